"""``mtpgraph bench step``: a decode step of realistic shape, several ways of running it.

A layer is what DeepSeek V3.2 has at tensor parallel 8, without its experts: RMS norm, projections,
index keys written, indexer with top-k, latent attention over the chosen keys, output projection,
and a dense MLP. Scaled to one card: ``hidden`` is 2048 where the model has 7168, and layers share
``--caches`` sets of caches in turn, each larger than the L2 where the shape allows it.
"""

import argparse
import dataclasses
import gc
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mtpgraph
from mtpgraph import Batched, Static, ops

BLOCK_SIZE = 64
DEVICE = "cuda"
WAYS = ("eager", "compile", "reduce-overhead", "mtpgraph", "tensorrt")
# the last needs an extra, so it is measured when asked for
DEFAULT_WAYS = WAYS[:-1]
# what runs through mtpgraph.compile, and with which engine
ENGINES = {"mtpgraph": "inductor", "tensorrt": "tensorrt"}
WARM_UPS = ("mtpgraph", "reduce-overhead", "one compilation per size")
INPUTS = {
    "hidden": Batched(per="token"),
    "query_start_loc": Batched(pad="last", extra=1),
    "seq_lens": Batched(),
    "block_table": Batched(pad=-1),
    "slot_mapping": Batched(pad=-1, per="token"),
    "caches": Static,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Widths of a layer."""

    layers: int = 61
    hidden: int = 2048
    index_heads: int = 64
    index_dim: int = 128
    heads: int = 16
    latent: int = 512
    rope: int = 64
    topk: int = 2048
    mlp: int = 4096


class Layer(nn.Module):
    """Indexer, sparse latent attention and an MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        s = self.sizes = sizes
        wide = s.latent + s.rope
        self.splits = [
            s.heads * wide,
            wide,
            s.index_heads * s.index_dim,
            s.index_dim,
            s.index_heads,
        ]
        self.norm = nn.RMSNorm(s.hidden, eps=1e-6)
        self.proj = nn.Linear(s.hidden, sum(self.splits), bias=False)
        self.out = nn.Linear(s.heads * s.latent, s.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(s.hidden, eps=1e-6)
        self.up = nn.Linear(s.hidden, 2 * s.mlp, bias=False)
        self.down = nn.Linear(s.mlp, s.hidden, bias=False)

    def forward(
        self,
        hidden: Tensor,
        row_lens: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        s = self.sizes
        kv_cache, index_cache = cache
        q, kv, index_q, index_k, weights = self.proj(self.norm(hidden)).split(self.splits, dim=-1)
        ops.kv_cache_write_(kv, slot_mapping, kv_cache)
        ops.indexer_cache_write_(index_k, slot_mapping, index_cache)
        index_q = index_q.unflatten(1, (s.index_heads, s.index_dim)).to(torch.float8_e4m3fn)
        logits = ops.indexer_logits(
            index_q,
            weights.float(),
            index_cache,
            block_table,
            query_start_loc,
            seq_lens,
            block_table.shape[1] * BLOCK_SIZE,
        )
        topk_indices = ops.indexer_topk(logits, row_lens, s.topk)
        attended, _ = ops.sparse_mla_decode(
            q.unflatten(1, (s.heads, s.latent + s.rope)),
            kv_cache,
            topk_indices,
            block_table,
            query_start_loc,
            (s.latent + s.rope) ** -0.5,
            s.latent,
        )
        hidden = hidden + self.out(attended.flatten(1))
        gate, value = self.up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * value)


class Model(nn.Module):
    """The layers of one step."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))

    def forward(
        self,
        hidden: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        caches: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, hidden.shape[0])
        for i, layer in enumerate(self.layers):
            hidden = layer(
                hidden,
                row_lens,
                query_start_loc,
                seq_lens,
                block_table,
                slot_mapping,
                caches[i % len(caches)],
            )
        return hidden


def make_caches(sizes: Sizes, count: int, num_blocks: int) -> list[tuple[Tensor, Tensor]]:
    """Caches with content: index keys of noise, latent keys of noise."""
    caches = []
    for _ in range(count):
        kv = torch.randn(
            num_blocks, BLOCK_SIZE, sizes.latent + sizes.rope, device=DEVICE, dtype=torch.bfloat16
        )
        index = torch.empty(
            num_blocks, BLOCK_SIZE * (sizes.index_dim + 4), device=DEVICE, dtype=torch.uint8
        )
        for first in range(0, num_blocks * BLOCK_SIZE, 1 << 20):
            slots = torch.arange(
                first, min(first + (1 << 20), num_blocks * BLOCK_SIZE), device=DEVICE
            )
            keys = torch.randn(len(slots), sizes.index_dim, device=DEVICE, dtype=torch.bfloat16)
            ops.indexer_cache_write_(keys, slots, index)
        caches.append((kv, index))
    return caches


def make_batch(sizes: Sizes, num_reqs: int, next_n: int, context: int, width: int) -> list[Tensor]:
    """A uniform verify batch; every request has blocks of its own, permuted."""
    blocks = -(-context // BLOCK_SIZE)
    table = torch.full((num_reqs, width), -1, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(num_reqs * blocks, device=DEVICE).view(num_reqs, blocks)
    table[:, :blocks] = order
    positions = torch.arange(context - next_n, context, device=DEVICE)
    slots = order[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return [
        torch.randn(num_reqs * next_n, sizes.hidden, device=DEVICE, dtype=torch.bfloat16),
        torch.arange(0, num_reqs * next_n + 1, next_n, device=DEVICE, dtype=torch.int32),
        torch.full((num_reqs,), context, device=DEVICE, dtype=torch.int32),
        table,
        slots.flatten(),
    ]


def build(way: str, model: Model, batches: Sequence[int], next_n: int) -> Any:
    """The step as one of ``WAYS``."""
    if way == "eager":
        return model
    if way in ENGINES:
        return mtpgraph.compile(
            model.forward, inputs=INPUTS, sizes=batches, next_n=next_n, engine=ENGINES[way]
        )
    return torch.compile(model, mode=None if way == "compile" else way)


def measure(step: Callable[[], Any], rounds: int, calls: int) -> dict[str, float]:
    """Milliseconds of a step, and of the host in it: medians over rounds of several calls."""
    step_ms, host_ms = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            step()
        host_ms.append((time.perf_counter() - started) / calls * 1e3)
        torch.cuda.synchronize()
        step_ms.append((time.perf_counter() - started) / calls * 1e3)
    # launched into an idle queue, a call costs the host what it costs without back-pressure
    alone = []
    for _ in range(8):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        alone.append((time.perf_counter() - started) * 1e3)
    torch.cuda.synchronize()
    return {
        "step_ms": statistics.median(step_ms),
        "step_ms_min": min(step_ms),
        "step_ms_max": max(step_ms),
        "host_ms": statistics.median(alone),
    }


def kernel_ms(step: Callable[[], Any], calls: int = 3) -> float:
    """Device time of all kernels of a step, summed, milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in trace.key_averages()) / calls / 1e3


def recompiles() -> int:
    """Graphs that Dynamo compiled so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def forget() -> None:
    """Compiled code and graphs of the way before."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def run_way(
    way: str, next_n: int, model: Model, caches: Any, args: argparse.Namespace
) -> Iterator[dict]:
    """Rows of one way at one query length: each batch size, then a run of changing sizes."""
    forget()
    batches = sorted(args.batches)
    width = -(-max(args.contexts) // BLOCK_SIZE)
    reserved, graphs = torch.cuda.memory_reserved(), recompiles()
    started = time.perf_counter()
    step = build(way, model, batches, next_n)
    first = make_batch(model.sizes, batches[0], next_n, min(args.contexts), width)
    if way in ENGINES:
        step.warm_up(*first, caches)
    else:
        step(*first, caches)
        step(*first, caches)
    torch.cuda.synchronize()
    common = {
        "way": way,
        "next_n": next_n,
        "layers": args.layers,
        "warm_up_s": time.perf_counter() - started,
        "memory_mib": (torch.cuda.memory_reserved() - reserved) / 2**20,
    }
    for num_reqs in batches:
        for context in args.contexts:
            if num_reqs * context > args.max_tokens:
                continue
            batch = make_batch(model.sizes, num_reqs, next_n, context, width)

            def call(batch: list[Tensor] = batch) -> Any:
                return step(*batch, caches)

            for _ in range(3):
                call()
            row = common | {"batch": num_reqs, "context": context}
            row |= measure(call, args.rounds, args.calls)
            row["kernel_ms"] = kernel_ms(call)
            row["tokens_per_s"] = num_reqs * next_n / row["step_ms"] * 1e3
            yield row
    context = min(args.contexts)
    torch.manual_seed(0)
    changing = [
        make_batch(model.sizes, n, next_n, context, width)
        for n in torch.randint(1, min(max(batches), 64) + 1, (args.changing,)).tolist()
    ]
    torch.cuda.synchronize()
    started = time.perf_counter()
    for batch in changing:
        step(*batch, caches)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    row = common | {"batch": "changing", "context": context, "graphs": recompiles() - graphs}
    row["step_ms"] = seconds / len(changing) * 1e3
    if way in ENGINES:
        stats = step.stats()
        row |= {"captures": stats.captures, "recompiles": stats.recompiles}
        if stats.engines:
            row["engines"] = dict(stats.engines)
    yield row


def run_warm_up(way: str, model: Model, caches: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Until every size of a table runs as fast as it ever will: seconds, and memory it takes.

    Every way meets every size twice. One compilation per size is measured on the first few sizes.
    """
    forget()
    sizes: Sequence[int] = mtpgraph.Options().sizes
    if way == "one compilation per size":
        sizes = sizes[: args.static_sizes]
    next_n, context = args.next_n[0], min(args.contexts)
    width = -(-context // BLOCK_SIZE)
    blocks = caches[0][0].shape[0]
    free, graphs = torch.cuda.mem_get_info()[0], recompiles()
    started = time.perf_counter()
    row: dict[str, Any] = {"warm_up_of": way, "sizes": len(sizes), "next_n": next_n}
    if way == "reduce-overhead":
        step = build(way, model, sizes, next_n)
    else:
        options = {"specialize": sizes} if way == "one compilation per size" else {}
        step = mtpgraph.compile(model.forward, inputs=INPUTS, sizes=sizes, next_n=next_n, **options)
    for size in reversed(sizes):
        # contents do not matter, only that the blocks exist
        fitting = min(context, blocks // size * BLOCK_SIZE)
        batch = make_batch(model.sizes, size, next_n, fitting, width)
        for _ in range(2):
            step(*batch, caches)
    torch.cuda.synchronize()
    row |= {
        "warm_up_s": time.perf_counter() - started,
        "graphs": recompiles() - graphs,
        "memory_mib": (free - torch.cuda.mem_get_info()[0]) / 2**20,
        "layers": args.layers,
    }
    if way != "reduce-overhead":
        stats = step.stats()
        row |= {
            "captures": stats.captures,
            "recompiles": stats.recompiles,
            "graph_mib": {str(size): n / 2**20 for size, n in stats.graph_bytes.items()},
        }
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``mtpgraph bench step``."""
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--caches", type=int, default=2, help="sets of caches that layers share")
    parser.add_argument(
        "--next-n", type=int, nargs="+", default=[2, 4], help="1 + speculative tokens"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--max-tokens", type=int, default=1 << 21, help="cache size in tokens")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(DEFAULT_WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument(
        "--warm-ups", nargs="*", choices=WARM_UPS, default=[], help="warm-ups of the default sizes"
    )
    parser.add_argument(
        "--static-sizes", type=int, default=3, help="how many of them are compiled one by one"
    )
    parser.add_argument("--changing", type=int, default=200, help="steps of changing batch size")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines to append to")
    parser.add_argument("--commit", default=commit(), help="what is measured, for the JSON lines")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 2 without a CUDA card."""
    if not torch.cuda.is_available():
        print("mtpgraph bench: needs a CUDA card", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    sizes = Sizes(layers=args.layers)
    args.batches = [n for n in args.batches if n * min(args.contexts) <= args.max_tokens]
    needed = max(n * c for n in args.batches for c in args.contexts if n * c <= args.max_tokens)
    with torch.no_grad():
        model = Model(sizes).to(DEVICE, torch.bfloat16)
        caches = make_caches(sizes, args.caches, needed // BLOCK_SIZE)
        for next_n in args.next_n:
            for way in args.ways:
                for row in run_way(way, next_n, model, caches, args):
                    _keep(row, args)
        for way in args.warm_ups:
            _keep(run_warm_up(way, model, caches, args), args)
    return 0


def _keep(row: dict[str, Any], args: argparse.Namespace) -> None:
    print(_line(row), flush=True)
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps(row | versions() | {"commit": args.commit}) + "\n")


def _line(row: dict[str, Any]) -> str:
    if "warm_up_of" in row:
        parts = [f"warm-up of {row['sizes']} sizes, {row['warm_up_of']}:"]
    else:
        parts = [f"{row['way']:16} n {row['next_n']} B {row['batch']!s:8} ctx {row['context']:6}"]
    parts += [
        f"{name} {row[name]:.3f}"
        for name in ("step_ms", "host_ms", "kernel_ms", "warm_up_s", "memory_mib")
        if name in row
    ]
    parts += [f"{k} {row[k]}" for k in ("graphs", "captures", "recompiles", "engines") if k in row]
    return "  ".join(parts)


def commit() -> str:
    """The commit of the sources, "unknown" where they are not in a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """What a figure depends on."""
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
    }
