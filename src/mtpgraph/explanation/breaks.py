"""Graph breaks: where they are, what Dynamo says about them, and what to write instead."""

import re

from ..compile_passes._compat import user_frames
from ..compile_passes.report import source_line
from ..testing.remedies import of_break
from .record import Break

_AT = re.compile(r"in user code at (.+):(\d+)$", re.MULTILINE)
_CALLED = re.compile(r"^\s*Encountered graph break when attempting to trace [^\n]*\n+")
_FELL_BACK = re.compile(r"^\s*Failed to handle graph break gracefully[^\n]*\n+")
_EXAMPLE = re.compile(r" \(e\.g\. `[^`]*`\)")
_LOOP = "graph break in loop"
_SYNCS = re.compile(r"on the host|depends on data|data-dependent")


def read_break(said: str) -> Break:
    """A graph break from the text that Dynamo logs about it.

    Where the same break came before, the text has no traceback, only the innermost line.
    """
    reason, _, trace = said.partition("User code traceback:")
    _, _, told = reason.partition("Graph Break Reason:")
    at = _AT.search(reason)
    frames = user_frames(trace) if trace else []
    file, line = frames[-1] if frames else (at[1], int(at[2])) if at else ("", 0)
    return _describe(told or reason, file, line)


def first_break(error: Exception) -> Break:
    """The graph break that a trace of the whole step failed at."""
    stack = getattr(error, "real_stack", None)
    frames = user_frames("".join(stack.format())) if stack else []
    file, line = frames[-1] if frames else ("", 0)
    return _describe(getattr(error, "msg", str(error)), file, line)


def _describe(told: str, file: str, line: int) -> Break:
    """A graph break at a line of the user's; ``told`` is Dynamo's reason with its hints."""
    # what follows belongs to the break of the loop around it
    own = told.partition("*** While handling this graph break")[0]
    for idle in (_FELL_BACK, _CALLED, _EXAMPLE):
        own = idle.sub("", own)
    kind, reason, remedy = of_break(own.strip())
    if _LOOP in told:
        reason += "; the break is in a loop, so the whole function runs without a graph"
    code = source_line(file, line)
    return Break(file, line, code, reason.rstrip("."), remedy, bool(_SYNCS.search(kind)))
