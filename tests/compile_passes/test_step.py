import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mtpgraph
from mtpgraph import Batched, Static, ops
from tests.helpers import assert_same_bits

from .support import INPUTS, NEXT_N, Stream, copy_pools, hybrid_step, make_pools

SIZES = [1, 2, 4, 8, 16]

# the step computes from padding on purpose, and says so by declaring every input
mixes_rows = pytest.mark.filterwarnings("ignore:padding may reach real rows:RuntimeWarning")


@dataclasses.dataclass
class Caches:
    sums: list[Tensor]


@dataclasses.dataclass(slots=True)
class SlottedCaches:
    sums: list[Tensor]


class ModuleCaches(torch.nn.Module):
    def __init__(self, sums: list[Tensor]) -> None:
        super().__init__()
        self.sums = sums


def compile_hybrid(**options: Any) -> mtpgraph.CompiledStep:
    options = {"sizes": SIZES, "next_n": NEXT_N, "engine": "eager", **options}
    return mtpgraph.compile(hybrid_step, inputs=INPUTS, **options)


def assert_equals_eager(
    step: mtpgraph.CompiledStep,
    batch: list[Tensor],
    pools: dict[str, Tensor],
    expected_pools: dict[str, Tensor],
) -> None:
    """Outputs and every byte of every pool, padding having touched nothing."""
    expected = hybrid_step(*batch, expected_pools)
    actual = step(*batch, pools)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b)
    for name, pool in pools.items():
        torch.testing.assert_close(pool, expected_pools[name], equal_nan=True)


