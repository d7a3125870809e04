"""Engines without TensorRT: the same partition, ranges and constants, computed by torch.

``FakeBuilder`` stands in for TensorRT's builder. It freezes the weights, checks what it is given,
and gives fresh results, in memory that held NaN before. Ops are in its engines if it is given a
``PluginLibrary``; without one it is like the RTX flavour, which has no plugins.
"""

import copy
import io
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mtpgraph.compile_passes import tensorrt
from mtpgraph.compile_passes.dense_regions import VIEWS, name_in_torch
from mtpgraph.compile_passes.engine_input import EngineInput
from mtpgraph.compile_passes.engine_ops import ENGINE_OPS
from mtpgraph.compile_passes.tensorrt_builder import export_region
from mtpgraph.compile_passes.tensorrt_plugins import register_plugins

from .fake_plugins import PluginLibrary


class FakeBuilder:
    """Keeps what it was asked for.

    Attributes:
        graphs: the regions that engines were built for
        inputs: their inputs
        ran: for each run of an engine, the shapes it was given
        addresses: for each run, where they lay
        loaded: how many engines were loaded
        version: what ``fingerprint`` says
        fails: raises for a region that no engine is to be built for
        exports: engines are programs of ``torch.export``, which another process can load too
        library: has plugins
    """

    def __init__(
        self, fails: Callable[[fx.GraphModule], None] = lambda gm: None, exports: bool = False
    ) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.inputs: list[list[EngineInput]] = []
        self.ran: list[list[tuple[int, ...]]] = []
        self.addresses: list[list[int]] = []
        self.loaded = 0
        self.version = "fake 1"
        self.fails = fails
        self.exports = exports
        self.library: PluginLibrary | None = None
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

    @property
    def ops(self) -> list[list[str]]:
        """The ops in each region."""
        twins = {op.twin: name for name, op in ENGINE_OPS.items()}
        return [
            [twins[node.target] for node in gm.graph.nodes if node.target in twins]
            for gm in self.graphs
        ]

    def plugins(self) -> Collection[str]:
        if self.library is None:
            return ()
        register_plugins(self.library.trt)
        return ENGINE_OPS

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
        if self.library is not None and any(self.ops[-1]):
            self._copies[name] = self.library.convert(export_region(gm, inputs).module())
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
            self.addresses.append([tensor.data_ptr() for tensor in given])
            results = []
            for value, dtype in zip(program(*given), outputs, strict=True):
                assert value.dtype == dtype
                assert value.is_contiguous()
                garbage = float("nan") if dtype.is_floating_point else -7
                results.append(torch.full_like(value, garbage).copy_(value))
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


@pytest.fixture
def library(builder: FakeBuilder, monkeypatch: pytest.MonkeyPatch) -> PluginLibrary:
    """Engines that can hold ops."""
    builder.library = PluginLibrary()
    builder.library.install(monkeypatch)
    return builder.library
