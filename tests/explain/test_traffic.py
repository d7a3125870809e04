"""Bytes of single calls against counts by hand, and our ops' formulas."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpgraph import ops
from mtpgraph.explanation.record import Op
from mtpgraph.explanation.trace import examine


def moved(fn: Callable[..., Any], *args: Any, known: bool = True) -> Op:
    """The one op of ``fn`` that is no picking out of a tuple."""
    found = examine(fn, args, {}, made_up=not known)
    (op,) = [op for op in found.ops if op.name != "getitem" or op.bytes]
    return op


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def write_row(x: Tensor, index: Tensor, row: Tensor) -> Tensor:
    x[index] = row
    return x


# (what, call, arguments, bytes read, bytes written, a bound)
PLAIN: list[tuple[str, Callable[..., Any], tuple[Tensor, ...], int, int, bool]] = [
    ("add", lambda a, b: a + b, (torch.ones(3, 5), torch.ones(3, 5)), 120, 60, False),
    ("same tensor twice", lambda a: a * a, (torch.ones(3, 5),), 60, 60, False),
    ("half", lambda a: a + 1, (torch.ones(7, dtype=torch.bfloat16),), 14, 14, False),
    ("expanded", lambda a: a + 1, (torch.ones(3, 1).expand(3, 5),), 12, 60, False),
    ("view", lambda a: a.view(15), (torch.ones(3, 5),), 0, 0, False),
    ("fill", lambda a: a.zero_(), (torch.ones(3, 5),), 0, 60, False),
    ("copy", lambda a, b: a.copy_(b), (torch.ones(3, 5), torch.ones(3, 5)), 60, 60, False),
    ("like", lambda a: torch.ones_like(a), (torch.ones(3, 5),), 0, 60, False),
    ("empty", lambda a: torch.empty_like(a), (torch.ones(3, 5),), 0, 0, False),
    (
        "embedding",
        lambda ids, table: F.embedding(ids, table),
        (torch.zeros(3, dtype=torch.int64), torch.ones(1000, 4)),
        24 + 48,
        48,
        False,
    ),
    (
        "index",
        lambda x, index: x[index],
        (torch.ones(1000, 4), torch.zeros(3, dtype=torch.int64)),
        24 + 48,
        48,
        False,
    ),
    (
        "set rows",
        write_row,
        (torch.ones(1000, 4), torch.zeros(3, dtype=torch.int64), torch.ones(3, 4)),
        24 + 48,
        48,
        False,
    ),
    (
        "scatter",
        lambda x, i, v: x.index_add_(0, i, v),
        (torch.ones(1000, 4), torch.zeros(3, dtype=torch.int64), torch.ones(3, 4)),
        24 + 48 + 48,
        48,
        False,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "args", "read", "written", "at_most"),
    [case[1:] for case in PLAIN],
    ids=[case[0] for case in PLAIN],
)
def test_traffic_of_torch(
    call: Callable[..., Any], args: tuple[Any, ...], read: int, written: int, at_most: bool
) -> None:
    op = moved(call, *args)
    assert (op.read, op.written, op.at_most) == (read, written, at_most)


HEADS, HEAD_DIM, BLOCK, BLOCKS = 2, 16, 4, 50


def indexer_inputs() -> tuple[Any, ...]:
    """Two requests of 10 and 6 keys with 3 query tokens, in a cache of 200 keys."""
    return (
        torch.randn(3, HEADS, HEAD_DIM),
        torch.randn(3, HEADS),
        torch.zeros(BLOCKS, BLOCK * (HEAD_DIM + 4), dtype=torch.uint8),
        torch.zeros(2, 8, dtype=torch.int32),
        int32(0, 2, 3),
        int32(10, 6),
    )


Q = 3 * HEADS * HEAD_DIM * 4 + 3 * HEADS * 4 + 3 * 4 + 2 * 4
"""Queries, weights, starts and lengths."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("known", "keys"), [(True, 16), (False, 64)])
def test_traffic_of_logits(known: bool, keys: int, dtype: torch.dtype) -> None:
    """Keys of the contexts with their scales and their entries in the table; not the cache."""
    score = partial(ops.indexer_logits, max_seq_len=32, logits_dtype=dtype)
    op = moved(score, *indexer_inputs(), known=known)
    assert op.read == Q + keys * (HEAD_DIM + 4) + keys // BLOCK * 4
    assert (op.written, op.at_most) == (3 * 32 * dtype.itemsize, not known)


