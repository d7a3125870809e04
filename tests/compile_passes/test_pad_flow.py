"""What padding holds in offsets of query tokens, and in what ops make of them."""

import inspect
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import mtpgraph
from mtpgraph import Finding, ops
from mtpgraph.compile_passes.infer_batch import infer_inputs
from tests.helpers import assert_same_bits

DIM, BLOCK_SIZE, BLOCKS = 4, 4, 4
Batch = Sequence[Tensor]


def serve(
    step: Callable[..., Tensor], batches: Sequence[Batch], kept: Sequence[Tensor] = ()
) -> Sequence[Finding]:
    """The findings of a compiled step; results and what is kept are those of eager."""
    compiled = mtpgraph.compile(step, sizes=[4, 8, 16], next_n=2, engine="eager")
    other = [tensor.clone() for tensor in kept]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "batches are not padded")
        for batch in batches:
            assert_same_bits(compiled(*batch, *kept), step(*batch, *other))
            for tensor, expected in zip(kept, other, strict=True):
                assert_same_bits(tensor, expected)
    stats = compiled.stats()
    found = [finding for finding in stats.findings if finding.kind != "left alone"]
    assert all((size is None) == bool(found) for size in stats.calls), stats.calls
    return found


def ragged(query_lens: Sequence[int]) -> Batch:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(query_lens, dtype=torch.int32) + 3
    return torch.randn(sum(query_lens), DIM), starts, lens


RAGGED = [ragged([2, 1, 2]), ragged([1, 1, 1, 1, 2]), ragged([1, 2])]

PASSED_ON: dict[str, Callable[[Tensor], Tensor]] = {
    "as it came": lambda q: q,
    "cast": lambda q: q.to(torch.int64).to(torch.int32),
    "whole slice": lambda q: q[:],
    "clone": lambda q: q.clone(),
    "view": lambda q: q.view(-1),
    "there and back": lambda q: q[None].squeeze(0),
    "copied": lambda q: torch.empty_like(q).copy_(q),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_padding_tokens_are_of_no_request_where_offsets_are_an_input(name: str):
    """Real rows can be counted by it, and the first entry of a row of the table tells."""

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor) -> Tensor:
        starts = PASSED_ON[name](query_start_loc)
        _, row_requests = ops.flatten_decode(starts, seq_lens, x.shape[0])
        table = ops.expand_block_table(block_table.clamp(min=0), row_requests)
        return x / (row_requests >= 0).sum() + (table[:, 0] >= 0).sum()

    batches = [[*batch, torch.ones(len(batch[2]), BLOCKS, dtype=torch.int32)] for batch in RAGGED]
    assert not serve(step, batches)


UNKNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "head of an arange": lambda q, s: torch.arange(64, dtype=torch.int32)[: s.shape[0] + 1],
    "narrowed arange": lambda q, s: torch.arange(64, dtype=torch.int32).narrow(
        0, 0, s.shape[0] + 1
    ),
    "stepped head": lambda q, s: torch.arange(0, 64, 2, dtype=torch.int32)[: s.shape[0] + 1],
    "stepped arange": lambda q, s: torch.arange(0, 2 * s.shape[0] + 1, 2, dtype=torch.int32),
    "arange times two": lambda q, s: torch.arange(s.shape[0] + 1, dtype=torch.int32) * 2,
    "arange from one": lambda q, s: torch.arange(1, s.shape[0] + 2, dtype=torch.int32),
    "fewer requests than tokens": lambda q, s: torch.arange(s.shape[0] + 1, dtype=torch.int32),
    "every token the first one's": lambda q, s: torch.full_like(q, 64),
    "moved on": lambda q, s: q + 1,
    "cut off": lambda q, s: q.clamp(max=3),
    "written over": lambda q, s: q.clone().masked_fill_(q < 0, 0),
    "put together": lambda q, s: torch.cat([q[:1], q[1:]]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_offsets_whose_padding_may_have_tokens_are_refused(name: str):
    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        ops.has_initial_state(query_start_loc, seq_lens)
        starts = UNKNOWN[name](query_start_loc, seq_lens)
        _, row_requests = ops.flatten_decode(starts, seq_lens, x.shape[0])
        return torch.where((row_requests >= 0)[:, None], x, 0)

    (finding,) = serve(step, RAGGED)
    assert finding.kind == "padding unknown"
    assert finding.code.startswith("_, row_requests = ops.flatten_decode(starts")
    assert finding.reason.startswith(
        "query_start_loc of mtpgraph::flatten_decode must hold the last real entry in padding"
    )
    assert finding.remedy.startswith("pass query_start_loc as an input of the step")


def single(num_tokens: int) -> Batch:
    """Of one token each: rows, lengths and a block table."""
    blocks = torch.arange(num_tokens * BLOCKS, dtype=torch.int32).view(-1, BLOCKS)
    return torch.randn(num_tokens, DIM), torch.arange(num_tokens).int() + 3, blocks + 1


SINGLE = [single(3), single(5), single(2)]


def counted(x: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    starts = torch.arange(x.shape[0] + 1, dtype=torch.int32)
    return ops.flatten_decode(starts, seq_lens, x.shape[0])


def test_each_padding_token_may_be_of_a_request_of_its_own():
    """It sees no keys, and names a row of whatever has one for each request."""

    def step(x: Tensor, seq_lens: Tensor, block_table: Tensor) -> Tensor:
        row_lens, row_requests = counted(x, seq_lens)
        old = ops.has_initial_state(torch.arange(x.shape[0] + 1, dtype=torch.int32), seq_lens)
        rows = block_table[row_requests] + block_table[row_requests.clamp(min=0)]
        return x / row_lens.sum() + rows + (~old).sum()

    assert not serve(step, SINGLE)


def counts_real_rows(x: Tensor, seq_lens: Tensor, block_table: Tensor, kv: Tensor) -> Tensor:
    _, row_requests = counted(x, seq_lens)
    return x / (row_requests >= 0).sum() + block_table


def writes_where_a_request_is_named(
    x: Tensor, seq_lens: Tensor, block_table: Tensor, kv: Tensor
) -> Tensor:
    row_lens, row_requests = counted(x, seq_lens)
    place = row_lens - 1
    block = block_table[row_requests.clamp(min=0), place // BLOCK_SIZE]
    slots = torch.where(row_requests < 0, -1, block * BLOCK_SIZE + place % BLOCK_SIZE)
    ops.kv_cache_write_(x, slots.long(), kv)
    return x + row_lens[:, None]


def writes_where_the_table_has_a_row(
    x: Tensor, seq_lens: Tensor, block_table: Tensor, kv: Tensor
) -> Tensor:
    row_lens, row_requests = counted(x, seq_lens)
    table = ops.expand_block_table(block_table.clamp(min=0), row_requests)
    place = (row_lens - 1).clamp(min=0)
    block = table.gather(1, (place // BLOCK_SIZE).long()[:, None])[:, 0]
    slots = torch.where(table[:, 0] < 0, -1, block * BLOCK_SIZE + place % BLOCK_SIZE)
    ops.kv_cache_write_(x, slots.long(), kv)
    return x + row_lens[:, None]


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (counts_real_rows, "return x / (row_requests >= 0).sum() + block_table"),
        (writes_where_a_request_is_named, "ops.kv_cache_write_(x, slots.long(), kv)"),
        (writes_where_the_table_has_a_row, "table = ops.expand_block_table("),
    ],
)
def test_padding_tokens_with_a_request_are_not_taken_for_none(
    step: Callable[..., Tensor], line: str
):
    kv = torch.full((32, BLOCK_SIZE, DIM), 7.0)
    finding, *_ = serve(step, SINGLE, [kv])
    assert finding.code.startswith(line)


def test_a_row_table_has_padding_only_where_its_requests_do():
    """Requests that are clamped name request 0 in padding, so its blocks are written."""

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor) -> Tensor:
        _, row_requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        table = ops.expand_block_table(block_table, row_requests.clamp(min=0))
        return x / (table[:, 0] >= 0).sum()

    batches = [[*batch, torch.ones(len(batch[2]), BLOCKS, dtype=torch.int32)] for batch in RAGGED]
    findings = serve(step, batches)
    assert [finding.kind for finding in findings] == ["rows mixed", "padding unknown"]
    assert "row_requests of mtpgraph::expand_block_table must hold -1" in findings[1].reason


def test_rows_by_number_of_a_longer_table():
    """It was taken for one of a row per request, or is not known to go on in padding."""

    def step(x: Tensor, seq_lens: Tensor, table: Tensor) -> Tensor:
        row_lens, row_requests = counted(x, seq_lens)
        return x + row_lens[:, None] + table[row_requests.clamp(min=0)]

    def batch(num_tokens: int, rows: int) -> Batch:
        return *single(num_tokens)[:2], torch.randn(rows, DIM)

    longer, as_long = batch(3, 8), [batch(3, 3), batch(5, 5), batch(7, 7)]
    assert not serve(step, as_long)
    for batches in ([longer, *as_long], [as_long[0], longer, *as_long[1:]]):
        torch._dynamo.reset()
        compiled = mtpgraph.compile(step, sizes=[4, 8], engine="eager")
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", "batches are not padded")
            for arguments in batches:
                assert_same_bits(compiled(*arguments), step(*arguments))


def test_what_is_declared_of_padding_requests_holds():
    """With a token for each padding request, of which none has keys."""
    starts = torch.arange(6, dtype=torch.int32)
    lens = torch.tensor([4, 5, 6, 0, 0], dtype=torch.int32)
    row_lens, row_requests = ops.flatten_decode(starts, lens, 5)
    assert row_lens[3:].tolist() == [0, 0]
    assert row_requests.tolist() == [0, 1, 2, 3, 4]
    assert ops.has_initial_state(starts, lens)[3:].all()
    chosen = ops.indexer_select(
        torch.ones(5, 1, DIM),
        torch.ones(5, 1),
        torch.zeros(3, BLOCK_SIZE * (DIM + 4), dtype=torch.uint8),
        torch.ones(5, 2, dtype=torch.int32),
        starts,
        lens,
        2 * BLOCK_SIZE,
        3,
    )
    assert (chosen[3:] == -1).all()


def test_a_wrong_offset_leaves_the_results_unknown():
    def step(x: Tensor, seq_lens: Tensor) -> Tensor:
        starts = torch.arange(0, 2 * x.shape[0] + 1, 2, dtype=torch.int32)
        row_lens, _ = ops.flatten_decode(starts, seq_lens, x.shape[0])
        return x + x[row_lens]

    with torch.no_grad():
        call = inspect.signature(step).bind(*single(3)[:2])
        findings = infer_inputs(step, call, {}).findings
    reasons = [finding.reason for finding in findings]
    assert any(reason.startswith("query_start_loc of") for reason in reasons), reasons
    assert any(reason.startswith("an index must stay within") for reason in reasons), reasons


def test_the_last_token_of_a_request_without_tokens():
    """Its index is -1, which is the last row in eager and a row of padding in a padded batch."""

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return (x + row_lens[:, None])[query_start_loc[1:] - 1]

    def clamped(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return (x + row_lens[:, None])[(query_start_loc[1:] - 1).clamp(min=0)]

    batches = [ragged([2, 1, 2]), ragged([0, 1, 2]), ragged([1, 0, 2]), ragged([0, 0, 2])]
    (finding,) = serve(step, batches)
    assert finding.kind == "rows mixed"
    assert finding.code.startswith("return (x + row_lens[:, None])[query_start_loc[1:] - 1]")
    assert "may be negative" in finding.reason
    assert "hidden[(query_start_loc[1:] - 1).clamp(min=0)]" in finding.remedy
    assert not serve(clamped, batches)
