"""State pools as they lie in memory: inside pages, transposed, and beyond 2**31 elements."""

import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from ..helpers import assert_same_bits, storage_bytes, strided_pool
from ..state_modes import (
    Mode,
    all_modes,
    int32,
    starts,
)


@all_modes
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_a_pool_inside_bigger_pages(mode: Mode, state_dtype: torch.dtype) -> None:
    dense = mode.pool(8, state_dtype)
    paged = strided_pool(dense)
    assert not paged.is_contiguous()
    inputs = mode.inputs(3)
    rows: dict[str, Any] = {"query_start_loc": starts([1, 2])}
    rows["has_initial_state"] = torch.tensor([True, False])
    if mode.takes_accepted:
        rows["num_accepted_tokens"] = int32(2, 1)
    indices = mode.indices([0, 4])
    pages = storage_bytes(paged)
    out = mode.run(dense, inputs, indices, **rows)
    assert_same_bits(out, mode.run(paged, inputs, indices, **rows))
    assert_same_bits(dense, paged)
    gaps = storage_bytes(strided_pool(torch.zeros_like(dense))) == 0xFF
    assert torch.equal(storage_bytes(paged)[gaps], pages[gaps])


@all_modes
def test_any_strides_of_the_pool_and_of_the_tokens(mode: Mode) -> None:
    dense = mode.pool(8)
    reversed_dims = dense.permute(*range(dense.dim() - 1, -1, -1)).contiguous()
    turned = reversed_dims.permute(*range(dense.dim() - 1, -1, -1))
    inputs = mode.inputs(4)
    strided = {
        name: torch.stack([value, torch.full_like(value, float("nan"))], -1)[..., 0]
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }
    rows = {"query_start_loc": starts([3, 1])} | mode.accepted(1, 3)
    indices = mode.indices([4, 0])
    out = mode.run(dense, inputs, indices, **rows)
    # every second column of a wider table
    wide = torch.stack([indices, torch.full_like(indices, -1)], -1)[..., 0]
    assert_same_bits(out, mode.run(turned, strided, wide, **rows))
    assert_same_bits(dense, turned)


def huge_pool(mode: Mode, dtype: torch.dtype, pitch: int = 2**20) -> Tensor:
    """2049 slots, 2**20 elements apart, in memory that costs nothing until it is touched."""
    memory = mmap.mmap(-1, 2049 * pitch * dtype.itemsize)
    flat = torch.frombuffer(memory, dtype=dtype)
    inner = torch.zeros(mode.state_shape, device="meta").stride()
    return flat.as_strided((2049, *mode.state_shape), (pitch, *inner))


@all_modes
def test_a_slot_beyond_2_to_the_31_elements(mode: Mode) -> None:
    # vLLM #20938, SGLang #33665: a 32-bit slot * stride wraps.
    state = huge_pool(mode, torch.bfloat16)
    slots = [0, 2045] if mode.slot_per_token else [0, 2048]
    state[[0, *range(2045, 2049)]] = mode.pool(5, torch.bfloat16)
    small = state[[0, 1, 2, 3, 2045, 2046, 2047, 2048]].clone()
    near = [0, 4] if mode.slot_per_token else [0, 7]
    rows = {"query_start_loc": starts([2, 3])} | mode.accepted(1, 3)
    inputs = mode.inputs(5)
    out = mode.run(state, inputs, mode.indices(slots), **rows)
    assert_same_bits(out, mode.run(small, inputs, mode.indices(near), **rows))
    assert_same_bits(state[[0, 1, 2, 3, 2045, 2046, 2047, 2048]], small)


@pytest.mark.gpu
@all_modes
def test_a_slot_beyond_2_to_the_31_elements_on_a_card(mode: Mode) -> None:
    pool = torch.zeros(2049, 2**20, dtype=torch.bfloat16, device="cuda")
    inner = torch.zeros(mode.state_shape, device="meta").stride()
    state = pool.as_strided((2049, *mode.state_shape), (2**20, *inner))
    slots = [0, 2045] if mode.slot_per_token else [0, 2048]
    live = [0, 1, 2, 3, 2045, 2046, 2047, 2048]
    state[live] = mode.pool(8, torch.bfloat16).cuda()
    small = state[live].clone()
    near = [0, 4] if mode.slot_per_token else [0, 7]
    rows: dict[str, Any] = {"query_start_loc": starts([2, 3]).cuda()}
    if mode.takes_accepted:
        rows["num_accepted_tokens"] = int32(1, 3).cuda()
    inputs = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in mode.inputs(5).items()}
    out = mode.run(state, inputs, mode.indices(slots).cuda(), **rows)
    assert_same_bits(out, mode.run(small, inputs, mode.indices(near).cuda(), **rows))
    assert_same_bits(state[live], small)
    assert pool[1024].count_nonzero() == 0
