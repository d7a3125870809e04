"""What the state ops mean, in float64, one request and one token at a time.

Each oracle takes the arguments of its op and changes nothing: it returns the output in float64 and
the pool after the step in the pool's dtype.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class OracleRow(NamedTuple):
    tokens: range
    new: bool
    # where the past lies; of no meaning for a new row
    slot: int
    offset: int
    # (token of the row, slot): the state after this token goes there
    stores: list[tuple[int, int]]


def active_rows(
    num_slots: int,
    next_n: int,
    num_tokens: int,
    state_indices: Tensor,
    query_start_loc: Tensor | None,
    has_initial_state: Tensor | None,
    num_accepted_tokens: Tensor | None,
    dst_indices: Tensor | None,
) -> Iterator[OracleRow]:
    def in_pool(slot: int) -> bool:
        return 0 <= slot < num_slots

    if query_start_loc is None:
        query_start_loc = torch.arange(num_tokens + 1)
    for r in range(state_indices.shape[0]):
        tokens = range(int(query_start_loc[r]), int(query_start_loc[r + 1]))
        new = has_initial_state is not None and not bool(has_initial_state[r])
        offset = 0
        if not new and num_accepted_tokens is not None:
            offset = int(num_accepted_tokens[r]) - 1
        slots = state_indices[r].reshape(-1).tolist()
        if len(tokens) == 0 or offset < 0 or offset >= next_n:
            continue
        slot = slots[offset] if state_indices.dim() == 2 else slots[0]
        free_of_source = new and dst_indices is not None
        if not in_pool(slot) and not free_of_source:
            continue

        store_to = state_indices if dst_indices is None else dst_indices
        if store_to.dim() == 1:
            stores = [(len(tokens) - 1, int(store_to[r]))]
        else:
            count = min(len(tokens), store_to.shape[1])
            stores = [(t, int(store_to[r, t])) for t in range(count)]
        yield OracleRow(tokens, new, slot, offset, [s for s in stores if in_pool(s[1])])


def conv1d(
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
) -> tuple[Tensor, Tensor]:
    num_slots, dim, state_len = conv_state.shape
    width = weight.shape[1]
    one_slot = state_indices.dim() == 1
    rolling = one_slot and num_accepted_tokens is not None
    after = conv_state.clone()
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row in active_rows(
        num_slots,
        state_len - width + 2 if one_slot else state_indices.shape[1],
        x.shape[0],
        state_indices,
        query_start_loc,
        has_initial_state,
        num_accepted_tokens,
        dst_indices,
    ):
        if row.new:
            past = torch.zeros(dim, width - 1, dtype=torch.float64, device=x.device)
        else:
            first = row.offset if one_slot else 0
            past = conv_state[row.slot, :, first : first + width - 1].double()
        line = torch.cat([past, x[row.tokens.start : row.tokens.stop].T.double()], 1)
        for t, token in enumerate(row.tokens):
            y = (line[:, t : t + width] * weight.double()).sum(1)
            if bias is not None:
                y = y + bias.double()
            out[token] = torch.nn.functional.silu(y) if activation == "silu" else y
        for t, slot in row.stores:
            # rolling: all but the oldest input, as far as it fits; else the last width - 1
            kept = line[:, 1 : width + t][:, :state_len] if rolling else line[:, t + 1 : t + width]
            if row.new:
                after[slot] = 0
            after[slot, :, : kept.shape[1]] = kept.to(after.dtype)
    return out, after


def selective_state(
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
) -> tuple[Tensor, Tensor]:
    after = state.clone()
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row in active_rows(
        state.shape[0],
        1 if state_indices.dim() == 1 else state_indices.shape[1],
        x.shape[0],
        state_indices,
        query_start_loc,
        has_initial_state,
        num_accepted_tokens,
        dst_indices,
    ):
        h = torch.zeros_like(state[0], dtype=torch.float64) if row.new else state[row.slot].double()
        stores = dict(row.stores)
        for t, token in enumerate(row.tokens):
            # What is given per head alone counts for each of its channels.
            xs = x[token].double()
            step = _like(dt[token], xs)
            if dt_bias is not None:
                step = step + _like(dt_bias, xs)
            if dt_softplus:
                step = torch.where(step <= 20, torch.log1p(step.exp()), step)
            rate = A.double() if A.dim() == h.dim() else A.double()[:, None, None]
            b, c = B[token].double(), C[token].double()
            if state.dim() == 4:
                heads = state.shape[1] // b.shape[0]
                b, c = (m.repeat_interleave(heads, 0)[:, None] for m in (b, c))
            h = torch.exp(rate * step[..., None]) * h + (step * xs)[..., None] * b
            y = (h * c).sum(-1)
            if D is not None:
                y = y + _like(D, xs) * xs
            if z is not None:
                y = y * torch.nn.functional.silu(z[token].double())
            out[token] = y
            if t in stores:
                after[stores[t]] = h.to(after.dtype)
    return out, after


def gated_delta(
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
) -> tuple[Tensor, Tensor]:
    num_slots, num_v_heads, k_dim, _ = state.shape
    factor = k_dim**-0.5 if scale is None else scale
    after = state.clone()
    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    for row in active_rows(
        num_slots,
        1 if state_indices.dim() == 1 else state_indices.shape[1],
        v.shape[0],
        state_indices,
        query_start_loc,
        has_initial_state,
        num_accepted_tokens,
        dst_indices,
    ):
        h = torch.zeros_like(state[0], dtype=torch.float64) if row.new else state[row.slot].double()
        stores = dict(row.stores)
        for t, token in enumerate(row.tokens):
            new_h = torch.empty_like(h)
            for head in range(num_v_heads):
                shared = head * q.shape[1] // num_v_heads
                qs, ks = q[token, shared].double(), k[token, shared].double()
                if qk_l2norm:
                    qs = qs / torch.sqrt(qs.dot(qs) + 1e-6)
                    ks = ks / torch.sqrt(ks.dot(ks) + 1e-6)
                decay = g[token, head].double().exp().expand(k_dim)
                kept = decay[:, None] * h[head]
                error = v[token, head].double() - ks @ kept
                new_h[head] = kept + torch.outer(ks, beta[token, head].double() * error)
                out[token, head] = factor * qs @ new_h[head]
            h = new_h
            if t in stores:
                after[stores[t]] = h.to(after.dtype)
    return out, after


def _like(per_head: Tensor, channels: Tensor) -> Tensor:
    """float64 of the shape of ``channels``, from a value per head or per channel."""
    wide = per_head.double()
    return (wide[:, None] if wide.dim() < channels.dim() else wide).expand_as(channels)
