"""What the calls of a step have in common, and what a batch is padded to."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .buffers import Buffers
from .direct import DirectCall
from .output_plan import OutputPlan


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
        tensors: caches and states of the last call
        moves: how often they have moved
        plan: how outputs follow the batch
        buffers, direct: inputs and calls of each shape
    """

    tensors: list[Tensor]
    moves: int = 0
    plan: OutputPlan | None = None
    buffers: dict[Shape, Buffers] = dataclasses.field(default_factory=dict)
    direct: dict[Shape, DirectCall] = dataclasses.field(default_factory=dict)


def same_places(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    if len(a) == len(b) and all(map(operator.is_, a, b)):
        return True
    return [_place(tensor) for tensor in a] == [_place(tensor) for tensor in b]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
