"""Shapes that an engine is built for: one range for each dimension that follows the batch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import _compat
from ._nodes import tensor_of
from .options import Options


@dataclasses.dataclass(frozen=True)
class EngineInput:
    """One input of an engine.

    Attributes:
        dtype: its dtype
        least, usual, most: its smallest shape, the one that kernels are chosen for, its largest
        device: where it is
        bytes_of: the dtype of the bytes that come as int32 words
        is_cache: not to be copied
    """

    dtype: torch.dtype
    least: tuple[int, ...]
    usual: tuple[int, ...]
    most: tuple[int, ...]
    device: torch.device
    bytes_of: torch.dtype | None = None
    is_cache: bool = False

    def take(self, value: Tensor | int) -> Tensor | None:
        """What the engine takes for an input of its region, contiguous; ``None`` if the engine was
        not built for it.

        Args:
            value: the input; a size, of whose rows the engine reads none
        """
        if not isinstance(value, Tensor):
            tensor = torch.empty(value, dtype=self.dtype, device=self.device)
            return tensor if self.fits(tensor) else None
        if self.is_cache and not value.is_contiguous():
            return None
        if self.bytes_of is None:
            return value.contiguous() if self.fits(value) else None
        if value.dtype != self.bytes_of:
            return None
        value = value.contiguous()
        word = self.dtype.itemsize
        if value.shape[-1] % word or value.storage_offset() % word:
            return None
        words = value.view(self.dtype)
        return words if self.fits(words) else None

    def fits(self, tensor: Tensor) -> bool:
        """A tensor that the engine takes."""
        return (
            tensor.dtype == self.dtype
            and len(self.least) == tensor.dim()
            and all(
                a <= size <= b
                for a, size, b in zip(self.least, tensor.shape, self.most, strict=True)
            )
        )

    @property
    def is_static(self) -> bool:
        return self.least == self.most


def engine_inputs(nodes: Sequence[fx.Node], options: Options) -> list[EngineInput]:
    """What the capture sizes of a step make of the inputs of a region, as an engine takes them.

    A symbol stands for requests or tokens: it goes from 2, below which symbolic code does not run,
    to the tokens of the largest size, or to what the traced call had where that is more. Kernels
    are chosen for the tokens of the size in the middle of the table.
    """
    tensors = [tensor for node in nodes if (tensor := tensor_of(node)) is not None]
    hints: dict[Any, int] = {}
    for tensor in tensors:
        for size in tensor.shape:
            expression = _compat.size_expression(size)
            if getattr(expression, "is_Symbol", False):
                hints[expression] = _compat.size_hint(size) or 2
    sizes, next_n = options.sizes, options.next_n
    usual, most = sizes[len(sizes) // 2] * next_n, sizes[-1] * next_n

    def shape(tensor: Tensor, value: int, at_least: bool) -> tuple[int, ...]:
        return tuple(
            _evaluate(
                _compat.size_expression(size),
                lambda symbol: max(value, hints.get(symbol, 2) if at_least else 2),
            )
            for size in tensor.shape
        )

    return [
        EngineInput(
            tensor.dtype,
            shape(tensor, 2, at_least=False),
            shape(tensor, usual, at_least=False),
            shape(tensor, most, at_least=True),
            tensor.device,
            node.meta.get("bytes_of"),
            node.meta.get("is_cache", False),
        )
        for node, tensor in zip(nodes, tensors, strict=True)
    ]


def _evaluate(expression: Any, value: Any) -> int:
    if isinstance(expression, int):
        return expression
    return int(expression.subs({symbol: value(symbol) for symbol in expression.free_symbols}))
