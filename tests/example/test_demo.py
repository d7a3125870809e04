"""The demo's report and exit code, and the compiled step it runs."""

import argparse
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtpgraph import Stats
from mtpgraph.example import data, demo
from mtpgraph.example.decoder import Decoder
from mtpgraph.example.model import load
from mtpgraph.example.runs import Request, differences


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class EagerStep:
    """Stands in for a compiled step where its speed and its compilation do not matter."""

    def __init__(self, step: Callable[..., Any], wrong_after: int | None = None) -> None:
        self.step, self.wrong_after, self.calls = step, wrong_after, 0

    def __call__(self, *args: Any) -> Any:
        said, accepted, drafts, gaps = self.step(*args)
        self.calls += 1
        if self.wrong_after is not None and self.calls > self.wrong_after:
            said = (said + 1) % 256
        return said, accepted, drafts, gaps

    def warm_up(self, *args: Any) -> None:
        """Nothing to compile."""

    def stats(self) -> Stats:
        return Stats(graphs=1)


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--device", "cpu", *flags])


SMALL = ("--requests", "4", "--max-new-tokens", "6")


def test_json_is_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "compile_step", lambda model: EagerStep(model.step))
    assert demo.run(arguments("--json", *SMALL)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"]
    assert report["graphs"] == 1
    assert len(report["texts"]) == 4
    assert set(report["tokens_per_second"]) == {
        "compiled speculative",
        "eager speculative",
        "eager one-token",
    }


def test_text_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "compile_step", lambda model: EagerStep(model.step))
    assert demo.run(arguments(*SMALL)) == 0
    out = capsys.readouterr().out
    assert "tokens per step" in out
    assert "same tokens" in out


def test_different_tokens_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "compile_step", lambda model: EagerStep(model.step, wrong_after=3))
    assert demo.run(arguments("--json", *SMALL)) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["differences"]["compiled speculative"]
    assert not report["differences"]["eager speculative"]


def test_bad_arguments_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(arguments("--requests", "0")) == 2
    assert "at least 1" in capsys.readouterr().err


def test_compiled_step_is_one_graph_for_all_batch_sizes() -> None:
    """Sizes all different from each other, as rows come and go; every reset and every indexer of
    the step is fused, and what comes out is what plain decoding says."""
    model = load()
    step = demo.compile_step(model, engine="eager")
    requests = [
        Request(request.prompt[:9], 3 + i % 4, arrival=i // 2)
        for i, request in enumerate(data.held_out_requests(9, 8, seed=1))
    ]
    decoder = Decoder(model, max_reqs=6)
    compiled = decoder.decode_speculative(requests, step)
    assert all(d.is_tie() for d in differences(decoder.decode_plain(requests), compiled))
    stats = step.stats()
    assert (stats.graphs, stats.graph_breaks, stats.recompiles) == (1, 0, 0)
    assert dict(stats.rewrites) == {"fuse_state_reset": 4, "fuse_select": 3}
    assert len(compiled.batch_sizes) >= 5
