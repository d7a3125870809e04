"""A small hybrid step, its batches and pools, and a look at the graph that the passes leave."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mtpgraph import Batched, Static, ops
from mtpgraph.compile_passes import PASSES
from mtpgraph.compile_passes._nodes import op_of
from mtpgraph.compile_passes.graph_pass import GraphPass, PassManager
from tests.helpers import nan_pool

BLOCK_SIZE = 4
HEADS, HEAD_DIM, STATE_DIM, WIDTH, DIM = 2, 4, 4, 3, 8
NEXT_N = 2

INPUTS = {
    "x": Batched(0, pad=0, per="token"),
    "query_start_loc": Batched(0, pad="last", extra=1),
    "seq_lens": Batched(0, pad=0),
    "block_table": Batched(0, pad=-1),
    "slot_mapping": Batched(0, pad=-1, per="token"),
    "state_indices": Batched(0, pad=-1),
    "num_accepted_tokens": Batched(0, pad=1),
    "pools": Static,
}


def hybrid_step(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor,
    pools: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """One indexer, one short conv, one Mamba-2 update; outputs per token and per request."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    old = ops.has_initial_state(query_start_loc, seq_lens)
    ops.indexer_cache_write_(x, slot_mapping, pools["index_k"])
    logits = ops.indexer_logits(
        x.unflatten(1, (1, DIM)),
        torch.ones_like(x[:, :1], dtype=torch.float32),
        pools["index_k"],
        block_table,
        query_start_loc,
        seq_lens,
        block_table.shape[1] * BLOCK_SIZE,
    )
    chosen = ops.indexer_topk(logits, row_lens, 3)
    h = x + 0.125 * chosen.sum(1, keepdim=True).to(x.dtype)
    h, y = recurrent_layer(h, query_start_loc, state_indices, num_accepted_tokens, old, pools)
    return y + h, chosen, seq_lens * 2


def recurrent_layer(
    x: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor,
    old: Tensor,
    pools: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """What a short conv and a Mamba-2 update behind it give, the states of new requests reset."""
    ops.reset_states_(pools["conv"], state_indices[:, 0], old)
    h = ops.causal_conv1d_update_(
        pools["conv"],
        x,
        pools["taps"],
        None,
        state_indices[:, 0],
        query_start_loc,
        num_accepted_tokens=num_accepted_tokens,
    )
    ops.reset_states_(pools["ssm"], state_indices[:, 0], old)
    heads = h.unflatten(1, (HEADS, HEAD_DIM))
    y = ops.selective_state_update_(
        pools["ssm"],
        heads,
        heads.sum(-1),
        pools["decay"],
        heads[:, :1],
        heads[:, 1:],
        state_indices,
        query_start_loc,
        num_accepted_tokens=num_accepted_tokens,
        dt_softplus=True,
    )
    return h, y.flatten(1)


def make_pools(num_requests: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Caches and states that hold NaN throughout, and two weights."""
    slots = num_requests * NEXT_N
    return {
        "index_k": nan_pool(num_requests * 16, BLOCK_SIZE * (DIM + 4), dtype=torch.uint8),
        "conv": nan_pool(slots, DIM, WIDTH - 1 + NEXT_N - 1, dtype=dtype),
        "ssm": nan_pool(slots, HEADS, HEAD_DIM, STATE_DIM, dtype=dtype),
        "taps": torch.linspace(-1, 1, DIM * WIDTH).view(DIM, WIDTH).to(dtype),
        "decay": torch.tensor([-0.5, -1.5]),
    }


class Stream:
    """Requests that start, advance and are replaced, one batch after the other.

    Every request lives in a place of its own; a new one takes over a place with what its
    predecessor left there.
    """

    def __init__(self, places: int, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.seq_lens = [0] * places
        self.accepted = [1] * places

    def batch(self, query_lens: Sequence[int], new: Sequence[int] = ()) -> list[Tensor]:
        """Arguments of a step for places ``0 .. len(query_lens) - 1``, those in ``new`` anew."""
        for place, query_len in enumerate(query_lens):
            if place in new or self.seq_lens[place] == 0 or self.seq_lens[place] > 40:
                self.seq_lens[place], self.accepted[place] = 0, 1
            self.seq_lens[place] += query_len
        table = torch.full((len(query_lens), 12), -1, dtype=torch.int32)
        slots = []
        for place, query_len in enumerate(query_lens):
            table[place] = torch.arange(12) + 16 * place
            seq_len = self.seq_lens[place]
            slots += [place * 64 + position for position in range(seq_len - query_len, seq_len)]
        indices = torch.arange(len(query_lens) * NEXT_N, dtype=torch.int32).view(-1, NEXT_N)
        accepted = torch.tensor(self.accepted[: len(query_lens)], dtype=torch.int32)
        for place, query_len in enumerate(query_lens):
            self.accepted[place] = random.randint(1, min(query_len, NEXT_N))
        return [
            torch.randn(sum(query_lens), DIM).to(self.dtype),
            torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
            torch.tensor(self.seq_lens[: len(query_lens)], dtype=torch.int32),
            table,
            torch.tensor(slots, dtype=torch.int64),
            indices,
            accepted,
        ]


def copy_pools(pools: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: pool.clone() for name, pool in pools.items()}


class Probe:
    """A backend that runs passes, keeps the graph, and runs it as it is."""

    def __init__(self, passes: Sequence[GraphPass] = PASSES) -> None:
        self.manager = PassManager(passes)
        self.graphs: list[fx.GraphModule] = []
        self.counts: Counter[str] = Counter()

    def __call__(self, gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        self.counts.update(self.manager(gm))
        self.graphs.append(gm)
        return gm.forward

    @property
    def calls(self) -> Counter[str]:
        """Calls of our ops over all graphs, by name."""
        nodes = itertools.chain.from_iterable(gm.graph.nodes for gm in self.graphs)
        found = (op_of(node) for node in nodes)
        return Counter(op._schema.name.removeprefix("mtpgraph::") for op in found if op)


def trace(
    fn: Callable[..., Any], *args: Any, passes: Sequence[GraphPass] = PASSES, dynamic: bool = False
) -> tuple[Any, Probe]:
    """Run ``fn`` once through the passes; returns its result and the probe."""
    torch._dynamo.reset()
    probe = Probe(passes)
    compiled = torch.compile(fn, backend=probe, fullgraph=True, dynamic=dynamic)
    return compiled(*args), probe
