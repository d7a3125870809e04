"""Exact top-k of each row: the positions of the ``topk`` largest logits, in ascending order.

    key[s]  = order-preserving int32 of logits[row, s]; -0.0 is 0.0, NaN is -inf
    chosen  = the topk largest of key[0 .. row_len - 1], equal ones by ascending s
    out     = chosen in ascending order, then -1

A row is cut into chunks of CHUNK keys. A program reads a chunk once and holds it in registers: it
finds the interval of keys that separates the topk largest and stores those, in order, behind one
another. What all chunks of a row have kept is the row of the next level, until one chunk is left.
Of equal keys a chunk keeps the lower positions, so no level drops a key that belongs in the result.
How many levels there are follows from the shapes alone; a row that ends within its first chunk is
finished in the first of them.

Layout:
    logits                        [num_tokens, width] fp32        any strides
    row_lens                      [num_tokens] int32              any stride
    out                           [num_tokens, topk] int32        contiguous
    kept_logits, kept_positions   [num_tokens, num_chunks * topk] contiguous; what a level hands to
                                  the next: topk per full chunk of a row, then those of its last

Grid (programs,): program p owns the (chunk, row) pairs p, p + programs, ...; a pair owns its topk
places in the next level, and in the last level its row of ``out``.

A topk of more than half a chunk would not shrink a row: ``indexer_topk_scan_kernel`` then counts
over the whole row, one program a row, 33 times whatever the topk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import num_sms
from ._selection import ABSENT, LEAST, choose, ordered, rank, separate, spread

# Plain defaults: 32 keys a thread, and registers for 32 warps on a multiprocessor.
CHUNK = 8192
LONG_CHUNK = 16384
LONG_WIDTH = 32768
KEYS_PER_WARP = 1024
WARPS_PER_SM = 32
MAX_REGISTERS = 64


@triton.jit
def write_rest(out_row, written, topk, BLOCK: tl.constexpr):
    """-1 in the places of a row of ``out`` from ``written`` on."""
    for first in range(written // BLOCK * BLOCK, topk, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        tl.store(out_row + columns, -1, mask=(columns >= written) & (columns < topk))


# fmt: off
@triton.jit(do_not_specialize=["num_tokens", "num_chunks", "level", "topk"])
def indexer_topk_kernel(
    logits_ptr, positions_ptr, row_lens_ptr, kept_logits_ptr, kept_positions_ptr, out_ptr,
    num_tokens, width, num_chunks, level, topk,
    row_stride, column_stride, row_lens_stride,
    CHUNK: tl.constexpr, WARPS: tl.constexpr,
):
    # fmt: on
    for item in range(tl.program_id(0), num_tokens * num_chunks, tl.num_programs(0)):
        row = item % num_tokens
        chunk = item // num_tokens
        length = tl.load(row_lens_ptr + row.to(tl.int64) * row_lens_stride)
        length = tl.minimum(tl.maximum(length, 0), width)
        # What the levels before this one have left of the row, unless one has finished it.
        finished = False
        for _ in range(0, level):
            finished = finished | (length <= CHUNK)
            length = length // CHUNK * topk + tl.minimum(length % CHUNK, topk)
        count = tl.minimum(length - chunk * CHUNK, CHUNK)
        if (not finished) & ((count > 0) | (chunk == 0)):
            last = length <= CHUNK
            places = spread(CHUNK, WARPS)
            present = places < count
            start = row.to(tl.int64) * row_stride + (chunk * CHUNK).to(tl.int64) * column_stride
            pointers = logits_ptr + start + places.to(tl.int64) * column_stride
            # Everything is kept: no key is below the least.
            keys = tl.where(present, LEAST, ABSENT)
            low = tl.full([], LEAST, tl.int32)
            high = low
            above = count
            if count > topk:
                if count == CHUNK:
                    keys = ordered(tl.load(pointers))
                else:
                    logits = tl.load(pointers, mask=present, other=0.0)
                    keys = tl.where(present, ordered(logits), ABSENT)
                keys, low, high, above = separate(keys, count, topk)
            written = tl.minimum(topk, count)
            chosen = choose(keys, low, high, written - above, CHUNK, WARPS)
            target = rank(chosen, CHUNK, WARPS)

            if positions_ptr is None:
                positions = chunk * CHUNK + places
            else:
                positions = tl.load(positions_ptr + start + places, mask=chosen, other=0)
            out_row = out_ptr + row.to(tl.int64) * topk
            if last:
                tl.store(out_row + target, positions, mask=chosen)
                write_rest(out_row, written, topk, 32 * WARPS)
            elif kept_logits_ptr is not None:
                kept = (row.to(tl.int64) * num_chunks + chunk) * topk
                logits = tl.load(pointers, mask=chosen, other=0.0)
                tl.store(kept_logits_ptr + kept + target, logits, mask=chosen)
                tl.store(kept_positions_ptr + kept + target, positions, mask=chosen)


# fmt: off
@triton.jit(do_not_specialize=["topk"])
def indexer_topk_scan_kernel(
    logits_ptr, row_lens_ptr, out_ptr,
    width, topk,
    row_stride, column_stride, row_lens_stride,
    BLOCK: tl.constexpr, WARPS: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    places = spread(BLOCK, WARPS)
    length = tl.load(row_lens_ptr + row * row_lens_stride)
    length = tl.minimum(tl.maximum(length, 0), width)
    row_ptr = logits_ptr + row * row_stride
    low = tl.full([], LEAST, tl.int64)
    high = low
    above = length
    if length > topk:
        high = tl.full([], -LEAST, tl.int64)
        above = length * 0
        while high - low > 1:
            bound = (low + high) >> 1
            counted = length * 0
            for first in range(0, length, BLOCK):
                keys = load_keys(row_ptr, first + places, column_stride, length)
                counted += tl.sum((keys >= bound.to(tl.int32)).to(tl.int32), axis=0)
            low = tl.where(counted >= topk, bound, low)
            high = tl.where(counted >= topk, high, bound)
            above = tl.where(counted >= topk, above, counted)
    low, high = low.to(tl.int32), high.to(tl.int32)
    missing = tl.minimum(topk, length) - above

    out_row = out_ptr + row * topk
    written = length * 0
    for first in range(0, length, BLOCK):
        columns = first + places
        keys = tl.where(columns < length, LEAST, ABSENT)
        if length > topk:
            keys = load_keys(row_ptr, columns, column_stride, length)
        chosen = choose(keys, low, high, missing, BLOCK, WARPS)
        tl.store(out_row + written + rank(chosen, BLOCK, WARPS), columns, mask=chosen)
        written += tl.sum(chosen.to(tl.int32), axis=0)
        missing -= tl.sum((chosen & (keys < high)).to(tl.int32), axis=0)
    write_rest(out_row, written, topk, BLOCK)


@triton.jit
def load_keys(row_ptr, columns, column_stride, length):
    pointers = row_ptr + columns.to(tl.int64) * column_stride
    logits = tl.load(pointers, mask=columns < length, other=0.0)
    return tl.where(columns < length, ordered(logits), ABSENT)


def launch(logits: Tensor, row_lens: Tensor, topk: int) -> Tensor:
    return largest_positions(logits, row_lens, topk, logits.shape[1])


def largest_positions(logits: Tensor, row_lens: Tensor, topk: int, width: int) -> Tensor:
    """The launches, which ``indexer_select`` shares: over the first ``width`` columns.

    A row of at most ``topk`` keys is not read.
    """
    num_tokens = row_lens.shape[0]
    out = torch.empty(num_tokens, topk, dtype=torch.int32, device=row_lens.device)
    if num_tokens == 0:
        return out
    chunk = CHUNK if topk <= CHUNK // 4 and width <= LONG_WIDTH else LONG_CHUNK
    warps = max(1, chunk // KEYS_PER_WARP)
    if topk > chunk // 2:
        indexer_topk_scan_kernel[(num_tokens,)](
            logits, row_lens, out,
            width, topk,
            logits.stride(0), logits.stride(1), row_lens.stride(0),
            BLOCK=max(chunk // 4, 32 * warps), WARPS=warps, num_warps=warps,
        )  # fmt: skip
        return out
    programs = num_sms(out.device) * max(1, WARPS_PER_SM // warps)
    positions = None
    row_stride, column_stride = logits.stride()
    left, num_chunks, level = width, 0, 0
    while num_chunks != 1:
        num_chunks = max(1, triton.cdiv(left, chunk))
        left = num_chunks * topk
        kept_logits = kept_positions = None
        if num_chunks > 1:
            kept_logits = torch.empty(num_tokens, left, dtype=torch.float32, device=out.device)
            kept_positions = torch.empty(num_tokens, left, dtype=torch.int32, device=out.device)
        indexer_topk_kernel[(min(num_tokens * num_chunks, programs),)](
            logits, positions, row_lens, kept_logits, kept_positions, out,
            num_tokens, width, num_chunks, level, topk,
            row_stride, column_stride, row_lens.stride(0),
            CHUNK=chunk, WARPS=warps, num_warps=warps, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        logits, positions = kept_logits, kept_positions
        row_stride, column_stride = left, 1
        level += 1
    return out
