"""Capture with a device that only pretends: what is recorded, when, and over which memory."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

import mtpgraph
from mtpgraph import Batched, Static
from mtpgraph.compile_passes import capture, graphed_callable, padded_runs
from mtpgraph.compile_passes.capture import CudaDevice, GraphTable, frozen_gc
from mtpgraph.compile_passes.graphed_callable import GraphedCallable
from mtpgraph.compile_passes.options import Options
from mtpgraph.compile_passes.pages import SharedBytesError
from mtpgraph.compile_passes.stats import Stats
from tests.helpers import assert_same_bits

from .support import INPUTS, NEXT_N, Stream, copy_pools, hybrid_step, make_pools


class PretendedGraph:
    """Runs the recorded code again, and keeps its outputs at one place as a real graph does."""

    num_bytes = 100

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.outputs: list[Tensor] | None = None

    def replay(self) -> Any:
        outputs = self.run()
        leaves = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        if self.outputs is None:
            self.outputs = [leaf.clone() for leaf in leaves]
        for kept, leaf in zip(self.outputs, leaves, strict=True):
            kept.copy_(leaf)
        return type(outputs)(self.outputs) if isinstance(outputs, list | tuple) else self.outputs[0]


class PretendedDevice:
    """Records what is asked of it; like a real device it does not run what it records."""

    def __init__(self) -> None:
        self.capturing = False
        self.failure: Exception | None = None
        self.captured: list[PretendedGraph] = []
        self.warm_ups = 0

    def is_capturing(self) -> bool:
        return self.capturing

    def warm_up(self, run: Callable[[], Any]) -> None:
        self.warm_ups += 1
        run()

    def capture(
        self, run: Callable[[], Any], generators: Sequence[torch.Generator]
    ) -> PretendedGraph:
        self.generators = list(generators)
        if self.failure is not None:
            raise self.failure
        self.captured.append(PretendedGraph(run))
        return self.captured[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PretendedDevice:
    pretended = PretendedDevice()
    monkeypatch.setattr(padded_runs, "device_of", lambda values: pretended)
    return pretended


def compile_hybrid(**options: Any) -> mtpgraph.CompiledStep:
    options = {"sizes": [1, 2, 4, 8], "next_n": NEXT_N, "engine": "eager", **options}
    return mtpgraph.compile(hybrid_step, inputs=INPUTS, **options)


def test_step_replays_one_graph_per_size(device: PretendedDevice):
    compiled, stream, pools = compile_hybrid(), Stream(8), make_pools(8)
    expected_pools = copy_pools(pools)
    for num_reqs in (3, 8, 4, 2, 3, 5, 1, 7):
        batch = stream.batch([NEXT_N] * num_reqs, new=(num_reqs // 2,))
        expected = hybrid_step(*batch, expected_pools)
        for a, b in zip(compiled(*batch, pools), expected, strict=True):
            assert_same_bits(a, b)
        for name, pool in pools.items():
            assert_same_bits(pool, expected_pools[name])
    stats = compiled.stats()
    assert (stats.graphs, stats.captures, stats.replays) == (1, 4, 8)
    assert (stats.recaptures, stats.recompiles, stats.eager_calls) == (0, 0, 0)
    assert device.warm_ups == 4


def test_warm_up_captures_largest_first_and_leaves_pools_alone(device: PretendedDevice):
    compiled, pools = compile_hybrid(), make_pools(8)
    before = copy_pools(pools)
    compiled.warm_up(*Stream(2).batch([2, 2]), pools)
    for name, pool in pools.items():
        assert_same_bits(pool, before[name])
    assert compiled.stats().captures == len(device.captured) == 4
    outputs = [graph.replay() for graph in device.captured]
    assert [len(per_token) for per_token, _, _ in outputs] == [16, 8, 4, 2]
    # the smallest size has a request of padding: symbolic code runs on two at least
    assert [len(per_request) for _, _, per_request in outputs] == [8, 4, 2, 2]

    compiled(*Stream(2).batch([2, 1]), pools)
    assert compiled.stats().captures == 4


def test_outputs_hold_until_the_next_call_or_are_copies(device: PretendedDevice):
    def fn(x: Tensor) -> Tensor:
        return x * 2

    for clone_outputs, kept in ((False, 8), (True, 2)):
        compiled = mtpgraph.compile(
            fn, sizes=[2], engine="eager", inputs={"x": Batched()}, clone_outputs=clone_outputs
        )
        first = compiled(torch.ones(2))
        compiled(torch.full((2,), 4.0))
        assert first.tolist() == [kept, kept]


def test_caches_that_move_are_captured_again(device: PretendedDevice):
    compiled, stream, pools = compile_hybrid(), Stream(2), make_pools(2)
    compiled(*stream.batch([2, 2]), pools)
    moved = copy_pools(pools)
    expected_pools = copy_pools(pools)
    batch = stream.batch([2, 2])
    expected = hybrid_step(*batch, expected_pools)
    for a, b in zip(compiled(*batch, moved), expected, strict=True):
        assert_same_bits(a, b)
    for name, pool in moved.items():
        assert_same_bits(pool, expected_pools[name])
    stats = compiled.stats()
    assert (stats.captures, stats.recaptures, stats.replays) == (2, 1, 2)


def test_caches_of_another_shape_at_the_same_address_are_captured_again(device: PretendedDevice):
    step = mtpgraph.compile(
        lambda x, page: x + page.sum(),
        sizes=[2],
        engine="eager",
        inputs={"x": Batched(), "page": Static},
    )
    page = torch.ones(128)
    for count in (64, 128, 64):
        assert step(torch.zeros(2), page[:count]).tolist() == [count, count]
    assert step.stats().recaptures == 2


def test_moves_far_apart_do_not_end_the_graphs(device: PretendedDevice):
    step = mtpgraph.compile(
        lambda x, cache: x + cache,
        sizes=[2],
        engine="eager",
        inputs={"x": Batched(), "cache": Static},
    )
    caches = [torch.full((1,), float(i)) for i in range(12)]
    for i, cache in enumerate(caches):
        for _ in range(3):
            assert step(torch.zeros(2), cache).tolist() == [i, i]
    assert step.stats().replays == 36
    assert not step.stats().fallbacks


@pytest.mark.parametrize("strict", [False, True])
def test_states_that_share_bytes_once_do_not_end_the_graphs(strict: bool):
    device, stats = PretendedDevice(), Stats()
    table = GraphTable(device, stats, Options(strict=strict))
    device.failure = SharedBytesError("x and y share bytes")
    with pytest.raises(SharedBytesError):
        table.obtain("key", "of a step", 0, lambda: None)
    device.failure = None
    assert table.obtain("key", "of a step", 1, lambda: None) is device.captured[0]
    assert stats.fallbacks == []


def test_generators_are_registered(device: PretendedDevice):
    step = mtpgraph.compile(
        lambda x, random: x + 1,
        sizes=[2],
        engine="eager",
        inputs={"x": Batched(), "random": Static},
    )
    generator = torch.Generator()
    step(torch.zeros(2), {"generator": generator})
    assert device.generators == [generator]


def test_debug_refuses_caches_that_moved(device: PretendedDevice):
    compiled, stream, pools = compile_hybrid(debug=True), Stream(2), make_pools(2)
    compiled(*stream.batch([2, 2]), pools)
    with pytest.raises(RuntimeError, match="inputs in use by address moved since"):
        compiled(*stream.batch([2, 2]), copy_pools(pools))


def test_caches_that_move_in_every_call_end_the_graphs(device: PretendedDevice):
    def fn(x: Tensor, cache: Tensor) -> Tensor:
        return x + cache

    inputs = {"x": Batched(), "cache": Static}
    compiled = mtpgraph.compile(fn, sizes=[2], engine="eager", inputs=inputs)
    x = torch.ones(2)
    caches = [torch.full((1,), float(i)) for i in range(12)]
    with pytest.warns(RuntimeWarning, match="its caches moved in 9 calls on end") as said:
        results = [compiled(x, cache)[0].item() for cache in caches]
    assert results == [1.0 + i for i in range(12)]
    assert len(said) == 1
    assert compiled.stats().recaptures == 9


def test_failed_capture_falls_back_with_one_warning(device: PretendedDevice):
    device.failure = RuntimeError("operation not permitted when stream is capturing")
    compiled, stream, pools = compile_hybrid(), Stream(2), make_pools(2)
    expected_pools = copy_pools(pools)
    batches = [stream.batch([2, 2]) for _ in range(3)]
    expected = [hybrid_step(*batch, expected_pools) for batch in batches]
    with pytest.warns(RuntimeWarning, match=r"no CUDA graph for .*operation not permitted") as said:
        actual = [compiled(*batch, pools) for batch in batches]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert len(said) == 1
    stats = compiled.stats()
    assert (stats.captures, stats.replays, stats.eager_calls) == (0, 0, 3)
    assert len(stats.fallbacks) == 1


def test_failed_capture_raises_under_strict(device: PretendedDevice):
    device.failure = RuntimeError("operation not permitted when stream is capturing")
    compiled, pools = compile_hybrid(strict=True), make_pools(2)
    before = copy_pools(pools)
    with pytest.raises(RuntimeError, match=r"no CUDA graph for .*operation not permitted"):
        compiled(*Stream(2).batch([2, 2]), pools)
    for name, pool in pools.items():
        assert_same_bits(pool, before[name])


def test_inside_the_callers_capture_the_code_runs_plain(device: PretendedDevice):
    device.capturing = True
    compiled, pools = compile_hybrid(), make_pools(2)
    compiled(*Stream(2).batch([2, 2]), pools)
    assert compiled.stats().captures == 0
    assert compiled.stats().eager_calls == 1


def test_cudagraph_off_captures_nothing(device: PretendedDevice):
    compiled, pools = compile_hybrid(cudagraph="off"), make_pools(2)
    compiled(*Stream(2).batch([2, 2]), pools)
    assert compiled.stats().captures == 0


def test_batch_above_the_largest_size_is_not_captured(device: PretendedDevice):
    compiled, pools = compile_hybrid(sizes=[1, 2]), make_pools(4)
    compiled(*Stream(4).batch([2, 2, 2, 2]), pools)
    assert compiled.stats().captures == 0
    assert compiled.stats().eager_calls == 1


def test_device_of_a_cpu_is_none():
    assert capture.device_of([torch.ones(1), 3]) is None


def test_graphs_share_a_pool_as_long_as_one_of_them_is_left(monkeypatch: pytest.MonkeyPatch):
    """The allocator takes no graph into a pool whose last graph is gone and whose memory is not."""
    handles, used = iter(range(100)), []

    @contextlib.contextmanager
    def record(graph: Any, pool: int, stream: Any) -> Iterator[None]:
        used.append(pool)
        yield

    def fail() -> None:
        raise RuntimeError("cannot be recorded")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 1))
    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    device = CudaDevice(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        device.capture(fail, ())
    graphs = [device.capture(list, ()) for _ in range(2)]
    del graphs[0]
    graphs.append(device.capture(list, ()))
    failed, first, *others = used
    assert failed != first
    assert others == [first, first]
    graphs.clear()
    device.capture(list, ())
    assert used[-1] != first


def test_frozen_gc_restores_what_it_found():
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    with frozen_gc():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.disable()
    try:
        with pytest.raises(KeyError), frozen_gc():
            raise KeyError
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_frozen_gc_leaves_what_a_service_froze():
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with frozen_gc():
            pass
        assert gc.get_freeze_count() == before > 0
    finally:
        gc.unfreeze()


class TestGraphedCallable:
    """The drop-in backend, where nobody says which inputs are caches."""

    def make(
        self, device: PretendedDevice, in_place: list[bool], **options: Any
    ) -> tuple[GraphedCallable, Stats]:
        def run(x: Tensor, state: Tensor, size: int) -> list[Tensor]:
            state.add_(x.sum())
            return [x * size + state]

        stats = Stats()
        return GraphedCallable(run, device, in_place, stats, Options(**options)), stats

    def test_first_call_runs_second_records(self):
        device = PretendedDevice()
        call, stats = self.make(device, [False, True, False])
        state = torch.zeros(1)
        for count in range(1, 5):
            (out,) = call(torch.ones(2), state, 2)
            assert out.tolist() == [2 + 2 * count] * 2
        assert (stats.eager_calls, stats.captures, stats.replays) == (1, 1, 3)

    def test_each_combination_of_shapes_has_a_graph(self):
        device = PretendedDevice()
        call, stats = self.make(device, [False, True, False])
        state = torch.zeros(1)
        for _ in range(3):
            for count, size in ((2, 2), (3, 2), (2, 5)):
                call(torch.ones(count), state, size)
        assert (stats.eager_calls, stats.captures, stats.replays) == (3, 3, 6)

    def test_a_number_in_a_tensor_of_the_cpu_has_graphs_of_its_own(self):
        """A Python float comes like this, and the code reads it while it is recorded."""

        def run(x: Tensor, scale: Tensor) -> list[Tensor]:
            return [x * float(scale)]

        stats = Stats()
        call = GraphedCallable(run, PretendedDevice(), [False, False], stats, Options())
        for _ in range(3):
            for scale in (0.5, 2.0, -0.0, 0.0):
                (out,) = call(torch.ones(2), torch.tensor(scale, dtype=torch.float64))
                assert_same_bits(out, torch.ones(2) * scale)
        assert (stats.eager_calls, stats.captures, stats.replays) == (4, 4, 8)

    def test_what_is_written_stays_where_it_lies(self):
        device = PretendedDevice()
        call, stats = self.make(device, [False, True, False])
        first, second = torch.zeros(1), torch.full((1,), 100.0)
        for state in (first, first, first, second, second):
            call(torch.ones(2), state, 1)
        assert (first.item(), second.item()) == (6, 104)
        assert stats.recaptures == 1

    def test_large_inputs_are_used_by_address(self):
        device = PretendedDevice()
        stats = Stats()
        seen = []

        def run(small: Tensor, large: Tensor) -> list[Tensor]:
            seen.append((small.data_ptr(), large.data_ptr()))
            return [small + large[0]]

        call = GraphedCallable(run, device, [False, False], stats, Options())
        small, large = torch.ones(1), torch.zeros(1 << 19)
        for _ in range(3):
            call(small, large)
        assert seen[0] == (small.data_ptr(), large.data_ptr())
        assert seen[-1][0] != small.data_ptr()
        assert seen[-1][1] == large.data_ptr()

    def test_an_expanded_input_is_used_by_address(self):
        """Several elements share one place in memory: there is nothing to copy to."""
        call, _ = self.make(PretendedDevice(), [False, True, False])
        state, x = torch.zeros(1), torch.ones(1).expand(2)
        for count in range(1, 4):
            (out,) = call(x, state, 2)
            assert out.tolist() == [2 + 2 * count] * 2

    def test_inputs_keep_their_strides(self):
        seen = []

        def run(x: Tensor) -> list[Tensor]:
            seen.append(x.stride())
            return [x * 2]

        stats = Stats()
        call = GraphedCallable(run, PretendedDevice(), [False], stats, Options())
        x = torch.ones(3, 8)[:, :4]
        for _ in range(3):
            call(x)
        assert set(seen) == {(8, 1)}

    def test_combinations_without_end_run_plain(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(graphed_callable, "_SHAPE_LIMIT", 4)
        call, stats = self.make(PretendedDevice(), [False, True, False])
        state = torch.zeros(1)
        sizes = [*range(20), *range(20)]
        with pytest.warns(RuntimeWarning, match="no more CUDA graphs: inputs came in over") as said:
            _ = [call(torch.ones(2), state, size) for size in sizes]
        assert len(said) == 1
        assert stats.captures == 4
        assert stats.eager_calls + stats.replays == 40

    def test_inside_the_callers_capture_the_code_runs_plain(self):
        device = PretendedDevice()
        call, stats = self.make(device, [False, True, False])
        device.capturing = True
        for _ in range(3):
            call(torch.ones(2), torch.zeros(1), 1)
        assert (stats.captures, stats.eager_calls) == (0, 3)