def test_traffic_of_select() -> None:
    """The logits go to scratch memory and come back, unless every key is chosen."""
    op = moved(partial(ops.indexer_select, max_seq_len=32, topk=8), *indexer_inputs())
    logits = 3 * 32 * 4
    assert op.read == Q + 16 * (HEAD_DIM + 4) + 4 * 4 + logits
    assert op.written == logits + 3 * 8 * 4
    assert (
        moved(partial(ops.indexer_select, max_seq_len=32, topk=32), *indexer_inputs()).written
        == 3 * 32 * 4
    )


def test_traffic_of_attention() -> None:
    """``topk`` keys for each query token, not the cache."""
    q, kv = torch.randn(3, HEADS, 24), torch.randn(BLOCKS, BLOCK, 24)
    chosen = torch.zeros(3, 5, dtype=torch.int32)
    table, starts = torch.zeros(2, 8, dtype=torch.int32), int32(0, 2, 3)
    op = moved(
        partial(ops.sparse_mla_decode, scale=0.1, latent_dim=16), q, kv, chosen, table, starts
    )  # fmt: skip
    assert op.read == q.numel() * 4 + 60 + 12 + 3 * 5 * (24 * 4 + 4)
    assert (op.written, op.at_most) == (3 * HEADS * 16 * 4 + 3 * HEADS * 4, True)


def test_traffic_of_cache_writes() -> None:
    slots = torch.tensor([0, -1, 9])
    cache = torch.zeros(BLOCKS, BLOCK * (HEAD_DIM + 4), dtype=torch.uint8)
    k = torch.randn(3, HEAD_DIM)
    op = moved(ops.indexer_cache_write_, k, slots, cache)
    assert (op.read, op.written, op.at_most) == (3 * HEAD_DIM * 4 + 24, 3 * (HEAD_DIM + 4), True)
    kv = torch.randn(BLOCKS, BLOCK, HEAD_DIM)
    op = moved(ops.kv_cache_write_, k, slots, kv)
    assert (op.read, op.written, op.at_most) == (3 * HEAD_DIM * 4 + 24, 3 * HEAD_DIM * 4, True)
    fp8 = torch.zeros(BLOCKS, BLOCK, 656, dtype=torch.uint8)
    op = moved(ops.kv_cache_write_, torch.randn(3, 576), slots, fp8)
    assert (op.read, op.written, op.at_most) == (3 * 576 * 4 + 24, 3 * 656, True)


@pytest.mark.parametrize(("per_token", "stores"), [(False, 2), (True, 3)])
def test_traffic_of_state_update(per_token: bool, stores: int) -> None:
    """One slot read for each request, one written for each store; not the pool."""
    state = torch.zeros(100, 4, 8, 16)
    x, dt, decay = torch.randn(3, 4, 8), torch.randn(3, 4), torch.ones(4)
    b = torch.randn(3, 1, 16)
    indices = torch.zeros(2, 2, dtype=torch.int32) if per_token else int32(0, 1)
    starts = int32(0, 2, 3)

    def update(
        state: Tensor, x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, i: Tensor, starts: Tensor
    ) -> Tensor:
        return ops.selective_state_update_(state, x, dt, decay, b, b, i, starts)

    op = moved(update, state, x, dt, decay, b, indices, starts)
    slot = 4 * 8 * 16 * 4
    beside = sum(t.numel() * 4 for t in (x, dt, decay, b, b, indices, starts))
    assert op.read == 2 * slot + beside
    assert op.written == stores * slot + x.numel() * 4
    assert op.mutates == ("state",)


def test_traffic_of_reset() -> None:
    state = torch.zeros(100, 4, 8)
    op = moved(ops.reset_states_, state, int32(0, 1, 2), torch.zeros(3).bool())
    assert (op.read, op.written, op.at_most) == (12 + 3, 3 * 4 * 8 * 4, True)
