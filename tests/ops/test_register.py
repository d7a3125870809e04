"""Which implementation a device gets."""

import importlib.util

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.ops import _register

from ..helpers import assert_same_bits
from ..op_inputs import OPS, Inputs, make_inputs

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


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_an_op_runs_on_the_current_stream(name: str) -> None:
    """Its inputs are there only when what the stream did before is done."""
    inputs = make_inputs(name, "cuda")
    late = {k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        getattr(ops, name)(**late)  # has memory of its own
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        for key, value in inputs.items():
            if isinstance(value, Tensor):
                late[key].copy_(value)
        actual = getattr(ops, name)(**late)
        assert not stream.query()
    stream.synchronize()
    _assert_same(actual, getattr(ops, name)(**inputs), late, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_an_op_runs_on_a_card_that_is_not_the_current_one(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    inputs = make_inputs(name, "cuda:0")
    other = {k: v.to("cuda:1") if isinstance(v, Tensor) else v for k, v in inputs.items()}
    actual = getattr(ops, name)(**other)
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    _assert_same(actual, getattr(ops, name)(**inputs), other, inputs)


def _assert_same(actual: object, expected: object, written: Inputs, inputs: Inputs) -> None:
    """Results and arguments, whatever card they are on."""
    arguments = [[v for v in each.values() if isinstance(v, Tensor)] for each in (written, inputs)]
    found = _tensors(actual) + arguments[0]
    for a, b in zip(found, _tensors(expected) + arguments[1], strict=True):
        assert_same_bits(a.cpu(), b.cpu())


def _tensors(value: object) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [value for value in values if isinstance(value, Tensor)]
