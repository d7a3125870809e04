"""The kernels of kv_cache_write_: rows land in their slots bit for bit or as the documented fp8
bytes, nothing else changes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.kernels import kv_cache_write
from mtpgraph.kernels.kv_cache_write import launch

from ..helpers import assert_same_bits, huge_rows, nan_pool, storage_bytes, strided_pool
from ..index_oracles import rounding_points
from ..ops.test_kv_cache_write import (
    BLOCK_SIZE,
    DTYPES,
    FP8_DIMS,
    HEAD_DIM,
    expected,
    expected_fp8,
    make_fp8_inputs,
    make_inputs,
)
from .gpu import assert_replays, twin


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache_write_kernel_stores_rows_and_nothing_else(
    dtype: torch.dtype, device: str
) -> None:
    inputs = make_inputs(dtype, device)
    right = expected(**inputs)
    assert launch(**inputs) is None
    assert_same_bits(inputs["kv_cache"], right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache_write_kernel_keeps_every_bit(dtype: torch.dtype, device: str) -> None:
    """NaN payloads, -0.0 and the smallest numbers are copied, not converted."""
    inputs = make_inputs(dtype, device)
    word = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    bits = torch.randint(-(2**15), 2**15, (6, HEAD_DIM)).to(word)
    bits[0] = torch.tensor([-1, 1, torch.iinfo(word).min, torch.iinfo(word).max, 0, 5], dtype=word)
    inputs["kv"] = bits.view(dtype).to(device)
    right = expected(**inputs)
    launch(**inputs)
    assert_same_bits(inputs["kv_cache"], right)


def test_kv_cache_write_kernel_into_pages_and_from_views(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs a row, too; the bytes between the rows stay."""
    monkeypatch.setattr(kv_cache_write, "BLOCK_D", 4)
    inputs = make_inputs(device=device)
    inputs["kv"] = torch.randn(6, 2 * HEAD_DIM, device=device)[:, ::2]
    inputs["slot_mapping"] = inputs["slot_mapping"].repeat_interleave(2)[::2]
    transposed = inputs["kv_cache"].transpose(0, 2).contiguous().transpose(0, 2)
    for cache in (strided_pool(inputs["kv_cache"]), transposed):
        right = twin(cache)
        right.copy_(expected(**{**inputs, "kv_cache": cache}))
        launch(**{**inputs, "kv_cache": cache})
        assert torch.equal(storage_bytes(cache), storage_bytes(right))


def test_kv_cache_write_kernel_past_2_31_elements(device: str) -> None:
    inputs = make_inputs(torch.bfloat16, device)
    inputs["kv_cache"] = huge_rows(inputs["kv_cache"][:2])
    inputs["slot_mapping"] = torch.tensor([5, -1, 0, 8, 7, 2**40], device=device)
    right = expected(**{**inputs, "kv_cache": inputs["kv_cache"].contiguous()})
    launch(**inputs)
    assert_same_bits(inputs["kv_cache"], right)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 5), (6, 0)])
