"""How the tiles of all requests are shared out: as runs of equal work, one for each program.

tiles[r]  = cdiv(min(seq_lens[r], max_seq_len), TILE), 0 without a row to score
work      = sum_r tiles[r] * (query_len[r] + 1)
program p has the tiles whose work begins in work * p / programs .. work * (p + 1) / programs
"""

import triton
import triton.language as tl


@triton.jit
def request_rows(
    request, query_start_loc_ptr, seq_lens_ptr, num_tokens, num_reqs, max_seq_len, min_keys,
    query_start_loc_stride, seq_lens_stride, TILE: tl.constexpr,
):  # fmt: skip
    """First row, end of its rows, sequence length and tiles to score of one request or a block.

    Requests ``num_reqs`` and ``num_reqs + 1`` stand for the padding tokens behind and, which only a
    malformed batch has, before the rows of all requests. Bounds are clamped to those of the batch.
    Up to ``min_keys`` keys are not scored.
    """
    known = request < num_reqs
    start_ptr = query_start_loc_ptr + request.to(tl.int64) * query_start_loc_stride
    start = tl.load(start_ptr, mask=request <= num_reqs, other=0)
    stop_ptr = tl.where(known, start_ptr + query_start_loc_stride, query_start_loc_ptr)
    stop = tl.load(stop_ptr, mask=request != num_reqs, other=num_tokens)
    start = tl.minimum(tl.maximum(start, 0), num_tokens)
    stop = tl.minimum(tl.maximum(stop, 0), num_tokens)
    seq_len_ptr = seq_lens_ptr + request.to(tl.int64) * seq_lens_stride
    seq_len = tl.maximum(tl.load(seq_len_ptr, mask=known, other=0), 0)
    keys = tl.minimum(seq_len, max_seq_len)
    tiles = tl.where((stop > start) & (keys > min_keys), tl.cdiv(keys, TILE), 0)
    return start, stop, seq_len, tiles


@triton.jit
def tile_work(start, stop):
    """What a tile costs: one for its keys and one for each row."""
    return (tl.maximum(stop - start, 0) + 1).to(tl.int64)


@triton.jit
def find_run(
    query_start_loc_ptr, seq_lens_ptr, num_tokens, num_reqs, max_seq_len, min_keys,
    query_start_loc_stride, seq_lens_stride, TILE: tl.constexpr, BLOCK_REQUESTS: tl.constexpr,
):  # fmt: skip
    """``request, passed, begin, end``: the run of this program is the work ``begin .. end - 1``.

    It begins in ``request``, before which lies the work ``passed``.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    block = tl.arange(0, BLOCK_REQUESTS)
    total = tl.full([], 0, tl.int64)
    for first in range(0, num_reqs, BLOCK_REQUESTS):
        start, stop, _, tiles = request_rows(
            first + block, query_start_loc_ptr, seq_lens_ptr, num_tokens, num_reqs, max_seq_len,
            min_keys, query_start_loc_stride, seq_lens_stride, TILE,
        )  # fmt: skip
        total += tl.sum(tiles * tile_work(start, stop), axis=0)
    begin = total * program // programs
    end = total * (program + 1) // programs

    request = program.to(tl.int32) * 0
    passed = total * 0
    seen = total * 0
    for first in range(0, num_reqs, BLOCK_REQUESTS):
        start, stop, _, tiles = request_rows(
            first + block, query_start_loc_ptr, seq_lens_ptr, num_tokens, num_reqs, max_seq_len,
            min_keys, query_start_loc_stride, seq_lens_stride, TILE,
        )  # fmt: skip
        work = tiles * tile_work(start, stop)
        before = (seen + tl.cumsum(work, axis=0) <= begin) & (first + block < num_reqs)
        request += tl.sum(before.to(tl.int32), axis=0)
        passed += tl.sum(tl.where(before, work, 0), axis=0)
        seen += tl.sum(work, axis=0)
    return request, passed, begin, end
