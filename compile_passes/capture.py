"""CUDA graphs over compiled code: record once, replay for every batch of the same shapes.

A graph reads and writes fixed addresses. Small inputs are copied into buffers of the graph's own;
caches and states are used where they lie, and a graph whose caches have moved is recorded again.

``GraphDevice`` is what a device must offer; tests put an emulation in its place.
"""

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .options import Options
from .pages import SharedBytesError
from .prove_graph import NotProven
from .stats import Stats

# a caller that hands over new caches in every step gains nothing from graphs
_RECAPTURE_LIMIT = 8


class Graph(Protocol):
    """A recorded run.

    Attributes:
        num_bytes: device memory that it took
    """

    num_bytes: int

    def replay(self) -> Any:
        """Run again on the same addresses; returns the outputs, at the same addresses too."""
        ...


class GraphDevice(Protocol):
    """Records graphs."""

    def is_capturing(self) -> bool:
        """The caller records a graph of its own just now."""
        ...

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Run once as the recording will: compiles kernels, creates handles, fills allocators."""
        ...

    def capture(self, run: Callable[[], Any], generators: Sequence[torch.Generator]) -> Graph:
        """Record ``run``, which is not to take effect before the first replay."""
        ...


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` and what it writes."""

    def __init__(self, graph: "torch.cuda.CUDAGraph", outputs: Any, num_bytes: int) -> None:
        self._graph = graph
        self._outputs = outputs
        self.num_bytes = num_bytes

    def replay(self) -> Any:
        self._graph.replay()
        return self._outputs


class CudaDevice:
    """Graphs of one CUDA device, all in one memory pool and recorded on one stream.

    Graphs that share a pool may reuse each other's memory: they must not run at the same time, and
    the outputs of one hold until the next one runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._stream = torch.cuda.Stream(device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def warm_up(self, run: Callable[[], Any]) -> None:
        with self._on_own_stream():
            run()

    def capture(self, run: Callable[[], Any], generators: Sequence[torch.Generator]) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            if generator.device.type == "cuda":
                graph.register_generator_state(generator)
        # recording gives back what the allocator has spare; that is not the graph's
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        if not self._graphs:
            # the allocator takes no graph into a pool that its last graph has left, as long as
            # somebody holds memory of it
            self._pool = torch.cuda.graph_pool_handle()
        with (
            self._on_own_stream(),
            frozen_gc(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
        ):
            outputs = run()
        recorded = CudaGraph(graph, outputs, free - torch.cuda.mem_get_info(self.device)[0])
        self._graphs.add(recorded)
        return recorded

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)


_devices: dict[torch.device, CudaDevice] = {}


def device_of(values: Sequence[Any]) -> GraphDevice | None:
    """Where graphs over these inputs are recorded; ``None`` off the GPU."""
    for value in values:
        if isinstance(value, Tensor) and value.device.type == "cuda":
            if value.device not in _devices:
                _devices[value.device] = CudaDevice(value.device)
            return _devices[value.device]
    return None


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """No garbage collection inside: freeing a kernel or a tensor would spoil the recording.

    Collects once on entry. Inside of another one that is quick, for what was there is frozen.
    """
    enabled = gc.isenabled()
    # what a service froze itself is not ours to thaw
    freezes = gc.get_freeze_count() == 0
    gc.collect()
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if enabled:
            gc.enable()


class GraphTable:
    """Graphs by key, each recorded over tensors at one place.

    ``obtain`` records what is missing or has moved. A key whose recording failed, or that moves in
    one call after the other, is given up with one warning, or with an error under ``strict``.
    """

    def __init__(self, device: GraphDevice, stats: Stats, options: Options) -> None:
        self.device = device
        self._stats = stats
        self._options = options
        self._graphs: dict[Any, tuple[Graph | None, Any]] = {}
        self._moves: dict[Any, int] = {}
        self._given_up: set[Any] = set()

    def obtain(
        self,
        key: Any,
        what: str,
        place: Any,
        run: Callable[[], Any],
        *,
        size: int | None = None,
        before: Callable[[], None] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> Graph | None:
        """The graph of ``key`` for tensors at ``place``; ``None`` when given up.

        Args:
            key: what the graph is for
            what: the same in words, for messages
            place: changes when a tensor that the graph uses by address has moved
            run: what to record
            size: what it is padded to, in requests
            before: makes a run harmless; with it ``run`` is warmed up first
            generators: random generators that the run draws from, besides the default one
        """
        if key in self._given_up:
            return None
        if key in self._graphs:
            graph, recorded = self._graphs[key]
            if recorded == place:
                self._moves[key] = 0
                assert graph is not None
                return graph
            if self._options.debug:
                raise RuntimeError(
                    f"inputs in use by address moved since the CUDA graph {what} was recorded"
                )
            del self._graphs[key]
            self._moves[key] = self._moves.get(key, 0) + 1
            self._stats.recaptures += 1
            if self._moves[key] > _RECAPTURE_LIMIT:
                cause = f"its caches moved in {self._moves[key]} calls on end"
                return self._give_up(key, what, cause, None)
        try:
            if before is not None:
                before()
                self.device.warm_up(run)
            graph = self.device.capture(run, generators)
        except (NotProven, SharedBytesError):
            # no fault of recording: such batches run as they are, such inputs not at all
            raise
        except Exception as error:
            return self._give_up(key, what, f"{type(error).__name__}: {error}", error)
        self._stats.captures += 1
        self._stats.graph_bytes[size] += graph.num_bytes
        self._graphs[key] = graph, place
        return graph

    def release(self, keys: Callable[[Any], bool]) -> None:
        """Let go of the memory of graphs that are to be recorded again."""
        for key, (_, place) in self._graphs.items():
            if keys(key):
                self._graphs[key] = None, place

    def _give_up(self, key: Any, what: str, cause: str, error: Exception | None) -> None:
        message = f"no CUDA graph {what}, running the compiled code: {cause}"
        if self._options.strict:
            raise RuntimeError(message) from error
        self._given_up.add(key)
        self._stats.fallbacks.append(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def clone(outputs: Any) -> Any:
    """Copies of the tensors in a list or tuple of outputs."""
    if isinstance(outputs, Tensor):
        return outputs.clone()
    if isinstance(outputs, list | tuple):
        return type(outputs)(map(clone, outputs))
    return outputs
