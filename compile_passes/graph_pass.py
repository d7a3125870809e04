"""What a pass is, and the run of all of them over one graph."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import fx

from .report import Finding, collect

GraphPass = Callable[[fx.Graph], int]
"""A function of a Dynamo-level graph that rewrites it in place and returns how often."""


class PassManager:
    """Run passes in order, count their rewrites and keep what they note.

    Attributes:
        findings: what the passes noted about the last graph
    """

    def __init__(self, passes: Iterable[GraphPass]) -> None:
        self.passes = tuple(passes)
        self.findings: list[Finding] = []

    def __call__(self, gm: fx.GraphModule) -> dict[str, int]:
        """Rewrite ``gm`` in place; returns the number of rewrites by the name of the pass."""
        with collect() as self.findings:
            counts = {graph_pass.__name__: graph_pass(gm.graph) for graph_pass in self.passes}
        if any(counts.values()):
            gm.graph.lint()
            gm.recompile()
        return counts

    def uuid(self) -> bytes:
        """Changes with the source of any pass, helper or op, the choice of passes, and torch."""
        digest = hashlib.sha256()
        here = Path(__file__).parent
        for path in (*sorted(here.glob("*.py")), *sorted((here.parent / "ops").glob("*.py"))):
            digest.update(path.read_bytes())
        names = [graph_pass.__name__ for graph_pass in self.passes]
        digest.update(json.dumps([names, torch.__version__]).encode())
        return digest.digest()
