"""``mtpgraph bench host``: what a call of a compiled step costs the host.

The step is 61 layers of RMS norm, a matrix product, a short conv over a state pool, and a residual:
short kernels, so that the host matters. It takes twelve small inputs, and its 122 cache tensors as
an argument or from the module (``caches``: "argument" or "module").
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mtpgraph
from mtpgraph import Batched, Static, ops

from .bench_step import commit, versions

DEVICE = "cuda"
INPUTS = {
    "hidden": Batched(per="token"),
    "positions": Batched(per="token"),
    "tokens": Batched(per="token"),
    "slot_mapping": Batched(pad=-1, per="token"),
    "query_start_loc": Batched(pad="last", extra=1),
    "seq_lens": Batched(),
    "block_table": Batched(pad=-1),
    "state_indices": Batched(pad=-1),
    "num_accepted_tokens": Batched(pad=1),
    "temperature": Batched(),
    "top_p": Batched(),
    "seeds": Batched(),
    "caches": Static,
}
Caches = list[tuple[Tensor, Tensor]]


class Model(nn.Module):
    """Layers that leave the device idle if the host is slow."""

    def __init__(self, layers: int, width: int, caches: Caches) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(layers))
        self.projs = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.caches = caches

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        tokens: Tensor,
        slot_mapping: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        state_indices: Tensor,
        num_accepted_tokens: Tensor,
        temperature: Tensor,
        top_p: Tensor,
        seeds: Tensor,
        caches: Caches | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        old = ops.has_initial_state(query_start_loc, seq_lens)
        for norm, proj, (state, taps) in zip(
            self.norms, self.projs, caches or self.caches, strict=True
        ):
            mixed = ops.causal_conv1d_update_(
                state,
                F.silu(proj(norm(hidden))),
                taps,
                None,
                state_indices,
                query_start_loc,
                has_initial_state=old,
            )
            hidden = hidden + mixed
        per_request = seeds + num_accepted_tokens + block_table[:, 0]
        return hidden, tokens + positions + slot_mapping, temperature * top_p + per_request


def make_batch(num_reqs: int, next_n: int, width: int) -> list[Tensor]:
    """Uniform verify rows, in the order of ``Model.forward``."""
    ints = {"device": DEVICE, "dtype": torch.int32}
    num_tokens = num_reqs * next_n
    each = torch.arange(num_tokens, device=DEVICE)
    return [
        torch.randn(num_tokens, width, device=DEVICE, dtype=torch.bfloat16),
        each,
        each.clone(),
        each.clone(),
        torch.arange(0, num_tokens + 1, next_n, **ints),
        torch.full((num_reqs,), 100, **ints),
        torch.ones(num_reqs, 64, **ints),
        torch.arange(num_reqs, **ints),
        torch.ones(num_reqs, **ints),
        torch.ones(num_reqs, device=DEVICE),
        torch.ones(num_reqs, device=DEVICE),
        torch.ones(num_reqs, **ints),
    ]


def microseconds(call: Callable[[], Any], *, queued: int = 1, rounds: int = 25) -> float:
    """Host time of a call, ``queued`` of them launched at a time into an idle device."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(queued):
            call()
        times.append((time.perf_counter() - started) / queued * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``mtpgraph bench host``."""
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--next-n", type=int, default=2, help="1 + speculative tokens")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 37])
    parser.add_argument("--out", type=Path, default=None, help="JSON lines to append to")
    parser.add_argument("--commit", default=commit(), help="what is measured, for the JSON lines")


@torch.no_grad()
def run(args: argparse.Namespace) -> int:
    """Measure and print; 2 without a CUDA card."""
    if not torch.cuda.is_available():
        print("mtpgraph bench: needs a CUDA card", file=sys.stderr)
        return 2
    bf16 = {"device": DEVICE, "dtype": torch.bfloat16}
    caches = [
        (torch.zeros(512, args.width, 3, **bf16), torch.randn(args.width, 4, **bf16))
        for _ in range(args.layers)
    ]
    model = Model(args.layers, args.width, caches).to(**bf16)
    size = max(args.requests)
    for where, given in (("argument", [caches]), ("module", [])):
        step = mtpgraph.compile(model.forward, inputs=INPUTS, sizes=[size], next_n=args.next_n)
        step.warm_up(*make_batch(size, args.next_n, args.width), *given)
        for num_reqs in args.requests:
            batch = [*make_batch(num_reqs, args.next_n, args.width), *given]
            for _ in range(4):
                step(*batch)
            found = step._replays.find(batch, {}) if step._replays is not None else None
            assert found is not None
            call = functools.partial(step, *batch)
            replay = found[0].served.graph.replay
            row = {
                "caches": where,
                "requests": num_reqs,
                "padded_to": size,
                "call_us": microseconds(call),
                "call_queued_us": microseconds(call, queued=20),
                "bare_replay_us": microseconds(replay),
                "bare_replay_queued_us": microseconds(replay, queued=20),
                "one_copy_us": microseconds(functools.partial(batch[1].copy_, batch[2])),
                "layers": args.layers,
            }
            print(
                "  ".join(
                    f"{k} {v:.1f}" if type(v) is float else f"{k} {v}" for k, v in row.items()
                )
            )
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(row | versions() | {"commit": args.commit}) + "\n")
    return 0
