"""What ``explain`` finds in small steps, on which line, and what it leaves alone."""

import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtpgraph
from mtpgraph import Batched, Static, ops
from mtpgraph.compile_passes import PASSES
from mtpgraph.explanation.record import Explanation
from mtpgraph.explanation.trace import examine, explain
from mtpgraph.explanation.words import place

from .modules import BROKEN, LAYERS, PLAIN, load_module


def line_of(path: Path, code: str) -> int:
    """The number of the only line that reads so."""
    (number,) = [i for i, line in enumerate(path.read_text().splitlines(), 1) if code in line]
    return number


def ops_at(explanation: Explanation, path: Path, code: str) -> list[Any]:
    place = (str(path), line_of(path, code))
    return [op for op in explanation.ops if op.frames[-1] == place]


def test_explain_plain_step(tmp_path: Path) -> None:
    """One graph, each op on its line with what it returns, writes and moves."""
    module, path = load_module(tmp_path, PLAIN)
    x, weight, cache = torch.randn(4, 8), torch.randn(8, 16), torch.randn(4, 16)
    found = explain(module.step, x, weight, cache)
    assert found.ok
    assert found.verdict == "One graph, no host sync, no mutation hazard."
    assert len(found.graphs) == 1
    (matmul,) = ops_at(found, path, "hidden = x @ weight")
    assert (matmul.outputs, matmul.mutates) == ("float32[4, 16]", ())
    assert (matmul.read, matmul.written) == (4 * (4 * 8 + 8 * 16), 4 * 4 * 16)
    (add,) = ops_at(found, path, "cache.add_(hidden)")
    assert add.mutates == ("cache",)
    assert (add.read, add.written, add.at_most) == (2 * 4 * 64, 4 * 64, False)
    (view,) = [op for op in ops_at(found, path, "return hidden.relu()") if op.name == "getitem"]
    assert view.bytes == 0
    assert found.bytes == sum(op.bytes for op in found.ops)


def test_explain_runs_nothing_of_an_unbroken_step(tmp_path: Path) -> None:
    module, _ = load_module(tmp_path, PLAIN)
    args = torch.randn(4, 8), torch.randn(8, 16), torch.randn(4, 16)
    before = [(arg.clone(), arg._version) for arg in args]
    state = torch.get_rng_state()
    code = module.step.__code__
    explain(module.step, *args)
    for arg, (value, version) in zip(args, before, strict=True):
        assert torch.equal(arg, value)
        assert arg._version == version
    assert torch.equal(torch.get_rng_state(), state)
    # nothing stays with the function either
    assert module.step.__code__ is code
    assert torch._dynamo.eval_frame._debug_get_cache_entry_list(code) == []


def test_explain_breaks_have_line_reason_and_remedy(tmp_path: Path) -> None:
    module, path = load_module(tmp_path, BROKEN)
    found = explain(module.step, torch.ones(4), torch.zeros(4))
    assert not found.ok
    assert [(b.file, b.line) for b in found.breaks] == [
        (str(path), line_of(path, 'print("<loud> & clear")')),
        (str(path), line_of(path, "if x.sum() > 0:")),
    ]
    shout, branch = found.breaks
    assert shout.code == 'print("<loud> & clear")'
    assert "print" in shout.reason
    assert "outside" in shout.remedy
    assert not shout.host_sync
    assert branch.host_sync
    assert "torch.where" in branch.remedy
    assert found.verdict == "2 graph breaks."
    assert len(found.graphs) > 1


def test_explain_leaves_a_broken_step_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step runs to get past its breaks: on copies of its arguments and of its module's data."""
    module, _ = load_module(tmp_path, BROKEN)
    x, cache = torch.ones(4), torch.zeros(4)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    explain(module.step, x, cache)
    assert torch.equal(x, torch.ones(4))
    assert (cache._version, module.TOTAL._version, module.LOG) == (0, 0, [])
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    # what the step prints is not mixed into the answer
    assert capsys.readouterr().out == ""


