"""Findings name the user's line; nothing is kept where nobody collects."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mtpgraph import ops
from mtpgraph.compile_passes.report import Finding, collect, note
from tests.compile_passes.support import trace


def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return x.softmax(0) + row_lens[:, None]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    ints = {"dtype": torch.int32}
    return torch.randn(4, 2), torch.tensor([0, 2, 4], **ints), torch.tensor([3, 5], **ints)


def note_all(graph: fx.Graph) -> int:
    """A pass that has something to say about every node."""
    for node in graph.nodes:
        note(node, "left alone", "note_all", "for a test", "do nothing")
    return 0


def test_a_finding_names_the_users_line() -> None:
    _, probe = trace(step, *inputs(), passes=(note_all,))
    found = {finding.op: finding for finding in probe.manager.findings}
    flatten = found["mtpgraph.flatten_decode"]
    assert flatten.file == __file__
    assert flatten.code.startswith("row_lens, _ = ops.flatten_decode(")
    assert found[".softmax()"].line == flatten.line + 1
    assert str(found[".softmax()"]) == (
        f"{__file__}:{flatten.line + 1}: `return x.softmax(0) + row_lens[:, None]`: for a test; "
        "do nothing"
    )


def test_without_a_line_a_finding_names_the_op() -> None:
    graph = fx.Graph()
    with collect() as findings:
        note(graph.placeholder("x"), "padding unknown", "p", "nothing shows its padding")
    assert findings == [
        Finding("padding unknown", "p", "placeholder x", "", 0, "", "nothing shows its padding")
    ]
    assert str(findings[0]) == "placeholder x: nothing shows its padding"


def test_the_same_finding_is_kept_once_and_only_while_collecting() -> None:
    node = fx.Graph().placeholder("x")
    note(node, "left alone", "p", "before")
    with collect() as findings:
        note(node, "left alone", "p", "inside")
        note(node, "left alone", "p", "inside")
    note(node, "left alone", "p", "after")
    assert [finding.reason for finding in findings] == ["inside"]


@pytest.mark.parametrize(
    "folder",
    [
        "env/lib/python3.12/site-packages",
        "usr/lib/python3/dist-packages",
        "home/me/.local/lib/python3.12/site-packages",
        "work/vendored/site-packages",
    ],
)
def test_a_library_is_not_blamed_wherever_it_is_installed(folder: str, tmp_path: Path) -> None:
    package = tmp_path / folder / "shapes"
    package.mkdir(parents=True)
    library = package / "pooling.py"
    library.write_text("def mean(x):\n    return x.mean(0)\n")
    code: dict[str, Any] = {}
    exec(compile(library.read_text(), str(library), "exec"), code)

    def pooled(x: Tensor) -> Tensor:
        return x - code["mean"](x)  # the call

    _, probe = trace(pooled, torch.randn(4, 2), passes=(note_all,))
    found = {finding.op: finding for finding in probe.manager.findings}
    assert found[".mean()"].file == __file__
    assert found[".mean()"].code == 'return x - code["mean"](x)  # the call'


def test_a_library_is_named_where_nothing_else_ran(tmp_path: Path) -> None:
    file = tmp_path / "site-packages" / "model.py"
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = f'  File "{file}", line 7, in forward\n    return x.mean(0)\n'
    with collect() as findings:
        note(node, "left alone", "p", "inside")
    assert (findings[0].file, findings[0].line) == (str(file), 7)
