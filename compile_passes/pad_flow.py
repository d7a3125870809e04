"""Follow the padding of inputs through a graph, up to where it must hold something.

It must hold what an op declares of its arguments; an index must lead into what it indexes; and the
index of a real row must not count from the end, where padding is.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, fx

from ..ops.declare import Facts, Pad, facts_of
from . import _compat
from .pad_facts import Fact, any_of, is_tracked, scalar
from .pad_owners import Owner, declared_result, owner_of
from .pad_rules import COPIES, flow_through
from .report import Kind
from .roles import Roles
from .row_rules import base_name
from .rows import Call, Trace
from .spans import Span, size_base

Fill = float | bool | Literal["last"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that the padding of inputs does not satisfy.

    Attributes:
        node: where
        kind, reason, remedy: as of a finding
        inputs: names of the inputs whose padding decides it; empty if none does
        place: file, line and code, where that is not the node's
    """

    node: fx.Node
    kind: Kind
    reason: str
    remedy: str
    inputs: frozenset[str] = frozenset()
    place: tuple[str, int, str] | None = None


@dataclasses.dataclass(frozen=True)
class Need:
    """An argument that an input feeds without a change, and what padding should hold there."""

    call: Call
    argument: str
    pad: Pad


class PadFlow:
    """One walk over a graph with chosen padding.

    Attributes:
        problems: what is not satisfied
        needs: by input, the arguments that it feeds unchanged
        indexed: inputs that do not grow and index what grows, with the node that does so
    """

    def __init__(
        self,
        trace: Trace,
        roles: Roles,
        names: Mapping[fx.Node, str],
        fills: Mapping[str, Fill],
        offsets: frozenset[str] = frozenset(),
        lengths: frozenset[str] = frozenset(),
    ) -> None:
        """Walk the graph.

        Args:
            trace, roles: the graph
            names: of its inputs
            fills: what padding of each input holds
            offsets: inputs that feed offsets of tokens to an op
            lengths: inputs that feed lengths to one, which are not negative
        """
        self.problems: list[Problem] = []
        self.needs: dict[str, list[Need]] = {}
        self.indexed: dict[str, fx.Node] = {}
        self.roles = roles
        self._facts: dict[int, Fact] = {}
        self._stored: dict[int, list[Tensor]] = {}
        self._offsets = offsets
        self._lengths = lengths
        for node, tensor in trace.inputs.items():
            self._put(tensor, self._input(tensor, names[node], fills.get(names[node])))
        for call in trace.calls:
            self._visit(call)

    def _input(self, tensor: Tensor, name: str, fill: Fill | None) -> Fact:
        anything = any_of(tensor.dtype)
        if fill is None or not self.roles.dims(tensor):
            return Fact(anything.real, anything.real, None, frozenset(), name)
        inputs = frozenset({name})
        if fill == "last" and name not in self._offsets:
            return Fact(anything.real, anything.real, None, inputs, name)
        if fill == "last":
            end = Span(0, 0, name)
            return Fact(Span(0), end, end, inputs, name)
        real = Span(0) if name in self._lengths else anything.real
        return Fact(real, Span(float(fill), float(fill)), None, inputs, name)

    def _put(self, tensor: Tensor, fact: Fact) -> None:
        if id(tensor) not in self._facts:
            self._stored.setdefault(_compat.storage_key(tensor), []).append(tensor)
        self._facts[id(tensor)] = fact

    def fact(self, value: Any) -> Fact:
        """What a tensor or number may hold."""
        if not isinstance(value, Tensor):
            return scalar(value) or any_of(torch.int64)
        return self._facts.get(id(value)) or any_of(value.dtype)

    def _visit(self, call: Call) -> None:
        facts = facts_of(call.op) if call.op is not None else None
        owner: Owner | None = None
        if facts is not None:
            owner = self._check_declared(call, facts)
        elif call.op is not None:
            self._check_indices(call)
        new: dict[int, Fact] = {}
        for place, tensor in enumerate(call.results):
            if facts is not None and place < len(facts.results):
                new[id(tensor)] = declared_result(call, facts, place, tensor, owner, self.roles)
            elif is_tracked(tensor) or base_name(call) in COPIES:
                new[id(tensor)] = flow_through(self, call, place, tensor)
        for tensor in call.written():
            fact = new.get(id(tensor)) or any_of(tensor.dtype)
            # views of the same memory hold it too, or some of it
            for other in self._stored.get(_compat.storage_key(tensor), ()):
                if other is not tensor:
                    self._facts[id(other)] = self.fact(other).join(fact)
            new[id(tensor)] = fact
        for tensor in (*call.results, *call.written()):
            if id(tensor) in new:
                self._put(tensor, new[id(tensor)])

    def _check_declared(self, call: Call, facts: Facts) -> Owner | None:
        """Whether padding is as the op wants it, and whose padding tokens are; None if it is not.

        What the op declares of padding in its results holds only then.
        """
        owners: set[Owner | None] = set()
        for name, pad in facts.pads.items():
            value = call.values.get(name)
            if not isinstance(value, Tensor):
                continue
            if not self.roles.dims(value):
                if pad.fill == "last":
                    owners.add(None)  # of as many requests whatever the batch
                continue
            fact = self.fact(value)
            if fact.copy_of is not None:
                self.needs.setdefault(fact.copy_of, []).append(Need(call, name, pad))
            if pad.fill == "last":
                owner = owner_of(call, facts, name, fact, self.roles, self._offsets)
                owners.add(owner)
                holds = owner is not None
                wanted = "the last real entry"
            else:
                holds = fact.pad.within(pad.low, pad.high)
                wanted = _range(pad)
            if not holds:
                owners.add(None)
                self.problems.append(
                    Problem(
                        call.node,
                        "padding unknown",
                        f"{name} of {call.name} must hold {wanted} in padding, which "
                        f"{_who(fact.inputs)}",
                        f"mask it, as in torch.where(seq_lens > 0, {name}, {pad.fill})"
                        if pad.fill != "last"
                        else "pass query_start_loc as an input of the step, and on as it came; "
                        "where each token is a request of its own, torch.arange(num_tokens + 1)",
                        fact.inputs,
                    )
                )
        # two arguments may not agree, either
        return "none" if not owners else owners.pop() if len(owners) == 1 else None

    def _check_indices(self, call: Call) -> None:
        for source, dim, index, wraps in _indices(call):
            fact, size = self.fact(index), source.shape[dim]
            if self.roles.grows(size):
                if fact.copy_of is not None and not fact.inputs:
                    self.indexed.setdefault(fact.copy_of, call.node)
                if wraps and not fact.real.low >= 0:
                    self.problems.append(
                        Problem(
                            call.node,
                            "rows mixed",
                            "an index that may be negative counts from the end, where padding is",
                            "use torch.index_select, or clamp(min=0): "
                            "hidden[(query_start_loc[1:] - 1).clamp(min=0)], for a request may "
                            "have no token",
                        )
                    )
            inside = self._counts_up_to(index, size) or self._inside(fact.pad, size, wraps)
            if self.roles.dims(index) and not inside:
                self.problems.append(
                    Problem(
                        call.node,
                        "padding unknown",
                        f"an index must stay within {self.roles.size(size)} entries in padding, "
                        f"which {_who(fact.inputs)}",
                        "clamp it, or mask it as in torch.where(seq_lens > 0, index, 0)",
                        fact.inputs,
                    )
                )

    def _counts_up_to(self, index: Tensor, size: Any) -> bool:
        """An index holds 0, 1, 2, ... and of these no more than there are entries."""
        dims = self.roles.dims(index)
        if not self.fact(index).counts or len(dims) != 1:
            return False
        left: Any = sympy.expand(self.roles.size(size) - self.roles.size(index.shape[dims[0]]))
        return bool(left.is_Integer and left >= 0)

    def _inside(self, span: Span, size: Any, wraps: bool) -> bool:
        expression, least = self.roles.size(size), self.roles.least(size)
        low, high = -least if wraps else 0, least - 1
        tokens = self.roles.tokens if self.roles.tokens is not None else self.roles.requests
        has_a_row_per_token = tokens is not None and sympy.expand(expression - tokens) == 0
        for piece in span.pieces:
            plain = piece.plain()
            # offsets go up to the number of real tokens
            ends_inside = piece.base in self._offsets and has_a_row_per_token
            ends_inside = ends_inside or piece.base == size_base(expression)
            ends_inside = ends_inside and piece.high <= -1
            if plain.low < low or not (plain.high <= high or ends_inside):
                return False
        return True

    def spread(self, value: Any, result: Tensor) -> Fact:
        """The fact of an operand where it is broadcast to a result."""
        fact = self.fact(value)
        dims = self.roles.dims(result)
        mine = ()
        if isinstance(value, Tensor):
            shift = result.dim() - value.dim()
            mine = tuple(dim + shift for dim in self.roles.dims(value))
        if mine == dims:
            return fact
        if not mine:
            return Fact(fact.real, fact.real, fact.real)
        return Fact(fact.real, fact.real.join(fact.pad))

    def carry(self, source: Tensor, result: Tensor, same_place: bool = False) -> Fact:
        """The fact of a result that holds entries of a source, each in the rows it was in."""
        fact = self.fact(source)
        before, after = len(self.roles.dims(source)), len(self.roles.dims(result))
        if before == after:
            if same_place:
                return fact
            return dataclasses.replace(fact, last=None, counts=False)
        pad = fact.real if 0 in (before, after) else fact.real.join(fact.pad)
        return Fact(fact.real, pad, fact.real if before == 0 else None, fact.inputs)


def _indices(call: Call) -> Iterable[tuple[Tensor, int, Tensor, bool]]:
    """What an op indexes, the dimension, the index, and whether negative numbers count from the
    end."""
    values, name = call.values, base_name(call)
    if name in ("index", "index_put"):
        for dim, index in enumerate(values["indices"]):
            if index is not None and index.dtype not in (torch.bool, torch.uint8):
                yield values["self"], dim, index, True
    elif name == "embedding":
        yield values["weight"], 0, values["indices"], False
    elif name in ("gather", "index_select", "scatter", "scatter_add", "scatter_reduce"):
        source = values["self"]
        if source.dim():
            yield source, values["dim"] % source.dim(), values["index"], False


def _range(pad: Pad) -> str:
    if pad.low == pad.high:
        return f"{pad.low:g}"
    return f"{pad.high:g} or less" if math.isinf(pad.low) else f"{pad.low:g} or more"


def _who(inputs: frozenset[str]) -> str:
    if not inputs:
        return "nothing here says it does"
    return f"no padding of {', '.join(sorted(inputs))} was found to bring about"
