"""The state ops in every form that they take, behind one way to call them.

A rule of the batch contract holds for all of them: its test runs over ``MODES``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops

from . import oracles
from .helpers import assert_close, assert_same_bits, assert_untouched, nan_pool

NEXT_N = 4
WIDTH = 4

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Mode:
    """One op with one way to lay out its state."""

    name: str
    op: Callable[..., Tensor]
    oracle: Callable[..., tuple[Tensor, Tensor]]
    state_shape: tuple[int, ...]
    make_inputs: Callable[[int, torch.dtype], Inputs]
    # the inputs with one row per token
    of_token: frozenset[str]
    # one slot holds the state after each token: state_indices is [num_reqs, NEXT_N]
    slot_per_token: bool = False
    # one slot holds enough inputs to go back: num_accepted_tokens with state_indices [num_reqs]
    rolling: bool = False

    @property
    def takes_accepted(self) -> bool:
        return self.slot_per_token or self.rolling

    @property
    def columns(self) -> int:
        """Slots that a request owns."""
        return NEXT_N if self.slot_per_token else 1

    def indices(self, rows: Sequence[int | Sequence[int]]) -> Tensor:
        """state_indices from a list of slots per request, or from the first slot of each."""
        wide = [
            list(row) if isinstance(row, Sequence) else [row + t for t in range(self.columns)]
            for row in rows
        ]
        table = torch.tensor(wide, dtype=torch.int32).view(len(rows), -1)
        return table if self.slot_per_token else table.reshape(len(rows), -1)[:, 0].contiguous()

    def pool(self, num_slots: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(num_slots, *self.state_shape).to(dtype)

    def nan_pool(self, num_slots: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return nan_pool(num_slots, *self.state_shape, dtype=dtype)

    def inputs(self, num_tokens: int, dtype: torch.dtype = torch.float32) -> Inputs:
        return self.make_inputs(num_tokens, dtype)

    def take(self, inputs: Inputs, tokens: Iterable[int]) -> Inputs:
        """The inputs of some tokens."""
        rows = list(tokens)
        return {k: v[rows] if k in self.of_token else v for k, v in inputs.items()}

    def run(self, state: Tensor, inputs: Inputs, state_indices: Tensor, **rows: Any) -> Tensor:
        return self._call(self.op, state, inputs, state_indices, rows)

    def expect(
        self, state: Tensor, inputs: Inputs, state_indices: Tensor, **rows: Any
    ) -> tuple[Tensor, Tensor]:
        return self._call(self.oracle, state, inputs, state_indices, rows)

    def check(self, state: Tensor, inputs: Inputs, state_indices: Tensor, **rows: Any) -> Tensor:
        """Run the op and hold its output and every slot of the pool to the oracle."""
        expected, after = self.expect(state, inputs, state_indices, **rows)
        before = state.clone()
        out = self.run(state, inputs, state_indices, **rows)
        assert out.is_contiguous()
        assert_close(out, expected)
        written = written_slots(before, after)
        assert_untouched(state, before, written)
        if self.name.startswith("conv"):
            # Inputs are stored as they came: nothing is rounded twice.
            assert_same_bits(state[written], after[written])
        else:
            assert_close(state[written], after[written])
        return out

    def one_by_one(self, inputs: Inputs, length: int) -> Tensor:
        """The outputs of a request's first tokens without speculation: each in a step alone."""
        plain = MODES[self.name.removesuffix("-slots").removesuffix("-rolling")]
        state = plain.nan_pool(1)
        outs = []
        for t in range(length):
            old = torch.tensor([t > 0])
            one = plain.take(inputs, [t])
            outs.append(plain.run(state, one, int32(0), has_initial_state=old))
        return torch.cat(outs)

    def accepted(self, *counts: int) -> dict[str, Any]:
        """num_accepted_tokens, where the mode takes it."""
        return {"num_accepted_tokens": int32(*counts)} if self.takes_accepted else {}

    def _call(
        self, op: Callable[..., Any], state: Tensor, inputs: Inputs, indices: Tensor, rows: Any
    ) -> Any:
        name = "conv_state" if self.name.startswith("conv") else "state"
        return op(**{name: state}, **inputs, state_indices=indices, **rows)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lens: Sequence[int]) -> Tensor:
    """query_start_loc of requests of these lengths."""
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)


