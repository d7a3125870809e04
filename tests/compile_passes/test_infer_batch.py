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

from .support import INPUTS, Stream, copy_pools, hybrid_step, make_pools, trace


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
    source, first = inspect.getsourcelines(hybrid_step)
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
        return (x + row_lens.unsqueeze(1))[query_start_loc[1:] - 1]

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
