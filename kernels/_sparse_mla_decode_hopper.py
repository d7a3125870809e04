"""Sparse MLA decode on compute capability 9.0: up to 64 heads a program, warp groups with roles.

Same maths, layout and contract as ``sparse_mla_decode_kernel``, for what ``supports`` takes: a
latent of 512, a rotary part of 64, and rows that copies of 16 bytes can read. A key of an fp8 cache
is 512 bytes of codes, four fp32 scales, and from byte 528 on its rotary part in bf16.

A program per SM walks over items, each 64 heads of one part of a query token, 64 keys at a time;
while multiprocessors are free, 32 or 16 heads in tiles of the same size:

    copy        the keys of a tile into one of two buffers, by cp.async; fp8 through registers
    score       the queries, by cp.async, before it is known whose they are; the dots of all 576
                dims, the running softmax, and the weights of the tile
    value 0, 1  the weighted sum of half the latents each

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
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from ._hopper import async_load, blocks_of, prefetch, reinterpret

LATENT_DIM = 512
ROPE_DIM = 64
BLOCK_H = 64
BLOCK_K = 64
MIN_HEADS_OF_FP8 = 17  # the portable kernel is faster for fewer: decoding is shared by few
# Of 64 heads a program. H200, topk 2048: whole lines cost 0.7 to 1 us at 1 token, and save 0.2 to
# 0.7 us at 8 to 32 tokens and 4 to 16 us at 64 to 256 (nothing at 64 tokens of 64 heads).
MIN_TOKENS_OF_LINES = 8
MAX_ALONE = gl.constexpr(256)  # columns that a warp looks at by itself, eight a lane: a default
_LN_2 = gl.constexpr(math.log(2))


@gluon.jit
def _place(item, batch):
    """Which heads of which part of which token an item is, and its first column and their limit."""
    _num_reqs, topk, split_size, num_splits, groups = batch[1]
    group = item % groups
    part = item // groups
    token = part // num_splits
    first = part % num_splits * split_size
    return group, part, token, first, gl.minimum(first + split_size, topk)


@gluon.jit
def _bounds(token, first, limit, batch, SCAN: gl.constexpr):
    """The request of a token, and the end of its valid columns in ``first .. limit - 1``.

    Where the columns are few, each warp looks at all of them and at the requests by itself, and
    waits for no other warp.
    """
    starts_ptr, starts_stride = batch[0][3:]
    num_reqs = batch[1][0]
    WARP: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1]))
    GROUP: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    ALONE: gl.constexpr = SCAN <= MAX_ALONE
    LAYOUT: gl.constexpr = WARP if ALONE else GROUP
    REQUESTS: gl.constexpr = 64 if ALONE else 512

    # The two loads do not wait for one another.
    topk_row = _topk_row(token, batch)
    columns = first + gl.arange(0, SCAN, layout=LAYOUT)
    index = _load_index(topk_row, batch[0][2], columns, limit)
    lanes = gl.arange(0, REQUESTS, layout=LAYOUT)
    request = -1
    for start in range(0, num_reqs + 1, REQUESTS):
        at = start + lanes
        known = at <= num_reqs
        begin = gl.load(starts_ptr + at.to(gl.int64) * starts_stride, mask=known, other=0)
        request = gl.maximum(request, gl.max(gl.where(known & (begin <= token), at, -1), axis=0))
    request = gl.where(request < num_reqs, request, -1)
    # A row that sees fewer keys than topk ends in -1, and need not be walked to its end.
    last = gl.maximum(first, gl.max(gl.where(index >= 0, columns + 1, 0), axis=0))
    for start in range(first + SCAN, limit, SCAN):
        columns = start + gl.arange(0, SCAN, layout=LAYOUT)
        index = _load_index(topk_row, batch[0][2], columns, limit)
        last = gl.maximum(last, gl.max(gl.where(index >= 0, columns + 1, 0), axis=0))
    return request, gl.where(request >= 0, last, first)


@gluon.jit
def _topk_row(token, batch):
    return batch[0][0] + token.to(gl.int64) * batch[0][1]


@gluon.jit
def _load_index(topk_row, stride, columns, end):
    return gl.load(topk_row + columns.to(gl.int64) * stride, mask=columns < end, other=-1)


@gluon.jit
def _load_block(index, table_row, table, BLOCK_SIZE: gl.constexpr):
    """The block of each key, -1 where there is none, and the offset in it."""
    stride, max_blocks, num_blocks = table[2]
    column = index // BLOCK_SIZE
    known = (index >= 0) & (column < max_blocks)
    block = gl.load(table_row + column.to(gl.int64) * stride, mask=known, other=-1)
    return gl.where(block < num_blocks, block, -1), index % BLOCK_SIZE


@gluon.jit
def _places(block, offset, cache):
    return (
        cache[0] + (block.to(gl.int64) * cache[1] + offset.to(gl.int64) * cache[2]),
        block >= 0,
    )


@gluon.jit
def _prefetch(keys, valid):
    """Bring the lines of fp8 keys into the L2 cache."""
    BYTES: gl.constexpr = 656
    LINES: gl.constexpr = 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    offsets = gl.arange(0, LINES, layout=gl.SliceLayout(0, LAYOUT)) * 128
    keys = gl.convert_layout(keys.to(gl.int64), gl.SliceLayout(1, LAYOUT), True)
    valid = gl.convert_layout(valid, gl.SliceLayout(1, LAYOUT), True)
    # A key does not begin at a line: its last byte lies in one more.
    mask = gl.expand_dims(valid, 1) & gl.expand_dims(offsets < BYTES + 127, 0)
    places = gl.expand_dims(keys, 1) + gl.expand_dims(gl.minimum(offsets, BYTES - 1), 0)
    prefetch(places, mask)


@gluon.jit
def _load_codes(keys, valid, c: gl.constexpr, words):
    """The codes of 128 dims, four in a word, and their scale."""
    ptrs = gl.expand_dims((keys + c * 128).to(gl.pointer_type(gl.int32)), 1)
    codes = gl.load(ptrs + gl.expand_dims(words, 0), mask=gl.expand_dims(valid, 1), other=0)
    scale_ptr = (keys + 512).to(gl.pointer_type(gl.float32))
    return codes, gl.load(scale_ptr + c, mask=valid, other=0.0)


@gluon.jit
def _store_keys(smem, codes, scales):
    """``codes`` times ``scales`` as bf16, into a tile of 64 keys and 128 dims."""
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 c0, c1, h0, h1, h2, h3;
        .reg .b32 p0, p1;
        .reg .f32 f0, f1, f2, f3;
        mov.b32 {c0, c1}, $2;
        cvt.rn.f16x2.e4m3x2 p0, c0;
        cvt.rn.f16x2.e4m3x2 p1, c1;
        mov.b32 {h0, h1}, p0;
        mov.b32 {h2, h3}, p1;
        cvt.f32.f16 f0, h0;
        cvt.f32.f16 f1, h1;
        cvt.f32.f16 f2, h2;
        cvt.f32.f16 f3, h3;
        mul.f32 f0, f0, $3;
        mul.f32 f1, f1, $3;
        mul.f32 f2, f2, $3;
        mul.f32 f3, f3, $3;
        cvt.rn.bf16x2.f32 $0, f1, f0;
        cvt.rn.bf16x2.f32 $1, f3, f2;
        }
        """,
        "=r,=r,r,f",
        [codes, gl.expand_dims(scales, 1)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    pairs = gl.reshape(gl.join(low, high), [64, 64])
    reinterpret(smem, gl.int32, [64, 64], gl.NVMMASharedLayout(128, 32, 2)).store(pairs)


@gluon.jit
def _heads(group, rows, heads):
    """The head of each of the 64 rows of a program, and whether it has one.

    Each warp has a quarter of the heads in its 16 rows: all of them share the stores.
    """
    num_heads, block_h = heads
    share = block_h // 4
    head = group * block_h + rows // 16 * share + rows % 16
    return head, (rows % 16 < share) & (head < num_heads)


@gluon.jit
def _copy_queries(token, group, queries, smem):
    q_ptr, token_stride, head_stride, heads = queries
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dims = gl.arange(0, 512, layout=gl.SliceLayout(0, LAYOUT))
    rope_dims = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    head, stored = _heads(group, gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), heads)
    row_ptr = q_ptr + token.to(gl.int64) * token_stride
    rows = gl.expand_dims(row_ptr + head.to(gl.int64) * head_stride, 1)
    mask = gl.expand_dims(stored, 1)
    latents = reinterpret(smem[0], smem[0].dtype, [64, 512], gl.NVMMASharedLayout(128, 16, 2))
    async_load(latents, rows + gl.expand_dims(dims, 0), mask=mask)
    async_load(smem[1], rows + gl.expand_dims(512 + rope_dims, 0), mask=mask)
    async_copy.commit_group()


