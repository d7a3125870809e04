"""Which calls of a graph are dense, and the regions of them that can run as one call each.

A call is dense when it is pure arithmetic on floating-point tensors: projections, norms,
activations, sums, and views of their results. Ops, random numbers, integers, masks, sizes that
only the data tell, and whatever writes, are not, and stay where the user put them; but for pure ops
of this package, where the library has plugins for them.

A region runs at one place of the graph: behind the last call that computes something it takes.
Every value that it takes is there by then, nothing outside has asked for its results before, and
no memory that it reads is written between the place where the user reads it and that one. Calls
that would break this start a region of their own.
"""

import dataclasses
import operator
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from . import _compat
from ._nodes import nodes_in, size_of, tensor_of
from ._values import is_view
from ._writes import UNKNOWN, is_pure, may_write, overlap, storages
from .engine_ops import fits_engine, is_result, name_of_op, results_of
from .report import note

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

PRODUCTS = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "__matmul__", "bilinear"}
)
_POINTWISE = frozenset(
    {"abs", "clamp", "clamp_max", "clamp_min", "cos", "elu", "exp", "gelu", "hardswish"}
    | {"leaky_relu", "log", "maximum", "minimum", "mish", "neg", "negative", "pow", "reciprocal"}
    | {"relu", "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "square", "tanh"}
    | {"add", "div", "divide", "mul", "multiply", "sub", "subtract", "true_divide", "truediv"}
    | {"__add__", "__mul__", "__neg__", "__pow__", "__sub__", "__truediv__"}
    | {"__radd__", "__rmul__", "__rsub__", "__rtruediv__"}
    | {"bfloat16", "float", "half", "to", "type_as", "contiguous", "detach"}
)
CONCATENATIONS = frozenset({"cat", "concat", "concatenate"})
_ALONG_ROWS = frozenset(
    {"layer_norm", "log_softmax", "mean", "normalize", "rms_norm", "softmax", "stack", "sum"}
)
VIEWS = frozenset(
    {"chunk", "flatten", "getitem", "mT", "permute", "reshape", "split", "squeeze", "t", "T"}
    | {"transpose", "unflatten", "unsqueeze", "view"}
)
_DENSE = PRODUCTS | _POINTWISE | CONCATENATIONS | _ALONG_ROWS | VIEWS
_TABLES = frozenset({"arange", "eye", "full", "linspace", "logspace", "ones", "tensor", "zeros"})
# give back what they were given where it is of the dtype already
_SAME_IF_CAST = frozenset({"bfloat16", "float", "half", "type_as"})
# give what they are called on another shape in place
_SHAPES_IN_PLACE = frozenset(
    {"as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_"}
    | {"transpose_", "unsqueeze_"}
)
# of these a size may be left for torch to find out
_SHAPED_ANEW = frozenset({"view", "reshape"})

_MIN_CALLS = 2
"""Calls that compute something, a matrix product among them, for a region to be worth a launch; or
so many ops of this package."""


@dataclasses.dataclass
class Region:
    """Dense calls that run as one.

    Attributes:
        nodes: the calls, in the graph's order
        behind: the node that the region runs behind
    """

    nodes: list[fx.Node]
    behind: fx.Node

    @property
    def product(self) -> fx.Node:
        """The first matrix product in it, or else its first op: the line to name when something is
        said about it."""
        products = [node for node in self.nodes if name_in_torch(node) in PRODUCTS]
        return (products or self.ops)[0]

    @property
    def ops(self) -> list[fx.Node]:
        """The calls of ops of this package in it."""
        return _ops(self.nodes)


def name_in_torch(node: fx.Node) -> str:
    """The plain name of the function or method of torch that a node calls; empty for any other."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if node.target is getattr:
        return str(node.args[1])
    name = getattr(node.target, "__name__", "")
    homes: tuple[Any, ...] = (operator, torch, F, Tensor)
    return name if any(getattr(home, name, None) is node.target for home in homes) else ""


def find_regions(
    graph: fx.Graph,
    weights: Collection[fx.Node],
    outside: Collection[fx.Node] = (),
    plugins: Collection[str] = (),
) -> list[Region]:
    """The dense regions of a graph that are worth a call, in the order in which they run.

    Notes the matrix products that only their dtype, or a gradient, keeps out.

    Args:
        graph: a Dynamo-level graph
        weights: inputs that are the same in every call: what follows from them alone, a region
            takes as it is
        outside: calls to leave out
        plugins: ops of this package that an engine can hold, by name
    """
    if _compat.is_autocast() or any(_enters_autocast(node) for node in graph.nodes):
        # a call would compute in another dtype inside of the region than outside
        for node in graph.nodes:
            if name_in_torch(node) in PRODUCTS:
                note(node, "engine fallback", "tensorrt", "autocast decides on its dtype")
        return []
    order = {node: place for place, node in enumerate(graph.nodes)}
    inputs = [order[node] for node in graph.nodes if node.op == "placeholder"]
    floor = max(inputs, default=0)
    fixed, outside = set(weights), set(outside)
    # the tracer recorded the last of their shapes alone
    shaped = set().union(*(storages(n.args) for n in graph.nodes if _shapes_in_place(n)))
    outside.update(n for n in graph.nodes if storages([n, *n.all_input_nodes]) & shaped)
    last_write: dict[int, int] = {}
    found: list[_Growing] = []
    growing: _Growing | None = None
    # where a call of a finished region runs
    ran: dict[fx.Node, int] = {}
    # results that came with the op that has them
    taken: set[fx.Node] = set()

    def finish() -> None:
        if growing is not None and _is_worth_it(growing.members):
            found.append(growing)
            ran.update(dict.fromkeys(growing.members, growing.earliest))

    for node in graph.nodes:
        place = order[node]
        if node in taken:
            continue
        if _is_fence(node):
            finish()
            growing, floor = None, max(floor, place)
            continue
        if _is_table(node):
            fixed.add(node)
        elif outside.isdisjoint([node, *results_of(node)]) and _is_dense(node, fixed, plugins):
            given = set(node.all_input_nodes)
            if given <= fixed:
                # what is the same in every step is small, and needed where regions end
                fixed.add(node)
            elif not is_look(node) or (growing and _base(node) in growing.members):
                if growing is None or not growing.takes(node, last_write):
                    finish()
                    growing = _Growing(floor, order, ran)
                    # a view of what an earlier region has stays an alias of it
                    if not is_look(node):
                        growing.takes(node, last_write)
                if node in growing.members:
                    taken.update(results_of(node))
                    continue
        if growing is not None:
            growing.passes(node, place)
        for storage in may_write(node):
            last_write[storage] = place
    finish()
    nodes = list(graph.nodes)
    return [Region(list(region.members), nodes[region.earliest]) for region in found]


class _Growing:
    """A region that calls are added to.

    ``earliest`` and ``latest`` bound the place where it can run: behind the first, and in front of
    the second of them.
    """

    def __init__(self, floor: int, order: dict[fx.Node, int], ran: dict[fx.Node, int]) -> None:
        self.members: dict[fx.Node, None] = {}
        self.earliest = floor
        self.latest: int | None = None
        self._memory: set[int] = set()
        self._device: torch.device | None = None
        self._order = order
        self._ran = ran

    def takes(self, node: fx.Node, last_write: dict[int, int]) -> bool:
        """Add a call if the region can still run at one place."""
        tensor = next(_tensors(node))
        if self._device not in (None, tensor.device):
            return False
        earliest = self.earliest
        for given in node.all_input_nodes:
            if given not in self.members:
                # what another region computes is there once it ran
                earliest = max(earliest, self._ran.get(given, self._order[given]))
        memory = storages((node.args, node.kwargs))
        for storage, written in last_write.items():
            if overlap({storage}, memory):
                earliest = max(earliest, written)
        if self.latest is not None and earliest >= self.latest:
            return False
        self.members.update(dict.fromkeys([node, *results_of(node)]))
        self._device = tensor.device
        self._memory |= memory | storages(node)
        self.earliest = earliest
        return True

    def passes(self, node: fx.Node, place: int) -> None:
        """A call that stays outside: it may need a result, or write what a member reads."""
        asks = any(given in self.members for given in node.all_input_nodes)
        if self.latest is None and (asks or overlap(may_write(node), self._memory)):
            self.latest = place


def is_look(node: fx.Node) -> bool:
    """A dense call whose result is memory of what it was given."""
    if is_result(node):
        return False
    return is_view(node) or (
        name_in_torch(node) in _SAME_IF_CAST and storages(node) <= storages(node.args[0])
    )


def _base(look: fx.Node) -> Any:
    """What a view is of, or a cast that changes nothing; any other argument says how alone."""
    return look.args[0] if look.args else None


def _shapes_in_place(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _SHAPES_IN_PLACE


def _enters_autocast(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "_enter_autocast"


def _is_worth_it(nodes: Collection[fx.Node]) -> bool:
    if all(user in nodes for node in nodes for user in node.users):
        # what nothing asks for, an engine could not give
        return False
    computing = [node for node in nodes if not is_look(node)]
    asked_for = [any(result.users for result in results_of(op) or [op]) for op in _ops(nodes)]
    if sum(asked_for) >= _MIN_CALLS:
        return True
    return len(computing) >= _MIN_CALLS and any(name_in_torch(n) in PRODUCTS for n in computing)


def _ops(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if name_of_op(node)]


def _is_fence(node: fx.Node) -> bool:
    """A call for its effect, on no tensor: a stream, a context, a setting of torch's."""
    if node.op not in ("call_function", "call_method"):
        return False
    given = node.all_input_nodes
    if any(map(_is_value, given)):
        return False
    # without inputs and a result, such as the end of a context
    return not _is_value(node)


def _is_value(node: fx.Node) -> bool:
    """Its result holds a tensor or a number."""
    leaves = _compat.tree_leaves(_compat.example_value(node))
    kinds = (Tensor, bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(isinstance(leaf, kinds) for leaf in leaves)


def _is_table(node: fx.Node) -> bool:
    """Numbers that are the same in every call, such as the frequencies of a rotary embedding."""
    return name_in_torch(node) in _TABLES and not node.all_input_nodes


def _is_dense(node: fx.Node, fixed: Collection[fx.Node], plugins: Collection[str]) -> bool:
    if op := name_of_op(node):
        return op in plugins and _is_op_of_engine(node, fixed)
    name = name_in_torch(node)
    if name not in _DENSE or not is_pure(node) or not _arguments_fit(node, name):
        return False
    if UNKNOWN in storages(node) | storages((node.args, node.kwargs)):
        return False
    if storages(node) & storages((node.args, node.kwargs)) and not is_look(node):
        return False
    tensors = list(_tensors(node))
    if not tensors or len({tensor.device for tensor in tensors}) > 1:
        return False
    if any(not _has_plain_shape(tensor) for tensor in tensors):
        return False
    if any(map(is_empty, tensors)) and not _may_be_empty(node, name):
        return False
    reason = ""
    if wrong := [tensor.dtype for tensor in tensors if tensor.dtype not in DTYPES]:
        reason = f"an engine computes in float32, float16 or bfloat16, got {_name(wrong[0])}"
    elif any(tensor.requires_grad for tensor in _tensors_in(node)):
        reason = "an engine has no gradient: call the step under torch.no_grad()"
    if reason and name in PRODUCTS and not set(node.all_input_nodes) <= set(fixed):
        note(node, "engine fallback", "tensorrt", reason)
    return not reason


def _is_op_of_engine(node: fx.Node, fixed: Collection[fx.Node]) -> bool:
    tensors = list(_tensors(node))
    return (
        UNKNOWN not in storages(node) | storages((node.args, node.kwargs))
        and all(_has_plain_shape(t) and not is_empty(t) and not t.requires_grad for t in tensors)
        and fits_engine(node, fixed)
    )


def _arguments_fit(node: fx.Node, name: str) -> bool:
    """Its arguments are tensors, and numbers that are the same in every call."""
    if node.kwargs.get("out") is not None:
        return False
    others = [given for given in nodes_in((node.args, node.kwargs)) if tensor_of(given) is None]
    if name == "getitem":
        return len(others) <= 1 and not nodes_in(node.args[1])
    if name in _SHAPED_ANEW and others:
        return free_size(node) is not None
    return not others


def free_size(node: fx.Node) -> int | None:
    """Of a ``view`` whose only size that is not a constant torch could find out by itself, the
    place of it among the sizes."""
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = tuple(sizes[0])
    open_ones = [place for place, size in enumerate(sizes) if isinstance(size, fx.Node)]
    rest = [size for size in sizes if not isinstance(size, fx.Node)]
    if len(open_ones) != 1 or node.kwargs or size_of(sizes[open_ones[0]]) is None:
        return None
    constant = all(isinstance(size, int) and size > 0 for size in rest)
    return open_ones[0] if constant else None


def _has_plain_shape(tensor: Tensor) -> bool:
    """Strided, of a rank and sizes that an engine can have."""
    return (
        tensor.layout == torch.strided
        and type(tensor).__name__ in ("FakeTensor", "Tensor", "Parameter")
        and not tensor.is_complex()
        and 1 <= tensor.dim() <= 8
        and not _compat.unbacked_symbols(tensor)
    )


def is_empty(tensor: Tensor) -> bool:
    """It has no element, whatever the batch."""
    return any(type(size) is int and size == 0 for size in tensor.shape)


def _may_be_empty(node: fx.Node, name: str) -> bool:
    """An engine has no empty tensors. A view of nothing is left out of it, also where it is
    concatenated with others."""
    if is_look(node):
        return True
    result = next(_tensors(node))
    same = len({tensor.dtype for tensor in _tensors(node)}) == 1
    return name in CONCATENATIONS and same and not is_empty(result)


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    """What a call gives and takes."""
    yield from _tensors_in(node)
    for given in node.all_input_nodes:
        yield from _tensors_in(given)


def _tensors_in(node: fx.Node) -> Iterator[Tensor]:
    for leaf in _compat.tree_leaves(_compat.example_value(node)):
        if isinstance(leaf, Tensor):
            yield leaf


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
