"""Which rows of a state pool hold their request's past."""

import torch
from torch import Tensor

from ._checks import check_lens
from ._register import register


def has_initial_state(query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """Tell new requests from the others, on the device.

    A request is new when this step holds all of its tokens: ``seq_lens == query_len > 0``.
    Padding requests (``seq_lens == 0``) count as not new, so a reset never touches their rows.

    Args:
        query_start_loc: int32 [num_reqs + 1], first query token of each request
        seq_lens: int32 [num_reqs], keys per request, this step's tokens included; 0 is padding

    Returns:
        bool [num_reqs], False for new requests alone

    Raises:
        TypeError: an argument is not int32
        ValueError: shapes or devices do not match
    """
    return _op(query_start_loc, seq_lens)


def _check(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    check_lens(query_start_loc, seq_lens)


def _reference(query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    starts = query_start_loc.clamp_min(0)
    return (seq_lens > starts[1:] - starts[:-1]) | (seq_lens <= 0)


def _fake(query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    return torch.empty_like(seq_lens, dtype=torch.bool)


_op = register(
    "has_initial_state(Tensor query_start_loc, Tensor seq_lens) -> Tensor",
    check=_check,
    reference=_reference,
    fake=_fake,
    results=["has_initial_state"],
)
