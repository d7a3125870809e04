"""``mtpgraph bench plot``: rows of ``mtpgraph bench step`` or ``indexer``, a table and a picture.

The picture of an indexer's rows is a roofline: what was computed in a second over what had to be
computed for each byte that had to be moved. Top-k computes nothing; it has a panel of times.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import bench_indexer

Row = dict[str, Any]
COLOURS = {"logits": "C0", "select": "C1", "mla": "C2", "topk": "C3"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``mtpgraph bench plot``."""
    parser.add_argument("results", type=Path, help="JSON lines of mtpgraph bench step or indexer")
    parser.add_argument("--out", type=Path, default=None, help="picture to write, .svg or .png")


def run(args: argparse.Namespace) -> int:
    """Print the table, draw the picture; 2 without rows to show or without matplotlib."""
    rows = [json.loads(line) for line in args.results.read_text().splitlines() if line]
    steps = [row for row in rows if type(row.get("batch")) is int]
    shapes = [row for row in rows if "what" in row]
    if bool(steps) == bool(shapes):
        why = "steps and shapes in one file" if steps else "no step or shape"
        print(f"mtpgraph bench: {why}: {args.results}", file=sys.stderr)
        return 2
    print(table(steps) if steps else bench_indexer.table(shapes))
    if args.out is None:
        return 0
    try:
        if steps:
            draw(steps, args.out)
        else:
            draw_roofline(shapes, args.out)
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
    pyplot = _pyplot()
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
    _save(pyplot, figure, out)


def draw_roofline(rows: Sequence[Row], out: Path) -> None:
    """Ours (filled) and the best peer (hollow) under the card's ceilings.

    Raises:
        ModuleNotFoundError: matplotlib is not installed
    """
    computing = [row for row in rows if row["flops"]]
    selecting = [row for row in rows if not row["flops"]]
    panels = [(_roof, computing)] if computing else []
    panels += [(_times, selecting)] if selecting else []
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.4), squeeze=False)
    for (draw_panel, of_panel), axis in zip(panels, axes[0], strict=True):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        draw_panel(axis, of_panel)
        axis.legend(fontsize=8)
    first = rows[0]
    figure.suptitle(f"mtpgraph filled, best peer hollow; {first['card']}, torch {first['torch']}")
    _save(pyplot, figure, out)


def _roof(axis: Any, rows: Sequence[Row]) -> None:
    ceilings = rows[0]["ceilings"]
    reached = [row["flops"] / row["bytes"] for row in rows]
    intensities = [min(*reached, 16) / 2 * 1.1**i for i in range(60)]
    for name, style in (("fp8", "-"), ("bf16", "--")):
        roof = [min(ceilings[f"{name}_flops"], ceilings["copy_bytes"] * x) for x in intensities]
        heights = [flops / 1e12 for flops in roof]
        axis.plot(intensities, heights, style, color="0.6", label=f"copy, {name} matrix product")
    for what in sorted({row["what"] for row in rows}):
        part = [row for row in rows if row["what"] == what]
        _points(axis, what, part, lambda row: row["flops"] / row["bytes"], lambda row: row["flops"])
    axis.set_xlabel("operations for each byte")
    axis.set_ylabel("TFLOP/s")


def _times(axis: Any, rows: Sequence[Row]) -> None:
    sizes = sorted(row["bytes"] for row in rows)
    floors = [size / rows[0]["ceilings"]["copy_bytes"] * 1e6 for size in sizes]
    axis.plot([size / 1e6 for size in sizes], floors, color="0.6", label="at the rate of a copy")
    _points(axis, "topk", rows, lambda row: row["bytes"] / 1e6, lambda row: None)
    axis.set_xlabel("megabytes of rows and indices")
    axis.set_ylabel("microseconds")


def _points(
    axis: Any,
    what: str,
    rows: Sequence[Row],
    x: Callable[[Row], float],
    flops: Callable[[Row], int | None],
) -> None:
    """A mark a row for ours and one for the best peer: TFLOP/s, or microseconds without flops."""
    colour = COLOURS[what]
    for key, fill in (("us", colour), ("best_peer_us", "none")):
        timed = [row for row in rows if key in row]
        places = [x(row) for row in timed]
        counts = [flops(row) for row in timed]
        heights = [
            row[key] if count is None else count / row[key] / 1e6
            for row, count in zip(timed, counts, strict=True)
        ]
        label = what if key == "us" else None
        axis.scatter(places, heights, s=24, facecolors=fill, edgecolors=colour, label=label)


def _pyplot() -> Any:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    return importlib.import_module("matplotlib.pyplot")


def _save(pyplot: Any, figure: Any, out: Path) -> None:
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot.close(figure)


def _case(row: Row) -> tuple[int, int, int]:
    return row["next_n"], row["context"], row["batch"]
