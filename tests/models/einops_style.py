"""Shapes by einops. Its functions are imported when a step is made: the library is optional."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtpgraph import ops

from .batches import HEADS, NEXT_N, ssm_pool
from .corpus import Model
from .parts import DECAY

OPAQUE = torch.__version__.startswith("2.11.")


def mamba_by_patterns() -> Callable[..., Tensor]:
    from einops import rearrange, repeat  # pyright: ignore[reportMissingImports]

    def step(
        x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_indices: Tensor, ssm: Tensor
    ) -> Tensor:
        old = ops.has_initial_state(query_start_loc, seq_lens)
        heads = rearrange(x, "t (h d) -> t h d", h=HEADS)
        dt = repeat(x[:, 0], "t -> t h", h=HEADS)
        ops.reset_states_(ssm, rearrange(state_indices, "r n -> n r")[0], old)
        y = ops.selective_state_update_(
            ssm,
            heads,
            dt,
            DECAY,
            heads[:, :1],
            heads[:, 1:],
            state_indices,
            query_start_loc,
            dt_softplus=True,
        )
        return rearrange(y, "t h d -> t (h d)")

    return step


def drafts_by_patterns() -> Callable[..., Any]:
    from einops import rearrange, reduce  # pyright: ignore[reportMissingImports]

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        drafts = rearrange(x + row_lens[:, None], "(r n) d -> r n d", n=NEXT_N)
        return reduce(drafts, "r n d -> r d", "mean"), drafts.softmax(-1)

    return step


def mean_by_pattern() -> Callable[..., Tensor]:
    from einops import reduce  # pyright: ignore[reportMissingImports]

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        center = reduce(x, "t d -> d", "mean")
        return x - center + row_lens[:, None]

    return step


def attention_by_einsum(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, keys: Tensor
) -> Tensor:
    """A table of learned keys, the same for every token."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    scores = torch.einsum("td,kd->tk", x, keys).softmax(-1)
    return torch.einsum("tk,kd->td", scores, keys) + row_lens[:, None]


MODELS = [
    Model(
        name="einops, Mamba-2",
        build=mamba_by_patterns,
        kept=lambda: {"ssm": ssm_pool()},
        # einops asks Dynamo of torch 2.11 not to look into it
        rewrites={} if OPAQUE else {"fuse_state_reset": 1},
        left_alone=(("fuse_state_reset", "rearrange"),) if OPAQUE else (),
        needs="einops",
    ),
    Model(
        name="einops, drafts",
        build=drafts_by_patterns,
        batches="uniform",
        needs="einops",
    ),
    Model(
        name="einops, mean of the batch",
        build=mean_by_pattern,
        needs="einops",
        findings=(("rows mixed", 'reduce(x, "t d -> d", "mean")'),),
        mixes='reduce(x, "t d -> d", "mean")',
    ),
    Model(
        name="einsum with a table",
        step=attention_by_einsum,
        kept=lambda: {"keys": torch.linspace(-1, 1, 5 * 8).view(5, 8).sin()},
    ),
]
