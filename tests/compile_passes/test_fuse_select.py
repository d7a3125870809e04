import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.compile_passes.fuse_select import fuse_select
from tests.helpers import Batch, make_batch, nan_pool

from .support import trace

HEADS, HEAD_DIM, TOPK = 2, 8, 5


def make_inputs(batch: Batch, dtype: torch.dtype) -> list[Tensor]:
    cache = nan_pool(batch.num_blocks, batch.block_size * (HEAD_DIM + 4), dtype=torch.uint8)
    for request, blocks in enumerate(batch.blocks):
        seq_len = int(batch.seq_lens[request])
        places = [(p // batch.block_size, p % batch.block_size) for p in range(seq_len)]
        slots = torch.tensor(
            [blocks[b] * batch.block_size + offset for b, offset in places], dtype=torch.int64
        )
        ops.indexer_cache_write_(torch.randn(seq_len, HEAD_DIM), slots, cache)
    return [
        torch.randn(batch.num_tokens, HEADS, HEAD_DIM).to(dtype),
        torch.randn(batch.num_tokens, HEADS),
        cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
    ]


def ragged_batch() -> Batch:
    return make_batch([2, 0, 1, 3], [7, 0, 9, 3], trailing=2)


def select(q: Tensor, weights: Tensor, cache: Tensor, table: Tensor, qsl: Tensor, lens: Tensor):
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(logits, row_lens, TOPK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_fuse_select_keeps_the_result(dtype: torch.dtype, engine: str):
    inputs = make_inputs(ragged_batch(), dtype)
    expected = select(*inputs)
    compiled = torch.compile(select, backend="mtpgraph", fullgraph=True, options={"engine": engine})
    assert torch.equal(compiled(*inputs), expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_fuse_select_leaves_one_op(dynamic: bool):
    inputs = make_inputs(ragged_batch(), torch.float32)
    result, probe = trace(select, *inputs, passes=[fuse_select], dynamic=dynamic)
    assert torch.equal(result, select(*inputs))
    assert probe.counts == {"fuse_select": 1}
    assert probe.calls == {"indexer_select": 1}


@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_fuse_select_of_logits_that_are_fp32_in_words(logits_dtype: torch.dtype | None):
    def step(q, weights, cache, table, qsl, lens):
        row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
        logits = torch.ops.mtpgraph.indexer_logits(
            q, weights, cache, table, qsl, lens, 12, logits_dtype=logits_dtype
        )
        return ops.indexer_topk(logits, row_lens, TOPK)

    inputs = make_inputs(ragged_batch(), torch.float32)
    result, probe = trace(step, *inputs, passes=[fuse_select])
    assert torch.equal(result, select(*inputs))
    assert probe.calls == {"indexer_select": 1}


def test_fuse_select_keeps_flatten_decode_that_is_used():
    def step(q, weights, cache, table, qsl, lens):
        row_lens, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
        logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
        chosen = ops.indexer_topk(logits, row_lens, TOPK)
        return ops.topk_to_slots(chosen, table, row_requests, 4)

    inputs = make_inputs(ragged_batch(), torch.float32)
    result, probe = trace(step, *inputs, passes=[fuse_select])
    assert torch.equal(result, step(*inputs))
    assert probe.calls == {"indexer_select": 1, "topk_to_slots": 1, "flatten_decode": 1}


def test_fuse_select_of_a_call_by_keywords():
    def step(q, weights, cache, table, qsl, lens):
        row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
        logits = torch.ops.mtpgraph.indexer_logits(
            q, weights, cache, table, max_seq_len=12, seq_lens=lens, query_start_loc=qsl
        )
        return torch.ops.mtpgraph.indexer_topk(topk=TOPK, row_lens=row_lens, logits=logits)

    inputs = make_inputs(ragged_batch(), torch.float32)
    result, probe = trace(step, *inputs, passes=[fuse_select])
    assert probe.counts == {"fuse_select": 1}
    assert torch.equal(result, step(*inputs))


def test_fuse_select_after_lens_were_advanced_in_place():
    """A write before the first use leaves one value throughout."""

    def step(q, weights, cache, table, qsl, lens):
        lens.sub_(1)
        row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
        logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
        return ops.indexer_topk(logits, row_lens, TOPK)

    inputs = make_inputs(ragged_batch(), torch.float32)
    expected = step(*[x.clone() for x in inputs])
    result, probe = trace(step, *inputs, passes=[fuse_select])
    assert probe.counts == {"fuse_select": 1}
    assert torch.equal(result, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_fuse_select_in_each_draft_step(dynamic: bool):
    """A step may go on with lengths of its own in place: each select reads its own."""

    def step(q, weights, cache, table, qsl, lens):
        lens = lens.clone()
        chosen = []
        for _ in range(3):
            row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
            logits = ops.indexer_logits(q, weights, cache, table[:], qsl.view(-1), lens, 12)
            chosen.append(ops.indexer_topk(logits, row_lens.contiguous(), TOPK))
            lens.sub_(1)
        return torch.stack(chosen)

    inputs = make_inputs(ragged_batch(), torch.float32)
    expected = step(*inputs)
    result, probe = trace(step, *inputs, passes=[fuse_select], dynamic=dynamic)
    assert probe.counts == {"fuse_select": 3}
    assert torch.equal(result, expected)


def test_fuse_select_reads_the_cache_where_the_logits_did():
    def step(q, weights, cache, table, qsl, lens):
        row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
        logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
        cache.fill_(0)
        return ops.indexer_topk(logits, row_lens, TOPK)

    inputs = make_inputs(ragged_batch(), torch.float32)
    expected = step(*[x.clone() for x in inputs])
    result, probe = trace(step, *inputs, passes=[fuse_select])
    assert probe.counts == {"fuse_select": 1}
    assert torch.equal(result, expected)


def test_fuse_select_of_every_layer():
    def step(q, weights, cache, table, qsl, lens):
        row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
        chosen = []
        for scale in (1.0, 2.0, -1.0):
            logits = ops.indexer_logits(q * scale, weights, cache, table, qsl, lens, 12)
            chosen.append(ops.indexer_topk(logits, row_lens, TOPK))
        return torch.stack(chosen)

    inputs = make_inputs(ragged_batch(), torch.float32)
    result, probe = trace(step, *inputs, passes=[fuse_select])
    assert probe.counts == {"fuse_select": 3}
    assert torch.equal(result, step(*inputs))


def logits_used_twice(q, weights, cache, table, qsl, lens):
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(logits, row_lens, TOPK), logits.sum(1)


def other_row_lens(q, weights, cache, table, qsl, lens):
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(logits, torch.full_like(qsl, 2).new_full((q.shape[0],), 2), TOPK)


def shortened_row_lens(q, weights, cache, table, qsl, lens):
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(logits, row_lens - 1, TOPK)


def row_lens_of_other_lens(q, weights, cache, table, qsl, lens):
    row_lens, _ = ops.flatten_decode(qsl, lens - 1, q.shape[0])
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(logits, row_lens, TOPK)


def row_requests_for_row_lens(q, weights, cache, table, qsl, lens):
    _, row_requests = ops.flatten_decode(qsl, lens, q.shape[0])
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(logits, row_requests, TOPK)


def lens_written_between(q, weights, cache, table, qsl, lens):
    lens = lens.clone()
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    lens.sub_(1)
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(logits, row_lens, TOPK)


def lens_written_through_a_view(q, weights, cache, table, qsl, lens):
    lens = lens.clone()
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    lens[1:][:] = 0
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(logits, row_lens, TOPK)


def lens_written_before_the_row_lens(q, weights, cache, table, qsl, lens):
    lens = lens.clone()
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    lens.sub_(1)
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    return ops.indexer_topk(logits, row_lens, TOPK)


def row_lens_written_in_place(q, weights, cache, table, qsl, lens):
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    row_lens.clamp_(max=2)
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(logits, row_lens, TOPK)


def row_lens_written_after_the_logits(q, weights, cache, table, qsl, lens):
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    row_lens[0] = 1
    return ops.indexer_topk(logits, row_lens, TOPK)


def lens_computed_anew_after_a_write(q, weights, cache, table, qsl, lens):
    wide = lens.long()
    before = wide.int()
    wide.sub_(1)
    row_lens, _ = ops.flatten_decode(qsl, before, q.shape[0])
    logits = ops.indexer_logits(q, weights, cache, table, qsl, wide.int(), 12)
    return ops.indexer_topk(logits, row_lens, TOPK)


def lens_written_through_out(q, weights, cache, table, qsl, lens):
    lens = lens.clone()
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    torch.ops.aten.relu(lens - 3, out=lens)
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(logits, row_lens, TOPK)


def logits_changed_before_topk(q, weights, cache, table, qsl, lens):
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(-logits, row_lens, TOPK)


def logits_changed_in_place(q, weights, cache, table, qsl, lens):
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    logits[:, 0] = 1e9
    return ops.indexer_topk(logits, row_lens, TOPK)


def logits_rounded(q, weights, cache, table, qsl, lens):
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12, torch.bfloat16)
    return ops.indexer_topk(logits, row_lens, TOPK)


def logits_rounded_by_keyword(q, weights, cache, table, qsl, lens):
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    logits = torch.ops.mtpgraph.indexer_logits(
        q, weights, cache, table, qsl, lens, 12, logits_dtype=torch.bfloat16
    )
    return ops.indexer_topk(logits, row_lens, TOPK)


def logits_returned_beside(q, weights, cache, table, qsl, lens):
    row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
    logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
    return ops.indexer_topk(logits, row_lens, TOPK), logits


NOT_ROW_LENS = "row_lens is not the first result of flatten_decode"
NEAR_MISSES = {
    logits_rounded: "the logits are rounded to torch.bfloat16",
    logits_rounded_by_keyword: "the logits are rounded to torch.bfloat16",
    logits_used_twice: "the logits are also used by .sum()",
    logits_returned_beside: "the logits are also used by what the step returns",
    logits_changed_in_place: "the logits are also used by setitem",
    logits_changed_before_topk: "the logits are changed by neg",
    other_row_lens: NOT_ROW_LENS,
    shortened_row_lens: NOT_ROW_LENS,
    row_lens_of_other_lens: NOT_ROW_LENS,
    row_requests_for_row_lens: NOT_ROW_LENS,
    lens_written_between: ".sub_() in line",
    lens_written_through_a_view: "setitem in line",
    lens_written_before_the_row_lens: ".sub_() in line",
    row_lens_written_in_place: ".clamp_() in line",
    row_lens_written_after_the_logits: "setitem in line",
    lens_computed_anew_after_a_write: ".sub_() in line",
    lens_written_through_out: "aten.relu in line",
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_fuse_select_leaves_alone(near_miss: Callable[..., Tensor]):
    inputs = make_inputs(ragged_batch(), torch.float32)
    expected = near_miss(*inputs)
    result, probe = trace(near_miss, *inputs, passes=[fuse_select])
    assert probe.counts == {"fuse_select": 0}
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    (finding,) = probe.manager.findings
    assert (finding.kind, finding.found_by) == ("left alone", "fuse_select")
    assert NEAR_MISSES[near_miss] in finding.reason
    assert finding.remedy
    assert "ops.indexer_topk" in finding.code


def test_fuse_select_says_nothing_of_a_topk_of_other_scores():
    def step(q, weights, cache, table, qsl, lens):
        row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
        return ops.indexer_topk(q[:, 0].float() @ torch.ones(HEAD_DIM, 12), row_lens, TOPK)

    _, probe = trace(step, *make_inputs(ragged_batch(), torch.float32), passes=[fuse_select])
    assert probe.counts == {"fuse_select": 0}
    assert probe.manager.findings == []


def test_fuse_select_leaves_alone_topk_known_only_after_the_logits():
    def step(q, weights, cache, table, qsl, lens):
        row_lens, _ = ops.flatten_decode(qsl, lens, q.shape[0])
        logits = ops.indexer_logits(q, weights, cache, table, qsl, lens, 12)
        return ops.indexer_topk(logits, row_lens, weights.shape[0] - 3)

    inputs = make_inputs(ragged_batch(), torch.float32)
    result, probe = trace(step, *inputs, passes=[fuse_select], dynamic=True)
    after = [
        node
        for node in probe.graphs[0].graph.nodes
        if node.target in (operator.sub, operator.add) and node.users
    ]
    assert len(after) == 1, "the size must be computed in the graph for this to be a near miss"
    assert probe.counts == {"fuse_select": 0}
    (finding,) = probe.manager.findings
    assert finding.reason == "topk is computed after the logits"
    assert torch.equal(result, step(*inputs))