@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_step_serves_every_size_from_one_compilation(engine: str):
    step, stream, pools = compile_hybrid(engine=engine), Stream(16), make_pools(16)
    expected_pools = copy_pools(pools)
    for num_reqs in (5, 1, 16, 2, 3, 7, 1, 12, 4, 9, 15, 6, 8, 10, 11, 13, 14):
        query_lens = [1 + (place + num_reqs) % NEXT_N for place in range(num_reqs)]
        batch = stream.batch(query_lens, new=(num_reqs // 2,))
        assert_equals_eager(step, batch, pools, expected_pools)
    stats = step.stats()
    assert (stats.graphs, stats.recompiles, stats.graph_breaks) == (1, 0, 0)
    assert stats.rewrites == {"fuse_select": 1, "fuse_state_reset": 2}
    assert stats.calls == {1: 2, 2: 1, 4: 2, 8: 4, 16: 8}
    assert stats.tokens + stats.padded_tokens == NEXT_N * sum(n * c for n, c in stats.calls.items())


def test_step_of_half_types_equals_eager():
    step, stream = compile_hybrid(), Stream(4, torch.bfloat16)
    pools = make_pools(4, torch.bfloat16)
    expected_pools = copy_pools(pools)
    for query_lens in ([2, 1, 2], [1], [2, 2, 2, 1]):
        assert_equals_eager(step, stream.batch(query_lens), pools, expected_pools)
    assert step.stats().recompiles == 0


def test_step_pads_by_tokens_when_rows_are_long():
    """5 tokens of one request need the size that holds 5 tokens, not the one for 1 request."""
    step, stream, pools = compile_hybrid(), Stream(2), make_pools(2)
    expected_pools = copy_pools(pools)
    assert_equals_eager(step, stream.batch([5]), pools, expected_pools)
    assert step.stats().calls == {4: 1}


def test_step_above_the_largest_size_runs_exact():
    step, stream, pools = compile_hybrid(sizes=[2, 4]), Stream(7), make_pools(7)
    expected_pools = copy_pools(pools)
    for query_lens in ([2] * 7, [1] * 6, [2, 1], [2] * 5):
        assert_equals_eager(step, stream.batch(query_lens), pools, expected_pools)
    stats = step.stats()
    assert (stats.graphs, stats.recompiles) == (1, 0)
    assert stats.calls == {None: 3, 2: 1}


def test_step_of_nothing_returns_empty_outputs():
    step, stream, pools = compile_hybrid(), Stream(2), make_pools(2)
    before = copy_pools(pools)
    empty = [stream.batch([2])[0][:0], torch.zeros(1, dtype=torch.int32)]
    empty += [value[:0] for value in stream.batch([2])[2:]]
    for _ in range(2):
        out, chosen, lens = step(*empty, pools)
        assert (out.shape, chosen.shape, lens.shape) == ((0, 8), (0, 3), (0,))
    for name, pool in pools.items():
        assert_same_bits(pool, before[name])


def test_step_of_padding_requests_alone():
    """Requests without tokens, as an idle rank sends them."""
    step, pools = compile_hybrid(), make_pools(2)
    before = copy_pools(pools)
    batch = [
        torch.zeros(0, 8),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.full((2, 12), -1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
        torch.full((2, NEXT_N), -1, dtype=torch.int32),
        torch.ones(2, dtype=torch.int32),
    ]
    out, _, lens = step(*batch, pools)
    assert (out.shape, lens.shape) == ((0, 8), (2,))
    for name, pool in pools.items():
        assert_same_bits(pool, before[name])


def test_step_warm_up_compiles_and_leaves_pools_alone():
    step, stream, pools = compile_hybrid(), Stream(3), make_pools(3)
    before = copy_pools(pools)
    step.warm_up(*Stream(2).batch([2, 2]), pools)
    for name, pool in pools.items():
        assert_same_bits(pool, before[name])
    assert step.stats().graphs == 1
    assert step.stats().tokens == step.stats().padded_tokens == 0
    assert_equals_eager(step, stream.batch([2, 1, 2]), pools, before)
    assert step.stats().graphs == 1


@mixes_rows
def test_step_serves_size_one_whatever_the_caches_hold():
    """Code of the same graph in Inductor's cache is guarded by "2 <= size"."""

    def fn(x: Tensor) -> Tensor:
        return x.tan() * 3 + x.shape[0]

    x = torch.randn(4, 5)
    torch._dynamo.mark_dynamic(x, 0)
    with torch._inductor.config.patch(fx_graph_cache=True):
        torch.compile(fn, backend="mtpgraph", fullgraph=True)(x)
        torch._dynamo.reset()
        step = mtpgraph.compile(fn, sizes=[1, 4], inputs={"x": Batched(0)})
        for count in (4, 1):
            torch.testing.assert_close(step(x[:count]) - step(x[:count]), torch.zeros(count, 5))
    assert (step.stats().graphs, step.stats().recompiles) == (1, 0)


def test_step_specializes_chosen_sizes():
    step, stream, pools = compile_hybrid(specialize=[1, 4]), Stream(8), make_pools(8)
    expected_pools = copy_pools(pools)
    for num_reqs in (1, 3, 8, 4, 2, 1, 5):
        assert_equals_eager(step, stream.batch([2] * num_reqs), pools, expected_pools)
    stats = step.stats()
    assert (stats.graphs, stats.recompiles) == (3, 0)


def test_step_with_every_size_specialized():
    step, stream, pools = compile_hybrid(sizes=[1, 2], specialize=[1, 2]), Stream(2), make_pools(2)
    expected_pools = copy_pools(pools)
    for num_reqs in (1, 2, 1):
        assert_equals_eager(step, stream.batch([2] * num_reqs), pools, expected_pools)
    # the third learns which output sizes follow the batch
    assert step.stats().graphs == 3
    assert step.stats().recompiles == 0


def test_step_with_the_single_size_one():
    step, stream, pools = compile_hybrid(sizes=[1]), Stream(1), make_pools(1)
    expected_pools = copy_pools(pools)
    for query_len in (2, 1, 2):
        assert_equals_eager(step, stream.batch([query_len]), pools, expected_pools)
    assert step.stats().graphs == 1
    # above the table: not the code or the buffers of a size in it
    assert_equals_eager(step, Stream(2).batch([2, 2]), pools := make_pools(2), copy_pools(pools))
    assert_equals_eager(step, Stream(2).batch([2]), pools, copy_pools(pools))


def test_step_does_not_take_equal_numbers_for_the_batch():
    """A weight of 4 rows comes back whole from a batch padded to 4, a batch sum keeps its shape."""

    def fn(x: Tensor, weight: Tensor) -> dict[str, Any]:
        return {
            "weight": weight * 1,
            "rows": x @ weight,
            "columns": weight @ x.t(),
            "every_second": x[::2],
            "one_more": torch.nn.functional.pad(x, (0, 0, 1, 0)),
            "nested": [x + 1, (x[:, 0], None)],
            "total": torch.ones(4),
        }

    step = mtpgraph.compile(
        fn, sizes=[4], engine="eager", inputs={"x": Batched(0, pad=0), "weight": Static}
    )
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    for _ in range(2):
        actual, expected = step(x, weight), fn(x, weight)
        torch.testing.assert_close(actual, expected)


def test_step_batched_in_another_dimension_and_strided():
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y.sum(0)

    step = mtpgraph.compile(
        fn, sizes=[2, 8], engine="eager", inputs={"x": Batched(0), "y": Batched(1, pad=3)}
    )
    x, y = torch.randn(10, 6)[::2, ::3], torch.randn(5, 3).t()
    assert x.shape[0] == y.shape[1] == 5
    torch.testing.assert_close(step(x, y), fn(x, y))


def test_step_takes_keywords_defaults_and_none():
    def fn(x: Tensor, bias: Tensor | None = None, *, scale: float = 2.0) -> Tensor:
        return x * scale + (0 if bias is None else bias)

    step = mtpgraph.compile(
        fn, sizes=[4], engine="eager", inputs={"x": Batched(0), "bias": Batched(0)}
    )
    x, bias = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(step(x), x * 2)
    torch.testing.assert_close(step(x=x, bias=bias), x * 2 + bias)
    torch.testing.assert_close(step(x, scale=3.0), x * 3)
    torch.testing.assert_close(step(x), x * 2)
    assert step.stats().graphs == 3
    assert step.stats().recompiles == 0


@mixes_rows
@pytest.mark.parametrize(
    "make", [Caches, SlottedCaches, ModuleCaches], ids=["dataclass", "slots", "module"]
)
def test_step_follows_caches_that_move(make: Callable[[list[Tensor]], Any]):
    def fn(x: Tensor, caches: Any) -> Tensor:
        caches.sums[0].add_(x.sum())
        return x + caches.sums[0]

    step = mtpgraph.compile(
        fn, sizes=[2], engine="eager", inputs={"x": Batched(0), "caches": Static}
    )
    x = torch.ones(2)
    first, second = make([torch.zeros(1)]), make([torch.full((1,), 10.0)])
    assert step(x, first).tolist() == [3, 3]
    assert step(x, first).tolist() == [5, 5]
    assert step(x, second).tolist() == [13, 13]
    assert step(x, first).tolist() == [7, 7]
    assert second.sums[0].item() == 12
    first.sums[0] = torch.full((1,), 100.0)
    assert step(x, first).tolist() == [103, 103]
    # the same tensor over other memory
    first.sums[0].set_(torch.full((1,), 1000.0))
    assert step(x, first).tolist() == [1003, 1003]


def test_step_sees_parameters_updated_in_place():
    module = torch.nn.Linear(3, 3)
    step = mtpgraph.compile(module, sizes=[2], engine="eager", inputs={"input": Batched(0)})
    x = torch.randn(2, 3)
    for _ in range(3):
        torch.testing.assert_close(step(x), module(x).detach())
        with torch.no_grad():
            module.weight.mul_(-2)


def test_step_runs_under_every_grad_mode():
    step, stream, pools = compile_hybrid(), Stream(2), make_pools(2)
    expected_pools = copy_pools(pools)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode):
        with mode():
            assert_equals_eager(step, stream.batch([2, 1]), pools, expected_pools)
    assert step.stats().recompiles == 0


def test_step_returns_a_copy_of_an_input_it_passes_on():
    step = mtpgraph.compile(
        lambda x: (x, x + 1), sizes=[4], engine="eager", inputs={"x": Batched(0)}
    )
    first, _ = step(torch.ones(3))
    step(torch.zeros(3))
    assert first.tolist() == [1, 1, 1]


@pytest.mark.parametrize("clone_outputs", [False, True])
def test_step_passes_on_an_input_that_its_graph_does_not_take(clone_outputs: bool):
    step = mtpgraph.compile(
        lambda x, lens, starts, y: [x, lens, starts, y * 2],
        sizes=[4],
        engine="eager",
        inputs={
            "x": Batched(per="token"),
            "lens": Batched(),
            "starts": Batched(extra=1, pad="last"),
            "y": Batched(per="token"),
        },
        next_n=2,
        clone_outputs=clone_outputs,
    )
    for num_tokens in (5, 3, 7):
        given = [
            torch.randn(num_tokens, 2),
            torch.tensor([7, 8, 9]),
            torch.tensor([0, 1, 2, num_tokens]),
            torch.randn(num_tokens),
        ]
        for actual, expected in zip(step(*given), [*given[:3], given[3] * 2], strict=True):
            assert_same_bits(actual, expected)


def test_step_returns_a_copy_of_a_view_of_an_input():
    step = mtpgraph.compile(
        lambda x: (x.unsqueeze(1), x + 1), sizes=[4], engine="eager", inputs={"x": Batched(0)}
    )
    first, _ = step(torch.ones(3))
    step(torch.zeros(3))
    assert first.tolist() == [[1], [1], [1]]


def test_step_lets_go_of_caches_that_moved():
    step, stream, pools = compile_hybrid(), Stream(4), make_pools(4)
    for num_reqs in (1, 3, 4):
        step(*stream.batch([2] * num_reqs), pools)
    old = weakref.ref(pools["ssm"])
    pools = copy_pools(pools)
    step(*stream.batch([2]), pools)
    gc.collect()
    assert old() is None


def test_step_tells_constants_apart_that_are_equal():
    def fn(x: Tensor, n: Any, static: dict[str, Any]) -> Tensor:
        y = x + 10 if n is True else x * n
        return y + static["shift"]

    step = mtpgraph.compile(
        fn, sizes=[2], engine="eager", inputs={"x": Batched(0), "static": Static}
    )
    x = torch.arange(2)
    for n in (1, True, 1.0, 2, 2.0, 0.0, -0.0):
        for shift in (0, 0.0, 5):
            static = {"shift": shift, "cache": torch.ones(1)}
            actual, expected = step(x, n, static), fn(x, n, static)
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)


def test_step_sees_static_values_and_layouts_change():
    def fn(x: Tensor, static: Any) -> Tensor:
        return x + static["a"] * 10 + sum(static["more"])

    step = mtpgraph.compile(
        fn, sizes=[2], engine="eager", inputs={"x": Batched(0), "static": Static}
    )
    one, two = torch.ones(1), torch.full((1,), 2.0)
    layouts: list[dict[str, Any]] = [
        {"a": one, "b": two, "more": [one, two, one]},
        {"b": one, "a": two, "more": [one, two, one]},
        {"a": one, "b": two, "more": [one, two, two]},
        {"a": 3, "b": two, "more": [one, two, two]},
        {"a": 4, "b": two, "more": [one, two, two]},
    ]
    x = torch.zeros(2)
    for static in (*layouts, *layouts):
        torch.testing.assert_close(step(x, static), fn(x, static))


def test_step_follows_autocast():
    weight = torch.randn(3, 3)
    step = mtpgraph.compile(lambda x: x @ weight, sizes=[2], inputs={"x": Batched(0)})
    x = torch.randn(2, 3)
    for enabled in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            assert step(x).dtype == (torch.bfloat16 if enabled else torch.float32)


def test_step_runs_eager_where_dynamo_is_off():
    step, stream, pools = compile_hybrid(), Stream(2), make_pools(2)
    expected_pools = copy_pools(pools)
    with torch.compiler.set_stance("force_eager"):
        assert_equals_eager(step, stream.batch([2, 1]), pools, expected_pools)
    assert_equals_eager(step, stream.batch([2, 1]), pools, expected_pools)
    assert step.stats().graphs == 1


@mixes_rows
def test_step_takes_in_place_residuals_and_bookkeeping():
    """A batched input may be read by what writes something else."""

    def fn(x: Tensor, index: Tensor, kept: Tensor) -> Tensor:
        h = x * 2
        h += x
        h.add_(x)
        torch.add(h, x, out=h)
        kept[index.clamp(min=0)] = x
        kept.index_copy_(0, index.clamp(min=0), x)
        return h

    inputs = {"x": Batched(0), "index": Batched(0, pad=-1), "kept": Static}
    step = mtpgraph.compile(fn, sizes=[3], engine="eager", inputs=inputs)
    x, index, kept = torch.arange(3.0), torch.tensor([2, 4, 1]), torch.zeros(5)
    expected_kept = kept.clone()
    torch.testing.assert_close(step(x, index, kept), fn(x, index, expected_kept))
    assert torch.equal(kept, expected_kept)


@mixes_rows
def test_step_runs_once_per_call():
    """The first call learns how outputs follow the batch from the batch itself."""
    step = mtpgraph.compile(
        lambda x, n: x + n.add_(1), sizes=[4], engine="eager", inputs={"x": Batched(), "n": Static}
    )
    n = torch.zeros(1)
    for count in range(1, 4):
        assert step(torch.zeros(2), n).tolist() == [count, count]


def test_step_counts_a_recompile():
    step = mtpgraph.compile(
        lambda x, weight: x @ weight,
        sizes=[2, 4],
        engine="eager",
        inputs={"x": Batched(0), "weight": Static},
    )
    step(torch.ones(2, 3), torch.ones(3, 5))
    step(torch.ones(4, 3), torch.ones(3, 5))
    assert step.stats().recompiles == 0
    step(torch.ones(2, 3), torch.ones(3, 6))
    assert (step.stats().graphs, step.stats().recompiles) == (2, 1)


@mixes_rows
def test_step_pads_beyond_the_real_rows_after_a_larger_batch():
    """What a larger batch left in a buffer is padding again for a smaller one."""

    def fn(x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + 0, x.sum(), ends.sum()

    step = mtpgraph.compile(
        fn,
        sizes=[4],
        engine="eager",
        inputs={"x": Batched(0, pad=-1), "ends": Batched(0, pad="last", extra=1)},
    )
    step(torch.full((4,), 9), torch.tensor([0, 1, 2, 3, 4]))
    _, total, ends = step(torch.full((1,), 5), torch.tensor([0, 7]))
    assert total.item() == 5 - 3
    assert ends.item() == 7 * 4


@mixes_rows
@pytest.mark.parametrize(
    ("fn", "error", "match"),
    [
        (
            lambda x: torch.cat([x, x + 10]),
            ValueError,
            "outputs must have their real rows in front, got size 2",
        ),
        (lambda x: x.t().reshape(-1), ValueError, "outputs must have their real rows in front"),
        (lambda x: (x, x.shape[0]), ValueError, "outputs must be tensors, got the number 4"),
        (lambda x: (x, x.shape[0] / 2), ValueError, "outputs must be tensors, got the number"),
        (lambda x: (x, x.shape[0] > 3), ValueError, "outputs must be tensors, got the number"),
        (lambda x: (x, x.shape), ValueError, "outputs must be tensors, got the number 4"),
        (
            lambda x: torch.zeros(x.shape[0]),
            ValueError,
            "outputs must not take their size from an input that the step reads nothing else of",
        ),
        (
            lambda x: Caches([x + 1]),
            TypeError,
            "outputs must be tensors in lists, tuples and dicts",
        ),
        (
            lambda x: x + torch.arange(4)[:, None],
            ValueError,
            "the step fixes a size that was declared to grow",
        ),
    ],
)
def test_step_refuses_outputs_that_it_cannot_cut(fn: Any, error: type[Exception], match: str):
    step = mtpgraph.compile(fn, sizes=[4], engine="eager", inputs={"x": Batched(0)})
    with pytest.raises(error, match=match):
        step(torch.ones(3, 2))


def test_step_refuses_a_pad_that_does_not_fit():
    for pad, dtype in ((-1, torch.uint8), (float("nan"), torch.int32), (0.5, torch.int64)):
        step = mtpgraph.compile(lambda x: x, engine="eager", inputs={"x": Batched(pad=pad)})
        with pytest.raises(ValueError, match=r"inputs\['x'\] must have a pad that torch"):
            step(torch.ones(3, dtype=dtype))


@pytest.mark.parametrize(
    ("inputs", "error", "match"),
    [
        ({"y": Static}, ValueError, r"inputs must name arguments of the step, got 'y'"),
        ({"x": 3}, TypeError, r"inputs\['x'\] must be Batched or Static, got 3"),
    ],
)
def test_compile_refuses_inputs(inputs: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        mtpgraph.compile(lambda x: x, inputs=inputs)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"dim": -1}, "dim must be a non-negative int, got -1"),
        ({"pad": "first"}, "pad must be a number or \"last\", got 'first'"),
        ({"per": "row"}, 'per must be "request" or "token", got \'row\''),
        ({"extra": 0.5}, "extra must be a non-negative int, got 0.5"),
    ],
)
def test_batched_refuses(given: dict, match: str):
    with pytest.raises(ValueError, match=match):
        Batched(**given)


