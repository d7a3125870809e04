"""Every launch compiles for every architecture and fits into its shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from .compile_cases import CASES, MAX_SHARED, RARE, Case


def compile_all(full: bool) -> str:
    """In one process: this one may have decorated the kernels for the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    sweep = ["--full"] if full else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_cases", *sweep],
        cwd=Path(__file__).parents[2],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def results(full: bool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of all cases, compiled once, by the first of the workers that the tests are dealt out to."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    kept = folder / "compiled.jsonl"
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            kept.write_text(compile_all(full))
    return [json.loads(line) for line in kept.read_text().splitlines()]


def test_rare_cases_are_cases() -> None:
    assert {case.name for case in CASES} >= RARE


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_launch_compiles(case: Case, results: list[dict[str, Any]], full: bool) -> None:
    if case.is_rare and not full:
        pytest.skip("compiled under --full")
    mine = [result for result in results if result["case"] == case.name]
    assert [result for result in mine if "error" in result] == []
    assert {result["arch"] for result in mine} == set(case.archs)
    for result in mine:
        assert result["registers"] > 0
        assert result["shared"] <= MAX_SHARED[result["arch"]], result
