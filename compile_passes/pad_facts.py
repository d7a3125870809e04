"""What integers and flags of a graph may hold, in real entries and in padding.

Nothing is said of floats that are computed: in padding they hold anything, NaN too.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from .spans import Span, truth_of


@dataclasses.dataclass(frozen=True)
class Fact:
    """What a tensor of integers or flags may hold.

    Attributes:
        real: its real entries
        pad: the others
        last: the last real entry along the one dimension that grows, if it is known
        inputs: names of the inputs that have a say in it
        copy_of: the input whose values it holds, unchanged
        counts: it holds 0, 1, 2, ..., real entries and padding alike
    """

    real: Span
    pad: Span
    last: Span | None = None
    inputs: frozenset[str] = frozenset()
    copy_of: str | None = None
    counts: bool = False

    def join(self, other: "Fact") -> "Fact":
        """What either may hold."""
        return Fact(
            self.real.join(other.real), self.pad.join(other.pad), None, self.inputs | other.inputs
        )


def any_of(dtype: torch.dtype, inputs: frozenset[str] = frozenset()) -> Fact:
    """Anything that the dtype can hold."""
    if dtype == torch.bool:
        span = Span(0, 1)
    elif dtype.is_floating_point or dtype.is_complex:
        span = Span()
    else:
        span = Span(0 if torch.iinfo(dtype).min == 0 else -math.inf)
    return Fact(span, span, None, inputs)


def constant(value: float) -> Fact:
    """One number throughout."""
    span = Span(value, value)
    return Fact(span, span, span)


def is_tracked(tensor: Tensor) -> bool:
    """Something is said of such a tensor."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def narrow_to(dtype: torch.dtype, span: Span, source: torch.dtype) -> Span:
    """A span after a cast."""
    if dtype == torch.bool:
        return truth_of(span)
    limits = torch.iinfo(dtype)
    if source == dtype or span.within(limits.min, limits.max):
        return span
    # a number that does not fit wraps; nothing that counts keys or rows is that large
    if span.low >= limits.min and limits.bits >= 32:
        return span
    return any_of(dtype).real


def scalar(value: Any) -> Fact | None:
    """A Python number as an operand."""
    return constant(float(value)) if isinstance(value, bool | int | float) else None
