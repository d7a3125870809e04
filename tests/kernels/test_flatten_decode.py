"""The kernel of flatten_decode against the batch's own rows."""

from typing import Any

import pytest
import torch

from mtpgraph import ops
from mtpgraph.kernels.flatten_decode import launch

from ..helpers import assert_same_bits, each_batch, make_batch, random_case
from ..ops.test_flatten_decode import Case, make_inputs, strided
from .gpu import assert_replays


@each_batch
def test_flatten_decode_kernel_equals_loops(case: Case, device: str) -> None:
    batch = make_batch(*case[:2], trailing=case[2], device=device)
    row_lens, row_requests = launch(**make_inputs(case, device))
    assert_same_bits(row_lens, batch.row_lens)
    assert_same_bits(row_requests, batch.row_requests)


def test_flatten_decode_kernel_of_many_requests(device: str) -> None:
    """More tokens than a program owns, and several steps of the search."""
    query_lens = torch.randint(0, 6, (130,)).tolist()
    seq_lens = [query_len + 3 * (i % 4) for i, query_len in enumerate(query_lens)]
    batch = make_batch(query_lens, seq_lens, trailing=9, device=device)
    row_lens, row_requests = launch(batch.query_start_loc, batch.seq_lens, batch.num_tokens)
    assert_same_bits(row_lens, batch.row_lens)
    assert_same_bits(row_requests, batch.row_requests)


def test_flatten_decode_kernel_reads_strided_inputs(device: str) -> None:
    inputs = make_inputs(device=device)
    expected = launch(**inputs)
    inputs["query_start_loc"] = strided(inputs["query_start_loc"])
    inputs["seq_lens"] = strided(inputs["seq_lens"])
    for actual, other in zip(launch(**inputs), expected, strict=True):
        assert_same_bits(actual, other)


@pytest.mark.parametrize(
    ("starts", "seq_lens", "num_tokens"),
    [
        ([0, 1, 4, 4, 9], [7, 3, 0, 11], 3),
        ([0, 2, 5], [-4, -(2**31)], 6),
        ([-7, -2, 3, 2**31 - 1], [5, 9, 6], 8),
    ],
    ids=["cut short", "negative lengths", "starts outside"],
)
def test_flatten_decode_kernel_clamps(
    starts: list[int], seq_lens: list[int], num_tokens: int, device: str
) -> None:
    args = torch.tensor(starts, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32)
    expected = ops.flatten_decode(*args, num_tokens)
    actual = launch(args[0].to(device), args[1].to(device), num_tokens)
    for tensor, other in zip(actual, expected, strict=True):
        assert_same_bits(tensor.cpu(), other)


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [1, 64, 4096])
def test_flatten_decode_replays(num_reqs: int) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        query_lens = torch.randint(0, 9, (num_reqs,))
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)]).int()
        seq_lens = (query_lens + torch.randint(0, 2**20, (num_reqs,))).int()
        seq_lens[seed % num_reqs] = 0
        return {
            "query_start_loc": starts.cuda(),
            "seq_lens": seq_lens.cuda(),
            "num_tokens": 8 * num_reqs + 1,
        }

    inputs = [make(seed) for seed in range(4)]
    for values in inputs:
        cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        expected = ops.flatten_decode(**cpu)
        for actual, other in zip(launch(**values), expected, strict=True):
            assert_same_bits(actual.cpu(), other)
    assert_replays(ops.flatten_decode, inputs)


@pytest.mark.gpu
def test_flatten_decode_on_the_card_equals_random_batches() -> None:
    for _ in range(50):
        case = random_case(max_reqs=40)
        batch = make_batch(*case[:2], trailing=case[2], device="cuda")
        row_lens, row_requests = launch(batch.query_start_loc, batch.seq_lens, batch.num_tokens)
        assert_same_bits(row_lens, batch.row_lens)
        assert_same_bits(row_requests, batch.row_requests)
