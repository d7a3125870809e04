"""What the calls of a step have in common, and what a batch is padded to."""

import dataclasses
import operator
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .buffers import Buffers
from .direct import DirectCall
from .input_plan import Variant
from .output_plan import OutputPlan
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
    """

    surveys: list[Survey]
    variant: Variant
    moves: int = 0
    plan: OutputPlan | None = None
    buffers: dict[Shape, Buffers] = dataclasses.field(default_factory=dict)
    direct: dict[Shape, DirectCall] = dataclasses.field(default_factory=dict)
    written: set[int] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self._places = self._now()

    def moved(self, surveys: list[Survey]) -> bool:
        """Take over the surveys of a call; true if a cache lies elsewhere than in the last."""
        if all(map(operator.is_, self.surveys, surveys)):
            return False
        self.surveys = surveys
        before, self._places = self._places, self._now()
        return before != self._places

    def _now(self) -> list[tuple[Any, ...]]:
        return [_place(tensor) for survey in self.surveys for tensor in survey.tensors]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
