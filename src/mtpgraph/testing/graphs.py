"""Assertions on what Dynamo makes of a function: graphs, breaks, recompiles, host syncs."""

import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..compile_passes import _compat
from ._common import counted, fail, name_of, named, place_of, user_function
from .record import Problem, Record, record
from .state import Snapshot


def assert_no_graph_breaks(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Record:
    """Every op of one call of ``fn`` is in one graph, or in graphs of functions it calls apart.

    The call runs, and what it writes is put back. Dynamo is reset before and after.

    Args:
        fn: a function, method or module; a compiled one is looked into
        *args, **kwargs: of the call

    Returns:
        what was compiled

    Raises:
        AssertionError: the trace left the graph; says for each place the line, why, and what to
            write instead. Also if nothing was compiled at all
    """
    __tracebackhide__ = True
    fn = user_function(fn)
    found = _trace(fn, [(args, kwargs)], dynamic=None)
    _refuse_breaks(fn, found)
    return found


def assert_no_recompiles(
    fn: Callable[..., Any],
    *calls: Any,
    max_recompiles: int = 0,
    dynamic: bool | None = None,
) -> Record:
    """After the first call, the others run what that compiled.

    The calls run one after the other, each going on from what the one before left; then what they
    wrote is put back. Dynamo is reset before and after.

    Args:
        fn: a function, method or module
        *calls: two or more, each a tuple of positional arguments, a dict of keyword arguments, or
            the one argument itself
        max_recompiles: so many are allowed: 1 for a size that Dynamo makes symbolic when it sees
            it change
        dynamic: as for ``torch.compile``

    Returns:
        what was compiled

    Raises:
        AssertionError: says for each recompile which check failed, the line that it goes back to,
            and what to write instead. Also if nothing was compiled at all
        ValueError: fewer than two calls
    """
    __tracebackhide__ = True
    fn = user_function(fn)
    if len(calls) < 2:
        raise ValueError(f"calls must hold at least two calls to compare, got {len(calls)}")
    found = _trace(fn, [_call(call) for call in calls], dynamic)
    _refuse_nothing(fn, found)
    if len(found.recompiles) > max_recompiles:
        title = (
            f"{name_of(fn)} was compiled again in {len(calls)} calls: "
            f"{counted(len(found.recompiles), 'recompile')}, {max_recompiles} allowed"
        )
        fail(title, found.recompiles)
    return found


def assert_whole_graph(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Record:
    """One call of ``fn`` is exactly one graph, which never makes the host wait.

    On CUDA tensors the graph is also captured as one CUDA graph and replayed while torch raises on
    every synchronisation. What the calls write is put back. Dynamo is reset before and after.

    Args:
        fn: a function, method or module
        *args, **kwargs: of the call

    Returns:
        what was compiled

    Raises:
        AssertionError: more than one graph, a graph break, a host sync, or a failed capture; with
            the line, the reason and what to write instead
    """
    __tracebackhide__ = True
    fn = user_function(fn)
    found = _trace(fn, [(args, kwargs)], dynamic=None)
    _refuse_breaks(fn, found)
    if len(found.graphs) != 1:
        apart = [
            Problem.at(
                "graph of its own",
                (graph.file, graph.line),
                f"{graph.function} was compiled as a graph of its own",
                "call it from the one function that is compiled, not from skipped or library code",
            )
            for graph in found.graphs
        ]
        fail(f"{name_of(fn)} makes {len(found.graphs)} graphs, expected one", apart)
    if found.host_syncs:
        title = f"{name_of(fn)} makes the host wait: {counted(len(found.host_syncs), 'host sync')}"
        fail(title, [Problem.of(finding) for finding in found.host_syncs])
    snapshot = Snapshot.take(fn, named(fn, args, kwargs))
    device = next((t.device for t in snapshot.tensors.values() if t.is_cuda), None)
    if device is not None:
        _replay(fn, args, kwargs, snapshot, device)
    return found


def _replay(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    snapshot: Snapshot,
    device: torch.device,
) -> None:
    """Capture the graph of a call as one CUDA graph and replay it without a synchronisation."""
    __tracebackhide__ = True
    _compat.reset_dynamo()
    compiled = torch.compile(fn, backend=_as_it_is, fullgraph=True, dynamic=False)
    stream = torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with torch.cuda.device(device), torch.no_grad():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    compiled(*args, **kwargs)
            torch.cuda.current_stream().wait_stream(stream)
            try:
                with torch.cuda.graph(graph, stream=stream):
                    compiled(*args, **kwargs)
                _set_sync_debug_mode("error")
                graph.replay()
            finally:
                _set_sync_debug_mode(before)
            torch.cuda.synchronize()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        problem = Problem.at(
            "capture",
            _place_in(error, fn),
            f"it cannot be captured and replayed as one CUDA graph: {reason}",
            "keep every tensor on the device and every shape independent of data; no .item(), "
            ".cpu(), nonzero() or tensors made on the host",
        )
        fail(f"{name_of(fn)} is no whole CUDA graph", [problem])
    finally:
        snapshot.restore()
        _compat.reset_dynamo()


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        # torch warns that the mode is a prototype, which -W error would make a failure of the test
        warnings.filterwarnings("ignore", message=".*[Ss]ynchronization debug mode.*")
        torch.cuda.set_sync_debug_mode(mode)


def _place_in(error: BaseException, fn: Callable[..., Any]) -> tuple[str, int]:
    frames = _compat.user_frames("".join(traceback.format_tb(error.__traceback__)))
    inside = [frame for frame in frames if "mtpgraph/testing" not in frame[0]]
    return inside[-1] if inside else place_of(fn)


def _as_it_is(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


def _call(given: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(given, dict):
        return (), given
    return (given if isinstance(given, tuple | list) else (given,)), {}


def _trace(
    fn: Callable[..., Any],
    calls: Sequence[tuple[Sequence[Any], dict[str, Any]]],
    dynamic: bool | None,
) -> Record:
    """Run calls of ``fn`` through Dynamo and put back what they wrote."""
    arguments = {
        f"{number}: {name}" if number else name: value
        for number, (args, kwargs) in enumerate(calls)
        for name, value in named(fn, args, kwargs).items()
    }
    snapshot = Snapshot.take(fn, arguments)
    _compat.reset_dynamo()
    try:
        with record(check=True) as found, warnings.catch_warnings():
            # Dynamo warns of some breaks as well: they are told in other words
            warnings.filterwarnings("ignore", module=r"torch\._dynamo")
            compiled = torch.compile(fn, backend=_as_it_is, dynamic=dynamic)
            for args, kwargs in calls:
                compiled(*args, **kwargs)
    finally:
        snapshot.restore()
        _compat.reset_dynamo()
    return found


def _refuse_breaks(fn: Callable[..., Any], found: Record) -> None:
    __tracebackhide__ = True
    if found.breaks:
        title = f"{name_of(fn)} leaves the graph: {counted(len(found.breaks), 'graph break')}"
        fail(title, found.breaks)
    _refuse_nothing(fn, found)


def _refuse_nothing(fn: Callable[..., Any], found: Record) -> None:
    """A check of nothing must not pass."""
    __tracebackhide__ = True
    if not found.graphs and not found.breaks:
        problem = Problem.at(
            "nothing compiled",
            place_of(fn),
            "Dynamo compiled nothing: the function holds no op on tensors, Dynamo skips it, or "
            "torch.compile is switched off (TORCH_COMPILE_DISABLE, a stance, "
            "torch.compiler.disable)",
            "pass the function that computes, and run the test with torch.compile switched on",
        )
        fail(f"{name_of(fn)} was not compiled", [problem])
