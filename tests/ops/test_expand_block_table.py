"""expand_block_table against plain loops."""

from typing import Any

import pytest
import torch

from mtpgraph import ops

from ..helpers import (
    assert_compiled_equals_eager,
    assert_opcheck,
    assert_refused,
    assert_same_bits,
    each_batch,
    make_batch,
)

Case = tuple[list[int], list[int], int]
RAGGED: Case = ([1, 3, 0, 5], [7, 3, 0, 11], 2)


def make_inputs(case: Case = RAGGED, device: str = "cpu") -> dict[str, Any]:
    batch = make_batch(*case[:2], trailing=case[2], device=device)
    return {"block_table": batch.block_table, "row_requests": batch.row_requests}


@each_batch
def test_expand_block_table_equals_loops(case: Case, device: str) -> None:
    """Garbage past the needed blocks comes along as it is: it is not followed."""
    inputs = make_inputs(case, device)
    table = inputs["block_table"].tolist()
    width = inputs["block_table"].shape[1]
    expected = [
        table[request] if request >= 0 else [-1] * width
        for request in inputs["row_requests"].tolist()
    ]
    actual = ops.expand_block_table(**inputs)
    assert_same_bits(actual, torch.tensor(expected, dtype=torch.int32).view(-1, width))
    assert actual.is_contiguous()


def test_expand_block_table_request_outside_the_table_is_padding(device: str) -> None:
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device)
    requests = torch.tensor([1, 2, -1, 2**31 - 1, -(2**31), 0], dtype=torch.int32, device=device)
    expected = [[3, 4], [-1, -1], [-1, -1], [-1, -1], [-1, -1], [1, 2]]
    assert ops.expand_block_table(table, requests).tolist() == expected


def test_expand_block_table_reads_strided_inputs(device: str) -> None:
    inputs = make_inputs(device=device)
    table, requests = inputs["block_table"], inputs["row_requests"]
    wide = torch.full((2 * table.shape[0], table.shape[1] + 5), 99, dtype=torch.int32)
    wide = wide.to(device)
    wide[::2, 3:-2] = table
    two = torch.stack([requests, requests], dim=1)
    for view in (wide[::2, 3:-2], table.t().contiguous().t()):
        actual = ops.expand_block_table(view, two[:, 0])
        assert_same_bits(actual, ops.expand_block_table(table, requests))
        assert actual.is_contiguous()


def test_expand_block_table_of_a_table_without_columns(device: str) -> None:
    table = torch.zeros(2, 0, dtype=torch.int32, device=device)
    requests = torch.tensor([0, -1, 1], dtype=torch.int32, device=device)
    assert ops.expand_block_table(table, requests).shape == (3, 0)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"block_table": torch.zeros(4, 6, dtype=torch.int64)},
            TypeError,
            "block_table must have dtype torch.int32, got torch.int64",
        ),
        (
            {"row_requests": torch.zeros(4, dtype=torch.int64)},
            TypeError,
            "row_requests must have dtype torch.int32, got torch.int64",
        ),
        (
            {"block_table": torch.zeros(4, dtype=torch.int32)},
            ValueError,
            r"block_table must have shape \[num_reqs, max_blocks\], got \[4\]",
        ),
        (
            {"row_requests": torch.zeros(4, 1, dtype=torch.int32)},
            ValueError,
            r"row_requests must have shape \[num_tokens\], got \[4, 1\]",
        ),
        (
            {"row_requests": torch.zeros(4, dtype=torch.int32, device="meta")},
            ValueError,
            "row_requests must be on cpu as block_table is, got meta",
        ),
    ],
)
def test_expand_block_table_refuses(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    assert_refused(ops.expand_block_table, {**make_inputs(), **changes}, error, match)


def test_expand_block_table_opcheck() -> None:
    inputs = make_inputs()
    assert_opcheck(
        torch.ops.mtpgraph.expand_block_table.default,
        inputs,
        make_inputs(([1], [9], 0)),
        make_inputs(([], [], 3)),
        {**inputs, "block_table": inputs["block_table"].t().contiguous().t()},
        {**inputs, "row_requests": inputs["row_requests"][::2]},
    )


def test_expand_block_table_compiled_equals_eager() -> None:
    assert_compiled_equals_eager(
        ops.expand_block_table,
        [lambda: make_inputs(), lambda: make_inputs(([2] * 3, [4, 29, 5], 7))],
    )