def test_explain_leaves_objects_and_closures_as_they_were() -> None:
    class Counter:
        def __init__(self) -> None:
            self.total = torch.zeros(3)
            self.calls = 0

        def step(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.total.add_(x)
            torch._dynamo.graph_break()
            self.total.add_(x)
            return self.total * 2

    counter = Counter()
    assert len(explain(counter.step, torch.ones(3)).breaks) == 1
    assert (counter.calls, counter.total._version) == (0, 0)
    inside = torch.zeros(3)

    def step(x: Tensor) -> Tensor:
        inside.add_(x)
        torch._dynamo.graph_break()
        inside.add_(x)
        return inside * 2

    assert len(explain(step, torch.ones(3)).breaks) == 1
    assert inside._version == 0


def test_explain_copies_what_is_shared_once() -> None:
    """An argument that is also an attribute: their copies are one as well."""

    class Holder(nn.Module):
        def __init__(self, pool: Tensor) -> None:
            super().__init__()
            self.pool = pool

        def forward(self, pool: Tensor) -> Tensor:
            self.pool.fill_(3)
            torch._dynamo.graph_break()
            size = int(pool[0].item())
            torch._dynamo.graph_break()
            return torch.ones(size)

    pool = torch.ones(2)
    found = explain(Holder(pool), pool)
    assert torch.equal(pool, torch.ones(2))
    assert [op.outputs for op in found.ops if op.name == "torch.ones"] == ["float32[3]"]


def test_explain_tells_the_first_break_where_nothing_can_be_copied() -> None:
    class Sole:
        def __deepcopy__(self, memo: dict[int, Any]) -> "Sole":
            raise TypeError("there is only one")

    sole = Sole()

    def step(x: Tensor, of: Sole) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    found = explain(step, torch.ones(2), sole)
    assert [b.code for b in found.breaks] == ["torch._dynamo.graph_break()"]
    assert "there is only one" in found.notes[0]


def test_explain_names_what_recompiles(tmp_path: Path) -> None:
    module, path = load_module(
        tmp_path,
        """
        import torch
        FACTOR = 7

        def step(x, one, flag, options):
            if x.shape[0] == 6:
                x = x + FACTOR
            if flag:
                x = x * options["factor"]
            return x + one
        """,
    )
    args = torch.ones(6, 4), torch.ones(1, 4), True, {"factor": 5}
    found = {r.name: r for r in explain(module.step, *args).recompiles}
    fixed = found["x.shape[0]"]
    assert (fixed.kind, fixed.value) == ("size", "6")
    assert fixed.where == f"{path}:{line_of(path, 'x.shape[0] == 6')}"
    assert (found["one.shape[0]"].kind, found["one.shape[0]"].value) == ("size", "1")
    assert (found["flag"].kind, found["flag"].value) == ("value", "True")
    assert (found["FACTOR"].kind, found["FACTOR"].value) == ("constant", "7")
    assert found["options['factor']"].kind == "value"
    assert "x.shape[1]" not in found or found["x.shape[1]"].where


def test_explain_marks_free_sizes() -> None:
    """A weight of a module fixes the size that meets it; the batch stays free."""
    layer = nn.Linear(8, 3)
    (x,) = [i for i in explain(lambda x: layer(x), torch.ones(5, 8)).inputs if i.name == "x"]
    assert (x.sizes, x.free) == ((5, 8), (True, False))


def test_explain_module_without_our_ops(tmp_path: Path) -> None:
    """Layers of a module are weights, not arguments, and their attributes constants."""
    module, _ = load_module(tmp_path, LAYERS)
    net, args = module.make()
    found = explain(net, *args)
    assert found.ok
    assert {i.name for i in found.inputs if not i.parameter} == {"x"}
    assert sum(i.parameter for i in found.inputs) == 5
    scale = next(r for r in found.recompiles if r.name.endswith(".scale"))
    assert (scale.name, scale.kind, scale.value) == ("self.layers.*.scale", "constant", "3")
    assert not any(op.ours for op in found.ops)


def reset_and_update(
    x: Tensor, state: Tensor, indices: Tensor, starts: Tensor, lens: Tensor
) -> Tensor:
    ops.reset_states_(state, indices, ops.has_initial_state(starts, lens))
    taps = torch.ones(4, 3)
    return ops.causal_conv1d_update_(state, x, taps, None, indices, starts)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def reset_inputs() -> list[Tensor]:
    state = torch.zeros(6, 4, 2)
    return [torch.randn(3, 4), state, int32(2, 0), int32(0, 2, 3), int32(9, 1)]


def test_explain_counts_rewrites_and_marks_our_ops() -> None:
    found = explain(reset_and_update, *reset_inputs())
    reports = {report.name: report for report in found.passes}
    assert list(reports) == [graph_pass.__name__ for graph_pass in PASSES]
    assert reports["fuse_state_reset"].count == 1
    assert reports["fuse_state_reset"].rewrite.startswith("reset_states_(")
    ours = [op for op in found.ops if op.ours]
    assert [op.name for op in ours] == [
        "mtpgraph.has_initial_state",
        "mtpgraph.causal_conv1d_update_",
    ]
    assert ours[1].mutates == ("state",)
    assert ours[1].at_most


def test_explain_compiled_step_has_its_padding_and_options() -> None:
    step = mtpgraph.compile(
        reset_and_update,
        inputs={
            "x": Batched(per="token"),
            "state": Static,
            "indices": Batched(pad=-1),
            "starts": Batched(pad="last", extra=1),
            "lens": Batched(),
        },
        disable_passes=["fuse_state_reset"],
    )
    found = explain(step, *reset_inputs())
    assert step.stats().graphs == 0
    assert found.padding is not None
    rows = {row.name: row for row in found.padding}
    assert (rows["x"].dim, rows["x"].per, rows["x"].pad) == (0, "token", "0")
    assert (rows["indices"].per, rows["indices"].pad) == ("request", "-1")
    assert (rows["starts"].per, rows["starts"].pad) == ("request + 1", "last")
    assert rows["state"].dim is None
    (report,) = [report for report in found.passes if report.name == "fuse_state_reset"]
    assert (report.disabled, report.count) == (True, 0)


def test_explain_takes_what_torch_compile_made() -> None:
    compiled = torch.compile(reset_and_update, backend="eager")
    assert explain(compiled, *reset_inputs()).ok
    assert explain(torch.compile(nn.Linear(4, 4)), torch.ones(2, 4)).ok


def test_explain_refuses_what_fails(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="missing a required argument"):
        explain(reset_and_update)
    with pytest.raises(TypeError, match="fn must be callable, got 3"):
        explain(3)  # pyright: ignore[reportArgumentType]
    module, path = load_module(tmp_path, "def step(x):\n    return x @ x\n")
    with pytest.raises(ValueError, match="fails on these inputs") as failed:
        explain(module.step, torch.ones(2, 3))
    assert f"{path}:2" in str(failed.value)
    inputs = reset_inputs()
    inputs[2] = inputs[2].long()
    with pytest.raises(ValueError, match="state_indices must have dtype"):
        explain(reset_and_update, *inputs)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(RuntimeError, match="switched off"),
    ):
        explain(reset_and_update, *reset_inputs())


