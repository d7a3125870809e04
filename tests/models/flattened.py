"""Indexer and sparse attention: batches flattened by hand, and batches given as they are."""

from collections.abc import Callable

import torch
from torch import Tensor

from mtpgraph import ops

from .batches import DIM, MAX_SEQ_LEN, index_cache, kv_cache
from .corpus import Model
from .parts import index_scores

TOPK = 3

Arange = Callable[[int, Tensor], Tensor]

ARANGES: dict[str, Arange] = {
    "end": lambda n, x: torch.arange(n + 1, dtype=torch.int32),
    "start, end": lambda n, x: torch.arange(0, n + 1, dtype=torch.int32),
    "start, end, step": lambda n, x: torch.arange(0, n + 1, 1, dtype=torch.int32),
    "keywords": lambda n, x: torch.arange(start=0, end=n + 1, step=1, dtype=torch.int32),
    "device": lambda n, x: torch.arange(n + 1, dtype=torch.int32, device=x.device),
    "to": lambda n, x: torch.arange(n + 1, device=x.device).to(torch.int32),
    "int": lambda n, x: torch.arange(n + 1).int(),
    "type": lambda n, x: torch.arange(n + 1).type(torch.int32),
    "head": lambda n, x: torch.arange(64, dtype=torch.int32)[: n + 1],
    "narrow": lambda n, x: torch.arange(64, dtype=torch.int32).narrow(0, 0, n + 1),
}
"""Ways to write 0, 1, 2, ..., one query token per row."""

HEADS = ("head", "narrow")
"""Of an arange of a fixed length, which a padded batch may outgrow."""


def flattened(arange: Arange) -> Callable[..., Tensor]:
    def step(
        x: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        index_k: Tensor,
    ) -> Tensor:
        num_tokens = x.shape[0]
        row_lens, row_requests = ops.flatten_decode(query_start_loc, seq_lens, num_tokens)
        row_table = ops.expand_block_table(block_table, row_requests)
        ops.indexer_cache_write_(x, slot_mapping, index_k)
        row_starts = arange(num_tokens, x)
        logits = index_scores(x, index_k, row_table, row_starts, row_lens)
        return ops.indexer_topk(logits, row_lens, TOPK)

    return step


def starts_from_a_buffer(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    index_k: Tensor,
    counting: Tensor,
) -> Tensor:
    """A persistent arange: what it holds is not known in the step."""
    num_tokens = x.shape[0]
    row_lens, row_requests = ops.flatten_decode(query_start_loc, seq_lens, num_tokens)
    row_table = ops.expand_block_table(block_table, row_requests)
    ops.indexer_cache_write_(x, slot_mapping, index_k)
    logits = index_scores(x, index_k, row_table, counting[: num_tokens + 1], row_lens)
    return ops.indexer_topk(logits, row_lens, TOPK)


def table_by_indexing(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    index_k: Tensor,
) -> Tensor:
    """``block_table[row_requests]`` in place of the op; rows of padding take request 0's."""
    num_tokens = x.shape[0]
    row_lens, row_requests = ops.flatten_decode(query_start_loc, seq_lens, num_tokens)
    row_table = block_table[row_requests.clamp(min=0)]
    ops.indexer_cache_write_(x, slot_mapping, index_k)
    row_starts = torch.arange(num_tokens + 1, dtype=torch.int32)
    logits = index_scores(x, index_k, row_table, row_starts, row_lens)
    return ops.indexer_topk(logits, row_lens, TOPK)


def native(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    index_k: Tensor,
) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    ops.indexer_cache_write_(x, slot_mapping, index_k)
    logits = index_scores(x, index_k, block_table, query_start_loc, seq_lens)
    return ops.indexer_topk(logits, row_lens, TOPK)


def scaled_logits(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    index_k: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logits that something else wants too."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    ops.indexer_cache_write_(x, slot_mapping, index_k)
    logits = index_scores(x, index_k, block_table, query_start_loc, seq_lens)
    return ops.indexer_topk(logits, row_lens, TOPK), logits.amax(-1)


def sparse_mla(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    index_k: Tensor,
    kv: Tensor,
) -> tuple[Tensor, Tensor]:
    """Selection and attention, both flattened, both into one set of rows."""
    num_tokens = x.shape[0]
    row_lens, row_requests = ops.flatten_decode(query_start_loc, seq_lens, num_tokens)
    row_table = ops.expand_block_table(block_table, row_requests)
    row_starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=x.device)
    ops.indexer_cache_write_(x, slot_mapping, index_k)
    ops.kv_cache_write_(x, slot_mapping, kv)
    chosen = ops.indexer_select(
        x[:, None],
        torch.ones_like(x[:, :1]),
        index_k,
        row_table,
        row_starts,
        row_lens,
        MAX_SEQ_LEN,
        TOPK,
    )
    q = torch.stack([x, x.flip(-1)], 1)
    out, lse = ops.sparse_mla_decode(q, kv, chosen, row_table, row_starts, DIM**-0.5, DIM - 2)
    return out.flatten(1), lse


def caches() -> dict[str, Tensor]:
    return {"index_k": index_cache()}


MODELS = [
    *(
        Model(
            name=f"flattened, arange by {form}",
            step=flattened(arange),
            kept=caches,
            rewrites={"use_native_rows": 1, "fuse_select": 1},
            findings=(("padding unknown", "return ops.indexer_logits("),) if form in HEADS else (),
            exact=True,
            spelling=form not in ("end", "head"),
        )
        for form, arange in ARANGES.items()
    ),
    Model(
        name="flattened, arange from a buffer",
        step=starts_from_a_buffer,
        kept=lambda: {**caches(), "counting": torch.arange(65, dtype=torch.int32)},
        left_alone=(
            ("use_native_rows", "query_start_loc is not known to count 0, 1, 2"),
            ("fuse_select", "row_lens"),
        ),
        findings=(("padding unknown", "return ops.indexer_logits("),),
        exact=True,
    ),
    Model(
        name="flattened, table by indexing",
        step=table_by_indexing,
        kept=caches,
        left_alone=(
            ("use_native_rows", "the block table is not expanded by expand_block_table"),
            ("fuse_select", "row_lens"),
        ),
        exact=True,
    ),
    Model(
        name="native",
        step=native,
        kept=caches,
        rewrites={"fuse_select": 1},
        exact=True,
    ),
    Model(
        name="logits with another user",
        step=scaled_logits,
        kept=caches,
        left_alone=(("fuse_select", "the logits are also used by .amax()"),),
    ),
    Model(
        name="sparse MLA flattened",
        step=sparse_mla,
        kept=lambda: {**caches(), "kv": kv_cache()},
        rewrites={"use_native_rows": 2},
    ),
]
