import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mtpgraph
from mtpgraph import Batched, Static, bench_step, ops
from mtpgraph.compile_passes.infer_batch import Inferred, infer_batch, infer_inputs
from mtpgraph.example.cache import make_caches
from mtpgraph.example.config import Config
from mtpgraph.example.model import Model
from mtpgraph.ops import declare as declare_module
from tests.helpers import assert_same_bits

from .support import INPUTS, Stream, copy_pools, hybrid_step, make_pools, recurrent_layer, trace


def infer(fn: Callable[..., Any], *args: Any, **given: Any) -> Inferred:
    bound = inspect.signature(fn).bind(*args)
    bound.apply_defaults()
    with torch.no_grad():
        return infer_inputs(fn, bound, given)


def specs(inputs: Any) -> dict[str, Any]:
    return {name: spec() if spec is Static else spec for name, spec in inputs.items()}


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def lens(*query_lens: int) -> tuple[Tensor, Tensor]:
    """``query_start_loc`` and ``seq_lens``."""
    starts = int32(0, *query_lens).cumsum(0, dtype=torch.int32)
    return starts, int32(*query_lens) + 4


@pytest.mark.parametrize(
    "query_lens", [[2, 1, 2], [1], [2], [1, 1, 1], [2, 2], [5]], ids=lambda q: "-".join(map(str, q))
)
def test_infer_batch_finds_the_inputs_of_the_hybrid_step(query_lens: list[int]):
    """Whatever the first batch: requests as many as tokens, one of one, one of both."""
    inferred = infer(hybrid_step, *Stream(3).batch(query_lens), make_pools(3))
    assert inferred.findings == ()
    assert inferred.row_safe
    assert inferred.decided
    assert inferred.inputs == specs(INPUTS)
    assert inferred.tokens_per_request is None


def test_infer_batch_of_an_empty_batch():
    batch = Stream(3).batch([2])
    empty = [batch[0][:0], int32(0), *(value[:0] for value in batch[2:])]
    inferred = infer(hybrid_step, *empty, make_pools(3))
    assert inferred.inputs == specs(INPUTS)
    assert inferred.row_safe


def test_infer_batch_runs_nothing_and_marks_nothing():
    batch, pools = Stream(3).batch([2, 1]), make_pools(3)
    before = copy_pools(pools)
    infer(hybrid_step, *batch, pools)
    for name, pool in pools.items():
        assert_same_bits(pool, before[name])
    for value in batch:
        assert not any(name.startswith("_dynamo") for name in vars(value))


def test_infer_batch_says_what_each_row_was_inferred_from():
    inferred = infer(hybrid_step, *Stream(3).batch([2, 1]), make_pools(3))
    rows = {row.argument: row for row in inferred.rows}
    assert rows.keys() == INPUTS.keys() - {"pools"}
    assert rows["seq_lens"].because == "mtpgraph::flatten_decode(seq_lens)"
    assert rows["state_indices"].because == "mtpgraph::reset_states_(state_indices)"
    source, first = inspect.getsourcelines(recurrent_layer)
    code = source[rows["state_indices"].line - first].strip()
    assert code.startswith("ops.reset_states_(")
    assert rows["state_indices"].file.endswith("support.py")


def test_infer_batch_of_the_example_decoder():
    """Its inputs are those that the demo declares by hand, or pad as well."""
    config = Config(dim=32, layers=("mamba", "attention", "delta"))
    model = Model(config).requires_grad_(False).eval()
    device = torch.device("cpu")
    caches = make_caches(config, 16, 16, 16, 0.0, device)
    starts, seq_lens = lens(2, 3)
    inferred = infer(
        model.step,
        torch.arange(5),
        torch.tensor([-1, 3, -1, -1, -1]),
        starts,
        seq_lens,
        torch.arange(8, dtype=torch.int32).view(2, 4),
        torch.arange(5),
        torch.arange(2 * config.next_n, dtype=torch.int32).view(2, -1),
        int32(1, 1),
        caches,
    )
    assert inferred.findings == ()
    declared = {
        "tokens": Batched(0, pad=0, per="token"),
        # -1 would do as well: an id that is not there, and no one looks at what it leads to
        "next_tokens": Batched(0, pad=0, per="token"),
        "query_start_loc": Batched(0, pad="last", extra=1),
        "seq_lens": Batched(0, pad=0),
        "block_table": Batched(0, pad=-1),
        "slot_mapping": Batched(0, pad=-1, per="token"),
        "state_indices": Batched(0, pad=-1),
        "num_accepted_tokens": Batched(0, pad=1),
        "caches": Static(),
    }
    assert inferred.inputs == declared


def test_infer_batch_of_the_benchmark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_step, "DEVICE", "cpu")
    sizes = bench_step.Sizes(
        layers=2,
        hidden=32,
        index_heads=2,
        index_dim=16,
        heads=2,
        latent=32,
        rope=16,
        topk=8,
        mlp=16,
    )
    model = bench_step.Model(sizes).to(torch.bfloat16)
    caches = bench_step.make_caches(sizes, 2, 8)
    for num_reqs, next_n in ((3, 2), (1, 1)):
        batch = bench_step.make_batch(sizes, num_reqs, next_n, 100, 4)
        inferred = infer(model.forward, *batch, caches)
        assert inferred.findings == ()
        assert inferred.inputs == specs(bench_step.INPUTS)


