"""Proves that padding rows cannot reach real rows. Rewrites nothing; notes what stands against it.

Noted are an op that mixes entries along a dimension that grows with the batch (``rows mixed``), a
size of the batch that is used as a number or decides what is computed (``batch size as value``),
a write to what outlives the step, other than by an op that is declared with a pad, and a write
through a view that ends before the tensor does.

What grows is known from the declarations of ops, see ``infer_batch``. An op that is neither in the
table of ``row_rules`` nor declared is noted where it meets something that grows: no silence means
that nobody looked.
"""

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from ..ops.declare import Facts, facts_of
from . import _compat
from .choose_pads import choose_pads
from .pad_flow import PadFlow, Problem
from .relations import NO_BOUNDS, Bounds
from .report import name_of, note
from .roles import Contradiction, Roles, find_roles, roots_of
from .row_effects import Mixed, index_write, puts_in_own_rows
from .row_rules import numbers_that_grow, rule_of
from .row_writes import Memory
from .rows import Call, Trace, input_name, is_symbolic, record
from .size_decisions import size_decisions, sizes_as_values


def check_row_independence(graph: fx.Graph) -> int:
    """Note what mixes rows; returns 0."""
    trace = record(graph)
    try:
        roles = find_roles(trace, {})
    except Contradiction:
        return 0  # infer_batch says so
    names = {node: input_name(node) for node in trace.inputs}
    _, flow = choose_pads(trace, roles, names, {})
    problems = [
        *find_mixed(trace, roles, flow),
        *(problem for problem in flow.problems if problem.kind == "rows mixed"),
    ]
    for problem in problems:
        note(problem.node, problem.kind, "check_row_independence", problem.reason, problem.remedy)
    return 0


def find_mixed(
    trace: Trace, roles: Roles, flow: PadFlow, bounds: Bounds = NO_BOUNDS
) -> Iterator[Problem]:
    """What may let padding reach a real row.

    Args:
        trace, roles: the graph
        flow: what padding holds in it
        bounds: the largest batch that is padded to
    """
    yield from size_decisions(trace, roles, bounds)
    told: set[fx.Node] = set()
    memory = Memory(trace, roles)
    for call in trace.calls:
        facts = facts_of(call.op) if call.op is not None else None
        yield from _fixed_sizes(call, roles, trace)
        writes = list(memory.check_writes(call, facts))
        # which memory a scatter writes to says more than that it is one
        scatter = rule_of(call) is index_write and bool(writes)
        if memory.concerns(call) and not scatter:
            found = (
                _check_rule(call, roles, flow)
                if facts is None
                else _check_declared(call, facts, roles)
            )
            for problem in found:
                if problem.kind == "batch size as value" or _is_control_flow(call):
                    told.add(problem.node)
                yield problem
        yield from writes
        memory.follow(call)
    for problem in sizes_as_values(trace, roles):
        if problem.node not in told:
            yield problem


# what a reduction of integers passes over
_NEUTRAL = {"sum": 0, "any": 0, "count_nonzero": 0, "all": 1, "prod": 1}


def _is_harmless(call: Call, roles: Roles, flow: PadFlow) -> bool:
    """What padding holds does not change the results of a call, whatever its op does to rows."""
    if call.name.removesuffix("_") == "index_put":
        rows = call.values["indices"][0]
        return rows is not None and flow.fact(rows).counts and puts_in_own_rows(call, roles)
    source = call.values.get("self")
    if not isinstance(source, Tensor) or source.dtype.is_floating_point:
        return False
    fact = flow.fact(source)
    if call.name in ("max", "amax") and len(call.results) == 1 and "other" not in call.values:
        return fact.pad.high <= fact.real.low
    value = _NEUTRAL.get(call.name)
    return value is not None and fact.pad.within(value, value)


def _is_control_flow(call: Call) -> bool:
    """``torch.cond`` and its like, which get the sizes that their bodies use as arguments."""
    target = call.node.target
    return isinstance(target, HigherOrderOperator) and "triton_kernel" not in str(target)


