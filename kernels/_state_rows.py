"""Which tokens and which slots belong to a request: shared by the three state updates.

A program serves one request. Those of one request and those of another never meet in a token or
in a slot; the padding tokens behind the last request are dealt out among them. Token bounds are
clamped to ``0 .. num_tokens``: no value of ``query_start_loc`` leads outside a tensor.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Rows(NamedTuple):
    """The metadata of a step, as one argument of a kernel."""

    query_start_loc: Tensor | None
    query_start_loc_stride: int
    state_indices: Tensor
    state_indices_strides: tuple[int, int]
    has_initial_state: Tensor | None
    has_initial_state_stride: int
    num_accepted_tokens: Tensor | None
    num_accepted_tokens_stride: int
    # where the state goes: dst_indices, or else state_indices
    targets: Tensor
    targets_strides: tuple[int, int]
    targets_columns: int
    # how many tokens of a step a request can go back by, this one included
    next_n: int
    SLOT_PER_TOKEN: tl.constexpr
    TARGET_PER_TOKEN: tl.constexpr
    APART: tl.constexpr


def make_rows(
    next_n: int,
    state_indices: Tensor,
    query_start_loc: Tensor | None,
    has_initial_state: Tensor | None,
    num_accepted_tokens: Tensor | None,
    dst_indices: Tensor | None,
) -> Rows:
    targets = state_indices if dst_indices is None else dst_indices
    return Rows(
        query_start_loc,
        _stride(query_start_loc),
        state_indices,
        (_stride(state_indices), _stride(state_indices, 1)),
        has_initial_state,
        _stride(has_initial_state),
        num_accepted_tokens,
        _stride(num_accepted_tokens),
        targets,
        (_stride(targets), _stride(targets, 1)),
        targets.shape[1] if targets.dim() == 2 else 1,
        next_n,
        tl.constexpr(state_indices.dim() == 2),
        tl.constexpr(targets.dim() == 2),
        tl.constexpr(dst_indices is not None),
    )


def _stride(tensor: Tensor | None, dim: int = 0) -> int:
    return tensor.stride(dim) if tensor is not None and dim < tensor.dim() else 1


@triton.jit
def row_tokens(rows, request, num_tokens, num_reqs):
    """First token and number of tokens of ``request``, int64, and the first padding token.

    ``request`` may be 0 in a step without requests: it has no token then. The number is negative
    where ``query_start_loc`` decreases.
    """
    if rows.query_start_loc is None:
        begin = request
        length = 1
        padding = num_tokens
    else:
        start_ptr = rows.query_start_loc + request * rows.query_start_loc_stride
        here = request < num_reqs
        begin = tl.load(start_ptr, mask=here, other=0)
        end = tl.load(start_ptr + rows.query_start_loc_stride, mask=here, other=0)
        begin = clamped(begin, num_tokens)
        length = clamped(end, num_tokens) - begin
        last_ptr = rows.query_start_loc + num_reqs.to(tl.int64) * rows.query_start_loc_stride
        padding = clamped(tl.load(last_ptr), num_tokens)
    return begin, length, padding


@triton.jit
def clamped(bound, num_tokens):
    return tl.minimum(tl.maximum(bound, 0), num_tokens).to(tl.int64)


@triton.jit
def row_start(rows, request, length, num_reqs, num_slots):
    """Where ``request`` starts from: (active, old, column, slot).

    A row that is not ``old`` starts from zero. ``column`` is how many tokens of the previous step
    stand, less one. ``slot`` is int64, and inside the pool wherever ``active & old``.
    """
    here = request < num_reqs
    old = here
    if rows.has_initial_state is not None:
        mask_ptr = rows.has_initial_state + request * rows.has_initial_state_stride
        old = tl.load(mask_ptr, mask=here, other=0) != 0
    column = tl.zeros((), dtype=tl.int32)
    if rows.num_accepted_tokens is not None:
        accepted_ptr = rows.num_accepted_tokens + request * rows.num_accepted_tokens_stride
        column = tl.where(old, tl.load(accepted_ptr, mask=here, other=1) - 1, 0)
    here = here & (column >= 0) & (column < rows.next_n)
    slot_ptr = rows.state_indices + request * rows.state_indices_strides[0]
    if rows.SLOT_PER_TOKEN:
        slot_ptr += column.to(tl.int64) * rows.state_indices_strides[1]
    slot = tl.load(slot_ptr, mask=here, other=-1)
    startable = (slot >= 0) & (slot < num_slots)
    if rows.APART:
        # A new row reads no slot, so with a place of its own to store to it needs no source.
        startable = startable | (old == 0)
    return here & (length > 0) & startable, old, column, slot.to(tl.int64)


@triton.jit
def target_slot(rows, request, t, num_slots):
    """The slot that takes the state after token ``t`` of an active row, int64; negative for none.

    A target for the whole row is that of its last token; it is not asked for another.
    """
    slot_ptr = rows.targets + request * rows.targets_strides[0]
    if rows.TARGET_PER_TOKEN:
        slot_ptr += t * rows.targets_strides[1]
        slot = tl.load(slot_ptr, mask=t < rows.targets_columns, other=-1)
    else:
        slot = tl.load(slot_ptr)
    return tl.where(slot < num_slots, slot, -1).to(tl.int64)


@triton.jit
def load_token(ptrs, strides, masks, token, here):
    """What each of the tuple ``ptrs`` holds for ``token``; without ``here`` nothing is read."""
    values = ()
    for i in tl.static_range(len(ptrs)):
        value = tl.load(ptrs[i] + token * strides[i], mask=tl.where(here, masks[i], False), other=0)
        values = values + (value,)  # noqa: RUF005  (no * in Triton)
    return values


@triton.jit
def store_state(ptrs, stride, state, target, mask):
    """``state`` into slot ``target``, unless that is negative."""
    stored = state.to(ptrs.dtype.element_ty)
    tl.store(ptrs + target * stride, stored, mask=tl.where(target >= 0, mask, False))


@triton.jit
def store_padding(out_ptrs, mask, token_stride, request, begin, padding, num_tokens, num_programs):
    """0 into the tokens of no request: this program's share of those behind the last one, and all
    before the first one, of which there are none unless its start is malformed."""
    store_zeros(out_ptrs, mask, token_stride, 0, tl.where(request == 0, begin, 0), 1)
    store_zeros(out_ptrs, mask, token_stride, padding + request, num_tokens, num_programs)


@triton.jit
def store_zeros(out_ptrs, mask, token_stride, first, last, step):
    """0 into a slice of the tokens ``first``, ``first + step`` and so on before ``last``."""
    for token in range(first, last, step):
        zeros = tl.zeros(out_ptrs.shape, dtype=out_ptrs.dtype.element_ty)
        tl.store(out_ptrs + token * token_stride, zeros, mask=mask)
