"""The builder of torch-tensorrt: what it hands over, with stand-ins for the library."""

import contextlib
import logging
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from mtpgraph.compile_passes import tensorrt, tensorrt_plugins
from mtpgraph.compile_passes.engine_cache import engine_key
from mtpgraph.compile_passes.engine_input import EngineInput
from mtpgraph.compile_passes.engine_ops import ENGINE_OPS
from mtpgraph.compile_passes.tensorrt_builder import TensorRTBuilder, TensorRTEngine, export_region
from mtpgraph.compile_passes.tensorrt_plugins import register_plugins

from .fake_plugins import PluginLibrary
from .support import DIM

CPU = torch.device("cpu")


class Library:
    """Stands in for torch_tensorrt: keeps what it is asked to convert."""

    def __init__(self, convert: Callable[..., bytes]) -> None:
        self.module: Any = types.ModuleType("torch_tensorrt")
        self.module.__version__ = "2.11.0"
        self.module.Input = dict
        self.module.dynamo = types.SimpleNamespace(
            convert_exported_program_to_serialized_trt_engine=self.convert
        )
        self.trt: Any = types.ModuleType("tensorrt_rtx")
        self.trt.__version__ = "1.4.0"
        self.asked: list[Any] = []
        self._convert = convert

    def convert(self, program: Any, **settings: Any) -> bytes:
        self.asked.append((program, settings))
        return self._convert()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setitem(sys.modules, "torch_tensorrt", self.module)
        patch.setitem(sys.modules, "tensorrt", self.trt)