def test_explain_json_is_plain(tmp_path: Path) -> None:
    module, path = load_module(tmp_path, BROKEN)
    found = explain(module.step, torch.ones(4), torch.zeros(4))
    data = json.loads(json.dumps(found.asdict()))
    assert data["ok"] is False
    assert data["breaks"][0]["file"] == str(path)
    assert data["graphs"][0][0]["bytes"] == found.graphs[0][0].bytes
    assert data["bytes"] == found.bytes


def test_explain_made_up_values_are_not_read() -> None:
    """Zeros from the command line say nothing about the keys that a step reads."""
    topk = 2

    def step(logits: Tensor, row_lens: Tensor) -> Tensor:
        return ops.indexer_topk(logits, row_lens, topk)

    args = torch.randn(3, 100), int32(10, 20, 0)
    (known,) = explain(step, *args).ops
    assert (known.read, known.at_most) == (30 * 4 + 12, False)
    (unknown,) = examine(step, args, {}, made_up=True).ops
    assert (unknown.read, unknown.at_most) == (300 * 4 + 12, True)


def test_explain_infers_padding() -> None:
    found = explain(reset_and_update, *reset_inputs())
    assert found.padding is not None
    rows = {row.name: row for row in found.padding}
    assert (rows["indices"].per, rows["indices"].pad) == ("request", "-1")
    assert (rows["starts"].per, rows["starts"].pad) == ("request + 1", "last")
    assert (rows["x"].dim, rows["x"].per) == (0, "token")
    assert rows["state"].dim is None
    line = reset_and_update.__code__.co_firstlineno
    at = re.escape(place(__file__, line + 3))
    assert re.fullmatch(rf"mtpgraph\.\w+\(\w+\) at {at}", rows["lens"].why)
    assert "proven" in found.padding_verdict


def test_explain_reports_mixed_rows_without_failing() -> None:
    """A step that mixes rows is not padded, and may be what its author wants."""

    def step(x: Tensor, lens: Tensor, starts: Tensor) -> Tensor:
        has_state = ops.has_initial_state(starts, lens)
        return (x - x.mean(0)) * has_state.any()

    found = explain(step, torch.randn(3, 4), int32(9, 1), int32(0, 2, 3))
    assert "rows mixed" in {finding.kind for finding in found.findings}
    assert "exact size" in found.padding_verdict
    assert found.ok


def test_explain_step_without_a_batch_is_not_padded() -> None:
    found = explain(nn.Linear(4, 4), torch.ones(2, 4))
    assert found.padding is None
    assert found.padding_verdict.startswith("Not padded: ")
    assert found.findings == []


def test_explain_takes_any_callable() -> None:
    class Scale:
        def __init__(self, factor: Tensor) -> None:
            self.factor = factor

        def __call__(self, x: Tensor, shift: float = 0.0) -> Tensor:
            self.factor.mul_(1)
            return x * self.factor + shift

    factor = torch.ones(2)
    for fn in (Scale(factor), partial(Scale(factor), shift=0.5), Scale(factor).__call__):
        found = explain(fn, torch.ones(2))
        assert [op.name for op in found.ops] == [".mul_()", "mul", "add"]
        assert found.ops[0].mutates == ("self.factor",)
        assert factor._version == 0
