"""Reading the index-key cache: fp8 codes and their scales, paged, in one uint8 pool.

    k_cache   [num_blocks, block_size * (head_dim + 4)]; a block: the e4m3 codes of its keys, one
              after the other, then one fp32 scale each
    key[i]  = codes[i] * scale[i]

The pointer is one to float8_e4m3fn where the card has the type, and to bytes elsewhere.
"""

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(codes, dtype: tl.constexpr):
    """The numbers of e4m3 codes or, where the card has no such type, of their bytes, exactly."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.int32)
        # The exponent of an fp16 has one bit more, and a bias that is larger by 8.
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        codes = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return codes.to(dtype)


@triton.jit
def load_blocks(
    table_row, table_stride, tile, tokens, keys, num_blocks,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """The block of each token of a tile, -1 where it is outside the pool or past ``keys``."""
    first = tile * TILE
    if PAGES == 0:
        positions = first + tokens
        columns = (positions // BLOCK_SIZE).to(tl.int64)
        blocks = tl.load(table_row + columns * table_stride, mask=positions < keys, other=-1)
    else:
        # A few scalars: a gather would have to change its layout before it can address the keys.
        column = table_row + (first // BLOCK_SIZE).to(tl.int64) * table_stride
        blocks = tl.load(column, mask=first < keys, other=-1) + tl.zeros_like(tokens)
        for page in tl.static_range(1, PAGES):
            column += table_stride
            block = tl.load(column, mask=first + page * BLOCK_SIZE < keys, other=-1)
            blocks = tl.where(tokens >= page * BLOCK_SIZE, block, blocks)
    return tl.where((blocks >= 0) & (blocks < num_blocks), blocks, -1)


@triton.jit
def load_codes(
    k_cache_ptr, blocks, places, dims, block_stride, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr
):
    """e4m3 bytes of the tokens at ``places`` of ``blocks``, 0 where there is no block."""
    row_ptr = k_cache_ptr + blocks.to(tl.int64) * block_stride + places * HEAD_DIM
    mask = (blocks >= 0)[:, None]
    if PADDED:
        mask = mask & (dims < HEAD_DIM)[None, :]
    return tl.load(row_ptr[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def load_scales(
    k_cache_ptr, blocks, places, block_stride, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    offsets = blocks.to(tl.int64) * block_stride + BLOCK_SIZE * HEAD_DIM + places * 4
    scale_ptr = (k_cache_ptr + offsets).to(tl.pointer_type(tl.float32))
    return tl.load(scale_ptr, mask=blocks >= 0, other=0.0)
