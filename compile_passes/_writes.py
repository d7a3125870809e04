"""What a node touches, and what it writes: for certain, or as far as cannot be ruled out.

Aliasing is read off the fake tensors that the tracer recorded: views share the storage of their
base, and so do two inputs that are views of one pool.
"""

import functools
import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ._compat import example_value, has_example_value, has_storage, storage_key
from ._nodes import arguments, nodes_in, op_of

UNKNOWN = 0
"""Stands for any storage: nothing is known of where a value lies."""


def storages(value: Any) -> set[int]:
    """The storages that a node, or a structure of nodes, refers to."""
    found: set[int] = set()
    for node in nodes_in(value):
        if has_example_value(node):
            _collect(example_value(node), found)
        else:
            found.add(UNKNOWN)
    return found


_NO_STORAGE = (
    bool | int | float | complex | str | torch.SymInt | torch.SymFloat | torch.SymBool
    | torch.dtype | torch.device | torch.layout | torch.memory_format
)  # fmt: skip


def _collect(value: Any, found: set[int]) -> None:
    if isinstance(value, Tensor):
        found.add(storage_key(value) if has_storage(value) else UNKNOWN)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        _collect(list(value.values()), found)
    elif not (value is None or isinstance(value, _NO_STORAGE)):
        # an array of another library may share memory with a tensor
        found.add(UNKNOWN)


def overlap(a: set[int], b: set[int]) -> bool:
    """Two sets of storages may have one in common."""
    return bool(a & b) or (UNKNOWN in a and bool(b)) or (UNKNOWN in b and bool(a))


def touched(node: fx.Node) -> set[int]:
    """Storages that a node reads or writes, or makes a view of."""
    if node.op == "call_module":
        return {UNKNOWN}
    return storages((node.args, node.kwargs))


def mutated(node: fx.Node) -> set[int]:
    """Storages that a node may write: what it is known to write, and what cannot be ruled out."""
    if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
        return {UNKNOWN}
    if op_of(node) is not None or is_pure(node) or _writes_first(node):
        return written(node)
    return storages((node.args, node.kwargs))


def may_write(node: fx.Node) -> set[int]:
    """What a node may write among its arguments: a node may not write what it was not given."""
    found = mutated(node)
    return storages((node.args, node.kwargs)) if UNKNOWN in found else found


def written(node: fx.Node) -> set[int]:
    """Storages that a node writes for certain.

    A call of an op says so in its schema. Methods with a trailing underscore, in-place operators
    and the setting of items write their first argument, and everything writes to ``out``.
    """
    op = op_of(node)
    if op is not None:
        values = arguments(node)
        return storages(
            [
                values[argument.name]
                for argument in op._schema.arguments
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        )
    found = storages(node.kwargs.get("out")) if node.op == "call_function" else set()
    in_place = _writes_first(node) or _said_in_place(node)
    return found | storages(node.args[0]) if in_place and node.args else found


_WRITING_OPERATORS = frozenset(
    {
        operator.iadd,
        operator.iand,
        operator.ifloordiv,
        operator.ilshift,
        operator.imatmul,
        operator.imod,
        operator.imul,
        operator.ior,
        operator.ipow,
        operator.irshift,
        operator.isub,
        operator.itruediv,
        operator.ixor,
        operator.setitem,
    }
)


_WRITING_METHODS = frozenset(f"__{function.__name__}__" for function in _WRITING_OPERATORS)


def named_in_place(name: str) -> bool:
    """The name of a method or function says that it writes its first argument: ``add_``."""
    if name.startswith("__") and name.endswith("__"):
        return name in _WRITING_METHODS
    return name.endswith("_")


def _writes_first(node: fx.Node) -> bool:
    if node.op == "call_method":
        return named_in_place(str(node.target))
    return node.op == "call_function" and node.target in _WRITING_OPERATORS


def _said_in_place(node: fx.Node) -> bool:
    """A function of torch that writes its first argument: ``torch.relu_``, ``inplace=True``."""
    if node.op != "call_function" or not _is_of_torch(node.target):
        return False
    if named_in_place(getattr(node.target, "__name__", "")):
        return True
    given = dict(zip(_parameters(node.target), node.args, strict=False)) | node.kwargs
    return given.get("inplace") is True


# operators that write none of their arguments
PURE_FUNCTIONS = frozenset(
    {
        operator.getitem,
        getattr,
        operator.add,
        operator.and_,
        operator.eq,
        operator.floordiv,
        operator.ge,
        operator.gt,
        operator.invert,
        operator.le,
        operator.lt,
        operator.matmul,
        operator.mod,
        operator.mul,
        operator.ne,
        operator.neg,
        operator.or_,
        operator.pow,
        operator.sub,
        operator.truediv,
    }
)


# functions of torch that write without an underscore to say so
_WRITERS = frozenset({"batch_norm", "instance_norm", "auto_functionalized", "setitem"})


def is_pure(node: fx.Node) -> bool:
    """Known to write none of its arguments: torch names what writes with a trailing underscore."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.op == "call_method":
        return not named_in_place(str(node.target))
    if node.op != "call_function" or node.kwargs.get("out") is not None:
        return False
    if isinstance(node.target, HigherOrderOperator):
        return False
    if isinstance(node.target, OpOverloadPacket):
        return not _may_write(node.target, node.kwargs)
    if node.target in PURE_FUNCTIONS:
        return True
    if node.kwargs.get("inplace") or (len(node.args) > 1 and "inplace" in _parameters(node.target)):
        return False
    name = getattr(node.target, "__name__", "")
    return _is_of_torch(node.target) and not named_in_place(name) and name not in _WRITERS


def _is_of_torch(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or ""
    # builtins of torch have no module of their own
    return module.split(".")[0] == "torch" or getattr(torch, name, None) is function


def _may_write(packet: OpOverloadPacket, kwargs: dict[str, Any]) -> bool:
    """One of the overloads that a call may mean writes an argument of it."""
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and (not argument.kwarg_only or argument.name in kwargs)
        for overload in overloads
        for argument in overload._schema.arguments
    )


@functools.lru_cache(maxsize=4096)
def _parameters(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def computes(op: OpOverload) -> bool:
    """Known to do nothing but compute its results: another's op may have effects of its own."""
    return op.namespace in ("aten", "mtpgraph") and not op._schema.is_mutable


def erase_unused(node: Any) -> None:
    """Erase a node that has no users left, and what only it used, among pure calls."""
    if not isinstance(node, fx.Node) or node.users or node.op == "placeholder":
        return
    op = op_of(node)
    if not is_pure(node) or (op is not None and not computes(op)):
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        erase_unused(source)


def erase_all_unused(graph: fx.Graph, values: Iterable[Any]) -> None:
    """``erase_unused`` of each that has not gone with another."""
    for value in values:
        if isinstance(value, fx.Node) and value in set(graph.nodes):
            erase_unused(value)
