"""Inputs from the command line: ``float32[4,8]``, ``int32[4]@cuda``, ``3``, ``None``."""

import re
from typing import Any

import torch
from torch import Tensor

GRAMMAR = (
    "[NAME=]DTYPE[SIZE,...][@DEVICE], an int, a float, True, False or None; "
    "for example float32[4,8], bf16[4,16,576]@cuda, seq_lens=int32[4], float32[], 3"
)

_NAMED = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_TENSOR = re.compile(r"^([A-Za-z_]\w*)\[([^\]]*)\](?:@(.+))?$")
_SHORT = {
    "bf16": "bfloat16",
    "bool": "bool",
    "double": "float64",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "half": "float16",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "i8": "int8",
    "int": "int64",
    "long": "int64",
    "u8": "uint8",
}
_CONSTANTS = {"None": None, "True": True, "False": False}


def parse_inputs(given: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named inputs from the command line, in order.

    Raises:
        ValueError: one is not of the grammar; the message names it
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(0)
    for number, text in enumerate(given, start=1):
        named = _NAMED.match(text)
        name, value = (named[1], named[2]) if named else ("", text)
        which = f"--input {number}, {text!r},"
        if not name and kwargs:
            raise ValueError(f"{which} must have a name, for it comes after a named one")
        if name in kwargs:
            raise ValueError(f"{which} names {name!r} a second time")
        parsed = _value(which, value.strip(), generator)
        if name:
            kwargs[name] = parsed
        else:
            args.append(parsed)
    return args, kwargs


def _value(which: str, text: str, generator: torch.Generator) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    match = _TENSOR.match(text)
    if match is None:
        raise ValueError(f"{which} must be {GRAMMAR}")
    dtype = getattr(torch, _SHORT.get(match[1], match[1]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{which} must have a dtype of torch, got {match[1]!r}")
    sizes = [size.strip() for size in match[2].split(",")] if match[2].strip() else []
    if not all(size.isdecimal() for size in sizes):
        raise ValueError(f"{which} must have sizes of 0 or more, got [{match[2]}]")
    try:
        return _filled([int(size) for size in sizes], dtype, generator).to(match[3] or "cpu")
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{which} cannot be made: {str(error).partition(chr(10))[0]}") from error


def _filled(sizes: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal numbers for floating point, the same in every run; zeros for everything else."""
    if dtype.is_floating_point:
        return torch.randn(sizes, generator=generator).to(dtype)
    return torch.zeros(sizes, dtype=dtype)
