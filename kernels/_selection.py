"""The topk largest of a block of keys in registers, exactly.

    guess_of   where the topk-th largest should lie, going by the number of keys alone
    bracket    finds an interval of keys that holds the topk-th largest and few others: each round
               counts from four bounds on, and the first four are set by the first two moments
    settle     compares what is left in it, at most CANDIDATES, with each other
    choose     says which keys the topk largest are, ties by position

Values stand for keys here, and NaN for what is absent: a bound above -inf counts neither that nor
the keys that are NaN themselves, and a count takes one comparison a key. So -inf and NaN cannot be
told apart; where one of them is among the topk largest, ``bracket`` says so.
"""

import triton
import triton.language as tl

from ._blocks import (
    END,
    GROUP,
    LANES_OF_2,
    LEAST,
    along,
    before_thread,
    finite_value_of,
    for_each_key,
    key_of,
    least_of_all,
    nan,
    of_each_warp,
    of_thread,
    rank,
    value_of,
)

# At most so many keys are compared with each other: two for each lane of a warp.
CANDIDATES = tl.constexpr(64)
# How far the inner and the outer bounds lie from a guess, in deviations of the count there.
# Defaults: of 8192 normal values, about 41 lie between the inner bounds, and 48 on either side.
INNER = tl.constexpr(0.9)
OUTER = tl.constexpr(3.0)


@triton.jit
def moments_of(deviations, WARPS: tl.constexpr):
    """Sums of all ``deviations`` and of their squares."""
    first = tl.sum(of_thread(deviations), axis=LANES_OF_2)
    second = tl.sum(of_thread(deviations * deviations), axis=LANES_OF_2)
    # Both in one number: one barrier.
    first = first.to(tl.int32, bitcast=True).to(tl.int64)
    second = second.to(tl.int32, bitcast=True).to(tl.int64)
    both = of_each_warp((second << 32) | (first & 0xFFFFFFFF), tl.arange(0, WARPS))
    first = tl.sum(both.to(tl.int32).to(tl.float32, bitcast=True), axis=0)
    second = tl.sum((both >> 32).to(tl.int32).to(tl.float32, bitcast=True), axis=0)
    return first, second


@triton.jit
def guess_of(topk, count, TAIL):
    """``where, gap, inverse`` of a normal distribution: how many deviations above the mean the
    topk-th of ``count`` values lies, how far apart values lie there, in deviations, and 1 / count.
    Of an exponential one (TAIL): the same in means, from where it begins. None needs a value."""
    inverse = 1.0 / count.to(tl.float32)
    share = topk.to(tl.float32) * inverse
    if TAIL:
        where = -tl.log(share)
        gap = inverse / share
    else:
        # Abramowitz and Stegun 26.2.22: the quantile of a normal distribution
        root = tl.sqrt(-2.0 * tl.log(tl.minimum(share, 1.0 - share)))
        where = root - (2.30753 + 0.27061 * root) / (1.0 + (0.99229 + 0.04481 * root) * root)
        gap = 2.50663 * tl.exp(0.5 * where * where) * inverse
        where = tl.where(share < 0.5, where, -where)
    return where, gap, inverse


@triton.jit
def count_4(values, a, b, c, d, WARPS: tl.constexpr):
    """How many values lie from each of four bounds on: in all, and of each thread, packed by twos.

    A block has fewer than 2**16 values, and a thread fewer than 64.
    """
    # Comparisons to 1.0 or 0.0 cost half of what those to a predicate do.
    a = of_thread(tl.where(values >= a, 1.0, 0.0))
    b = of_thread(tl.where(values >= b, 1.0, 0.0))
    c = of_thread(tl.where(values >= c, 1.0, 0.0))
    d = of_thread(tl.where(values >= d, 1.0, 0.0))
    a_b = (a + 64.0 * b).to(tl.int32)
    c_d = (c + 64.0 * d).to(tl.int32)
    # The same in 16 bits each: one sum over each warp for two, and one barrier for all four.
    of_warp = tl.sum((a_b & 63) | ((a_b >> 6) << 16), axis=LANES_OF_2).to(tl.int64)
    of_warp_ = tl.sum((c_d & 63) | ((c_d >> 6) << 16), axis=LANES_OF_2).to(tl.int64)
    lane = tl.arange(0, 32)
    every = of_each_warp((of_warp_ << 32) | of_warp, lane % WARPS)
    every = tl.where(lane < WARPS, every, 0)
    first = tl.sum(every.to(tl.uint32), axis=0)
    second = tl.sum((every >> 32).to(tl.uint32), axis=0)
    a = (first & 0xFFFF).to(tl.int32)
    b = (first >> 16).to(tl.int32)
    c = (second & 0xFFFF).to(tl.int32)
    d = (second >> 16).to(tl.int32)
    return a, b, c, d, a_b, c_d


