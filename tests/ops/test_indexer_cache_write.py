"""indexer_cache_write_ against an fp8 quantiser in plain Python, byte for byte."""

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
    assert_untouched,
    each_batch,
    huge_rows,
    make_batch,
    nan_pool,
    random_case,
    storage_bytes,
    strided_pool,
)
from ..index_oracles import quantise, read_key

HEAD_DIM = 8
BLOCK_SIZE = 4
BLOCK_BYTES = BLOCK_SIZE * (HEAD_DIM + 4)
Case = tuple[list[int], list[int], int]
RAGGED: Case = ([1, 3, 0, 5], [7, 3, 0, 11], 2)


def make_inputs(
    case: Case = RAGGED, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Any]:
    batch = make_batch(*case[:2], BLOCK_SIZE, trailing=case[2], device=device)
    return {
        "k": torch.randn(batch.num_tokens, HEAD_DIM).to(device, dtype),
        "slot_mapping": batch.slot_mapping,
        "k_cache": nan_pool(batch.num_blocks, BLOCK_BYTES, dtype=torch.uint8, device=device),
    }


def expected_cache(
    k: Tensor, slot_mapping: Tensor, k_cache: Tensor, power_of_two_scale: bool = False
) -> Tensor:
    """``k_cache`` after the write, put together byte by byte."""
    out = k_cache.cpu().clone(memory_format=torch.contiguous_format)
    head_dim = k.shape[1]
    block_size = k_cache.shape[1] // (head_dim + 4)
    for key, slot in zip(k.double().tolist(), slot_mapping.tolist(), strict=True):
        if not 0 <= slot < k_cache.shape[0] * block_size:
            continue
        codes, scale = quantise(key, power_of_two_scale)
        block, offset = slot // block_size, slot % block_size
        out[block, offset * head_dim : (offset + 1) * head_dim] = torch.tensor(codes)
        start = block_size * head_dim + 4 * offset
        out[block, start : start + 4] = torch.tensor([scale]).view(torch.uint8)
    return out


