"""Scores of the lightning indexer: every query token against every key of its request."""

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_lens, check_rule, check_shape
from ._index_cache import check_index_cache, code_values, index_block_size, scale_bytes
from ._register import register
from ._rows import row_bounds

# Bytes that the reference spends on one pass over the keys of a group of requests.
_CHUNK_BYTES = 1 << 26


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Score the keys of each request for each of its query tokens, for any mix of query lengths.

    ::

        logits[t, s] = sum_h weights[t, h] * relu(q[t, h] . key[s])      s < row_len(t)
        row_len      = max(0, seq_len - query_len + j + 1)               token j of its request

    as in DeepSeek-V3.2's lightning indexer, with ``key[s] = codes[s] * scale[s]`` from the paged
    fp8 cache. Blocks that no row of the request can see are not read.

    Args:
        q: float8_e4m3fn, bf16, fp16 or fp32 [num_tokens, num_heads, head_dim]; the scale of an
            fp8 query belongs in ``weights``
        weights: fp32 [num_tokens, num_heads]
        k_cache: uint8 [num_blocks, block_size * (head_dim + 4)], see ``indexer_cache_write_``
        block_table: int32 [num_reqs, max_blocks], physical block of each logical block; a block
            outside ``0 .. num_blocks - 1`` has its keys scored -inf
        query_start_loc: int32 [num_reqs + 1], first query token of each request
        seq_lens: int32 [num_reqs], keys per request, this step's tokens included; 0 is padding
        max_seq_len: width of the result, ``1 .. max_blocks * block_size``; longer rows are cut
        logits_dtype: fp32, or bf16 for half of the memory: each score is computed in fp32 and
            rounded once

    Returns:
        logits_dtype [num_tokens, max_seq_len], -inf at and past each row's length. A NaN key
        scores NaN.

    Raises:
        TypeError: a dtype is not the one above
        ValueError: shapes, devices, strides or alignment do not fit, or max_seq_len is out of
            range
    """
    batch = (block_table, query_start_loc, seq_lens, max_seq_len)
    if logits_dtype == torch.float32:
        # one form for what is the same; and AOTInductor of torch 2.11 misreads any dtype
        return _op(q, weights, k_cache, *batch)
    return _op(q, weights, k_cache, *batch, logits_dtype)


def check_logits(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    logits_dtype: torch.dtype | None = None,
) -> None:
    """The check, which ``indexer_select`` shares."""
    check_dtype("q", q, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)
    check_dtype("weights", weights, torch.float32)
    check_dtype("block_table", block_table, torch.int32)
    check_shape("q", q, num_tokens=None, num_heads=None, head_dim=None)
    num_tokens, num_heads, head_dim = q.shape
    check_shape("weights", weights, num_tokens=num_tokens, num_heads=num_heads)
    check_rule(head_dim >= 1, "q", "have a head_dim of at least 1", list(q.shape))
    check_index_cache(k_cache, head_dim)
    check_lens(query_start_loc, seq_lens)
    check_shape("block_table", block_table, num_reqs=seq_lens.shape[0], max_blocks=None)
    check_rule(max_seq_len >= 1, "max_seq_len", "be at least 1", max_seq_len)
    check_rule(
        max_seq_len <= block_table.shape[1] * index_block_size(k_cache, head_dim),
        "block_table",
        f"have the columns that max_seq_len {max_seq_len} needs at block size "
        f"{index_block_size(k_cache, head_dim)}",
        list(block_table.shape),
    )
    check_device(
        "q",
        q.device,
        weights=weights,
        k_cache=k_cache,
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
    )
    if logits_dtype not in (None, torch.float32, torch.bfloat16):
        raise TypeError(f"logits_dtype must be torch.float32 or torch.bfloat16, got {logits_dtype}")


def score_keys(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """The reference, which ``indexer_select`` shares.

    Dots are summed in float64 and rounded once, to fp32, and from there to ``logits_dtype``. They
    are then exact in all but freak cases, so a row has the same scores, and selects the same keys,
    whichever batch it is computed in.
    """
    logits = weights.new_full((q.shape[0], max_seq_len), float("-inf"), dtype=logits_dtype)
    if k_cache.shape[0] == 0:
        return logits
    bounds = row_bounds(query_start_loc, q.shape[0])
    lens = seq_lens.tolist()
    # Requests of one query length make one dense group; a step has few lengths.
    groups: dict[int, list[int]] = {}
    for request, seq_len in enumerate(lens):
        begin, end = bounds[request]
        query_len = end - begin
        if query_len > 0 and seq_len > 0:
            groups.setdefault(query_len, []).append(request)
    q, weights = q.double(), weights.double()
    for query_len, requests in groups.items():
        longest = min(max_seq_len, max(lens[request] for request in requests))
        members = torch.tensor(requests, dtype=torch.int64, device=q.device)
        begins = query_start_loc[members].long().clamp_min(0)
        tokens = begins.unsqueeze(1) + torch.arange(query_len, device=q.device)
        _score_group(
            logits,
            q[tokens],
            weights[tokens],
            k_cache,
            block_table[members],
            seq_lens[members],
            tokens,
            longest,
        )
    return logits


def _score_group(
    logits: Tensor,
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    tokens: Tensor,
    longest: int,
) -> None:
    """Fill ``logits[tokens, :longest]`` for requests of equal query length."""
    num_reqs, query_len, num_heads, head_dim = q.shape
    block_size = index_block_size(k_cache, head_dim)
    num_blocks = -(-longest // block_size)
    q = q.flatten(1, 2)
    last = seq_lens.unsqueeze(1) - query_len + torch.arange(query_len, device=q.device)
    key_bytes = 8 * num_reqs * (head_dim + query_len * num_heads)
    step = max(1, _CHUNK_BYTES // (key_bytes * block_size))
    for first in range(0, num_blocks, step):
        blocks = block_table[:, first : min(first + step, num_blocks)]
        start = first * block_size
        positions = torch.arange(start, start + blocks.shape[1] * block_size, device=q.device)
        # Garbage past the needed blocks is replaced before it can be followed.
        valid = (blocks >= 0) & (blocks < k_cache.shape[0])
        valid &= positions[::block_size] < seq_lens.unsqueeze(1)
        pages = k_cache[torch.where(valid, blocks, 0).flatten().long()]
        codes = code_values(pages, head_dim).view(num_reqs, -1, head_dim)
        scales = scale_bytes(pages, head_dim).contiguous().view(torch.float32)

        dots = torch.bmm(q, codes.transpose(1, 2)).relu_()
        dots = dots.view(num_reqs, query_len, num_heads, positions.shape[0])
        scores = torch.matmul(weights.unsqueeze(2), dots).squeeze(2)
        scores = (scores * scales.view(num_reqs, 1, -1)).float()
        seen = (positions <= last.unsqueeze(2)) & valid.repeat_interleave(
            block_size, dim=1
        ).unsqueeze(1)
        scores = torch.where(seen, scores, float("-inf"))
        scores = scores[:, :, : longest - start].to(logits.dtype)
        logits[tokens, start : start + scores.shape[2]] = scores


def _fake(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    return weights.new_empty(q.shape[0], max_seq_len, dtype=logits_dtype)


_op = register(
    "indexer_logits(Tensor q, Tensor weights, Tensor k_cache, Tensor block_table,"
    " Tensor query_start_loc, Tensor seq_lens, SymInt max_seq_len,"
    " ScalarType? logits_dtype=None) -> Tensor",
    check=check_logits,
    reference=score_keys,
    fake=_fake,
    rows={"q": "token", "weights": "token"},
    results=["token"],
)
