"""sparse_mla_decode against float64 loops, on a cache where every unselected key is NaN."""

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops

from ..helpers import (
    Batch,
    assert_close,
    assert_compiled_equals_eager,
    assert_opcheck,
    assert_refused,
    assert_refuses_grad,
    assert_same_result,
    each_batch,
    huge_rows,
    make_batch,
    nan_pool,
    random_case,
    storage_bytes,
    strided_pool,
)

HEAD_DIM = 12
LATENT_DIM = 9
BLOCK_SIZE = 4
SCALE = 0.3
Case = tuple[list[int], list[int], int]
RAGGED: Case = ([1, 3, 0, 5], [7, 3, 0, 11], 2)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# latents of an fp8 cache come in groups of 128
FP8_DIMS = {"head_dim": 264, "latent_dim": 256}


def make_inputs(
    case: Case = RAGGED,
    *,
    topk: int = 5,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 3,
    head_dim: int = HEAD_DIM,
    latent_dim: int = LATENT_DIM,
    block_size: int = BLOCK_SIZE,
    fp8: bool = False,
    device: str = "cpu",
) -> tuple[dict[str, Any], Batch]:
    """Each row selects keys that it sees, in any order, with -1 between them.

    Keys that no row selects, and all other memory of the cache, are NaN.
    """
    batch = make_batch(*case[:2], block_size, trailing=case[2], device=device)
    if fp8:
        key_bytes = latent_dim + latent_dim // 128 * 4 + (head_dim - latent_dim) * 2
        kv_cache = nan_pool(batch.num_blocks, block_size, key_bytes, dtype=torch.uint8)
    else:
        kv_cache = nan_pool(batch.num_blocks, block_size, head_dim, dtype=dtype)
    indices = torch.full((batch.num_tokens, topk), -1, dtype=torch.int32)
    for token, (request, row_len) in enumerate(batch.rows):
        chosen = torch.randperm(row_len)[:topk].tolist()
        columns = torch.randperm(topk)[: len(chosen)].tolist()
        for column, position in zip(columns, chosen, strict=True):
            indices[token, column] = position
            block = batch.blocks[request][position // block_size]
            key = torch.randn(head_dim)
            row = fp8_keys(key, latent_dim) if fp8 else key.to(dtype)
            kv_cache[block, position % block_size] = row
    inputs = {
        "q": torch.randn(batch.num_tokens, num_heads, head_dim).to(device, dtype),
        "kv_cache": kv_cache.to(device),
        "topk_indices": indices.to(device),
        "block_table": batch.block_table,
        "query_start_loc": batch.query_start_loc,
        "scale": SCALE,
        "latent_dim": latent_dim,
    }
    return inputs, batch


def fp8_keys(keys: Tensor, latent_dim: int = 512) -> Tensor:
    """Rows of an fp8 cache: [..., head_dim] to uint8 [..., key_bytes]."""
    latents = keys[..., :latent_dim].float().unflatten(-1, (-1, 128))
    scales = latents.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    codes = (latents / scales).to(torch.float8_e4m3fn).flatten(-2)
    parts = [codes, scales.squeeze(-1), keys[..., latent_dim:].bfloat16()]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def numbers(rows: Tensor, dtype: torch.dtype, latent_dim: int) -> Tensor:
    """The keys of a cache in float64, each number of an fp8 key on its own."""
    if rows.dtype != torch.uint8:
        return rows.double().cpu()
    rows = rows.cpu()
    groups = latent_dim // 128
    parts = []
    for group in range(groups):
        codes = rows[..., 128 * group : 128 * group + 128].contiguous().view(torch.float8_e4m3fn)
        first = latent_dim + 4 * group
        scale = rows[..., first : first + 4].contiguous().view(torch.float32)
        parts.append(codes.float() * scale)
    rope = rows[..., latent_dim + 4 * groups :].contiguous().view(torch.bfloat16)
    return torch.cat([*parts, rope.float()], dim=-1).to(dtype).double()


def oracle(
    q: Tensor,
    kv_cache: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    scale: float,
    latent_dim: int = 512,
) -> tuple[Tensor, Tensor]:
    """Softmax over the listed keys, one token and one head at a time."""
    num_tokens, num_heads, _ = q.shape
    num_blocks, block_size, _ = kv_cache.shape
    out = torch.zeros(num_tokens, num_heads, latent_dim, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    kv_cache = numbers(kv_cache, q.dtype, latent_dim)
    q, table = q.double().cpu(), block_table.tolist()
    starts = query_start_loc.tolist()
    for request, row in enumerate(table):
        for token in range(starts[request], starts[request + 1]):
            keys = []
            for index in topk_indices[token].tolist():
                if 0 <= index < len(row) * block_size:
                    block = row[index // block_size]
                    if 0 <= block < num_blocks:
                        keys.append(kv_cache[block, index % block_size])
            if not keys:
                continue
            for head in range(num_heads):
                scores = [scale * torch.dot(q[token, head], key).item() for key in keys]
                largest = max(scores)
                total = sum(math.exp(score - largest) for score in scores)
                lse[token, head] = largest + math.log(total)
                for score, key in zip(scores, keys, strict=True):
                    out[token, head] += math.exp(score - largest) / total * key[:latent_dim]
    return out, lse


def assert_equals_float64(inputs: dict[str, Any]) -> None:
    out, lse = ops.sparse_mla_decode(**inputs)
    expected_out, expected_lse = oracle(**inputs)
    assert out.dtype == inputs["q"].dtype
    assert lse.dtype == torch.float32
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


@each_batch
def test_sparse_mla_decode_equals_float64(case: Case, device: str) -> None:
    assert_equals_float64(make_inputs(case, device=device)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sparse_mla_decode_of_each_dtype(dtype: torch.dtype, device: str) -> None:
    assert_equals_float64(make_inputs(dtype=dtype, device=device)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sparse_mla_decode_rounds_to_half_once(dtype: torch.dtype) -> None:
    """The result is the float64 one to within half a unit in the last place, and fp32 noise."""
    inputs, _ = make_inputs(dtype=dtype, num_heads=8, topk=11)
    out, _ = ops.sparse_mla_decode(**inputs)
    expected, _ = oracle(**inputs)
    bound = expected.abs() * (torch.finfo(dtype).eps / 2) + 1e-6
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "latent_dim", "block_size", "topk"),
    [(1, 1, 1, 1, 1), (16, 48, 32, 64, 24), (4, 12, 12, 3, 7), (2, 576, 512, 4, 9)],
)
def test_sparse_mla_decode_of_other_sizes(
    num_heads: int, head_dim: int, latent_dim: int, block_size: int, topk: int, device: str
) -> None:
    inputs, _ = make_inputs(
        num_heads=num_heads,
        head_dim=head_dim,
        latent_dim=latent_dim,
        block_size=block_size,
        topk=topk,
        device=device,
    )
    assert_equals_float64(inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sparse_mla_decode_of_an_fp8_cache(dtype: torch.dtype, device: str) -> None:
    assert_equals_float64(make_inputs(dtype=dtype, fp8=True, **FP8_DIMS, device=device)[0])
    for dims in ({"head_dim": 576, "latent_dim": 512}, {"head_dim": 128, "latent_dim": 128}):
        inputs, _ = make_inputs(([2], [9], 1), dtype=dtype, fp8=True, **dims, device=device)
        assert_equals_float64(inputs)


def test_sparse_mla_decode_fp8_key_is_codes_times_scale() -> None:
    """By hand, from the bytes: 656 of a key with 512 + 64 dims."""
    row = torch.zeros(656, dtype=torch.uint8)
    row[[0, 127, 128, 511]] = torch.tensor([0x38, 0xC0, 0x7E, 0x01], dtype=torch.uint8)
    row[512:528] = torch.tensor([2.0, 0.5, 8.0, 1024.0]).view(torch.uint8)
    row[528:] = torch.arange(64).bfloat16().view(torch.uint8)
    inputs = {
        "q": torch.zeros(1, 1, 576),
        "kv_cache": row.view(1, 1, 656),
        "topk_indices": torch.zeros(1, 1, dtype=torch.int32),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
        "scale": 1.0,
    }
    out, lse = ops.sparse_mla_decode(**inputs)
    expected = torch.zeros(512)
    expected[[0, 127, 128, 511]] = torch.tensor([2.0, -4.0, 224.0, 2.0])
    assert torch.equal(out[0, 0], expected)
    assert lse.item() == 0
    inputs["q"][0, 0, [127, 512 + 63]] = torch.tensor([1.0, 0.5])
    assert ops.sparse_mla_decode(**inputs)[1].item() == -4.0 + 63 / 2


def test_sparse_mla_decode_fp8_nan_reaches_only_rows_that_select_it(device: str) -> None:
    """A code, a scale or a rotary dim that is NaN."""
    inputs, batch = make_inputs(
        ([1, 1], [5, 5], 0), topk=5, fp8=True, head_dim=136, latent_dim=128, device=device
    )
    expected = ops.sparse_mla_decode(**inputs)
    clean = inputs["kv_cache"].clone()
    for where in (slice(77, 78), slice(128, 132), slice(140, 142)):
        inputs["kv_cache"] = clean.clone()
        inputs["kv_cache"][batch.blocks[0][0], 1, where] = 0xFF
        out, lse = ops.sparse_mla_decode(**inputs)
        assert out[0].isnan().all()
        assert lse[0].isnan().all()
        assert_close(out[1], expected[0][1])
        assert_close(lse[1], expected[1][1])


def test_sparse_mla_decode_reads_a_strided_fp8_cache(device: str) -> None:
    inputs, _ = make_inputs(fp8=True, **FP8_DIMS, device=device)
    expected = ops.sparse_mla_decode(**inputs)
    pool = inputs["kv_cache"]
    tokens = torch.cat([pool] * 2, dim=2)[:, :, : pool.shape[2]]
    for kv_cache in (strided_pool(pool), tokens, heads_apart(pool), huge_rows(pool)):
        actual = ops.sparse_mla_decode(**{**inputs, "kv_cache": kv_cache})
        for tensor, other in zip(actual, expected, strict=True):
            assert_close(tensor, other)


def test_sparse_mla_decode_latent_dim_is_512_unless_told() -> None:
    inputs, _ = make_inputs(([1], [3], 0), head_dim=576, latent_dim=512)
    del inputs["latent_dim"]
    assert_equals_float64(inputs)


def test_sparse_mla_decode_equals_float64_on_random_batches(full: bool, device: str) -> None:
    for _ in range(200 if full else 8):
        assert_equals_float64(make_inputs(random_case(), device=device)[0])


def test_sparse_mla_decode_skips_keys_that_do_not_exist(device: str) -> None:
    """Indices past the table or negative, and blocks outside the pool, add nothing."""
    inputs, batch = make_inputs(([2], [11], 0), topk=9, device=device)
    past = batch.block_table.shape[1] * BLOCK_SIZE
    extra = torch.tensor([[past, -7, 2**31 - 1, -(2**31)]] * 2, dtype=torch.int32, device=device)
    indices = torch.cat([extra, inputs["topk_indices"]], dim=1)
    assert_equals_float64({**inputs, "topk_indices": indices})
    expected = ops.sparse_mla_decode(**inputs)
    for actual, other in zip(
        ops.sparse_mla_decode(**{**inputs, "topk_indices": indices}), expected, strict=True
    ):
        assert_close(actual, other)

    # positions behind the needed blocks meet the garbage of the table
    garbage = torch.arange(12, past, dtype=torch.int32, device=device).expand(2, -1)
    table = batch.block_table.clone()
    table[0, 3:] = torch.tensor([-1, 2**31 - 1, batch.num_blocks], device=device)
    indices = torch.cat([inputs["topk_indices"], garbage], dim=1)
    assert_equals_float64({**inputs, "block_table": table, "topk_indices": indices})

    table[0, :3] = -1
    out, lse = ops.sparse_mla_decode(**{**inputs, "block_table": table})
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_sparse_mla_decode_key_listed_twice_counts_twice(device: str) -> None:
    inputs, _ = make_inputs(([1], [1], 0), topk=3, device=device)
    once = ops.sparse_mla_decode(**inputs)
    inputs["topk_indices"] = torch.zeros(1, 2, dtype=torch.int32, device=device)
    twice = ops.sparse_mla_decode(**inputs)
    assert_close(twice[0], once[0])
    assert_close(twice[1], once[1] + math.log(2))


def test_sparse_mla_decode_of_large_scores_is_finite(device: str) -> None:
    """Scores far outside the range of exp."""
    inputs, _ = make_inputs(([2], [9], 0), topk=6, device=device)
    for scale in (3e3, -3e3):
        inputs["scale"] = scale
        out, lse = ops.sparse_mla_decode(**inputs)
        assert out.isfinite().all()
        assert lse.isfinite().all()
        torch.testing.assert_close(lse.double().cpu(), oracle(**inputs)[1], rtol=1e-5, atol=0)


def test_sparse_mla_decode_nan_key_reaches_only_rows_that_select_it(device: str) -> None:
    inputs, batch = make_inputs(([1, 1], [5, 5], 0), topk=5, device=device)
    expected = ops.sparse_mla_decode(**inputs)
    inputs["kv_cache"][batch.blocks[0][0], 1] = math.nan
    out, lse = ops.sparse_mla_decode(**inputs)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert_close(out[1], expected[0][1])
    assert_close(lse[1], expected[1][1])


def test_sparse_mla_decode_padding_rows_are_written(device: str) -> None:
    """Tokens of padding requests and trailing tokens: 0 and -inf even when they list keys."""
    inputs, batch = make_inputs(([2, 2], [6, 0], 3), device=device)
    inputs["topk_indices"][4:] = 0
    inputs["q"][2:] = math.nan
    out, lse = ops.sparse_mla_decode(**inputs)
    assert batch.rows[2:] == [(1, 0), (1, 0), (-1, 0), (-1, 0), (-1, 0)]
    assert (out[2:] == 0).all()
    assert (lse[2:] == -math.inf).all()


def test_sparse_mla_decode_reads_strided_inputs(device: str) -> None:
    inputs, _ = make_inputs(device=device)
    expected = ops.sparse_mla_decode(**inputs)
    tokens = torch.cat([inputs["kv_cache"]] * 2, dim=2)[:, :, :HEAD_DIM]
    for kv_cache in (strided_pool(inputs["kv_cache"]), tokens, heads_apart(inputs["kv_cache"])):
        actual = ops.sparse_mla_decode(
            inputs["q"].transpose(0, 2).contiguous().transpose(0, 2),
            kv_cache,
            inputs["topk_indices"].t().contiguous().t(),
            inputs["block_table"].repeat_interleave(2, dim=0)[::2],
            inputs["query_start_loc"].repeat_interleave(2)[::2],
            SCALE,
            LATENT_DIM,
        )
        for tensor, other in zip(actual, expected, strict=True):
            assert_same_result(tensor, other)
            assert tensor.is_contiguous()


def heads_apart(pool: Tensor) -> Tensor:
    """The pool with its tokens outermost."""
    return pool.transpose(0, 1).contiguous().transpose(0, 1)


def test_sparse_mla_decode_past_2_31_elements(device: str) -> None:
    inputs, batch = make_inputs(([2], [7], 0), device=device)
    used = max(batch.blocks[0]) + 1
    inputs["kv_cache"] = huge_rows(inputs["kv_cache"][:used])
    assert_equals_float64(inputs)


def test_sparse_mla_decode_past_2_31_elements_of_index_rows(device: str) -> None:
    inputs, _ = make_inputs(([2, 1], [7, 3], 0), device=device)
    inputs["topk_indices"] = huge_rows(inputs["topk_indices"], 2**30 + 64)
    inputs["block_table"] = huge_rows(inputs["block_table"], 2**30 + 64)
    assert_equals_float64(inputs)


def test_sparse_mla_decode_keeps_its_inputs(device: str) -> None:
    inputs, _ = make_inputs(device=device)
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    before = [storage_bytes(tensor) for tensor in tensors]
    ops.sparse_mla_decode(**inputs)
    assert all(map(torch.equal, before, map(storage_bytes, tensors)))


def test_sparse_mla_decode_row_does_not_depend_on_padding(device: str) -> None:
    """Padding requests behind it do not change a row."""
    inputs, batch = make_inputs(([1, 4], [17, 11], 0), topk=8, device=device)
    expected = ops.sparse_mla_decode(**inputs)
    tokens = batch.num_tokens

    def more(tensor: Tensor, rows: int, value: float) -> Tensor:
        return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), value)])

    padded = {
        **inputs,
        "q": more(inputs["q"], 6, math.nan),
        "topk_indices": more(inputs["topk_indices"], 6, -1),
        "block_table": more(inputs["block_table"], 2, 2**31 - 1),
        "query_start_loc": more(more(inputs["query_start_loc"], 1, 7), 1, 7),
    }
    out, lse = ops.sparse_mla_decode(**padded)
    assert_same_result(out[:tokens], expected[0])
    assert_same_result(lse[:tokens], expected[1])


