"""Intervals of integers, and arithmetic on them."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Piece:
    """Numbers from ``low`` to ``high``, both relative to ``base``, a number that is not negative.

    A base is what the last real entry of an input holds, by the name of the input, or a size. With
    one, no number is below ``floor`` either.
    """

    low: float = -math.inf
    high: float = math.inf
    base: str | None = None
    floor: float = -math.inf

    def plain(self) -> "Piece":
        """The same without a base."""
        return self if self.base is None else Piece(max(self.low, self.floor), math.inf)


_MOST_PIECES = 4


class Span:
    """What a number may be: one of some pieces."""

    def __init__(
        self, low: float = -math.inf, high: float = math.inf, base: str | None = None
    ) -> None:
        self.pieces: tuple[Piece, ...] = (Piece(low, high, base),)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> "Span":
        """All of the pieces; those of the same base become one."""
        merged: dict[str | None, Piece] = {}
        for piece in pieces:
            old = merged.get(piece.base, piece)
            merged[piece.base] = Piece(
                min(old.low, piece.low),
                max(old.high, piece.high),
                piece.base,
                min(old.floor, piece.floor),
            )
        span = cls()
        span.pieces = tuple(merged.values())
        if len(span.pieces) > _MOST_PIECES:
            return cls(span.low, span.high)
        return span

    @property
    def low(self) -> float:
        """No number is less."""
        return min(piece.plain().low for piece in self.pieces)

    @property
    def high(self) -> float:
        """No number is greater."""
        return max(piece.plain().high for piece in self.pieces)

    def within(self, low: float, high: float) -> bool:
        """All of it lies between two numbers."""
        return low <= self.low and self.high <= high

    def join(self, other: "Span") -> "Span":
        """Both."""
        return Span.of((*self.pieces, *other.pieces))

    def not_below(self, other: "Span") -> bool:
        """No number of it is less than one of the other."""
        for a, b in itertools.product(self.pieces, other.pieces):
            x, y = (a, b) if a.base == b.base else (a.plain(), b.plain())
            if not (x.low >= y.high and y.high < math.inf):
                return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Span) and self.pieces == other.pieces

    def __hash__(self) -> int:
        return hash(self.pieces)


def size_base(size: object) -> str:
    """The base that a size is."""
    return f"size {size}"


def below_size(size: object) -> Span:
    """Positions along a dimension of this size, whatever it comes to."""
    return Span.of([Piece(-math.inf, -1, size_base(size), floor=0)])


def _same_base(a: Piece, b: Piece) -> tuple[Piece, Piece]:
    return (a, b) if a.base == b.base else (a.plain(), b.plain())


def _add(a: Piece, b: Piece) -> Piece:
    if a.base is not None and b.base is not None:
        a, b = a.plain(), b.plain()
    floor = a.plain().low + b.plain().low
    return Piece(a.low + b.low, a.high + b.high, a.base or b.base, floor)


def _sub(a: Piece, b: Piece) -> Piece:
    if a.base == b.base:
        return Piece(a.low - b.high, a.high - b.low)
    if b.base is None:
        return Piece(a.low - b.high, a.high - b.low, a.base, a.plain().low - b.high)
    b, a = b.plain(), a.plain()
    return Piece(a.low - b.high, a.high - b.low)


def _mul(a: Piece, b: Piece) -> Piece:
    a, b = a.plain(), b.plain()
    corners = [_times(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Piece(min(corners), max(corners))


def _times(x: float, y: float) -> float:
    return 0 if x == 0 or y == 0 else x * y


def _floor_divide(a: Piece, b: Piece) -> Piece:
    a, b = a.plain(), b.plain()
    if not (b.low == b.high and 0 < b.low < math.inf):
        return Piece(0) if a.low >= 0 and b.low > 0 else Piece()
    low, high = (x if math.isinf(x) else x // b.low for x in (a.low, a.high))
    return Piece(low, high)


def _remainder(a: Piece, b: Piece) -> Piece:
    a, b = a.plain(), b.plain()
    if b.low <= 0:
        return Piece()
    if a.low == a.high and b.low == b.high and math.isfinite(a.low) and math.isfinite(b.low):
        return Piece(a.low % b.low, a.low % b.low)
    return Piece(0, b.high - 1)


def _maximum(a: Piece, b: Piece) -> list[Piece]:
    # one of the two, and not below the other
    low = max(a.plain().low, b.plain().low)
    if a.base == b.base:
        return [Piece(max(a.low, b.low), max(a.high, b.high), a.base, low)]
    return [_from(a, low), _from(b, low)]


def _from(piece: Piece, low: float) -> Piece:
    if piece.base is None:
        return Piece(max(piece.low, low), max(piece.high, low))
    return dataclasses.replace(piece, floor=max(piece.floor, low))


def _minimum(a: Piece, b: Piece) -> Piece:
    a, b = _same_base(a, b)
    return Piece(min(a.low, b.low), min(a.high, b.high), a.base)


def _less(a: Piece, b: Piece) -> Piece:
    a, b = _same_base(a, b)
    return Piece(float(a.high < b.low), float(a.low < b.high))


def _less_equal(a: Piece, b: Piece) -> Piece:
    return _not(_less(b, a))


def _not(a: Piece) -> Piece:
    return Piece(1 - a.high, 1 - a.low)


def _equal(a: Piece, b: Piece) -> Piece:
    a, b = _same_base(a, b)
    apart = a.high < b.low or b.high < a.low
    one = a.low == a.high == b.low == b.high and math.isfinite(a.low) and a.base is None
    return Piece(float(one), float(not apart))


def _is_flag(piece: Piece) -> bool:
    return piece.base is None and piece.low >= 0 and piece.high <= 1


def _and(a: Piece, b: Piece) -> Piece:
    if _is_flag(a) and _is_flag(b):
        return Piece(min(a.low, b.low), min(a.high, b.high))
    return Piece(0) if a.plain().low >= 0 or b.plain().low >= 0 else Piece()


def _or(a: Piece, b: Piece) -> Piece:
    if _is_flag(a) and _is_flag(b):
        return Piece(max(a.low, b.low), max(a.high, b.high))
    return Piece(0) if a.plain().low >= 0 and b.plain().low >= 0 else Piece()


def _truth(a: Piece) -> Piece:
    """Whether it is not zero."""
    return _not(_equal(a, Piece(0, 0)))


_BINARY: dict[str, Callable[[Piece, Piece], Piece | list[Piece]]] = {
    "add": _add,
    "sub": _sub,
    "rsub": lambda a, b: _sub(b, a),
    "mul": _mul,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "maximum": _maximum,
    "minimum": _minimum,
    "clamp_min": _maximum,
    "clamp_max": _minimum,
    "lt": _less,
    "gt": lambda a, b: _less(b, a),
    "le": _less_equal,
    "ge": lambda a, b: _less_equal(b, a),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "bitwise_and": _and,
    "logical_and": lambda a, b: _and(_truth(a), _truth(b)),
    "bitwise_or": _or,
    "logical_or": lambda a, b: _or(_truth(a), _truth(b)),
}
_UNARY: dict[str, Callable[[Piece], Piece]] = {
    "neg": lambda a: _sub(Piece(0, 0), a),
    "logical_not": lambda a: _not(_truth(a)),
    "abs": lambda a: Piece(0),
}


def _lifted(function: Callable[..., Piece | list[Piece]]) -> Callable[..., Span]:
    """The same of spans, piece by piece."""

    def on_spans(*spans: Span) -> Span:
        found: list[Piece] = []
        for pieces in itertools.product(*(span.pieces for span in spans)):
            piece = function(*pieces)
            found += piece if isinstance(piece, list) else [piece]
        return Span.of(found)

    return on_spans


BINARY = {name: _lifted(function) for name, function in _BINARY.items()}
"""Ops of two operands, ``self`` and ``other``."""

UNARY = {name: _lifted(function) for name, function in _UNARY.items()}
"""Ops of one operand."""

truth_of = _lifted(_truth)
"""Whether it is not zero."""
