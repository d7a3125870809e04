"""Which symbols of a graph count requests and tokens.

They are read off the arguments of ops that declare what they have an entry for. That a size is
symbolic says nothing: sizes of caches are symbolic too.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import sympy
from torch import Tensor, fx

from ..ops.declare import Rows, facts_of
from . import _compat
from .inputs import Batched
from .row_numbers import count_by_index
from .rows import Call, Trace, expression
from .token_groups import group_of


@dataclasses.dataclass(frozen=True)
class Root:
    """A size that is known to count something.

    Attributes:
        count: its expression, less what is extra
        unit: what it counts
        call, argument: the op and argument that say so; None and the input's name if the caller did
    """

    count: sympy.Expr
    unit: str
    call: Call | None
    argument: str

    def __str__(self) -> str:
        return f"{self.call.name}({self.argument})" if self.call else f"inputs[{self.argument!r}]"


@dataclasses.dataclass(frozen=True)
class Roles:
    """How the sizes of a graph follow the batch.

    Attributes:
        requests, tokens: the two counts; None where nothing counts them
        symbols: the symbols in them
        same: symbols that count the same as another, and that one
        multiple: the step views tokens in groups of so many, and takes whole groups alone
        by_index: symbols that were taken for a count since the rows that they count are indexed by
            it: where they are as many in this batch, and in no other, that is wrong
    """

    requests: sympy.Expr | None
    tokens: sympy.Expr | None
    symbols: frozenset[Any]
    same: Mapping[Any, sympy.Expr]
    multiple: int = 1
    by_index: frozenset[Any] = frozenset()

    def size(self, value: Any) -> sympy.Expr:
        """The expression of a size, equal for equal counts."""
        substituted: Any = expression(value).xreplace(dict(self.same))
        return substituted

    def grows(self, value: Any) -> bool:
        """The size or number follows the batch."""
        return bool(self.size(value).free_symbols & self.symbols)

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        """The dimensions of a tensor that grow."""
        return tuple(dim for dim, size in enumerate(tensor.shape) if self.grows(size))

    def least(self, size: Any) -> int:
        """What a size is at least in a padded batch."""
        expression: Any = self.size(size)
        # a symbolic size is 2 at least, a number of groups may be 1
        groups = self.symbols if self.multiple > 1 else frozenset[Any]()
        least = expression.subs({s: 1 if s in groups else 2 for s in expression.free_symbols})
        return int(least) if least.is_Integer else 1

    def spec(self, size: Any) -> tuple[str, int] | None:
        """What a size has an entry for, and how many entries more; None if it is neither."""
        for unit, count in (("request", self.requests), ("token", self.tokens)):
            if count is not None:
                extra = sympy.expand(self.size(size) - count)
                if extra.is_Integer and extra >= 0:
                    return unit, int(extra)
        return None


class Contradiction(ValueError):
    """The declared arguments do not agree on what a symbol counts."""


def find_roles(
    trace: Trace,
    given: Mapping[fx.Node, tuple[str, Batched]],
    fixed: Collection[fx.Node] = (),
) -> Roles:
    """Read the roles off a graph.

    Args:
        trace: the graph
        given: inputs that the caller declared, with their names
        fixed: inputs that the caller declared not to grow

    Raises:
        Contradiction: no one number of requests and of tokens fits all declarations
    """
    roots = [root for call in trace.calls for root in roots_of(call)]
    for node, (name, spec) in given.items():
        shape = trace.inputs[node].shape
        if spec.dim < len(shape):
            count = expression(shape[spec.dim]) - spec.extra
            roots.append(Root(count, spec.per, None, name))
    requests, tokens = _sort(roots)
    same: dict[Any, sympy.Expr] = {}
    for counts in (requests, tokens):
        plain = sorted((c for c in counts if c.is_Symbol), key=str)
        same.update(dict.fromkeys(plain[1:], plain[0] if plain else None))
    by_index = count_by_index(trace, same, requests, tokens, fixed)
    multiple, groups = _group_tokens(trace, same, tokens)
    _equate(trace, same, requests, tokens, groups)
    requests, tokens = ({c.xreplace(same) for c in counts} for counts in (requests, tokens))
    grown: set[Any] = set()
    for count in sorted(requests, key=_simplest) + sorted(tokens, key=_simplest):
        free = count.free_symbols
        # in requests * next_n the other factor does not grow
        if free and not free & grown:
            symbol = _growing_factor(trace, count, requests)
            if symbol is None:
                raise Contradiction(f"which of the factors of size {count} grows is not known")
            known = min((c for c in requests if c.is_Symbol), key=_simplest, default=None)
            if count not in requests and not count.is_Symbol and symbol != groups:
                if known is not None and symbol is not known:
                    same[symbol] = known
                    symbol = known
                requests.add(symbol)
            grown.add(symbol)
    requests, tokens = ({c.xreplace(same) for c in counts} for counts in (requests, tokens))
    first = [
        min((c for c in counts if c.free_symbols), key=_simplest, default=None)
        for counts in (requests, tokens)
    ]
    return Roles(first[0], first[1], frozenset(grown), same, multiple, by_index)


def _simplest(count: Any) -> tuple[int, str]:
    return count.count_ops(), str(count)


def _group_tokens(
    trace: Trace, same: dict[Any, sympy.Expr], tokens: set[Any]
) -> tuple[int, sympy.Symbol | None]:
    """Tokens that a step views in groups are so many groups.

    Returns:
        the tokens of a group, 1 if there are none, and the symbol for the number of groups
    """
    symbols = [count.xreplace(same) for count in tokens if count.is_Symbol]
    if not symbols:
        return 1, None
    token = min(symbols, key=_simplest)
    multiple = group_of(trace, token, same)
    if multiple == 1:
        return 1, None
    groups = sympy.Symbol(f"{token}_by_{multiple}", integer=True, positive=True)
    same.update({s: e.xreplace({token: multiple * groups}) for s, e in same.items()})
    same[token] = multiple * groups
    return multiple, groups


def _equate(
    trace: Trace,
    same: dict[Any, sympy.Expr],
    requests: set[Any],
    tokens: set[Any],
    groups: sympy.Symbol | None,
) -> None:
    """A step that views tokens as [requests, n] has n tokens for each request.

    So has one in which a number of groups of tokens must be that of requests.
    """
    symbols = [
        min((count for count in counts if count.is_Symbol), key=_simplest, default=None)
        for counts in (requests, tokens)
    ]
    if symbols[0] is None or symbols[1] is None:
        return
    request, token = (same.get(symbol, symbol) for symbol in symbols)
    token = token if groups is None else groups
    for equality in _compat.size_equalities(trace.gm):
        difference = sympy.expand((equality.lhs - equality.rhs).xreplace(same))
        if difference.free_symbols == {request, token} and difference.is_polynomial(token):
            solved = sympy.solve(difference, token)
            if len(solved) == 1 and (solved[0] / request).is_Integer:
                same.update({s: e.xreplace({token: solved[0]}) for s, e in same.items()})
                same[token] = solved[0]
                return


def _growing_factor(trace: Trace, count: Any, requests: set[Any]) -> Any:
    """The symbol in a count that grows: of several, the one that is dimension 0 of an input.

    Where requests are counted elsewhere, it is as many as they are in the call at hand.
    """
    free = count.free_symbols
    if len(free) == 1:
        return next(iter(free))
    hints: dict[Any, int | None] = {
        expression(tensor.shape[0]): _compat.size_hint(tensor.shape[0])
        for tensor in trace.inputs.values()
        if tensor.dim()
    }
    known = next((hints[c] for c in requests if c.is_Symbol and c in hints), None)
    leading = [s for s in free if s in hints and known in (None, hints[s])]
    return leading[0] if len(leading) == 1 else None


def roots_of(call: Call) -> Iterable[Root]:
    """What the declarations of an op say of the sizes of its arguments."""
    facts = facts_of(call.op) if call.op is not None else None
    for name, rows in facts.rows.items() if facts else ():
        count = count_of(call.values.get(name), rows)
        if count is not None:
            yield Root(count, rows.unit, call, name)


def count_of(value: Any, rows: Rows) -> sympy.Expr | None:
    """How many requests or tokens an argument is for."""
    if isinstance(value, Tensor):
        if rows.dim >= value.dim():
            return None
        value = value.shape[rows.dim]
    return None if value is None else sympy.expand(expression(value) - rows.extra)


def _sort(roots: list[Root]) -> tuple[set[Any], set[Any]]:
    """The expressions that count requests, and those that count tokens.

    An op may get one token per request, or rows that were flattened to requests of one token: only
    a call in which the two differ tells which is which.
    """
    requests: set[Any] = set()
    tokens: set[Any] = set()
    loose: dict[Any, set[str]] = {}
    calls: dict[Any, dict[str, set[Any]]] = {}
    for root in roots:
        if root.call is None:
            (requests if root.unit == "request" else tokens).add(root.count)
        else:
            calls.setdefault(id(root.call), {}).setdefault(root.unit, set()).add(root.count)
            loose.setdefault(root.count, set()).add(root.unit)
    for counts in calls.values():
        a, b = counts.get("request", set()), counts.get("token", set())
        if a and b and a != b:
            requests |= a
            tokens |= b
    for count, units in loose.items():
        if count not in requests and count not in tokens:
            (requests if "request" in units else tokens).add(count)
    if both := {count for count in requests & tokens if count.free_symbols}:
        raise Contradiction(
            f"size {next(iter(both))} counts requests in one place and tokens in another"
        )
    return requests, tokens
