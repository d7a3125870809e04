"""The inputs of a padded step at fixed addresses: a batch in front, padding behind it."""

from collections.abc import Callable, Mapping, Sequence

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
        # where an input goes in the fused launch, and where in copies of its own
        self._fused = _fused_places(self.tensors, specs)
        self._single = [place for place in range(len(like)) if place not in self._fused]
        self._copy = self._fused_copy() if self._fused else None
        self._names = list(like)
        # entries in front that may hold something else than padding
        self._used = {name: specs[name].length(requests, tokens) for name in like}
        # entries that a caller may write at any time
        self._exposed: dict[str, int] = {}
        self._fronts: list[Tensor] = []
        self._counts: tuple[int, int] | None = None
        self.blank()

    def blank(self) -> None:
        """Make everything padding."""
        for name, buffer in self.tensors.items():
            self._used[name] = buffer.shape[self._specs[name].dim]
            self._pad(name, 0)
        self._counts = None

    def fill(self, values: Sequence[Tensor], requests: int, tokens: int) -> None:
        """Copy a batch in. Nothing is read on the host but sizes.

        Args:
            values: one for each buffer, in order
            requests, tokens: the size of the batch
        """
        if self._copy is not None:
            # contiguous copies live until here, and the launch stands before what reuses them
            fused = [values[place] for place in self._fused]
            if not all(map(Tensor.is_contiguous, fused)):
                fused = [value.contiguous() for value in fused]
            self._copy(list(map(Tensor.data_ptr, fused)), requests, tokens)
        if self._single:
            self._copy_singly([values[place] for place in self._single], requests, tokens)

    def fronts(self, requests: int, tokens: int) -> dict[str, Tensor]:
        """Where a batch lies in the buffers, for the caller to write."""
        fronts = {}
        for name, buffer in self.tensors.items():
            count = self._specs[name].length(requests, tokens)
            fronts[name] = buffer.narrow(self._specs[name].dim, 0, count)
            self._exposed[name] = max(count, self._exposed.get(name, 0))
            self._used[name] = max(count, self._used[name])
        self._counts = None
        return fronts

    def _fused_copy(self) -> Callable[..., None]:
        from ..kernels.copy_inputs import InputCopy, Target

        targets = []
        for place, (name, buffer) in enumerate(self.tensors.items()):
            spec = self._specs[name]
            if place in self._fused:
                pad = None if spec.pad == "last" else spec.pad
                targets.append(Target(buffer, spec.per == "token", spec.extra, pad))
        return InputCopy(targets)

    def _copy_singly(self, values: list[Tensor], requests: int, tokens: int) -> None:
        names = [self._names[place] for place in self._single]
        if self._counts != (requests, tokens):
            self._counts = None
            self._fronts = []
            for name in names:
                count = self._specs[name].length(requests, tokens)
                self._fronts.append(self.tensors[name].narrow(self._specs[name].dim, 0, count))
                self._pad(name, count)
        _compat.copy_all(self._fronts, values)
        for name in names:
            spec, buffer = self._specs[name], self.tensors[name]
            count, size = spec.length(requests, tokens), buffer.shape[spec.dim]
            if spec.pad == "last" and 0 < count < size:
                rest = buffer.narrow(spec.dim, count, size - count)
                rest.copy_(buffer.narrow(spec.dim, count - 1, 1).expand_as(rest))
        if not self._exposed:
            self._counts = requests, tokens

    def _pad(self, name: str, count: int) -> None:
        """Padding from entry ``count`` on; what is padding already stays as it is."""
        spec, used = self._specs[name], self._used[name]
        if count < used:
            rest = self.tensors[name].narrow(spec.dim, count, used - count)
            rest.fill_(0 if spec.pad == "last" else spec.pad)
        # what follows the last entry of one batch is not what follows that of another
        lasting = self.tensors[name].shape[spec.dim] if spec.pad == "last" else count
        self._used[name] = max(lasting, self._exposed.get(name, 0))


def _fused_places(tensors: Mapping[str, Tensor], specs: Mapping[str, Batched]) -> list[int]:
    """Which buffers one launch fills: those of one GPU that lie entry after entry."""
    devices = [tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"]
    return [
        place
        for place, (name, tensor) in enumerate(tensors.items())
        if tensor.device in devices[:1] and specs[name].dim == 0 and tensor.element_size() <= 8
    ]


def _check_pad(name: str, pad: float | str, dtype: torch.dtype) -> None:
    """An integer dtype cannot hold a NaN, an unsigned one no -1."""
    if isinstance(pad, str) or dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (pad == pad // 1 and low <= pad <= high):
        raise ValueError(f"inputs[{name!r}] must have a pad that {dtype} can hold, got {pad}")
