"""The code of a step: compiled through Dynamo, and run over the buffers of padded batches.

Symbolic code serves every size, and static code one each. Both are observed wherever they first
run: whether the graph may serve the batch, what it writes, and how outputs follow the batch shows
in what a graph was given and what it gave. From then on they are called past Dynamo.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import _compat
from .backend import Artifact, build, build_graphed
from .direct import DirectCall
from .inputs import Batch
from .kind import Kind
from .options import Options
from .output_plan import OutputPlan, check_outputs
from .proofs import Observed, Proofs
from .prove_graph import NotProven, cannot_be_padded
from .shape import Shape, symbolic_shape
from .stats import Stats
from .tensorrt import FrozenWeights

# kinds of calls are few, and Dynamo's own limit is for code that nobody asked to compile
_RECOMPILE_LIMIT = 256

# a graph, what it was given and what it gave
_Observation = tuple[Artifact, Sequence[Any], Sequence[Any]]


class CompiledCode:
    """Compiles a step when it first runs on something new, and runs it.

    Attributes:
        frozen: weights that the code holds copies of
    """

    def __init__(self, fn: Callable[..., Any], options: Options, proofs: Proofs) -> None:
        self._options = options
        self._proofs = proofs
        # a backend of its own keeps the static code apart from the symbolic one in Dynamo's cache
        self._symbolic = torch.compile(fn, backend=self._backend, fullgraph=True, dynamic=False)
        self._static = torch.compile(
            fn, backend=self._static_backend, fullgraph=True, dynamic=False
        )
        self._unpadded = torch.compile(fn, backend=self._unpadded_backend, fullgraph=True)
        self._artifacts: list[Artifact] = []
        self.frozen: list[FrozenWeights] = []
        self._planned: set[Any] = set()
        self._observing: Observed | None = None
        self._observed: list[_Observation] = []

    def run(self, batch: Batch, kind: Kind, shape: Shape, *, blank: bool = False) -> Any:
        """Run over the buffers of a shape, past Dynamo once the code has run there.

        Args:
            batch: what else the step takes
            kind: that of the batch
            shape: whose buffers
            blank: they hold padding alone

        Raises:
            NotProven: padding may reach real rows
            ValueError: what the step does with its inputs or outputs does not go with padding
        """
        direct = kind.direct.get(shape)
        if direct is not None:
            return direct()
        outputs, (artifact, given, results) = self._run_observed(batch, kind, shape, blank)
        direct = DirectCall.learn(artifact.run, given, results, outputs)
        if direct is not None:
            kind.direct[shape] = direct
        return outputs

    def run_unpadded(self, bound: inspect.BoundArguments) -> Any:
        """Run a batch at its own size; on a GPU each size is a CUDA graph from its second call."""
        before = len(self._artifacts)
        with _compat.many_recompiles(_RECOMPILE_LIMIT):
            outputs = self._unpadded(*bound.args, **bound.kwargs)
        if len(self._artifacts) > before:
            self._planned.add("unpadded")
        return outputs

    def plan(self, batch: Batch, kind: Kind) -> OutputPlan:
        """How outputs follow the batch; learnt from a run of padding if need be."""
        if kind.plan is None:
            size = max(kind.variant.sizes[0], 2)
            size = kind.variant.symbolic_size(size, self._options.next_n)
            shape = symbolic_shape(size, size * self._options.next_n)
            kind.buffers_of(batch, shape).blank()
            self.learn(batch, kind, shape, blank=True)
        assert kind.plan is not None
        return kind.plan

    def learn(self, batch: Batch, kind: Kind, shape: Shape, *, blank: bool = False) -> Any:
        """Run symbolic code over the buffers of a shape, as ``run``, and read the plan off it."""
        outputs, (artifact, given, results) = self._run_observed(batch, kind, shape, blank)
        kind.plan = OutputPlan.learn(
            artifact.sizes,
            given,
            results,
            kind.buffers_of(batch, shape).tensors,
            batch.specs,
            outputs,
            kind.variant.multiple,
            kind.variant.proven,
        )
        return outputs

    def add_counts(self, total: Stats) -> None:
        """Add those of all compilations."""
        for artifact in self._artifacts:
            total.merge(artifact.stats)
        total.recompiles = len(self._artifacts) - len(self._planned)

    def _run_observed(
        self, batch: Batch, kind: Kind, shape: Shape, blank: bool
    ) -> tuple[Any, _Observation]:
        """Run through Dynamo; also what the graph was given and what it gave."""
        buffers = kind.buffers_of(batch, shape).tensors
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
            self._proofs.require(proofs, self._observing)
            # whatever is wrong with the step is said before it writes to a cache
            _check(artifact, args, self._observing)
            results = artifact.run(*args)
            self._observed.append((artifact, args, results))
            return results

        return run

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

    def _keep(self, artifact: Artifact) -> None:
        self._artifacts.append(artifact)
        if artifact.frozen is not None:
            self.frozen.append(artifact.frozen)


def _check(artifact: Artifact, given: Sequence[Any], observed: Observed) -> None:
    """What a graph writes is not a copy, and its outputs can be cut."""
    batch, kind, _, buffers, _ = observed
    _refuse_written(artifact, given, buffers)
    check_outputs(
        artifact.sizes, given, buffers, batch.specs, kind.variant.multiple, kind.variant.proven
    )
    statics = {id(tensor) for survey in batch.surveys for tensor in survey.tensors}
    kind.written |= {
        _compat.storage_key(value)
        for value, written in zip(given, artifact.in_place, strict=True)
        if written and id(value) in statics
    }
    kind.refuse_shared(batch.batched)


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
