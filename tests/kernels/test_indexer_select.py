"""indexer_select is the kernels of its two parts, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.kernels import flatten_decode, indexer_logits, indexer_topk
from mtpgraph.kernels._hopper_runs import MAX_KEPT_BYTES, TILE
from mtpgraph.kernels.indexer_select import launch
from mtpgraph.ops.indexer_topk import largest_positions

from ..helpers import assert_same_bits, each_batch, huge_rows, nan_pool
from ..malformed_lens import MIN, check_negative_seq_lens, check_starts, each_starts
from ..ops.test_indexer_logits import DTYPES, Case
from ..ops.test_indexer_select import make_inputs
from .gpu import assert_replays
from .test_indexer_logits import card_inputs
from .test_indexer_topk import SCANNED_TOPK, VALUES, each_values

# As in the tests of indexer_topk: infinities in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

LONG: Case = ([2, 1, 0, 4], [50, 3, 0, 25], 1)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Short tiles, so that a short row has several; not on the card."""
    if device == "cpu":
        monkeypatch.setattr(indexer_logits, "num_sms", lambda device: 1)
        monkeypatch.setattr(indexer_logits, "TILE", 16)


def in_two_launches(inputs: dict[str, Any]) -> Tensor:
    parts = {name: value for name, value in inputs.items() if name != "topk"}
    row_lens, _ = flatten_decode.launch(
        inputs["query_start_loc"], inputs["seq_lens"], inputs["q"].shape[0]
    )
    return indexer_topk.launch(indexer_logits.launch(**parts), row_lens, inputs["topk"])


def assert_equals_two_launches(inputs: dict[str, Any]) -> None:
    actual = launch(**inputs)
    assert actual.is_contiguous()
    assert_same_bits(actual, in_two_launches(inputs))


@each_batch
def test_select_equals_two_launches(case: Case, device: str) -> None:
    assert_equals_two_launches(make_inputs(case, device=device))


