"""Exact top-k of each row: the positions of the ``topk`` largest logits, in ascending order.

    key[s]  = order-preserving int32 of logits[row, s]; -0.0 is 0.0, NaN is -inf
    chosen  = the topk largest of key[0 .. row_len - 1], equal ones by ascending s
    out     = chosen in ascending order, then -1

A row that fits into the registers of a program is read once. The mean and the deviation of its
logits say where the topk-th largest should lie; four bounds about that place are counted from, and
so on in rounds, until at most 64 logits lie between the bounds on its either side. Those are
compared with each other, and all from the topk-th on are stored, in order (``_selection``).

Longer rows take two launches, each of which reads a key once:

    filter    programs share a row by slices. All programs of a row draw the same sample of it and
              find the same bound, from which on a block of keys should lie (``limits``); what lies
              there of its own slice a program stores, in order, with its positions.
    select    a program holds what all slices have left, and goes on as with a short row.

The bound decides what is left, never what is chosen: where fewer than topk keys are left, or more
than a program can hold (a sample that misleads, a value that most of a row shares), the program
counts over the row itself, from the bound on (``scan_row``). So it does where -inf or NaN is among
the chosen. That is exact for every row, and serves every topk that is too large for registers.

Layout:
    logits             [num_tokens, width] fp32               any strides
    row_lens           [num_tokens] int32                     any stride
    out                [num_tokens, topk] int32               contiguous
    left               [num_tokens, num_slices, 2, capacity]  contiguous; logits that are left of a
                       fp32                                   slice, then NaN up to a multiple of
                                                              32; and, as int32, their positions
    counts             [num_tokens, num_slices] int32         how many those are, or would be
    bounds             [num_tokens] int32                     the bound of each row, as a key

Grid: (num_tokens * num_slices,) filters, (num_tokens,) selects; a program owns its slice of
``left``, or its row of ``out``. A slice that begins past the end of its row, and a row that the
second kernel can hold as it is, leave the first one at once.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import (
    ABSENT,
    END,
    LANES,
    LEAST,
    MAX_GROUPS,
    along,
    finite_value_of,
    key_of,
    nan,
    places,
    rank,
    starts_of_4,
    sum_of_all,
    value_of,
)
from ._common import INTERPRETED, capability, num_sms
from ._sampling import draw, find_bound
from ._selection import bracket, choose, guess_of, moments_of

# Plain defaults. A row of at most SHORT_WIDTH keys is selected from as it is; of a longer one, the
# filter leaves a block for one program, of MAX_WARPS at most, as many as a program can have.
KEYS_PER_THREAD = 16
MAX_WARPS = 32
SHORT_WIDTH = 16384
# A row that is selected from as it is has twice as many keys a thread from LONG_BLOCK on, and from
# DENSE_BLOCK on where rows share a multiprocessor: there instructions count, a part of which each
# thread has once. H200, us of 16 and of 32 keys: 64 and 256 rows of 16K keys 9.1 and 17.4, 8.0 and
# 14.9; of 8K keys 5.8 and 9.2, 6.1 and 8.7.
LONG_BLOCK = 16384
DENSE_BLOCK = 8192
SHORTEST_BLOCK = 4096
LONGEST_BLOCK = 16384
MAX_REGISTERS = 64
# The filter: keys that a program reads at a time, programs for each multiprocessor, the most slices
# of a row, and the keys of a sample, more than LONG_SAMPLE only where no larger block helps. H200,
# top 2048 of 64 and 256 rows of 32K keys, us, before other savings: 4 programs of 64 registers,
# which spill, 14.1 and 39; 3 of 80 13.0 and 33; 2 of 128 12.7 and 28; chunks of 8K 13.8 and 30.
CHUNK = 4096
PROGRAMS_PER_SM = 2
FILTER_REGISTERS = 128
MAX_SLICES = 128
SHORTEST_SAMPLE = 1024
LONG_SAMPLE = 2048
LONGEST_SAMPLE = 8192
# How many deviations of the sample away are too few keys, for which a row is read again, and too
# many, for which there is a larger block; and what there has to be between its limits.
TOO_FEW = 4.0
TOO_MANY = 2.0
SPAN = 1.2
# Whether the second launch may begin before the first has ended, and wait for it on the card.
OVERLAP = True


class Plan(NamedTuple):
    """How rows are shared out, which follows from shapes alone; in keys, all powers of two."""

    block: int  # what a program selects from: a row, or what the filter leaves of it
    large_block: int  # what it can hold in a pinch
    chunk: int = 0  # 0: no filter
    slice: int = 0
    sample: int = 0
    fewest: int = 0  # that the filter means to leave of a row; these two are any numbers
    most: int = 0


def plan(num_tokens: int, width: int, topk: int, sms: int) -> Plan | None:
    """None where no program can hold enough keys for ``topk`` of them."""
    power_of_2 = triton.next_power_of_2
    if width <= SHORT_WIDTH:
        block = power_of_2(max(width, 128))
        return Plan(block, block)
    keys = max(num_tokens * width / (PROGRAMS_PER_SM * sms), width / MAX_SLICES)
    slice_ = CHUNK * power_of_2(math.ceil(keys / CHUNK))
    num_slices = triton.cdiv(width, slice_)
    block, sample = SHORTEST_BLOCK, SHORTEST_SAMPLE
    while True:
        fewest, most = limits(block - 16 * num_slices, width / sample, topk)
        if most >= SPAN * fewest:
            break
        if sample < (LONG_SAMPLE if block < LONGEST_BLOCK else LONGEST_SAMPLE):
            sample *= 2
        elif block < LONGEST_BLOCK:
            block, sample = 2 * block, SHORTEST_SAMPLE
        else:
            return None
    large_block = min(
        2 * block, LONGEST_BLOCK, MAX_GROUPS * 128 * warps_for(block, KEYS_PER_THREAD)
    )
    return Plan(block, large_block, CHUNK, slice_, sample, fewest, most)


def limits(room: int, apart: float, topk: int) -> tuple[int, int]:
    """How few and how many keys a filter may mean to leave, where it knows a row by one key of
    ``apart``: more than topk and at most ``room`` are left then, but for so many deviations of the
    sample."""
    root = math.sqrt(apart)
    fewest = (0.5 * TOO_FEW * root + math.sqrt(0.25 * TOO_FEW**2 * apart + topk)) ** 2
    most = (math.sqrt(0.25 * TOO_MANY**2 * apart + max(room, 0)) - 0.5 * TOO_MANY * root) ** 2
    return math.ceil(fewest), int(most)


@triton.jit
def write_all(out_row, length, topk, BLOCK: tl.constexpr):
    """A row of ``out`` where all keys are chosen."""
    for first in range(0, topk, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        tl.store(out_row + columns, tl.where(columns < length, columns, -1), mask=columns < topk)


@triton.jit
def load_block(
    row_ptr, column_stride, first, length,
    VECTORS: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr,
    DONE: tl.constexpr = False,
):  # fmt: skip
    """``columns, logits`` from ``first`` on, a multiple of 4; past ``length`` they are any. DONE:
    the L2 need not keep them."""
    POLICY: tl.constexpr = "evict_first" if DONE else ""
    columns = first + places(GROUPS, WARPS)
    if VECTORS:
        # Four at a time, if only the first of them is a key: one mask for all.
        starts = tl.broadcast_to(first + starts_of_4(GROUPS, WARPS), columns.shape)
        mask = starts < length
        logits = tl.load(row_ptr + columns, mask=mask, other=0.0, eviction_policy=POLICY)
    else:
        logits = tl.load(
            row_ptr + columns.to(tl.int64) * column_stride, mask=columns < length, other=0.0,
            eviction_policy=POLICY,
        )  # fmt: skip
    return columns, logits.to(tl.float32)


@triton.jit
def present_or_nan(columns, logits, length):
    return tl.where(columns < length, logits, nan())


@triton.jit
def deviations_of(values, pivot):
    return tl.where(values == values, values - pivot, 0.0)


@triton.jit
def write_largest(
    values, first, second, pivot, guess, count, topk, TAIL, places_, left_ptr, out_row,
    LISTED, CAPACITY: tl.constexpr, LATE: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """A row of ``out``: the positions of the topk largest of ``count`` values, which are
    ``places_``. LATE: those are but the first of each four; LISTED, of their entries in a list.

    False, and nothing is written, where -inf or NaN may be among the largest.
    """
    low, high, from_low, from_high, own = bracket(
        values, first, second, pivot, guess, count, topk, TAIL, WARPS
    )
    if low > LEAST:
        chosen = choose(values, low, high, from_low, from_high, own, topk, out_row, GROUPS, WARPS)
        before, _ = rank(chosen, GROUPS, WARPS)
        positions = places_
        if LATE:
            positions = places_ + tl.arange(0, 4)[None, None, None, :]
            if LISTED:
                entry_ptr = left_ptr + positions
                positions = tl.load(positions_of(entry_ptr, CAPACITY), mask=chosen, other=0)
        tl.store(out_row + before, positions, mask=chosen)
    return low > LEAST


@triton.jit
def entries_left(
    slot_runs, slot_size, GROUPS: tl.constexpr, WARPS: tl.constexpr, SLICES: tl.constexpr
):
    """Which entries of ``left`` make up a block, the first of each four; negative where there are
    no more: runs of 32, of which slice s has ``slot_runs[s]``, behind one another."""
    RUNS: tl.constexpr = GROUPS * WARPS * 4
    run = tl.arange(0, RUNS)
    ends = tl.cumsum(slot_runs, axis=0)
    # How many slices end at or before each run: a binary search.
    slot = tl.zeros_like(run)
    begin = tl.zeros_like(run)
    STEPS: tl.constexpr = SLICES.bit_length() - 1
    for step in tl.static_range(STEPS):
        width = SLICES >> (step + 1)
        end = tl.gather(ends, slot + (width - 1), axis=0)
        passed = end <= run
        slot = tl.where(passed, slot + width, slot)
        begin = tl.where(passed, end, begin)
    offset = tl.where(run < tl.sum(slot_runs, axis=0), slot * slot_size + (run - begin) * 32, -32)
    offset = tl.reshape(offset, [WARPS, GROUPS, 4])
    if LANES == 0:
        offset = tl.permute(offset, [2, 0, 1])[:, None, :, :]
        offset = tl.reshape(tl.broadcast_to(offset, [4, 8, WARPS, GROUPS]), [32, WARPS, GROUPS])
    else:
        offset = tl.permute(offset, [1, 0, 2])[:, :, :, None]
        offset = tl.reshape(tl.broadcast_to(offset, [GROUPS, WARPS, 4, 8]), [GROUPS, WARPS, 32])
    offset = tl.multiple_of(offset[:, :, :, None], [32, 32, 32, 32])
    return offset + along(tl.arange(0, 32) % 8 * 4, LANES)


@triton.jit
def positions_of(entry_ptr, CAPACITY: tl.constexpr):
    """Where the positions of entries of ``left`` are."""
    return (entry_ptr + CAPACITY).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def load_left(left_ptr, starts, CAPACITY: tl.constexpr, LATE: tl.constexpr):
    """``values, places_`` of the entries that begin at ``starts``."""
    entry_ptr = left_ptr + (starts + tl.arange(0, 4)[None, None, None, :])
    present = tl.broadcast_to(starts >= 0, entry_ptr.shape)
    values = tl.load(entry_ptr, mask=present, other=nan())
    places_ = starts
    if not LATE:
        places_ = tl.load(positions_of(entry_ptr, CAPACITY), mask=present, other=0)
    return values, places_


@triton.jit
def scan_row(
    row_ptr, column_stride, length, topk, hint, out_row,
    VECTORS: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Any row, in as many passes as it takes: each counts from three bounds on.

    ``hint`` is the first bound, and the key above it the second: a row most of which is one value
    often needs no more.
    """
    size = 128 * GROUPS * WARPS
    low = tl.full([], LEAST, tl.int64)
    high = tl.full([], END, tl.int64)
    from_low = length
    from_high = length * 0
    first = hint.to(tl.int64)
    second = first + 1
    third = (second + high) >> 1
    while (high - low > 1) & (from_low > topk):
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, first), high - 1)
        third = tl.minimum(tl.maximum(third, second), high - 1)
        from_first = length * 0
        from_second = length * 0
        from_third = length * 0
        for start in range(0, length, size):
            columns, logits = load_block(
                row_ptr, column_stride, start, length, VECTORS, GROUPS, WARPS
            )
            keys = tl.where(columns < length, key_of(logits), ABSENT)
            both = (keys >= first.to(tl.int32)).to(tl.uint32)
            both = sum_of_all(both + ((keys >= second.to(tl.int32)).to(tl.uint32) << 16))
            from_first += (both & 0xFFFF).to(tl.int32)
            from_second += (both >> 16).to(tl.int32)
            from_third += sum_of_all((keys >= third.to(tl.int32)).to(tl.int32))
        if from_third >= topk:
            low = third
            from_low = from_third
        else:
            high = third
            from_high = from_third
            if from_second >= topk:
                low = second
                from_low = from_second
            else:
                high = second
                from_high = from_second
                if from_first >= topk:
                    low = first
                    from_low = from_first
                else:
                    high = first
                    from_high = from_first
        first = (3 * low + high) >> 2
        second = (low + high) >> 1
        third = (low + 3 * high) >> 2

    missing = topk - from_high
    equal = from_low - from_high
    written = length * 0
    for start in range(0, length, size):
        columns, logits = load_block(row_ptr, column_stride, start, length, VECTORS, GROUPS, WARPS)
        keys = tl.where(columns < length, key_of(logits), ABSENT)
        chosen = keys >= low.to(tl.int32)
        if equal > missing:
            tied = chosen & (keys < high.to(tl.int32))
            before, ties = rank(tied, GROUPS, WARPS)
            chosen = chosen & ((keys >= high.to(tl.int32)) | (before < missing))
            missing = tl.maximum(missing - ties, 0)
        before, kept = rank(chosen, GROUPS, WARPS)
        tl.store(out_row + written + before, columns, mask=chosen)
        written += kept


