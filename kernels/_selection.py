"""The topk largest of a block of keys in registers: which they are, and where each one goes.

    key        = order-preserving int32 of a logit; -0.0 is 0.0, NaN is -inf
    separate   finds the interval of keys that separates the topk largest from the others
    choose     says which keys those are, ties by position
    rank       counts the chosen ones before each place, which is where each one is stored

A block is [32, WARPS, GROUPS, 4], or the other way round up to the last axis: ``places`` gives the
place of each key. A warp has one run of the block, and a thread four neighbours at a time: loads
are of 16 bytes, and a prefix sum needs the other warps once, not once for every key. That is how
Triton hands out the axes of such a load, 3.6 from the first one on and 3.7 and later from the last.
"""

import triton
import triton.language as tl

# The key of -inf, the least there is; that above inf; and what stands where there is no key.
LEAST = tl.constexpr(-2139095040)
END = tl.constexpr(2139095041)
ABSENT = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)

# Counts of this many groups fit into one number.
MAX_GROUPS = 8

# The axis of the lanes of a warp, and that of the groups of each.
LANES = tl.constexpr(0 if triton.__version__ < "3.7" else 2)
GROUP = tl.constexpr(2 - LANES.value)


@triton.jit
def along(index, AXIS: tl.constexpr):
    return index[:, None, None, None] if AXIS == 0 else index[None, None, :, None]


@triton.jit
def starts_of_4(GROUPS: tl.constexpr, WARPS: tl.constexpr):
    """int32, one for four places: the first that a thread has in a group."""
    warp = tl.arange(0, WARPS)[None, :, None, None]
    group = along(tl.arange(0, GROUPS), GROUP)
    return (warp * GROUPS + group) * 128 + along(tl.arange(0, 32), LANES) * 4


@triton.jit
def places(GROUPS: tl.constexpr, WARPS: tl.constexpr):
    """int32: 0 .. 128 * GROUPS * WARPS - 1, a run for each warp."""
    return starts_of_4(GROUPS, WARPS) + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def ordered(logits):
    """int32 keys in the order of ``logits``, NaN as -inf and -0.0 as 0.0."""
    bits = logits.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude > 0x7F800000, LEAST, tl.where(bits < 0, -magnitude, bits))


@triton.jit
def value_of(key):
    """The finite float nearest to the one whose key is ``key``."""
    key = tl.minimum(tl.maximum(key, LEAST + 1), END - 2)
    magnitude = tl.abs(key).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -magnitude, magnitude)


@triton.jit
def sum_of_all(block):
    return tl.sum(tl.reshape(block, [block.numel]), axis=0)


@triton.jit
def least_of_all(block):
    return tl.min(tl.reshape(block, [block.numel]), axis=0)


@triton.jit
def first_guess(share, count, mean, square, pivot, TAIL: tl.constexpr):
    """The value which a ``share`` of the values exceeds, and how far apart values lie there."""
    if TAIL:
        guess = pivot - mean * tl.log(share)
        gap = mean / (share * count)
    else:
        # Abramowitz and Stegun 26.2.22: the quantile of a normal distribution
        log = -2.0 * tl.log(tl.minimum(share, 1.0 - share))
        root = tl.sqrt(log)
        normal = root - (2.30753 + 0.27061 * root) / (1.0 + (0.99229 + 0.04481 * root) * root)
        deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
        guess = pivot + mean + tl.where(share < 0.5, normal, -normal) * deviation
        gap = 2.50663 * tl.exp(0.5 * normal * normal) * deviation / count
    return guess, gap


