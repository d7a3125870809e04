"""Blocks of keys in registers: where each one lies, how they are ordered, and sums over them.

A block is [32, WARPS, GROUPS, 4], or the other way round up to the last axis: ``places`` gives the
place of each key. A warp has one run of the block, and a thread four neighbours at a time: loads
are of 16 bytes (8 of bf16), and a prefix sum needs the other warps once, not once for every key.
That is how Triton hands out the axes of such a load, 3.6 from the first one on and 3.7 and later
from the last.

A logit is ordered by its key, an int32: that of -0.0 is that of 0.0, and that of NaN is that of
-inf.
"""

import triton
import triton.language as tl

# The key of -inf, the least there is; that above inf; and what stands where there is no key.
LEAST = tl.constexpr(-2139095040)
END = tl.constexpr(2139095041)
ABSENT = tl.constexpr(-(2**31))

# Counts of this many groups fit into one number.
MAX_GROUPS = 8

# The axis of the lanes of a warp, and that of the groups of each.
LANES = tl.constexpr(0 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 2)
GROUP = tl.constexpr(2 - LANES.value)
# The axis of the lanes once those of the groups and of the four are summed over.
LANES_OF_2 = tl.constexpr(LANES.value // 2)


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
def nan():
    return tl.full([], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def key_of(logits):
    bits = logits.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude > 0x7F800000, LEAST, tl.where(bits < 0, -magnitude, bits))


@triton.jit
def value_of(key):
    """The float whose key is ``key``; NaN, which no float equals or exceeds, for END."""
    magnitude = tl.abs(key).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -magnitude, magnitude)


@triton.jit
def finite_value_of(key):
    """The finite float nearest to the one whose key is ``key``."""
    return value_of(tl.minimum(tl.maximum(key, LEAST + 1), END - 2))


@triton.jit
def of_thread(block):
    """The sum over the keys of each thread: [32, WARPS], or the other way round."""
    return tl.sum(tl.sum(block, axis=3), axis=GROUP)


@triton.jit
def sum_of_all(block):
    return tl.sum(tl.reshape(block, [block.numel]), axis=0)


@triton.jit
def least_of_all(block, WARPS: tl.constexpr):
    of_warp = tl.min(tl.min(tl.min(block, axis=3), axis=GROUP), axis=LANES_OF_2)
    return tl.min(of_each_warp(of_warp, tl.arange(0, WARPS)), axis=0)


@triton.jit
def of_each_warp(of_warp, index):
    """``of_warp[index]`` in every thread, by way of shared memory: one barrier, and no shuffles
    but those of the reduction that follows."""
    return tl.gather(of_warp, index, axis=0)


@triton.jit
def before_warp(of_warp, WARPS: tl.constexpr):
    """The sum of ``of_warp`` over the warps before each one, and over all."""
    lane = tl.arange(0, 32)
    every = tl.where(lane < WARPS, of_each_warp(of_warp, lane % WARPS), 0)
    earlier = lane[None, :] < tl.arange(0, WARPS)[:, None]
    return tl.sum(tl.where(earlier, every[None, :], 0), axis=1), tl.sum(every, axis=0)


@triton.jit
def warps_by_lanes(of_thread):
    """[WARPS, 32] of what each thread has, or back: in it, a prefix sum along the lanes stays
    within a warp."""
    if LANES == 0:
        of_thread = tl.trans(of_thread)
    return of_thread


@triton.jit
def for_each_key(of_thread):
    """What each thread has, to be broadcast to its keys."""
    return of_thread[:, :, None, None] if LANES == 0 else of_thread[None, :, :, None]


@triton.jit
def before_thread(of_thread, WARPS: tl.constexpr):
    """The sum of ``of_thread`` over the threads before each one."""
    of_thread = warps_by_lanes(of_thread)
    earlier, _ = before_warp(tl.sum(of_thread, axis=1), WARPS)
    return warps_by_lanes(tl.cumsum(of_thread, axis=1) - of_thread + earlier[:, None])


@triton.jit
def rank(mask, GROUPS: tl.constexpr, WARPS: tl.constexpr):
    """How many places of the block before each one are set, and how many there are in all."""
    # The counts of all groups go through one prefix sum over the threads of a warp, a byte for each
    # (a group has 128 places).
    tl.static_assert(GROUPS <= 8)
    if GROUPS <= 4:
        BYTES: tl.constexpr = tl.int32
    else:
        BYTES: tl.constexpr = tl.int64
    group = along(tl.arange(0, GROUPS), GROUP)
    shift = (8 * group).to(BYTES)
    set_ = mask.to(tl.int32)
    of_four = tl.sum(set_, axis=3, keep_dims=True)
    packed = warps_by_lanes(of_thread(of_four.to(BYTES) << shift).to(BYTES))
    before = for_each_key(warps_by_lanes(tl.cumsum(packed, axis=1).to(BYTES) - packed))
    before = ((before >> shift) & 255).to(tl.int32)
    packed = tl.sum(packed, axis=1).to(BYTES)[None, :, None, None]
    of_warp = tl.zeros([WARPS], tl.int32)
    for other in tl.static_range(GROUPS):
        of_group = ((packed >> (8 * other)) & 255).to(tl.int32)
        before += tl.where(group > other, of_group, 0)
        of_warp += tl.reshape(of_group, [WARPS])
    earlier, all_ = before_warp(of_warp, WARPS)
    before += earlier[None, :, None, None] + tl.cumsum(set_, axis=3) - set_
    return before, all_
