import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtpgraph
from mtpgraph import testing
from mtpgraph.compile_passes.infer_batch import infer_inputs
from mtpgraph.testing import graphs
from tests.compile_passes import support

from . import models

X = torch.arange(12, dtype=torch.float32).view(4, 3)


def message(check: Callable[..., object], *args: object, **kwargs: object) -> str:
    """What the check fails with."""
    with pytest.raises(AssertionError) as caught:
        check(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("fn", [models.Mlp(), models.doubled])
def test_no_graph_breaks_passes(fn: Callable[..., Tensor]) -> None:
    found = testing.assert_no_graph_breaks(fn, X)
    assert len(found.graphs) == 1
    assert found.graphs[0].file == models.THIS


BREAKS = {
    "gated": (models.Gated(), "[Dd]ata-dependent branch", r"torch\.where"),
    "item": (models.item, r"Tensor\.item\(\)", "0-d tensor"),
    "print": (models.prints, "`print`", "print outside"),
    "log": (models.logs, "Logger", r"torch\.compiler\.is_compiling"),
    "mask": (models.mask, "aten.nonzero", r"torch\.where\(mask, x, fill\)"),
    "clock": (models.clock, "perf_counter_ns", "outside of the compiled function"),
    "disabled": (
        models.disabled,
        r"torch\.compiler\.disable",
        r"take torch\.compiler\.disable off",
    ),
    "loop": (models.loop, "[Dd]ata-dependent branch", r"torch\.where"),
    "to_list": (models.to_list, "tolist", r"torch\.index_select"),
    "no_fake": (models.no_fake, "fake tensors", r"torch\.library\.register_fake"),
}


@pytest.mark.parametrize("marker", BREAKS)
def test_no_graph_breaks_says_line_reason_and_remedy(marker: str) -> None:
    fn, reason, remedy = BREAKS[marker]
    told = message(testing.assert_no_graph_breaks, fn, X)
    assert "1 graph break" in told
    assert f"1. {models.line_of(marker)}: `" in told
    assert re.search(f"reason: .*{reason}", told)
    assert re.search(f"instead: .*{remedy}", told)


def test_no_graph_breaks_names_the_innermost_line_of_the_users() -> None:
    def outer(x: Tensor) -> Tensor:
        return models.prints(x) + 1

    told = message(testing.assert_no_graph_breaks, outer, X)
    assert told.count(models.line_of("print")) == 1
    assert "1 graph break" in told


def test_no_graph_breaks_of_ours() -> None:
    stream = support.Stream(3)
    found = testing.assert_no_graph_breaks(
        support.hybrid_step, *stream.batch([1, 2, 1]), support.make_pools(3)
    )
    assert len(found.graphs) == 1


def test_no_graph_breaks_looks_into_what_was_compiled() -> None:
    told = message(testing.assert_no_graph_breaks, torch.compile(models.Gated()), X)
    assert models.line_of("gated") in told
    step = mtpgraph.compile(models.item, inputs={"x": mtpgraph.Batched()})
    assert models.line_of("item") in message(testing.assert_no_graph_breaks, step, X)


def test_no_graph_breaks_of_nothing_is_a_failure() -> None:
    told = message(testing.assert_no_graph_breaks, lambda x: 3, X)
    assert "Dynamo compiled nothing" in told
    assert f"1. {__file__}:" in told


def test_no_graph_breaks_while_compilation_is_off() -> None:
    with torch.compiler.set_stance("force_eager"):
        assert "was not compiled" in message(testing.assert_no_graph_breaks, models.doubled, X)


def test_checks_put_back_what_the_call_wrote() -> None:
    model, x = models.Counting(), X.clone()
    buffered = models.CountingBuffer()
    step, total = models.with_closure()
    steps = models.STEPS.clone()
    testing.assert_no_graph_breaks(model, x)
    testing.assert_no_graph_breaks(buffered, x)
    testing.assert_no_graph_breaks(step, x)
    testing.assert_no_graph_breaks(models.looked_up, torch.tensor([1]))
    testing.assert_no_graph_breaks(lambda y: y.zero_(), x)
    assert model.calls == 0
    assert not buffered.calls.any()
    assert not total.any()
    assert torch.equal(models.STEPS, steps)
    assert torch.equal(x, X)


def test_no_recompiles_passes() -> None:
    found = testing.assert_no_recompiles(models.Mlp(), X, (X + 1,), {"x": X * 2})
    assert len(found.graphs) == 1
    testing.assert_no_recompiles(models.CountingBuffer(), X, X, X)
    testing.assert_no_recompiles(models.doubled, X, X[:2], X[:3], dynamic=True)


RECOMPILES = {
    "counting": (models.Counting(), [X, X], r"\.calls == 0", "tensor buffer"),
    "scaled": (models.scaled, [(X, 0.5), (X, 1.5)], "factor == 0.5", "factor as a 0-d tensor"),
    "repeated": (models.repeated, [(X, 1), (X, 2)], "times == 1", "times as a 0-d tensor"),
    "added": (models.added, [(X,), (X, X)], "y is None", "a tensor of no entries"),
    "doubled": (models.doubled, [X, X[:2]], "'x' size mismatch at index 0", r"\(x, 0\)"),
}


@pytest.mark.parametrize("marker", RECOMPILES)
def test_no_recompiles_says_guard_line_and_remedy(marker: str) -> None:
    fn, calls, guard, remedy = RECOMPILES[marker]
    told = message(testing.assert_no_recompiles, fn, *calls)
    assert "1 recompile, 0 allowed" in told
    assert f"1. {models.line_of(marker)}: `" in told
    assert re.search(f"reason: .*{guard}", told)
    assert re.search(f"instead: .*{remedy}", told)


KINDS = {
    "dtype": ([X, X.double()], "one dtype in every call"),
    "layout": ([X, X.T.contiguous().T], r"\.contiguous\(\) outside"),
    "rank": ([X, X[None]], "number of dimensions"),
    "requires_grad": ([X, X.clone().requires_grad_()], r"torch\.no_grad\(\)"),
    "one row": ([X, X[:3], X[:1]], "a size of 1 is compiled apart"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_recompiles_tells_kinds_apart(kind: str) -> None:
    calls, remedy = KINDS[kind]
    dynamic = True if kind == "one row" else None
    told = message(testing.assert_no_recompiles, models.doubled, *calls, dynamic=dynamic)
    assert re.search(f"instead: .*{remedy}", told)
    assert models.line_of("doubled") in told


def test_no_recompiles_of_a_list_that_grows() -> None:
    told = message(testing.assert_no_recompiles, models.summed, ([X],), ([X, X + 1],))
    assert "len(xs) == 1" in told
    assert "containers of the same length" in told


def test_no_recompiles_up_to_a_budget() -> None:
    sizes = [X, X[:2], X[:3]]
    found = testing.assert_no_recompiles(models.doubled, *sizes, max_recompiles=1)
    assert len(found.recompiles) == 1
    assert [graph.recompile for graph in found.graphs] == [False, True]


def test_no_recompiles_needs_two_calls() -> None:
    with pytest.raises(ValueError, match="at least two calls"):
        testing.assert_no_recompiles(models.doubled, X)


def test_whole_graph_passes() -> None:
    testing.assert_whole_graph(models.Mlp(), X)
    stream = support.Stream(3)
    pools = support.make_pools(3)
    testing.assert_whole_graph(support.hybrid_step, *stream.batch([1, 2, 1]), pools)


def test_whole_graph_refuses_a_break() -> None:
    assert models.line_of("item") in message(testing.assert_whole_graph, models.item, X)


def test_whole_graph_refuses_a_host_sync() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.nonzero(x)[:1]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        told = message(testing.assert_whole_graph, step, X)
    assert "1 host sync" in told
    assert f"{__file__}:" in told
    assert "instead:" in told


@pytest.mark.gpu
def test_whole_graph_replays_on_a_card() -> None:
    model = models.Mlp().cuda()
    testing.assert_whole_graph(model, X.cuda())

    def step(x: Tensor) -> Tensor:
        return x + torch.ones(3).to(x.device)

    told = message(testing.assert_whole_graph, step, X.cuda())
    assert "instead:" in told


def test_record_sees_graphs_findings_and_rewrites_of_our_backend() -> None:
    stream = support.Stream(3)
    torch._dynamo.reset()
    step = torch.compile(support.hybrid_step, backend="mtpgraph", options={"engine": "eager"})
    with testing.record() as found:
        step(*stream.batch([1, 2, 1]), support.make_pools(3))
    assert len(found.graphs) == 1
    assert found.rewrites["fuse_state_reset"] == 2
    assert ("mtpgraph.flatten_decode") in [op for op, _, _ in found.graphs[0].ops]


def test_record_does_not_count_another_backend_as_a_recompile() -> None:
    torch._dynamo.reset()
    with testing.record() as found:
        torch.compile(models.doubled, backend="eager")(X)
        torch.compile(models.doubled, backend=lambda gm, _: gm.forward)(X)
    assert not found.recompiles
    assert len(found.first_graphs) == 2


def test_record_leaves_out_a_graph_that_was_only_looked_at() -> None:
    """Inference traces a step with a backend that compiles nothing."""
    batch, pools = support.Stream(3).batch([1, 2, 1]), support.make_pools(3)
    bound = inspect.signature(support.hybrid_step).bind(*batch, pools)
    torch._dynamo.reset()
    with testing.record() as found, torch.no_grad():
        infer_inputs(support.hybrid_step, bound, {})
    assert not found
    step = mtpgraph.compile(support.hybrid_step, inputs=support.INPUTS, sizes=[4], engine="eager")
    with testing.record() as found:
        step(*batch, pools)
        step(*batch, pools)
    assert len(found.graphs) == 1
    assert not found.recompiles


def test_record_keeps_checks_apart() -> None:
    torch._dynamo.reset()
    with testing.record() as found:
        testing.assert_no_graph_breaks(models.doubled, X)
    assert not found.graphs
    assert len(found.checks[0].graphs) == 1


def test_record_leaves_no_hook_behind() -> None:
    from torch._dynamo import convert_frame, output_graph, symbolic_convert

    def hooks() -> list[object]:
        return [
            output_graph.OutputGraph.call_user_compiler,
            symbolic_convert.InstructionTranslatorBase.log_graph_break,
            convert_frame.get_and_maybe_log_recompilation_reasons,
        ]

    before = hooks()
    with testing.record(), testing.record():
        assert hooks() != before
    assert hooks() == before


class Nested(nn.Module):
    """Tensors in an attribute, a list and a dict of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.caches = [{"k": torch.zeros(4, 3)} for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        for cache in self.caches:
            cache["k"].add_(x)
        self.last = x
        return x + self.caches[0]["k"]


def test_checks_reach_tensors_in_containers() -> None:
    model = Nested()
    testing.assert_no_graph_breaks(model, X)
    assert not any(cache["k"].any() for cache in model.caches)


def test_the_sync_debug_mode_is_set_without_the_warning_of_torch(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Under ``-W error``, as here, a warning would be a failure; others are not hidden."""
    modes: list[Any] = []

    def set_mode(mode: Any) -> None:
        modes.append(mode)
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all "
            "synchronizing operations",
            UserWarning,
            stacklevel=1,
        )
        if mode == "other":
            warnings.warn("something else", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs._set_sync_debug_mode("error")
        with pytest.raises(UserWarning, match="something else"):
            graphs._set_sync_debug_mode("other")
    assert modes == ["error", "other"]
    assert not recwarn.list
