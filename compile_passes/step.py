"""``mtpgraph.compile``: one compilation for every batch size, batches padded to a few sizes.

Padding happens outside of Dynamo: inputs that grow with the batch are copied into buffers of the
next size, the rest of a buffer holds padding, and outputs are cut back. On a GPU each size is one
CUDA graph over its buffers.
"""

import bisect
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from . import _compat
from .backend import Artifact, build
from .buffers import Buffers
from .capture import Graph, GraphTable, clone, device_of
from .direct import DirectCall
from .inputs import Batch, Batched, Static, check_specs, tensors_in
from .options import Options
from .output_plan import OutputPlan
from .stats import Stats


class _Shape(NamedTuple):
    """What a batch is padded to, and the code that serves it."""

    requests: int
    tokens: int
    static: bool = False


def _symbolic(requests: int, tokens: int) -> _Shape:
    """Two at least: lowering takes for granted that a symbolic size is not one."""
    return _Shape(max(requests, 2), max(tokens, 2))


# a graph, what it was given and what it gave
_Observation = tuple[Artifact, Sequence[Any], Sequence[Any]]


def compile(
    fn: Callable[..., Any],
    *,
    inputs: Mapping[str, Batched | Static | type[Static]] | None = None,
    **options: Any,
) -> "CompiledStep":
    """Compile a decode step once and serve every batch size with it.

    Args:
        fn: the step: plain PyTorch with the ops of this package, traceable as one graph. Padding
            must be harmless to it, which the ops are by contract
        inputs: for every argument of ``fn`` that holds tensors, :class:`Batched` or
            :class:`Static`; other arguments are constants, and each new value compiles anew
        **options: fields of :class:`Options`

    Returns:
        a callable with the signature of ``fn``. Runs without gradients. Outputs whose sizes follow
        the batch are cut to the real one. On a GPU they hold until the next call, unless
        ``clone_outputs`` is set

    Raises:
        ValueError: an unknown option or name, or ``inputs`` is missing
        TypeError: a value of the wrong kind
    """
    return CompiledStep(fn, inputs, Options.parse(options))


