"""The trace from which a step's batch is inferred, whatever the size of the call at hand.

A tracer takes sizes 0 and 1 for constants. For a batch with none or one of something, stand-ins of
larger inputs are traced in place of it; nothing is run, so their content does not matter.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..ops.declare import facts_of
from . import _compat
from .inputs import Batched, Static
from .roles import Contradiction, Roles, find_roles
from .row_rules import is_pointwise
from .rows import Trace, expression, record

Given = Mapping[str, Batched | Static]


class Undecided(Exception):
    """A batch of this size does not tell."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A graph, and which of its inputs are arguments of the step.

    Attributes:
        trace: the graph
        names: arguments, by the placeholder of the tensor
        unseen: arguments of which the graph has a size and not the tensor, with its dimension, by
            the placeholder of the size; several names where it may be either's
    """

    trace: Trace
    names: Mapping[fx.Node, str]
    unseen: Mapping[fx.Node, tuple[str, int]]


def trace_step(fn: Callable[..., Any], bound: inspect.BoundArguments, given: Given) -> TracedStep:
    """Trace a step with a symbol for each size of each argument that is a tensor.

    Raises:
        Undecided: the batch is too small to tell what grows
    """
    tensors = {name: v for name, v in bound.arguments.items() if isinstance(v, Tensor)}
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if all(min(shape[:1], default=2) >= 2 for shape in sizes.values()):
        traced = _trace(fn, bound, sizes)
        return _with_more_tokens(fn, bound, given, traced) or traced
    return _trace_larger(fn, bound, given, sizes)


def _trace(
    fn: Callable[..., Any], bound: inspect.BoundArguments, sizes: Mapping[str, tuple[int, ...]]
) -> TracedStep:
    stand_ins: dict[str, Tensor] = {}
    for name, shape in sizes.items():
        tensor: Any = bound.arguments[name]
        with torch.no_grad():
            # another object over the same memory: marks of the tracer stay off the caller's
            same = tuple(tensor.shape) == shape
            stand_ins[name] = tensor.detach() if same else tensor.new_empty(shape)
    arguments = {**bound.arguments, **stand_ins}
    call = inspect.BoundArguments(bound.signature, arguments)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        gm, inputs = _compat.trace_only(fn, call.args, call.kwargs, list(stand_ins.values()))
    trace = record(gm.graph)
    owners = {id(tensor): name for name, tensor in stand_ins.items()}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    names = {
        node: owners[id(value)]
        for node, value in zip(placeholders, inputs, strict=True)
        if id(value) in owners
    }
    return TracedStep(
        trace, names, _unseen(trace, [n for n in stand_ins if n not in names.values()])
    )


def _unseen(trace: Trace, missing: list[str]) -> dict[fx.Node, tuple[str, int]]:
    """The sizes in a graph that are of arguments of which it has no tensor."""
    seen = {_plain(str(node.target)) for node in trace.inputs}
    return {
        node: (next((n for n in missing if source == f"L['{n}']"), " or ".join(missing)), dim)
        for node, (source, dim) in _compat.size_sources(trace.gm).items()
        if missing and _plain(source) not in seen
    }


def _plain(source: str) -> str:
    # a placeholder is named after what it was found in
    return re.sub(r"[^a-zA-Z0-9]+", "_", source).strip("_").lower()


def _roles(traced: TracedStep, given: Given) -> Roles | None:
    declared = {
        node: (name, spec)
        for node, name in traced.names.items()
        if isinstance(spec := given.get(name), Batched) and node in traced.trace.inputs
    }
    fixed = [node for node, name in traced.names.items() if isinstance(given.get(name), Static)]
    try:
        return find_roles(traced.trace, declared, fixed)
    except Contradiction:
        return None


def _with_more_tokens(
    fn: Callable[..., Any], bound: inspect.BoundArguments, given: Given, traced: TracedStep
) -> TracedStep | None:
    """The same step with two tokens per request, if it can have them.

    In a batch of as many requests as tokens the two may have been compared and found equal.
    """
    roles = _roles(traced, given)
    if roles is None or len(roles.symbols) != 1:
        return None
    units = _fed(traced.trace, traced.names, given)
    tokens = [name for name, (unit, _) in units.items() if unit == "token"]
    requests = [name for name, (unit, _) in units.items() if unit == "request"]
    if not tokens or not requests:
        return None
    sizes = {name: tuple(bound.arguments[name].shape) for name in traced.names.values()}
    count = sizes[tokens[0]][0]
    for unknown in (True, False):
        doubled = {
            name: (2 * shape[0], *shape[1:])
            if name in tokens or (unknown and name not in units and shape[:1] == (count,))
            else shape
            for name, shape in sizes.items()
        }
        try:
            again = _trace(fn, bound, {**_all_sizes(bound), **doubled})
        except Exception:
            continue
        more = _roles(again, given)
        if more is not None and len(more.symbols) > 1:
            return again
    return None


def _all_sizes(bound: inspect.BoundArguments) -> dict[str, tuple[int, ...]]:
    return {n: tuple(v.shape) for n, v in bound.arguments.items() if isinstance(v, Tensor)}


def _trace_larger(
    fn: Callable[..., Any],
    bound: inspect.BoundArguments,
    given: Given,
    sizes: Mapping[str, tuple[int, ...]],
) -> TracedStep:
    units = _units_of(fn, bound, given, sizes)
    counts: dict[str, set[int]] = {"request": set(), "token": set()}
    for name, (unit, extra) in units.items():
        counts[unit].add(sizes[name][0] - extra)
    if not any(counts.values()):
        raise Undecided(
            "no op in the step says which arguments have an entry per request or token",
            "declare inputs, or the ops: mtpgraph.declare",
        )
    requests, tokens = (max(counts[unit], default=0) for unit in ("request", "token"))
    errors: list[Exception] = []
    for larger in _larger_sizes(sizes, units, requests, tokens):
        try:
            traced = _trace(fn, bound, larger)
        except Exception as error:
            errors.append(error)
            continue
        _refuse_ambiguous(fn, bound, given, larger, sizes, units, traced)
        return traced
    if not errors:
        return _trace(fn, bound, sizes)
    first = str(errors[0]).strip().splitlines()
    raise Undecided(
        f"a batch of {requests} requests and {tokens} tokens does not tell which arguments grow"
        + (f" ({first[0]})" if first else ""),
        "call the step first with two requests or more, or declare inputs",
    ) from errors[0]


def _larger_sizes(
    sizes: Mapping[str, tuple[int, ...]],
    units: Mapping[str, tuple[str, int]],
    requests: int,
    tokens: int,
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Sizes of a larger batch that may be of the same kind, the likeliest first."""
    more_requests = 2 * requests if requests else 2
    ratio = tokens // requests if requests and tokens and tokens % requests == 0 else 1
    loose = [
        name
        for name, shape in sizes.items()
        if name not in units and shape and (shape[0] in (requests, tokens) or shape[0] == 0)
    ]
    for more_tokens in dict.fromkeys((more_requests * ratio, max(tokens, 2 * more_requests))):
        counts = {"request": more_requests, "token": more_tokens}
        for kept in (None, *loose):
            larger = dict(sizes)
            for name, (unit, extra) in units.items():
                larger[name] = (counts[unit] + extra, *sizes[name][1:])
            for name in loose:
                if name != kept:
                    count = more_tokens if sizes[name][0] == tokens else more_requests
                    larger[name] = (count, *sizes[name][1:])
            yield larger


