"""One step of a selective state space over a state pool.

    dt'   = softplus(dt[t] + dt_bias)
    h     = exp(A * dt') * h + dt' * x[t] * B[t]
    y     = sum(h * C[t], state_dim) + D * x[t]
    y[t]  = y * silu(z[t])

Layout, any strides; Mamba-1 is Mamba-2 with one head and one group:
    state      [num_slots, num_heads, head_dim, state_dim]
    x, z, dt   [num_tokens, num_heads, head_dim]              dt also with a stride of 0
    A          [num_heads, head_dim, state_dim]               also with strides of 0
    B, C       [num_tokens, num_groups, state_dim]
    D, dt_bias [num_heads, head_dim]                          also with a stride of 0
    out        [num_tokens, num_heads, head_dim]              contiguous

Grid (requests * num_heads * cdiv(head_dim, BLOCK_P),), head_dim fastest: a program owns BLOCK_P
channels of one head in every slot of its request, and keeps them in registers, fp32, over the
request's tokens. No other program reads or writes them, so a slot is updated in place.
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
    store_state,
    store_zeros,
    target_slot,
)

TILE_ELEMENTS = 2048  # default: 8 KB of fp32 state in a program
ELEMENTS_PER_WARP = 1024  # default


# fmt: off
@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "num_programs"])
def selective_state_update_kernel(
    state_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, out_ptr,
    rows, num_tokens, num_reqs, num_programs, num_slots,
    x_strides, dt_strides, A_strides, B_strides, C_strides, D_strides, z_strides,
    dt_bias_strides,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr, DT_SOFTPLUS: tl.constexpr, TIED_A: tl.constexpr,
    TIED_DT: tl.constexpr,
    STATE_STRIDES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # fmt: on
    TILES: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    program = tl.program_id(0)
    # Every offset is int64 before it meets a stride.
    request = (program // (TILES * NUM_HEADS)).to(tl.int64)
    head = (program // TILES % NUM_HEADS).to(tl.int64)
    group = head // HEADS_PER_GROUP
    channels = (program % TILES * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    columns = tl.arange(0, BLOCK_N).to(tl.int64)
    channel_mask = channels < HEAD_DIM
    column_mask = columns < STATE_DIM
    mask = channel_mask[:, None] & column_mask[None, :]
    out_ptrs = out_ptr + head * HEAD_DIM + channels

    begin, length, padding = row_tokens(rows, request, num_tokens, num_reqs)
    active, old, _, slot = row_start(rows, request, length, num_reqs, num_slots)
    if active:
        state_ptrs = state_ptr + head * STATE_STRIDES[1] + channels[:, None] * STATE_STRIDES[2]
        state_ptrs += columns[None, :] * STATE_STRIDES[3]
        present = tl.where(old, mask, False)
        h = tl.load(state_ptrs + slot * STATE_STRIDES[0], mask=present, other=0).to(tl.float32)
        # Threads may hold copies of an element: all have read it before one of them stores.
        tl.debug_barrier()
        if not rows.TARGET_PER_TOKEN:
            target = target_slot(rows, request, length - 1, num_slots)

        A_ptrs = A_ptr + head * A_strides[0]
        if TIED_A:
            A = tl.load(A_ptrs).to(tl.float32)
        else:
            A_ptrs += channels[:, None] * A_strides[1] + columns[None, :] * A_strides[2]
            A = tl.load(A_ptrs, mask=mask, other=0).to(tl.float32)
        if D_ptr is not None:
            D_ptrs = D_ptr + head * D_strides[0] + channels * D_strides[1]
            D = tl.load(D_ptrs, mask=channel_mask, other=0).to(tl.float32)
        dt_ptrs = dt_ptr + head * dt_strides[1]
        dt_mask = True
        if not TIED_DT:
            dt_ptrs += channels * dt_strides[2]
            dt_mask = channel_mask
        if dt_bias_ptr is not None:
            bias_ptrs = dt_bias_ptr + head * dt_bias_strides[0]
            if not TIED_DT:
                bias_ptrs += channels * dt_bias_strides[1]
            dt_bias = tl.load(bias_ptrs, mask=dt_mask, other=0).to(tl.float32)

        x_ptrs = x_ptr + head * x_strides[1] + channels * x_strides[2]
        B_ptrs = B_ptr + group * B_strides[1] + columns * B_strides[2]
        C_ptrs = C_ptr + group * C_strides[1] + columns * C_strides[2]
        ptrs = (x_ptrs, dt_ptrs, B_ptrs, C_ptrs)
        strides = (x_strides[0], dt_strides[0], B_strides[0], C_strides[0])
        masks = (channel_mask, dt_mask, column_mask, column_mask)
        if z_ptr is not None:
            z_ptrs = z_ptr + head * z_strides[1] + channels * z_strides[2]
            ptrs = ptrs + (z_ptrs,)  # noqa: RUF005  (no * in Triton)
            strides = strides + (z_strides[0],)  # noqa: RUF005  (no * in Triton)
            masks = masks + (channel_mask,)  # noqa: RUF005  (no * in Triton)

        # A token's inputs are on their way while the one before it is computed.
        ahead = load_token(ptrs, strides, masks, begin, True)
        for t in range(length):
            token = begin + t
            x, dt = ahead[0].to(tl.float32), ahead[1].to(tl.float32)
            B, C = ahead[2].to(tl.float32), ahead[3].to(tl.float32)
            if z_ptr is not None:
                z = ahead[4].to(tl.float32)
            ahead = load_token(ptrs, strides, masks, token + 1, t + 1 < length)
            if rows.TARGET_PER_TOKEN:
                target = target_slot(rows, request, t, num_slots)

            if dt_bias_ptr is not None:
                dt += dt_bias
            if DT_SOFTPLUS:
                dt = softplus(dt)
            step = dt if TIED_DT else dt[:, None]
            h = tl.exp(A * step) * h + (dt * x)[:, None] * B[None, :]
            y = tl.sum(h * C[None, :], axis=1)
            if D_ptr is not None:
                y += D * x
            if z_ptr is not None:
                y *= z / (1 + tl.exp(-z))
            here = out_ptrs + token * (NUM_HEADS * HEAD_DIM)
            tl.store(here, y.to(out_ptr.dtype.element_ty), mask=channel_mask)
            if rows.TARGET_PER_TOKEN:
                store_state(state_ptrs, STATE_STRIDES[0], h, target, mask)
        if not rows.TARGET_PER_TOKEN:
            store_state(state_ptrs, STATE_STRIDES[0], h, target, mask)
    else:
        store_zeros(out_ptrs, channel_mask, NUM_HEADS * HEAD_DIM, begin, begin + length, 1)
    store_padding(
        out_ptrs, channel_mask, NUM_HEADS * HEAD_DIM,
        request, begin, padding, num_tokens, num_programs,
    )  # fmt: skip


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(u), u = exp(-|x|); in fp32 it is x itself above 20.

    log1p(u) = 2 * artanh(s), s = u / (2 + u) <= 1/3, as its series: the logarithm of a card is
    coarse near 1.
    """
    u = tl.exp(-tl.abs(x))
    s = u / (2 + u)
    q = s * s
    series = 1 / 15
    for i in tl.static_range(7):
        series = series * q + 1 / (13 - 2 * i)
    return tl.maximum(x, 0) + 2 * s * series