@gluon.jit
def _start_item(item, batch, table, lanes, BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr):
    """The bounds of an item, the blocks of its first tile, and the indices of its second: the
    indices are two tiles ahead of the copies, the blocks one."""
    _group, _part, token, first, limit = _place(item, batch)
    topk_row = _topk_row(token, batch)
    # Before the end is known: there is no index between it and the limit.
    index = _load_index(topk_row, batch[0][2], first + lanes, limit)
    index_after = _load_index(topk_row, batch[0][2], first + 64 + lanes, limit)
    request, end = _bounds(token, first, limit, batch, SCAN)
    table_row = blocks_of(request, table)
    index = gl.where(request >= 0, index, -1)
    block, offset = _load_block(index, table_row, table, BLOCK_SIZE)
    index_after = gl.where(request >= 0, index_after, -1)
    return first, end, topk_row, table_row, index_after, block, offset


# fmt: off
@gluon.jit
def _copy_keys(
    items, batch, table, cache, k_smem, r_smem, k_full, k_empty,
    BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr,
):
    # fmt: on
    """The keys of every tile."""
    # A warp copies 128 bytes of four keys at once: a thread has four keys to find in all.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dims = gl.arange(0, 512, layout=gl.SliceLayout(0, LAYOUT))
    rope_dims = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    # Four chunks in a row are laid out as one tile of 512 dims. Copied one by one, each would wait
    # at a barrier of the group.
    latents = reinterpret(k_smem, k_smem.dtype, [2, 64, 512], gl.NVMMASharedLayout(128, 16, 2))
    lanes = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))

    item = gl.program_id(0)
    tile = 0
    while item < items:
        first, end, topk_row, table_row, index, block, offset = _start_item(
            item, batch, table, lanes, BLOCK_SIZE, SCAN
        )
        for start in range(first, end, 64):
            keys, valid = _places(block, offset, cache)
            keys = gl.expand_dims(keys, 1)
            mask = gl.expand_dims(valid, 1)
            block, offset = _load_block(index, table_row, table, BLOCK_SIZE)
            index = _load_index(topk_row, batch[0][2], start + 128 + lanes, end)

            stage = tile & 1
            mbarrier.wait(k_empty.index(stage), ((tile >> 1) & 1) ^ 1)
            async_load(
                r_smem.index(stage), keys + gl.expand_dims(512 + rope_dims, 0), mask=mask
            )
            async_load(
                latents.index(stage), keys + gl.expand_dims(dims, 0), mask=mask
            )
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            tile += 1
        item += gl.num_programs(0)