def _refuse_ambiguous(
    fn: Callable[..., Any],
    bound: inspect.BoundArguments,
    given: Given,
    larger: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, tuple[int, ...]],
    units: Mapping[str, tuple[str, int]],
    traced: TracedStep,
) -> None:
    """An input of one row that would serve any batch may be one row by nature.

    One without rows that nothing ties to an empty batch may be of any size in the next.
    """
    roles = _roles(traced, given)
    empty = all(sizes[name][0] == extra for name, (_, extra) in units.items())
    for node, name in traced.names.items():
        if empty and roles is not None and name not in units and sizes[name][:1] == (0,):
            tensor = traced.trace.inputs[node]
            if not roles.dims(tensor) or expression(tensor.shape[0]) in roles.by_index:
                raise Undecided(
                    f"{name} has no rows in a batch of none: whether it grows does not show",
                    f'call the step first with two requests, or declare inputs={{"{name}": ...}}',
                )
            continue
        if roles is None or name in units or larger[name] == sizes[name] or sizes[name][0] != 1:
            continue
        if not roles.dims(traced.trace.inputs[node]):
            continue
        try:
            _trace(fn, bound, {**larger, name: sizes[name]})
        except Exception:
            continue
        raise Undecided(
            f"{name} has one row in a batch of one: whether it grows with the batch does not show",
            f'call the step first with two requests or more, or declare inputs={{"{name}": ...}}',
        )


def _units_of(
    fn: Callable[..., Any],
    bound: inspect.BoundArguments,
    given: Given,
    sizes: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[str, int]]:
    """What dimension 0 of an input has an entry for, where an op gets the input itself."""
    try:
        traced = _trace(fn, bound, sizes)
    except Exception as error:
        raise Undecided(
            f"a batch of this size cannot be traced ({error})",
            "call the step first with two requests or more, or declare inputs",
        ) from error
    return _fed(traced.trace, traced.names, given)


def _fed(trace: Trace, names: Mapping[fx.Node, str], given: Given) -> dict[str, tuple[str, int]]:
    owner = {id(trace.inputs[node]): name for node, name in names.items() if node in trace.inputs}
    found: dict[str, tuple[str, int]] = {}
    for name, spec in given.items():
        if isinstance(spec, Batched) and spec.dim == 0:
            found[name] = (spec.per, spec.extra)
    for call in trace.calls:
        tensors = list(call.tensors())
        facts = facts_of(call.op) if call.op is not None else None
        if facts is not None:
            for argument, tensor in tensors:
                rows, name = facts.rows.get(argument), owner.get(id(tensor))
                if rows is not None and rows.dim == 0 and name is not None:
                    found.setdefault(name, (rows.unit, rows.extra))
        elif len(tensors) == 1 and len(call.results) >= 1 and _keeps_rows(call):
            source = tensors[0][1]
            name = owner.get(id(source))
            for result in call.results:
                if name is not None and result.shape[:1] == source.shape[:1]:
                    owner.setdefault(id(result), name)
    return found


_VIEWS = frozenset(
    {"select", "slice", "view", "unsqueeze", "squeeze", "_to_copy", "detach", "alias"}
)


def _keeps_rows(call: Any) -> bool:
    if call.name in ("select", "slice", "unsqueeze"):
        return call.values.get("dim") not in (0, None) or call.name == "slice"
    return call.name in _VIEWS or (call.op is not None and is_pointwise(call))
