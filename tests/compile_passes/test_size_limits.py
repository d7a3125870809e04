"""Sizes that a step takes alone: batches of others run as they are, and none is padded to them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mtpgraph
from mtpgraph import Batched, Static, ops

_NOT_PADDED = pytest.mark.filterwarnings("ignore:batches are not padded:RuntimeWarning")


def lens(*query_lens: int) -> tuple[Tensor, Tensor]:
    """``query_start_loc`` and ``seq_lens``."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return starts, torch.tensor(query_lens, dtype=torch.int32) + 4


def make_step(value: Callable[..., Any]) -> Callable[..., Any]:
    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Any:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return value(x + row_lens.unsqueeze(1), query_start_loc, seq_lens)

    return step


def batch_of(*query_lens: int) -> tuple[Tensor, ...]:
    return torch.randn(sum(query_lens), 4), *lens(*query_lens)


def assert_like_eager(compiled: Any, step: Any, *batches: tuple[Any, ...]) -> None:
    for args in batches:
        try:
            expected = step(*args)
        except RuntimeError:
            with pytest.raises(Exception, match=r"shape|size"):
                compiled(*args)
            continue
        actual = compiled(*args)
        torch.testing.assert_close(actual, expected)


EVEN: dict[str, Callable[..., Any]] = {
    "pairs of requests": lambda x, q, s: (x, s.view(-1, 2).cumsum(1)),
    "pairs of requests by offsets": lambda x, q, s: (x, q[1:].view(-1, 2).sum(1)),
    "pairs of requests, flat": lambda x, q, s: (x, s.unflatten(0, (-1, 2)).cumsum(1).flatten()),
    "every second row": lambda x, q, s: x[::2] * 2,
    "every second row from the second": lambda x, q, s: x[1::2] * 2,
    "every second request": lambda x, q, s: (x, s[::2] + 1),
    "sum of neighbours": lambda x, q, s: x[::2] + x[1::2],
    "stacked neighbours": lambda x, q, s: torch.stack([x[::2], x[1::2]], 1).sum(1),
    "windows": lambda x, q, s: x.unfold(0, 2, 2).sum(2),
    "as many as six": lambda x, q, s: x[: min(x.shape[0], 6)] * 2,
}
"""What is not done for each request, token or group of tokens."""


@_NOT_PADDED
@pytest.mark.parametrize("name", EVEN)
def test_a_step_of_even_sizes_runs_each_batch_as_it_is(name: str):
    # of pairs there is one in the first batch, which a tracer may take for a constant
    first = (2, 2)
    step = make_step(EVEN[name])
    compiled = mtpgraph.compile(step, sizes=[1, 2, 4, 8], next_n=2, engine="eager")
    later = ((2,) * 6, (2, 2, 2), (1, 1), (2,), (2, 1, 2, 2))
    assert_like_eager(compiled, step, *(batch_of(*query_lens) for query_lens in (first, *later)))
    assert set(compiled.stats().calls) == {None}
    assert any(finding.kind == "padding unknown" for finding in compiled.stats().findings)


@_NOT_PADDED
@pytest.mark.parametrize("name", ["pairs of requests", "sum of neighbours", "stacked neighbours"])
def test_a_declared_step_of_even_sizes_runs_each_batch_as_it_is(name: str):
    inputs = {
        "x": Batched(per="token"),
        "query_start_loc": Batched(pad="last", extra=1),
        "seq_lens": Batched(),
    }
    step = make_step(EVEN[name])
    compiled = mtpgraph.compile(step, inputs=inputs, sizes=[1, 2, 4, 8], next_n=2, engine="eager")
    batches = [(2, 2), (2,) * 6, (2, 1, 2), (1, 3)]
    assert_like_eager(compiled, step, *(batch_of(*query_lens) for query_lens in batches))
    assert set(compiled.stats().calls) == {None}


TABLES: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "head": (lambda x, t: x * t[: x.shape[0]], 10),
    "head by narrow": (lambda x, t: x * t.narrow(0, 0, x.shape[0]), 10),
    "less one": (lambda x, t: x[1:] * t[: x.shape[0] - 1], 9),
    "from the third": (lambda x, t: x * t[2 : x.shape[0] + 2], 12),
    "two each": (lambda x, t: x + t[: 2 * x.shape[0]].view(-1, 2, 4).sum(1), 20),
    "every second": (lambda x, t: x * t[: 2 * x.shape[0] : 2], 20),
    "columns": (lambda x, t: x * t.t()[:, : x.shape[0]].t(), 10),
    "returned": (lambda x, t: (x, t[: x.shape[0]] + 1), 10),
}
"""What a step takes of a table, and how many rows that has to have for ten tokens."""


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_ends_limits_the_sizes_of_each_call(name: str):
    value, rows = TABLES[name]

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, table: Tensor) -> Any:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return value(x + row_lens.unsqueeze(1), table)

    compiled = mtpgraph.compile(step, sizes=[2, 4, 8], next_n=2, engine="eager")
    short, long = torch.randn(rows, 4), torch.randn(64, 4)
    calls = [
        ((2, 1, 2), long, 4),
        ((2, 2, 2, 2, 1), long, 8),
        ((2, 2, 2, 2, 1), short, None),
        ((2, 1, 2), short, 4),
        ((2, 2, 2, 2, 2, 2), short, None),
        ((2, 2, 2, 2, 2, 2), long, 8),
    ]
    for query_lens, table, size in calls:
        before = dict(compiled.stats().calls)
        assert_like_eager(compiled, step, (*batch_of(*query_lens), table))
        assert compiled.stats().calls[size] == before.get(size, 0) + 1
    assert compiled.inputs["table"] == Static()


def test_a_table_of_the_step_itself_limits_its_sizes():
    table = torch.randn(8, 4)
    step = make_step(lambda x, q, s: x * table[: x.shape[0]])
    compiled = mtpgraph.compile(step, sizes=[2, 4, 8], next_n=2, engine="eager")
    compiled.warm_up(*batch_of(2, 1, 2))
    assert_like_eager(
        compiled, step, *(batch_of(*q) for q in ((1, 2), (2, 2, 2, 2), (1,) * 6, (2,) * 6))
    )
    assert compiled.stats().calls == {2: 1, 4: 1, None: 2}
