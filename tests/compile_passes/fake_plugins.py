"""The Python interface of TensorRT's quick-deploy plugins, without TensorRT.

``PluginLibrary`` has what ours are registered with, by the names of TensorRT 10.15 and
torch-tensorrt 2.11: it reads signatures as strictly, converts a region through the converters, and
runs plugins on memory of the host that it knows by address.
"""

import ctypes
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mtpgraph.compile_passes import tensorrt_plugins

STREAM = 7
DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorDesc:
    """Describes a tensor in expressions of sizes."""

    def __init__(self, shape_expr: tuple[Any, ...], dtype: str) -> None:
        self.shape_expr = shape_expr
        self.dtype = dtype


class PluginTensor:
    """A tensor that a plugin is run on: what it needs to find the memory."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self.data_ptr = tensor.data_ptr()
        self.shape = tuple(tensor.shape)
        self.dtype = _NAMES[tensor.dtype]


class Plugin:
    """One plugin, registered in two parts."""

    def __init__(self, describe: Callable[..., Any]) -> None:
        signature = inspect.signature(describe)
        self.describe = describe
        kinds = {name: given.annotation for name, given in signature.parameters.items()}
        assert inspect.Parameter.empty not in kinds.values()
        self.tensors = [name for name, kind in kinds.items() if kind is TensorDesc]
        self.attributes = {n: k for n, k in kinds.items() if k is not TensorDesc}
        assert list(kinds) == [*self.tensors, *self.attributes]
        # of a number, numpy may make an error
        assert set(self.attributes.values()) <= {str}
        assert typing.get_origin(signature.return_annotation) is tuple
        self.results = len(typing.get_args(signature.return_annotation))
        self.run: Callable[..., None] | None = None

    def implement(self, run: Callable[..., None]) -> None:
        names = list(inspect.signature(run).parameters)
        assert names == [*self.tensors, *self.attributes, "outputs", "stream"]
        self.run = run

    def __call__(self, *tensors: Any, **attributes: Any) -> Callable[[], Any]:
        assert len(tensors) == len(self.tensors)
        assert {name: type(value) for name, value in attributes.items()} == self.attributes
        assert list(attributes) == list(self.attributes)
        return lambda: (self, tensors, attributes)

    def results_for(self, tensors: list[Tensor], attributes: dict[str, Any]) -> list[Tensor]:
        """Memory for results that holds 0xFF."""
        descs = [TensorDesc(tuple(t.shape), _NAMES[t.dtype]) for t in tensors]
        found = self.describe(*descs, **attributes)
        assert len(found) == self.results
        results = [torch.empty(desc.shape_expr, dtype=DTYPES[desc.dtype]) for desc in found]
        for result in results:
            result.view(torch.uint8).fill_(0xFF)
        return results

    def enqueue(self, tensors: list[Tensor], attributes: dict[str, Any]) -> list[Tensor]:
        results = self.results_for(tensors, attributes)
        assert self.run is not None
        given = [PluginTensor(tensor) for tensor in tensors]
        outputs = [PluginTensor(tensor) for tensor in results]
        self.run(*given, *attributes.values(), outputs, stream=STREAM)
        return results


class Layer:
    """A plugin in a network."""

    def __init__(self, plugin: Plugin, tensors: tuple[Any, ...], attributes: Any) -> None:
        self.plugin, self.tensors, self.attributes = plugin, tensors, attributes
        self.name = ""

    def get_output(self, place: int) -> tuple["Layer", int]:
        assert 0 <= place < self.plugin.results
        return self, place


class PluginLibrary:
    """A TensorRT with plugins.

    Attributes:
        trt: goes by the name of ``tensorrt``
        plugins: by their id
        converters: of torch-tensorrt, by the op that they convert
        streams: on which plugins ran
        refuses: raises what the registration of a plugin is to raise
    """

    def __init__(self) -> None:
        self.trt: Any = types.ModuleType("tensorrt")
        for name, kind in [
            ("float32", "FLOAT"),
            ("float16", "HALF"),
            ("bfloat16", "BF16"),
            ("int32", "INT32"),
        ]:
            setattr(self.trt, name, kind)
        self.plugins: dict[str, Plugin] = {}
        self.converters: dict[Any, Callable[..., Any]] = {}
        self.streams: list[int] = []
        self.refuses: Callable[[str], None] = lambda plugin: None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put it in the place of TensorRT and torch-tensorrt, and the host's memory in a card's."""
        trtp: Any = types.ModuleType("tensorrt.plugin")
        trtp.TensorDesc, trtp.Tensor = TensorDesc, PluginTensor
        trtp.register, trtp.impl = self._register, self._impl
        trtp.from_shape_expr = TensorDesc
        trtp.op = types.SimpleNamespace(mtpgraph=types.SimpleNamespace())
        self._op = trtp.op.mtpgraph
        conversion: Any = types.ModuleType("torch_tensorrt.dynamo.conversion")
        conversion.dynamo_tensorrt_converter = self._converter
        utils: Any = types.ModuleType("torch_tensorrt.dynamo.conversion.converter_utils")
        utils.get_trt_tensor = lambda ctx, value, name: value
        for module in (self.trt, trtp, conversion, utils):
            patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(tensorrt_plugins, "_registered", {})
        patch.setattr(tensorrt_plugins, "_at", _at)
        patch.setattr(tensorrt_plugins, "_on_stream", self._on_stream)

    def convert(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """A program with a plugin for each op, made by its converter."""
        layers: dict[fx.Node, Layer] = {}
        net = types.SimpleNamespace(add_plugin=lambda made, aot: Layer(*made()))
        for node in gm.graph.nodes:
            if convert := self.converters.get(node.target):
                ctx = types.SimpleNamespace(net=net)
                made = convert(ctx, node.target, node.args, node.kwargs, node.name)
                first = made[0] if isinstance(made[0], tuple) else made
                layers[node] = first[0]
                assert layers[node].name == f"[{node.target}]-[{node.name}]"
        return _Program(gm, layers).run

    def _register(self, name: str) -> Callable[..., Any]:
        self.refuses(name)
        assert name not in self.plugins

        def decorate(describe: Callable[..., Any]) -> None:
            plugin = self.plugins[name] = Plugin(describe)
            setattr(self._op, name.removeprefix("mtpgraph::"), plugin)

        return decorate

    def _impl(self, name: str) -> Callable[..., Any]:
        return self.plugins[name].implement

    def _converter(self, op: Any, *, supports_dynamic_shapes: bool) -> Callable[..., Any]:
        assert supports_dynamic_shapes
        return lambda convert: self.converters.setdefault(op, convert)

    def _on_stream(self, stream: int) -> Any:
        self.streams.append(stream)
        return torch.no_grad()


class _Program(fx.Interpreter):
    """Runs a region, its ops as plugins."""

    def __init__(self, gm: fx.GraphModule, layers: dict[fx.Node, Layer]) -> None:
        super().__init__(gm)
        self._layers = layers

    def run_node(self, n: fx.Node) -> Any:
        if n not in self._layers:
            return super().run_node(n)
        layer = self._layers[n]
        tensors = [self.env[node].contiguous() for node in layer.tensors]
        results = layer.plugin.enqueue(tensors, layer.attributes)
        return results if len(results) > 1 else results[0]


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = (ctypes.c_byte * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
