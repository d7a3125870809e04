"""kv_cache_write_ against plain loops, byte for byte; fp8 keys put together number by number."""

import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from tests.helpers import (
    TOLERANCES,
    assert_close,
    assert_compiled_equals_eager,
    assert_refused,
    assert_refuses_grad,
    assert_same_bits,
    huge_rows,
    nan_pool,
    storage_bytes,
    strided_pool,
)
from tests.index_oracles import float32, quantise
from tests.ops.test_sparse_mla_decode import oracle

HEAD_DIM, BLOCK_SIZE = 6, 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# head_dim, latent_dim of fp8 keys; the last two differ in how the bytes of a key are shared out
FP8_DIMS = [(264, 256), (576, 512), (128, 128), (130, 128), (320, 128), (320, 256)]


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


def make_fp8_inputs(
    dtype: torch.dtype = torch.float32,
    head_dim: int = 264,
    latent_dim: int = 256,
    device: str = "cpu",
) -> dict[str, Any]:
    """As ``make_inputs``, with groups of any size: from far below the floor of the scale on."""
    inputs = make_inputs(dtype, device)
    sizes = torch.logspace(-7, 4, 6 * -(-head_dim // 128)).view(6, -1).repeat_interleave(128, 1)
    inputs["kv"] = (torch.randn(6, head_dim) * sizes[:, :head_dim]).to(device, dtype)
    key_bytes = latent_dim + latent_dim // 32 + 2 * (head_dim - latent_dim)
    shape = (5, BLOCK_SIZE, key_bytes)
    inputs["kv_cache"] = nan_pool(*shape, dtype=torch.uint8, device=device)
    return inputs


def bfloat16_bits(value: float) -> int:
    """The bf16 nearest to ``value``, which is an fp32, ties to the even one."""
    if math.isnan(value):
        return 0x7FC0
    low = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    if math.isinf(value):
        return low

    def number(bits: int) -> float:
        if bits & 0x7FFF == 0x7F80:
            # where the next number would be if there was one
            return math.copysign(2.0**128, value)
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]

    return min((low, low + 1), key=lambda bits: (abs(number(bits) - value), bits & 1))


def fp8_row(key: list[float], latent_dim: int) -> bytes:
    """The bytes of one key, put together number by number."""
    groups = [quantise(key[first : first + 128]) for first in range(0, latent_dim, 128)]
    codes = b"".join(bytes(codes) for codes, _ in groups)
    scales = b"".join(struct.pack("<f", scale) for _, scale in groups)
    return codes + scales + b"".join(struct.pack("<H", bfloat16_bits(x)) for x in key[latent_dim:])


def expected_fp8(
    kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor, latent_dim: int = 256
) -> Tensor:
    cache = kv_cache.cpu().clone(memory_format=torch.contiguous_format)
    num_blocks, block_size, _ = cache.shape
    for key, slot in zip(kv.double().tolist(), slot_mapping.tolist(), strict=True):
        if 0 <= slot < num_blocks * block_size:
            row = torch.tensor(list(fp8_row(key, latent_dim)), dtype=torch.uint8)
            cache[slot // block_size, slot % block_size] = row
    return cache


each_fp8_dims = pytest.mark.parametrize(
    ("head_dim", "latent_dim"), FP8_DIMS, ids=lambda size: str(size)
)


@each_fp8_dims
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache_write_fp8_stores_the_documented_bytes(
    dtype: torch.dtype, head_dim: int, latent_dim: int, device: str
):
    inputs = make_fp8_inputs(dtype, head_dim, latent_dim, device)
    right = expected_fp8(**inputs, latent_dim=latent_dim)
    assert ops.kv_cache_write_(**inputs) is None
    assert_same_bits(inputs["kv_cache"].cpu(), right)


def test_kv_cache_write_fp8_key_by_hand(device: str):
    """FlashMLA's 656 bytes: the greatest of a group is 448 times its scale."""
    kv = torch.zeros(1, 576, device=device)
    kv[0, [0, 127, 128, 511]] = torch.tensor([896.0, -4.0, 224.0, 448.0], device=device)
    kv[0, [510, 512, 575]] = torch.tensor([17.0, -0.0, 1 + 2.0**-8], device=device)
    cache = torch.full((1, 1, 656), 0xFF, dtype=torch.uint8, device=device)
    ops.kv_cache_write_(kv, torch.tensor([0], device=device), cache)
    row = torch.zeros(656, dtype=torch.uint8)
    # 448, -2, 448; 17 lies between 16 and 18, and 16 is even; 448
    row[[0, 127, 128, 510, 511]] = torch.tensor([0x7E, 0xC0, 0x7E, 0x58, 0x7E], dtype=torch.uint8)
    row[512:528] = torch.tensor([2.0, 0.5, float32(1e-4) / 448, 1.0]).view(torch.uint8)
    # -0.0, and 1 for a number halfway between 1 and the next
    row[[529, 655, 654]] = torch.tensor([0x80, 0x3F, 0x80], dtype=torch.uint8)
    assert_same_bits(cache.cpu(), row.view(1, 1, 656))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache_write_fp8_of_extreme_keys(dtype: torch.dtype, device: str):
    """Zeros, the smallest and the largest numbers, NaN and infinities in latents and rotary part.

    A group that is not finite is NaN throughout; the groups beside it are what they would be.
    """
    inputs = make_fp8_inputs(dtype, device=device)
    inputs["slot_mapping"] = torch.arange(6, device=device)
    kv = inputs["kv"]
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    kv[0, :128], kv[0, 128:256] = 0.0, -0.0
    kv[1, :4] = torch.tensor([largest, -largest, tiny, -tiny / 4])
    kv[2, 3], kv[2, 256] = math.nan, 1.0
    kv[3, 200], kv[3, 201] = math.inf, -math.inf
    kv[4, 256:] = torch.tensor(
        [math.nan, -math.nan, math.inf, -math.inf, largest, -largest, tiny / 4, -0.0]
    )
    kv[5, 5] = -math.nan
    right = expected_fp8(**inputs)
    ops.kv_cache_write_(**inputs)
    cache = inputs["kv_cache"].cpu()
    assert_same_bits(cache, right)
    rows = cache.flatten(0, 1)
    assert rows[0, 256:264].view(torch.float32).tolist() == [float32(float32(1e-4) / 448)] * 2
    assert rows[2, :128].tolist() == [0x7F] * 128
    assert not (rows[2, 128:256] & 0x7F == 0x7F).any()


def test_kv_cache_write_fp8_rounds_the_rotary_part_to_nearest_even(device: str):
    """bf16 numbers, and fp32 numbers at, below and above the middle of two, of any size."""
    high = torch.randint(0, 2**16, (1, 1 << 10), dtype=torch.int64)
    high[0, :8] = torch.tensor([0, 1, 0x7F7F, 0x7F80, 0x7FC0, 0xFF7F, 0xFF80, 0xFFFF])
    low = torch.tensor([[0], [1], [0x7FFF], [0x8000], [0x8001], [0xFFFF]])
    bits = high << 16 | low
    bits -= (bits >> 31) << 32
    rope = bits.int().view(torch.float32)
    kv = torch.cat([torch.zeros(6, 128), rope], dim=1).to(device)
    cache = nan_pool(6, 1, 132 + 2048, dtype=torch.uint8, device=device)
    slots = torch.arange(6, device=device)
    right = expected_fp8(kv, slots, cache, latent_dim=128)
    ops.kv_cache_write_(kv, slots, cache)
    assert_same_bits(cache.cpu(), right)


def test_kv_cache_write_fp8_does_not_touch_other_bytes(device: str):
    inputs = make_fp8_inputs(device=device)
    page = torch.randint(0, 256, inputs["kv_cache"].shape, dtype=torch.uint8, device=device)
    inputs["kv_cache"] = strided_pool(page)
    before = storage_bytes(inputs["kv_cache"])
    slots = torch.tensor([-1, -(2**63), 5 * BLOCK_SIZE, 2**62, -BLOCK_SIZE, -1], device=device)
    ops.kv_cache_write_(inputs["kv"], slots, inputs["kv_cache"])
    assert torch.equal(storage_bytes(inputs["kv_cache"]), before)
    right = strided_pool(expected_fp8(**inputs).to(device))
    ops.kv_cache_write_(**inputs)
    assert torch.equal(storage_bytes(inputs["kv_cache"]), storage_bytes(right))


def test_kv_cache_write_fp8_from_views_and_into_padded_keys(device: str):
    inputs = make_fp8_inputs(device=device)
    right = expected_fp8(**inputs)
    wide = nan_pool(5, BLOCK_SIZE, 300, dtype=torch.uint8, device=device)
    for kv in (inputs["kv"].t().contiguous().t(), inputs["kv"].repeat_interleave(2, dim=1)[:, ::2]):
        cache = wide.clone()[..., 8:288]
        ops.kv_cache_write_(kv, inputs["slot_mapping"], cache)
        assert_same_bits(cache.cpu(), right)


def test_kv_cache_write_fp8_past_two_to_the_31():
    inputs = make_fp8_inputs()
    inputs["kv_cache"] = huge_rows(inputs["kv_cache"])
    right = expected_fp8(**inputs)
    ops.kv_cache_write_(**inputs)
    assert_same_bits(inputs["kv_cache"], right)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 5), (6, 0), (0, 0)])
