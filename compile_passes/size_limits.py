"""What a step takes for granted of the sizes of a batch, beyond what it does with its rows.

A trace keeps the relations between sizes that torch's own shape functions found to hold and relied
on: a table has rows for each token, say, or a number of rows is even. What holds for the batch at
hand and not for each other one either limits the sizes that batches are padded to, or forbids
padding.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
from torch import Tensor, fx

from . import _compat
from .pad_flow import Problem
from .relations import NO_BOUNDS, always, holds_for_samples, ranges_of
from .roles import Roles
from .rows import Trace

_REQUESTS, _TOKENS = sympy.symbols("requests tokens", integer=True, positive=True)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What must hold of the size of a batch.

    Attributes:
        bounds: relations of requests, tokens and sizes of tables; above them the step takes less
            from a table than it has rows to take it for, or fails
        gaps: single sizes that compile to other code, which serves no other size
        tables: symbols in the bounds, and the argument and dimension that each is the size of
    """

    bounds: tuple[Any, ...] = ()
    gaps: tuple[Any, ...] = ()
    tables: tuple[tuple[Any, str, int], ...] = ()

    def sizes_of_tables(self, bound: inspect.BoundArguments) -> tuple[int, ...]:
        """The sizes in one call; 0 where an argument is no such tensor."""
        return tuple(
            value.shape[dim]
            if isinstance(value := bound.arguments.get(name), Tensor) and dim < value.dim()
            else 0
            for _, name, dim in self.tables
        )

    def allow(self, requests: int, tokens: int, tables: tuple[int, ...]) -> bool:
        """The step does the same for a batch of this size as for any."""
        return _hold(self.bounds, self._values(requests, tokens, tables))

    def allow_padded(self, requests: int, tokens: int, tables: tuple[int, ...]) -> bool:
        """A batch can be padded to this size."""
        values = self._values(requests, tokens, tables)
        return _hold(self.bounds, values) and _hold(self.gaps, values)

    def _values(self, requests: int, tokens: int, tables: tuple[int, ...]) -> dict[Any, int]:
        known = {symbol: size for (symbol, _, _), size in zip(self.tables, tables, strict=True)}
        return {**known, _REQUESTS: requests, _TOKENS: tokens}


NO_LIMITS = Limits()


def _hold(relations: tuple[Any, ...], values: Mapping[Any, int]) -> bool:
    try:
        return all(bool(relation.subs(values)) for relation in relations)
    except (TypeError, ZeroDivisionError):
        # of sizes that the step cannot have
        return False


def find_limits(trace: Trace, roles: Roles, names: Mapping[fx.Node, str]) -> Limits:
    """Read the limits off a trace.

    Args:
        trace, roles: the graph
        names: arguments of the step, by the placeholder of the tensor
    """
    hints: dict[Any, int | None] = {}
    tables: dict[Any, tuple[Any, str, int]] = {}
    for node, tensor in trace.inputs.items():
        for dim, size in enumerate(tensor.shape):
            symbol = roles.size(size)
            if symbol.is_Symbol:
                hints.setdefault(symbol, _compat.size_hint(size))
                if node in names:
                    tables.setdefault(symbol, (symbol, names[node], dim))
    units = _units(roles)
    bounds, gaps = [], []
    for relation, grown, _ in _assumptions(trace, roles):
        free: Any = relation.free_symbols
        if isinstance(relation, sympy.Ne):
            # one that relates two sizes chooses how something is computed
            if free == grown and len(grown) == 1:
                gaps.append(relation.xreplace(units))
        elif not isinstance(relation, sympy.Eq):
            fixed = {s: hints[s] for s in free - grown if s not in tables and hints.get(s)}
            bounds.append(relation.xreplace({**units, **fixed}))
    used = set[Any]().union(*(bound.free_symbols for bound in bounds))
    return Limits(
        tuple(bounds),
        tuple(gaps),
        tuple(place for symbol, place in tables.items() if symbol in used),
    )


