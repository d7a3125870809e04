"""What text and page say alike: numbers, places and ops in few characters."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from .record import Explanation, Input, Op, Recompile
from .tree import Line

_PREFIXES = ("torch._C._nn.", "torch.nn.functional.", "torch.functional.", "torch.", "mtpgraph.")


def count(number: int, what: str) -> str:
    """``1 graph``, ``2 graphs``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size(number: int, at_most: bool = False) -> str:
    """Bytes with three digits and a unit."""
    value, unit = float(number), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    digits = f"{value:.0f}" if unit == "B" or value >= 999.5 else f"{value:.3g}"
    return f"{'at most ' if at_most else ''}{digits} {unit}"


def place(file: str, line: int) -> str:
    """A line of a file, relative to the working directory where it lies below."""
    return f"{short_path(file)}:{line}" if file else ""


def short_path(file: str) -> str:
    """A path, relative to the working directory where it lies below."""
    try:
        return str(Path(file).relative_to(os.getcwd()))
    except ValueError:
        return file


def op_names(ops: Iterable[Op]) -> list[tuple[str, bool]]:
    """What a line calls, in order, and whether it is ours; picking out of a tuple goes unsaid."""
    names = []
    for op in ops:
        if op.name == "getitem" and not op.bytes:
            continue
        names.append((plain(op.name), op.ours))
    return names


def plain(name: str) -> str:
    """The name of an op without its namespace: ``.sum()`` is sum."""
    name = name.strip(".()")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def mutated(line: Line) -> list[str]:
    """What the ops of a line write to."""
    return list(dict.fromkeys(name for op in line.ops for name in op.mutates))


def summary(explanation: Explanation) -> list[str]:
    """The size of it in a few phrases."""
    ops = explanation.ops
    bound = any(op.at_most for op in ops)
    return [
        count(len(explanation.graphs), "graph"),
        count(len(explanation.breaks), "graph break"),
        f"{count(len(ops), 'op')}, {sum(op.ours for op in ops)} of mtpgraph",
        f"{size(explanation.bytes, bound)} read and written",
    ]


def moved(ops: Sequence[Op]) -> str:
    """Bytes that some ops read and write; nothing if they move none."""
    total = sum(op.bytes for op in ops)
    return size(total, any(op.at_most for op in ops)) if total else ""


@dataclasses.dataclass
class Mover:
    """The calls of one op on one line, together."""

    name: str
    where: str
    calls: int = 0
    read: int = 0
    written: int = 0
    at_most: bool = False


def largest(ops: Iterable[Op], limit: int = 8) -> list[Mover]:
    """The ops that move most, the calls from one line together, largest first."""
    movers: dict[tuple[str, str], Mover] = {}
    for op in ops:
        where = place(*op.frames[-1]) if op.frames else ""
        name = plain(op.name) if not op.ours else op.name
        mover = movers.setdefault((name, where), Mover(name, where))
        mover.calls += 1
        mover.read += op.read
        mover.written += op.written
        mover.at_most |= op.at_most
    moving = [mover for mover in movers.values() if mover.read + mover.written]
    return sorted(moving, key=lambda mover: -mover.read - mover.written)[:limit]


def shape(one: Input) -> str:
    """``float32[4*, 8]``: a star on a size that may change."""
    if one.dtype in ("int", "float"):
        return one.dtype
    sizes = (
        f"{'?' if s is None else s}{'*' * f}" for s, f in zip(one.sizes, one.free, strict=True)
    )
    return f"{one.dtype}[{', '.join(sizes)}]"


def seldom(recompiles: Sequence[Recompile]) -> tuple[list[Recompile], list[Recompile]]:
    """What may change from call to call, and what changes with the model alone."""
    fixed = [r for r in recompiles if r.kind in ("state", "constant")]
    return [r for r in recompiles if r not in fixed], fixed


WHY_BYTES = (
    "Each op as if it ran alone and met a cold cache; what a compiler fuses moves less. Paged "
    "caches and state pools count by what the kernels touch, at most where that depends on values."
)
STARS = (
    "A star marks a size that may change without compiling anew: to any of at least 2, and "
    "together with those that have to equal it."
)
