"""Real CUDA graphs: one per size, replayed for every batch that the size can hold."""

import contextlib
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import mtpgraph
from mtpgraph import Batched, Static, ops
from mtpgraph.compile_passes.capture import CudaDevice
from tests.helpers import assert_same_bits

from .support import INPUTS, NEXT_N, Stream, copy_pools, hybrid_step, make_pools

pytestmark = pytest.mark.gpu

ENGINES = ["eager", "inductor"]


def compile_hybrid(**options: Any) -> mtpgraph.CompiledStep:
    options = {"sizes": [1, 2, 4, 8], "next_n": NEXT_N, "strict": True, **options}
    return mtpgraph.compile(hybrid_step, inputs=INPUTS, **options)


def to_gpu(batch: list[Tensor]) -> list[Tensor]:
    return [value.cuda() for value in batch]


def gpu_pools(num_requests: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: pool.cuda() for name, pool in make_pools(num_requests, dtype).items()}


def assert_replay_equals_eager(
    step: mtpgraph.CompiledStep,
    batch: list[Tensor],
    pools: dict[str, Tensor],
    expected_pools: dict[str, Tensor],
    *,
    exact: bool,
) -> None:
    with torch.no_grad():
        expected = hybrid_step(*batch, expected_pools)
    actual = step(*batch, pools)
    compare = {"rtol": 0, "atol": 0} if exact else {}
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, **compare)
    for name, pool in pools.items():
        torch.testing.assert_close(pool, expected_pools[name], equal_nan=True, **compare)


@pytest.mark.parametrize("engine", ENGINES)
def test_gpu_step_replays_every_batch(engine: str):
    step, stream, pools = compile_hybrid(engine=engine), Stream(8), gpu_pools(8)
    expected_pools = copy_pools(pools)
    step.warm_up(*to_gpu(Stream(2).batch([2, 2])), pools)
    for name, pool in pools.items():
        assert_same_bits(pool, expected_pools[name])
    assert step.stats().captures == 4
    for num_reqs in (3, 8, 4, 2, 3, 5, 1, 7, 6):
        query_lens = [1 + (place + num_reqs) % NEXT_N for place in range(num_reqs)]
        batch = to_gpu(stream.batch(query_lens, new=(num_reqs // 2,)))
        assert_replay_equals_eager(step, batch, pools, expected_pools, exact=engine == "eager")
    stats = step.stats()
    assert (stats.graphs, stats.captures, stats.replays) == (1, 4, 9)
    assert (stats.recompiles, stats.recaptures, stats.eager_calls) == (0, 0, 0)


def test_gpu_new_request_of_next_n_tokens_replays_a_graph_of_verify_rows():
    """It looks like any verify row to the host; the device knows that it is new."""
    step, stream, pools = compile_hybrid(engine="eager"), Stream(2), gpu_pools(2)
    expected_pools = copy_pools(pools)
    for new in ((), (), (1,), (0, 1)):
        batch = to_gpu(stream.batch([NEXT_N, NEXT_N], new))
        assert_replay_equals_eager(step, batch, pools, expected_pools, exact=True)
    assert (step.stats().captures, step.stats().replays) == (1, 4)


def test_gpu_step_never_waits_for_the_device():
    step, stream, pools = compile_hybrid(engine="inductor"), Stream(4), gpu_pools(4)
    batches = [to_gpu(stream.batch([2, 1, 2])) for _ in range(3)]
    step(*batches[0], pools)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            # that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        for batch in batches[1:]:
            step(*batch, pools)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.stats().replays == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gpu_step_under_either_mode(mode: Any):
    step, stream, pools = compile_hybrid(engine="inductor"), Stream(2), gpu_pools(2)
    expected_pools = copy_pools(pools)
    with mode():
        for _ in range(3):
            batch = to_gpu(stream.batch([2, 1]))
            assert_replay_equals_eager(step, batch, pools, expected_pools, exact=False)
    assert step.stats().replays == 3


def test_gpu_step_on_another_stream():
    step, stream, pools = compile_hybrid(engine="eager"), Stream(4), gpu_pools(4)
    expected_pools = copy_pools(pools)
    other = torch.cuda.Stream()
    for place in range(4):
        batch = to_gpu(stream.batch([2, 1, 2, 2]))
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other if place % 2 else torch.cuda.current_stream()):
            assert_replay_equals_eager(step, batch, pools, expected_pools, exact=True)
        torch.cuda.current_stream().wait_stream(other)


def test_gpu_caches_that_move_are_captured_again():
    step, stream, pools = compile_hybrid(engine="eager"), Stream(2), gpu_pools(2)
    expected_pools = copy_pools(pools)
    batch = to_gpu(stream.batch([2, 2]))
    assert_replay_equals_eager(step, batch, pools, expected_pools, exact=True)
    moved = copy_pools(pools)
    batch = to_gpu(stream.batch([2, 2]))
    assert_replay_equals_eager(step, batch, moved, expected_pools, exact=True)
    assert step.stats().recaptures == 1


def test_gpu_step_inside_the_users_own_capture():
    step, stream, pools = compile_hybrid(engine="inductor"), Stream(2), gpu_pools(2)
    batch = to_gpu(stream.batch([2, 2]))
    step(*batch, pools)
    before = copy_pools(pools)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*batch, pools)
    for name, pool in pools.items():
        assert_same_bits(pool, before[name])
    with torch.no_grad():
        hybrid_step(*batch, before)
    graph.replay()
    for name, pool in pools.items():
        torch.testing.assert_close(pool, before[name], equal_nan=True)


def test_gpu_parameters_updated_in_place_are_seen():
    module = torch.nn.Linear(8, 8).cuda()
    step = mtpgraph.compile(module.forward, sizes=[4], strict=True, inputs={"input": Batched()})
    x = torch.randn(3, 8, device="cuda")
    for _ in range(3):
        torch.testing.assert_close(step(x), module(x).detach())
        with torch.no_grad():
            module.weight.mul_(-2)
    assert step.stats().replays == 3


def test_gpu_random_numbers_advance_in_replay_and_work_outside():
    step = mtpgraph.compile(
        lambda x: x + torch.rand_like(x), sizes=[4], engine="eager", inputs={"x": Batched()}
    )
    x = torch.zeros(4, device="cuda")
    drawn = [step(x).clone() for _ in range(3)]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    assert step.stats().replays == 3
    torch.manual_seed(0)
    first = torch.rand(3, device="cuda")
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(3, device="cuda"))


