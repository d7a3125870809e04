"""The copies of sparse MLA decode from an fp8 cache on compute capability 9.0: two groups of warps,
each of which decodes half of the keys of every tile. Names are those of ``_hopper_mla_copies``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ._hopper import async_load, prefetch, reinterpret
from ._hopper_mla_copies import copy_queries, load_block, places_of, start_item, there_of
from ._hopper_mla_items import load_index, place


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
def _store_keys(smem, FIRST: gl.constexpr, codes, scales):
    """``codes`` times ``scales`` as bf16, from key FIRST of a tile of 64 keys and 128 dims on."""
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
    pairs = gl.reshape(gl.join(low, high), [32, 64])
    pairs_smem = reinterpret(smem, gl.int32, [64, 64], gl.NVMMASharedLayout(128, 32, 2))
    pairs_smem.slice(FIRST, 32).store(pairs)


@gluon.jit
def _copy_rope(smem, keys, valid):
    """The rotary parts of some keys, which are bf16."""
    # A thread has the same keys as in the layout of the codes.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dims = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    rope = gl.convert_layout(keys + 528, gl.SliceLayout(1, LAYOUT), True)
    rope = gl.expand_dims(rope.to(gl.pointer_type(smem.dtype)), 1)
    mask = gl.expand_dims(gl.convert_layout(valid, gl.SliceLayout(1, LAYOUT), True), 1)
    async_load(smem, rope + gl.expand_dims(dims, 0), mask=mask)
    async_copy.commit_group()


@gluon.jit
def copy_fp8(
    items, batch, queries, table, cache, tiles, bars,
    HALF: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """32 keys of every tile: the codes of the next 128 dims are on their way while others are
    decoded. The second group copies the queries of each item as well."""
    k_smem, r_smem, there_smem = tiles
    k_full, k_empty, q_full, q_empty = bars
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    FIRST: gl.constexpr = HALF * 32
    words = gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))
    lanes = FIRST + gl.arange(0, 32, layout=gl.SliceLayout(1, WORDS))

    item = gl.program_id(0)
    items_done = 0
    tile = 0
    while item < items:
        if HALF == 1:
            share, _part, token, _row, _first, _limit = place(item, batch, TOKENS)
            # No dot of the item before needs them.
            mbarrier.wait(q_empty, (items_done & 1) ^ 1)
            copy_queries(token, share, queries[0], queries[1], TOKENS)
            async_copy.mbarrier_arrive(q_full, increment_count=False)
        first, end, limit, topk_row, table_row, index, block, offset = start_item(
            item, batch, table, lanes, 64, BLOCK_SIZE, SCAN, TOKENS
        )
        keys, valid, tokens = places_of(block, offset, cache, table, TOKENS)
        codes, scales = _load_codes(keys, valid, 0, words)
        block, offset = load_block(index, table_row, table, BLOCK_SIZE, TOKENS)
        index = load_index(topk_row, batch[0][2], first + 128 + lanes, limit, TOKENS)
        for start in range(first, end, 64):
            stage = tile & 1
            next_keys, next_valid, next_tokens = places_of(block, offset, cache, table, TOKENS)
            _prefetch(next_keys, next_valid)
            block, offset = load_block(index, table_row, table, BLOCK_SIZE, TOKENS)
            index = load_index(topk_row, batch[0][2], start + 192 + lanes, limit, TOKENS)

            mbarrier.wait(k_empty.index(stage), ((tile >> 1) & 1) ^ 1)
            there_smem.index(stage).slice(FIRST, 32).store(there_of(valid, tokens, TOKENS))
            _copy_rope(r_smem.index(stage).slice(FIRST, 32), keys, valid)
            for c in gl.static_range(3):
                next_codes, next_scales = _load_codes(keys, valid, c + 1, words)
                _store_keys(k_smem.index(stage * 4 + c), FIRST, codes, scales)
                codes, scales = next_codes, next_scales
            _store_keys(k_smem.index(stage * 4 + 3), FIRST, codes, scales)
            async_copy.wait_group(0)
            # It waits for loads that are under way: the next ones come after it.
            fence_async_shared()
            mbarrier.arrive(k_full.index(stage), count=1)
            keys, valid, tokens = next_keys, next_valid, next_tokens
            codes, scales = _load_codes(keys, valid, 0, words)
            tile += 1
        items_done += 1
        item += gl.num_programs(0)
