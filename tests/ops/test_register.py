"""Which implementation a device gets."""

import importlib.util

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.ops import _register

from ..helpers import assert_same_bits
from ..op_inputs import OPS, make_inputs

has_kernels = _register._has_kernels.__wrapped__


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_kernels_need_a_card_of_compute_capability_8(
    capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_kernels(torch.device("cuda", 0)) == has


def test_kernels_need_triton_and_a_build_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not has_kernels(torch.device("cuda", 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not has_kernels(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_a_card_without_kernels_runs_the_reference(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_register, "_has_kernels", lambda device: False)
    monkeypatch.setattr(_register, "_kernel", None)
    op, inputs = getattr(ops, name), make_inputs(name)
    on_card = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    expected, actual = op(**inputs), op(**on_card)
    for a, b in zip(_tensors(actual), _tensors(expected), strict=True):
        torch.testing.assert_close(a.cpu(), b, equal_nan=True)
    for key, value in inputs.items():
        if isinstance(value, Tensor):
            if value.dtype.is_floating_point:
                torch.testing.assert_close(on_card[key].cpu(), value, equal_nan=True)
            else:
                assert_same_bits(on_card[key].cpu(), value)


def _tensors(value: object) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [value for value in values if isinstance(value, Tensor)]
