"""The scores of sparse MLA decode from an fp8 cache on compute capability 9.0: dots and weights.

The largest score of a head that its weights are relative to is followed with a delay: it moves when
a score is more than 8 above it, in powers of two, which is seldom after the first tiles. So sums
are seldom decayed, and weights are at most 2**8.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._hopper_mla_scores import MMA, contain, keys_of_rows, opaque, sum_lanes, watch

_FLAG = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_MAX_RISE = gl.constexpr(8.0)


@gluon.jit
def dots_of_tile(stage, phase, smem, k_full):
    """The dots of all heads and the keys of a tile, once those are there."""
    q_smem, k_smem, r_smem = smem
    zero = gl.full([64, 64], 0.0, gl.float32, layout=MMA)
    mbarrier.wait(k_full.index(stage), phase)
    # The copies' own fence does not do: their threads do not meet after it.
    fence_async_shared()
    none = opaque(0)
    keys = r_smem.index(stage).permute((1, 0))
    dots = warpgroup_mma(q_smem[1].index(none), keys, zero, use_acc=False, is_async=True)
    for c in gl.static_range(4):
        keys = k_smem.index(stage * 4 + c).permute((1, 0))
        dots = warpgroup_mma(q_smem[0].index(c + none), keys, dots, is_async=True)
    return warpgroup_mma_wait(0, deps=[dots])


@gluon.jit
def weigh_tile(dots, before, own, stage, scale_log2, smem, bars, TOKENS: gl.constexpr):
    """Store the weights of a tile, what they are relative to, and the decay of earlier sums.

    ``before`` is what the weights of the tile before are relative to. ``own`` is that of the last
    tile of this group, the sums of its weights, and whether there is a decay; so is the result.
    """
    k_smem, r_smem, there_smem, highest_smem, decay_smem, moved_smem, wrong_smem = smem
    m_full, p_full = bars
    own_highest, totals, _moved = own
    there = keys_of_rows(there_smem.index(stage), TOKENS)
    if TOKENS > 0:
        dots = watch(dots, wrong_smem)
    dots = gl.where(there, dots, float("-inf"))
    highest = gl.max(dots, axis=1) * scale_log2
    rises = highest > before + _MAX_RISE
    highest = gl.where(rises, highest, before)
    # -inf - (-inf) is NaN: heads that have met no key subtract 0.
    shift = gl.where(highest == float("-inf"), 0.0, highest)
    moved = gl.max(rises.to(gl.int32), axis=0)
    highest_smem.index(stage).store(highest)
    decay_smem.index(stage).store(gl.exp2(before - shift))
    moved_smem.index(stage).store(gl.full([32], moved, gl.int32, layout=_FLAG))
    mbarrier.arrive(m_full.index(stage), count=1)
    if TOKENS > 0:
        contain(stage, wrong_smem, k_smem)
    scale = gl.full([64, 64], scale_log2, gl.float32, layout=MMA)
    weights = gl.exp2(gl.fma(dots, scale, gl.expand_dims(-shift, 1)))
    r_smem.index(stage).store(weights.to(r_smem.dtype))
    fence_async_shared()
    mbarrier.arrive(p_full.index(stage), count=1)
    decay = gl.exp2(own_highest - shift)
    decay = gl.convert_layout(decay, gl.SliceLayout(1, totals.type.layout), True)
    decay = gl.expand_dims(decay, 1) + gl.zeros_like(totals)
    totals = gl.fma(totals, decay, sum_lanes(weights))
    return highest, totals, moved


@gluon.jit
def has_moved(stage, moved_smem):
    return gl.max(moved_smem.index(stage).load(_FLAG), axis=0) != 0
