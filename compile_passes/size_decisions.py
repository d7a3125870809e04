"""Where the size of a batch decides what is computed: branches, and numbers among arguments."""

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from . import _compat
from .pad_flow import Problem
from .relations import NO_BOUNDS, Bounds, Ranges, always, holds_for_samples, ranges_of
from .report import name_of
from .roles import Roles
from .rows import Call, Trace, is_symbolic


def size_decisions(trace: Trace, roles: Roles, bounds: Bounds = NO_BOUNDS) -> Iterator[Problem]:
    """Sizes of the batch for which the step would have been traced otherwise.

    Args:
        trace, roles: the graph
        bounds: the largest batch that is padded to
    """
    hints: dict[Any, int] = {}
    nodes: dict[Any, fx.Node] = {}
    for node, tensor in trace.inputs.items():
        for size in tensor.shape:
            expression = roles.size(size)
            hint = _compat.size_hint(size)
            if expression.is_Symbol and hint is not None:
                hints.setdefault(expression, hint)
                nodes.setdefault(expression, node)
    ranges = ranges_of(roles, bounds)
    for guard, file, line, code in _compat.size_decisions(trace.gm):
        expression = sympy.sympify(guard).xreplace(dict(roles.same))
        grown = sorted(expression.free_symbols & roles.symbols, key=str)
        known = {s: hints.get(s, 2) for s in expression.free_symbols - roles.symbols}
        if not grown or _holds(expression.subs(known), ranges):
            continue
        reason, remedy = _depends(expression, roles)
        yield Problem(
            nodes.get(grown[0], next(iter(trace.inputs))),
            "batch size as value",
            reason + ("" if file or not code else f" (`{code}`)"),
            remedy,
            place=(file, line, code) if file else None,
        )
    yield from _truths(trace, roles, ranges)


def _truths(trace: Trace, roles: Roles, ranges: Ranges) -> Iterator[Problem]:
    """Numbers that are asked whether they are 0, as in ``not (x.shape[0] - 3)``."""
    for node in trace.gm.graph.nodes:
        if node.target in (operator.not_, operator.truth) and len(node.all_input_nodes) == 1:
            value = trace.values.get(node.all_input_nodes[0])
            if is_symbolic(value) and roles.grows(value):
                zero: Any = sympy.Eq(roles.size(value), 0)
                if not (_holds(zero, ranges) or _holds(sympy.Not(zero), ranges)):
                    yield Problem(node, "batch size as value", *_depends(zero, roles))


def _depends(relation: Any, roles: Roles) -> tuple[str, str]:
    reason = f"what is computed depends on whether {_readable(relation, roles)}"
    return f"{reason}, which counts padding", "compute the same for every size"


def _holds(relation: Any, ranges: Ranges) -> bool:
    """What is not known to hold is not taken to, but for comparisons of what is rounded."""
    found = always(relation, ranges)
    if found is not None:
        return found
    picks = relation.has(sympy.Eq, sympy.Ne) or any(
        part.func.__name__ in ("Mod", "PythonMod") for part in relation.atoms(sympy.Function)
    )
    return not picks and holds_for_samples(relation, {})


def _readable(expression: Any, roles: Roles) -> str:
    names = {roles.requests: sympy.Symbol("requests"), roles.tokens: sympy.Symbol("tokens")}
    return str(expression.xreplace({k: v for k, v in names.items() if k is not None}))


def sizes_as_values(trace: Trace, roles: Roles) -> Iterator[Problem]:
    """Numbers that follow the batch, given to something that computes tensors with them.

    Asked of the nodes of the graph: in the calls of ops that a node comes to, a number may be the
    constant that it is in the batch at hand. A size is fine as long as it shows in one of them.
    """
    calls: dict[fx.Node, list[Call]] = {}
    for call in trace.calls:
        calls.setdefault(call.node, []).append(call)
    for node in trace.gm.graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        made = [t for t in _compat.tree_leaves(trace.values.get(node)) if isinstance(t, Tensor)]
        if not made and not any(call.written() for call in calls.get(node, ())):
            continue
        shown = _shown(calls.get(node, ()), roles)
        # what takes a size may come to nothing where the size is what it was
        shapes = [*made, *(t for call in calls.get(node, ()) for _, t in call.tensors())]
        sizes = {roles.size(size) for tensor in shapes for size in tensor.shape}
        hidden = [
            number
            for number, is_size in _numbers(node, trace, roles)
            if not isinstance(number, torch.SymInt)
            or not (roles.size(number) in shown or (is_size and roles.size(number) in sizes))
        ]
        if hidden:
            yield Problem(
                node,
                "batch size as value",
                f"{name_of(node)} computes with {_readable(roles.size(hidden[0]), roles)}, a "
                "number that follows the size of the batch, which counts padding",
                "count real rows, as in (seq_lens > 0).sum(), or pass the number in as a tensor",
            )


def _shown(calls: Iterable[Call], roles: Roles) -> set[Any]:
    """The symbolic numbers among the arguments of calls."""
    return {
        roles.size(leaf)
        for call in calls
        for leaf in _compat.tree_leaves(list(call.values.values()))
        if is_symbolic(leaf)
    }


_SHAPING = frozenset(
    {"narrow", "view", "reshape", "expand", "broadcast_to", "flatten", "unflatten", "sum_to_size"}
    | {"split", "repeat_interleave"}
)


def _numbers(node: fx.Node, trace: Trace, roles: Roles) -> Iterator[tuple[Any, bool]]:
    """The numbers given to a node that follow the batch, and whether they are no more than sizes.

    An index is none, nor is a value that is set; the ends of a slice are.
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    sliced: list[Any] = []
    if name in ("getitem", "setitem"):
        places = node.args[1] if isinstance(node.args[1], tuple | list) else [node.args[1]]
        sliced = [end for place in places if isinstance(place, slice)
                  for end in (place.start, place.stop)]  # fmt: skip
    for given in node.all_input_nodes:
        for leaf in _compat.tree_leaves(trace.values.get(given)):
            if is_symbolic(leaf) and roles.grows(leaf):
                yield leaf, name in _SHAPING or given in sliced
