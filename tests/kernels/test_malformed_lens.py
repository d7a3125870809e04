"""The kernels under malformed lengths: what the references make of them, inside every tensor."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from ..malformed_lens import (
    MIN,
    RAGGED_OPS,
    check_flatten,
    check_has_initial_state,
    check_negative_seq_lens,
    check_starts,
    each_starts,
)


def launch_of(name: str) -> Callable[..., Any]:
    return importlib.import_module(f"mtpgraph.kernels.{name.removesuffix('_')}").launch


@pytest.mark.parametrize("name", RAGGED_OPS)
@each_starts
def test_malformed_starts_leave_each_request_to_itself(
    name: str, starts: list[int], device: str
) -> None:
    check_starts(name, launch_of(name), starts, device)


@each_starts
def test_malformed_starts_in_flatten_decode(starts: list[int], device: str) -> None:
    check_flatten(launch_of("flatten_decode"), starts, device)


@each_starts
def test_malformed_starts_in_has_initial_state(starts: list[int], device: str) -> None:
    check_has_initial_state(launch_of("has_initial_state"), starts, device)


@pytest.mark.parametrize("name", ["flatten_decode", "has_initial_state"])
@pytest.mark.parametrize("length", [-1, -5, MIN])
def test_a_negative_seq_len_is_padding(name: str, length: int, device: str) -> None:
    check_negative_seq_lens(name, launch_of(name), length, device)
