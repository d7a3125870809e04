"""Copy the inputs of a step into the front of their buffers and pad the rest, in one launch.

    buffer[i]  = input[i]          i < count = (requests or tokens) + extra
    buffer[i]  = input[count - 1]  otherwise, where padding repeats the last entry
    buffer[i]  = pad               otherwise

An input that lies in front of its buffer already is not copied.

Layout:
    inputs   up to MAX_INPUTS addresses of contiguous memory, entries along the first dimension
    buffers  contiguous, of any dtypes
    table    [inputs, 7] int64   a buffer's address, its bytes, bytes per entry, 1 if it counts
             tokens, extra entries, 1 if padding repeats the last, the pad as eight bytes

Grid (inputs, up to MAX_PROGRAMS): the programs of an input take blocks of it in turn.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import INTERPRETED, bare_launch

BLOCK = 2048
MAX_PROGRAMS = 128
MAX_INPUTS = 16


@triton.jit
def copy_entries(
    source, target, used, size, entry, pad, last, dtype: tl.constexpr, start, step,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sizes are in elements of ``dtype``, which divides a pad."""
    source_ptr = source.to(tl.pointer_type(dtype))
    target_ptr = target.to(tl.pointer_type(dtype))
    width: tl.constexpr = dtype.primitive_bitwidth
    repeats = (last != 0) & (used > 0)
    # what lies in its place already is not read, and not written
    block = start.to(tl.int64)
    if source == target:
        block += used // BLOCK
    while block * BLOCK < size:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        real = offsets < used
        origin = tl.where(real, offsets, used - entry + offsets % entry)
        repeated = tl.where(repeats, offsets < size, False)
        value = tl.load(source_ptr + origin, mask=real | repeated, other=0)
        padding = (pad >> (offsets * width % 64)).to(dtype)
        value = tl.where(real | repeats, value, padding)
        tl.store(target_ptr + offsets, value, mask=offsets < size)
        block += step


# fmt: off
@triton.jit(do_not_specialize=[
    "requests", "tokens", "source_0", "source_1", "source_2", "source_3", "source_4", "source_5",
    "source_6", "source_7", "source_8", "source_9", "source_10", "source_11", "source_12",
    "source_13", "source_14", "source_15",
])
def copy_inputs_kernel(
    table_ptr, requests, tokens,
    source_0, source_1, source_2, source_3, source_4, source_5, source_6, source_7,
    source_8, source_9, source_10, source_11, source_12, source_13, source_14, source_15,
    BLOCK: tl.constexpr,
):
    sources = (
        source_0, source_1, source_2, source_3, source_4, source_5, source_6, source_7, source_8,
        source_9, source_10, source_11, source_12, source_13, source_14, source_15,
    )
    # fmt: on
    index = tl.program_id(0)
    source = source_0
    for other in tl.static_range(1, 16):
        if index == other:
            source = sources[other]
    row_ptr = table_ptr + index * 7
    target = tl.load(row_ptr)
    size = tl.load(row_ptr + 1)
    entry = tl.load(row_ptr + 2)
    count = tl.load(row_ptr + 4) + requests
    if tl.load(row_ptr + 3) != 0:
        count += tokens - requests
    last = tl.load(row_ptr + 5)
    pad = tl.load(row_ptr + 6)
    used = tl.minimum(count * entry, size)
    start = tl.program_id(1)
    step = tl.num_programs(1)
    if (source | target | entry) % 4 == 0:
        copy_entries(
            source, target, used // 4, size // 4, entry // 4, pad, last, tl.int32, start, step,
            BLOCK,
        )  # fmt: skip
    else:
        copy_entries(
            source, target, used, size, entry, pad, last, tl.int8, start, step, BLOCK
        )


@dataclasses.dataclass(frozen=True)
class Target:
    """A buffer, and what goes into it.

    Attributes:
        buffer: contiguous, entries along its first dimension
        counts_tokens: an entry is for a token, not for a request
        extra: entries beyond one each
        pad: what padding holds; ``None`` repeats the last real entry
    """

    buffer: Tensor
    counts_tokens: bool
    extra: int
    pad: float | bool | None


class InputCopy:
    """The launches that fill some buffers, MAX_INPUTS in each."""

    def __init__(self, targets: Sequence[Target]) -> None:
        """``targets`` lie on one device and stay where they are."""
        self._device = targets[0].buffer.device
        self._launches = [
            _Launch(targets[first : first + MAX_INPUTS])
            for first in range(0, len(targets), MAX_INPUTS)
        ]

    def __call__(self, sources: Sequence[int], requests: int, tokens: int) -> None:
        """Copy from the addresses of contiguous inputs, one for each target."""
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                self(sources, requests, tokens)
            return
        for number, launch_some in enumerate(self._launches):
            first = number * MAX_INPUTS
            launch_some(sources[first : first + MAX_INPUTS], requests, tokens)


class _Launch:
    def __init__(self, targets: Sequence[Target]) -> None:
        rows = [_row(target) for target in targets]
        self._table = torch.tensor(rows, dtype=torch.int64, device=targets[0].buffer.device)
        blocks = triton.cdiv(max(size for _, size, *_ in rows), 4 * BLOCK)
        self._grid = (len(targets), max(1, min(blocks, MAX_PROGRAMS)), 1)
        self._nowhere = self._table.data_ptr()
        self._unused = (self._nowhere,) * (MAX_INPUTS - len(targets))
        self._compiled: Callable[..., None] | None = None

    def __call__(self, sources: Sequence[int], requests: int, tokens: int) -> None:
        # an empty tensor lies at 0, which would count as an int of 32 bits
        sources = [source or self._nowhere for source in sources]
        if self._compiled is not None:
            self._compiled(self._nowhere, requests, tokens, *sources, *self._unused, BLOCK)
            return
        compiled = launch(self._table, requests, tokens, (*sources, *self._unused), self._grid)
        if not INTERPRETED:
            self._compiled = bare_launch(compiled, self._grid, self._table.device)


def launch(
    table: Tensor, requests: int, tokens: int, sources: Sequence[int], grid: tuple[int, int, int]
) -> Any:
    """One launch; returns the compiled kernel."""
    return copy_inputs_kernel[grid](table, requests, tokens, *sources, BLOCK)


def _row(target: Target) -> list[int]:
    buffer = target.buffer
    size = buffer.numel() * buffer.element_size()
    pattern = torch.full((8 // buffer.element_size(),), target.pad or 0, dtype=buffer.dtype)
    return [
        buffer.data_ptr(),
        size,
        size // max(1, buffer.shape[0]),
        int(target.counts_tokens),
        target.extra,
        int(target.pad is None),
        int(pattern.view(torch.int64)),
    ]
