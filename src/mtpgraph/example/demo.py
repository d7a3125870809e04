"""``mtpgraph demo``: the example decoder on real text, speculative against plain decoding."""

import argparse
import itertools
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

import mtpgraph

from .config import Config
from .data import held_out_requests
from .decoder import Decoder
from .model import Model, load
from .runs import Difference, Request, Run, differences

if TYPE_CHECKING:
    from rich.console import Console

SIZES = (1, 2, 4, 8, 16, 24)
_NUMBERS = (
    "device",
    "tokens",
    "tokens_per_step",
    "acceptance",
    "steps",
    "mixed_steps",
    "graphs",
    "graph_breaks",
    "recompiles",
    "captures",
    "replays",
    "recaptures",
    "padded_tokens",
    "compile_seconds",
    "seconds",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``mtpgraph demo``."""
    parser.add_argument("--requests", type=int, default=24, help="requests to serve (default 24)")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=48,
        help="most bytes to decode per request; about three quarters on average (default 48)",
    )
    parser.add_argument("--seed", type=int, default=0, help="choice of prompts (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--device", default=None, help="cpu or cuda (default: cuda if there)")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if all three ways of decoding agree, 1 if not, 2 if it cannot run."""
    try:
        from rich.console import Console

        if args.requests < 1 or args.max_new_tokens < 1:
            raise ValueError("--requests and --max-new-tokens must be at least 1")
        console = Console(stderr=args.json)
        report = run_demo(args, console)
    except (ImportError, OSError, ValueError) as error:
        hint = "; pip install mtpgraph[demo]" if isinstance(error, ImportError) else ""
        print(f"mtpgraph demo: {error}{hint}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report))
    else:
        _print(report, console)
    return 0 if report["equal"] else 1


def compile_step(model: Model, **options: Any) -> "mtpgraph.CompiledStep":
    """The decode step as one graph for every batch of up to 24 requests."""
    batched, static = mtpgraph.Batched, mtpgraph.Static
    return mtpgraph.compile(
        model.step,
        sizes=SIZES,
        next_n=model.config.next_n,
        inputs={
            "tokens": batched(0, pad=0, per="token"),
            "next_tokens": batched(0, pad=-1, per="token"),
            "query_start_loc": batched(0, pad="last", extra=1),
            "seq_lens": batched(0, pad=0),
            "block_table": batched(0, pad=-1),
            "slot_mapping": batched(0, pad=-1, per="token"),
            "state_indices": batched(0, pad=-1),
            "num_accepted_tokens": batched(0, pad=1),
            "caches": static(),
        },
        **options,
    )


def make_step() -> tuple["mtpgraph.CompiledStep", tuple[Any, ...]]:
    """The compiled step and a batch: three verify rows, a short new request, a padding request.

    For ``mtpgraph explain mtpgraph.example.demo:make_step``. The weights are random: what a step
    compiles to does not depend on them.
    """
    model = Model(Config()).requires_grad_(False).eval()
    next_n = model.config.next_n
    decoder = Decoder(model, max_reqs=8, fill=0.0)
    size = decoder.block_size
    query_lens, seq_lens = [next_n, next_n, next_n, 2, 0], [130, 61, 17, 2, 0]
    block_table = torch.full((len(seq_lens), decoder.max_blocks), -1, dtype=torch.int32)
    slot_mapping = []
    for r, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        # room for the drafts behind the row
        blocks = decoder.blocks.take(-(-(seq_len + next_n) // size) if seq_len else 0)
        block_table[r, : len(blocks)] = torch.tensor(blocks)
        places = range(seq_len - query_len, seq_len)
        slot_mapping += [blocks[i // size] * size + i % size for i in places]
    starts = [0, *itertools.accumulate(query_lens)]
    tokens = torch.arange(starts[-1])
    slots = [decoder.slots.take(next_n) if n else [-1] * next_n for n in seq_lens]
    batch = (
        tokens,
        torch.full_like(tokens, -1),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        block_table,
        torch.tensor(slot_mapping),
        torch.tensor(slots, dtype=torch.int32),
        torch.ones(len(seq_lens), dtype=torch.int32),
    )
    return compile_step(model), (*batch, decoder.caches)


def run_demo(args: argparse.Namespace, console: "Console") -> dict[str, Any]:
    """Decode the same requests three ways; the report holds numbers and strings alone."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load().to(device)
    longest = 512
    requests = held_out_requests(args.requests, args.max_new_tokens, args.seed)
    decoder = Decoder(
        model, max_reqs=SIZES[-1], max_seq_len=max(longest, 300 + args.max_new_tokens)
    )
    step = compile_step(model)
    runs: dict[str, Run] = {}
    started = time.perf_counter()
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=args.json) as progress:
        compiling = progress.add_task("compile", total=1)
        compile_seconds = _warm_up(decoder, step)
        progress.update(compiling, completed=1)
        total = sum(request.max_new_tokens for request in requests)

        def follow(name: str) -> Any:
            task = progress.add_task(name, total=total)
            return lambda done: progress.update(task, completed=done)

        runs["compiled speculative"] = decoder.decode_speculative(
            requests, step, follow("compiled speculative")
        )
        runs["eager speculative"] = decoder.decode_speculative(
            requests, None, follow("eager speculative")
        )
        runs["eager one-token"] = decoder.decode_plain(requests, follow("eager one-token"))
    report = _report(requests, runs, step)
    report["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    report["compile_seconds"] = round(compile_seconds, 2)
    report["seconds"] = round(time.perf_counter() - started, 2)
    return report


def _warm_up(decoder: Decoder, step: "mtpgraph.CompiledStep") -> float:
    """Compile, and capture every size on a GPU, so that the runs are timed without it.

    The two requests, one of which is prefilled, leave their slots dirty.
    """
    started = time.perf_counter()

    def first(*batch: Any) -> Any:
        step.warm_up(*batch)
        return step(*batch)

    requests = [Request(b"The ", 1), Request(b"The " * 16, 1)]
    decoder.decode_speculative(requests, first)
    decoder.decode_plain(requests)
    if decoder.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _report(
    requests: list[Request], runs: dict[str, Run], step: "mtpgraph.CompiledStep"
) -> dict[str, Any]:
    oracle = runs["eager one-token"]
    best = runs["compiled speculative"]
    found = {name: differences(oracle, run) for name, run in runs.items() if run is not oracle}
    ties = {name: [d for d in some if d.is_tie()] for name, some in found.items()}
    stats = step.stats()
    return {
        "equal": found == ties,
        "identical": not any(found.values()),
        "ties": {name: [_difference(d) for d in some] for name, some in ties.items()},
        "differences": {
            name: [_difference(d) for d in some if not d.is_tie()] for name, some in found.items()
        },
        "tokens": best.tokens,
        "tokens_per_step": round(best.tokens_per_step, 3),
        "acceptance": round(best.acceptance, 3),
        "steps": best.steps,
        "mixed_steps": best.mixed_steps,
        "batch_sizes": sorted(best.batch_sizes),
        "tokens_per_second": {name: round(run.tokens_per_second, 1) for name, run in runs.items()},
        "graphs": stats.graphs,
        "graph_breaks": stats.graph_breaks,
        "recompiles": stats.recompiles,
        "captures": stats.captures,
        "replays": stats.replays,
        "recaptures": stats.recaptures,
        "padded_tokens": stats.padded_tokens,
        "rewrites": dict(stats.rewrites),
        "texts": [
            {
                "prompt": request.prompt.decode(errors="replace"),
                "text": result.text,
                "tokens": result.tokens,
                "tokens_per_step": round(result.tokens_per_step, 3),
            }
            for request, result in zip(requests, best.results, strict=True)
        ],
    }


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "request": difference.request,
        "position": difference.position,
        "gap": difference.gap,
    }


def _print(report: dict[str, Any], console: "Console") -> None:
    from rich.markup import escape
    from rich.table import Table

    for item in report["texts"][:8]:
        prompt = item["prompt"][-100:]
        console.print(
            f"[dim]{escape(prompt)}[/dim][bold]{escape(item['text'])}[/bold]", highlight=False
        )
        console.rule(style="dim")
    table = Table(show_header=False, box=None)
    for name in _NUMBERS:
        table.add_row(name.replace("_", " "), str(report[name]))
    table.add_row("batch sizes", " ".join(map(str, report["batch_sizes"])))
    for name, count in report["rewrites"].items():
        table.add_row(f"rewrites of {name}", str(count))
    for name, rate in report["tokens_per_second"].items():
        table.add_row(f"{name}, tokens/s", str(rate))
    console.print(table)
    for name, some in report["ties"].items():
        for d in some:
            console.print(f"tie: {name}, request {d['request']}, token {d['position']}: {d['gap']}")
    for name, some in report["differences"].items():
        for d in some:
            console.print(
                f"[red]different[/red]: {name}, request {d['request']}, token {d['position']}, "
                f"where the first choice leads by {d['gap']:.4g}"
            )
    if report["identical"]:
        console.print("[green]All three decode the same tokens.[/green]")
