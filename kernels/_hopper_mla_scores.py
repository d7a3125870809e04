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
from ._hopper_mla_items import bounds, place, token_of_rows
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
def keys_of_rows(there_smem, TOKENS: gl.constexpr):
    """Which keys of a tile each of the 64 rows of a program has."""
    there = there_smem.load(gl.SliceLayout(0, MMA))
    if TOKENS > 0:
        token = token_of_rows(gl.arange(0, 64, layout=HEADS), TOKENS)
        bit = 1 << gl.expand_dims(token, 1)
        there = (gl.expand_dims(there.to(gl.int32), 0) & bit) != 0
    else:
        there = gl.expand_dims(there != 0, 0)
    return there


@gluon.jit
def watch(dots, wrong_smem):
    """Dots, those that are inf as NaN; each warp says in ``wrong_smem`` whether there is NaN.

    A dot of -inf would leave its key out, and with it the inf that ``contain`` takes away.
    """
    none = dots * 0.0
    wrong = gl.reshape(sum_lanes(none), [4, 2, 8, 4])
    wrong = (gl.sum(wrong, axis=1) != 0.0).to(gl.int32)
    wrong = gl.max(gl.max(wrong, axis=2), axis=1)
    wrong_smem.store(wrong)
    return dots + none


@gluon.jit
def contain(stage, wrong_smem, k_smem):
    """What is not finite of the latents of a tile becomes 0, after a ``watch`` and a barrier.

    A key that is not finite must not reach the tokens of a group that have not selected it: their
    weights are 0, and 0 times inf or NaN is NaN. Those that have get NaN from its dot.
    """
    WARPS: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    if gl.max(wrong_smem.load(WARPS), axis=0) != 0:
        for c in range(4):
            for first in gl.static_range(0, 64, 16):
                keys = k_smem.index(stage * 4 + c).slice(first, 16)
                latents = keys.load(LAYOUT)
                finite = latents.to(gl.float32) * 0.0 == 0.0
                keys.store(gl.where(finite, latents, 0.0).to(k_smem.dtype))
        fence_async_shared()


@gluon.jit
def opaque(number):
    """A number that is not known to the compiler: what follows from it is worked out where it is
    used, and not held in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def score(
    items, batch, queries, lse_ptr, scale_log2, smem, bars,
    SPLIT: gl.constexpr, SCAN: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """The queries of every item; scores, running softmax and weights; the lse."""
    q_smem, k_smem, r_smem, there_smem, decay_smem, factor_smem, wrong_smem = smem
    k_full, d_full, p_full = bars
    zero = gl.full([64, 64], 0.0, gl.float32, layout=MMA)
    scale = gl.full([64, 64], scale_log2, gl.float32, layout=MMA)
    no_totals = sum_lanes(gl.full([64, 32], 0.0, gl.float32, layout=HALF_MMA))

    item = gl.program_id(0)
    tile = 0
    while item < items:
        share, part, token, row, first, limit = place(item, batch, TOKENS)
        # The dots of the item before are done. Whether the token has a request is not known yet.
        copy_queries(token, share, queries, q_smem, TOKENS)
        async_copy.commit_group()
        _request, end = bounds(row, first, limit, batch, SCAN, TOKENS)
        highest = gl.full([64], float("-inf"), gl.float32, layout=HEADS)
        total = gl.full([64], 0.0, gl.float32, layout=HEADS)
        totals = no_totals
        async_copy.wait_group(0)
        for start in range(first, end, 64):
            stage = tile & 1
            mbarrier.wait(k_full.index(stage), (tile >> 1) & 1)
            fence_async_shared()
            # With more to hold, what describes the queries would not fit into registers.
            none = opaque(0) if TOKENS > 0 else 0
            dots = warpgroup_mma(
                q_smem[1], r_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            for c in gl.static_range(4):
                keys = k_smem.index(stage * 4 + c).permute((1, 0))
                dots = warpgroup_mma(q_smem[0].index(c + none), keys, dots, is_async=True)
            there = keys_of_rows(there_smem.index(stage), TOKENS)
            dots = warpgroup_mma_wait(0, deps=[dots])

            if TOKENS > 0:
                dots = watch(dots, wrong_smem)
            dots = gl.where(there, dots, float("-inf"))
            new_highest = gl.maximum(highest, gl.max(dots, axis=1) * scale_log2)
            # -inf - (-inf) is NaN: heads that have met no key subtract 0.
            shift = gl.where(new_highest == float("-inf"), 0.0, new_highest)
            decay = gl.exp2(highest - shift)
            highest = new_highest
            decay_smem.index(stage).store(decay)
            mbarrier.arrive(d_full.index(stage), count=1)
            if TOKENS > 0:
                contain(stage, wrong_smem, k_smem)
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
        store_lse(highest, total, share, part, lse_ptr, queries[3], TOKENS)
        item += gl.num_programs(0)
