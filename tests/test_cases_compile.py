"""Public bug reports of group A and E (compiling, sizes) as small inputs with the right result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.simple_registry import singleton

import mtpgraph
from mtpgraph import Batched, Static, ops
from mtpgraph.compile_passes.capture import GraphTable
from mtpgraph.compile_passes.options import Options
from mtpgraph.compile_passes.stats import Stats

OPS = [
    getattr(torch.ops.mtpgraph, name).default
    for name in (
        "flatten_decode",
        "expand_block_table",
        "indexer_cache_write_",
        "indexer_logits",
        "indexer_topk",
        "indexer_select",
        "topk_to_slots",
        "kv_cache_write_",
        "sparse_mla_decode",
        "has_initial_state",
        "reset_states_",
        "causal_conv1d_update_",
        "selective_state_update_",
        "gated_delta_update_",
    )
]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op._schema.name.split("::")[1])


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def both_ways(
    fn: Callable[..., Any], make: Callable[[], list[Tensor]], engine: str
) -> tuple[Any, list[Tensor], Any, list[Tensor]]:
    """Result and arguments afterwards, in eager and compiled."""
    eager_args, args = make(), make()
    expected = fn(*eager_args)
    compiled = torch.compile(fn, backend="mtpgraph", fullgraph=True, options={"engine": engine})
    return expected, eager_args, compiled(*args), args


def assert_same(fn: Callable[..., Any], make: Callable[[], list[Tensor]], engine: str) -> None:
    expected, eager_args, actual, args = both_ways(fn, make, engine)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(args, eager_args, rtol=0, atol=0)


each_engine = pytest.mark.parametrize("engine", ["eager", "inductor"])


def assert_same_with_a_snapshot(
    fn: Callable[..., Any], make: Callable[[], list[Tensor]], engine: str
) -> None:
    """As ``assert_same``, of what Inductor alone computes from overwritten memory."""
    eager_args, args = make(), make()
    expected = fn(*eager_args)
    compiled = torch.compile(fn, backend="mtpgraph", fullgraph=True, options={"engine": engine})
    torch.testing.assert_close(compiled(*args), expected, rtol=0, atol=0)
    torch.testing.assert_close(args, eager_args, rtol=0, atol=0)
    stats = mtpgraph.stats(compiled)
    assert stats.rewrites["find_mutation_hazards"] > 0
    assert "mutation hazard" in {finding.kind for finding in stats.findings}


def lens_and_states() -> list[Tensor]:
    return [
        torch.tensor([5, 7, 9], dtype=torch.int32),
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        torch.tensor([0, 1, 2], dtype=torch.int32),
    ]


class TestA1ReadLiveAcrossAWrite:
    """A value that reads a buffer, feeds an op that writes this buffer, and is used again."""

    @each_engine
    def test_a1_trigger(self, engine: str):
        def fn(lens: Tensor, state: Tensor, indices: Tensor) -> Tensor:
            shifted = state + 1
            ops.reset_states_(state, indices, shifted[:, 0] > 3)
            return shifted * 2

        assert_same_with_a_snapshot(fn, lens_and_states, engine)

    @each_engine
    def test_a1_the_step_s_own_lens_are_only_read(self, engine: str):
        """The mask of new requests reads lens that no op of ours ever writes."""

        def fn(lens: Tensor, state: Tensor, indices: Tensor) -> Tensor:
            starts = torch.arange(4, dtype=torch.int32)
            old = ops.has_initial_state(starts, lens - 4)
            ops.reset_states_(state, indices, old)
            return state * 2 + (lens + old)[:, None]

        assert_same(fn, lens_and_states, engine)

    @each_engine
    def test_a1_value_read_through_an_opaque_op_is_safe(self, engine: str):
        def fn(lens: Tensor, state: Tensor, indices: Tensor) -> Tensor:
            starts = torch.arange(4, dtype=torch.int32)
            row_lens, _ = ops.flatten_decode(starts, lens, 3)
            kept = lens.clone()
            ops.reset_states_(state, indices, row_lens > 6)
            return row_lens + kept

        assert_same(fn, lens_and_states, engine)


class TestA2CloneGivenToAnOpWithItsSource:
    """``y = x.clone(); op(y, x)`` becomes ``op(x, x)`` where the clone is taken for a no-op."""

    @each_engine
    def test_a2_trigger(self, engine: str):
        """Every row moves one slot up, from a pool into a copy of it."""

        def fn(pool: Tensor, slots: Tensor) -> Tensor:
            doubled = pool * 2
            moved = doubled.clone()
            ops.kv_cache_write_(doubled.flatten(0, 1), slots, moved)
            return moved

        def make() -> list[Tensor]:
            return [torch.arange(8.0).view(2, 2, 2), torch.tensor([1, 2, 3, -1])]

        assert_same_with_a_snapshot(fn, make, engine)

    @each_engine
    def test_a2_no_op_of_ours_reads_what_it_writes_through_another_argument(self, engine: str):
        def fn(lens: Tensor, state: Tensor, indices: Tensor) -> Tensor:
            doubled = state * 2
            ops.reset_states_(doubled, indices, doubled.clone()[:, 0] > 5)
            return doubled + 0

        assert_same(fn, lens_and_states, engine)

    @each_engine
    def test_a2_persistent_buffer(self, engine: str):
        def fn(kept: Tensor, state: Tensor, indices: Tensor) -> Tensor:
            doubled = state * 2
            state.copy_(doubled)
            ops.reset_states_(state, indices, kept > 6)
            return state + 0

        assert_same(fn, lens_and_states, engine)


class TestA3BookkeepingByCopy:
    """``prev[:] = lens; lens.add_(1)`` copies the lens of after the step."""

    @each_engine
    def test_a3_trigger(self, engine: str):
        def fn(lens: Tensor, prev: Tensor, other: Tensor) -> Tensor:
            old = lens.clone()
            lens.add_(other)
            prev.copy_(old)
            return prev + 0

        def make() -> list[Tensor]:
            return [torch.arange(4), torch.zeros(4, dtype=torch.int64), torch.ones(4).long()]

        assert_same_with_a_snapshot(fn, make, engine)

    @each_engine
    def test_a3_states_move_with_source_and_destination_in_one_op(self, engine: str):
        """Rolling a state forward is one op that reads every source before it stores."""

        def fn(state: Tensor, x: Tensor, indices: Tensor, dst: Tensor) -> Tensor:
            return ops.selective_state_update_(
                state, x, x, -torch.ones(2, 2), x, x, indices, dst_indices=dst
            )

        def make() -> list[Tensor]:
            torch.manual_seed(0)
            swapped = torch.tensor([1, 0], dtype=torch.int32)
            return [torch.randn(2, 2, 2), torch.randn(2, 2), swapped.flip(0), swapped]

        assert_same(fn, make, engine)


class TestA4ResultThatIsTheInput:
    """``logits / 1.0`` may come back as the logits themselves."""

    @each_engine
    def test_a4_a_temperature_of_one_gives_fresh_logits(self, engine: str):
        def fn(logits: Tensor) -> Tensor:
            return logits / 1.0

        logits = torch.tensor([1.0, -2.0])
        compiled = torch.compile(fn, backend="mtpgraph", fullgraph=True, options={"engine": engine})
        compiled(logits).clamp_(max=0)
        assert logits.tolist() == [1.0, -2.0]

    @each_op
    def test_a4_no_op_returns_an_argument(self, op: torch._ops.OpOverload):
        assert all(result.alias_info is None for result in op._schema.returns)

    @each_engine
    def test_a4_functional_ops_return_fresh_memory(self, engine: str):
        def fn(indices: Tensor, table: Tensor, requests: Tensor) -> Tensor:
            return ops.topk_to_slots(indices, table, requests, 1)

        indices = torch.tensor([[0, 1]], dtype=torch.int32)
        table = torch.tensor([[0, 1]], dtype=torch.int32)
        compiled = torch.compile(fn, backend="mtpgraph", options={"engine": engine})
        slots = compiled(indices, table, torch.zeros(1, dtype=torch.int32))
        slots.fill_(9)
        assert indices.tolist() == table.tolist() == [[0, 1]]


@each_op
def test_a5_mutable_ops_declare_one_written_argument(op: torch._ops.OpOverload):
    """An op that returns what it mutates is computed in three ways by three parts of the stack."""
    written = [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert len(written) == op._schema.name.endswith("_")


@each_op
def test_a7_every_op_has_a_fake(op: torch._ops.OpOverload):
    """Without one, tracing under ``fullgraph`` stops at the op."""
    assert singleton.find(op._schema.name).fake_impl.kernel


@each_engine
def test_a8_in_place_op_whose_result_nobody_uses(engine: str):
    """The update must stay for what it does to the state, fused reset included."""

    def fn(state: Tensor, x: Tensor, lens: Tensor, indices: Tensor) -> Tensor:
        starts = torch.arange(3, dtype=torch.int32)
        old = ops.has_initial_state(starts, lens)
        ops.reset_states_(state, indices, old)
        ops.selective_state_update_(state, x, x, -torch.ones(2, 2), x, x, indices, starts)
        return lens + 1

    def make() -> list[Tensor]:
        torch.manual_seed(0)
        state = torch.full((3, 2, 2), float("nan"))
        state[1] = 2
        lens = torch.tensor([1, 5], dtype=torch.int32)
        return [state, torch.randn(2, 2), lens, torch.tensor([2, 1], dtype=torch.int32)]

    expected, eager_args, actual, args = both_ways(fn, make, engine)
    assert torch.equal(actual, expected)
    assert args[0][1:].isfinite().all()
    torch.testing.assert_close(args[0], eager_args[0], rtol=0, atol=0, equal_nan=True)


def test_a12_no_output_shape_depends_on_a_value():
    """``repeat_interleave`` by lengths makes a size that only the device knows."""

    def fn(starts: Tensor, lens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.flatten_decode(starts, lens, x.shape[0])

    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    lens = torch.tensor([2, 9], dtype=torch.int32)
    compiled = torch.compile(fn, backend="mtpgraph", fullgraph=True, options={"engine": "eager"})
    for count in (3, 5):
        row_lens, row_requests = compiled(starts, lens, torch.empty(count))
        assert len(row_lens) == len(row_requests) == count


@pytest.mark.parametrize("num_reqs", [32, 33, 34])
def test_e3_padded_rows_are_empty_and_real_rows_right(num_reqs: int):
    """33 requests of 4 tokens are 132, padded to 136: 34 rows in buffers that held 33."""
    next_n = 4

    def fn(x: Tensor, starts: Tensor, lens: Tensor, indices: Tensor, state: Tensor) -> Any:
        row_lens, row_requests = ops.flatten_decode(starts, lens, x.shape[0])
        y = ops.selective_state_update_(
            state, x, x, -torch.ones(2, 2), x, x, indices, starts, dt_softplus=True
        )
        return row_lens, row_requests, y

    step = mtpgraph.compile(
        fn,
        sizes=range(8, 65, 8),
        next_n=next_n,
        engine="eager",
        inputs={
            "x": Batched(per="token"),
            "starts": Batched(pad="last", extra=1),
            "lens": Batched(),
            "indices": Batched(pad=-1),
            "state": Static,
        },
    )
    x = torch.randn(num_reqs * next_n, 2)
    starts = torch.arange(0, num_reqs * next_n + 1, next_n, dtype=torch.int32)
    lens = torch.full((num_reqs,), 9, dtype=torch.int32)
    indices = torch.arange(num_reqs * next_n, dtype=torch.int32).view(num_reqs, next_n)
    state = torch.randn(40 * next_n, 2, 2)
    expected_state = state.clone()
    expected = fn(x, starts, lens, indices, expected_state)
    torch.testing.assert_close(step(x, starts, lens, indices, state), expected, rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
    assert step.stats().calls == {-(-num_reqs // 8) * 8: 1}


def test_e3_every_batch_up_to_the_largest_size_is_captured():
    """97 tokens with a largest size of 100 must not fall out of the table."""
    step = mtpgraph.compile(
        lambda x: x * 2, sizes=[50, 100], engine="eager", inputs={"x": Batched()}
    )
    for count in (97, 100, 51):
        step(torch.ones(count))
    assert step.stats().calls == {100: 3}


def test_e8_a_graph_that_was_captured_is_the_one_that_is_found():
    """Graphs captured under keys that no call asks for are memory spent for nothing."""

    class Recorded:
        num_bytes = 0

        def replay(self) -> None:
            raise AssertionError("nothing runs here")

    class Recorder:
        def __init__(self) -> None:
            self.count = 0

        def is_capturing(self) -> bool:
            return False

        def warm_up(self, run: Callable[[], Any]) -> None:
            run()

        def capture(self, run: Callable[[], Any], generators: Any) -> Any:
            self.count += 1
            return Recorded()

    recorder, stats = Recorder(), Stats()
    table = GraphTable(recorder, stats, Options())
    first = table.obtain("a", "for a", 1, lambda: None)
    assert table.obtain("a", "for a", 1, lambda: None) is first
    assert table.obtain("b", "for b", 1, lambda: None) is not first
    assert recorder.count == stats.captures == 2
