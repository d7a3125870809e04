"""The kernels of sparse_mla_decode against float64, on a cache whose unselected keys are NaN."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.kernels import _shared_keys, _sparse_mla_decode_hopper, sparse_mla_decode
from mtpgraph.kernels.sparse_mla_decode import _parts, _splits, launch

from ..helpers import (
    TOLERANCES,
    assert_close,
    assert_same_bits,
    each_batch,
    huge_rows,
    nan_pool,
    strided_pool,
)
from ..malformed_lens import STARTS, check_starts
from ..ops.test_sparse_mla_decode import (
    DTYPES,
    HEAD_DIM,
    LATENT_DIM,
    SCALE,
    Case,
    fp8_keys,
    heads_apart,
    make_inputs,
    numbers,
    oracle,
)
from .gpu import assert_replays

LONG: Case = ([2, 1, 0, 1], [70, 3, 0, 41], 1)


@pytest.fixture(params=["one split", "many splits"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tiles of 16 keys, so that a short row has several; with many splits a row is cut into as
    many parts as it has tiles."""
    monkeypatch.setattr(sparse_mla_decode, "_blocks", lambda *sizes: (16, 16, 1))
    monkeypatch.setattr(sparse_mla_decode, "BLOCK_SCAN", 16)
    one = request.param == "one split"
    monkeypatch.setattr(
        sparse_mla_decode,
        "_splits",
        lambda *sizes: (1, 2**20) if one else (max(1, -(-sizes[4] // 16)), 16),
    )
    return request.param


def assert_equals_float64(inputs: dict[str, Any]) -> None:
    out, lse = launch(**inputs)
    expected_out, expected_lse = oracle(**inputs)
    assert out.dtype == inputs["q"].dtype
    assert lse.dtype == torch.float32
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


@each_batch
def test_sparse_mla_kernel_equals_float64(case: Case, device: str) -> None:
    assert_equals_float64(make_inputs(case, device=device)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sparse_mla_kernel_of_each_dtype(dtype: torch.dtype, device: str, splits: str) -> None:
    assert_equals_float64(make_inputs(LONG, topk=40, dtype=dtype, device=device)[0])


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "latent_dim", "block_size", "topk"),
    [(1, 1, 1, 1, 1), (17, 48, 32, 16, 37), (4, 12, 12, 3, 33), (2, 20, 16, 64, 48)],
)
def test_sparse_mla_kernel_of_other_sizes(
    num_heads: int,
    head_dim: int,
    latent_dim: int,
    block_size: int,
    topk: int,
    device: str,
    splits: str,
) -> None:
    inputs, _ = make_inputs(
        LONG,
        num_heads=num_heads,
        head_dim=head_dim,
        latent_dim=latent_dim,
        block_size=block_size,
        topk=topk,
        device=device,
    )
    assert_equals_float64(inputs)


def test_sparse_mla_kernel_of_model_dims(device: str) -> None:
    """512 + 64 dims, with the blocks that a card would get."""
    assert_equals_float64(
        make_inputs(([1], [9], 0), head_dim=576, latent_dim=512, topk=70, device=device)[0]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sparse_mla_kernel_of_an_fp8_cache(dtype: torch.dtype, device: str, splits: str) -> None:
    """One group of 128 latents, and three, which are padded to four."""
    for latent_dim, head_dim in ((128, 144), (384, 393)):
        inputs, _ = make_inputs(
            LONG, topk=40, dtype=dtype, fp8=True, head_dim=head_dim, latent_dim=latent_dim,
            device=device,
        )  # fmt: skip
        assert_equals_float64(inputs)
    pool = inputs["kv_cache"]
    tokens = torch.cat([pool] * 2, dim=2)[:, :, : pool.shape[2]]
    expected = launch(**inputs)
    for kv_cache in (strided_pool(pool), tokens, heads_apart(pool)):
        actual = launch(**{**inputs, "kv_cache": kv_cache})
        for tensor, other in zip(actual, expected, strict=True):
            assert_close(tensor, other)


def test_sparse_mla_kernel_fp8_nan_reaches_only_rows_that_select_it(
    device: str, splits: str
) -> None:
    inputs, batch = make_inputs(
        ([1, 1], [40, 40], 0), topk=40, fp8=True, head_dim=136, latent_dim=128, device=device
    )
    expected = launch(**inputs)
    clean = inputs["kv_cache"].clone()
    index = int(inputs["topk_indices"][0, 20])
    for where in (slice(77, 78), slice(128, 132), slice(140, 142)):
        inputs["kv_cache"] = clean.clone()
        inputs["kv_cache"][batch.blocks[0][index // 4], index % 4, where] = 0xFF
        out, lse = launch(**inputs)
        assert out[0].isnan().all()
        assert lse[0].isnan().all()
        assert_same_bits(out[1], expected[0][1])
        assert_same_bits(lse[1], expected[1][1])


def test_sparse_mla_kernel_skips_tiles_and_splits_without_a_key(device: str, splits: str) -> None:
    """Rows whose keys stand in the first, a middle or the last tile alone, or nowhere."""
    inputs, _ = make_inputs(([5], [70], 0), topk=64, device=device)
    indices = inputs["topk_indices"]
    chosen = indices.clone()
    indices.fill_(-1)
    indices[0, :5] = chosen[0][chosen[0] >= 0][:5]
    indices[1, 20:23] = chosen[1][chosen[1] >= 0][:3]
    indices[2, 63] = chosen[2][chosen[2] >= 0][0]
    indices[4, ::17] = chosen[4][chosen[4] >= 0][:4]
    assert_equals_float64(inputs)
    out, lse = launch(**inputs)
    assert (out[3] == 0).all()
    assert (lse[3] == -math.inf).all()


def test_sparse_mla_kernel_skips_keys_that_do_not_exist(device: str, splits: str) -> None:
    """Indices past the table or negative, and blocks outside the pool, add nothing."""
    inputs, batch = make_inputs(([2], [11], 0), topk=9, device=device)
    past = batch.block_table.shape[1] * 4
    odd = torch.tensor([[past, -7, 2**31 - 1, -(2**31)]] * 2, dtype=torch.int32, device=device)
    garbage = torch.arange(12, past, dtype=torch.int32, device=device).expand(2, -1)
    table = inputs["block_table"].clone()
    table[0, 3:] = torch.tensor([-1, 2**31 - 1, batch.num_blocks], device=device)
    inputs["block_table"] = table
    inputs["topk_indices"] = torch.cat([odd, inputs["topk_indices"], garbage], dim=1)
    assert_equals_float64(inputs)

    table[0, :3] = -1
    out, lse = launch(**inputs)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_sparse_mla_kernel_key_listed_twice_counts_twice(device: str, splits: str) -> None:
    inputs, _ = make_inputs(([1], [1], 0), topk=40, device=device)
    inputs["topk_indices"].fill_(-1)
    inputs["topk_indices"][0, [3, 35]] = 0
    assert_equals_float64(inputs)


@pytest.mark.parametrize("scale", [3e3, -3e3])
def test_sparse_mla_kernel_of_large_scores_is_finite(
    scale: float, device: str, splits: str
) -> None:
    inputs, _ = make_inputs(([2], [60], 0), topk=40, device=device)
    inputs["scale"] = scale
    out, lse = launch(**inputs)
    assert out.isfinite().all()
    torch.testing.assert_close(lse.double().cpu(), oracle(**inputs)[1], rtol=1e-5, atol=0)


def test_sparse_mla_kernel_nan_key_reaches_only_rows_that_select_it(
    device: str, splits: str
) -> None:
    """Whichever tile or split it is in, and when it is the only key of its row."""
    inputs, batch = make_inputs(([1, 1, 1], [40, 40, 1], 0), topk=40, device=device)
    expected = launch(**inputs)
    block = batch.blocks[0][int(inputs["topk_indices"][0, 20]) // 4]
    inputs["kv_cache"][block, int(inputs["topk_indices"][0, 20]) % 4] = math.nan
    inputs["kv_cache"][batch.blocks[2][0], 0, -1] = math.nan
    out, lse = launch(**inputs)
    for row in (0, 2):
        assert out[row].isnan().all()
        assert lse[row].isnan().all()
    assert_same_bits(out[1], expected[0][1])
    assert_same_bits(lse[1], expected[1][1])


def test_sparse_mla_kernel_padding_rows_are_written(device: str, splits: str) -> None:
    inputs, _ = make_inputs(([2, 2], [6, 0], 3), topk=20, device=device)
    inputs["topk_indices"][4:] = 0
    inputs["q"][2:] = math.nan
    out, lse = launch(**inputs)
    assert (out[2:] == 0).all()
    assert (lse[2:] == -math.inf).all()


def test_sparse_mla_kernel_reads_strided_inputs(device: str, splits: str) -> None:
    inputs, _ = make_inputs(([2, 1], [30, 11], 1), topk=20, device=device)
    expected = launch(**inputs)
    tokens = torch.cat([inputs["kv_cache"]] * 2, dim=2)[:, :, :HEAD_DIM]
    for kv_cache in (strided_pool(inputs["kv_cache"]), tokens, heads_apart(inputs["kv_cache"])):
        actual = launch(
            inputs["q"].transpose(0, 2).contiguous().transpose(0, 2),
            kv_cache,
            inputs["topk_indices"].t().contiguous().t(),
            inputs["block_table"].repeat_interleave(2, dim=0)[::2],
            inputs["query_start_loc"].repeat_interleave(2)[::2],
            SCALE,
            LATENT_DIM,
        )
        for tensor, other in zip(actual, expected, strict=True):
            assert_close(tensor, other)


def test_sparse_mla_kernel_past_2_31_elements(device: str) -> None:
    inputs, batch = make_inputs(([1], [7], 0), dtype=torch.bfloat16, device=device)
    used = max(batch.blocks[0]) + 1
    assert used > 1
    inputs["kv_cache"] = huge_rows(inputs["kv_cache"][:used])
    assert_equals_float64(inputs)


def test_sparse_mla_kernel_past_2_31_elements_of_index_rows(device: str) -> None:
    inputs, _ = make_inputs(([2, 1], [7, 3], 0), device=device)
    inputs["topk_indices"] = huge_rows(inputs["topk_indices"], 2**30 + 64)
    inputs["block_table"] = huge_rows(inputs["block_table"], 2**30 + 64)
    assert_equals_float64(inputs)


def test_sparse_mla_kernel_of_many_requests(device: str) -> None:
    """More requests than one step of the search for a token's request looks at."""
    query_lens = [1 if i in (0, 130, 259, 299) else 0 for i in range(300)]
    inputs, _ = make_inputs((query_lens, [6 * n for n in query_lens], 1), device=device)
    assert_equals_float64(inputs)


@pytest.mark.parametrize("empty", ["topk", "heads", "blocks", "columns", "requests"])
def test_sparse_mla_kernel_of_an_empty_dim(empty: str, device: str) -> None:
    inputs, _ = make_inputs(([2], [5], 1), device=device)
    if empty == "topk":
        inputs["topk_indices"] = inputs["topk_indices"][:, :0]
    elif empty == "heads":
        inputs["q"] = inputs["q"][:, :0]
    elif empty == "blocks":
        inputs["kv_cache"] = inputs["kv_cache"][:0]
    elif empty == "columns":
        inputs["block_table"] = inputs["block_table"][:, :0]
    else:
        inputs["block_table"] = inputs["block_table"][:0]
        inputs["query_start_loc"] = inputs["query_start_loc"][:1]
    out, lse = launch(**inputs)
    assert out.shape == (3, inputs["q"].shape[1], LATENT_DIM)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_sparse_mla_splits_cover_every_column_once() -> None:
    for topk in [0, 1, 15, 16, 17, 511, 512, 2048, 2049, 4096]:
        for tokens, heads, groups in [(1, 1, 1), (1, 128, 2), (7, 64, 1), (64, 16, 1), (999, 8, 1)]:
            for block_k in (16, 32, 64):
                num_splits, split_size = _splits(132, tokens, heads, groups, topk, block_k)
                assert 1 <= num_splits <= max(1, min(64, topk // 64))
                assert split_size % block_k == 0
                assert (num_splits - 1) * split_size < max(1, topk) <= num_splits * split_size


def test_sparse_mla_splits_fill_the_card() -> None:
    """Few rows give work to all multiprocessors, many rows are not split."""
    assert _splits(132, 1, 16, 1, 2048, 64) == (32, 64)
    for tokens in (2, 4, 8, 16, 32, 64):
        num_splits, _ = _splits(132, tokens, 16, 1, 2048, 64)
        assert 64 <= tokens * num_splits <= 132
    for tokens in (256, 512, 4096):
        assert _splits(132, tokens, 128, 2, 2048, 64) == (1, 2048)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_splits", "block_h"),
    [
        (1, 16, 32, 16), (1, 64, 32, 16), (1, 128, 16, 16),
        (8, 16, 16, 16), (8, 64, 8, 32), (8, 128, 8, 64),
        (64, 16, 2, 16), (64, 64, 2, 64), (64, 128, 1, 64),
    ],
)  # fmt: skip
def test_sparse_mla_splits_and_heads_of_a_program_are_the_fastest_measured(
    num_tokens: int, num_heads: int, num_splits: int, block_h: int
) -> None:
    groups = -(-num_heads // _sparse_mla_decode_hopper.BLOCK_H)
    assert _splits(132, num_tokens, num_heads, groups, 2048, 64)[0] == num_splits
    parts = num_tokens * num_splits
    assert _sparse_mla_decode_hopper.heads_of_program(parts, num_heads, 132) == block_h


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "next_n", "parts"),
    [
        (64, 16, 4, (2, 1024, 0)),
        (96, 16, 4, (5, 410, 4)),
        (128, 16, 4, (4, 512, 4)),
        (256, 16, 4, (2, 1024, 4)),
        (512, 16, 4, (1, 2048, 4)),
        (256, 8, 8, (4, 512, 8)),
        (256, 16, 2, (1, 2048, 2)),
        (256, 64, 4, (1, 2048, 0)),
        (256, 16, 1, (1, 2048, 0)),
    ],
)
def test_sparse_mla_parts_of_tokens_that_share_keys(
    num_tokens: int, num_heads: int, next_n: int, parts: tuple[int, int, int]
) -> None:
    """As many as were the fastest measured, and about as many columns in each."""
    num_reqs = num_tokens // next_n
    sizes = [(num_tokens, num_heads, 576), (99, 64, 576), (num_tokens, 2048), (num_reqs, 512)]
    inputs = tuple(torch.empty(size, device="meta") for size in [*sizes, (num_reqs + 1,)])
    assert _parts(inputs, 64, 64, 132, may_share=True) == parts
    assert _parts(inputs, 64, 64, 132, may_share=False)[2] == 0


def test_sparse_mla_heads_of_a_program_cover_all_in_one_turn() -> None:
    """Fewer than 64 only where that starts no program that has to wait for another."""
    for num_sms in (1, 66, 132):
        for parts in (1, 2, 7, 32, 65, 132, 1000):
            for num_heads in (1, 8, 16, 17, 24, 64, 65, 100, 128, 1000):
                block_h = _sparse_mla_decode_hopper.heads_of_program(parts, num_heads, num_sms)
                groups = -(-num_heads // block_h)
                assert block_h in (16, 32, 64)
                assert block_h == 64 or groups == 1 or parts * groups <= num_sms
                if block_h > 16:
                    smaller = -(-num_heads // (block_h // 2))
                    assert smaller > 1
                    assert parts * smaller > num_sms


def test_sparse_mla_warps_look_alone_at_short_parts_of_single_items() -> None:
    scan = _sparse_mla_decode_hopper.scan
    assert [scan(size, 132, 132) for size in (64, 128, 192, 256)] == [64, 128, 256, 256]
    assert [scan(size, 132, 132) for size in (320, 512, 576, 4096)] == [512, 512, 2048, 2048]
    assert [scan(size, 133, 132) for size in (64, 512, 2048)] == [512, 512, 2048]


def model_inputs(
    seed: int,
    num_reqs: int = 5,
    num_heads: int = 16,
    topk: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
    max_query_len: int = 4,
    fp8: bool = False,
) -> dict[str, Any]:
    """DeepSeek-V3.2's sizes: rows longer and shorter than topk, -1 behind or between the indices,
    padding requests and tokens; keys that no row may read are NaN."""
    torch.manual_seed(seed)
    block_size, columns, num_tokens = 64, 80, num_reqs * max_query_len
    query_lens = torch.randint(1, max_query_len + 1, (num_reqs,))
    query_lens[seed % num_reqs] = 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)])
    seq_lens = torch.randint(max_query_len, columns * block_size, (num_reqs,))
    seq_lens[(seed + 1) % num_reqs] = 300
    pool_dtype, width = (torch.uint8, 656) if fp8 else (dtype, 576)
    kv_cache = nan_pool(num_reqs * columns + 3, block_size, width, dtype=pool_dtype, device="cuda")
    table = torch.randperm(num_reqs * columns).view(num_reqs, columns)
    indices = torch.full((num_tokens, topk), -1)
    for request in range(num_reqs):
        used = -(-int(seq_lens[request]) // block_size)
        keys = torch.randn(used, block_size, 576, device="cuda")
        kv_cache[table[request, :used].cuda()] = fp8_keys(keys) if fp8 else keys.to(dtype)
        table[request, used:] = 2**31 - 1
        for token in range(int(starts[request]), int(starts[request + 1])):
            chosen = torch.randperm(int(seq_lens[request]))[:topk]
            where = torch.randperm(topk)[: len(chosen)] if token % 2 else slice(len(chosen))
            indices[token, where] = chosen
    return {
        "q": torch.randn(num_tokens, num_heads, 576, device="cuda").to(dtype),
        "kv_cache": kv_cache,
        "topk_indices": indices.int().cuda(),
        "block_table": table.int().cuda(),
        "query_start_loc": starts.int().cuda(),
        "scale": 576**-0.5,
        "latent_dim": 512,
    }


def keys_of_tokens(inputs: dict[str, Any]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each token that has keys: their indices, as they stand, and the keys in float64."""
    starts = inputs["query_start_loc"].tolist()
    for request in range(len(starts) - 1):
        for token in range(starts[request], starts[request + 1]):
            index = inputs["topk_indices"][token].long()
            index = index[index >= 0]
            if index.numel():
                blocks = inputs["block_table"][request][index // 64].long()
                keys = inputs["kv_cache"][blocks, index % 64]
                yield token, index, numbers(keys, inputs["q"].dtype, inputs["latent_dim"]).cuda()


def reference64(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The op's formula in float64 on the card, a token at a time."""
    q, latent_dim = inputs["q"].double(), inputs["latent_dim"]
    out = torch.zeros(*q.shape[:2], latent_dim, dtype=torch.float64, device="cuda")
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device="cuda")
    for token, _index, keys in keys_of_tokens(inputs):
        scores = inputs["scale"] * q[token] @ keys.T
        lse[token] = scores.logsumexp(1)
        out[token] = scores.softmax(1) @ keys[:, :latent_dim]
    return out, lse


def one_token(seed: int, num_heads: int = 16, fp8: bool = False) -> dict[str, Any]:
    """A single token, -1 between its indices, whose request is the last of three."""
    inputs = model_inputs(3 * seed, 3, num_heads, max_query_len=1, fp8=fp8)
    return {
        **inputs,
        "q": inputs["q"][1:2],
        "topk_indices": inputs["topk_indices"][1:2],
        "query_start_loc": (inputs["query_start_loc"] - 1).clamp(min=0),
    }


def take_keys_away(inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` with blocks outside the pool, columns past the table and tiles without a key, put
    there in place; returned with the indices of those keys alone that there are."""
    table, index, kv_cache = (inputs[k] for k in ("block_table", "topk_indices", "kv_cache"))
    table[:, 1] = torch.tensor([-1, len(kv_cache), 2**31 - 1] * 3)[: len(table)]
    index[:, :64] = index[:, 128:192] = -1
    index[:, 70] = table.shape[1] * 64 + 5
    index[:, 71] = 2**31 - 1
    outside = (index // 64 == 1) | (index // 64 >= table.shape[1])
    assert (outside.sum(dim=1) > 2).any()
    return inputs | {"topk_indices": torch.where(outside, -1, index)}


def cut_rows(monkeypatch: pytest.MonkeyPatch, num_splits: int) -> None:
    """Into as many parts of ``model_inputs``' columns."""
    monkeypatch.setattr(
        sparse_mla_decode, "_splits", lambda *sizes: (num_splits, 2048 // num_splits)
    )


def assert_equals_reference64(inputs: dict[str, Any]) -> None:
    for actual, expected in zip(launch(**inputs), reference64(inputs), strict=True):
        assert_close(actual, expected)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens share their keys in batches of any size."""
    monkeypatch.setattr(_shared_keys, "MIN_TOKENS", 0)


def assert_shares(inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``launch`` is given them, they are shared."""
    given = []
    share_keys = _sparse_mla_decode_hopper.share_keys
    with monkeypatch.context() as patch:
        patch.setattr(
            _sparse_mla_decode_hopper, "share_keys", lambda *a: given.append(a) or share_keys(*a)
        )
        launch(**inputs)
    assert len(given) == 1


@pytest.fixture(params=["chosen kernel", "portable kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel that the card gets, and the one that every card can have."""
    if request.param == "portable kernel":
        monkeypatch.setattr(_sparse_mla_decode_hopper, "supports", lambda *inputs: False)
    return request.param


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_heads", [1, 16, 24, 64, 65, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_equals_float64(
    fp8: bool, num_heads: int, dtype: torch.dtype, kernel: str
) -> None:
    for num_reqs in (1, 7, 40):
        inputs = model_inputs(num_heads, num_reqs, num_heads, dtype=dtype, fp8=fp8)
        assert_equals_reference64(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [1, 63, 512, 1000, 4096])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_of_each_topk(fp8: bool, topk: int, kernel: str) -> None:
    assert_equals_reference64(model_inputs(topk, topk=topk, fp8=fp8))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_reads_strided_inputs(fp8: bool) -> None:
    """Strides and addresses that 16 bytes divide, and others, which need the portable kernel."""
    inputs = model_inputs(5, 3, 24, fp8=fp8)
    expected = launch(**inputs)
    pool, q = inputs["kv_cache"], inputs["q"]
    wide = torch.cat([pool, pool], dim=2)
    for kv_cache in (
        strided_pool(pool),
        strided_pool(pool, 4, 4),
        wide[:, :, : pool.shape[2]],
        heads_apart(pool),
    ):
        inputs["kv_cache"] = kv_cache
        for other_q in (q, q.transpose(0, 1).contiguous().transpose(0, 1), q.mT.contiguous().mT):
            inputs["q"] = other_q
            for actual, other in zip(launch(**inputs), expected, strict=True):
                assert_close(actual, other)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_of_rows_without_keys_or_requests(fp8: bool) -> None:
    """No key at all, tokens of padding requests and trailing tokens, in each number of splits."""
    for num_reqs in (1, 3, 100):
        inputs = model_inputs(2, num_reqs, 64, fp8=fp8)
        inputs["topk_indices"][::2] = -1
        inputs["q"][int(inputs["query_start_loc"][-1]) :] = math.nan
        assert_equals_reference64(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sparse_mla_on_the_card_is_as_close_as_the_reference_and_rounding(
    dtype: torch.dtype,
) -> None:
    """Weights in half precision: their errors average out, so they stay under one rounding."""
    inputs = model_inputs(3, 8, dtype=dtype)
    exact, _ = reference64(inputs)
    out, _ = launch(**inputs)
    error = (out.double() - exact).abs().max()
    rounding = (exact.to(dtype).double() - exact).abs().max()
    assert error <= 2 * rounding + TOLERANCES[torch.float32][1]


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 16, 24, 64, 65, 100, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_of_one_token(fp8: bool, num_heads: int, kernel: str) -> None:
    for seed in range(3):
        inputs = one_token(seed, num_heads, fp8)
        assert reference64(inputs)[1].isfinite().all()
        assert_equals_reference64(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 0.0, -0.04, -1.0])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_of_any_scale(
    fp8: bool, scale: float, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_rows(monkeypatch, num_splits)
    assert_equals_reference64(model_inputs(5, 7, 64, fp8=fp8) | {"scale": scale})


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_of_sorted_scores(
    fp8: bool, falling: bool, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's largest score rises with every tile, by some and by many powers of two, or never."""
    cut_rows(monkeypatch, num_splits)
    for scale in (0.05, 0.3, 2.0):
        inputs = {**model_inputs(4, 4, 64, fp8=fp8), "scale": scale}
        for token, index, keys in keys_of_tokens(inputs):
            order = (keys @ inputs["q"][token, 0].double()).argsort(descending=falling)
            inputs["topk_indices"][token] = -1
            inputs["topk_indices"][token, : len(index)] = index[order].int()
        assert_equals_reference64(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_always_gives_the_same(fp8: bool, num_heads: int) -> None:
    """Items of odd and even numbers of tiles, several to a program: nothing races."""
    inputs = model_inputs(6, 100, num_heads, fp8=fp8)
    expected = launch(**inputs)
    for _ in range(200):
        for actual, same in zip(launch(**inputs), expected, strict=True):
            assert_same_bits(actual, same)


@pytest.mark.parametrize("scale", [0.0, 1e-46, -0.04, math.nan])
def test_sparse_mla_on_hopper_takes_positive_scales_alone(scale: float) -> None:
    """Its largest score is that of the largest dot."""
    q = torch.empty(2, 64, 576, dtype=torch.bfloat16, device="meta")
    kv_cache = torch.empty(8, 64, 576, dtype=torch.bfloat16, device="meta")
    assert _sparse_mla_decode_hopper.supports(q, kv_cache, 0.04, 512)
    assert not _sparse_mla_decode_hopper.supports(q, kv_cache, scale, 512)


@pytest.mark.parametrize("num_heads", [1, 16, 17, 128])
def test_sparse_mla_on_hopper_takes_an_fp8_cache(num_heads: int) -> None:
    q = torch.empty(2, num_heads, 576, dtype=torch.bfloat16, device="meta")
    kv_cache = torch.empty(8, 64, 656, dtype=torch.uint8, device="meta")
    assert _sparse_mla_decode_hopper.supports(q, kv_cache, 0.04, 512)
    assert not _sparse_mla_decode_hopper.supports(q.half(), kv_cache, 0.04, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_leaves_out_keys_that_are_not_there(
    fp8: bool, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks outside the pool, columns past the table, and tiles without a key, first and later."""
    cut_rows(monkeypatch, num_splits)
    inputs = model_inputs(4, 7, 64, fp8=fp8)
    known = take_keys_away(inputs)
    table, kv_cache = inputs["block_table"], inputs["kv_cache"]
    results = launch(**inputs)
    for actual, expected in zip(results, reference64(known), strict=True):
        assert_close(actual, expected)

    # A key of NaN reaches the rows that select it, and no other.
    key = int(known["topk_indices"][0].max())
    request = int((inputs["query_start_loc"][1:] <= 0).sum())
    row = kv_cache[int(table[request, key // 64]), key % 64]
    row[3] = 0x7F if fp8 else math.nan
    start, stop = inputs["query_start_loc"][request : request + 2].tolist()
    hit = (known["topk_indices"] == key).any(dim=1)
    hit[:start] = hit[stop:] = False
    out, lse = launch(**inputs)
    assert hit[0]
    assert out[hit].isnan().all()
    assert lse[hit].isnan().all()
    assert_same_bits(out[~hit], results[0][~hit])
    assert_same_bits(lse[~hit], results[1][~hit])


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("num_heads", [5, 8, 16, 32])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_of_tokens_that_share_keys(
    fp8: bool, num_heads: int, num_splits: int, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that are full and not, rows with much, little and nothing in common, and a key that a
    row has twice, which counts twice."""
    cut_rows(monkeypatch, num_splits)
    for num_reqs, max_query_len in ((2, 4), (7, 9), (40, 3)):
        inputs = model_inputs(num_heads, num_reqs, num_heads, max_query_len=max_query_len, fp8=fp8)
        index, starts = inputs["topk_indices"], inputs["query_start_loc"].tolist()
        for begin, end in itertools.pairwise(starts):
            for token in range(begin + 1, end):
                index[token, : 500 * (token - begin)] = index[begin, : 500 * (token - begin)]
            if end - begin > 1:
                index[begin + 1, 2000] = index[begin + 1, 3]
                index[end - 1] = index[begin]
        assert_shares(inputs, monkeypatch)
        assert_equals_reference64(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dim", [3, 575])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_of_shared_keys_that_are_not_finite(
    fp8: bool,
    dim: int,
    value: float,
    num_splits: int,
    shared: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They reach the tokens that select them, and change no bit of others of their group."""
    if fp8 and dim < 512 and not math.isnan(value):
        pytest.skip("e4m3 has no inf")
    cut_rows(monkeypatch, num_splits)
    inputs = model_inputs(4, 7, 16, fp8=fp8)
    index, table = inputs["topk_indices"], inputs["block_table"]
    starts = inputs["query_start_loc"].tolist()
    request = next(r for r in range(7) if starts[r + 1] - starts[r] > 2)
    start, stop = starts[request], starts[request + 1]
    hit = torch.zeros(len(index), dtype=torch.bool)
    # A key that one token alone has, and the others not.
    for key in index[start + 1][index[start + 1] >= 0].tolist():
        if not any(key in index[token] for token in range(start, stop) if token != start + 1):
            break
    else:
        pytest.fail("each key is another token's as well")
    hit[start + 1] = True
    results = launch(**inputs)
    row = inputs["kv_cache"][int(table[request, key // 64]), key % 64]
    if not fp8:
        row[dim] = value
    elif dim < 512:
        row[dim] = 0x7F
    else:
        row[528:].view(torch.bfloat16)[dim - 512] = value
    assert_shares(inputs, monkeypatch)
    out, lse = launch(**inputs)
    assert_same_bits(out[~hit], results[0][~hit])
    assert_same_bits(lse[~hit], results[1][~hit])
    assert out[hit].isnan().all()
    assert lse[hit].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 16, 32])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_of_shared_keys_that_are_not_there(
    fp8: bool, num_heads: int, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = model_inputs(4, 7, num_heads, fp8=fp8)
    inputs["topk_indices"][::3] = -1
    known = take_keys_away(inputs)
    assert_shares(inputs, monkeypatch)
    for actual, expected in zip(launch(**inputs), reference64(known), strict=True):
        assert_close(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [1, 63, 4096])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_of_shared_keys_of_each_topk(
    fp8: bool, topk: int, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = model_inputs(topk, topk=topk, fp8=fp8)
    assert_shares(inputs, monkeypatch)
    assert_equals_reference64(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [2, 33, 100])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_replays_of_shared_keys(fp8: bool, num_reqs: int, shared: None) -> None:
    assert_replays(
        ops.sparse_mla_decode, [model_inputs(seed, num_reqs, 16, fp8=fp8) for seed in range(3)]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 8, 32])
@pytest.mark.parametrize("num_heads", [8, 24, 65, 100, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_the_card_of_each_number_of_heads_a_program(
    fp8: bool, num_heads: int, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which program has a head, and how it stores the sums, changes no bit of the result."""
    cut_rows(monkeypatch, num_splits)
    inputs = model_inputs(num_heads, 7, num_heads, fp8=fp8)
    inputs["topk_indices"][:2] = -1
    expected = None
    for block_h in (16, 32, 64):
        monkeypatch.setattr(
            _sparse_mla_decode_hopper, "heads_of_program", lambda *sizes, block_h=block_h: block_h
        )
        for min_tokens in (1, 1 << 20):
            monkeypatch.setattr(_sparse_mla_decode_hopper, "MIN_TOKENS_OF_LINES", min_tokens)
            results = launch(**inputs)
            if expected is None:
                expected = results
                for actual, other in zip(results, reference64(inputs), strict=True):
                    assert_close(actual, other)
            for actual, other in zip(results, expected, strict=True):
                assert_same_bits(actual, other)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 16, 64])
def test_sparse_mla_on_the_card_combines_early_what_it_combines_late(
    num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other inputs at each call, in the same memory: parts read too soon are those of another."""
    launch_parts = _sparse_mla_decode_hopper.launch
    cut_rows(monkeypatch, 8)
    batches = [one_token(seed, num_heads) for seed in range(3)]

    def late(*args: Any) -> int:
        num_sms = sparse_mla_decode.num_sms(args[0].device)
        assert 2 * launch_parts(*args) <= num_sms
        return num_sms

    with monkeypatch.context() as patch:
        patch.setattr(_sparse_mla_decode_hopper, "launch", late)
        expected = [launch(**inputs) for inputs in batches]
    for _ in range(50):
        results = [launch(**inputs) for inputs in batches]
        for result, other in zip(results, expected, strict=True):
            for actual, tensor in zip(result, other, strict=True):
                assert_same_bits(actual, tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", ["few tokens", "a token each"])
@pytest.mark.parametrize("num_heads", [16, 65])
def test_sparse_mla_on_the_card_of_many_requests(num_heads: int, query_lens: str) -> None:
    """As many as one step of the searches for a token's request looks at, and more."""
    for num_reqs in (63, 64, 300, 511, 512, 700):
        few = (0, num_reqs // 2, num_reqs - 1)
        lens = [int(query_lens == "a token each" or i in few) for i in range(num_reqs)]
        inputs, _ = make_inputs(
            (lens, [5 * n for n in lens], 2), num_heads=num_heads, head_dim=576, latent_dim=512,
            block_size=64, topk=70, dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        inputs["scale"] = 576**-0.5
        assert_equals_reference64(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 64, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_replays_of_one_token(fp8: bool, num_heads: int) -> None:
    """Of 16 heads with the combination begun early."""
    assert_replays(ops.sparse_mla_decode, [one_token(seed, num_heads, fp8) for seed in range(3)])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_reqs", "num_heads"),
    [(1, 16), (2, 64), (2, 128), (5, 128), (16, 64), (100, 16), (100, 65)],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_replays(fp8: bool, num_reqs: int, num_heads: int) -> None:
    assert_replays(
        ops.sparse_mla_decode,
        [model_inputs(seed, num_reqs, num_heads, fp8=fp8) for seed in range(3)],
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [2, 100])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_replays_of_the_portable_kernel(
    fp8: bool, num_reqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sparse_mla_decode_hopper, "supports", lambda *inputs: False)
    assert_replays(
        ops.sparse_mla_decode, [model_inputs(seed, num_reqs, 16, fp8=fp8) for seed in range(3)]
    )


each_way_of_hopper = pytest.mark.parametrize("num_heads", [16, 64], ids=["shared", "one by one"])
"""With the fixture ``shared``: 64 heads are too many for that."""


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "shared")
@each_way_of_hopper
@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_hopper_past_2_31_elements(
    fp8: bool, num_splits: int, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys behind as many elements of the pool."""
    cut_rows(monkeypatch, num_splits)
    inputs = model_inputs(3, 5, num_heads, fp8=fp8)
    expected = launch(**inputs)
    pool, table = inputs["kv_cache"], inputs["block_table"]
    before = -(-(2**31) // pool[0].numel())
    huge = nan_pool(before + len(pool), *pool.shape[1:], dtype=pool.dtype, device="cuda")
    huge[before:] = pool
    inputs["kv_cache"] = huge
    inputs["block_table"] = torch.where(table < len(pool), table + before, table)
    for actual, other in zip(launch(**inputs), expected, strict=True):
        assert_same_bits(actual, other)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "shared")
@each_way_of_hopper
def test_sparse_mla_on_hopper_past_2_31_elements_of_rows(num_heads: int) -> None:
    inputs = model_inputs(0, 3, num_heads, max_query_len=2)
    expected = launch(**inputs)
    assert inputs["query_start_loc"].tolist() == [0, 0, 2, 4]
    for name in ("q", "topk_indices", "block_table"):
        far = {**inputs, name: huge_rows(inputs[name], 2**30 + 64)}
        for actual, other in zip(launch(**far), expected, strict=True):
            assert_same_bits(actual, other)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("num_splits", [1, 8])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_hopper_past_2_31_elements_of_results(
    fp8: bool, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the parts, where there are several. All tokens are the same one."""
    cut_rows(monkeypatch, num_splits)
    one = one_token(0, 128, fp8)
    num_tokens = 2**31 // (num_splits * 128 * 512) + 9
    out, lse = launch(
        **one
        | {
            "q": one["q"].expand(num_tokens, -1, -1),
            "topk_indices": one["topk_indices"].expand(num_tokens, -1),
            "query_start_loc": one["query_start_loc"] * num_tokens,
        }
    )
    assert (out == out[:1]).all()
    assert (lse == lse[:1]).all()
    for actual, expected in zip((out[:1], lse[:1]), reference64(one), strict=True):
        assert_close(actual, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "shared")
@each_way_of_hopper
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_on_hopper_of_an_empty_dim(fp8: bool, num_heads: int) -> None:
    given = model_inputs(3, 5, num_heads, fp8=fp8)
    for changed in (
        {"topk_indices": given["topk_indices"][:, :0]},
        {"block_table": given["block_table"][:, :0]},
        {"block_table": given["block_table"][:0], "query_start_loc": given["query_start_loc"][:1]},
        {"topk_indices": given["topk_indices"].clone().fill_(-1)},
    ):
        out, lse = launch(**given | changed)
        assert out.shape == (20, num_heads, 512)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "shared")
@each_way_of_hopper
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
@pytest.mark.parametrize("starts", STARTS, ids=str)
def test_sparse_mla_on_hopper_of_malformed_starts(
    starts: list[int], fp8: bool, num_heads: int
) -> None:
    """Each request gets what it would get alone, padding what padding gets."""
    case: Case = ([2, 3, 2], [9, 3, 2], 0)
    inputs, _ = make_inputs(
        case, num_heads=num_heads, head_dim=576, latent_dim=512, block_size=64, topk=70,
        dtype=torch.bfloat16, fp8=fp8,
    )  # fmt: skip
    # a token may get the keys of any request
    keys = torch.randn(*inputs["kv_cache"].shape[:2], 576)
    inputs["kv_cache"] = fp8_keys(keys) if fp8 else keys.bfloat16()
    inputs["scale"] = 576**-0.5
    check_starts("sparse_mla_decode", launch, starts, "cuda", inputs)
