"""Scores of the lightning indexer over a paged fp8 key cache, ragged, each key read once a request.

    logits[t, s] = scale[s] * sum_h weights[t, h] * relu(q[t, h] . codes[s])   s < row_len(t)
    logits[t, s] = -inf                                                        otherwise
    row_len      = max(0, seq_len - query_len + j + 1)       token j of its request

The sum over heads is fp32. Scores are multiplied by the key's scale last: a NaN key scores NaN
whatever the weights.

Layout:
    q                [num_tokens, num_heads, head_dim] e4m3, bf16, fp16 or fp32; any strides
    weights          [num_tokens, num_heads] fp32       any strides
    k_cache          [num_blocks, block_size * (head_dim + 4)] uint8; codes, then fp32 scales; any
                     block stride
    block_table      [num_reqs, max_blocks] int32       any strides
    query_start_loc  [num_reqs + 1] int32               any stride
    seq_lens         [num_reqs] int32                   any stride
    logits           [num_tokens, max_seq_len] fp32 or bf16, rounded to nearest; last dim contiguous
    row_lens         [num_tokens] int32                 written for ``indexer_select`` alone

Grid (programs,): the tiles of TILE keys of all requests, one after the other, are cut into runs of
equal work, a run per program; a program finds its run in the lengths, so nothing is planned on the
host. It holds the queries of up to MAX_ROWS rows of the request, goes through the tiles of its run,
and scores each for all of them; the columns behind the tiles are shared out likewise. How a row is
computed depends on neither its batch nor the program it falls to.

fp8 queries are multiplied in fp8 where the card can and the head dim is a multiple of 64. Tensor
cores of compute capability 8.9 and 9.0 then keep about 13 bits behind the largest of 32 products.
All other dots are of exact products in fp32: codes fit into fp16 and bf16, and an fp32 query is the
sum of three bf16 numbers.

Cards of compute capability 9.0 have a kernel of their own for the shapes of the large models:
``_indexer_logits_hopper``. Which of the two runs depends on dtypes, sizes of the model, strides
and alignment, never on the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _indexer_logits_hopper
from ._common import INTERPRETED, capability, num_sms
from ._index_cache import decode_e4m3, load_blocks, load_codes, load_scales
from ._runs import find_run, request_rows, tile_work

# Plain defaults.
TILE = 128
MAX_BLOCK_H = 64
MAX_BLOCK_D = 128
BLOCK_REQUESTS = 256
BLOCK_COLUMNS = 1024
SPAN = 8
MAX_ROWS = 8
FEW_ROWS = 4
L2_BYTES = 50 << 20
MAX_HOISTED_BYTES = 64 << 10
NUM_WARPS = 8
MAX_REGISTERS = 128
PROGRAMS_PER_SM = 2


@triton.jit
def add_dots(keys, q, dots):
    """``dots + keys @ q.T``, with ``q`` taken to the dtype of ``keys``."""
    if q.dtype == tl.float32 and keys.dtype == tl.bfloat16:
        high = q.to(tl.bfloat16)
        rest = q - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        dots = tl.dot(keys, tl.trans(low), dots)
        dots = tl.dot(keys, tl.trans(middle), dots)
        dots = tl.dot(keys, tl.trans(high), dots)
    else:
        q = decode_e4m3(q, keys.dtype)
        dots = tl.dot(keys, tl.trans(q), dots, input_precision="ieee")
    return dots


@triton.jit
def weigh(dots, weights, dtype: tl.constexpr):
    """``sum_h weights[h] * relu(dots[:, h])``, with the relu of a NaN a NaN."""
    if dtype == tl.float8e4nv:
        # Twice the relu: an addition is twice as fast as a maximum. No such dot is infinite.
        dots = dots + tl.abs(dots)
        weights = weights * 0.5
    else:
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(dots * weights[None, :], axis=1)


@triton.jit
def store_scores(row_ptr, positions, scores, scales, blocks, row_len, max_seq_len):
    seen = (positions < row_len) & (blocks >= 0)
    scores = tl.where(seen, scores * scales, float("-inf"))
    tl.store(row_ptr + positions, scores, mask=positions < max_seq_len)


@triton.jit
def load_queries(
    q_ptr, row, heads, dims, token_stride, head_stride, dim_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row_ptr = q_ptr + row.to(tl.int64) * token_stride
    offsets = heads.to(tl.int64)[:, None] * head_stride + dims.to(tl.int64)[None, :] * dim_stride
    if PADDED:
        mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        return tl.load(row_ptr + offsets, mask=mask, other=0.0)
    return tl.load(row_ptr + offsets)


# fmt: off
@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "num_blocks", "min_keys"])
def indexer_logits_kernel(
    q_ptr, weights_ptr, k_cache_ptr, block_table_ptr, query_start_loc_ptr, seq_lens_ptr,
    logits_ptr, row_lens_ptr,
    num_tokens, num_reqs, num_blocks, max_seq_len, min_keys,
    q_token_stride, q_head_stride, q_dim_stride, weights_token_stride, weights_head_stride,
    block_stride, table_request_stride, table_stride, query_start_loc_stride, seq_lens_stride,
    logits_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, PAGES: tl.constexpr,
    DTYPE: tl.constexpr, HOIST: tl.constexpr, MAX_ROWS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):
    # fmt: on
    programs = tl.num_programs(0)
    request, passed, begin, end = find_run(
        query_start_loc_ptr, seq_lens_ptr, num_tokens, num_reqs, max_seq_len, min_keys,
        query_start_loc_stride, seq_lens_stride, TILE, BLOCK_REQUESTS,
    )  # fmt: skip
    while (passed < end) & (request < num_reqs):
        start, stop, seq_len, tiles = request_rows(
            request, query_start_loc_ptr, seq_lens_ptr, num_tokens, num_reqs, max_seq_len,
            min_keys, query_start_loc_stride, seq_lens_stride, TILE,
        )  # fmt: skip
        work = tile_work(start, stop)
        # A tile belongs to the program in whose run its work begins.
        first_tile = tl.maximum(tl.cdiv(begin - passed, work), 0).to(tl.int32)
        last_tile = tl.minimum(tl.cdiv(end - passed, work), tiles).to(tl.int32)
        table_row = block_table_ptr + request.to(tl.int64) * table_request_stride
        num_keys = tl.minimum(seq_len, max_seq_len)
        # More rows than fit: a few tiles for all rows, then the next, while those are in the L2.
        span = tl.where(stop - start <= MAX_ROWS, tl.maximum(last_tile - first_tile, 1), SPAN)
        for span_offset in range(0, last_tile - first_tile, span):
            first = first_tile + span_offset
            last = tl.minimum(first + span, last_tile)
            for row_offset in range(0, stop - start, MAX_ROWS):
                row = start + row_offset
                for rows in tl.static_range(1, MAX_ROWS + 1):
                    if tl.minimum(stop - row, MAX_ROWS) == rows:
                        score_tiles(
                            q_ptr, weights_ptr, k_cache_ptr, table_row, logits_ptr,
                            row, seq_len - stop + row + 1, first, last, num_keys,
                            num_blocks, max_seq_len,
                            q_token_stride, q_head_stride, q_dim_stride,
                            weights_token_stride, weights_head_stride,
                            block_stride, table_stride, logits_stride,
                            NUM_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, BLOCK_H, BLOCK_D, PAGES,
                            DTYPE, HOIST, rows,
                        )  # fmt: skip
        passed += tiles * work
        request += 1

    spans = tl.cdiv(max_seq_len, BLOCK_COLUMNS) if row_lens_ptr is None else 1
    for item in range(tl.program_id(0), (num_reqs + 2) * spans, programs):
        start, stop, seq_len, tiles = request_rows(
            item % (num_reqs + 2), query_start_loc_ptr, seq_lens_ptr, num_tokens, num_reqs,
            max_seq_len, min_keys, query_start_loc_stride, seq_lens_stride, TILE,
        )  # fmt: skip
        if row_lens_ptr is None:
            columns = item // (num_reqs + 2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
            mask = (columns >= tiles * TILE) & (columns < max_seq_len)
            nothing = tl.full([BLOCK_COLUMNS], float("-inf"), tl.float32)
            if item // (num_reqs + 2) * BLOCK_COLUMNS + BLOCK_COLUMNS > tiles * TILE:
                for index in range(0, stop - start):
                    row_ptr = logits_ptr + (start + index).to(tl.int64) * logits_stride
                    tl.store(row_ptr + columns, nothing, mask=mask)
        else:
            for first in range(start, stop, BLOCK_REQUESTS):
                rows = first + tl.arange(0, BLOCK_REQUESTS)
                row_lens = tl.maximum(seq_len - stop + rows + 1, 0)
                tl.store(row_lens_ptr + rows, row_lens, mask=rows < stop)


@triton.jit
def load_weights(
    weights_ptr, row, heads, token_stride, head_stride, NUM_HEADS: tl.constexpr
):
    row_ptr = weights_ptr + row.to(tl.int64) * token_stride
    return tl.load(row_ptr + heads.to(tl.int64) * head_stride, mask=heads < NUM_HEADS, other=0.0)


@triton.jit
def score_tiles(
    q_ptr, weights_ptr, k_cache_ptr, table_row, logits_ptr,
    start, first_len, first_tile, last_tile, num_keys, num_blocks, max_seq_len,
    q_token_stride, q_head_stride, q_dim_stride, weights_token_stride, weights_head_stride,
    block_stride, table_stride, logits_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, PAGES: tl.constexpr,
    DTYPE: tl.constexpr, HOIST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Tiles ``first_tile .. last_tile - 1`` of a request, for ROWS rows from ``start`` on, of which
    the first sees ``first_len`` keys and each other one more than the one before.

    The compiler pipelines the loads of the keys. With HOIST the queries of all rows stay in shared
    memory, otherwise they are loaded with every tile.
    """
    HEAD_CHUNKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H if NUM_HEADS > 0 else 1
    DIM_CHUNKS: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    PADDED_D: tl.constexpr = DIM_CHUNKS * BLOCK_D != HEAD_DIM
    PADDED_Q: tl.constexpr = PADDED_D or HEAD_CHUNKS * BLOCK_H != NUM_HEADS
    tokens = tl.arange(0, TILE)
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    # No block is looked up that no key needs, or that another run scores.
    keys_end = tl.minimum(num_keys, last_tile * TILE)
    queries = ()
    if HOIST:
        for part in tl.static_range(ROWS * HEAD_CHUNKS):
            queries = queries + (  # noqa: RUF005
                load_queries(
                    q_ptr, start + part // HEAD_CHUNKS, part % HEAD_CHUNKS * BLOCK_H + heads, dims,
                    q_token_stride, q_head_stride, q_dim_stride, NUM_HEADS, HEAD_DIM, PADDED_Q,
                ),
            )  # fmt: skip

    # Blocks and scales one tile ahead, so that no load of keys waits for its address.
    blocks = load_blocks(
        table_row, table_stride, first_tile, tokens, keys_end, num_blocks, BLOCK_SIZE, TILE, PAGES
    )
    places = (first_tile * TILE + tokens) % BLOCK_SIZE
    scales = load_scales(k_cache_ptr, blocks, places, block_stride, BLOCK_SIZE, HEAD_DIM)
    for tile_index in range(0, last_tile - first_tile):
        tile = first_tile + tile_index
        places = (tile * TILE + tokens) % BLOCK_SIZE
        codes = load_codes(k_cache_ptr, blocks, places, dims, block_stride, HEAD_DIM, PADDED_D)
        next_blocks = load_blocks(
            table_row, table_stride, tile + 1, tokens, keys_end, num_blocks, BLOCK_SIZE, TILE, PAGES
        )
        next_places = ((tile + 1) * TILE + tokens) % BLOCK_SIZE
        next_scales = load_scales(
            k_cache_ptr, next_blocks, next_places, block_stride, BLOCK_SIZE, HEAD_DIM
        )
        keys = decode_e4m3(codes, DTYPE)
        for row in tl.static_range(ROWS):
            scores = tl.zeros([TILE], tl.float32)
            for chunk in tl.static_range(HEAD_CHUNKS):
                weights = load_weights(
                    weights_ptr, start + row, chunk * BLOCK_H + heads,
                    weights_token_stride, weights_head_stride, NUM_HEADS,
                )  # fmt: skip
                dots = tl.zeros([TILE, BLOCK_H], tl.float32)
                for part in tl.static_range(DIM_CHUNKS):
                    if part == 0:
                        part_keys = keys
                    else:
                        part_codes = load_codes(
                            k_cache_ptr, blocks, places, part * BLOCK_D + dims,
                            block_stride, HEAD_DIM, PADDED_D,
                        )  # fmt: skip
                        part_keys = decode_e4m3(part_codes, DTYPE)
                    if HOIST and part == 0:
                        part_q = queries[row * HEAD_CHUNKS + chunk]
                    else:
                        part_q = load_queries(
                            q_ptr, start + row, chunk * BLOCK_H + heads, part * BLOCK_D + dims,
                            q_token_stride, q_head_stride, q_dim_stride,
                            NUM_HEADS, HEAD_DIM, PADDED_Q,
                        )  # fmt: skip
                    dots = add_dots(part_keys, part_q, dots)
                scores += weigh(dots, weights, DTYPE)
            store_scores(
                logits_ptr + (start + row).to(tl.int64) * logits_stride, tile * TILE + tokens,
                scores, scales, blocks, first_len + row, max_seq_len,
            )  # fmt: skip
        blocks, scales = next_blocks, next_scales


