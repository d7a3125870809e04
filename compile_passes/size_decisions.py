"""Branches of a step that depend on the size of its batch."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
from torch import fx

from . import _compat
from .pad_flow import Problem
from .roles import Roles
from .rows import Trace

_SAMPLES = (*range(2, 34), 63, 64, 65, 100, 128, 255, 256, 257, 500, 512, 513, 1000, 1024, 4096)


def size_decisions(trace: Trace, roles: Roles) -> Iterator[Problem]:
    """Sizes of the batch for which the step would have been traced otherwise."""
    hints: dict[Any, int] = {}
    nodes: dict[Any, fx.Node] = {}
    for node, tensor in trace.inputs.items():
        for size in tensor.shape:
            expression = roles.size(size)
            hint = _compat.size_hint(size)
            if expression.is_Symbol and hint is not None:
                hints.setdefault(expression, hint)
                nodes.setdefault(expression, node)
    for guard, file, line, code in _compat.size_decisions(trace.gm):
        expression = sympy.sympify(guard).xreplace(dict(roles.same))
        grown = sorted(expression.free_symbols & roles.symbols, key=str)
        if not grown or _holds(expression, grown, hints):
            continue
        yield Problem(
            nodes.get(grown[0], next(iter(trace.inputs))),
            "batch size as value",
            f"what is computed depends on whether {_readable(expression, roles)}, which counts "
            "padding" + ("" if file or not code else f" (`{code}`)"),
            "compute the same for every size",
            place=(file, line, code) if file else None,
        )


def _holds(expression: Any, grown: list[Any], hints: Mapping[Any, int]) -> bool:
    """The expression is true for every size of the batch, as far as many samples tell."""
    known = {symbol: hints.get(symbol, 2) for symbol in expression.free_symbols}
    points = (
        ({grown[0]: n} for n in _SAMPLES)
        if len(grown) == 1
        else (
            dict(zip(grown, values, strict=True))
            for values in itertools.product(_SAMPLES[::3], repeat=len(grown))
        )
    )
    return all(bool(expression.subs({**known, **point})) for point in points)


def _readable(expression: Any, roles: Roles) -> str:
    names = {roles.requests: sympy.Symbol("requests"), roles.tokens: sympy.Symbol("tokens")}
    return str(expression.xreplace({k: v for k, v in names.items() if k is not None}))
