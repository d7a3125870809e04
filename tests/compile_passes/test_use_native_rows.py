from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental import _config

from mtpgraph import ops
from mtpgraph.compile_passes.fuse_select import fuse_select
from mtpgraph.compile_passes.use_native_rows import use_native_rows
from tests.helpers import Batch, assert_same_bits, each_batch, make_batch, nan_pool, random_case

from .support import trace

# torch installs ``patch`` on its config modules when they are imported
symbolic_config: Any = _config

HEADS, HEAD_DIM, LATENT, TOPK, WIDTH = 2, 8, 6, 5, 12


def make_inputs(batch: Batch, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, weights, an index cache, a kv cache and the batch; what no request owns is NaN."""
    cache = nan_pool(batch.num_blocks, batch.block_size * (HEAD_DIM + 4), dtype=torch.uint8)
    kv_cache = nan_pool(batch.num_blocks, batch.block_size, HEAD_DIM, dtype=dtype)
    for request, blocks in enumerate(batch.blocks):
        seq_len = int(batch.seq_lens[request])
        places = [(blocks[p // batch.block_size], p % batch.block_size) for p in range(seq_len)]
        slots = [block * batch.block_size + offset for block, offset in places]
        keys = torch.randn(seq_len, HEAD_DIM)
        ops.indexer_cache_write_(keys, torch.tensor(slots, dtype=torch.int64), cache)
        for (block, offset), key in zip(places, keys, strict=True):
            kv_cache[block, offset] = key.to(dtype)
    return [
        torch.randn(batch.num_tokens, HEADS, HEAD_DIM).to(dtype),
        torch.randn(batch.num_tokens, HEADS),
        cache,
        kv_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
    ]


def ragged_batch() -> Batch:
    """New requests, others, padding of both kinds and padding tokens."""
    return make_batch([2, 0, 1, 3, 2], [7, 0, 9, 3, 0], trailing=2)


def logits(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def select(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(0, q.shape[0] + 1, dtype=torch.int32)
    return ops.indexer_select(q, weights, cache, rows, starts, row_lens, WIDTH, TOPK)


def attend(q, weights, cache, kv_cache, table, qsl, lens):
    """Also with indices that a padding token and one with few keys should not have."""
    _, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    chosen = torch.arange(4, dtype=torch.int32).expand(q.shape[0], 4) - 1
    out, lse = ops.sparse_mla_decode(q, kv_cache, chosen, rows, starts, 0.5, LATENT)
    return torch.cat([out.float().flatten(1), lse], 1)


def attend_to_selected(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    scores = ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)
    chosen = ops.indexer_topk(scores, row_lens, TOPK)
    out, lse = ops.sparse_mla_decode(q, kv_cache, chosen, rows, starts, 0.5, LATENT)
    return torch.cat([out.float().flatten(1), lse], 1)


def rounded_logits(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH, torch.bfloat16)


FORMS = [logits, rounded_logits, select, attend, attend_to_selected]


@each_batch
@pytest.mark.parametrize("form", FORMS)
def test_use_native_rows_gives_the_same_bits(form: Callable[..., Tensor], case):
    query_lens, seq_lens, trailing = case
    batch = make_batch(query_lens, seq_lens, trailing=trailing, extra_columns=12)
    inputs = make_inputs(batch)
    result, probe = trace(form, *inputs, passes=[use_native_rows])
    assert_same_bits(result, form(*inputs))
    assert probe.counts == {"use_native_rows": 2 if form is attend_to_selected else 1}
    assert probe.calls["expand_block_table"] == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_use_native_rows_of_every_dtype(form, dtype: torch.dtype, dynamic: bool):
    inputs = make_inputs(ragged_batch(), dtype)
    result, probe = trace(form, *inputs, passes=[use_native_rows], dynamic=dynamic)
    assert probe.counts["use_native_rows"] > 0
    assert probe.calls["expand_block_table"] == 0
    assert_same_bits(result, form(*inputs))


@pytest.mark.parametrize("form", FORMS)
def test_use_native_rows_serves_other_batches_with_the_same_graph(form):
    """What holds for any batch that fits the traced sizes holds for all that come."""
    torch.manual_seed(0)
    batches = [ragged_batch()]
    while len(batches) < 12:
        query_lens, seq_lens, trailing = random_case()
        if len(query_lens) > 1 and sum(query_lens) + trailing > 1:
            batches.append(make_batch(query_lens, seq_lens, trailing=trailing, extra_columns=12))
    _, probe = trace(form, *make_inputs(batches[0]), passes=[use_native_rows], dynamic=True)
    compiled = torch.compile(form, backend=probe, fullgraph=True, dynamic=True)
    for batch in batches:
        inputs = make_inputs(batch)
        assert_same_bits(compiled(*inputs), form(*inputs))
    assert probe.counts["use_native_rows"] >= len(probe.graphs)
    assert probe.calls["expand_block_table"] == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_use_native_rows_lets_fuse_select_see_the_native_form(dynamic: bool):
    inputs = make_inputs(ragged_batch())
    result, probe = trace(
        attend_to_selected, *inputs, passes=[use_native_rows, fuse_select], dynamic=dynamic
    )
    assert probe.counts == {"use_native_rows": 2, "fuse_select": 1}
    assert probe.calls == {"indexer_select": 1, "sparse_mla_decode": 1}
    assert not [node for node in probe.graphs[0].graph.nodes if node.target is torch.arange]
    assert_same_bits(result, attend_to_selected(*inputs))


def test_use_native_rows_in_every_layer_with_ops_between():
    def step(q, weights, cache, kv_cache, table, qsl, lens):
        total = torch.zeros(q.shape[0], WIDTH)
        for layer in range(3):
            row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
            rows = ops.expand_block_table(table, row_requests).contiguous()
            starts = torch.arange(q.shape[0] + 1).to(torch.int32)
            ops.indexer_cache_write_(q[:1, 0], torch.tensor([layer]), cache)
            q = torch.nn.functional.silu(q) * 0.5 + q
            scores = ops.indexer_logits(q, weights, cache, rows, starts, row_lens.clone(), WIDTH)
            total = total + scores.nan_to_num(neginf=-1.0)
        return total

    inputs, again = make_inputs(ragged_batch()), []
    again = [value.clone() for value in inputs]
    result, probe = trace(step, *inputs, passes=[use_native_rows])
    assert_same_bits(result, step(*again))
    assert_same_bits(inputs[2], again[2])
    assert probe.counts == {"use_native_rows": 3}
    assert probe.calls == {"indexer_logits": 3, "indexer_cache_write_": 3}


COUNTS = {
    "int64 cast": lambda n: torch.arange(n).to(torch.int32),
    "int": lambda n: torch.arange(0, n).int(),
    "keywords": lambda n: torch.arange(start=0, end=n, step=1, dtype=torch.int32),
    "head of a longer one": lambda n: torch.arange(64, dtype=torch.int32)[:n],
    "head of a cast one": lambda n: torch.arange(64).int()[0:n].contiguous(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS.keys())
def test_use_native_rows_knows_what_counts_up(count: Callable[[int], Tensor], dynamic: bool):
    def step(q, weights, cache, kv_cache, table, qsl, lens):
        row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
        rows = ops.expand_block_table(table, row_requests)
        starts = count(q.shape[0] + 1)
        return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)

    inputs = make_inputs(ragged_batch())
    result, probe = trace(step, *inputs, passes=[use_native_rows], dynamic=dynamic)
    assert probe.counts == {"use_native_rows": 1}
    assert_same_bits(result, step(*inputs))


@pytest.mark.parametrize("form", FORMS)
def test_use_native_rows_with_a_symbol_for_every_size(form):
    """As mtpgraph.compile traces. Nothing in the step says that the table has a row per request:
    a guard does, and a table that has more is served by other code."""
    inputs = make_inputs(ragged_batch())
    with symbolic_config.patch(use_duck_shape=False):
        result, probe = trace(form, *inputs, passes=[use_native_rows], dynamic=True)
        assert_same_bits(result, form(*inputs))
        assert probe.calls["expand_block_table"] == 0

        compiled = torch.compile(form, backend=probe, fullgraph=True, dynamic=True)
        others = make_inputs(make_batch([1, 4, 2], [9, 4, 12], trailing=1))
        assert_same_bits(compiled(*others), form(*others))
        assert len(probe.graphs) == 1

        others[4] = torch.cat([others[4], others[4]])
        assert_same_bits(compiled(*others), form(*others))
        assert len(probe.graphs) == 2
        assert probe.calls["expand_block_table"] == 1
        assert all(
            "is not known to have a row for each of the requests" in finding.reason
            for finding in probe.manager.findings
        )
        assert_same_bits(compiled(*inputs), form(*inputs))
        assert len(probe.graphs) == 2


def starts_from_outside(q, weights, cache, kv_cache, table, qsl, lens):
    """A buffer may hold anything: here, two tokens to a request."""
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.full((q.shape[0] + 1,), 2, dtype=torch.int32).cumsum(0).int() - 2
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def starts_by_two(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(0, 2 * q.shape[0] + 2, 2, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def starts_at_one(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(1, q.shape[0] + 2, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def starts_at_the_tail(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(q.shape[0] + 2, dtype=torch.int32)[1:]
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def starts_of_rounded_numbers(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.bfloat16).int()
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def starts_written(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    starts[3:] = 3
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def other_lens(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens - 1, WIDTH)


def lens_of_another_batch(q, weights, cache, kv_cache, table, qsl, lens):
    _, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    row_lens, _ = ops.flatten_decode(qsl, lens - 1, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def requests_for_lens(q, weights, cache, kv_cache, table, qsl, lens):
    _, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_requests, WIDTH)


def other_rows(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests.flip(0))
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def table_gathered_by_hand(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = table.flip(0)[row_requests.clamp(min=0).long()]
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def table_with_more_rows(q, weights, cache, kv_cache, table, qsl, lens):
    """Legal flattened, refused by the native op."""
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(torch.cat([table, table]), row_requests)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def more_queries_than_tokens(q, weights, cache, kv_cache, table, qsl, lens):
    """The last tokens of the batch are cut off flattened, and would not be natively."""
    num_tokens = q.shape[0] - 5
    row_lens, row_requests = ops.flatten_decode(qsl, lens, num_tokens)
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(num_tokens + 1, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def table_written(q, weights, cache, kv_cache, table, qsl, lens):
    table = table.clone()
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    table.fill_(-1)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def rows_written(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    rows[0] = -1
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def lens_written(q, weights, cache, kv_cache, table, qsl, lens):
    """One draft step after the other: the lengths go on before the first rows are used."""
    lens = lens.clone()
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    lens.add_(1)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def row_lens_written(q, weights, cache, kv_cache, table, qsl, lens):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests)
    row_lens.clamp_(max=2)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return ops.indexer_logits(q, weights, cache, rows, starts, row_lens, WIDTH)


def attention_by_other_rows(q, weights, cache, kv_cache, table, qsl, lens):
    _, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    rows = ops.expand_block_table(table, row_requests.clamp(min=0))
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    chosen = torch.zeros(q.shape[0], 4, dtype=torch.int32)
    return ops.sparse_mla_decode(q, kv_cache, chosen, rows, starts, 0.5, LATENT)


NEAR_MISSES = {
    starts_from_outside: "query_start_loc is not known to count",
    starts_by_two: "query_start_loc is not known to count",
    starts_at_one: "query_start_loc is not known to count",
    starts_at_the_tail: "query_start_loc is not known to count",
    starts_of_rounded_numbers: "query_start_loc is not known to count",
    starts_written: "setitem",
    other_lens: "seq_lens is not the row_lens",
    lens_of_another_batch: "seq_lens is not the row_lens",
    requests_for_lens: "seq_lens is not the row_lens",
    other_rows: "expanded by other rows",
    attention_by_other_rows: "expanded by other rows",
    table_gathered_by_hand: "the block table is not expanded by expand_block_table",
    table_with_more_rows: "is not known to have a row for each of the requests",
    more_queries_than_tokens: "not known to have as many queries",
    table_written: ".fill_()",
    rows_written: "setitem",
    lens_written: ".add_()",
    row_lens_written: ".clamp_()",
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_use_native_rows_leaves_alone(near_miss: Callable[..., Tensor]):
    inputs = make_inputs(ragged_batch())
    expected = near_miss(*(value.clone() for value in inputs))
    result, probe = trace(near_miss, *inputs, passes=[use_native_rows])
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert probe.counts == {"use_native_rows": 0}
    (finding,) = probe.manager.findings
    assert (finding.kind, finding.found_by) == ("left alone", "use_native_rows")
    assert NEAR_MISSES[near_miss] in finding.reason
    assert finding.remedy
    assert finding.file == __file__
    assert "ops.indexer_logits" in finding.code or "ops.sparse_mla_decode" in finding.code


def test_use_native_rows_says_nothing_of_the_native_form():
    def step(q, weights, cache, kv_cache, table, qsl, lens):
        return ops.indexer_select(q, weights, cache, table, qsl, lens, WIDTH, TOPK)

    _, probe = trace(step, *make_inputs(ragged_batch()), passes=[use_native_rows])
    assert probe.counts == {"use_native_rows": 0}
    assert probe.manager.findings == []