def launch(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    logits = weights.new_empty(q.shape[0], max_seq_len, dtype=logits_dtype)
    score_keys(
        q, weights, k_cache, block_table, query_start_loc, seq_lens, max_seq_len, logits, None, 0
    )
    return logits


def score_keys(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    logits: Tensor,
    row_lens: Tensor | None,
    min_keys: int,
) -> None:
    """The launch, which ``indexer_select`` shares.

    With ``row_lens`` it writes those, and leaves ``logits`` as they are past a request's keys and
    in requests of up to ``min_keys`` keys.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_reqs = seq_lens.shape[0]
    if num_tokens == 0:
        return
    batch = (block_table, query_start_loc, seq_lens)
    if not INTERPRETED and _indexer_logits_hopper.supports(
        q, weights, k_cache, *batch, max_seq_len
    ):
        _indexer_logits_hopper.score_keys(
            q, weights, k_cache, *batch, max_seq_len, logits, row_lens, min_keys
        )
        return
    block_size = k_cache.shape[1] // (head_dim + 4)
    whole = block_size >= 16 and block_size & (block_size - 1) == 0
    codes_are_fp8 = not INTERPRETED and capability(q.device) >= 89
    code_dtype = torch.float8_e4m3fn if codes_are_fp8 else torch.uint8
    block_h = min(MAX_BLOCK_H, max(16, triton.next_power_of_2(num_heads)))
    block_d = min(MAX_BLOCK_D, max(32, triton.next_power_of_2(head_dim)))
    padded_heads = max(1, triton.cdiv(num_heads, block_h)) * block_h
    hoisted_rows = _hoisted_rows(q, num_reqs, max_seq_len, padded_heads * block_d)
    # Loads are buffered in shared memory: too much of it for operands of which one row is too much.
    pipelined = head_dim <= block_d and (hoisted_rows > 0 or q.itemsize < 4)
    spans = 1 if row_lens is not None else triton.cdiv(max_seq_len, BLOCK_COLUMNS)
    items = max(num_reqs * triton.cdiv(max_seq_len, TILE), (num_reqs + 2) * spans)
    programs = min(items, PROGRAMS_PER_SM * num_sms(q.device))
    indexer_logits_kernel[(programs,)](
        q if q.itemsize > 1 else q.view(code_dtype), weights, k_cache.view(code_dtype),
        block_table, query_start_loc, seq_lens, logits, row_lens,
        num_tokens, num_reqs, k_cache.shape[0], max_seq_len, min_keys,
        *q.stride(), *weights.stride(), k_cache.stride(0), *block_table.stride(),
        query_start_loc.stride(0), seq_lens.stride(0), logits.stride(0),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=TILE,
        BLOCK_H=block_h, BLOCK_D=block_d, PAGES=max(1, TILE // block_size) if whole else 0,
        DTYPE=_operand_dtype(q), HOIST=hoisted_rows > 0, MAX_ROWS=max(1, hoisted_rows), SPAN=SPAN,
        BLOCK_REQUESTS=BLOCK_REQUESTS, BLOCK_COLUMNS=BLOCK_COLUMNS,
        num_warps=NUM_WARPS, num_stages=3 if pipelined else 1,
        maxnreg=MAX_REGISTERS if q.itemsize == 1 else None,
    )  # fmt: skip


def _operand_dtype(q: Tensor) -> tl.dtype:
    """What keys and queries are multiplied in."""
    if INTERPRETED:
        return tl.float32
    if q.dtype == torch.float8_e4m3fn:
        wide = capability(q.device) >= 89 and q.shape[2] % 64 == 0
        return tl.float8e4nv if wide else tl.float16
    return tl.float16 if q.dtype == torch.float16 else tl.bfloat16


def _hoisted_rows(q: Tensor, num_reqs: int, max_seq_len: int, padded_size: int) -> int:
    """How many rows of a request go together, with their queries in shared memory.

    0 where one row is too much, or tensor cores take both operands from registers. Each number of
    rows is a loop of its own to compile, and many rows leave few registers to each: so 1 for single
    tokens and where speed is no concern, and more than FEW_ROWS only for requests of more, whose
    keys would otherwise come from memory a second time, the L2 being too small for them.
    """
    if INTERPRETED:
        return FEW_ROWS
    if capability(q.device) // 10 not in (9, 10):
        return 0
    operands = 3 if q.dtype == torch.float32 else 1
    row_bytes = padded_size * operands * _operand_dtype(q).primitive_bitwidth // 8
    if q.shape[0] <= num_reqs or q.shape[2] not in (64, 128):
        rows = 1
    else:
        many = q.shape[0] > FEW_ROWS * num_reqs
        rows = MAX_ROWS if many and num_reqs * max_seq_len * q.shape[2] > L2_BYTES else FEW_ROWS
    return min(rows, MAX_HOISTED_BYTES // row_bytes)
