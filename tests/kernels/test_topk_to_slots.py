"""The kernel of topk_to_slots against plain loops."""

from typing import Any

import pytest
import torch

from mtpgraph import ops
from mtpgraph.kernels import topk_to_slots
from mtpgraph.kernels.topk_to_slots import launch

from ..helpers import assert_same_bits, each_batch, huge_rows
from ..ops.test_topk_to_slots import Case, int32, make_inputs, oracle
from .gpu import assert_replays


def assert_equals_loops(inputs: dict[str, Any]) -> None:
    actual = launch(**inputs)
    assert_same_bits(actual, oracle(**inputs))
    assert actual.is_contiguous()


@each_batch
def test_topk_to_slots_kernel_equals_loops(case: Case, device: str) -> None:
    assert_equals_loops(make_inputs(case, device=device))


def test_topk_to_slots_kernel_request_outside_the_table_is_padding(device: str) -> None:
    table = int32([[5], [7]], device)
    requests = int32([0, 2, -1, 2**31 - 1, -(2**31), 1], device)
    actual = launch(int32([[3]] * 6, device), table, requests, 4)
    assert actual.flatten().tolist() == [23, -1, -1, -1, -1, 31]


def test_topk_to_slots_kernel_slot_that_int32_cannot_hold_is_none(device: str) -> None:
    table = int32([[2**31 - 1, 2**29 - 1, 2**29, -(2**31)]], device)
    actual = launch(int32([[0, 4, 7, 8, 12]], device), table, int32([0], device), 4)
    assert actual.tolist() == [[-1, 2**31 - 4, 2**31 - 1, -1, -1]]


def test_topk_to_slots_kernel_largest_index_and_block_size(device: str) -> None:
    indices = int32([[2**31 - 1, 0, -(2**31)]], device)
    actual = launch(indices, int32([[0]], device), int32([0], device), 2**31)
    assert actual.tolist() == [[2**31 - 1, 0, -1]]


def test_topk_to_slots_kernel_reads_strided_inputs(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs a row, too."""
    monkeypatch.setattr(topk_to_slots, "BLOCK", 4)
    inputs = make_inputs(device=device)
    requests = inputs["row_requests"]
    inputs["block_table"] = inputs["block_table"].t().contiguous().t()
    inputs["row_requests"] = torch.stack([requests, requests + 1], dim=1)[:, 0]
    inputs["topk_indices"] = inputs["topk_indices"].t().contiguous().t()
    assert_equals_loops(inputs)


def test_topk_to_slots_kernel_past_2_31_elements(device: str) -> None:
    inputs = make_inputs(([2, 1], [9, 6], 0), device=device)
    inputs["topk_indices"] = huge_rows(inputs["topk_indices"], 2**30 + 64)
    inputs["block_table"] = huge_rows(inputs["block_table"], 2**30 + 64)
    assert_equals_loops(inputs)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_topk_to_slots_kernel_of_an_empty_table(shape: tuple[int, int], device: str) -> None:
    table = torch.zeros(shape, dtype=torch.int32, device=device)
    actual = launch(int32([[0, 1]], device), table, int32([0], device), 4)
    assert actual.tolist() == [[-1, -1]]


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64, 100, 256])
def test_topk_to_slots_replays(block_size: int) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        table = torch.randint(-1, 99999, (32, 512), dtype=torch.int32)
        indices = torch.randint(-9, 512 * block_size + 9, (65, 2048), dtype=torch.int32)
        return {
            "topk_indices": indices.cuda(),
            "block_table": table.cuda(),
            "row_requests": torch.randint(-1, 34, (65,), dtype=torch.int32).cuda(),
            "block_size": block_size,
        }

    inputs = [make(seed) for seed in range(3)]
    for values in inputs:
        cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        assert_same_bits(launch(**values).cpu(), ops.topk_to_slots(**cpu))
    assert_replays(ops.topk_to_slots, inputs)
