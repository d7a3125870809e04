"""Sparse MLA in its absorbed form, with the lightning indexer that chooses its keys."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mtpgraph import ops

from .config import Config
from .layers import AttentionCache, Rows


class Projections(NamedTuple):
    query: Tensor  # [.., num_heads, latent_dim + rope_dim]
    key: Tensor  # [.., latent_dim + rope_dim]
    index_q: Tensor  # [.., index_heads, index_dim]
    index_k: Tensor  # [.., index_dim]
    index_weights: Tensor  # [.., index_heads]


class AttentionLayer(nn.Module):
    """Multi-head latent attention over the ``topk`` keys that the indexer scores highest."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        self.scale = (c.nope_dim + c.rope_dim) ** -0.5
        self.norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.wq = nn.Linear(c.dim, c.num_heads * (c.nope_dim + c.rope_dim), bias=False)
        self.wkv = nn.Linear(c.dim, c.kv_dim, bias=False)
        self.kv_norm = nn.RMSNorm(c.latent_dim, eps=1e-6)
        # One row block per head: from the latent to the head's key, and to the head's value.
        self.key_up = nn.Linear(c.latent_dim, c.num_heads * c.nope_dim, bias=False)
        self.value_up = nn.Linear(c.latent_dim, c.num_heads * c.value_dim, bias=False)
        self.wo = nn.Linear(c.num_heads * c.value_dim, c.dim, bias=False)
        self.index_q = nn.Linear(c.dim, c.index_heads * c.index_dim, bias=False)
        self.index_k = nn.Linear(c.dim, c.index_dim, bias=False)
        self.index_norm = nn.RMSNorm(c.index_dim, eps=1e-6)
        self.index_weights = nn.Linear(c.dim, c.index_heads, bias=False)

    def project(self, hidden: Tensor, positions: Tensor) -> Projections:
        """Everything that depends on one token alone; ``positions`` [..] has no heads."""
        c = self.config
        x = self.norm(hidden)
        # The indexer learns from the attention, never the other way round.
        x_index = x.detach()
        q = self.wq(x).unflatten(-1, (c.num_heads, -1))
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], dim=-1)
        key_up = self.key_up.weight.unflatten(0, (c.num_heads, c.nope_dim))
        q_latent = torch.einsum("...hn,hnl->...hl", q_nope, key_up)
        latent, k_rope = self.wkv(x).split([c.latent_dim, c.rope_dim], dim=-1)
        return Projections(
            query=torch.cat([q_latent, rotate(q_rope, positions.unsqueeze(-1))], dim=-1),
            key=torch.cat([self.kv_norm(latent), rotate(k_rope, positions)], dim=-1),
            index_q=rotate(
                self.index_q(x_index).unflatten(-1, (c.index_heads, c.index_dim)),
                positions.unsqueeze(-1),
            ),
            index_k=rotate(self.index_norm(self.index_k(x_index)), positions),
            index_weights=self.index_weights(x_index) * (c.index_heads * c.index_dim) ** -0.5,
        )

    def out(self, attended: Tensor) -> Tensor:
        """``attended`` [.., num_heads, latent_dim]"""
        c = self.config
        value_up = self.value_up.weight.unflatten(0, (c.num_heads, c.value_dim))
        return self.wo(torch.einsum("...hl,hvl->...hv", attended, value_up).flatten(-2))

    def decode(self, hidden: Tensor, cache: AttentionCache, rows: Rows) -> tuple[Tensor, Tensor]:
        """Returns the layer's output and the ``topk_indices`` it attended to."""
        p = self.project(hidden, (rows.row_lens - 1).clamp(min=0))
        ops.kv_cache_write_(p.key, rows.slot_mapping, cache.kv)
        ops.indexer_cache_write_(p.index_k, rows.slot_mapping, cache.index_k)
        max_seq_len = rows.block_table.shape[1] * cache.kv.shape[1]
        logits = ops.indexer_logits(
            p.index_q,
            p.index_weights,
            cache.index_k,
            rows.block_table,
            rows.query_start_loc,
            rows.seq_lens,
            max_seq_len,
        )
        topk_indices = ops.indexer_topk(logits, rows.row_lens, self.config.topk)
        return self.attend(p.query, cache, topk_indices, rows), topk_indices

    def decode_shared(
        self, hidden: Tensor, cache: AttentionCache, topk_indices: Tensor, rows: Rows
    ) -> Tensor:
        """IndexShare: attend to given keys. The index key of each token is written all the same,
        for later steps will choose among them."""
        p = self.project(hidden, (rows.row_lens - 1).clamp(min=0))
        ops.kv_cache_write_(p.key, rows.slot_mapping, cache.kv)
        ops.indexer_cache_write_(p.index_k, rows.slot_mapping, cache.index_k)
        return self.attend(p.query, cache, topk_indices, rows)

    def attend(
        self, query: Tensor, cache: AttentionCache, topk_indices: Tensor, rows: Rows
    ) -> Tensor:
        attended, _ = ops.sparse_mla_decode(
            query,
            cache.kv,
            topk_indices,
            rows.block_table,
            rows.query_start_loc,
            self.scale,
            self.config.latent_dim,
        )
        return self.out(attended)


def rotate(x: Tensor, positions: Tensor, rope_dim: int = 16) -> Tensor:
    """Rotary embedding of the first ``rope_dim`` numbers of the last dimension of ``x``."""
    half = rope_dim // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    angles = positions.unsqueeze(-1) * torch.exp(steps * (-9.2103403719761836 / half))
    cos, sin = angles.cos(), angles.sin()
    a, b, rest = x.split([half, half, x.shape[-1] - rope_dim], dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)
