"""Sparse MLA decode on compute capability 9.0: up to 64 heads a program, warp groups with roles.

Same maths, layout and contract as ``sparse_mla_decode_kernel``, for what ``supports`` takes: a
latent of 512, a rotary part of 64, and rows that copies of 16 bytes can read. An fp8 cache has a
kernel of its own (``_sparse_mla_decode_hopper_fp8``), with other roles and the same launch.

A program per SM walks over items, each 64 heads of one part of a query token, 64 keys at a time;
while multiprocessors are free, 32 or 16 heads in tiles of the same size; and of many tokens of few
heads a group of one request, which shares its keys (``_shared_keys``):

    copy        the keys of a tile into one of two buffers, by cp.async, and which of them there are
    score       the queries, by cp.async, before it is known whose they are; the dots of all 576
                dims, the running softmax, and the weights of the tile
    value 0, 1  the weighted sum of half the latents each: decayed while the weights are made, and
                begun with those of the first 32 keys

Through shared memory the weights take the place of the rotary keys, which only the scores need, so
that they are double buffered as the keys are. A buffer is free once both halves are summed: while
that of one tile is on its way, the other is scored and summed. Tiles behind the last index of a
row are skipped. Each role finds the bounds of an item itself, and none waits for another's answer.
The sums go out straight from registers, or, where that is faster, in whole lines: through the part
of the last buffer that only their half reads.

The two accumulators of 64 x 256 take half of all registers, so that a program has a multiprocessor
to itself, and the registers of the roles are set by hand: all 512 of a thread of each.
"""

import math

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ._hopper_mla_copies import copy_keys
from ._hopper_mla_items import MAX_ALONE, bounds, place
from ._hopper_mla_scores import score
from ._hopper_mla_stores import SUM_HEADS, SUM_MMA, store_sums
from ._shared_keys import share_keys
from ._sparse_mla_decode_hopper_fp8 import sparse_mla_decode_hopper_fp8_kernel

LATENT_DIM = 512
ROPE_DIM = 64
BLOCK_H = 64
BLOCK_K = 64
# Of 64 heads a program. H200, topk 2048: whole lines cost 0.7 to 1 us at 1 token, and save 0.2 to
# 0.7 us at 8 to 32 tokens and 4 to 16 us at 64 to 256 (nothing at 64 tokens of 64 heads).
MIN_TOKENS_OF_LINES = 8
# Registers of each value and of copy: score has what is left of 512. Over fp8 of attend 1 and of
# each copy: attend 0 has what is left. With 184 the compiler makes products wait for one another.
REGISTERS, FP8_REGISTERS = (160, 88), (192, 64)
_LOG2_E = math.log2(math.e)


