"""Checks that name the argument, the rule and what came.

They serve eager calls and fakes alike: sizes may be symbolic, so equalities go through
``torch._check_value``, which also tells the tracer that two sizes are one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def check_shape(name: str, tensor: Tensor, source: str = "", /, **dims: int | None) -> None:
    """``tensor`` has one dimension per keyword, of the given size; ``None`` admits any size.

    ``source``: where a size is from, if another argument may be wrong as well.
    """

    def message() -> str:
        tail = f"; {source}" if source else ""
        return f"{name} must have shape {_rule(dims)}, got {_told(tensor.shape)}{tail}"

    if tensor.dim() != len(dims):
        raise ValueError(message())
    for axis, size in enumerate(dims.values()):
        if size is not None:
            actual = tensor.shape[axis]
            if type(actual) is int and type(size) is int:
                if actual != size:
                    raise ValueError(message())
            else:
                torch._check_value(actual == size, message)


def check_any_shape(name: str, tensor: Tensor, *choices: Mapping[str, int | None]) -> None:
    """``tensor`` has the shape of the choice that has its rank."""
    for dims in choices:
        if tensor.dim() == len(dims):
            return check_shape(name, tensor, **dims)
    raise ValueError(
        f"{name} must have shape {' or '.join(map(_rule, choices))}, got {_told(tensor.shape)}"
    )


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """``tensor`` is there, and has one of ``dtypes``."""
    # None passes for a tensor in a schema. The first check of an argument is this one.
    if tensor is None:
        raise TypeError(f"{name} must be a tensor, got None")
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}"
        )


def check_device(like: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Every tensor lies on ``device``, the device of the argument called ``like``."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on {device} as {like} is, got {tensor.device}")


def check_lens(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    """The two tensors that describe a batch fit each other."""
    check_dtype("query_start_loc", query_start_loc, torch.int32)
    check_dtype("seq_lens", seq_lens, torch.int32)
    check_shape("seq_lens", seq_lens, num_reqs=None)
    check_starts(query_start_loc, seq_lens.shape[0], "seq_lens")
    check_device("query_start_loc", query_start_loc.device, seq_lens=seq_lens)


def check_starts(query_start_loc: Tensor, num_reqs: int, like: str) -> None:
    """``query_start_loc`` has a start for each request and an end, as many as ``like`` says."""
    source = f"num_reqs is that of {like}"
    check_shape("query_start_loc", query_start_loc, source, num_reqs_plus_1=num_reqs + 1)


def check_rule(condition: bool | torch.SymBool, name: str, rule: str, got: object) -> None:
    """``condition`` holds; otherwise the error says ``<name> must <rule>, got <got>``."""
    if condition is True:
        return
    torch._check_value(condition, lambda: f"{name} must {rule}, got {_told(got)}")


def check_writable(name: str, tensor: Tensor) -> None:
    """No two elements of ``tensor`` share memory through a stride of zero."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if type(stride) is int and stride == 0 and size != 1:
            raise ValueError(
                f"{name} must not overlap itself, got strides {tuple(tensor.stride())} "
                f"for shape {_told(tensor.shape)}"
            )


def _rule(dims: Mapping[str, int | None]) -> str:
    return "[" + ", ".join(k if v is None else f"{k}={_told(v)}" for k, v in dims.items()) + "]"


def _told(got: object) -> str:
    """A size, several, or what else came; of a symbol also its value in the call that is traced."""
    if isinstance(got, list | tuple):
        return f"[{', '.join(map(_told, got))}]"
    if isinstance(got, torch.SymInt) and got.node.has_hint():
        return f"{got} ({got.node.hint})"
    return str(got)
