"""The kernels of indexer_topk against Python's sort, exactly, with one level and with several."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.kernels import indexer_topk
from mtpgraph.kernels.indexer_topk import launch

from ..helpers import assert_same_bits, huge_rows
from ..index_oracles import topk_oracle
from ..ops.test_indexer_topk import make_inputs
from .gpu import assert_replays

reference = importlib.import_module("mtpgraph.ops.indexer_topk").largest_positions

NAN, INF = math.nan, math.inf
LARGEST = torch.finfo(torch.float32).max

# What the search for the threshold meets: values of n keys.
VALUES: dict[str, Callable[[int], Tensor]] = {
    "normal": torch.randn,
    "exponential": lambda n: torch.rand(n).log().neg(),
    "heavy tails": lambda n: torch.randn(n) / torch.randn(n),
    "one cluster": lambda n: 100 + 1e-3 * torch.randn(n),
    "outliers": lambda n: torch.cat([torch.randn(n - 2), torch.tensor([LARGEST, -LARGEST])]),
    "relu plateau": lambda n: (torch.randn(n) - 1).relu(),
    "negative plateau": lambda n: torch.randn(n).clamp_max(-0.5),
    "all negative": lambda n: -torch.rand(n) - 1,
    "few values": lambda n: torch.randint(-2, 3, (n,)).float(),
    "equal": lambda n: torch.full((n,), 3.5),
    "equal to -inf": lambda n: torch.full((n,), -INF),
    "mostly -inf": lambda n: torch.where(torch.rand(n) < 0.9, -INF, torch.randn(n)),
    "mostly inf": lambda n: torch.where(torch.rand(n) < 0.9, INF, torch.randn(n)),
    "mostly NaN": lambda n: torch.where(torch.rand(n) < 0.9, NAN, torch.randn(n)),
    "two far values": lambda n: torch.where(torch.rand(n) < 0.9, 1e-30, 1e30),
    "zeros of both signs": lambda n: torch.where(torch.rand(n) < 0.5, 0.0, -0.0),
    "subnormal": lambda n: torch.randn(n) * 1e-42,
    "any bits": lambda n: torch.randint(-(2**31), 2**31, (n,)).to(torch.int32).view(torch.float32),
    "ascending": lambda n: torch.arange(n).float(),
    "descending": lambda n: -torch.arange(n).float(),
}
each_values = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 or 128 keys: rows of hundreds have several, and several levels."""
    monkeypatch.setattr(indexer_topk, "CHUNK", 64)
    monkeypatch.setattr(indexer_topk, "LONG_CHUNK", 128)
    monkeypatch.setattr(indexer_topk, "LONG_WIDTH", 400)
    monkeypatch.setattr(indexer_topk, "KEYS_PER_WARP", 64)


def int32(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_equals_sort(logits: Tensor, row_lens: Tensor, topk: int) -> None:
    actual = launch(logits, row_lens, topk)
    assert actual.is_contiguous()
    assert_same_bits(actual, topk_oracle(logits, row_lens.tolist(), topk))


@pytest.mark.parametrize("topk", [1, 9, 40, 64])
def test_topk_equals_sort(topk: int, device: str) -> None:
    assert_equals_sort(**make_inputs(3, topk=topk, device=device))


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    ("width", "topk"),
    [
        (64, 16),
        (65, 16),
        (128, 1),
        (300, 13),
        (400, 16),
        (401, 16),
        (300, 17),
        (700, 32),
        (300, 64),
        (900, 64),
        (300, 65),
        (300, 300),
        (300, 1000),
    ],
)
def test_topk_in_levels_equals_sort(width: int, topk: int, device: str) -> None:
    """One level and several, chunks of both sizes, a last chunk of one key, and the scan."""
    assert_equals_sort(**make_inputs(4, width, topk, device))


@pytest.mark.usefixtures("short_chunks")
def test_topk_of_each_row_length(device: str) -> None:
    """Around the topk, around one chunk and two, and what lies outside of 0 .. width."""
    lens = [-(2**31), -1, 0, 1, 12, 13, 14, 63, 64, 65, 77, 78, 127, 128, 129, 142, 299, 300, 301]
    lens.append(2**31 - 1)
    logits = make_inputs(len(lens), 300)["logits"].to(device)
    assert_equals_sort(logits, int32(lens, device), 13)