@gluon.jit
def _value(
    items, batch, out_ptr, heads, smem, bars,
    HALF: gl.constexpr, SPLIT: gl.constexpr, SCAN: gl.constexpr, WHOLE_LINES: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """256 latents of the weighted sum."""
    k_smem, r_smem, decay_smem, factor_smem = smem
    d_full, p_full, k_empty = bars

    item = gl.program_id(0)
    tile = 0
    while item < items:
        share, part, _token, row, first, limit = place(item, batch, TOKENS)
        _request, end = bounds(row, first, limit, batch, SCAN, TOKENS)
        left = gl.full([64, 128], 0.0, gl.float32, layout=SUM_MMA)
        right = gl.full([64, 128], 0.0, gl.float32, layout=SUM_MMA)
        factor = gl.full([64], 1.0, gl.float32, layout=SUM_HEADS)
        for start in range(first, end, 64):
            stage = tile & 1
            phase = (tile >> 1) & 1
            # While the weights are made.
            mbarrier.wait(d_full.index(stage), phase)
            decay = gl.expand_dims(decay_smem.index(stage).load(SUM_HEADS), 1)
            left *= decay
            right *= decay
            for keys in gl.static_range(0, 64, 32):
                if keys == 0 or not SPLIT:
                    mbarrier.wait(p_full.index(2 * stage + (1 if SPLIT else keys // 32)), phase)
                    fence_async_shared()
                weights = r_smem.index(stage).slice(keys, 32, dim=1)
                values = k_smem.index(stage * 4 + 2 * HALF).slice(keys, 32)
                left = warpgroup_mma(weights, values, left, is_async=True)
                values = k_smem.index(stage * 4 + 2 * HALF + 1).slice(keys, 32)
                right = warpgroup_mma(weights, values, right, is_async=True)
            factor = factor_smem.index(stage).load(SUM_HEADS)
            left, right = warpgroup_mma_wait(0, deps=[left, right])
            # The buffer of the last tile is kept for the stores.
            if not WHOLE_LINES or start + 64 < end:
                mbarrier.arrive(k_empty.index(stage), count=1)
            tile += 1
        factor = gl.expand_dims(factor, 1)
        store_sums(
            left, right, factor, tile, end > first, share, part, out_ptr, heads, k_smem, k_empty,
            HALF, SPLIT, WHOLE_LINES, TOKENS,
        )  # fmt: skip
        item += gl.num_programs(0)


# fmt: off
@gluon.jit(do_not_specialize=[
    "items", "num_reqs", "num_heads", "num_blocks", "max_blocks", "topk", "split_size",
    "num_splits", "groups", "block_h",
])
def sparse_mla_decode_hopper_kernel(
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
    q_rope_smem = gl.allocate_shared_memory(dtype, [64, 64], SWIZZLE)
    k_smem = gl.allocate_shared_memory(dtype, [8, 64, 128], SWIZZLE)
    r_smem = gl.allocate_shared_memory(dtype, [2, 64, 64], SWIZZLE)
    there_smem = gl.allocate_shared_memory(gl.int8, [2, 64], FLAT)
    decay_smem = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    factor_smem = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    # Without shared keys nothing uses it, and it takes no memory.
    wrong_smem = gl.allocate_shared_memory(gl.int32, [4], FLAT)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    d_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        # Every thread that copies arrives twice, when its copies have; all of them, for what they
        # store, once.
        mbarrier.init(k_full.index(i), count=257)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(d_full.index(i), count=1)
        mbarrier.init(p_full.index(2 * i), count=1)
        mbarrier.init(p_full.index(2 * i + 1), count=1)

    q_all = (q_smem, q_rope_smem)
    batch = (
        (topk_indices_ptr, topk_token_stride, topk_stride,
         query_start_loc_ptr, query_start_loc_stride),
        (num_reqs, topk, split_size, num_splits, groups),
    )  # fmt: skip
    table = (block_table_ptr, table_request_stride, (table_stride, max_blocks, num_blocks))
    cache = (kv_cache_ptr, kv_block_stride, kv_token_stride)
    heads = (num_heads, block_h, num_splits)
    queries = (q_ptr, q_token_stride, q_head_stride, heads)
    tiles = (k_smem, r_smem, there_smem)
    value_smem, value_bars = (k_smem, r_smem, decay_smem, factor_smem), (d_full, p_full, k_empty)
    score_smem = (q_all, k_smem, r_smem, there_smem, decay_smem, factor_smem, wrong_smem)
    if TOKENS > 0:
        gdc_wait()
        items = gl.load(query_start_loc_ptr)
    gl.warp_specialize(
        [
            (score, (items, batch, queries, lse_ptr, scale_log2, score_smem,
                     (k_full, d_full, p_full), SPLIT, SCAN, TOKENS)),
            (_value, (items, batch, out_ptr, heads, value_smem, value_bars,
                      0, SPLIT, SCAN, WHOLE_LINES, TOKENS)),
            (_value, (items, batch, out_ptr, heads, value_smem, value_bars,
                      1, SPLIT, SCAN, WHOLE_LINES, TOKENS)),
            (copy_keys, (items, batch, table, cache, tiles, (k_full, k_empty),
                         BLOCK_SIZE, SCAN, TOKENS)),
        ],
        [4, 4, 4],
        [REGS, REGS, COPY_REGS],
    )  # fmt: skip


def supports(q: Tensor, kv_cache: Tensor, scale: float, latent_dim: int) -> bool:
    """Whether the kernel takes these; otherwise ``sparse_mla_decode_kernel`` has to.

    The largest dot has to be the largest score, so that ``scale`` must be positive, in fp32 too.
    Scores of more than 10**6 lose their fraction, as they would in fp32 anyhow, and from 10**8 on
    the weights of all keys of a head may vanish.
    """
    if not scale * _LOG2_E >= torch.finfo(torch.float32).tiny:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] != LATENT_DIM + ROPE_DIM:
        return False
    fp8 = kv_cache.dtype == torch.uint8
    if fp8 and q.dtype != torch.bfloat16:
        return False
    # Strides and addresses that Triton knows to be multiples of 16: copies are 16 bytes wide.
    strides = (q.stride(0), q.stride(1), kv_cache.stride(0), kv_cache.stride(1))
    return (
        latent_dim == LATENT_DIM
        and q.stride(2) == 1
        and kv_cache.shape[0] > 0
        and all(stride % 16 == 0 for stride in strides)
        and (q.device.type == "meta" or (q.data_ptr() | kv_cache.data_ptr()) % 16 == 0)
    )


def heads_of_program(parts: int, num_heads: int, num_programs: int) -> int:
    """16, 32 or 64: the fewest of which all programs run at once, or one holds all heads.

    Each program reads the keys of its part, and fewer heads take less to write.
    """
    for block_h in (16, 32):
        groups = triton.cdiv(num_heads, block_h)
        if groups == 1 or parts * groups <= num_programs:
            return block_h
    return BLOCK_H


def launch(
    q: Tensor, kv_cache: Tensor, topk_indices: Tensor, block_table: Tensor,
    query_start_loc: Tensor, out: Tensor, lse: Tensor,
    scale: float, split_size: int, num_splits: int, num_programs: int, tokens: int,
) -> int:  # fmt: skip
    """Write ``out`` and ``lse``, final or of the parts, with at most ``num_programs`` programs.

    ``tokens`` of a request share their keys, or none if it is 0. Returns the number of programs.
    """
    num_tokens, num_heads, _ = q.shape
    num_blocks, block_size, _ = kv_cache.shape
    num_reqs, max_blocks = block_table.shape
    starts, starts_stride = query_start_loc, query_start_loc.stride(0)
    if tokens:
        max_keys = max_blocks * block_size
        topk_indices, starts = share_keys(
            topk_indices, query_start_loc, max_keys, tokens, num_splits, split_size
        )
        starts_stride = starts.stride(0)
        block_h, groups, items = BLOCK_H, 1, len(topk_indices)
    else:
        block_h = heads_of_program(num_tokens * num_splits, num_heads, num_programs)
        groups = triton.cdiv(num_heads, block_h)
        items = num_tokens * num_splits * groups
    programs = min(items, num_programs)
    if kv_cache.dtype == torch.uint8:
        kernel, registers = sparse_mla_decode_hopper_fp8_kernel, FP8_REGISTERS
    else:
        kernel, registers = sparse_mla_decode_hopper_kernel, REGISTERS
    kernel[(programs,)](
        q, kv_cache, topk_indices, block_table, starts,
        out, lse,
        scale * _LOG2_E,
        items, num_reqs, num_heads, num_blocks, max_blocks,
        topk_indices.shape[1], split_size, num_splits, groups, block_h,
        q.stride(0), q.stride(1), kv_cache.stride(0), kv_cache.stride(1),
        *topk_indices.stride(), *block_table.stride(), starts_stride,
        BLOCK_SIZE=block_size, SCAN=0 if tokens else scan(split_size, items, num_programs),
        SPLIT=num_splits > 1, WHOLE_LINES=block_h == BLOCK_H and num_tokens >= MIN_TOKENS_OF_LINES,
        TOKENS=tokens, REGS=registers[0], COPY_REGS=registers[1],
        num_warps=4, maxnreg=128, launch_pdl=tokens > 0,
    )  # fmt: skip
    return programs


def scan(split_size: int, items: int, num_programs: int) -> int:
    """Columns that are looked at together for the end of a part.

    All of a short part by each warp alone, where a program has one item and waits for its bounds.
    In later items the others hide that, and one step for up to 511 requests is cheaper.
    """
    if items <= num_programs:
        for size in (64, 128, MAX_ALONE.value):
            if split_size <= size:
                return size
    return 512 if split_size <= 512 else 2048
