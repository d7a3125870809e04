"""How many bytes a call reads and writes, from fake tensors alone.

Each op counts as if it ran alone and met a cold cache: every distinct input is read once, every
fresh output and every written input is written once, a view costs nothing. What a compiler fuses
moves less. Calls that touch a part of an input (embedding, indexing with tensors, our ops on paged
caches and state pools) count that part; where it depends on values that are not known the number
is what they can touch at most.
"""

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..compile_passes._compat import (
    example_value,
    has_example_value,
    size_hint,
    storage_key,
    tree_leaves,
)
from ..compile_passes._nodes import arguments, nodes_in, op_of
from ..compile_passes._writes import storages, written
from .paged import PAGED


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one call; ``at_most`` says that they are a bound."""

    read: int
    written: int
    at_most: bool = False


def traffic(node: fx.Node, known: Mapping[fx.Node, Tensor]) -> Traffic:
    """Bytes that a call reads and writes.

    Args:
        node: a node of a Dynamo-level graph
        known: tensors whose values may be looked at, by the input of the graph
    """
    op = op_of(node)
    if op is not None and op.namespace == "mtpgraph" and op._schema.name in PAGED:
        values = {name: _value(value, known) for name, value in arguments(node).items()}
        return Traffic(*PAGED[op._schema.name](**values, outputs=_outputs(node)))
    if node.op in ("placeholder", "get_attr", "output"):
        return Traffic(0, 0)
    return _plain(node)


def nbytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor; 0 for a size that only a run would tell."""
    sizes = [
        size_hint(size) or 0
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if not (isinstance(stride, int) and stride == 0)
    ]
    return math.prod(sizes) * tensor.dtype.itemsize


def _plain(node: fx.Node) -> Traffic:
    name = getattr(node.target, "__name__", str(node.target))
    inputs = _tensors(node.all_input_nodes)
    outputs = [t for t in tree_leaves(_example(node)) if isinstance(t, Tensor)]
    changed = written(node)
    if not outputs and not changed:
        # sizes, dtypes and other facts that the host knows
        return Traffic(0, 0)
    read_from = storages(node.all_input_nodes)
    fresh = [t for t in outputs if not _storages_of(t) & read_from]
    out = sum(map(nbytes, fresh))
    if changed:
        return _in_place(node, name, inputs, changed, out)
    if not fresh:
        return Traffic(0, 0)
    if name.startswith(("empty", "new_empty")):
        return Traffic(0, 0)
    if name.endswith("_like") or name.startswith("new_"):
        return Traffic(0, out)
    source = _gathered(node, name)
    read = sum(nbytes(t) for t in inputs if t is not source)
    return Traffic(read + (min(out, nbytes(source)) if source is not None else 0), out)


def _in_place(
    node: fx.Node, name: str, inputs: list[Tensor], changed: set[int], fresh: int
) -> Traffic:
    target = [t for t in inputs if _storages_of(t) & changed]
    others = sum(nbytes(t) for t in inputs if not _storages_of(t) & changed)
    whole = sum(map(nbytes, target))
    if name in ("setitem", "index_put_", "index_copy_", "scatter_", "index_fill_", "masked_fill_"):
        value = node.args[-1]
        part = sum(map(nbytes, _tensors([value]))) if isinstance(value, fx.Node) else whole
        return Traffic(others, min(part, whole) + fresh, at_most=not isinstance(value, fx.Node))
    if name in ("index_add_", "scatter_add_", "scatter_reduce_", "index_reduce_"):
        part = min(max(map(nbytes, inputs[1:]), default=whole), whole)
        return Traffic(others + part, part + fresh)
    overwritten = name in ("copy_", "fill_", "zero_") or node.kwargs.get("out") is not None
    return Traffic(others + (0 if overwritten else whole), whole + fresh)


def _gathered(node: fx.Node, name: str) -> Tensor | None:
    """The input of which a call reads no more than it returns."""
    by_tensor = node.target is operator.getitem and bool(_tensors(nodes_in(node.args[1])))
    if by_tensor or name in ("index_select", "gather", "take_along_dim", "take"):
        source = node.args[0]
    elif node.target in (F.embedding, torch.embedding):
        source = node.args[1 if node.target is F.embedding else 0]
    else:
        return None
    value = _example(source)
    return value if isinstance(value, Tensor) else None


def _storages_of(tensor: Tensor) -> set[int]:
    """The storage of one fake tensor."""
    return {storage_key(tensor)}


def _tensors(nodes: Any) -> list[Tensor]:
    """Distinct tensors among the values of nodes: two views of one memory are two."""
    leaves = [leaf for node in nodes for leaf in tree_leaves(_example(node))]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _example(node: Any) -> Any:
    return example_value(node) if isinstance(node, fx.Node) and has_example_value(node) else None


def _outputs(node: fx.Node) -> int:
    return sum(nbytes(t) for t in tree_leaves(_example(node)) if isinstance(t, Tensor))


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a formula may ask about a tensor argument.

    Attributes:
        sizes: with 0 for what only a run would tell
        itemsize: bytes of an element
        nbytes: bytes of the whole
        values: the elements, where they are known
    """

    sizes: tuple[int, ...]
    itemsize: int
    nbytes: int
    values: Tensor | None


def _value(value: Any, known: Mapping[fx.Node, Tensor]) -> Any:
    """An argument for a formula: tensors as :class:`Shape`, sizes as ints."""
    fake = _example(value) if isinstance(value, fx.Node) else value
    if isinstance(fake, Tensor):
        sizes = tuple(size_hint(size) or 0 for size in fake.shape)
        return Shape(sizes, fake.dtype.itemsize, nbytes(fake), known.get(value))
    return size_hint(fake) or 0 if isinstance(fake, torch.SymInt) else fake
