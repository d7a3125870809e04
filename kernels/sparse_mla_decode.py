"""Attention of each query token over its selected keys, the keys of a row split among programs.

    key, value = kv[s], kv[s, :latent_dim]
    lse[t, h]  = log sum_s exp(scale * q[t, h] . key[s])
    out[t, h]  = sum_s exp(scale * q[t, h] . key[s] - lse[t, h]) * value[s]

Layout:
    q                [num_tokens, num_heads, head_dim]      any strides
    kv_cache         [num_blocks, block_size, head_dim]     last dim contiguous, other strides any
               or    [num_blocks, block_size, key_bytes]    uint8: of a key the e4m3 codes of its
                                                            latents, an fp32 scale for each 128 of
                                                            them, its rotary part in bf16
    topk_indices     [num_tokens, topk] int32               any strides, -1 anywhere
    block_table      [num_reqs, max_blocks] int32           any strides
    query_start_loc  [num_reqs + 1] int32                   any stride
    out              [num_tokens, num_heads, latent_dim]    contiguous
    lse              [num_tokens, num_heads] fp32           contiguous
    part_out, part_lse   out and lse of each split, fp32, with num_splits after num_tokens

On compute capability 9.0 the kernel of ``_sparse_mla_decode_hopper`` serves the sizes that models
have; ``sparse_mla_decode_kernel`` everything else.

Grid of ``sparse_mla_decode_kernel`` (num_tokens * num_splits * cdiv(num_heads, BLOCK_H),): a
program owns BLOCK_H heads of a token and split_size of its columns of topk_indices, and reads each
of those keys once, for scores and values alike. It finds the token's request and the keys' places
itself. The programs of a token are neighbours, so its keys come from L2 from the second group of
heads on. With one split the result is final, otherwise ``combine_parts`` makes it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _sparse_mla_decode_hopper as hopper
from ._combine_parts import combine_parts
from ._common import INTERPRETED, capability, num_sms, token_request
from ._index_cache import decode_e4m3
from ._shared_keys import expected_groups, tokens_of_group

# All of these are defaults.
MIN_SPLIT = 64  # keys of a split, at least
BLOCK_SCAN = 256  # indices looked at together in search of the last valid one
_LN_2 = tl.constexpr(math.log(2))


# fmt: off
@triton.jit(do_not_specialize=[
    "num_reqs", "num_heads", "num_blocks", "max_blocks", "topk", "split_size", "num_splits",
])
def sparse_mla_decode_kernel(
    q_ptr, kv_cache_ptr, topk_indices_ptr, block_table_ptr, query_start_loc_ptr,
    out_ptr, lse_ptr,
    scale_log2,
    num_reqs, num_heads, num_blocks, max_blocks, topk, split_size, num_splits,
    q_token_stride, q_head_stride, q_dim_stride, kv_block_stride, kv_token_stride,
    topk_token_stride, topk_stride, table_request_stride, table_stride, query_start_loc_stride,
    LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_SCAN: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr, FP8: tl.constexpr,
):
    # fmt: on
    num_groups = tl.cdiv(num_heads, BLOCK_H)
    group = tl.program_id(0) % num_groups
    part = tl.program_id(0) // num_groups
    token = part // num_splits
    first = (part % num_splits) * split_size

    request = token_request(query_start_loc_ptr, query_start_loc_stride, num_reqs, token)
    topk_row = topk_indices_ptr + token.to(tl.int64) * topk_token_stride
    table_row = block_table_ptr + request.to(tl.int64) * table_request_stride
    end = tl.where(request >= 0, tl.minimum(first + split_size, topk), first)
    end = _last_index(topk_row, topk_stride, first, end, BLOCK_SCAN)

    heads = group * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = heads < num_heads
    q_row = q_ptr + token.to(tl.int64) * q_token_stride
    q_heads = q_row + heads.to(tl.int64) * q_head_stride
    q_latent = _load(q_heads, head_mask, q_dim_stride, 0, LATENT_DIM, BLOCK_L, UPCAST)
    if ROPE_DIM > 0:
        q_rope = _load(q_heads, head_mask, q_dim_stride, LATENT_DIM, ROPE_DIM, BLOCK_R, UPCAST)

    # The indices are two tiles ahead of the dot, the places of the keys one: no load of a tile
    # waits for another one of the same tile.
    columns = first + tl.arange(0, BLOCK_K)
    index = _load_index(topk_row, topk_stride, columns, end)
    block, offset = _load_block(index, table_row, table_stride, max_blocks, BLOCK_SIZE)
    index = _load_index(topk_row, topk_stride, columns + BLOCK_K, end)
    highest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    for start in range(first, end, BLOCK_K):
        valid = (block >= 0) & (block < num_blocks)
        place = block.to(tl.int64) * kv_block_stride + offset.to(tl.int64) * kv_token_stride
        keys = kv_cache_ptr + place
        if FP8:
            key_latent = _load_fp8(keys, valid, LATENT_DIM, BLOCK_L, q_ptr.dtype.element_ty, UPCAST)
        else:
            key_latent = _load(keys, valid, 1, 0, LATENT_DIM, BLOCK_L, UPCAST)
        scores = tl.dot(q_latent, tl.trans(key_latent), input_precision="ieee")
        if ROPE_DIM > 0:
            if FP8:
                rope = (keys + LATENT_DIM + LATENT_DIM // 128 * 4).to(tl.pointer_type(tl.bfloat16))
                key_rope = _load(rope, valid, 1, 0, ROPE_DIM, BLOCK_R, UPCAST)
                if UPCAST:
                    key_rope = _rounded(key_rope, q_ptr.dtype.element_ty)
                else:
                    key_rope = key_rope.to(q_ptr.dtype.element_ty)
            else:
                key_rope = _load(keys, valid, 1, LATENT_DIM, ROPE_DIM, BLOCK_R, UPCAST)
            scores = tl.dot(q_rope, tl.trans(key_rope), scores, input_precision="ieee")
        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # -inf - (-inf) is NaN: heads that have met no key subtract 0.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        highest = new_highest
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(key_latent.dtype), key_latent, acc, input_precision="ieee")

        block, offset = _load_block(index, table_row, table_stride, max_blocks, BLOCK_SIZE)
        index = _load_index(topk_row, topk_stride, columns + (start - first + 2 * BLOCK_K), end)

    # NaN counts as a sum: a total is 0 only if no key has a score above -inf.
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out = acc / total[:, None]
    lse = tl.where(empty, float("-inf"), (highest + tl.log2(total)) * _LN_2)
    row = part.to(tl.int64) * num_heads + heads
    latents = tl.arange(0, BLOCK_L)
    stored = head_mask
    if SPLIT:
        stored = head_mask & ~empty
    out_ptrs = out_ptr + row[:, None] * LATENT_DIM + latents[None, :]
    out_mask = stored[:, None] & (latents < LATENT_DIM)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(lse_ptr + row, lse, mask=head_mask)


@triton.jit
def _last_index(topk_row, topk_stride, first, end, BLOCK: tl.constexpr):
    """One past the last column in ``first .. end - 1`` whose index is not negative.

    A row that sees fewer keys than topk ends in -1, and need not walk over them.
    """
    last = first
    for start in range(first, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        index = _load_index(topk_row, topk_stride, columns, end)
        last = tl.maximum(last, tl.max(tl.where(index >= 0, columns + 1, 0), axis=0))
    return last


@triton.jit
def _load_index(topk_row, topk_stride, columns, end):
    return tl.load(topk_row + columns.to(tl.int64) * topk_stride, mask=columns < end, other=-1)


@triton.jit
def _load_block(index, table_row, table_stride, max_blocks, BLOCK_SIZE: tl.constexpr):
    """The block of each key, negative where there is none, and the offset in it."""
    column = index // BLOCK_SIZE
    known = (index >= 0) & (column < max_blocks)
    block = tl.load(table_row + column.to(tl.int64) * table_stride, mask=known, other=-1)
    return block, index % BLOCK_SIZE


@triton.jit
def _load(
    rows, mask, stride, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Dims FIRST .. FIRST + DIM - 1 of each of ``rows``, and zeros up to BLOCK."""
    dims = tl.arange(0, BLOCK)
    mask = mask[:, None]
    if DIM < BLOCK:
        mask = mask & (dims < DIM)[None, :]
    offsets = (FIRST + dims).to(tl.int64) * stride
    values = tl.load(rows[:, None] + offsets[None, :], mask=mask, other=0.0)
    if UPCAST:
        values = values.to(tl.float32)
    return values


