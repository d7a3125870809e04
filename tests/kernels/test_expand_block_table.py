"""The kernel of expand_block_table: rows are copied as they are, padding is -1."""

from typing import Any

import pytest
import torch

from mtpgraph import ops
from mtpgraph.kernels import expand_block_table
from mtpgraph.kernels.expand_block_table import launch

from ..helpers import assert_same_bits, each_batch, huge_rows
from ..ops.test_expand_block_table import Case, make_inputs
from .gpu import assert_replays


def assert_equals_reference(inputs: dict[str, Any]) -> None:
    cpu = {name: tensor.cpu() for name, tensor in inputs.items()}
    actual = launch(**inputs)
    assert_same_bits(actual.cpu(), ops.expand_block_table(**cpu))
    assert actual.is_contiguous()


@each_batch
def test_expand_block_table_kernel_equals_reference(case: Case, device: str) -> None:
    assert_equals_reference(make_inputs(case, device))


def test_expand_block_table_kernel_of_views_and_foreign_requests(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs a row, any strides, requests outside the table."""
    monkeypatch.setattr(expand_block_table, "BLOCK", 4)
    table = torch.randint(-5, 99, (3, 9), dtype=torch.int32, device=device)
    requests = torch.tensor([1, 3, -1, 2**31 - 1, -(2**31), 0, 2], dtype=torch.int32)
    requests = torch.stack([requests, requests + 1], dim=1).to(device)[:, 0]
    for view in (table, table.t().contiguous().t(), table.repeat(2, 2)[::2, 1::2]):
        assert_equals_reference({"block_table": view, "row_requests": requests})


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_expand_block_table_kernel_of_an_empty_table(shape: tuple[int, int], device: str) -> None:
    table = torch.zeros(shape, dtype=torch.int32, device=device)
    requests = torch.tensor([0, -1, 1], dtype=torch.int32, device=device)
    assert_equals_reference({"block_table": table, "row_requests": requests})


def test_expand_block_table_kernel_past_2_31_elements(device: str) -> None:
    inputs = make_inputs(device=device)
    inputs["block_table"] = huge_rows(inputs["block_table"], 2**30 + 64)
    assert_equals_reference(inputs)


@pytest.mark.gpu
def test_expand_block_table_replays() -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        table = torch.randint(-1, 9999, (64, 4000), dtype=torch.int32)
        requests = torch.randint(-1, 66, (129,), dtype=torch.int32)
        return {"block_table": table.cuda(), "row_requests": requests.cuda()}

    inputs = [make(seed) for seed in range(3)]
    for values in inputs:
        assert_equals_reference(values)
    assert_replays(ops.expand_block_table, inputs)
