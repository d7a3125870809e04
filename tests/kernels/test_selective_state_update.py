"""The kernel of selective_state_update_: its own forms; test_state_rows.py has rows and slots."""

from typing import Any

import pytest
import torch

from ..helpers import assert_same_bits
from ..state_modes import Mode, starts
from .state_kernels import MODES, check

SSM = {name: MODES[name] for name in ("mamba2", "mamba1")}
each_form = pytest.mark.parametrize("mode", SSM.values(), ids=SSM.keys())


def make_inputs(mode: Mode, num_tokens: int) -> dict[str, Any]:
    """With all that may be left out."""
    inputs = mode.inputs(num_tokens)
    channels = mode.state_shape[:-1]
    extra = {
        "D": torch.randn(channels),
        "dt_bias": torch.randn(channels),
        "z": torch.randn(num_tokens, *channels),
        "dt_softplus": True,
    }
    return extra | inputs


def check_step(mode: Mode, inputs: dict[str, Any], state: torch.Tensor | None = None) -> None:
    rows = {
        "query_start_loc": starts([1, 2]),
        "has_initial_state": torch.tensor([True, False]),
    }
    state = mode.pool(4) if state is None else state
    check(mode, state, inputs, mode.indices([2, 0]), **rows)


@each_form
@pytest.mark.parametrize("absent", ["D", "z", "dt_bias", "dt_softplus", "all"])
def test_ssm_without(mode: Mode, absent: str) -> None:
    inputs = make_inputs(mode, 4)
    for name in ("D", "z", "dt_bias", "dt_softplus"):
        if absent in (name, "all"):
            del inputs[name]
    if "dt_softplus" not in inputs:
        inputs["dt"] = inputs["dt"].abs()
        inputs["dt_bias"] = None
    check_step(mode, inputs)


@pytest.mark.parametrize("per_channel", ["dt", "A", "D", "dt_bias", "all"])
def test_ssm_per_channel(per_channel: str) -> None:
    heads, channels, states = MODES["mamba2"].state_shape
    wide = {
        "dt": torch.randn(4, heads, channels),
        "A": -torch.rand(heads, channels, states),
        "D": torch.randn(heads, channels),
        "dt_bias": torch.randn(heads, channels),
    }
    inputs = make_inputs(MODES["mamba2"], 4)
    inputs |= {name: value for name, value in wide.items() if per_channel in (name, "all")}
    check_step(MODES["mamba2"], inputs)


def test_ssm_tied_tensors_of_stride_0_equal_one_value_per_head() -> None:
    mode = MODES["mamba2"]
    _, channels, states = mode.state_shape
    inputs, state = make_inputs(mode, 3), mode.pool(4)
    tied = {
        "dt": inputs["dt"][..., None].expand(-1, -1, channels),
        "A": inputs["A"][:, None, None].expand(-1, channels, states),
        "D": inputs["D"][:, None].expand(-1, channels),
        "dt_bias": inputs["dt_bias"][:, None].expand(-1, channels),
    }
    out, pool = check(mode, state, inputs, mode.indices([2, 0, 1]))
    same, other = check(mode, state, inputs | tied, mode.indices([2, 0, 1]))
    assert_same_bits(out, same)
    assert_same_bits(pool, other)


@pytest.mark.parametrize("num_groups", [1, 4])
def test_ssm_groups(num_groups: int) -> None:
    inputs = make_inputs(MODES["mamba2"], 3)
    for name in ("B", "C"):
        inputs[name] = torch.randn(3, num_groups, 5)
    check_step(MODES["mamba2"], inputs)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 300), (2, 70, 64), (300, 16)], ids=str)
def test_ssm_sizes(shape: tuple[int, ...]) -> None:
    """Sizes that are no powers of 2, and several tiles of a head."""
    channels, states = shape[:-1], shape[-1]
    groups = (1,) if len(shape) == 3 else ()
    inputs = {
        "x": torch.randn(3, *channels),
        "dt": torch.randn(3, *channels),
        "A": -torch.rand(shape),
        "B": torch.randn(3, *groups, states).div(states**0.5),
        "C": torch.randn(3, *groups, states).div(states**0.5),
        "dt_softplus": True,
    }
    check_step(SSM["mamba2" if len(shape) == 3 else "mamba1"], inputs, torch.randn(4, *shape))


def test_ssm_softplus_is_exact_far_from_zero_and_near_it() -> None:
    # From a state of zero, with B = C = 1, the output is softplus(dt) * x.
    dt = torch.tensor([-80.0, -20, -9, -1e-3, 0, 1e-3, 1, 9, 19.99, 20, 20.01, 1e4])
    expected = torch.where(dt > 20, dt.double(), dt.double().exp().log1p())
    scale = 1 / expected
    one = torch.ones(len(dt), 1)
    inputs = {
        "x": scale.float()[:, None],
        "dt": dt[:, None],
        "A": -torch.ones(1, 1),
        "B": one,
        "C": one,
        "dt_softplus": True,
    }
    new = torch.zeros(len(dt), dtype=torch.bool)
    state = torch.zeros(len(dt), 1, 1)
    out, _ = check(
        MODES["mamba1"],
        state,
        inputs,
        torch.arange(len(dt), dtype=torch.int32),
        has_initial_state=new,
    )
    torch.testing.assert_close(out.cpu(), one, rtol=2e-6, atol=0)
