"""The ops of a graph as the user's calls: lines, the calls they make, and repetitions in one."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ..compile_passes.report import source_line
from .record import Op


@dataclasses.dataclass
class Line:
    """A line of the user's with the ops that it calls itself and the lines that it runs.

    Attributes:
        file, line: where
        ops: called on this very line
        inside: the lines of the functions that it calls, in order
        times: how often the same follows in a row; ops and bytes count all of them
        once: the ops of the first time, where there are more
    """

    file: str
    line: int
    ops: list[Op] = dataclasses.field(default_factory=list)
    inside: list["Line"] = dataclasses.field(default_factory=list)
    times: int = 1
    once: list[Op] | None = None

    @property
    def code(self) -> str:
        """The text of the line."""
        return source_line(self.file, self.line)

    @property
    def all_ops(self) -> list[Op]:
        """The ops of this line and of those inside."""
        return [*self.ops, *(op for line in self.inside for op in line.all_ops)]

    @property
    def first(self) -> list[Op]:
        """The ops of the line itself, once."""
        return self.ops if self.once is None else self.once

    @property
    def bytes(self) -> int:
        """Read and written by all of them."""
        return sum(op.bytes for op in self.all_ops)

    @property
    def own_bytes(self) -> int:
        """Read and written by the ops of the line itself."""
        return sum(op.bytes for op in self.ops)

    @property
    def at_most(self) -> bool:
        """The bytes are a bound."""
        return any(op.at_most for op in self.all_ops)

    @property
    def key(self) -> Any:
        """Equal for two that differ in sizes alone."""
        names = tuple(op.name for op in self.first)
        return self.file, self.line, names, self.times, tuple(line.key for line in self.inside)


def lines_of(ops: Sequence[Op]) -> list[Line]:
    """The outermost lines of a graph, repetitions folded."""
    return _fold(_group(ops, 0))


def _group(ops: Sequence[Op], depth: int) -> list[Line]:
    lines: list[Line] = []
    deeper: list[list[Op]] = []
    for op in ops:
        file, line = op.frames[depth] if depth < len(op.frames) else ("", 0)
        if not lines or (lines[-1].file, lines[-1].line) != (file, line):
            lines.append(Line(file, line))
            deeper.append([])
        if depth + 1 < len(op.frames):
            deeper[-1].append(op)
        else:
            lines[-1].ops.append(op)
    for line, inside in zip(lines, deeper, strict=True):
        line.inside = _fold(_group(inside, depth + 1))
    return lines


def _fold(lines: list[Line]) -> list[Line]:
    """Put what follows in a row several times into one; the longest saving first."""
    keys = [line.key for line in lines]
    folded: list[Line] = []
    start = 0
    while start < len(lines):
        length, times = _repetition(keys, start)
        block = [lines[start + i * length : start + (i + 1) * length] for i in range(times)]
        folded += lines[start : start + 1] if times == 1 else [_merged(block)]
        start += length * times
    return folded


def _repetition(keys: list[Any], start: int) -> tuple[int, int]:
    """Length of the block that repeats from ``start`` on, and how often it stands there."""
    best = (1, 1)
    for length in range(1, (len(keys) - start) // 2 + 1):
        if keys[start] != keys[start + length]:
            continue
        times = 1
        block = keys[start : start + length]
        while keys[start + times * length : start + (times + 1) * length] == block:
            times += 1
        if (times - 1) * length > (best[1] - 1) * best[0]:
            best = (length, times)
    return best


def _merged(blocks: list[list[Line]]) -> Line:
    if len(blocks[0]) == 1:
        parts = [line for block in blocks for line in block]
        return _sum(parts, len(blocks))
    # several lines repeat together: a line without a place of its own holds them
    inside = [_sum([block[i] for block in blocks], 1) for i in range(len(blocks[0]))]
    return Line("", 0, [], inside, len(blocks))


def _sum(parts: list[Line], times: int) -> Line:
    one = parts[0]
    inside = [_sum([part.inside[i] for part in parts], 1) for i in range(len(one.inside))]
    for line, first in zip(inside, one.inside, strict=True):
        line.times = first.times
    ops = [op for part in parts for op in part.ops]
    return Line(one.file, one.line, ops, inside, times, one.first)


def walk(lines: list[Line], depth: int = 0) -> Iterator[tuple[int, Line, "Line | None"]]:
    """Every line with its depth; and, where the same lines stood before, those instead of them."""
    yield from _walk(lines, depth, {})


def _walk(
    lines: list[Line], depth: int, seen: dict[Any, Line]
) -> Iterator[tuple[int, Line, Line | None]]:
    for line in lines:
        inner = tuple(inside.key for inside in line.inside)
        before = seen.get(inner) if len(line.inside) > 2 else None
        yield depth, line, before
        if before is None:
            seen.setdefault(inner, line)
            yield from _walk(line.inside, depth + 1, seen)
