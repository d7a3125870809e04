"""Questions about nodes of a Dynamo-level graph that the passes share.

Aliasing is read off the fake tensors that the tracer recorded: views share the storage of their
base, and so do two inputs that are views of one pool.
"""

import inspect
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ._compat import example_value, has_example_value, storage_key


def op_of(node: object) -> OpOverload | None:
    """The op that a node calls, if it calls one."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if isinstance(node.target, OpOverloadPacket):
        # which of several overloads a call means, only its arguments tell
        return node.target.default if node.target.overloads() == ["default"] else None
    return node.target if isinstance(node.target, OpOverload) else None


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of an op by name, defaults filled in, in the order of the schema."""
    op = op_of(node)
    assert op is not None
    values = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(node.args):
            values[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        else:
            values[argument.name] = argument.default_value
    return values


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Give one argument of a call of an op, wherever it stands."""
    op = op_of(node)
    assert op is not None
    names = [argument.name for argument in op._schema.arguments]
    position = names.index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


UNKNOWN = 0
"""Stands for any storage: the tracer recorded nothing about a value."""


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


def overlap(a: set[int], b: set[int]) -> bool:
    """Two sets of storages may have one in common."""
    return bool(a & b) or (UNKNOWN in a and bool(b)) or (UNKNOWN in b and bool(a))


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes in a structure of arguments."""
    nodes: list[fx.Node] = []
    fx.map_arg(value, lambda node: nodes.append(node) or node)
    return nodes


def _collect(value: Any, found: set[int]) -> None:
    if isinstance(value, Tensor):
        found.add(storage_key(value))
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        _collect(list(value.values()), found)
    elif not (value is None or isinstance(value, _NO_STORAGE)):
        # an array of another library may share memory with a tensor
        found.add(UNKNOWN)


def touched(node: fx.Node) -> set[int]:
    """Storages that a node reads or writes, or makes a view of."""
    if node.op == "call_module":
        return {UNKNOWN}
    return storages((node.args, node.kwargs))


def mutated(node: fx.Node) -> set[int]:
    """Storages that a node may write: what it is known to write, and what cannot be ruled out."""
    if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
        return {UNKNOWN}
    if op_of(node) is not None or _is_pure(node) or _writes_first(node):
        return written(node)
    return storages((node.args, node.kwargs))


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
    return found | storages(node.args[0]) if _writes_first(node) and node.args else found


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


def _writes_first(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target).endswith("_")
    return node.op == "call_function" and node.target in _WRITING_OPERATORS


_PURE_FUNCTIONS = frozenset(
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


def _is_pure(node: fx.Node) -> bool:
    """Known to write none of its arguments: torch names what writes with a trailing underscore."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.op == "call_method":
        return not str(node.target).endswith("_")
    if node.op != "call_function" or node.kwargs.get("out") is not None:
        return False
    if isinstance(node.target, HigherOrderOperator | OpOverloadPacket):
        return False
    if node.target in _PURE_FUNCTIONS:
        return True
    if node.kwargs.get("inplace") or (len(node.args) > 1 and "inplace" in _parameters(node.target)):
        return False
    name = getattr(node.target, "__name__", "")
    module = getattr(node.target, "__module__", None) or ""
    # builtins of torch have no module of their own
    of_torch = module.split(".")[0] == "torch" or getattr(torch, name, None) is node.target
    return of_torch and not name.endswith("_") and name not in _WRITERS


# functions of torch that write without an underscore to say so
_WRITERS = frozenset({"batch_norm", "instance_norm", "auto_functionalized", "setitem"})


def _parameters(function: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def steady(values: Any, since: fx.Node, until: fx.Node) -> bool:
    """Nothing that ``values`` are, or were computed from, is written while they are in use.

    In use is from the first call that computes one of them, or from ``since`` where that comes
    first, up to ``until``. Two equal expressions among them are then one value.
    """
    chain = upstream(values)
    sources = set().union(*map(storages, chain))
    computed = {since, *(node for node in chain if node.op != "placeholder")}
    in_use = False
    for node in until.graph.nodes:
        if node is until:
            return True
        in_use = in_use or node in computed
        if in_use and overlap(mutated(node), sources):
            return False
    raise ValueError(f"{until} is not in its graph")


def comes_before(graph: fx.Graph, first: fx.Node, last: fx.Node) -> bool:
    """``first`` stands before ``last`` in the graph."""
    for node in graph.nodes:
        if node is first:
            return node is not last
        if node is last:
            return False
    return False


# what gives one result for one input: not so torch.rand_like, for one
_REPEATABLE_METHODS = frozenset(
    {"bool", "contiguous", "flatten", "int", "long", "narrow", "reshape", "select", "size"}
    | {"squeeze", "to", "transpose", "unsqueeze", "view"}
)


def same_value(a: Any, b: Any) -> bool:
    """Two values are one, provably: the same node, or the same repeatable call of the same values.

    Says nothing of writes between the two: the caller asks ``steady`` for that.
    """
    if a is b:
        return True
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        return (
            (a.op, a.target) == (b.op, b.target)
            and _is_repeatable(a)
            and same_value((a.args, dict(a.kwargs)), (b.args, dict(b.kwargs)))
        )
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return False
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, slice) and isinstance(b, slice):
        return same_value((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return type(a) is type(b) and bool(a == b)


def _is_repeatable(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _REPEATABLE_METHODS
    return node.target in _PURE_FUNCTIONS or _is_functional(node)


def _is_functional(node: fx.Node) -> bool:
    """A call of one of our ops that writes nothing: the same inputs give the same result."""
    op = op_of(node)
    return op is not None and op.namespace == "mtpgraph" and not op._schema.is_mutable


def upstream(value: Any) -> set[fx.Node]:
    """The nodes in a value, and all that they were computed from."""
    found: set[fx.Node] = set()
    stack = nodes_in(value)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def erase_unused(node: Any) -> None:
    """Erase a node that has no users left, and what only it used, among pure calls."""
    if not isinstance(node, fx.Node) or node.users or node.op == "placeholder":
        return
    if not (_is_pure(node) or _is_functional(node)):
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        erase_unused(source)
