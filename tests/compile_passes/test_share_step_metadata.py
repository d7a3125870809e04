from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.compile_passes.share_step_metadata import share_step_metadata
from tests.helpers import assert_same_bits, make_batch

from .support import trace

LAYERS = 3


def make_inputs() -> list[Tensor]:
    """Hidden states, and a batch of new requests, others and padding of all kinds."""
    batch = make_batch([2, 0, 1, 3, 2], [7, 0, 9, 3, 0], trailing=2)
    topk_indices = torch.tensor([[0, 2, -1]], dtype=torch.int32).repeat(batch.num_tokens, 1)
    x = torch.randn(batch.num_tokens, 8)
    return [x, batch.query_start_loc, batch.seq_lens, batch.block_table, topk_indices]


def layer(x, qsl, lens, table, topk_indices) -> Tensor:
    """Everything that a layer could ask about the step, added up."""
    row_lens, row_requests = ops.flatten_decode(qsl, lens, x.shape[0])
    old = ops.has_initial_state(qsl, lens)
    rows = ops.expand_block_table(table, row_requests)
    slots = ops.topk_to_slots(topk_indices, table, row_requests, 4)
    return row_lens + rows.sum(1) + slots.sum(1) + old.sum()


def layers(x, qsl, lens, table, topk_indices):
    for _ in range(LAYERS):
        x = x.relu() + layer(x, qsl, lens, table, topk_indices).unsqueeze(1)
    return x


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_share_step_metadata_leaves_one_of_each(dynamic: bool, dtype: torch.dtype):
    x, *batch = make_inputs()
    x = x.to(dtype)
    result, probe = trace(layers, x, *batch, passes=[share_step_metadata], dynamic=dynamic)
    assert_same_bits(result, layers(x, *batch))
    assert probe.counts == {"share_step_metadata": 4 * (LAYERS - 1)}
    assert set(probe.calls.values()) == {1}
    parts = [node for node in probe.graphs[0].graph.nodes if "getitem" in str(node.target)]
    assert len(parts) == 2
    assert probe.manager.findings == []


def test_share_step_metadata_with_parts_of_a_lone_result():
    """An index is any: slices, which cannot be looked up, among them."""

    def step(x, qsl, lens, table, topk_indices):
        _, row_requests = ops.flatten_decode(qsl, lens, x.shape[0])
        first = ops.topk_to_slots(topk_indices, table, row_requests, 4)
        second = ops.topk_to_slots(topk_indices, table, row_requests, 4)
        return first[:, 0] + second[:, 1] + first[:, 0:2].sum(1) + second[0].sum()

    inputs = make_inputs()
    result, probe = trace(step, *inputs, passes=[share_step_metadata])
    assert_same_bits(result, step(*inputs))
    assert probe.counts == {"share_step_metadata": 1}