# fmt: off
@triton.jit
def indexer_topk_filter_kernel(
    logits_ptr, row_lens_ptr, left_ptr, counts_ptr, bounds_ptr,
    width, num_slices,
    row_stride, column_stride, row_lens_stride,
    VECTORS: tl.constexpr, FEWEST: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr, SLICE: tl.constexpr, CAPACITY: tl.constexpr,
    GROUPS: tl.constexpr, SAMPLE_GROUPS: tl.constexpr, WARPS: tl.constexpr,
    DONE: tl.constexpr, OVERLAP: tl.constexpr,
):
    # fmt: on
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) // num_slices).to(tl.int64)
    part = tl.program_id(0) % num_slices
    length = tl.load(row_lens_ptr + row * row_lens_stride)
    length = tl.minimum(tl.maximum(length, 0), width)
    row_ptr = logits_ptr + row * row_stride
    begin = part * SLICE
    if (length > BLOCK) & (begin < length):
        end = tl.minimum(begin + SLICE, length)
        first_ptr = row_ptr + begin.to(tl.int64) * column_stride
        # Under way while the bound is found, as each chunk is while the one before it is ranked.
        place, logits = load_block(
            first_ptr, column_stride, 0, end - begin, VECTORS, GROUPS, WARPS, DONE
        )
        sample = draw(row_ptr, column_stride, length, SAMPLE_GROUPS, WARPS)
        pivot = tl.load(row_ptr).to(tl.float32)
        # How many of the sample lie from the bound on.
        share = 128.0 * SAMPLE_GROUPS * WARPS / length.to(tl.float32)
        fewest = tl.maximum((FEWEST * share).to(tl.int32), 1)
        most = tl.maximum((MOST * share).to(tl.int32), fewest)
        bound = find_bound(sample, pivot, fewest, most, WARPS)
        bound_value = value_of(bound)

        slot = row * num_slices + part
        left_ptr += slot * (2 * CAPACITY)
        CHUNK: tl.constexpr = 128 * GROUPS * WARPS
        count = length * 0
        for first in range(begin, end, CHUNK):
            if first + CHUNK > end:
                logits = present_or_nan(place, logits, end - first)
            next_logits = logits
            if SLICE > CHUNK:
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
@triton.jit(do_not_specialize=["topk"])
def indexer_topk_kernel(
    logits_ptr, row_lens_ptr, left_ptr, counts_ptr, bounds_ptr, out_ptr,
    width, topk, num_slices,
    row_stride, column_stride, row_lens_stride,
    VECTORS: tl.constexpr, FILTERED: tl.constexpr,
    SLICE: tl.constexpr, CAPACITY: tl.constexpr, SLICES: tl.constexpr,
    GROUPS: tl.constexpr, LARGE_GROUPS: tl.constexpr, WARPS: tl.constexpr,
    LATE: tl.constexpr, DONE: tl.constexpr, OVERLAP: tl.constexpr,
):
    # fmt: on
    BLOCK: tl.constexpr = 128 * GROUPS * WARPS
    LARGE_BLOCK: tl.constexpr = 128 * LARGE_GROUPS * WARPS
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    out_row = out_ptr + row * topk
    length = tl.load(row_lens_ptr + row * row_lens_stride)
    if not FILTERED:
        # Before the length is known: one wait for both. Not where there may be no logits.
        end = tl.where(width > topk, width, 0)
        pivot = tl.load(row_ptr, mask=end > 0, other=0.0).to(tl.float32)
        columns, values = load_block(row_ptr, column_stride, 0, end, VECTORS, GROUPS, WARPS, DONE)
    length = tl.minimum(tl.maximum(length, 0), width)
    if OVERLAP:
        # All programs wait: nothing that comes after this kernel may run beside the first one.
        tl.extra.cuda.gdc_wait()
    hint = tl.full([], LEAST, tl.int32)
    if length <= topk:
        write_all(out_row, length, topk, 32 * WARPS)
        done = True
    elif not FILTERED:
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
    else:
        slices = tl.arange(0, SLICES)
        live = slices < tl.cdiv(length, SLICE)
        listed = length > BLOCK
        counts = tl.load(
            counts_ptr + row * num_slices + slices, mask=tl.where(listed, live, False), other=0
        )
        hint = tl.load(bounds_ptr + row, mask=listed, other=LEAST)
        left_ptr += row * num_slices * (2 * CAPACITY)
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
                pivot = tl.load(row_ptr).to(tl.float32)
                columns, values = load_block(
                    row_ptr, column_stride, 0, length, VECTORS, GROUPS, WARPS, DONE
                )
                values = present_or_nan(columns, values, length)
                places_ = starts_of_4(GROUPS, WARPS) if LATE else columns
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
        warps = warps_for(LONGEST_BLOCK, KEYS_PER_THREAD)
        indexer_topk_scan_kernel[(num_tokens,)](
            logits, row_lens, out,
            width, topk,
            logits.stride(0), logits.stride(1), row_lens.stride(0),
            VECTORS=vectors, GROUPS=LONGEST_BLOCK // (128 * warps), WARPS=warps, num_warps=warps,
        )  # fmt: skip
        return out

    left = counts = bounds = None
    num_slices = capacity = 1
    overlap = False
    if shape.chunk:
        overlap = OVERLAP and not INTERPRETED and capability(out.device) >= 90
        num_slices = triton.cdiv(width, shape.slice)
        capacity = min(shape.slice, shape.large_block)
        left = logits.new_empty(num_tokens, num_slices, 2, capacity)
        counts = row_lens.new_empty(num_tokens, num_slices)
        bounds = row_lens.new_empty(num_tokens)
        warps = warps_for(shape.chunk, KEYS_PER_THREAD)
        indexer_topk_filter_kernel[(num_tokens * num_slices,)](
            logits, row_lens, left, counts, bounds,
            width, num_slices,
            logits.stride(0), logits.stride(1), row_lens.stride(0),
            VECTORS=vectors, FEWEST=shape.fewest, MOST=shape.most,
            BLOCK=shape.block, SLICE=shape.slice, CAPACITY=capacity,
            GROUPS=shape.chunk // (128 * warps), SAMPLE_GROUPS=shape.sample // (128 * warps),
            WARPS=warps, DONE=last_use, OVERLAP=overlap, num_warps=warps,
            maxnreg=FILTER_REGISTERS,
        )  # fmt: skip
    keys = KEYS_PER_THREAD if shape.chunk else keys_per_thread(num_tokens, shape.block, sms)
    warps = warps_for(shape.block, keys)
    registers = select_registers(num_tokens, warps, keys, sms, filtered=shape.chunk > 0)
    indexer_topk_kernel[(num_tokens,)](
        logits, row_lens, left, counts, bounds, out,
        width, topk, num_slices,
        logits.stride(0), logits.stride(1), row_lens.stride(0),
        VECTORS=vectors, FILTERED=shape.chunk > 0,
        SLICE=max(shape.slice, 1), CAPACITY=capacity,
        SLICES=triton.next_power_of_2(num_slices),
        GROUPS=shape.block // (128 * warps), LARGE_GROUPS=shape.large_block // (128 * warps),
        WARPS=warps, LATE=registers < 2 * MAX_REGISTERS, DONE=last_use, OVERLAP=overlap,
        num_warps=warps, launch_pdl=overlap, maxnreg=registers,
    )  # fmt: skip
    return out


