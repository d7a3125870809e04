"""Inputs as they are written on the command line."""

from typing import Any

import pytest
import torch

from mtpgraph.explanation.specs import parse_inputs


@pytest.mark.parametrize(
    ("text", "dtype", "shape"),
    [
        ("float32[4,8]", torch.float32, (4, 8)),
        ("bf16[2, 3]", torch.bfloat16, (2, 3)),
        ("half[1]", torch.float16, (1,)),
        ("int32[4]", torch.int32, (4,)),
        ("i64[0]", torch.int64, (0,)),
        ("uint8[2,2]@cpu", torch.uint8, (2, 2)),
        ("bool[3]", torch.bool, (3,)),
        ("fp8[2,4]", torch.float8_e4m3fn, (2, 4)),
        ("float32[]", torch.float32, ()),
        ("float32[2]@meta", torch.float32, (2,)),
    ],
)
def test_specs_tensor(text: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ((tensor,), named) = parse_inputs([text])
    assert (tensor.dtype, tuple(tensor.shape), named) == (dtype, shape, {})


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("-1", -1), ("0.5", 0.5), ("None", None), ("True", True), ("False", False)],
)
def test_specs_constant(text: str, value: Any) -> None:
    ((parsed,), _) = parse_inputs([text])
    assert parsed == value
    assert type(parsed) is type(value)


def test_specs_fill() -> None:
    """Integers and booleans are zero, which every id, length and index may be; floats vary."""
    (whole, flags, drawn), _ = parse_inputs(["int32[5]", "bool[5]", "float32[50]"])
    assert not whole.any()
    assert not flags.any()
    assert drawn.std() > 0.5
    (again, *_), _ = parse_inputs(["float32[50]"])
    assert torch.equal(drawn, again)


def test_specs_names() -> None:
    args, kwargs = parse_inputs(["float32[2]", "lens=int32[3]", "scale=0.5"])
    assert len(args) == 1
    assert kwargs["lens"].shape == (3,)
    assert kwargs["scale"] == 0.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["float32[2]", "floot"], r"--input 2, 'floot', must be \[NAME=\]DTYPE\[SIZE,...\]"),
        (["float32[2"], "--input 1, 'float32"),
        (["floot[2]"], "must have a dtype of torch, got 'floot'"),
        (["Tensor[2]"], "must have a dtype of torch, got 'Tensor'"),
        (["float32[2,-1]"], r"must have sizes of 0 or more, got \[2,-1\]"),
        (["float32[2,,3]"], "must have sizes of 0 or more"),
        (["int32[2]@nowhere"], "'int32\\[2\\]@nowhere', cannot be made"),
        (["a=1", "2"], "must have a name, for it comes after a named one"),
        (["a=1", "a=2"], "names 'a' a second time"),
    ],
)
def test_specs_errors(given: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_inputs(given)
