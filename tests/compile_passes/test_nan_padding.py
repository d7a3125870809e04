"""What engines write beside the ops, padded with NaN: numbers are those of eager, or it is said
why a batch is not padded."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mtpgraph
from mtpgraph import Batched, Static, ops
from mtpgraph.compile_passes import input_plan
from mtpgraph.compile_passes.infer_batch import Inferred, infer_inputs
from tests.helpers import assert_same_bits

DIM, VOCAB, BLOCKS = 4, 7, 3
Step = Callable[..., Any]
REQUEST, TOKEN = Batched(0), Batched(0, per="token")


@pytest.fixture(autouse=True)
def nan_in_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats are padded with NaN, if with any number."""

    def infer(fn: Any, bound: Any, *others: Any) -> Inferred:
        found = infer_inputs(fn, bound, *others)
        floats = [
            n for n, v in bound.arguments.items() if isinstance(v, Tensor) and v.is_floating_point()
        ]
        inputs = {
            name: dataclasses.replace(spec, pad=math.nan)
            if name in floats and isinstance(spec, Batched)
            else spec
            for name, spec in found.inputs.items()
        }
        return dataclasses.replace(found, inputs=inputs)

    monkeypatch.setattr(input_plan, "infer_inputs", infer)


def batch_of(query_lens: list[int]) -> dict[str, Tensor]:
    """Arguments by the names that steps have for them."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    requests, tokens = len(query_lens), sum(query_lens)
    return {
        "x": torch.randn(tokens, DIM),
        "q": starts,
        "s": torch.tensor(query_lens, dtype=torch.int32) + torch.arange(requests).int() + 3,
        "table": torch.randint(0, 99, (requests, BLOCKS), dtype=torch.int32),
        "draft": torch.randint(0, VOCAB, (requests, 3)),
        "accepted": torch.randint(1, 4, (requests,)),
        "ids": torch.randint(0, VOCAB, (tokens,)),
        "logits": torch.randn(tokens, VOCAB),
        "weight": torch.randn(DIM, VOCAB),
        "idx": torch.arange(requests).int(),
    }


def arguments(step: Step, batch: dict[str, Tensor]) -> list[Tensor]:
    code = step.__code__
    return [batch[name].clone() for name in code.co_varnames[: code.co_argcount]]


QUERY_LENS = [[2, 1, 2], [2, 1, 2], [1, 1], [1, 1, 2, 1, 2], [2, 2], [2], [1, 2, 1], [1] * 8]


def serve(step: Step, batches: int = len(QUERY_LENS)) -> mtpgraph.CompiledStep:
    """A compiled step whose results and arguments were those of eager."""
    compiled = mtpgraph.compile(step, sizes=[1, 2, 4, 8], next_n=2, engine="eager")
    with torch.no_grad():
        for query_lens in QUERY_LENS[:batches]:
            batch = batch_of(query_lens)
            given, expected_given = arguments(step, batch), arguments(step, batch)
            actual, expected = compiled(*given), step(*expected_given)
            for one, other in zip(actual, expected, strict=True):
                assert_same_bits(one, other)
            for one, other in zip(given, expected_given, strict=True):
                assert_same_bits(one, other)
    return compiled


def hidden(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(q, s, x.shape[0])
    return x + row_lens[:, None]


def block_of_the_next_token(x: Tensor, q: Tensor, s: Tensor, table: Tensor) -> Any:
    """As vLLM's drafters find it."""
    return hidden(x, q, s), table.gather(1, (s.long() // 8)[:, None])


def block_by_numbers(x: Tensor, q: Tensor, s: Tensor, table: Tensor) -> Any:
    return hidden(x, q, s), table[torch.arange(s.shape[0]), s.long() // 8]


def block_by_columns(x: Tensor, q: Tensor, s: Tensor, table: Tensor) -> Any:
    return hidden(x, q, s), table[torch.arange(s.shape[0])[:, None], torch.arange(2)]


def accepted_draft(x: Tensor, q: Tensor, s: Tensor, draft: Tensor, accepted: Tensor) -> Any:
    return hidden(x, q, s), draft.gather(1, (accepted - 1)[:, None])[:, 0] + s


def log_probabilities(x: Tensor, q: Tensor, s: Tensor, weight: Tensor, ids: Tensor) -> Any:
    return ((hidden(x, q, s) @ weight).double().log_softmax(-1).gather(1, ids[:, None]) * 0,)


def penalties(x: Tensor, q: Tensor, s: Tensor, logits: Tensor, ids: Tensor) -> Any:
    return (logits.scatter_add(1, ids[:, None], hidden(x, q, s)[:, :1]),)


def one_hot(x: Tensor, q: Tensor, s: Tensor, ids: Tensor) -> Any:
    return (torch.zeros(x.shape[0], VOCAB).scatter_(1, ids[:, None], hidden(x, q, s)[:, :1]),)


def bad_words(x: Tensor, q: Tensor, s: Tensor, ids: Tensor) -> Any:
    logits = hidden(x, q, s).repeat(1, 2)
    logits[torch.arange(x.shape[0]), ids] = -math.inf
    return (logits,)


def experts(x: Tensor, q: Tensor, s: Tensor) -> Any:
    h = hidden(x, q, s)
    chosen = torch.zeros_like(h)
    chosen[torch.arange(x.shape[0])[:, None], h.topk(2).indices] = h[:, :2]
    return (chosen,)


def sums_up_to(x: Tensor, q: Tensor, s: Tensor) -> Any:
    h = hidden(x, q, s)
    return h.cumsum(0), h.cumprod(0), h.logcumsumexp(0), h.cummax(0).values, s.cumsum(0)


def longest(x: Tensor, q: Tensor, s: Tensor) -> Any:
    return hidden(x, q, s) / s.max(), s - s.amax()


def longest_row(x: Tensor, q: Tensor, s: Tensor) -> Any:
    row_lens, row_requests = ops.flatten_decode(q, s, x.shape[0])
    return x / row_lens.max(), x * (row_requests + 1).amax()


def padded_features(x: Tensor, q: Tensor, s: Tensor) -> Any:
    h = hidden(x, q, s)
    return F.pad(h, (0, 3)), F.pad(h, (1, 2), value=2.0), F.pad(h, (0, 0, 1, 0))


def mirrored_features(x: Tensor, q: Tensor, s: Tensor) -> Any:
    h = hidden(x, q, s)[:, None]
    return F.pad(h, (1, 2), mode="reflect"), F.pad(h, (1, 2), mode="replicate")


def last_tokens(x: Tensor, q: Tensor, s: Tensor) -> Any:
    return (hidden(x, q, s)[(q[1:] - 1).clamp(min=0)],)


PADDED: dict[Step, dict[str, Batched]] = {
    block_of_the_next_token: {"table": REQUEST},
    block_by_numbers: {"table": REQUEST},
    block_by_columns: {"table": REQUEST},
    accepted_draft: {"draft": REQUEST, "accepted": Batched(0, pad=1)},
    log_probabilities: {"ids": TOKEN},
    penalties: {"ids": TOKEN, "logits": TOKEN},
    one_hot: {"ids": TOKEN},
    bad_words: {"ids": TOKEN},
    experts: {},
    sums_up_to: {},
    longest: {},
    longest_row: {},
    padded_features: {},
    mirrored_features: {},
    last_tokens: {},
}
"""What is padded, and what nothing but the use of its rows tells of its arguments."""


@pytest.mark.parametrize("step", PADDED, ids=lambda step: step.__name__)
def test_a_step_whose_rows_are_provably_apart_is_padded(step: Step):
    compiled = serve(step)
    stats = compiled.stats()
    assert not [at for at in stats.findings if at.kind != "mutation hazard"], stats.findings
    assert stats.calls == {4: 3, 2: 2, 8: 2, 1: 1}
    # one compilation for all sizes
    assert (stats.graphs, stats.recompiles) == (1, 0)
    for name, expected in PADDED[step].items():
        found: Any = compiled.inputs[name]
        pad = found.pad if expected.pad == 0 and math.isnan(found.pad) else expected.pad
        assert found == dataclasses.replace(expected, pad=pad), name


def scan_from_behind(x: Tensor, q: Tensor, s: Tensor) -> Any:
    return (hidden(x, q, s).flip(0).cumsum(0).flip(0),)


def written_by_a_scan(x: Tensor, q: Tensor, s: Tensor) -> Any:
    kv = torch.zeros(5, 4, DIM)
    ops.kv_cache_write_(hidden(x, q, s), (x[:, 0] > 9).long().cumsum(0), kv)
    return (kv,)


def shortest(x: Tensor, q: Tensor, s: Tensor) -> Any:
    return (hidden(x, q, s) / s.min(),)


def place_of_the_longest(x: Tensor, q: Tensor, s: Tensor) -> Any:
    return (hidden(x, q, s) + s.max(0).indices,)


def most_room(x: Tensor, q: Tensor, s: Tensor) -> Any:
    return (hidden(x, q, s) + (20 - s).max(),)


def put_across(x: Tensor, q: Tensor, s: Tensor) -> Any:
    h = hidden(x, q, s)
    rows, column = torch.arange(x.shape[0]), (h[:, :1] > 0).long()
    return (torch.zeros_like(h).index_put((rows, column), h[:, :1]),)


def put_by_index(x: Tensor, q: Tensor, s: Tensor, ids: Tensor) -> Any:
    h = hidden(x, q, s)
    h[ids.clamp(max=0)] = 1.0
    return (h,)


def put_in_an_input(x: Tensor, q: Tensor, s: Tensor, logits: Tensor, ids: Tensor) -> Any:
    logits[torch.arange(x.shape[0]), ids] = 0.0
    return hidden(x, q, s), logits * 2


def scatter_along_rows(x: Tensor, q: Tensor, s: Tensor, ids: Tensor) -> Any:
    h = hidden(x, q, s)
    return (h.scatter(0, (ids[:, None] % 2), 0.0),)


def row_behind(x: Tensor, q: Tensor, s: Tensor) -> Any:
    return (F.pad(hidden(x, q, s), (0, 0, 0, 1)),)


def last_row_repeated(x: Tensor, q: Tensor, s: Tensor) -> Any:
    return (F.pad(hidden(x, q, s).t()[None], (0, 1), mode="replicate"),)


def chosen_by_cond(x: Tensor, q: Tensor, s: Tensor) -> Any:
    return (torch.cond((s > 0).any(), lambda h: h * 2, lambda h: h * 3, (hidden(x, q, s),)),)


def taken_along(x: Tensor, q: Tensor, s: Tensor, table: Tensor) -> Any:
    return hidden(x, q, s), torch.take_along_dim(table, (s.long() // 8)[:, None], 1)


NOT_PADDED: dict[Step, tuple[str, str]] = {
    scan_from_behind: ("flips along dimension 0", ""),
    written_by_a_scan: ("slot_mapping of mtpgraph::kv_cache_write_ must hold -1 or less", ""),
    shortest: ("reduces over dimension 0", ""),
    place_of_the_longest: ("reduces over dimension 0", ""),
    most_room: ("reduces over dimension 0", ""),
    put_across: ("scatters rows by index", ""),
    put_by_index: ("scatters rows by index", ""),
    put_in_an_input: ("writes an input that grows with the batch", ""),
    scatter_along_rows: ("scatters across dimension 0", ""),
    row_behind: ("puts something behind the padding of dimension 0", ""),
    last_row_repeated: ("works across a dimension that grows", ""),
    taken_along: ("is for 3 requests whatever the batch", "write take_along_dim as gather"),
}
"""Near misses: a part of the reason, and of the remedy."""


@pytest.mark.parametrize("step", NOT_PADDED, ids=lambda step: step.__name__)
@pytest.mark.filterwarnings("ignore:batches are not padded:RuntimeWarning")
def test_a_step_whose_rows_may_mix_runs_at_its_sizes(step: Step):
    reason, remedy = NOT_PADDED[step]
    stats = serve(step, batches=3).stats()
    assert set(stats.calls) == {None}
    found = [at for at in stats.findings if reason in at.reason]
    assert found, stats.findings
    assert any(at.remedy.startswith(remedy) for at in found)
    assert all(at.code for at in found)


def test_a_condition_on_the_device_is_named():
    call = inspect.signature(chosen_by_cond).bind(*arguments(chosen_by_cond, batch_of([2, 1, 2])))
    with torch.no_grad():
        (finding,) = infer_inputs(chosen_by_cond, call, {}).findings
    assert finding.kind == "rows mixed"
    assert finding.reason.startswith("nothing is known of how torch's cond treats rows")
    assert "torch.where(condition, a, b)" in finding.remedy


def fewer_rows_than_the_table(x: Tensor, q: Tensor, s: Tensor, logits: Tensor) -> Any:
    return hidden(x, q, s), logits.gather(1, (s.long() % VOCAB)[:, None])


def test_a_table_that_leaves_no_other_size_is_not_padded_for():
    """With two rows of logits, two requests are all that there can be: once a size was fixed."""
    compiled = serve(fewer_rows_than_the_table)
    assert compiled.inputs["logits"] == Static()
    assert compiled.stats().calls[4] >= 1
    assert compiled.stats().calls[None] >= 1


def test_a_table_that_had_a_row_for_each_request_once_is_a_table():
    """In the first batch there are as many rows as requests, and in the next one more."""

    def step(x: Tensor, q: Tensor, s: Tensor, table: Tensor) -> Any:
        return hidden(x, q, s), table.gather(1, (s.long() // 8)[:, None])

    compiled = mtpgraph.compile(step, sizes=[2, 4, 8], next_n=2, engine="eager")
    with torch.no_grad():
        for query_lens, rows in (([2, 1, 2], 3), ([1, 2], 6), ([2, 1, 2], 6), ([1, 1, 1, 1], 6)):
            batch = {**batch_of(query_lens), "table": torch.randint(0, 99, (rows, BLOCKS))}
            given = arguments(step, batch)
            for one, other in zip(compiled(*given), step(*given), strict=True):
                assert_same_bits(one, other)
    assert compiled.inputs["table"] == Static()
