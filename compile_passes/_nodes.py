"""Questions about one node of a Dynamo-level graph that the passes share: what it calls, with what,
and what the tracer recorded for it."""

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

from ._compat import example_value, has_example_value, size_expression, user_frame
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


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes in a structure of arguments."""
    nodes: list[fx.Node] = []
    fx.map_arg(value, lambda node: nodes.append(node) or node)
    return nodes


def comes_before(graph: fx.Graph, first: fx.Node, last: fx.Node) -> bool:
    """``first`` stands before ``last`` in the graph."""
    for node in graph.nodes:
        if node is first:
            return node is not last
        if node is last:
            return False
    return False


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


def describe(node: fx.Node) -> str:
    """What a node calls and where, for a reason: ``.add_() in line 12``."""
    if node.op == "output":
        return "what the step returns"
    line = user_frame(node)[1]
    return f"{name_of(node)} in line {line}" if line else name_of(node)