@triton.jit
def _load_fp8(
    keys, mask, DIM: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr, UPCAST: tl.constexpr
):
    """The latents of fp8 keys, rounded to ``dtype``, and zeros up to BLOCK."""
    GROUPS: tl.constexpr = BLOCK // 128
    codes = _load(keys, mask, 1, 0, DIM, BLOCK, False)
    scale_ptr = (keys + DIM).to(tl.pointer_type(tl.float32))
    scales = _load(scale_ptr, mask, 1, 0, DIM // 128, GROUPS, False)
    values = decode_e4m3(codes, tl.float32).reshape(keys.shape[0], GROUPS, 128)
    values = (values * scales[:, :, None]).reshape(keys.shape[0], BLOCK)
    if UPCAST:
        return _rounded(values, dtype)
    return values.to(dtype)


@triton.jit
def _rounded(values, dtype: tl.constexpr):
    """fp32 with the precision of ``dtype``; the interpreter cuts off what does not fit in bf16."""
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        rounded = even.to(tl.uint32).to(tl.float32, bitcast=True)
        return tl.where(values == values, rounded, values)
    return values.to(dtype).to(tl.float32)


def launch(
    q: Tensor,
    kv_cache: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    scale: float,
    latent_dim: int = 512,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_dim = q.shape
    out = q.new_empty(num_tokens, num_heads, latent_dim)
    lse = q.new_empty(num_tokens, num_heads, dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse

    inputs = (q, kv_cache, topk_indices, block_table, query_start_loc)
    # One program fills a multiprocessor.
    num_programs = num_sms(q.device)
    arch = capability(q.device)
    on_hopper = arch == 90 and not INTERPRETED and hopper.supports(q, kv_cache, scale, latent_dim)
    if on_hopper:
        blocks = None
        block_h, block_k = hopper.BLOCK_H, hopper.BLOCK_K
    else:
        fp8 = kv_cache.dtype == torch.uint8
        block_l, block_r = _dim_blocks(head_dim, latent_dim, fp8)
        blocks = _blocks(arch, q.itemsize, num_heads, block_l, block_r, fp8)
        block_h, block_k, _ = blocks
    num_splits, split_size, tokens = _parts(
        inputs, block_h, block_k, num_programs, may_share=on_hopper
    )
    part_out, part_lse = out, lse
    if num_splits > 1:
        part_out = q.new_empty(num_tokens, num_splits, num_heads, latent_dim, dtype=torch.float32)
        part_lse = q.new_empty(num_tokens, num_splits, num_heads, dtype=torch.float32)

    overlap = False
    if blocks is None:
        programs = hopper.launch(
            *inputs, part_out, part_lse, scale, split_size, num_splits, num_programs, tokens
        )
        # Early programs of the combination go where they find room: onto few multiprocessors, if
        # few are free, and there each has to wait for its turn.
        overlap = 2 * programs <= num_programs
    else:
        _attend(inputs, part_out, part_lse, scale, split_size, num_splits, blocks)
    if num_splits > 1:
        combine_parts(part_out, part_lse, out, lse, num_programs, overlap)
    return out, lse


def _parts(
    inputs: tuple[Tensor, ...], block_h: int, block_k: int, num_programs: int, *, may_share: bool
) -> tuple[int, int, int]:
    """The number of splits of a row, the columns of each, and how many tokens share their keys."""
    q, kv_cache, topk_indices, block_table, _ = inputs
    num_tokens, num_heads, _ = q.shape
    num_reqs, max_blocks = block_table.shape
    topk = topk_indices.shape[1]
    tokens = 0
    if may_share:
        max_keys = max_blocks * kv_cache.shape[1]
        tokens = tokens_of_group(num_tokens, num_reqs, num_heads, topk, max_keys)
    if tokens == 0:
        groups = triton.cdiv(num_heads, block_h)
        return *_splits(num_programs, num_tokens, num_heads, groups, topk, block_k), 0
    # As if tokens that share had two thirds of their keys in common (default).
    groups = expected_groups(num_tokens, num_reqs, tokens)
    heads = num_tokens * num_heads // groups
    num_splits, _ = _splits(num_programs, groups, heads, 1, topk * 3 // 2, block_k)
    return num_splits, triton.cdiv(topk, num_splits), tokens


def _attend(
    inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor, scale: float,
    split_size: int, num_splits: int, blocks: tuple[int, int, int],
) -> None:  # fmt: skip
    """Write ``out`` and ``lse``, final or of the parts, by ``sparse_mla_decode_kernel``."""
    q, kv_cache, topk_indices, block_table, query_start_loc = inputs
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_size, _ = kv_cache.shape
    latent_dim = out.shape[-1]
    fp8 = kv_cache.dtype == torch.uint8
    if fp8 and capability(q.device) >= 89 and not INTERPRETED:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    block_h, block_k, num_stages = blocks
    block_l, block_r = _dim_blocks(head_dim, latent_dim, fp8)
    sparse_mla_decode_kernel[(num_tokens * num_splits * triton.cdiv(num_heads, block_h),)](
        q, kv_cache, topk_indices, block_table, query_start_loc,
        out, lse,
        scale * math.log2(math.e),
        block_table.shape[0], num_heads, num_blocks, block_table.shape[1],
        topk_indices.shape[1], split_size, num_splits,
        *q.stride(), kv_cache.stride(0), kv_cache.stride(1),
        *topk_indices.stride(), *block_table.stride(), query_start_loc.stride(0),
        LATENT_DIM=latent_dim, ROPE_DIM=head_dim - latent_dim, BLOCK_SIZE=block_size,
        BLOCK_L=block_l, BLOCK_R=block_r, BLOCK_H=block_h, BLOCK_K=block_k,
        BLOCK_SCAN=BLOCK_SCAN, SPLIT=num_splits > 1, UPCAST=INTERPRETED, FP8=fp8,
        num_warps=8, num_stages=num_stages,
    )  # fmt: skip


def _dim_blocks(head_dim: int, latent_dim: int, fp8: bool) -> tuple[int, int]:
    """BLOCK_L and BLOCK_R: the dims of a key, latent and rotary, up to a power of two."""
    block_l = max(128 if fp8 else 16, triton.next_power_of_2(latent_dim))
    return block_l, max(16, triton.next_power_of_2(head_dim - latent_dim))


def _blocks(
    arch: int, itemsize: int, num_heads: int, block_l: int, block_r: int, fp8: bool = False
) -> tuple[int, int, int]:
    """BLOCK_H, BLOCK_K and num_stages that fit into registers and shared memory.

    The tiles go to mma.sync, whose loads keep ``num_stages - 1`` tiles of keys in shared memory
    next to q. More heads spill registers: 64 in any case, 32 where a tile of fp8 keys is decoded,
    into another one of the dtype of q.
    """
    # 227 KB of shared memory a program on 9.x, 10.x and 11.x; 99 KB on 8.6, 8.9 and 12.x.
    roomy = arch // 10 in (9, 10, 11)
    budget = (216 if roomy else 96) << 10
    row = itemsize * (block_l + block_r)
    wide = block_l > 512
    few = itemsize == 4 or fp8 or (wide and not roomy)
    block_h = 16 if num_heads <= 16 or few else 32
    if itemsize == 4 or (not roomy and (wide or block_h == 32)):
        block_k = 16
    elif wide or not roomy:
        block_k = 32
    else:
        block_k = 64
    num_stages = 3
    while num_stages > 1:
        tiles = (num_stages - 1) * block_k
        shared = tiles * (block_l + 4 * block_r) + block_k * row if fp8 else tiles * row
        if block_h * row + shared <= budget:
            break
        num_stages -= 1
    return block_h, block_k, num_stages


def _splits(
    num_programs: int, num_tokens: int, num_heads: int, num_groups: int, topk: int, block_k: int
) -> tuple[int, int]:
    """The number of splits of a row, and the columns of each: whole tiles, none without one.

    The choice with the least estimated time, of programs that go through the card in turns. The
    unit is what a program takes for 64 keys.
    """
    tiles = max(1, triton.cdiv(topk, block_k))
    best = (math.inf, 1, tiles)
    for splits in range(1, min(64, max(1, topk // MIN_SPLIT)) + 1):
        size = triton.cdiv(tiles, splits)
        parts = triton.cdiv(tiles, size)
        if parts != splits:
            continue
        turns = triton.cdiv(num_tokens * num_groups * parts, num_programs)
        time = turns * (size * block_k / 64 + 2)
        if parts > 1:
            # A launch, and the parts are written and read once more. With 1300 to 1500 this gives
            # the fastest of 4 to 32 parts for 1 and 8 tokens of 16, 64 and 128 heads (H200, topk
            # 2048).
            time += 2 + num_tokens * num_heads * parts / 1400
        if time < best[0]:
            best = (time, parts, size)
    return best[1], best[2] * block_k
