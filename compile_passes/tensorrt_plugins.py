"""TensorRT plugins of the twins in ``engine_ops``: shapes, implementation, and how to add them.

Written against quick-deploy plugins, ``tensorrt.plugin``, whose implementation is Python that runs
when an engine does: the op is called on the memory and the stream that TensorRT gives, and launches
our kernels there. Recorded in a CUDA graph, a replay has the kernels alone.

torch-tensorrt makes plugins of custom ops itself, with a single result of the dtype of the first
input. Ours have int32 results of other inputs, or two results, so all three parts are made here.

Numbers are attributes in the form of text: of an int, TensorRT 10.15 makes an array of one element,
and an int of that again, which numpy has given up.
"""

import contextlib
import dataclasses
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .engine_ops import ENGINE_OPS, EngineOp

_NAMESPACE = "mtpgraph"
_registered: dict[Any, Exception | None] = {}


def register_plugins(trt: Any) -> None:
    """Make plugins of all ops known to TensorRT, and converters to torch-tensorrt, once.

    An engine with plugins can be loaded after that, too.

    Args:
        trt: the module ``tensorrt``

    Raises:
        Exception: the library does not take them
    """
    if trt not in _registered:
        try:
            _register_plugins(trt)
        except Exception as error:
            # what was registered cannot be again
            _registered[trt] = error
        else:
            _registered[trt] = None
    if (error := _registered[trt]) is not None:
        raise error


def _register_plugins(trt: Any) -> None:
    trtp = importlib.import_module("tensorrt.plugin")
    conversion = importlib.import_module("torch_tensorrt.dynamo.conversion")
    get_tensor = importlib.import_module(f"{conversion.__name__}.converter_utils").get_trt_tensor
    for name, op in ENGINE_OPS.items():
        plugin = f"{_NAMESPACE}::{name}"
        trtp.register(plugin)(_describe(op, trt, trtp))
        trtp.impl(plugin)(_implement(op, trt, trtp))
        create = getattr(getattr(trtp.op, _NAMESPACE), name)
        convert = _converter(op, create, get_tensor)
        conversion.dynamo_tensorrt_converter(op.twin, supports_dynamic_shapes=True)(convert)


def dtypes_of(trt: Any) -> dict[Any, torch.dtype]:
    """The dtypes that tensors of our engines have, by TensorRT's name for them."""
    return {
        trt.float32: torch.float32,
        trt.float16: torch.float16,
        trt.bfloat16: torch.bfloat16,
        trt.int32: torch.int32,
    }


@dataclasses.dataclass(frozen=True)
class _Described:
    """A tensor that has a shape, in expressions of TensorRT, and no data."""

    shape: tuple[Any, ...]
    dtype: torch.dtype


def _describe(op: EngineOp, trt: Any, trtp: Any) -> Callable[..., Any]:
    """The shape function of a plugin."""
    to_torch = dtypes_of(trt)
    to_trt = {dtype: name for name, dtype in to_torch.items()}

    def describe(*tensors: Any, **attributes: Any) -> tuple[Any, ...]:
        given: dict[str, Any] = {
            name: _Described(tuple(desc.shape_expr), to_torch[desc.dtype])
            for name, desc in zip(op.tensors, tensors, strict=True)
        }
        given |= {name: kind(attributes[name]) for name, kind in op.attributes.items()}
        return tuple(
            trtp.from_shape_expr(tuple(shape), dtype=to_trt[dtype])
            for shape, dtype in op.results(**given)
        )

    returned = tuple[(trtp.TensorDesc,) * len(op.twin._schema.returns)]
    return _signed(describe, _parameters(op, trtp.TensorDesc), returned)


def _implement(op: EngineOp, trt: Any, trtp: Any) -> Callable[..., None]:
    """What a plugin runs."""
    dtypes = dtypes_of(trt)

    def run(*args: Any, stream: int) -> None:
        *given, outputs = args
        try:
            with torch.no_grad(), _on_stream(stream):
                tensors = [_tensor(value, dtypes) for value in given[: len(op.tensors)]]
                texts = given[len(op.tensors) :]
                kinds = op.attributes.values()
                numbers = [kind(text) for kind, text in zip(kinds, texts, strict=True)]
                results = op.twin(*tensors, *numbers)
                results = (results,) if isinstance(results, Tensor) else results
                for output, result in zip(outputs, results, strict=True):
                    _tensor(output, dtypes).copy_(result)
        except Exception as error:
            # what becomes of it in between is the library's affair
            found = getattr(_local, "failed", None)
            if found is not None:
                found.append(error)
            raise

    parameters = _parameters(op, trtp.Tensor)
    outputs = tuple[(trtp.Tensor,) * len(op.twin._schema.returns)]
    return _signed(run, {**parameters, "outputs": outputs, "stream": int}, None)


def _converter(op: EngineOp, create: Callable[..., Any], get_tensor: Any) -> Callable[..., Any]:
    """How torch-tensorrt puts a plugin in the place of a twin.

    Args:
        create: makes the plugin, of tensors of TensorRT and attributes by name
        get_tensor: torch-tensorrt's own: makes constants of weights
    """
    names = [argument.name for argument in op.twin._schema.arguments]

    def convert(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        tensors = [get_tensor(ctx, given[n], f"{name}_{n}") for n in op.tensors]
        attributes = {n: repr(kind(given[n])) for n, kind in op.attributes.items()}
        layer = ctx.net.add_plugin(create(*tensors, **attributes), aot=False)
        if layer is None:
            raise RuntimeError(f"TensorRT makes no layer of the plugin for {target}")
        layer.name = f"[{target}]-[{name}]"
        outputs = [layer.get_output(i) for i in range(len(op.twin._schema.returns))]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    return convert


def _parameters(op: EngineOp, kind: Any) -> dict[str, Any]:
    return {**dict.fromkeys(op.tensors, kind), **dict.fromkeys(op.attributes, str)}


def _signed(call: Callable[..., Any], parameters: dict[str, Any], returned: Any) -> Any:
    """Give a function the signature that the library reads the plugin's off."""
    call.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in parameters.items()
        ],
        return_annotation=returned,
    )
    return call


_local = threading.local()


@contextlib.contextmanager
def failures() -> Iterator[list[Exception]]:
    """Exceptions of plugins that run inside, in this thread; the list fills as they are raised."""
    before = getattr(_local, "failed", None)
    _local.failed = found = []
    try:
        yield found
    finally:
        _local.failed = before


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Device memory of TensorRT, in the form that torch takes it."""

    __cuda_array_interface__: dict[str, Any]


_INTEGERS = {2: "<i2", 4: "<i4"}
"""Of as many bytes as an element: the interface has no name for bfloat16."""


def _tensor(tensor: Any, dtypes: dict[Any, torch.dtype]) -> Tensor:
    """A tensor over the memory of one of TensorRT, which is contiguous."""
    return _at(tensor.data_ptr, tuple(tensor.shape), dtypes[tensor.dtype])


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    kind = _INTEGERS[dtype.itemsize]
    interface = {"shape": shape, "typestr": kind, "data": (address, False), "version": 3}
    device = torch.device("cuda", torch.cuda.current_device())
    # without a device, it would be a copy on the host
    return torch.as_tensor(_Memory(interface), device=device).view(dtype)


def _on_stream(stream: int) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))
