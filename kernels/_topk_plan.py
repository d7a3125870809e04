"""How the rows of a top-k are shared out among programs, which follows from shapes alone."""

import math
from typing import NamedTuple

import triton
from torch import Tensor

from ._blocks import MAX_GROUPS

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
# A row that the shortest block holds has as much of a longer one, whose threads are not more than
# its keys.
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
# many, for which there is a larger block; and the least and the most that its limits are apart.
TOO_FEW = 4.0
TOO_MANY = 2.0
SPAN = 1.2
MOST_SPAN = 1.7


class Plan(NamedTuple):
    """How rows are shared out, which follows from shapes alone: programs and memory for rows as
    wide as the logits. What of a row goes to which program follows from its length."""

    # All of them powers of two; the first four in keys.
    block: int  # what a program selects from: a row, or what the filter leaves of it
    large_block: int  # what it can hold in a pinch
    chunk: int = 0  # 0: no filter
    sample: int = 0
    num_slices: int = 0  # of a row, at most
    max_chunks: int = 0  # of a slice


def plan(num_tokens: int, width: int, topk: int, sms: int) -> Plan | None:
    """None where no program can hold enough keys for ``topk`` of them."""
    power_of_2 = triton.next_power_of_2
    if width <= SHORT_WIDTH:
        block = power_of_2(max(width, 128))
        return Plan(block, block)
    chunks = triton.cdiv(width, CHUNK)
    num_slices = slices_of(num_tokens, chunks, PROGRAMS_PER_SM * sms)
    room = 16 * min(num_slices, chunks)  # to which slices are stored, beyond what is left
    block, sample = SHORTEST_BLOCK, SHORTEST_SAMPLE
    while True:
        fewest, most = limits(block - room, width / sample, topk)
        if most >= SPAN * fewest:
            break
        if sample < (LONG_SAMPLE if block < LONGEST_BLOCK else LONGEST_SAMPLE):
            sample *= 2
        elif block < LONGEST_BLOCK:
            block, sample = 2 * block, SHORTEST_SAMPLE
        else:
            return None
    large_block = min(2 * block, LONGEST_BLOCK, MAX_GROUPS * 128 * warps_for(block))
    max_chunks = power_of_2(triton.cdiv(chunks, num_slices))
    return Plan(block, large_block, CHUNK, sample, num_slices, max_chunks)


def slices_of(num_tokens: int, chunks: int, programs: int) -> int:
    """How many slices rows of so many chunks get: a power of two, of which the card runs all at
    once, or twice as many if that is faster. A slice is of whole chunks, and some are left over."""

    def turns(slices: int) -> int:
        of_slice = triton.cdiv(chunks, slices)
        return of_slice * triton.cdiv(num_tokens * triton.cdiv(chunks, of_slice), programs)

    most = min(triton.next_power_of_2(chunks), MAX_SLICES)
    few = min(1 << max(1, programs // max(num_tokens, 1)).bit_length() - 1, most)
    return min(few, min(2 * few, most), key=turns)


def limits(room: int, apart: float, topk: int) -> tuple[int, int]:
    """How few and how many keys a filter may mean to leave, where it knows a row by one key of
    ``apart``: more than topk and at most ``room`` are left then, but for so many deviations of the
    sample. Of a shorter row, which it knows better, they are further apart (``_sampling.limits``).
    """
    root = math.sqrt(apart)
    fewest = (0.5 * TOO_FEW * root + math.sqrt(0.25 * TOO_FEW**2 * apart + topk)) ** 2
    most = (math.sqrt(0.25 * TOO_MANY**2 * apart + max(room, 0)) - 0.5 * TOO_MANY * root) ** 2
    return math.ceil(fewest), int(most)


def keys_per_thread(num_tokens: int, block: int, sms: int, *, filtered: bool) -> int:
    """Of rows that are selected from as they are, or of what a filter has left."""
    if filtered:
        return KEYS_PER_THREAD
    dense = num_tokens > sms and block >= DENSE_BLOCK
    return KEYS_PER_THREAD * (2 if dense or block >= LONG_BLOCK else 1)


def warps_for(block: int, keys: int = KEYS_PER_THREAD) -> int:
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


def reads_vectors(logits: Tensor, width: int) -> bool:
    """Whether the last 4 logits of a row may be read as a whole, past its end."""
    row_stride, column_stride = logits.stride()
    last = logits.storage_offset() + (logits.shape[0] - 1) * row_stride + -(-width // 4) * 4
    return column_stride == 1 and last * logits.element_size() <= logits.untyped_storage().nbytes()
