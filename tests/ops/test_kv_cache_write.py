from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from tests.helpers import (
    assert_compiled_equals_eager,
    assert_refused,
    assert_refuses_grad,
    assert_same_bits,
    huge_rows,
    nan_pool,
    strided_pool,
)

HEAD_DIM, BLOCK_SIZE = 6, 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_inputs(dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    """Six tokens: two without a slot, two of them past the pool, in a pool of five blocks."""
    slots = torch.tensor([19, -1, 0, 20, 7, 2**40], dtype=torch.int64, device=device)
    return {
        "kv": torch.randn(6, HEAD_DIM, device=device).to(dtype),
        "slot_mapping": slots,
        "kv_cache": nan_pool(5, BLOCK_SIZE, HEAD_DIM, dtype=dtype, device=device),
    }


def expected(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> Tensor:
    cache = kv_cache.clone()
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < cache.shape[0] * BLOCK_SIZE:
            cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = kv[token]
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_cache_write_stores_rows_and_nothing_else(dtype: torch.dtype, device: str):
    inputs = make_inputs(dtype, device)
    right = expected(**inputs)
    assert ops.kv_cache_write_(**inputs) is None
    assert_same_bits(inputs["kv_cache"], right)


def test_kv_cache_write_minus_one_does_not_wrap_to_the_last_slot():
    inputs = make_inputs()
    inputs["slot_mapping"].fill_(-1)
    before = inputs["kv_cache"].clone()
    ops.kv_cache_write_(**inputs)
    assert_same_bits(inputs["kv_cache"], before)


def test_kv_cache_write_into_pages_and_from_views(device: str):
    inputs = make_inputs(device=device)
    wide = torch.randn(6, 2 * HEAD_DIM, device=device)
    inputs["kv"] = wide[:, ::2]
    inputs["kv_cache"] = strided_pool(inputs["kv_cache"])
    right = expected(**inputs)
    ops.kv_cache_write_(**inputs)
    assert_same_bits(inputs["kv_cache"], right)


def test_kv_cache_write_past_two_to_the_31():
    inputs = make_inputs()
    inputs["kv_cache"] = huge_rows(inputs["kv_cache"])
    right = expected(**inputs)
    ops.kv_cache_write_(**inputs)
    assert_same_bits(inputs["kv_cache"], right)


def test_kv_cache_write_of_nothing(device: str):
    inputs = make_inputs(device=device)
    before = inputs["kv_cache"].clone()
    ops.kv_cache_write_(inputs["kv"][:0], inputs["slot_mapping"][:0], inputs["kv_cache"])
    assert_same_bits(inputs["kv_cache"], before)


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_kv_cache_write_opcheck(tokens: int, device: str):
    inputs = make_inputs(device=device)
    torch.library.opcheck(
        torch.ops.mtpgraph.kv_cache_write_.default,
        (
            inputs["kv"][:tokens],
            inputs["slot_mapping"][:tokens],
            strided_pool(inputs["kv_cache"]),
        ),
    )


def test_kv_cache_write_compiled_equals_eager():
    assert_compiled_equals_eager(ops.kv_cache_write_, [make_inputs])


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("kv", torch.zeros(6, HEAD_DIM).double(), TypeError, "kv must have dtype"),
        (
            "kv",
            torch.zeros(6, HEAD_DIM).half(),
            TypeError,
            "kv_cache must have dtype torch.float16",
        ),
        ("kv", torch.zeros(6), ValueError, r"kv must have shape \[num_tokens, head_dim\]"),
        (
            "slot_mapping",
            torch.zeros(6, dtype=torch.int32),
            TypeError,
            "slot_mapping must have dtype torch.int64, got torch.int32",
        ),
        (
            "slot_mapping",
            torch.zeros(5, dtype=torch.int64),
            ValueError,
            r"slot_mapping must have shape \[num_tokens=6\], got \[5\]",
        ),
        (
            "kv_cache",
            torch.zeros(5, BLOCK_SIZE, HEAD_DIM + 1),
            ValueError,
            r"kv_cache must have shape \[num_blocks, block_size, head_dim=6\]",
        ),
        (
            "kv_cache",
            torch.zeros(1, BLOCK_SIZE, HEAD_DIM).expand(5, -1, -1),
            ValueError,
            "kv_cache must not overlap itself",
        ),
        (
            "kv_cache",
            torch.zeros(5, BLOCK_SIZE, HEAD_DIM, device="meta"),
            ValueError,
            "kv_cache must be on cpu as kv is, got meta",
        ),
    ],
)
def test_kv_cache_write_refuses(name: str, value: Tensor, error: type[Exception], match: str):
    assert_refused(ops.kv_cache_write_, {**make_inputs(), name: value}, error, match)


def test_kv_cache_write_refuses_grad():
    assert_refuses_grad(ops.kv_cache_write_, make_inputs(), "kv")