@triton.jit
def separate(keys, logits, pivot, count, topk, most, TAIL: tl.constexpr):
    """``low, high, from_low, above``: all ``above`` keys from ``high`` on are among the topk
    largest, none of the topk lies below ``low``, from which on there are ``from_low``: at most
    ``most`` (topk at least), unless the keys in ``low .. high - 1`` are equal.

    A probe counts from two bounds on, one meant for each side of the one that is looked for. The
    first guess takes the distribution for a normal one, of the mean and the deviation of
    ``logits``, or for an exponential one from ``pivot`` on (TAIL); while bounds of one side only
    are known, the next steps on by the density that this implies, and then guesses go by the
    straight line between two counts. From the fifth probe on one of the two bounds halves the
    interval of keys, and every other time the interval is drawn in to the keys that it still holds:
    values that cluster, tie or lie far out cost more probes, never another result.

    ``count`` keys are present; ``pivot`` is any value among them, or the least.
    """
    deviations = tl.where(keys == ABSENT, 0.0, logits - pivot)
    size = count.to(tl.float32)
    moments = tl.join(deviations, deviations * deviations)
    moments = tl.sum(tl.reshape(moments, [keys.numel, 2]), axis=0)
    mean, square = tl.split(moments / size)
    aim = 0.5 * (topk + most).to(tl.float32)
    centre, gap = first_guess(aim / size, size, mean, square, pivot, TAIL)
    margin = tl.where(most > topk, 0.0, 0.25 * tl.sqrt(size))

    low = tl.full([], LEAST, tl.int32)
    high = tl.full([], END, tl.int32)
    from_low = count
    from_high = count * 0
    probes = 0
    while (high > low + 1) & (from_low > most):
        drawn = probes >= 4
        if drawn & (probes % 2 == 0):
            held = (keys >= low) & (keys < high)
            least = least_of_all(tl.where(held, keys, HIGHEST))
            high = -least_of_all(tl.where(held, -keys, HIGHEST)) + 1
            low = least
        low_value = value_of(low)
        high_value = value_of(high)
        from_high_ = from_high.to(tl.float32)
        if (not drawn) & ((low == LEAST) | (high == END)):
            if probes > 0:
                missed = tl.where(low == LEAST, from_high_, from_low.to(tl.float32)) - aim
                centre = tl.where(low == LEAST, high_value, low_value) + missed * gap
                margin = 0.15 * tl.abs(missed) + 6.0
            lower = centre - margin * gap
            upper = centre + margin * gap
        else:
            between = (from_low - from_high).to(tl.float32)
            inverse = tl.rsqrt(between)
            apart = tl.maximum(0.25 * between * inverse, 0.5)
            step = (low_value - high_value) * (inverse * inverse)
            wanted = aim - from_high_
            lower = high_value + step * tl.minimum(wanted + apart, between - 0.5)
            upper = high_value + step * tl.maximum(wanted - apart, 0.5)
        first = ordered(lower)
        second = ordered(upper)
        if drawn:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            guess = ordered(0.5 * lower + 0.5 * upper)
            first = tl.minimum(middle, guess)
            second = tl.maximum(middle, guess)
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, first), high - 1)
        # Both counts in one sum: a block has fewer than 2**16 keys.
        both = (keys >= first).to(tl.int32) + ((keys >= second).to(tl.int32) << 16)
        both = sum_of_all(both)
        from_first = both & 0xFFFF
        from_second = (both >> 16) & 0xFFFF
        rises = from_second >= topk
        meets = from_first >= topk
        from_high = tl.where(rises, from_high, tl.where(meets, from_second, from_first))
        high = tl.where(rises, high, tl.where(meets, second, first))
        from_low = tl.where(rises, from_second, tl.where(meets, from_first, from_low))
        low = tl.where(rises, second, tl.where(meets, first, low))
        probes += 1
    return low, high, from_low, from_high


@triton.jit
def rank(mask, GROUPS: tl.constexpr, WARPS: tl.constexpr):
    """How many places of the block before each one are set, and how many there are in all."""
    # The counts of all groups go through one prefix sum over the threads of a warp, a byte for each
    # (a group has 128 places). With all axes kept, every sum stays in the layout of the block.
    tl.static_assert(GROUPS <= 8)
    if GROUPS <= 4:
        BYTES: tl.constexpr = tl.uint32
    else:
        BYTES: tl.constexpr = tl.uint64
    group = along(tl.arange(0, GROUPS), GROUP)
    shift = (8 * group).to(BYTES)
    set_ = mask.to(tl.int32)
    packed = tl.sum(set_.to(BYTES) << shift, axis=GROUP, keep_dims=True).to(BYTES)
    before = tl.sum(tl.cumsum(packed, axis=LANES).to(BYTES) - packed, axis=3, keep_dims=True).to(
        BYTES
    )
    before = ((before >> shift) & 255).to(tl.int32)
    packed = tl.sum(packed, axis=3, keep_dims=True).to(BYTES)
    packed = tl.sum(packed, axis=LANES, keep_dims=True).to(BYTES)
    of_warp = tl.sum(((packed >> shift) & 255).to(tl.int32), axis=GROUP)
    for other in tl.static_range(GROUPS - 1):
        before += tl.where(group > other, ((packed >> (8 * other)) & 255).to(tl.int32), 0)
    of_warp = tl.reshape(of_warp, [WARPS])
    before_warp = tl.cumsum(of_warp, axis=0) - of_warp
    before += before_warp[None, :, None, None]
    before += tl.cumsum(set_, axis=3) - set_
    return before, tl.sum(of_warp, axis=0)


@triton.jit
def choose(keys, low, high, equal, missing, GROUPS: tl.constexpr, WARPS: tl.constexpr):
    """The keys from ``high`` on, and the first ``missing`` of the ``equal`` ones in
    ``low .. high - 1``."""
    chosen = keys >= low
    if equal > missing:
        before, _ = rank(chosen & (keys < high), GROUPS, WARPS)
        chosen = chosen & ((keys >= high) | (before < missing))
    return chosen
