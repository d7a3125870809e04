"""The rows of a state pool that one step reads and writes: shared by the three updates."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import (
    check_any_shape,
    check_device,
    check_dtype,
    check_rule,
    check_shape,
    check_starts,
    check_writable,
)
from ._rows import row_bounds

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_rows(
    num_tokens: int,
    state_name: str,
    state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor | None,
    has_initial_state: Tensor | None,
    num_accepted_tokens: Tensor | None,
    dst_indices: Tensor | None,
) -> None:
    """The arguments that say which tokens and which slots belong to a request fit each other."""
    check_writable(state_name, state)
    check_dtype("state_indices", state_indices, torch.int32)
    check_any_shape(
        "state_indices", state_indices, {"num_reqs": None}, {"num_reqs": None, "next_n": None}
    )
    num_reqs = state_indices.shape[0]
    if query_start_loc is None:
        check_rule(
            num_tokens == num_reqs,
            "state_indices",
            f"have one row per token (num_reqs = num_tokens = {num_tokens}) "
            "when query_start_loc is None",
            list(state_indices.shape),
        )
    else:
        check_dtype("query_start_loc", query_start_loc, torch.int32)
        check_starts(query_start_loc, num_reqs, "state_indices")
    if has_initial_state is not None:
        check_dtype("has_initial_state", has_initial_state, torch.bool)
        check_shape("has_initial_state", has_initial_state, num_reqs=num_reqs)
    if num_accepted_tokens is not None:
        check_dtype("num_accepted_tokens", num_accepted_tokens, torch.int32)
        check_shape("num_accepted_tokens", num_accepted_tokens, num_reqs=num_reqs)
    if dst_indices is not None:
        check_dtype("dst_indices", dst_indices, torch.int32)
        check_any_shape(
            "dst_indices", dst_indices, {"num_reqs": num_reqs}, {"num_reqs": num_reqs, "n": None}
        )
    check_device(
        state_name,
        state.device,
        state_indices=state_indices,
        query_start_loc=query_start_loc,
        has_initial_state=has_initial_state,
        num_accepted_tokens=num_accepted_tokens,
        dst_indices=dst_indices,
    )


def check_accepted_has_slots(state_indices: Tensor, num_accepted_tokens: Tensor | None) -> None:
    """A state that holds no more than its last token cannot go back to an earlier one."""
    if num_accepted_tokens is not None and state_indices.dim() != 2:
        raise ValueError(
            "num_accepted_tokens needs state_indices of shape [num_reqs, next_n], "
            f"got {list(state_indices.shape)}"
        )


class Row(NamedTuple):
    """One active request of a step."""

    begin: int
    """Its first token."""
    length: int
    """Its tokens, at least one."""
    source: int | None
    """The slot that it starts from; None starts from zero and reads no slot."""
    column: int
    """Tokens of the previous step that stand, less one; 0 for a new request."""
    stores: dict[int, int]
    """Token position -> slot that takes the state after it."""


def plan_rows(
    num_tokens: int,
    num_slots: int,
    next_n: int,
    state_indices: Tensor,
    query_start_loc: Tensor | None,
    has_initial_state: Tensor | None,
    num_accepted_tokens: Tensor | None,
    dst_indices: Tensor | None,
) -> list[Row]:
    """Apply the row rules: the active rows, with every token inside ``0 .. num_tokens - 1`` and
    every slot inside ``0 .. num_slots - 1``."""
    sources = state_indices.tolist()
    targets = sources if dst_indices is None else dst_indices.tolist()
    num_reqs = len(sources)
    if query_start_loc is None:
        bounds = [(r, r + 1) for r in range(num_reqs)]
    else:
        bounds = row_bounds(query_start_loc, num_tokens)
    olds = [True] * num_reqs if has_initial_state is None else has_initial_state.tolist()
    accepted = [1] * num_reqs if num_accepted_tokens is None else num_accepted_tokens.tolist()

    rows = []
    for r, (begin, end) in enumerate(bounds):
        length, old = end - begin, olds[r]
        column = accepted[r] - 1 if old else 0
        if length <= 0 or not 0 <= column < next_n:
            continue
        source = sources[r][column] if isinstance(sources[r], list) else sources[r]
        # A new row reads no slot, so with a place of its own to store to it needs no source.
        if not 0 <= source < num_slots and (old or dst_indices is None):
            continue
        if isinstance(targets[r], list):
            stores = dict(enumerate(targets[r][:length]))
        else:
            stores = {length - 1: targets[r]}
        stores = {token: slot for token, slot in stores.items() if 0 <= slot < num_slots}
        rows.append(Row(begin, length, source if old else None, column, stores))
    return rows


def scan(
    state: Tensor,
    rows: list[Row],
    tokens: Sequence[Tensor],
    advance: Callable[..., Tensor],
) -> tuple[Tensor, Tensor]:
    """Take every row through its tokens, all rows of one token position at a time.

    ``advance(h, *tokens_here)`` moves ``h``, fp32 [rows_here, ...], in place by one token and
    returns that token's result.

    Returns:
        The token of each result, and the results; tokens of inactive rows are not among them.
    """
    # Longest first: the rows that still have a token at some position are then a prefix of h.
    rows = sorted(rows, key=lambda row: -row.length)
    h = torch.zeros(len(rows), *state.shape[1:], dtype=torch.float32, device=state.device)
    loads = [(i, row.source) for i, row in enumerate(rows) if row.source is not None]
    if loads:
        places, slots = as_index(loads, state.device)
        h[places] = state[slots].float()

    order: list[int] = []
    counts: list[int] = []
    count = len(rows)
    for position in range(rows[0].length):
        while rows[count - 1].length <= position:
            count -= 1
        counts.append(count)
        order += [row.begin + position for row in rows[:count]]
    here = as_index(order, state.device)

    results = []
    for position, inputs in enumerate(
        zip(*(token[here].split(counts) for token in tokens), strict=True)
    ):
        count = counts[position]
        results.append(advance(h[:count], *inputs))
        stores = [
            (i, row.stores[position])
            for i, row in enumerate(rows[:count])
            if position in row.stores
        ]
        if stores:
            places, slots = as_index(stores, state.device)
            state[slots] = h[places].to(state.dtype)
    return here, torch.cat(results)


def as_index(values: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """int64 [n], or one row per member of the tuples: what indexing takes."""
    return torch.tensor(values, dtype=torch.int64, device=device).t()


def silu(x: Tensor) -> Tensor:
    # F.silu rounds the last elements of a tensor otherwise than the rest, which would make a
    # token's bits depend on its place in the batch.
    return x / (1 + torch.exp(-x))
