"""Clear the state rows of new requests."""

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_shape, check_writable
from ._register import register
from ._state_rows import FLOAT_DTYPES


def reset_states_(state: Tensor, state_indices: Tensor, has_initial_state: Tensor) -> None:
    """Zero the whole row of every request that has no past; ``state`` is changed in place.

    The old content is overwritten, never read, so NaN and Inf left by a previous owner go away.

    Args:
        state: [num_slots, ...] fp32, bf16 or fp16, any strides
        state_indices: int32 [num_reqs], rows of ``state``; an index outside it is padding
        has_initial_state: bool [num_reqs], False where the row is to be zeroed

    Raises:
        TypeError: a dtype is not the one above
        ValueError: shapes or devices do not match, or ``state`` overlaps itself
    """
    _op(state, state_indices, has_initial_state)


def _check(state: Tensor, state_indices: Tensor, has_initial_state: Tensor) -> None:
    check_dtype("state", state, *FLOAT_DTYPES)
    if state.dim() == 0:
        raise ValueError("state must have shape [num_slots, ...], got []")
    check_writable("state", state)
    check_dtype("state_indices", state_indices, torch.int32)
    check_shape("state_indices", state_indices, num_reqs=None)
    check_dtype("has_initial_state", has_initial_state, torch.bool)
    check_shape("has_initial_state", has_initial_state, num_reqs=state_indices.shape[0])
    check_device(
        "state",
        state.device,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
    )


def _reference(state: Tensor, state_indices: Tensor, has_initial_state: Tensor) -> None:
    valid = (state_indices >= 0) & (state_indices < state.shape[0])
    state[state_indices[valid & ~has_initial_state].long()] = 0


def _fake(state: Tensor, state_indices: Tensor, has_initial_state: Tensor) -> None:
    return None


_op = register(
    "reset_states_(Tensor(a!) state, Tensor state_indices, Tensor has_initial_state) -> ()",
    check=_check,
    reference=_reference,
    fake=_fake,
)
