"""A bound from a sample of a row, from which on about as many keys lie as one asks for."""

import triton
import triton.language as tl

from ._blocks import END, LEAST, finite_value_of, key_of, places, sum_of_all
from ._selection import guess_of, moments_of

HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def draw(row_ptr, column_stride, length, GROUPS: tl.constexpr, WARPS: tl.constexpr):
    """A block of the logits of a row, which has more: four neighbours out of each of as many equal
    parts of it, anywhere within: at equal distances they might all have one place in a page."""
    RUNS: tl.constexpr = 32 * GROUPS * WARPS
    place = places(GROUPS, WARPS)
    run = place // 4
    origin = (run.to(tl.int64) * (length // 4) // RUNS).to(tl.int32)
    spread = (run * 40503) & 0xFFFF
    origin += (spread.to(tl.int64) * (length // 4 // RUNS) >> 16).to(tl.int32)
    start = (origin * 4 + place % 4).to(tl.int64) * column_stride
    return tl.load(row_ptr + start).to(tl.float32)


@triton.jit
def limits(
    room, length, topk, SAMPLE: tl.constexpr,
    TOO_FEW: tl.constexpr, TOO_MANY: tl.constexpr, MOST_SPAN: tl.constexpr,
):  # fmt: skip
    """``fewest, most`` of a sample of SAMPLE of ``length`` keys: as ``_topk_plan.limits``, of which
    this is the share of the sample. Where there is much room, no more than is of use."""
    apart = length.to(tl.float32) * (1.0 / SAMPLE)
    share = SAMPLE / length.to(tl.float32)
    few = 0.5 * TOO_FEW * tl.sqrt(apart)
    few += tl.sqrt(0.25 * TOO_FEW * TOO_FEW * apart + topk.to(tl.float32))
    many = tl.sqrt(0.25 * TOO_MANY * TOO_MANY * apart + tl.maximum(room, 0).to(tl.float32))
    many -= 0.5 * TOO_MANY * tl.sqrt(apart)
    fewest = few * few * share
    most = tl.minimum(many * many * share, MOST_SPAN * fewest)
    fewest = tl.maximum(fewest.to(tl.int32), 1)
    return fewest, tl.maximum(most.to(tl.int32), fewest)


@triton.jit
def least_key(keys):
    return tl.min(tl.reshape(keys, [keys.numel]), axis=0)


@triton.jit
def find_bound(sample, pivot, fewest, most, WARPS: tl.constexpr):
    """A key from which on at least ``fewest`` of the sample lie, and at most ``most`` unless equal
    ones do. ``pivot`` is any number.

    A probe counts from two bounds on, one meant for each side of the key that is looked for. The
    first guess takes the distribution for a normal one, of the mean and the deviation of the
    sample; while bounds of one side only are known, the next steps on by the density that this
    implies, and then guesses go by the straight line between two counts. From the fifth probe on
    one of the two bounds halves the interval of keys, and every other time the interval is drawn in
    to the keys that it still holds.
    """
    keys = key_of(sample)
    count = tl.full([], sample.numel, tl.int32)
    aim = 0.5 * (fewest + most).to(tl.float32)
    where, gap, inverse = guess_of(aim, count, False)
    mean, square = moments_of(sample - pivot, WARPS)
    mean *= inverse
    deviation = tl.sqrt(tl.maximum(square * inverse - mean * mean, 0.0))
    centre = pivot + mean + where * deviation
    gap *= deviation
    margin = aim * 0.0

    low = tl.full([], LEAST, tl.int32)
    high = tl.full([], END, tl.int32)
    from_low = count
    from_high = count * 0
    probes = 0
    while (high > low + 1) & (from_low > most):
        drawn = probes >= 4
        if drawn & (probes % 2 == 0):
            held = (keys >= low) & (keys < high)
            least = least_key(tl.where(held, keys, HIGHEST))
            high = -least_key(tl.where(held, -keys, HIGHEST)) + 1
            low = least
        low_value = finite_value_of(low)
        high_value = finite_value_of(high)
        above = from_high.to(tl.float32)
        if (not drawn) & ((low == LEAST) | (high == END)):
            if probes > 0:
                missed = tl.where(low == LEAST, above, from_low.to(tl.float32)) - aim
                centre = tl.where(low == LEAST, high_value, low_value) + missed * gap
                margin = 0.15 * tl.abs(missed) + 6.0
            lower = centre - margin * gap
            upper = centre + margin * gap
        else:
            between = (from_low - from_high).to(tl.float32)
            root = tl.rsqrt(between)
            apart = tl.maximum(0.25 * between * root, 0.5)
            step = (low_value - high_value) * (root * root)
            wanted = aim - above
            lower = high_value + step * tl.minimum(wanted + apart, between - 0.5)
            upper = high_value + step * tl.maximum(wanted - apart, 0.5)
        first = key_of(lower)
        second = key_of(upper)
        if drawn:
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            guess = key_of(0.5 * lower + 0.5 * upper)
            first = tl.minimum(middle, guess)
            second = tl.maximum(middle, guess)
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, first), high - 1)
        # Both counts in one sum: a sample has fewer than 2**16 keys.
        both = (keys >= first).to(tl.int32) + ((keys >= second).to(tl.int32) << 16)
        both = sum_of_all(both)
        from_first = both & 0xFFFF
        from_second = (both >> 16) & 0xFFFF
        rises = from_second >= fewest
        meets = from_first >= fewest
        from_high = tl.where(rises, from_high, tl.where(meets, from_second, from_first))
        high = tl.where(rises, high, tl.where(meets, second, first))
        from_low = tl.where(rises, from_second, tl.where(meets, from_first, from_low))
        low = tl.where(rises, second, tl.where(meets, first, low))
        probes += 1
    return low
