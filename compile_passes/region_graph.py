"""Take a dense region out of a graph: as a module of its own, and as one call in its place."""

import dataclasses
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from . import _compat
from ._nodes import tensor_of
from .dense_regions import (
    CONCATENATIONS,
    VIEWS,
    Region,
    free_size,
    is_empty,
    is_look,
    name_in_torch,
)
from .engine_ops import DTYPES, name_of_op


@dataclasses.dataclass
class RegionGraph:
    """A region as a module.

    Attributes:
        module: takes ``inputs`` and gives a tuple of the ``outputs``, each contiguous; weights are
            parameters of it, the user's own
        inputs: what it takes, nodes of the graph that it comes from: tensors, and sizes for ops
        outputs: what it gives
        orders: for each output, the order of its dimensions in memory; the module gives the
            output permuted to it
    """

    module: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    orders: list[tuple[int, ...]]

    @property
    def output_dtypes(self) -> list[torch.dtype]:
        return [_tensor(node).dtype for node in self.outputs]


def copy_region(region: Region, weights: dict[fx.Node, Tensor]) -> RegionGraph:
    """The module of a region; the graph stays as it is.

    Views of weights, and views with gaps of other tensors, are made inside.

    Args:
        region: the calls
        weights: inputs of the graph that become parameters of the module
    """
    members = dict.fromkeys(region.nodes)
    outputs = _outputs(region)
    orders = [memory_order(_tensor(node)) for node in outputs]
    root, graph = nn.Module(), fx.Graph()
    inputs: list[fx.Node] = []
    env: dict[fx.Node, fx.Node] = {}

    def bring(node: fx.Node) -> None:
        """Make what comes from outside available."""
        if node in env:
            return
        if node in weights:
            name = f"weight_{sum(1 for seen in env if seen in weights)}"
            root.register_parameter(name, _parameter(weights[node]))
            env[node] = graph.get_attr(name)
        elif _is_made_inside(node, weights):
            for given in node.all_input_nodes:
                bring(given)
            env[node] = _copy(graph, node, env)
        else:
            env[node] = graph.placeholder(f"input_{len(inputs)}")
            inputs.append(node)
        env[node].meta = {"example_value": _compat.example_value(node)}

    # placeholders come first in a graph, so all that is brought is brought before anything else
    live = _live(region, outputs)
    for node in live:
        for given in node.all_input_nodes:
            if given not in members and _is_wanted(given, node):
                for source in _sources(given, weights):
                    if source not in weights:
                        bring(source)
    for node in live:
        for given in node.all_input_nodes:
            if given not in members and _is_wanted(given, node):
                bring(given)
        env[node] = _copy(graph, node, env)
        env[node].meta = {"example_value": _compat.example_value(node)}
    results = []
    for node, order in zip(outputs, orders, strict=True):
        assert order is not None
        result = env[node]
        if order != tuple(range(len(order))):
            result = graph.call_method("permute", (result, order))
        results.append(result)
    graph.output(tuple(results))
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    module = fx.GraphModule(root, graph, "DenseRegion")
    return RegionGraph(module, inputs, outputs, [order for order in orders if order is not None])


def replace_region(
    gm: fx.GraphModule, region: Region, taken: RegionGraph, name: str, behind: fx.Node
) -> fx.Node:
    """Put one call of the submodule ``name`` in the place of a region.

    Args:
        behind: the node to run behind, ``region.behind`` or a later one that stands at its place

    Returns:
        the last node that was put in
    """
    members = dict.fromkeys(region.nodes)
    graph = gm.graph
    with graph.inserting_after(behind):
        last = call = graph.call_module(name, tuple(taken.inputs))
    env: dict[fx.Node, fx.Node] = {}

    def add(node: fx.Node, target: str, *args: Any) -> fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            if target == "getitem":
                last = graph.call_function(_getitem, args)
            else:
                last = graph.call_method(target, args)
        _compat.copy_meta(node, last)
        return last

    for place, (node, order) in enumerate(zip(taken.outputs, taken.orders, strict=True)):
        value = add(node, "getitem", call, place)
        if order != tuple(range(len(order))):
            value = add(node, "permute", value, _inverse(order))
        env[node] = value
    # a view of a result is made outside, of the result
    for node in region.nodes:
        if node not in env and is_look(node) and node.args[0] in env:
            base = env[node.args[0]]

            def known(given: fx.Node, base: fx.Node = base) -> fx.Node:
                # of another member it takes the dtype, which is its own
                return env.get(given, base if given in members else given)

            with graph.inserting_after(last):
                last = env[node] = graph.node_copy(node, known)
            _compat.copy_meta(node, last)
    for node, value in env.items():
        node.replace_all_uses_with(value, lambda user: user not in members)
    for node in reversed(region.nodes):
        graph.erase_node(node)
    for node in reversed(env.values()):
        if not node.users:
            last = node.prev if node is last else last
            graph.erase_node(node)
    return last


