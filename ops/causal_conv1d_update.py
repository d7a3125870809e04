"""Decode step of a depthwise causal convolution over a state pool."""

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_rule, check_shape
from ._register import register
from ._state_rows import FLOAT_DTYPES, Row, as_index, check_rows, plan_rows, silu


def causal_conv1d_update_(
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
    """Convolve the step's tokens with the inputs before them; ``conv_state`` advances in place.

    Per channel: ``out[t] = silu(sum_i weight[i] * x[t - width + 1 + i] + bias)`` in fp32, the
    inputs before the step's first token coming from the state.

    Where the state lies:

    - ``state_indices`` [num_reqs], without ``num_accepted_tokens``: columns ``0 .. width - 2`` of
      the slot hold the last ``width - 1`` inputs, before and after the step.
    - ``state_indices`` [num_reqs] with ``num_accepted_tokens`` ``a``: the history is columns
      ``a - 1 .. a + width - 3``. The step stores history and inputs, less the oldest, from column
      0, as many as fit, so that the next step can take back any of its first ``next_n =
      state_len - width + 2`` tokens.
    - ``state_indices`` [num_reqs, next_n]: a slot per token, of ``width - 1`` columns. The history
      is in slot ``a - 1`` of the request (0 without ``num_accepted_tokens``); the inputs up to
      token ``t`` go to slot ``t``. Tokens past the slots are not stored.

    A new request (``has_initial_state`` False) has a history of zeros: no old byte is read,
    ``num_accepted_tokens`` is ignored, and the slots it stores to are written whole, with 0 in
    the columns that its tokens leave open.

    A row is inactive when it has no token, when its start slot is outside the pool (a new row
    with ``dst_indices`` needs none) or when it is not new and ``num_accepted_tokens`` is outside
    ``1 .. next_n``. Its output is 0, no slot is read or written. Slots of active rows are
    distinct.

    Args:
        conv_state: [num_slots, dim, state_len] fp32, bf16 or fp16, oldest input first, any strides
        x: [num_tokens, dim] fp32, bf16 or fp16
        weight: [dim, width], width >= 2
        bias: [dim]
        state_indices: int32 [num_reqs] or [num_reqs, next_n]
        query_start_loc: int32 [num_reqs + 1], first token of each request; None is one token each
        has_initial_state: bool [num_reqs]; None is True for all
        num_accepted_tokens: int32 [num_reqs], tokens of the previous step that stand
        dst_indices: int32 [num_reqs] or [num_reqs, n], slots to store to in place of
            ``state_indices``, which are then only read; a slot outside the pool stores nothing
        activation: "silu" or None

    Returns:
        [num_tokens, dim] in ``x.dtype``, 0 for padding tokens and inactive rows

    Raises:
        TypeError: a dtype is not one of the above
        ValueError: shapes or devices do not match, ``conv_state`` overlaps itself or is too short,
            or the activation is unknown
    """
    return _op(
        conv_state,
        x,
        weight,
        bias,
        state_indices,
        query_start_loc,
        has_initial_state=has_initial_state,
        num_accepted_tokens=num_accepted_tokens,
        dst_indices=dst_indices,
        activation=activation,
    )


def _check(
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
) -> None:
    check_dtype("conv_state", conv_state, *FLOAT_DTYPES)
    check_dtype("x", x, *FLOAT_DTYPES)
    check_shape("x", x, num_tokens=None, dim=None)
    num_tokens, dim = x.shape
    check_shape("conv_state", conv_state, num_slots=None, dim=dim, state_len=None)
    check_dtype("weight", weight, *FLOAT_DTYPES)
    check_shape("weight", weight, dim=dim, width=None)
    if bias is not None:
        check_dtype("bias", bias, *FLOAT_DTYPES)
        check_shape("bias", bias, dim=dim)
    check_rows(
        num_tokens,
        "conv_state",
        conv_state,
        state_indices,
        query_start_loc,
        has_initial_state,
        num_accepted_tokens,
        dst_indices,
    )
    check_device("conv_state", conv_state.device, x=x, weight=weight, bias=bias)
    _check_state_len(
        conv_state.shape[2], weight.shape[1], state_indices, num_accepted_tokens, dst_indices
    )
    if activation not in ("silu", None):
        raise ValueError(f'activation must be "silu" or None, got {activation!r}')


def _check_state_len(
    state_len: int,
    width: int,
    state_indices: Tensor,
    num_accepted_tokens: Tensor | None,
    dst_indices: Tensor | None,
) -> None:
    check_rule(width >= 2, "weight", "have width >= 2", width)
    got = f"state_len {state_len}"
    for name, indices in (("state_indices", state_indices), ("dst_indices", dst_indices)):
        if indices is not None and indices.dim() == 2:
            check_rule(
                state_len == width - 1,
                "conv_state",
                f"have state_len == width - 1 = {width - 1} with a slot per token ({name} 2-D)",
                got,
            )
    if num_accepted_tokens is not None and state_indices.dim() == 1:
        check_rule(
            state_len >= width,
            "conv_state",
            f"have state_len >= width = {width} when num_accepted_tokens is given with one slot "
            "per request",
            got,
        )
    check_rule(
        state_len >= width - 1, "conv_state", f"have state_len >= width - 1 = {width - 1}", got
    )


def _reference(
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
    num_slots, dim, state_len = conv_state.shape
    width, past = weight.shape[1], weight.shape[1] - 1
    one_slot = state_indices.dim() == 1
    rows = plan_rows(
        x.shape[0],
        num_slots,
        state_len - width + 2 if one_slot else state_indices.shape[1],
        state_indices,
        query_start_loc,
        has_initial_state,
        num_accepted_tokens,
        dst_indices,
    )
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if not rows:
        return out

    loads = [
        (i, row.source, row.column if one_slot else 0)
        for i, row in enumerate(rows)
        if row.source is not None
    ]
    history = torch.zeros(len(rows), past, dim, dtype=torch.float32, device=x.device)
    if loads:
        places, slots, columns = as_index(loads, x.device)
        columns = columns[:, None] + torch.arange(past, device=x.device)
        history[places] = conv_state[slots[:, None], :, columns].float()

    # All rows in one line, each its history and then its tokens; a row of zeros ends the line.
    parts = []
    tokens, places = [], []
    begins = []
    begin = 0
    for i, row in enumerate(rows):
        here = range(row.begin, row.begin + row.length)
        parts += [history[i], x[here.start : here.stop].float()]
        tokens += here
        places += range(begin, begin + row.length)
        begins.append(begin)
        begin += past + row.length
    line = torch.cat([*parts, history.new_zeros(1, dim)])

    y = _convolve(line.unfold(0, width, 1)[as_index(places, x.device)], weight, bias)
    out[as_index(tokens, x.device)] = (silu(y) if activation == "silu" else y).to(x.dtype)
    rolling = one_slot and num_accepted_tokens is not None
    stores = _stores(rows, begins, past, state_len, rolling, zero=begin)
    if stores:
        slots, columns, places = as_index(stores, x.device)
        conv_state[slots, :, columns] = line[places].to(conv_state.dtype)
    return out


def _convolve(windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 [tokens, dim] from windows [tokens, dim, width], summed oldest first."""
    taps = weight.float()
    y = windows[..., 0] * taps[:, 0]
    for i in range(1, taps.shape[1]):
        y += windows[..., i] * taps[:, i]
    if bias is not None:
        y += bias.float()
    return y


def _stores(
    rows: list[Row], begins: list[int], past: int, state_len: int, rolling: bool, zero: int
) -> list[tuple[int, int, int]]:
    """(slot, column, place in the line) of each column to store; ``zero`` is a place of zeros."""
    stores = []
    for row, begin in zip(rows, begins, strict=True):
        for token, slot in row.stores.items():
            first = begin + 1 if rolling else begin + 1 + token
            count = min(past + token, state_len) if rolling else past
            stores += [(slot, column, first + column) for column in range(count)]
            if row.source is None:
                stores += [(slot, column, zero) for column in range(count, state_len)]
    return stores


def _fake(
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
    return x.new_empty(x.shape)


_op = register(
    "causal_conv1d_update_("
    "Tensor(a!) conv_state, Tensor x, Tensor weight, Tensor? bias, Tensor state_indices, "
    "Tensor? query_start_loc=None, *, Tensor? has_initial_state=None, "
    'Tensor? num_accepted_tokens=None, Tensor? dst_indices=None, str? activation="silu") -> Tensor',
    check=_check,
    reference=_reference,
    fake=_fake,
    rows={"x": "token"},
    results=["token"],
)
