"""A step without ``inputs``: what grows is inferred, and padded only where that is proven safe."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mtpgraph
from mtpgraph import Batched, Static, ops
from mtpgraph.compile_passes.survey import Survey, Surveyor
from tests.helpers import assert_same_bits

from .support import INPUTS, NEXT_N, Stream, copy_pools, hybrid_step, make_pools


def compile_step(fn: Any = hybrid_step, **options: Any) -> mtpgraph.CompiledStep:
    options = {"sizes": [1, 2, 4, 8], "next_n": NEXT_N, "engine": "eager", **options}
    return mtpgraph.compile(fn, **options)


def assert_serves(step: mtpgraph.CompiledStep, sizes: list[int]) -> None:
    stream, pools = Stream(8), make_pools(8)
    expected_pools = copy_pools(pools)
    for num_reqs in sizes:
        args: Any = stream.batch([1 + (num_reqs + place) % NEXT_N for place in range(num_reqs)])
        expected = hybrid_step(*args, expected_pools)
        for actual, want in zip(step(*args, pools), expected, strict=True):
            torch.testing.assert_close(actual, want)
        for name, pool in pools.items():
            assert_same_bits(pool, expected_pools[name])


def test_inputs_are_inferred_and_padded() -> None:
    step = compile_step()
    assert dict(step.inputs) == {}
    assert_serves(step, [3, 2, 8, 5, 1, 7])
    stats = step.stats()
    assert (stats.graphs, stats.recompiles, stats.findings) == (1, 0, [])
    assert stats.calls == {4: 1, 2: 1, 8: 3, 1: 1}
    assert step.inputs.keys() == INPUTS.keys()
    for name, declared in INPUTS.items():
        found = step.inputs[name]
        if isinstance(declared, Batched):
            assert isinstance(found, Batched)
            assert (found.dim, found.per, found.extra) == (
                declared.dim, declared.per, declared.extra
            )  # fmt: skip
        else:
            assert found == Static()


def test_what_is_declared_stands() -> None:
    step = compile_step(inputs={"x": Batched(pad=-7.5, per="token")})
    assert_serves(step, [3, 5])
    assert step.inputs["x"] == Batched(pad=-7.5, per="token")


def test_warm_up_infers_too() -> None:
    step, pools = compile_step(), make_pools(8)
    before = copy_pools(pools)
    step.warm_up(*Stream(2).batch([2, 2]), pools)
    assert step.stats().graphs == 1
    for name, pool in pools.items():
        assert_same_bits(pool, before[name])


def test_a_batch_of_one_that_cannot_tell_runs_and_a_later_one_tells() -> None:
    def fn(x: Tensor, bias: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return x + bias + row_lens[:, None]

    def args(num_reqs: int) -> tuple[Tensor, ...]:
        starts = torch.arange(num_reqs + 1, dtype=torch.int32)
        return torch.randn(num_reqs, 3), torch.randn(1, 3), starts, starts[1:] + 4

    step = compile_step(fn, next_n=1)
    with pytest.raises(ValueError, match=r"warm_up needs a batch of at least two .* x \[1, 3\]"):
        step.warm_up(*args(1))
    for num_reqs in (1, 1, 3, 1, 4):
        batch = args(num_reqs)
        torch.testing.assert_close(step(*batch), fn(*batch))
    assert step.stats().calls == {None: 2, 4: 2, 1: 1}
    assert step.inputs["bias"] == Static()


def add_mean(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return x - x.mean(0) + row_lens[:, None]


def mean_inputs(num_reqs: int) -> tuple[Tensor, Tensor, Tensor]:
    starts = torch.arange(num_reqs + 1, dtype=torch.int32)
    return torch.randn(num_reqs, 3), starts, starts[1:] + 4


def test_a_step_that_mixes_rows_runs_at_its_own_sizes() -> None:
    step = compile_step(add_mean, next_n=1)
    with pytest.warns(RuntimeWarning, match=r"batches are not padded: .*`return x - x.mean\(0\)"):
        step(*mean_inputs(3))
    for num_reqs in (3, 5, 1, 4, 6):
        args = mean_inputs(num_reqs)
        torch.testing.assert_close(step(*args), add_mean(*args))
    stats = step.stats()
    assert stats.calls == {None: 6}
    assert [finding.kind for finding in stats.findings] == ["rows mixed"]
    with pytest.raises(ValueError, match="buffers need a step that is padded"):
        step.buffers(*mean_inputs(3))
    step.warm_up(*mean_inputs(3))


def test_a_step_that_mixes_rows_is_padded_where_every_input_was_declared() -> None:
    inputs = {
        "x": Batched(per="token"),
        "query_start_loc": Batched(pad="last", extra=1),
        "seq_lens": Batched(),
    }
    step = compile_step(add_mean, next_n=1, inputs=inputs)
    with pytest.warns(RuntimeWarning, match="padding may reach real rows: "):
        step(*mean_inputs(3))
    assert step.stats().calls == {4: 1}


def test_strict_refuses_a_step_that_mixes_rows() -> None:
    with pytest.raises(ValueError, match=r"batches are not padded: .*x\.mean\(0\)"):
        compile_step(add_mean, next_n=1, strict=True)(*mean_inputs(3))


def test_next_n_must_be_what_the_step_says() -> None:
    def fn(x: Tensor, seq_lens: Tensor, query_start_loc: Tensor) -> Tensor:
        old = ops.has_initial_state(query_start_loc, seq_lens)
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        y = (x.view(seq_lens.shape[0], 2, 3) * old[:, None, None]).flatten(0, 1)
        return y + row_lens[:, None]

    starts = torch.arange(0, 7, 2, dtype=torch.int32)
    args = torch.randn(6, 3), starts[1:] + 3, starts
    torch.testing.assert_close(compile_step(fn)(*args), fn(*args))
    with pytest.raises(ValueError, match="next_n must be 2, the tokens of each request"):
        compile_step(fn, next_n=3)(*args)


@pytest.mark.filterwarnings("ignore:batches are not padded:RuntimeWarning")
def test_a_step_without_ops_that_say_what_grows_runs_as_it_is() -> None:
    step = compile_step(lambda x, y: (x @ y).relu())
    for count in (3, 4, 3, 5, 1, 2):
        x, y = torch.randn(count, 2), torch.randn(2, 2)
        torch.testing.assert_close(step(x, y), (x @ y).relu())
    assert step.stats().calls == {None: 6}
    assert step.stats().findings[0].kind == "padding unknown"


def test_an_argument_that_comes_later_is_inferred_then() -> None:
    def fn(x: Tensor, seq_lens: Tensor, starts: Tensor, bias: Tensor | None = None) -> Tensor:
        row_lens, _ = ops.flatten_decode(starts, seq_lens, x.shape[0])
        y = x + row_lens
        return y if bias is None else y + bias

    step = compile_step(fn, next_n=1)
    starts = torch.arange(4, dtype=torch.int32)
    x, bias = torch.randn(3), torch.randn(3)
    args = x, starts[1:] + 2, starts
    torch.testing.assert_close(step(*args), fn(*args))
    torch.testing.assert_close(step(*args, bias), fn(*args, bias))
    torch.testing.assert_close(step(*args), fn(*args))
    assert step.inputs["bias"] == Batched(per="token")
    assert step.stats().calls == {4: 3}


def test_a_step_that_is_no_single_graph_fails_as_under_fullgraph() -> None:
    def fn(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_step(fn)(torch.ones(3))


def test_other_constants_are_another_graph_and_looked_at_by_itself() -> None:
    def fn(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, mix: bool = False) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        y = x + row_lens[:, None]
        return y - x.mean(0) if mix else y

    step = compile_step(fn, next_n=1)
    for num_reqs in (3, 5):
        args = mean_inputs(num_reqs)
        torch.testing.assert_close(step(*args), fn(*args))
    with pytest.warns(RuntimeWarning, match=r"batches are not padded: .*x.mean"):
        step(*mean_inputs(3), True)
    for num_reqs in (3, 5):
        args = mean_inputs(num_reqs)
        torch.testing.assert_close(step(*args, mix=True), fn(*args, mix=True))
        torch.testing.assert_close(step(*args), fn(*args))
    assert step.stats().calls == {None: 3, 4: 2, 8: 2}


def test_outputs_per_token_where_the_step_fixes_the_tokens_of_a_request() -> None:
    def fn(seq_lens: Tensor, query_start_loc: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        grouped = x.view(seq_lens.shape[0], 2, 3)
        return x + row_lens[:, None], grouped * 2, grouped.sum(1), seq_lens * 2

    step = compile_step(fn)
    for num_reqs in (3, 2, 7, 1, 5):
        starts = torch.arange(0, 2 * num_reqs + 1, 2, dtype=torch.int32)
        args = starts[1:] + 3, starts, torch.randn(2 * num_reqs, 3)
        for actual, expected in zip(step(*args), fn(*args), strict=True):
            torch.testing.assert_close(actual, expected)
    assert step.stats().calls == {4: 1, 2: 1, 8: 2, 1: 1}


def test_a_call_looks_into_each_argument_once(monkeypatch: pytest.MonkeyPatch):
    step = mtpgraph.compile(hybrid_step, sizes=[4], next_n=2, engine="eager")
    stream, pools = Stream(3), make_pools(3)
    step(*stream.batch([2, 1, 2]), pools)
    looked: list[str] = []
    look = Surveyor.look

    def watched(self: Surveyor, name: str, value: Any) -> Survey:
        looked.append(name)
        return look(self, name, value)

    monkeypatch.setattr(Surveyor, "look", watched)
    step(*stream.batch([1, 2]), pools)
    assert looked == ["pools"]


@pytest.mark.filterwarnings("ignore:batches are not padded:RuntimeWarning")
@pytest.mark.parametrize("first", [[1, 1], [2], [1, 1, 1, 1]], ids=str)
def test_as_many_tokens_as_requests_in_the_first_batch_alone(first: list[int]):
    """A later batch shows that the two are not the same."""

    def fn(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return (x + row_lens[:, None]).view(seq_lens.shape[0], -1, 3).cumsum(1)

    step = compile_step(fn, next_n=2)
    for query_lens in (first, [2, 2], [1, 1], [2, 2, 2], [3, 3], first):
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        args = torch.randn(sum(query_lens), 3), starts, starts[1:] + 4
        torch.testing.assert_close(step(*args), fn(*args))
    assert step.inputs["x"] == Batched(per="token")
