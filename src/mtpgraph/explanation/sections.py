"""An explanation as titled sections of sentences and tables, for any terminal."""

import dataclasses
from collections.abc import Iterator, Sequence

from . import words
from .record import Explanation, Op
from .tree import lines_of, walk


@dataclasses.dataclass
class Section:
    """A title, sentences, lines, and a table if there are rows.

    Attributes:
        title: of the section
        prose: sentences, wrapped where that helps
        text: lines that stay whole, so that they can be searched for
        head, rows: the table
        right: columns whose numbers line up at the right
    """

    title: str
    prose: Sequence[str] = ()
    text: list[str] = dataclasses.field(default_factory=list)
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    right: Sequence[int] = ()


def sections(explanation: Explanation) -> Iterator[Section]:
    """The sections in the order a reader needs them."""
    yield Section(
        explanation.name,
        [
            explanation.verdict,
            f"{'; '.join(words.summary(explanation))} (torch {explanation.torch})",
            *(f"Note: {note}" for note in explanation.notes),
        ],
    )
    if explanation.breaks:
        yield Section("Graph breaks", text=list(_breaks(explanation)))
    if explanation.findings:
        yield Section("Findings", text=list(_findings(explanation)))
    yield _passes(explanation)
    yield _inputs(explanation)
    yield from _recompiles(explanation)
    yield _padding(explanation)
    for number, graph in enumerate(explanation.graphs, start=1):
        title = f"Ops of graph {number}" if len(explanation.graphs) > 1 else "Ops"
        yield Section(title, text=list(_ops(graph)))
    yield _largest(explanation)


def _breaks(explanation: Explanation) -> Iterator[str]:
    for one in explanation.breaks:
        yield f"{words.place(one.file, one.line)}: {one.code}"
        yield f"    {one.reason}"
        if one.host_sync:
            yield "    the host waits for the device here"
        yield f"    instead: {one.remedy}"


def _findings(explanation: Explanation) -> Iterator[str]:
    for one in explanation.findings:
        yield f"{words.place(one.file, one.line) or one.op}: {one.code or one.op}"
        yield f"    {one.kind}: {one.reason}"
        if one.remedy:
            yield f"    instead: {one.remedy}"


def _passes(explanation: Explanation) -> Section:
    rows, text = [], []
    for one in explanation.passes:
        done = "disabled" if one.disabled else str(one.count)
        rows.append((one.name, done, one.rewrite))
        for finding in one.left_alone:
            at = words.place(finding.file, finding.line)
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            text.append(f"{one.name} left {at or finding.op} alone: {finding.reason}{remedy}")
    return Section("Passes", (), text, ("pass", "rewrites", "what it does"), rows, (1,))


def _inputs(explanation: Explanation) -> Section:
    rows = [
        (one.name, words.shape(one), "written" if one.written else "")
        for one in explanation.inputs
        if not one.parameter
    ]
    weights = sum(one.parameter for one in explanation.inputs)
    text = [words.STARS]
    if weights:
        text.append(f"Besides: {weights} weights, buffers and numbers of modules.")
    return Section("Inputs", text if rows else text[1:], [], ("input", "value", ""), rows)


def _recompiles(explanation: Explanation) -> Iterator[Section]:
    often, fixed = words.seldom(explanation.recompiles)
    rows = [
        (one.name, one.value, words.short_path(one.where), one.code)
        for one in often
    ]  # fmt: skip
    text = [] if often else ["Only other dtypes, devices or structures of the arguments."]
    if fixed:
        states = sum(one.kind == "state" for one in fixed)
        kinds = (
            (states, "size", "states"),
            (len(fixed) - states, "constant", "modules and globals"),
        )
        said = [f"{words.count(number, what)} of {of}" for number, what, of in kinds if number]
        text.append(f"And what changes with the model alone: {', '.join(said)}.")
    yield Section("Compiles anew for another", text, [], ("what", "now", "line", "why"), rows)


def _padding(explanation: Explanation) -> Section:
    rows = [
        (one.name, "" if one.dim is None else str(one.dim), one.per, one.pad, one.why)
        for one in explanation.padding or []
    ]
    return Section(
        "Padding", [explanation.padding_verdict], [], ("input", "dim", "per", "pad", "why"), rows
    )


def _ops(graph: Sequence[Op]) -> Iterator[str]:
    """Every line of the user's with, below it, what it calls."""
    file = ""
    for depth, line, before in walk(lines_of(graph)):
        indent = "  " * depth
        if not line.file:
            yield f"{indent}      {line.times} times in a row, {words.moved(line.all_ops)} in all:"
            continue
        if line.file != file:
            file = line.file
            yield f"{indent}{words.short_path(file)}"
        times = f"  ({line.times} times in a row)" if line.times > 1 else ""
        yield f"{indent}{line.line:>5} {line.code}{times}"
        names = [f"*{name}" if ours else name for name, ours in words.op_names(line.first)]
        said = [" ".join(names)] if names else []
        if changed := words.mutated(line):
            said.append(f"writes {', '.join(changed)}")
        if before is not None:
            said.append(f"calls what line {before.line} does")
        whole = before is not None or (line.times > 1 and not names)
        if moved := words.moved(line.all_ops if whole else line.ops):
            said.append(moved)
        if said:
            yield f"{indent}      -> {'; '.join(said)}"


def _largest(explanation: Explanation) -> Section:
    rows = []
    for one in words.largest(explanation.ops):
        moved = [words.size(number, one.at_most) for number in (one.read, one.written)]
        rows.append((one.name, str(one.calls), *moved, one.where))
    head = ("op", "calls", "read", "written", "line")
    return Section("Most bytes", [words.WHY_BYTES], [], head, rows, (1, 2, 3))
