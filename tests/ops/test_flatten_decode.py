"""flatten_decode against plain loops."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops

from ..helpers import (
    assert_compiled_equals_eager,
    assert_opcheck,
    assert_refused,
    assert_same_bits,
    each_batch,
    make_batch,
    random_case,
)

Case = tuple[list[int], list[int], int]
RAGGED: Case = ([1, 3, 0, 5], [7, 3, 0, 11], 2)


def make_inputs(case: Case = RAGGED, device: str = "cpu") -> dict[str, Any]:
    batch = make_batch(*case[:2], trailing=case[2], device=device)
    return {
        "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens,
        "num_tokens": batch.num_tokens,
    }


def strided(values: Tensor) -> Tensor:
    """The same values, every other element of a wider tensor."""
    return torch.stack([values, torch.full_like(values, 77)], dim=-1)[..., 0]


@each_batch
def test_flatten_decode_equals_loops(case: Case, device: str) -> None:
    batch = make_batch(*case[:2], trailing=case[2], device=device)
    row_lens, row_requests = ops.flatten_decode(**make_inputs(case, device))
    assert_same_bits(row_lens, batch.row_lens)
    assert_same_bits(row_requests, batch.row_requests)
    assert row_lens.is_contiguous()
    assert row_requests.is_contiguous()


def test_flatten_decode_equals_loops_on_random_batches(full: bool, device: str) -> None:
    for _ in range(1000 if full else 50):
        case = random_case()
        batch = make_batch(*case[:2], trailing=case[2], device=device)
        row_lens, row_requests = ops.flatten_decode(
            batch.query_start_loc, batch.seq_lens, batch.num_tokens
        )
        assert_same_bits(row_lens, batch.row_lens)
        assert_same_bits(row_requests, batch.row_requests)


def test_flatten_decode_reads_strided_inputs(device: str) -> None:
    inputs = make_inputs(device=device)
    expected = ops.flatten_decode(**inputs)
    inputs["query_start_loc"] = strided(inputs["query_start_loc"])
    inputs["seq_lens"] = strided(inputs["seq_lens"])
    for actual, other in zip(ops.flatten_decode(**inputs), expected, strict=True):
        assert_same_bits(actual, other)


def test_flatten_decode_of_fewer_tokens(device: str) -> None:
    """The request that is cut short has the query length that is left: 2 of 3 tokens."""
    inputs = make_inputs(device=device) | {"num_tokens": 3}
    row_lens, row_requests = ops.flatten_decode(**inputs)
    assert row_lens.tolist() == [7, 2, 3]
    assert row_requests.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"query_start_loc": torch.zeros(5, dtype=torch.int64)},
            TypeError,
            "query_start_loc must have dtype torch.int32, got torch.int64",
        ),
        (
            {"seq_lens": torch.zeros(4)},
            TypeError,
            "seq_lens must have dtype torch.int32, got torch.float32",
        ),
        (
            {"seq_lens": torch.zeros(2, 2, dtype=torch.int32)},
            ValueError,
            r"seq_lens must have shape \[num_reqs\], got \[2, 2\]",
        ),
        (
            {"query_start_loc": torch.zeros(4, dtype=torch.int32)},
            ValueError,
            r"query_start_loc must have shape \[num_reqs_plus_1=5\], got \[4\]; "
            "num_reqs is that of seq_lens$",
        ),
        (
            {"seq_lens": torch.zeros(4, dtype=torch.int32, device="meta")},
            ValueError,
            "seq_lens must be on cpu as query_start_loc is, got meta",
        ),
        ({"num_tokens": -1}, ValueError, "num_tokens must be at least 0, got -1"),
    ],
)
def test_flatten_decode_refuses(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    assert_refused(ops.flatten_decode, {**make_inputs(), **changes}, error, match)


def test_sizes_that_are_traced_come_with_their_values() -> None:
    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        return ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])[0]

    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=True)
    lens = torch.tensor([0, 2, 5], dtype=torch.int32)
    rule = r"\[num_reqs_plus_1=s\d+ \+ 1 \(4\)\], got \[s\d+ \(3\)\]; num_reqs is that of seq_lens"
    with pytest.raises(Exception, match=rule):
        compiled(torch.ones(5), lens, lens.clone())


def test_flatten_decode_opcheck() -> None:
    inputs = make_inputs()
    assert_opcheck(
        torch.ops.mtpgraph.flatten_decode.default,
        inputs,
        make_inputs(([1], [9], 0)),
        make_inputs(([], [], 0)),
        {**inputs, "seq_lens": strided(inputs["seq_lens"])},
    )


def test_flatten_decode_compiled_equals_eager() -> None:
    assert_compiled_equals_eager(
        ops.flatten_decode, [lambda: make_inputs(), lambda: make_inputs(([2] * 3, [4, 9, 5], 4))]
    )