def launch(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor | None = None,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    has_initial_state: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    dst_indices: Tensor | None = None,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if state.dim() == 3:
        state, x, dt, B, C = (tensor.unsqueeze(1) for tensor in (state, x, dt, B, C))
        A = A.unsqueeze(0)
        D = None if D is None else D.unsqueeze(0)
        z = None if z is None else z.unsqueeze(1)
        dt_bias = None if dt_bias is None else dt_bias.unsqueeze(0)
    num_slots, num_heads, head_dim, state_dim = state.shape
    A_strides = _strides(A, 3)
    dt_strides, dt_bias_strides = _strides(dt, 3), _strides(dt_bias, 2)
    block_n = triton.next_power_of_2(state_dim)
    block_p = min(triton.next_power_of_2(head_dim), max(1, TILE_ELEMENTS // block_n))
    num_programs = max(1, state_indices.shape[0])
    next_n = state_indices.shape[1] if state_indices.dim() == 2 else 1
    rows = make_rows(
        next_n,
        state_indices,
        query_start_loc,
        has_initial_state,
        num_accepted_tokens,
        dst_indices,
    )
    selective_state_update_kernel[(num_programs * num_heads * triton.cdiv(head_dim, block_p),)](
        state, x, dt, A, B, C, D, z, dt_bias, out,
        rows, x.shape[0], state_indices.shape[0], num_programs, num_slots,
        x.stride(), dt_strides, A_strides, B.stride(), C.stride(),
        _strides(D, 2), _strides(z, 3), dt_bias_strides,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, STATE_DIM=state_dim,
        HEADS_PER_GROUP=num_heads // B.shape[1], DT_SOFTPLUS=dt_softplus,
        TIED_A=A_strides[1:] == (0, 0), TIED_DT=dt_strides[2] == 0 and dt_bias_strides[1] == 0,
        STATE_STRIDES=state.stride(), BLOCK_P=block_p, BLOCK_N=block_n,
        num_warps=max(1, block_p * block_n // ELEMENTS_PER_WARP),
    )  # fmt: skip
    return out


def _strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """Those of ``tensor``, and 0 for what it has not."""
    strides = () if tensor is None else tensor.stride()
    return strides + (0,) * (dims - len(strides))
