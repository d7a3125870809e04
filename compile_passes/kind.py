"""What the calls of a step have in common: all that is found out once and kept for later ones."""

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from . import _compat
from .buffers import Buffers
from .direct import DirectCall
from .input_plan import Variant
from .inputs import Batch
from .output_plan import OutputPlan
from .prove_graph import Proof
from .report import Finding
from .shape import Shape
from .size_limits import Limits
from .survey import Survey


@dataclasses.dataclass(eq=False)
class Kind:
    """What calls of one kind share: all but the sizes of the batch and where the caches lie.

    Attributes:
        surveys: what lay in the arguments that do not grow, in the last call
        variant: what is known of such calls
        moves: how often caches and states have moved
        plan: how outputs follow the batch
        buffers, direct: inputs and calls of each shape
        written: storages of caches and states that the step writes, as far as it ran
        against: what was found in a graph that is not proven; padded while there is nothing
        proofs: of the graph that serves each shape
        limits: what these graphs hold for
        corners: what stands against serving batches of one, by graph and what there is one of
        not_padded_to: shapes of static code that serve batches of just their size
    """

    surveys: list[Survey]
    variant: Variant
    moves: int = 0
    plan: OutputPlan | None = None
    buffers: dict[Shape, Buffers] = dataclasses.field(default_factory=dict)
    direct: dict[Shape, DirectCall] = dataclasses.field(default_factory=dict)
    written: set[int] = dataclasses.field(default_factory=set)
    against: tuple[Finding, ...] = ()
    proofs: dict[Shape, Proof] = dataclasses.field(default_factory=dict)
    limits: set[Limits] = dataclasses.field(default_factory=set)
    corners: dict[tuple[Proof, Any], tuple[Finding, ...]] = dataclasses.field(default_factory=dict)
    not_padded_to: set[Shape] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self._places = self._now()

    def moved(self, surveys: list[Survey]) -> bool:
        """Take over the surveys of a call; true if a cache lies elsewhere than in the last.

        What was known of the places in the last call is forgotten then.
        """
        if all(map(operator.is_, self.surveys, surveys)):
            return False
        self.surveys = surveys
        before, self._places = self._places, self._now()
        if [place[1:] for place in before] != [place[1:] for place in self._places]:
            # other shapes or dtypes are another graph
            self._forget()
        if before == self._places:
            return False
        self.moves += 1
        # memory that was let go may be somebody else's by now
        self.written.clear()
        self.direct.clear()
        return True

    def serves(self, requests: int, tokens: int) -> bool:
        """A batch of this size may be padded, as far as the graphs of this kind tell."""
        return not self.against and all(
            limits.allow(requests, tokens, ()) for limits in self.limits
        )

    def buffers_of(self, batch: Batch, shape: Shape) -> Buffers:
        """The buffers of a shape; the first batch shows what they are to hold."""
        if shape not in self.buffers:
            self.buffers[shape] = Buffers(
                batch.batched,
                batch.specs,
                shape.requests,
                shape.tokens,
                symbolic=shape.code != "static",
            )
        return self.buffers[shape]

    def refuse_shared(self, batched: Mapping[str, Tensor]) -> None:
        """A batched input is a copy: it would not see what the step writes to memory it shares."""
        for name, value in batched.items() if self.written else ():
            if _compat.storage_key(value) in self.written:
                raise ValueError(
                    f"{name} must not share memory with what the step writes, got a view of it: "
                    "a batched input is copied before the step runs"
                )

    def _forget(self) -> None:
        self.against, self.plan = (), None
        for known in (self.proofs, self.limits, self.corners, self.not_padded_to):
            known.clear()

    def _now(self) -> list[tuple[Any, ...]]:
        return [_place(tensor) for survey in self.surveys for tensor in survey.tensors]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def corner_of(batch: Batch) -> Any:
    """What a batch has none or one of, and which inputs do not lie densely: a trace may tell.

    ``None`` for a batch that is like any larger one.
    """
    units = {batch.specs[name].per for name in batch.batched}
    requests = batch.requests if "request" in units and batch.requests < 2 else None
    tokens = batch.tokens if "token" in units and batch.tokens < 2 else None
    loose = tuple(
        (name, tuple(sorted(range(value.dim()), key=value.stride)))
        for name, value in batch.batched.items()
        if not value.is_contiguous()
    )
    corner = requests, tokens, loose
    return None if corner == (None, None, ()) else corner
