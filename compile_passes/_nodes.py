"""Questions about nodes of a Dynamo-level graph that the passes share.

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

from ._compat import (
    example_value,
    has_example_value,
    has_storage,
    size_expression,
    storage_key,
    user_frame,
)
from ._memory import same_elements, sizes
from .report import name_of


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
        found.add(storage_key(value) if has_storage(value) else UNKNOWN)
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
    if node.target in _PURE_FUNCTIONS:
        return True
    if node.kwargs.get("inplace") or (len(node.args) > 1 and "inplace" in _parameters(node.target)):
        return False
    name = getattr(node.target, "__name__", "")
    module = getattr(node.target, "__module__", None) or ""
    # builtins of torch have no module of their own
    of_torch = module.split(".")[0] == "torch" or getattr(torch, name, None) is node.target
    return of_torch and not named_in_place(name) and name not in _WRITERS


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


# functions of torch that write without an underscore to say so
_WRITERS = frozenset({"batch_norm", "instance_norm", "auto_functionalized", "setitem"})


@functools.lru_cache(maxsize=4096)
def _parameters(function: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def writer_between(
    values: Any, since: fx.Node, until: fx.Node, computed: Iterable[fx.Node] | None = None
) -> fx.Node | None:
    """The first node that may write ``values``, or what they were computed from, while in use.

    In use is from the first call that computes one of them, or from ``since`` where that comes
    first, up to ``until``. If there is no such node, equal expressions among them are one value.
    ``computed`` are the calls to begin from, in place of all that the values come from: a caller
    that knows which ones read what the others may not change between leaves out the rest.
    """
    chain = read_from(values)
    sources = set().union(*map(storages, chain))
    if computed is None:
        computed = (node for node in chain if node.op != "placeholder")
    first = {since, *computed}
    in_use = False
    for node in until.graph.nodes:
        if node is until:
            return None
        in_use = in_use or node in first
        if in_use and overlap(mutated(node), sources):
            return node
    raise ValueError(f"{until} is not in its graph")


def computed_apart(a: Any, b: Any) -> set[fx.Node]:
    """The calls that compute two equal values twice: where the value is one, what it is a result
    of is no matter. Inputs are not calls."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return set().union(*map(computed_apart, a, b))
    if a is b or not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return set()
    if size_of(a) is not None:
        return set()
    here = {node for node in (a, b) if node.op != "placeholder"}
    return here if same_view(a, b) else here | computed_apart(_operands(a), _operands(b))


def _operands(node: fx.Node) -> tuple[Any, ...]:
    return (*node.args, *(node.kwargs[name] for name in sorted(node.kwargs)))


def read_from(value: Any) -> set[fx.Node]:
    """The nodes in a value, and all that they were computed from, up to sizes: a number stays what
    it is whatever is written later."""
    found: set[fx.Node] = set()
    stack = nodes_in(value)
    while stack:
        node = stack.pop()
        if node not in found and size_of(node) is None:
            found.add(node)
            stack += node.all_input_nodes
    return found


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
    {"bool", "chunk", "clamp", "clamp_min", "clone", "contiguous", "detach", "expand", "flatten"}
    | {"index_select", "int", "long", "narrow", "permute", "reshape", "select", "size", "split"}
    | {"squeeze", "t", "to", "transpose", "type", "unbind", "unflatten", "unsqueeze", "view"}
)
_REPEATABLE_FUNCTIONS = frozenset(
    {torch.arange, torch.chunk, torch.clamp, torch.clone, torch.flatten, torch.index_select}
    | {torch.narrow, torch.permute, torch.reshape, torch.select, torch.split, torch.squeeze}
    | {torch.transpose, torch.unbind, torch.unflatten, torch.unsqueeze}
)


