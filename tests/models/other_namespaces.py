"""Custom ops that are not ours: declared, declared for their writes, and unknown."""

import torch
from torch import Tensor

import mtpgraph
from mtpgraph import ops

from .batches import DIM, kv_cache
from .corpus import Model


@torch.library.custom_op("corpus::rotate", mutates_args=())
def rotate(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None].to(x.dtype)
    return x * angle.cos() + x.flip(-1) * angle.sin()


@rotate.register_fake
def _(x: Tensor, positions: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("corpus::rotate_unknown", mutates_args=())
def rotate_unknown(x: Tensor, positions: Tensor) -> Tensor:
    return rotate(x, positions)


@rotate_unknown.register_fake
def _(x: Tensor, positions: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("corpus::store", mutates_args=("cache",))
def store(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    rows = cache.view(-1, cache.shape[-1])
    rows[slots[slots >= 0]] = x[slots >= 0]


@store.register_fake
def _(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    return None


@torch.library.custom_op("corpus::level", mutates_args=())
def level(x: Tensor) -> Tensor:
    """Takes the mean of the batch away: nobody should declare this one independent."""
    return x - x.mean(0)


@level.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


mtpgraph.declare(
    "corpus::rotate",
    pad_values={"positions": "any"},
    rows={"x": "token", "positions": "token"},
    results="token",
    row_independent=True,
)
mtpgraph.declare(
    "corpus::store",
    pad_values={"slots": -1},
    rows={"x": "token", "slots": "token"},
    results=(),
    row_independent=True,
)


def declared(x: Tensor, positions: Tensor) -> Tensor:
    return rotate(x, positions) + 1


def declared_write(x: Tensor, slot_mapping: Tensor, kv: Tensor) -> Tensor:
    store(x, slot_mapping, kv)
    return x.tanh()


def undeclared(x: Tensor, positions: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return rotate_unknown(x, positions) + row_lens[:, None]


def undeclared_and_mixing(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return level(x) + row_lens[:, None]


def undeclared_on_weights(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, weight: Tensor
) -> Tensor:
    """Nothing that grows goes through the op, so nothing needs to be known of it."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return x * level(weight)[0] + row_lens[:, None]


def nothing_declared(x: Tensor) -> Tensor:
    """No op says which arguments grow."""
    return torch.nn.functional.silu(x) * 2


MODELS = [
    Model(name="op of another, declared", step=declared),
    Model(
        name="op of another, declared to write",
        step=declared_write,
        kept=lambda: {"kv": kv_cache()},
    ),
    Model(
        name="op of another, undeclared",
        step=undeclared,
        static=("positions",),  # that the op takes them by token is as little known
        findings=(("rows mixed", "rotate_unknown(x, positions)"),),
    ),
    Model(
        name="op of another, undeclared and mixing",
        step=undeclared_and_mixing,
        findings=(("rows mixed", "level(x)"),),
        mixes="level(x)",
    ),
    Model(
        name="op of another, on weights",
        step=undeclared_on_weights,
        kept=lambda: {"weight": torch.linspace(0, 1, 3 * DIM).view(3, DIM)},
    ),
    Model(
        name="nothing declared",
        step=nothing_declared,
        static=("x",),
        findings=(("padding unknown", ""),),
    ),
]
