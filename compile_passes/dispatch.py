"""Which way a call goes that no replay serves: padded to a size, in its own shape, or as it is.

A batch is padded where its graph is proven to keep padding away from real rows, and above the
largest size the same code runs it in its own shape. Whatever does not fit runs as it is, in code
that knows no padding.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .capture import frozen_gc
from .compiled_code import CompiledCode
from .input_plan import InputPlan, Variant
from .inputs import Batch, Batched, Static
from .kind import Kind
from .options import Options
from .padded_runs import PaddedRuns
from .proofs import Proofs
from .prove_graph import NotProven
from .replay import Replays
from .shape import fits, fits_exactly, is_of, shape_of, size_of
from .stats import Stats
from .survey import Survey, Surveyor


class Dispatcher:
    """Sends each call of a step its way.

    Attributes:
        inputs: what is known of the arguments
        code: what is compiled
        runs: what runs padded batches
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: inspect.Signature,
        inputs: Mapping[str, Batched | Static | type[Static]] | None,
        options: Options,
        stats: Stats,
        replays: Replays | None,
    ) -> None:
        self._options = options
        self._stats = stats
        self._surveyor = Surveyor()
        self.inputs = InputPlan(fn, signature, inputs, options, stats, self._surveyor)
        self._proofs = Proofs(fn, self.inputs)
        self.code = CompiledCode(fn, options, self._proofs)
        self.runs = PaddedRuns(self.code, self._proofs, options, stats, replays)

    def serve(self, bound: inspect.BoundArguments) -> Any:
        """Serve a call, defaults filled in."""
        variant, surveys = self.inputs.settle(bound)
        return self._by_proof(self._serve_as, self._serve_unproven, variant, bound, surveys)

    def warm_up(self, bound: inspect.BoundArguments) -> None:
        """Compile and record what calls like this one take.

        Raises:
            ValueError: the call does not show what grows
        """
        variant, surveys = self.inputs.settle(bound)
        if not variant.pads:
            if not variant.examined:
                raise ValueError(
                    "warm_up needs a batch of at least two requests and tokens, or inputs to "
                    f"say what grows, got {_shapes(bound)}"
                )
            return

        def unproven(error: NotProven, variant: Variant, _: Any) -> None:
            self.inputs.report(variant, error.findings, padded=False)

        self._by_proof(self._warm_up_as, unproven, variant, bound, surveys)

    def buffers(self, bound: inspect.BoundArguments) -> dict[str, Tensor]:
        """Where the batched inputs of a call are read.

        Raises:
            ValueError: such a batch is not padded to a size
        """
        variant, surveys = self.inputs.settle(bound)
        read = self._read(bound, variant, surveys) if variant.pads and variant.sizes else None
        if read is None or read[1].against:
            raise ValueError("buffers need a step that is padded, see stats().findings")
        batch, kind = read
        size = size_of(batch, variant.sizes, self._options.next_n)
        if size is None:
            raise ValueError(
                f"buffers are for at most {variant.sizes[-1]} requests, got "
                f"{max(batch.requests, -(-batch.tokens // self._options.next_n))}"
            )
        buffers = kind.buffers_of(batch, shape_of(size, variant, self._options))
        return buffers.fronts(batch.requests, batch.tokens)

    def _by_proof(
        self,
        serve: Callable[[Variant, inspect.BoundArguments, Mapping[str, Survey]], Any],
        unproven: Callable[[NotProven, Variant, inspect.BoundArguments], Any],
        variant: Variant,
        bound: inspect.BoundArguments,
        surveys: Mapping[str, Survey],
    ) -> Any:
        """``serve`` a call by its variant, or by what a second look finds; else ``unproven``."""
        try:
            return serve(variant, bound, surveys)
        except NotProven as error:
            again = self.inputs.look_again(variant, bound, surveys) if error.of_graph else None
            if again is None:
                return unproven(error, variant, bound)
        # of what a second look found there is no third
        return self._by_proof(serve, unproven, again, bound, surveys)

    def _serve_as(
        self, variant: Variant, bound: inspect.BoundArguments, surveys: Mapping[str, Survey]
    ) -> Any:
        """Serve a call by what is known of it.

        Raises:
            NotProven: nothing has run, and the batch is to run as it is
        """
        if not variant.pads or not variant.sizes:
            return self._run_unpadded(bound)
        batch, kind = self._read(bound, variant, surveys)
        if not fits(batch, variant, self._options.next_n):
            return self._run_unpadded(bound)
        if not kind.serves(batch.requests, batch.tokens):
            if kind.against and self._options.strict:
                raise NotProven(kind.against)
            return self._run_unpadded(bound)
        size = size_of(batch, variant.sizes, self._options.next_n)
        if size is None and not fits_exactly(batch, variant):
            return self._run_unpadded(bound)
        if batch.requests == batch.tokens == 0:
            empty = self.runs.empty(batch, kind)
            if empty is not None:
                return empty
        if size is None:
            return self.runs.run_exact(batch, kind)
        shape = shape_of(size, variant, self._options)
        if shape in kind.not_padded_to and not is_of(batch, shape):
            return self._run_unpadded(bound)
        return self.runs.run(batch, kind, shape, size)

    def _serve_unproven(
        self, error: NotProven, variant: Variant, bound: inspect.BoundArguments
    ) -> Any:
        """Run a batch as it is whose graph is not proven, and say why."""
        if self._options.strict:
            self.inputs.report(variant, error.findings, padded=False)
        # what is wrong with the call itself, the step says first
        outputs = self._run_unpadded(bound)
        self.inputs.report(variant, error.findings, padded=False)
        return outputs

    def _run_unpadded(self, bound: inspect.BoundArguments) -> Any:
        self._stats.calls[None] += 1
        return self.code.run_unpadded(bound)

    def _warm_up_as(
        self, variant: Variant, bound: inspect.BoundArguments, surveys: Mapping[str, Survey]
    ) -> None:
        if not variant.pads or not variant.sizes:
            return
        batch, kind = self._read(bound, variant, surveys)
        if kind.against:
            return
        self.code.plan(batch, kind)
        with frozen_gc():
            for size in reversed(variant.sizes):
                try:
                    self.runs.warm_up(batch, kind, shape_of(size, variant, self._options))
                except NotProven as error:
                    if error.of_graph:
                        raise
                    self.inputs.report(variant, error.findings, padded=False)
        largest = shape_of(variant.sizes[-1], variant, self._options)
        self._proofs.check_one(batch, kind, largest, self._options.next_n)

    def _read(
        self, bound: inspect.BoundArguments, variant: Variant, surveys: Mapping[str, Survey]
    ) -> tuple[Batch, Kind]:
        next_n = self._options.next_n
        batch = Batch.read(bound, variant.specs, self._surveyor, next_n, surveys)
        return batch, self.runs.kind_of(batch, variant)


def _shapes(bound: inspect.BoundArguments) -> str:
    """Shapes of the tensors among the arguments, for a message."""
    return ", ".join(
        f"{name} {list(value.shape)}"
        for name, value in bound.arguments.items()
        if isinstance(value, Tensor)
    )