def test_share_step_metadata_of_a_size_come_by_in_other_ways():
    def step(x, qsl, lens, table, topk_indices):
        first, _ = ops.flatten_decode(qsl, lens, x.shape[0])
        x = torch.cat([x, x])
        second, _ = ops.flatten_decode(qsl, lens, x.size(0) // 2)
        third, _ = ops.flatten_decode(qsl, lens, x.view(2, -1, 8).shape[1])
        fourth, _ = ops.flatten_decode(qsl, lens, len(topk_indices))
        return first + second + third + fourth

    inputs = make_inputs()
    result, probe = trace(step, *inputs, passes=[share_step_metadata], dynamic=True)
    assert_same_bits(result, step(*inputs))
    assert probe.counts == {"share_step_metadata": 3}


def test_share_step_metadata_of_views_and_casts():
    def step(x, qsl, lens, table, topk_indices):
        wide = lens.long()
        first = ops.has_initial_state(qsl, wide.int())
        second = ops.has_initial_state(qsl[:], lens.long().int())
        third = ops.has_initial_state(qsl.view(-1), wide.int().contiguous())
        _, row_requests = ops.flatten_decode(qsl, lens, x.shape[0])
        rows = ops.expand_block_table(table, row_requests.clamp(min=0))
        _, row_requests = ops.flatten_decode(qsl, lens, x.shape[0])
        again = ops.expand_block_table(table[:, :], row_requests.clamp(min=0))
        return first.int() + second + third, rows + again

    inputs = make_inputs()
    result, probe = trace(step, *inputs, passes=[share_step_metadata])
    for actual, expected in zip(result, step(*inputs), strict=True):
        assert_same_bits(actual, expected)
    assert probe.counts["share_step_metadata"] >= 3
    assert probe.calls["flatten_decode"] == probe.calls["expand_block_table"] == 1
    assert not [node for node in probe.graphs[0].graph.nodes if not node.users][:-1]


def test_share_step_metadata_shares_again_after_a_write():
    """Two draft steps of two layers each: one set of metadata for each draft step."""

    def step(x, qsl, lens, table, topk_indices):
        lens = lens.clone()
        for _ in range(2):
            for _ in range(2):
                x = x + layer(x, qsl, lens, table, topk_indices).unsqueeze(1)
            lens.add_(1)
        return x

    inputs = make_inputs()
    result, probe = trace(step, *inputs, passes=[share_step_metadata])
    assert_same_bits(result, step(*inputs))
    assert probe.counts == {"share_step_metadata": 8}
    assert set(probe.calls.values()) == {2}


def test_share_step_metadata_with_a_write_to_other_memory():
    def step(x, qsl, lens, table, topk_indices):
        x = x.clone()
        first, _ = ops.flatten_decode(qsl, lens, x.shape[0])
        x.mul_(2)
        second, _ = ops.flatten_decode(qsl, lens, x.shape[0])
        return x + (first + second).unsqueeze(1)

    inputs = make_inputs()
    result, probe = trace(step, *inputs, passes=[share_step_metadata], dynamic=True)
    assert_same_bits(result, step(*inputs))
    assert probe.counts == {"share_step_metadata": 1}


def lens_written(x, qsl, lens, table, topk_indices):
    lens = lens.clone()
    first = ops.has_initial_state(qsl, lens)
    lens.clamp_(max=2)
    return first.int() + ops.has_initial_state(qsl, lens)


def table_written_through_a_view(x, qsl, lens, table, topk_indices):
    table = table.clone()
    _, row_requests = ops.flatten_decode(qsl, lens, x.shape[0])
    first = ops.expand_block_table(table, row_requests)
    table[1:].fill_(7)
    return first + ops.expand_block_table(table, row_requests)


def lens_computed_anew_after_a_write(x, qsl, lens, table, topk_indices):
    wide = lens.long()
    first = ops.has_initial_state(qsl, wide.int())
    wide.clamp_(max=2)
    return first.int() + ops.has_initial_state(qsl, wide.int())


def first_result_written(x, qsl, lens, table, topk_indices):
    first, _ = ops.flatten_decode(qsl, lens, x.shape[0])
    first.clamp_(max=2)
    second, _ = ops.flatten_decode(qsl, lens, x.shape[0])
    return first + 10 * second


def second_result_written(x, qsl, lens, table, topk_indices):
    first, _ = ops.flatten_decode(qsl, lens, x.shape[0])
    second, _ = ops.flatten_decode(qsl, lens, x.shape[0])
    second[1:].clamp_(max=2)
    return first + 10 * second


def result_written_by_an_op(x, qsl, lens, table, topk_indices):
    first = ops.expand_block_table(table, topk_indices[:, 0])
    second = ops.expand_block_table(table, topk_indices[:, 0])
    torch.add(first, 1, out=first)
    return first + 10 * second


def both_returned(x, qsl, lens, table, topk_indices):
    first = ops.has_initial_state(qsl, lens)
    return first, ops.has_initial_state(qsl, lens)


NEAR_MISSES = {
    lens_written: ".clamp_()",
    table_written_through_a_view: ".fill_()",
    lens_computed_anew_after_a_write: ".clamp_()",
    first_result_written: "may write the result",
    second_result_written: "may write the result",
    result_written_by_an_op: "may write the result",
    both_returned: "two tensors to its caller",
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_share_step_metadata_leaves_alone(near_miss: Callable[..., Any]):
    inputs = make_inputs()
    expected = near_miss(*(value.clone() for value in inputs))
    result, probe = trace(near_miss, *inputs, passes=[share_step_metadata])
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert probe.counts == {"share_step_metadata": 0}
    (finding,) = probe.manager.findings
    assert (finding.kind, finding.found_by) == ("left alone", "share_step_metadata")
    assert NEAR_MISSES[near_miss] in finding.reason
    assert finding.remedy
    assert finding.file == __file__


def test_share_step_metadata_keeps_two_returned_tensors_apart():
    inputs = make_inputs()
    (first, second), _ = trace(both_returned, *inputs, passes=[share_step_metadata])
    first.fill_(True)
    assert not second.all()


def other_lens(x, qsl, lens, table, topk_indices):
    first = ops.has_initial_state(qsl, lens)
    return first.int() + ops.has_initial_state(qsl, lens - 1)


def other_number_of_tokens(x, qsl, lens, table, topk_indices):
    first, _ = ops.flatten_decode(qsl, lens, x.shape[0])
    second, _ = ops.flatten_decode(qsl, lens, x.shape[0] - 1)
    return first[1:] + second


def other_requests(x, qsl, lens, table, topk_indices):
    row_lens, row_requests = ops.flatten_decode(qsl, lens, x.shape[0])
    first = ops.expand_block_table(table, row_requests)
    return first + ops.expand_block_table(table, row_lens)


def random_numbers(x, qsl, lens, table, topk_indices):
    first = ops.has_initial_state(qsl, torch.randint_like(lens, 100))
    return first.int() + ops.has_initial_state(qsl, torch.randint_like(lens, 100))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "other", [other_lens, other_number_of_tokens, other_requests, random_numbers]
)
def test_share_step_metadata_passes_over_other_calls(other: Callable[..., Tensor], dynamic: bool):
    inputs = make_inputs()
    torch.manual_seed(1)
    expected = other(*inputs)
    torch.manual_seed(1)
    result, probe = trace(other, *inputs, passes=[share_step_metadata], dynamic=dynamic)
    assert_same_bits(result, expected)
    assert probe.counts == {"share_step_metadata": 0}
    assert probe.manager.findings == []
