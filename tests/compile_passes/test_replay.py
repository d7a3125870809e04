"""The shortest way through a step is taken for calls that it fits, and for no other."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mtpgraph
from mtpgraph import Batched, Static
from mtpgraph.compile_passes.replay import Replay
from tests.compile_passes.support import NEXT_N, Stream, copy_pools, hybrid_step, make_pools
from tests.compile_passes.test_capture import PretendedDevice, compile_hybrid, device
from tests.helpers import assert_same_bits

__all__ = ["device"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """Every replay that served a call."""
    served: list[Replay] = []
    run = Replay.run

    def watched(self: Replay, args: Any) -> Any:
        served.append(self)
        return run(self, args)

    monkeypatch.setattr(Replay, "run", watched)
    return served


def add(x: Tensor, cache: list[Tensor], flag: int | None = None) -> tuple[Tensor, Tensor]:
    return x + cache[0] + (flag or 0), x * 2


def compile_add(**options: Any) -> mtpgraph.CompiledStep:
    inputs = {"x": Batched(), "cache": Static}
    return mtpgraph.compile(add, inputs=inputs, sizes=[4, 8], engine="eager", **options)


def test_from_the_third_call_of_a_size_on(device: PretendedDevice, taken: list[Replay]) -> None:
    step, cache = compile_add(), [torch.zeros(1)]
    for call in range(1, 6):
        x = torch.randn(3)
        cache[0].fill_(call)
        total, double = step(x, cache)
        assert_same_bits(total, x + call)
        assert_same_bits(double, x * 2)
        assert len(taken) == max(0, call - 2)
    stats = step.stats()
    assert (stats.replays, stats.captures, stats.graphs) == (5, 1, 1)
    assert (stats.calls, stats.tokens, stats.padded_tokens) == ({4: 5}, 15, 5)


def test_batches_of_changing_sizes(device: PretendedDevice, taken: list[Replay]) -> None:
    compiled, stream, pools = compile_hybrid(), Stream(8), make_pools(8)
    expected_pools = copy_pools(pools)
    for query_lens in [[2, 1, 2], [1, 1], [2, 1, 2], [2] * 8, [1, 1], [1, 2, 2], [2] * 8] * 3:
        args: Any = stream.batch(query_lens)
        expected = hybrid_step(*args, expected_pools)
        for out, want in zip(compiled(*args, pools), expected, strict=True):
            assert_same_bits(out, want)
        for name, pool in pools.items():
            assert_same_bits(pool, expected_pools[name])
    assert len(taken) > 12
    assert compiled.stats().tokens == 3 * (5 + 2 + 5 + 16 + 2 + 5 + 16)
    assert NEXT_N == 2


@pytest.mark.parametrize(
    "change",
    ["dtype", "constant", "cache", "address", "autocast", "inference mode", "width"],
)
def test_a_call_that_differs_goes_the_long_way(
    device: PretendedDevice, taken: list[Replay], change: str
) -> None:
    step = compile_add()
    x, cache, flag = torch.arange(6.0).view(3, 2), [torch.ones(1)], 5
    for _ in range(4):
        step(x, cache, flag)
    before, past = len(taken), float(cache[0])
    assert before == 2
    if change == "dtype":
        x = x.double()
    elif change == "constant":
        flag = 7
    elif change == "cache":
        cache[0] = torch.zeros(1)
        past = 0
    elif change == "address":
        cache[0].set_(torch.full((1,), 40.0).untyped_storage())
        past = 40
    elif change == "width":
        x = torch.arange(9.0).view(3, 3)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"),
        torch.inference_mode(change == "inference mode"),
    ):
        total, _ = step(x, cache, flag)
        assert len(taken) == before
        assert_same_bits(total, x + past + flag)


def test_constants_in_turn_have_replays_of_their_own(
    device: PretendedDevice, taken: list[Replay]
) -> None:
    step, cache, x = compile_add(), [torch.zeros(1)], torch.zeros(4)
    for call in range(12):
        total, _ = step(x, cache, call % 2 or None)
        assert float(total[0]) == call % 2
    assert len(taken) == 8


def test_arguments_by_name_and_by_default(device: PretendedDevice, taken: list[Replay]) -> None:
    step, cache, x = compile_add(), [torch.zeros(1)], torch.zeros(4)
    for call in range(4):
        assert float(step(x + call, cache=cache, flag=2)[0][0]) == call + 2
    assert len(taken) == 2
    for call in range(4):
        assert float(step(x + call, cache)[0][0]) == call
    assert len(taken) == 4
    assert float(step(flag=1, x=x, cache=cache)[0][0]) == 1
    with pytest.raises(TypeError, match="flags"):
        step(x, cache, flags=2)


def test_a_wrong_argument_is_refused_as_in_the_first_call(device: PretendedDevice) -> None:
    step, cache, x = compile_add(), [torch.zeros(1)], torch.zeros(4)
    for _ in range(3):
        step(x, cache)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        step([1.0], cache)


def test_inside_the_callers_own_capture_the_code_itself_runs(
    device: PretendedDevice, taken: list[Replay]
) -> None:
    step, cache, x = compile_add(), [torch.zeros(1)], torch.zeros(4)
    for _ in range(3):
        step(x, cache)
    device.capturing = True
    cache[0].fill_(4)
    assert float(step(x, cache)[0][0]) == 4
    assert len(taken) == 1


def test_clones_are_the_callers_own(device: PretendedDevice) -> None:
    step, cache, x = compile_add(clone_outputs=True), [torch.zeros(1)], torch.zeros(4)
    outputs = [step(x + call, cache)[0] for call in range(1, 6)]
    assert [float(output[0]) for output in outputs] == [1, 2, 3, 4, 5]


def test_inputs_can_be_written_where_they_are_read(
    device: PretendedDevice, taken: list[Replay]
) -> None:
    step, cache, x = compile_add(), [torch.zeros(1)], torch.arange(3.0)
    for _ in range(3):
        step(x, cache)
    place = step.buffers(x, cache)
    assert place.keys() == {"x"}
    assert place["x"].shape == x.shape
    place["x"].copy_(x + 5)
    total, _ = step(place["x"], cache)
    assert_same_bits(total, x + 5)
    assert len(taken) == 2
    assert step.buffers(torch.zeros(4), cache)["x"].data_ptr() == place["x"].data_ptr()
    with pytest.raises(ValueError, match="at most 8 requests, got 9"):
        step.buffers(torch.zeros(9), cache)


def test_outputs_are_objects_of_the_callers_own(device: PretendedDevice) -> None:
    """What the caller does to the object of one call does not show in the next."""
    step, cache = compile_add(), [torch.zeros(1)]
    for count in (3, 4):
        for _ in range(5):
            total, double = step(torch.ones(count), cache)
            assert total.shape == double.shape == (count,)
            total.unsqueeze_(0)
            double.resize_(0)


def test_a_place_that_was_given_out_is_padding_again_for_a_smaller_batch(
    device: PretendedDevice,
) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.sum().expand(1)

    step = mtpgraph.compile(fn, sizes=[4], engine="eager", inputs={"x": Batched(pad=0)})
    with pytest.warns(RuntimeWarning, match="padding may reach real rows"):
        place = step.buffers(torch.ones(4))["x"]
    for _ in range(4):
        place.fill_(7)
        _, total = step(torch.ones(2))
        assert total.tolist() == [2]
