"""How many tokens a step views as one group: ``x.view(-1, 2, dim)`` needs an even number."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import sympy

from .rows import Call, Trace, expression

_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})


def group_of(trace: Trace, tokens: sympy.Symbol, same: Mapping[Any, sympy.Expr]) -> int:
    """A number that divides the tokens of each batch that the step takes.

    Read off the arguments of reshapes, which fail on another number. What a branch of Python code
    found for the batch at hand says nothing of others.

    Args:
        trace: of the step
        tokens: their number
        same: what other symbols are equal to
    """
    found = 1
    for call in trace.calls:
        sizes = call.values.get("size", call.values.get("shape"))
        if call.name in _RESHAPES and isinstance(sizes, list | tuple):
            for count in _must_be_whole(call, sizes, same):
                # p * tokens / q in lowest terms
                factor: Any = count / tokens
                if factor.is_Rational:
                    found = math.lcm(found, int(factor.q))
    return found


def _must_be_whole(
    call: Call, sizes: Iterable[Any], same: Mapping[Any, sympy.Expr]
) -> list[sympy.Expr]:
    """Quotients of sizes that a reshape needs to be whole numbers."""
    source = call.values["self"]
    whole: Any = sympy.prod([expression(size).xreplace(dict(same)) for size in source.shape])
    after: list[Any] = [expression(size).xreplace(dict(same)) for size in sizes]
    found: list[sympy.Expr] = []
    for place, size in enumerate(after):
        others = sympy.prod([other for at, other in enumerate(after) if at != place])
        if others == 0:
            continue
        quotient = whole / others
        if size == -1:
            found.append(quotient)
        elif size.func.__name__ == "FloorDiv" and quotient == size.args[0] / size.args[1]:
            # as many elements as before: nothing was rounded
            found.append(quotient)
    return found