def reads_vectors(logits: Tensor, width: int) -> bool:
    """Whether the last 4 logits of a row may be read as a whole, past its end."""
    row_stride, column_stride = logits.stride()
    last = logits.storage_offset() + (logits.shape[0] - 1) * row_stride + -(-width // 4) * 4
    return column_stride == 1 and last * logits.element_size() <= logits.untyped_storage().nbytes()


def keys_per_thread(num_tokens: int, block: int, sms: int) -> int:
    """Of rows that are selected from as they are."""
    dense = num_tokens > sms and block >= DENSE_BLOCK
    return KEYS_PER_THREAD * (2 if dense or block >= LONG_BLOCK else 1)


def warps_for(block: int, keys: int) -> int:
    return min(max(1, block // (32 * keys)), MAX_WARPS)


def select_registers(num_tokens: int, warps: int, keys: int, sms: int, *, filtered: bool) -> int:
    """Of a thread, by whether one, two or more rows fall to a multiprocessor: three at most, for
    each is compiled.

    One or two programs get all that it has; with few warps behind a filter so many that the
    positions of what is left can wait in them, beside the keys. H200, us of 512 and 1024 rows of 4K
    keys: two at a time 11.5 and 19.8, four 10.3 and 16.9. Programs of fewer warps have room anyway.
    """
    all_ = 65536 // (32 * warps)
    least = MAX_REGISTERS * keys // KEYS_PER_THREAD * (2 if filtered and warps <= 8 else 1)
    most_programs = 2 if filtered or warps < 8 else 4
    programs = min(triton.next_power_of_2(triton.cdiv(num_tokens, sms)), most_programs)
    return max(min(all_ // programs, 248), min(least, all_))
