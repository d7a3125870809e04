"""The topk largest of a block of keys in registers: which they are, and where each one goes.

    key        = order-preserving int32 of a logit; -0.0 is 0.0, NaN is -inf
    separate   finds the interval of keys that separates the topk largest from the others
    choose     says which keys those are, ties by position
    rank       counts the chosen ones before each place, which is where each one is stored

Keys lie in a block in the order of ``spread``.
"""

import triton
import triton.language as tl

# The key of -inf, the least there is, and what stands where there is no key.
LEAST = tl.constexpr(-2139095041)
ABSENT = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def ordered(logits):
    """int32 keys in the order of ``logits``, NaN as -inf and -0.0 as 0.0."""
    bits = logits.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    keys = tl.where(bits < 0, -magnitude - 1, bits)
    keys = tl.where(magnitude == 0, 0, keys)
    return tl.where(magnitude > 0x7F800000, LEAST, keys)


@triton.jit
def value_of(key):
    """The finite float nearest to the one whose key is ``key``."""
    key = tl.minimum(tl.maximum(key, LEAST + 1), -LEAST - 2)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def separate(keys, count, topk):
    """``keys, low, high, above``: all ``above`` keys from ``high`` on are among the topk largest,
    none below ``low`` is; those in ``low .. high - 1`` are equal, or just as many as are missing.

    A search for a bound with ``topk`` keys from it on, between two bounds with more and with fewer.
    It guesses by the secant between the counts (Illinois rule: the count at an end that stays put
    is halved). From the eighth probe on every other guess is the middle of the interval, and every
    fourth time the interval is drawn in to the keys that it still holds: values that cluster, tie
    or lie far out cost more probes, never another result.

    ``count`` keys are present, more than ``topk``. The keys returned compare with ``low`` and
    ``high`` as those given do.
    """
    from_zero = tl.sum((keys >= 0).to(tl.int32), axis=0)
    least = tl.min(tl.where(keys == ABSENT, HIGHEST, keys), axis=0)
    most = tl.max(keys, axis=0)
    # All bounds to come have one sign, so differences of bounds do not overflow.
    positive = from_zero >= topk
    low = tl.where(positive, tl.maximum(least, 0), least)
    high = tl.where(positive, most + 1, tl.minimum(most + 1, 0))
    from_low = tl.where(positive, from_zero, count)
    from_high = tl.where(positive, 0, from_zero)
    if positive:
        keys = tl.maximum(keys, -1)

    low_weight = 1.0
    high_weight = 1.0
    moved = 0
    probes = 0
    while (high - low > 1) & (from_low > topk):
        if (probes >= 8) & (probes % 4 == 0):
            held = (keys >= low) & (keys < high)
            low = tl.min(tl.where(held, keys, HIGHEST), axis=0)
            high = tl.max(tl.where(held, keys, ABSENT), axis=0) + 1
        excess = (from_low - topk).to(tl.float32) * low_weight
        lack = (topk - from_high).to(tl.float32) * high_weight
        share = excess / (excess + lack)
        guess = ordered(value_of(low) * (1.0 - share) + value_of(high) * share)
        secant = (low > LEAST) & (high < -LEAST) & ((probes < 8) | (probes % 2 == 1))
        bound = tl.where(secant, guess, low + ((high - low) >> 1))
        bound = tl.minimum(tl.maximum(bound, low + 1), high - 1)
        if positive:
            # The sign bit of a difference that cannot overflow: two instructions a key.
            below = (keys - bound).to(tl.uint32) >> 31
            counted = keys.numel - tl.sum(below.to(tl.int32), axis=0)
        else:
            counted = tl.sum((keys >= bound).to(tl.int32), axis=0)
        enough = counted >= topk
        low_weight = tl.where(enough | (moved >= 0), 1.0, low_weight * 0.5)
        high_weight = tl.where(enough & (moved > 0), high_weight * 0.5, 1.0)
        moved = tl.where(enough, 1, -1)
        low = tl.where(enough, bound, low)
        from_low = tl.where(enough, counted, from_low)
        high = tl.where(enough, high, bound)
        from_high = tl.where(enough, from_high, counted)
        probes += 1
    return keys, low, high, from_high


@triton.jit
def spread(SIZE: tl.constexpr, WARPS: tl.constexpr):
    """Place in its block of each of SIZE keys, such that a warp has one run of the block, and 32
    neighbours at a time: a prefix sum then needs the other warps once, not once for every key."""
    index = tl.arange(0, SIZE)
    threads = 32 * WARPS
    place = (index % threads) // 32 * (SIZE // WARPS) + index // threads * 32 + index % 32
    # No vectors: the layout of scattered stores, so nothing changes hands between load and store.
    return tl.max_contiguous(place, 1)


@triton.jit
def count_bits(bits):
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def rank(mask, SIZE: tl.constexpr, WARPS: tl.constexpr):
    """How many places of the block before each one, in the order of ``spread``, are set."""
    lane = tl.arange(0, 32)[None, None, :]
    bit = (1 << lane).to(tl.uint32)
    rows = tl.reshape(mask, [SIZE // (32 * WARPS), WARPS, 32])
    bits = tl.sum(tl.where(rows, bit, 0), axis=2, keep_dims=True)
    in_row = count_bits(bits & (bit - 1))
    set_in_row = tl.broadcast_to(count_bits(bits), in_row.shape)
    set_in_warp = tl.sum(set_in_row, axis=0)
    before_row = tl.cumsum(set_in_row, axis=0) - set_in_row
    before_warp = tl.cumsum(set_in_warp, axis=0) - set_in_warp
    return tl.reshape(before_warp[None, :, :] + before_row + in_row, [SIZE])


@triton.jit
def choose(keys, low, high, missing, SIZE: tl.constexpr, WARPS: tl.constexpr):
    """The keys from ``high`` on, and the first ``missing`` of those in ``low .. high - 1``."""
    chosen = keys >= low
    equal = chosen & (keys < high)
    if tl.sum(equal.to(tl.int32), axis=0) > missing:
        chosen = chosen & ((keys >= high) | (rank(equal, SIZE, WARPS) < missing))
    return chosen