def written_slots(before: Tensor, after: Tensor) -> list[int]:
    """The slots whose bytes differ."""
    return [
        slot
        for slot in range(before.shape[0])
        if before[slot].contiguous().view(torch.uint8).tolist()
        != after[slot].contiguous().view(torch.uint8).tolist()
    ]


def _conv(num_tokens: int, dtype: torch.dtype) -> Inputs:
    return {
        "x": torch.randn(num_tokens, 5).to(dtype),
        "weight": torch.randn(5, WIDTH).to(dtype),
        "bias": torch.randn(5).to(dtype),
    }


def _mamba2(num_tokens: int, dtype: torch.dtype) -> Inputs:
    return {
        "x": torch.randn(num_tokens, 4, 3).to(dtype),
        "dt": torch.randn(num_tokens, 4).to(dtype),
        "A": -torch.rand(4) - 0.1,
        "B": torch.randn(num_tokens, 2, 5).to(dtype),
        "C": torch.randn(num_tokens, 2, 5).to(dtype),
        "D": torch.randn(4),
        "z": torch.randn(num_tokens, 4, 3).to(dtype),
        "dt_bias": torch.randn(4),
        "dt_softplus": True,
    }


def _mamba1(num_tokens: int, dtype: torch.dtype) -> Inputs:
    return {
        "x": torch.randn(num_tokens, 6).to(dtype),
        "dt": torch.rand(num_tokens, 6).to(dtype),
        "A": -torch.rand(6, 3) - 0.1,
        "B": torch.randn(num_tokens, 3).to(dtype),
        "C": torch.randn(num_tokens, 3).to(dtype),
    }


def _delta(num_tokens: int, dtype: torch.dtype, per_channel: bool = False) -> Inputs:
    g = -torch.rand(num_tokens, 4, 3) if per_channel else -torch.rand(num_tokens, 4)
    return {
        "q": torch.randn(num_tokens, 2, 3).to(dtype),
        "k": torch.randn(num_tokens, 2, 3).to(dtype),
        "v": torch.randn(num_tokens, 4, 5).to(dtype),
        "g": g,
        "beta": torch.rand(num_tokens, 4).to(dtype),
    }


def _kda(num_tokens: int, dtype: torch.dtype) -> Inputs:
    return _delta(num_tokens, dtype, per_channel=True)


def _modes() -> Iterable[Mode]:
    conv = (ops.causal_conv1d_update_, oracles.conv1d)
    of_token = frozenset({"x"})
    past = WIDTH - 1
    yield Mode("conv", *conv, (5, past), _conv, of_token)
    yield Mode("conv-spare-columns", *conv, (5, past + 2), _conv, of_token)
    yield Mode("conv-rolling", *conv, (5, past + NEXT_N - 1), _conv, of_token, rolling=True)
    yield Mode("conv-slots", *conv, (5, past), _conv, of_token, slot_per_token=True)
    for name, op, oracle, shape, make, names in (
        ("mamba2", ops.selective_state_update_, oracles.selective_state, (4, 3, 5), _mamba2, _SSM),
        ("mamba1", ops.selective_state_update_, oracles.selective_state, (6, 3), _mamba1, _SSM),
        ("gdn", ops.gated_delta_update_, oracles.gated_delta, (4, 3, 5), _delta, _DELTA),
        ("kda", ops.gated_delta_update_, oracles.gated_delta, (4, 3, 5), _kda, _DELTA),
    ):
        yield Mode(name, op, oracle, shape, make, names)
        yield Mode(f"{name}-slots", op, oracle, shape, make, names, slot_per_token=True)


_SSM = frozenset({"x", "dt", "B", "C", "z"})
_DELTA = frozenset({"q", "k", "v", "g", "beta"})

MODES = {mode.name: mode for mode in _modes()}

all_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
"""Every op and layout."""

accepting_modes = pytest.mark.parametrize(
    "mode", [pytest.param(m, id=m.name) for m in MODES.values() if m.takes_accepted]
)
"""Those that can go back to an earlier token."""
