"""The keys that query tokens of one request have selected, each of them once.

Tokens of a request that follow one another select much the same keys. Where they have few heads,
up to ``64 // heads`` of them, a group, fit into one program, which then reads every key once:

    entries[p] = the positions that part p has of those that any token of its group has selected,
                 and which have: position | tokens << 24, bit t of ``tokens`` for token t

A position is in the part of the column where the first of its tokens has it. An index counts once
for each time that it is there: all but one of those that a row has twice, whichever, have an entry
of their own, for their token alone.

Two launches:

    map     a program writes down where each position stands in one row of indices, and the first of
            a group what the group is
    share   a program has a part: some columns of all rows of a group. It looks up each of their
            indices in all of those rows. Of memory that was not written the index that stands there
            tells: it is another one, or the position stands there indeed.

Layout:
    topk_indices     [num_tokens, topk] int32           any strides, any order, -1 anywhere
    query_start_loc  [num_reqs + 1] int32               any stride
    columns          [max_groups, max_keys, TOKENS]     scratch, int16: where a position stands in
                                                        the row of each token
    groups           [1 + max_groups, 4] int32          the number of groups; first token, tokens
                                                        and request of each
    entries          [max_groups * num_splits, TOKENS * split_size] int32
    parts            [1 + max_groups * num_splits, 4]   int32: the number of parts; of each what its
                                                        group has, and its number of entries

Grid (num_tokens,) and (max_groups * num_splits,). Tokens without a request have groups too, whose
parts have no entry.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._blocks import MAX_GROUPS, places, rank
from ._common import can_overlap

# Positions and tokens of an entry, in bits.
POSITION_BITS = tl.constexpr(24)
MAX_TOKENS = 8
# Of fewer tokens the shorter walk does not pay for two launches and more parts. H200, 4 tokens a
# request of 16 heads that have 75% of 2048 keys in common, us without and with: 64 tokens 44.5 and
# 45.7, 96 70.5 and 58.0, 128 71.7 and 66.3, 256 138 and 110, 512 275 and 188.
MIN_TOKENS = 96
# Bytes of scratch, warps of a program, and what is looked at together: defaults.
MAX_WARPS = 16
MAX_SCRATCH = 1 << 28
_BLOCK_COLUMNS = 1024
_BLOCK_REQUESTS = 512


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _group(
    token, starts_ptr, num_tokens, num_reqs, starts_stride,
    TOKENS: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """``group, first, tokens, request``: TOKENS of a request are a group, or what is left of them.

    Tokens before and behind those of all requests are those of requests -1 and ``num_reqs``. Where
    starts decrease, each counts as the least from it on: a token is of the last request that begins
    at or before it, as everywhere, and all tokens are in a group.
    """
    begin = token * 0
    end = begin + num_tokens
    passed = begin
    group = begin
    least = end
    chunks = tl.cdiv(num_reqs + 1, REQUESTS)
    for later in range(0, chunks):
        i = (chunks - 1 - later) * REQUESTS + tl.arange(0, REQUESTS)
        ptr = starts_ptr + i.to(tl.int64) * starts_stride
        at = tl.load(ptr, mask=i <= num_reqs, other=num_tokens)
        before = tl.load(ptr - starts_stride, mask=(i > 0) & (i <= num_reqs), other=0)
        at = tl.minimum(tl.maximum(at, 0), num_tokens)
        before = tl.minimum(tl.maximum(before, 0), num_tokens)
        at = tl.minimum(tl.associative_scan(at, 0, _least, reverse=True), least)
        before = tl.minimum(before, at)
        least = tl.min(at, axis=0)
        has_begun = at <= token
        begin = tl.maximum(begin, tl.max(tl.where(has_begun, at, 0), axis=0))
        end = tl.minimum(end, tl.min(tl.where(has_begun, num_tokens, at), axis=0))
        passed += tl.sum(has_begun.to(tl.int32), axis=0)
        group += tl.sum(tl.where(has_begun, tl.cdiv(at - before, TOKENS), 0), axis=0)
    turn = (token - begin) // TOKENS
    first = begin + turn * TOKENS
    return group + turn, first, tl.minimum(end - first, TOKENS), passed - 1


# fmt: off
@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "topk"])
def map_indices_kernel(
    indices_ptr, starts_ptr, columns_ptr, groups_ptr,
    num_tokens, num_reqs, max_keys, topk,
    token_stride, column_stride, starts_stride,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, REQUESTS: tl.constexpr, OVERLAP: tl.constexpr,
):
    # fmt: on
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    group, first, tokens, request = _group(
        token, starts_ptr, num_tokens, num_reqs, starts_stride, TOKENS, REQUESTS
    )
    if token == num_tokens - 1:
        tl.store(groups_ptr, group + 1)
    if token == first:
        group_ptr = groups_ptr + (1 + group).to(tl.int64) * 4
        tl.store(group_ptr, first)
        tl.store(group_ptr + 1, tokens)
        tl.store(group_ptr + 2, request)
    row_ptr = indices_ptr + token.to(tl.int64) * token_stride
    columns_ptr += group.to(tl.int64) * max_keys * TOKENS + (token - first)
    for start in range(0, topk, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        ptr = row_ptr + column.to(tl.int64) * column_stride
        index = tl.load(ptr, mask=column < topk, other=-1)
        known = (index >= 0) & (index < max_keys)
        tl.store(columns_ptr + index * TOKENS, column.to(tl.int16), mask=known)


# fmt: off
@triton.jit(do_not_specialize=["num_reqs", "topk", "num_splits", "split_size"])
def share_keys_kernel(
    indices_ptr, columns_ptr, groups_ptr, entries_ptr, parts_ptr,
    num_reqs, max_keys, topk, num_splits, split_size,
    token_stride, column_stride,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr, OVERLAP: tl.constexpr,
):
    # fmt: on
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part = tl.program_id(0)
    group = part // num_splits
    num_groups = tl.load(groups_ptr)
    if part == 0:
        tl.store(parts_ptr, num_groups * num_splits)
    if group < num_groups:
        group_ptr = groups_ptr + (1 + group).to(tl.int64) * 4
        first = tl.load(group_ptr)
        tokens = tl.load(group_ptr + 1)
        request = tl.load(group_ptr + 2)
        known_tokens = tl.where((request >= 0) & (request < num_reqs), tokens, 0)

        # The columns of each token, one token after another.
        COLUMNS: tl.constexpr = 128 * GROUPS * WARPS // TOKENS
        place = places(GROUPS, WARPS)
        token = place // COLUMNS
        offset = place % COLUMNS
        column = part % num_splits * split_size + offset
        row_ptr = indices_ptr + first.to(tl.int64) * token_stride
        index = tl.load(
            row_ptr + token.to(tl.int64) * token_stride + column.to(tl.int64) * column_stride,
            mask=(token < known_tokens) & (offset < split_size) & (column < topk),
            other=-1,
        )
        known = (index >= 0) & (index < max_keys)
        # The columns of up to four tokens at once.
        PER_WORD: tl.constexpr = 2 if TOKENS == 2 else 4
        WORDS: tl.constexpr = TOKENS // PER_WORD
        WORD: tl.constexpr = tl.int32 if TOKENS == 2 else tl.int64
        words_ptr = columns_ptr.to(tl.pointer_type(WORD), bitcast=True)
        words_ptr += group.to(tl.int64) * max_keys * WORDS
        chosen = tl.zeros_like(index)
        own_column = chosen
        for w in tl.static_range(WORDS):
            word = tl.load(words_ptr + (index * WORDS + w), mask=known, other=0)
            own = (word >> ((token % PER_WORD) * 16)).to(tl.int32) & 0xFFFF
            own_column = tl.where(token // PER_WORD == w, own, own_column)
            for i in tl.static_range(PER_WORD):
                other = w * PER_WORD + i
                there = (word >> (16 * i)).to(tl.int32) & 0xFFFF
                ptr = row_ptr + there.to(tl.int64) * column_stride
                mask = there < tl.where(other < tokens, topk, 0)
                found = tl.load(ptr, mask=mask, other=-1) == index
                chosen |= tl.where(found, 1 << other, 0)
                row_ptr += token_stride
        bit = tl.full([], 1, tl.int32) << token
        chosen = tl.where(own_column == column, chosen, bit)
        listed = known & ((chosen & (bit - 1)) == 0)
        before, count = rank(listed, GROUPS, WARPS)
        entries_ptr += part.to(tl.int64) * (TOKENS * split_size)
        tl.store(entries_ptr + before, index | (chosen << POSITION_BITS), mask=listed)
        part_ptr = parts_ptr + (1 + part).to(tl.int64) * 4
        tl.store(part_ptr, first)
        tl.store(part_ptr + 1, tokens)
        tl.store(part_ptr + 2, request)
        tl.store(part_ptr + 3, count)


def tokens_of_group(
    num_tokens: int, num_reqs: int, num_heads: int, topk: int, max_keys: int
) -> int:
    """How many tokens share their keys, 2, 4 or 8; 0 where none should, or could.

    There have to be two for each request: of a batch of single tokens, which a padded one may be,
    none has anything to share.
    """
    if num_tokens < max(MIN_TOKENS, 2 * num_reqs) or min(num_reqs, topk, max_keys) == 0:
        return 0
    of_request = triton.cdiv(num_tokens, num_reqs)
    tokens = min(
        MAX_TOKENS,
        64 // triton.next_power_of_2(num_heads),
        triton.next_power_of_2(of_request),
        128 * MAX_GROUPS * MAX_WARPS // triton.next_power_of_2(topk),
    )
    if tokens < 2:
        return 0
    scratch = 2 * tokens * max_keys * max_groups(num_tokens, num_reqs, tokens)
    return tokens if max_keys <= 1 << POSITION_BITS.value and scratch <= MAX_SCRATCH else 0


def expected_groups(num_tokens: int, num_reqs: int, tokens: int) -> int:
    """Of a batch whose requests have as many tokens each."""
    return num_reqs * triton.cdiv(triton.cdiv(num_tokens, num_reqs), tokens)


def max_groups(num_tokens: int, num_reqs: int, tokens: int) -> int:
    """The most groups that there can be: the last of each request, and of what comes before and
    behind them, has one token."""
    return min(num_tokens, (num_tokens + (tokens - 1) * (num_reqs + 2)) // tokens)


def share_keys(
    topk_indices: Tensor, query_start_loc: Tensor, max_keys: int, tokens: int,
    num_splits: int, split_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``entries`` and ``parts``, of positions below ``max_keys``."""
    num_tokens, topk = topk_indices.shape
    num_reqs = query_start_loc.shape[0] - 1
    most = max_groups(num_tokens, num_reqs, tokens)
    columns = topk_indices.new_empty(most, max_keys, tokens, dtype=torch.int16)
    groups = topk_indices.new_empty(1 + most, 4)
    entries = topk_indices.new_empty(most * num_splits, tokens * split_size)
    parts = topk_indices.new_empty(1 + most * num_splits, 4)
    overlap = can_overlap(columns.device)
    map_indices_kernel[(num_tokens,)](
        topk_indices, query_start_loc, columns, groups,
        num_tokens, num_reqs, max_keys, topk,
        *topk_indices.stride(), query_start_loc.stride(0),
        TOKENS=tokens, COLUMNS=_BLOCK_COLUMNS, REQUESTS=_BLOCK_REQUESTS, OVERLAP=overlap,
        num_warps=4,
    )  # fmt: skip
    block = tokens * max(triton.next_power_of_2(split_size), 128 // tokens)
    warps = min(MAX_WARPS, block // 128)
    share_keys_kernel[(most * num_splits,)](
        topk_indices, columns, groups, entries, parts,
        num_reqs, max_keys, topk, num_splits, split_size,
        *topk_indices.stride(),
        TOKENS=tokens, GROUPS=block // (128 * warps), WARPS=warps, OVERLAP=overlap,
        num_warps=warps, launch_pdl=overlap,
    )  # fmt: skip
    return entries, parts
