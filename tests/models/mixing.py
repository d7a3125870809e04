"""Layers that look along the batch, and layers that only seem to."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpgraph import ops

from .batches import DIM
from .corpus import Model

WEIGHT = torch.linspace(-1, 1, 4 * DIM * DIM).view(4, DIM, DIM)
GATE = torch.linspace(1, -1, 4 * DIM).view(4, DIM) ** 3

Layer = Callable[[Tensor], Tensor]


def with_layer(layer: Layer) -> Callable[..., Tensor]:
    """A step of one layer over hidden states, whose rows are tokens by what follows."""

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        y = layer(x)
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return y + row_lens[:, None]

    return step


class Normed(nn.Module):
    """A step with a batch norm in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return self.norm(x) + row_lens[:, None]


def by_length(
    x: Tensor, row_bias: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Longest requests first."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    order = seq_lens.argsort(descending=True, stable=True)
    return x + row_lens[:, None], row_bias[order]


def static_row_behind(x: Tensor) -> Tensor:
    sink = torch.zeros(1, DIM)
    return torch.cat([x, sink])[1:]


def static_row_in_front(x: Tensor) -> Tensor:
    """A shift by one row, static row first: padding stays behind."""
    sink = torch.zeros(1, DIM)
    return torch.cat([sink, x])[:-1]


def experts_by_row(x: Tensor) -> Tensor:
    """A mixture of experts in which each token gathers its own."""
    scores, chosen = F.linear(x, GATE).softmax(-1).topk(2)
    return torch.einsum("tkij,tj,tk->ti", WEIGHT[chosen], x, scores)


def experts_dense(x: Tensor) -> Tensor:
    """All experts for every token, those not chosen times zero."""
    scores = F.linear(x, GATE).softmax(-1)
    top = scores.topk(2).values[:, -1:]
    scores = scores.masked_fill(scores < top, 0)
    return torch.einsum("eij,tj,te->ti", WEIGHT, x, scores)


def experts_sorted(x: Tensor) -> Tensor:
    """Tokens sorted by expert, as a grouped product wants them, and put back."""
    expert = F.linear(x, GATE).argmax(-1)
    order = expert.argsort(stable=True)
    y = torch.einsum("tij,tj->ti", WEIGHT[expert[order]], x[order])
    return y[order.argsort()]


def balanced(x: Tensor) -> Tensor:
    """The load of the experts over the batch takes part."""
    scores = F.linear(x, GATE).softmax(-1)
    load = scores.mean(0)
    return x * (scores / load).amax(-1, keepdim=True)


def size_as_value(x: Tensor) -> Tensor:
    return x / x.shape[0]


def size_as_branch(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 5 else x * 3


def last_row(x: Tensor) -> Tensor:
    return x + x[-1]


def einsum_rows(x: Tensor) -> Tensor:
    return torch.einsum("td,ode->te", x, WEIGHT)


def einsum_gram(x: Tensor) -> Tensor:
    """Attention of all tokens to all, without saying so."""
    return torch.einsum("td,sd,se->te", x, x, x)


SAFE: dict[str, Layer] = {
    "static row in front": static_row_in_front,
    "experts by row": experts_by_row,
    "experts, dense": experts_dense,
    "einsum of rows": einsum_rows,
    "softmax of features": lambda x: x.softmax(-1),
    # padding comes last, so a sum up to a real row has none of it
    "cumsum of tokens": lambda x: x.cumsum(0),
}

MIXED: dict[str, tuple[Layer, str]] = {
    "mean of the batch": (lambda x: x - x.mean(0), "x - x.mean(0)"),
    "softmax of the batch": (lambda x: F.softmax(x, dim=0), "F.softmax(x, dim=0)"),
    "static row behind": (static_row_behind, "torch.cat([x, sink])[1:]"),
    "roll": (lambda x: x.roll(1, 0), "x.roll(1, 0)"),
    "cumsum from behind": (lambda x: x.flip(0).cumsum(0), "x.flip(0)"),
    "load of the experts": (balanced, "scores.mean(0)"),
    "last row": (last_row, "x + x[-1]"),
    "einsum across": (einsum_gram, '"td,sd,se->te"'),
}

MODELS = [
    *(Model(name=name, step=with_layer(layer)) for name, layer in SAFE.items()),
    *(
        Model(
            name=name,
            step=with_layer(layer),
            findings=(("rows mixed", line),),
            mixes=line,
        )
        for name, (layer, line) in MIXED.items()
    ),
    Model(
        name="experts, sorted",
        step=with_layer(experts_sorted),
        # sorted and put back, which takes more than a rule for each op to see
        findings=(
            ("rows mixed", "expert.argsort(stable=True)"),
            ("rows mixed", "y[order.argsort()]"),
        ),
    ),
    Model(
        name="sorted by length",
        step=by_length,
        # padding has the least length, so it comes last and no real row moves
        static=("row_bias",),  # nothing says what an index into it counts
        findings=(("rows mixed", "seq_lens.argsort"), ("padding unknown", "row_bias[order]")),
    ),
    Model(name="batch norm, eval", build=lambda: Normed().eval().requires_grad_(False)),
    Model(
        name="batch norm, train",
        build=lambda: Normed().requires_grad_(False),
        batches="several",
        findings=(("rows mixed", "self.norm(x)"),),
        mixes="self.norm(x)",
    ),
    Model(
        name="batch size as a value",
        step=with_layer(size_as_value),
        findings=(("batch size as value", "x / x.shape[0]"),),
        mixes="x / x.shape[0]",
    ),
    Model(
        name="branch on the batch size",
        step=with_layer(size_as_branch),
        findings=(("batch size as value", "x.shape[0] > 5"),),
        mixes="x.shape[0] > 5",
    ),
]
