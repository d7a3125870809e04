"""Failures of recurrent state that others met in public, each as the smallest input for our ops.

``test_f1_...`` and the like follow the letters of the groups of cases (A: tracing, D: indices,
E: graphs, F: split and state), ``test_state_07_...`` the numbers of the state reports. A fault
of one op is tested for every op that could have it.
"""

import mmap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.optests import OpCheckError

from mtpgraph import ops

from .helpers import assert_same_bits, assert_untouched, nan_pool
from .state_modes import (
    MODES,
    NEXT_N,
    Inputs,
    Mode,
    accepting_modes,
    all_modes,
    int32,
    starts,
)

NEW, OLD = torch.tensor([False]), torch.tensor([True])


def run_one(
    mode: Mode,
    state: Tensor,
    inputs: Inputs,
    tokens: range,
    accepted: int = 1,
    mask: Tensor = OLD,
) -> Tensor:
    """A step of one request, which lives in slot 4 and those after it."""
    return mode.run(
        state,
        mode.take(inputs, tokens),
        mode.indices([4]),
        query_start_loc=starts([len(tokens)]),
        has_initial_state=mask,
        **mode.accepted(accepted),
    )


@all_modes
@pytest.mark.parametrize("stale", [7.0, float("nan")], ids=str)
def test_f1_new_request_over_stale_slot(mode: Mode, stale: float) -> None:
    """A prompt of 3 tokens under a decode threshold of 4 went on from the state of the slot's
    previous owner (vLLM #32716, #32118)."""
    inputs = mode.inputs(3)
    state = mode.pool(8).fill_(stale)
    out = run_one(mode, state, inputs, range(3), mask=NEW)
    assert_same_bits(out, mode.one_by_one(inputs, 3))
    clean = torch.zeros_like(state)
    run_one(mode, clean, inputs, range(3), mask=NEW)
    written = [4, 5, 6] if mode.slot_per_token else [4]
    assert_same_bits(state[written], clean[written])


@all_modes
def test_f1_a_chunk_without_context_is_a_new_request(mode: Mode) -> None:
    """The first chunk of a long prompt has no past either: seq_len equals query_len, however many
    tokens are still to come."""
    query_start_loc, seq_lens = int32(0, 3, 5), int32(3, 9)
    mask = ops.has_initial_state(query_start_loc, seq_lens)
    assert mask.tolist() == [False, True]
    state = mode.pool(8)
    inputs = mode.inputs(5)
    rows = {"query_start_loc": query_start_loc, "has_initial_state": mask}
    out = mode.check(state, inputs, mode.indices([0, 4]), **rows, **mode.accepted(1, 1))
    assert_same_bits(out[:3], mode.one_by_one(inputs, 3))


@accepting_modes
@pytest.mark.parametrize("prompt", [NEXT_N - 1, NEXT_N, NEXT_N + 1])
def test_f2_prompt_as_long_as_a_verify_row(mode: Mode, prompt: int) -> None:
    """A prompt of exactly 1 + K tokens looked like a uniform decode, replayed the verify graph, and
    its state was never written (vLLM #47123, #49918)."""
    inputs = mode.inputs(prompt + 2)
    truth = mode.one_by_one(inputs, prompt + 2)
    state = mode.nan_pool(8)
    out = run_one(mode, state, inputs, range(min(prompt, NEXT_N)), mask=NEW)
    assert_same_bits(out, truth[: len(out)])
    for t in range(NEXT_N, prompt):
        out = run_one(mode, state, inputs, range(t, t + 1), accepted=NEXT_N)
        assert_same_bits(out, truth[t : t + 1])
    last = prompt if prompt <= NEXT_N else 1
    out = run_one(mode, state, inputs, range(prompt, prompt + 2), accepted=last)
    assert_same_bits(out, truth[prompt:])