# fmt: off
@gluon.jit
def _copy_fp8(
    items, batch, table, cache, k_smem, r_smem, k_full, k_empty,
    BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr,
):
    # fmt: on
    """The same from an fp8 cache: half a tile is on its way while a quarter is decoded."""
    # A thread has the same keys in both layouts.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rope_dims = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    words = gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))
    lanes = gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS))

    item = gl.program_id(0)
    tile = 0
    while item < items:
        first, end, topk_row, table_row, index, block, offset = _start_item(
            item, batch, table, lanes, BLOCK_SIZE, SCAN
        )
        keys, valid = _places(block, offset, cache)
        codes0, scales0 = _load_codes(keys, valid, 0, words)
        codes1, scales1 = _load_codes(keys, valid, 1, words)
        block, offset = _load_block(index, table_row, table, BLOCK_SIZE)
        for start in range(first, end, 64):
            index = _load_index(topk_row, batch[0][2], start + 128 + lanes, end)
            stage = tile & 1
            mbarrier.wait(k_empty.index(stage), ((tile >> 1) & 1) ^ 1)
            rope = gl.convert_layout(keys + 528, gl.SliceLayout(1, LAYOUT), True)
            rope = gl.expand_dims(rope.to(gl.pointer_type(r_smem.dtype)), 1)
            mask = gl.expand_dims(gl.convert_layout(valid, gl.SliceLayout(1, LAYOUT), True), 1)
            async_load(
                r_smem.index(stage), rope + gl.expand_dims(rope_dims, 0), mask=mask
            )
            async_copy.commit_group()
            codes2, scales2 = _load_codes(keys, valid, 2, words)
            _store_keys(k_smem.index(stage * 4), codes0, scales0)
            codes3, scales3 = _load_codes(keys, valid, 3, words)
            _store_keys(k_smem.index(stage * 4 + 1), codes1, scales1)

            keys, valid = _places(block, offset, cache)
            block, offset = _load_block(index, table_row, table, BLOCK_SIZE)
            codes0, scales0 = _load_codes(keys, valid, 0, words)
            _store_keys(k_smem.index(stage * 4 + 2), codes2, scales2)
            codes1, scales1 = _load_codes(keys, valid, 1, words)
            _store_keys(k_smem.index(stage * 4 + 3), codes3, scales3)
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(k_full.index(stage), count=1)
            after, there = _places(block, offset, cache)
            _prefetch(after, there)
            tile += 1
        item += gl.num_programs(0)


