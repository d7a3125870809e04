"""A Dynamo-level graph as calls of ops of the dispatcher, with sizes as expressions.

The functions of torch that a user calls are many, the ops that they come to are few. A graph is
run once more on the fake tensors that its tracer recorded, and every op is kept with the node it
belongs to. Nothing is computed.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from . import _compat


@dataclasses.dataclass(eq=False)
class Call:
    """One call of an op.

    Attributes:
        op: the op; None for a node that could not be taken apart
        values: its arguments by name
        results: the tensors it returned
        node: the node of the graph that it is part of
    """

    op: OpOverload | None
    values: dict[str, Any]
    results: list[Tensor]
    node: fx.Node

    @property
    def name(self) -> str:
        """Namespace and name without the overload, as ``aten::add``; for aten without it."""
        return self.op._schema.name.removeprefix("aten::") if self.op is not None else ""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors among the arguments, those in lists too."""
        for name, value in self.values.items():
            for item in _compat.tree_leaves(value):
                if isinstance(item, Tensor):
                    yield name, item

    def written(self) -> list[Tensor]:
        """The arguments that the schema says are written; of a Triton kernel it says nothing."""
        if self.op is None:
            kernel = "triton_kernel_wrapper" in str(self.node.target)
            return [tensor for _, tensor in self.tensors()] if kernel else []
        return [
            tensor
            for argument in self.op._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _compat.tree_leaves(self.values.get(argument.name))
            if isinstance(tensor, Tensor)
        ]


@dataclasses.dataclass
class Trace:
    """The calls of a graph.

    Attributes:
        calls: in order
        inputs: the placeholders of tensors, and the fake tensor of each
        sizes: the placeholders of symbolic sizes, and each size
        constants: tensors that the graph holds itself
        outputs: the tensors that it returns
        values: what each node gave
    """

    gm: fx.GraphModule
    calls: list[Call]
    inputs: dict[fx.Node, Tensor]
    sizes: dict[fx.Node, Any]
    constants: list[Tensor]
    outputs: list[Tensor]
    values: dict[fx.Node, Any]


_IGNORED = frozenset(
    {"prim::device", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "size", "stride"}
    | {"is_contiguous", "_assert_tensor_metadata", "dim", "numel", "is_pinned", "detach_"}
)


def record(graph: fx.Graph) -> Trace:
    """Run a graph on fake tensors and keep its calls."""
    gm: Any = graph.owning_module
    calls: list[Call] = []

    def seen(node: fx.Node, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        call = Call(op, _by_name(op, args, kwargs), _tensors(result), node)
        if call.name not in _IGNORED:
            calls.append(call)

    def failed(node: fx.Node, given: Any, result: Any) -> None:
        if (op := _compat.op_called(node)) is not None and not op._schema.is_mutable:
            # what was seen of it is not all of it
            calls[:] = [call for call in calls if call.node is not node]
            calls.append(Call(op, _by_name(op, *given), _tensors(result), node))
            return
        values = {str(place): leaf for place, leaf in enumerate(_compat.tree_leaves(given))}
        calls.append(Call(None, values, _tensors(result), node))

    env = _compat.run_on_fakes(gm, seen, failed)
    inputs = {n: env[n] for n in graph.nodes if n.op == "placeholder"}
    returned = fx.map_arg(graph.output_node().args, lambda node: env.get(node))
    return Trace(
        gm,
        calls,
        {node: value for node, value in inputs.items() if isinstance(value, Tensor)},
        {node: value for node, value in inputs.items() if is_symbolic(value)},
        [v for n in graph.nodes if n.op == "get_attr" and isinstance(v := env.get(n), Tensor)],
        _tensors(returned),
        env,
    )


def _by_name(op: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    values = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            values[argument.name] = args[position]
        else:
            values[argument.name] = kwargs.get(argument.name, argument.default_value)
    return values


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _compat.tree_leaves(value) if isinstance(leaf, Tensor)]


def is_symbolic(value: Any) -> bool:
    """A number that the tracer does not know."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def expression(value: Any) -> sympy.Expr:
    """The expression of a size or number."""
    expr = value.node.expr if is_symbolic(value) else value
    return sympy.sympify(expr)


def input_name(node: fx.Node) -> str:
    """What a placeholder was made for, nearly as the user wrote it."""
    return str(node.target).removeprefix("L_").removeprefix("l_").strip("_")
