"""reset_states_: the rows of new requests become zero, and nothing else changes."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.ops import reset_states

from ..helpers import assert_same_bits, assert_untouched, nan_pool, storage_bytes, strided_pool
from ..state_modes import int32

OP = torch.ops.mtpgraph.reset_states_.default
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_inputs(num_slots: int = 9, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.randn(num_slots, *shape)
    state_indices = int32(5, 2, -1, 0, num_slots, 7)
    has_initial_state = torch.tensor([False, True, False, False, False, True])
    return state, state_indices, has_initial_state


@pytest.mark.parametrize("shape", [(), (4,), (3, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reset_zeroes_new_rows_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    state, state_indices, has_initial_state = make_inputs(9, *shape)
    state = state.to(dtype)
    before = state.clone()
    assert ops.reset_states_(state, state_indices, has_initial_state) is None
    assert_untouched(state, before, [5, 0])
    assert_same_bits(state[[5, 0]], torch.zeros(2, *shape, dtype=dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reset_clears_what_a_product_with_zero_would_keep(value: float, dtype: torch.dtype) -> None:
    state = torch.full((4, 6), value, dtype=dtype)
    ops.reset_states_(state, int32(1, 3), torch.tensor([False, False]))
    assert_same_bits(state[[1, 3]], torch.zeros(2, 6, dtype=dtype))
    assert_same_bits(state[[0, 2]], torch.full((2, 6), value, dtype=dtype))


def test_reset_does_not_multiply() -> None:
    source = inspect.getsource(reset_states._reference)
    assert "*" not in source


@pytest.mark.parametrize("index", [-1, -9, 9, 2**31 - 1, -(2**31)])
def test_reset_of_an_index_outside_the_pool_does_nothing(index: int) -> None:
    state = torch.randn(9, 4)
    before = state.clone()
    ops.reset_states_(state, int32(index, index), torch.tensor([False, False]))
    assert_same_bits(state, before)


def test_reset_takes_duplicates() -> None:
    state = nan_pool(5, 3)
    ops.reset_states_(state, int32(2, 2, -1, -1), torch.tensor([False] * 4))
    assert state.isfinite().all(-1).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reset_in_pages_writes_nothing_between_the_rows(dtype: torch.dtype) -> None:
    dense = torch.ones(9, 3, 4, dtype=dtype)
    paged = strided_pool(dense)
    _, state_indices, has_initial_state = make_inputs()
    ops.reset_states_(paged, state_indices, has_initial_state)
    ops.reset_states_(dense, state_indices, has_initial_state)
    assert torch.equal(storage_bytes(paged), storage_bytes(strided_pool(dense)))


def test_reset_of_a_transposed_pool() -> None:
    state = nan_pool(9, 4, 3).transpose(1, 2)
    _, state_indices, has_initial_state = make_inputs()
    ops.reset_states_(state, state_indices, has_initial_state)
    assert state.isfinite().all((1, 2)).nonzero().flatten().tolist() == [0, 5]


@pytest.mark.parametrize("num_slots", [0, 9])
def test_reset_of_an_empty_batch(num_slots: int) -> None:
    state = nan_pool(num_slots, 4)
    before = state.clone()
    ops.reset_states_(state, int32(), torch.zeros(0, dtype=torch.bool))
    assert_same_bits(state, before)


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "state dtype": (
        {"state": torch.zeros(9, 4, dtype=torch.int8)},
        TypeError,
        "state must have dtype torch.float32 or torch.bfloat16 or torch.float16, got torch.int8",
    ),
    "state scalar": (
        {"state": torch.zeros(())},
        ValueError,
        r"state must have shape \[num_slots, ...\], got \[\]",
    ),
    "state overlaps": (
        {"state": torch.zeros(1, 4).expand(9, 4)},
        ValueError,
        r"state must not overlap itself, got strides \(0, 1\) for shape \[9, 4\]",
    ),
    "state_indices dtype": (
        {"state_indices": torch.zeros(6, dtype=torch.int64)},
        TypeError,
        "state_indices must have dtype torch.int32, got torch.int64",
    ),
    "state_indices rank": (
        {"state_indices": torch.zeros(6, 2, dtype=torch.int32)},
        ValueError,
        r"state_indices must have shape \[num_reqs\], got \[6, 2\]",
    ),
    "mask dtype": (
        {"has_initial_state": torch.zeros(6, dtype=torch.int32)},
        TypeError,
        "has_initial_state must have dtype torch.bool, got torch.int32",
    ),
    "mask length": (
        {"has_initial_state": torch.zeros(5, dtype=torch.bool)},
        ValueError,
        r"has_initial_state must have shape \[num_reqs=6\], got \[5\]",
    ),
    "device": (
        {"has_initial_state": torch.zeros(6, dtype=torch.bool, device="meta")},
        ValueError,
        "has_initial_state must be on cpu as state is, got meta",
    ),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS.keys())
def test_reset_of_arguments_that_do_not_fit(
    case: tuple[dict[str, Any], type[Exception], str],
) -> None:
    changes, error, message = case
    state, state_indices, has_initial_state = make_inputs(9, 4)
    before = state.clone()
    args = {
        "state": state,
        "state_indices": state_indices,
        "has_initial_state": has_initial_state,
    }
    with pytest.raises(error, match=message):
        ops.reset_states_(**(args | changes))
    assert_same_bits(state, before)


def test_reset_refuses_a_state_that_requires_grad() -> None:
    state = torch.ones(9, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="mtpgraph::reset_states_ has no gradient"):
        ops.reset_states_(state, int32(0), torch.tensor([False]))
    assert (state == 1).all()


@pytest.mark.parametrize("case", ["dense", "paged", "batch 1", "empty"])
def test_reset_opcheck(case: str) -> None:
    state, state_indices, has_initial_state = make_inputs(9, 3, 4)
    if case == "paged":
        state = strided_pool(state)
    count = {"batch 1": 1, "empty": 0}.get(case, 6)
    torch.library.opcheck(OP, (state, state_indices[:count], has_initial_state[:count]))


def test_reset_compiled_equals_eager() -> None:
    def step(state: Tensor, state_indices: Tensor, lens: Tensor, seen: Tensor) -> Tensor:
        ops.reset_states_(state, state_indices, seen > lens)
        ops.reset_states_(state, state_indices + 1, seen > lens)
        return state.sum() + seen

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for num_reqs in (3, 5):
        args = (
            torch.arange(0, 2 * num_reqs, 2, dtype=torch.int32),
            torch.ones(num_reqs),
            torch.arange(num_reqs).float(),
        )
        eager = nan_pool(12, 3, 4)
        eager[10:] = 7
        traced = eager.clone()
        expected = step(eager, *args)
        assert_same_bits(compiled(traced, *args), expected)
        assert_same_bits(traced, eager)
        assert not eager[:4].isnan().any()


@pytest.mark.gpu
def test_reset_of_a_slot_beyond_2_to_the_31_elements() -> None:
    state = torch.ones(2049, 2**20, dtype=torch.bfloat16, device="cuda")
    ops.reset_states_(state, int32(2048, 3).cuda(), torch.tensor([False, True]).cuda())
    assert state[2048].count_nonzero() == 0
    assert (state[:2048] == 1).all()