def test_kv_cache_write_fp8_of_nothing(tokens: int, blocks: int, device: str):
    inputs = make_fp8_inputs(device=device)
    cache = inputs["kv_cache"][:blocks]
    before = cache.clone()
    ops.kv_cache_write_(inputs["kv"][:tokens], inputs["slot_mapping"][:tokens], cache)
    assert_same_bits(cache, before)


def attention_inputs(
    kv: Tensor, kv_cache: Tensor, topk_indices: list[list[int]], q: Tensor, latent_dim: int
) -> dict[str, Any]:
    """One request whose keys fill the blocks of ``kv_cache`` in order."""
    blocks = torch.arange(kv_cache.shape[0], dtype=torch.int32, device=kv.device)
    return {
        "q": q,
        "kv_cache": kv_cache,
        "topk_indices": torch.tensor(topk_indices, dtype=torch.int32, device=kv.device),
        "block_table": blocks.unsqueeze(0),
        "query_start_loc": torch.tensor([0, len(q)], dtype=torch.int32, device=kv.device),
        "scale": 0.05,
        "latent_dim": latent_dim,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "latent_dim"), [(576, 512), (264, 256)])
def test_kv_cache_write_fp8_is_read_back_by_attention(
    dtype: torch.dtype, head_dim: int, latent_dim: int, device: str
):
    """A token that selects one key has its latents as output: within half a unit in the last place
    of e4m3, and the rounding to the dtype of q. The logarithm holds the rotary part."""
    kv = (torch.randn(8, head_dim) * torch.logspace(-2, 2, 8)[:, None]).to(device, dtype)
    key_bytes = latent_dim + latent_dim // 32 + 2 * (head_dim - latent_dim)
    cache = nan_pool(2, BLOCK_SIZE, key_bytes, dtype=torch.uint8, device=device)
    ops.kv_cache_write_(kv, torch.arange(8, device=device), cache)
    q = torch.zeros(8, 1, head_dim, device=device, dtype=dtype)
    q[:, :, latent_dim + 1] = 1
    inputs = attention_inputs(kv, cache, [[key] for key in range(8)], q, latent_dim)
    out, lse = ops.sparse_mla_decode(**inputs)

    latents = kv[:, :latent_dim].double()
    amax = latents.unflatten(1, (-1, 128)).abs().amax(dim=2).repeat_interleave(128, dim=1)
    # 3 mantissa bits; below 2**-6 codes are 2**-9 apart
    half_unit = torch.maximum(latents.abs() * 2.0**-4, amax / 448 * 2.0**-10)
    bound = half_unit + latents.abs() * torch.finfo(dtype).eps + amax * 1e-6
    error = (out[:, 0].double() - latents).abs()
    assert (error <= bound).all()
    # fp8 it is: the bound is met, and not by copies
    assert error.max() > amax.max() * 2.0**-7
    rope = kv[:, latent_dim + 1].bfloat16().to(dtype)
    assert_close(lse[:, 0], rope.double() * inputs["scale"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache_write_fp8_attention_is_near_that_of_the_keys(dtype: torch.dtype, device: str):
    """Attention over the fp8 cache is within what the error of its keys explains."""
    head_dim, latent_dim, num_keys = 264, 256, 12
    kv = torch.randn(num_keys, head_dim).to(device, dtype)
    q = torch.randn(3, 2, head_dim).to(device, dtype)
    indices = [torch.randperm(num_keys)[:5].tolist() for _ in range(3)]
    cache = nan_pool(3, BLOCK_SIZE, 280, dtype=torch.uint8, device=device)
    ops.kv_cache_write_(kv, torch.arange(num_keys, device=device), cache)
    inputs = attention_inputs(kv, cache, indices, q, latent_dim)
    out, lse = ops.sparse_mla_decode(**inputs)
    plain = kv.view(3, BLOCK_SIZE, head_dim)
    right, right_lse = oracle(**{**inputs, "kv_cache": plain})

    keys, queries = kv.double().cpu(), q.double().cpu()
    scales = keys[:, :latent_dim].unflatten(1, (2, 128)).abs().amax(2) / 448
    latent_error = torch.maximum(
        keys[:, :latent_dim].abs() * 2.0**-4, scales.repeat_interleave(128, 1) * 2.0**-10
    )
    rope_error = keys[:, latent_dim:].abs() * 2.0**-8
    # the rounding of keys to the dtype of q, too
    key_error = torch.cat([latent_error, rope_error], dim=1)
    key_error += keys.abs() * torch.finfo(dtype).eps
    rtol, atol = TOLERANCES[dtype]
    for token in range(3):
        chosen = keys[indices[token]]
        score_error = inputs["scale"] * (queries[token].abs() @ key_error[indices[token]].T).amax(1)
        assert ((lse[token].double().cpu() - right_lse[token]).abs() <= score_error + 1e-4).all()
        # weights move by a factor within exp(2 * score_error), values by their own error
        moved = torch.expm1(2 * score_error)[:, None] * chosen[:, :latent_dim].abs().amax(0)
        bound = moved + (2 * score_error).exp()[:, None] * latent_error[indices[token]].amax(0)
        error = (out[token].double().cpu() - right[token]).abs()
        assert (error <= bound + atol + rtol * right[token].abs()).all()


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_kv_cache_write_fp8_opcheck(tokens: int, device: str):
    inputs = make_fp8_inputs(torch.bfloat16, 576, 512, device=device)
    cache = strided_pool(inputs["kv_cache"])
    torch.library.opcheck(
        torch.ops.mtpgraph.kv_cache_write_.default,
        (inputs["kv"][:tokens], inputs["slot_mapping"][:tokens], cache),
    )


def test_kv_cache_write_fp8_compiled_equals_eager():
    """The cache is a view into a page: every byte of the page is compared."""

    def step(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> Tensor:
        ops.kv_cache_write_(kv * 2, slot_mapping, kv_cache)
        return kv * 3

    def make(tokens: int) -> dict[str, Any]:
        inputs = make_fp8_inputs(torch.bfloat16, 576, 512)
        inputs["kv_cache"] = strided_pool(inputs["kv_cache"])
        for name in ("kv", "slot_mapping"):
            inputs[name] = inputs[name][:tokens]
        return inputs

    assert_compiled_equals_eager(step, [lambda: make(6), lambda: make(3)])


def fp8_cache(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        *(
            (
                {"kv_cache": fp8_cache(5, BLOCK_SIZE, key_bytes)},
                ValueError,
                r"kv_cache must have keys of latent_dim \+ latent_dim / 128 \* 4 \+ "
                r"\(head_dim - latent_dim\) \* 2 bytes with dtype uint8, for a latent_dim that is "
                rf"a multiple of 128 in 128 .. head_dim \(264\), got {key_bytes} bytes",
            )
            # none, 128 * 3, -128, of no integer, head_dim itself
            for key_bytes in (528, 156, 652, 281, 264, 0)
        ),
        (
            {"kv": torch.zeros(6, 120), "kv_cache": fp8_cache(5, BLOCK_SIZE, 116)},
            ValueError,
            r"kv_cache must have keys of .* head_dim \(120\), got 116 bytes",
        ),
        (
            {"kv_cache": fp8_cache(5, BLOCK_SIZE * 280)},
            ValueError,
            r"kv_cache must have shape \[num_blocks, block_size, key_bytes\], got \[5, 1120\]",
        ),
        (
            {"kv_cache": fp8_cache(5, 0, 280)},
            ValueError,
            "kv_cache must have a block_size of at least 1, got 0",
        ),
        (
            {"kv_cache": torch.zeros(5, BLOCK_SIZE, 280, dtype=torch.int8)},
            TypeError,
            "kv_cache must have dtype torch.float32 or torch.uint8, got torch.int8",
        ),
        (
            {"kv_cache": fp8_cache(5, BLOCK_SIZE, 282)[..., :280]},
            ValueError,
            "kv_cache must have a token stride that is a multiple of 4 bytes, got 282",
        ),
        (
            {"kv_cache": fp8_cache(5, 1122)[:, :1120].unflatten(1, (4, 280))},
            ValueError,
            "kv_cache must have a block stride that is a multiple of 4 bytes, got 1122",
        ),
        (
            {"kv_cache": fp8_cache(6, BLOCK_SIZE, 280).flatten()[2:-1118].view(5, 4, 280)},
            ValueError,
            "kv_cache must have a storage offset that is a multiple of 4 bytes, got 2",
        ),
        (
            {"kv_cache": fp8_cache(5, BLOCK_SIZE, 560)[..., ::2]},
            ValueError,
            "kv_cache must have a stride of 1 in its last dim with dtype uint8, got 2",
        ),
        (
            {"kv_cache": fp8_cache(1, BLOCK_SIZE, 280).expand(5, -1, -1)},
            ValueError,
            "kv_cache must not overlap itself",
        ),
        (
            {"kv_cache": torch.zeros(5, BLOCK_SIZE, 280, dtype=torch.uint8, device="meta")},
            ValueError,
            "kv_cache must be on cpu as kv is, got meta",
        ),
    ],
)
def test_kv_cache_write_fp8_refuses(changes: dict[str, Any], error: type[Exception], match: str):
    assert_refused(ops.kv_cache_write_, {**make_fp8_inputs(), **changes}, error, match)
