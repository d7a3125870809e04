"""What the calls of a step have in common, and what a batch is padded to."""

import dataclasses
import operator
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .buffers import Buffers
from .direct import DirectCall
from .input_plan import Variant
from .inputs import Batch
from .output_plan import OutputPlan
from .prove_graph import Proof
from .report import Finding
from .size_limits import Limits
from .survey import Survey


class Shape(NamedTuple):
    """What a batch is padded to, and the code that serves it; exact is symbolic, and not kept."""

    requests: int
    tokens: int
    code: Literal["symbolic", "static", "exact"] = "symbolic"


def symbolic_shape(requests: int, tokens: int) -> Shape:
    """Two at least: the tracer takes for granted that a symbolic size is neither zero nor one."""
    return Shape(max(requests, 2), max(tokens, 2))


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
        """Take over the surveys of a call; true if a cache lies elsewhere than in the last."""
        if all(map(operator.is_, self.surveys, surveys)):
            return False
        self.surveys = surveys
        before, self._places = self._places, self._now()
        if [place[1:] for place in before] != [place[1:] for place in self._places]:
            # other shapes or dtypes are another graph
            self._forget()
        return before != self._places

    def serves(self, requests: int, tokens: int) -> bool:
        """A batch of this size may be padded, as far as the graphs of this kind tell."""
        return not self.against and all(
            limits.allow(requests, tokens, ()) for limits in self.limits
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
