"""Sizes of two graphs are compared as expressions in requests and tokens."""

from typing import Any

import pytest
import torch
from sympy import Integer
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv

from mtpgraph.compile_passes.outline import REQUESTS, TOKENS, Outline

R: Any = REQUESTS
T: Any = TOKENS
EQUAL = {
    "the same": (2 * T, T + T, {}),
    "a quotient that leaves nothing": (FloorDiv(3 * T, 3), T, {}),
    "of one request": (R + 1, Integer(2), {R: 1}),
    "of one request of two tokens": (R * T, Integer(2), {R: 1, T: 2}),
}
UNLIKE = {
    "requests and tokens": (R, T, {}),
    "sums that agree where both are one number": (2 * R, R + T, {}),
    "quotients": (FloorDiv(T, 2), FloorDiv(T, 3), {}),
    "tokens of one request": (T, Integer(1), {R: 1}),
}


def outline(size: Any) -> Outline:
    """Of a graph that makes a tensor of this size."""
    graph = fx.Graph()
    count = graph.placeholder("count")
    count.meta["example_value"] = ShapeEnv().create_symintnode(
        size, hint=int(size) if size.is_number else 2
    )
    node = graph.call_function(torch.zeros, (count,))
    node.meta["example_value"] = torch.zeros(2)
    graph.output((node,))
    return Outline(fx.GraphModule(torch.nn.Module(), graph), {}, {})


@pytest.mark.parametrize(("here", "there", "counts"), EQUAL.values(), ids=EQUAL.keys())
def test_sizes_that_are_alike(here: Any, there: Any, counts: dict[Any, int]) -> None:
    assert outline(here).differs(outline(there), counts) is None


@pytest.mark.parametrize(("here", "there", "counts"), UNLIKE.values(), ids=UNLIKE.keys())
def test_sizes_that_are_not_alike(here: Any, there: Any, counts: dict[Any, int]) -> None:
    found = outline(here).differs(outline(there), counts)
    assert found is not None
    assert found.there == "torch.zeros"
