"""The kernel of has_initial_state against the definition."""

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.kernels.has_initial_state import launch

from ..helpers import assert_same_bits, each_batch, make_batch
from ..ops.test_flatten_decode import Case, strided
from .gpu import assert_replays


def expected(query_lens: list[int], seq_lens: list[int]) -> Tensor:
    pairs = zip(query_lens, seq_lens, strict=True)
    old = [seq_len > query_len or seq_len == 0 for query_len, seq_len in pairs]
    return torch.tensor(old, dtype=torch.bool)


@each_batch
def test_has_initial_state_kernel_equals_loops(case: Case, device: str) -> None:
    batch = make_batch(*case[:2], trailing=case[2], device=device)
    actual = launch(batch.query_start_loc, batch.seq_lens)
    assert_same_bits(actual.cpu(), expected(*case[:2]))


def test_has_initial_state_kernel_of_many_requests(device: str) -> None:
    query_lens = torch.randint(0, 4, (300,)).tolist()
    seq_lens = [max(0, query_len + i % 3 - 1) for i, query_len in enumerate(query_lens)]
    batch = make_batch(query_lens, seq_lens, device=device)
    actual = launch(strided(batch.query_start_loc), strided(batch.seq_lens))
    assert_same_bits(actual.cpu(), expected(query_lens, seq_lens))


def test_has_initial_state_kernel_of_malformed_lengths(device: str) -> None:
    starts = torch.tensor([-(2**31), -3, 2, 2**31 - 1, 5, 6], dtype=torch.int32)
    seq_lens = torch.tensor([-1, 2, 2**31 - 1, 4, -(2**31)], dtype=torch.int32)
    actual = launch(starts.to(device), seq_lens.to(device))
    assert_same_bits(actual.cpu(), ops.has_initial_state(starts, seq_lens))


@pytest.mark.gpu
def test_has_initial_state_replays() -> None:
    batches = [
        make_batch(query_lens, seq_lens, device="cuda")
        for query_lens, seq_lens in [
            ([1, 2, 3, 0], [1, 5, 3, 0]),
            ([4, 1, 0, 2], [9, 1, 0, 0]),
            ([0, 0, 0, 0], [0, 0, 0, 0]),
        ]
    ]
    assert_replays(
        ops.has_initial_state,
        [{"query_start_loc": b.query_start_loc, "seq_lens": b.seq_lens} for b in batches],
    )
