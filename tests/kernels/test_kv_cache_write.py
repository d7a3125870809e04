"""The kernel of kv_cache_write_: rows land in their slots bit for bit, nothing else changes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.kernels import kv_cache_write
from mtpgraph.kernels.kv_cache_write import launch

from ..helpers import assert_same_bits, huge_rows, nan_pool, storage_bytes, strided_pool
from ..ops.test_kv_cache_write import DTYPES, HEAD_DIM, expected, make_inputs
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
    assert_replays(ops.kv_cache_write_, inputs)
