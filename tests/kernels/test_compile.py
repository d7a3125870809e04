"""Every launch compiles for every architecture and fits into its shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .compile_cases import CASES, MAX_SHARED, Case


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """One process for all cases: this one may have decorated the kernels for the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_cases"],
        cwd=Path(__file__).parents[2],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_launch_compiles(case: Case, results: list[dict[str, Any]]) -> None:
    mine = [result for result in results if result["case"] == case.name]
    assert [result for result in mine if "error" in result] == []
    assert {result["arch"] for result in mine} == set(case.archs)
    for result in mine:
        assert result["registers"] > 0
        assert result["shared"] <= MAX_SHARED[result["arch"]], result