def conv(x: Tensor, state_indices: Tensor, state: Tensor, taps: Tensor) -> Tensor:
    return ops.causal_conv1d_update_(state, x, taps, None, state_indices)


def test_infer_batch_of_one_token_per_request():
    """Without offsets requests and tokens are one number."""
    args = torch.randn(3, 8), int32(2, 0, 1), torch.zeros(5, 8, 2), torch.randn(8, 3)
    for count in (3, 1):
        inferred = infer(conv, args[0][:count], args[1][:count], *args[2:])
        assert inferred.row_safe, inferred.findings
        assert inferred.tokens_per_request is None
        assert inferred.inputs == {
            "x": Batched(0, pad=0),
            "state_indices": Batched(0, pad=-1),
            "state": Static(),
            "taps": Static(),
        }


def test_infer_batch_of_as_many_tokens_per_request_as_the_step_says():
    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        per_request = (x * row_lens.unsqueeze(1)).view(seq_lens.shape[0], 2, 4)
        return per_request.sum(1)

    inferred = infer(step, torch.randn(6, 4), *lens(2, 2, 2))
    assert inferred.row_safe, inferred.findings
    assert inferred.tokens_per_request == 2
    assert inferred.inputs["x"] == Batched(0, per="token")


def test_infer_batch_of_tokens_in_rows_of_requests():
    """Hidden states [num_reqs, next_n, dim], flattened for the ops."""

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0] * x.shape[1])
        return x * row_lens.view(x.shape[0], x.shape[1], 1)

    inferred = infer(step, torch.randn(3, 2, 4), *lens(2, 2, 2))
    assert inferred.row_safe, inferred.findings
    assert inferred.inputs["x"] == Batched(0, per="request")


def test_infer_batch_in_another_dimension():
    def step(x: Tensor, slot_mapping: Tensor, cache: Tensor) -> Tensor:
        ops.kv_cache_write_(x.t(), slot_mapping, cache)
        return x * 2

    inferred = infer(step, torch.randn(4, 6), torch.arange(6), torch.zeros(3, 2, 4))
    assert inferred.row_safe, inferred.findings
    assert inferred.inputs["x"] == Batched(1, pad=0, per="token")
    assert inferred.inputs["cache"] == Static()