@triton.jit
def narrow(interval, bound, count, own, topk):
    """The interval, drawn in to ``bound``, from which on there are ``count`` keys."""
    low, high, from_low, from_high, own_low, own_high = interval
    up = (count >= topk) & (bound > low)
    low = tl.where(up, bound, low)
    from_low = tl.where(up, count, from_low)
    own_low = tl.where(up, own, own_low)
    down = (count < topk) & (bound < high)
    high = tl.where(down, bound, high)
    from_high = tl.where(down, count, from_high)
    own_high = tl.where(down, own, own_high)
    return low, high, from_low, from_high, own_low, own_high


@triton.jit
def finite_or_zero(value):
    return tl.where(tl.abs(value) < 3e38, value, 0.0)


@triton.jit
def key_between(value, low, high):
    return tl.minimum(tl.maximum(key_of(finite_or_zero(value)), low + 1), high - 1)


@triton.jit
def bracket(values, first, second, pivot, guess, count, topk, TAIL, WARPS: tl.constexpr):
    """``low, high, from_low, from_high, own``: of ``count`` keys, more than topk, ``from_low`` (at
    least topk) lie from ``low`` on, and ``from_high`` (fewer than topk) from ``high`` on. Unless
    ``from_low`` is topk, at most CANDIDATES and topk lie between, or those are equal; each thread
    has ``own`` of them. If ``low`` is LEAST, -inf or NaN is among the topk largest.

    ``first`` and ``second`` are the moments of the deviations from ``pivot``, which is any number;
    with TAIL all values lie above it, and the moments say how much lighter than an exponential tail
    this one is. Later rounds go by the counts, from the third or fourth on by halves of the
    interval and by the least value in it as well: values that cluster, tie or lie far out cost more
    rounds, never another result.
    """
    where, gap, inverse = guess
    mean = first * inverse
    variance = tl.maximum(second * inverse - mean * mean, 0.0)
    unit = tl.sqrt(variance)
    centre = pivot + mean
    if TAIL:
        # A generalised Pareto distribution of these moments, whose shape is 0 if exponential.
        ratio = tl.minimum(tl.maximum(mean * mean / tl.maximum(variance, 1e-37), 0.5), 2.9)
        bend = (0.5 - 0.5 * ratio) * where
        unit = (0.5 + 0.5 * ratio) * mean
        centre = pivot
        where *= tl.where(tl.abs(bend) > 0.01, (tl.exp(bend) - 1.0) / bend, 1.0 + 0.5 * bend)
        gap *= tl.exp(bend)
    centre += where * unit
    gap *= unit
    # The deviation of the count at the guess.
    unit = 0.25 * tl.sqrt(count.to(tl.float32)) * gap
    value_a = finite_or_zero(centre - OUTER * unit)
    value_b = finite_or_zero(centre - INNER * unit)
    value_c = finite_or_zero(centre + INNER * unit)
    value_d = finite_or_zero(centre + OUTER * unit)
    a = key_of(value_a)
    b = key_of(value_b)
    c = key_of(value_c)
    d = key_of(value_d)

    aim = topk.to(tl.float32)
    few = tl.minimum(topk, CANDIDATES)
    low = tl.full([], LEAST, tl.int32)
    high = tl.full([], END, tl.int32)
    from_low = count
    from_high = count * 0
    own_low = of_thread(values.to(tl.int32, bitcast=True)) * 0
    own_high = own_low
    rounds = 0
    while (high > low + 1) & (from_low > topk) & ((from_low - from_high > few) | (low == LEAST)):
        if rounds > 0:
            low_value = finite_value_of(low)
            high_value = finite_value_of(high)
            above = from_high.to(tl.float32)
            one_sided = (low == LEAST) | (high == END)
            if (rounds < 2) & one_sided:
                # Steps on by the density that the distribution implies.
                missed = tl.where(low == LEAST, above, from_low.to(tl.float32)) - aim
                centre = tl.where(low == LEAST, high_value, low_value) + missed * gap
                step = (0.15 * tl.abs(missed) + 6.0) * gap
            else:
                # The straight line between the two counts.
                held = (from_low - from_high).to(tl.float32)
                step = (high_value - low_value) / held
                centre = high_value - step * (aim - above)
                step *= 0.5 * tl.sqrt(held)
            a = key_between(centre - 3.0 * step, low, high)
            b = key_between(centre - step, low, high)
            c = key_between(centre + step, low, high)
            d = key_between(centre + 3.0 * step, low, high)
            if (rounds >= 3) | ((rounds == 2) & one_sided):
                # The least value in the interval, the key above it, and half of the rest.
                inside = (values >= value_of(low)) ^ (values >= value_of(high))
                a = key_of(least_of_all(tl.where(inside, values, float("inf")), WARPS))
                a = tl.where(low == LEAST, LEAST, a)
                a = tl.minimum(tl.maximum(a, low + 1), high - 1)
                b = tl.minimum(a + 1, high - 1)
                c = tl.maximum((b >> 1) + (high >> 1) + (b & high & 1), low + 1)
                d = key_between(centre, low, high)
            value_a = value_of(a)
            value_b = value_of(b)
            value_c = value_of(c)
            value_d = value_of(d)
        from_a, from_b, from_c, from_d, a_b, c_d = count_4(
            values, value_a, value_b, value_c, value_d, WARPS
        )
        interval = (low, high, from_low, from_high, own_low, own_high)
        interval = narrow(interval, a, from_a, a_b & 63, topk)
        interval = narrow(interval, b, from_b, a_b >> 6, topk)
        interval = narrow(interval, c, from_c, c_d & 63, topk)
        interval = narrow(interval, d, from_d, c_d >> 6, topk)
        low, high, from_low, from_high, own_low, own_high = interval
        rounds += 1
    return low, high, from_low, from_high, own_low - own_high


