"""Sparse MLA decode from an fp8 cache on compute capability 9.0.

As ``_sparse_mla_decode_hopper``, whose launch, limits and buffers it shares, in other roles: to
decode the keys takes two groups of warps, so that the other two share all else.

    attend 0, 1  the scores and weights of every other tile of an item, and half of the latents of
                 all sums; what one knows of its tiles the other reads from shared memory
    copy 0, 1    half of the keys of every tile, as bf16, through registers; one the queries as well

A key is 512 bytes of codes, four fp32 scales, and from byte 528 on its rotary part in bf16. A fence
for the tensor cores waits for the loads under way, so that the next ones begin behind it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ._hopper_mla_fp8_copies import copy_fp8
from ._hopper_mla_fp8_scores import dots_of_tile, has_moved, weigh_tile
from ._hopper_mla_items import bounds, place
from ._hopper_mla_scores import HEADS, MMA, opaque, sum_lanes
from ._hopper_mla_stores import SUM_HEADS, SUM_MMA, store_lse, store_sums


@gluon.jit
def _decay(left, right, stage, decay_smem):
    decay = gl.expand_dims(decay_smem.index(stage).load(SUM_HEADS), 1)
    return left * decay, right * decay


@gluon.jit
def _sum_tile(
    left, right, before, own, stage, phase, scale_log2, smem, bars,
    HALF: gl.constexpr, OWN: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """The sums with a tile: its weights, if it is the group's OWN, or those of the other group, and
    what they are relative to."""
    q_smem, k_smem, r_smem, there_smem, highest_smem, decay_smem, moved_smem, wrong_smem = smem
    k_full, m_full, p_full = bars
    if OWN:
        dots = dots_of_tile(stage, phase, (q_smem, k_smem, r_smem), k_full)
        own = weigh_tile(
            dots, before, own, stage, scale_log2,
            (k_smem, r_smem, there_smem, highest_smem, decay_smem, moved_smem,
             wrong_smem.index(HALF)), (m_full, p_full),
            TOKENS,
        )  # fmt: skip
        if own[2] != 0:
            left, right = _decay(left, right, stage, decay_smem)
    else:
        # While the weights are made.
        mbarrier.wait(m_full.index(stage), phase)
        before = highest_smem.index(stage).load(HEADS)
        if has_moved(stage, moved_smem):
            left, right = _decay(left, right, stage, decay_smem)
        mbarrier.wait(p_full.index(stage), phase)
        fence_async_shared()
    weights = r_smem.index(stage)
    left = warpgroup_mma(weights, k_smem.index(stage * 4 + 2 * HALF), left, is_async=True)
    right = warpgroup_mma(weights, k_smem.index(stage * 4 + 2 * HALF + 1), right, is_async=True)
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    return left, right, before, own


@gluon.jit
def _whole_totals(own, count, end_smem, e_full, HALF: gl.constexpr):
    """Of both groups: the totals of all weights, and what they are relative to."""
    highest, totals, _moved = own
    total = gl.convert_layout(gl.sum(totals, axis=1), HEADS, True)
    turn = count & 1
    mine = turn * 4 + HALF * 2
    end_smem.index(mine).store(total)
    end_smem.index(mine + 1).store(highest)
    mbarrier.arrive(e_full.index(turn * 2 + HALF), count=1)
    mbarrier.wait(e_full.index(turn * 2 + (1 - HALF)), (count >> 1) & 1)
    other = turn * 4 + (1 - HALF) * 2
    other_total = end_smem.index(other).load(HEADS)
    other_highest = end_smem.index(other + 1).load(HEADS)
    # The last of the two in either group: it never falls.
    both = gl.maximum(highest, other_highest)
    shift = gl.where(both == float("-inf"), 0.0, both)
    total = total * gl.exp2(highest - shift) + other_total * gl.exp2(other_highest - shift)
    return total, both


@gluon.jit
def _attend(
    items, batch, out_ptr, lse_ptr, scale_log2, heads, smem, end_smem, bars,
    HALF: gl.constexpr, SPLIT: gl.constexpr, SCAN: gl.constexpr, WHOLE_LINES: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Scores of the first or the second tile of every two of an item; 256 latents of all sums."""
    k_smem = smem[1]
    k_full, k_empty, q_full, q_empty, m_full, p_full, e_full = bars
    tile_bars = (k_full, m_full, p_full)
    nothing = gl.full([64], float("-inf"), gl.float32, layout=HEADS)
    no_totals = sum_lanes(gl.full([64, 64], 0.0, gl.float32, layout=MMA))

    item = gl.program_id(0)
    count = 0
    tile = 0
    while item < items:
        share, part, _token, row, first, limit = place(item, batch, TOKENS)
        _request, end = bounds(row, first, limit, batch, SCAN, TOKENS)
        tiles = (end - first + 63) // 64
        left = gl.full([64, 128], 0.0, gl.float32, layout=SUM_MMA)
        right = gl.full([64, 128], 0.0, gl.float32, layout=SUM_MMA)
        before = nothing
        own = (nothing, no_totals, 0)
        mbarrier.wait(q_full, count & 1)
        for pair in range(tiles // 2):
            stage = opaque(tile & 1)
            phase = (tile >> 1) & 1
            later_stage = stage ^ 1
            later_phase = ((tile + 1) >> 1) & 1
            for turn in gl.static_range(2):
                left, right, before, own = _sum_tile(
                    left, right, before, own, stage, phase, scale_log2, smem, tile_bars,
                    HALF, turn == HALF, TOKENS,
                )  # fmt: skip
                # The buffer of the last tile is kept for the stores.
                if turn == 0 or not WHOLE_LINES or 2 * pair + 2 < tiles:
                    mbarrier.arrive(k_empty.index(stage), count=1)
                stage, phase = later_stage, later_phase
            tile += 2
        if tiles % 2 > 0:
            stage = tile & 1
            left, right, before, own = _sum_tile(
                left, right, before, own, stage, (tile >> 1) & 1, scale_log2, smem, tile_bars,
                HALF, HALF == 0, TOKENS,
            )  # fmt: skip
            if not WHOLE_LINES:
                mbarrier.arrive(k_empty.index(stage), count=1)
            tile += 1
        mbarrier.arrive(q_empty, count=1)
        total, highest = _whole_totals(own, count, end_smem, e_full, HALF)
        if HALF == 0:
            store_lse(highest, total, share, part, lse_ptr, heads, TOKENS)
        factor = 1.0 / gl.where(total == 0.0, 1.0, total)
        factor = gl.convert_layout(factor, SUM_HEADS, True)
        factor = gl.expand_dims(factor, 1)
        store_sums(
            left, right, factor, tile, end > first, share, part, out_ptr, heads, k_smem, k_empty,
            HALF, SPLIT, WHOLE_LINES, TOKENS,
        )  # fmt: skip
        count += 1
        item += gl.num_programs(0)


# fmt: off
@gluon.jit(do_not_specialize=[
    "items", "num_reqs", "num_heads", "num_blocks", "max_blocks", "topk", "split_size",
    "num_splits", "groups", "block_h",
])
def sparse_mla_decode_hopper_fp8_kernel(
    q_ptr, kv_cache_ptr, topk_indices_ptr, block_table_ptr, query_start_loc_ptr,
    out_ptr, lse_ptr,
    scale_log2,
    items, num_reqs, num_heads, num_blocks, max_blocks, topk, split_size, num_splits,
    groups, block_h,
    q_token_stride, q_head_stride, kv_block_stride, kv_token_stride,
    topk_token_stride, topk_stride, table_request_stride, table_stride, query_start_loc_stride,
    BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr, SPLIT: gl.constexpr,
    WHOLE_LINES: gl.constexpr, TOKENS: gl.constexpr, REGS: gl.constexpr, COPY_REGS: gl.constexpr,
):
    # fmt: on
    if SPLIT:
        # The combination, if it is launched early, waits for the end of this kernel by itself.
        gdc_launch_dependents()
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    SWIZZLE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [4, 64, 128], SWIZZLE)
    q_rope_smem = gl.allocate_shared_memory(dtype, [1, 64, 64], SWIZZLE)
    k_smem = gl.allocate_shared_memory(dtype, [8, 64, 128], SWIZZLE)
    r_smem = gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLE)
    there_smem = gl.allocate_shared_memory(gl.int8, [2, 64], FLAT)
    highest_smem = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    decay_smem = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    moved_smem = gl.allocate_shared_memory(gl.int32, [2, 32], FLAT)
    wrong_smem = gl.allocate_shared_memory(gl.int32, [2, 4], FLAT)
    end_smem = gl.allocate_shared_memory(gl.float32, [8, 64], FLAT)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    m_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Of the two groups, by turns: one of them may be an item ahead.
    e_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    # Every thread of a group arrives when its copies have.
    mbarrier.init(q_full, count=128)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=2)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(m_full.index(i), count=1)
        mbarrier.init(p_full.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(e_full.index(i), count=1)

    batch = (
        (topk_indices_ptr, topk_token_stride, topk_stride,
         query_start_loc_ptr, query_start_loc_stride),
        (num_reqs, topk, split_size, num_splits, groups),
    )  # fmt: skip
    table = (block_table_ptr, table_request_stride, (table_stride, max_blocks, num_blocks))
    cache = (kv_cache_ptr, kv_block_stride, kv_token_stride)
    heads = (num_heads, block_h, num_splits)
    queries = ((q_ptr, q_token_stride, q_head_stride, heads), (q_smem, q_rope_smem.index(0)))
    tiles = (k_smem, r_smem, there_smem)
    smem = ((q_smem, q_rope_smem), k_smem, r_smem, there_smem, highest_smem, decay_smem, moved_smem,
            wrong_smem)  # fmt: skip
    bars = (k_full, k_empty, q_full, q_empty, m_full, p_full, e_full)
    copy_bars = (k_full, k_empty, q_full, q_empty)
    if TOKENS > 0:
        gdc_wait()
        items = gl.load(query_start_loc_ptr)
    gl.warp_specialize(
        [
            (_attend, (items, batch, out_ptr, lse_ptr, scale_log2, heads, smem, end_smem, bars,
                       0, SPLIT, SCAN, WHOLE_LINES, TOKENS)),
            (_attend, (items, batch, out_ptr, lse_ptr, scale_log2, heads, smem, end_smem, bars,
                       1, SPLIT, SCAN, WHOLE_LINES, TOKENS)),
            (copy_fp8, (items, batch, queries, table, cache, tiles, copy_bars,
                        0, BLOCK_SIZE, SCAN, TOKENS)),
            (copy_fp8, (items, batch, queries, table, cache, tiles, copy_bars,
                        1, BLOCK_SIZE, SCAN, TOKENS)),
        ],
        [4, 4, 4],
        [REGS, COPY_REGS, COPY_REGS],
    )  # fmt: skip
