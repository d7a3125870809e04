"""The calls of a graph, each with its user's line, what it returns, writes and moves."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import Tensor, fx

from ..compile_passes import _compat
from ..compile_passes._nodes import op_of
from ..compile_passes._writes import mutated, overlap, storages
from ..compile_passes.report import name_of
from .record import Op
from .traffic import traffic


def read_ops(
    graph: fx.Graph,
    names: Mapping[fx.Node, str],
    known: Mapping[fx.Node, Tensor],
    numbers: Set[fx.Node],
) -> Iterator[Op]:
    """The calls of a graph in order.

    Args:
        graph: after the passes
        names: of its inputs, as the user knows them
        known: inputs whose values may be looked at
        numbers: inputs that are Python floats, which Dynamo carries in a tensor
    """
    inputs = [(node, storages(node)) for node in names]
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.target == "item" and node.args[0] in numbers:
            continue
        op = op_of(node)
        moved = traffic(node, known)
        changed = mutated(node)
        trace = node.meta.get("stack_trace") or ""
        yield Op(
            name=name_of(node),
            ours=op is not None and op.namespace == "mtpgraph",
            frames=tuple(_compat.user_frames(trace)),
            outputs=_shown(_compat.example_value(node)),
            mutates=tuple(names[n] for n, own in inputs if overlap(own, changed)),
            read=moved.read,
            written=moved.written,
            at_most=moved.at_most,
        )


def _shown(value: Any) -> str:
    """A result in few words: ``float32[4, 8]``; nothing for what is no tensor."""
    tensors = [leaf for leaf in _compat.tree_leaves(value) if isinstance(leaf, Tensor)]
    return ", ".join(_shown_tensor(tensor) for tensor in tensors)


def _shown_tensor(tensor: Tensor) -> str:
    sizes = (_compat.size_hint(size) for size in tensor.shape)
    inside = ", ".join("?" if size is None else str(size) for size in sizes)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{inside}]"
