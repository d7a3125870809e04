"""The kernel of indexer_logits against float64, on a cache where every unneeded byte is NaN.

Bounds are in units of ``sum_h |weights| * sum_d |q * key|``: where terms cancel, an error that is
small beside them is large beside their sum.
"""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.kernels import indexer_logits
from mtpgraph.kernels.indexer_logits import launch
from mtpgraph.ops._index_cache import code_bytes
from mtpgraph.ops.indexer_logits import score_keys as reference

from ..helpers import BATCHES, assert_same_bits, each_batch, huge_rows, strided_pool
from ..index_oracles import NAN_CODE, e4m3_value
from ..malformed_lens import MIN, check_negative_seq_lens, check_starts, each_starts
from ..ops.test_indexer_logits import BLOCK_SIZE, DTYPES, HEAD_DIM, RAGGED, Case, make_inputs
from .gpu import assert_replays

FP32_ERROR = 1e-5
# Products in fp8 tensor cores of compute capability 9.0 are cut 13 bits behind the largest of 32.
FP8_ERROR = 2.0**-9
LONG: Case = ([2, 1, 0, 11, 6], [50, 3, 0, 25, 40], 1)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Two: the interpreter runs one after the other."""
    if device == "cpu":
        monkeypatch.setattr(indexer_logits, "num_sms", lambda device: 1)


@pytest.fixture
def short_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Tiles of 16 keys: a short row has several. On the card they stay as they are."""
    if device == "cpu":
        monkeypatch.setattr(indexer_logits, "TILE", 16)
        monkeypatch.setattr(indexer_logits, "BLOCK_COLUMNS", 32)


def assert_scores(inputs: dict[str, Any], error: float = FP32_ERROR) -> None:
    actual = launch(**inputs)
    assert actual.dtype == torch.float32
    assert actual.is_contiguous()
    assert_close_to_reference(actual, inputs, error)


