"""What every state op refuses; the shapes of its own inputs are in each op's file."""

from typing import Any

import pytest
import torch

from ..helpers import assert_same_bits
from ..state_modes import (
    MODES,
    Mode,
    all_modes,
    int32,
    starts,
)


@all_modes
def test_inputs_that_require_grad_are_refused(mode: Mode) -> None:
    state = mode.pool(4)
    before = state.clone()
    inputs = mode.inputs(1)
    name = min(mode.of_token & inputs.keys())
    inputs[name].requires_grad_()
    rows = mode.accepted(1)
    with pytest.raises(RuntimeError, match="has no gradient, got an input that requires grad"):
        mode.run(state, inputs, mode.indices([0]), **rows)
    assert_same_bits(state, before)
    with torch.no_grad():
        mode.run(state, inputs, mode.indices([0]), **rows)
    assert not torch.equal(state, before)


ROW_ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "state_indices int64": (
        {"state_indices": torch.zeros(2, dtype=torch.int64)},
        TypeError,
        "state_indices must have dtype torch.int32, got torch.int64",
    ),
    "state_indices 3-D": (
        {"state_indices": torch.zeros(2, 1, 1, dtype=torch.int32)},
        ValueError,
        r"state_indices must have shape \[num_reqs\] or \[num_reqs, next_n\], got \[2, 1, 1\]",
    ),
    "one token per request": (
        {"query_start_loc": None},
        ValueError,
        r"state_indices must have one row per token \(num_reqs = num_tokens = 3\) when "
        r"query_start_loc is None, got \[2",
    ),
    "query_start_loc length": (
        {"query_start_loc": int32(0, 3)},
        ValueError,
        r"query_start_loc must have shape \[num_reqs_plus_1=3\], got \[2\]",
    ),
    "query_start_loc int64": (
        {"query_start_loc": torch.tensor([0, 1, 3])},
        TypeError,
        "query_start_loc must have dtype torch.int32, got torch.int64",
    ),
    "has_initial_state uint8": (
        {"has_initial_state": torch.ones(2, dtype=torch.uint8)},
        TypeError,
        "has_initial_state must have dtype torch.bool, got torch.uint8",
    ),
    "has_initial_state length": (
        {"has_initial_state": torch.ones(3, dtype=torch.bool)},
        ValueError,
        r"has_initial_state must have shape \[num_reqs=2\], got \[3\]",
    ),
    "num_accepted_tokens int64": (
        {"num_accepted_tokens": torch.tensor([1, 1])},
        TypeError,
        "num_accepted_tokens must have dtype torch.int32, got torch.int64",
    ),
    "num_accepted_tokens length": (
        {"num_accepted_tokens": int32(1)},
        ValueError,
        r"num_accepted_tokens must have shape \[num_reqs=2\], got \[1\]",
    ),
    "dst_indices int64": (
        {"dst_indices": torch.tensor([1, 1])},
        TypeError,
        "dst_indices must have dtype torch.int32, got torch.int64",
    ),
    "dst_indices length": (
        {"dst_indices": int32(1)},
        ValueError,
        r"dst_indices must have shape \[num_reqs=2\], got \[1\]",
    ),
    "mask on another device": (
        {"has_initial_state": torch.ones(2, dtype=torch.bool, device="meta")},
        ValueError,
        "has_initial_state must be on cpu as (conv_)?state is, got meta",
    ),
}


@pytest.mark.parametrize(
    "mode", [MODES["conv-rolling"], MODES["mamba2-slots"], MODES["gdn-slots"]], ids=lambda m: m.name
)
@pytest.mark.parametrize("case", ROW_ERRORS.values(), ids=ROW_ERRORS.keys())
def test_arguments_that_do_not_fit(
    mode: Mode, case: tuple[dict[str, Any], type[Exception], str]
) -> None:
    changes, error, message = case
    state = mode.pool(8)
    before = state.clone()
    rows: dict[str, Any] = {
        "state_indices": mode.indices([0, 4]),
        "query_start_loc": starts([1, 2]),
    }
    with pytest.raises(error, match=message):
        mode.run(state, mode.inputs(3), **(rows | changes))
    assert_same_bits(state, before)


@all_modes
def test_a_pool_that_overlaps_itself_is_refused(mode: Mode) -> None:
    state = mode.pool(1).expand(8, *mode.state_shape)
    with pytest.raises(ValueError, match="state must not overlap itself, got strides"):
        mode.run(state, mode.inputs(1), mode.indices([0]))
    integers = torch.zeros(8, *mode.state_shape, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"state must have dtype torch\.float32 or"):
        mode.run(integers, mode.inputs(1), mode.indices([0]))


@pytest.mark.parametrize("name", ["mamba2", "mamba1", "gdn", "kda"])
def test_a_single_slot_cannot_go_back(name: str) -> None:
    mode = MODES[name]
    message = r"num_accepted_tokens needs state_indices of shape \[num_reqs, next_n\], got \[2\]"
    with pytest.raises(ValueError, match=message):
        mode.run(mode.pool(8), mode.inputs(2), int32(0, 4), num_accepted_tokens=int32(1, 1))
