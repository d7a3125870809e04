"""Which inputs of a step grow with the batch, in which dimension, and what pads them.

Rewrites nothing. Roles are rooted in what ops declare of their arguments (``mtpgraph.declare``;
the ops of this package do so where they are registered) and follow from there through equal sizes.
Padding follows from what an input feeds, through views, casts, arithmetic and indexing. What is
not known is noted as ``padding unknown``, with the argument and what to declare.

An input that nothing ties to the batch is Static. That is always right, for a static input is used
as it comes, and slow if it does grow.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from . import _compat
from .check_row_independence import find_mixed, let_sizes_grow
from .choose_pads import choose_pads
from .inputs import Batched, Static
from .pad_flow import Fill, PadFlow, Problem
from .relations import NO_BOUNDS, Bounds
from .report import Finding, collect, note
from .roles import Contradiction, Roles, Root, find_roles, roots_of
from .rows import Trace, expression, input_name, record
from .size_limits import (
    NO_LIMITS,
    Limits,
    find_limits,
    sizes_that_cannot_be_cut,
    sizes_that_must_agree,
)
from .stand_ins import Undecided, trace_step
from .stored_values import find_stored
from .survey import Survey

_NAME = "infer_batch"


@dataclasses.dataclass(frozen=True)
class InputRow:
    """What was found of one input that grows, for a report.

    Attributes:
        argument: its name
        dim, per, extra, pad: as of ``Batched``
        because: the op and argument that it was inferred from
        file, line: of that call
    """

    argument: str
    dim: int
    per: str
    extra: int
    pad: Fill
    because: str
    file: str
    line: int


@dataclasses.dataclass(frozen=True)
class Inferred:
    """What is known of the arguments of a step.

    Attributes:
        inputs: for every argument that holds tensors, what it is to the batch
        rows: the same as a table, for those that grow
        findings: what stands against padding, or is not known
        row_safe: padding cannot reach a real row, proven; otherwise run the step at exact sizes
        decided: a batch with more requests or tokens would not tell more
        tokens_per_request: tokens of each request, where the step fixes their number
        multiple: what divides the tokens of each batch, where the step views them in groups
        limits: what must hold of the size of a batch: tables of the step end somewhere
        paddable: batches of the step can be padded at all: its sizes are such, and it leaves
            nothing of a batch but what it returns
        by_index: inputs that grow as far as this batch tells: something indexes as many rows
    """

    inputs: dict[str, Batched | Static]
    rows: tuple[InputRow, ...]
    findings: tuple[Finding, ...]
    row_safe: bool
    decided: bool = True
    tokens_per_request: int | None = None
    multiple: int = 1
    limits: Limits = NO_LIMITS
    paddable: bool = True
    by_index: frozenset[str] = frozenset()


def infer_batch(graph: fx.Graph) -> int:
    """Note what is not known of the inputs of a graph; returns 0."""
    trace = record(graph)
    names = {node: input_name(node) for node in trace.inputs}
    for problem in _analyze(trace, names, {}, {}).problems:
        if problem.kind == "padding unknown":
            note(problem.node, problem.kind, _NAME, problem.reason, problem.remedy)
    return 0


def infer_inputs(
    fn: Callable[..., Any],
    bound: inspect.BoundArguments,
    given: Mapping[str, Batched | Static] | None = None,
    bounds: Bounds = NO_BOUNDS,
) -> Inferred:
    """Trace a step once and find out what its arguments are to the batch. Runs nothing of it.

    Args:
        fn: the step
        bound: the arguments of one call, with defaults
        given: what the caller declared; it stands, and what is not in it is inferred
        bounds: the largest batch that is padded to: what the step does for larger ones is not asked

    Raises:
        whatever Dynamo does on a step that is not one graph
    """
    given = dict(given or {})
    static: dict[str, Batched | Static] = {
        name: given.get(name, Static())
        for name, value in bound.arguments.items()
        if Survey(value).tensors or name in given
    }
    try:
        traced = trace_step(fn, bound, given)
    except Undecided as error:
        finding = Finding("padding unknown", _NAME, "", "", 0, "", str(error), error.remedy)
        return Inferred(static, (), (finding,), row_safe=False, decided=False)
    names = _names_of_inputs(traced.trace, traced.names)
    analysis = _analyze(traced.trace, names, given, traced.unseen, bounds)
    findings = list(dict.fromkeys(map(_finding, analysis.problems)))
    inputs = static | {
        row.argument: Batched(row.dim, row.pad, row.per, row.extra)  # pyright: ignore[reportArgumentType]
        for row in analysis.rows
        if row.argument not in given
    }
    roles, trace = analysis.roles, traced.trace
    if roles is None:
        return Inferred(
            inputs, analysis.rows, tuple(findings), row_safe=False, paddable=analysis.paddable
        )
    ratio = tokens_per_request(roles, trace)
    by_index = {
        name
        for node, name in traced.names.items()
        if node in trace.inputs and name not in given
        for size in trace.inputs[node].shape
        if expression(size) in roles.by_index
    }
    return Inferred(
        inputs,
        analysis.rows,
        tuple(findings),
        row_safe=not findings,
        tokens_per_request=ratio,
        multiple=math.lcm(roles.multiple, ratio or 1),
        by_index=frozenset(by_index),
        limits=find_limits(trace, roles, traced.names),
        paddable=analysis.paddable,
    )


def find_problems(
    trace: Trace,
    names: Mapping[fx.Node, str],
    specs: Mapping[str, Batched | Static],
    bounds: Bounds,
    declared: bool,
) -> tuple[Roles | None, tuple[Finding, ...]]:
    """What stands against padding in a graph whose inputs are known.

    Args:
        trace: the graph
        names: arguments of the step, by the placeholder of the tensor
        specs: what they are
        bounds: the largest batch that is padded to
        declared: the caller declared every argument
    """
    named = _names_of_inputs(trace, names)
    analysis = _analyze(trace, named, specs, {}, bounds, inferred=not declared)
    return analysis.roles, tuple(dict.fromkeys(map(_finding, analysis.problems)))


def _names_of_inputs(trace: Trace, names: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    return {node: names.get(node, f"what lies in {input_name(node)}") for node in trace.inputs}


def _finding(problem: Problem) -> Finding:
    by = _NAME if problem.kind == "padding unknown" else "check_row_independence"
    with collect() as findings:
        note(problem.node, problem.kind, by, problem.reason, problem.remedy)
    if problem.place is None:
        return findings[0]
    file, line, code = problem.place
    return dataclasses.replace(findings[0], file=file, line=line, code=code, op="")


@dataclasses.dataclass(frozen=True)
class _Analysis:
    roles: Roles | None
    rows: tuple[InputRow, ...]
    problems: list[Problem]
    paddable: bool = True


def _analyze(
    trace: Trace,
    names: Mapping[fx.Node, str],
    given: Mapping[str, Batched | Static],
    unseen: Mapping[fx.Node, tuple[str, int]],
    bounds: Bounds = NO_BOUNDS,
    *,
    inferred: bool = False,
) -> _Analysis:
    declared = {
        node: (name, spec)
        for node, name in names.items()
        if isinstance(spec := given.get(name), Batched)
    }
    anywhere = trace.gm.graph.output_node()
    fixed = [node for node, name in names.items() if isinstance(given.get(name), Static)]
    try:
        roles = find_roles(trace, declared, fixed)
    except Contradiction as error:
        problem = Problem(anywhere, "padding unknown", str(error), "declare inputs")
        stored = list(find_stored(trace, None, given))
        return _Analysis(None, (), [problem, *stored], paddable=not stored)
    stored = list(find_stored(trace, roles, given))
    problems = [*_used_for_size_alone(trace, names, given), *stored]
    known_by_size, found = _known_by_size(trace, roles, given, unseen)
    problems += found
    batched = any(isinstance(spec, Batched) for spec in given.values())
    if not roles.symbols and not batched:
        return _Analysis(roles, (), [_nothing_grows(trace, anywhere)])
    shapes, found = _dims_that_grow(trace, roles, names)
    problems += found
    for node, (name, spec) in declared.items():
        if roles.dims(trace.inputs[node]) != (spec.dim,):
            tensor = trace.inputs[node]
            fixed = spec.dim < tensor.dim() and not roles.dims(tensor)
            reason = f"inputs[{name!r}] declares dimension {spec.dim} to grow, but the step " + (
                f"takes its size for the constant {tensor.shape[spec.dim]}"
                if fixed
                else f"has sizes {_sizes_of(tensor, roles)}"
            )
            problems.append(Problem(node, "padding unknown", reason, "declare what does grow"))
    fills, flow = choose_pads(trace, roles, names, given)
    problems += find_mixed(trace, roles, flow, bounds)
    disagreements = list(sizes_that_must_agree(trace, roles))
    problems += disagreements
    if inferred or not all(name in given for name in names.values()):
        # where all is declared, the sizes of outputs alone count
        problems += sizes_that_cannot_be_cut(trace, roles)
    problems += flow.problems
    for name, node in flow.indexed.items():
        if name in names.values() and name not in given:
            reason = f"{name} indexes rows of the batch, and nothing says what it has an entry for"
            remedy = f'declare inputs={{"{name}": Batched(...)}} or Static'
            problems.append(Problem(node, "padding unknown", reason, remedy))
    rows = tuple(
        _row(
            names[node], dim, roles, fills[names[node]], flow, trace, trace.inputs[node].shape[dim]
        )
        for node, dim in shapes.items()
    )
    # no one looks at what pads them
    rows += tuple(
        _row(name, dim, roles, 0, flow, trace, size) for name, (dim, size) in known_by_size.items()
    )
    return _Analysis(roles, rows, problems, paddable=not (disagreements or stored))


def _known_by_size(
    trace: Trace,
    roles: Roles,
    given: Mapping[str, Batched | Static],
    unseen: Mapping[fx.Node, tuple[str, int]],
) -> tuple[dict[str, tuple[int, Any]], list[Problem]]:
    """Arguments that the graph has a growing size of and not the tensor.

    Returns:
        by name, the dimension and its size, of those that grow as an input does that the graph has
        the tensor of: outputs of that size can be cut. Of the others, what is not known
    """
    sizes = _symbols_of_inputs(trace)
    found: dict[str, tuple[int, Any]] = {}
    problems = []
    for node, (name, dim) in unseen.items():
        size = trace.sizes.get(node)
        if size is None or not roles.grows(size) or isinstance(given.get(name), Batched):
            continue
        known = expression(size).free_symbols <= sizes and roles.spec(size) is not None
        if known and name not in (*found, *given) and name.isidentifier():
            found[name] = dim, size
            continue
        user = next(iter(node.users), node)
        reason = (
            f"size {dim} of {name} grows with the batch, and the step reads nothing else of it: "
            "padding could not be cut"
        )
        remedy = "take the size from an input that the step reads, or pass it as a number"
        problems.append(Problem(user, "padding unknown", reason, remedy))
        found.pop(name, None)
    return found, problems


def _symbols_of_inputs(trace: Trace) -> set[Any]:
    return set[Any]().union(
        *(expression(size).free_symbols for t in trace.inputs.values() for size in t.shape)
    )


def _used_for_size_alone(
    trace: Trace, names: Mapping[fx.Node, str], given: Mapping[str, Batched | Static]
) -> list[Problem]:
    """A size of an input that is declared to grow, and that the graph does not see otherwise."""
    known = _symbols_of_inputs(trace)
    alone = [
        node for node, size in trace.sizes.items() if not expression(size).free_symbols <= known
    ]
    unseen = [
        name
        for name, spec in given.items()
        if isinstance(spec, Batched) and name not in names.values()
    ]
    if not alone or not unseen:
        return []
    reason = f"the size of {' or '.join(unseen)} is used as a number, which counts padding"
    remedy = "count real rows, as in (seq_lens > 0).sum()"
    user = next(iter(alone[0].users), alone[0])
    return [Problem(user, "batch size as value", reason, remedy)]


def _nothing_grows(trace: Trace, node: fx.Node) -> Problem:
    roots = [root for call in trace.calls for root in roots_of(call)]
    if roots:
        root = roots[0]
        assert root.call is not None
        reason = (
            f"{root.argument} of {root.call.name} is for {root.count} {root.unit}s whatever the "
            "batch: the step fixes this size, or the tensors come in a container"
        )
        return Problem(root.call.node, "padding unknown", reason, let_sizes_grow(trace))
    reason = "no op in the step says which arguments have an entry per request or token"
    return Problem(node, "padding unknown", reason, "declare inputs, or the ops: mtpgraph.declare")


def _dims_that_grow(
    trace: Trace, roles: Roles, names: Mapping[fx.Node, str]
) -> tuple[dict[fx.Node, int], list[Problem]]:
    found: dict[fx.Node, int] = {}
    problems = []
    for node, tensor in trace.inputs.items():
        dims = roles.dims(tensor)
        if not dims:
            continue
        if len(dims) == 1 and roles.spec(tensor.shape[dims[0]]) is not None:
            found[node] = dims[0]
        else:
            reason = (
                f"{names[node]} has sizes {_sizes_of(tensor, roles)}: padding takes one dimension "
                "that has an entry per request or token"
            )
            problems.append(Problem(node, "padding unknown", reason, "declare inputs"))
    return found, problems


def _sizes_of(tensor: Tensor, roles: Roles) -> str:
    names = {roles.requests: "requests", roles.tokens: "tokens"}
    return ", ".join(
        f"{names.get(roles.size(size)) or roles.size(size)} in dimension {dim}"
        for dim, size in enumerate(tensor.shape)
        if roles.grows(size)
    )


def _row(
    name: str,
    dim: int,
    roles: Roles,
    fill: Fill,
    flow: PadFlow,
    trace: Trace,
    size: Any,
) -> InputRow:
    spec = roles.spec(size)
    assert spec is not None
    needs = flow.needs.get(name)
    because, node = "", None
    if needs:
        because, node = f"{needs[0].call.name}({needs[0].argument})", needs[0].call.node
    else:
        root = _root_of(size, spec[1], roles, trace)
        if root is not None:
            because, node = str(root), root.call.node if root.call is not None else None
    file, line = _compat.user_frame(node) if node is not None else ("", 0)
    return InputRow(name, dim, spec[0], spec[1], fill, because, file, line)


def _root_of(size: Any, extra: int, roles: Roles, trace: Trace) -> Root | None:
    count = roles.size(expression(size) - extra)
    for call in trace.calls:
        for root in roots_of(call):
            if roles.size(root.count) == count:
                return root
    return None


def tokens_per_request(roles: Roles, trace: Trace) -> int | None:
    """Tokens of each request, where the graph fixes them."""
    if roles.requests is None or roles.tokens is None:
        return None
    ratio: Any = roles.tokens / roles.requests
    for tensor in trace.inputs.values():
        for size in tensor.shape:
            symbol, hint = expression(size), _compat.size_hint(size)
            # a factor that does not grow is what it is in this call
            if symbol in ratio.free_symbols - roles.symbols and hint is not None:
                ratio = ratio.subs(symbol, hint)
    return int(ratio) if ratio.is_Integer else None
