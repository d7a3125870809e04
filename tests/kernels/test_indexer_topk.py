"""The kernels of indexer_topk against Python's sort, exactly: short rows, long ones, and scans."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpgraph import ops
from mtpgraph.kernels import _topk_plan, indexer_topk
from mtpgraph.kernels._sampling import limits
from mtpgraph.kernels.indexer_topk import launch
from mtpgraph.ops.indexer_topk import largest_positions as reference

from ..helpers import assert_same_bits, huge_rows
from ..index_oracles import topk_oracle
from ..ops.test_indexer_topk import make_inputs
from .gpu import assert_replays

# Guesses at a bound are made from sums over all values, infinite ones too: NumPy warns, a card not.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

NAN, INF = math.nan, math.inf
LARGEST = torch.finfo(torch.float32).max

# What the search for the threshold meets: values of n keys.
VALUES: dict[str, Callable[[int], Tensor]] = {
    "normal": torch.randn,
    "exponential": lambda n: torch.rand(n).log().neg(),
    "heavy tails": lambda n: torch.randn(n) / torch.randn(n),
    "one cluster": lambda n: 100 + 1e-3 * torch.randn(n),
    "two clusters": lambda n: torch.where(torch.rand(n) < 0.5, 1000, -1000) + torch.randn(n),
    "outliers": lambda n: torch.cat([torch.randn(n - 2), torch.tensor([LARGEST, -LARGEST])]),
    "one outlier": lambda n: torch.cat([torch.tensor([1e38]), torch.randn(n - 1)]),
    "huge": lambda n: torch.randn(n) * 1e38,
    "plateau within": lambda n: torch.where(torch.rand(n) < 0.5, 0.25, torch.randn(n)),
    "relu plateau": lambda n: (torch.randn(n) - 1).relu(),
    "negative plateau": lambda n: torch.randn(n).clamp_max(-0.5),
    "all negative": lambda n: -torch.rand(n) - 1,
    "two values": lambda n: torch.where(torch.rand(n) < 0.3, 2.0, 1.0),
    "few values": lambda n: torch.randint(-2, 3, (n,)).float(),
    "equal": lambda n: torch.full((n,), 3.5),
    "equal to -inf": lambda n: torch.full((n,), -INF),
    "mostly -inf": lambda n: torch.where(torch.rand(n) < 0.9, -INF, torch.randn(n)),
    "mostly inf": lambda n: torch.where(torch.rand(n) < 0.9, INF, torch.randn(n)),
    "mostly NaN": lambda n: torch.where(torch.rand(n) < 0.9, NAN, torch.randn(n)),
    "two far values": lambda n: torch.where(torch.rand(n) < 0.9, 1e-30, 1e30),
    "half inf, half -inf": lambda n: torch.where(torch.rand(n) < 0.5, INF, -INF),
    "NaN first": lambda n: torch.cat([torch.tensor([NAN]), torch.randn(n - 1)]),
    "-inf first": lambda n: torch.cat([torch.tensor([-INF]), torch.randn(n - 1)]),
    "zeros of both signs": lambda n: torch.where(torch.rand(n) < 0.5, 0.0, -0.0),
    "zeros within": lambda n: torch.cat(
        [
            -torch.rand(n // 4),
            torch.zeros(n // 4),
            -torch.zeros(n // 4),
            torch.rand(n - 3 * (n // 4)),
        ]
    )[torch.randperm(n)],
    "subnormal": lambda n: torch.randn(n) * 1e-42,
    "any bits": lambda n: torch.randint(-(2**31), 2**31, (n,)).to(torch.int32).view(torch.float32),
    "ascending": lambda n: torch.arange(n).float(),
    "descending": lambda n: -torch.arange(n).float(),
}
# More than a block of the card holds.
SCANNED_TOPK = 15_000
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
each_values = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 and 256 keys, so that rows of hundreds go through the filter, and a topk of
    200 through the scan; not on the card, which has warps enough for the real ones."""
    for name, value in {
        "SHORT_WIDTH": 128,
        "SHORTEST_BLOCK": 128,
        "LONGEST_BLOCK": 256,
        "CHUNK": 128,
        "MAX_SLICES": 4,
        "SHORTEST_SAMPLE": 128,
        "LONG_SAMPLE": 128,
        "LONGEST_SAMPLE": 256,
        "TOO_FEW": 2.0,
        "TOO_MANY": 1.0,
    }.items():
        monkeypatch.setattr(_topk_plan, name, value)