def sizes_that_must_agree(trace: Trace, roles: Roles) -> Iterator[Problem]:
    """Sizes that are equal in the batch at hand, and not in each other one.

    ``x[::2] + x[1::2]`` takes an even number of rows, and ``view(-1, 2)`` of something that there
    is one of for each request an even number of requests.
    """
    anywhere = trace.gm.graph.output_node()
    told: set[str] = set()
    for relation, _, (file, line, code) in _assumptions(trace, roles):
        words = _readable(relation, roles)
        if isinstance(relation, sympy.Eq) and words not in told and not _is_of_value(relation):
            told.add(words)
            yield Problem(
                anywhere,
                "padding unknown",
                f"the step works where {words} alone, which padding would change"
                + ("" if file or not code else f" (`{code}`)"),
                "view tokens in groups with view(-1, k, ...), and slice the batch without a step",
                place=(file, line, code) if file else None,
            )


def sizes_that_cannot_be_cut(trace: Trace, roles: Roles) -> Iterator[Problem]:
    """Sizes that follow the batch otherwise than by so many rows for each request or token."""
    told: set[Any] = set()
    returned = {id(tensor) for tensor in trace.outputs}
    for call in trace.calls:
        for tensor in call.results:
            for dim, size in enumerate(tensor.shape):
                counted = roles.size(size)
                if not roles.grows(size) or (counted, id(tensor) in returned) in told:
                    continue
                grown: set[Any] = counted.free_symbols & roles.symbols
                fits = _is_linear if id(tensor) in returned else _is_whole
                if not fits(counted, grown):
                    told |= {(counted, True), (counted, False)}
                    yield Problem(
                        call.node,
                        "padding unknown",
                        f"a tensor has size {_readable(counted, roles)} in dimension {dim}, which "
                        "is not so many entries for each request or token",
                        "keep the batch in a dimension of its own, and slice it without a step",
                    )


def _is_whole(size: Any, grown: set[Any]) -> bool:
    """Made of sums and products: nothing is rounded, and no size is the smaller of two."""
    return bool(size.is_polynomial(*grown))


def _is_linear(size: Any, grown: set[Any]) -> bool:
    """So many entries for each, and some more."""
    return len(grown) == 1 and _is_whole(size, grown) and sympy.Poly(size, *grown).degree() == 1


def _is_of_value(relation: Any) -> bool:
    """Of a size as a number to compute with, which ``size_decisions`` reports."""
    fractions = {"IntTrueDiv", "FloatTrueDiv", "ToFloat"}
    return any(part.func.__name__ in fractions for part in relation.atoms(sympy.Function))


def _units(roles: Roles) -> dict[Any, Any]:
    """The symbols that grow, in requests and tokens."""
    units: dict[Any, Any] = {}
    for count, unit in ((roles.requests, _REQUESTS), (roles.tokens, _TOKENS)):
        free = set() if count is None else count.free_symbols & roles.symbols
        if len(free) == 1 and not free & units.keys():
            (symbol,) = free
            solved: Any = sympy.solve(sympy.sympify(count) - unit, symbol)
            if len(solved) == 1:
                units[symbol] = solved[0]
    return units


def _assumptions(
    trace: Trace, roles: Roles
) -> Iterator[tuple[Any, set[Any], tuple[str, int, str]]]:
    """What does not hold for every batch, the symbols that grow in it, and where it was found."""
    hints: dict[Any, int] = {}
    for tensor in trace.inputs.values():
        for size in tensor.shape:
            hint = _compat.size_hint(size)
            if hint is not None:
                hints.setdefault(roles.size(size), hint)
    ranges = ranges_of(roles, NO_BOUNDS)
    for guard, file, line, code in _compat.size_assumptions(trace.gm):
        relation: Any = sympy.sympify(guard).xreplace(dict(roles.same))
        grown: set[Any] = relation.free_symbols & roles.symbols
        if grown and not _always(relation, grown, hints, ranges):
            yield relation, grown, (file, line, code)


def _always(
    relation: Any, grown: set[Any], hints: Mapping[Any, int], ranges: Mapping[Any, Any]
) -> bool:
    """A relation holds for every size of the batch; of what is rounded, samples tell."""
    known = {symbol: hints.get(symbol, 2) for symbol in relation.free_symbols - grown}
    found = always(relation.subs(known), ranges)
    return holds_for_samples(relation, known) if found is None else found


def _readable(relation: Any, roles: Roles) -> str:
    return str(relation.xreplace(_units(roles)))
