"""``mtpgraph explain``: targets, exit status, and what is printed where."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpgraph.__main__ import main
from mtpgraph.explanation.command import load
from mtpgraph.explanation.trace import explain

from .modules import BROKEN, LAYERS, PLAIN, write_module

INPUTS = ("--input", "float32[4,8]", "--input", "float32[8,16]", "--input", "cache=float32[4,16]")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are found in the working directory, as for ``python -m``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_command_function_with_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, path = write_module(tmp_path, PLAIN)
    assert main(["explain", f"{name}:step", *INPUTS]) == 0
    said = capsys.readouterr().out
    assert f"{name}:step" in said
    assert "One graph, no host sync, no mutation hazard." in said
    # below the working directory a path is relative to it
    assert f"\n{path.name}\n" in said
    assert "4 hidden = x @ weight" in said


def test_command_breaks_exit_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, path = write_module(tmp_path, BROKEN)
    given = ("--input", "float32[4]", "--input", "float32[4]")
    assert main(["explain", f"{name}:step", *given, "--json"]) == 1
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [b["line"] for b in data["breaks"]] == [7, 15]
    assert {b["file"] for b in data["breaks"]} == {str(path)}
    assert all(b["remedy"] for b in data["breaks"])


@pytest.mark.parametrize("factory", ["make", "make_named"])
def test_command_factory_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factory: str
) -> None:
    name, _ = write_module(tmp_path, LAYERS)
    out = tmp_path / "page.html"
    assert main(["explain", f"{name}:{factory}", "--html", str(out)]) == 0
    assert "One graph" in capsys.readouterr().out
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "torch.tanh(y) * self.scale" in page


@pytest.mark.parametrize(
    ("target", "inputs", "said"),
    [
        ("step", [], "expected MODULE:NAME, got 'step'"),
        ("no_such_module_here:step", [], "No module named 'no_such_module_here'"),
        ("{plain}:stop", [], "has no attribute 'stop'"),
        ("{plain}:torch", [], "must be a function, a module or a factory"),
        ("{plain}:step", [], "takes x, weight, cache: give an --input for each"),
        ("{plain}:step", ["3", "floot"], "--input 2, 'floot', must be [NAME=]DTYPE[SIZE,...]"),
        ("{plain}:step", ["float32[2]"], "missing a required argument"),
        ("{plain}:step", ["float32[4,8]"] * 3, "the step fails on these inputs"),
        ("{layers}:Net", [], "must be a factory that returns (step, args)"),
    ],
)
def test_command_errors_exit_with_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: str,
    inputs: list[str],
    said: str,
) -> None:
    plain, _ = write_module(tmp_path, PLAIN)
    layers, _ = write_module(tmp_path, LAYERS)
    flags = [flag for spec in inputs for flag in ("--input", spec)]
    assert main(["explain", target.format(plain=plain, layers=layers), *flags]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


def test_command_example_decoder() -> None:
    """The showcase: one graph, every reset and every indexer fused, padding declared, and the
    caches as they were."""
    step = load("mtpgraph.example.demo:make_step", [])
    caches = step.args[-1]
    tensors = [*step.args[:-1], *(t for layer in caches.layers for t in layer), *caches.mtp]
    before = [(tensor.clone(), tensor._version) for tensor in tensors]
    found = explain(step.fn, *step.args)
    for tensor, (value, version) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, value)
    assert found.ok
    assert len(found.graphs) == 1
    counts = {report.name: report.count for report in found.passes}
    assert (counts["fuse_state_reset"], counts["fuse_select"]) == (4, 3)
    padding = {row.name: row for row in found.padding or []}
    assert padding["slot_mapping"].pad == "-1"
    assert padding["caches"].dim is None
    select = next(op for op in found.ops if op.name == "mtpgraph.indexer_select")
    assert 0 < select.read < caches.layers[1].index_k.nbytes


def test_command_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    said = capsys.readouterr().out
    assert "Exit status: 0" in said
    assert "float32[4,8]" in said