def test_sparse_mla_decode_in_passes_over_the_tokens_equals_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, _ = make_inputs()
    expected = ops.sparse_mla_decode(**inputs)
    for size in (1, 3 * 4 * 5 * HEAD_DIM):
        monkeypatch.setattr(sys.modules["mtpgraph.ops.sparse_mla_decode"], "_CHUNK_BYTES", size)
        for actual, other in zip(ops.sparse_mla_decode(**inputs), expected, strict=True):
            assert_close(actual, other)


@pytest.mark.parametrize(
    "name", ["kv_cache blocks", "block_table columns", "topk_indices columns", "heads"]
)
def test_sparse_mla_decode_of_empty_inputs(name: str, device: str) -> None:
    inputs, _ = make_inputs(device=device)
    if name == "kv_cache blocks":
        inputs["kv_cache"] = inputs["kv_cache"][:0]
    elif name == "block_table columns":
        inputs["block_table"] = inputs["block_table"][:, :0]
    elif name == "topk_indices columns":
        inputs["topk_indices"] = inputs["topk_indices"][:, :0]
    else:
        inputs["q"] = inputs["q"][:, :0]
    assert_equals_float64(inputs)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"q": torch.zeros(11, 3, HEAD_DIM, dtype=torch.float64)},
            TypeError,
            "q must have dtype torch.bfloat16 or torch.float16 or torch.float32, got torch.float64",
        ),
        (
            {"kv_cache": torch.zeros(9, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16)},
            TypeError,
            "kv_cache must have dtype torch.float32 or torch.uint8, got torch.bfloat16",
        ),
        (
            {"topk_indices": torch.zeros(11, 5, dtype=torch.int64)},
            TypeError,
            "topk_indices must have dtype torch.int32, got torch.int64",
        ),
        (
            {"block_table": torch.zeros(4, 6, dtype=torch.int64)},
            TypeError,
            "block_table must have dtype torch.int32, got torch.int64",
        ),
        (
            {"query_start_loc": torch.zeros(5, dtype=torch.int64)},
            TypeError,
            "query_start_loc must have dtype torch.int32, got torch.int64",
        ),
        (
            {"q": torch.zeros(11, HEAD_DIM)},
            ValueError,
            r"q must have shape \[num_tokens, num_heads, head_dim\], got \[11, 12\]",
        ),
        (
            {"kv_cache": torch.zeros(9, BLOCK_SIZE, HEAD_DIM + 1)},
            ValueError,
            r"kv_cache must have shape \[num_blocks, block_size, head_dim=12\], got \[9, 4, 13\]",
        ),
        (
            {"kv_cache": torch.zeros(9, 0, HEAD_DIM)},
            ValueError,
            r"kv_cache must have a block_size of at least 1, got \[9, 0, 12\]",
        ),
        (
            {"topk_indices": torch.zeros(10, 5, dtype=torch.int32)},
            ValueError,
            r"topk_indices must have shape \[num_tokens=11, topk\], got \[10, 5\]",
        ),
        (
            {"block_table": torch.zeros(4, dtype=torch.int32)},
            ValueError,
            r"block_table must have shape \[num_reqs, max_blocks\], got \[4\]",
        ),
        (
            {"query_start_loc": torch.zeros(4, dtype=torch.int32)},
            ValueError,
            r"query_start_loc must have shape \[num_reqs_plus_1=5\], got \[4\]",
        ),
        (
            {"kv_cache": torch.zeros(9, HEAD_DIM, BLOCK_SIZE).transpose(1, 2)},
            ValueError,
            "kv_cache must have a stride of 1 in its last dim, got 4",
        ),
        ({"latent_dim": 0}, ValueError, r"latent_dim must be in 1 .. head_dim \(12\), got 0"),
        ({"latent_dim": 13}, ValueError, r"latent_dim must be in 1 .. head_dim \(12\), got 13"),
        *(
            (
                {name: torch.zeros(shape, dtype=dtype, device="meta")},
                ValueError,
                f"{name} must be on cpu as q is, got meta",
            )
            for name, shape, dtype in [
                ("kv_cache", (9, BLOCK_SIZE, HEAD_DIM), torch.float32),
                ("topk_indices", (11, 5), torch.int32),
                ("block_table", (4, 6), torch.int32),
                ("query_start_loc", (5,), torch.int32),
            ]
        ),
    ],
)
def test_sparse_mla_decode_refuses(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    assert_refused(ops.sparse_mla_decode, {**make_inputs()[0], **changes}, error, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"kv_cache": torch.zeros(9, BLOCK_SIZE, 279, dtype=torch.uint8)},
            r"kv_cache must have shape \[.*, block_size, key_bytes=280\], got \[9, 4, 279\]",
        ),
        (
            {"kv_cache": torch.zeros(9, BLOCK_SIZE, 264, dtype=torch.uint8)},
            r"kv_cache must have shape \[.*, block_size, key_bytes=280\], got \[9, 4, 264\]",
        ),
        (
            {"latent_dim": 192},
            "latent_dim must be a multiple of 128 with a kv_cache of uint8, whose scales are for "
            "128 latents each, got 192",
        ),
        ({"latent_dim": 0}, r"latent_dim must be in 1 .. head_dim \(264\), got 0"),
        (
            {"kv_cache": torch.zeros(9, BLOCK_SIZE, 282, dtype=torch.uint8)[:, :, :280]},
            "kv_cache must have a token stride that is a multiple of 4 bytes, got 282",
        ),
        (
            {"kv_cache": torch.zeros(9, 1122, dtype=torch.uint8)[:, :1120].unflatten(1, (4, 280))},
            "kv_cache must have a block stride that is a multiple of 4 bytes, got 1122",
        ),
        (
            {
                "kv_cache": torch.zeros(10, BLOCK_SIZE, 280, dtype=torch.uint8)
                .flatten()[2:-1118]
                .view(9, 4, 280)
            },
            "kv_cache must have a storage offset that is a multiple of 4 bytes, got 2",
        ),
        (
            {"kv_cache": torch.zeros(9, 280, BLOCK_SIZE, dtype=torch.uint8).transpose(1, 2)},
            "kv_cache must have a (token stride that is|stride of 1 in its last dim)",
        ),
    ],
)
def test_sparse_mla_decode_refuses_an_fp8_cache(changes: dict[str, Any], match: str) -> None:
    inputs, _ = make_inputs(fp8=True, **FP8_DIMS)
    assert_refused(ops.sparse_mla_decode, {**inputs, **changes}, ValueError, match)


