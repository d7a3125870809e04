"""Zero the rows of new requests: stores only, nothing is read from the pool.

    state[state_indices[r], ...]  = 0 where not has_initial_state[r]

Layout:
    state              [num_slots, ...]    any strides; a row counts as [SIZE_0, SIZE_1, SIZE_2]
    state_indices      [num_reqs] int32    any stride; outside the pool: nothing happens
    has_initial_state  [num_reqs] bool     any stride

Grid (num_reqs * num_chunks,): a program owns every num_chunks-th BLOCK of a row. A row of a request
that is not new costs its programs two loads.
"""

import triton
import triton.language as tl
from torch import Tensor

from ._common import num_sms

# Both are defaults.
BLOCK = 4096
PROGRAMS_PER_SM = 32


# fmt: off
@triton.jit(do_not_specialize=["num_slots", "num_chunks", "row_size"])
def reset_states_kernel(
    state_ptr, state_indices_ptr, has_initial_state_ptr,
    num_slots, num_chunks, row_size,
    state_stride, stride_0, stride_1, stride_2, index_stride, mask_stride,
    NUM_DIMS: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    request = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    old = tl.load(has_initial_state_ptr + request * mask_stride)
    slot = tl.load(state_indices_ptr + request * index_stride)
    if old | (slot < 0) | (slot >= num_slots):
        return
    row_ptr = state_ptr + slot.to(tl.int64) * state_stride
    zeros = tl.zeros([BLOCK], state_ptr.dtype.element_ty)
    for first in range(chunk * BLOCK, row_size, num_chunks * BLOCK):
        element = first + tl.arange(0, BLOCK)
        if NUM_DIMS == 1:
            offset = element.to(tl.int64) * stride_2
        else:
            offset = (element % SIZE_2).to(tl.int64) * stride_2
            offset += (element // SIZE_2 % SIZE_1).to(tl.int64) * stride_1
            offset += (element // SIZE_2 // SIZE_1).to(tl.int64) * stride_0
        tl.store(row_ptr + offset, zeros, mask=element < row_size)


def launch(state: Tensor, state_indices: Tensor, has_initial_state: Tensor) -> None:
    num_reqs = state_indices.shape[0]
    if num_reqs == 0 or state.numel() == 0:
        return
    dims = _row_dims(state)
    if len(dims) > 3:
        # One launch for each index of the outermost dim: such a pool is a view of many parts.
        outermost = dims[0][2]
        for part in state.unbind(outermost):
            launch(part, state_indices, has_initial_state)
        return
    row_size = state[0].numel()
    (_, stride_0, _), (size_1, stride_1, _), (size_2, stride_2, _) = [
        *[(1, 0, 0)] * (3 - len(dims)), *dims
    ]  # fmt: skip
    programs = num_sms(state.device) * PROGRAMS_PER_SM
    block = min(BLOCK, triton.next_power_of_2(row_size))
    num_chunks = min(triton.cdiv(row_size, block), triton.cdiv(programs, num_reqs))
    reset_states_kernel[(num_reqs * num_chunks,)](
        state, state_indices, has_initial_state,
        state.shape[0], num_chunks, row_size,
        state.stride(0), stride_0, stride_1, stride_2,
        state_indices.stride(0), has_initial_state.stride(0),
        NUM_DIMS=len(dims), SIZE_1=size_1, SIZE_2=size_2, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _row_dims(state: Tensor) -> list[tuple[int, int, int]]:
    """Size, stride and a dim of ``state`` for each dim of a row that is not part of the next one,
    widest stride first. A contiguous row has one."""
    dims: list[tuple[int, int, int]] = []
    order = sorted(range(1, state.dim()), key=state.stride, reverse=True)
    for dim in order:
        size, stride = state.shape[dim], state.stride(dim)
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride, dim)
        else:
            dims.append((size, stride, dim))
    return dims
