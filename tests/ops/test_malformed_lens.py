"""Malformed lengths: no error, no memory of others, and well-formed requests as if alone."""

import pytest

from mtpgraph import ops

from ..malformed_lens import (
    MIN,
    RAGGED_OPS,
    check_flatten,
    check_has_initial_state,
    check_negative_seq_lens,
    check_starts,
    each_starts,
)


@pytest.mark.parametrize("name", RAGGED_OPS)
@each_starts
def test_malformed_starts_leave_each_request_to_itself(
    name: str, starts: list[int], device: str
) -> None:
    check_starts(name, getattr(ops, name), starts, device)


@each_starts
def test_malformed_starts_in_flatten_decode(starts: list[int], device: str) -> None:
    check_flatten(ops.flatten_decode, starts, device)


@each_starts
def test_malformed_starts_in_has_initial_state(starts: list[int], device: str) -> None:
    check_has_initial_state(ops.has_initial_state, starts, device)


@pytest.mark.parametrize(
    "name", ["flatten_decode", "has_initial_state", "indexer_logits", "indexer_select"]
)
@pytest.mark.parametrize("length", [-1, -5, MIN])
def test_a_negative_seq_len_is_padding(name: str, length: int, device: str) -> None:
    check_negative_seq_lens(name, getattr(ops, name), length, device)
