"""Findings name the user's line; nothing is kept where nobody collects."""

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
