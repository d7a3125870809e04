"""The lightning indexer in one op: ``indexer_logits`` into a scratch tensor, then ``indexer_topk``.

    logits   = indexer_logits(q, weights, k_cache, ...)     [num_tokens, max_seq_len] fp32
    out      = indexer_topk(logits, row_lens, topk)         [num_tokens, topk] int32

The kernels, layouts and grids are those of the two ops, so every logit and every choice has their
bits. Three things are left out, none of which shows in the result: columns that no row of a request
sees are not filled, requests of at most topk keys are not scored, as all their keys are chosen, and
the row lengths come from the first kernel, not from a launch of their own. And the first kernel
asks the L2 to hold the logits (``_indexer_logits_hopper``), if they are few, and the second to give
them up: the keys, which are read once and are many more, would drive them out.
"""

import torch
from torch import Tensor

from .indexer_logits import score_keys
from .indexer_topk import largest_positions

# Rows of the scratch tensor start on a multiple of 16 bytes.
_ALIGNMENT = 16  # elements: Triton specialises strides on this multiple


def launch(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    topk: int,
) -> Tensor:
    num_tokens = q.shape[0]
    # Where all keys are chosen anyhow, no logit is written or read.
    width = 0 if topk >= max_seq_len else -(-max_seq_len // _ALIGNMENT) * _ALIGNMENT
    logits = torch.empty(num_tokens, width, dtype=torch.float32, device=q.device)
    row_lens = torch.empty(num_tokens, dtype=torch.int32, device=q.device)
    score_keys(
        q, weights, k_cache, block_table, query_start_loc, seq_lens, max_seq_len, logits, row_lens,
        topk,
    )  # fmt: skip
    return largest_positions(logits, row_lens, topk, max_seq_len, last_use=True)
