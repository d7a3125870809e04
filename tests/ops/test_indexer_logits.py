"""indexer_logits against float64 loops, on a cache where every unneeded byte is NaN."""

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
    assert_same_bits,
    assert_same_result,
    each_batch,
    huge_rows,
    make_batch,
    nan_pool,
    random_case,
    storage_bytes,
    strided_pool,
)
from ..index_oracles import logits_oracle, make_index_cache

HEAD_DIM = 8
BLOCK_SIZE = 4
BLOCK_BYTES = BLOCK_SIZE * (HEAD_DIM + 4)
Case = tuple[list[int], list[int], int]
RAGGED: Case = ([1, 3, 0, 5], [7, 3, 0, 11], 2)
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]


def make_inputs(
    case: Case = RAGGED,
    *,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 3,
    head_dim: int = HEAD_DIM,
    block_size: int = BLOCK_SIZE,
    device: str = "cpu",
) -> tuple[dict[str, Any], Tensor, Batch]:
    """The arguments, what float64 makes of them, and the batch."""
    batch = make_batch(*case[:2], block_size, trailing=case[2], device=device)
    k_cache, keys = make_index_cache(batch, head_dim)
    q = torch.randn(batch.num_tokens, num_heads, head_dim).to(dtype)
    weights = torch.randn(batch.num_tokens, num_heads)
    inputs = {
        "q": q.to(device),
        "weights": weights.to(device),
        "k_cache": k_cache,
        "block_table": batch.block_table,
        "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens,
        "max_seq_len": batch.max_seq_len,
    }
    return inputs, logits_oracle(q, weights, keys, batch, batch.max_seq_len), batch


@each_batch
def test_indexer_logits_equals_float64(case: Case, device: str) -> None:
    inputs, expected, _ = make_inputs(case, device=device)
    actual = ops.indexer_logits(**inputs)
    assert actual.dtype == torch.float32
    assert actual.is_contiguous()
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_indexer_logits_of_each_query_dtype(dtype: torch.dtype, device: str) -> None:
    inputs, expected, _ = make_inputs(dtype=dtype, device=device)
    assert_close(ops.indexer_logits(**inputs), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_batch
def test_indexer_logits_in_bf16(case: Case, dtype: torch.dtype, device: str) -> None:
    """Each score rounded once: to nearest, ties to even."""
    inputs, expected, _ = make_inputs(case, dtype=dtype, device=device)
    actual = ops.indexer_logits(**inputs, logits_dtype=torch.bfloat16)
    assert actual.dtype == torch.bfloat16
    assert actual.is_contiguous()
    assert_close(actual, expected)
    assert_same_bits(actual, ops.indexer_logits(**inputs, logits_dtype=torch.float32).bfloat16())


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "block_size"), [(1, 4, 1), (4, 32, 8), (16, 64, 64), (5, 33, 4)]
)
def test_indexer_logits_of_other_sizes(
    num_heads: int, head_dim: int, block_size: int, device: str
) -> None:
    inputs, expected, _ = make_inputs(
        num_heads=num_heads, head_dim=head_dim, block_size=block_size, device=device
    )
    assert_close(ops.indexer_logits(**inputs), expected)


def test_indexer_logits_equals_float64_on_random_batches(full: bool, device: str) -> None:
    for _ in range(200 if full else 8):
        inputs, expected, _ = make_inputs(random_case(), device=device)
        assert_close(ops.indexer_logits(**inputs), expected)


def test_indexer_logits_without_heads_scores_zero(device: str) -> None:
    inputs, expected, _ = make_inputs(num_heads=0, device=device)
    assert_close(ops.indexer_logits(**inputs), expected)


def test_indexer_logits_max_seq_len_cuts_and_widens(device: str) -> None:
    inputs, expected, batch = make_inputs(device=device)
    assert_close(ops.indexer_logits(**{**inputs, "max_seq_len": 6}), expected[:, :6])
    assert_close(ops.indexer_logits(**{**inputs, "max_seq_len": 1}), expected[:, :1])
    most = batch.block_table.shape[1] * BLOCK_SIZE
    wide = torch.full((batch.num_tokens, most), -math.inf, dtype=torch.float64)
    wide[:, : batch.max_seq_len] = expected
    assert_close(ops.indexer_logits(**{**inputs, "max_seq_len": most}), wide)


