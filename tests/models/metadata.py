"""Who computes the metadata of a step, how often, and while its lengths change."""

from typing import NamedTuple

import torch
from torch import Tensor

from mtpgraph import ops

from .batches import BLOCK_SIZE, index_cache, ssm_pool
from .corpus import Model
from .parts import index_scores, mamba2

LAYERS = 3


class Rows(NamedTuple):
    """What layers need to know of a step."""

    row_lens: Tensor
    row_requests: Tensor
    has_initial_state: Tensor


def per_layer(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    state_indices: Tensor,
    states: list[Tensor],
) -> Tensor:
    """Every layer computes its own."""
    for state in states:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        old = ops.has_initial_state(query_start_loc, seq_lens)
        x = mamba2(state, x, state_indices, query_start_loc, has_initial_state=old)
        x = x / (1 + row_lens[:, None])
    return x


def shared_by_hand(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    state_indices: Tensor,
    states: list[Tensor],
) -> Tensor:
    rows = Rows(
        *ops.flatten_decode(query_start_loc, seq_lens, x.shape[0]),
        ops.has_initial_state(query_start_loc, seq_lens),
    )
    for state in states:
        old = rows.has_initial_state
        x = mamba2(state, x, state_indices, query_start_loc, has_initial_state=old)
        x = x / (1 + rows.row_lens[:, None])
    return torch.where(rows.row_requests[:, None] >= 0, x, 0)


def slots_per_layer(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    index_k: Tensor,
) -> Tensor:
    """Two layers translate the positions that the first selected, each on its own."""
    row_lens, row_requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    ops.indexer_cache_write_(x, slot_mapping, index_k)
    logits = index_scores(x, index_k, block_table, query_start_loc, seq_lens)
    chosen = ops.indexer_topk(logits, row_lens, 3)
    for _ in range(2):
        slots = ops.topk_to_slots(chosen, block_table, row_requests, BLOCK_SIZE)
        x = x + (slots >= 0).sum(1, keepdim=True)
    return x


def drafts(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    index_k: Tensor,
) -> Tensor:
    """An MTP draft loop: lengths grow in place, but not those of padding."""
    lens = seq_lens.clone()
    for _ in range(2):
        row_lens, _ = ops.flatten_decode(query_start_loc, lens, x.shape[0])
        logits = index_scores(x, index_k, block_table, query_start_loc, lens)
        chosen = ops.indexer_topk(logits, row_lens, 3)
        x = x + chosen.sum(1, keepdim=True)
        lens.add_(lens > 0)
    ops.indexer_cache_write_(x, slot_mapping, index_k)
    return x


def drafts_of_padding(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """The same in short, and wrong to pad: a padding request is given a key."""
    lens = seq_lens.clone()
    for _ in range(2):
        row_lens, _ = ops.flatten_decode(query_start_loc, lens, x.shape[0])
        x = x + row_lens[:, None]
        lens += 1
    return x


def shared_indices(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    index_caches: list[Tensor],
) -> Tensor:
    """IndexShare: layers write their index keys, and only the first selects."""
    row_lens, row_requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    chosen = None
    for index_k in index_caches:
        ops.indexer_cache_write_(x, slot_mapping, index_k)
        if chosen is None:
            logits = index_scores(x, index_k, block_table, query_start_loc, seq_lens)
            chosen = ops.indexer_topk(logits, row_lens, 3)
        slots = ops.topk_to_slots(chosen, block_table, row_requests, BLOCK_SIZE)
        x = x + (slots % BLOCK_SIZE).sum(1, keepdim=True)
    return x


def states() -> dict[str, list[Tensor]]:
    return {"states": [ssm_pool() for _ in range(LAYERS)]}


MODELS = [
    Model(
        name="metadata per layer",
        step=per_layer,
        kept=states,
        rewrites={"share_step_metadata": 2 * (LAYERS - 1)},
    ),
    Model(name="metadata shared by hand", step=shared_by_hand, kept=states),
    Model(
        name="slots per layer",
        step=slots_per_layer,
        kept=lambda: {"index_k": index_cache()},
        rewrites={"fuse_select": 1, "share_step_metadata": 1},
    ),
    Model(
        name="draft loop",
        step=drafts,
        kept=lambda: {"index_k": index_cache()},
        rewrites={"fuse_select": 2},
        exact=True,
    ),
    Model(
        name="draft loop that grows padding",
        step=drafts_of_padding,
        left_alone=(("share_step_metadata", "iadd"),),
        findings=(("padding unknown", "ops.flatten_decode(query_start_loc, lens"),),
    ),
    Model(
        name="IndexShare",
        step=shared_indices,
        kept=lambda: {"index_caches": [index_cache() for _ in range(2)]},
        rewrites={"fuse_select": 1, "share_step_metadata": 1},
    ),
]
