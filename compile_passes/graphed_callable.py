"""CUDA graphs behind the backend alone, where nobody says which inputs are caches."""

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .capture import Graph, GraphDevice, GraphTable, clone
from .options import Options
from .stats import Stats

# larger inputs are used by address: a copy of a cache in every step would cost more than the graph
_COPY_LIMIT_BYTES = 1 << 20
# a caller whose shapes hardly come twice gains nothing from graphs
_SHAPE_LIMIT = 128


class GraphedCallable:
    """Compiled code of one Dynamo graph, one CUDA graph for each combination of shapes.

    The first call of a combination runs the code as it is, which is also the warm-up; the second
    records. Outputs hold until the next call, or are copies under ``clone_outputs``. What the
    traced function stores in Python objects is a copy always: it may be kept for long.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        device: GraphDevice,
        in_place: Sequence[bool],
        stats: Stats,
        options: Options,
        stored: Collection[int] = (),
    ) -> None:
        """``stored`` are the outputs that are left in Python objects."""
        self._run = run
        self._in_place = in_place
        self._stats = stats
        self._options = options
        self._stored = stored
        self._table = GraphTable(device, stats, options)
        self._buffers: dict[Any, list[Any]] = {}
        self._seen: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        key = tuple(map(_key, args))
        graph = self._graph(key, args)
        if graph is None:
            self._stats.eager_calls += 1
            return self._run(*args)
        for buffer, arg in zip(self._buffers[key], args, strict=True):
            if buffer is not None and buffer.data_ptr() != arg.data_ptr():
                buffer.copy_(arg, non_blocking=True)
        outputs = graph.replay()
        self._stats.replays += 1
        if self._options.clone_outputs:
            return clone(outputs)
        if self._stored:
            return [
                clone(output) if place in self._stored else output
                for place, output in enumerate(outputs)
            ]
        return outputs

    def _graph(self, key: Any, args: Sequence[Any]) -> Graph | None:
        if self._table.device.is_capturing():
            return None
        if key not in self._seen:
            self._admit(key)
            return None
        if key not in self._buffers:
            if len(self._buffers) >= _SHAPE_LIMIT:
                return None
            self._buffers[key] = [self._buffer(place, arg) for place, arg in enumerate(args)]
        buffers = self._buffers[key]
        given = [
            arg if buffer is None else buffer for buffer, arg in zip(buffers, args, strict=True)
        ]
        place = tuple(
            arg.data_ptr()
            for buffer, arg in zip(buffers, args, strict=True)
            if buffer is None and isinstance(arg, Tensor)
        )
        shapes = [list(arg.shape) for arg in args if isinstance(arg, Tensor)]
        what = f"for inputs of shapes {shapes}"
        return self._table.obtain(key, what, place, lambda: self._run(*given))

    def _admit(self, key: Any) -> None:
        """Remember a combination, unless they are so many that graphs cannot be the way."""
        if len(self._seen) < 2 * _SHAPE_LIMIT:
            self._seen.add(key)
            return
        message = (
            f"no more CUDA graphs: inputs came in over {len(self._seen)} combinations of shapes"
        )
        if message not in self._stats.fallbacks:
            self._stats.fallbacks.append(message)
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def _buffer(self, position: int, arg: Any) -> Tensor | None:
        """A place of the graph's own for an input that is copied, of its very strides."""
        if (
            not isinstance(arg, Tensor)
            or self._in_place[position]
            or isinstance(arg, torch.nn.Parameter)
            or arg.numel() * arg.element_size() > _COPY_LIMIT_BYTES
            # one element of memory for several of the tensor: nothing can be copied there
            or any(
                step == 0 and size > 1 for size, step in zip(arg.shape, arg.stride(), strict=True)
            )
        ):
            return None
        buffer = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
        return buffer.copy_(arg)


def _key(arg: Any) -> Any:
    """What a graph is for: the layout of a tensor, and the value of a number.

    The tracer passes a Python float as a tensor of the CPU without dimensions, which code reads
    while it is recorded.
    """
    if not isinstance(arg, Tensor):
        return arg
    if arg.dim() == 0 and arg.device.type == "cpu":
        # as text, -0.0 is not 0.0 and a NaN is itself
        return arg.dtype, repr(arg.item())
    return arg.shape, arg.stride(), arg.dtype