@pytest.mark.parametrize("topk", [1, 8, 40, 49, 50, 51])
def test_select_of_each_topk(topk: int, device: str) -> None:
    """Around the longest row, beyond half a chunk, and beyond all keys."""
    assert_equals_two_launches(make_inputs(LONG, topk=topk, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_select_of_each_query_dtype(dtype: torch.dtype, device: str) -> None:
    assert_equals_two_launches(make_inputs(LONG, topk=8, dtype=dtype, device=device))


def test_select_equals_the_reference(device: str) -> None:
    """Random keys have no near ties."""
    inputs = make_inputs(LONG, topk=8, device=device)
    expected = ops.indexer_select(
        **{k: v.cpu() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    )
    assert_same_bits(launch(**inputs), expected)


@pytest.mark.parametrize("max_seq_len", [1, 8, 9, 52])
def test_select_max_seq_len_cuts_the_rows(max_seq_len: int, device: str) -> None:
    inputs = make_inputs(LONG, topk=8, device=device)
    assert_equals_two_launches({**inputs, "max_seq_len": max_seq_len})


def test_select_of_ties_and_nan(device: str) -> None:
    inputs = make_inputs(([3, 1], [40, 27], 0), topk=6, device=device)
    inputs["q"].zero_()
    assert_equals_two_launches(inputs)
    assert launch(**inputs)[2].tolist() == [0, 1, 2, 3, 4, 5]
    inputs["k_cache"].fill_(0xFF)
    assert launch(**inputs)[3].tolist() == [0, 1, 2, 3, 4, 5]
    inputs["block_table"].fill_(-1)
    assert launch(**inputs)[0].tolist() == [0, 1, 2, 3, 4, 5]


def inputs_of_values(values: Tensor, topk: int, head_dim: int) -> dict[str, Any]:
    """A token a request, whose logits are a row of ``values``: the scale of a key is the size of
    its value, and of two heads one is for positive and one for negative keys."""
    num_reqs, width = values.shape
    block_size = 64
    columns = -(-width // block_size)
    k_cache = nan_pool(num_reqs * columns + 2, block_size * (head_dim + 4), dtype=torch.uint8)
    table = torch.randperm(len(k_cache))[: num_reqs * columns].view(num_reqs, columns)
    keys = torch.zeros(num_reqs, columns * block_size, head_dim)
    keys[:, :width, 0] = (~values.signbit()).float()
    keys[:, :width, 1] = values.signbit().float()
    codes = keys.to(torch.float8_e4m3fn).view(torch.uint8).view(num_reqs, columns, -1)
    scales = torch.nn.functional.pad(values.abs(), (0, columns * block_size - width))
    scales = scales.view(torch.uint8).view(num_reqs, columns, -1)
    k_cache[table] = torch.cat([codes, scales], dim=2)
    heads = 64 if head_dim == 128 else 2
    q = torch.zeros(num_reqs, heads, head_dim)
    q[:, 0, 0] = q[:, 1, 1] = 1
    weights = torch.zeros(num_reqs, heads)
    weights[:, 0], weights[:, 1] = 1, -1
    return {
        "q": q.to(torch.float8_e4m3fn),
        "weights": weights,
        "k_cache": k_cache,
        "block_table": table.int(),
        "query_start_loc": torch.arange(num_reqs + 1, dtype=torch.int32),
        "seq_lens": torch.full((num_reqs,), width, dtype=torch.int32),
        "max_seq_len": width,
        "topk": topk,
    }


def assert_selects_the_largest(values: Tensor, topk: int, device: str, head_dim: int = 128) -> None:
    inputs = inputs_of_values(values, topk, head_dim)
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    scores = {name: value for name, value in given.items() if name != "topk"}
    logits = indexer_logits.launch(**scores)
    # a scale may be halved, which takes a bit of a subnormal one
    torch.testing.assert_close(logits.cpu(), values, rtol=0, atol=2.0**-149, equal_nan=True)
    expected = largest_positions(logits, given["seq_lens"], topk)
    assert_same_bits(launch(**given), expected)


@pytest.mark.parametrize(
    "kind",
    ["two values", "descending", "subnormal", "zeros of both signs", "mostly inf", "mostly NaN"],
)
def test_select_of_kinds_of_values(kind: str, device: str) -> None:
    assert_selects_the_largest(VALUES[kind](70)[None], 9, device, head_dim=4)


@each_starts
def test_select_of_malformed_starts(starts: list[int], device: str) -> None:
    check_starts("indexer_select", launch, starts, device)


@pytest.mark.parametrize("length", [-1, -5, MIN])
def test_select_of_a_negative_seq_len(length: int, device: str) -> None:
    check_negative_seq_lens("indexer_select", launch, length, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("query_lens", "longest", "topk"),
    [
        ([1], 40_000, 2048),
        ([1] * 40, 9000, 2048),
        ([1, 3, 2, 8, 0, 5, 4, 11], 5000, 512),
        ([2] * 5, 40_000, 4096),
        ([2] * 5, 2000, 2048),
    ],
    ids=["one", "single tokens", "ragged", "pairs", "all keys"],
)
def test_select_on_the_card_equals_two_launches(
    query_lens: list[int], longest: int, topk: int, dtype: torch.dtype
) -> None:
    assert_equals_two_launches({**card_inputs(query_lens, longest, dtype=dtype), "topk": topk})


@pytest.mark.gpu
@pytest.mark.parametrize("held", [True, False], ids=["held in the L2", "too many to hold"])
def test_select_does_not_depend_on_max_seq_len(held: bool) -> None:
    """A graph is captured for the longest requests there may be: rows are far shorter then."""
    query_lens = [1] * 3 if held else [4] * 64
    inputs = {**card_inputs(query_lens, 40_000), "topk": 2048}
    tiles = -(-inputs["seq_lens"][inputs["seq_lens"] > 2048] // TILE.value)
    assert bool(4 * TILE.value * query_lens[0] * tiles.sum() <= MAX_KEPT_BYTES.value) == held
    expected = in_two_launches(inputs)
    for max_seq_len in (40_000, 160 << 10, 1 << 20):
        wide = inputs | {"max_seq_len": max_seq_len}
        missing = -(-max_seq_len // 64) - inputs["block_table"].shape[1]
        wide["block_table"] = torch.nn.functional.pad(inputs["block_table"], (0, missing), value=-1)
        assert_same_bits(launch(**wide), expected)


@pytest.mark.gpu
@each_values
def test_select_on_the_card_of_each_kind_of_values(values: Callable[[int], Tensor]) -> None:
    """Short rows, rows that are filtered first, and rows that are scanned."""
    for width, topk in ((4000, 512), (8192, 2048), (40_000, 2048), (40_000, SCANNED_TOPK)):
        assert_selects_the_largest(torch.stack([values(width), values(width)]), topk, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", [512, 5000])
def test_select_replays(topk: int, dtype: torch.dtype) -> None:
    """Queries that are not of fp8 have the portable kernel on every card."""
    query_lens = [[1, 3, 2, 8], [4, 4, 3, 3], [0, 14, 0, 0]]
    inputs = [
        {**card_inputs(lens, 9000, dtype=dtype, seed=seed), "topk": topk}
        for seed, lens in enumerate(query_lens)
    ]
    assert_replays(ops.indexer_select, inputs)


@pytest.mark.gpu
def test_select_on_the_card_past_2_31_bytes() -> None:
    inputs = {**card_inputs([2], 128), "topk": 50}
    inputs["block_table"] = torch.tensor([[0, 1]], dtype=torch.int32, device="cuda")
    expected = launch(**inputs)
    inputs["k_cache"] = huge_rows(inputs["k_cache"])
    assert_same_bits(launch(**inputs), expected)
