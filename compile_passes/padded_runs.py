"""Runs of padded batches: fill the buffers, replay a CUDA graph or run the code, cut the outputs.

What runs are kept by is the kind of the call and the shape that its batch is padded to. Where
caches have moved, what was recorded over them is let go.
"""

from typing import Any

from .capture import Graph, GraphTable, device_of
from .compiled_code import CompiledCode
from .input_plan import Variant
from .inputs import Batch
from .kind import Kind
from .options import Options
from .proofs import Proofs
from .replay import Replays, Served
from .shape import Shape, symbolic_shape
from .stats import Stats


class PaddedRuns:
    """Runs the code of a step over buffers, on a GPU as one CUDA graph for each shape."""

    def __init__(
        self,
        code: CompiledCode,
        proofs: Proofs,
        options: Options,
        stats: Stats,
        replays: Replays | None,
    ) -> None:
        """``replays`` takes down how later calls can be served; ``None`` if calls are not."""
        self._code = code
        self._proofs = proofs
        self._options = options
        self._stats = stats
        self._replays = replays
        self._kinds: dict[Any, Kind] = {}
        self._graphs: GraphTable | None = None

    def is_capturing(self) -> bool:
        """The caller records a graph of its own just now."""
        return self._graphs is not None and self._graphs.device.is_capturing()

    def kind_of(self, batch: Batch, variant: Variant) -> Kind:
        """What is known of calls like this one.

        Raises:
            ValueError: a batched input shares memory with what the step writes
        """
        # what is known of calls may have turned out to be so of some alone, and is another variant
        key = variant, batch.kind
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = Kind(batch.surveys, variant)
        elif kind.moved(batch.surveys):
            if self._replays is not None:
                self._replays.clear()
            if self._graphs is not None:
                self._graphs.release(lambda key: key[0] is kind)
        kind.refuse_shared(batch.batched)
        return kind

    def warm_up(self, batch: Batch, kind: Kind, shape: Shape) -> None:
        """Compile for a shape and record its graph; only padding runs.

        Raises:
            NotProven: batches of the shape are to run as they are
        """
        if self._graph(batch, kind, shape) is None:
            kind.buffers_of(batch, shape).blank()
            self._code.run(batch, kind, shape, blank=True)

    def run(self, batch: Batch, kind: Kind, shape: Shape, size: int | None = None) -> Any:
        """Run a batch padded to a shape, which is that of a size, if it is kept.

        Raises:
            NotProven: nothing has run, and the batch is to run as it is
        """
        padding = shape.tokens - batch.tokens
        captures = self._stats.captures
        graph = self._graph(batch, kind, shape)
        if (proof := kind.proofs.get(shape)) is not None:
            self._proofs.check_served(proof, batch, kind, shape)
        buffers = kind.buffers_of(batch, shape)
        values = list(batch.batched.values())
        if graph is None and kind.plan is None and shape.code == "symbolic":
            # the first batch itself shows how outputs follow it
            buffers.fill(values, batch.requests, batch.tokens)
            outputs = self._code.learn(batch, kind, shape)
            self._stats.count_call(size, batch.tokens, padding)
            self._stats.eager_calls += 1
            return self._code.plan(batch, kind).cut(outputs, batch.requests, batch.tokens)
        plan = self._code.plan(batch, kind)
        buffers.fill(values, batch.requests, batch.tokens)
        if graph is None:
            outputs = self._code.run(batch, kind, shape)
            self._stats.count_call(size, batch.tokens, padding)
            self._stats.eager_calls += 1
            return plan.cut(outputs, batch.requests, batch.tokens)
        self._stats.count_call(size, batch.tokens, padding)
        self._stats.replays += 1
        results = graph.replay()
        outputs = plan.cut(results, batch.requests, batch.tokens)
        # a graph that was recorded just now may have moved, and counts as such
        if self._replays is not None and size is not None and captures == self._stats.captures:
            requests, tokens = batch.requests, batch.tokens
            served = Served(
                kind, size, padding, requests, tokens, graph, buffers, plan, results, outputs
            )
            self._replays.keep(batch, served)
        return outputs

    def run_exact(self, batch: Batch, kind: Kind) -> Any:
        """Run a batch above the largest size, without graph; such sizes are many and not kept."""
        shape = symbolic_shape(batch.requests, batch.tokens)._replace(code="exact")
        try:
            return self.run(batch, kind, shape)
        finally:
            kind.buffers.pop(shape, None)
            kind.direct.pop(shape, None)
            kind.proofs.pop(shape, None)

    def empty(self, batch: Batch, kind: Kind) -> Any | None:
        """Outputs of a batch of nothing; ``None`` if some output does not follow the batch.

        Raises:
            NotProven: a batch of nothing is not computed as larger ones are
        """
        outputs = self._code.plan(batch, kind).empty()
        if outputs is not None:
            for proof in list(kind.proofs.values())[:1]:
                self._proofs.check_corner(batch, kind, proof)
        return outputs

    def _graph(self, batch: Batch, kind: Kind, shape: Shape) -> Graph | None:
        """The CUDA graph of a shape over the caches where they lie; ``None`` if there is none."""
        device = device_of(list(batch.batched.values()))
        if (
            device is None
            or self._options.cudagraph == "off"
            or shape.code == "exact"
            or device.is_capturing()
        ):
            return None
        # recording runs the step: whatever is wrong with it is better said before
        self._code.plan(batch, kind)
        if self._graphs is None:
            self._graphs = GraphTable(device, self._stats, self._options)
        return self._graphs.obtain(
            (kind, shape),
            f"for {shape.requests} requests of {shape.tokens} tokens",
            kind.moves,
            lambda: self._code.run(batch, kind, shape, blank=True),
            size=shape.requests,
            # warm-up and recording run on padding: no cache or state may move on
            before=kind.buffers_of(batch, shape).blank,
            generators=[g for survey in batch.surveys for g in survey.generators],
        )
