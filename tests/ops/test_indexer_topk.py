"""indexer_topk against Python's sort, exactly."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops

from ..helpers import (
    assert_compiled_equals_eager,
    assert_opcheck,
    assert_refused,
    assert_refuses_grad,
    assert_same_bits,
    huge_rows,
)
from ..index_oracles import topk_oracle

NAN, INF = math.nan, math.inf


def int32(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_inputs(
    num_tokens: int = 7, width: int = 40, topk: int = 9, device: str = "cpu"
) -> dict[str, Any]:
    """Rows full of ties, NaN and infinities; lengths from 0 to past the width; NaN behind them."""
    choice = torch.tensor([0.0, -0.0, 1.0, 1.0, -1.0, NAN, INF, -INF, 1e-45, 3.5])
    logits = choice[torch.randint(0, len(choice), (num_tokens, width))]
    plain = torch.rand(num_tokens, 1) < 0.3
    logits = torch.where(plain, torch.randn(num_tokens, width), logits)
    row_lens = torch.randint(-1, width + 3, (num_tokens,), dtype=torch.int32)
    row_lens[:1] = 0
    row_lens[1:2] = width
    for row, row_len in enumerate(row_lens.tolist()):
        logits[row, max(row_len, 0) :] = NAN if row % 2 else INF
    return {"logits": logits.to(device), "row_lens": row_lens.to(device), "topk": topk}


@pytest.mark.parametrize("topk", [1, 9, 39, 40, 41, 64])
def test_indexer_topk_equals_sort(topk: int, device: str) -> None:
    inputs = make_inputs(topk=topk, device=device)
    actual = ops.indexer_topk(**inputs)
    assert_same_bits(actual, topk_oracle(inputs["logits"], inputs["row_lens"].tolist(), topk))
    assert actual.is_contiguous()


def test_indexer_topk_of_bf16_rows(device: str) -> None:
    """Many of the values are equal, the more so the coarser they are."""
    inputs = make_inputs(topk=9, device=device)
    for logits in (inputs["logits"], *(torch.randn(7, 40) * scale + 3 for scale in (1, 0.1, 10))):
        inputs["logits"] = logits.to(device, torch.bfloat16)
        expected = topk_oracle(inputs["logits"], inputs["row_lens"].tolist(), 9)
        assert_same_bits(ops.indexer_topk(**inputs), expected)


def test_indexer_topk_equals_sort_on_random_rows(full: bool, device: str) -> None:
    for _ in range(500 if full else 30):
        num_tokens, width, topk = (int(torch.randint(0, high, ())) for high in (5, 70, 30))
        inputs = make_inputs(num_tokens, width, topk + 1, device)
        expected = topk_oracle(inputs["logits"], inputs["row_lens"].tolist(), topk + 1)
        assert_same_bits(ops.indexer_topk(**inputs), expected)


@pytest.mark.parametrize(
    ("logits", "row_len", "topk", "expected"),
    [
        ([0.0, -0.0, 0.0, -0.0], 4, 2, [0, 1]),
        ([-0.0, 0.0, -0.0, 1.0], 4, 3, [0, 1, 3]),
        ([NAN, NAN, NAN], 3, 2, [0, 1]),
        ([NAN, -INF, 5.0, -INF], 4, 3, [0, 1, 2]),
        ([-INF, NAN, -INF, -3e38], 4, 2, [0, 3]),
        ([-INF] * 4, 3, 4, [0, 1, 2, -1]),
        ([INF, INF, INF], 3, 2, [0, 1]),
        ([1.0, 9.0, 9.0], 1, 2, [0, -1]),
        ([1.0, 9.0], -5, 1, [-1]),
        ([1.0, 9.0], 2**31 - 1, 1, [1]),
        ([3.0, 1.0, 2.0, 5.0], 4, 3, [0, 2, 3]),
        ([-1e-45, 0.0, 1e-45], 3, 2, [1, 2]),
    ],
)
def test_indexer_topk_order(
    logits: list[float], row_len: int, topk: int, expected: list[int], device: str
) -> None:
    """Ties to the lower position, NaN as -inf, a key at -inf is a key, positions ascending."""
    row = torch.tensor([logits], device=device)
    assert ops.indexer_topk(row, int32([row_len], device), topk).tolist() == [expected]


def test_indexer_topk_negative_nan_is_a_nan(device: str) -> None:
    """A NaN with its sign bit set must rank no differently."""
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    logits.view(torch.int32)[0, 1] = -1
    assert ops.indexer_topk(logits.to(device), int32([3], device), 2).tolist() == [[0, 2]]


def test_indexer_topk_ignores_what_lies_past_the_row(device: str) -> None:
    inputs = make_inputs(device=device)
    expected = ops.indexer_topk(**inputs)
    for row, row_len in enumerate(inputs["row_lens"].tolist()):
        inputs["logits"][row, max(row_len, 0) :] = 123.0
    assert_same_bits(ops.indexer_topk(**inputs), expected)


def test_indexer_topk_keeps_its_inputs(device: str) -> None:
    inputs = make_inputs(device=device)
    logits, row_lens = inputs["logits"].clone(), inputs["row_lens"].clone()
    ops.indexer_topk(**inputs)
    assert_same_bits(inputs["logits"], logits)
    assert_same_bits(inputs["row_lens"], row_lens)


def test_indexer_topk_reads_strided_logits(device: str) -> None:
    inputs = make_inputs(device=device)
    expected = ops.indexer_topk(**inputs)
    logits = inputs["logits"]
    wide = torch.full((logits.shape[0], 2 * 50), INF, device=device)
    wide[:, 5:85:2] = logits
    for view in (wide[:, 5:85:2], logits.t().contiguous().t()):
        actual = ops.indexer_topk(**{**inputs, "logits": view})
        assert_same_bits(actual, expected)
        assert actual.is_contiguous()
    lens = torch.stack([inputs["row_lens"], inputs["row_lens"] + 1], dim=1)[:, 0]
    assert_same_bits(ops.indexer_topk(**{**inputs, "row_lens": lens}), expected)


def test_indexer_topk_row_does_not_depend_on_its_batch(device: str) -> None:
    inputs = make_inputs(device=device)
    together = ops.indexer_topk(**inputs)
    for row in range(together.shape[0]):
        alone = ops.indexer_topk(
            inputs["logits"][row : row + 1], inputs["row_lens"][row : row + 1], inputs["topk"]
        )
        assert_same_bits(alone, together[row : row + 1])


def test_indexer_topk_rows_past_2_31_elements(device: str) -> None:
    inputs = make_inputs(num_tokens=3, device=device)
    expected = ops.indexer_topk(**inputs)
    inputs["logits"] = huge_rows(inputs["logits"])
    assert_same_bits(ops.indexer_topk(**inputs), expected)


@pytest.mark.parametrize(("num_tokens", "width"), [(0, 40), (3, 0), (0, 0)])
def test_indexer_topk_of_nothing(num_tokens: int, width: int, device: str) -> None:
    logits = torch.zeros(num_tokens, width, device=device)
    actual = ops.indexer_topk(logits, int32([4] * num_tokens, device), 5)
    assert actual.shape == (num_tokens, 5)
    assert (actual == -1).all()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"logits": torch.zeros(7, 40, dtype=torch.float16)},
            TypeError,
            "logits must have dtype torch.float32 or torch.bfloat16, got torch.float16",
        ),
        (
            {"row_lens": torch.zeros(7, dtype=torch.int64)},
            TypeError,
            "row_lens must have dtype torch.int32, got torch.int64",
        ),
        (
            {"logits": torch.zeros(7)},
            ValueError,
            r"logits must have shape \[num_tokens, width\], got \[7\]",
        ),
        (
            {"row_lens": torch.zeros(6, dtype=torch.int32)},
            ValueError,
            r"row_lens must have shape \[num_tokens=7\], got \[6\]",
        ),
        (
            {"row_lens": torch.zeros(7, dtype=torch.int32, device="meta")},
            ValueError,
            "row_lens must be on cpu as logits is, got meta",
        ),
        ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
    ],
)
def test_indexer_topk_refuses(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    assert_refused(ops.indexer_topk, {**make_inputs(), **changes}, error, match)


def test_indexer_topk_refuses_grad() -> None:
    assert_refuses_grad(ops.indexer_topk, make_inputs(), "logits")


def test_indexer_topk_opcheck() -> None:
    inputs = make_inputs()
    assert_opcheck(
        torch.ops.mtpgraph.indexer_topk.default,
        inputs,
        make_inputs(1, 40, 64),
        make_inputs(0, 40, 4),
        {**inputs, "logits": inputs["logits"].t().contiguous().t()},
        {**inputs, "logits": inputs["logits"].bfloat16()},
    )


def test_indexer_topk_compiled_equals_eager() -> None:
    assert_compiled_equals_eager(
        ops.indexer_topk, [lambda: make_inputs(), lambda: make_inputs(5, 33, 12)]
    )