def test_indexer_logits_longer_sequence_than_the_table(device: str) -> None:
    """A length past the table is cut with the row: no column is read that does not exist."""
    inputs, expected, batch = make_inputs(([2], [11], 0), device=device)
    inputs["block_table"] = inputs["block_table"][:, :2]
    assert batch.max_seq_len == 11
    actual = ops.indexer_logits(**{**inputs, "max_seq_len": 8})
    assert_close(actual, expected[:, :8])


def test_indexer_logits_invalid_block_scores_minus_infinity(device: str) -> None:
    """A block id outside the pool in the needed range: its keys, and only they, are -inf."""
    inputs, expected, batch = make_inputs(([2], [11], 0), device=device)
    for bad in (-1, batch.num_blocks, 2**31 - 1, -(2**31)):
        inputs["block_table"][0, 1] = bad
        expected[:, BLOCK_SIZE : 2 * BLOCK_SIZE] = -math.inf
        assert_close(ops.indexer_logits(**inputs), expected)


def test_indexer_logits_pool_without_blocks(device: str) -> None:
    inputs, expected, _ = make_inputs(device=device)
    inputs["k_cache"] = inputs["k_cache"][:0]
    assert_close(ops.indexer_logits(**inputs), torch.full_like(expected, -math.inf))


def test_indexer_logits_nan_key_scores_nan_alone(device: str) -> None:
    """A NaN is visible in the logits of its key and nowhere else, whatever the weights."""
    inputs, expected, batch = make_inputs(([2], [11], 0), device=device)
    block, offset = batch.blocks[0][1], 2
    start = BLOCK_SIZE * HEAD_DIM + 4 * offset
    inputs["k_cache"][block, start : start + 4] = 0xFF
    inputs["weights"].zero_()
    expected = torch.where(expected.isinf(), expected, 0.0)
    expected[:, BLOCK_SIZE + offset] = math.nan
    assert_close(ops.indexer_logits(**inputs), expected)


def test_indexer_logits_reads_what_indexer_cache_write_stored(device: str) -> None:
    batch = make_batch([3, 2], [3, 2], BLOCK_SIZE, device=device)
    k_cache = nan_pool(batch.num_blocks, BLOCK_BYTES, dtype=torch.uint8, device=device)
    # multiples of 1/8 with a largest element of 448 / 256 are e4m3 codes at scale 2**-8
    k = torch.randint(-8, 9, (5, HEAD_DIM)).float() / 8
    k[:, 0] = 448 / 256
    ops.indexer_cache_write_(k.to(device), batch.slot_mapping, k_cache)
    q, weights = torch.randn(5, 2, HEAD_DIM), torch.randn(5, 2)
    actual = ops.indexer_logits(
        q.to(device),
        weights.to(device),
        k_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        3,
    )
    assert_close(actual, logits_oracle(q, weights, [k[:3].double(), k[3:].double()], batch, 3))


def test_indexer_logits_reads_strided_inputs(device: str) -> None:
    inputs, _, _ = make_inputs(device=device)
    expected = ops.indexer_logits(**inputs)
    q, table = inputs["q"], inputs["block_table"]
    actual = ops.indexer_logits(
        q.transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack([inputs["weights"]] * 2, dim=-1)[..., 1],
        strided_pool(inputs["k_cache"]),
        table.repeat_interleave(2, dim=0)[::2],
        inputs["query_start_loc"].repeat_interleave(2)[::2],
        inputs["seq_lens"].repeat_interleave(2)[::2],
        inputs["max_seq_len"],
    )
    assert_same_result(actual, expected)


def test_indexer_logits_past_2_31_bytes(device: str) -> None:
    inputs, expected, _ = make_inputs(([2], [7], 0), device=device)
    used = int(inputs["block_table"][0, :2].max()) + 1
    inputs["k_cache"] = huge_rows(inputs["k_cache"][:used])
    inputs["block_table"] = huge_rows(inputs["block_table"], 2**30 + 64)
    assert_close(ops.indexer_logits(**inputs), expected)


