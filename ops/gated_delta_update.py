"""Decode step of the gated delta rule (GDN, KDA) over a state pool."""

import torch
from torch import Tensor

from ._checks import check_any_shape, check_device, check_dtype, check_rule, check_shape
from ._register import register
from ._state_rows import FLOAT_DTYPES, check_accepted_has_slots, check_rows, plan_rows, scan


def gated_delta_update_(
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
    """Advance each request by the step's tokens; ``state`` is changed in place.

    Per token and value head: ``h = exp(g) * h``, ``h += k * beta * (v - k @ h)``,
    ``out = scale * q @ h`` (Yang et al. 2024, Gated Delta Networks; a decay per channel of ``k``
    is Kimi Delta Attention). The maths is fp32, ``h`` is rounded when stored only.

    Where ``h`` lies:

    - ``state_indices`` [num_reqs]: read from the slot, stored to it after the last token.
    - ``state_indices`` [num_reqs, next_n]: a slot per token. Read from slot
      ``num_accepted_tokens - 1`` of the request (0 without it); ``h`` after token ``t`` goes to
      slot ``t``. Tokens past the slots are computed and not stored.

    A new request (``has_initial_state`` False) starts from ``h = 0``: no old byte is read, and
    ``num_accepted_tokens`` is ignored.

    A row is inactive when it has no token, when its start slot is outside the pool (a new row
    with ``dst_indices`` needs none) or when it is not new and ``num_accepted_tokens`` is outside
    ``1 .. next_n``. Its output is 0, no slot is read or written. Slots of active rows are
    distinct.

    Args:
        state: [num_slots, num_v_heads, k_dim, v_dim] fp32, bf16 or fp16, any strides
        q, k: [num_tokens, num_heads, k_dim]; value head ``i`` uses head
            ``i // (num_v_heads / num_heads)``
        v: [num_tokens, num_v_heads, v_dim]
        g: log of the decay, [num_tokens, num_v_heads] or [num_tokens, num_v_heads, k_dim]
        beta: [num_tokens, num_v_heads]
        state_indices: int32 [num_reqs] or [num_reqs, next_n]
        query_start_loc: int32 [num_reqs + 1], first token of each request; None is one token each
        scale: factor of ``q``, after its norm; None is ``k_dim ** -0.5``
        qk_l2norm: whether ``q`` and ``k`` are divided by ``sqrt(sum of squares + 1e-6)``
        has_initial_state: bool [num_reqs]; None is True for all
        num_accepted_tokens: int32 [num_reqs], tokens of the previous step that stand; needs
            ``state_indices`` [num_reqs, next_n]
        dst_indices: int32 [num_reqs] (stored to after the last token) or [num_reqs, n] (after each
            token), slots to store to in place of ``state_indices``, which are then only read; a
            slot outside the pool stores nothing

    Returns:
        [num_tokens, num_v_heads, v_dim] in ``v.dtype``; 0 for padding tokens and inactive rows

    Raises:
        TypeError: a dtype is not fp32, bf16 or fp16, or an index is not int32
        ValueError: shapes or devices do not match, or ``state`` overlaps itself
    """
    return _op(
        state,
        q,
        k,
        v,
        g,
        beta,
        state_indices,
        query_start_loc,
        scale=scale,
        qk_l2norm=qk_l2norm,
        has_initial_state=has_initial_state,
        num_accepted_tokens=num_accepted_tokens,
        dst_indices=dst_indices,
    )


def _check(
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
) -> None:
    floats = {"state": state, "q": q, "k": k, "v": v, "g": g, "beta": beta}
    for name, tensor in floats.items():
        check_dtype(name, tensor, *FLOAT_DTYPES)
    check_shape("q", q, num_tokens=None, num_heads=None, k_dim=None)
    num_tokens, num_heads, k_dim = q.shape
    check_shape("k", k, num_tokens=num_tokens, num_heads=num_heads, k_dim=k_dim)
    check_shape("v", v, num_tokens=num_tokens, num_v_heads=None, v_dim=None)
    num_v_heads, v_dim = v.shape[1:]
    check_rule(num_heads >= 1, "q", "have num_heads >= 1", num_heads)
    check_rule(
        num_v_heads % num_heads == 0, "v", f"have a multiple of {num_heads} heads", num_v_heads
    )
    check_shape("state", state, num_slots=None, num_v_heads=num_v_heads, k_dim=k_dim, v_dim=v_dim)
    per_head = {"num_tokens": num_tokens, "num_v_heads": num_v_heads}
    check_any_shape("g", g, per_head, per_head | {"k_dim": k_dim})
    check_shape("beta", beta, **per_head)
    check_device("state", state.device, **floats)
    check_rows(
        num_tokens,
        "state",
        state,
        state_indices,
        query_start_loc,
        has_initial_state,
        num_accepted_tokens,
        dst_indices,
    )
    check_accepted_has_slots(state_indices, num_accepted_tokens)


def _reference(
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
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    rows = plan_rows(
        v.shape[0],
        state.shape[0],
        1 if state_indices.dim() == 1 else state_indices.shape[1],
        state_indices,
        query_start_loc,
        has_initial_state,
        num_accepted_tokens,
        dst_indices,
    )
    if not rows:
        return out

    q, k = q.float(), k.float()
    if qk_l2norm:
        q, k = _normalise(q), _normalise(k)
    q = q * (q.shape[2] ** -0.5 if scale is None else scale)
    per_head = v.shape[1] // q.shape[1]
    q, k = (tensor.repeat_interleave(per_head, 1) for tensor in (q, k))
    decay = torch.exp(g.float() if g.dim() == 3 else g.float()[..., None])

    def advance(h: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        h *= decay[..., None]
        k = k[..., None]
        error = beta[..., None] * (v - (h * k).sum(2))
        h += k * error[:, :, None]
        return (h * q[..., None]).sum(2)

    tokens, y = scan(state, rows, (q, k, v.float(), decay, beta.float()), advance)
    out[tokens] = y.to(v.dtype)
    return out


def _normalise(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _fake(
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
    return v.new_empty(v.shape)


_op = register(
    "gated_delta_update_("
    "Tensor(a!) state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state_indices, "
    "Tensor? query_start_loc=None, *, float? scale=None, bool qk_l2norm=True, "
    "Tensor? has_initial_state=None, Tensor? num_accepted_tokens=None, "
    "Tensor? dst_indices=None) -> Tensor",
    check=_check,
    reference=_reference,
    fake=_fake,
    rows=dict.fromkeys(("q", "k", "v", "g", "beta"), "token"),
    results=["token"],
)