def same_value(a: Any, b: Any) -> bool:
    """Two values are one, provably.

    They are the same node, two views of the same elements, equal sizes, or the same repeatable
    call of the same values. Says nothing of writes between the two: the caller asks
    ``writer_between`` for that.
    """
    if a is b:
        return True
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return _same_result(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, slice) and isinstance(b, slice):
        return same_value((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return type(a) is type(b) and bool(a == b)


def _same_result(a: Any, b: Any) -> bool:
    size = size_of(a)
    if size is not None and size == size_of(b):
        return True
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return False
    if same_view(a, b):
        return True
    return (
        (a.op, a.target) == (b.op, b.target)
        and _is_repeatable(a)
        and same_value((a.args, dict(a.kwargs)), (b.args, dict(b.kwargs)))
    )


def same_view(a: object, b: object) -> bool:
    """Two nodes are tensors over the same elements of one storage."""
    first, second = tensor_of(a), tensor_of(b)
    return first is not None and second is not None and same_elements(first, second)


def tensor_of(node: object) -> Tensor | None:
    """The fake tensor recorded for a node, if it is a tensor and one was recorded."""
    if not isinstance(node, fx.Node) or not has_example_value(node):
        return None
    value = example_value(node)
    return value if isinstance(value, Tensor) else None


def size_of(value: object) -> Any:
    """An int, or a node that is one, as an int or an expression of symbols; None otherwise.

    Two sizes whose expressions are equal are equal whenever the graph runs.
    """
    if isinstance(value, fx.Node):
        value = example_value(value)
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        return None
    return size_expression(value)


_COPIES = frozenset({"bool", "clone", "contiguous", "detach", "int", "long", "to", "type"})


def copied_from(value: Any) -> Any:
    """The earliest node that holds the same values as this one: past copies, casts to the dtype
    that it already has, and casts of int32 to int64 and back."""
    tensor = tensor_of(value)
    if tensor is None:
        return value
    origin = node = value
    while is_copy(node):
        node = node.args[0]
        source = tensor_of(node)
        if source is None:
            break
        if source.dtype == tensor.dtype:
            origin = node
        elif (tensor.dtype, source.dtype) != (torch.int32, torch.int64):
            break
    return origin


def is_copy(node: object) -> bool:
    """A call that gives each element of its first argument again, on the same device, as the same
    dtype or cast to another."""
    if not isinstance(node, fx.Node) or not node.args:
        return False
    if node.op == "call_method":
        named = node.target in _COPIES
    else:
        named = node.target in (torch.clone, torch.detach)
    result, source = tensor_of(node), tensor_of(node.args[0])
    if not named or result is None or source is None:
        return False
    return result.device == source.device and sizes(result) == sizes(source)


_VIEW_NAMES = frozenset(
    {"T", "alias", "as_strided", "chunk", "contiguous", "detach", "diagonal", "expand", "flatten"}
    | {
        "getitem",
        "mT",
        "movedim",
        "narrow",
        "numpy_T",
        "permute",
        "reshape",
        "select",
        "split",
        "squeeze",
    }
    | {"swapaxes", "t", "tensor_split", "to", "transpose", "unbind", "unflatten", "unsqueeze"}
    | {"view", "view_as"}
)


def is_view(node: fx.Node) -> bool:
    """A call that only looks at its first argument otherwise: it reads no element of it."""
    if not node.args or node.op not in ("call_function", "call_method"):
        return False
    op = op_of(node)
    if op is not None:
        name = op._schema.name.removeprefix("aten::")
    elif node.target is getattr:
        name = node.args[1]
    else:
        name = node.target if isinstance(node.target, str) else _name(node.target)
    if name not in _VIEW_NAMES:
        return False
    # those that may copy do so into a storage of their own
    return UNKNOWN not in storages(node) and storages(node) <= storages(node.args[0])


def _name(function: Any) -> str:
    return getattr(function, "__name__", "")


def _is_repeatable(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _REPEATABLE_METHODS
    return (
        node.target in _PURE_FUNCTIONS
        or (node.op == "call_function" and node.target in _REPEATABLE_FUNCTIONS)
        or _is_functional(node)
    )


def _is_functional(node: fx.Node) -> bool:
    """A call of one of our ops that writes nothing: the same inputs give the same result."""
    op = op_of(node)
    return op is not None and op.namespace == "mtpgraph" and _computes(op)


def _computes(op: OpOverload) -> bool:
    """Known to do nothing but compute its results: another's op may have effects of its own."""
    return op.namespace in ("aten", "mtpgraph") and not op._schema.is_mutable


def erase_unused(node: Any) -> None:
    """Erase a node that has no users left, and what only it used, among pure calls."""
    if not isinstance(node, fx.Node) or node.users or node.op == "placeholder":
        return
    op = op_of(node)
    if not is_pure(node) or (op is not None and not _computes(op)):
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


def describe(node: fx.Node) -> str:
    """What a node calls and where, for a reason: ``.add_() in line 12``."""
    if node.op == "output":
        return "what the step returns"
    line = user_frame(node)[1]
    return f"{name_of(node)} in line {line}" if line else name_of(node)