def sync_step(x: Tensor) -> Tensor:
    return x * x.sum().cpu().item()


@pytest.mark.filterwarnings("ignore:padding may reach real rows:RuntimeWarning")
def test_gpu_failed_capture_falls_back():
    """A sync that no pass looks for fails the recording, and leaves the device usable."""
    step = mtpgraph.compile(
        sync_step,
        sizes=[4],
        engine="eager",
        inputs={"x": Batched()},
        disable_passes=["find_host_syncs"],
    )
    x = torch.ones(3, device="cuda")
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.warns(RuntimeWarning, match="no CUDA graph for"),
    ):
        out = step(x)
    assert out.tolist() == [3, 3, 3]
    assert step.stats().captures == 0
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_gpu_backend_alone_runs_a_step_that_syncs_without_a_graph():
    x = torch.ones(3, device="cuda")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(sync_step, backend="mtpgraph", options={"engine": "eager"})
        with pytest.warns(RuntimeWarning, match="no CUDA graph, .*return x \\* x.sum"):
            assert compiled(x).tolist() == [3, 3, 3]
        assert compiled(x).tolist() == [3, 3, 3]
    assert mtpgraph.stats(compiled).captures == 0


def test_gpu_outputs_hold_until_the_next_call_or_are_copies():
    for clone_outputs in (False, True):
        step = mtpgraph.compile(
            lambda x: x * 2,
            sizes=[2],
            engine="eager",
            clone_outputs=clone_outputs,
            inputs={"x": Batched()},
        )
        first = step(torch.ones(2, device="cuda"))
        step(torch.full((2,), 4.0, device="cuda"))
        assert first.tolist() == ([2, 2] if clone_outputs else [8, 8])


def test_gpu_collector_is_as_before():
    assert gc.isenabled()
    step = mtpgraph.compile(lambda x: x + 1, sizes=[2], engine="eager", inputs={"x": Batched()})
    step(torch.ones(2, device="cuda"))
    assert gc.isenabled()


@pytest.mark.parametrize("engine", ENGINES)
def test_gpu_backend_alone_captures_each_shape(engine: str):
    """The drop-in: first call plain, then one graph per combination of shapes."""
    compiled = torch.compile(
        hybrid_step,
        backend="mtpgraph",
        fullgraph=True,
        dynamic=False,
        options={"engine": engine, "strict": True},
    )
    stream, pools = Stream(4), gpu_pools(4)
    expected_pools = copy_pools(pools)
    with torch.no_grad():
        for _ in range(4):
            batch = to_gpu(stream.batch([2, 2, 1, 2]))
            expected = hybrid_step(*batch, expected_pools)
            for a, b in zip(compiled(*batch, pools), expected, strict=True):
                torch.testing.assert_close(a, b)
            for name, pool in pools.items():
                torch.testing.assert_close(pool, expected_pools[name], equal_nan=True)
    stats = mtpgraph.stats(compiled)
    assert (stats.captures, stats.replays, stats.eager_calls) == (1, 3, 1)


