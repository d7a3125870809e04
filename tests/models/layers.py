"""Where a step lives and where its caches are: modules, methods, partials, dataclasses, dicts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mtpgraph import ops

from .batches import DIM, PLACES, STATE_DIM, VOCAB, conv_pool, kv_cache, nan_pool, ssm_pool
from .corpus import Model
from .parts import delta, mamba2, short_conv


class Block(nn.Module):
    """A recurrent layer that owns its states."""

    ssm: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, DIM)
        self.register_buffer("ssm", ssm_pool())

    def forward(self, x: Tensor, state_indices: Tensor, starts: Tensor, old: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + mamba2(self.ssm, h, state_indices, starts, has_initial_state=old)


class Network(nn.Module):
    """Embedding, two blocks with buffers for caches, and a head over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(
        self, tokens: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_indices: Tensor
    ) -> Tensor:
        x = self.embed(tokens)
        old = ops.has_initial_state(query_start_loc, seq_lens)
        for block in self.blocks:
            x = block(x, state_indices, query_start_loc, old)
        return self.head(x)

    def greedy(
        self, tokens: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_indices: Tensor
    ) -> Tensor:
        """A method of the module, as a step."""
        return self(tokens, query_start_loc, seq_lens, state_indices).argmax(-1)


def network() -> Network:
    return Network().eval().requires_grad_(False)


@dataclasses.dataclass
class Caches:
    conv: Tensor
    ssm: Tensor


def dataclass_of_caches(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_indices: Tensor, caches: Caches
) -> Tensor:
    old = ops.has_initial_state(query_start_loc, seq_lens)
    x = short_conv(caches.conv, x, state_indices, query_start_loc, has_initial_state=old)
    return mamba2(caches.ssm, x, state_indices, query_start_loc, has_initial_state=old)


def dict_of_caches(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    state_indices: Tensor,
    caches: dict[str, Any],
) -> Tensor:
    """Layers find their caches by name."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    for name, cache in caches.items():
        if name.startswith("attention"):
            ops.kv_cache_write_(x, slot_mapping, cache)
        else:
            x = delta(cache["state"], x, state_indices, query_start_loc, has_initial_state=old)
    return x


def with_layers(
    layers: list[Callable[..., Tensor]],
    x: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    states: list[Tensor],
) -> Tensor:
    for layer, state in zip(layers, states, strict=True):
        x = layer(state, x, state_indices, query_start_loc)
    return x


def mamba1(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor,
    ssm: Tensor,
) -> Tensor:
    """[num_tokens, dim] and a state per channel."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    A = -torch.ones(DIM, STATE_DIM)
    B, C = x.split(STATE_DIM, -1)
    ops.reset_states_(ssm, state_indices[:, 0], old)
    return ops.selective_state_update_(
        ssm,
        x,
        x.abs(),
        A,
        B.contiguous(),
        C.contiguous(),
        state_indices,
        query_start_loc,
        z=x + 1,
        num_accepted_tokens=num_accepted_tokens,
    )


def of_dtype(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor,
    kv: Tensor,
    conv: Tensor,
    ssm: Tensor,
) -> Tensor:
    """Accepted tokens are given, the mask comes with the update, hidden states are narrow."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    given = {"has_initial_state": old, "num_accepted_tokens": num_accepted_tokens}
    ops.kv_cache_write_(x, slot_mapping, kv)
    x = short_conv(conv, x, state_indices, query_start_loc, **given)
    x = mamba2(ssm, x, state_indices, query_start_loc, **given)
    return x.float()


def caches_of(dtype: torch.dtype) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "kv": kv_cache(dtype),
        "conv": conv_pool(dtype=dtype),
        "ssm": ssm_pool(dtype=dtype),
    }


MODELS = [
    Model(name="module with buffers", build=network),
    Model(name="method of a module", build=lambda: network().greedy, inductor=True),
    Model(
        name="dataclass of caches",
        step=dataclass_of_caches,
        kept=lambda: {"caches": Caches(conv_pool(), ssm_pool())},
    ),
    Model(
        name="dict of caches",
        step=dict_of_caches,
        kept=lambda: {
            "caches": {
                "delta.0": {"state": ssm_pool()},
                "attention.1": kv_cache(),
                "delta.2": {"state": ssm_pool()},
            }
        },
    ),
    Model(
        name="partial",
        step=functools.partial(with_layers, [mamba2, delta]),
        kept=lambda: {"states": [torch.zeros_like(ssm_pool()) for _ in range(2)]},
    ),
    Model(
        name="Mamba-1",
        step=mamba1,
        kept=lambda: {"ssm": nan_pool(PLACES * 2, DIM, STATE_DIM)},
        rewrites={"fuse_state_reset": 1},
    ),
    *(
        Model(
            name=f"hybrid in {str(dtype).removeprefix('torch.')}",
            step=of_dtype,
            dtype=dtype,
            kept=caches_of(dtype),
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ),
]
