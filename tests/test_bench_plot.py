"""What ``mtpgraph bench plot`` makes of the rows of ``mtpgraph bench step`` and ``indexer``."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtpgraph.__main__ import main


def row(way: str, batch: int | str, step_ms: float, **more: Any) -> dict[str, Any]:
    common = {"next_n": 2, "context": 4096, "layers": 61, "card": "a card", "torch": "2.11.0"}
    timed = {"kernel_ms": step_ms - 0.5, "tokens_per_s": 2000 / step_ms}
    return common | timed | {"way": way, "batch": batch, "step_ms": step_ms} | more


ROWS = [
    row("mtpgraph", 64, 16.0),
    row("eager", 64, 48.0),
    row("mtpgraph", 8, 8.0),
    row("mtpgraph", 8, 9.0, context=32768),
    row("compile", 8, 20.0),
    row("mtpgraph", "changing", 5.0),
    {"warm_up_of": "mtpgraph", "sizes": 67},
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "step.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    return path


def test_plot_prints_a_table_by_case(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plot", str(results)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("| tokens/s | compile | eager |")
    assert lines[2:] == [
        "| 2 | 4096 | 8 | 8.00 | 7.50 | 250 | 2.50x |  |",
        "| 2 | 4096 | 64 | 16.00 | 15.50 | 125 |  | 3.00x |",
        "| 2 | 32768 | 8 | 9.00 | 8.50 | 222 |  |  |",
    ]


def test_plot_draws_a_picture(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "step.svg"
    assert main(["bench", "plot", str(results), "--out", str(out)]) == 0
    assert out.read_text().lstrip().startswith("<?xml")


def test_plot_without_a_step_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert main(["bench", "plot", str(path)]) == 2
    assert f"no step or shape: {path}" in capsys.readouterr().err


def shape(what: str, name: str, flops: int, **more: Any) -> dict[str, Any]:
    """A row of ``bench indexer``."""
    ceilings = {"copy_bytes": 4e12, "fp8_flops": 1.2e15, "bf16_flops": 8e14}
    common = {"card": "a card", "torch": "2.11.0", "ceilings": ceilings, "l2": "cold"}
    return common | {"what": what, "shape": name, "flops": flops, "bytes": 10**8} | more


OURS = {"us": 50.0, "gb_s": 2000.0, "tflop_s": 40.0, "of_floor": 0.5}
PEER = {"best_peer": "a peer", "best_peer_us": 60.0, "ratio": 0.83, "ratio_apart": 0.9}
EXACT = {"inexact": {"a peer": "tied rows: recall 0.9"}, "ratio_exact": 0.7}
SHAPES = [
    shape("logits", "64x8K-n2", 2 * 10**9, **OURS, **PEER),
    shape("topk", "1x8K-k2048", 0, **OURS, **PEER, **EXACT),
    shape("select", "8x32K-n3", 10**9, **OURS),
    shape("mla", "8x64h", 10**9, **{key: PEER[key] for key in ("best_peer", "best_peer_us")}),
]


@pytest.fixture
def indexer_results(tmp_path: Path) -> Path:
    path = tmp_path / "indexer.jsonl"
    path.write_text("\n".join(map(json.dumps, SHAPES)) + "\n")
    return path


def test_plot_prints_the_table_of_the_indexer(
    indexer_results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "plot", str(indexer_results)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| logits | 64x8K-n2 | 50.0 | 2000 | 40 | 50% | a peer | 60.0 | 0.83 | 0.90 |  | cold |",
        "| topk | 1x8K-k2048 | 50.0 | 2000 |  | 50% | a peer* | 60.0 | 0.83 | 0.90 | 0.70 | cold |",
        "| select | 8x32K-n3 | 50.0 | 2000 | 40 | 50% |  |  |  |  |  | cold |",
        "| mla | 8x64h |  |  |  |  | a peer | 60.0 |  |  |  | cold |",
    ]


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        (SHAPES, {"TFLOP/s", "microseconds"}),
        (SHAPES[:1], {"TFLOP/s"}),
        (SHAPES[1:2], {"microseconds"}),
    ],
)
def test_plot_draws_a_roofline(
    rows: list[dict[str, Any]], labels: set[str], tmp_path: Path
) -> None:
    """Top-k computes nothing, so it has a panel of its own, where there is any."""
    pytest.importorskip("matplotlib")
    results, out = tmp_path / "indexer.jsonl", tmp_path / "indexer.svg"
    results.write_text("\n".join(map(json.dumps, rows)))
    assert main(["bench", "plot", str(results), "--out", str(out)]) == 0
    picture = out.read_text()
    assert {label for label in ("TFLOP/s", "microseconds") if label in picture} == labels


def test_plot_of_two_kinds_of_rows_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "both.jsonl"
    path.write_text("\n".join(map(json.dumps, [*ROWS, *SHAPES])))
    assert main(["bench", "plot", str(path)]) == 2
    assert f"steps and shapes in one file: {path}" in capsys.readouterr().err
