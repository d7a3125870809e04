"""Engines of torch-tensorrt: built through its exporter and converters, run by TensorRT itself.

Serves both flavours, standard and RTX. Imported when a step is compiled for TensorRT.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import _compat
from ._nodes import tensor_of
from .dense_regions import PRODUCTS, name_in_torch
from .engine_input import EngineInput
from .engine_ops import ENGINE_OPS
from .tensorrt_plugins import dtypes_of, failures, register_plugins


class TensorRTBuilder:
    """Builds engines with the installed torch-tensorrt.

    Raises:
        ImportError: it does not import
    """

    def __init__(self) -> None:
        try:
            # in this order: it chooses which TensorRT goes by that name
            torch_tensorrt = importlib.import_module("torch_tensorrt")
            trt = importlib.import_module("tensorrt")
        except ImportError:
            raise
        except Exception as error:
            # without a driver, for one
            cause = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ImportError(
                f"torch-tensorrt is installed but does not import: {cause}"
            ) from error
        self._torch_tensorrt: Any = torch_tensorrt
        self._trt: Any = trt

    @property
    def flavour(self) -> str:
        """ "rtx" or "standard"."""
        return "rtx" if _is_rtx(self._trt) else "standard"

    def plugins(self) -> frozenset[str]:
        """The ops that engines can hold: all that have a plugin, or none where the library says
        that it has no quick-deploy plugins, as the RTX flavour does.

        Raises:
            Exception: it has, and refuses ours
        """
        features = getattr(self._torch_tensorrt, "ENABLED_FEATURES", None)
        if not getattr(features, "qdp_plugin", False):
            return frozenset()
        register_plugins(self._trt)
        return frozenset(ENGINE_OPS)

    def fingerprint(self, device: torch.device) -> str:
        """Libraries, card and the settings of torch that an engine is built under."""
        name = "torch_tensorrt_rtx" if self.flavour == "rtx" else "torch_tensorrt"
        return " ".join(
            (
                name,
                _version(name) or str(getattr(self._torch_tensorrt, "__version__", "")),
                f"tensorrt {self._trt.__version__}",
                f"card {torch.cuda.get_device_name(device)} "
                f"{torch.cuda.get_device_capability(device)}",
                f"tf32 {_allows_tf32()}",
            )
        )

    def build(
        self, gm: fx.GraphModule, inputs: Sequence[EngineInput], outputs: Sequence[torch.dtype]
    ) -> bytes:
        """Export the region and convert it, all of it or nothing."""
        if self.flavour == "rtx" and not _allows_tf32() and _multiplies_float32(gm):
            # seen in 1.4, whatever its flag for TF32 says
            raise RuntimeError(
                "TensorRT-RTX multiplies float32 as TF32, and torch is not to: "
                "torch.set_float32_matmul_precision('high') permits it"
            )
        convert = self._torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
        program = export_region(gm, inputs)
        with _errors_of("torch_tensorrt") as errors, failures() as failed:
            try:
                engine = convert(
                    program,
                    arg_inputs=[self._input(wanted) for wanted in inputs],
                    device=inputs[0].device,
                    disable_tf32=not _allows_tf32(),
                    use_explicit_typing=True,
                )
            except Exception as error:
                # the converter logs the cause and stumbles over the result it does not have
                if not failed:
                    raise RuntimeError(_cause(errors) or str(error)) from error
                engine = b""
        if failed:
            # in a run that was to be timed
            raise RuntimeError(f"a plugin failed: {failed[0]}") from failed[0]
        if not engine:
            raise RuntimeError(_cause(errors) or "the converter gave no engine")
        return bytes(engine)

    def load(
        self, engine: bytes, inputs: Sequence[EngineInput], outputs: Sequence[torch.dtype]
    ) -> "TensorRTEngine":
        """Deserialize an engine for the device of its inputs."""
        return TensorRTEngine(self._trt, engine, inputs, outputs)

    def _input(self, wanted: EngineInput) -> Any:
        if wanted.is_cache:
            # the library would make an example of random numbers, on the host
            example = torch.empty(0, dtype=wanted.dtype)
            return self._torch_tensorrt.Input(
                shape=wanted.most, dtype=wanted.dtype, torch_tensor=example
            )
        if wanted.is_static:
            return self._torch_tensorrt.Input(shape=wanted.most, dtype=wanted.dtype)
        return self._torch_tensorrt.Input(
            min_shape=wanted.least,
            opt_shape=wanted.usual,
            max_shape=wanted.most,
            dtype=wanted.dtype,
        )


def export_region(gm: fx.GraphModule, inputs: Sequence[EngineInput]) -> Any:
    """The region as a ``torch.export`` program whose open dimensions have the ranges of inputs.

    A cache is open in its first dimension, too: there is no memory for an example of its size.

    Raises:
        whatever torch.export does where the region fixes a size
    """
    dim = torch.export.Dim
    inputs = [_small(wanted) if wanted.is_cache else wanted for wanted in inputs]
    shapes = tuple(
        {
            place: dim.DYNAMIC(min=least, max=most)  # pyright: ignore[reportCallIssue]
            for place, (least, most) in enumerate(zip(wanted.least, wanted.most, strict=True))
            if least != most
        }
        for wanted in inputs
    )
    examples = tuple(
        torch.zeros(wanted.usual, dtype=wanted.dtype, device=wanted.device) for wanted in inputs
    )
    with torch.no_grad():
        program = torch.export.export(gm, examples, dynamic_shapes=shapes, strict=False)
    # torch-tensorrt 2.11 has a rewrite of its own for this, and mixes up fake tensors in it
    fused = torch.ops.aten._fused_rms_norm.default
    if any(node.target == fused for node in program.graph.nodes):
        with warnings.catch_warnings():
            # of torch about itself
            warnings.simplefilter("ignore", FutureWarning)
            program = program.run_decompositions(_compat.decompositions([fused]))
    return program


def _small(cache: EngineInput) -> EngineInput:
    blocks, *sizes = cache.usual
    # torch takes for granted that a symbol is not 0 or 1
    least = (min(blocks, 2), *sizes)
    return dataclasses.replace(cache, least=least, usual=least)


class TensorRTEngine:
    """One engine on one device.

    A CUDA graph holds on to the execution context that it was recorded with, so every
    combination of input shapes has a context of its own. Their scratch memory comes from torch's
    allocator, call by call: under capture, from the pool of the graph.
    """

    def __init__(
        self,
        trt: Any,
        engine: bytes,
        inputs: Sequence[EngineInput],
        outputs: Sequence[torch.dtype],
    ) -> None:
        self._trt = trt
        self._device = inputs[0].device
        with torch.cuda.device(self._device):
            # an engine does not keep the runtime it came from, nor that its logger
            self._logger = trt.Logger(trt.Logger.ERROR)
            self._runtime = trt.Runtime(self._logger)
            self._engine = self._runtime.deserialize_cuda_engine(engine)
        if self._engine is None:
            raise RuntimeError("TensorRT cannot read the engine")
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        modes = {name: self._engine.get_tensor_mode(name) for name in names}
        self._inputs = [name for name in names if modes[name] == trt.TensorIOMode.INPUT]
        self._outputs = [name for name in names if modes[name] == trt.TensorIOMode.OUTPUT]
        self._inputs.sort(key=_number)
        self._outputs.sort(key=_number)
        self._dtypes = list(outputs)
        expected = [*(wanted.dtype for wanted in inputs), *outputs]
        found = [self._dtype(name) for name in (*self._inputs, *self._outputs)]
        if found != expected or len(self._inputs) != len(inputs):
            raise RuntimeError(f"the engine takes and gives {found}, not {expected}")
        self._contexts: dict[tuple[torch.Size, ...], Any] = {}

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Run on the current stream."""
        with torch.cuda.device(self._device):
            shapes = tuple(tensor.shape for tensor in inputs)
            context = self._contexts.get(shapes)
            if context is None:
                context = self._contexts[shapes] = self._make_context(shapes)
            outputs = [
                torch.empty(tuple(context.get_tensor_shape(name)), dtype=dtype, device=self._device)
                for name, dtype in zip(self._outputs, self._dtypes, strict=True)
            ]
            size = self._engine.device_memory_size_v2
            scratch = torch.empty(max(size, 256), dtype=torch.uint8, device=self._device)
            context.set_device_memory(scratch.data_ptr(), scratch.numel())
            for name, tensor in zip(
                (*self._inputs, *self._outputs), (*inputs, *outputs), strict=True
            ):
                context.set_tensor_address(name, tensor.data_ptr())
            stream = torch.cuda.current_stream().cuda_stream
            if torch.cuda.is_current_stream_capturing() and not _can_capture(context, stream):
                raise RuntimeError("the TensorRT engine cannot be recorded in a CUDA graph")
            with failures() as failed:
                ran = context.execute_async_v3(stream)
            if failed:
                raise RuntimeError(f"a plugin of the TensorRT engine failed: {failed[0]}") from (
                    failed[0]
                )
            if not ran:
                raise RuntimeError(f"the TensorRT engine failed on inputs of {list(shapes)}")
        return outputs

    def _make_context(self, shapes: Sequence[torch.Size]) -> Any:
        context = self._engine.create_execution_context(self._context_settings())
        if context is None:
            raise RuntimeError("TensorRT cannot make an execution context")
        for name, shape in zip(self._inputs, shapes, strict=True):
            if not context.set_input_shape(name, tuple(shape)):
                raise RuntimeError(f"the TensorRT engine refuses {name} of {list(shape)}")
        return context

    def _context_settings(self) -> Any:
        user_managed = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not _is_rtx(self._trt):
            return user_managed
        # RTX compiles kernels for a shape in a thread of its own, which would meet our recording,
        # and can record graphs of its own
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        eager = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
        config.dynamic_shapes_kernel_specialization_strategy = eager
        config.cuda_graph_strategy = self._trt.CudaGraphStrategy.DISABLED
        return config

    def _dtype(self, name: str) -> torch.dtype | None:
        return dtypes_of(self._trt).get(self._engine.get_tensor_dtype(name))