@accepting_modes
def test_f3_last_chunk_of_one_token_among_verify_rows(mode: Mode) -> None:
    """Two verify rows and the last token of a prompt of 9 in chunks of 8 tripped an assertion on
    the mix (vLLM #34871)."""
    inputs = mode.inputs(9)
    lens, seq_lens = [NEXT_N, NEXT_N, 1], int32(40, 20, 9)
    mask = ops.has_initial_state(starts(lens), seq_lens)
    assert mask.all()
    rows = {"query_start_loc": starts(lens), "has_initial_state": mask}
    state = mode.pool(12)
    out = mode.check(state, inputs, mode.indices([0, 4, 8]), **rows, **mode.accepted(2, 3, 1))
    assert (out[-1] != 0).any()


@all_modes
def test_f5_a_freed_slot_written_late(mode: Mode) -> None:
    """A block changed hands without being zeroed, and a step still in flight wrote into it after it
    was freed (vLLM #56524, #45096). Clearing at first use does not care when the write came."""
    state = mode.pool(8)
    first, second = mode.inputs(3), mode.inputs(2)
    run_one(mode, state, first, range(2), mask=NEW)
    # freed here; the late write of the old owner
    run_one(mode, state, first, range(2, 3), accepted=2)
    out = run_one(mode, state, second, range(2), mask=NEW)
    assert_same_bits(out, mode.one_by_one(second, 2))


@all_modes
def test_f8_lengths_are_read_from_the_device_tensors_at_the_call(mode: Mode) -> None:
    """A copy of the lengths on the host was one step behind, so the second step of a request was
    taken for its first, or the other way round (vLLM #32716, #33997)."""
    query_start_loc, seq_lens = int32(0, 2), int32(2)
    inputs = mode.inputs(4)
    truth = mode.one_by_one(inputs, 4)
    state = mode.nan_pool(8)
    for step in range(2):
        mask = ops.has_initial_state(query_start_loc, seq_lens)
        tokens = range(2 * step, 2 * step + 2)
        out = run_one(mode, state, inputs, tokens, accepted=2, mask=mask)
        assert_same_bits(out, truth[tokens.start : tokens.stop])
        seq_lens += 2


@accepting_modes
def test_d6_no_accepted_token(mode: Mode) -> None:
    """A count of 0 became the index -1: the row took its neighbour's last slot, or memory before
    the table (SGLang #48475, #50021)."""
    state = mode.pool(8)
    before = state.clone()
    inputs = mode.inputs(2)
    indices = mode.indices([0, 4])
    out = mode.check(state, inputs, indices, num_accepted_tokens=int32(0, 2))
    assert_same_bits(out[0], torch.zeros_like(out[0]))
    assert_untouched(state, before, [4])
    # the row before it is the one that 0 - 1 reached
    swapped = before.clone()
    mode.run(swapped, inputs, indices, num_accepted_tokens=int32(2, 0))
    assert_untouched(swapped, before, [0])


@all_modes
def test_e2_reset_is_data_not_part_of_the_captured_step(mode: Mode) -> None:
    """The graph that was captured first held the clearing of the state, and cleared it at each
    token (ik_llama.cpp #1393). The same call with the flag changed in place must tell apart."""
    mask = torch.tensor([True])
    inputs = mode.inputs(1)
    state = mode.pool(8)
    fused, reset = state.clone(), state.clone()
    first = int32(4)

    def step() -> tuple[Tensor, Tensor]:
        masked = run_one(mode, fused, inputs, range(1), mask=mask)
        ops.reset_states_(reset, first, mask)
        return masked, run_one(mode, reset, inputs, range(1))

    expected = run_one(mode, state, inputs, range(1))
    for out in step():
        assert_same_bits(out, expected)
    mask.fill_(False)
    for out in step():
        assert_same_bits(out, mode.one_by_one(inputs, 1))
    mask.fill_(True)
    twice = mode.one_by_one(mode.take(inputs, [0, 0]), 2)
    for out in step():
        assert_same_bits(out, twice[1:])


