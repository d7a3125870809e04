"""What ``mtpgraph bench plot`` makes of rows that ``mtpgraph bench step`` wrote."""

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
    assert f"no step in {path}" in capsys.readouterr().err
