"""The kernel of gated_delta_update_: its own forms; test_state_rows.py has rows and slots."""

from typing import Any

import pytest
import torch

from ..state_modes import Mode, starts
from .state_kernels import MODES, check

DELTA = {name: MODES[name] for name in ("gdn", "kda")}
each_form = pytest.mark.parametrize("mode", DELTA.values(), ids=DELTA.keys())


def check_step(mode: Mode, inputs: dict[str, Any], state: torch.Tensor | None = None) -> None:
    rows = {
        "query_start_loc": starts([1, 2]),
        "has_initial_state": torch.tensor([True, False]),
    }
    state = mode.pool(4) if state is None else state
    check(mode, state, inputs, mode.indices([2, 0]), **rows)


@each_form
@pytest.mark.parametrize(
    "options",
    [{"scale": 0.3}, {"scale": 0.0}, {"qk_l2norm": False}, {"scale": -2.0, "qk_l2norm": False}],
    ids=str,
)
def test_delta_options(mode: Mode, options: dict[str, Any]) -> None:
    check_step(mode, mode.inputs(4) | options)


@each_form
@pytest.mark.parametrize(
    ("heads", "v_heads", "k_dim", "v_dim"), [(1, 1, 1, 1), (1, 3, 20, 70), (2, 2, 130, 33)]
)
def test_delta_sizes(mode: Mode, heads: int, v_heads: int, k_dim: int, v_dim: int) -> None:
    """Sizes that are no powers of 2, and several tiles of a head."""
    channels = (k_dim,) if mode.name == "kda" else ()
    inputs = {
        "q": torch.randn(3, heads, k_dim),
        "k": torch.randn(3, heads, k_dim),
        "v": torch.randn(3, v_heads, v_dim),
        "g": -torch.rand(3, v_heads, *channels),
        "beta": torch.rand(3, v_heads),
    }
    check_step(mode, inputs, torch.randn(4, v_heads, k_dim, v_dim))


@each_form
def test_delta_keys_of_zero(mode: Mode) -> None:
    inputs = mode.inputs(3)
    inputs["q"][0], inputs["k"][1:] = 0, 0
    check_step(mode, inputs)


@each_form
def test_delta_decay_from_nothing_to_all(mode: Mode) -> None:
    inputs = mode.inputs(3)
    inputs["g"][0], inputs["g"][1], inputs["g"][2] = 0, -200, -1e-6
    check_step(mode, inputs)
