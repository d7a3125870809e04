"""Whether the graph that is about to run on padding keeps padding away from real rows.

Inference looks at a trace of its own. Dynamo may compile another graph: at the sizes that batches
are padded to, for sizes that do not grow, for another attribute of a module. What runs is what is
proven, by the rules of ``infer_batch`` and with the inputs that it found.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from torch import Tensor, fx

from . import _compat
from .infer_batch import find_problems, tokens_per_request
from .inputs import Batch, Batched, Specs
from .outline import REQUESTS, TOKENS, Outline
from .relations import Bounds, always
from .report import Finding
from .rows import record
from .size_limits import NO_LIMITS, Limits, find_limits

_NAME = "check_row_independence"


class NotProven(ValueError):
    """A graph may let padding reach real rows, or be another than that of the batch itself.

    Attributes:
        findings: why
        of_graph: it is so of the graph, and not of the size of this batch alone
    """

    def __init__(self, findings: Sequence[Finding], *, of_graph: bool = False) -> None:
        super().__init__(str(findings[0]) if findings else "")
        self.findings = tuple(findings)
        self.of_graph = of_graph


@dataclasses.dataclass(frozen=True, eq=False)
class Proof:
    """What is known of one graph.

    Attributes:
        findings: what stands against padding
        limits: what must hold of the size of a batch
        ratio: tokens of each request, where the graph fixes them
        multiple: what divides the tokens of each batch
        outline: its calls
    """

    findings: tuple[Finding, ...]
    limits: Limits
    ratio: int | None
    multiple: int
    outline: Outline


def prove_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    buffers: Mapping[str, Tensor],
    specs: Specs,
    bounds: Bounds,
    declared: bool,
) -> Proof:
    """Look at a graph as Dynamo handed it over.

    Args:
        gm: the graph, with symbols for sizes that grow
        inputs: what it was traced with
        buffers: the tensors among them that stand for arguments of the step
        specs: what each argument is
        bounds: the largest batch that is padded to
        declared: the caller declared every argument
    """
    names = _names(gm, inputs, buffers)
    outline = outline_of(gm, inputs, buffers, specs)
    trace = record(gm.graph)
    roles, findings = find_problems(trace, names, specs, bounds, declared)
    if roles is None:
        return Proof(findings, NO_LIMITS, None, 1, outline)
    ratio = tokens_per_request(roles, trace)
    limits = find_limits(trace, roles, names)
    return Proof(findings, limits, ratio, math.lcm(roles.multiple, ratio or 1), outline)


def outline_of(
    gm: fx.GraphModule, inputs: Sequence[Any], tensors: Mapping[str, Tensor], specs: Specs
) -> Outline:
    """The calls of a graph, which is not proven by that."""
    grown = {name: spec for name, spec in specs.items() if isinstance(spec, Batched)}
    return Outline(gm, _names(gm, inputs, tensors), grown)


def check_alike(
    proof: Proof, other: Outline, requests: int | None, tokens: int | None, bounds: Bounds
) -> tuple[Finding, ...]:
    """Whether a batch that a proven graph does not cover is served by it all the same.

    Args:
        proof: of the graph
        other: the calls of that batch
        requests, tokens: its size, as far as ``other`` has it for a constant
        bounds: the largest batch that is padded to
    """
    sizes = ((REQUESTS, requests), (TOKENS, tokens))
    counts = {symbol: count for symbol, count in sizes if count is not None}
    what = " and ".join(
        f"{count} {str(symbol).removesuffix('s') if count == 1 else symbol}"
        for symbol, count in counts.items()
    )
    what = f"a batch of {what}" if what else "a batch that lies in memory otherwise"
    found = proof.outline.differs(other, counts)
    if found is not None:
        return (_finding(what, found.there, found.file, found.line, found.code),)
    # the graph serves whole groups of tokens alone
    groups = sympy.Symbol("groups", integer=True, positive=True)
    most = bounds.tokens and -(-bounds.tokens // proof.multiple)
    ranges = {REQUESTS: (2, bounds.requests), groups: (2 if proof.multiple == 1 else 1, most)}
    sizes = {TOKENS: proof.multiple * groups, **counts}
    return tuple(
        _finding(what, str(relation), file, line, code)
        for relation, file, line, code in other.decisions
        if always(relation.subs(sizes), ranges) is not True
    )


def _finding(what: str, op: str, file: str, line: int, code: str) -> Finding:
    reason = f"{what} is computed otherwise than the larger one that it would be padded to"
    remedy = "compute the same for every size, and squeeze only dimensions that do not grow"
    return Finding("batch size as value", _NAME, op, file, line, code, reason, remedy)


def fixed_tokens(count: int, per: str) -> Finding:
    """A graph takes so many tokens of each request, or in each group, and others do not."""
    reason = f"at the sizes that it is padded to the step takes {count} tokens {per} for granted"
    remedy = "compute the same for every size"
    return Finding("batch size as value", _NAME, "the step", "", 0, "", reason, remedy)


def beyond_limits(requests: int, tokens: int) -> Finding:
    """The padded batch has other relations to the tables of a step than the batch itself."""
    reason = (
        f"{requests} requests of {tokens} tokens are to a table of the step what the batch that "
        "they would be padded to is not"
    )
    return Finding("padding unknown", "infer_batch", "the step", "", 0, "", reason, "")


def cannot_be_padded(error: Exception) -> Finding:
    """A step could not be traced at another size than that of the batch."""
    first = next(iter(str(error).strip().splitlines()), "")
    reason = f"the step cannot be traced at the sizes that it would be padded to ({first})"
    return Finding(
        "padding unknown", "infer_batch", "the step", "", 0, "", reason, "declare inputs"
    )


def _names(
    gm: fx.GraphModule, inputs: Sequence[Any], tensors: Mapping[str, Tensor]
) -> dict[fx.Node, str]:
    owners = {id(tensor): name for name, tensor in tensors.items()}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return {
        node: owners[id(value)]
        for node, value in zip(placeholders, inputs, strict=True)
        if id(value) in owners
    }


def outline_of_batch(
    fn: Callable[..., Any], batch: Batch, requests: int | None, tokens: int | None
) -> Outline:
    """Trace a batch at its own size. Runs nothing.

    Args:
        fn: the step
        batch: a call of it
        requests, tokens: its size, where the trace is to be for just that
    """
    tensors = {name: value.detach() for name, value in batch.batched.items()}
    for name, tensor in tensors.items():
        spec = batch.specs[name]
        count = requests if spec.per == "request" else tokens
        if count is None and tensor.shape[spec.dim] > 1:
            # a mark on another object than the caller's
            _compat.mark_dynamic(tensor, spec.dim)
    bound = batch.with_inputs(tensors)
    gm, inputs = _compat.trace_only(fn, bound.args, bound.kwargs, [])
    return outline_of(gm, inputs, tensors, batch.specs)
