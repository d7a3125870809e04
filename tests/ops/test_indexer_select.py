"""indexer_select: the two ops in one, bit for bit."""

from typing import Any

import pytest
import torch

from mtpgraph import ops

from ..helpers import (
    assert_compiled_equals_eager,
    assert_opcheck,
    assert_refused,
    assert_refuses_grad,
    assert_same_bits,
    each_batch,
    huge_rows,
    random_case,
    strided_pool,
)
from ..index_oracles import topk_oracle
from .test_indexer_logits import DTYPES, RAGGED, REFUSALS, Case
from .test_indexer_logits import make_inputs as make_logits_inputs


def make_inputs(case: Case = RAGGED, topk: int = 5, **options: Any) -> dict[str, Any]:
    return {**make_logits_inputs(case, **options)[0], "topk": topk}


def in_two_ops(inputs: dict[str, Any]) -> torch.Tensor:
    logits = ops.indexer_logits(**{k: v for k, v in inputs.items() if k != "topk"})
    row_lens, _ = ops.flatten_decode(
        inputs["query_start_loc"], inputs["seq_lens"], inputs["q"].shape[0]
    )
    return ops.indexer_topk(logits, row_lens, inputs["topk"])


@each_batch
def test_indexer_select_equals_the_two_ops(case: Case, device: str) -> None:
    inputs = make_inputs(case, device=device)
    actual = ops.indexer_select(**inputs)
    assert_same_bits(actual, in_two_ops(inputs))
    assert actual.is_contiguous()


@each_batch
def test_indexer_select_equals_float64(case: Case) -> None:
    """Random keys have no near ties: the set is that of exact arithmetic."""
    inputs, logits, batch = make_logits_inputs(case)
    actual = ops.indexer_select(**inputs, topk=5)
    assert_same_bits(actual, topk_oracle(logits, batch.row_lens.tolist(), 5))


@pytest.mark.parametrize("topk", [1, 11, 12, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_indexer_select_equals_the_two_ops_for_each_dtype(
    dtype: torch.dtype, topk: int, device: str
) -> None:
    inputs = make_inputs(topk=topk, dtype=dtype, device=device)
    assert_same_bits(ops.indexer_select(**inputs), in_two_ops(inputs))


def test_indexer_select_equals_the_two_ops_on_random_batches(full: bool, device: str) -> None:
    for _ in range(200 if full else 8):
        inputs = make_inputs(random_case(), topk=int(torch.randint(1, 12, ())), device=device)
        assert_same_bits(ops.indexer_select(**inputs), in_two_ops(inputs))


def test_indexer_select_ties_and_nan_rank_as_in_indexer_topk(device: str) -> None:
    """Negative weights and NaN keys: a plateau, and keys below -inf that still are keys."""
    inputs = make_inputs(([3, 1], [11, 7], 0), topk=6, device=device)
    inputs["q"].zero_()
    assert_same_bits(ops.indexer_select(**inputs), in_two_ops(inputs))
    assert ops.indexer_select(**inputs)[2].tolist() == [0, 1, 2, 3, 4, 5]
    inputs["k_cache"].fill_(0xFF)
    assert_same_bits(ops.indexer_select(**inputs), in_two_ops(inputs))
    assert ops.indexer_select(**inputs)[3].tolist() == [0, 1, 2, 3, 4, 5]
    inputs["block_table"].fill_(-1)
    assert_same_bits(ops.indexer_select(**inputs), in_two_ops(inputs))


def test_indexer_select_max_seq_len_cuts_the_rows(device: str) -> None:
    inputs = {**make_inputs(device=device), "max_seq_len": 3}
    actual = ops.indexer_select(**inputs)
    assert_same_bits(actual, in_two_ops(inputs))
    assert int(actual.max()) == 2


def test_indexer_select_reads_strided_inputs(device: str) -> None:
    inputs = make_inputs(device=device)
    expected = ops.indexer_select(**inputs)
    inputs["q"] = inputs["q"].transpose(0, 1).contiguous().transpose(0, 1)
    inputs["k_cache"] = strided_pool(inputs["k_cache"])
    inputs["block_table"] = inputs["block_table"].repeat_interleave(2, dim=0)[::2]
    assert_same_bits(ops.indexer_select(**inputs), expected)


def test_indexer_select_past_2_31_bytes(device: str) -> None:
    inputs = make_inputs(([2], [7], 0), topk=3, device=device)
    expected = ops.indexer_select(**inputs)
    used = int(inputs["block_table"][0, :2].max()) + 1
    inputs["k_cache"] = huge_rows(inputs["k_cache"][:used])
    assert_same_bits(ops.indexer_select(**inputs), expected)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [*REFUSALS, ({"topk": 0}, ValueError, "topk must be at least 1, got 0")],
)
def test_indexer_select_refuses(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    assert_refused(ops.indexer_select, {**make_inputs(), **changes}, error, match)


@pytest.mark.parametrize("name", ["q", "weights"])
def test_indexer_select_refuses_grad(name: str) -> None:
    assert_refuses_grad(ops.indexer_select, make_inputs(), name)


def test_indexer_select_opcheck() -> None:
    inputs = make_inputs()
    assert_opcheck(
        torch.ops.mtpgraph.indexer_select.default,
        inputs,
        make_inputs(([1], [9], 0), topk=20, dtype=torch.bfloat16),
        make_inputs(([], [], 2), dtype=torch.float8_e4m3fn),
        {
            **inputs,
            "q": inputs["q"].transpose(0, 1).contiguous().transpose(0, 1),
            "k_cache": strided_pool(inputs["k_cache"]),
        },
    )


def test_indexer_select_compiled_equals_eager() -> None:
    assert_compiled_equals_eager(
        ops.indexer_select,
        [
            lambda: make_inputs(([1, 3, 0], [7, 3, 0], 2), num_heads=7, topk=10),
            lambda: make_inputs(([2] * 5, [4, 29, 5, 2, 2], 3), num_heads=7, topk=9),
        ],
    )
