"""What several kernels use unchanged: device functions, and facts about the device."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

# Triton reads the same variable when it decorates the kernels: both are fixed at import.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability of ``device``: 90 is 9.0. The interpreter passes for 9.0."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    # Without a card, kernels are interpreted or compiled for the target of the active driver.
    return 90 if INTERPRETED else driver.active.get_current_target().arch


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of ``device``; 132, an H100's, where there is no card."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132


def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may begin before the one before it ends, and wait for it on the card."""
    return not INTERPRETED and capability(device) >= 90


def bare_launch(
    compiled: Any, grid: tuple[int, int, int], device: torch.device
) -> Callable[..., None]:
    """Launches a compiled kernel on the current stream, past the JIT's look at the arguments.

    Call it with all arguments of the kernel, constants too; a pointer may be an int. Their types
    are those of the launch that compiled it, and ``device`` is the current one.
    """
    run = functools.partial(compiled.run, *grid)
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)
    stream_of = functools.partial(driver.active.get_current_stream, device.index)

    def call(*args: Any) -> None:
        run(stream_of(), *fixed, *args)

    return call


@triton.jit
def token_requests(query_start_loc_ptr, stride, num_reqs, tokens):
    """The request of each of ``tokens`` (int32, any block shape); -1 for a padding token.

    A binary search per token for the number of starts at or before it: requests without a query
    token are passed over, and tokens from the last start on have all ``num_reqs + 1`` before them.
    Where the starts decrease, the token still lies within the bounds of its request.
    """
    low = tl.zeros_like(tokens)
    high = low + (num_reqs + 1)
    width = num_reqs + 1
    while width > 0:
        middle = (low + high) // 2
        open_ = low < high
        start = tl.load(query_start_loc_ptr + middle.to(tl.int64) * stride, mask=open_, other=0)
        right = open_ & (start <= tokens)
        low = tl.where(right, middle + 1, low)
        high = tl.where(open_ & (start > tokens), middle, high)
        width = width // 2
    return tl.where(low <= num_reqs, low - 1, -1)


@triton.jit
def token_request(query_start_loc_ptr, stride, num_reqs, token, BLOCK: tl.constexpr = 256):
    """The request of one ``token`` (int32 scalar); -1 for a padding token.

    Looks for the last start at or before it, ``BLOCK`` at a time: up to ``BLOCK`` - 1 requests cost
    one load, where a binary search waits for eight, one after the other. Where the starts decrease,
    the token still lies within the bounds of its request.
    """
    last = -1
    offsets = tl.arange(0, BLOCK)
    for first in range(0, num_reqs + 1, BLOCK):
        index = first + offsets
        mask = index <= num_reqs
        start = tl.load(query_start_loc_ptr + index.to(tl.int64) * stride, mask=mask, other=0)
        last = tl.maximum(last, tl.max(tl.where(mask & (start <= token), index, -1), axis=0))
    return tl.where(last < num_reqs, last, -1)