def test_a9_a_step_on_slices_of_a_cache_copies_no_cache() -> None:
    """An op that mutates a view of an input was not put back in place: the whole cache was cloned
    at each call (pytorch #131192, #127660)."""
    modes = [MODES[name] for name in ("conv", "mamba2", "gdn")]
    inputs = [mode.inputs(3) for mode in modes]
    states = [mode.nan_pool(64) for mode in modes]

    def step(states: list[Tensor], indices: Tensor, mask: Tensor) -> list[Tensor]:
        outs = []
        for mode, state, given in zip(modes, states, inputs, strict=True):
            ops.reset_states_(state[:32], indices, mask)
            outs.append(mode.run(state[:32], given, indices))
            outs.append(mode.run(state[32:], given, indices, has_initial_state=mask))
        return outs

    indices, mask = int32(3, 0, 31), torch.tensor([False, False, False])
    expected_states = [state.clone() for state in states]
    expected = step(expected_states, indices, mask)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    outs, code = run_and_get_code(compiled, states, indices, mask)
    for out, same in zip([*outs, *states], [*expected, *expected_states], strict=True):
        assert_same_bits(out, same)
    allocations = [
        line for line in "\n".join(code).splitlines() if "empty_strided" in line and "(64," in line
    ]
    assert allocations == []


UPDATES = ["causal_conv1d_update_", "selective_state_update_", "gated_delta_update_"]


@pytest.mark.parametrize("name", [*UPDATES, "reset_states_"])
def test_a10_the_schema_declares_the_state_and_nothing_else_as_written(name: str) -> None:
    """An under-declared mutation lets a compiler move or drop the update, an over-declared one
    makes it copy (aiter, llm-scaler #572)."""
    schema = getattr(torch.ops.mtpgraph, name).default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["conv_state" if "conv" in name else "state"]
    assert [a for a in schema.arguments if a.alias_info] == [schema.arguments[0]]
    assert all(returned.alias_info is None for returned in schema.returns)
    assert len(schema.returns) == (0 if name == "reset_states_" else 1)


def test_a10_opcheck_finds_a_mutation_that_is_not_declared() -> None:
    """What the tests of our ops rely on to keep the schemas honest."""

    @torch.library.custom_op("mtpgraph_tests::undeclared", mutates_args=())
    def undeclared(state: Tensor, x: Tensor) -> Tensor:
        state.add_(1)
        return x.clone()

    undeclared.register_fake(lambda state, x: torch.empty_like(x))
    with pytest.raises(OpCheckError, match="state"):
        torch.library.opcheck(undeclared, (torch.zeros(3), torch.zeros(2)))


@all_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_01_prompt_of_one_token_over_a_stale_slot(mode: Mode, dtype: torch.dtype) -> None:
    """With the budget of a step used up a new request got a single token and ran as a decode on
    the slot of another (vLLM #32118)."""
    inputs = mode.inputs(1)
    stale, clean = mode.nan_pool(8, dtype), mode.pool(8, dtype).zero_()
    before = stale.clone()
    out = run_one(mode, stale, inputs, range(1), mask=NEW)
    assert_same_bits(out, mode.one_by_one(inputs, 1))
    run_one(mode, clean, inputs, range(1), mask=NEW)
    assert_same_bits(stale[4], clean[4])
    assert stale[4].isfinite().all()
    assert_untouched(stale, before, [4])


@accepting_modes
def test_state_02_short_prompt_next_to_a_verify_row(mode: Mode) -> None:
    """A prompt of 3 tokens under a threshold of 4 was taken for a decode (vLLM #35447, #37303).
    Row 0 starts from zero, row 1 from the second token of its last step."""
    state = mode.nan_pool(8)
    state[[4, 5]] = mode.pool(2)
    inputs = mode.inputs(3 + NEXT_N)
    rows = {
        "query_start_loc": starts([3, NEXT_N]),
        "has_initial_state": torch.tensor([False, True]),
    }
    out = mode.check(state, inputs, mode.indices([0, 4]), **rows, **mode.accepted(99, 2))
    assert_same_bits(out[:3], mode.one_by_one(inputs, 3))
    assert out.isfinite().all()


