"""The inputs of a padded step at fixed addresses: a batch in front, padding behind it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from . import _compat
from .inputs import Batched


class Buffers:
    """One buffer per batched input, all for the same numbers of requests and tokens."""

    def __init__(
        self,
        like: Mapping[str, Tensor],
        specs: Mapping[str, Batched],
        requests: int,
        tokens: int,
        *,
        symbolic: bool,
    ) -> None:
        """Allocate buffers, all padding.

        Args:
            like: inputs that show dtypes, devices and the sizes that do not grow
            specs: how each of them was declared
            requests, tokens: what the buffers hold
            symbolic: ask the tracer for symbols in the dimensions that grow
        """
        self._specs = specs
        self.tensors: dict[str, Tensor] = {}
        for name, value in like.items():
            _check_pad(name, specs[name].pad, value.dtype)
            sizes = list(value.shape)
            sizes[specs[name].dim] = specs[name].length(requests, tokens)
            # outlives the call: an inference tensor could not be written outside of the mode
            with torch.inference_mode(False):
                self.tensors[name] = value.new_empty(sizes)
            if symbolic:
                _compat.mark_dynamic(self.tensors[name], specs[name].dim)
        # entries in front that may hold something else than padding
        self._used = {name: specs[name].length(requests, tokens) for name in like}
        self._fronts: list[Tensor] = []
        self._counts: Sequence[int] | None = None
        self.blank()

    def blank(self) -> None:
        """Make everything padding."""
        for name in self.tensors:
            self._pad(name, 0)
        self._counts = None

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Copy a batch in. Nothing is read on the host but sizes."""
        counts = [values[name].shape[self._specs[name].dim] for name in self.tensors]
        if counts != self._counts:
            self._counts = counts
            self._fronts = []
            for (name, buffer), count in zip(self.tensors.items(), counts, strict=True):
                self._fronts.append(buffer.narrow(self._specs[name].dim, 0, count))
                self._pad(name, count)
        _compat.copy_all(self._fronts, [values[name] for name in self.tensors])
        for (name, buffer), count in zip(self.tensors.items(), counts, strict=True):
            spec = self._specs[name]
            if spec.pad == "last" and 0 < count < buffer.shape[spec.dim]:
                rest = buffer.narrow(spec.dim, count, buffer.shape[spec.dim] - count)
                rest.copy_(buffer.narrow(spec.dim, count - 1, 1).expand_as(rest))

    def _pad(self, name: str, count: int) -> None:
        """Padding from entry ``count`` on; what is padding already stays as it is."""
        spec, used = self._specs[name], self._used[name]
        if count < used:
            rest = self.tensors[name].narrow(spec.dim, count, used - count)
            rest.fill_(0 if spec.pad == "last" else spec.pad)
        # what follows the last entry of one batch is not what follows that of another
        self._used[name] = self.tensors[name].shape[spec.dim] if spec.pad == "last" else count


def _check_pad(name: str, pad: float | str, dtype: torch.dtype) -> None:
    """An integer dtype cannot hold a NaN, an unsigned one no -1."""
    if isinstance(pad, str) or dtype.is_floating_point:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (pad == pad // 1 and low <= pad <= high):
        raise ValueError(f"inputs[{name!r}] must have a pad that {dtype} can hold, got {pad}")
