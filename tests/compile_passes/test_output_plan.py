"""Outputs that hold several entries for each request or token, cut back to the real ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mtpgraph
from mtpgraph import Batched, ops


def lens(*query_lens: int) -> tuple[Tensor, Tensor]:
    """``query_start_loc`` and ``seq_lens``."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return starts, torch.tensor(query_lens, dtype=torch.int32) + 4


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "three for each token": lambda x, s: x.repeat_interleave(3, 0),
    "three for each request": lambda x, s: (x, torch.stack([s, s + 1, s + 2], 1).flatten()),
    "three halves": lambda x, s: x.repeat_interleave(3, 0).view(-1, 2, 4).sum(1),
    "flat": lambda x, s: x.flatten(),
    "pairs, flat": lambda x, s: x.view(-1, 2, 4).softmax(1).flatten(),
    "pairs, twice": lambda x, s: x.view(-1, 2, 4).sum(1).repeat_interleave(3, 0),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_several_entries_are_cut(name: str):
    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Any:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return OUTPUTS[name](x + row_lens.unsqueeze(1), seq_lens)

    compiled = mtpgraph.compile(step, sizes=[2, 4], next_n=2, engine="eager")
    for query_lens in ((2, 1, 3), (2,), (1, 1), (1, 1, 3, 1), (4, 4, 2)):
        batch = torch.randn(sum(query_lens), 4), *lens(*query_lens)
        torch.testing.assert_close(compiled(*batch), step(*batch))
    # of the last there are more tokens than the largest size holds
    assert compiled.stats().calls == {4: 2, 2: 2, None: 1}


@pytest.mark.filterwarnings("ignore:padding may reach real rows:RuntimeWarning")
def test_outputs_of_several_entries_in_any_order_are_refused():
    step = mtpgraph.compile(
        lambda x: x.t().reshape(-1), sizes=[4], engine="eager", inputs={"x": Batched()}
    )
    with pytest.raises(ValueError, match="outputs must have their real rows in front"):
        step(torch.ones(3, 2))


@pytest.mark.filterwarnings("ignore:batches are not padded:RuntimeWarning")
def test_outputs_that_no_cut_fits_leave_the_step_as_it_is():
    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return (row_lens[:, None] + row_lens[None]).flatten()

    compiled = mtpgraph.compile(step, sizes=[2, 4], next_n=2, engine="eager")
    for query_lens in ((2, 1, 3), (2,), (1, 1)):
        batch = torch.randn(sum(query_lens), 4), *lens(*query_lens)
        torch.testing.assert_close(compiled(*batch), step(*batch))
    assert set(compiled.stats().calls) == {None}
