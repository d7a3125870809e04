"""Every op that an eager call runs, with the user's line and what it gave."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..compile_passes import _compat


@dataclasses.dataclass
class Call:
    """One op that ran.

    Attributes:
        name: of the op
        file, line: the user's line that ran it
        is_custom: it belongs to no namespace of torch
        writes: it writes an argument
        results: copies of what it returned and of what it wrote; empty unless kept
    """

    name: str
    file: str
    line: int
    is_custom: bool
    writes: bool
    results: list[Tensor]


def watch_ops(
    seen: Callable[[Call], None], *, keep: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """Hand every op that runs inside to ``seen``, after it ran.

    Args:
        seen: is called with each
        keep: copy the results: a later op may write over them
    """

    def tell(op: Any, args: Any, kwargs: Any, result: Any) -> None:
        file, line = _compat.current_user_frame()
        written = _written(op, args, kwargs)
        values = [result, *written] if keep else []
        tensors = [leaf for leaf in _compat.tree_leaves(values) if isinstance(leaf, Tensor)]
        name = str(op).removesuffix(".default")
        is_custom = op.namespace not in ("aten", "prims", "torch_attn")
        results = [tensor.detach().clone() for tensor in tensors]
        seen(Call(name, file, line, is_custom, bool(written), results))

    return _compat.OpMode(tell)


def _written(op: Any, args: Any, kwargs: Any) -> list[Any]:
    written = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return written