def test_gpu_sizes_share_one_pool_of_memory():
    """Graphs of all sizes together hold little more than the largest alone."""

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.relu(x @ weight)
        return x

    def reserved(sizes: list[int]) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        step = mtpgraph.compile(
            fn, sizes=sizes, engine="eager", inputs={"x": Batched(), "weight": Static}
        )
        weight = torch.randn(1024, 1024, device="cuda")
        step.warm_up(torch.randn(2, 1024, device="cuda"), weight)
        assert step.stats().captures == len(sizes)
        return torch.cuda.memory_reserved() - before

    largest = reserved([2048])
    assert reserved([256, 512, 1024, 2048]) < 2 * largest


@pytest.mark.parametrize("fails", [False, True], ids=["graphs are gone", "capture failed"])
def test_gpu_memory_of_graphs_that_are_gone_may_be_held(fails: bool):
    """A pool that its graphs have left takes no other while an output of theirs lives on."""
    gc.collect()
    held: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        y = torch.relu(x @ x)
        if torch.cuda.is_current_stream_capturing():
            held.append(y)
            if fails:
                raise RuntimeError("cannot be recorded")
        return y

    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    x = torch.randn(512, 512, device="cuda")
    device.warm_up(lambda: fn(x))
    cannot = pytest.raises(RuntimeError, match="cannot be recorded")
    with cannot if fails else contextlib.nullcontext():
        device.capture(lambda: fn(x), ())
    gc.collect()
    assert held
    graph = device.capture(lambda: torch.relu(x @ x), ())
    torch.testing.assert_close(graph.replay(), torch.relu(x @ x))


def test_gpu_ops_in_a_step_stay_on_the_device():
    """One call of every kind of op under a capture of the caller's: nothing reads a value."""
    starts = torch.tensor([0, 2, 3], dtype=torch.int32, device="cuda")
    lens = torch.tensor([2, 9], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    ops.flatten_decode(starts, lens, 4)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        row_lens, row_requests = ops.flatten_decode(starts, lens, 4)
    graph.replay()
    assert row_lens.tolist() == [1, 2, 9, 0]
    assert row_requests.tolist() == [0, 0, 1, -1]


def add_step(x: Tensor, lens: Tensor, ids: Tensor, cache: list[Tensor]) -> tuple[Tensor, Tensor]:
    return x + cache[0] + lens[:, None], ids + 1


def compile_add() -> mtpgraph.CompiledStep:
    inputs = {"x": Batched(pad=float("nan")), "lens": Batched(), "ids": Batched(1), "cache": Static}
    return mtpgraph.compile(add_step, inputs=inputs, sizes=[4, 8], engine="eager", strict=True)


def add_inputs(num_reqs: int) -> list[Tensor]:
    return [
        torch.randn(num_reqs, 3, device="cuda"),
        torch.randint(9, (num_reqs,), device="cuda", dtype=torch.int32),
        torch.randint(9, (2, num_reqs), device="cuda"),
    ]


def test_gpu_replays_take_inputs_of_any_strides_and_dims():
    step, cache = compile_add(), [torch.ones(1, device="cuda")]
    for num_reqs in (3, 3, 3, 5, 5, 5, 3, 4, 1, 8, 8, 2):
        x, lens, ids = add_inputs(num_reqs)
        strided = [x.t().contiguous().t(), lens.repeat_interleave(2)[::2], ids.t().clone().t()]
        for args in ([x, lens, ids], strided):
            for actual, expected in zip(step(*args, cache), add_step(*args, cache), strict=True):
                assert_same_bits(actual.contiguous(), expected.contiguous())
    assert step.stats().captures == 2


def test_gpu_inputs_in_their_place_are_not_copied():
    step, cache = compile_add(), [torch.ones(1, device="cuda")]
    for _ in range(3):
        step(*add_inputs(3), cache)
    place = step.buffers(*add_inputs(3), cache)
    for value, new in zip(place.values(), add_inputs(3), strict=True):
        value.copy_(new)
    args = list(place.values())
    expected = [value.clone() for value in add_step(*args, cache)]
    for actual, want in zip(step(*args, cache), expected, strict=True):
        assert_same_bits(actual, want)


def test_gpu_replays_keep_no_input_and_no_cache_that_was_replaced():
    step, cache = compile_add(), [torch.ones(1, device="cuda")]
    args = add_inputs(3)
    alive = [weakref.ref(value) for value in (*args, cache[0])]
    for _ in range(3):
        step(*args, cache)
    del args
    cache[0] = torch.ones(1, device="cuda")
    for _ in range(3):
        step(*add_inputs(3), cache)
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


def test_gpu_replay_on_a_card_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    step, cache = compile_add(), [torch.ones(1, device="cuda:1")]
    for _ in range(4):
        args = [value.to("cuda:1") for value in add_inputs(3)]
        for actual, want in zip(step(*args, cache), add_step(*args, cache), strict=True):
            assert_same_bits(actual, want)
    assert torch.cuda.current_device() == 0