def region(dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("input_0")
    weight = graph.get_attr("weight_0")
    linear = graph.call_function(torch.nn.functional.linear, (x, weight))
    linear.meta["example_value"] = torch.empty(6, 4, dtype=dtype)
    graph.output((linear,))
    root = torch.nn.Module()
    root.weight_0 = torch.nn.Parameter(torch.ones(4, DIM, dtype=dtype), requires_grad=False)
    return fx.GraphModule(root, graph)


def test_builder_asks_for_the_ranges_dtypes_and_precision(monkeypatch: pytest.MonkeyPatch):
    library = Library(lambda: b"engine")
    library.install(monkeypatch)
    half = torch.bfloat16
    wanted = EngineInput(half, (2, DIM), (6, DIM), (24, DIM), CPU)
    assert TensorRTBuilder().build(region(half), [wanted], [half]) == b"engine"
    ((program, settings),) = library.asked
    assert settings["arg_inputs"] == [
        {
            "min_shape": (2, DIM),
            "opt_shape": (6, DIM),
            "max_shape": (24, DIM),
            "dtype": half,
        }
    ]
    assert settings["disable_tf32"] is (torch.get_float32_matmul_precision() == "highest")
    assert settings["device"] == CPU
    (size,) = program.range_constraints.values()
    assert (size.lower, size.upper) == (2, 24)
    # names tell inputs apart in the engine
    assert list(program.graph_signature.user_inputs) == ["input_0"]

    static = EngineInput(half, (4, DIM), (4, DIM), (4, DIM), CPU)
    TensorRTBuilder().build(region(half), [static], [half])
    program, settings = library.asked[1]
    assert settings["arg_inputs"] == [{"shape": (4, DIM), "dtype": half}]
    assert not program.range_constraints


def test_builder_says_what_the_converter_only_logs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The converter logs the cause, then fails for want of a result."""

    def convert() -> bytes:
        logger = logging.getLogger("torch_tensorrt.dynamo")
        logger.error("no converter for aten.foo\nlong")
        logger.error("While interpreting the module got an error: ")
        raise UnboundLocalError("interpreter_result")

    Library(convert).install(monkeypatch)
    half = torch.bfloat16
    wanted = EngineInput(half, (2, DIM), (6, DIM), (24, DIM), CPU)
    with pytest.raises(RuntimeError, match=r"^no converter for aten\.foo$"):
        TensorRTBuilder().build(region(half), [wanted], [half])
    assert "no converter" not in caplog.text

    def convert_with_plugin() -> bytes:
        tensorrt_plugins._local.failed.append(ValueError("row_lens must be int32"))
        return convert()

    Library(convert_with_plugin).install(monkeypatch)
    with pytest.raises(RuntimeError, match=r"^a plugin failed: row_lens must be int32$"):
        TensorRTBuilder().build(region(half), [wanted], [half])
    Library(lambda: b"").install(monkeypatch)
    with pytest.raises(RuntimeError, match="gave no engine"):
        TensorRTBuilder().build(region(half), [wanted], [half])


def test_builder_tells_the_flavours_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    library = Library(lambda: b"")
    library.install(monkeypatch)
    builder = TensorRTBuilder()
    assert builder.flavour == "rtx"
    assert builder.fingerprint(CPU) == (
        "torch_tensorrt_rtx 2.11.0 tensorrt 1.4.0 card a card (9, 0) tf32 False"
    )
    library.trt.__name__ = "tensorrt"
    assert builder.flavour == "standard"
    before = builder.fingerprint(CPU)
    torch.set_float32_matmul_precision("high")
    try:
        assert builder.fingerprint(CPU) != before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_builder_has_plugins_where_the_library_has(monkeypatch: pytest.MonkeyPatch):
    """The RTX flavour has none; nor has the standard one, for a TensorRT that it does not trust."""
    plugins = PluginLibrary()
    plugins.install(monkeypatch)
    library = Library(lambda: b"")
    library.trt = plugins.trt
    library.install(monkeypatch)
    assert TensorRTBuilder().plugins() == frozenset()
    for has_them in (False, True):
        features = types.SimpleNamespace(qdp_plugin=has_them)
        monkeypatch.setattr(library.module, "ENABLED_FEATURES", features, raising=False)
        # a second builder of the process registers nothing again
        for _ in range(2):
            assert TensorRTBuilder().plugins() == (ENGINE_OPS.keys() if has_them else set())
        assert bool(plugins.plugins) == has_them
    assert plugins.converters.keys() == {op.twin for op in ENGINE_OPS.values()}


def test_library_that_does_not_import_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    """Without a driver its import raises what it will; the user reads one ImportError."""
    (tmp_path / "torch_tensorrt.py").write_text("raise RuntimeError('no driver\\nand more')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_tensorrt", raising=False)
    assert tensorrt.is_installed()
    with pytest.raises(ImportError, match=r"does not import: RuntimeError: no driver$"):
        tensorrt.load_builder()


def test_export_refuses_a_region_that_fixes_the_batch():
    gm = region()
    wanted = EngineInput(torch.float32, (2, DIM), (6, DIM), (24, DIM), CPU)
    (x,) = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = ((gm.graph.call_method("view", (x, 6 * DIM)),),)
    gm.recompile()
    with pytest.raises(Exception, match=r"specializ|[cC]onstraint"):
        export_region(gm, [wanted])


def test_build_needs_no_memory_of_the_size_of_a_cache(monkeypatch: pytest.MonkeyPatch):
    """Two blocks of it are an example of all: there may be no room for a second cache."""
    library = Library(lambda: b"engine")
    library.install(monkeypatch)
    op = ENGINE_OPS["sparse_mla_decode"]
    graph = fx.Graph()
    given = [graph.placeholder(f"input_{place}") for place in range(5)]
    graph.output(graph.call_function(op.twin, (*given, 0.5, 4)))
    huge = (2**40, 4, 8)
    wanted = [
        EngineInput(torch.bfloat16, (2, 2, 8), (4, 2, 8), (8, 2, 8), CPU),
        EngineInput(torch.bfloat16, huge, huge, huge, CPU, is_cache=True),
        EngineInput(torch.int32, (2, 3), (4, 3), (8, 3), CPU),
        EngineInput(torch.int32, (2, 6), (4, 6), (8, 6), CPU),
        EngineInput(torch.int32, (3,), (5,), (9,), CPU),
    ]
    gm = fx.GraphModule(torch.nn.Module(), graph)
    TensorRTBuilder().build(gm, wanted, [torch.bfloat16, torch.float32])
    ((program, settings),) = library.asked
    assert op.twin in {node.target for node in program.graph.nodes}
    cache = settings["arg_inputs"][1]
    assert (cache["shape"], cache["torch_tensor"].numel()) == (huge, 0)


def test_export_takes_a_fused_norm_apart():
    """A card has one call for the whole norm, of which torch-tensorrt makes fake tensors of two
    modes if its weight is a constant."""
    gm = region(torch.bfloat16)
    fused = torch.ops.aten._fused_rms_norm.default
    gm.norm_weight = torch.nn.Parameter(torch.randn(4).bfloat16(), requires_grad=False)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        linear = output.args[0][0]
        weight = gm.graph.get_attr("norm_weight")
        norm = gm.graph.call_function(fused, (linear, [4], weight, 1e-6))
        output.args = ((gm.graph.call_function(operator.getitem, (norm, 0)),),)
    gm.recompile()
    program = export_region(gm, [EngineInput(torch.bfloat16, (2, DIM), (6, DIM), (24, DIM), CPU)])
    assert fused not in {node.target for node in program.graph.nodes}
    (size,) = program.range_constraints.values()
    assert (size.lower, size.upper) == (2, 24)
    x = torch.randn(5, DIM).bfloat16()
    linear = torch.nn.functional.linear(x, gm.weight_0)
    expected = torch.nn.functional.rms_norm(linear, [4], gm.norm_weight, 1e-6)
    torch.testing.assert_close(program.module()(x)[0], expected)


def test_rtx_multiplies_float32_where_tf32_is_permitted(monkeypatch: pytest.MonkeyPatch):
    library = Library(lambda: b"engine")
    library.install(monkeypatch)
    wanted = [EngineInput(torch.float32, (2, DIM), (6, DIM), (24, DIM), CPU)]
    gm = region()
    with pytest.raises(RuntimeError, match=r"float32 as TF32.*set_float32_matmul_precision"):
        TensorRTBuilder().build(gm, wanted, [torch.float32])
    assert not library.asked
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert TensorRTBuilder().build(gm, wanted, [torch.float32]) == b"engine"
    assert library.asked[0][1]["disable_tf32"] is False


def test_standard_tensorrt_does_without_tf32(monkeypatch: pytest.MonkeyPatch):
    library = Library(lambda: b"engine")
    library.install(monkeypatch)
    library.trt.__name__ = "tensorrt"
    wanted = [EngineInput(torch.float32, (2, DIM), (6, DIM), (24, DIM), CPU)]
    assert TensorRTBuilder().build(region(), wanted, [torch.float32]) == b"engine"
    assert library.asked[0][1]["disable_tf32"] is True


class StubContext:
    """An execution context that keeps what it is told."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory: list[tuple[int, int]] = []
        self.runs = 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (self.shapes["input_0"][0], 4)

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory.append((address, size))

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        self.runs += 1
        return self.runs < 3


class StubTensorRT(types.SimpleNamespace):
    """TensorRT with one engine of ten inputs and an output, listed in the order of their names."""

    def __init__(self, dtype: str = "half") -> None:
        names = ["input_0", "input_1", "input_10", *(f"input_{i}" for i in range(2, 10)), "output0"]
        self.contexts: list[StubContext] = []

        def create(settings: Any) -> StubContext:
            self.contexts.append(StubContext())
            return self.contexts[-1]

        engine = types.SimpleNamespace(
            num_io_tensors=len(names),
            get_tensor_name=names.__getitem__,
            get_tensor_mode=lambda name: name[:5],
            get_tensor_dtype=lambda name: dtype,
            device_memory_size_v2=1000,
            create_execution_context=create,
        )
        runtime = types.SimpleNamespace(
            deserialize_cuda_engine=lambda plan: engine if plan == b"plan" else None
        )
        logger = type("Logger", (), {"ERROR": 1, "__init__": lambda self, level: None})
        super().__init__(
            __name__="tensorrt",
            Logger=logger,
            Runtime=lambda logger: runtime,
            TensorIOMode=types.SimpleNamespace(INPUT="input", OUTPUT="outpu"),
            ExecutionContextAllocationStrategy=types.SimpleNamespace(USER_MANAGED="ours"),
            float32="float",
            float16="half",
            bfloat16="bf16",
            int32="int",
        )


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    stream = types.SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.usefixtures("no_card")
def test_engine_has_a_context_per_shape_and_inputs_by_number():
    trt = StubTensorRT()
    wanted = [EngineInput(torch.float16, (2, 4), (4, 4), (8, 4), CPU)] * 11
    engine = TensorRTEngine(trt, b"plan", wanted, [torch.float16])
    for size in (2, 5, 2):
        given = [torch.zeros(size, 4, dtype=torch.float16) for _ in wanted]
        (output,) = engine(*given)
        assert (tuple(output.shape), output.dtype) == ((size, 4), torch.float16)
        context = trt.contexts[size != 2]
        assert context.addresses == {
            **{f"input_{place}": tensor.data_ptr() for place, tensor in enumerate(given)},
            "output0": output.data_ptr(),
        }
        assert context.memory[-1][1] == 1000
    assert [context.runs for context in trt.contexts] == [2, 1]
    with pytest.raises(RuntimeError, match="engine failed on inputs of"):
        engine(*[torch.zeros(2, 4, dtype=torch.float16)] * 11)


@pytest.mark.usefixtures("no_card")
def test_engine_says_what_failed_in_a_plugin(monkeypatch: pytest.MonkeyPatch):
    """Also where the library goes on as if nothing had happened."""
    plugins = PluginLibrary()
    plugins.install(monkeypatch)
    register_plugins(plugins.trt)

    def execute(self: StubContext, stream: int) -> bool:
        with contextlib.suppress(ValueError):
            plugin = plugins.plugins["mtpgraph::indexer_topk"]
            plugin.enqueue([torch.zeros(2, 4), torch.zeros(3, dtype=torch.int32)], {"topk": "2"})
        return True

    monkeypatch.setattr(StubContext, "execute_async_v3", execute)
    wanted = [EngineInput(torch.float16, (2, 4), (4, 4), (8, 4), CPU)] * 11
    engine = TensorRTEngine(StubTensorRT(), b"plan", wanted, [torch.float16])
    with pytest.raises(RuntimeError, match="a plugin of the TensorRT engine failed: row_lens must"):
        engine(*[torch.zeros(2, 4, dtype=torch.float16)] * 11)


@pytest.mark.usefixtures("no_card")
def test_engine_refuses_what_is_not_its_region():
    wanted = [EngineInput(torch.float16, (2, 4), (4, 4), (8, 4), CPU)] * 11
    with pytest.raises(RuntimeError, match="cannot read the engine"):
        TensorRTEngine(StubTensorRT(), b"other", wanted, [torch.float16])
    with pytest.raises(RuntimeError, match="the engine takes and gives"):
        TensorRTEngine(StubTensorRT("float"), b"plan", wanted, [torch.float16])
    with pytest.raises(RuntimeError, match="the engine takes and gives"):
        TensorRTEngine(StubTensorRT(), b"plan", wanted[1:], [torch.float16])


def test_key_is_that_of_the_card_and_not_of_its_place():
    """The processes of one host, each with a card of its own, find one another's engines."""
    keys = {
        engine_key(
            region(),
            [EngineInput(dtype, (2, DIM), (4, DIM), (8, DIM), torch.device("cuda", place))],
            card,
            b"passes",
        )
        for place in range(2)
        for dtype in (torch.float16, torch.bfloat16)
        for card in ("a card", "another")
    }
    assert len(keys) == 4