def test_indexer_logits_keeps_its_inputs(device: str) -> None:
    inputs, _, _ = make_inputs(device=device)
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    before = [storage_bytes(tensor) for tensor in tensors]
    ops.indexer_logits(**inputs)
    assert all(map(torch.equal, before, map(storage_bytes, tensors)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_indexer_logits_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    """Verifying four tokens at once selects the keys that decoding them one by one selects.

    A bit of difference in a logit is a different key at a tie, hence the exact comparison.
    """
    inputs, _, batch = make_inputs(
        ([1, 4, 0, 2, 2], [70, 90, 0, 11, 0], 3),
        dtype=dtype,
        num_heads=4,
        head_dim=64,
        block_size=16,
    )
    together = ops.indexer_logits(**inputs)
    for token, (request, row_len) in enumerate(batch.rows):
        if row_len == 0:
            continue
        alone = ops.indexer_logits(
            inputs["q"][token : token + 1],
            inputs["weights"][token : token + 1],
            inputs["k_cache"],
            inputs["block_table"][request : request + 1],
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([row_len], dtype=torch.int32),
            row_len,
        )
        assert_same_bits(alone, together[token : token + 1, :row_len])


def test_indexer_logits_in_passes_over_the_keys_equals_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long sequences are scored a few blocks at a time; the seams do not show."""
    inputs, _, _ = make_inputs(([2, 2], [23, 17], 0))
    expected = ops.indexer_logits(**inputs)
    for size in (1, 3 * 8 * 2 * BLOCK_SIZE * (HEAD_DIM + 6)):
        monkeypatch.setattr(sys.modules["mtpgraph.ops.indexer_logits"], "_CHUNK_BYTES", size)
        assert_same_bits(ops.indexer_logits(**inputs), expected)


def test_indexer_logits_of_flattened_rows_equals_native(device: str) -> None:
    """One row per token over an expanded table is the same computation."""
    inputs, _, batch = make_inputs(([1, 3, 2, 2], [7, 5, 11, 0], 2), device=device)
    native = ops.indexer_logits(**inputs)
    row_lens, row_requests = ops.flatten_decode(
        inputs["query_start_loc"], inputs["seq_lens"], batch.num_tokens
    )
    flattened = ops.indexer_logits(
        inputs["q"],
        inputs["weights"],
        inputs["k_cache"],
        ops.expand_block_table(inputs["block_table"], row_requests),
        torch.arange(batch.num_tokens + 1, dtype=torch.int32, device=device),
        row_lens,
        inputs["max_seq_len"],
    )
    assert_same_result(flattened, native)


def cache(blocks: int, size: int = BLOCK_BYTES) -> Tensor:
    return nan_pool(blocks, size, dtype=torch.uint8)


# What indexer_select refuses as well.
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"q": torch.zeros(11, 3, HEAD_DIM, dtype=torch.float64)},
        TypeError,
        "q must have dtype torch.float8_e4m3fn or torch.bfloat16 or torch.float16 or "
        "torch.float32, got torch.float64",
    ),
    (
        {"weights": torch.zeros(11, 3, dtype=torch.bfloat16)},
        TypeError,
        "weights must have dtype torch.float32, got torch.bfloat16",
    ),
    (
        {"k_cache": cache(9).view(torch.float8_e4m3fn)},
        TypeError,
        "k_cache must have dtype torch.uint8, got torch.float8_e4m3fn",
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
        {"seq_lens": torch.zeros(4, dtype=torch.int64)},
        TypeError,
        "seq_lens must have dtype torch.int32, got torch.int64",
    ),
    (
        {"q": torch.zeros(11, 3 * HEAD_DIM)},
        ValueError,
        r"q must have shape \[num_tokens, num_heads, head_dim\], got \[11, 24\]",
    ),
    (
        {"q": torch.zeros(11, 3, 0)},
        ValueError,
        r"q must have a head_dim of at least 1, got \[11, 3, 0\]",
    ),
    (
        {"weights": torch.zeros(10, 3)},
        ValueError,
        r"weights must have shape \[num_tokens=11, num_heads=3\], got \[10, 3\]",
    ),
    (
        {"weights": torch.zeros(11, 3, 1)},
        ValueError,
        r"weights must have shape \[num_tokens=11, num_heads=3\], got \[11, 3, 1\]",
    ),
    (
        {"k_cache": cache(9, BLOCK_BYTES + 4)},
        ValueError,
        r"k_cache must have a multiple of head_dim \+ 4 = 12 bytes per block, got 52",
    ),
    (
        {"k_cache": cache(9, 2 * BLOCK_BYTES)[:, ::2]},
        ValueError,
        "k_cache must have a stride of 1 in its last dim, got 2",
    ),
    (
        {"k_cache": cache(9, BLOCK_BYTES + 1)[:, 1:]},
        ValueError,
        "k_cache must have a block stride that is a multiple of 4 bytes, got 49",
    ),
    (
        {"k_cache": cache(9, BLOCK_BYTES + 4)[:, 1:-3]},
        ValueError,
        "k_cache must have a storage offset that is a multiple of 4 bytes, got 1",
    ),
    (
        {"block_table": torch.zeros(3, 6, dtype=torch.int32)},
        ValueError,
        r"block_table must have shape \[num_reqs=4, max_blocks\], got \[3, 6\]",
    ),
    (
        {"query_start_loc": torch.zeros(4, dtype=torch.int32)},
        ValueError,
        r"query_start_loc must have shape \[num_reqs_plus_1=5\], got \[4\]",
    ),
    ({"max_seq_len": 0}, ValueError, "max_seq_len must be at least 1, got 0"),
    (
        {"max_seq_len": 25},
        ValueError,
        r"block_table must have the columns that max_seq_len 25 needs at block size 4, "
        r"got \[4, 6\]",
    ),
    *(
        (
            {name: torch.zeros(shape, dtype=dtype, device="meta")},
            ValueError,
            f"{name} must be on cpu as q is, got meta",
        )
        for name, shape, dtype in [
            ("weights", (11, 3), torch.float32),
            ("k_cache", (9, BLOCK_BYTES), torch.uint8),
            ("block_table", (4, 6), torch.int32),
        ]
    ),
    (
        {"seq_lens": torch.zeros(4, dtype=torch.int32, device="meta")},
        ValueError,
        "seq_lens must be on cpu as query_start_loc is, got meta",
    ),
]


DTYPE_REFUSALS = [
    (
        {"logits_dtype": dtype},
        TypeError,
        f"logits_dtype must be torch.float32 or torch.bfloat16, got {dtype}",
    )
    for dtype in (torch.float16, torch.float64, torch.float8_e4m3fn)
]


@pytest.mark.parametrize(("changes", "error", "match"), [*REFUSALS, *DTYPE_REFUSALS])
def test_indexer_logits_refuses(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    assert_refused(ops.indexer_logits, {**make_inputs()[0], **changes}, error, match)


@pytest.mark.parametrize("name", ["q", "weights"])
def test_indexer_logits_refuses_grad(name: str) -> None:
    assert_refuses_grad(ops.indexer_logits, make_inputs()[0], name)


def test_indexer_logits_opcheck() -> None:
    inputs = make_inputs()[0]
    assert_opcheck(
        torch.ops.mtpgraph.indexer_logits.default,
        inputs,
        make_inputs(([1], [9], 0), dtype=torch.bfloat16)[0],
        make_inputs(([], [], 2), dtype=torch.float8_e4m3fn)[0],
        {**inputs, "logits_dtype": torch.bfloat16},
        {**make_inputs(([], [], 0))[0], "logits_dtype": torch.bfloat16},
        {
            **inputs,
            "q": inputs["q"].transpose(0, 1).contiguous().transpose(0, 1),
            "k_cache": strided_pool(inputs["k_cache"]),
        },
    )


def test_indexer_logits_in_fp32_are_the_default() -> None:
    """One graph, whether it is said or not."""
    calls = []

    def keep(gm: torch.fx.GraphModule, examples: list[Any]) -> torch.fx.GraphModule:
        calls.extend(node for node in gm.graph.nodes if "indexer_logits" in str(node.target))
        return gm

    inputs = make_inputs()[0]
    for given in ({}, {"logits_dtype": torch.float32}):
        torch._dynamo.reset()
        torch.compile(ops.indexer_logits, backend=keep, fullgraph=True)(**inputs, **given)
    assert [len(call.args) + len(call.kwargs) for call in calls] == [7, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_indexer_logits_compiled_equals_eager(dtype: torch.dtype) -> None:
    assert_compiled_equals_eager(
        lambda **inputs: ops.indexer_logits(**inputs, logits_dtype=dtype),
        [
            lambda: make_inputs(([1, 3, 0], [7, 3, 0], 2), num_heads=7)[0],
            lambda: make_inputs(([2] * 5, [4, 29, 5, 2, 2], 3), num_heads=7)[0],
        ],
    )