class Buffers:
    """The inputs of a step in tensors that keep their addresses, as a captured graph reads them."""

    def __init__(self, mode: Mode, num_reqs: int) -> None:
        self.mode = mode
        self.inputs = mode.inputs(num_reqs * NEXT_N)
        self.indices = mode.indices([[-1] * mode.columns] * num_reqs)
        self.query_start_loc = starts([0] * num_reqs)
        self.mask = torch.ones(num_reqs, dtype=torch.bool)
        self.accepted = int32(*[1] * num_reqs)

    def fill(
        self, inputs: Inputs, slots: list[Any], lens: list[int], mask: list[bool], *accepted: int
    ) -> None:
        for name in self.mode.of_token & inputs.keys():
            self.inputs[name][: sum(lens)] = inputs[name][: sum(lens)]
        for name in inputs.keys() - self.mode.of_token:
            self.inputs[name] = inputs[name]
        self.indices.copy_(self.mode.indices(slots))
        self.query_start_loc.copy_(starts(lens))
        self.mask.copy_(torch.tensor(mask))
        self.accepted.copy_(int32(*accepted))

    def replay(self, state: Tensor) -> Tensor:
        rows = {"num_accepted_tokens": self.accepted} if self.mode.takes_accepted else {}
        return self.mode.run(
            state,
            self.inputs,
            self.indices,
            query_start_loc=self.query_start_loc,
            has_initial_state=self.mask,
            **rows,
        )


@all_modes
def test_state_03_prompt_of_exactly_next_n_through_buffers_filled_with_padding(mode: Mode) -> None:
    """A prompt or its tail of 1 + K tokens replayed the full graph while the index buffer still
    held the padding of the capture: the guard skipped the writes (vLLM #49918, #53051)."""
    inputs = mode.inputs(2 * NEXT_N)
    truth = mode.one_by_one(inputs, 2 * NEXT_N)
    state = mode.nan_pool(8)
    buffers = Buffers(mode, 1)
    before = state.clone()
    buffers.replay(state)
    assert_same_bits(state, before)
    for step in range(2):
        part = mode.take(inputs, range(step * NEXT_N, (step + 1) * NEXT_N))
        # After the prompt its last token is where the state is: all of them stand.
        buffers.fill(part, [4], [NEXT_N], [step > 0], NEXT_N)
        out = buffers.replay(state)
        assert_same_bits(out, truth[step * NEXT_N : (step + 1) * NEXT_N])


@all_modes
def test_state_04_no_row_keeps_values_of_the_last_step(mode: Mode) -> None:
    """The last chunk of a prompt on the decode graph read the buffers of the step before
    (vllm-ascend #12255)."""
    state = mode.nan_pool(16)
    state[12:] = mode.pool(4)
    fresh = state.clone()
    buffers = Buffers(mode, 2)
    first, second = mode.inputs(5), mode.inputs(3)
    second |= {name: first[name] for name in first.keys() - mode.of_token}
    buffers.fill(first, [0, 12], [4, 1], [False, True], 7, 1)
    buffers.replay(state)
    fresh[:4], fresh[12:] = state[:4], state[12:]
    buffers.fill(second, [12, 4], [1, 2], [True, False], 1, 0)
    out = buffers.replay(state)
    rows = {"query_start_loc": starts([1, 2]), "has_initial_state": torch.tensor([True, False])}
    expected = mode.run(fresh, second, mode.indices([12, 4]), **rows, **mode.accepted(1, 0))
    assert_same_bits(out[:3], expected)
    assert_same_bits(out[3:], torch.zeros_like(out[3:]))
    assert_same_bits(state, fresh)


@accepting_modes
def test_state_05_last_prompt_token_with_placeholder_drafts(mode: Mode) -> None:
    """One real token and K placeholders, run as a prefill, left the state after all of them behind
    (vLLM #55178). As a verify row its drafts can be taken back."""
    inputs = mode.inputs(NEXT_N + 2)
    truth = mode.one_by_one(inputs, NEXT_N)
    state = mode.nan_pool(8)
    run_one(mode, state, inputs, range(2), mask=NEW)
    # token 2 is real, what follows it are placeholders
    junk = mode.take(inputs, [2, 4, 5, 4])
    out = run_one(mode, state, junk, range(4), accepted=2)
    assert_same_bits(out[:1], truth[2:3])
    out = run_one(mode, state, inputs, range(3, 4), accepted=1)
    assert_same_bits(out, truth[3:4])


