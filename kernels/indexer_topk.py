"""Exact top-k of each row: the positions of the ``topk`` largest logits, in ascending order.

    key[s]  = order-preserving int32 of logits[row, s]; -0.0 is 0.0, NaN is -inf
    chosen  = the topk largest of key[0 .. row_len - 1], equal ones by ascending s
    out     = chosen in ascending order, then -1

A row that fits into the registers of a program is read once; a short one in a wider block that is
read ahead of its length, twice. The mean and the deviation of its
logits say where the topk-th largest should lie; four bounds about that place are counted from, and
so on in rounds, until at most 64 logits lie between the bounds on its either side. Those are
compared with each other, and all from the topk-th on are stored, in order (``_selection``).

Longer rows take two launches, each of which reads a key once:

    filter    programs share a row by slices. All programs of a row draw the same sample of it and
              find the same bound, from which on a block of keys should lie (``limits``); what lies
              there of its own slice a program stores, in order, with its positions.
    select    a program holds what all slices have left, and goes on as with a short row. It begins
              early, and waits for the filter before it reads what that left, or at its end.

The bound decides what is left, never what is chosen: where fewer than topk keys are left, or more
than a program can hold (a sample that misleads, a value that most of a row shares), the program
counts over the row itself, from the bound on (``scan_row``). So it does where -inf or NaN is among
the chosen. That is exact for every row, and serves every topk that is too large for registers.

Layout:
    logits             [num_tokens, width] fp32 or bf16       any strides
    row_lens           [num_tokens] int32                     any stride
    out                [num_tokens, topk] int32               contiguous
    left               [num_tokens, num_slices, 2, capacity]  contiguous; logits that are left of a
                       fp32                                   slice, then NaN up to a multiple of
                                                              32; and, as int32, their positions
    counts             [num_tokens, num_slices] int32         how many those are, or would be
    bounds             [num_tokens] int32                     the bound of each row, as a key

Grid: (num_tokens * num_slices,) filters, (num_tokens,) selects; a program owns its slice of
``left``, or its row of ``out``. The length of a row says what its slices are, so that rows far
shorter than the logits are shared out as well. A slice that begins past the end of its row, and a
row that the second kernel can hold as it is, leave the first one at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _topk_plan
from ._blocks import LEAST, finite_value_of, nan, rank, value_of
from ._common import can_overlap, num_sms
from ._sampling import draw, find_bound, limits
from ._selection import guess_of, moments_of
from ._topk_plan import keys_per_thread, plan, reads_vectors, select_registers, warps_for
from ._topk_rows import (
    deviations_of,
    entries_left,
    load_block,
    load_left,
    load_row,
    positions_of,
    present_or_nan,
    scan_row,
    select_row,
    write_all,
    write_largest,
)

# Whether the second launch may begin before the first has ended, and wait for it on the card.
OVERLAP = True


@triton.jit
def slice_of(length, slices_bits, CHUNK: tl.constexpr):
    """Keys of a slice of a row: whole chunks, as few as ``1 << slices_bits`` slices can do with."""
    return (((length - 1) // CHUNK >> slices_bits) + 1) * CHUNK


# fmt: off
@triton.jit(do_not_specialize=["topk", "slices_bits"])
def indexer_topk_filter_kernel(
    logits_ptr, row_lens_ptr, left_ptr, counts_ptr, bounds_ptr,
    width, topk, slices_bits,
    row_stride, column_stride, row_lens_stride,
    VECTORS: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
    TOO_FEW: tl.constexpr, TOO_MANY: tl.constexpr, MOST_SPAN: tl.constexpr,
    GROUPS: tl.constexpr, SAMPLE_GROUPS: tl.constexpr, WARPS: tl.constexpr,
    MANY_CHUNKS: tl.constexpr, DONE: tl.constexpr, OVERLAP: tl.constexpr,
):
    # fmt: on
    CHUNK: tl.constexpr = 128 * GROUPS * WARPS
    SAMPLE: tl.constexpr = 128 * SAMPLE_GROUPS * WARPS
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) >> slices_bits).to(tl.int64)
    part = tl.program_id(0) & ((1 << slices_bits) - 1)
    length = tl.load(row_lens_ptr + row * row_lens_stride)
    length = tl.minimum(tl.maximum(length, 0), width)
    row_ptr = logits_ptr + row * row_stride
    keys = slice_of(length, slices_bits, CHUNK)
    begin = part * keys
    if (length > BLOCK) & (begin < length):
        end = begin + tl.minimum(keys, length - begin)
        first_ptr = row_ptr + begin.to(tl.int64) * column_stride
        # Under way while the bound is found, as each chunk is while the one before it is ranked.
        place, logits = load_block(
            first_ptr, column_stride, 0, end - begin, VECTORS, GROUPS, WARPS, DONE
        )
        sample = draw(row_ptr, column_stride, length, SAMPLE_GROUPS, WARPS)
        pivot = tl.load(row_ptr).to(tl.float32)
        # A slice is stored up to a multiple of 32, 16 more on average.
        room = BLOCK - (16 << slices_bits)
        fewest, most = limits(room, length, topk, SAMPLE, TOO_FEW, TOO_MANY, MOST_SPAN)
        bound = find_bound(sample, pivot, fewest, most, WARPS)
        bound_value = value_of(bound)

        slot = (row << slices_bits) + part
        left_ptr += slot * (2 * CAPACITY)
        count = length * 0
        for first in range(begin, end, CHUNK):
            if first + CHUNK > end:
                logits = present_or_nan(place, logits, end - first)
            next_logits = logits
            if MANY_CHUNKS:
                first_ptr += tl.full([], CHUNK, tl.int64) * column_stride
                _, next_logits = load_block(
                    first_ptr, column_stride, 0, end - first - CHUNK,
                    VECTORS, GROUPS, WARPS, DONE,
                )  # fmt: skip
            # NaN is never left: whoever chooses -inf or NaN looks at the row itself.
            kept = logits >= bound_value
            before, ranked = rank(kept, GROUPS, WARPS)
            # What a slot cannot hold is of no use to anyone.
            if count + ranked <= CAPACITY:
                target = left_ptr + count + before
                tl.store(target, logits, mask=kept)
                tl.store(positions_of(target, CAPACITY), first + place, mask=kept)
            count += ranked
            logits = next_logits
        rest = count + tl.arange(0, 32)
        filled = tl.minimum((count + 31) // 32 * 32, CAPACITY)
        tl.store(left_ptr + rest, nan(), mask=rest < filled)
        tl.store(counts_ptr + slot, count)
        if part == 0:
            tl.store(bounds_ptr + row, bound)


# fmt: off
@triton.jit(do_not_specialize=["topk", "slices_bits"])
def indexer_topk_kernel(
    logits_ptr, row_lens_ptr, left_ptr, counts_ptr, bounds_ptr, out_ptr,
    width, topk, slices_bits,
    row_stride, column_stride, row_lens_stride,
    VECTORS: tl.constexpr, FILTERED: tl.constexpr,
    CHUNK: tl.constexpr, CAPACITY: tl.constexpr, SLICES: tl.constexpr, SHORT_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, LARGE_GROUPS: tl.constexpr, WARPS: tl.constexpr,
    LATE: tl.constexpr, DONE: tl.constexpr, OVERLAP: tl.constexpr,
):
    # fmt: on
    BLOCK: tl.constexpr = 128 * GROUPS * WARPS
    LARGE_BLOCK: tl.constexpr = 128 * LARGE_GROUPS * WARPS
    # Where the logits are wide, a block is made for longer rows than most are. Of a short one each
    # thread has fewer keys, and little of the widest can be read ahead.
    SHORT_GROUPS: tl.constexpr = SHORT_BLOCK // (128 * WARPS) if BLOCK > SHORT_BLOCK else GROUPS
    tl.static_assert(SHORT_GROUPS > 0)
    AHEAD: tl.constexpr = not FILTERED and BLOCK <= 2 * SHORT_BLOCK
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    out_row = out_ptr + row * topk
    length = tl.load(row_lens_ptr + row * row_lens_stride)
    if AHEAD:
        # Before the length is known: one wait for both. Not where there may be no logits.
        end = tl.where(width > topk, width, 0)
        pivot = tl.load(row_ptr, mask=end > 0, other=0.0).to(tl.float32)
        columns, values = load_block(row_ptr, column_stride, 0, end, VECTORS, GROUPS, WARPS, DONE)
    length = tl.minimum(tl.maximum(length, 0), width)
    hint = tl.full([], LEAST, tl.int32)
    if length <= topk:
        write_all(out_row, length, topk, 32 * WARPS)
        done = True
    elif SHORT_GROUPS < GROUPS and length <= SHORT_BLOCK:
        done = select_row(
            row_ptr, column_stride, length, topk, out_row,
            VECTORS, LATE, DONE, SHORT_GROUPS, WARPS,
        )  # fmt: skip
    elif AHEAD:
        guess = guess_of(topk, length, False)
        if length < BLOCK:
            values = present_or_nan(columns, values, length)
            first, second = moments_of(deviations_of(values, pivot), WARPS)
        else:
            first, second = moments_of(values - pivot, WARPS)
        done = write_largest(
            values, first, second, pivot, guess, length, topk, False, columns, left_ptr,
            out_row, False, CAPACITY, False, GROUPS, WARPS,
        )  # fmt: skip
    elif not FILTERED:
        done = select_row(
            row_ptr, column_stride, length, topk, out_row, VECTORS, LATE, DONE, GROUPS, WARPS
        )
    else:
        slices = tl.arange(0, SLICES)
        live = slices * slice_of(length, slices_bits, CHUNK) < length
        listed = length > BLOCK
        if OVERLAP and listed:
            tl.extra.cuda.gdc_wait()
        counts = tl.load(
            counts_ptr + (row << slices_bits) + slices, mask=tl.where(listed, live, False), other=0
        )
        hint = tl.load(bounds_ptr + row, mask=listed, other=LEAST)
        left_ptr += (row << slices_bits) * (2 * CAPACITY)
        slot_runs = (counts + 31) // 32
        count = tl.sum(counts, axis=0)
        taken = tl.sum(slot_runs, axis=0) * 32
        whole = (count > topk) & (tl.max(counts, axis=0) <= CAPACITY)
        if (length <= BLOCK) | (whole & (taken <= BLOCK)):
            if listed:
                pivot = finite_value_of(hint)
                starts = entries_left(slot_runs, 2 * CAPACITY, GROUPS, WARPS, SLICES)
                values, places_ = load_left(left_ptr, starts, CAPACITY, LATE)
            else:
                count = length
                pivot, values, places_ = load_row(
                    row_ptr, column_stride, length, VECTORS, LATE, DONE, GROUPS, WARPS
                )
            guess = guess_of(topk, count, listed)
            first, second = moments_of(deviations_of(values, pivot), WARPS)
            done = write_largest(
                values, first, second, pivot, guess, count, topk, listed, places_,
                left_ptr, out_row, listed, CAPACITY, LATE, GROUPS, WARPS,
            )  # fmt: skip
        elif whole & (taken <= LARGE_BLOCK):
            pivot = finite_value_of(hint)
            starts = entries_left(slot_runs, 2 * CAPACITY, LARGE_GROUPS, WARPS, SLICES)
            values, places_ = load_left(left_ptr, starts, CAPACITY, True)
            guess = guess_of(topk, count, True)
            first, second = moments_of(deviations_of(values, pivot), WARPS)
            done = write_largest(
                values, first, second, pivot, guess, count, topk, True, places_,
                left_ptr, out_row, True, CAPACITY, True, LARGE_GROUPS, WARPS,
            )  # fmt: skip
        else:
            done = False
    if not done:
        # No more registers than the search needs: it holds its keys throughout, this does not.
        SCAN_GROUPS: tl.constexpr = GROUPS if GROUPS <= 4 else 4
        scan_row(row_ptr, column_stride, length, topk, hint, out_row, VECTORS, SCAN_GROUPS, WARPS)
    if OVERLAP:
        # All programs wait: nothing that comes after this kernel may run beside the first one.
        tl.extra.cuda.gdc_wait()


# fmt: off
@triton.jit(do_not_specialize=["topk"])
def indexer_topk_scan_kernel(
    logits_ptr, row_lens_ptr, out_ptr,
    width, topk,
    row_stride, column_stride, row_lens_stride,
    VECTORS: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(row_lens_ptr + row * row_lens_stride)
    length = tl.minimum(tl.maximum(length, 0), width)
    out_row = out_ptr + row * topk
    if length <= topk:
        write_all(out_row, length, topk, 32 * WARPS)
    else:
        row_ptr = logits_ptr + row * row_stride
        hint = tl.full([], 0, tl.int32)
        scan_row(row_ptr, column_stride, length, topk, hint, out_row, VECTORS, GROUPS, WARPS)


def launch(logits: Tensor, row_lens: Tensor, topk: int) -> Tensor:
    return largest_positions(logits, row_lens, topk, logits.shape[1])


def largest_positions(
    logits: Tensor, row_lens: Tensor, topk: int, width: int, *, last_use: bool = False
) -> Tensor:
    """The launches, which ``indexer_select`` shares: over the first ``width`` columns. After the
    ``last_use`` of the logits the L2 gives them up first.

    Where ``width`` is at most ``topk``, no logit is read, and there need not be any; nor does it
    matter what a row of at most ``topk`` keys holds.
    """
    num_tokens = row_lens.shape[0]
    out = torch.empty(num_tokens, topk, dtype=torch.int32, device=row_lens.device)
    if num_tokens == 0:
        return out
    vectors = reads_vectors(logits, width)
    sms = num_sms(out.device)
    shape = plan(num_tokens, width, topk, sms)
    if shape is None:
        block = _topk_plan.LONGEST_BLOCK
        warps = warps_for(block)
        indexer_topk_scan_kernel[(num_tokens,)](
            logits, row_lens, out,
            width, topk,
            logits.stride(0), logits.stride(1), row_lens.stride(0),
            VECTORS=vectors, GROUPS=block // (128 * warps), WARPS=warps, num_warps=warps,
        )  # fmt: skip
        return out

    left = counts = bounds = None
    capacity = 1
    overlap = False
    num_slices = max(shape.num_slices, 1)
    slices_bits = num_slices.bit_length() - 1
    if shape.chunk:
        overlap = OVERLAP and can_overlap(out.device)
        capacity = min(shape.chunk * shape.max_chunks, shape.large_block)
        left = logits.new_empty(num_tokens, num_slices, 2, capacity, dtype=torch.float32)
        counts = row_lens.new_empty(num_tokens, num_slices)
        bounds = row_lens.new_empty(num_tokens)
        warps = warps_for(shape.chunk)
        indexer_topk_filter_kernel[(num_tokens * num_slices,)](
            logits, row_lens, left, counts, bounds,
            width, topk, slices_bits,
            logits.stride(0), logits.stride(1), row_lens.stride(0),
            VECTORS=vectors, BLOCK=shape.block, CAPACITY=capacity,
            TOO_FEW=_topk_plan.TOO_FEW, TOO_MANY=_topk_plan.TOO_MANY,
            MOST_SPAN=_topk_plan.MOST_SPAN,
            GROUPS=shape.chunk // (128 * warps), SAMPLE_GROUPS=shape.sample // (128 * warps),
            WARPS=warps, MANY_CHUNKS=shape.max_chunks > 1, DONE=last_use, OVERLAP=overlap,
            num_warps=warps, maxnreg=_topk_plan.FILTER_REGISTERS,
        )  # fmt: skip
    filtered = shape.chunk > 0
    keys = keys_per_thread(num_tokens, shape.block, sms, filtered=filtered)
    warps = warps_for(shape.block, keys)
    registers = select_registers(num_tokens, warps, keys, sms, filtered=filtered)
    indexer_topk_kernel[(num_tokens,)](
        logits, row_lens, left, counts, bounds, out,
        width, topk, slices_bits,
        logits.stride(0), logits.stride(1), row_lens.stride(0),
        VECTORS=vectors, FILTERED=filtered,
        CHUNK=shape.chunk, CAPACITY=capacity,
        SLICES=num_slices, SHORT_BLOCK=_topk_plan.SHORTEST_BLOCK,
        GROUPS=shape.block // (128 * warps), LARGE_GROUPS=shape.large_block // (128 * warps),
        WARPS=warps, LATE=registers < 2 * _topk_plan.MAX_REGISTERS, DONE=last_use, OVERLAP=overlap,
        num_warps=warps, launch_pdl=overlap, maxnreg=registers,
    )  # fmt: skip
    return out
