"""Whether a relation between sizes holds for every batch, as exactly as can be told.

Sums of products are judged exactly, what rounds by its range, and what is left by samples: those
can show that a relation does not hold, and never that it does.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import sympy

from . import _compat
from .roles import Roles

# each residue of small numbers, both sides of round ones, and beyond what tables end at
_SAMPLES = (*range(2, 34), 40, 48, 56, 63, 64, 65, 96, 100, 127, 128, 192, 255, 256, 257, 384, 500)
_LARGE = (512, 513, 768, 1000, 1024, 2048, 4096, 4097, 5000, 8192, 65536, 1000003)
_FEW = (*range(2, 15), 16, 24, 31, 48, 64, 100, 257, 1000, 4096, 65536)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The largest batch that is padded to: requests, and tokens; ``None`` where there is no end."""

    requests: int | None = None
    tokens: int | None = None


NO_BOUNDS = Bounds()

# the smallest and the largest that a size can be, both included; ``None`` where there is no end
Ranges = Mapping[Any, tuple[int, int | None]]


def ranges_of(roles: Roles, bounds: Bounds) -> dict[Any, tuple[int, int | None]]:
    """What the symbols that grow may be in a trace, which takes one of something for a constant."""
    found: dict[Any, tuple[int, int | None]] = {}
    for count, end in ((roles.requests, bounds.requests), (roles.tokens, bounds.tokens)):
        free = set() if count is None else count.free_symbols & roles.symbols
        for symbol in free:
            # so many tokens are so many groups
            whole: Any = count
            times = sympy.expand(whole).coeff(symbol)
            per = int(times) if times.is_Integer and times > 0 else 1
            # whole groups may take one request more, or a few
            more = roles.multiple if roles.multiple > 1 else 0
            ends = [
                n for n in (found.get(symbol, (0, None))[1], end and end // per + 2 * more) if n
            ]
            found[symbol] = (2 if roles.multiple == 1 else 1, max(ends, default=None))
    return {symbol: found.get(symbol, (2, None)) for symbol in roles.symbols}


def always(relation: Any, ranges: Ranges) -> bool | None:
    """A relation holds for all sizes in their ranges.

    Returns:
        whether it does; ``None`` where that is not known
    """
    if relation in (sympy.true, sympy.false):
        return bool(relation)
    if isinstance(relation, sympy.And | sympy.Or):
        parts = [always(part, ranges) for part in relation.args]
        decides = isinstance(relation, sympy.Or)
        if decides in parts:
            # one that never holds makes an And fail, as one that always does makes an Or hold
            return decides
        if None in parts:
            return None
        # an Or of relations that hold for some each may hold for all
        return None if decides else True
    if isinstance(relation, sympy.Not):
        inner = relation.args[0]
        if isinstance(inner, sympy.And | sympy.Or):
            other = sympy.Or if isinstance(inner, sympy.And) else sympy.And
            return always(other(*map(sympy.Not, inner.args)), ranges)
    if isinstance(relation, sympy.core.relational.Relational):
        found = _of_sums(relation, ranges)
        if found is not None:
            return found
    known = {symbol: ranges.get(symbol, (2, None)) for symbol in relation.free_symbols}
    return True if _compat.holds_in_range(relation, known) else None


def _of_sums(relation: Any, ranges: Ranges) -> bool | None:
    """Of a relation between sums of products of sizes."""
    difference = sympy.expand(relation.lhs - relation.rhs)
    symbols = sorted(difference.free_symbols, key=str)
    if not symbols:
        held = relation.func(difference, 0)
        return bool(held) if held in (sympy.true, sympy.false) else None
    if not difference.is_polynomial(*symbols):
        return None
    polynomial = sympy.Poly(difference, *symbols)
    low, high = _ends(polynomial, symbols, ranges)
    exact = polynomial.total_degree() <= 1
    never = bool(low > 0 or high < 0 or (exact and _misses_0(polynomial)))
    if isinstance(relation, sympy.Eq):
        return bool(low == high == 0)
    if isinstance(relation, sympy.Ne):
        return True if never else (False if exact else None)
    wanted = {
        sympy.StrictGreaterThan: low > 0,
        sympy.GreaterThan: low >= 0,
        sympy.StrictLessThan: high < 0,
        sympy.LessThan: high <= 0,
    }
    holds = next((held for kind, held in wanted.items() if isinstance(relation, kind)), False)
    return True if holds else (False if exact else None)


def _ends(polynomial: Any, symbols: list[Any], ranges: Ranges) -> tuple[Any, Any]:
    """A number that a sum of products is never below, and one that it is never above."""
    low: Any = sympy.Integer(0)
    high: Any = sympy.Integer(0)
    for powers, factor in polynomial.terms():
        ends = [ranges.get(symbol, (2, None)) for symbol in symbols]
        least = sympy.prod([end[0] ** power for end, power in zip(ends, powers, strict=True)])
        most: Any = sympy.Integer(1)
        for (_, end), power in zip(ends, powers, strict=True):
            if power:
                most *= sympy.oo if end is None else end**power
        low += factor * (least if factor > 0 else most)
        high += factor * (most if factor > 0 else least)
    return low, high


def _misses_0(polynomial: Any) -> bool:
    """So many of each and some more are never none: ``2 * a + 4 * b + 1``."""
    factors = [factor for powers, factor in polynomial.terms() if any(powers)]
    rest = polynomial.coeff_monomial(1)
    whole = all(factor.is_Integer for factor in (*factors, rest))
    return bool(whole and rest % sympy.igcd(0, *factors))


def holds_for_samples(
    relation: Any, known: Mapping[Any, int], points: Collection[Mapping[Any, int]] = ()
) -> bool:
    """A relation holds for many sizes, and for the given ones.

    Args:
        relation: of sizes
        known: those that do not grow
        points: sizes to ask for beyond the samples
    """
    relation = relation.subs(known)
    grown = sorted(relation.free_symbols, key=str)
    asked = itertools.chain(_samples(grown), points)
    return all(_holds(relation, point) for point in asked)


def _samples(grown: list[Any]) -> Iterator[dict[Any, int]]:
    values = (*_SAMPLES, *_LARGE) if len(grown) == 1 else _FEW
    if len(grown) > 2:
        values = values[::3]
    for place in itertools.product(values, repeat=len(grown)):
        yield dict(zip(grown, place, strict=True))


def _holds(relation: Any, values: Mapping[Any, int]) -> bool:
    try:
        return bool(relation.subs(values))
    except (TypeError, ZeroDivisionError):
        # of sizes that the step cannot have
        return False
