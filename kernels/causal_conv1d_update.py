"""One step of a depthwise causal convolution over a state pool.

    line[:]   = the width - 1 inputs before the row's first token (0 in a new row), then its tokens
    out[t]    = silu(sum_i weight[:, i] * line[t + i] + bias)

and of ``line`` go to the state, column by column,

    one slot per request              the last width - 1 inputs
    the same, num_accepted_tokens     all but the oldest, as many as fit
    a slot per token                  after token t the width - 1 inputs up to it

Layout, any strides:
    conv_state  [num_slots, dim, state_len]  oldest input first
    x           [num_tokens, dim]
    weight      [dim, width]
    bias        [dim]
    out         [num_tokens, dim]            contiguous

Grid (requests * cdiv(dim, BLOCK_D),), dim fastest: a program owns BLOCK_D channels in every slot of
its request. It reads their history whole before it stores, so a slot is updated in place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._state_rows import (
    load_token,
    make_rows,
    row_start,
    row_tokens,
    store_padding,
    store_zeros,
    target_slot,
)

BLOCK_D = 128  # default: a channel per thread


# fmt: off
@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "num_programs"])
def causal_conv1d_update_kernel(
    state_ptr, x_ptr, weight_ptr, bias_ptr, out_ptr,
    rows, num_tokens, num_reqs, num_programs, num_slots,
    x_strides, weight_strides, bias_stride,
    DIM: tl.constexpr, STATE_LEN: tl.constexpr, WIDTH: tl.constexpr,
    SILU: tl.constexpr, ROLLING: tl.constexpr, STATE_STRIDES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # fmt: on
    TILES: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    PAST: tl.constexpr = WIDTH - 1
    program = tl.program_id(0)
    # Every offset is int64 before it meets a stride.
    request = (program // TILES).to(tl.int64)
    channels = (program % TILES * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    mask = channels < DIM
    out_ptrs = out_ptr + channels

    begin, length, padding = row_tokens(rows, request, num_tokens, num_reqs)
    active, old, column, slot = row_start(rows, request, length, num_reqs, num_slots)
    if active:
        state_ptrs = state_ptr + channels * STATE_STRIDES[1]
        first_ptrs = state_ptrs + slot * STATE_STRIDES[0]
        if ROLLING:
            first_ptrs += column.to(tl.int64) * STATE_STRIDES[2]
        # the last width - 1 inputs, oldest first
        past = ()
        present = tl.where(old, mask, False)
        for i in tl.static_range(PAST):
            value = tl.load(first_ptrs + i * STATE_STRIDES[2], mask=present, other=0)
            past = past + (value.to(tl.float32),)  # noqa: RUF005  (no * in Triton)
        # Threads may hold copies of an element: all have read it before one of them stores.
        tl.debug_barrier()
        if not rows.TARGET_PER_TOKEN:
            target = target_slot(rows, request, length - 1, num_slots)
            target_ptrs = state_ptrs + target * STATE_STRIDES[0]
            stored = tl.where(target >= 0, mask, False)

        taps = ()
        weight_ptrs = weight_ptr + channels * weight_strides[0]
        for i in tl.static_range(WIDTH):
            tap = tl.load(weight_ptrs + i * weight_strides[1], mask=mask, other=0)
            taps = taps + (tap.to(tl.float32),)  # noqa: RUF005  (no * in Triton)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + channels * bias_stride, mask=mask, other=0).to(tl.float32)
        ptrs, strides, masks = (x_ptr + channels * x_strides[1],), (x_strides[0],), (mask,)
        # A token's inputs are on their way while the one before it is computed.
        ahead = load_token(ptrs, strides, masks, begin, True)
        if ROLLING:
            store_columns(target_ptrs, STATE_STRIDES[2], past[1:], stored)
        for t in range(length):
            token = begin + t
            x = ahead[0].to(tl.float32)
            ahead = load_token(ptrs, strides, masks, token + 1, t + 1 < length)
            y = taps[0] * past[0]
            for i in tl.static_range(1, PAST):
                y += taps[i] * past[i]
            y += taps[PAST] * x
            if bias_ptr is not None:
                y += bias
            if SILU:
                y = y / (1 + tl.exp(-y))
            tl.store(out_ptrs + token * DIM, y.to(out_ptr.dtype.element_ty), mask=mask)
            past = past[1:] + (x,)  # noqa: RUF005  (no * in Triton)
            if rows.TARGET_PER_TOKEN:
                target = target_slot(rows, request, t, num_slots)
                here_ptrs = state_ptrs + target * STATE_STRIDES[0]
                store_columns(here_ptrs, STATE_STRIDES[2], past, tl.where(target >= 0, mask, False))
            if ROLLING:
                x_ptrs = target_ptrs + (PAST - 1 + t) * STATE_STRIDES[2]
                here = stored & tl.where(PAST - 1 + t < STATE_LEN, True, False)
                store_columns(x_ptrs, 0, (x,), here)

        if not rows.TARGET_PER_TOKEN:
            if not ROLLING:
                store_columns(target_ptrs, STATE_STRIDES[2], past, stored)
            if old == 0:
                zeros = (tl.zeros((BLOCK_D,), dtype=tl.float32),)
                for rest in range(PAST - 1 + length if ROLLING else PAST, STATE_LEN):
                    store_columns(target_ptrs + rest * STATE_STRIDES[2], 0, zeros, stored)
    else:
        store_zeros(out_ptrs, mask, DIM, begin, begin + length, 1)
    store_padding(out_ptrs, mask, DIM, request, begin, padding, num_tokens, num_programs)


@triton.jit
def store_columns(ptrs, stride, values, mask):
    """A tuple of ``values`` into as many columns, from the one at ``ptrs`` on."""
    for i in tl.static_range(len(values)):
        tl.store(ptrs + i * stride, values[i].to(ptrs.dtype.element_ty), mask=mask)


def launch(
    conv_state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state_indices: Tensor,
    query_start_loc: Tensor | None = None,
    *,
    has_initial_state: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    dst_indices: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    num_slots, dim, state_len = conv_state.shape
    width = weight.shape[1]
    one_slot = state_indices.dim() == 1
    rows = make_rows(
        state_len - width + 2 if one_slot else state_indices.shape[1],
        state_indices,
        query_start_loc,
        has_initial_state,
        num_accepted_tokens,
        dst_indices,
    )
    block_d = min(triton.next_power_of_2(dim), BLOCK_D)
    num_programs = max(1, state_indices.shape[0])
    causal_conv1d_update_kernel[(num_programs * triton.cdiv(dim, block_d),)](
        conv_state, x, weight, bias, out,
        rows, x.shape[0], state_indices.shape[0], num_programs, num_slots,
        x.stride(), weight.stride(), 0 if bias is None else bias.stride(0),
        DIM=dim, STATE_LEN=state_len, WIDTH=width,
        SILU=activation == "silu", ROLLING=one_slot and num_accepted_tokens is not None,
        STATE_STRIDES=conv_state.stride(), BLOCK_D=block_d, num_warps=max(1, block_d // 32),
    )  # fmt: skip
    return out
