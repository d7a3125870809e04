"""The launches of the three state updates behind the modes of ``tests.state_modes``.

``check`` runs one on the card, or in the interpreter where there is none, and holds it to the
float64 oracle.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .. import state_modes
from ..helpers import assert_close, assert_same_bits, assert_untouched
from ..state_modes import Inputs, Mode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def with_launch(mode: Mode) -> Mode:
    name = mode.op.__name__.removesuffix("_")
    launch = importlib.import_module(f"mtpgraph.kernels.{name}").launch
    return dataclasses.replace(mode, op=launch)


MODES = {name: with_launch(mode) for name, mode in state_modes.MODES.items()}
all_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


def big_modes() -> dict[str, Mode]:
    """The same at the sizes of models."""
    shapes = {"conv": (4352,), "mamba2": (32, 64, 128), "mamba1": (2048, 16)}
    shapes |= {"gdn": (8, 128, 128), "kda": (8, 128, 128)}
    modes = {}
    for name, mode in MODES.items():
        kind = name.split("-")[0]
        inner = mode.state_shape[1:] if kind == "conv" else ()
        make = globals()[f"_{kind}"]
        modes[name] = dataclasses.replace(
            mode, state_shape=(*shapes[kind], *inner), make_inputs=make
        )
    return modes


def _conv(num_tokens: int, dtype: torch.dtype) -> Inputs:
    return {
        "x": torch.randn(num_tokens, 4352).to(dtype),
        "weight": torch.randn(4352, state_modes.WIDTH).to(dtype),
        "bias": torch.randn(4352).to(dtype),
    }


def _mamba2(num_tokens: int, dtype: torch.dtype) -> Inputs:
    return {
        "x": torch.randn(num_tokens, 32, 64).to(dtype),
        "dt": torch.randn(num_tokens, 32).to(dtype),
        "A": -torch.rand(32) - 0.1,
        "B": torch.randn(num_tokens, 4, 128).div(8).to(dtype),
        "C": torch.randn(num_tokens, 4, 128).div(8).to(dtype),
        "D": torch.randn(32),
        "z": torch.randn(num_tokens, 32, 64).to(dtype),
        "dt_bias": torch.randn(32),
        "dt_softplus": True,
    }


def _mamba1(num_tokens: int, dtype: torch.dtype) -> Inputs:
    return {
        "x": torch.randn(num_tokens, 2048).to(dtype),
        "dt": torch.randn(num_tokens, 2048).to(dtype),
        "A": -torch.rand(2048, 16) - 0.1,
        "B": torch.randn(num_tokens, 16).div(4).to(dtype),
        "C": torch.randn(num_tokens, 16).div(4).to(dtype),
        "D": torch.randn(2048),
        "dt_bias": torch.randn(2048),
        "dt_softplus": True,
    }


def _gdn(num_tokens: int, dtype: torch.dtype) -> Inputs:
    return {
        "q": torch.randn(num_tokens, 4, 128).to(dtype),
        "k": torch.randn(num_tokens, 4, 128).to(dtype),
        "v": torch.randn(num_tokens, 8, 128).to(dtype),
        "g": -torch.rand(num_tokens, 8),
        "beta": torch.rand(num_tokens, 8).to(dtype),
    }


def _kda(num_tokens: int, dtype: torch.dtype) -> Inputs:
    return _gdn(num_tokens, dtype) | {"g": -torch.rand(num_tokens, 8, 128)}


def to_device(value: Any) -> Any:
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def run(mode: Mode, state: Tensor, inputs: Inputs, state_indices: Tensor, **rows: Any) -> Tensor:
    """``mode.run`` with ``state`` where it is and the rest on the device."""
    inputs, rows = ({k: to_device(v) for k, v in given.items()} for given in (inputs, rows))
    return mode.run(state, inputs, to_device(state_indices), **rows)


def check(
    mode: Mode,
    state: Tensor,
    inputs: Inputs,
    state_indices: Tensor,
    *,
    place: Callable[[Tensor], Tensor] = torch.clone,
    **rows: Any,
) -> tuple[Tensor, Tensor]:
    """The output and the pool after a step; ``place`` lays the pool out on the device."""
    expected, after = mode.expect(state, inputs, state_indices, **rows)
    pool = place(state.to(DEVICE))
    out = run(mode, pool, inputs, state_indices, **rows)
    assert out.is_contiguous()
    assert_close(out, expected)
    written = (after != state).flatten(1).any(1).nonzero().flatten().tolist()
    assert_untouched(pool.cpu(), state, written)
    if mode.name.startswith("conv"):
        # Inputs are stored as they came: nothing is rounded twice.
        assert_same_bits(pool[written].cpu(), after[written])
    else:
        assert_close(pool[written], after[written])
    return out, pool
