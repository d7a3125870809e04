"""``mtpgraph bench plot``: the rows of ``mtpgraph bench step`` as a table and as a picture."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``mtpgraph bench plot``."""
    parser.add_argument("results", type=Path, help="JSON lines that mtpgraph bench step wrote")
    parser.add_argument("--out", type=Path, default=None, help="picture to write, .svg or .png")


def run(args: argparse.Namespace) -> int:
    """Print the table, draw the picture; 2 without rows to show or without matplotlib."""
    rows = [json.loads(line) for line in args.results.read_text().splitlines() if line]
    steps = [row for row in rows if type(row.get("batch")) is int]
    if not steps:
        print(f"mtpgraph bench: no step in {args.results}", file=sys.stderr)
        return 2
    print(table(steps))
    if args.out is None:
        return 0
    try:
        draw(steps, args.out)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("mtpgraph bench: pictures need pip install 'mtpgraph[plot]'", file=sys.stderr)
        return 2
    return 0


def table(rows: Sequence[Row]) -> str:
    """Markdown: milliseconds of ``mtpgraph``, and of every other way how many times as long."""
    ways = sorted({row["way"] for row in rows} - {"mtpgraph"})
    times = {(row["way"], *_case(row)): row for row in rows}
    head = ["next_n", "context", "requests", "mtpgraph, ms", "sum of its kernels, ms", "tokens/s"]
    lines = [head + ways, ["---"] * (len(head) + len(ways))]
    for case in sorted({_case(row) for row in rows}):
        ours = times.get(("mtpgraph", *case))
        if ours is None:
            continue
        cells = [*map(str, case), f"{ours['step_ms']:.2f}", f"{ours['kernel_ms']:.2f}"]
        cells.append(f"{ours['tokens_per_s']:.0f}")
        for way in ways:
            other = times.get((way, *case))
            cells.append(f"{other['step_ms'] / ours['step_ms']:.2f}x" if other else "")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(rows: Sequence[Row], out: Path) -> None:
    """Step time over batch size, one panel for each query length and context.

    Raises:
        ModuleNotFoundError: matplotlib is not installed
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")

    panels = sorted({(row["next_n"], row["context"]) for row in rows})
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4 * len(panels), 3.6), sharey=True, squeeze=False
    )
    for (next_n, context), axis in zip(panels, axes[0], strict=True):
        for way in sorted({row["way"] for row in rows}, reverse=True):
            points = sorted(
                (row["batch"], row["step_ms"])
                for row in rows
                if (row["way"], row["next_n"], row["context"]) == (way, next_n, context)
            )
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=way)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"next_n {next_n}, context {context}")
        axis.set_xlabel("requests")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("step, ms")
    axes[0][0].legend()
    figure.suptitle(f"{rows[0]['layers']} layers, {rows[0]['card']}, torch {rows[0]['torch']}")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot.close(figure)


def _case(row: Row) -> tuple[int, int, int]:
    return row["next_n"], row["context"], row["batch"]
