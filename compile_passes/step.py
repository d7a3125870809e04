"""``mtpgraph.compile``: one compilation for every batch size, batches padded to a few sizes.

Padding happens outside of Dynamo: inputs that grow with the batch are copied into buffers of the
next size, the rest of a buffer holds padding, and outputs are cut back. On a GPU each size is one
CUDA graph over its buffers.
"""

import bisect
import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import _compat
from .backend import Artifact, build, build_graphed
from .buffers import Buffers
from .capture import Graph, GraphTable, clone, device_of, frozen_gc
from .direct import DirectCall
from .input_plan import InputPlan, Variant
from .inputs import Batch, Batched, Static
from .kind import Kind, Shape, symbolic_shape
from .options import Options
from .output_plan import OutputPlan, check_outputs
from .proofs import Observed, Proofs, is_of
from .prove_graph import NotProven, cannot_be_padded
from .replay import Replay, Replays, Served
from .stats import Stats
from .survey import Survey, Surveyor
from .tensorrt import FrozenWeights, require

# kinds of calls are few, and Dynamo's own limit is for code that nobody asked to compile
_RECOMPILE_LIMIT = 256

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
        fn: the step: plain PyTorch with the ops of this package, traceable as one graph. Where it
            is not proven that padding cannot reach real rows, a warning says why, and batches run
            at their own sizes. With ``inputs`` for every argument they are padded all the same,
            unless they are of sizes that the step does not take, like an odd number of tokens
            where it views them in pairs. Such a step is padded to those ``sizes`` whose tokens,
            ``next_n`` for each request, are whole groups
        inputs: arguments of ``fn`` that are :class:`Batched` or :class:`Static`. What it does not
            name is inferred at the first call, from what the ops of the step say of their
            arguments. Arguments without tensors are constants, and each new value compiles anew
        **options: fields of :class:`Options`

    Returns:
        a callable with the signature of ``fn``. Runs without gradients. Outputs whose sizes follow
        the batch are cut to the real one. On a GPU they hold until the next call, unless
        ``clone_outputs`` is set

    Raises:
        ValueError: an unknown option or name
        TypeError: a value of the wrong kind
        ModuleNotFoundError: ``engine="tensorrt"`` without torch-tensorrt
    """
    parsed = Options.parse(options)
    if parsed.engine == "tensorrt":
        require()
    return CompiledStep(fn, inputs, parsed)


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
        self._fn = fn
        self._signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = self._signature.parameters.values()
        # of a step that takes anything else, every call is bound
        plain = all(parameter.kind is positional for parameter in parameters)
        self._names = [parameter.name for parameter in parameters] if plain else []
        self._options = options
        self._stats = Stats()
        self._surveyor = Surveyor()
        self._inputs = InputPlan(fn, self._signature, inputs, options, self._stats, self._surveyor)
        self._proofs = Proofs(fn, self._inputs, self._buffers_of)
        # a backend of its own keeps the static code apart from the symbolic one in Dynamo's cache
        self._symbolic = torch.compile(fn, backend=self._backend, fullgraph=True, dynamic=False)
        self._static = torch.compile(
            fn, backend=self._static_backend, fullgraph=True, dynamic=False
        )
        self._unpadded = torch.compile(fn, backend=self._unpadded_backend, fullgraph=True)
        self._artifacts: list[Artifact] = []
        self._frozen: list[FrozenWeights] = []
        self._planned: set[Any] = set()
        self._observing: Observed | None = None
        self._observed: list[_Observation] = []
        self._kinds: dict[Any, Kind] = {}
        self._graphs: GraphTable | None = None
        self._replays = Replays(self._signature) if self._names else None
        self._busy = threading.Lock()

    @property
    def inputs(self) -> Mapping[str, Batched | Static]:
        """What each argument is to the batch: as declared, and from the first call as inferred."""
        return self._inputs.specs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on a batch of any size.

        Raises:
            RuntimeError: another thread is in a call of this step, whose buffers it has one of
        """
        # as _alone does it, without the cost of a context manager in every call
        self._enter()
        try:
            outputs = self._serve(args, kwargs)
            return _compat.tree_map(clone, outputs) if self._options.clone_outputs else outputs
        finally:
            self._busy.release()

    def _serve(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for weights in self._frozen:
            # a replay would not look
            weights.check()
        if self._replays is not None and not _compat.is_suspended():
            found = self._replays.find(args, kwargs)
            if found is not None and not self._is_capturing():
                return self._replay(*found)
        with torch.no_grad():
            if _compat.is_off():
                return self._fn(*args, **kwargs)
            bound = self._bind(args, kwargs)
            variant, surveys = self._inputs.settle(bound)
            return self._serve_proven(self._serve_as, self._serve_unproven, variant, bound, surveys)

    def _serve_proven(
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
            again = self._inputs.look_again(variant, bound, surveys) if error.of_graph else None
            if again is None:
                return unproven(error, variant, bound)
        # of what a second look found there is no third
        return self._serve_proven(serve, unproven, again, bound, surveys)

    def _serve_unproven(
        self, error: NotProven, variant: Variant, bound: inspect.BoundArguments
    ) -> Any:
        """Run a batch as it is whose graph is not proven, and say why."""
        if self._options.strict:
            self._inputs.report(variant, error.findings, padded=False)
        # what is wrong with the call itself, the step says first
        outputs = self._run_unpadded(bound)
        self._inputs.report(variant, error.findings, padded=False)
        return outputs

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
        if not _fits(batch, variant, self._options.next_n):
            return self._run_unpadded(bound)
        if not kind.serves(batch.requests, batch.tokens):
            if kind.against and self._options.strict:
                raise NotProven(kind.against)
            return self._run_unpadded(bound)
        size = self._size_of(batch, kind)
        if size is None and not _fits_exactly(batch, variant):
            return self._run_unpadded(bound)
        if batch.requests == batch.tokens == 0:
            empty = self._plan(batch, kind).empty()
            if empty is not None:
                for proof in list(kind.proofs.values())[:1]:
                    self._proofs.check_corner(batch, kind, proof)
                return empty
        if size is None:
            return self._run_exact(batch, kind)
        shape = self._shape_of(size, kind)
        if shape in kind.not_padded_to and not is_of(batch, shape):
            return self._run_unpadded(bound)
        return self._run_padded(batch, kind, shape, size)

    def _enter(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("a compiled step serves one call at a time, and is in one just now")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._busy.release()

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Compile, and on a GPU capture a CUDA graph of every size, largest first.

        Args:
            *args, **kwargs: what a call takes; a batch shows dtypes and shapes. Its values are not
                used, caches and states keep theirs: only padding runs. A step that is not padded
                is left to its calls

        Raises:
            ValueError: the batch has one request or token, which does not show what grows
        """
        with self._alone(), torch.no_grad():
            bound = self._bind(args, kwargs)
            variant, surveys = self._inputs.settle(bound)
            if not variant.pads:
                if not variant.examined:
                    raise ValueError(
                        "warm_up needs a batch of at least two requests and tokens, or inputs to "
                        f"say what grows, got {_shapes(bound)}"
                    )
                return

            def unproven(error: NotProven, variant: Variant, _: Any) -> None:
                self._inputs.report(variant, error.findings, padded=False)

            self._serve_proven(self._warm_up_as, unproven, variant, bound, surveys)

    def _warm_up_as(
        self, variant: Variant, bound: inspect.BoundArguments, surveys: Mapping[str, Survey]
    ) -> None:
        if not variant.pads or not variant.sizes:
            return
        batch, kind = self._read(bound, variant, surveys)
        if kind.against:
            return
        self._plan(batch, kind)
        with frozen_gc():
            for size in reversed(kind.variant.sizes):
                shape = self._shape_of(size, kind)
                try:
                    if self._graph(batch, kind, shape) is None:
                        self._buffers_of(batch, kind, shape).blank()
                        self._run(batch, kind, shape, blank=True)
                except NotProven as error:
                    if error.of_graph:
                        raise
                    self._inputs.report(variant, error.findings, padded=False)
        self._look_at_one(batch, kind)

    def _look_at_one(self, batch: Batch, kind: Kind) -> None:
        """Find out whether batches of one request are padded, before one comes."""
        next_n = self._options.next_n
        shape = self._shape_of(kind.variant.sizes[-1], kind)
        for tokens in dict.fromkeys((next_n, 1)):
            inputs = {}
            for name, value in self._buffers_of(batch, kind, shape).tensors.items():
                spec = batch.specs[name]
                inputs[name] = value.narrow(spec.dim, 0, spec.length(1, tokens)).contiguous()
            one = dataclasses.replace(batch, batched=inputs, requests=1, tokens=tokens)
            proof = kind.proofs.get(shape)
            if proof is not None and _fits(one, kind.variant, next_n):
                try:
                    self._proofs.check_corner(one, kind, proof)
                except NotProven as error:
                    self._inputs.report(kind.variant, error.findings, padded=False)

    def buffers(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Where the batched inputs of a call are read: written there, they need no copy.

        Args:
            *args, **kwargs: what a call takes; a batch of the size in question

        Returns:
            for each batched input, a tensor of its shape in front of the buffer of that size, to
            be filled and given to the call. A batch of the next size overwrites nothing in it

        Raises:
            ValueError: the batch is above the largest size, or the step is not padded
        """
        with self._alone(), torch.no_grad():
            bound = self._bind(args, kwargs)
            variant, surveys = self._inputs.settle(bound)
            read = self._read(bound, variant, surveys) if variant.pads and variant.sizes else None
            if read is None or read[1].against:
                raise ValueError("buffers need a step that is padded, see stats().findings")
            batch, kind = read
            size = self._size_of(batch, kind)
            if size is None:
                raise ValueError(
                    f"buffers are for at most {kind.variant.sizes[-1]} requests, got "
                    f"{max(batch.requests, -(-batch.tokens // self._options.next_n))}"
                )
            return self._buffers_of(batch, kind, self._shape_of(size, kind)).fronts(
                batch.requests, batch.tokens
            )

    def stats(self) -> Stats:
        """Counts so far, all compilations together."""
        total = Stats()
        total.merge(self._stats)
        for artifact in self._artifacts:
            total.merge(artifact.stats)
        total.recompiles = len(self._artifacts) - len(self._planned)
        return total

    def _replay(self, replay: Replay, args: Sequence[Any]) -> Any:
        served = replay.served
        self._count(served.size, served.tokens, served.padding)
        self._stats.replays += 1
        return replay.run(args)

    def _is_capturing(self) -> bool:
        return self._graphs is not None and self._graphs.device.is_capturing()

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        if kwargs or len(args) != len(self._names):
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return bound
        # what bind would come to, in a tenth of the time
        arguments: Any = dict(zip(self._names, args, strict=True))
        return inspect.BoundArguments(self._signature, arguments)

    def _read(
        self, bound: inspect.BoundArguments, variant: Variant, surveys: Mapping[str, Survey]
    ) -> tuple[Batch, Kind]:
        next_n = self._options.next_n
        batch = Batch.read(bound, variant.specs, self._surveyor, next_n, surveys)
        # what is known of calls may have turned out to be so of some alone, and is another variant
        key = variant, batch.kind
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = Kind(batch.surveys, variant)
        elif kind.moved(batch.surveys):
            kind.moves += 1
            # memory that was let go may be somebody else's by now
            kind.written.clear()
            kind.direct.clear()
            if self._replays is not None:
                self._replays.clear()
            if self._graphs is not None:
                self._graphs.release(lambda key: key[0] is kind)
        _refuse_shared(batch.batched, kind.written)
        return batch, kind

    def _run_unpadded(self, bound: inspect.BoundArguments) -> Any:
        """Run a batch at its own size; on a GPU each size is a CUDA graph from its second call."""
        self._stats.calls[None] += 1
        before = len(self._artifacts)
        with _compat.many_recompiles(_RECOMPILE_LIMIT):
            outputs = self._unpadded(*bound.args, **bound.kwargs)
        if len(self._artifacts) > before:
            self._planned.add("unpadded")
        return outputs

    def _size_of(self, batch: Batch, kind: Kind) -> int | None:
        """The capture size that holds the batch; ``None`` above the largest."""
        needed = max(batch.requests, -(-batch.tokens // self._options.next_n))
        index = bisect.bisect_left(kind.variant.sizes, needed)
        return kind.variant.sizes[index] if index < len(kind.variant.sizes) else None

    def _shape_of(self, size: int, kind: Kind) -> Shape:
        next_n = self._options.next_n
        if size in self._options.specialize:
            return Shape(size, size * next_n, "static")
        size = kind.variant.symbolic_size(size, next_n)
        return symbolic_shape(size, size * next_n)

    def _run_padded(self, batch: Batch, kind: Kind, shape: Shape, size: int | None = None) -> Any:
        padding = shape.tokens - batch.tokens
        captures = self._stats.captures
        graph = self._graph(batch, kind, shape)
        if (proof := kind.proofs.get(shape)) is not None:
            self._proofs.check_served(proof, batch, kind, shape)
        buffers = self._buffers_of(batch, kind, shape)
        values = list(batch.batched.values())
        if graph is None and kind.plan is None and shape.code == "symbolic":
            # the first batch itself shows how outputs follow it
            buffers.fill(values, batch.requests, batch.tokens)
            outputs = self._learn(batch, kind, shape)
            self._count(size, batch.tokens, padding)
            self._stats.eager_calls += 1
            return self._plan(batch, kind).cut(outputs, batch.requests, batch.tokens)
        plan = self._plan(batch, kind)
        buffers.fill(values, batch.requests, batch.tokens)
        if graph is None:
            outputs = self._run(batch, kind, shape)
            self._count(size, batch.tokens, padding)
            self._stats.eager_calls += 1
            return plan.cut(outputs, batch.requests, batch.tokens)
        self._count(size, batch.tokens, padding)
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

    def _count(self, size: int | None, tokens: int, padding: int) -> None:
        self._stats.calls[size] += 1
        self._stats.tokens += tokens
        self._stats.padded_tokens += padding

    def _run_exact(self, batch: Batch, kind: Kind) -> Any:
        """Run a batch above the largest size, without graph; such sizes are many and not kept."""
        shape = symbolic_shape(batch.requests, batch.tokens)._replace(code="exact")
        try:
            return self._run_padded(batch, kind, shape)
        finally:
            kind.buffers.pop(shape, None)
            kind.direct.pop(shape, None)
            kind.proofs.pop(shape, None)

    def _plan(self, batch: Batch, kind: Kind) -> OutputPlan:
        """How outputs follow the batch; learnt from a run of padding if need be."""
        if kind.plan is None:
            size = max(kind.variant.sizes[0], 2)
            size = kind.variant.symbolic_size(size, self._options.next_n)
            shape = symbolic_shape(size, size * self._options.next_n)
            self._buffers_of(batch, kind, shape).blank()
            self._learn(batch, kind, shape, blank=True)
        assert kind.plan is not None
        return kind.plan

    def _learn(self, batch: Batch, kind: Kind, shape: Shape, *, blank: bool = False) -> Any:
        """Run symbolic code over the buffers of a shape and read the plan off it."""
        outputs, (artifact, given, results) = self._run_observed(batch, kind, shape, blank)
        buffers = self._buffers_of(batch, kind, shape).tensors
        kind.plan = OutputPlan.learn(
            artifact.sizes,
            given,
            results,
            buffers,
            batch.specs,
            outputs,
            kind.variant.multiple,
            kind.variant.proven,
        )
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
        self._plan(batch, kind)
        if self._graphs is None:
            self._graphs = GraphTable(device, self._stats, self._options)
        return self._graphs.obtain(
            (kind, shape),
            f"for {shape.requests} requests of {shape.tokens} tokens",
            kind.moves,
            lambda: self._run(batch, kind, shape, blank=True),
            size=shape.requests,
            # warm-up and recording run on padding: no cache or state may move on
            before=self._buffers_of(batch, kind, shape).blank,
            generators=[g for survey in batch.surveys for g in survey.generators],
        )

    def _buffers_of(self, batch: Batch, kind: Kind, shape: Shape) -> Buffers:
        if shape not in kind.buffers:
            kind.buffers[shape] = Buffers(
                batch.batched,
                batch.specs,
                shape.requests,
                shape.tokens,
                symbolic=shape.code != "static",
            )
        return kind.buffers[shape]

    def _run(self, batch: Batch, kind: Kind, shape: Shape, *, blank: bool = False) -> Any:
        """Run compiled code over the buffers of a shape, past Dynamo once it has run there."""
        direct = kind.direct.get(shape)
        if direct is not None:
            return direct()
        outputs, (artifact, given, results) = self._run_observed(batch, kind, shape, blank)
        direct = DirectCall.learn(artifact.run, given, results, outputs)
        if direct is not None:
            kind.direct[shape] = direct
        return outputs

    def _run_observed(
        self, batch: Batch, kind: Kind, shape: Shape, blank: bool
    ) -> tuple[Any, _Observation]:
        """Run through Dynamo; also what the graph was given and what it gave."""
        buffers = self._buffers_of(batch, kind, shape).tensors
        compiled = self._static if shape.code == "static" else self._symbolic
        key = (kind, shape if shape.code == "static" else None)
        self._observing = Observed(batch, kind, shape, buffers, blank)
        try:
            outputs = self._call(compiled, batch.with_inputs(buffers), key)
            _refuse_stored(self._observed[-1], outputs)
            return outputs, self._observed[-1]
        except (_compat.FakeRunError, _compat.FixedSizeError) as error:
            if kind.variant.declared:
                raise
            kind.against = (cannot_be_padded(error),)
            raise NotProven(kind.against, of_graph=True) from error
        finally:
            self._observing = None
            self._observed.clear()

    def _call(self, compiled: Callable[..., Any], bound: inspect.BoundArguments, key: Any) -> Any:
        before = len(self._artifacts)
        with _compat.symbolic_batch(_RECOMPILE_LIMIT):
            outputs = compiled(*bound.args, **bound.kwargs)
        if len(self._artifacts) > before:
            # the first compilation for a key is planned, a further one is a recompile
            self._planned.add(key)
        return outputs

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        observed = self._observing
        assert observed is not None
        proofs = self._proofs.of_graph(gm, example_inputs, observed)
        # what is not proven need not be compiled
        self._proofs.require(proofs, observed)
        artifact = build(gm, example_inputs, self._options)
        self._keep(artifact)

        def run(*args: Any) -> Any:
            if self._observing is None:
                return artifact.run(*args)
            batch, kind, _, buffers, _ = self._observing
            self._proofs.require(proofs, self._observing)
            # whatever is wrong with the step is said before it writes to a cache
            _refuse_written(artifact, args, buffers)
            check_outputs(
                artifact.sizes,
                args,
                buffers,
                batch.specs,
                kind.variant.multiple,
                kind.variant.proven,
            )
            statics = {id(tensor) for survey in batch.surveys for tensor in survey.tensors}
            kind.written |= {
                _compat.storage_key(value)
                for value, written in zip(args, artifact.in_place, strict=True)
                if written and id(value) in statics
            }
            _refuse_shared(batch.batched, kind.written)
            results = artifact.run(*args)
            self._observed.append((artifact, args, results))
            return results

        return run

    def _keep(self, artifact: Artifact) -> None:
        self._artifacts.append(artifact)
        if artifact.frozen is not None:
            self._frozen.append(artifact.frozen)

    def _static_backend(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        return self._backend(gm, example_inputs)

    def _unpadded_backend(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        artifact = build_graphed(gm, example_inputs, self._options, whole=True)
        self._keep(artifact)
        return artifact


def _fits(batch: Batch, variant: Variant, next_n: int) -> bool:
    """Padding can stand behind the tokens of a batch: they are whole groups, if they must be.

    Of a batch that they are not, the step itself has to say what comes of it.
    """
    counts_tokens = any(batch.specs[name].per == "token" for name in batch.batched)
    if variant.uniform and counts_tokens and batch.tokens != batch.requests * next_n:
        return False
    if not variant.limits.allow(batch.requests, batch.tokens, variant.tables):
        return False
    return not counts_tokens or batch.tokens % variant.multiple == 0


def _fits_exactly(batch: Batch, variant: Variant) -> bool:
    """Symbolic code serves a batch without padding: it has more than one of what is counted."""
    if variant.uniform or variant.multiple > 1:
        return batch.requests > 1 and batch.tokens >= 2 * variant.multiple
    return variant.limits.allow_padded(max(batch.requests, 2), max(batch.tokens, 2), variant.tables)


def _shapes(bound: inspect.BoundArguments) -> str:
    """Shapes of the tensors among the arguments, for a message."""
    return ", ".join(
        f"{name} {list(value.shape)}"
        for name, value in bound.arguments.items()
        if isinstance(value, Tensor)
    )


def _refuse_shared(batched: Mapping[str, Tensor], written: set[int]) -> None:
    """A batched input is a copy: it would not see what the step writes to memory it shares."""
    for name, value in batched.items() if written else ():
        if _compat.storage_key(value) in written:
            raise ValueError(
                f"{name} must not share memory with what the step writes, got a view of it: "
                "a batched input is copied before the step runs"
            )


def _refuse_stored(observed: _Observation, outputs: Any) -> None:
    """What a padded step computes must be in what it returns: nothing else could be cut.

    Where the step was looked into, it is not padded for that. A call of another kind, or with other
    values in Python, may store what that one did not.
    """
    _, given, results = observed
    leaves = _compat.tree_leaves(outputs)
    returned = {id(leaf) for leaf in leaves}
    known = {id(value) for value in (*given, *results)}
    if any(id(leaf) not in known for leaf in leaves if leaf is not None and type(leaf) is not str):
        return  # what an output was made of is not known here
    for value in results:
        if isinstance(value, Tensor) and id(value) not in returned:
            raise ValueError(
                "the step must not store tensors of the batch in what outlives it, got one of "
                f"shape {list(value.shape)} with padding in it: return it"
            )


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