@triton.jit
def settle(
    values, low, high, own, held, missing, scratch, GROUPS: tl.constexpr, WARPS: tl.constexpr
):
    """``least, tied``: the ``missing``-th largest of the ``held`` values in ``low .. high - 1``, at
    most CANDIDATES, and how many of its equals rank behind it. ``scratch`` has room for them."""
    # In any order: only values are compared.
    inside = (values >= value_of(low)) ^ (values >= value_of(high))
    set_ = inside.to(tl.int32)
    # A byte for each group, and in each the sum of those below it.
    packed = tl.sum(set_, axis=3, keep_dims=True)
    if GROUPS <= 4:
        BELOW: tl.constexpr = 0x01010100
    else:
        packed = packed.to(tl.int64)
        BELOW: tl.constexpr = 0x0101010101010100
    shift = (8 * along(tl.arange(0, GROUPS), GROUP)).to(packed.dtype)
    packed = tl.sum(packed << shift, axis=GROUP, keep_dims=True).to(shift.dtype) * BELOW
    slot = for_each_key(before_thread(own, WARPS)) + ((packed >> shift) & 255).to(tl.int32)
    slot += tl.cumsum(set_, axis=3) - set_
    scratch = scratch.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(scratch + slot, values, mask=inside)
    tl.debug_barrier()
    HALF: tl.constexpr = CANDIDATES // 2
    lane = tl.arange(0, HALF)
    later = HALF + lane
    first = tl.load(scratch + lane, mask=lane < held, other=nan())
    second = tl.load(scratch + later, mask=later < held, other=nan())
    # A candidate for a warp at a time, and all others for its lanes.
    last = tl.zeros([WARPS, HALF], tl.int32)
    for turn in tl.static_range(CANDIDATES // WARPS):
        row = turn * WARPS + tl.arange(0, WARPS)
        one = tl.load(scratch + row, mask=row < held, other=nan())[:, None]
        row = tl.broadcast_to(row[:, None], [WARPS, HALF])
        ahead = (first[None, :] > one) | ((first[None, :] == one) & (lane[None, :] < row))
        ahead_ = (second[None, :] > one) | ((second[None, :] == one) & (later[None, :] < row))
        beaten = tl.sum(ahead.to(tl.int32) + ahead_.to(tl.int32), axis=1, keep_dims=True)
        beaten = tl.broadcast_to(beaten, [WARPS, HALF])
        last += tl.where((beaten == missing - 1) & (row < held) & (lane[None, :] == 0), row, 0)
    warp = tl.arange(0, 32)
    last = tl.where(warp < WARPS, of_each_warp(tl.sum(last, axis=1), warp % WARPS), 0)
    last = tl.sum(last, axis=0)
    bits = tl.where(lane == last, first.to(tl.int32, bitcast=True), 0)
    bits += tl.where(later == last, second.to(tl.int32, bitcast=True), 0)
    least = tl.sum(bits, axis=0).to(tl.float32, bitcast=True)
    tied = ((first == least) & (lane > last)).to(tl.int32)
    tied += ((second == least) & (later > last)).to(tl.int32)
    return least, tl.sum(tied, axis=0)


@triton.jit
def choose(
    values, low, high, from_low, from_high, own, topk, scratch,
    GROUPS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Which values are the topk largest, after ``bracket``, with ``low`` above LEAST. ``scratch``
    has room for topk numbers."""
    least = value_of(low)
    tied = from_low - topk
    held = from_low - from_high
    if (tied > 0) & (held <= tl.minimum(topk, CANDIDATES)):
        least, tied = settle(
            values, low, high, own, held, topk - from_high, scratch, GROUPS, WARPS
        )  # fmt: skip
    if tied > 0:
        equal = values == least
        before, equals = rank(equal, GROUPS, WARPS)
        # The last of the equal ones are given up.
        values = tl.where(equal & (before >= equals - tied), nan(), values)
    return values >= least
