"""The kernel of causal_conv1d_update_: its own forms; test_state_rows.py has rows and slots."""

from typing import Any

import pytest
import torch

from ..helpers import assert_same_bits
from ..state_modes import starts
from .state_kernels import DEVICE, MODES, check, run


def make_inputs(num_tokens: int, dim: int, width: int) -> dict[str, Any]:
    return {
        "x": torch.randn(num_tokens, dim),
        "weight": torch.randn(dim, width),
        "bias": torch.randn(dim),
    }


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["conv", "conv-rolling", "conv-slots"])
def test_conv_width(name: str, width: int) -> None:
    mode = MODES[name]
    state = torch.randn(12, 3, width + 2 if name == "conv-rolling" else width - 1)
    rows = {
        "query_start_loc": starts([1, 4, 2]),
        "has_initial_state": torch.tensor([True, True, False]),
        **mode.accepted(2, 1, 0),
    }
    check(mode, state, make_inputs(7, 3, width), mode.indices([0, 4, 8]), **rows)


@pytest.mark.parametrize("dim", [1, 33, 300])
def test_conv_dim(dim: int) -> None:
    state = torch.randn(2, dim, 3)
    indices = MODES["conv"].indices([1, 0])
    check(MODES["conv"], state, make_inputs(3, dim, 4), indices, query_start_loc=starts([2, 1]))


@pytest.mark.parametrize("absent", [{"bias": None}, {"activation": None}], ids=str)
def test_conv_without(absent: dict[str, Any]) -> None:
    inputs = make_inputs(2, 3, 4) | absent
    check(MODES["conv"], torch.randn(2, 3, 3), inputs, MODES["conv"].indices([1, 0]))


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_conv_rolling_row_of_any_length(length: int, new: bool) -> None:
    # State columns 3 to 5 are next_n = 4 with a width of 4: a long row fills them all.
    rows = {
        "query_start_loc": starts([length]),
        "has_initial_state": torch.tensor([not new]),
        **MODES["conv-rolling"].accepted(3),
    }
    mode = MODES["conv-rolling"]
    state = mode.nan_pool(2) if new else mode.pool(2)
    _, pool = check(mode, state, make_inputs(length, 5, 4), mode.indices([1]), **rows)
    assert pool[1].isfinite().all()


def test_conv_stores_inputs_of_other_dtypes_rounded_once() -> None:
    # Values of bf16 pass through fp32 and fp16 unchanged.
    mode = MODES["conv"]
    inputs = make_inputs(3, 5, 4)
    inputs["x"] = inputs["x"].bfloat16()
    state = mode.pool(2, torch.float16).to(DEVICE)
    run(mode, state, inputs, mode.indices([1]), query_start_loc=starts([3]))
    assert_same_bits(state[1].cpu(), inputs["x"].T.half())
