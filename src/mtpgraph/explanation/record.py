"""What there is to say about one compiled step; plain data."""

import dataclasses
from typing import Any

from ..compile_passes.report import Finding

PROBLEMS = ("host sync", "mutation hazard")
"""Kinds of findings that make a step fail the examination; graph breaks do so too."""


@dataclasses.dataclass(frozen=True)
class Break:
    """A place where the step leaves the graph.

    Attributes:
        file, line, code: the user's line
        reason: what the compiler could not put into the graph
        remedy: what to write instead
        host_sync: the host waits there for a value of the device
    """

    file: str
    line: int
    code: str
    reason: str
    remedy: str
    host_sync: bool


@dataclasses.dataclass(frozen=True)
class Op:
    """One call in a graph, after the passes.

    Attributes:
        name: what is called
        ours: it is an op of this package
        frames: file and line of the user's, outermost call first
        outputs: the results, as ``float32[4, 8]``
        mutates: inputs of the step and other tensors that it writes to
        read, written: bytes
        at_most: the bytes are a bound, for what is touched depends on values
    """

    name: str
    ours: bool
    frames: tuple[tuple[str, int], ...]
    outputs: str
    mutates: tuple[str, ...]
    read: int
    written: int
    at_most: bool

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.read + self.written


@dataclasses.dataclass(frozen=True)
class Input:
    """A tensor or number that a graph takes.

    Attributes:
        name: as the user reaches it, ``caches[0].conv``
        dtype: of a tensor; the type of a number
        sizes: its sizes in this call
        free: for each size, whether others of at least 2 run the same code
        written: the graph writes to it
        parameter: a weight or buffer of a module, not an argument
    """

    name: str
    dtype: str
    sizes: tuple[int | None, ...]
    free: tuple[bool, ...]
    written: bool
    parameter: bool


@dataclasses.dataclass(frozen=True)
class Recompile:
    """Something that another value of compiles the step anew.

    Attributes:
        kind: "size", a dimension of a tensor; "value", an argument; "state", a dimension of a
            tensor that the step writes to; "constant", an attribute of an object or a global. The
            last two change seldom
        name: what it is
        value: what it was in this call
        where, code: the user's line that needs it, as far as is known
    """

    kind: str
    name: str
    value: str
    where: str
    code: str


@dataclasses.dataclass(frozen=True)
class PassReport:
    """What a pass did.

    Attributes:
        name: of the pass
        rewrite: what it does, in one line
        count: rewrites
        disabled: the options leave it out
        left_alone: what it saw and did not rewrite
    """

    name: str
    rewrite: str
    count: int
    disabled: bool
    left_alone: tuple[Finding, ...]


@dataclasses.dataclass(frozen=True)
class Padding:
    """How an input is padded: along ``dim``, one entry per request or token, with ``pad``."""

    name: str
    dim: int | None
    per: str
    pad: str
    why: str


@dataclasses.dataclass
class Explanation:
    """What :func:`mtpgraph.explain` found; prints as text, and as a page in a notebook.

    Attributes:
        name: of the step
        torch: its version
        graphs: the ops of each graph, in order
        inputs: what the first graph takes
        breaks: where the step leaves the graph
        findings: what the passes noted, but for what they left alone
        passes: what each pass did, in order
        recompiles: what compiles the step anew
        padding: how inputs are padded; ``None`` where that is not known
        padding_verdict: whether it may be, in a sentence
        notes: limits of this explanation, and inputs that Inductor does not take
    """

    name: str
    torch: str
    graphs: list[list[Op]] = dataclasses.field(default_factory=list)
    inputs: list[Input] = dataclasses.field(default_factory=list)
    breaks: list[Break] = dataclasses.field(default_factory=list)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    passes: list[PassReport] = dataclasses.field(default_factory=list)
    recompiles: list[Recompile] = dataclasses.field(default_factory=list)
    padding: list[Padding] | None = None
    padding_verdict: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def ops(self) -> list[Op]:
        """The ops of all graphs."""
        return [op for graph in self.graphs for op in graph]

    @property
    def bytes(self) -> int:
        """Bytes that all ops read and write."""
        return sum(op.bytes for op in self.ops)

    @property
    def problems(self) -> list[Break | Finding]:
        """Graph breaks, host syncs and mutation hazards."""
        return [*self.breaks, *(f for f in self.findings if f.kind in PROBLEMS)]

    @property
    def ok(self) -> bool:
        """One graph, and no problem in it."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        if not self.graphs and self.ok:
            return "No graph: nothing to trace."
        if self.ok:
            return "One graph, no host sync, no mutation hazard."
        syncs = sum(f.kind == "host sync" for f in self.findings)
        hazards = sum(f.kind == "mutation hazard" for f in self.findings)
        counts = (
            (len(self.breaks), "graph break"), (syncs, "host sync"), (hazards, "mutation hazard")
        )  # fmt: skip
        said = [f"{count} {what}{'s' * (count > 1)}" for count, what in counts if count]
        return f"{', '.join(said)}."

    def asdict(self) -> dict[str, Any]:
        """A plain copy, ready for JSON."""
        values = dataclasses.asdict(self)
        for ops, graph in zip(values["graphs"], self.graphs, strict=True):
            for value, op in zip(ops, graph, strict=True):
                value["bytes"] = op.bytes
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "bytes": self.bytes,
            **values,
        }

    def __str__(self) -> str:
        from .text import render

        return render(self)

    def html(self) -> str:
        """One self-contained page."""
        from .page import page

        return page(self)

    def _repr_html_(self) -> str:
        from .page import fragment

        return fragment(self)