def int32(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_equals_sort(logits: Tensor, row_lens: Tensor, topk: int) -> None:
    actual = launch(logits, row_lens, topk)
    assert actual.is_contiguous()
    assert_same_bits(actual, topk_oracle(logits, row_lens.tolist(), topk))


@pytest.mark.parametrize("topk", [1, 9, 40, 64])
def test_topk_equals_sort(topk: int, device: str) -> None:
    assert_equals_sort(**make_inputs(3, topk=topk, device=device))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("width", "topk"),
    [
        (64, 16),
        (128, 1),
        (128, 100),
        (129, 16),
        (257, 13),
        (400, 32),
        (401, 33),
        (900, 64),
        (1600, 64),
        (1600, 1),
        (130, 65),
        (300, 300),
        (300, 1000),
        (600, 200),
    ],
)
def test_topk_of_each_width_equals_sort(width: int, topk: int, device: str) -> None:
    """One block, one slice and several, slices of one chunk and of several, and the scan."""
    assert_equals_sort(**make_inputs(4, width, topk, device))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("width", "topk"), [(128, 100), (257, 13), (600, 200)])
def test_topk_of_bf16_rows(width: int, topk: int, device: str) -> None:
    inputs = make_inputs(4, width, topk, device)
    inputs["logits"] = inputs["logits"].bfloat16()
    assert_equals_sort(**inputs)
    # of a few hundred values, many are equal
    inputs["logits"] = (torch.randn(4, width) + 3).to(device, torch.bfloat16)
    assert_equals_sort(**inputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card compiles the limits that there are")
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("share", [0.02, 0.2, 0.6, 1.0, 1.4, 5.0])
def test_topk_whatever_the_filter_leaves(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than topk keys, a block, a large block, and more than that."""
    assert _topk_plan.plan(2, 600, 11, 132)[:2] == (128, 256)
    asked = 0

    def limits(room: Any, length: Any, topk: Any, sample: Any, *_: Any) -> tuple[Any, Any]:
        nonlocal asked
        asked += 1
        count = (128 * share * sample / length.to(tl.float32)).to(tl.int32)
        count = tl.maximum(count, 1)
        return count, count

    monkeypatch.setattr(indexer_topk, "limits", limits)
    assert_equals_sort(**make_inputs(2, 600, 11, "cpu"))
    assert_equals_sort(torch.randn(2, 600), int32([600, 301]), 11)
    assert asked > 0


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("width", [700, 5000])
def test_topk_of_rows_far_shorter_than_the_logits(width: int, device: str) -> None:
    """The length of a row says what its slices are, whatever is behind it."""
    lens = [1, 90, 128, 129, 200, 257, 385, 513, 600, 0]
    logits = torch.full((len(lens), width), INF, device=device)
    for row, row_len in zip(logits, lens, strict=True):
        row[:row_len] = torch.randn(row_len)
        row[max(row_len - 1, 0)] = 9
    assert_equals_sort(logits, int32(lens, device), 17)


@pytest.mark.usefixtures("small_blocks")
@each_dtype
@pytest.mark.parametrize("width", [250, 500])
def test_topk_of_rows_far_shorter_than_a_block(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Without a filter, in blocks of two chunks and of four: rows of a chunk, and longer ones."""
    monkeypatch.setattr(_topk_plan, "SHORT_WIDTH", 512)
    lens = [1, 17, 18, 90, 127, 128, 129, 200, width, 0, 100, 100]
    logits = torch.full((len(lens), width), INF, device=device)
    for row, row_len in zip(logits, lens, strict=True):
        row[:row_len] = torch.randn(row_len)
        row[max(row_len - 1, 0)] = 9
    # -inf and NaN among the largest
    logits[-2:, 10:100] = torch.tensor([[-INF], [NAN]], device=device)
    assert_equals_sort(logits.to(dtype), int32(lens, device), 17)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card compiles the function that there is")
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("short_width", "width"), [(512, 250), (512, 500), (128, 700)])
def test_topk_of_short_rows_takes_a_part_of_the_block(
    short_width: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read ahead, read when its length is known, and behind a filter; late positions as well."""
    monkeypatch.setattr(_topk_plan, "SHORT_WIDTH", short_width)
    select_row, groups = indexer_topk.select_row, []

    def counted(*args: Any) -> Any:
        groups.append(args[8])
        return select_row(*args)

    monkeypatch.setattr(indexer_topk, "select_row", counted)
    logits = torch.randn(1, width)
    for late in (False, True):
        monkeypatch.setattr(_topk_plan, "MAX_REGISTERS", 1000 if late else 1)
        for row_len in (17, 18, 127, 128, 129, 200):
            groups.clear()
            assert_equals_sort(logits, int32([row_len]), 17)
            assert groups.count(1) == (18 <= row_len <= 128)


@pytest.mark.parametrize(
    ("num_tokens", "width", "num_slices", "max_chunks"),
    [
        (64, 32_768, 4, 2),
        (64, 163_840, 4, 16),
        (8, 32_768, 8, 1),
        (8, 1 << 20, 32, 8),
        (20, 50_000, 16, 1),
        (24, 163_840, 8, 8),
        (67, 163_840, 2, 32),
        (40, 163_840, 4, 16),
        (256, 163_840, 1, 64),
        (1000, 32_768, 1, 8),
        (1, 1 << 20, 128, 2),
        (0, 32_768, 8, 1),
    ],
)
def test_slices_fill_the_card(
    num_tokens: int, width: int, num_slices: int, max_chunks: int
) -> None:
    """A power of two, and as many as there is room for, however short rows may be; or twice as
    many, where there are not chunks enough for all of them."""
    plan = _topk_plan.plan(num_tokens, width, 2048, 132)
    assert plan is not None
    assert (plan.num_slices, plan.max_chunks) == (num_slices, max_chunks)


@pytest.mark.parametrize("num_tokens", [1, 64, 300])
def test_widths_share_what_is_compiled(num_tokens: int) -> None:
    plans = [_topk_plan.plan(num_tokens, width, 2048, 132) for width in range(16_385, 300_000, 997)]
    constants = {(p.block, p.large_block, p.sample, p.num_slices, p.max_chunks) for p in plans if p}
    assert len(plans) > 280
    assert len(constants) <= 10


def test_limits_on_the_card_are_those_of_the_plan(device: str) -> None:
    """And of a shorter row not less apart than the plan makes sure of."""
    made = torch.empty(2, dtype=torch.int32, device=device)
    constants = {name: getattr(_topk_plan, name) for name in ("TOO_FEW", "TOO_MANY", "MOST_SPAN")}

    def of_sample(room: int, length: int, topk: int) -> list[int]:
        limits_kernel[(1,)](made, room, length, topk, SAMPLE=2048, **constants)
        return made.tolist()

    for room, length, topk in [(4096, 32_768, 2048), (8064, 163_840, 2048), (4032, 9000, 1)]:
        fewest, most = of_sample(room, length, topk)
        expected = _topk_plan.limits(room, length / 2048, topk)
        share = 2048 / length
        assert fewest == pytest.approx(max(expected[0] * share, 1), abs=1.5)
        assert most == pytest.approx(min(expected[1] * share, 1.7 * expected[0] * share), abs=2.5)
    plan = _topk_plan.plan(64, 160 << 10, 2048, 132)
    assert plan is not None
    assert plan.sample == 2048
    for length in (plan.block + 1, 10_000, 20_000, 50_000, 100_000, 160 << 10):
        fewest, most = of_sample(plan.block - 16 * plan.num_slices, length, 2048)
        assert most >= 1.15 * fewest


@triton.jit(do_not_specialize=["room", "length", "topk"])
def limits_kernel(
    out_ptr, room, length, topk, SAMPLE: tl.constexpr,
    TOO_FEW: tl.constexpr, TOO_MANY: tl.constexpr, MOST_SPAN: tl.constexpr,
):  # fmt: skip
    fewest, most = limits(room, length, topk, SAMPLE, TOO_FEW, TOO_MANY, MOST_SPAN)
    tl.store(out_ptr, fewest)
    tl.store(out_ptr + 1, most)


@pytest.mark.usefixtures("small_blocks")
def test_topk_of_rows_whose_largest_lie_together(device: str) -> None:
    """All in one slice, at either end, and where no sample may have looked."""
    logits = torch.randn(4, 1000)
    logits[0, :40] += 10
    logits[1, -40:] += 10
    logits[2, 500:540] += 10
    logits[3, ::16] += 10
    assert_equals_sort(logits.to(device), int32([1000, 1000, 999, 990], device), 37)


@pytest.mark.usefixtures("small_blocks")
def test_topk_of_each_row_length(device: str) -> None:
    """Around the topk, around one block and two slices, and what lies outside of 0 .. width."""
    lens = [-(2**31), -1, 0, 1, 12, 13, 14, 63, 64, 65, 127, 128, 129, 132, 255, 256, 257, 299, 300]
    lens += [301, 2**31 - 1]
    logits = make_inputs(len(lens), 300)["logits"].to(device)
    assert_equals_sort(logits, int32(lens, device), 13)


@pytest.mark.usefixtures("small_blocks")
@each_values
def test_topk_of_each_kind_of_values(values: Callable[[int], Tensor], device: str) -> None:
    check_kind_of_values(values, torch.float32, device)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "kind",
    ["normal", "one cluster", "huge", "equal", "mostly -inf", "mostly NaN", "zeros of both signs"],
)
def test_topk_of_kinds_of_values_in_bf16(kind: str, device: str) -> None:
    check_kind_of_values(VALUES[kind], torch.bfloat16, device)


def check_kind_of_values(values: Callable[[int], Tensor], dtype: torch.dtype, device: str) -> None:
    """A row in one block, one through the filter, and one by the scan."""
    logits = torch.stack([values(300), values(300)]).to(device, dtype)
    assert_equals_sort(logits, int32([300, 101], device), 15)
    assert _topk_plan.plan(1, 300, 200, 132) is None
    assert_equals_sort(logits[:1], int32([300], device), 200)


@pytest.mark.parametrize(("width", "topk"), [(1500, 1), (3001, 400), (1100, 550), (1023, 1022)])
def test_topk_of_each_kind_of_values_in_one_block(width: int, topk: int, device: str) -> None:
    """Several warps, and several groups a thread: rows that are full, short, and padded with inf.

    A threshold lies in every part of the row, among more than 64 equal values as well.
    """
    logits = torch.full((len(VALUES), width + 4), INF)
    for row, values in zip(logits, VALUES.values(), strict=True):
        row[:width] = values(width)
    row_lens = torch.full((len(VALUES),), width, dtype=torch.int32)
    row_lens[::3] -= torch.randint(1, width - topk + 1, row_lens[::3].shape, dtype=torch.int32)
    assert_equals_sort(logits[:, :width].to(device), row_lens.to(device), topk)


@pytest.mark.parametrize(("width", "topk"), [(20_000, 2048), (32_768, 700)])
def test_topk_of_a_block_of_the_largest_size(
    width: int, topk: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """32 warps of eight groups: all counts of 32768 equal keys still fit into 16 bits."""
    monkeypatch.setattr(_topk_plan, "SHORT_WIDTH", 32_768)
    assert _topk_plan.plan(1, width, topk, 132) == (32_768, 32_768, 0, 0, 0, 0)
    kinds = ["normal", "equal", "plateau within", "zeros within", "any bits"]
    logits = torch.stack([VALUES[kind](width) for kind in kinds]).to(device)
    assert_equals_sort(logits, int32([width, width, width - 9, width, width], device), topk)


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces a function of the interpreter")
@pytest.mark.parametrize(("width", "topk"), [(2000, 100), (300, 15)])
def test_topk_scans_no_row_of_finite_logits(
    width: int, topk: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is enough, whatever they are, and so is what the filter leaves of normal ones."""

    def refuse(*args: object) -> None:
        raise AssertionError("scanned")

    if width == 300:
        request.getfixturevalue("small_blocks")
    monkeypatch.setattr(indexer_topk, "scan_row", refuse)
    finite = [values(width) for values in VALUES.values()]
    finite = [values for values in finite if values.isfinite().all()]
    assert len(finite) > 15
    logits = torch.stack(finite) if width == 2000 else torch.randn(8, width)
    assert_equals_sort(logits, int32([width] * len(logits)), topk)
    with pytest.raises(Exception, match="scanned"):
        launch(torch.full((1, width), -INF), int32([width]), topk)


@pytest.mark.usefixtures("small_blocks")
@each_dtype
@pytest.mark.parametrize("topk", [13, 65])
def test_topk_of_strided_rows(topk: int, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(2, 140, topk, device)
    logits = inputs["logits"] = inputs["logits"].to(dtype)
    expected = launch(**inputs)
    wide = torch.full((2, 290), INF, device=device, dtype=dtype)
    wide[:, 5:285:2] = logits
    for view in (wide[:, 5:285:2], logits.t().contiguous().t()):
        assert_same_bits(launch(view, inputs["row_lens"], topk), expected)
    lens = torch.stack([inputs["row_lens"], inputs["row_lens"] + 1], dim=1)[:, 0]
    assert_same_bits(launch(logits, lens, topk), expected)


@pytest.mark.usefixtures("small_blocks")
@each_dtype
@pytest.mark.parametrize("width", [37, 39, 301])
def test_topk_of_the_last_columns_of_a_storage(width: int, dtype: torch.dtype, device: str) -> None:
    """Vectors of 4 logits may reach past the end of a row, into its padding, not past memory."""
    storage = torch.full((2 * 320 + width,), INF, device=device, dtype=dtype)
    view = storage.as_strided((3, width), (320, 1))
    view.copy_(torch.randn(3, width))
    assert not _topk_plan.reads_vectors(view, width)
    assert _topk_plan.reads_vectors(view[:2], width)
    lens = int32([width, width - 1, width], device)
    assert_equals_sort(view, lens, 9)
    assert_equals_sort(view[:2], lens[:2], 9)


@pytest.mark.parametrize(("num_tokens", "width"), [(0, 40), (3, 0), (0, 0)])
@pytest.mark.parametrize("topk", [5, 10_000])
def test_topk_of_nothing(num_tokens: int, width: int, topk: int, device: str) -> None:
    logits = torch.zeros(num_tokens, width, device=device)
    actual = launch(logits, int32([4] * num_tokens, device), topk)
    assert actual.shape == (num_tokens, topk)
    assert (actual == -1).all()


def test_topk_of_all_reads_no_logits(device: str) -> None:
    """As in indexer_select, which then has none."""
    lens = int32([40, 7, 0], device)
    actual = indexer_topk.largest_positions(torch.empty(3, 0, device=device), lens, 50, 40)
    assert_same_bits(actual, topk_oracle(torch.zeros(3, 40), lens.tolist(), 50).to(device))


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
        (64, 8192, 512),
        (256, 4096, 512),
        (256, 4096, 2048),
        (8, 32768, 512),
        (300, 32768, 2048),
        (128, 32768, 2048),
        (4, 131072, 512),
        (33, 32773, 2048),
        (7, 131072, 2048),
        (64, 131072, 4096),
        (7, 131072, SCANNED_TOPK),
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
    inputs["logits"] = torch.randn_like(inputs["logits"]).bfloat16()
    assert_same_bits(launch(**inputs), reference(**inputs))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "width"),
    [(140, 8192), (140, 4096), (270, 4096), (600, 4000), (600, 700), (3000, 130)],
)
def test_topk_on_the_card_where_rows_share_a_multiprocessor(num_tokens: int, width: int) -> None:
    """Rows of every kind of values, two, three or more of them at once, with 32 keys a thread or
    with few registers."""
    kinds = [values(width) for values in VALUES.values()]
    logits = torch.stack([kinds[row % len(kinds)] for row in range(num_tokens)]).cuda()
    row_lens = torch.full((num_tokens,), width, dtype=torch.int32, device="cuda")
    row_lens[num_tokens // 2 :: 3] -= 5
    for topk in (width // 2, width // 11):
        assert_same_bits(launch(logits, row_lens, topk), reference(logits, row_lens, topk))


@pytest.mark.parametrize("block", [128, 512, 2048, 4096, 8192, 16_384])
@pytest.mark.parametrize("filtered", [False, True])
def test_registers_of_a_multiprocessor_go_round(block: int, filtered: bool) -> None:
    found = set()
    for num_tokens in range(1, 3000):
        keys = _topk_plan.keys_per_thread(num_tokens, block, 132, filtered=filtered)
        warps = _topk_plan.warps_for(block, keys)
        registers = _topk_plan.select_registers(num_tokens, warps, keys, 132, filtered=filtered)
        assert registers % 8 == 0
        assert registers * 32 * warps <= 65_536
        assert registers >= 4 * keys
        assert registers <= 255
        found.add((warps, registers))
    # each is compiled for
    assert len(found) <= 3


def test_rows_of_4_k_share_a_multiprocessor_by_fours() -> None:
    rows = {1: 248, 132: 248, 133: 128, 264: 128, 265: 64, 5000: 64}
    for num_tokens, registers in rows.items():
        assert _topk_plan.keys_per_thread(num_tokens, 4096, 132, filtered=False) == 16
        found = _topk_plan.select_registers(num_tokens, 8, 16, 132, filtered=False)
        assert found == registers


def test_long_rows_and_many_rows_have_more_keys_a_thread() -> None:
    keys = functools.partial(_topk_plan.keys_per_thread, sms=132, filtered=False)
    assert [keys(rows, 8192) for rows in (132, 133)] == [16, 32]
    assert keys(1, 16_384) == 32
    assert _topk_plan.keys_per_thread(1, 16_384, 132, filtered=True) == 16


@pytest.mark.parametrize(
    ("num_tokens", "width"), [(2, 40_000), (3, 20_000), (7, 131_072), (9, 30_000)]
)
def test_topk_beyond_a_block_is_scanned_for(num_tokens: int, width: int) -> None:
    assert _topk_plan.plan(num_tokens, width, SCANNED_TOPK, 132) is None


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [8, 64, 256])
def test_topk_on_the_card_of_rows_far_shorter_than_the_logits(num_tokens: int) -> None:
    lens = torch.randint(0, 40_000, (num_tokens,), dtype=torch.int32)
    lens[:8] = torch.tensor([2048, 2049, 4096, 4097, 8192, 8193, 16_384, 16_385])
    logits = torch.full((num_tokens, 160 << 10), INF, device="cuda")
    logits[:, :40_000].normal_()
    beyond = torch.arange(40_000) >= lens[:, None]
    logits[:, :40_000].masked_fill_(beyond.cuda(), INF)
    actual = launch(logits, lens.cuda(), 2048)
    assert_same_bits(actual, reference(logits, lens.cuda(), 2048))
    assert_same_bits(launch(logits[:, :40_000].clone(), lens.cuda(), 2048), actual)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_topk_on_the_card_may_begin_early(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the second launch waits for the first on the card or ahead of it; rows that it waits
    for, and, of many, others."""
    lens = [100_000, 30_000, 6000, 3000, 100, 0]
    row_lens = int32([lens[row % len(lens)] for row in range(num_tokens)], "cuda")
    rows = [torch.randn(num_tokens, 100_000, device="cuda") for _ in range(3)]
    found = []
    for overlap in (True, False):
        monkeypatch.setattr(indexer_topk, "OVERLAP", overlap)
        # behind one another, without a wait of the host
        found.append([launch(logits, row_lens, 2048) for logits in rows * 5])
    for early, late, logits in zip(*found, rows * 5, strict=True):
        assert_same_bits(early, late)
        assert_same_bits(early, reference(logits, row_lens, 2048))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "width"),
    [(60, 8192), (300, 8192), (60, 16_384), (300, 160 << 10), (8, 1 << 20)],
)
def test_topk_on_the_card_of_short_rows_of_each_kind_of_values(num_tokens: int, width: int) -> None:
    """Rows of half a chunk to a chunk and a few, in wider logits, none of which they may see."""
    kinds = list(VALUES.values())
    lens = torch.randint(2048, 4200, (num_tokens,))
    lens[:4] = torch.tensor([2048, 2049, 4096, 4097])
    logits = torch.full((num_tokens, width), INF)
    for row, row_len in enumerate(lens.tolist()):
        logits[row, :row_len] = kinds[row % len(kinds)](row_len)
        if row % 2:
            logits[row, row_len - 1] = LARGEST
    inputs = (logits.cuda(), lens.int().cuda())
    for topk in (2048, 512):
        assert_same_bits(launch(*inputs, topk), reference(*inputs, topk))
    half = (inputs[0].bfloat16(), inputs[1])
    assert_same_bits(launch(*half, 2048), reference(*half, 2048))


@pytest.mark.gpu
@each_values
def test_topk_on_the_card_of_each_kind_of_values(values: Callable[[int], Tensor]) -> None:
    sizes = [(4000, 512), (8192, 2048), (16384, 4096), (100_000, 512), (100_000, 2048)]
    for width, topk in [*sizes, (500_000, 2048), (100_000, 4096), (40_000, SCANNED_TOPK)]:
        logits = torch.stack([values(width), values(width)]).cuda()
        row_lens = int32([width, width - 7], "cuda")
        assert_same_bits(launch(logits, row_lens, topk), reference(logits, row_lens, topk))


@pytest.mark.gpu
def test_topk_on_the_card_of_random_rows(full: bool) -> None:
    """Every size of row and of topk, with values that tie, cluster or spread by chance."""
    kinds = list(VALUES.values())
    # each pair is compiled for: so few of them
    for _ in range(100 if full else 10):
        width = int(2 ** (7 + 11 * torch.rand(()))) + int(torch.randint(0, 5, ()))
        topk = int(2 ** (12.3 * torch.rand(())))
        for _ in range(4):
            num_tokens = int(torch.randint(1, 40, ()))
            chosen = torch.randint(0, len(kinds), (num_tokens,)).tolist()
            logits = torch.stack([kinds[kind](width) for kind in chosen]).cuda()
            row_lens = torch.randint(0, width + 1, (num_tokens,), dtype=torch.int32).cuda()
            row_lens[0] = width
            expected = reference(logits, row_lens, topk)
            assert_same_bits(launch(logits, row_lens, topk), expected)
            assert_same_bits(launch(logits, row_lens, topk), expected)


@pytest.mark.gpu
def test_topk_on_the_card_of_rows_whose_largest_lie_together() -> None:
    width, topk = 131_072, 2048
    logits = torch.randn(6, width, device="cuda")
    logits[0, -topk:] += 10
    logits[1, :topk] += 10
    logits[2, 7777 : 7777 + topk] += 10
    logits[3, ::64] += 10
    logits[4, 60::256] += 10
    row_lens = int32([width, width, width, width, width, topk + 1], "cuda")
    assert_same_bits(launch(logits, row_lens, topk), reference(logits, row_lens, topk))


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize(
    ("width", "topk"), [(8192, 2048), (50_000, 2048), (300_000, 4096), (30_000, SCANNED_TOPK)]
)
def test_topk_replays(width: int, topk: int, dtype: torch.dtype) -> None:
    inputs = [card_inputs(9, width, topk, seed) for seed in range(3)]
    assert_replays(ops.indexer_topk, [x | {"logits": x["logits"].to(dtype)} for x in inputs])


@pytest.mark.gpu
def test_topk_on_the_card_past_2_31_elements() -> None:
    inputs = card_inputs(3, 20_000, 2048)
    expected = launch(**inputs)
    inputs["logits"] = huge_rows(inputs["logits"])
    assert_same_bits(launch(**inputs), expected)
    inputs["topk"] = SCANNED_TOPK
    assert_same_bits(launch(**inputs), reference(**inputs))
