"""What an op computes does not depend on torch's default dtype."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mtpgraph import ops

from ..helpers import assert_same_bits
from ..op_inputs import OPS, Inputs, make_inputs


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def copied(inputs: Inputs) -> Inputs:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, Tensor)]


def test_the_table_has_every_op() -> None:
    assert sorted(OPS) == sorted(name for name in ops.__all__ if hasattr(torch.ops.mtpgraph, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_the_default_dtype_changes_nothing(name: str, dtype: torch.dtype, device: str) -> None:
    op = getattr(ops, name)
    plain = make_inputs(name, device)
    inputs, fake_inputs = copied(plain), copied(plain)
    expected = tensors(op(**plain))
    with default_dtype(dtype):
        results = tensors(op(**inputs))
        mode = FakeTensorMode()
        with mode:
            fakes = tensors(
                op(
                    **{
                        k: mode.from_tensor(v) if isinstance(v, Tensor) else v
                        for k, v in fake_inputs.items()
                    }
                )
            )
    for result, other, fake in zip(results, expected, fakes, strict=True):
        assert_same_bits(result, other)
        assert result.dtype == fake.dtype
    for key, value in plain.items():
        if isinstance(value, Tensor):
            assert_same_bits(inputs[key], value)
