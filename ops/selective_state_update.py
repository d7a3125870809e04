"""Decode step of a selective state space (Mamba-2, Mamba-1) over a state pool."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check_any_shape, check_device, check_dtype, check_rule, check_shape
from ._register import register
from ._state_rows import (
    FLOAT_DTYPES,
    check_accepted_has_slots,
    check_rows,
    plan_rows,
    scan,
    silu,
)


def selective_state_update_(
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
    """Advance each request by the step's tokens; ``state`` is changed in place.

    Per token: ``dt = softplus(dt + dt_bias)``, ``h = exp(A * dt) * h + dt * x * B``,
    ``y = sum(h * C) + D * x``, ``y *= silu(z)``; softplus and the absent terms are left out
    (Dao and Gu 2024, Transformers are SSMs). The maths is fp32, ``h`` is rounded when stored only.

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
        state: [num_slots, num_heads, head_dim, state_dim] (Mamba-2) or
            [num_slots, dim, state_dim] (Mamba-1), fp32, bf16 or fp16, any strides
        x: [num_tokens, num_heads, head_dim]; Mamba-1 [num_tokens, dim]
        dt: [num_tokens, num_heads] or like ``x``; Mamba-1 like ``x``
        A: [num_heads] or [num_heads, head_dim, state_dim]; Mamba-1 [dim, state_dim]
        B, C: [num_tokens, num_groups, state_dim]; Mamba-1 [num_tokens, state_dim]
        state_indices: int32 [num_reqs] or [num_reqs, next_n]
        query_start_loc: int32 [num_reqs + 1], first token of each request; None is one token each
        D, dt_bias: [num_heads] or [num_heads, head_dim]; Mamba-1 [dim]
        z: like ``x``
        dt_softplus: whether ``dt`` goes through softplus, which is the identity above 20
        has_initial_state: bool [num_reqs]; None is True for all
        num_accepted_tokens: int32 [num_reqs], tokens of the previous step that stand; needs
            ``state_indices`` [num_reqs, next_n]
        dst_indices: int32 [num_reqs] (stored to after the last token) or [num_reqs, n] (after each
            token), slots to store to in place of ``state_indices``, which are then only read; a
            slot outside the pool stores nothing

    Returns:
        [num_tokens, num_heads, head_dim], Mamba-1 [num_tokens, dim], in ``x.dtype``; 0 for padding
        tokens and inactive rows

    Raises:
        TypeError: a dtype is not fp32, bf16 or fp16, or an index is not int32
        ValueError: shapes or devices do not match, or ``state`` overlaps itself
    """
    return _op(
        state,
        x,
        dt,
        A,
        B,
        C,
        state_indices,
        query_start_loc,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        has_initial_state=has_initial_state,
        num_accepted_tokens=num_accepted_tokens,
        dst_indices=dst_indices,
    )


def _check(
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
) -> None:
    required = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C}
    optional = {"D": D, "z": z, "dt_bias": dt_bias}
    for name, tensor in required.items():
        check_dtype(name, tensor, *FLOAT_DTYPES)
    for name, tensor in optional.items():
        if tensor is not None:
            check_dtype(name, tensor, *FLOAT_DTYPES)
    _check_shapes(state, x, dt, A, B, C, D, z, dt_bias)
    check_device("state", state.device, **required, **optional)
    check_rows(
        x.shape[0],
        "state",
        state,
        state_indices,
        query_start_loc,
        has_initial_state,
        num_accepted_tokens,
        dst_indices,
    )
    check_accepted_has_slots(state_indices, num_accepted_tokens)


def _check_shapes(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    if state.dim() not in (3, 4):
        raise ValueError(
            "state must have shape [num_slots, num_heads, head_dim, state_dim] or "
            f"[num_slots, dim, state_dim], got {list(state.shape)}"
        )
    mamba2 = state.dim() == 4
    names: tuple[str, ...] = ("num_heads", "head_dim") if mamba2 else ("dim",)
    check_shape("x", x, num_tokens=None, **dict.fromkeys(names))
    tokens = {"num_tokens": x.shape[0]}
    channels: dict[str, int] = dict(zip(names, x.shape[1:], strict=True))
    check_shape("state", state, num_slots=None, **channels, state_dim=None)
    state_dim = {"state_dim": state.shape[-1]}
    per_head = [{"num_heads": x.shape[1]}] if mamba2 else []

    check_any_shape("dt", dt, *(tokens | heads for heads in per_head), tokens | channels)
    check_any_shape("A", A, *per_head, channels | state_dim)
    groups = {}
    if mamba2:
        check_shape("B", B, **tokens, num_groups=None, **state_dim)
        groups = {"num_groups": B.shape[1]}
        check_rule(B.shape[1] >= 1, "B", "have num_groups >= 1", B.shape[1])
        rule = f"have num_groups that divide {x.shape[1]} heads"
        check_rule(x.shape[1] % B.shape[1] == 0, "B", rule, B.shape[1])
    for name, tensor in (("B", B), ("C", C)):
        check_shape(name, tensor, **tokens, **groups, **state_dim)
    if z is not None:
        check_shape("z", z, **tokens, **channels)
    for name, tensor in (("D", D), ("dt_bias", dt_bias)):
        if tensor is not None:
            check_any_shape(name, tensor, *per_head, channels)


def _reference(
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
    if state.dim() == 3:
        # Mamba-1 is Mamba-2 with a single head.
        return _reference(
            state.unsqueeze(1),
            x.unsqueeze(1),
            dt.unsqueeze(1),
            A.unsqueeze(0),
            B.unsqueeze(1),
            C.unsqueeze(1),
            state_indices,
            query_start_loc,
            D=None if D is None else D.unsqueeze(0),
            z=None if z is None else z.unsqueeze(1),
            dt_bias=None if dt_bias is None else dt_bias.unsqueeze(0),
            dt_softplus=dt_softplus,
            has_initial_state=has_initial_state,
            num_accepted_tokens=num_accepted_tokens,
            dst_indices=dst_indices,
        ).squeeze(1)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    rows = plan_rows(
        x.shape[0],
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

    decay = A.float() if A.dim() == 3 else A.float()[:, None, None]
    dt = dt.float() if dt.dim() == 3 else dt.float()[..., None]
    if dt_bias is not None:
        dt = dt + _per_channel(dt_bias)
    if dt_softplus:
        # In fp32, softplus rounds the last elements of a tensor otherwise than the rest, which
        # would make a token's bits depend on its place in the batch.
        dt = F.softplus(dt.double(), threshold=20).float()
    per_group = x.shape[1] // B.shape[1]
    B, C = (tensor.float().repeat_interleave(per_group, 1) for tensor in (B, C))

    def advance(h: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        h *= torch.exp(decay * dt[..., None])
        h += (dt * x)[..., None] * B[:, :, None]
        return (h * C[:, :, None]).sum(-1)

    tokens, y = scan(state, rows, (x.float(), dt, B, C), advance)
    if D is not None:
        y += _per_channel(D) * x[tokens].float()
    if z is not None:
        y *= silu(z[tokens].float())
    out[tokens] = y.to(x.dtype)
    return out


def _per_channel(tensor: Tensor) -> Tensor:
    """fp32 [num_heads, head_dim or 1]"""
    return tensor.float() if tensor.dim() == 2 else tensor.float()[:, None]


def _fake(
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
    return x.new_empty(x.shape)


_op = register(
    "selective_state_update_("
    "Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor state_indices, "
    "Tensor? query_start_loc=None, *, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, "
    "bool dt_softplus=False, Tensor? has_initial_state=None, Tensor? num_accepted_tokens=None, "
    "Tensor? dst_indices=None) -> Tensor",
    check=_check,
    reference=_reference,
    fake=_fake,
    rows=dict.fromkeys(("x", "dt", "B", "C", "z"), "token"),
    results=["token"],
)