class CompiledStep:
    """A step that pads, runs compiled code, and cuts the outputs back. See :func:`compile`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Mapping[str, Batched | Static | type[Static]] | None,
        options: Options,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {fn!r}")
        self._signature = inspect.signature(fn)
        self._specs = check_specs(inputs, self._signature)
        self._batched = {k: v for k, v in self._specs.items() if isinstance(v, Batched)}
        self._options = options
        # a backend of its own keeps the static code apart from the symbolic one in Dynamo's cache
        self._symbolic = torch.compile(fn, backend=self._backend, fullgraph=True, dynamic=False)
        self._static = torch.compile(
            fn, backend=self._static_backend, fullgraph=True, dynamic=False
        )
        self._artifacts: list[Artifact] = []
        self._planned: set[Any] = set()
        self._observed: list[_Observation] | None = None
        self._direct: dict[Any, DirectCall] = {}
        self._plans: dict[Any, OutputPlan] = {}
        self._buffers: dict[Any, Buffers] = {}
        self._graphs: GraphTable | None = None
        self._stats = Stats()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on a batch of any size."""
        with torch.no_grad():
            batch = self._read(args, kwargs)
            plan = self._plan(batch)
            if batch.requests == batch.tokens == 0:
                empty = plan.empty()
                if empty is not None:
                    return empty
            size = self._size_of(batch)
            shape = self._shape_of(size) if size else _symbolic(batch.requests, batch.tokens)
            self._stats.calls[size] += 1
            self._stats.tokens += batch.tokens
            self._stats.padded_tokens += shape.tokens - batch.tokens
            graph = self._graph(batch, shape) if size else None
            self._buffers_of(batch, shape).fill(batch.batched)
            if graph is None:
                self._stats.eager_calls += 1
                outputs = self._run(batch, shape)
            else:
                self._stats.replays += 1
                outputs = graph.replay()
            outputs = plan.cut(outputs, batch.requests, batch.tokens)
            if size is None:
                self._forget(batch, shape)
            return _compat.tree_map(clone, outputs) if self._options.clone_outputs else outputs

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Compile, and on a GPU capture a CUDA graph of every size, largest first.

        Args:
            *args, **kwargs: what a call takes; a batch of any size shows dtypes and shapes. Its
                values are not used, caches and states keep theirs: only padding runs
        """
        with torch.no_grad():
            batch = self._read(args, kwargs)
            self._plan(batch)
            for size in reversed(self._options.sizes):
                shape = self._shape_of(size)
                if self._graph(batch, shape) is None:
                    self._buffers_of(batch, shape).blank()
                    self._run(batch, shape)

    def stats(self) -> Stats:
        """Counts so far, all compilations together."""
        total = Stats()
        total.merge(self._stats)
        for artifact in self._artifacts:
            total.merge(artifact.stats)
        total.recompiles = len(self._artifacts) - len(self._planned)
        return total

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        bound = self._signature.bind(*args, **kwargs)
        return Batch.read(bound, self._specs, self._options.next_n)

    def _size_of(self, batch: Batch) -> int | None:
        """The capture size that holds the batch; ``None`` above the largest."""
        needed = max(batch.requests, -(-batch.tokens // self._options.next_n))
        index = bisect.bisect_left(self._options.sizes, needed)
        return self._options.sizes[index] if index < len(self._options.sizes) else None

    def _shape_of(self, size: int) -> _Shape:
        tokens = size * self._options.next_n
        if size in self._options.specialize:
            return _Shape(size, tokens, static=True)
        return _symbolic(size, tokens)

    def _plan(self, batch: Batch) -> OutputPlan:
        """How outputs follow the batch, learnt as symbolic code runs on a batch of padding."""
        if batch.kind not in self._plans:
            size = self._options.sizes[0]
            shape = _symbolic(size, size * self._options.next_n)
            self._buffers_of(batch, shape).blank()
            outputs, (artifact, given, results) = self._run_observed(batch, shape)
            buffers = self._buffers_of(batch, shape).tensors
            _refuse_written(artifact, given, buffers)
            self._plans[batch.kind] = OutputPlan.learn(
                artifact.sizes, given, results, buffers, self._specs, outputs
            )
        return self._plans[batch.kind]

    def _graph(self, batch: Batch, shape: _Shape) -> Graph | None:
        """The CUDA graph of a shape over the caches where they lie; ``None`` if there is none."""
        device = device_of(list(batch.batched.values()))
        if device is None or self._options.cudagraph == "off" or device.is_capturing():
            return None
        if self._graphs is None:
            self._graphs = GraphTable(device, self._stats, self._options)
        return self._graphs.obtain(
            (shape, batch.kind),
            f"for {shape.requests} requests of {shape.tokens} tokens",
            list(tensors_in(batch.static)),
            lambda: self._run(batch, shape),
            # warm-up and recording run on padding: no cache or state may move on
            before=self._buffers_of(batch, shape).blank,
        )

    def _buffers_of(self, batch: Batch, shape: _Shape) -> Buffers:
        key = (shape, batch.kind)
        if key not in self._buffers:
            self._buffers[key] = Buffers(
                batch.batched,
                self._batched,
                shape.requests,
                shape.tokens,
                symbolic=not shape.static,
            )
        return self._buffers[key]

    def _forget(self, batch: Batch, shape: _Shape) -> None:
        """Sizes above the largest are many: their buffers do not stay."""
        self._buffers.pop((shape, batch.kind), None)
        self._direct.pop((shape, batch.kind), None)

    def _run(self, batch: Batch, shape: _Shape) -> Any:
        """Run compiled code over the buffers of a shape, past Dynamo once it has run there."""
        key = (shape, batch.kind)
        static = list(tensors_in(batch.static))
        direct = self._direct.get(key)
        if direct is not None and direct.serves(static):
            return direct()
        outputs, (artifact, given, results) = self._run_observed(batch, shape)
        direct = DirectCall.learn(artifact.run, given, results, static, outputs)
        self._direct.pop(key, None)
        if direct is not None:
            self._direct[key] = direct
        return outputs

    def _run_observed(self, batch: Batch, shape: _Shape) -> tuple[Any, _Observation]:
        """Run through Dynamo; also what the graph was given and what it gave."""
        compiled = self._static if shape.static else self._symbolic
        bound = batch.with_inputs(self._buffers_of(batch, shape).tensors)
        self._observed = []
        try:
            outputs = self._call(compiled, bound, (batch.kind, shape if shape.static else None))
            return outputs, self._observed[-1]
        finally:
            self._observed = None

    def _call(self, compiled: Callable[..., Any], bound: inspect.BoundArguments, key: Any) -> Any:
        before = len(self._artifacts)
        with _compat.symbolic_batch(recompile_limit=8 * (1 + len(self._options.sizes))):
            outputs = compiled(*bound.args, **bound.kwargs)
        if len(self._artifacts) > before:
            # the first compilation for a key is planned, a further one is a recompile
            self._planned.add(key)
        return outputs

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        artifact = build(gm, example_inputs, self._options)
        self._artifacts.append(artifact)

        def run(*args: Any) -> Any:
            results = artifact.run(*args)
            if self._observed is not None:
                self._observed.append((artifact, args, results))
            return results

        return run

    def _static_backend(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        return self._backend(gm, example_inputs)


def _refuse_written(
    artifact: Artifact, given: Sequence[Any], buffers: Mapping[str, Tensor]
) -> None:
    """A step must not write what is only a copy of the caller's input."""
    for value, written in zip(given, artifact.in_place, strict=True):
        for name, buffer in buffers.items():
            if written and value is buffer:
                raise ValueError(
                    f"inputs[{name!r}] must be Static or not be written by the step: a batched "
                    "input is copied, so the caller would not see it change"
                )
