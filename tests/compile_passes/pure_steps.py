"""Steps whose pure ops an engine can hold, and batches through them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mtpgraph
from mtpgraph import ops
from tests.helpers import assert_same_bits, assert_same_result

from .support import BLOCK_SIZE, DIM, INPUTS, NEXT_N, Stream

BATCH = ["x", "query_start_loc", "seq_lens", "block_table", "slot_mapping"]
SPECS = {name: INPUTS[name] for name in [*BATCH, "pools"]}
LATENT_DIM = 6
INSIDE = ["flatten_decode", "indexer_select", "topk_to_slots", "sparse_mla_decode"]
"""What an engine can hold of each of the steps."""


class PureSteps(nn.Module):
    """Each writes to both caches, then calls pure ops. Its products give a row the same bits in
    every batch: they are sums of one number and of zeros."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.last = nn.Linear(LATENT_DIM, DIM, bias=False)
        for layer in (self.first, self.last):
            layer.weight.data.copy_(2 * torch.eye(*layer.weight.shape))
        self.to(dtype).requires_grad_(False)

    def pure(
        self,
        x: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        pools: dict[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """Nothing but ops, which follow the writes."""
        row_lens, row_requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        ops.indexer_cache_write_(x, slot_mapping, pools["index_k"])
        ops.kv_cache_write_(x, slot_mapping, pools["kv"])
        q = x.unflatten(1, (1, DIM))
        logits = ops.indexer_logits(
            q,
            torch.ones_like(x[:, :1], dtype=torch.float32),
            pools["index_k"],
            block_table,
            query_start_loc,
            seq_lens,
            block_table.shape[1] * BLOCK_SIZE,
        )
        chosen = ops.indexer_topk(logits, row_lens, 3)
        slots = ops.topk_to_slots(chosen, block_table, row_requests, BLOCK_SIZE)
        out, lse = ops.sparse_mla_decode(
            q, pools["kv"], chosen, block_table, query_start_loc, 0.3, LATENT_DIM
        )
        return slots, out, lse

    def dense_in_front(
        self,
        x: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        pools: dict[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """The caches are written with what an engine computes."""
        x = F.relu(self.first(x))
        return self.pure(x, query_start_loc, seq_lens, block_table, slot_mapping, pools)

    def dense_views_by_the_same_size(
        self,
        x: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        pools: dict[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """Views and an op by the number of tokens, in one engine."""
        num_tokens = x.shape[0]
        row_lens, row_requests = ops.flatten_decode(query_start_loc, seq_lens, num_tokens)
        heads = F.relu(self.first(x)).view(num_tokens, 2, DIM // 2)
        chosen = ops.indexer_topk(heads.reshape(num_tokens, DIM), row_lens, 3)
        return ops.topk_to_slots(chosen, block_table, row_requests, BLOCK_SIZE), heads * 2

    def dense_on_both_sides(
        self,
        x: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        pools: dict[str, Tensor],
    ) -> tuple[Tensor, ...]:
        x = F.relu(self.first(x))
        slots, out, lse = self.pure(x, query_start_loc, seq_lens, block_table, slot_mapping, pools)
        return slots, F.relu(self.last(out.flatten(1))) + x, lse


def make_pools(dtype: torch.dtype = torch.float32, place: str = "cpu") -> dict[str, Tensor]:
    """Empty caches for 8 requests."""
    return {
        "index_k": torch.zeros(128, BLOCK_SIZE * (DIM + 4), dtype=torch.uint8, device=place),
        "kv": torch.zeros(128, BLOCK_SIZE, DIM, dtype=dtype, device=place),
    }


def run_step(
    fn: Callable[..., Any], pools: dict[str, Tensor] | None = None, **options: Any
) -> mtpgraph.Stats:
    """Some batches through a step, whose results and caches are those of eager: on a CPU, and in
    the caches, bit for bit."""
    pools = pools or make_pools()
    compiled = mtpgraph.compile(
        fn,
        engine="tensorrt",
        **{"sizes": [2, 4, 8], "next_n": NEXT_N, "inputs": SPECS, **options},
    )
    dtype, place = next((p.dtype, p.device) for p in pools.values() if p.is_floating_point())
    stream = Stream(8, dtype)
    for query_lens in ([2, 1, 2], [1, 2], [2] * 7, [1, 1, 2, 2]):
        batch = [given.to(place) for given in stream.batch(query_lens)[: len(BATCH)]]
        twins = {name: pool.clone() for name, pool in pools.items()}
        expected, actual = fn(*batch, twins), compiled(*batch, pools)
        for a, b in zip(actual, expected, strict=True):
            assert_same_result(a, b)
        for name, pool in pools.items():
            assert_same_bits(pool, twins[name])
    return compiled.stats()
