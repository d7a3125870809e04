"""``mtpgraph bench indexer``: the indexer and its attention beside every peer that is found.

Parts are the logits, the top-k, both together, and sparse latent attention. Each arm is checked
before any is timed, ours exactly where the answer is exact; what is wrong is named and not timed.
An arm is a CUDA graph of several calls; the arms of a shape are replayed in turn, medians of
rounds. Inputs rotate so that they outgrow the L2, except the rows of the top-k alone: they stay
where the logits kernel leaves them, in the L2 if they fit. A top-k that is right for random rows
but not for others that a model may score is timed and marked; the fastest exact one has its column.

A peer's plan for the step (DeepGEMM's schedule, FlashMLA's split) is counted in, and in a second
arm ("apart") left out, as where many layers share it. A peer that flattens gets its rows repeated.
"""

import argparse
import dataclasses
import fnmatch
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import bench_attention as attention
from . import bench_graph, bench_peers
from . import bench_scores as scores
from .bench_graph import Arm, Plan, Timing, first_line
from .bench_peers import Peers, find_peers, fp8_kv_cache
from .bench_shapes import SHAPES, Ceilings, Logits, Mla, Shape, TopK
from .bench_step import commit, versions

Row = dict[str, Any]
Timer = Callable[[Sequence[Arm], Plan], Mapping[str, Timing | str]]
DEVICE = "cuda"
BLOCK_SIZE = attention.BLOCK_SIZE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``mtpgraph bench indexer``."""
    parser.add_argument("--what", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--shapes", nargs="+", default=["*"], help="names to take, such as 64x32K-n2 or '*-n4'"
    )
    parser.add_argument("--rounds", type=int, default=15, help="replays of each arm")
    parser.add_argument(
        "--peers", type=Path, default=None, help="folder with peers that are not installed"
    )
    parser.add_argument("--skip", nargs="*", choices=list(bench_peers.SOURCES), default=[])
    parser.add_argument(
        "--check", action="store_true", help="check every arm, which compiles it, and time none"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON lines to append to")
    parser.add_argument("--commit", default=commit(), help="what is measured, for the JSON lines")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 where ours is wrong or fails, 2 where nothing can be measured."""
    shapes = chosen_shapes(args.what, args.shapes)
    if not shapes:
        names = ", ".join(shape.name for what in args.what for shape in SHAPES[what])
        print(
            f"mtpgraph bench: no shape is named {args.shapes}; there are {names}", file=sys.stderr
        )
        return 2
    if args.peers is not None and not args.peers.is_dir():
        print(f"mtpgraph bench: --peers {args.peers} is no folder", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("mtpgraph bench: needs a CUDA card", file=sys.stderr)
        return 2
    started = time.perf_counter()
    torch.manual_seed(0)
    device = torch.device(DEVICE)
    with torch.no_grad():
        peers = find_peers(args.peers, args.skip)
        ceilings = bench_graph.measure_ceilings(device)
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        print(heading(peers, ceilings))
        facts = versions() | {"commit": args.commit, "ceilings": dataclasses.asdict(ceilings)}
        timer: Timer = _no_times if args.check else bench_graph.time_arms
        rows = []
        for shape, arms, plan in each_shape(shapes, peers, ceilings, l2_bytes, args.rounds, device):
            row = measure(shape, arms, plan, ceilings, timer)
            rows.append(row)
            keep(row | facts, None if args.check else args.out)
    if not args.check:
        print(table(rows))
    print(f"{len(rows)} shapes in {time.perf_counter() - started:.0f} s")
    wrong = {name for row in rows for name in row.get("wrong", {})}
    return 1 if any(name.startswith("mtpgraph") for name in wrong) else 0


def chosen_shapes(what: Sequence[str], patterns: Sequence[str]) -> list[Shape]:
    """The shapes of some parts whose name matches one of ``patterns``."""
    return [
        shape
        for part in what
        for shape in SHAPES[part]
        if any(fnmatch.fnmatchcase(shape.name, pattern) for pattern in patterns)
    ]


def each_shape(
    shapes: Sequence[Shape],
    peers: Peers,
    ceilings: Ceilings,
    l2_bytes: int,
    rounds: int,
    device: torch.device,
) -> Iterator[tuple[Shape, list[Arm], Plan]]:
    """The arms of each shape, over pools of keys that the shapes share."""
    plans = [
        bench_graph.plan(
            shape.input_bytes if isinstance(shape, Logits) else shape.bytes,
            shape.floor_us(ceilings),
            rounds,
            l2_bytes,
            _max_sets(shape),
            rotate=not isinstance(shape, TopK),
        )
        for shape in shapes
    ]
    todo = list(zip(shapes, plans, strict=True))
    blocks = [
        plan.sets * shape.num_reqs * (shape.context // BLOCK_SIZE)
        for shape, plan in todo
        if isinstance(shape, Logits)
    ]
    keys = scores.make_keys(max(blocks), 128, device) if blocks else None
    for shape, plan in todo:
        if isinstance(shape, Logits):
            inputs = scores.make_scores(shape, plan.sets, keys, device)
            arms = scores.select_arms if shape.what == "select" else scores.logits_arms
            yield shape, arms(inputs, peers), plan
        elif isinstance(shape, TopK):
            sets = scores.make_row_sets(shape, plan.sets, device)
            yield shape, scores.topk_arms(shape, sets, peers), plan
    del keys
    kept = [(shape, plan) for shape, plan in todo if isinstance(shape, Mla)]
    if kept:
        needed = max(plan.sets * shape.num_reqs * shape.context for shape, plan in kept)
        pool = attention.make_kv_cache(needed // BLOCK_SIZE, 576, device)
        fp8_pool = fp8_kv_cache(pool)
        for shape, plan in kept:
            inputs = attention.make_attention(shape, plan.sets, pool, fp8_pool)
            yield shape, attention.attention_arms(inputs, peers), plan


def _max_sets(shape: Shape) -> int:
    # two million tokens of keys, and a quarter of a gigabyte of rows, are enough to outgrow an L2
    if isinstance(shape, TopK):
        return max(1, (1 << 28) // shape.bytes)
    return max(1, (1 << 21) // (shape.num_reqs * shape.context))


def measure(shape: Shape, arms: Sequence[Arm], plan: Plan, ceilings: Ceilings, timer: Timer) -> Row:
    """Check every arm, time those that are right, and say how ours compares."""
    problems = {arm.name: _problem(arm, arm.check, shape) for arm in arms}
    right = [arm for arm in arms if not problems[arm.name]]
    limits = {arm.name: _problem(arm, arm.check_others, shape) for arm in right}
    inexact = {name: limit for name, limit in limits.items() if limit}
    times: dict[str, Timing] = {}
    for name, result in timer(right, plan).items():
        if isinstance(result, str):
            problems[name] = result
        else:
            times[name] = result
    wrong = {name: problem for name, problem in problems.items() if problem}
    row = row_of(shape, arms, times, plan, ceilings, inexact)
    return row | ({"wrong": wrong} if wrong else {})


def _no_times(arms: Sequence[Arm], plan: Plan) -> dict[str, Timing | str]:
    return {}


def _problem(arm: Arm, check: Callable[[], str], shape: Shape) -> str:
    try:
        return check()
    except Exception as error:  # a peer's own; the others are measured all the same
        problem = first_line(error)
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            why = f"{arm.name} at {shape.name} left the card unusable: {problem}"
            raise RuntimeError(why) from error
    return problem


def row_of(
    shape: Shape,
    arms: Sequence[Arm],
    times: dict[str, Timing],
    plan: Plan,
    ceilings: Ceilings,
    inexact: Mapping[str, str],
) -> Row:
    """The JSON line of a shape, without what holds for the whole run."""
    floor = shape.floor_us(ceilings)
    timed = [arm for arm in arms if arm.name in times]
    row: Row = {
        "what": shape.what,
        "shape": shape.name,
        "sizes": dataclasses.asdict(shape),
        "bytes": shape.bytes,
        "flops": shape.flops,
        "floor_us": floor,
        "calls": plan.calls,
        "rounds": plan.rounds,
        "l2": plan.l2,
        "peers": {
            arm.name: dataclasses.asdict(times[arm.name]) | {"apart": arm.apart}
            for arm in timed
            if not arm.ours
        },
        "also": {
            arm.name: dataclasses.asdict(times[arm.name])
            for arm in timed
            if arm.ours and arm.name != "mtpgraph"
        },
    }
    ours = times.get("mtpgraph")
    if ours is not None:
        row |= dataclasses.asdict(ours)
        row["of_floor"] = floor / ours.us
        row["gb_s"] = shape.bytes / ours.us / 1e3
        row["tflop_s"] = shape.flops / ours.us / 1e6
    if inexact:
        row["inexact"] = dict(inexact)
    peers = [arm for arm in timed if not arm.ours]
    compared = {
        "": [arm for arm in peers if not arm.apart],
        # with plans left out, a peer that has none still competes
        "_apart": peers,
        "_exact": [arm for arm in peers if not arm.apart and arm.name not in inexact],
    }
    for key, rivals in compared.items():
        if not rivals:
            continue
        best = min((arm.name for arm in rivals), key=lambda name: times[name].us)
        row |= {f"best_peer{key}": best, f"best_peer{key}_us": times[best].us}
        if ours is not None:
            row[f"ratio{key}"] = ours.us / times[best].us
    return row


def heading(peers: Peers, ceilings: Ceilings) -> str:
    """What is measured against, and what is not there."""
    lines = [
        f"{versions()['card']}: copy {ceilings.copy_bytes / 1e12:.2f} TB/s, "
        f"fp8 {ceilings.fp8_flops / 1e12:.0f} and bf16 {ceilings.bf16_flops / 1e12:.0f} TFLOP/s",
        f"peers: {', '.join([*peers.found, 'torch.topk'])}",
    ]
    return "\n".join(lines + [f"no {name}: {why}" for name, why in peers.absent.items()])


def keep(row: Row, out: Path | None) -> None:
    """Print a row as it comes, and append it to a file of JSON lines."""
    us = f"{row['us']:.1f} us" if "us" in row else "not timed"
    peer = f", {row['best_peer']} {row['best_peer_us']:.1f}" if "best_peer" in row else ""
    print(f"{row['what']} {row['shape']}: {us}{peer}", flush=True)
    for kind in ("wrong", "inexact"):
        for name, problem in row.get(kind, {}).items():
            print(f"  {name} is {kind}: {problem}", flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def table(rows: Sequence[Row]) -> str:
    """Markdown: ours over the best peer, the peers' plans counted in and (apart) left out, and over
    the best of those that are right for every kind of rows (exact); a star marks one that is not.
    """
    head = [
        "part",
        "shape",
        "us",
        "GB/s",
        "TFLOP/s",
        "of floor",
        "best peer",
        "us",
        "ratio",
        "apart",
        "exact",
    ]
    lines = [[*head, "L2"], ["---"] * (len(head) + 1)]
    for row in rows:
        lines.append(
            [
                row["what"],
                row["shape"],
                _number(row, "us", ".1f"),
                _number(row, "gb_s", ".0f"),
                _number(row, "tflop_s", ".0f") if row["flops"] else "",
                _number(row, "of_floor", ".0%"),
                row.get("best_peer", "") + "*" * (row.get("best_peer") in row.get("inexact", {})),
                _number(row, "best_peer_us", ".1f"),
                _number(row, "ratio", ".2f"),
                _number(row, "ratio_apart", ".2f"),
                _number(row, "ratio_exact", ".2f"),
                row["l2"],
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _number(row: Row, key: str, form: str) -> str:
    return format(row[key], form) if key in row else ""
