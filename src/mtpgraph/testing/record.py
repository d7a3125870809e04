"""What Dynamo compiled in a stretch of code: graphs, breaks, recompiles, and what passes found."""

import contextlib
import copy
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from ..compile_passes import _compat, graph_pass, report
from ..compile_passes.find_host_syncs import find_host_syncs
from ..compile_passes.find_mutation_hazards import find_mutation_hazards
from ..compile_passes.report import Finding
from . import remedies

# passes that find something, run over a copy of each graph
_FINDERS = (find_host_syncs, find_mutation_hazards)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something to put right, at a line of the user's.

    Attributes:
        kind: a few words for what it is
        file, line, code: where in the user's source; empty, 0 and empty where nothing is known
        reason: why it happened
        remedy: what to write instead
    """

    kind: str
    file: str
    line: int
    code: str
    reason: str
    remedy: str

    @classmethod
    def at(cls, kind: str, place: tuple[str, int], reason: str, remedy: str) -> "Problem":
        """A problem at a file and line."""
        file, line = place
        code = report.source_line(file, line)
        return cls(kind, file, line, code, reason, remedy)

    @classmethod
    def of(cls, finding: Finding) -> "Problem":
        """What a pass noted, as a problem."""
        f = finding
        return cls(f.kind, f.file, f.line, f.code or f.op, f.reason, f.remedy)

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "(no line is known)"
        code = f": `{self.code}`" if self.code else ""
        lines = [f"{where}{code}", f"    reason: {self.reason}"]
        if self.remedy:
            lines.append(f"    instead: {self.remedy}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Graph:
    """A graph that went to a backend.

    Attributes:
        function, file, line: the function it was traced from
        ops: what it calls, in order: name of the op, file and line of the user's
        recompile: the function had been compiled before
    """

    function: str
    file: str
    line: int
    ops: tuple[tuple[str, str, int], ...]
    recompile: bool


@dataclasses.dataclass
class Record:
    """Everything that was compiled while it was open. See :func:`record`.

    Attributes:
        graphs: graphs in the order of their compilation
        breaks: places where a trace left the graph
        recompiles: compilations of a function that had been compiled already
        findings: what passes noted about the graphs: those of the ``mtpgraph`` backend, and the
            search for host syncs and hazards over the graphs of any backend
        rewrites: rewrites by the name of the pass
        checks: records of the ``assert_...`` functions that ran meanwhile
    """

    graphs: list[Graph] = dataclasses.field(default_factory=list)
    breaks: list[Problem] = dataclasses.field(default_factory=list)
    recompiles: list[Problem] = dataclasses.field(default_factory=list)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    rewrites: Counter[str] = dataclasses.field(default_factory=Counter)
    checks: list["Record"] = dataclasses.field(default_factory=list)

    @property
    def host_syncs(self) -> list[Finding]:
        """Ops in the graphs that make the host wait for the device."""
        return [finding for finding in self.findings if finding.kind == "host sync"]

    @property
    def first_graphs(self) -> list[Graph]:
        """Graphs of first compilations, those of recompiles left out."""
        return [graph for graph in self.graphs if not graph.recompile]

    def __bool__(self) -> bool:
        """Something was compiled, or tried to be."""
        return bool(self.graphs or self.breaks or self.recompiles or any(self.checks))

    def asdict(self) -> dict[str, Any]:
        """A plain copy, ready for JSON."""
        return {
            "graphs": [dataclasses.asdict(graph) for graph in self.graphs],
            "breaks": [dataclasses.asdict(problem) for problem in self.breaks],
            "recompiles": [dataclasses.asdict(problem) for problem in self.recompiles],
            "findings": [dataclasses.asdict(Problem.of(finding)) for finding in self.findings],
            "rewrites": dict(self.rewrites),
            "checks": [check.asdict() for check in self.checks],
        }


_open: list[Record] = []


@contextlib.contextmanager
def record(into: Record | None = None, *, check: bool = False) -> Iterator[Record]:
    """Record what Dynamo compiles inside, by any backend.

    Args:
        into: a record to add to, a new one by default
        check: belongs to an ``assert_...`` function; a record around it lists it under ``checks``
            instead of counting its graphs as its own
    """
    found = Record() if into is None else into
    with contextlib.ExitStack() as stack:
        stack.enter_context(_compat.observe_compiles(_Observer(found)))
        stack.enter_context(_passes_recorded(found))
        if check and _open:
            _open[-1].checks.append(found)
        _open.append(found)
        stack.callback(_open.pop)
        yield found


class _Observer:
    def __init__(self, found: Record) -> None:
        self._found = found
        self._again: set[str] = set()
        self._last: tuple[str, int] = ("", 0)

    def graph(
        self, compile_id: str, attempt: int, gm: fx.GraphModule, place: _compat.Place
    ) -> Callable[[], None]:
        calls = [node for node in gm.graph.nodes if node.op.startswith("call")]
        ops = tuple((report.name_of(node), *_compat.user_frame(node)) for node in calls)
        graph = Graph(*place, ops, compile_id in self._again)
        findings = find(gm)

        def compiled() -> None:
            graphs = self._found.graphs
            if graphs and self._last[0] == compile_id and self._last[1] < attempt:
                graphs.pop()
            self._last = (compile_id, attempt)
            graphs.append(graph)
            for finding in findings:
                _add(self._found.findings, finding)

        return compiled

    def graph_break(self, message: str, stack_trace: str) -> None:
        frames = _compat.user_frames(stack_trace)
        kind, reason, remedy = remedies.of_break(message)
        _add(
            self._found.breaks, Problem.at(kind, frames[-1] if frames else ("", 0), reason, remedy)
        )

    def recompile(
        self, compile_id: str, reasons: list[str], stack_trace: str, place: _compat.Place
    ) -> None:
        self._again.add(compile_id)
        frames = _compat.user_frames(stack_trace) if stack_trace else []
        guard = remedies.read_guard(reasons[0] if reasons else "")
        where = frames[-1] if frames else remedies.place_of_guard(guard, place)
        kind, reason, remedy = remedies.of_recompile(guard, place[0])
        # every recompile counts, a second one at the same line too
        self._found.recompiles.append(Problem.at(kind, where, reason, remedy))


def find(gm: fx.GraphModule) -> list[Finding]:
    """What the finding passes have to say about a graph, which is left as it is."""
    findings: list[Finding] = []
    for finder in _FINDERS:
        copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        try:
            with report.collect() as noted:
                finder(copied.graph)
        except Exception as error:
            # a user's test must not fail because an analysis does
            warnings.warn(f"{finder.__name__} failed on a graph: {error!r}", stacklevel=2)
        else:
            findings += noted
    return findings


@contextlib.contextmanager
def _passes_recorded(found: Record) -> Iterator[None]:
    original = graph_pass.PassManager.__call__

    def call(self: graph_pass.PassManager, gm: fx.GraphModule) -> dict[str, int]:
        counts = original(self, gm)
        if _open and _open[-1] is found:
            found.rewrites.update({name: count for name, count in counts.items() if count})
            for finding in self.findings:
                _add(found.findings, finding)
        return counts

    graph_pass.PassManager.__call__ = call
    try:
        yield
    finally:
        graph_pass.PassManager.__call__ = original


def _add(into: list[Any], item: Any) -> None:
    if item not in into:
        into.append(item)


def forget_compiled() -> None:
    """Forget every compiled function; the next call of each compiles as if for the first time."""
    _compat.reset_dynamo()