@pytest.mark.usefixtures("short_chunks")
@each_values
def test_topk_of_each_kind_of_values(values: Callable[[int], Tensor], device: str) -> None:
    logits = torch.stack([values(200), values(200)]).to(device)
    assert_equals_sort(logits, int32([200, 131], device), 15)


@pytest.mark.usefixtures("short_chunks")
def test_topk_of_random_rows(full: bool, device: str) -> None:
    for _ in range(200 if full else 4):
        num_tokens, width, topk = (int(torch.randint(0, high, ())) for high in (5, 300, 90))
        assert_equals_sort(**make_inputs(num_tokens, width, topk + 1, device))


@pytest.mark.usefixtures("short_chunks")
def test_topk_on_few_programs(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A program then owns several chunks of several rows."""
    monkeypatch.setattr(indexer_topk, "num_sms", lambda device: 1)
    monkeypatch.setattr(indexer_topk, "WARPS_PER_SM", 2)
    assert_equals_sort(**make_inputs(3, 300, 13, device))


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("topk", [13, 65])
def test_topk_of_strided_rows(topk: int, device: str) -> None:
    inputs = make_inputs(2, 140, topk, device)
    expected = launch(**inputs)
    logits = inputs["logits"]
    wide = torch.full((2, 290), INF, device=device)
    wide[:, 5:285:2] = logits
    for view in (wide[:, 5:285:2], logits.t().contiguous().t()):
        assert_same_bits(launch(view, inputs["row_lens"], topk), expected)
    lens = torch.stack([inputs["row_lens"], inputs["row_lens"] + 1], dim=1)[:, 0]
    assert_same_bits(launch(logits, lens, topk), expected)


@pytest.mark.parametrize(("num_tokens", "width"), [(0, 40), (3, 0), (0, 0)])
@pytest.mark.parametrize("topk", [5, 10_000])
def test_topk_of_nothing(num_tokens: int, width: int, topk: int, device: str) -> None:
    logits = torch.zeros(num_tokens, width, device=device)
    actual = launch(logits, int32([4] * num_tokens, device), topk)
    assert actual.shape == (num_tokens, topk)
    assert (actual == -1).all()


def card_inputs(num_tokens: int, width: int, topk: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(num_tokens, width, device="cuda", generator=generator)
    lens = torch.randint(0, width + 1, (num_tokens,), device="cuda", generator=generator)
    lens[0] = width
    return {"logits": logits, "row_lens": lens.to(torch.int32), "topk": topk}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "width", "topk"),
    [
        (1, 8192, 2048),
        (64, 8192, 2048),
        (256, 4096, 512),
        (300, 32768, 2048),
        (33, 32773, 2048),
        (7, 131072, 2048),
        (64, 131072, 4096),
        (7, 131072, 9000),
        (1, 2**20, 2048),
        (5, 2**20, 4096),
        (3, 3000, 4096),
    ],
)
def test_topk_on_the_card_equals_sort(num_tokens: int, width: int, topk: int) -> None:
    inputs = card_inputs(num_tokens, width, topk)
    assert_same_bits(launch(**inputs), reference(**inputs))
    # full rows, and ties at every threshold
    inputs["row_lens"].fill_(width)
    inputs["logits"] = (inputs["logits"] * 20).round_()
    assert_same_bits(launch(**inputs), reference(**inputs))


@pytest.mark.gpu
@each_values
def test_topk_on_the_card_of_each_kind_of_values(values: Callable[[int], Tensor]) -> None:
    for width, topk in ((8192, 2048), (100_000, 2048), (100_000, 4096), (40_000, 9000)):
        logits = torch.stack([values(width), values(width)]).cuda()
        row_lens = int32([width, width - 7], "cuda")
        assert_same_bits(launch(logits, row_lens, topk), reference(logits, row_lens, topk))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "topk"), [(8192, 2048), (50_000, 2048), (300_000, 4096), (30_000, 9000)]
)
def test_topk_replays(width: int, topk: int) -> None:
    assert_replays(ops.indexer_topk, [card_inputs(9, width, topk, seed) for seed in range(3)])


@pytest.mark.gpu
def test_topk_on_the_card_past_2_31_elements() -> None:
    inputs = card_inputs(3, 20_000, 2048)
    expected = launch(**inputs)
    inputs["logits"] = huge_rows(inputs["logits"])
    assert_same_bits(launch(**inputs), expected)
    inputs["topk"] = 9000
    assert_same_bits(launch(**inputs), reference(**inputs))