def test_kv_cache_write_kernel_of_nothing(tokens: int, blocks: int, device: str) -> None:
    inputs = make_inputs(device=device)
    cache = inputs["kv_cache"][:blocks].clone()
    before = cache.clone()
    launch(inputs["kv"][:tokens], inputs["slot_mapping"][:tokens], cache)
    assert_same_bits(cache, before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache_write_replays(dtype: torch.dtype) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        slots = torch.randperm(50 * 64)[:300]
        slots[::7] = -1
        cache = strided_pool(nan_pool(50, 64, 576, dtype=dtype, device="cuda"))
        return {
            "kv": torch.randn(300, 576, device="cuda").to(dtype),
            "slot_mapping": slots.cuda(),
            "kv_cache": cache,
        }

    inputs = [make(seed) for seed in range(3)]
    for values in inputs:
        cpu: dict[str, Tensor] = {name: tensor.cpu() for name, tensor in values.items()}
        ops.kv_cache_write_(**cpu)
        cache = values["kv_cache"].clone()
        launch(**{**values, "kv_cache": cache})
        assert_same_bits(cache.cpu(), cpu["kv_cache"])
    assert_replays(ops.kv_cache_write_, inputs, writes="kv_cache")


@pytest.mark.parametrize(("head_dim", "latent_dim"), FP8_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache_write_fp8_kernel_stores_the_documented_bytes(
    dtype: torch.dtype, head_dim: int, latent_dim: int, device: str
) -> None:
    inputs = make_fp8_inputs(dtype, head_dim, latent_dim, device)
    right = expected_fp8(**inputs, latent_dim=latent_dim)
    assert launch(**inputs) is None
    assert_same_bits(inputs["kv_cache"].cpu(), right)


def assert_fp8_equals_reference(kv: Tensor, latent_dim: int = 512) -> None:
    """The bytes are those of the reference on a CPU, for every key of ``kv``."""
    num_keys, head_dim = kv.shape
    key_bytes = latent_dim + latent_dim // 32 + 2 * (head_dim - latent_dim)
    cache = nan_pool(-(-num_keys // 4), 4, key_bytes, dtype=torch.uint8, device=kv.device)
    right, slots = cache.cpu(), torch.randperm(num_keys)
    ops.kv_cache_write_(kv.cpu(), slots, right)
    launch(kv, slots.to(kv.device), cache)
    assert_same_bits(cache.cpu(), right)


def test_kv_cache_write_fp8_kernel_reaches_every_code_and_ties_go_to_even(device: str) -> None:
    assert_fp8_equals_reference(rounding_points(128).to(device), latent_dim=128)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache_write_fp8_kernel_of_extreme_keys(dtype: torch.dtype, device: str) -> None:
    """Zeros of both signs, groups below the floor of the scale, numbers without a normal form, the
    largest, NaN and infinities, in latents and rotary part."""
    kv = torch.randn(12, 192)
    kv[0], kv[1] = 0.0, -0.0
    kv[2] *= 1e-5
    kv[3] *= 1e-30
    kv[4] = 2.0**-149
    kv[5] *= 1e38
    kv[6, ::7] = torch.finfo(torch.float32).max
    kv = kv.to(dtype)
    for token, bad in enumerate([math.nan, -math.nan, math.inf, -math.inf]):
        kv[7 + token, 16 * token :: 64] = bad
    kv[11, 128:] = torch.finfo(dtype).smallest_normal / 3
    assert_fp8_equals_reference(kv.to(device), latent_dim=128)


def test_kv_cache_write_fp8_kernel_rounds_the_rotary_part_to_nearest_even(device: str) -> None:
    bits = torch.randint(-(2**31), 2**31, (4, 600), dtype=torch.int32)
    bits[:, ::3] = bits[:, ::3] & -(2**16) | 0x8000
    bits[0, :4] = torch.tensor([0x7F7F8000, 0x7F7F7FFF, 0x7FFFFFFF, -0x7FFFFF])
    kv = torch.cat([torch.zeros(4, 128), bits.view(torch.float32)], dim=1)
    assert_fp8_equals_reference(kv.to(device), latent_dim=128)


def test_kv_cache_write_fp8_kernel_does_not_touch_other_bytes(device: str) -> None:
    inputs = make_fp8_inputs(device=device)
    page = torch.randint(0, 256, inputs["kv_cache"].shape, dtype=torch.uint8, device=device)
    inputs["kv_cache"] = strided_pool(page)
    before = storage_bytes(inputs["kv_cache"])
    slots = torch.tensor([-1, -(2**63), 5 * BLOCK_SIZE, 2**62, -BLOCK_SIZE, -1], device=device)
    launch(inputs["kv"], slots, inputs["kv_cache"])
    assert torch.equal(storage_bytes(inputs["kv_cache"]), before)
    right = strided_pool(expected_fp8(**inputs).to(device))
    launch(**inputs)
    assert torch.equal(storage_bytes(inputs["kv_cache"]), storage_bytes(right))


def test_kv_cache_write_fp8_kernel_from_views_and_into_padded_keys(device: str) -> None:
    """Keys 300 bytes apart: on whole words, and on no more."""
    inputs = make_fp8_inputs(device=device)
    right = expected_fp8(**inputs)
    slots = inputs["slot_mapping"].repeat_interleave(3)[::3]
    for kv in (inputs["kv"].t().contiguous().t(), inputs["kv"].repeat_interleave(2, dim=1)[:, ::2]):
        page = nan_pool(5, BLOCK_SIZE, 300, dtype=torch.uint8, device=device)
        cache = page[..., 12:292]
        launch(kv, slots, cache)
        assert_same_bits(cache.cpu(), right)
        assert (page[..., :12] == 0xFF).all()
        assert (page[..., 292:] == 0xFF).all()


def test_kv_cache_write_fp8_kernel_past_2_31_elements(device: str) -> None:
    inputs = make_fp8_inputs(torch.bfloat16, device=device)
    inputs["kv_cache"] = huge_rows(inputs["kv_cache"][:2])
    inputs["slot_mapping"] = torch.tensor([5, -1, 0, 8, 7, 2**40], device=device)
    right = expected_fp8(**inputs)
    launch(**inputs)
    assert_same_bits(inputs["kv_cache"].cpu(), right)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 5), (6, 0)])
def test_kv_cache_write_fp8_kernel_of_nothing(tokens: int, blocks: int, device: str) -> None:
    inputs = make_fp8_inputs(device=device)
    cache = inputs["kv_cache"][:blocks].clone()
    before = cache.clone()
    launch(inputs["kv"][:tokens], inputs["slot_mapping"][:tokens], cache)
    assert_same_bits(cache, before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache_write_fp8_on_the_card_stores_the_bytes_of_a_cpu(dtype: torch.dtype) -> None:
    for spread in (1.0, 30.0):
        exponents = (torch.randn(4096, 9) * spread).repeat_interleave(64, dim=1)
        kv = (torch.randn(4096, 576) * exponents.exp2()).to(dtype)
        assert_fp8_equals_reference(kv.cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache_write_fp8_replays(dtype: torch.dtype) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        slots = torch.randperm(50 * 64)[:300]
        slots[::7] = -1
        slots[3::50] = 50 * 64 + seed
        kv = torch.randn(300, 576, device="cuda").to(dtype)
        kv[seed, 100 * seed] = math.nan
        cache = strided_pool(nan_pool(50, 64, 656, dtype=torch.uint8, device="cuda"))
        return {"kv": kv, "slot_mapping": slots.cuda(), "kv_cache": cache}

    assert_replays(ops.kv_cache_write_, [make(seed) for seed in range(3)], writes="kv_cache")
