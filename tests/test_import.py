"""What importing the package costs, what it pulls in, and what it registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mtpgraph

OPS = [
    "causal_conv1d_update_",
    "expand_block_table",
    "flatten_decode",
    "gated_delta_update_",
    "has_initial_state",
    "indexer_cache_write_",
    "indexer_logits",
    "indexer_select",
    "indexer_topk",
    "reset_states_",
    "selective_state_update_",
    "sparse_mla_decode",
    "topk_to_slots",
]


def run_python(program: str, cwd: Path) -> str:
    """What ``program`` prints in a fresh interpreter that imports this very package."""
    source = Path(mtpgraph.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", OPS)
def test_import_registers(name: str) -> None:
    packet = getattr(torch.ops.mtpgraph, name)
    assert packet.overloads() == ["default"]
    assert callable(getattr(mtpgraph.ops, name))
    assert name in mtpgraph.ops.__all__


def test_import_without_triton_runs_an_op(tmp_path: Path) -> None:
    """The references need torch alone: a machine without triton imports and runs everything."""
    program = """
import sys
sys.modules["triton"] = None
import torch
import mtpgraph
from mtpgraph import ops
has_state = ops.has_initial_state(
    torch.tensor([0, 4, 7, 8], dtype=torch.int32), torch.tensor([14, 3, 9], dtype=torch.int32)
)
print(has_state.tolist())
"""
    assert run_python(program, tmp_path) == "[True, False, True]"


def test_import_adds_little_to_torch(tmp_path: Path) -> None:
    program = """
import time
import torch
start = time.perf_counter()
import mtpgraph
print(time.perf_counter() - start)
"""
    assert min(float(run_python(program, tmp_path)) for _ in range(3)) < 0.3


def test_import_pulls_in_no_compiler(tmp_path: Path) -> None:
    """Dynamo, Inductor, sympy and triton take seconds, and a step may never be compiled."""
    program = """
import sys
import torch
before = set(sys.modules)
import mtpgraph
heavy = ("torch._dynamo", "torch._inductor", "sympy", "triton")
print(*sorted(name for name in set(sys.modules) - before if name.startswith(heavy)))
"""
    assert run_python(program, tmp_path) == ""
