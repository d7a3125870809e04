"""Rows of a top-k: their keys in registers, what a filter has left of them, and the positions of
the largest; and any row that no program can hold, in passes (``scan_row``).

The layouts are those of ``indexer_topk``.
"""

import triton
import triton.language as tl

from ._blocks import (
    ABSENT,
    END,
    LANES,
    LEAST,
    along,
    key_of,
    nan,
    places,
    rank,
    starts_of_4,
    sum_of_all,
)
from ._selection import bracket, choose, guess_of, moments_of


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
def load_row(
    row_ptr, column_stride, length,
    VECTORS: tl.constexpr, LATE: tl.constexpr, DONE: tl.constexpr,
    GROUPS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """``pivot, values, places_`` of a row that a block holds, for ``write_largest``."""
    pivot = tl.load(row_ptr).to(tl.float32)
    columns, values = load_block(row_ptr, column_stride, 0, length, VECTORS, GROUPS, WARPS, DONE)
    places_ = starts_of_4(GROUPS, WARPS) if LATE else columns
    return pivot, present_or_nan(columns, values, length), places_


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
def select_row(
    row_ptr, column_stride, length, topk, out_row,
    VECTORS: tl.constexpr, LATE: tl.constexpr, DONE: tl.constexpr,
    GROUPS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """``write_largest`` of a row that a block holds."""
    pivot, values, places_ = load_row(
        row_ptr, column_stride, length, VECTORS, LATE, DONE, GROUPS, WARPS
    )
    guess = guess_of(topk, length, False)
    first, second = moments_of(deviations_of(values, pivot), WARPS)
    return write_largest(
        values, first, second, pivot, guess, length, topk, False, places_, out_row, out_row,
        False, 1, LATE, GROUPS, WARPS,
    )  # fmt: skip


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