def _is_rtx(trt: Any) -> bool:
    # torch-tensorrt lets either go by the name of tensorrt; the module itself says what it is
    return trt.__name__.startswith("tensorrt_rtx")


def _can_capture(context: Any, stream: int) -> bool:
    """RTX says so; standard TensorRT can, or fails as it is recorded."""
    return not hasattr(context, "is_stream_capturable") or context.is_stream_capturable(stream)


def _number(name: str) -> int:
    """Inputs are called ``input_0`` and so on, outputs ``output0``."""
    digits = name.removeprefix("input_").removeprefix("output")
    if not digits.isdigit():
        raise RuntimeError(f"the engine has a tensor {name!r} that its region has not")
    return int(digits)


def _multiplies_float32(gm: fx.GraphModule) -> bool:
    products = [tensor_of(node) for node in gm.graph.nodes if name_in_torch(node) in PRODUCTS]
    return any(product is not None and product.dtype == torch.float32 for product in products)


def _allows_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def _cause(errors: Sequence[str]) -> str:
    """The last error that says something: the converter may introduce a cause that is empty."""
    return next((error for error in reversed(errors) if not error.rstrip().endswith(":")), "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def _errors_of(logger_name: str) -> Iterator[list[str]]:
    """First lines of the errors that a library logs, which stay off the user's log."""
    logger, errors = logging.getLogger(logger_name), []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage().partition("\n")[0])
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield errors
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
