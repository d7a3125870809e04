"""Lengths that no scheduler sends, and what the ops make of them."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops

from .helpers import assert_close, assert_same_bits, assert_untouched
from .op_inputs import NUM_TOKENS, Inputs, make_inputs
from .state_modes import int32, written_slots

MIN, MAX = -(2**31), 2**31 - 1

STARTS = [
    [0, 2, 5, 9],
    [0, 2, 5, MAX],
    [0, 2, MAX, MAX],
    [-3, 2, 5, 7],
    [MIN, 2, 5, MAX],
    [MIN, MIN, MAX, MAX],
    [2, 2, 5, 7],
    [0, 5, 3, 7],
    [0, 5, 3, 3],
    [0, 2, MIN, 7],
    [0, MAX, 2, 5],
    [0, 7, 2, 7],
    [7, 5, 2, 0],
    [9, 9, 9, 9],
    [MAX, MAX, MAX, MAX],
    [MIN, MIN, MIN, MIN],
]
each_starts = pytest.mark.parametrize("starts", STARTS, ids=str)
"""query_start_loc of ``make_inputs``, malformed."""

# What a token of no request has, result by result.
PADDING = {
    "indexer_logits": [float("-inf")],
    "indexer_select": [-1],
    "sparse_mla_decode": [0, float("-inf")],
    "causal_conv1d_update_": [0],
    "selective_state_update_": [0],
    "gated_delta_update_": [0],
}
RAGGED_OPS = list(PADDING)
_OF_TOKEN = {"q", "k", "v", "g", "beta", "x", "z", "dt", "B", "C", "weights", "topk_indices"}
_OF_REQUEST = {
    "seq_lens",
    "block_table",
    "state_indices",
    "has_initial_state",
    "num_accepted_tokens",
}


def rows_of(starts: list[int]) -> list[range]:
    """The tokens of each request: its bounds, clamped to those of the batch."""
    bounds = [min(max(start, 0), NUM_TOKENS) for start in starts]
    return [range(*pair) for pair in itertools.pairwise(bounds)]


def claimed_once(starts: list[int], token: int) -> bool:
    """No two requests, nor a request and padding, claim ``token``."""
    claims = sum(token in row for row in rows_of(starts))
    return claims + (token >= starts[-1]) + (token < starts[0]) <= 1


def check_starts(
    name: str,
    op: Callable[..., Any],
    starts: list[int],
    device: str,
    inputs: Inputs | None = None,
) -> None:
    """Each request gets what it would get alone, padding what padding gets, and no other slot of
    the pool is touched. ``inputs``, on the CPU, are of as many tokens as ``make_inputs``'."""
    inputs = make_inputs(name) if inputs is None else inputs
    state = next((key for key in ("conv_state", "state") if key in inputs), None)
    expected_pool = None if state is None else inputs[state].clone()
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    if state is not None:
        # On the CPU ``to`` copies nothing, and the pool of ``inputs`` is looked at again.
        given[state] = given[state].clone()
    given["query_start_loc"] = int32(*starts).to(device)
    results = [result.cpu() for result in _listed(op(**given))]

    alone = [
        torch.full_like(result, fill) for result, fill in zip(results, PADDING[name], strict=True)
    ]
    for request, row in enumerate(rows_of(starts)):
        if len(row) == 0:
            continue
        values = _of_one(inputs, request, row)
        if state is not None:
            values[state] = expected_pool
        for result, part in zip(alone, _listed(getattr(ops, name)(**values)), strict=True):
            result[row.start : row.stop] = part
    tokens = [token for token in range(NUM_TOKENS) if claimed_once(starts, token)]
    for result, other in zip(results, alone, strict=True):
        _assert_equal(result[tokens], other[tokens])
    if state is not None and expected_pool is not None:
        written = written_slots(inputs[state], expected_pool)
        pool = given[state].cpu()
        assert_untouched(pool, inputs[state], written)
        _assert_equal(pool[written], expected_pool[written])


def check_flatten(op: Callable[..., Any], starts: list[int], device: str) -> None:
    """``flatten_decode`` puts a token into a row that holds it."""
    inputs = make_inputs("flatten_decode", device)
    inputs["query_start_loc"] = int32(*starts).to(device)
    row_lens, row_requests = (result.tolist() for result in op(**inputs))
    rows, seq_lens = rows_of(starts), inputs["seq_lens"].tolist()
    for token, request in enumerate(row_requests):
        holders = [r for r, row in enumerate(rows) if token in row]
        assert request in holders or (
            request == -1 and not (holders and claimed_once(starts, token))
        )
        row_len = 0
        if request >= 0:
            row_len = max(0, seq_lens[request] - (rows[request].stop - token) + 1)
        assert row_lens[token] == row_len


def check_has_initial_state(op: Callable[..., Any], starts: list[int], device: str) -> None:
    """``has_initial_state`` knows no number of tokens, and clamps from below alone."""
    for seq_lens in ([9, 3, 2], [MAX, MIN, 0], [-1, MAX, 1]):
        actual = op(int32(*starts).to(device), int32(*seq_lens).to(device))
        bounds = [max(start, 0) for start in starts]
        query_lens = [end - begin for begin, end in itertools.pairwise(bounds)]
        pairs = zip(query_lens, seq_lens, strict=True)
        assert actual.tolist() == [n > query_len or n <= 0 for query_len, n in pairs]


def check_negative_seq_lens(name: str, op: Callable[..., Any], length: int, device: str) -> None:
    """A negative length is that of a padding request."""
    inputs = make_inputs(name, device)
    expected = _listed(op(**{**inputs, "seq_lens": int32(9, 0, 2).to(device)}))
    actual = _listed(op(**{**inputs, "seq_lens": int32(9, length, 2).to(device)}))
    for result, other in zip(actual, expected, strict=True):
        assert_same_bits(result, other)


def _of_one(inputs: Inputs, request: int, row: range) -> Inputs:
    values = dict(inputs, query_start_loc=int32(0, len(row)))
    for name in _OF_TOKEN & inputs.keys():
        values[name] = inputs[name][row.start : row.stop]
    for name in _OF_REQUEST & inputs.keys():
        values[name] = inputs[name][request : request + 1]
    return values


def _listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _assert_equal(actual: Tensor, expected: Tensor) -> None:
    if actual.is_floating_point():
        assert_close(actual, expected)
    else:
        assert_same_bits(actual, expected)
