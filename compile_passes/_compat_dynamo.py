"""Dynamo: how it traces, whether it does, and what it has compiled."""

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._decomp
import torch._dynamo
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported
from torch._guards import tracing
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from ._compat_stored import stored_by_python

# torch installs ``patch`` on its config modules when they are imported
_symbolic_config: Any = _config


class FixedSizeError(ValueError):
    """A step takes a size for a constant that is to grow with the batch."""


@contextlib.contextmanager
def symbolic_batch(recompile_limit: int) -> Iterator[None]:
    """Trace with a symbol of its own for each size, even for those that happen to be equal."""
    with _symbolic_config.patch(use_duck_shape=False), many_recompiles(recompile_limit):
        try:
            yield
        except ConstraintViolationError as error:
            raise FixedSizeError(
                "the step fixes a size that was declared to grow with the batch, so one "
                f"compilation cannot serve all: {error}"
            ) from error


@contextlib.contextmanager
def many_recompiles(recompile_limit: int) -> Iterator[None]:
    """A function may be compiled this often."""
    config = torch._dynamo.config
    with config.patch(recompile_limit=max(recompile_limit, config.recompile_limit)):
        try:
            yield
        except BackendCompilerFailed as error:
            # our own words need no wrapping in Dynamo's
            if isinstance(error.inner_exception, ValueError):
                raise error.inner_exception from None
            raise


def is_off() -> bool:
    """``torch.compile`` runs eager code just now: Dynamo is off, or the caller is being traced."""
    return torch._dynamo.config.disable or is_suspended()


def is_suspended() -> bool:
    """``is_off`` for a time: by a stance, or since the caller is being traced."""
    stance = torch._dynamo.eval_frame._stance.stance
    return stance == "force_eager" or torch.compiler.is_compiling()


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Ask the tracer for a symbol in this dimension."""
    torch._dynamo.mark_dynamic(tensor, dim)


def compiled_callables(function: Any) -> tuple[list[Any], int]:
    """What backends returned for the compiled versions of a function, and its graph breaks.

    ``function`` is what ``torch.compile`` returned or was given.
    """
    module = getattr(function, "_orig_mod", None)
    function = _unwrap(function if module is None else function.forward)
    if getattr(function, "__func__", None) is torch.nn.Module._wrapped_call_impl:
        # Dynamo compiles the module's own code behind torch's call machinery
        function = function.__self__.forward
    function = getattr(function, "__func__", function)
    return _compiled_callables(function.__code__, function.__globals__)


def _compiled_callables(code: types.CodeType, namespace: dict[str, Any]) -> tuple[list[Any], int]:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    found, breaks = [], 0
    for entry in reversed(_debug_get_cache_entry_list(code)):
        for name in entry.code.co_names:
            if name.startswith("__compiled_fn"):
                found.append(_unwrap(namespace.get(name)))
            elif name.startswith("__resume_at"):
                resumed, more = _compiled_callables(namespace[name].__code__, namespace)
                found += resumed
                breaks += 1 + more
    return found, breaks


def _unwrap(function: Any) -> Any:
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    return function


GraphBreak = Unsupported
"""What ``fullgraph=True`` raises where the graph would break."""


FakeRunError = TorchRuntimeError
"""What tracing raises where a call fails on its inputs: shapes that do not fit, for one."""


def uncompiled(function: Any) -> Any:
    """What the user wrote, where they hand over the result of ``torch.compile``."""
    return _unwrap(getattr(function, "_orig_mod", function))


def reset_dynamo() -> None:
    """Forget every compiled function, and which sizes were seen to change."""
    torch._dynamo.reset()


_STORED = "mtpgraph_stored"


def stored_in_trace(gm: fx.GraphModule) -> list[tuple[str | torch.SymInt, list[tuple[str, int]]]]:
    """``stored_by_python`` of a graph that ``trace_only`` returned."""
    return gm.meta.get(_STORED, [])


class _Traced(Exception):
    """Ends a compilation whose graph is all that was wanted."""


def trace_only(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    symbolic: list[Tensor],
) -> tuple[fx.GraphModule, Sequence[Any]]:
    """Dynamo's graph of a call and its inputs; nothing of the call is run.

    Args:
        function, args, kwargs: the call
        symbolic: tensors in it whose sizes become symbols, each one of its own; other sizes are
            constants

    Raises:
        whatever Dynamo does on a function that is not one graph
    """
    found: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def keep(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        gm.meta[_STORED] = stored_by_python()
        found.append((gm, example_inputs))
        raise _Traced

    for tensor in symbolic:
        for dim in range(tensor.dim()):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    config = torch._dynamo.config
    # an error that is suppressed would run the function after all
    with (
        _symbolic_config.patch(use_duck_shape=False),
        config.patch(suppress_errors=False, recompile_limit=max(256, config.recompile_limit)),
    ):
        try:
            torch.compile(function, backend=keep, fullgraph=True, dynamic=False)(*args, **kwargs)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _Traced):
                raise
    if not found:
        raise ValueError("the step calls no op on a tensor")
    # Dynamo remembers every backend, and with it what it refers to
    return found.pop()


def decompositions(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's own ways to compute ops by simpler ones, for ``run_decompositions``."""
    return torch._decomp.get_decompositions(ops)


def outside_of_tracing() -> contextlib.AbstractContextManager[Any]:
    """What is traced inside, such as an export, is no part of a compilation that goes on around."""
    return tracing(None)