def test_step_refuses_arguments_before_it_writes():
    step, stream, pools = compile_hybrid(), Stream(3), make_pools(3)
    batch, before = stream.batch([2, 1, 2]), copy_pools(pools)
    cases = [
        (0, batch[0].tolist(), TypeError, "x must be a tensor, got list"),
        (2, batch[2][:2], ValueError, "seq_lens must be for 3 requests as query_start_loc is"),
        (4, batch[4][1:], ValueError, "slot_mapping must be for 5 tokens as x is"),
        (1, batch[1][:0], ValueError, "query_start_loc must have at least 1 entries, got 0"),
        (0, torch.tensor(1.0), ValueError, r"x must have a dimension 0, got \[\]"),
    ]
    for position, value, error, match in cases:
        wrong = [value if i == position else given for i, given in enumerate(batch)]
        with pytest.raises(error, match=match):
            step(*wrong, pools)
    for name, pool in pools.items():
        assert_same_bits(pool, before[name])


def test_what_holds_tensors_and_was_not_declared_is_inferred():
    step = mtpgraph.compile(lambda x, other: x + other[0], engine="eager", inputs={"x": Batched(0)})
    assert step(torch.ones(2), [torch.ones(1)]).tolist() == [2, 2]
    assert step.inputs == {"x": Batched(0), "other": Static()}


