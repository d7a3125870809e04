"""What a pass has to say to the user: which line of theirs, why, and what to write instead.

A pass calls ``note`` wherever it finds something or leaves something alone. Nothing is kept unless
somebody collects: ``with collect() as findings``.
"""

import contextlib
import contextvars
import dataclasses
import linecache
from collections.abc import Iterator, Sequence
from typing import Literal

from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from ._compat import user_frame

Kind = Literal[
    "left alone",
    "host sync",
    "mutation hazard",
    "rows mixed",
    "batch size as value",
    "padding unknown",
    "engine fallback",
]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a pass found in a graph.

    Attributes:
        kind: what it is
        found_by: name of the pass
        op: what the node calls
        file, line, code: where in the user's source; empty, 0 and empty where the tracer kept none
        reason: why it matters
        remedy: what to write instead; empty if there is nothing to do
    """

    kind: Kind
    found_by: str
    op: str
    file: str
    line: int
    code: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file else ""
        code = f"`{self.code}`: " if self.code else f"{self.op}: "
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{where}{code}{self.reason}{remedy}"


class ReportError(ValueError):
    """What passes found rules out what the caller asked for.

    Attributes:
        findings: all of it; the message has the first
    """

    def __init__(self, what: str, findings: Sequence[Finding]) -> None:
        more = f" ({len(findings) - 1} more findings)" if len(findings) > 1 else ""
        super().__init__(f"{what}: {findings[0]}{more}")
        self.findings = tuple(findings)


_collected: contextvars.ContextVar[list[Finding] | None] = contextvars.ContextVar(
    "findings", default=None
)


@contextlib.contextmanager
def collect() -> Iterator[list[Finding]]:
    """Keep what passes note inside; the list fills as they do."""
    findings: list[Finding] = []
    token = _collected.set(findings)
    try:
        yield findings
    finally:
        _collected.reset(token)


def note(node: fx.Node, kind: Kind, found_by: str, reason: str, remedy: str = "") -> None:
    """Say something about a node.

    Args:
        node: what it is about; its line in the user's source goes with it
        kind: what was found
        found_by: name of the pass
        reason: why it matters, one clause, lower case, without a full stop
        remedy: what to write instead, one clause
    """
    findings = _collected.get()
    if findings is None:
        return
    file, line = user_frame(node)
    code = source_line(file, line)
    finding = Finding(kind, found_by, name_of(node), file, line, code, reason, remedy)
    if finding not in findings:
        findings.append(finding)


def source_line(file: str, line: int) -> str:
    """The text of a line, stripped; empty where it or its file is not known."""
    return linecache.getline(file, line).strip() if file else ""


def name_of(node: fx.Node) -> str:
    """What a node calls, as a user would write it."""
    if node.op in ("placeholder", "get_attr", "output"):
        return f"{node.op} {node.target}"
    if isinstance(node.target, str):
        return f".{node.target}()"
    if isinstance(node.target, OpOverload | OpOverloadPacket):
        return str(node.target).removesuffix(".default")
    name = getattr(node.target, "__name__", str(node.target))
    module = getattr(node.target, "__module__", None) or ""
    return f"{module}.{name}" if module.startswith("torch") else name
