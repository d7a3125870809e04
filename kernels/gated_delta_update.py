"""One step of the gated delta rule over a state pool.

    q, k   = q[t] / sqrt(sum(q[t]^2) + 1e-6) * scale, k[t] / sqrt(sum(k[t]^2) + 1e-6)
    h      = exp(g[t]) * h
    error  = beta[t] * (v[t] - k @ h)
    o[t]   = q @ h + (q . k) * error
    h      = h + outer(k, error)

``o[t]`` is ``q @ h`` of the new h. Written so, both sums over h are of the same h: one pass, and
the next token waits for one reduction instead of two.

Layout, any strides:
    state    [num_slots, num_v_heads, k_dim, v_dim]
    q, k     [num_tokens, num_heads, k_dim]
    v        [num_tokens, num_v_heads, v_dim]
    g        [num_tokens, num_v_heads] or [num_tokens, num_v_heads, k_dim]
    beta     [num_tokens, num_v_heads]
    out      [num_tokens, num_v_heads, v_dim]    contiguous

Grid (requests * num_v_heads * cdiv(v_dim, BLOCK_V),), v_dim fastest: a program owns BLOCK_V columns
of one head's h in every slot of its request, and keeps them in registers, fp32, over the request's
tokens. No other program reads or writes them, so a slot is updated in place.
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
# One warp holds all of k_dim for its columns, so that the sums over it stay inside the warp.
MAX_ELEMENTS_PER_WARP = 4096  # default


# fmt: off
@triton.jit(do_not_specialize=["num_tokens", "num_reqs", "num_programs"])
def gated_delta_update_kernel(
    state_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr,
    rows, num_tokens, num_reqs, num_programs, num_slots, scale,
    q_strides, k_strides, v_strides, g_strides, beta_strides,
    NUM_V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    V_HEADS_PER_HEAD: tl.constexpr, QK_L2NORM: tl.constexpr, DECAY_PER_CHANNEL: tl.constexpr,
    STATE_STRIDES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # fmt: on
    TILES: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    # Every offset is int64 before it meets a stride.
    request = (program // (TILES * NUM_V_HEADS)).to(tl.int64)
    v_head = (program // TILES % NUM_V_HEADS).to(tl.int64)
    head = v_head // V_HEADS_PER_HEAD
    channels = tl.arange(0, BLOCK_K).to(tl.int64)
    columns = (program % TILES * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    channel_mask = channels < K_DIM
    column_mask = columns < V_DIM
    mask = channel_mask[:, None] & column_mask[None, :]
    out_ptrs = out_ptr + v_head * V_DIM + columns

    begin, length, padding = row_tokens(rows, request, num_tokens, num_reqs)
    active, old, _, slot = row_start(rows, request, length, num_reqs, num_slots)
    if active:
        state_ptrs = (
            state_ptr + v_head * STATE_STRIDES[1]
            + channels[:, None] * STATE_STRIDES[2] + columns[None, :] * STATE_STRIDES[3]
        )  # fmt: skip
        present = tl.where(old, mask, False)
        h = tl.load(state_ptrs + slot * STATE_STRIDES[0], mask=present, other=0).to(tl.float32)
        # Threads may hold copies of an element: all have read it before one of them stores.
        tl.debug_barrier()
        if not rows.TARGET_PER_TOKEN:
            target = target_slot(rows, request, length - 1, num_slots)

        q_ptrs = q_ptr + head * q_strides[1] + channels * q_strides[2]
        k_ptrs = k_ptr + head * k_strides[1] + channels * k_strides[2]
        v_ptrs = v_ptr + v_head * v_strides[1] + columns * v_strides[2]
        g_ptrs = g_ptr + v_head * g_strides[1]
        g_mask = True
        if DECAY_PER_CHANNEL:
            g_ptrs += channels * g_strides[2]
            g_mask = channel_mask
        ptrs = (q_ptrs, k_ptrs, v_ptrs, g_ptrs, beta_ptr + v_head * beta_strides[1])
        strides = (q_strides[0], k_strides[0], v_strides[0], g_strides[0], beta_strides[0])
        masks = (channel_mask, channel_mask, column_mask, g_mask, True)

        # A token's inputs are on their way while the one before it is computed.
        ahead = load_token(ptrs, strides, masks, begin, True)
        for t in range(length):
            token = begin + t
            q, k, v = ahead[0].to(tl.float32), ahead[1].to(tl.float32), ahead[2].to(tl.float32)
            decay = tl.exp(ahead[3].to(tl.float32))
            beta = ahead[4].to(tl.float32)
            ahead = load_token(ptrs, strides, masks, token + 1, t + 1 < length)
            if rows.TARGET_PER_TOKEN:
                target = target_slot(rows, request, t, num_slots)

            if QK_L2NORM:
                q = q / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6)
                k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
            q *= scale
            h *= decay[:, None] if DECAY_PER_CHANNEL else decay
            error = beta * (v - tl.sum(h * k[:, None], axis=0))
            y = tl.sum(h * q[:, None], axis=0) + tl.sum(q * k, axis=0) * error
            h += k[:, None] * error[None, :]
            here = out_ptrs + token * (NUM_V_HEADS * V_DIM)
            tl.store(here, y.to(out_ptr.dtype.element_ty), mask=column_mask)
            if rows.TARGET_PER_TOKEN:
                store_state(state_ptrs, STATE_STRIDES[0], h, target, mask)
        if not rows.TARGET_PER_TOKEN:
            store_state(state_ptrs, STATE_STRIDES[0], h, target, mask)
    else:
        store_zeros(out_ptrs, column_mask, NUM_V_HEADS * V_DIM, begin, begin + length, 1)
    store_padding(
        out_ptrs, column_mask, NUM_V_HEADS * V_DIM,
        request, begin, padding, num_tokens, num_programs,
    )  # fmt: skip


def launch(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor | None = None,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    has_initial_state: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    dst_indices: Tensor | None = None,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel() == 0:
        return out
    num_slots, num_v_heads, k_dim, v_dim = state.shape
    block_k = triton.next_power_of_2(k_dim)
    block_v = min(triton.next_power_of_2(v_dim), max(1, TILE_ELEMENTS // block_k))
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
    gated_delta_update_kernel[(num_programs * num_v_heads * triton.cdiv(v_dim, block_v),)](
        state, q, k, v, g, beta, out,
        rows, v.shape[0], state_indices.shape[0], num_programs, num_slots,
        k_dim**-0.5 if scale is None else scale,
        q.stride(), k.stride(), v.stride(), g.stride(), beta.stride(),
        NUM_V_HEADS=num_v_heads, K_DIM=k_dim, V_DIM=v_dim,
        V_HEADS_PER_HEAD=num_v_heads // q.shape[1], QK_L2NORM=qk_l2norm,
        DECAY_PER_CHANNEL=g.dim() == 3,
        STATE_STRIDES=state.stride(), BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=triton.cdiv(block_k * block_v, MAX_ELEMENTS_PER_WARP),
    )  # fmt: skip
    return out
