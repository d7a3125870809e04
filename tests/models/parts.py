"""Layers that several models have in common, each one call of an op on hidden states."""

from typing import Any

import torch
from torch import Tensor

from mtpgraph import ops

from .batches import DIM, HEADS, MAX_SEQ_LEN, WIDTH

DECAY = torch.tensor([-0.5, -1.5])
TAPS = torch.linspace(-1, 1, DIM * WIDTH).view(DIM, WIDTH)


def mamba2(state: Tensor, h: Tensor, state_indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    heads = h.unflatten(1, (HEADS, -1))
    dt, B, C = heads.sum(-1), heads[:, :1], heads[:, 1:]
    y = ops.selective_state_update_(
        state, heads, dt, DECAY, B, C, state_indices, *args, dt_softplus=True, **kwargs
    )
    return h + y.flatten(1)


def short_conv(
    state: Tensor, h: Tensor, state_indices: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    taps = TAPS.to(h.dtype)
    return h + ops.causal_conv1d_update_(state, h, taps, None, state_indices, *args, **kwargs)


def delta(state: Tensor, h: Tensor, state_indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    heads = h.unflatten(1, (HEADS, -1))
    g, beta = -heads.sum(-1).abs(), heads.mean(-1).sigmoid()
    y = ops.gated_delta_update_(
        state, heads, heads * 2, heads - 1, g, beta, state_indices, *args, **kwargs
    )
    return h + y.flatten(1)


def index_scores(
    h: Tensor, index_k: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> Tensor:
    q, weights = h[:, None], torch.ones_like(h[:, :1], dtype=torch.float32)
    return ops.indexer_logits(
        q, weights, index_k, block_table, query_start_loc, seq_lens, MAX_SEQ_LEN
    )
