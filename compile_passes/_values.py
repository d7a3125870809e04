"""Which nodes hold one value: equal calls, views of the same elements, copies.

What is provably one value a pass computes once, unless something in between may write what it is
computed from.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ._memory import same_elements, sizes
from ._nodes import nodes_in, op_of, size_of, tensor_of
from ._writes import PURE_FUNCTIONS, UNKNOWN, computes, mutated, overlap, storages


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


def _is_repeatable(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _REPEATABLE_METHODS
    return (
        node.target in PURE_FUNCTIONS
        or (node.op == "call_function" and node.target in _REPEATABLE_FUNCTIONS)
        or _is_functional(node)
    )


def _is_functional(node: fx.Node) -> bool:
    """A call of one of our ops that writes nothing: the same inputs give the same result."""
    op = op_of(node)
    return op is not None and op.namespace == "mtpgraph" and computes(op)


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
