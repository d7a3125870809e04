"""What a graph calls, in order, with sizes in requests and tokens: to compare two traces of a step.

A tracer takes sizes of none and one for constants, and with them what a branch on such a size comes
to: a graph for many says nothing of a batch of one. A trace of that batch does, if it is laid
beside the graph that is to serve it.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from . import _compat
from .inputs import Batched
from .report import name_of, source_line

REQUESTS, TOKENS = sympy.symbols("requests tokens", integer=True, positive=True)
_UNITS = {"request": REQUESTS, "token": TOKENS}
# where two expressions are not the same to look at, they are if they agree here
_TRIED = (2, 3, 5, 8, 13, 34, 144)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One node: what it calls, with what, and what tensors come of it.

    An argument that is a tensor is the number of the call that made it; a size is an expression.
    """

    kind: str
    target: Any
    given: Any
    made: Any
    place: tuple[str, str, int]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first thing that another trace does otherwise.

    Attributes:
        here, there: what the two call; "nothing" where one has come to its end
        file, line, code: where in the user's source
    """

    here: str
    there: str
    file: str
    line: int
    code: str


class Outline:
    """The calls of a graph that came from Dynamo, before anything rewrites it.

    Attributes:
        decisions: what branches took for granted of sizes, with file, line and code
    """

    def __init__(
        self, gm: fx.GraphModule, names: Mapping[fx.Node, str], specs: Mapping[str, Batched]
    ) -> None:
        """Take the outline.

        Args:
            gm: the graph
            names: arguments of the step, by the placeholder of the tensor
            specs: those that grow
        """
        self._units = _units(names, specs)
        self._steps: list[_Step] = []
        # an input goes by its name: two traces may meet them in another order
        places: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                if not _is_number(node):
                    places[node] = str(node.target), self._sizes(_compat.example_value(node))
            elif not (_is_number(node) or node.op == "output" or "_assert" in str(node.target)):
                places[node] = len(self._steps)
                self._steps.append(self._step(gm, node, places))
        returned = self._arguments(gm.graph.output_node().args, places)
        self._steps.append(_Step("output", "", returned, (), ("the outputs", "", 0)))
        self.decisions = [
            (sympy.sympify(guard).xreplace(self._units), file, line, code)
            for guard, file, line, code in _compat.size_decisions(gm)
        ]

    def differs(self, other: "Outline", counts: Mapping[Any, int]) -> Difference | None:
        """The first call that ``other`` makes in another way; ``None`` if all are alike.

        Args:
            other: a trace of a batch at its own sizes
            counts: its requests and tokens, as far as ``other`` takes them for constants
        """
        mine, theirs = self._steps, other._steps
        for here, there in zip(mine, theirs, strict=False):
            if not _alike(here, there, counts):
                return _difference(here, there)
        if len(mine) != len(theirs):
            at = min(len(mine), len(theirs))
            rest = (mine if len(mine) > at else theirs)[at]
            return _difference(rest, rest)
        return None

    def _step(self, gm: fx.GraphModule, node: fx.Node, places: Mapping[fx.Node, Any]) -> _Step:
        made = self._sizes(_compat.example_value(node))
        file, line = _compat.user_frame(node)
        place = (name_of(node), file, line)
        if node.op == "get_attr":
            held = getattr(gm, str(node.target), None)
            if isinstance(held, fx.GraphModule):
                inner = tuple(str(inside.target) for inside in held.graph.nodes)
                return _Step("get_attr", "", inner, (), place)
            # constants are numbered as they come
            return _Step("get_attr", "", _values(held), made, place)
        given = self._arguments((node.args, sorted(node.kwargs.items())), places)
        return _Step(node.op, node.target, given, made, place)

    def _arguments(self, value: Any, places: Mapping[fx.Node, Any]) -> Any:
        if isinstance(value, fx.Node):
            known = value in places
            return places[value] if known else self._arguments(_compat.example_value(value), places)
        if isinstance(value, slice):
            ends = value.start, value.stop, value.step
            return ("slice", *(self._arguments(end, places) for end in ends))
        if isinstance(value, list | tuple):
            return tuple(self._arguments(item, places) for item in value)
        if isinstance(value, Mapping):
            return tuple((k, self._arguments(v, places)) for k, v in sorted(value.items()))
        return self._number(value)

    def _sizes(self, value: Any) -> Any:
        return tuple(
            (tuple(map(self._number, leaf.shape)), leaf.dtype)
            for leaf in _compat.tree_leaves(value)
            if isinstance(leaf, Tensor)
        )

    def _number(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return sympy.sympify(value.node.expr).xreplace(self._units)
        if type(value) in (bool, int, float):
            # 1, 1.0 and True are three constants
            return _Constant(type(value), value)
        return value


@dataclasses.dataclass(frozen=True)
class _Constant:
    kind: type
    value: Any


def _is_number(node: fx.Node) -> bool:
    value = _compat.example_value(node)
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size)
    return node.op != "get_attr" and isinstance(value, numbers)


def _values(held: Any) -> Any:
    """Small constants are compared by what they hold, larger ones by what they are."""
    if isinstance(held, Tensor) and held.numel() <= 64 and not hasattr(held, "fake_mode"):
        return tuple(map(str, held.detach().flatten().tolist()))
    return ()


def _units(names: Mapping[fx.Node, str], specs: Mapping[str, Batched]) -> dict[Any, Any]:
    """The symbols of a graph in requests and tokens."""
    units: dict[Any, Any] = {}
    for node, name in sorted(names.items(), key=lambda pair: pair[1]):
        spec, tensor = specs.get(name), _compat.example_value(node)
        if spec is None or not isinstance(tensor, Tensor) or spec.dim >= tensor.dim():
            continue
        length: Any = sympy.sympify(_compat.size_expression(tensor.shape[spec.dim]))
        free = length.free_symbols - units.keys()
        if len(free) == 1 and len(length.free_symbols) == 1:
            (symbol,) = free
            solved: Any = sympy.solve(length - spec.extra - _UNITS[spec.per], symbol)
            if len(solved) == 1:
                units[symbol] = solved[0]
    return units


def _alike(here: Any, there: Any, counts: Mapping[Any, int]) -> bool:
    if isinstance(here, _Step):
        return (
            here.kind == there.kind
            and here.target == there.target
            and _alike(here.given, there.given, counts)
            and _alike(here.made, there.made, counts)
        )
    if isinstance(here, tuple) and isinstance(there, tuple):
        return len(here) == len(there) and all(
            _alike(a, b, counts) for a, b in zip(here, there, strict=True)
        )
    if isinstance(here, sympy.Basic) or isinstance(there, sympy.Basic):
        return _equal(here, there, counts)
    if isinstance(here, Tensor) or isinstance(there, Tensor):
        return here is there
    return bool(type(here) is type(there) and here == there)


def _equal(here: Any, there: Any, counts: Mapping[Any, int]) -> bool:
    """A size of the one graph is that of the other, in a batch that the other is for."""
    here, there = (
        value.value if isinstance(value, _Constant) else value for value in (here, there)
    )
    try:
        first: Any = sympy.sympify(here).subs(counts)
        second: Any = sympy.sympify(there).subs(counts)
    except (sympy.SympifyError, ZeroDivisionError, TypeError):
        return False
    if first == second:
        return True
    free = first.free_symbols | second.free_symbols
    if not free <= {REQUESTS, TOKENS}:
        # a size that only the data can tell
        return not (first.is_number or second.is_number)
    samples = itertools.product(_TRIED, repeat=len(free))
    sized = (dict(zip(free, sample, strict=True)) for sample in samples)
    return bool(free) and all(first.subs(sizes) == second.subs(sizes) for sizes in sized)


def _difference(here: _Step, there: _Step) -> Difference:
    at = there if there.place[1] else here
    name, file, line = at.place
    return Difference(here.place[0], name, file, line, source_line(file, line))
