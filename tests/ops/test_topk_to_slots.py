"""topk_to_slots against plain loops."""

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
    huge_rows,
    make_batch,
)

BLOCK_SIZE = 4
Case = tuple[list[int], list[int], int]
RAGGED: Case = ([1, 3, 0, 5], [7, 3, 0, 11], 2)


def int32(values: Any, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_inputs(case: Case = RAGGED, topk: int = 6, device: str = "cpu") -> dict[str, Any]:
    """Indices of all kinds: inside the table, at its garbage, past it, negative."""
    batch = make_batch(*case[:2], BLOCK_SIZE, trailing=case[2], device=device)
    past = batch.block_table.shape[1] * BLOCK_SIZE + 5
    indices = torch.randint(-3, past, (batch.num_tokens, topk), dtype=torch.int32)
    return {
        "topk_indices": indices.to(device),
        "block_table": batch.block_table,
        "row_requests": batch.row_requests,
        "block_size": BLOCK_SIZE,
    }


def oracle(
    topk_indices: Tensor, block_table: Tensor, row_requests: Tensor, block_size: int
) -> Tensor:
    table = block_table.tolist()
    out = torch.full(topk_indices.shape, -1, dtype=torch.int32)
    for token, request in enumerate(row_requests.tolist()):
        for column, index in enumerate(topk_indices[token].tolist()):
            if not 0 <= request < len(table) or index < 0:
                continue
            logical = index // block_size
            if logical >= len(table[request]) or table[request][logical] < 0:
                continue
            slot = table[request][logical] * block_size + index % block_size
            out[token, column] = slot if slot < 2**31 else -1
    return out


@each_batch
def test_topk_to_slots_equals_loops(case: Case, device: str) -> None:
    inputs = make_inputs(case, device=device)
    actual = ops.topk_to_slots(**inputs)
    assert_same_bits(actual, oracle(**inputs))
    assert actual.is_contiguous()


def test_topk_to_slots_of_needed_positions_is_the_slot_mapping(device: str) -> None:
    """What indexer_cache_write_ was told is where the selected keys are looked for."""
    batch = make_batch([2, 3], [9, 6], BLOCK_SIZE, device=device)
    positions = batch.row_lens.unsqueeze(1) - 1
    slots = ops.topk_to_slots(positions, batch.block_table, batch.row_requests, BLOCK_SIZE)
    assert slots.flatten().tolist() == batch.slot_mapping.tolist()


def test_topk_to_slots_request_outside_the_table_is_padding(device: str) -> None:
    table = int32([[5], [7]], device)
    requests = int32([0, 2, -1, 2**31 - 1, -(2**31), 1], device)
    indices = int32([[3]] * 6, device)
    actual = ops.topk_to_slots(indices, table, requests, 4)
    assert actual.flatten().tolist() == [23, -1, -1, -1, -1, 31]


def test_topk_to_slots_slot_that_int32_cannot_hold_is_none(device: str) -> None:
    """A stale, huge entry must not wrap around into a slot that exists."""
    table = int32([[2**31 - 1, 2**29 - 1, 2**29, -(2**31)]], device)
    indices = int32([[0, 4, 7, 8, 12]], device)
    actual = ops.topk_to_slots(indices, table, int32([0], device), 4)
    assert actual.tolist() == [[-1, 2**31 - 4, 2**31 - 1, -1, -1]]


def test_topk_to_slots_largest_index_and_block_size(device: str) -> None:
    indices = int32([[2**31 - 1, 0, -(2**31)]], device)
    table, requests = int32([[0]], device), int32([0], device)
    actual = ops.topk_to_slots(indices, table, requests, 2**31)
    assert actual.tolist() == [[2**31 - 1, 0, -1]]


def test_topk_to_slots_reads_strided_inputs(device: str) -> None:
    inputs = make_inputs(device=device)
    expected = oracle(**inputs)
    table, requests = inputs["block_table"], inputs["row_requests"]
    wide = torch.cat([table, torch.full_like(table, 9)], dim=1)
    inputs["block_table"] = torch.stack([wide, wide + 1], dim=1).flatten(0, 1)[::2][
        :, : table.shape[1]
    ]
    inputs["row_requests"] = torch.stack([requests, requests + 1], dim=1)[:, 0]
    inputs["topk_indices"] = inputs["topk_indices"].t().contiguous().t()
    actual = ops.topk_to_slots(**inputs)
    assert_same_bits(actual, expected)
    assert actual.is_contiguous()


def test_topk_to_slots_rows_past_2_31_elements(device: str) -> None:
    inputs = make_inputs(([2, 1], [9, 6], 0), device=device)
    expected = oracle(**inputs)
    inputs["topk_indices"] = huge_rows(inputs["topk_indices"], 2**30 + 64)
    assert_same_bits(ops.topk_to_slots(**inputs), expected)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_topk_to_slots_of_an_empty_table(shape: tuple[int, int], device: str) -> None:
    table = torch.zeros(shape, dtype=torch.int32, device=device)
    actual = ops.topk_to_slots(int32([[0, 1]], device), table, int32([0], device), 4)
    assert actual.tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"topk_indices": torch.zeros(11, 6, dtype=torch.int64)},
            TypeError,
            "topk_indices must have dtype torch.int32, got torch.int64",
        ),
        (
            {"block_table": torch.zeros(4, 6, dtype=torch.int64)},
            TypeError,
            "block_table must have dtype torch.int32, got torch.int64",
        ),
        (
            {"row_requests": torch.zeros(11, dtype=torch.int64)},
            TypeError,
            "row_requests must have dtype torch.int32, got torch.int64",
        ),
        (
            {"topk_indices": int32([0] * 11)},
            ValueError,
            r"topk_indices must have shape \[num_tokens, topk\], got \[11\]",
        ),
        (
            {"block_table": int32([0] * 4)},
            ValueError,
            r"block_table must have shape \[num_reqs, max_blocks\], got \[4\]",
        ),
        (
            {"row_requests": int32([0] * 10)},
            ValueError,
            r"row_requests must have shape \[num_tokens=11\], got \[10\]",
        ),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        (
            {"block_table": torch.zeros(4, 6, dtype=torch.int32, device="meta")},
            ValueError,
            "block_table must be on cpu as topk_indices is, got meta",
        ),
        (
            {"row_requests": torch.zeros(11, dtype=torch.int32, device="meta")},
            ValueError,
            "row_requests must be on cpu as topk_indices is, got meta",
        ),
    ],
)
def test_topk_to_slots_refuses(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    assert_refused(ops.topk_to_slots, {**make_inputs(), **changes}, error, match)


def test_topk_to_slots_opcheck() -> None:
    inputs = make_inputs()
    assert_opcheck(
        torch.ops.mtpgraph.topk_to_slots.default,
        inputs,
        make_inputs(([1], [9], 0), topk=1),
        make_inputs(([], [], 3)),
        {
            **inputs,
            "topk_indices": inputs["topk_indices"].t().contiguous().t(),
            "block_table": inputs["block_table"].t().contiguous().t(),
        },
    )


def test_topk_to_slots_compiled_equals_eager() -> None:
    assert_compiled_equals_eager(
        ops.topk_to_slots,
        [
            lambda: make_inputs(([1, 3, 0], [7, 3, 0], 2), topk=8),
            lambda: make_inputs(([2] * 5, [4, 29, 5, 2, 2], 7), topk=6),
        ],
    )