# fmt: off
@gluon.jit
def _copy(
    items, batch, table, cache, k_smem, r_smem, k_full, k_empty,
    BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr, FP8: gl.constexpr,
):
    if FP8:
        _copy_fp8(
            items, batch, table, cache, k_smem, r_smem, k_full, k_empty,
            BLOCK_SIZE, SCAN,
        )
    else:
        _copy_keys(
            items, batch, table, cache, k_smem, r_smem, k_full, k_empty,
            BLOCK_SIZE, SCAN,
        )
    # fmt: on


# fmt: off
@gluon.jit
def _score(
    items, batch, table, queries, lse_ptr, scale_log2, q_smem, k_smem, r_smem, decay_smem,
    factor_smem, k_full, p_full, BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr,
):
    # fmt: on
    """The queries of every item; scores, running softmax and weights; the lse."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    HEADS: gl.constexpr = gl.SliceLayout(1, MMA)
    KEYS: gl.constexpr = gl.SliceLayout(0, MMA)
    heads = queries[3]
    lanes = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    zero = gl.full([64, 64], 0.0, gl.float32, layout=MMA)

    item = gl.program_id(0)
    tile = 0
    while item < items:
        group, part, token, first, limit = _place(item, batch)
        # The dots of the item before are done. Whether the token has a request is not known yet.
        _copy_queries(token, group, queries, q_smem)
        request, end = _bounds(token, first, limit, batch, SCAN)
        topk_row = _topk_row(token, batch)
        table_row = blocks_of(request, table)
        index = _load_index(topk_row, batch[0][2], first + lanes, end)
        block, _ = _load_block(index, table_row, table, BLOCK_SIZE)
        index = _load_index(topk_row, batch[0][2], first + 64 + lanes, end)
        highest = gl.full([64], float("-inf"), gl.float32, layout=HEADS)
        total = gl.full([64], 0.0, gl.float32, layout=HEADS)
        async_copy.wait_group(0)
        for start in range(first, end, 64):
            valid = gl.convert_layout(block, KEYS) >= 0
            block, _ = _load_block(index, table_row, table, BLOCK_SIZE)
            index = _load_index(topk_row, batch[0][2], start + 128 + lanes, end)

            stage = tile & 1
            mbarrier.wait(k_full.index(stage), (tile >> 1) & 1)
            fence_async_shared()
            dots = warpgroup_mma(
                q_smem[1], r_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            for c in gl.static_range(4):
                keys = k_smem.index(stage * 4 + c).permute((1, 0))
                dots = warpgroup_mma(q_smem[0].index(c), keys, dots, is_async=True)
            dots = warpgroup_mma_wait(0, deps=[dots])

            scores = gl.where(gl.expand_dims(valid, 0), dots * scale_log2, float("-inf"))
            new_highest = gl.maximum(highest, gl.max(scores, axis=1))
            # -inf - (-inf) is NaN: heads that have met no key subtract 0.
            shift = gl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = gl.exp2(scores - gl.expand_dims(shift, 1))
            decay = gl.exp2(highest - shift)
            highest = new_highest
            total = total * decay + gl.sum(weights, axis=1)
            r_smem.index(stage).store(weights.to(r_smem.dtype))
            decay_smem.index(stage).store(decay)
            # NaN counts as a sum: only a head that met no key has a total of 0.
            factor_smem.index(stage).store(1.0 / gl.where(total == 0.0, 1.0, total))
            fence_async_shared()
            mbarrier.arrive(p_full.index(stage), count=1)
            tile += 1
        empty = total == 0.0
        lse = (highest + gl.log2(gl.where(empty, 1.0, total))) * _LN_2
        head, stored = _heads(group, gl.arange(0, 64, layout=HEADS), heads)
        row_ptr = lse_ptr + part.to(gl.int64) * heads[0] + head
        gl.store(row_ptr, gl.where(empty, float("-inf"), lse), mask=stored)
        item += gl.num_programs(0)


@gluon.jit
def _out_ptrs(rows, latents, group, part, out_ptr, heads):
    """Where the latents of some rows of a program go, and which of them there are."""
    head, stored = _heads(group, rows, heads)
    row = part.to(gl.int64) * heads[0] + head
    ptrs = out_ptr + gl.expand_dims(row * 512, 1) + gl.expand_dims(latents, 0)
    return ptrs, gl.expand_dims(stored, 1)


@gluon.jit
def _store_lines(tile, rows_of_tile, group, part, out_ptr, heads, FIRST: gl.constexpr):
    """Latents FIRST .. FIRST + 127 through shared memory: a warp writes whole lines.

    Few rows at a time: the sums hold the registers.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    latents = FIRST + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    tile.store(rows_of_tile)
    for r in gl.static_range(0, 64, 16):
        rows = r + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
        ptrs, mask = _out_ptrs(rows, latents, group, part, out_ptr, heads)
        values = tile.slice(r, 16, dim=0).load(LAYOUT)
        gl.store(ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)