def _check_rule(call: Call, roles: Roles, flow: PadFlow) -> Iterator[Problem]:
    if _is_control_flow(call):
        name = name_of(call.node).rpartition(".")[2]
        yield Problem(
            call.node,
            "rows mixed",
            f"nothing is known of how torch's {name} treats rows: it runs a graph of its own",
            "compute both and choose by torch.where(condition, a, b)"
            if name == "cond"
            else "write the loop in Python, where it has a fixed number of turns",
        )
        return
    numbers = numbers_that_grow(call, roles)
    if numbers:
        yield Problem(
            call.node,
            "batch size as value",
            f"{call.name or name_of(call.node)} computes with a size of the batch "
            f"({', '.join(numbers)}), which counts padding",
            "count real rows, as in (seq_lens > 0).sum(), or pass the number in as a tensor",
        )
        return
    rule = rule_of(call)
    try:
        if rule is None:
            name = call.op._schema.name if call.op is not None else name_of(call.node)
            custom = call.op is not None and call.op.namespace != "aten"
            raise Mixed(
                f"nothing is known of how {name} treats rows",
                f'if it keeps them apart, say so: mtpgraph.declare("{name}", row_independent=True)'
                if custom
                else "write it with ops that are known, or as an op of yours that is declared",
            )
        if not _is_harmless(call, roles, flow):
            rule(call, roles)
    except Mixed as mixed:
        yield Problem(call.node, "rows mixed", mixed.reason, mixed.remedy)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        yield Problem(
            call.node,
            "rows mixed",
            f"{call.name} was called in a form that is not known: {error}",
            "",
        )


def _check_declared(call: Call, facts: Facts, roles: Roles) -> Iterator[Problem]:
    assert call.op is not None
    name = call.op._schema.name

    def problem(kind: Any, reason: str, remedy: str = "") -> Problem:
        return Problem(call.node, kind, reason, remedy)

    if not facts.row_independent:
        yield problem("rows mixed", f"{name} is declared, but not as row_independent")
        return
    loose: set[sympy.Expr] = set()
    for argument, value in call.values.items():
        rows = facts.rows.get(argument)
        if is_symbolic(value) and roles.grows(value) and rows is None:
            yield problem(
                "batch size as value",
                f"{argument} of {name} is a size of the batch, which counts padding",
                "pass a number that does not grow",
            )
        for tensor in _compat.tree_leaves(value):
            if not isinstance(tensor, Tensor):
                continue
            dims = roles.dims(tensor)
            if dims and rows is None:
                loose.add(roles.size(tensor.shape[dims[0]]))
            if not dims or dims == ((rows.dim,) if rows else (() if facts.complete else (0,))):
                continue
            yield problem(
                "rows mixed",
                f"{argument} of {name} grows with the batch in dimension {dims[-1]}, where the op "
                "is not declared to keep rows apart",
            )
    written = {id(tensor) for tensor in call.written()}
    if facts.complete:
        return
    counts = {root.count for root in roots_of(call)} | loose
    if len(counts) > 1 and loose:
        yield problem(
            "rows mixed",
            f"{name} gets arguments of {len(counts)} sizes that grow, and not all of them say what "
            "they have an entry for",
            f'mtpgraph.declare("{name}", rows=...)',
        )
    for tensor in call.results:
        dims, declared = roles.dims(tensor), {result.rows.dim for result in facts.results if
                                              result.rows}  # fmt: skip
        if any(dim != 0 and dim not in declared for dim in dims):
            yield problem("rows mixed", f"a result of {name} grows in another dimension than 0")
    if written:
        yield from _unnamed_rows(call, facts, roles)


def _unnamed_rows(call: Call, facts: Facts, roles: Roles) -> Iterator[Problem]:
    """An op that writes must say which of its arguments keep padding from being written."""
    assert call.op is not None
    grown = [
        (name, tensor.dtype)
        for name, tensor in call.tensors()
        if roles.dims(tensor) and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    ]
    named = [name for name, _ in grown if name in facts.pads]
    if not named or any(
        dtype in (torch.int32, torch.int64) and name not in facts.pads for name, dtype in grown
    ):
        yield Problem(
            call.node,
            "padding unknown",
            f"{call.op._schema.name} writes, and nothing says what keeps padding rows from being "
            "written",
            f'mtpgraph.declare("{call.op._schema.name}", pad_values=...) for each argument that '
            "names rows",
        )


def _fixed_sizes(call: Call, roles: Roles, trace: Trace) -> Iterator[Problem]:
    """A size that an op declares to grow is a constant here."""
    for root in roots_of(call):
        if not roles.grows(root.count):
            yield Problem(
                call.node,
                "padding unknown",
                f"{root.argument} of {call.name} is for {root.count} {root.unit}s whatever the "
                "batch: the step fixes this size, or the tensor comes in a container",
                let_sizes_grow(trace),
            )


def let_sizes_grow(trace: Trace) -> str:
    """What to write where a size of the batch is a constant of the graph."""
    if any("take_along_dim" in name_of(node) for node in trace.gm.graph.nodes):
        return "write take_along_dim as gather: torch makes constants of the sizes that it gets"
    return "pass each tensor that grows as an argument of its own"
