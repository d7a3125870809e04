"""The copies of sparse MLA decode on compute capability 9.0: queries, and tiles of 64 keys.

A ``table`` is the block table, its strides, and how many blocks a request and the cache have; a
``cache`` the pool of keys with the strides of its blocks and tokens. ``tiles`` are the buffers of
two: latents, rotary parts, and which keys there are; ``bars`` say that one is full, or empty again.
Others are as in ``_hopper_mla_items``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ._hopper import async_load, blocks_of, prefetch, reinterpret
from ._hopper_mla_items import bounds, heads_of_rows, load_index, place, topk_row_of


@gluon.jit
def _load_block(index, table_row, table, BLOCK_SIZE: gl.constexpr):
    """The block of each key as the table has it, and the offset in it.

    A look at a block waits for it: ``_places`` is for when it is needed, a tile later.
    """
    stride, max_blocks, _num_blocks = table[2]
    column = index // BLOCK_SIZE
    known = (index >= 0) & (column < max_blocks)
    block = gl.load(table_row + column.to(gl.int64) * stride, mask=known, other=-1)
    return block, index % BLOCK_SIZE


@gluon.jit
def _places(block, offset, cache, table):
    """Where keys are, and which of them there are."""
    num_blocks = table[2][2]
    start = block.to(gl.int64) * cache[1]
    places = cache[0] + (start + offset.to(gl.int64) * cache[2])
    return places, (block >= 0) & (block < num_blocks)


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
def copy_queries(token, group, queries, smem):
    q_ptr, token_stride, head_stride, heads = queries
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dims = gl.arange(0, 512, layout=gl.SliceLayout(0, LAYOUT))
    rope_dims = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    head, stored = heads_of_rows(group, gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), heads)
    row_ptr = q_ptr + token.to(gl.int64) * token_stride
    rows = gl.expand_dims(row_ptr + head.to(gl.int64) * head_stride, 1)
    mask = gl.expand_dims(stored, 1)
    latents = reinterpret(smem[0], smem[0].dtype, [64, 512], gl.NVMMASharedLayout(128, 16, 2))
    async_load(latents, rows + gl.expand_dims(dims, 0), mask=mask)
    async_load(smem[1], rows + gl.expand_dims(512 + rope_dims, 0), mask=mask)
    async_copy.commit_group()


@gluon.jit
def _start_item(item, batch, table, lanes, BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr):
    """Where an item begins, ends, and ends at most; the blocks of its first ``lanes``, the indices of
    the next ones. Between its end and the limit all indices are -1."""
    _group, _part, token, first, limit = place(item, batch)
    topk_row = topk_row_of(token, batch)
    # Before the end is known: there is no index between it and the limit.
    index = load_index(topk_row, batch[0][2], first + lanes, limit)
    index_after = load_index(topk_row, batch[0][2], first + lanes.shape[0] + lanes, limit)
    request, end = bounds(token, first, limit, batch, SCAN)
    table_row = blocks_of(request, table)
    index = gl.where(request >= 0, index, -1)
    block, offset = _load_block(index, table_row, table, BLOCK_SIZE)
    index_after = gl.where(request >= 0, index_after, -1)
    return first, end, limit, topk_row, table_row, index_after, block, offset


@gluon.jit
def _copy_keys(
    items, batch, table, cache, tiles, bars, BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr
):
    """The keys of every tile, 32 at a time: the first ones are soon found. Indices are three steps
    ahead of the copies, blocks two."""
    k_smem, r_smem, there_smem = tiles
    k_full, k_empty = bars
    # A warp copies 128 bytes of four keys at once: a thread has two keys to find at a time.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dims = gl.arange(0, 512, layout=gl.SliceLayout(0, LAYOUT))
    rope_dims = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    # Four chunks in a row are laid out as one tile of 512 dims. Copied one by one, each would wait
    # at a barrier of the group.
    k_latents = reinterpret(k_smem, k_smem.dtype, [2, 64, 512], gl.NVMMASharedLayout(128, 16, 2))
    lanes = gl.arange(0, 32, layout=gl.SliceLayout(1, LAYOUT))

    item = gl.program_id(0)
    tile = 0
    while item < items:
        first, end, limit, topk_row, table_row, index, block, offset = _start_item(
            item, batch, table, lanes, BLOCK_SIZE, SCAN
        )
        next_block, next_offset = _load_block(index, table_row, table, BLOCK_SIZE)
        index = load_index(topk_row, batch[0][2], first + 64 + lanes, limit)
        for start in range(first, end, 64):
            stage = tile & 1
            for half in gl.static_range(2):
                keys, valid = _places(block, offset, cache, table)
                keys = gl.expand_dims(keys, 1)
                mask = gl.expand_dims(valid, 1)
                block, offset = next_block, next_offset
                next_block, next_offset = _load_block(index, table_row, table, BLOCK_SIZE)
                index = load_index(topk_row, batch[0][2], start + 32 * half + 96 + lanes, limit)

                if half == 0:
                    mbarrier.wait(k_empty.index(stage), ((tile >> 1) & 1) ^ 1)
                rope = r_smem.index(stage).slice(32 * half, 32)
                async_load(rope, keys + gl.expand_dims(512 + rope_dims, 0), mask=mask)
                latents = k_latents.index(stage).slice(32 * half, 32)
                async_load(latents, keys + gl.expand_dims(dims, 0), mask=mask)
                async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
                there_smem.index(stage).slice(32 * half, 32).store(valid.to(gl.int8))
            mbarrier.arrive(k_full.index(stage), count=1)
            tile += 1
        item += gl.num_programs(0)


@gluon.jit
def _copy_fp8(
    items, batch, table, cache, tiles, bars, BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr
):
    """The keys of every tile from an fp8 cache, 64 at a time: half of them are on their way while
    the first quarter is decoded, a quarter while the second is."""
    k_smem, r_smem, there_smem = tiles
    k_full, k_empty = bars
    # A thread has the same keys in both layouts.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rope_dims = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    words = gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))
    lanes = gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS))

    item = gl.program_id(0)
    tile = 0
    while item < items:
        first, end, limit, topk_row, table_row, index, block, offset = _start_item(
            item, batch, table, lanes, BLOCK_SIZE, SCAN
        )
        keys, valid = _places(block, offset, cache, table)
        codes0, scales0 = _load_codes(keys, valid, 0, words)
        codes1, scales1 = _load_codes(keys, valid, 1, words)
        block, offset = _load_block(index, table_row, table, BLOCK_SIZE)
        for start in range(first, end, 64):
            index = load_index(topk_row, batch[0][2], start + 128 + lanes, limit)
            stage = tile & 1
            mbarrier.wait(k_empty.index(stage), ((tile >> 1) & 1) ^ 1)
            there_smem.index(stage).store(valid.to(gl.int8))
            rope = gl.convert_layout(keys + 528, gl.SliceLayout(1, LAYOUT), True)
            rope = gl.expand_dims(rope.to(gl.pointer_type(r_smem.dtype)), 1)
            mask = gl.expand_dims(gl.convert_layout(valid, gl.SliceLayout(1, LAYOUT), True), 1)
            async_load(r_smem.index(stage), rope + gl.expand_dims(rope_dims, 0), mask=mask)
            async_copy.commit_group()
            codes2, scales2 = _load_codes(keys, valid, 2, words)
            _store_keys(k_smem.index(stage * 4), codes0, scales0)
            codes3, scales3 = _load_codes(keys, valid, 3, words)
            _store_keys(k_smem.index(stage * 4 + 1), codes1, scales1)

            keys, valid = _places(block, offset, cache, table)
            block, offset = _load_block(index, table_row, table, BLOCK_SIZE)
            _store_keys(k_smem.index(stage * 4 + 2), codes2, scales2)
            _store_keys(k_smem.index(stage * 4 + 3), codes3, scales3)
            async_copy.wait_group(0)
            # It waits for loads that are under way: the next ones come after it.
            fence_async_shared()
            mbarrier.arrive(k_full.index(stage), count=1)
            codes0, scales0 = _load_codes(keys, valid, 0, words)
            codes1, scales1 = _load_codes(keys, valid, 1, words)
            after, there = _places(block, offset, cache, table)
            _prefetch(after, there)
            tile += 1
        item += gl.num_programs(0)


@gluon.jit
def copy_tiles(
    items, batch, table, cache, tiles, bars,
    BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    if FP8:
        _copy_fp8(items, batch, table, cache, tiles, bars, BLOCK_SIZE, SCAN)
    else:
        _copy_keys(items, batch, table, cache, tiles, bars, BLOCK_SIZE, SCAN)