@pytest.mark.parametrize("name", ["q", "kv_cache"])
def test_sparse_mla_decode_refuses_grad(name: str) -> None:
    assert_refuses_grad(ops.sparse_mla_decode, make_inputs()[0], name)


def test_sparse_mla_decode_opcheck() -> None:
    inputs, _ = make_inputs()
    assert_opcheck(
        torch.ops.mtpgraph.sparse_mla_decode.default,
        inputs,
        make_inputs(([1], [9], 0), dtype=torch.bfloat16)[0],
        make_inputs(([], [], 2))[0],
        make_inputs(fp8=True, **FP8_DIMS)[0],
        {
            **inputs,
            "q": inputs["q"].transpose(0, 2).contiguous().transpose(0, 2),
            "kv_cache": strided_pool(inputs["kv_cache"]),
        },
    )


@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_decode_compiled_equals_eager(fp8: bool) -> None:
    more: dict[str, Any] = {"num_heads": 8, "fp8": fp8, **(FP8_DIMS if fp8 else {})}
    assert_compiled_equals_eager(
        ops.sparse_mla_decode,
        [
            lambda: make_inputs(([1, 3, 0], [7, 3, 0], 3), topk=10, **more)[0],
            lambda: make_inputs(([2] * 5, [4, 29, 5, 2, 2], 4), topk=11, **more)[0],
        ],
    )
