"""The scores of sparse MLA decode on compute capability 9.0: one warp group's role."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._hopper_mla_copies import copy_queries
from ._hopper_mla_items import bounds, place
from ._hopper_mla_stores import store_lse

# of products with a tile's keys, and with half of them
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HEADS = gl.constexpr(gl.SliceLayout(1, MMA.value))
HALF_MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


@gluon.jit
def sum_lanes(weights):
    """Sums over the keys of each lane of a quad, without an exchange: [64, 4] of [64, n]."""
    return gl.sum(gl.sum(gl.reshape(weights, [64, weights.shape[1] // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def weigh(exponents, smem, left_full, SPLIT: gl.constexpr):
    """Store the weights of a tile, and give those of its first 32 keys and of the others.

    Not SPLIT: the first are handed over while the others are made. In parts, which have up to half
    of the tiles, that did not pay: 64 tokens of 64 heads 59.7 -> 60.1 us (H200, topk 2048).
    """
    left, right = gl.split(gl.permute(gl.reshape(exponents, [64, 2, 32]), (0, 2, 1)))
    left = gl.exp2(gl.convert_layout(left, HALF_MMA, True))
    smem.slice(0, 32, dim=1).store(left.to(smem.dtype))
    if not SPLIT:
        fence_async_shared()
        mbarrier.arrive(left_full, count=1)
    right = gl.exp2(gl.convert_layout(right, HALF_MMA, True))
    smem.slice(32, 32, dim=1).store(right.to(smem.dtype))
    return left, right


@gluon.jit
def score(
    items, batch, queries, lse_ptr, scale_log2, smem, bars, SPLIT: gl.constexpr, SCAN: gl.constexpr
):
    """The queries of every item; scores, running softmax and weights; the lse."""
    q_smem, k_smem, r_smem, there_smem, decay_smem, factor_smem = smem
    k_full, d_full, p_full = bars
    KEYS: gl.constexpr = gl.SliceLayout(0, MMA)
    zero = gl.full([64, 64], 0.0, gl.float32, layout=MMA)
    scale = gl.full([64, 64], scale_log2, gl.float32, layout=MMA)
    no_totals = sum_lanes(gl.full([64, 32], 0.0, gl.float32, layout=HALF_MMA))

    item = gl.program_id(0)
    tile = 0
    while item < items:
        group, part, token, first, limit = place(item, batch)
        # The dots of the item before are done. Whether the token has a request is not known yet.
        copy_queries(token, group, queries, q_smem)
        async_copy.commit_group()
        _request, end = bounds(token, first, limit, batch, SCAN)
        highest = gl.full([64], float("-inf"), gl.float32, layout=HEADS)
        total = gl.full([64], 0.0, gl.float32, layout=HEADS)
        totals = no_totals
        async_copy.wait_group(0)
        for start in range(first, end, 64):
            stage = tile & 1
            mbarrier.wait(k_full.index(stage), (tile >> 1) & 1)
            fence_async_shared()
            dots = warpgroup_mma(
                q_smem[1], r_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            for c in gl.static_range(4):
                keys = k_smem.index(stage * 4 + c).permute((1, 0))
                dots = warpgroup_mma(q_smem[0].index(c), keys, dots, is_async=True)
            there = gl.expand_dims(there_smem.index(stage).load(KEYS) != 0, 0)
            dots = warpgroup_mma_wait(0, deps=[dots])

            dots = gl.where(there, dots, float("-inf"))
            new_highest = gl.maximum(highest, gl.max(dots, axis=1) * scale_log2)
            # -inf - (-inf) is NaN: heads that have met no key subtract 0.
            shift = gl.where(new_highest == float("-inf"), 0.0, new_highest)
            decay = gl.exp2(highest - shift)
            highest = new_highest
            decay_smem.index(stage).store(decay)
            mbarrier.arrive(d_full.index(stage), count=1)
            exponents = gl.fma(dots, scale, gl.expand_dims(-shift, 1))
            left, right = weigh(exponents, r_smem.index(stage), p_full.index(2 * stage), SPLIT)
            decay = gl.convert_layout(decay, gl.SliceLayout(1, totals.type.layout), True)
            decay = gl.expand_dims(decay, 1) + no_totals
            totals = gl.fma(totals, decay, sum_lanes(left) + sum_lanes(right))
            # Most parts are of few tiles: no branch there.
            is_last = True if SPLIT else start + 64 >= end
            if is_last:
                total = gl.convert_layout(gl.sum(totals, axis=1), HEADS, True)
                # NaN counts as a sum: a total is 0 only if no key has a score above -inf.
                factor_smem.index(stage).store(1.0 / gl.where(total == 0.0, 1.0, total))
            fence_async_shared()
            mbarrier.arrive(p_full.index(2 * stage + 1), count=1)
            tile += 1
        store_lse(highest, total, group, part, lse_ptr, queries[3])
        item += gl.num_programs(0)