WRITES: list[Callable[[Tensor], Any]] = [
    lambda x: x.add_(1),
    lambda x: torch.relu_(x),
    lambda x: torch.nn.functional.relu(x, inplace=True),
    lambda x: torch.nn.functional.silu(x, True),
    lambda x: torch.neg(x, out=x),
]


@mixes_rows
@pytest.mark.parametrize("write", WRITES, ids=["method", "name", "inplace", "by-place", "out"])
def test_step_refuses_a_write_to_what_is_only_a_copy(write: Callable[[Tensor], Any]):
    def fn(x: Tensor) -> Tensor:
        write(x)
        return x * 2

    step = mtpgraph.compile(fn, engine="eager", inputs={"x": Batched(0)})
    with pytest.raises(ValueError, match=r"inputs\['x'\] must be Static or not be written"):
        step(torch.ones(2))


def test_step_refuses_a_batched_input_that_shares_what_it_writes():
    def fn(lens: Tensor, pool: Tensor) -> Tensor:
        ops.reset_states_(pool, lens, lens > 100)
        return lens * 1.0

    step = mtpgraph.compile(
        fn, sizes=[4], engine="eager", inputs={"lens": Batched(pad=-1), "pool": Static}
    )
    pool = torch.zeros(8)
    lens = torch.tensor([1, 2], dtype=torch.int32)
    step(lens, pool)
    with pytest.raises(ValueError, match="lens must not share memory with what the step writes"):
        step(pool[:2].view(torch.int32), pool)
    assert step(lens, pool).tolist() == [1, 2]