@all_modes
def test_state_06_one_token_on_a_complete_state(mode: Mode) -> None:
    """The last prompt token, computed elsewhere up to there, is still prefilling by name and was
    taken for a first chunk (vLLM #42430, #37310). It advances the state once, without a reset."""
    inputs = mode.inputs(2)
    truth = mode.one_by_one(inputs, 2)
    source, state = mode.nan_pool(8), mode.nan_pool(8)
    run_one(mode, source, inputs, range(1), mask=NEW)
    state[4] = source[4]
    mask = ops.has_initial_state(int32(0, 1), int32(2))
    out = run_one(mode, state, inputs, range(1, 2), mask=mask)
    assert_same_bits(out, truth[1:])


@all_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_07_every_byte_ff(mode: Mode, dtype: torch.dtype) -> None:
    """Slots came with the bytes of other tenants, NaN among them (vLLM #56524)."""
    inputs = mode.inputs(3 * NEXT_N)
    state = mode.nan_pool(12, dtype)
    lens = [NEXT_N, 1, 2]
    new = torch.tensor([False] * 3)
    rows = {"query_start_loc": starts(lens), "has_initial_state": new} | mode.accepted(1, 1, 1)
    indices = mode.indices([0, 4, 8])
    assert mode.run(state, inputs, indices, **rows).isfinite().all()
    # and so is the next step, which reads what this one stored
    rows |= {"has_initial_state": ~new} | mode.accepted(*lens)
    assert mode.run(state, inputs, indices, **rows).isfinite().all()


@all_modes
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_state_08_a_slot_that_no_product_can_clear(mode: Mode, value: float) -> None:
    """0 * NaN is NaN: a reset by multiplication kept what it should clear (vLLM #35219, #35138)."""
    inputs = mode.inputs(2)
    truth = mode.one_by_one(inputs, 2)
    masked = mode.pool(8).fill_(value)
    assert_same_bits(run_one(mode, masked, inputs, range(2), mask=NEW), truth)
    reset = mode.pool(8).fill_(value)
    ops.reset_states_(reset, int32(4), NEW)
    assert_same_bits(run_one(mode, reset, inputs, range(2)), truth)


@accepting_modes
def test_state_10_new_wins_over_a_count_of_4(mode: Mode) -> None:
    """After rows swapped places the host's copy of the counts was stale: 4 was seen at a first
    step (vLLM #45100). A new row reads no column at all, the fourth neither."""
    inputs = mode.inputs(NEXT_N)
    state = mode.nan_pool(8)
    out = run_one(mode, state, inputs, range(NEXT_N), accepted=4, mask=NEW)
    assert_same_bits(out, mode.one_by_one(inputs, NEXT_N))


@accepting_modes
def test_state_11_count_of_the_previous_owner(mode: Mode) -> None:
    """A slot handed on kept the count of its last owner (vLLM #48132). The first step ignores it;
    then every prompt token counts as accepted."""
    inputs = mode.inputs(5)
    truth = mode.one_by_one(inputs, 5)
    state = mode.nan_pool(8)
    assert_same_bits(run_one(mode, state, inputs, range(3), accepted=2, mask=NEW), truth[:3])
    assert_same_bits(run_one(mode, state, inputs, range(3, 5), accepted=3), truth[3:])


@accepting_modes
def test_state_12_a_step_without_drafts_after_several_accepted(mode: Mode) -> None:
    """A step without drafts read the first column although three tokens stood
    (vLLM #39273, #40738)."""
    inputs = mode.inputs(6)
    truth = mode.one_by_one(inputs, 6)
    state = mode.nan_pool(8)
    run_one(mode, state, inputs, range(2), mask=NEW)
    step = mode.take(inputs, [2, 3, 4, 0])
    assert_same_bits(run_one(mode, state, step, range(4), accepted=2)[:3], truth[2:5])
    assert_same_bits(run_one(mode, state, inputs, range(5, 6), accepted=3), truth[5:])


