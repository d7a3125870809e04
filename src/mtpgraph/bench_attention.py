"""The arms of ``mtpgraph bench indexer`` for sparse latent attention, with their checks.

Each request has K blocks of its own, and each token attends to random keys of it. Ours translates
positions to slots itself; peers are given slots, and queries already split.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .bench_graph import Arm
from .bench_peers import (
    Peers,
    fa3_decode,
    flash_mla_decode,
    flash_mla_forward,
    fp8_kv_values,
)
from .bench_shapes import BLOCK_SIZE, Mla

# By norm of a token: probabilities and outputs are rounded to bf16.
TOLERANCE = 1e-2


@dataclass
class Attention:
    """Inputs of sparse attention; an input set is other requests of one pool."""

    shape: Mla
    q: Tensor
    kv_cache: Tensor
    fp8_cache: Tensor
    block_tables: list[Tensor]
    topk_indices: list[Tensor]
    slots: list[Tensor]
    query_start_loc: Tensor

    @property
    def scale(self) -> float:
        return (self.shape.latent + self.shape.rope) ** -0.5


def make_kv_cache(num_blocks: int, width: int, device: torch.device) -> Tensor:
    """A pool of random latent keys, bf16."""
    size = (num_blocks, BLOCK_SIZE, width)
    return torch.randn(size, device=device, dtype=torch.bfloat16)


def max_sets(shape: Mla, num_blocks: int) -> int:
    """Input sets that a pool has blocks for."""
    return num_blocks // (shape.num_reqs * (shape.context // BLOCK_SIZE))


def make_attention(shape: Mla, sets: int, kv_cache: Tensor, fp8_cache: Tensor) -> Attention:
    """Random queries and selections over a pool of random keys."""
    device = kv_cache.device
    columns = shape.context // BLOCK_SIZE
    order = torch.randperm(kv_cache.shape[0], device=device)[: sets * shape.num_reqs * columns]
    tables = list(order.int().view(sets, shape.num_reqs, columns))
    requests = torch.arange(shape.num_reqs + 1, dtype=torch.int32, device=device)
    starts = requests * shape.next_n
    rows = requests[:-1].repeat_interleave(shape.next_n)
    width = shape.latent + shape.rope
    chosen = [_select(shape, device) for _ in tables]
    return Attention(
        shape,
        torch.randn(shape.num_rows, shape.num_heads, width, device=device, dtype=torch.bfloat16),
        kv_cache,
        fp8_cache,
        tables,
        chosen,
        [
            ops.topk_to_slots(each, table, rows, BLOCK_SIZE)
            for each, table in zip(chosen, tables, strict=True)
        ],
        starts,
    )


def _select(shape: Mla, device: torch.device) -> Tensor:
    """int32 [num_rows, topk], ascending: random keys of each request."""
    keys = torch.rand(shape.num_reqs, shape.context, device=device)
    keys = keys.topk(shape.keys_of_request, dim=1).indices
    common, own = keys.tensor_split([shape.common_keys], dim=1)
    common = common.unsqueeze(1).expand(-1, shape.next_n, -1)
    chosen = torch.cat([common, own.unflatten(1, (shape.next_n, -1))], dim=2)
    return chosen.flatten(0, 1).sort(dim=1).values.int()


def reference_attention(attention: Attention, i: int, *, fp8: bool) -> Tensor:
    """fp32 [num_tokens, num_heads, latent], over the keys of one of the two caches."""
    cache = attention.fp8_cache if fp8 else attention.kv_cache
    tokens, latent = cache.flatten(0, 1), attention.shape.latent
    rows = []
    for q, slots in zip(attention.q, attention.slots[i], strict=True):
        keys = tokens[slots.long()]
        keys = fp8_kv_values(keys, latent) if fp8 else keys.float()
        weights = (q.float() @ keys.t() * attention.scale).softmax(dim=1)
        rows.append(weights @ keys[:, :latent])
    return torch.stack(rows)


def attention_arms(attention: Attention, peers: Peers) -> list[Arm]:
    """Ours over the cache of the shape, FlashMLA over the fp8 cache; where the shape's is of bf16,
    FA3 and, as prefill, FlashMLA over that."""
    a, shape = attention, attention.shape
    kv_cache = a.fp8_cache if shape.fp8 else a.kv_cache

    def ours(i: int) -> Tensor:
        batch = (a.topk_indices[i], a.block_tables[i], a.query_start_loc)
        return ops.sparse_mla_decode(a.q, kv_cache, *batch, a.scale, shape.latent)[0]

    arms: list[tuple[str, bool, bool, Callable[[int], Tensor]]] = [
        ("mtpgraph", False, shape.fp8, ours)
    ]
    fa3, flash_mla = peers.get("FA3"), peers.get("FlashMLA")
    if fa3 is not None and not shape.fp8:
        call = fa3_decode(fa3, a.q, a.kv_cache, a.slots, a.scale, shape.latent)
        arms.append(("FA3", False, False, call))
    if flash_mla is not None and shape.num_heads in (64, 128):
        given = (flash_mla, a.q, a.fp8_cache, a.slots, a.scale)
        for apart in (False, True):
            name = f"FlashMLA fp8{', split apart' if apart else ''}"
            arms.append((name, apart, True, flash_mla_decode(*given, apart)))
        if not shape.fp8:
            call = flash_mla_forward(flash_mla, a.q, a.kv_cache, a.slots, a.scale)
            arms.append(("FlashMLA forward", False, False, call))
    expected: dict[bool, Tensor] = {}

    def check(call: Callable[[int], Tensor], fp8: bool) -> str:
        if fp8 not in expected:
            expected[fp8] = reference_attention(a, 0, fp8=fp8)
        return wrong_attention(call(0), expected[fp8])

    return [
        Arm(
            name,
            call,
            lambda call=call, fp8=fp8: check(call, fp8),
            ours=name == "mtpgraph",
            apart=apart,
        )
        for name, apart, fp8, call in arms
    ]


def wrong_attention(out: Tensor, expected: Tensor) -> str:
    """How far the worst token of ``out`` is off, "" if it is right."""
    error = float(((out.float() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))).max())
    return "" if error <= TOLERANCE else f"outputs off by {error:.1e}"