def test_step_follows_objects_that_can_be_called():
    """A layer is an argument like any other, though it is code as well."""

    class Layer:
        def __init__(self) -> None:
            self.weight = torch.ones(1)

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.weight

    inputs = {"x": Batched(), "layer": Static}
    for of in (lambda layer: layer, lambda layer: layer.__call__, functools.partial):
        layer = Layer()
        step = mtpgraph.compile(lambda x, layer: layer(x), sizes=[4], engine="eager", inputs=inputs)
        assert step(torch.ones(2), of(layer)).tolist() == [1, 1]
        layer.weight = torch.full((1,), 5.0)
        assert step(torch.ones(2), of(layer)).tolist() == [5, 5]


def test_step_serves_one_call_at_a_time():
    started, go_on = threading.Event(), threading.Event()

    def fn(x: Tensor) -> Tensor:
        return x + 1

    step = mtpgraph.compile(fn, sizes=[4], engine="eager", inputs={"x": Batched()})
    run = step._serve

    def slow(*args: Any) -> Any:
        started.set()
        assert go_on.wait(10)
        return run(*args)

    step._serve = slow  # pyright: ignore[reportAttributeAccessIssue]
    other = threading.Thread(target=lambda: step(torch.ones(2)))
    other.start()
    assert started.wait(10)
    with pytest.raises(RuntimeError, match="serves one call at a time"):
        step(torch.ones(2))
    go_on.set()
    other.join()
    assert step(torch.ones(2)).tolist() == [2, 2]


def test_step_pads_complex_inputs():
    step = mtpgraph.compile(
        lambda x: x * 2, sizes=[4], engine="eager", inputs={"x": Batched(pad=-1)}
    )
    x = torch.tensor([1 + 2j, 3j])
    torch.testing.assert_close(step(x), x * 2)