def assert_close_to_reference(actual: Tensor, inputs: dict[str, Any], error: float) -> None:
    expected = reference(**inputs).double()
    sizes = reference(**_magnitudes(inputs)).double()
    finite = expected.isfinite()
    torch.testing.assert_close(
        torch.where(finite, 0, actual.double()),
        torch.where(finite, 0, expected),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    difference = torch.where(finite, actual.double() - expected, 0).abs()
    allowed = torch.where(finite, sizes, 0) * error
    worst = (difference / allowed.clamp_min(1e-30)).max() if allowed.numel() else 0
    assert worst <= 1, f"off by {worst:.3g} times what is allowed"


def _magnitudes(inputs: dict[str, Any]) -> dict[str, Any]:
    k_cache = inputs["k_cache"].clone()
    codes = code_bytes(k_cache, inputs["q"].shape[2])
    codes &= 0x7F
    q, weights = inputs["q"].float().abs(), inputs["weights"].abs()
    return {**inputs, "q": q, "weights": weights, "k_cache": k_cache}


@each_batch
def test_logits_equal_float64(case: Case, device: str) -> None:
    assert_scores(make_inputs(case, device=device)[0])


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_each_query_dtype(dtype: torch.dtype, device: str) -> None:
    assert_scores(make_inputs(LONG, dtype=dtype, device=device)[0])


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_in_bf16(dtype: torch.dtype, device: str) -> None:
    assert_rounded(make_inputs(LONG, dtype=dtype, device=device)[0])


def assert_rounded(inputs: dict[str, Any]) -> None:
    """Logits in bf16 are those in fp32, rounded; the interpreter cuts off what does not fit."""
    expected = launch(**inputs)
    actual = launch(**inputs, logits_dtype=torch.bfloat16)
    assert actual.dtype == torch.bfloat16
    if actual.is_cuda:
        assert_same_bits(actual, expected.bfloat16())
    else:
        bits = expected.view(torch.int32) & -0x10000
        assert_same_bits(actual, bits.view(torch.float32).bfloat16())


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "block_size"),
    [(1, 4, 1), (0, 8, 4), (4, 32, 8), (16, 64, 64), (5, 33, 4), (70, 12, 16), (3, 140, 32)],
)
def test_logits_of_other_sizes(num_heads: int, head_dim: int, block_size: int, device: str) -> None:
    """Blocks smaller and larger than a tile; heads and dims of several parts."""
    case: Case = ([2, 1], [37, 20], 0)
    assert_scores(
        make_inputs(
            case, num_heads=num_heads, head_dim=head_dim, block_size=block_size, device=device
        )[0]
    )


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("hoist", [True, False])
def test_logits_of_more_rows_than_go_together(
    hoist: bool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(indexer_logits, "SPAN", 2)
    rows = 3 if hoist else 0
    monkeypatch.setattr(indexer_logits, "_hoisted_rows", lambda *sizes: rows)
    assert_scores(make_inputs(LONG, device=device)[0])


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("programs", [1, 5, 10_000])
def test_logits_do_not_depend_on_the_number_of_programs(
    programs: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Wherever the runs are cut, within a request or between two, every tile is scored once."""
    monkeypatch.setattr(indexer_logits, "BLOCK_REQUESTS", 4)
    inputs = make_inputs(([3, 1, 0, 2, 0, 1], [40, 3, 0, 17, 5, 33], 1), device=device)[0]
    expected = launch(**inputs)
    monkeypatch.setattr(indexer_logits, "PROGRAMS_PER_SM", 1)
    monkeypatch.setattr(indexer_logits, "num_sms", lambda device: programs)
    assert_same_bits(launch(**inputs), expected)
    assert_scores(inputs)


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("max_seq_len", [1, 16, 17, 44, 52])
def test_logits_max_seq_len_cuts_and_widens(max_seq_len: int, device: str) -> None:
    assert_scores({**make_inputs(LONG, device=device)[0], "max_seq_len": max_seq_len})


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("bad", [-1, 10**6, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 16, 32])
def test_logits_of_an_invalid_block(bad: int, block_size: int, device: str) -> None:
    inputs, _, _ = make_inputs(([2], [70], 0), block_size=block_size, device=device)
    inputs["block_table"][0, 1] = bad
    assert_scores(inputs)
    inputs["k_cache"] = inputs["k_cache"][:0]
    assert (launch(**inputs) == -math.inf).all()


def test_logits_of_every_code(device: str) -> None:
    """Each e4m3 byte is its number, a NaN code a NaN, and no other key sees it."""
    k_cache = torch.zeros(256, 8, dtype=torch.uint8)
    k_cache[:, 0] = torch.arange(256)
    k_cache[:, 4:] = torch.ones(1).view(torch.uint8)
    inputs = {
        "q": torch.tensor([[[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]], device=device),
        "weights": torch.tensor([[1.0, -1.0]], device=device),
        "k_cache": k_cache.to(device),
        "block_table": torch.arange(256, dtype=torch.int32, device=device)[None],
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([256], dtype=torch.int32, device=device),
        "max_seq_len": 256,
    }
    expected = [e4m3_value(code) for code in range(256)]
    assert math.isnan(expected[NAN_CODE])
    for dtype in DTYPES:
        actual = launch(**{**inputs, "q": inputs["q"].to(dtype)})
        torch.testing.assert_close(
            actual.cpu(), torch.tensor([expected]), rtol=0, atol=0, equal_nan=True
        )


def test_logits_of_a_nan_scale(device: str) -> None:
    """A NaN is visible in the logits of its key and nowhere else, whatever the weights."""
    inputs, _, batch = make_inputs(([2], [11], 0), device=device)
    start = BLOCK_SIZE * HEAD_DIM + 4 * 2
    inputs["k_cache"][batch.blocks[0][1], start : start + 4] = 0xFF
    inputs["weights"].zero_()
    assert_scores(inputs)
    assert launch(**inputs).isnan().sum() == 2


@pytest.mark.usefixtures("short_tiles")
def test_logits_of_strided_inputs(device: str) -> None:
    inputs, _, _ = make_inputs(LONG, device=device)
    expected = launch(**inputs)
    actual = launch(
        inputs["q"].transpose(0, 2).contiguous().transpose(0, 2),
        torch.stack([inputs["weights"]] * 2, dim=-1)[..., 1],
        strided_pool(inputs["k_cache"]),
        inputs["block_table"].t().contiguous().t(),
        inputs["query_start_loc"].repeat_interleave(2)[::2],
        inputs["seq_lens"].repeat_interleave(2)[::2],
        inputs["max_seq_len"],
    )
    assert_same_bits(actual, expected)


@each_starts
def test_logits_of_malformed_starts(starts: list[int], device: str) -> None:
    check_starts("indexer_logits", launch, starts, device)


@pytest.mark.parametrize("length", [-1, -5, MIN])
def test_logits_of_a_negative_seq_len(length: int, device: str) -> None:
    check_negative_seq_lens("indexer_logits", launch, length, device)


def assert_rows_equal_alone(inputs: dict[str, Any]) -> None:
    """Verifying four tokens at once selects the keys that decoding them one by one selects."""
    together = launch(**inputs)
    starts, lens = inputs["query_start_loc"].tolist(), inputs["seq_lens"].tolist()
    for request, seq_len in enumerate(lens):
        for token in range(starts[request], starts[request + 1]):
            row_len = max(0, seq_len - starts[request + 1] + token + 1)
            if row_len == 0:
                continue
            alone = launch(
                inputs["q"][token : token + 1],
                inputs["weights"][token : token + 1],
                inputs["k_cache"],
                inputs["block_table"][request : request + 1],
                inputs["query_start_loc"].new_tensor([0, 1]),
                inputs["seq_lens"].new_tensor([row_len]),
                row_len,
            )
            assert_same_bits(alone, together[token : token + 1, :row_len])


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_a_row_do_not_depend_on_its_batch(dtype: torch.dtype, device: str) -> None:
    case: Case = ([1, 4, 0, 7, 2], [33, 40, 0, 11, 0], 3)
    assert_rows_equal_alone(
        make_inputs(case, dtype=dtype, head_dim=64, block_size=16, device=device)[0]
    )


def card_inputs(
    query_lens: list[int],
    longest: int,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    num_heads: int = 64,
    head_dim: int = 128,
    block_size: int = 64,
    seed: int = 0,
) -> dict[str, Any]:
    """Requests of up to ``longest`` keys with permuted blocks, the first of them full."""
    torch.manual_seed(seed)
    num_reqs, num_tokens = len(query_lens), sum(query_lens)
    max_blocks = -(-longest // block_size)
    num_blocks = num_reqs * max_blocks
    seq_lens = torch.randint(0, longest + 1, (num_reqs,), dtype=torch.int32)
    seq_lens[0] = longest
    k_cache = torch.randint(0, 256, (num_blocks, block_size * (head_dim + 4)), dtype=torch.uint8)
    codes = code_bytes(k_cache, head_dim)
    codes[codes & 0x7F == NAN_CODE] = 0
    scales = torch.rand(num_blocks, block_size) * 0.01 + 1e-3
    k_cache[:, block_size * head_dim :] = scales.view(torch.uint8)
    return {
        "q": torch.randn(num_tokens, num_heads, head_dim).to(dtype).cuda(),
        "weights": torch.randn(num_tokens, num_heads).cuda(),
        "k_cache": k_cache.cuda(),
        "block_table": torch.randperm(num_blocks).to(torch.int32).view(num_reqs, -1).cuda(),
        "query_start_loc": torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).cuda(),
        "seq_lens": seq_lens.cuda(),
        "max_seq_len": longest,
    }


def error_on_the_card(dtype: torch.dtype) -> float:
    return FP8_ERROR if dtype == torch.float8_e4m3fn else FP32_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("query_lens", "longest"),
    [([1], 20_000), ([1] * 40, 3000), ([2] * 9, 5000), ([1, 3, 2, 8, 0, 5, 4, 11, 6, 7], 2500)],
    ids=["one", "single tokens", "pairs", "ragged"],
)
def test_logits_on_the_card_equal_float64(
    query_lens: list[int], longest: int, dtype: torch.dtype
) -> None:
    inputs = card_inputs(query_lens, longest, dtype=dtype)
    assert_scores(inputs, error_on_the_card(dtype))
    assert_rounded(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "block_size"),
    [(32, 64, 64), (8, 128, 16), (128, 64, 256), (64, 128, 48)],
)
def test_logits_on_the_card_of_other_sizes(num_heads: int, head_dim: int, block_size: int) -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        inputs = card_inputs(
            [3, 1, 4],
            1000,
            dtype=dtype,
            num_heads=num_heads,
            head_dim=head_dim,
            block_size=block_size,
        )
        assert_scores(inputs, error_on_the_card(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_logits_on_the_card_of_many_rows_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the keys are too many for the L2, up to eight rows go through them together."""
    inputs = card_inputs([5, 8, 6, 1, 7, 11], 900, dtype=dtype)
    expected = launch(**inputs)
    monkeypatch.setattr(indexer_logits, "L2_BYTES", 0)
    assert_same_bits(launch(**inputs), expected)
    assert_scores(inputs, error_on_the_card(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_on_the_card_of_a_row_do_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    assert_rows_equal_alone(card_inputs([1, 4, 0, 7, 2], 700, dtype=dtype))


@pytest.mark.gpu
def test_logits_on_the_card_of_every_batch() -> None:
    for case in BATCHES.values():
        inputs, _, _ = make_inputs(
            case, dtype=torch.bfloat16, num_heads=32, head_dim=64, device="cuda"
        )
        assert_scores(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_replay(dtype: torch.dtype) -> None:
    """Queries that are not of fp8 have the portable kernel on every card."""
    query_lens = [[1, 3, 2, 8], [4, 4, 3, 3], [0, 14, 0, 0]]
    inputs = [
        card_inputs(lens, 2000, dtype=dtype, seed=seed) for seed, lens in enumerate(query_lens)
    ]
    assert_replays(ops.indexer_logits, inputs)
    assert_replays(functools.partial(ops.indexer_logits, logits_dtype=torch.bfloat16), inputs)


@pytest.mark.gpu
def test_logits_on_the_card_past_2_31_bytes() -> None:
    inputs, _, batch = make_inputs(RAGGED, dtype=torch.bfloat16, head_dim=64, device="cuda")
    expected = launch(**inputs)
    # The second of the two blocks of the first request lies far behind the first.
    inputs["k_cache"] = huge_rows(inputs["k_cache"][batch.blocks[0]])
    far = launch(
        inputs["q"][:1],
        inputs["weights"][:1],
        inputs["k_cache"],
        inputs["block_table"].new_tensor([[0, 1]]),
        inputs["query_start_loc"].new_tensor([0, 1]),
        inputs["seq_lens"][:1],
        7,
    )
    assert_same_bits(far, expected[:1, :7])
