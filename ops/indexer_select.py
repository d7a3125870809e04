"""The lightning indexer in one op: score the keys, keep the topk largest."""

from torch import Tensor

from ._register import register
from ._rows import token_requests, token_row_lens
from .indexer_logits import check_logits, score_keys
from .indexer_topk import check_topk, largest_positions


def indexer_select(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    topk: int,
) -> Tensor:
    """Select keys for each query token without handing out its logits.

    The result is that of ``indexer_topk(indexer_logits(q, ..., max_seq_len), row_lens, topk)``
    bit for bit, with the row lengths of ``flatten_decode``. The maths is that of DeepSeek-V3.2's
    lightning indexer.

    Args:
        q: float8_e4m3fn, bf16, fp16 or fp32 [num_tokens, num_heads, head_dim]; the scale of an
            fp8 query belongs in ``weights``
        weights: fp32 [num_tokens, num_heads]
        k_cache: uint8 [num_blocks, block_size * (head_dim + 4)], see ``indexer_cache_write_``
        block_table: int32 [num_reqs, max_blocks], physical block of each logical block; a block
            outside ``0 .. num_blocks - 1`` has its keys scored -inf
        query_start_loc: int32 [num_reqs + 1], first query token of each request
        seq_lens: int32 [num_reqs], keys per request, this step's tokens included; 0 is padding
        max_seq_len: keys considered, ``1 .. max_blocks * block_size``; longer rows are cut
        topk: positions per row, at least 1; may exceed ``max_seq_len``

    Returns:
        int32 [num_tokens, topk], positions in ascending order, then -1

    Raises:
        TypeError: a dtype is not the one above
        ValueError: shapes, devices, strides or alignment do not fit, or max_seq_len or topk is
            out of range
    """
    return _op(q, weights, k_cache, block_table, query_start_loc, seq_lens, max_seq_len, topk)


def _check(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    topk: int,
) -> None:
    check_logits(q, weights, k_cache, block_table, query_start_loc, seq_lens, max_seq_len)
    check_topk(topk)


def _reference(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    topk: int,
) -> Tensor:
    logits = score_keys(q, weights, k_cache, block_table, query_start_loc, seq_lens, max_seq_len)
    requests = token_requests(query_start_loc, q.shape[0])
    row_lens = token_row_lens(query_start_loc, seq_lens, requests)
    return largest_positions(logits, row_lens, topk)


def _fake(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    topk: int,
) -> Tensor:
    return seq_lens.new_empty(q.shape[0], topk)


_op = register(
    "indexer_select(Tensor q, Tensor weights, Tensor k_cache, Tensor block_table,"
    " Tensor query_start_loc, Tensor seq_lens, SymInt max_seq_len, SymInt topk) -> Tensor",
    check=_check,
    reference=_reference,
    fake=_fake,
    rows={"q": "token", "weights": "token"},
    results=["topk_indices"],
)