@pytest.mark.parametrize("power_of_two_scale", [False, True], ids=["exact", "power_of_two"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_indexer_cache_write_stores_the_documented_bytes(
    dtype: torch.dtype, power_of_two_scale: bool, device: str
) -> None:
    inputs = make_inputs(dtype=dtype, device=device)
    # magnitudes from far below the smallest code to the largest half
    inputs["k"] *= torch.logspace(-7, 4, inputs["k"].shape[0], device=device).to(dtype)[:, None]
    expected = expected_cache(**inputs, power_of_two_scale=power_of_two_scale)
    ops.indexer_cache_write_(**inputs, power_of_two_scale=power_of_two_scale)
    assert_same_bits(inputs["k_cache"].cpu(), expected)


@each_batch
def test_indexer_cache_write_equals_loops(case: Case, device: str) -> None:
    inputs = make_inputs(case, device=device)
    expected = expected_cache(**inputs)
    assert ops.indexer_cache_write_(**inputs) is None
    assert_same_bits(inputs["k_cache"].cpu(), expected)


def test_indexer_cache_write_equals_loops_on_random_batches(full: bool, device: str) -> None:
    for _ in range(200 if full else 8):
        inputs = make_inputs(random_case(), device=device)
        expected = expected_cache(**inputs)
        ops.indexer_cache_write_(**inputs)
        assert_same_bits(inputs["k_cache"].cpu(), expected)


def test_indexer_cache_write_every_code_is_reachable_and_ties_go_to_even(device: str) -> None:
    """With a largest element of 448 the scale is 1: the keys are codes, and points between."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (values[1:] + values[:-1]) / 2
    points = torch.cat([values, halfway, -values, -halfway])
    k = torch.cat([points.view(-1, 1), torch.full((points.numel(), 1), 448.0)], dim=1)
    k_cache = nan_pool(len(k), 1 * (2 + 4), dtype=torch.uint8)
    # one key of two dims per block puts the scale on an odd word: use four keys per block
    k_cache = nan_pool(-(-len(k) // 4), 4 * (2 + 4), dtype=torch.uint8, device=device)
    slots = torch.arange(len(k), device=device)
    ops.indexer_cache_write_(k.to(device), slots, k_cache)
    for slot, key in enumerate(k.double().tolist()):
        codes, scale = read_key(k_cache.cpu(), slot, 2)
        assert scale == 1.0
        assert codes == quantise(key)[0], key


def test_indexer_cache_write_key_of_zeros_has_a_finite_scale(device: str) -> None:
    k_cache = nan_pool(1, BLOCK_BYTES, dtype=torch.uint8, device=device)
    k = torch.zeros(1, HEAD_DIM, device=device)
    ops.indexer_cache_write_(k, torch.tensor([2], device=device), k_cache)
    codes, scale = read_key(k_cache.cpu(), 2, HEAD_DIM)
    assert codes == [0] * HEAD_DIM
    assert scale == pytest.approx(1e-4 / 448, rel=1e-6)


@pytest.mark.parametrize("power_of_two_scale", [False, True], ids=["exact", "power_of_two"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_indexer_cache_write_key_that_is_not_finite_is_nan_throughout(
    bad: float, power_of_two_scale: bool, device: str
) -> None:
    """An inf or NaN must not become a plausible number, nor reach the keys of other tokens."""
    inputs = make_inputs(device=device)
    inputs["k"][1, 3] = bad
    expected = expected_cache(**inputs, power_of_two_scale=power_of_two_scale)
    slot = int(inputs["slot_mapping"][1])
    ops.indexer_cache_write_(**inputs, power_of_two_scale=power_of_two_scale)
    codes, scale = read_key(inputs["k_cache"].cpu(), slot, HEAD_DIM)
    assert codes == [0x7F] * HEAD_DIM
    assert math.isnan(scale)
    assert_same_bits(inputs["k_cache"].cpu(), expected)


def test_indexer_cache_write_power_of_two_scale_rounds_up(device: str) -> None:
    amax = torch.tensor([448.0, 448.0001, 447.9, 1.0, 3e-5, 3e38])
    k = torch.zeros(6, HEAD_DIM)
    k[:, 5] = -amax
    k_cache = nan_pool(2, BLOCK_BYTES, dtype=torch.uint8, device=device)
    slots = torch.arange(6, device=device)
    ops.indexer_cache_write_(k.to(device), slots, k_cache, power_of_two_scale=True)
    scales = [read_key(k_cache.cpu(), slot, HEAD_DIM)[1] for slot in range(6)]
    assert scales[:4] == [1.0, 2.0, 1.0, 2.0**-8]
    for scale, value in zip(scales, amax.clamp_min(1e-4).tolist(), strict=True):
        assert math.frexp(scale)[0] == 0.5
        assert value / 448 <= scale < value / 224


def test_indexer_cache_write_does_not_touch_other_bytes(device: str) -> None:
    """Slots outside the pool are skipped; other blocks and the page around the pool stay."""
    page = torch.randint(0, 256, (5, BLOCK_BYTES), dtype=torch.uint8, device=device)
    k_cache = strided_pool(page)
    before = storage_bytes(k_cache)
    outside = [-1, -(2**63), 5 * BLOCK_SIZE, 2**62, -BLOCK_SIZE]
    slots = torch.tensor([*outside, 2 * BLOCK_SIZE + 1], device=device)
    k = torch.randn(6, HEAD_DIM, device=device)
    ops.indexer_cache_write_(k[:5], slots[:5], k_cache)
    assert torch.equal(storage_bytes(k_cache), before)

    ops.indexer_cache_write_(k, slots, k_cache)
    assert_untouched(k_cache, page, touched=[2])
    assert_same_bits(k_cache.cpu(), expected_cache(k, slots, page))
    changed = (storage_bytes(k_cache) != before).nonzero().flatten() - k_cache.storage_offset()
    block = changed // k_cache.stride(0)
    assert block.unique().tolist() == [2]
    within = set((changed % k_cache.stride(0)).tolist())
    scale = BLOCK_SIZE * HEAD_DIM + 4
    assert within <= {*range(HEAD_DIM, 2 * HEAD_DIM), *range(scale, scale + 4)}


def test_indexer_cache_write_reads_strided_keys(device: str) -> None:
    inputs = make_inputs(device=device)
    expected = expected_cache(**inputs)
    k, slots = inputs["k"], inputs["slot_mapping"]
    inputs["k"] = k.t().contiguous().t()
    inputs["slot_mapping"] = torch.stack([slots, slots + 1], dim=1)[:, 0]
    ops.indexer_cache_write_(**inputs)
    assert_same_bits(inputs["k_cache"].cpu(), expected)


@pytest.mark.parametrize("head_dim", [4, 32, 33, 128])
def test_indexer_cache_write_any_head_dim(head_dim: int, device: str) -> None:
    k = torch.randn(3, head_dim, device=device)
    k_cache = nan_pool(3, BLOCK_SIZE * (head_dim + 4), dtype=torch.uint8, device=device)
    slots = torch.tensor([7, 0, 9], device=device)
    expected = expected_cache(k, slots, k_cache)
    ops.indexer_cache_write_(k, slots, k_cache)
    assert_same_bits(k_cache.cpu(), expected)


def test_indexer_cache_write_past_2_31_bytes(device: str) -> None:
    k_cache = huge_rows(nan_pool(3, BLOCK_BYTES, dtype=torch.uint8, device=device))
    k = torch.randn(2, HEAD_DIM, device=device)
    slots = torch.tensor([2 * BLOCK_SIZE + 3, BLOCK_SIZE], device=device)
    expected = expected_cache(k, slots, k_cache)
    ops.indexer_cache_write_(k, slots, k_cache)
    assert_same_bits(k_cache.cpu(), expected)


def test_indexer_cache_write_pool_of_one_block_may_have_any_block_stride(device: str) -> None:
    """A stride that is never multiplied says nothing about alignment."""
    wide = nan_pool(1, BLOCK_BYTES + 1, dtype=torch.uint8, device=device)
    k_cache = wide[:, :BLOCK_BYTES]
    k, slots = torch.randn(1, HEAD_DIM, device=device), torch.tensor([1], device=device)
    expected = expected_cache(k, slots, k_cache)
    ops.indexer_cache_write_(k, slots, k_cache)
    assert_same_bits(k_cache.cpu(), expected)


def test_indexer_cache_write_into_a_pool_without_blocks(device: str) -> None:
    k_cache = nan_pool(0, BLOCK_BYTES, dtype=torch.uint8, device=device)
    k, slots = torch.randn(1, HEAD_DIM, device=device), torch.tensor([0], device=device)
    ops.indexer_cache_write_(k, slots, k_cache)


def cache(blocks: int, size: int = BLOCK_BYTES) -> Tensor:
    return nan_pool(blocks, size, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"k": torch.zeros(11, HEAD_DIM, dtype=torch.float64)},
            TypeError,
            "k must have dtype torch.float32 or torch.bfloat16 or torch.float16, got torch.float64",
        ),
        (
            {"slot_mapping": torch.zeros(11, dtype=torch.int32)},
            TypeError,
            "slot_mapping must have dtype torch.int64, got torch.int32",
        ),
        (
            {"k_cache": cache(9).view(torch.float8_e4m3fn)},
            TypeError,
            "k_cache must have dtype torch.uint8, got torch.float8_e4m3fn",
        ),
        (
            {"k": torch.zeros(11, 2, 4)},
            ValueError,
            r"k must have shape \[num_tokens, head_dim\], got \[11, 2, 4\]",
        ),
        (
            {"slot_mapping": torch.zeros(10, dtype=torch.int64)},
            ValueError,
            r"slot_mapping must have shape \[num_tokens=11\], got \[10\]",
        ),
        (
            {"k_cache": cache(9).view(9, BLOCK_SIZE, HEAD_DIM + 4)},
            ValueError,
            r"k_cache must have shape \[num_blocks, block_bytes\], got \[9, 4, 12\]",
        ),
        (
            {"k_cache": cache(9, BLOCK_BYTES + 4)},
            ValueError,
            r"k_cache must have a multiple of head_dim \+ 4 = 12 bytes per block, got 52",
        ),
        (
            {"k_cache": cache(9, 0)},
            ValueError,
            r"k_cache must have a multiple of head_dim \+ 4 = 12 bytes per block, got 0",
        ),
        (
            {"k": torch.zeros(11, 2), "k_cache": cache(9, 6)},
            ValueError,
            r"k_cache must have its scales on a multiple of 4 bytes in the block \(head_dim 2\), "
            "got 6 bytes per block",
        ),
        (
            {"k": torch.zeros(11, 0)},
            ValueError,
            r"k must have a head_dim of at least 1, got \[11, 0\]",
        ),
        (
            {"k_cache": cache(9, 2 * BLOCK_BYTES)[:, ::2]},
            ValueError,
            "k_cache must have a stride of 1 in its last dim, got 2",
        ),
        (
            {"k_cache": cache(9, BLOCK_BYTES + 2)[:, :-2]},
            ValueError,
            "k_cache must have a block stride that is a multiple of 4 bytes, got 50",
        ),
        (
            {"k_cache": cache(9, BLOCK_BYTES + 4)[:, 2:-2]},
            ValueError,
            "k_cache must have a storage offset that is a multiple of 4 bytes, got 2",
        ),
        (
            {"k_cache": cache(1).expand(9, -1)},
            ValueError,
            r"k_cache must not overlap itself, got strides \(0, 1\) for shape \[9, 48\]",
        ),
        (
            {"slot_mapping": torch.zeros(11, dtype=torch.int64, device="meta")},
            ValueError,
            "slot_mapping must be on cpu as k is, got meta",
        ),
        (
            {"k_cache": torch.zeros(9, BLOCK_BYTES, dtype=torch.uint8, device="meta")},
            ValueError,
            "k_cache must be on cpu as k is, got meta",
        ),
    ],
)
def test_indexer_cache_write_refuses(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    assert_refused(ops.indexer_cache_write_, {**make_inputs(), **changes}, error, match)


def test_indexer_cache_write_refuses_grad() -> None:
    assert_refuses_grad(ops.indexer_cache_write_, make_inputs(), "k")


def test_indexer_cache_write_opcheck() -> None:
    inputs = make_inputs()
    one = make_inputs(([1], [9], 0), torch.bfloat16)
    assert_opcheck(
        torch.ops.mtpgraph.indexer_cache_write_.default,
        inputs,
        {**one, "power_of_two_scale": True},
        make_inputs(([], [], 0)),
        {
            **inputs,
            "k": inputs["k"].t().contiguous().t(),
            "k_cache": strided_pool(inputs["k_cache"]),
        },
    )


def strided_inputs(case: Case) -> dict[str, Any]:
    inputs = make_inputs(case)
    return {**inputs, "k_cache": strided_pool(inputs["k_cache"])}


def test_indexer_cache_write_compiled_equals_eager() -> None:
    """The cache is a view into a page: every byte of the page is compared."""

    def step(k: Tensor, slot_mapping: Tensor, k_cache: Tensor) -> Tensor:
        ops.indexer_cache_write_(k * 2, slot_mapping, k_cache)
        ops.indexer_cache_write_(k + 1, slot_mapping + 1, k_cache, power_of_two_scale=True)
        return k * 3

    assert_compiled_equals_eager(
        step,
        [lambda: strided_inputs(RAGGED), lambda: strided_inputs(([2] * 3, [4, 19, 5], 1))],
    )