# fmt: off
@gluon.jit
def _value(
    items, batch, out_ptr, heads, k_smem, r_smem, decay_smem, factor_smem, p_full, k_empty,
    HALF: gl.constexpr, SPLIT: gl.constexpr, SCAN: gl.constexpr, WHOLE_LINES: gl.constexpr,
):
    # fmt: on
    """256 latents of the weighted sum."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    HEADS: gl.constexpr = gl.SliceLayout(1, MMA)
    FIRST: gl.constexpr = HALF * 256
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    # The two chunks of a half are as large as 128 of its sums.
    stages = reinterpret(k_smem, gl.float32, [4, 64, 128], gl.NVMMASharedLayout(128, 32, 2))

    item = gl.program_id(0)
    tile = 0
    while item < items:
        group, part, token, first, limit = _place(item, batch)
        _request, end = _bounds(token, first, limit, batch, SCAN)
        left = gl.full([64, 128], 0.0, gl.float32, layout=MMA)
        right = gl.full([64, 128], 0.0, gl.float32, layout=MMA)
        factor = gl.full([64], 1.0, gl.float32, layout=HEADS)
        for start in range(first, end, 64):
            stage = tile & 1
            mbarrier.wait(p_full.index(stage), (tile >> 1) & 1)
            fence_async_shared()
            decay = gl.expand_dims(decay_smem.index(stage).load(HEADS), 1)
            weights = r_smem.index(stage)
            values = k_smem.index(stage * 4 + 2 * HALF)
            left = warpgroup_mma(weights, values, left * decay, is_async=True)
            values = k_smem.index(stage * 4 + 2 * HALF + 1)
            right = warpgroup_mma(weights, values, right * decay, is_async=True)
            factor = factor_smem.index(stage).load(HEADS)
            left, right = warpgroup_mma_wait(0, deps=[left, right])
            # The buffer of the last tile is kept for the stores.
            if not WHOLE_LINES or start + 64 < end:
                mbarrier.arrive(k_empty.index(stage), count=1)
            tile += 1
        factor = gl.expand_dims(factor, 1)
        # A part without a key is not written: the combination does not read it.
        if WHOLE_LINES and end > first:
            stage = (tile - 1) & 1
            sums = stages.index(stage * 2 + HALF)
            _store_lines(sums, left * factor, group, part, out_ptr, heads, FIRST)
            _store_lines(sums, right * factor, group, part, out_ptr, heads, FIRST + 128)
            mbarrier.arrive(k_empty.index(stage), count=1)
        elif not SPLIT or end > first:
            rows = gl.arange(0, 64, layout=HEADS)
            latents = FIRST + gl.arange(0, 128, layout=gl.SliceLayout(0, MMA))
            ptrs, mask = _out_ptrs(rows, latents, group, part, out_ptr, heads)
            scaled = left * factor
            gl.store(ptrs, scaled.to(dtype), mask=mask)
            scaled = right * factor
            gl.store(ptrs + 128, scaled.to(dtype), mask=mask)
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
    FP8: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr, SPLIT: gl.constexpr,
    WHOLE_LINES: gl.constexpr, VALUE_REGS: gl.constexpr, COPY_REGS: gl.constexpr,
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
    decay_smem = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    factor_smem = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        # Every thread that copies arrives when its copies have.
        mbarrier.init(k_full.index(i), count=1 if FP8 else 128)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(p_full.index(i), count=1)

    q_all = (q_smem, q_rope_smem)
    batch = (
        (topk_indices_ptr, topk_token_stride, topk_stride,
         query_start_loc_ptr, query_start_loc_stride),
        (num_reqs, topk, split_size, num_splits, groups),
    )  # fmt: skip
    table = (block_table_ptr, table_request_stride, (table_stride, max_blocks, num_blocks))
    cache = (kv_cache_ptr, kv_block_stride, kv_token_stride)
    heads = (num_heads, block_h)
    queries = (q_ptr, q_token_stride, q_head_stride, heads)
    gl.warp_specialize(
        [
            (_score, (items, batch, table, queries, lse_ptr, scale_log2, q_all, k_smem, r_smem,
                      decay_smem, factor_smem, k_full, p_full, BLOCK_SIZE, SCAN)),
            (_value, (items, batch, out_ptr, heads, k_smem, r_smem, decay_smem, factor_smem,
                      p_full, k_empty, 0, SPLIT, SCAN, WHOLE_LINES)),
            (_value, (items, batch, out_ptr, heads, k_smem, r_smem, decay_smem, factor_smem,
                      p_full, k_empty, 1, SPLIT, SCAN, WHOLE_LINES)),
            (_copy, (items, batch, table, cache, k_smem, r_smem, k_full, k_empty,
                     BLOCK_SIZE, SCAN, FP8)),
        ],
        [4, 4, 4],
        [VALUE_REGS, VALUE_REGS, COPY_REGS],
    )  # fmt: skip


def supports(q: Tensor, kv_cache: Tensor, latent_dim: int) -> bool:
    """Whether the kernel takes these; otherwise ``sparse_mla_decode_kernel`` has to."""
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] != LATENT_DIM + ROPE_DIM:
        return False
    fp8 = kv_cache.dtype == torch.uint8
    if fp8 and (q.dtype != torch.bfloat16 or q.shape[1] < MIN_HEADS_OF_FP8):
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
    scale: float, split_size: int, num_splits: int, num_programs: int,
) -> int:  # fmt: skip
    """Write ``out`` and ``lse``, final or of the parts, with at most ``num_programs`` programs.

    Returns the number of them.
    """
    num_tokens, num_heads, _ = q.shape
    num_blocks, block_size, _ = kv_cache.shape
    num_reqs, max_blocks = block_table.shape
    block_h = heads_of_program(num_tokens * num_splits, num_heads, num_programs)
    groups = triton.cdiv(num_heads, block_h)
    items = num_tokens * num_splits * groups
    programs = min(items, num_programs)
    fp8 = kv_cache.dtype == torch.uint8
    value_regs, copy_regs = (160, 104) if fp8 else (160, 88)
    sparse_mla_decode_hopper_kernel[(programs,)](
        q, kv_cache, topk_indices, block_table, query_start_loc,
        out, lse,
        scale * math.log2(math.e),
        items, num_reqs, num_heads, num_blocks, max_blocks,
        topk_indices.shape[1], split_size, num_splits, groups, block_h,
        q.stride(0), q.stride(1), kv_cache.stride(0), kv_cache.stride(1),
        *topk_indices.stride(), *block_table.stride(), query_start_loc.stride(0),
        FP8=fp8, BLOCK_SIZE=block_size, SCAN=scan(split_size, items, num_programs),
        SPLIT=num_splits > 1, WHOLE_LINES=block_h == BLOCK_H and num_tokens >= MIN_TOKENS_OF_LINES,
        VALUE_REGS=value_regs, COPY_REGS=copy_regs,
        num_warps=4, maxnreg=128,
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
