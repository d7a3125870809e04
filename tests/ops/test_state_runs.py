"""Several steps of a state op against one, and against one token at a time, to the bit."""

import itertools
import random
from typing import Any

import torch
from torch import Tensor

from ..helpers import assert_same_bits
from ..state_modes import (
    NEXT_N,
    Mode,
    accepting_modes,
    all_modes,
    int32,
    starts,
)


@all_modes
def test_two_calls_with_carried_state_equal_one(mode: Mode) -> None:
    lens, first = [5, 2, 4], [3, 1, 2]
    whole = mode.pool(12)
    parts = whole.clone()
    inputs, indices = mode.inputs(sum(lens)), mode.indices([0, 4, 8])
    bounds = [0, *itertools.accumulate(lens)]
    head = [t for r in range(3) for t in range(bounds[r], bounds[r] + first[r])]
    tail = [t for t in range(sum(lens)) if t not in head]
    rest = [n - m for n, m in zip(lens, first, strict=True)]

    def run(state: Tensor, tokens: list[int], lens: list[int], rows: dict[str, Any]) -> Tensor:
        here = mode.take(inputs, tokens)
        return mode.run(state, here, indices, query_start_loc=starts(lens), **rows)

    out = run(whole, list(range(sum(lens))), lens, mode.accepted(1, 1, 1))
    assert_same_bits(out[head], run(parts, head, first, mode.accepted(1, 1, 1)))
    assert_same_bits(out[tail], run(parts, tail, rest, mode.accepted(*first)))
    # The newest state lies elsewhere after other calls, and the next step sees the same past.
    # (Five tokens are more than the slots of the first request hold.)
    one = run(whole, [0, 1, 2], [1, 1, 1], mode.accepted(1, *lens[1:]))
    two = run(parts, [0, 1, 2], [1, 1, 1], mode.accepted(1, *rest[1:]))
    assert_same_bits(one[1:], two[1:])
    if not mode.takes_accepted:
        assert_same_bits(whole, parts)


@all_modes
def test_a_row_has_the_same_bits_alone_and_in_any_batch(mode: Mode) -> None:
    lens = [3, 1, 4, 2]
    state = mode.pool(16)
    alone = state.clone()
    inputs = mode.inputs(sum(lens))
    rows: dict[str, Any] = {}
    if mode.takes_accepted:
        rows["num_accepted_tokens"] = int32(1, 2, 3, 4)
    slots = [0, 4, 8, 12]
    out = mode.run(state, inputs, mode.indices(slots), query_start_loc=starts(lens), **rows)
    begin = 0
    for r, length in enumerate(lens):
        tokens = range(begin, begin + length)
        mine = {k: v[r : r + 1] for k, v in rows.items()}
        mine["query_start_loc"] = starts([length])
        one = mode.run(alone, mode.take(inputs, tokens), mode.indices(slots[r : r + 1]), **mine)
        assert_same_bits(out[begin : begin + length], one)
        begin += length
    assert_same_bits(state, alone)


@accepting_modes
def test_draft_verify_rollback_equals_the_sequential_run(mode: Mode) -> None:
    # Requests of different ages draft 0 to 3 tokens a step, keep some, and sit steps out. What
    # stands must be what one token at a time gives, to the bit.
    num_reqs, length = 3, 24
    streams = [mode.inputs(length) for _ in range(num_reqs)]
    for stream in streams[1:]:
        for name in stream.keys() - mode.of_token:
            stream[name] = streams[0][name]
    drafts = mode.take(mode.inputs(60), range(60)) | {
        name: streams[0][name] for name in streams[0].keys() - mode.of_token
    }

    truth = [mode.one_by_one(stream, length) for stream in streams]
    state = mode.nan_pool(num_reqs * NEXT_N + 2)
    indices = mode.indices([NEXT_N * r + 1 for r in range(num_reqs)])
    done, accepted = [0] * num_reqs, [random.randint(-3, 9) for _ in range(num_reqs)]
    while min(done) < length:
        lens, stand = [], []
        for r in range(num_reqs):
            lens.append(0 if random.random() < 0.2 else random.randint(1, NEXT_N))
            real = min(lens[r], length - done[r])
            # A prompt counts as accepted whole; a verified step keeps one token or more.
            keep = real if done[r] == 0 else random.randint(min(1, real), real)
            lens[r] = real if done[r] == 0 or real == 0 else lens[r]
            stand.append(keep)
        pieces: list[dict[str, Any]] = []
        for r in range(num_reqs):
            junk = random.sample(range(60), lens[r] - stand[r])
            pieces.append(mode.take(streams[r], range(done[r], done[r] + stand[r])))
            pieces.append(mode.take(drafts, junk))
        inputs = {
            name: torch.cat([piece[name] for piece in pieces])
            if name in mode.of_token
            else streams[0][name]
            for name in streams[0]
        }
        out = mode.run(
            state,
            inputs,
            indices,
            query_start_loc=starts(lens),
            has_initial_state=torch.tensor(
                [d > 0 or n == 0 for d, n in zip(done, lens, strict=True)]
            ),
            num_accepted_tokens=int32(*accepted),
        )
        begin = 0
        for r in range(num_reqs):
            kept = slice(begin, begin + stand[r])
            assert_same_bits(out[kept], truth[r][done[r] : done[r] + stand[r]])
            done[r] += stand[r]
            accepted[r] = stand[r] if lens[r] else accepted[r]
            begin += lens[r]