def with_gaps(region: Region) -> list[fx.Node]:
    """Results of a region whose layout only the calls themselves can give."""
    return [node for node in _outputs(region) if memory_order(_tensor(node)) is None]


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a tensor from the outermost in memory to the innermost, ``None`` if it has
    gaps or overlaps."""
    strides = [_compat.size_expression(stride) for stride in tensor.stride()]
    sizes = [_compat.size_expression(size) for size in tensor.shape]
    hints = [_compat.size_hint(stride) for stride in tensor.stride()]
    if None in hints:
        return None
    order = sorted(range(tensor.dim()), key=lambda dim: -(hints[dim] or 0))
    expected: Any = 1
    for dim in reversed(order):
        if sizes[dim] == 1:
            continue
        if sympy.expand(expected - strides[dim]) != 0:
            return None
        expected *= sizes[dim]
    # the usual order says the same where dimensions of one make others possible
    plain = tuple(range(tensor.dim()))
    kept = [dim for dim in order if sizes[dim] != 1]
    return plain if kept == sorted(kept) else tuple(order)


def _getitem(values: Any, place: int) -> Any:
    return values[place]


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _outputs(region: Region) -> list[fx.Node]:
    """The computed values that something outside needs, itself or through views."""
    members = dict.fromkeys(region.nodes)
    found: dict[fx.Node, None] = {}
    for node in region.nodes:
        if any(user not in members for user in node.users):
            base = node
            while is_look(base) and base.args[0] in members:
                base = base.args[0]
            found[base] = None
    return [node for node in region.nodes if node in found]


def _live(region: Region, outputs: list[fx.Node]) -> list[fx.Node]:
    """The calls that a result needs."""
    needed = set(outputs)
    for node in reversed(region.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in region.nodes if node in needed]


def _sources(node: fx.Node, weights: dict[fx.Node, Tensor]) -> list[fx.Node]:
    """What a value from outside is made of inside."""
    if not _is_made_inside(node, weights):
        return [node]
    return [source for given in node.all_input_nodes for source in _sources(given, weights)]


def _is_wanted(node: fx.Node, user: fx.Node) -> bool:
    """It has elements: the copy of a call does without empty tensors and, but for an op, without
    sizes."""
    if name_of_op(user):
        return True
    leaves = _compat.tree_leaves(_compat.example_value(node))
    return any(isinstance(leaf, Tensor) and not is_empty(leaf) for leaf in leaves)


def _is_made_inside(node: fx.Node, weights: dict[fx.Node, Tensor]) -> bool:
    """A view of a weight, or one that is not contiguous, of a tensor that is."""
    base = node
    while base not in weights and _is_plain_view(base):
        base = base.all_input_nodes[0]
    if base is node or base in weights:
        return base is not node
    source, value = tensor_of(base), tensor_of(node)
    if source is None or source.dtype not in DTYPES or not _is_contiguous(source):
        return False
    return value is None or not _is_contiguous(value)


def _is_plain_view(node: fx.Node) -> bool:
    """A view of a tensor, of its dtype, with the same sizes in every call but for the batch."""
    given = node.all_input_nodes
    if name_in_torch(node) not in VIEWS or not is_look(node) or len(given) != 1:
        return False
    return node.args[0] is given[0] and not any(isinstance(a, torch.dtype) for a in node.args)


def _is_contiguous(tensor: Tensor) -> bool:
    return memory_order(tensor) == tuple(range(tensor.dim()))


def _copy(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """A call, with what an engine cannot have left out: empty tensors, and sizes as inputs."""
    name = name_in_torch(node)
    if name in CONCATENATIONS:
        args = [_without_empty(arg) for arg in node.args]
        kwargs = {key: _without_empty(arg) for key, arg in node.kwargs.items()}
        return graph.create_node(
            node.op, node.target, *fx.map_arg((tuple(args), kwargs), env.__getitem__)
        )
    if (piece := _piece(node)) is not None:
        source, dim, start, length = piece
        return graph.call_function(torch.narrow, (env[source], dim, start, length))
    sizes_given = [given for given in node.all_input_nodes if tensor_of(given) is None]
    if name in ("view", "reshape") and sizes_given:
        # also where an op takes the same size: in an engine that is a tensor
        place = free_size(node)
        assert place is not None
        sizes = list(node.args[1] if isinstance(node.args[1], list | tuple) else node.args[1:])
        sizes[place] = -1
        return graph.create_node(node.op, node.target, (env[node.all_input_nodes[0]], tuple(sizes)))
    return graph.node_copy(node, env.__getitem__)


def _piece(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """Of one of the tensors of a ``split``, what was split, and the part of it: dimension, start
    and length. The others may be empty."""
    split: Any = node.args[0] if name_in_torch(node) == "getitem" else None
    if not isinstance(split, fx.Node) or name_in_torch(split) != "split" or not split.args:
        return None
    given: dict[str, Any] = dict(zip(("tensor", "sizes", "dim"), split.args, strict=False))
    given |= split.kwargs
    sizes = given.get("sizes", given.get("split_size", given.get("split_size_or_sections")))
    place: Any = node.args[1]
    if not isinstance(sizes, list | tuple) or type(place) is not int:
        return None
    if any(type(size) is not int for size in sizes):
        return None
    place %= len(sizes)
    return given["tensor"], given.get("dim", 0), sum(sizes[:place]), sizes[place]


def _without_empty(arg: Any) -> Any:
    return (
        [given for given in arg if not _is_empty(given)] if isinstance(arg, list | tuple) else arg
    )


def _is_empty(node: Any) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and is_empty(tensor)


def _parameter(tensor: Tensor) -> nn.Parameter:
    assert isinstance(tensor, nn.Parameter)
    return tensor


def _tensor(node: fx.Node) -> Tensor:
    tensor = tensor_of(node)
    assert tensor is not None
    return tensor
