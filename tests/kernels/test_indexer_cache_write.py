"""The kernel of indexer_cache_write_ against an fp8 quantiser in plain Python, byte for byte."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.kernels.indexer_cache_write import launch

from ..helpers import (
    assert_same_bits,
    each_batch,
    huge_rows,
    nan_pool,
    storage_bytes,
    strided_pool,
)
from ..index_oracles import rounding_points
from ..ops.test_indexer_cache_write import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    HEAD_DIM,
    Case,
    expected_cache,
    make_inputs,
)
from .gpu import assert_replays

each_scale = pytest.mark.parametrize(
    "power_of_two_scale", [False, True], ids=["exact", "power_of_two"]
)


def cache_of(num_keys: int, head_dim: int, device: str) -> Tensor:
    num_blocks = -(-num_keys // 4)
    return nan_pool(num_blocks, 4 * (head_dim + 4), dtype=torch.uint8, device=device)


def assert_equals_reference(k: Tensor, power_of_two_scale: bool = False) -> None:
    """The bytes are those of the reference on a CPU, for every key of ``k``."""
    k_cache = cache_of(k.shape[0], k.shape[1], str(k.device))
    slots = torch.randperm(k.shape[0])
    expected = k_cache.cpu()
    ops.indexer_cache_write_(k.cpu(), slots, expected, power_of_two_scale=power_of_two_scale)
    launch(k, slots.to(k.device), k_cache, power_of_two_scale=power_of_two_scale)
    assert_same_bits(k_cache.cpu(), expected)


@each_scale
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_indexer_cache_write_kernel_stores_the_documented_bytes(
    dtype: torch.dtype, power_of_two_scale: bool, device: str
) -> None:
    inputs = make_inputs(dtype=dtype, device=device)
    inputs["k"] *= torch.logspace(-7, 4, inputs["k"].shape[0], device=device).to(dtype)[:, None]
    expected = expected_cache(**inputs, power_of_two_scale=power_of_two_scale)
    assert launch(**inputs, power_of_two_scale=power_of_two_scale) is None
    assert_same_bits(inputs["k_cache"].cpu(), expected)


@each_batch
def test_indexer_cache_write_kernel_equals_loops(case: Case, device: str) -> None:
    inputs = make_inputs(case, device=device)
    expected = expected_cache(**inputs)
    launch(**inputs)
    assert_same_bits(inputs["k_cache"].cpu(), expected)


def test_indexer_cache_write_kernel_reaches_every_code_and_ties_go_to_even(device: str) -> None:
    assert_equals_reference(rounding_points(32).to(device))


@each_scale
def test_indexer_cache_write_kernel_of_extreme_keys(power_of_two_scale: bool, device: str) -> None:
    """Zeros of both signs, keys below the floor of the scale, the largest number, and keys whose
    quotients need the rounding of an IEEE division."""
    k = torch.randn(24, 16)
    k[0] = 0.0
    k[1] = -0.0
    k[2] *= 1e-5
    k[3] *= 1e-30
    k[4] = 2.0**-149
    k[5] *= 1e38
    k[6, 3] = torch.finfo(torch.float32).max
    k[7] = torch.arange(-8, 8) * 2.0**-7
    k[8, 1:] = 1e-6
    assert_equals_reference(k.to(device), power_of_two_scale)


@each_scale
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_indexer_cache_write_kernel_key_that_is_not_finite_is_nan_throughout(
    dtype: torch.dtype, power_of_two_scale: bool, device: str
) -> None:
    k = torch.randn(8, 12).to(dtype)
    for token, bad in enumerate([math.nan, -math.nan, math.inf, -math.inf]):
        k[2 * token, token] = bad
    assert_equals_reference(k.to(device), power_of_two_scale)


@pytest.mark.parametrize("head_dim", [1, 5, 64, 128])
def test_indexer_cache_write_kernel_of_other_head_dims(head_dim: int, device: str) -> None:
    assert_equals_reference(torch.randn(7, head_dim, device=device))


def test_indexer_cache_write_kernel_does_not_touch_other_bytes(device: str) -> None:
    page = torch.randint(0, 256, (5, BLOCK_BYTES), dtype=torch.uint8, device=device)
    k_cache = strided_pool(page)
    before = storage_bytes(k_cache)
    outside = [-1, -(2**63), 5 * BLOCK_SIZE, 2**62, -BLOCK_SIZE]
    slots = torch.tensor([*outside, 2 * BLOCK_SIZE + 1], device=device)
    k = torch.randn(6, HEAD_DIM, device=device)
    launch(k[:5], slots[:5], k_cache)
    assert torch.equal(storage_bytes(k_cache), before)
    launch(k, slots, k_cache)
    expected = strided_pool(expected_cache(k, slots, page).to(device))
    assert torch.equal(storage_bytes(k_cache), storage_bytes(expected))


def test_indexer_cache_write_kernel_reads_strided_inputs(device: str) -> None:
    inputs = make_inputs(device=device)
    expected = expected_cache(**inputs)
    inputs["k"] = inputs["k"].t().contiguous().t()
    inputs["slot_mapping"] = inputs["slot_mapping"].repeat_interleave(3)[::3]
    launch(**inputs)
    assert_same_bits(inputs["k_cache"].cpu(), expected)


def test_indexer_cache_write_kernel_past_2_31_elements(device: str) -> None:
    inputs = make_inputs(([2], [7], 0), device=device)
    inputs["k_cache"] = huge_rows(inputs["k_cache"][:2])
    inputs["slot_mapping"] = torch.tensor([6, 1], device=device)
    expected = expected_cache(**inputs)
    launch(**inputs)
    assert_same_bits(inputs["k_cache"].cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_scale
def test_indexer_cache_write_on_the_card_stores_the_bytes_of_a_cpu(
    dtype: torch.dtype, power_of_two_scale: bool
) -> None:
    for spread in (1.0, 30.0):
        exponents = torch.randn(4096, 1) * spread
        k = (torch.randn(4096, 128) * exponents.exp2()).to(dtype)
        assert_equals_reference(k.cuda(), power_of_two_scale)


@pytest.mark.gpu
@each_scale
@pytest.mark.parametrize("head_dim", [64, 128])
def test_indexer_cache_write_replays(head_dim: int, power_of_two_scale: bool) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        slots = torch.randperm(40 * 64)[:300]
        slots[::9] = -1
        cache = nan_pool(40, 64 * (head_dim + 4), dtype=torch.uint8, device="cuda")
        return {
            "k": torch.randn(300, head_dim, device="cuda").bfloat16(),
            "slot_mapping": slots.cuda(),
            "k_cache": strided_pool(cache),
            "power_of_two_scale": power_of_two_scale,
        }

    assert_replays(ops.indexer_cache_write_, [make(seed) for seed in range(3)], writes="k_cache")
