"""Inductor's caches serve a second process, and none that has other passes, options or ops."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mtpgraph

PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
import mtpgraph
from mtpgraph import ops

def step(x, query_start_loc, seq_lens):
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    # no element-wise kernel: a C++ compiler has nothing to do
    return x @ x.t(), row_lens

starts = torch.arange(4, dtype=torch.int32)
for options in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, backend="mtpgraph", fullgraph=True, options=options)
    result = compiled(torch.ones(3, 2), starts, starts[1:] + 2)
    print(json.dumps({
        "graph hits": counters["inductor"]["fxgraph_cache_hit"],
        "graph misses": counters["inductor"]["fxgraph_cache_miss"],
        "aot hits": counters["aot_autograd"]["autograd_cache_hit"],
        "aot misses": counters["aot_autograd"]["autograd_cache_miss"],
        "result": [value.tolist() for value in result],
        "source": mtpgraph.__file__,
    }))
"""


class Machine:
    """A copy of the package, and a folder for the caches."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "mtpgraph"
        shutil.copytree(
            Path(mtpgraph.__file__).parent,
            self.package,
            ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"),
        )
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "caches"),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        }
        self._elsewhere = folder / "elsewhere"
        self._elsewhere.mkdir()

    def run(self, *options: dict[str, Any]) -> list[dict[str, Any]]:
        """Compile a step in a new process, once with each of ``options``."""
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(options)],
            env=self._environment,
            cwd=self._elsewhere,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        runs = [json.loads(line) for line in done.stdout.splitlines()]
        for run in runs:
            assert Path(run["source"]).parent == self.package
        return runs


def hit(run: dict[str, Any]) -> bool:
    """Served by the caches; both agree."""
    counts = run["aot hits"], run["aot misses"]
    assert counts in ((1, 0), (0, 1)), run
    if counts == (0, 1):
        assert (run["graph hits"], run["graph misses"]) == (0, 1), run
    return counts == (1, 0)


@pytest.mark.slow
def test_caches_serve_what_is_the_same_and_nothing_else(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    cold, other = machine.run({}, {"disable_passes": ["fuse_select"]})
    assert not hit(cold)
    assert not hit(other)

    warm, warm_other = machine.run({}, {"disable_passes": ["fuse_select"]})
    assert hit(warm)
    assert hit(warm_other)
    assert warm["result"] == cold["result"] == other["result"]

    # a helper of a pass, which no source of a function would show
    with (machine.package / "compile_passes" / "_memory.py").open("a") as file:
        file.write("\n# edited\n")
    edited, again = machine.run({}, {})
    assert not hit(edited)
    assert hit(again)