@accepting_modes
def test_state_14_one_call_for_rows_of_1_4_and_4_tokens(mode: Mode) -> None:
    """A last chunk of one token together with verify rows tripped an assertion on uniform lengths
    (vLLM #34871)."""
    state = mode.pool(12)
    rows = {"query_start_loc": starts([1, 4, 4])} | mode.accepted(1, 4, 2)
    out = mode.check(state, mode.inputs(9), mode.indices([0, 4, 8]), **rows)
    assert (out != 0).any(-1).all()


def test_state_15_rejected_drafts_leave_the_window() -> None:
    """A short conv kept width - 1 columns and no counts, so rejected drafts stayed in its window
    (vLLM #44296, #50272)."""
    weight = torch.tensor([[100.0, 10.0, 1.0]])
    state = nan_pool(1, 1, 4)
    rows: dict[str, Any] = {"activation": None}
    prompt = torch.tensor([[1.0], [2.0], [3.0]])
    mask = torch.tensor([False])
    out = ops.causal_conv1d_update_(
        state,
        prompt,
        weight,
        None,
        int32(0),
        int32(0, 3),
        has_initial_state=mask,
        num_accepted_tokens=int32(1),
        **rows,
    )
    assert out.flatten().tolist() == [1, 12, 123]
    # the first of them alone stands
    out = ops.causal_conv1d_update_(
        state,
        torch.tensor([[4.0]]),
        weight,
        None,
        int32(0),
        num_accepted_tokens=int32(1),
        **rows,
    )
    assert out.flatten().tolist() == [14]

    with pytest.raises(ValueError, match=r"conv_state must have state_len >= width = 3 when"):
        ops.causal_conv1d_update_(
            torch.zeros(1, 1, 2), prompt[:1], weight, None, int32(0), num_accepted_tokens=int32(1)
        )


