"""The layers of the example decoder: Mamba-2, sparse MLA with its indexer, gated delta rule.

Each layer has a ``project`` half, shared with the training forward of ``reference.py``, and a
``decode`` half: one step of any number of requests over paged caches and state pools.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpgraph import ops

from .config import Config


class StateCache(NamedTuple):
    """State pools of a recurrent layer; a row of both is one slot."""

    conv: Tensor  # [num_slots, conv_dim, conv_width - 1]
    state: Tensor  # Mamba-2 [num_slots, heads, head_dim, state_dim]; delta [.., key_dim, value_dim]


class AttentionCache(NamedTuple):
    """Paged caches of a sparse-MLA layer."""

    kv: Tensor  # [num_blocks, block_size, latent_dim + rope_dim]
    index_k: Tensor  # uint8 [num_blocks, block_size * (index_dim + 4)]


class Caches(NamedTuple):
    """What a model keeps between steps."""

    layers: list[Any]  # a StateCache or an AttentionCache per layer
    mtp: AttentionCache


class Rows(NamedTuple):
    """What an attention layer needs to know of a step; the words are those of the ops."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    row_lens: Tensor


class States(NamedTuple):
    """What a recurrent layer needs to know of a step."""

    query_start_loc: Tensor
    indices: Tensor  # [num_reqs, next_n], a slot per token; [num_reqs] for a prefill
    first: Tensor  # [num_reqs], the slot a new request starts from
    num_accepted_tokens: Tensor | None
    has_initial_state: Tensor


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.up = nn.Linear(config.dim, 2 * config.mlp_dim, bias=False)
        self.down = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class MambaLayer(nn.Module):
    """Mamba-2 with one group: short convolution, selective state update, gated norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        heads = config.mamba_heads
        self.config = config
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.in_proj = nn.Linear(
            config.dim, config.mamba_dim + config.mamba_conv_dim + heads, bias=False
        )
        self.conv_weight = nn.Parameter(torch.randn(config.mamba_conv_dim, config.conv_width) * 0.2)
        self.conv_bias = nn.Parameter(torch.zeros(config.mamba_conv_dim))
        self.a_log = nn.Parameter(torch.linspace(0.0, 2.5, heads))
        self.d = nn.Parameter(torch.ones(heads))
        dt = torch.logspace(-2.5, -0.5, heads)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.out_norm = nn.RMSNorm(config.mamba_dim, eps=1e-6)
        self.out_proj = nn.Linear(config.mamba_dim, config.dim, bias=False)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate, what goes through the convolution (x, B, C), and dt."""
        c = self.config
        z, xbc, dt = self.in_proj(self.norm(hidden)).split(
            [c.mamba_dim, c.mamba_conv_dim, c.mamba_heads], dim=-1
        )
        return z, xbc, dt

    def split(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        x, b, c_ = xbc.split([c.mamba_dim, c.mamba_state_dim, c.mamba_state_dim], dim=-1)
        return x.unflatten(-1, (c.mamba_heads, c.mamba_head_dim)), b, c_

    def out(self, y: Tensor) -> Tensor:
        """``y`` [.., heads, head_dim], already gated."""
        return self.out_proj(self.out_norm(y.flatten(-2)))

    def decode(self, hidden: Tensor, cache: StateCache, states: States) -> Tensor:
        z, xbc, dt = self.project(hidden)
        ops.reset_states_(cache.conv, states.first, states.has_initial_state)
        xbc = ops.causal_conv1d_update_(
            cache.conv,
            xbc,
            self.conv_weight,
            self.conv_bias,
            states.indices,
            states.query_start_loc,
            num_accepted_tokens=states.num_accepted_tokens,
        )
        x, b, c = self.split(xbc)
        ops.reset_states_(cache.state, states.first, states.has_initial_state)
        y = ops.selective_state_update_(
            cache.state,
            x,
            dt,
            -self.a_log.exp(),
            b.unsqueeze(1),
            c.unsqueeze(1),
            states.indices,
            states.query_start_loc,
            D=self.d,
            z=z.unflatten(-1, (self.config.mamba_heads, self.config.mamba_head_dim)),
            dt_bias=self.dt_bias,
            dt_softplus=True,
            num_accepted_tokens=states.num_accepted_tokens,
        )
        return self.out(y)


class DeltaLayer(nn.Module):
    """Gated delta rule (GDN): short convolution, gated delta update, gated norm per head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        heads, value = config.delta_heads, config.delta_heads * config.delta_value_dim
        self.config = config
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.in_proj = nn.Linear(config.dim, config.delta_conv_dim + value + 2 * heads, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(config.delta_conv_dim, config.conv_width) * 0.2)
        self.a_log = nn.Parameter(torch.linspace(0.0, 1.5, heads))
        dt = torch.logspace(-2.5, -0.5, heads)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.out_norm = nn.RMSNorm(config.delta_value_dim, eps=1e-6)
        self.out_proj = nn.Linear(value, config.dim, bias=False)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The output gate, what goes through the convolution (q, k, v), log decay, and beta."""
        c = self.config
        value = c.delta_heads * c.delta_value_dim
        z, qkv, a, b = self.in_proj(self.norm(hidden)).split(
            [value, c.delta_conv_dim, c.delta_heads, c.delta_heads], dim=-1
        )
        g = -self.a_log.exp() * F.softplus(a + self.dt_bias)
        return z.unflatten(-1, (c.delta_heads, c.delta_value_dim)), qkv, g, b.sigmoid()

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        key, value = c.delta_heads * c.delta_key_dim, c.delta_heads * c.delta_value_dim
        q, k, v = qkv.split([key, key, value], dim=-1)
        return (
            q.unflatten(-1, (c.delta_heads, c.delta_key_dim)),
            k.unflatten(-1, (c.delta_heads, c.delta_key_dim)),
            v.unflatten(-1, (c.delta_heads, c.delta_value_dim)),
        )

    def out(self, o: Tensor, z: Tensor) -> Tensor:
        return self.out_proj((self.out_norm(o) * F.silu(z)).flatten(-2))

    def decode(self, hidden: Tensor, cache: StateCache, states: States) -> Tensor:
        z, qkv, g, beta = self.project(hidden)
        ops.reset_states_(cache.conv, states.first, states.has_initial_state)
        qkv = ops.causal_conv1d_update_(
            cache.conv,
            qkv,
            self.conv_weight,
            None,
            states.indices,
            states.query_start_loc,
            num_accepted_tokens=states.num_accepted_tokens,
        )
        q, k, v = self.split(qkv)
        ops.reset_states_(cache.state, states.first, states.has_initial_state)
        o = ops.gated_delta_update_(
            cache.state,
            q,
            k,
            v,
            g,
            beta,
            states.indices,
            states.query_start_loc,
            num_accepted_tokens=states.num_accepted_tokens,
        )
        return self.out(o, z)
