"""The copies of sparse MLA decode on compute capability 9.0: queries, and tiles of 64 keys in bf16.

A ``table`` is the block table, its strides, and how many blocks a request and the cache have; a
``cache`` the pool of keys with the strides of its blocks and tokens. ``tiles`` are the buffers of
two: latents, rotary parts, and which keys there are, or of which tokens of a group; ``bars`` say
that one is full, or empty again. Others are as in ``_hopper_mla_items``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ._hopper import async_load, blocks_of, reinterpret
from ._hopper_mla_items import bounds, heads_of_rows, load_index, place, topk_row_of
from ._shared_keys import POSITION_BITS

# The position of an entry; its tokens are behind it.
_POSITION = gl.constexpr((1 << POSITION_BITS.value) - 1)


@gluon.jit
def load_block(index, table_row, table, BLOCK_SIZE: gl.constexpr, TOKENS: gl.constexpr):
    """The block of each key as the table has it, and the offset in it; with the tokens of an entry.

    A look at a block waits for it: ``places_of`` is for when it is needed, a tile later.
    """
    stride, max_blocks, _num_blocks = table[2]
    if TOKENS > 0:
        tokens = index & ~_POSITION
        index = gl.where(tokens != 0, index & _POSITION, -1)
    column = index // BLOCK_SIZE
    known = (index >= 0) & (column < max_blocks)
    block = gl.load(table_row + column.to(gl.int64) * stride, mask=known, other=-1)
    offset = index % BLOCK_SIZE
    if TOKENS > 0:
        offset |= tokens
    return block, offset


@gluon.jit
def places_of(block, offset, cache, table, TOKENS: gl.constexpr):
    """Where keys are, which of them there are, and whose they are (TOKENS)."""
    num_blocks = table[2][2]
    start = block.to(gl.int64) * cache[1]
    position = offset
    if TOKENS > 0:
        position &= _POSITION
    places = cache[0] + (start + position.to(gl.int64) * cache[2])
    valid = (block >= 0) & (block < num_blocks)
    tokens = offset >> POSITION_BITS if TOKENS > 0 else valid
    return places, valid, tokens


@gluon.jit
def there_of(valid, tokens, TOKENS: gl.constexpr):
    """Which keys there are, as ``tiles`` have it."""
    return (gl.where(valid, tokens, 0) if TOKENS > 0 else valid).to(gl.int8)


@gluon.jit
def copy_queries(token, share, queries, smem, TOKENS: gl.constexpr):
    q_ptr, token_stride, head_stride, heads = queries
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dims = gl.arange(0, 512, layout=gl.SliceLayout(0, LAYOUT))
    rope_dims = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    later, head, stored = heads_of_rows(share, row, heads, TOKENS)
    row_ptr = q_ptr + token.to(gl.int64) * token_stride
    if TOKENS > 0:
        row_ptr += later.to(gl.int64) * token_stride
    rows = gl.expand_dims(row_ptr + head.to(gl.int64) * head_stride, 1)
    mask = gl.expand_dims(stored, 1)
    latents = reinterpret(smem[0], smem[0].dtype, [64, 512], gl.NVMMASharedLayout(128, 16, 2))
    async_load(latents, rows + gl.expand_dims(dims, 0), mask=mask)
    async_load(smem[1], rows + gl.expand_dims(512 + rope_dims, 0), mask=mask)


@gluon.jit
def start_item(
    item, batch, table, lanes,
    STEP: gl.constexpr, BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Where an item begins, ends, and ends at most; the blocks of its first ``lanes``, and the
    indices of those STEP further.

    Of a token with a request, no index between end and limit is that of a key; without one the end
    is the beginning, and whatever its indices are, no tile is walked.
    """
    _share, _part, _token, row, first, limit = place(item, batch, TOKENS)
    topk_row = topk_row_of(row, batch)
    # Before the end is known: there is no index between it and the limit.
    index = load_index(topk_row, batch[0][2], first + lanes, limit, TOKENS)
    index_after = load_index(topk_row, batch[0][2], first + STEP + lanes, limit, TOKENS)
    request, end = bounds(row, first, limit, batch, SCAN, TOKENS)
    table_row = blocks_of(request, table)
    if TOKENS == 0:
        index = gl.where(request >= 0, index, -1)
    block, offset = load_block(index, table_row, table, BLOCK_SIZE, TOKENS)
    if TOKENS == 0:
        index_after = gl.where(request >= 0, index_after, -1)
    return first, end, limit, topk_row, table_row, index_after, block, offset


@gluon.jit
def copy_keys(
    items, batch, table, cache, tiles, bars,
    BLOCK_SIZE: gl.constexpr, SCAN: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
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
        first, end, limit, topk_row, table_row, index, block, offset = start_item(
            item, batch, table, lanes, 32, BLOCK_SIZE, SCAN, TOKENS
        )
        next_block, next_offset = load_block(index, table_row, table, BLOCK_SIZE, TOKENS)
        index = load_index(topk_row, batch[0][2], first + 64 + lanes, limit, TOKENS)
        for start in range(first, end, 64):
            stage = tile & 1
            for half in gl.static_range(2):
                keys, valid, tokens = places_of(block, offset, cache, table, TOKENS)
                keys = gl.expand_dims(keys, 1)
                mask = gl.expand_dims(valid, 1)
                block, offset = next_block, next_offset
                next_block, next_offset = load_block(index, table_row, table, BLOCK_SIZE, TOKENS)
                columns = start + 32 * half + 96 + lanes
                index = load_index(topk_row, batch[0][2], columns, limit, TOKENS)

                if half == 0:
                    mbarrier.wait(k_empty.index(stage), ((tile >> 1) & 1) ^ 1)
                rope = r_smem.index(stage).slice(32 * half, 32)
                async_load(rope, keys + gl.expand_dims(512 + rope_dims, 0), mask=mask)
                latents = k_latents.index(stage).slice(32 * half, 32)
                async_load(latents, keys + gl.expand_dims(dims, 0), mask=mask)
                async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
                there = there_of(valid, tokens, TOKENS)
                there_smem.index(stage).slice(32 * half, 32).store(there)
            mbarrier.arrive(k_full.index(stage), count=1)
            tile += 1
        item += gl.num_programs(0)
