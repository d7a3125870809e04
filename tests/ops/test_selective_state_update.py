"""selective_state_update_: its forms and errors; the common rules are in test_state_*.py."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops

from .. import oracles
from ..helpers import assert_close, assert_same_bits, nan_pool, strided_pool
from ..state_modes import int32, starts

OP = torch.ops.mtpgraph.selective_state_update_.default
NUM_HEADS, HEAD_DIM, NUM_GROUPS, STATE_DIM = 4, 3, 2, 5
DIM = 6


def make_inputs(lens: list[int], num_slots: int = 12) -> dict[str, Any]:
    """Mamba-2, with all that may be left out."""
    tokens = sum(lens)
    return {
        "state": torch.randn(num_slots, NUM_HEADS, HEAD_DIM, STATE_DIM),
        "x": torch.randn(tokens, NUM_HEADS, HEAD_DIM),
        "dt": torch.randn(tokens, NUM_HEADS),
        "A": -torch.rand(NUM_HEADS),
        "B": torch.randn(tokens, NUM_GROUPS, STATE_DIM),
        "C": torch.randn(tokens, NUM_GROUPS, STATE_DIM),
        "state_indices": torch.randperm(num_slots)[: len(lens)].int(),
        "query_start_loc": starts(lens),
        "D": torch.randn(NUM_HEADS),
        "z": torch.randn(tokens, NUM_HEADS, HEAD_DIM),
        "dt_bias": torch.randn(NUM_HEADS),
        "dt_softplus": True,
    }


def make_mamba1_inputs(lens: list[int], num_slots: int = 12) -> dict[str, Any]:
    tokens = sum(lens)
    return {
        "state": torch.randn(num_slots, DIM, STATE_DIM),
        "x": torch.randn(tokens, DIM),
        "dt": torch.randn(tokens, DIM),
        "A": -torch.rand(DIM, STATE_DIM),
        "B": torch.randn(tokens, STATE_DIM),
        "C": torch.randn(tokens, STATE_DIM),
        "state_indices": torch.randperm(num_slots)[: len(lens)].int(),
        "query_start_loc": starts(lens),
        "D": torch.randn(DIM),
        "z": torch.randn(tokens, DIM),
        "dt_bias": torch.randn(DIM),
        "dt_softplus": True,
    }


def check(inputs: dict[str, Any]) -> Tensor:
    expected, after = oracles.selective_state(**inputs)
    out = ops.selective_state_update_(**inputs)
    assert_close(out, expected)
    assert_close(inputs["state"], after)
    return out


def test_ssm_by_hand() -> None:
    # One channel, one state: h = exp(-dt) * h + dt * x * B.
    state = torch.tensor([[[[1.0]]]])
    one = torch.ones(1, 1, 1)
    out = ops.selective_state_update_(
        state,
        3 * one,
        torch.tensor([[math.log(2)]]),
        torch.tensor([-1.0]),
        5 * one,
        7 * one,
        int32(0),
        D=torch.tensor([11.0]),
    )
    h = 0.5 + math.log(2) * 15
    assert_close(state, torch.tensor([[[[h]]]]).double())
    assert_close(out, torch.tensor([[[7 * h + 33]]]).double())


@pytest.mark.parametrize("absent", ["D", "z", "dt_bias", "dt_softplus"])
@pytest.mark.parametrize("make", [make_inputs, make_mamba1_inputs], ids=["mamba2", "mamba1"])
def test_ssm_without(make: Any, absent: str) -> None:
    inputs = make([1, 3, 2])
    if absent == "dt_softplus":
        inputs["dt"] = inputs["dt"].abs()
        inputs["dt_bias"] = None
    del inputs[absent]
    check(inputs)


@pytest.mark.parametrize("per_channel", ["dt", "A", "D", "dt_bias", "all"])
def test_ssm_per_head_or_per_channel(per_channel: str) -> None:
    inputs = make_inputs([1, 3, 2])
    tokens = inputs["x"].shape[0]
    wide = {
        "dt": torch.randn(tokens, NUM_HEADS, HEAD_DIM),
        "A": -torch.rand(NUM_HEADS, HEAD_DIM, STATE_DIM),
        "D": torch.randn(NUM_HEADS, HEAD_DIM),
        "dt_bias": torch.randn(NUM_HEADS, HEAD_DIM),
    }
    check(inputs | {k: v for k, v in wide.items() if per_channel in (k, "all")})


def test_ssm_tied_tensors_of_stride_0_equal_one_value_per_head() -> None:
    inputs = make_inputs([1, 3, 2])
    tied = {
        "dt": inputs["dt"][..., None].expand(-1, -1, HEAD_DIM),
        "A": inputs["A"][:, None, None].expand(-1, HEAD_DIM, STATE_DIM),
        "D": inputs["D"][:, None].expand(-1, HEAD_DIM),
        "dt_bias": inputs["dt_bias"][:, None].expand(-1, HEAD_DIM),
    }
    other = inputs | tied | {"state": inputs["state"].clone()}
    out = ops.selective_state_update_(**inputs)
    assert_same_bits(out, ops.selective_state_update_(**other))
    assert_same_bits(inputs["state"], other["state"])


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_ssm_groups(num_groups: int) -> None:
    inputs = make_inputs([2, 1])
    for name in ("B", "C"):
        inputs[name] = torch.randn(3, num_groups, STATE_DIM)
    check(inputs)


def test_ssm_mamba1_is_mamba2_with_one_head() -> None:
    inputs = make_mamba1_inputs([3, 1])
    other = {
        name: value.unsqueeze(0 if name in ("A", "D", "dt_bias") else 1)
        if isinstance(value, Tensor) and name not in ("state_indices", "query_start_loc")
        else value
        for name, value in inputs.items()
    }
    other["state"] = other["state"].clone()
    out = ops.selective_state_update_(**inputs)
    assert_same_bits(out, ops.selective_state_update_(**other).squeeze(1))
    assert_same_bits(inputs["state"], other["state"].squeeze(1))


def test_ssm_softplus_threshold() -> None:
    inputs = make_inputs([8])
    dt = torch.tensor([-100.0, -20, -1e-3, 0, 19.99, 20, 20.01, 1e4])
    inputs |= {"dt": dt[:, None].expand(-1, NUM_HEADS), "dt_bias": None}
    inputs["A"] = inputs["A"] * 1e-3
    # Steps of 1e4 make values of that size.
    expected, _ = oracles.selective_state(**inputs)
    out = ops.selective_state_update_(**inputs)
    assert_close(out / 1e4, expected / 1e4)
    assert_close(out[:4], expected[:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ssm_parameters_have_dtypes_of_their_own(dtype: torch.dtype) -> None:
    inputs = make_inputs([1, 2])
    for name in ("A", "D", "dt_bias", "dt"):
        inputs[name] = inputs[name].to(dtype)
    check(inputs)


@pytest.mark.parametrize("step", list(itertools.product([1, 2], [1, 2])), ids=str)
def test_ssm_slots_to_one_destination_and_back(step: tuple[int, int]) -> None:
    # [num_reqs, next_n] read and [num_reqs] written, and the other way round.
    inputs = make_inputs([2, 3])
    wide = torch.arange(8, dtype=torch.int32).view(2, 4)
    indices = {1: int32(8, 9), 2: wide}
    inputs["state_indices"] = indices[step[0]]
    if step[0] == 2:
        inputs["num_accepted_tokens"] = int32(4, 2)
    check(inputs | {"dst_indices": indices[step[1]]})


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "state rank": (
        {"state": torch.zeros(12, 4)},
        ValueError,
        r"state must have shape \[num_slots, num_heads, head_dim, state_dim\] or "
        r"\[num_slots, dim, state_dim\], got \[12, 4\]",
    ),
    "state shape": (
        {"state": torch.zeros(12, 4, 2, 5)},
        ValueError,
        r"state must have shape \[num_slots, num_heads=4, head_dim=3, state_dim\], "
        r"got \[12, 4, 2, 5\]",
    ),
    "x rank": (
        {"x": torch.zeros(3, 12)},
        ValueError,
        r"x must have shape \[num_tokens, num_heads, head_dim\], got \[3, 12\]",
    ),
    "x dtype": (
        {"x": torch.zeros(3, 4, 3).double()},
        TypeError,
        r"x must have dtype torch.float32 or torch.bfloat16 or torch.float16, got torch.float64",
    ),
    "dt": (
        {"dt": torch.zeros(3)},
        ValueError,
        r"dt must have shape \[num_tokens=3, num_heads=4\] or "
        r"\[num_tokens=3, num_heads=4, head_dim=3\], got \[3\]",
    ),
    "dt size": (
        {"dt": torch.zeros(3, 2)},
        ValueError,
        r"dt must have shape \[num_tokens=3, num_heads=4\], got \[3, 2\]",
    ),
    "A": (
        {"A": torch.zeros(4, 3)},
        ValueError,
        r"A must have shape \[num_heads=4\] or \[num_heads=4, head_dim=3, state_dim=5\], "
        r"got \[4, 3\]",
    ),
    "A dtype": ({"A": torch.zeros(4).int()}, TypeError, "A must have dtype torch.float32"),
    "B": (
        {"B": torch.zeros(3, 2, 4)},
        ValueError,
        r"B must have shape \[num_tokens=3, num_groups, state_dim=5\], got \[3, 2, 4\]",
    ),
    "C": (
        {"C": torch.zeros(3, 1, 5)},
        ValueError,
        r"C must have shape \[num_tokens=3, num_groups=2, state_dim=5\], got \[3, 1, 5\]",
    ),
    "groups": (
        {"B": torch.zeros(3, 3, 5), "C": torch.zeros(3, 3, 5)},
        ValueError,
        "B must have num_groups that divide 4 heads, got 3",
    ),
    "no groups": (
        {"B": torch.zeros(3, 0, 5), "C": torch.zeros(3, 0, 5)},
        ValueError,
        "B must have num_groups >= 1, got 0",
    ),
    "D": (
        {"D": torch.zeros(4, 2)},
        ValueError,
        r"D must have shape \[num_heads=4, head_dim=3\], got \[4, 2\]",
    ),
    "dt_bias": (
        {"dt_bias": torch.zeros(3)},
        ValueError,
        r"dt_bias must have shape \[num_heads=4\], got \[3\]",
    ),
    "z": (
        {"z": torch.zeros(4, 4, 3)},
        ValueError,
        r"z must have shape \[num_tokens=3, num_heads=4, head_dim=3\], got \[4, 4, 3\]",
    ),
    "z device": (
        {"z": torch.zeros(3, 4, 3, device="meta")},
        ValueError,
        "z must be on cpu as state is, got meta",
    ),
}
MAMBA1_ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "state": (
        {"state": torch.zeros(12, 5, 5)},
        ValueError,
        r"state must have shape \[num_slots, dim=6, state_dim\], got \[12, 5, 5\]",
    ),
    "dt": (
        {"dt": torch.zeros(3, 1)},
        ValueError,
        r"dt must have shape \[num_tokens=3, dim=6\], got \[3, 1\]",
    ),
    "A": (
        {"A": torch.zeros(6)},
        ValueError,
        r"A must have shape \[dim=6, state_dim=5\], got \[6\]",
    ),
    "B": (
        {"B": torch.zeros(3, 1, 5)},
        ValueError,
        r"B must have shape \[num_tokens=3, state_dim=5\], got \[3, 1, 5\]",
    ),
    "C": (
        {"C": torch.zeros(2, 5)},
        ValueError,
        r"C must have shape \[num_tokens=3, state_dim=5\], got \[2, 5\]",
    ),
    "D": ({"D": torch.zeros(5)}, ValueError, r"D must have shape \[dim=6\], got \[5\]"),
    "z": (
        {"z": torch.zeros(3, 5)},
        ValueError,
        r"z must have shape \[num_tokens=3, dim=6\], got \[3, 5\]",
    ),
}


@pytest.mark.parametrize(
    ("make", "case"),
    [pytest.param(make_inputs, case, id=f"mamba2-{name}") for name, case in ERRORS.items()]
    + [
        pytest.param(make_mamba1_inputs, case, id=f"mamba1-{name}")
        for name, case in MAMBA1_ERRORS.items()
    ],
)
def test_ssm_of_arguments_that_do_not_fit(
    make: Any, case: tuple[dict[str, Any], type[Exception], str]
) -> None:
    changes, error, message = case
    inputs = make([1, 2])
    before = inputs["state"].clone()
    with pytest.raises(error, match=message):
        ops.selective_state_update_(**(inputs | changes))
    assert_same_bits(inputs["state"], before)


@pytest.mark.parametrize(
    "case", ["mamba2", "mamba1", "batch 1", "slots", "destination", "paged", "tied", "empty"]
)
def test_ssm_opcheck(case: str) -> None:
    lens = {"batch 1": [1], "empty": []}.get(case, [1, 3, 2])
    inputs = make_mamba1_inputs(lens) if case == "mamba1" else make_inputs(lens)
    inputs["has_initial_state"] = torch.arange(len(lens)) != 1
    if case == "slots":
        inputs["state_indices"] = torch.arange(12, dtype=torch.int32).view(3, 4)
        inputs["num_accepted_tokens"] = int32(1, 2, 3)
    if case == "destination":
        inputs["state_indices"] = int32(0, 1, 2)
        inputs["dst_indices"] = torch.arange(3, 12, dtype=torch.int32).view(3, 3)
    if case == "paged":
        inputs["state"] = strided_pool(inputs["state"])
        del inputs["z"], inputs["D"], inputs["dt_bias"]
    if case == "tied":
        inputs["A"] = inputs["A"][:, None, None].expand(-1, HEAD_DIM, STATE_DIM)
        inputs["x"] = torch.randn(HEAD_DIM, NUM_HEADS, 6).permute(2, 1, 0)
    torch.library.opcheck(OP, (), inputs)


def test_ssm_compiled_equals_eager() -> None:
    def step(
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        state_indices: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        num_accepted_tokens: Tensor,
    ) -> Tensor:
        mask = ops.has_initial_state(query_start_loc, seq_lens)
        y = ops.selective_state_update_(
            state,
            x + 1,
            dt,
            A,
            B,
            C,
            state_indices,
            query_start_loc,
            has_initial_state=mask,
            num_accepted_tokens=num_accepted_tokens,
        )
        first = state_indices[:, 0] + 20
        ops.reset_states_(state, first, mask)
        return 2 * ops.selective_state_update_(
            state, y, dt, A, B, C, first, query_start_loc, z=x, dt_softplus=True
        )

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for lens, seq_lens, accepted in (
        ([2, 1, 3], [9, 1, 3], [2, 4, 0]),
        ([1, 4, 0, 1, 2], [1, 4, 0, 7, 8], [0, 1, 1, 3, 9]),
    ):
        inputs = make_inputs(lens)
        num_reqs = len(lens)
        args = (
            *(inputs[name] for name in ("x", "dt", "A", "B", "C")),
            torch.arange(4 * num_reqs, dtype=torch.int32).view(num_reqs, 4),
            inputs["query_start_loc"],
            int32(*seq_lens),
            int32(*accepted),
        )
        eager = nan_pool(50, NUM_HEADS, HEAD_DIM, STATE_DIM)
        eager[::3] = torch.randn(17, NUM_HEADS, HEAD_DIM, STATE_DIM)
        traced = eager.clone()
        expected = step(eager, *args)
        assert_same_bits(compiled(traced, *args), expected)
        assert_same_bits(traced, eager)
