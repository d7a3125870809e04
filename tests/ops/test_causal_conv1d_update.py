"""causal_conv1d_update_: its own layouts, forms and errors; the common rules are in
test_state_*.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops

from .. import oracles
from ..helpers import assert_close, assert_same_bits, nan_pool, strided_pool
from ..state_modes import int32, starts

OP = torch.ops.mtpgraph.causal_conv1d_update_.default
DIM = 5


def make_inputs(
    lens: list[int], state_len: int, width: int = 4, num_slots: int = 12
) -> dict[str, Any]:
    return {
        "conv_state": torch.randn(num_slots, DIM, state_len),
        "x": torch.randn(sum(lens), DIM),
        "weight": torch.randn(DIM, width),
        "bias": torch.randn(DIM),
        "state_indices": torch.randperm(num_slots)[: len(lens)].int(),
        "query_start_loc": starts(lens),
    }


def check(inputs: dict[str, Any]) -> Tensor:
    expected, after = oracles.conv1d(**inputs)
    out = ops.causal_conv1d_update_(**inputs)
    assert_close(out, expected)
    assert_same_bits(inputs["conv_state"], after)
    return out


def one_channel(*columns: float) -> Tensor:
    return torch.tensor(columns, dtype=torch.float32).view(1, 1, -1)


def test_conv_by_hand() -> None:
    state = one_channel(1, 2)
    x = torch.tensor([[3.0], [4.0]])
    weight = torch.tensor([[100.0, 10.0, 1.0]])
    bias = torch.tensor([0.5])
    out = ops.causal_conv1d_update_(state, x, weight, bias, int32(0), int32(0, 2), activation=None)
    assert out.tolist() == [[123.5], [234.5]]
    assert state.tolist() == [[[3, 4]]]


def test_conv_rolling_by_hand() -> None:
    # Two tokens came in the last step and one stands: 3 is taken back.
    state = one_channel(1, 2, 3, 9)
    out = ops.causal_conv1d_update_(
        state,
        torch.tensor([[5.0], [6.0]]),
        torch.tensor([[100.0, 10.0, 1.0]]),
        None,
        int32(0),
        int32(0, 2),
        num_accepted_tokens=int32(1),
        activation=None,
    )
    assert out.tolist() == [[125], [256]]
    assert state.tolist() == [[[2, 5, 6, 9]]]


def test_conv_rolling_row_longer_than_the_window() -> None:
    # Three columns and a width of 3: the window of the third token has no place.
    state = one_channel(1, 2, 9)
    args = (torch.arange(3.0, 6).view(3, 1), torch.ones(1, 3), None, int32(0), int32(0, 3))
    out = ops.causal_conv1d_update_(state, *args, num_accepted_tokens=int32(1), activation=None)
    assert out.tolist() == [[6], [9], [12]]
    assert state.tolist() == [[[2, 3, 4]]]


def test_conv_new_row_clears_the_columns_that_it_leaves_open() -> None:
    for accepted, expected in ((None, [0, 3, 0, 0]), (int32(1), [0, 3, 0, 0])):
        state = nan_pool(1, 1, 4)
        ops.causal_conv1d_update_(
            state,
            torch.tensor([[3.0]]),
            torch.ones(1, 3),
            None,
            int32(0),
            has_initial_state=torch.tensor([False]),
            num_accepted_tokens=accepted,
        )
        assert state.tolist() == [[expected]]


def test_conv_old_row_keeps_the_columns_past_the_window() -> None:
    state = one_channel(1, 2, float("nan"), 8)
    ops.causal_conv1d_update_(state, torch.tensor([[3.0]]), torch.ones(1, 3), None, int32(0))
    assert state[0, 0, :2].tolist() == [2, 3]
    assert state[0, 0, 2].isnan()
    assert state[0, 0, 3] == 8


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("width", [2, 3, 4, 7])
def test_conv_forms(width: int, bias: bool, activation: str | None) -> None:
    inputs = make_inputs([1, 2, 9, 4], state_len=width - 1, width=width)
    if not bias:
        inputs["bias"] = None
    check(inputs | {"activation": activation})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_conv_weights_have_a_dtype_of_their_own(dtype: torch.dtype) -> None:
    inputs = make_inputs([1, 2], state_len=3)
    inputs["weight"] = inputs["weight"].to(dtype)
    inputs["bias"] = inputs["bias"].half()
    check(inputs)


@pytest.mark.parametrize("layout", ["channels last", "channels last in pages"])
@pytest.mark.parametrize("rolling", [True, False], ids=["rolling", "plain"])
def test_conv_with_channels_last(layout: str, rolling: bool) -> None:
    inputs = make_inputs([1, 2, 3], state_len=6)
    if rolling:
        inputs["num_accepted_tokens"] = int32(1, 3, 4)
    dense = inputs["conv_state"].clone()
    state = inputs["conv_state"].transpose(1, 2).contiguous()
    state = (strided_pool(state) if "pages" in layout else state).transpose(1, 2)
    assert state.stride(1) == 1
    out = ops.causal_conv1d_update_(**(inputs | {"conv_state": state}))
    assert_same_bits(out, ops.causal_conv1d_update_(**(inputs | {"conv_state": dense})))
    assert_same_bits(state, dense)


def test_conv_a_slot_per_token_to_one_destination() -> None:
    # Read among the slots of the last step, keep the newest window only.
    inputs = make_inputs([2, 3], state_len=3)
    inputs["state_indices"] = torch.arange(8, dtype=torch.int32).view(2, 4)
    check(inputs | {"num_accepted_tokens": int32(4, 2), "dst_indices": int32(8, 9)})


def test_conv_one_slot_to_a_slot_per_token() -> None:
    inputs = make_inputs([2, 3], state_len=3)
    inputs["state_indices"] = int32(8, 9)
    check(inputs | {"dst_indices": torch.arange(8, dtype=torch.int32).view(2, 4)})


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "activation": (
        {"activation": "gelu"},
        ValueError,
        "activation must be \"silu\" or None, got 'gelu'",
    ),
    "x rank": (
        {"x": torch.zeros(3, DIM, 1)},
        ValueError,
        r"x must have shape \[num_tokens, dim\], got \[3, 5, 1\]",
    ),
    "x dtype": ({"x": torch.zeros(3, DIM).double()}, TypeError, "x must have dtype torch.float32"),
    "conv_state dim": (
        {"conv_state": torch.zeros(12, 6, 3)},
        ValueError,
        r"conv_state must have shape \[num_slots, dim=5, state_len\], got \[12, 6, 3\]",
    ),
    "weight dim": (
        {"weight": torch.zeros(6, 4)},
        ValueError,
        r"weight must have shape \[dim=5, width\], got \[6, 4\]",
    ),
    "weight dtype": (
        {"weight": torch.zeros(DIM, 4).int()},
        TypeError,
        "weight must have dtype torch.float32",
    ),
    "width": ({"weight": torch.zeros(DIM, 1)}, ValueError, "weight must have width >= 2, got 1"),
    "bias": (
        {"bias": torch.zeros(6)},
        ValueError,
        r"bias must have shape \[dim=5\], got \[6\]",
    ),
    "bias device": (
        {"bias": torch.zeros(DIM, device="meta")},
        ValueError,
        "bias must be on cpu as conv_state is, got meta",
    ),
    "state_len": (
        {"weight": torch.zeros(DIM, 5)},
        ValueError,
        "conv_state must have state_len >= width - 1 = 4, got state_len 3",
    ),
    "state_len with counts": (
        {"num_accepted_tokens": int32(1, 1)},
        ValueError,
        "conv_state must have state_len >= width = 4 when num_accepted_tokens is given with one "
        "slot per request, got state_len 3",
    ),
    "state_len with a slot per token": (
        {"state_indices": torch.zeros(2, 2, dtype=torch.int32), "weight": torch.zeros(DIM, 3)},
        ValueError,
        r"conv_state must have state_len == width - 1 = 2 with a slot per token \(state_indices "
        r"2-D\), got state_len 3",
    ),
    "state_len with a destination per token": (
        {"dst_indices": torch.zeros(2, 2, dtype=torch.int32), "weight": torch.zeros(DIM, 3)},
        ValueError,
        r"conv_state must have state_len == width - 1 = 2 with a slot per token "
        r"\(dst_indices 2-D\), got state_len 3",
    ),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS.keys())
def test_conv_of_arguments_that_do_not_fit(
    case: tuple[dict[str, Any], type[Exception], str],
) -> None:
    changes, error, message = case
    inputs = make_inputs([1, 2], state_len=3)
    before = inputs["conv_state"].clone()
    with pytest.raises(error, match=message):
        ops.causal_conv1d_update_(**(inputs | changes))
    assert_same_bits(inputs["conv_state"], before)


@pytest.mark.parametrize(
    "case", ["plain", "batch 1", "rolling", "paged", "channels last", "slots", "empty"]
)
def test_conv_opcheck(case: str) -> None:
    lens = {"batch 1": [1], "empty": []}.get(case, [1, 3, 2])
    inputs = make_inputs(lens, state_len=6 if case == "rolling" else 3)
    inputs["has_initial_state"] = torch.arange(len(lens)) != 1
    state_indices = inputs["state_indices"]
    if case == "rolling":
        inputs["num_accepted_tokens"] = int32(1, 2, 3)
    if case == "slots":
        state_indices = torch.arange(12, dtype=torch.int32).view(3, 4)
        inputs["num_accepted_tokens"] = int32(1, 2, 3)
    if case == "paged":
        inputs["conv_state"] = strided_pool(inputs["conv_state"])
        inputs["bias"] = None
    if case == "channels last":
        inputs["conv_state"] = torch.randn(12, 3, DIM).transpose(1, 2)
        inputs["x"] = torch.randn(DIM, 6).T
    inputs["state_indices"] = state_indices
    torch.library.opcheck(OP, (), inputs)


def test_conv_compiled_equals_eager() -> None:
    def step(
        state: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        state_indices: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        num_accepted_tokens: Tensor,
    ) -> Tensor:
        rows: dict[str, Any] = {
            "query_start_loc": query_start_loc,
            "has_initial_state": ops.has_initial_state(query_start_loc, seq_lens),
            "num_accepted_tokens": num_accepted_tokens,
        }
        y = ops.causal_conv1d_update_(state, x + 1, weight, bias, state_indices, **rows)
        return 2 * ops.causal_conv1d_update_(
            state, y, weight, None, state_indices + 6, activation=None, **rows
        )

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for lens, seq_lens, accepted in (
        ([2, 1, 3], [9, 1, 3], [2, 4, 0]),
        ([1, 4, 0, 1, 2], [1, 4, 0, 7, 8], [0, 1, 1, 3, 9]),
    ):
        inputs = make_inputs(lens, state_len=6)
        args = (
            inputs["x"],
            inputs["weight"],
            inputs["bias"],
            torch.arange(len(lens), dtype=torch.int32),
            inputs["query_start_loc"],
            int32(*seq_lens),
            int32(*accepted),
        )
        eager = nan_pool(12, DIM, 6)
        eager[[0, 3, 6, 9]] = torch.randn(4, DIM, 6)
        traced = eager.clone()
        expected = step(eager, *args)
        assert_same_bits(compiled(traced, *args), expected)
        assert_same_bits(traced, eager)
