"""Engines without TensorRT: the same partition, ranges and constants, computed by torch.

``FakeBuilder`` stands in for TensorRT's builder. It freezes the weights, checks what it is given,
and gives fresh results, in memory that held NaN before.
"""

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mtpgraph.compile_passes import tensorrt
from mtpgraph.compile_passes.dense_regions import VIEWS, name_in_torch
from mtpgraph.compile_passes.engine_input import EngineInput
from mtpgraph.compile_passes.tensorrt_builder import export_region


class FakeBuilder:
    """Keeps what it was asked for.

    Attributes:
        graphs: the regions that engines were built for
        inputs: their inputs
        ran: for each run of an engine, the shapes it was given
        loaded: how many engines were loaded
        version: what ``fingerprint`` says
        fails: raises for a region that no engine is to be built for
        exports: engines are programs of ``torch.export``, which another process can load too
    """

    def __init__(
        self, fails: Callable[[fx.GraphModule], None] = lambda gm: None, exports: bool = False
    ) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.inputs: list[list[EngineInput]] = []
        self.ran: list[list[tuple[int, ...]]] = []
        self.loaded = 0
        self.version = "fake 1"
        self.fails = fails
        self.exports = exports
        self._copies: dict[bytes, Any] = {}

    @property
    def calls(self) -> list[list[str]]:
        """What each region calls, views left out."""
        found = []
        for gm in self.graphs:
            names = map(name_in_torch, gm.graph.nodes)
            found.append(
                [name for name in names if name and name not in {*VIEWS, "narrow"} - {"reshape"}]
            )
        return found

    def fingerprint(self, device: torch.device) -> str:
        return self.version

    def build(
        self, gm: fx.GraphModule, inputs: Sequence[EngineInput], outputs: Sequence[torch.dtype]
    ) -> bytes:
        self.fails(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        for wanted, node in zip(inputs, placeholders, strict=True):
            assert wanted.dtype == node.meta["example_value"].dtype
            assert node.users, f"{node} is given for nothing"
        self.graphs.append(gm)
        self.inputs.append(list(inputs))
        if self.exports:
            file = io.BytesIO()
            torch.export.save(export_region(gm, inputs), file)
            return file.getvalue()
        name = f"copy {len(self._copies)}".encode()
        self._copies[name] = copy.deepcopy(gm)
        return name

    def load(
        self, engine: bytes, inputs: Sequence[EngineInput], outputs: Sequence[torch.dtype]
    ) -> Callable[..., Sequence[Tensor]]:
        program = self._copies[engine] if engine in self._copies else _load(engine)
        self.loaded += 1

        def run(*given: Tensor) -> list[Tensor]:
            for tensor, wanted in zip(given, inputs, strict=True):
                assert tensor.is_contiguous()
                assert wanted.fits(tensor)
            self.ran.append([tuple(tensor.shape) for tensor in given])
            results = []
            for value, dtype in zip(program(*given), outputs, strict=True):
                assert value.dtype == dtype
                assert value.is_contiguous()
                results.append(torch.full_like(value, float("nan")).copy_(value))
            return results

        return run


def _load(engine: bytes) -> Any:
    with warnings.catch_warnings():
        # older torch reads the file without a copy
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.export.load(io.BytesIO(engine)).module()


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    """Stands in for TensorRT, which seems to be installed."""
    fake = FakeBuilder()
    monkeypatch.delenv("MTPGRAPH_ENGINE_CACHE", raising=False)
    monkeypatch.setattr(tensorrt, "is_installed", lambda: True)
    monkeypatch.setattr(tensorrt, "load_builder", lambda: fake)
    return fake