def needs(name: str, value: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A step in which an input reaches an argument of an op by way of ``value``."""

    def slots(v: Tensor, x: Tensor, cache: Tensor) -> Tensor:
        ops.kv_cache_write_(x, value(v), cache)
        return x + 1

    def states(v: Tensor, x: Tensor, cache: Tensor) -> Tensor:
        mask = torch.ones(v.shape[0], dtype=torch.bool)
        ops.reset_states_(cache, value(v), mask)
        return x + 1

    return {"slots": slots, "states": states}[name]


PADS: dict[str, tuple[str, Callable[[Tensor], Tensor], Tensor, Any]] = {
    "as it is": ("slots", lambda v: v, torch.arange(6), -1),
    "cast": ("slots", lambda v: v.long(), torch.arange(6, dtype=torch.int32), -1),
    "sliced": ("slots", lambda v: v[:, 1], torch.arange(12).view(6, 2), -1),
    "viewed": ("slots", lambda v: v.view(-1), torch.arange(6).view(6, 1), -1),
    "flattened": ("slots", lambda v: v.flatten(), torch.arange(6).view(3, 2), -1),
    "doubled": ("slots", lambda v: v * 2, torch.arange(6), -1),
    "counted from one": ("slots", lambda v: v - 1, torch.arange(1, 7), 0),
    "turned": ("slots", lambda v: -v - 1 + 1, torch.arange(6), 1),
    "masked": ("slots", lambda v: torch.where(v > 0, v, -1), torch.arange(6), 0),
    "filled": ("slots", lambda v: v.masked_fill(v == 0, -1), torch.arange(6), 0),
    "states": ("states", lambda v: v, torch.arange(6, dtype=torch.int32), -1),
    "block and offset": ("slots", lambda v: v[:, 0] * 2 + v[:, 1].clamp(max=1),
                         torch.zeros(6, 2, dtype=torch.int64), -1),
}  # fmt: skip


@pytest.mark.parametrize("name", PADS)
def test_infer_batch_finds_padding_through(name: str):
    need, value, v, pad = PADS[name]
    x, cache = torch.randn(6, 4), torch.zeros(6, 2, 4)
    inferred = infer(needs(need, value), v, x, cache)
    assert inferred.findings == ()
    spec = inferred.inputs["v"]
    assert isinstance(spec, Batched)
    accepted = {-1: "-1", 0: "0", 1: "1"}
    assert accepted[spec.pad] == accepted[pad]  # pyright: ignore[reportArgumentType]


def test_infer_batch_resolves_an_input_with_two_needs():
    """A slot that is also an id: -1 would be no id unless it is clamped."""

    def step(v: Tensor, x: Tensor, cache: Tensor, table: Tensor) -> Tensor:
        ops.kv_cache_write_(x, v, cache)
        return x + F.embedding(v.clamp(min=0), table)

    args = torch.arange(6), torch.randn(6, 4), torch.zeros(6, 2, 4), torch.randn(12, 4)
    inferred = infer(step, *args)
    assert inferred.row_safe, inferred.findings
    assert inferred.inputs["v"] == Batched(0, pad=-1, per="token")


def test_infer_batch_reports_needs_that_exclude_each_other():
    def step(v: Tensor, x: Tensor, cache: Tensor, table: Tensor) -> Tensor:
        ops.kv_cache_write_(x, v, cache)
        return x + F.embedding(v, table)

    args = torch.arange(6), torch.randn(6, 4), torch.zeros(6, 2, 4), torch.randn(12, 4)
    inferred = infer(step, *args)
    assert not inferred.row_safe
    (finding,) = inferred.findings
    assert finding.kind == "padding unknown"
    assert finding.found_by == "infer_batch"
    assert "no padding of v was found" in finding.reason
    assert finding.remedy


def test_infer_batch_reports_an_index_that_may_leave_its_table():
    """``hidden[query_start_loc[:-1]]``: a padding request starts behind the last token."""

    def first(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return (x + row_lens.unsqueeze(1))[query_start_loc[:-1]]

    def last(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return (x + row_lens.unsqueeze(1))[(query_start_loc[1:] - 1).clamp(min=0)]

    args = torch.randn(6, 4), *lens(2, 1, 3)
    (finding,) = infer(first, *args).findings
    assert finding.kind == "padding unknown"
    assert "an index must stay within" in finding.reason
    assert infer(last, *args).row_safe


def test_infer_batch_reports_lengths_that_padding_breaks():
    """One more key for every request gives padding requests a key."""

    def step(query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        return ops.flatten_decode(query_start_loc, seq_lens + 1, 6)[0]

    inferred = infer(lambda x, q, s: x * step(q, s).unsqueeze(1), torch.randn(6, 4), *lens(2, 1, 3))
    assert not inferred.row_safe
    masked = infer(
        lambda x, q, s: (
            x * ops.flatten_decode(q, torch.where(s > 0, s + 1, 0), x.shape[0])[0].unsqueeze(1)
        ),
        torch.randn(6, 4),
        *lens(2, 1, 3),
    )
    assert masked.row_safe, masked.findings


def test_infer_batch_reports_a_batch_in_a_container():
    def step(x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        row_lens, _ = ops.flatten_decode(batch["starts"], batch["lens"], x.shape[0])
        return x * row_lens.unsqueeze(1)

    starts, seq_lens = lens(2, 1, 3)
    inferred = infer(step, torch.randn(6, 4), {"starts": starts, "lens": seq_lens})
    assert not inferred.row_safe
    assert inferred.inputs["batch"] == Static()
    assert any("argument of its own" in finding.remedy for finding in inferred.findings)


def test_infer_batch_reports_a_step_in_which_nothing_is_declared():
    inferred = infer(lambda x: x * 2, torch.randn(6, 4))
    assert not inferred.row_safe
    assert inferred.inputs == {"x": Static()}
    (finding,) = inferred.findings
    assert finding.kind == "padding unknown"
    assert "declare" in finding.remedy


def test_infer_batch_reports_a_write_to_a_batched_input():
    def step(x: Tensor, slot_mapping: Tensor, cache: Tensor) -> Tensor:
        ops.kv_cache_write_(x, slot_mapping, cache)
        return x.add_(1)

    inferred = infer(step, torch.randn(6, 4), torch.arange(6), torch.zeros(3, 2, 4))
    assert [finding.kind for finding in inferred.findings] == ["padding unknown"]
    assert "the input is a copy" in inferred.findings[0].reason


def test_infer_batch_reports_rows_that_nothing_counts():
    """Which tokens are sampled: a number of its own, which may follow the batch."""

    def step(x: Tensor, slot_mapping: Tensor, cache: Tensor, sampled: Tensor) -> Tensor:
        ops.kv_cache_write_(x, slot_mapping, cache)
        return x.index_select(0, sampled)

    args = torch.randn(6, 4), torch.arange(6), torch.zeros(3, 2, 4), torch.tensor([1, 5, 2])
    inferred = infer(step, *args)
    (finding,) = inferred.findings
    assert finding.reason.startswith("sampled indexes rows of the batch")
    assert infer(step, *args, sampled=Static()).row_safe
    declared = infer(step, *args, sampled=Batched(0))
    assert declared.row_safe
    assert declared.inputs["sampled"] == Batched(0)
    assert declared.inputs["slot_mapping"] == Batched(0, pad=-1, per="token")


def test_infer_batch_cannot_tell_one_row_from_a_constant_row():
    def step(x: Tensor, scale: Tensor, slot_mapping: Tensor, cache: Tensor) -> Tensor:
        ops.kv_cache_write_(x, slot_mapping, cache)
        return x * scale

    cache = torch.zeros(3, 2, 4)
    one = infer(step, torch.randn(1, 4), torch.ones(1, 4), torch.arange(1), cache)
    assert not one.decided
    assert not one.row_safe
    assert one.findings[0].reason.startswith("scale has one row in a batch of one")
    for rows, expected in ((1, Static()), (3, Batched(0, pad=0, per="token"))):
        scale = torch.ones(rows, 4)
        inferred = infer(step, torch.randn(3, 4), scale, torch.arange(3), cache)
        assert inferred.row_safe, inferred.findings
        assert inferred.inputs["scale"] == expected


def test_infer_batch_takes_what_is_given():
    batch, pools = Stream(3).batch([2, 1, 2]), make_pools(3)
    for given in (specs(INPUTS), {"block_table": Batched(0, pad=7)}, {"pools": Static()}):
        inferred = infer(hybrid_step, *batch, pools, **given)
        assert inferred.findings == ()
        assert inferred.inputs == {**specs(INPUTS), **given}
    wrong = infer(hybrid_step, *batch, pools, slot_mapping=Batched(0, pad=0, per="token"))
    assert [finding.kind for finding in wrong.findings] == ["padding unknown"]
    assert "slot_mapping of mtpgraph::indexer_cache_write_ must hold -1 or less" in str(
        wrong.findings[0]
    )


@pytest.fixture
def paged_scale() -> Iterator[Any]:
    """An op of somebody else's: writes rows that ``slots`` names, returns a row per row."""
    library = torch.library.Library("batch_tests", "FRAGMENT")
    library.define("paged_scale_(Tensor(a!) pool, Tensor x, Tensor slots) -> Tensor")

    def run(pool: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        kept = slots >= 0
        pool[slots[kept]] = x[kept]
        return x * 2

    def fake(pool: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        torch._check(x.shape[0] == slots.shape[0])
        return x.new_empty(x.shape)

    library.impl("paged_scale_", run, "CompositeExplicitAutograd")
    torch.library.register_fake("batch_tests::paged_scale_", fake, lib=library)
    yield torch.ops.batch_tests.paged_scale_
    declare_module._facts.pop("batch_tests::paged_scale_", None)
    library._destroy()


def test_infer_batch_of_a_declared_op(paged_scale: Any):
    def step(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
        return paged_scale(pool, x, slots) + 1

    args = torch.randn(6, 4), torch.arange(6), torch.zeros(8, 4)
    assert not infer(step, *args).row_safe
    declare = declare_module.declare
    rows = {"x": "token", "slots": "token"}
    declare(paged_scale, rows=rows, row_independent=True)
    (finding,) = infer(step, *args).findings
    assert "nothing says what keeps padding rows from being written" in finding.reason
    declare(paged_scale, rows=rows, pad_values={"slots": -1})
    (finding,) = infer(step, *args).findings
    assert finding.reason == "batch_tests::paged_scale_ is declared, but not as row_independent"
    declare(paged_scale, rows=rows, pad_values={"slots": -1}, row_independent=True)
    inferred = infer(step, *args)
    assert inferred.row_safe, inferred.findings
    assert inferred.inputs == {
        "x": Batched(0, pad=0, per="token"),
        "slots": Batched(0, pad=-1, per="token"),
        "pool": Static(),
    }


def flat(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return x + row_lens.unsqueeze(1)


class Counting(torch.nn.Module):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        self.calls.add_(1)
        return flat(x, query_start_loc, seq_lens) + self.calls


def test_infer_batch_reports_a_write_that_padding_makes_too():
    """Nothing that grows goes in, and a run of padding alone would count."""
    step = Counting()
    batch = torch.zeros(3, 2), *lens(1, 1, 1)
    (finding,) = infer(step.forward, *batch).findings
    assert finding.kind == "rows mixed"
    assert finding.code == "self.calls.add_(1)"
    assert "also when only padding runs" in finding.reason
    assert "declared with a pad" in finding.remedy


@pytest.mark.parametrize("sizes", [[4, 8], [2]], ids=["padded", "above"])
def test_a_step_that_counts_its_calls_counts_each_once(sizes: list[int]):
    step = Counting()
    compiled = mtpgraph.compile(step, sizes=sizes, engine="eager")
    with pytest.warns(RuntimeWarning, match="also when only padding runs"):
        compiled.warm_up(torch.zeros(3, 2), *lens(1, 1, 1))
    for calls, num_reqs in enumerate((3, 0, 1, 3), start=1):
        batch = torch.zeros(num_reqs, 2), *lens(*[1] * num_reqs)
        out = compiled(*batch)
        assert step.calls.item() == calls
        torch.testing.assert_close(out, flat(*batch) + calls)


def test_a_step_that_counts_its_calls_warns_where_inputs_are_declared():
    inputs = {
        "x": Batched(0, per="token"),
        "query_start_loc": Batched(0, "last", extra=1),
        "seq_lens": Batched(0),
    }
    compiled = mtpgraph.compile(Counting(), inputs=inputs, sizes=[4], engine="eager")
    with pytest.warns(RuntimeWarning, match="padding may reach real rows.*only padding runs"):
        compiled(torch.zeros(3, 2), *lens(1, 1, 1))


def test_infer_batch_takes_a_pad_that_does_not_grow_for_none(paged_scale: Any):
    """Padding rows are left out by slots of the batch, not by slots that are always the same."""
    rows = {"x": None, "slots": None}
    pads = {"slots": -1}
    declare_module.declare(paged_scale, rows=rows, pad_values=pads, row_independent=True)

    def step(
        x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, y: Tensor, slots: Tensor, pool: Tensor
    ) -> tuple[Tensor, Tensor]:
        return flat(x, query_start_loc, seq_lens), paged_scale(pool, y, slots)

    kept = torch.ones(2, 4), torch.arange(2), torch.zeros(8, 4)
    (finding,) = infer(step, torch.zeros(3, 2), *lens(1, 1, 1), *kept).findings
    assert finding.reason.startswith("writes pool also when only padding runs")


def sized(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, temp: Tensor) -> Tensor:
    """Reads nothing of ``x`` but its size."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return row_lens + temp


def test_infer_batch_of_an_input_known_by_its_size():
    """``temp`` is of the same size: outputs are cut by it, and ``x`` has to grow with it."""
    for query_lens in ([1, 1, 1], [2, 2], [1, 2]):
        starts, seq_lens = lens(*query_lens)
        count = sum(query_lens)
        batch = torch.ones(count, 2), starts, seq_lens, torch.ones(count, dtype=torch.int32)
        inferred = infer(sized, *batch)
        assert inferred.row_safe, inferred.findings
        token = Batched(0, pad=0, per="token")
        assert (inferred.inputs["x"], inferred.inputs["temp"]) == (token, token)
    step = mtpgraph.compile(sized, sizes=[2, 4], engine="eager")
    for count in (3, 1, 4, 9):
        batch = torch.ones(count, 2), *lens(*[1] * count), torch.ones(count, dtype=torch.int32)
        torch.testing.assert_close(step(*batch), sized(*batch))
    assert step.stats().findings == []


def test_infer_batch_reports_a_size_that_no_input_has():
    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        return ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])[0]

    @functools.wraps(step)
    def wrapped(*args: Tensor) -> Tensor:
        return step(*args)

    batch = torch.zeros(3, 2), *lens(1, 1, 1)
    for fn in (step, wrapped):
        inferred = infer(fn, *batch)
        assert inferred.inputs["x"] == Static()
        (finding,) = inferred.findings
        assert finding.kind == "padding unknown"
        assert "size 0 of x grows with the batch" in finding.reason


def test_infer_batch_cannot_tell_an_empty_row_from_an_empty_table():
    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, temp: Tensor) -> Tensor:
        _, requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return temp[requests.long().clamp(min=0)].unsqueeze(1) * x

    empty = torch.zeros(0, 2), int32(0), int32(), torch.zeros(0)
    inferred = infer(step, *empty)
    assert not inferred.decided
    assert inferred.findings[0].reason.startswith("temp has no rows in a batch of none")
    assert infer(step, torch.zeros(3, 2), *lens(1, 1, 1), torch.zeros(3)).decided
    # in a batch that has requests, an empty table is one
    other = infer(
        lambda x, q, s, w: (flat(x, q, s), w * 2), torch.ones(2, 2), *lens(1, 1), empty[3]
    )
    assert other.decided


GROUPS: dict[str, tuple[Callable[[Tensor], Any], int | None]] = {
    "view": (lambda x: x.view(-1, 2, 4).mean(1), 2),
    "view by the size": (lambda x: x.view(x.shape[0] // 2, 2, 4).mean(1), 2),
    "reshape": (lambda x: x.reshape(-1, 2, 4).softmax(1), 2),
    "unflatten": (lambda x: x.unflatten(0, (-1, 3)).amax(1), 3),
    "groups of several sizes": (lambda x: (x.view(-1, 2, 4).sum(1), x.view(-1, 3, 4).sum(1)), 6),
    "rows of two tokens": (lambda x: x.view(-1, 2 * x.shape[1]) * 2, 2),
    "heads": (lambda x: x.view(-1, 2, 2).sum(1), 1),
    "half of the rows in groups": (lambda x: x.view(-1, 2, 4)[: x.shape[0] // 4].sum(1), None),
    "every second group": (lambda x: x.view(-1, 2, 4)[::2].sum(1), None),
    "groups turned": (lambda x: x.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4), None),
    "last group": (lambda x: x.view(-1, 2, 4)[-1], None),
    "half of the rows and groups": (
        lambda x: (x.view(-1, 2, 4).sum(1), x[: x.shape[0] // 2].clone()),
        None,
    ),
    "half of the rows": (lambda x: x[: x.shape[0] // 2].clone(), None),
    "groups across": (lambda x: x.view(2, -1, 4).mean(0), None),
    "mean of groups": (lambda x: x.view(-1, 2, 4).mean(0), None),
    "sorted groups": (lambda x: x.view(-1, 2, 4).sort(0).values, None),
    "by columns": (lambda x: x.t().reshape(4, 2, -1).sum(1), None),
    "number of groups": (lambda x: x.view(-1, 2, 4).sum(1) / (x.shape[0] // 2), None),
    "new rows": (lambda x: x.new_zeros(x.shape[0] // (x.shape[0] // 4), 4).sum(0), None),
}
"""What a step does with tokens, and of how many it makes a group; None: what is not safe to pad."""


@pytest.mark.parametrize("name", GROUPS)
def test_infer_batch_of_tokens_in_groups(name: str):
    value, multiple = GROUPS[name]

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Any:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return value(x + row_lens.unsqueeze(1))

    inferred = infer(step, torch.randn(12, 4), *lens(5, 3, 4))
    assert inferred.row_safe == (multiple is not None), inferred.findings
    assert inferred.inputs["x"] == Batched(0, per="token")
    assert inferred.tokens_per_request is None
    if multiple is not None:
        assert inferred.multiple == multiple


def even(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    x = x + row_lens.unsqueeze(1)
    if x.shape[0] % 2:
        return x.cumsum(1)
    return x.view(-1, 2, 4).flip(1).flatten(0, 1)


def pairs(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Any:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    grouped = (x + row_lens.unsqueeze(1)).view(-1, 2, 4)
    return grouped.softmax(1), grouped.sum(1)


def test_a_step_that_views_tokens_in_groups_is_padded_with_whole_groups():
    step = mtpgraph.compile(pairs, sizes=[2, 4], next_n=2, engine="eager")
    for query_lens in ([2, 2], [1, 3, 2], [2], [1, 1, 3, 1], [4, 4, 4, 4]):
        batch = torch.randn(sum(query_lens), 4), *lens(*query_lens)
        torch.testing.assert_close(step(*batch), pairs(*batch))
    assert step.stats().calls == {2: 2, 4: 2, None: 1}
    with pytest.raises(Exception, match=r"invalid for input|shape"):
        step(torch.randn(3, 4), *lens(1, 2))


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, {2: 1, 4: 3, None: 1}),
        ({"next_n": 3}, {2: 4, 4: 1}),
        ({"next_n": 3, "sizes": [1, 3, 4]}, {4: 5}),
        ({"next_n": 4, "sizes": [1, 2]}, {1: 1, 2: 3, None: 1}),
    ],
    ids=str,
)
def test_a_step_that_views_tokens_in_groups_takes_sizes_of_whole_groups(
    options: dict[str, Any], calls: dict[int | None, int]
):
    step = mtpgraph.compile(pairs, **{"sizes": [1, 2, 3, 4], "engine": "eager", **options})
    for query_lens in ([1, 1], [1, 3], [2, 2], [4], [4, 6]):
        batch = torch.randn(sum(query_lens), 4), *lens(*query_lens)
        torch.testing.assert_close(step(*batch), pairs(*batch))
    assert step.stats().calls == calls


def test_a_step_that_views_tokens_in_groups_is_not_padded_without_such_a_size():
    step = mtpgraph.compile(pairs, sizes=[1, 3], next_n=1, engine="eager")
    with pytest.warns(RuntimeWarning, match=r"no size holds whole groups .* pass next_n=2"):
        step(torch.randn(4, 4), *lens(1, 3))
    for query_lens in ([1, 1], [1, 3], [4, 6]):
        batch = torch.randn(sum(query_lens), 4), *lens(*query_lens)
        torch.testing.assert_close(step(*batch), pairs(*batch))
    assert step.stats().calls == {None: 4}


def test_a_step_that_groups_some_batches_alone_is_padded_for_those():
    """The branch is the right one for every batch that is padded: others run as they are."""
    step = mtpgraph.compile(even, sizes=[2, 4], next_n=2, engine="eager")
    for count in (4, 3, 2, 5, 6, 8):
        batch = torch.randn(count, 4), *lens(count // 2, count - count // 2)
        torch.testing.assert_close(step(*batch), even(*batch))
    assert step.stats().calls[None] == 2


def test_a_step_for_uniform_batches_leaves_others_as_they_are():
    """Tokens are two for each request in the first batch, and in no other by nature."""

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        x = x + row_lens.unsqueeze(1)
        if x.shape[0] == 2 * seq_lens.shape[0]:
            return x.view(seq_lens.shape[0], 2, 4).cumsum(1).flatten(0, 1)
        return x * 3

    compiled = mtpgraph.compile(step, sizes=[4, 8], next_n=2, engine="eager")
    for query_lens in ([2, 2], [1, 2], [2, 2, 2], [1, 1, 1], [3, 2, 2]):
        batch = torch.randn(sum(query_lens), 4), *lens(*query_lens)
        torch.testing.assert_close(compiled(*batch), step(*batch))


INDICES: dict[str, tuple[Callable[[Tensor, Tensor], Any], bool]] = {
    "argmax": (lambda x, w: x.gather(1, x.argmax(1, keepdim=True)), True),
    "topk": (lambda x, w: x.gather(1, x.topk(2).indices), True),
    "sorted": (lambda x, w: x.gather(1, x.sort(-1).indices.int().long()), True),
    "scattered": (lambda x, w: torch.zeros_like(x).scatter(1, x.topk(2).indices, 1.0), True),
    "row of a table as wide": (lambda x, w: (x @ w).t()[x.argmax(1) * 0], True),
    "one further": (lambda x, w: x.gather(1, x.argmax(1, keepdim=True) + 1), False),
    "twice as far": (lambda x, w: x.gather(1, x.argmax(1, keepdim=True) * 2), False),
    "of another table": (lambda x, w: w[x.argmax(1)], False),
    "of the narrower half": (lambda x, w: x[:, 1:].gather(1, x.argmax(1, keepdim=True)), False),
    "sum of two": (lambda x, w: x.gather(1, (x.argmax(1) + x.argmin(1))[:, None]), False),
}
"""Positions that an op returns, as an index; whether they are known to be within."""


@pytest.mark.parametrize("name", INDICES)
def test_infer_batch_of_positions_as_indices(name: str):
    value, safe = INDICES[name]

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, w: Tensor) -> Any:
        return value(flat(x, query_start_loc, seq_lens), w)

    inferred = infer(step, torch.randn(6, 4), *lens(2, 1, 3), torch.randn(4, 5))
    found = [f.reason for f in inferred.findings if "an index must stay within" in f.reason]
    assert bool(found) != safe, inferred.findings


def blocks(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def step(
        x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, kv: Tensor
    ) -> Tensor:
        row_lens, row_requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        table = ops.expand_block_table(block_table, row_requests)
        return x + row_lens.unsqueeze(1) + kv[change(table)].sum(1)

    return step


@pytest.mark.parametrize(
    ("change", "safe"),
    [
        (lambda table: table.clamp(min=0), True),
        (lambda table: table + 1, True),
        (lambda table: torch.where(table < 0, 0, table), True),
        (lambda table: table, True),
        (lambda table: table - 2, False),
        (lambda table: table.clamp(min=2), False),
        (lambda table: table.clamp(min=0) + 2, False),
        (lambda table: table * 3, False),
    ],
    ids=["clamped", "from one", "masked", "the last", "below", "above", "moved", "multiplied"],
)
def test_infer_batch_of_an_index_from_an_expanded_block_table(
    change: Callable[[Tensor], Tensor], safe: bool
):
    """Its padding rows are -1, and a table of blocks has two at least."""
    tensors = torch.arange(6, dtype=torch.int32).view(3, 2), torch.randn(6, 4)
    inferred = infer(blocks(change), torch.randn(6, 4), *lens(2, 1, 3), *tensors)
    assert inferred.row_safe == safe, inferred.findings
    assert inferred.inputs["block_table"] == Batched(0, pad=-1 if safe else 0) or not safe


def counted(starts: Callable[[int, Tensor], Tensor]) -> Callable[..., Tensor]:
    def step(x: Tensor, slots: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        lens, _ = ops.flatten_decode(starts(x.shape[0], slots), row_lens, x.shape[0])
        return x + lens.unsqueeze(1)

    return step


_STEPS: Any = {"dtype": torch.int32}
STARTS: dict[str, Callable[[int, Tensor], Tensor]] = {
    "head": lambda n, s: torch.arange(64, **_STEPS)[: n + 1],
    "middle": lambda n, s: torch.arange(64, **_STEPS)[3 : n + 4],
    "cast": lambda n, s: torch.arange(64)[: n + 1].int(),
    "cast before": lambda n, s: torch.arange(64).int().clone()[: n + 1],
    "every second": lambda n, s: torch.arange(0, 128, 2, **_STEPS).narrow(0, 0, n + 1),
    "backward": lambda n, s: torch.arange(64, 0, -1, **_STEPS)[: n + 1],
    "flipped": lambda n, s: torch.arange(64, **_STEPS).flip(0)[: n + 1],
    "negative": lambda n, s: (-torch.arange(64, **_STEPS))[: n + 1],
    "turned": lambda n, s: torch.arange(64, **_STEPS).view(8, 8).t().reshape(64)[: n + 1],
    "rows": lambda n, s: torch.arange(64, **_STEPS).repeat(2)[: n + 1],
    "remainder": lambda n, s: (torch.arange(64, **_STEPS) % 8)[: n + 1],
    "written": lambda n, s: torch.arange(64, **_STEPS).index_fill_(0, s, 0)[: n + 1],
    "as a narrow integer": lambda n, s: torch.arange(600)[: n + 1].to(torch.int8).int(),
}
"""Offsets of rows of one token, which padding would have go on in ways of its own."""


@pytest.mark.parametrize("name", STARTS)
def test_infer_batch_of_offsets_from_an_arange(name: str):
    args = torch.randn(6, 4), torch.tensor([3, 5]), *lens(2, 1, 3)
    inferred = infer(counted(STARTS[name]), *args)
    reason = "query_start_loc of mtpgraph::flatten_decode must"
    assert any(finding.reason.startswith(reason) for finding in inferred.findings)
    assert not inferred.row_safe


ROWS_BY_INDEX: dict[str, tuple[Callable[..., Tensor], str | None]] = {
    "as it is": (lambda x, y, q, r: x + y[r], "request"),
    "clamped": (lambda x, y, q, r: x + y[r.clamp(min=0)], "request"),
    "cast": (lambda x, y, q, r: x + F.embedding(r.long().clamp_min(0), y), "request"),
    "selected": (lambda x, y, q, r: x + (y * 2).index_select(0, r.clamp(min=0)), "request"),
    "moved": (lambda x, y, q, r: x + y[r.clamp(min=0) + 0 * r], None),
    "next": (lambda x, y, q, r: x + y[(r + 1).clamp(max=2)], None),
    "from the second": (lambda x, y, q, r: x + y[r.clamp(min=1)], None),
    "as truth": (lambda x, y, q, r: x + y[r.bool().long()], None),
    "columns": (lambda x, y, q, r: x + y.t()[:, r.clamp(min=0)].t(), None),
    "last token": (lambda x, y, q, r: x[:1] + y[(q[1:] - 1).clamp(min=0)], "token"),
    "last token, cast": (
        lambda x, y, q, r: x[:1] + y[q.long()[1:].sub(1).clamp_min(0)],
        "token",
    ),
    "the one before": (lambda x, y, q, r: x[:1] + y[q[1:] - 2], None),
    "lengths": (lambda x, y, q, r: x[:1] + y[q[1:] - q[:-1]], None),
}
"""How something is indexed, and what that shows it to have a row for."""


@pytest.mark.parametrize("name", ROWS_BY_INDEX)
def test_infer_batch_of_rows_that_are_indexed_by_number(name: str):
    value, unit = ROWS_BY_INDEX[name]

    def step(x: Tensor, y: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return value(x + row_lens.unsqueeze(1), y, query_start_loc, requests)

    x, (starts, seq_lens) = torch.randn(6, 4), lens(2, 1, 3)
    rows = {"request": 3, "token": 6, None: 3}[unit]
    inferred = infer(step, x, torch.randn(rows, 4), starts, seq_lens)
    assert inferred.inputs["y"] == (Batched(0, per=unit) if unit else Static())
    assert inferred.by_index == (frozenset("y") if unit else frozenset())
    if unit:
        assert inferred.row_safe, inferred.findings
        # a table of more rows is one
        longer = infer(step, x, torch.randn(rows + 1, 4), starts, seq_lens)
        assert longer.inputs["y"] == Static()
        # and so is what the caller says
        assert infer(step, x, torch.randn(rows, 4), starts, seq_lens, y=Static()).inputs == {
            **inferred.inputs,
            "y": Static(),
        }


@pytest.mark.parametrize("first", [3, 8], ids=["as many", "more"])
def test_a_table_that_had_as_many_rows_as_the_first_batch_is_found_to_be_one(first: int):
    def step(x: Tensor, table: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return x + row_lens.unsqueeze(1) + table[requests.clamp(min=0)]

    table = torch.randn(first, 4)
    compiled = mtpgraph.compile(step, sizes=[4, 8], next_n=2, engine="eager")
    for query_lens in ([2, 1, 2], [1, 2], [2, 2], [1]):
        batch = torch.randn(sum(query_lens), 4), table, *lens(*query_lens)
        torch.testing.assert_close(compiled(*batch), step(*batch))
    assert compiled.inputs["table"] == Static()
    assert set(compiled.stats().calls) == {4}
    # rows for each request are padded, and no size compiles anew
    rows = mtpgraph.compile(step, sizes=[4, 8], next_n=2, engine="eager")
    for query_lens in ([2, 1, 2], [1, 2], [2, 2, 1, 1, 1]):
        batch = torch.randn(sum(query_lens), 4), torch.randn(len(query_lens), 4), *lens(*query_lens)
        torch.testing.assert_close(rows(*batch), step(*batch))
    assert rows.inputs["table"] == Batched(0)
    assert rows.stats().recompiles == 0


def test_infer_batch_is_a_pass():
    def step(v: Tensor, x: Tensor, cache: Tensor, table: Tensor) -> Tensor:
        ops.kv_cache_write_(x, v, cache)
        return x + F.embedding(v, table)

    args = torch.arange(6), torch.randn(6, 4), torch.zeros(5, 2, 4), torch.randn(12, 4)
    _, probe = trace(step, *args, passes=[infer_batch], dynamic=True)
    (finding,) = probe.manager.findings
    assert finding.kind == "padding unknown"
    assert probe.counts == {"infer_batch": 0}


def test_inferred_inputs_run_a_padded_step():
    batch, pools = Stream(4).batch([2, 1, 2, 1]), make_pools(4)
    inferred = infer(hybrid_step, *batch, pools)
    expected_pools = copy_pools(pools)
    step = mtpgraph.compile(
        hybrid_step, inputs=inferred.inputs, sizes=[8], next_n=2, engine="eager"
    )
    expected = hybrid_step(*batch, expected_pools)  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(step(*batch, pools), expected)
    for name, pool in pools.items():
        torch.testing.assert_close(pool, expected_pools[name], equal_nan=True)


def test_inferred_inputs_run_a_padded_step_with_an_fp8_cache():
    """The cache keeps its shape, and what padding rows hold is not quantised into it."""

    def step(
        q: Tensor, kv: Tensor, slot_mapping: Tensor, topk_indices: Tensor, block_table: Tensor,
        query_start_loc: Tensor, cache: Tensor,
    ) -> Tensor:  # fmt: skip
        ops.kv_cache_write_(kv, slot_mapping, cache)
        out, _ = ops.sparse_mla_decode(
            q, cache, topk_indices, block_table, query_start_loc, 0.1, latent_dim=128
        )
        return out

    def batch(count: int) -> tuple[Tensor, ...]:
        """One token of each request, in the first slot of the only block of the request."""
        q, kv = torch.randn(count, 2, 136), torch.randn(count, 136)
        blocks = torch.randperm(8, dtype=torch.int32)[:count]
        starts = torch.arange(count + 1, dtype=torch.int32)
        return q, kv, blocks.long() * 4, int32(*[0] * count)[:, None], blocks[:, None], starts

    cache = torch.full((8, 4, 148), 0xFF, dtype=torch.uint8)
    expected_cache = cache.clone()
    inferred = infer(step, *batch(3), cache)
    assert inferred.row_safe, inferred.findings
    assert inferred.inputs["kv"] == Batched(0, pad=0, per="token")
    assert inferred.inputs["cache"] == Static()
    compiled = mtpgraph.compile(step, inputs=inferred.inputs, sizes=[4, 8], engine="eager")
    for count in (3, 1, 4, 7):
        args = batch(count)
        torch.testing.assert_close(compiled(*args, cache), step(*args, expected_cache))
        assert_same_bits(cache, expected_cache)