@all_modes
def test_state_17_slot_0_is_a_slot_and_minus_1_is_none(mode: Mode) -> None:
    """A null block that kernels took for a real slot was read and written by many rows
    (vLLM #33937). Here -1 names no slot, and 0 is as good as any other."""
    state = mode.pool(8)
    before = state.clone()
    indices = mode.indices([[-1] * mode.columns, 0, [-1] * mode.columns])
    out = mode.check(state, mode.inputs(3), indices, **mode.accepted(1, 1, 1))
    assert (out[1] != 0).any()
    assert_same_bits(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert_untouched(state, before, [0])


@all_modes
@pytest.mark.parametrize("mask", [True, False], ids=["old", "new"])
def test_state_18_minus_1_does_not_reach_the_last_slot(mode: Mode, mask: bool) -> None:
    """An index of -1 wrapped to, or was mapped to, the last live slot
    (SGLang #36885, FlashInfer #5042)."""
    pool = mode.pool(5 if mode.columns == 1 else 9)
    before = pool.clone()
    indices = mode.indices([[-1] * mode.columns, 3])
    rows = {"has_initial_state": torch.tensor([mask, True])} | mode.accepted(1, 1)
    mode.run(pool, mode.inputs(2), indices, **rows)
    assert_untouched(pool, before, [3])
    ops.reset_states_(pool, int32(-1, 3), torch.tensor([False, False]))
    assert_untouched(pool, before, [3])


@all_modes
@pytest.mark.parametrize("shared", [4, 0, -1], ids=["live", "other", "none"])
def test_state_20_padding_rows_with_the_same_slot(mode: Mode, shared: int) -> None:
    """Padding rows aliased the slot of a waiting request, and wrote to it (TensorRT-LLM #13151)."""
    state = mode.pool(8)
    before = state.clone()
    pads = [[shared + t if shared >= 0 else -1 for t in range(mode.columns)]] * 3
    rows = {"query_start_loc": starts([1, 0, 0, 0])} | mode.accepted(1, 1, 1, 1)
    mode.check(state, mode.inputs(1), mode.indices([4, *pads]), **rows)
    assert_untouched(state, before, [4])


@pytest.mark.parametrize("name", ["conv", "mamba2", "mamba1", "gdn"])
def test_state_25_token_offsets_beyond_2_to_the_31(name: str) -> None:
    """token * pitch wrapped at 58 thousand tokens of 36,864 elements (vLLM #41617,
    mamba #880). Slots beyond 2**31 elements are in tests/ops/test_state_memory.py."""
    mode = MODES[name]
    num_tokens, pitch = 58_300, 36_864
    inputs = mode.inputs(num_tokens, torch.bfloat16)
    name = "x" if "x" in inputs else "v"
    shape = inputs[name].shape[1:]
    memory = mmap.mmap(-1, num_tokens * pitch * 2)
    wide = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided(
        (num_tokens, *shape), (pitch, *torch.empty(shape, device="meta").stride())
    )
    tail = range(num_tokens - 2, num_tokens)
    wide[tail] = inputs[name][tail]
    one = mode.pool(8)
    other = one.clone()
    rows = {"query_start_loc": starts([num_tokens - 2, 2])} | mode.accepted(1, 2)
    indices = mode.indices([[-1] * mode.columns, 4])
    out = mode.run(one, inputs | {name: wide}, indices, **rows)
    expected = run_one(mode, other, mode.take(inputs, tail), range(2), accepted=2)
    assert_same_bits(out[tail], expected)
    assert_same_bits(one, other)


@all_modes
def test_state_26_source_and_destination_apart(mode: Mode) -> None:
    """A copy across a block edge ran over a state that had moved, and a new row was refused for
    want of a source (vLLM #53505, #51113)."""
    state = mode.nan_pool(16)
    state[:4] = mode.pool(4)
    before = state.clone()
    inputs = mode.inputs(4)
    rows = {
        "query_start_loc": starts([2, 2]),
        "has_initial_state": torch.tensor([True, False]),
    } | mode.accepted(1, 0)
    indices = mode.indices([0, [-1] * mode.columns])
    out = mode.check(state, inputs, indices, dst_indices=mode.indices([4, 8]), **rows)
    assert_same_bits(out[2:], mode.one_by_one(mode.take(inputs, [2, 3]), 2))
    assert_untouched(state, before, [4, 5, 8, 9] if mode.slot_per_token else [4, 8])


@all_modes
def test_state_28_padding_outputs_are_zeros(mode: Mode) -> None:
    """Outputs of padding rows that nobody wrote held NaN, which went into shared scales and expert
    choices (vLLM #37442, #39593). Here every allocation starts as NaN."""
    state = mode.nan_pool(8)
    indices = mode.indices([[-1] * mode.columns, [99] * mode.columns, 4])
    mask = torch.tensor([True, True, False])
    rows = {"query_start_loc": starts([NEXT_N, 1, 2]), "has_initial_state": mask}
    out = mode.run(state, mode.inputs(NEXT_N + 6), indices, **rows, **mode.accepted(1, 1, 1))
    assert out.isfinite().all()
    real = slice(NEXT_N + 1, NEXT_N + 3)
    assert (out[real] != 0).any()
    out[real] = 0
    assert_same_bits(out, torch.zeros_like(out))


@pytest.mark.parametrize("name", ["conv", "conv-spare-columns"])
def test_state_30_a_short_row_shifts_its_window_as_far_as_its_own_length(name: str) -> None:
    """In a ragged call without counts the window was shifted by the longest row: width 4, lengths
    3 and 1 left [x, s1, s2] (read in a public kernel)."""
    mode = MODES[name]
    state = mode.pool(2)
    before = state.clone()
    inputs = mode.inputs(4)
    mode.check(state, inputs, int32(0, 1), query_start_loc=starts([3, 1]))
    assert_same_bits(state[1, :, :2], before[1, :, 1:3])
    assert_same_bits(state[1, :, 2], inputs["x"][3])
    assert_same_bits(state[0, :, :3], inputs["x"][:3].T)
