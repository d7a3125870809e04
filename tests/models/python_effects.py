"""Python around the graph: lists, counters, prints, loops and branches over sizes."""

from typing import Any

import torch
from torch import Tensor, nn

from mtpgraph import ops

from .batches import DIM
from .corpus import Model

seen: list[Any] = []
calls = 0


def appends(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    seen.append("called")
    return x + row_lens[:, None]


def collects_hidden(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """A list that is local, and returned."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    hidden = []
    for scale in (1, 2, 3):
        x = x * scale + row_lens[:, None]
        hidden.append(x)
    return x, hidden


def prints(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    x = x + row_lens[:, None]
    print("step")
    return x * 2


def counts_calls(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    global calls
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    calls = calls + 1
    return x + row_lens[:, None]


class Counting(nn.Module):
    """A module that counts its calls on the device."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.scale = nn.Parameter(torch.linspace(1, 2, DIM), requires_grad=False)

    def forward(self, x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        self.steps.add_(1)
        return x * self.scale + row_lens[:, None]


def loops_over_rows(
    x: Tensor, row_bias: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """One turn per request: the size of the batch becomes part of the program."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    rows = [row_bias[r] * seq_lens[r] for r in range(seq_lens.shape[0])]
    return x + row_lens[:, None], torch.stack(rows)


def asserts_shapes(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """Checks that hold whatever the batch."""
    assert x.dim() == 2
    assert x.shape[1] == DIM, f"hidden must have {DIM} features, got {x.shape[1]}"
    assert query_start_loc.shape[0] == seq_lens.shape[0] + 1
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return x + row_lens[:, None]


def optional(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """Constants and absent arguments decide what is traced."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    if bias is not None:
        x = x + bias
    return x * scale + row_lens[:, None]


MODELS = [
    Model(name="list of the module appended to", step=appends, recompiles=True),
    Model(name="list of hidden states", step=collects_hidden),
    Model(name="print", step=prints, graphs=2, breaks=('print("step")',), refused='print("step")'),
    Model(name="global counter", step=counts_calls, recompiles=None),
    Model(
        name="counter in a buffer",
        build=Counting,
        # a warm-up would count as well
        findings=(("rows mixed", "self.steps.add_(1)"),),
        mixes="self.steps.add_(1)",
    ),
    Model(
        name="loop over rows",
        step=loops_over_rows,
        findings=(("padding unknown", "ops.flatten_decode("),),
        static=("row_bias", "query_start_loc", "seq_lens"),
    ),
    Model(name="asserts of shapes", step=asserts_shapes),
    Model(
        name="constants",
        step=optional,
        kept=lambda: {"bias": None, "scale": 0.5},
    ),
]
