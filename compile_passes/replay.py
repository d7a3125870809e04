"""The shortest way through a step: a batch as large as one before, over a recorded graph.

The first calls find out what a batch is, pick its size and record. A ``Replay`` keeps what came of
that for one batch size. A later call that differs in the content of its tensors alone is one
comparison of its arguments, one copy into the buffers, and one launch.
"""

import dataclasses
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .buffers import Buffers
from .capture import Graph
from .inputs import Batch, mode
from .kind import Kind
from .output_plan import OutputPlan

_DTYPE = operator.attrgetter("dtype")

# stands for results that no graph gives
_NOTHING = object()

# of one batch size, with other constants or caches
_KEPT_EACH = 4
# batch sizes; ragged batches come in very many
_KEPT = 1024


@dataclasses.dataclass(frozen=True)
class Served:
    """What served a batch: a graph over buffers, whose results a plan cuts.

    Attributes:
        kind: the kind of the call
        size, padding: what the batch was padded to, in requests, and the tokens that this added
        requests, tokens: the batch
        graph, buffers, plan: what ran
        results, outputs: what the graph gave, and the same cut
    """

    kind: Kind
    size: int
    padding: int
    requests: int
    tokens: int
    graph: Graph
    buffers: Buffers
    plan: OutputPlan
    results: Any
    outputs: Any


class Replay:
    """Serves batches of one size, of one kind, over caches in one place.

    Of the batch that it was made from it keeps no tensor.
    """

    def __init__(self, served: Served, batch: Batch, names: Sequence[str]) -> None:
        """``names`` are the arguments of the step in order."""
        self.served = served
        self._moves = served.kind.moves
        self._mode = batch.mode
        self._places = [names.index(name) for name in batch.batched]
        self._types = [Tensor] * len(batch.batched)
        self._dtypes = list(map(_DTYPE, batch.batched.values()))
        self._devices = list(map(Tensor.get_device, batch.batched.values()))
        # a step may ask how its inputs lie, which the buffers do not tell
        self._dense = list(map(Tensor.is_contiguous, batch.batched.values()))
        others = [place for place, name in enumerate(names) if name not in batch.batched]
        self._surveys = list(zip(others, batch.surveys, strict=True))
        # cut once and for all; each call gets tensor objects of its own, over the same memory
        self._outputs = served.outputs
        self._results = served.results if _is_flat(served) else _NOTHING

    def fits(self, args: Sequence[Any]) -> bool:
        """These arguments, of the right shapes, are of this kind, over the same caches."""
        values = [args[place] for place in self._places]
        if (
            list(map(type, values)) != self._types
            or list(map(_DTYPE, values)) != self._dtypes
            or list(map(Tensor.get_device, values)) != self._devices
            or list(map(Tensor.is_contiguous, values)) != self._dense
            or self.served.kind.moves != self._moves
            or mode() != self._mode
        ):
            return False
        return all(survey.holds(args[place]) for place, survey in self._surveys)

    def run(self, args: Sequence[Any]) -> Any:
        """Fill the buffers, replay, cut."""
        served = self.served
        values = [args[place] for place in self._places]
        served.buffers.fill(values, served.requests, served.tokens)
        results = served.graph.replay()
        if results is not self._results:
            with torch.no_grad():
                return served.plan.cut(results, served.requests, served.tokens)
        if isinstance(self._outputs, Tensor):
            return self._outputs.detach()
        return tuple(map(Tensor.detach, self._outputs))


def _is_flat(served: Served) -> bool:
    """One tensor or a plain tuple of them, none in a buffer that the next call overwrites."""
    outputs = served.outputs if type(served.outputs) is tuple else (served.outputs,)
    return all(type(output) is Tensor for output in outputs) and not any(served.plan.copied)


class Replays:
    """The replays of a step, found by the sizes of a call's arguments."""

    def __init__(self, signature: inspect.Signature) -> None:
        """Every argument in the signature can be given by place."""
        self._names = list(signature.parameters)
        self._defaults = {name: p.default for name, p in signature.parameters.items()}
        self._found: dict[Any, list[Replay]] = {}

    def find(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Replay, Sequence[Any]] | None:
        """What serves a call with these arguments, and all of them in order."""
        if len(args) != len(self._names):
            rest = self._names[len(args) :]
            if any(name not in rest for name in kwargs):
                return None
            args = [*args, *[kwargs.get(name, self._defaults[name]) for name in rest]]
            if len(args) != len(self._names):
                return None
        elif kwargs:
            return None
        for replay in self._found.get(self._key(args), ()):
            if replay.fits(args):
                return replay, args
        return None

    def keep(self, batch: Batch, served: Served) -> None:
        """Serve calls like this one in the same way."""
        if len(self._found) >= _KEPT:
            self._found.clear()
        kept = self._found.setdefault(self._key(list(batch.bound.arguments.values())), [])
        kept.insert(0, Replay(served, batch, self._names))
        del kept[_KEPT_EACH:]

    def clear(self) -> None:
        """Caches have moved: let go of where they lay."""
        self._found.clear()

    def _key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([value.shape if isinstance(value, Tensor) else None for value in args])
