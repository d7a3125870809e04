"""The rules that every state op keeps, whatever its maths and wherever its state lies."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops

from ..helpers import assert_same_bits, assert_untouched
from ..state_modes import (
    NEXT_N,
    WIDTH,
    Mode,
    accepting_modes,
    all_modes,
    int32,
    starts,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_step(mode: Mode, num_slots: int, full: bool = False) -> tuple[Tensor, dict[str, Any]]:
    """A random step: ragged rows, new rows, padding of every kind, slots outside the pool."""
    num_reqs = random.randint(0, 5)
    slots = random.sample(range(num_slots), num_slots)
    odd = [-1, -7, num_slots, 2**31 - 1, -(2**31)]

    def draw() -> int:
        return random.choice(odd) if random.random() < 0.1 else slots.pop()

    def table(columns: int | None) -> Tensor:
        shape = (num_reqs,) if columns is None else (num_reqs, columns)
        count = num_reqs * (columns or 1)
        return int32(*(draw() for _ in range(count))).view(shape)

    rows: dict[str, Any] = {}
    indices = table(NEXT_N if mode.slot_per_token else None)
    lens = [random.choice([0, 1, 1, 2, 3, NEXT_N, NEXT_N + 3]) for _ in range(num_reqs)]
    if random.random() < 0.2:
        lens = [1] * num_reqs
    else:
        rows["query_start_loc"] = starts(lens)
    if random.random() < 0.7:
        rows["has_initial_state"] = torch.rand(num_reqs) < 0.7
    if mode.rolling or (mode.takes_accepted and random.random() < 0.8):
        accepted = [random.choice([1, 2, 3, NEXT_N, 1, 2, 0, -1, NEXT_N + 1]) for _ in lens]
        rows["num_accepted_tokens"] = int32(*accepted)
    if random.random() < 0.3:
        wide = not mode.name.startswith("conv") or mode.slot_per_token
        rows["dst_indices"] = table(random.choice([None, 2, NEXT_N]) if wide else None)
    return indices, rows


@all_modes
@pytest.mark.parametrize("repeat", range(3))
def test_random_steps_match_the_oracle(mode: Mode, repeat: int, full: bool) -> None:
    for _ in range(100 if full else 12):
        state = mode.pool(60)
        indices, rows = make_step(mode, 60)
        num_tokens = len(indices)
        if "query_start_loc" in rows:
            num_tokens = int(rows["query_start_loc"][-1]) + random.choice([0, 0, 3])
        mode.check(state, mode.inputs(num_tokens), indices, **rows)


@all_modes
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_dtypes(mode: Mode, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    state = mode.pool(20, state_dtype)
    rows: dict[str, Any] = {"has_initial_state": torch.tensor([True, False, True])}
    if mode.takes_accepted:
        rows["num_accepted_tokens"] = int32(2, 1, 4)
    out = mode.check(
        state,
        mode.inputs(6, dtype),
        mode.indices([0, 8, 12]),
        query_start_loc=starts([1, 3, 2]),
        **rows,
    )
    assert out.dtype == dtype


@all_modes
def test_the_state_is_rounded_when_stored_and_not_between_tokens(mode: Mode) -> None:
    # In fp16, one call of three tokens and three calls of one are two different results.
    inputs = mode.inputs(3)
    coarse, fine = mode.pool(4, torch.float16), mode.pool(4)
    fine.copy_(coarse)
    rows = {"query_start_loc": starts([3])} | mode.accepted(1)
    out = mode.run(coarse, inputs, mode.indices([0]), **rows)
    assert_same_bits(out, mode.run(fine, inputs, mode.indices([0]), **rows))
    assert_same_bits(coarse, fine.half())


@all_modes
@pytest.mark.parametrize("byte", ["NaN", "+Inf", "-Inf"])
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_a_new_row_reads_nothing_of_its_slots(
    mode: Mode, byte: str, state_dtype: torch.dtype
) -> None:
    stale = mode.nan_pool(12, state_dtype)
    if byte != "NaN":
        stale.fill_(float(byte))
    clean = torch.zeros_like(stale)
    inputs, indices = mode.inputs(6), mode.indices([0, 4])
    rows: dict[str, Any] = {
        "query_start_loc": starts([2, 4]),
        "has_initial_state": torch.tensor([False, False]),
    }
    if mode.takes_accepted:
        rows["num_accepted_tokens"] = int32(1, 1)
    out = mode.run(stale, inputs, indices, **rows)
    assert out.isfinite().all()
    assert_same_bits(out, mode.run(clean, inputs, indices, **rows))
    written = [0, 1, 4, 5, 6, 7] if mode.slot_per_token else [0, 4]
    assert_same_bits(stale[written], clean[written])
    assert stale[written].isfinite().all()


@accepting_modes
@pytest.mark.parametrize("junk", [0, -1, 3, NEXT_N + 1, 99, 2**31 - 1, -(2**31)])
def test_a_new_row_ignores_num_accepted_tokens(mode: Mode, junk: int) -> None:
    inputs = mode.inputs(3)
    rows: dict[str, Any] = {
        "query_start_loc": starts([3]),
        "has_initial_state": torch.tensor([False]),
    }
    one, other = mode.nan_pool(4), mode.nan_pool(4)
    out = mode.run(one, inputs, mode.indices([0]), num_accepted_tokens=int32(1), **rows)
    same = mode.run(other, inputs, mode.indices([0]), num_accepted_tokens=int32(junk), **rows)
    assert_same_bits(out, same)
    assert_same_bits(one, other)


@all_modes
def test_resetting_first_equals_the_mask_bit_for_bit(mode: Mode) -> None:
    # What lets a compiler drop the reset. The spare columns of a conv slot count too.
    for state_dtype in DTYPES:
        old = mode.nan_pool(20, state_dtype)
        old[[4, 5, 6, 7]] = mode.pool(4, state_dtype)
        masked, reset = old.clone(), old.clone()
        inputs, indices = mode.inputs(7), mode.indices([0, 4, -1, 8])
        has_initial_state = torch.tensor([False, True, False, False])
        rows: dict[str, Any] = {"query_start_loc": starts([1, 2, 1, 3])}
        if mode.takes_accepted:
            rows["num_accepted_tokens"] = int32(1, 2, 1, 1)
        out = mode.run(masked, inputs, indices, has_initial_state=has_initial_state, **rows)
        first = indices[:, 0].contiguous() if mode.slot_per_token else indices
        ops.reset_states_(reset, first, has_initial_state)
        assert_same_bits(out, mode.run(reset, inputs, indices, **rows))
        assert_same_bits(masked, reset)


@all_modes
@pytest.mark.parametrize("lens", [[0, 0, 2, 0], [NEXT_N, NEXT_N, 2, NEXT_N]], ids=["0", "next_n"])
@pytest.mark.parametrize("pad", [-1, -9, 40, 2**31 - 1])
def test_padding_rows_write_zeros_and_touch_nothing(mode: Mode, lens: list[int], pad: int) -> None:
    state = mode.nan_pool(40)
    state[4:8] = mode.pool(4)
    before = state.clone()
    indices = mode.indices([[pad] * mode.columns] * 2 + [4] + [[pad] * mode.columns])
    rows = {"query_start_loc": starts(lens)} | mode.accepted(1, 1, 1, 1)
    inputs = mode.inputs(sum(lens) + 3)
    out = mode.check(state, inputs, indices, **rows)
    real = slice(sum(lens[:2]), sum(lens[:2]) + 2)
    assert (out[real] != 0).any()
    out[real] = 0
    assert_same_bits(out, torch.zeros_like(out))
    assert_untouched(state, before, [4, 5] if mode.slot_per_token else [4])


@all_modes
def test_tokens_of_padding_may_hold_anything(mode: Mode) -> None:
    clean = mode.inputs(7)
    dirty = mode.take(clean, range(7))
    for name in mode.of_token & dirty.keys():
        dirty[name][[0, 1, 5, 6]] = float("nan")
    indices = mode.indices([[-1] * mode.columns, 4])
    rows = {"query_start_loc": starts([2, 3])} | mode.accepted(1, 1)
    one = mode.pool(8)
    other = one.clone()
    assert_same_bits(mode.run(one, clean, indices, **rows), mode.run(other, dirty, indices, **rows))
    assert_same_bits(one, other)


@all_modes
def test_rows_without_tokens_may_share_a_live_slot(mode: Mode) -> None:
    state = mode.pool(8)
    rows: dict[str, Any] = {"query_start_loc": starts([0, 0, 1, 0])}
    rows["has_initial_state"] = torch.tensor([False, True, True, False])
    if mode.takes_accepted:
        rows["num_accepted_tokens"] = int32(1, 1, 1, 1)
    mode.check(state, mode.inputs(1), mode.indices([4, 4, 4, 4]), **rows)


@accepting_modes
@pytest.mark.parametrize("accepted", [0, -1, NEXT_N + 1, 2**31 - 1, -(2**31)])
def test_a_count_out_of_range_makes_an_old_row_inactive(mode: Mode, accepted: int) -> None:
    state = mode.pool(8)
    before = state.clone()
    out = mode.run(
        state,
        mode.inputs(3),
        mode.indices([0, 4]),
        query_start_loc=starts([2, 1]),
        num_accepted_tokens=int32(accepted, NEXT_N),
    )
    assert_same_bits(out[:2], torch.zeros_like(out[:2]))
    assert (out[2] != 0).any()
    assert_untouched(state, before, [4])


@all_modes
def test_slot_0_is_an_ordinary_slot(mode: Mode) -> None:
    moved, plain = mode.pool(8), mode.pool(8)
    moved[4:] = plain[:4]
    inputs = mode.inputs(1)
    rows = mode.accepted(1)
    out = mode.run(plain, inputs, mode.indices([0]), **rows)
    assert_same_bits(out, mode.run(moved, inputs, mode.indices([4]), **rows))
    assert (out != 0).any()
    assert_same_bits(plain[:4], moved[4:])


@all_modes
def test_an_index_of_minus_1_does_not_wrap_to_the_last_slot(mode: Mode) -> None:
    state = mode.pool(9)
    before = state.clone()
    rows = mode.accepted(1, 1)
    indices = mode.indices([[-1] * mode.columns, 4])
    mode.run(state, mode.inputs(2), indices, has_initial_state=torch.tensor([False, True]), **rows)
    assert_untouched(state, before, [4])


@all_modes
def test_source_and_destination_apart(mode: Mode) -> None:
    state = mode.pool(16)
    before = state.clone()
    indices, dst = mode.indices([0, 4]), mode.indices([8, 12])
    rows = {"query_start_loc": starts([1, 3])} | mode.accepted(2, 1)
    inputs = mode.inputs(4)
    out = mode.check(state, inputs, indices, dst_indices=dst, **rows)
    assert_untouched(state, before, range(8, 16))

    # the same numbers as in place
    in_place = before.clone()
    assert_same_bits(out, mode.run(in_place, inputs, indices, **rows))
    stored = [8, 12, 13, 14] if mode.slot_per_token else [8, 12]
    if mode.name in ("conv-spare-columns", "conv-rolling"):
        # Columns that an old row leaves open stay those of each slot.
        filled = slice(0, WIDTH - 1)
        assert_same_bits(state[8, :, filled], in_place[0, :, filled])
    else:
        assert_same_bits(state[stored], in_place[[slot - 8 for slot in stored]])


@all_modes
@pytest.mark.parametrize("source", [-1, 99])
def test_a_new_row_with_a_destination_needs_no_source(mode: Mode, source: int) -> None:
    state, plain = mode.nan_pool(8), mode.nan_pool(8)
    before = state.clone()
    inputs = mode.inputs(2)
    rows: dict[str, Any] = {
        "query_start_loc": starts([2]),
        "has_initial_state": torch.tensor([False]),
    }
    if mode.takes_accepted:
        rows["num_accepted_tokens"] = int32(0)
    nowhere = mode.indices([[source] * mode.columns])
    out = mode.run(state, inputs, nowhere, dst_indices=mode.indices([4]), **rows)
    assert_same_bits(out, mode.run(plain, inputs, mode.indices([4]), **rows))
    assert_same_bits(state, plain)
    assert_untouched(state, before, [4, 5] if mode.slot_per_token else [4])


@all_modes
def test_an_old_row_without_a_source_is_inactive_whatever_its_destination(mode: Mode) -> None:
    state = mode.pool(8)
    before = state.clone()
    rows = mode.accepted(1)
    nowhere = mode.indices([[-1] * mode.columns])
    out = mode.run(state, mode.inputs(1), nowhere, dst_indices=mode.indices([4]), **rows)
    assert_same_bits(out, torch.zeros_like(out))
    assert_same_bits(state, before)


@all_modes
def test_a_store_outside_the_pool_is_skipped_and_the_row_goes_on(mode: Mode) -> None:
    state = mode.pool(8)
    before = state.clone()
    inputs = mode.inputs(3)
    rows = {"query_start_loc": starts([3])} | mode.accepted(1)
    dst = [[4, -1, 6, 99]] if mode.slot_per_token else [[-1]]
    out = mode.check(state, inputs, mode.indices([0]), dst_indices=mode.indices(dst), **rows)
    assert (out != 0).any(-1).all()
    assert_untouched(state, before, [4, 6] if mode.slot_per_token else [])
    if mode.slot_per_token:
        # in place as well, where the row starts from its first slot
        state = before.clone()
        mode.check(state, inputs, mode.indices([[0, -1, 2, 99]]), **rows)
        assert_untouched(state, before, [0, 2])


@all_modes
def test_more_tokens_than_slots(mode: Mode) -> None:
    # A prompt longer than the speculative window: all outputs, and the stores that have a place.
    state = mode.pool(4)
    rows = {"query_start_loc": starts([21])} | mode.accepted(2)
    out = mode.check(state, mode.inputs(21), mode.indices([0]), **rows)
    assert (out != 0).any(-1).all()


@all_modes
def test_a_destination_may_be_another_rows_source(mode: Mode) -> None:
    # All sources are read before any store.
    state = mode.pool(8)
    rows = mode.accepted(1, 1)
    indices = mode.indices([0, 4])
    mode.check(state, mode.inputs(2), indices, dst_indices=indices.flip(0).contiguous(), **rows)


@all_modes
def test_none_for_the_mask_is_all_true(mode: Mode) -> None:
    one = mode.pool(8)
    other = one.clone()
    inputs = mode.inputs(2)
    rows = mode.accepted(2, 1)
    out = mode.run(one, inputs, mode.indices([0, 4]), **rows)
    true = torch.tensor([True, True])
    same = mode.run(other, inputs, mode.indices([0, 4]), has_initial_state=true, **rows)
    assert_same_bits(out, same)
    assert_same_bits(one, other)


@all_modes
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_an_empty_batch(mode: Mode, num_tokens: int) -> None:
    state = mode.nan_pool(4)
    before = state.clone()
    shape = (0, NEXT_N) if mode.slot_per_token else (0,)
    rows: dict[str, Any] = {"query_start_loc": int32(0)}
    if mode.takes_accepted:
        rows["num_accepted_tokens"] = int32()
    inputs = mode.inputs(num_tokens)
    out = mode.run(state, inputs, torch.empty(shape, dtype=torch.int32), **rows)
    assert_same_bits(out, torch.zeros_like(inputs.get("v", inputs.get("x"))))
    assert_same_bits(state, before)


@all_modes
def test_requests_without_tokens(mode: Mode) -> None:
    state = mode.nan_pool(8)
    before = state.clone()
    rows = mode.accepted(1, 1)
    indices = mode.indices([0, 4])
    out = mode.run(state, mode.inputs(0), indices, query_start_loc=int32(0, 0, 0), **rows)
    assert out.shape[0] == 0
    assert_same_bits(state, before)
