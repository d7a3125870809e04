"""The kernel for compute capability 9.0, which takes the shapes of the large models alone."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.kernels import _indexer_logits_hopper as hopper
from mtpgraph.kernels import indexer_logits
from mtpgraph.kernels.indexer_logits import launch

from ..helpers import BATCHES, assert_same_bits
from ..ops.test_indexer_logits import Case, make_inputs
from .gpu import assert_replays
from .test_indexer_logits import (
    FP8_ERROR,
    assert_rounded,
    assert_rows_equal_alone,
    assert_scores,
    card_inputs,
)

RAGGED = [1, 3, 2, 8, 0, 5, 4, 11, 6, 7]


Inputs = dict[str, Any]


def shape(
    dtype: torch.dtype = torch.float8_e4m3fn,
    num_heads: int = 64,
    head_dim: int = 128,
    block_size: int = 64,
    num_tokens: int = 3,
) -> Inputs:
    def meta(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    return {
        "q": meta(num_tokens, num_heads, head_dim, dtype=dtype),
        "weights": meta(num_tokens, num_heads, dtype=torch.float32),
        "k_cache": meta(4, block_size * (head_dim + 4), dtype=torch.uint8),
        "block_table": meta(2, 5),
        "query_start_loc": meta(3),
        "seq_lens": meta(2),
        "max_seq_len": 320,
    }


@pytest.fixture
def hopper_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "capability", lambda device: 90)


@pytest.mark.usefixtures("hopper_card")
def test_the_shapes_of_large_models_are_taken() -> None:
    assert hopper.supports(**shape())
    assert hopper.supports(**shape(num_heads=32))
    wider = torch.empty(2, 9, dtype=torch.int32, device="meta")[:, :5]
    assert hopper.supports(**shape() | {"block_table": wider})


@pytest.mark.usefixtures("hopper_card")
@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.bfloat16},
        {"num_heads": 16},
        {"num_heads": 128},
        {"head_dim": 64},
        {"block_size": 32},
        {"block_size": 128},
    ],
    ids=str,
)
def test_other_shapes_are_not(other: dict[str, Any]) -> None:
    assert not hopper.supports(**shape(**other))


@pytest.mark.usefixtures("hopper_card")
@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_strided_inputs_are_not(num_tokens: int) -> None:
    """Whatever their number of tokens: torch calls a tensor of one contiguous."""
    inputs = shape(num_tokens=num_tokens)

    def spread(name: str, *strides: int) -> Inputs:
        tensor = inputs[name]
        other = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
        return inputs | {name: other}

    assert hopper.supports(**inputs)
    assert not hopper.supports(**spread("q", 96 * 128, 128, 1))
    assert not hopper.supports(**spread("q", 64 * 144, 144, 1))
    assert not hopper.supports(**spread("q", 64 * 128, 1, 64))
    assert not hopper.supports(**spread("weights", 72, 1))
    assert not hopper.supports(**spread("weights", 1, num_tokens + 1))
    assert not hopper.supports(**spread("k_cache", 8448 + 64, 1))
    assert not hopper.supports(**spread("k_cache", 8448 - 128, 1))
    assert not hopper.supports(**spread("k_cache", 2 * 8448, 2))
    assert not hopper.supports(**spread("block_table", 1, 2))
    assert not hopper.supports(**spread("query_start_loc", 2))
    assert not hopper.supports(**spread("seq_lens", 2))


@pytest.mark.usefixtures("hopper_card")
@pytest.mark.parametrize("page", [8448 + 128, 2 * 8448, 1 << 20])
def test_blocks_that_are_views_into_pages_are_taken(page: int) -> None:
    pool = torch.empty(4, page, dtype=torch.uint8, device="meta")
    assert hopper.supports(**shape() | {"k_cache": pool[:, 128 : 128 + 8448]})


@pytest.mark.usefixtures("hopper_card")
def test_more_than_the_copy_engine_can_number_is_not() -> None:
    inputs = shape()
    assert not hopper.supports(**inputs | {"k_cache": inputs["k_cache"][:0]})
    for num_blocks, taken in [(2**31 // 66, True), (2**31 // 66 + 1, False)]:
        pool = torch.empty(num_blocks, 8448, dtype=torch.uint8, device="meta")
        assert hopper.supports(**inputs | {"k_cache": pool}) == taken
    for num_pages, taken in [(2**31 // 132, True), (2**31 // 132 + 1, False)]:
        pages = torch.empty(num_pages, 2, 8448, dtype=torch.uint8, device="meta")
        assert hopper.supports(**inputs | {"k_cache": pages[:, 1]}) == taken
    for num_tokens, taken in [(2**25 - 9, True), (2**25 - 8, False)]:
        assert hopper.supports(**shape(num_tokens=num_tokens)) == taken


@pytest.mark.usefixtures("hopper_card")
def test_rows_with_columns_past_int32_are_not() -> None:
    for max_seq_len, taken in [(2**31 - 640, True), (2**31 - 639, False)]:
        assert hopper.supports(**shape() | {"max_seq_len": max_seq_len}) == taken


@pytest.mark.usefixtures("hopper_card")
@pytest.mark.parametrize("name", ["q", "weights", "k_cache"])
def test_memory_off_16_bytes_is_not(name: str) -> None:
    inputs = shape()
    for key in ("q", "weights", "k_cache"):
        like = inputs[key]
        flat = torch.zeros(like.numel() + 32, dtype=torch.uint8 if like.itemsize == 1 else None)
        begin = 16 // like.itemsize + (key == name)
        inputs[key] = flat[begin:][: like.numel()].view(like.dtype).view(like.shape)
        assert inputs[key].stride() == like.stride()
    assert not hopper.supports(**inputs)
    tensor = inputs[name]
    inputs[name] = tensor.clone()
    assert hopper.supports(**inputs)


@pytest.mark.parametrize("card", [80, 89, 100, 120])
def test_other_cards_do_not_take_it(card: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "capability", lambda device: card)
    assert not hopper.supports(**shape())


def counts_in_int64(num_tokens: int, num_reqs: int, max_seq_len: int) -> bool:
    """Whether a launch of such a batch counts work in int64."""
    given: list[bool] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *args, **options: given.append(options["WIDE"])

    inputs = shape(num_tokens=num_tokens) | {"max_seq_len": max_seq_len}
    inputs["seq_lens"] = torch.empty(num_reqs, dtype=torch.int32, device="meta")
    logits = torch.empty(num_tokens, max_seq_len, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "indexer_logits_hopper_kernel", Kernel())
        patch.setattr(hopper, "num_sms", lambda device: 132)
        patch.setattr(hopper, "_descriptors", lambda *tensors: ())
        hopper.score_keys(**inputs, logits=logits, row_lens=None, min_keys=0)
    return given[0]


@pytest.mark.parametrize(("num_tokens", "num_reqs"), [(512, 512), (1024, 256), (3000, 1)])
def test_work_that_int32_cannot_count_is_counted_in_int64(num_tokens: int, num_reqs: int) -> None:
    """In halves of a row: two a row of a tile, and at most four for its keys; every request may
    claim all rows, as nothing says that theirs differ."""
    of_a_tile = num_reqs * (2 * num_tokens + 4)
    max_seq_len = (2**31 - 1) // of_a_tile * 128
    assert not counts_in_int64(num_tokens, num_reqs, max_seq_len // 3)
    assert counts_in_int64(num_tokens, num_reqs, max_seq_len + 1)
    assert counts_in_int64(num_tokens, num_reqs, 2 * max_seq_len)


@pytest.fixture(params=["each warp", "all warps"])
def finders_of_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each warp finds the run of few requests, all together that of more: both get to do it."""
    if request.param == "all warps":
        monkeypatch.setattr(hopper, "WARP_REQUESTS", -1)


def small(case: Case, num_heads: int = 64) -> dict[str, Any]:
    inputs, _, _ = make_inputs(
        case,
        dtype=torch.float8_e4m3fn,
        num_heads=num_heads,
        head_dim=128,
        block_size=64,
        device="cuda",
    )
    return inputs


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "finders_of_runs")
@pytest.mark.parametrize("num_heads", [32, 64])
@pytest.mark.parametrize("case", BATCHES.values(), ids=BATCHES.keys())
def test_hopper_logits_of_every_batch(case: Case, num_heads: int) -> None:
    inputs = small(case, num_heads)
    assert_scores(inputs, FP8_ERROR)
    assert_rounded(inputs)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("num_heads", [32, 64])
@pytest.mark.parametrize(
    ("query_lens", "longest"),
    [([n] * 5, 9000) for n in range(1, 9)]
    + [([1], 60_000), ([1, 2] * 300, 300), (RAGGED, 4000), ([70, 1, 33], 2000)]
    # the first requests without work, and as many as are looked at in one go, and one more
    + [([0] * 256 + [1], 300), ([0] * 300 + [2] * 40, 500), ([1] * 256, 200), ([1] * 257, 200)]
    + [([0] * 63 + [2], 300), ([1] * 64, 200), ([0] * 64 + [3], 300), ([1] * 65, 200)],
)
def test_hopper_logits_equal_float64(query_lens: list[int], longest: int, num_heads: int) -> None:
    inputs = card_inputs(query_lens, longest, num_heads=num_heads)
    assert_scores(inputs, FP8_ERROR)
    assert_rounded(inputs)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "finders_of_runs")
@pytest.mark.parametrize("num_heads", [32, 64])
@pytest.mark.parametrize("query_lens", [RAGGED, [1, 3, 4, 2, 0, 4], [1, 1, 9, 0, 1, 2, 1]], ids=str)
def test_hopper_logits_do_not_depend_on_the_batch(
    query_lens: list[int], num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the number of programs, nor on how many rows go together."""
    inputs = card_inputs(query_lens, 3000, num_heads=num_heads)
    assert_rows_equal_alone(inputs)
    expected = launch(**inputs)
    for _ in range(5):
        assert_same_bits(launch(**inputs), expected)
    for programs in (1, 3, 50):
        monkeypatch.setattr(hopper, "num_sms", lambda device, count=programs: count)
        assert_same_bits(launch(**inputs), expected)
    for rows, slots in [(8, 1), (3, 2), (4, 2), (1, 1)]:
        monkeypatch.setattr(hopper, "MAX_ROWS", rows)
        monkeypatch.setattr(hopper, "MAX_ROWS_SLOTS", slots)
        assert_same_bits(launch(**inputs), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "finders_of_runs")
@pytest.mark.parametrize("query_lens", [RAGGED, [1] * 100, [1, 2] * 200], ids=len)
def test_hopper_logits_do_not_depend_on_how_work_is_counted(
    query_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = card_inputs(query_lens, 1000)
    expected = launch(**inputs)
    monkeypatch.setattr(hopper, "MAX_INT32", 0)
    assert_same_bits(launch(**inputs), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("query_lens", [RAGGED, [1] * 64, [70, 1, 33]], ids=len)
def test_hopper_logits_do_not_depend_on_who_finds_the_runs(
    query_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = card_inputs(query_lens, 1000)
    expected = launch(**inputs)
    monkeypatch.setattr(hopper, "WARP_REQUESTS", -1)
    assert_same_bits(launch(**inputs), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("query_lens", [[4], [1, 2] * 20, [1, 2] * 40], ids=len)
def test_hopper_logits_are_the_same_each_time(query_lens: list[int]) -> None:
    """A missing barrier shows once in some dozens of launches."""
    inputs = card_inputs(query_lens, 100_000 // len(query_lens))
    expected = launch(**inputs).view(torch.int32)
    differ = [(launch(**inputs).view(torch.int32) != expected).any() for _ in range(400)]
    assert not torch.stack(differ).any()


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("max_seq_len", [1, 63, 64, 65, 127, 129, 640, 1500])
def test_hopper_logits_max_seq_len_cuts_and_widens(max_seq_len: int) -> None:
    inputs = card_inputs(RAGGED, 1000)
    blocks = torch.full((len(RAGGED), 8), -7, dtype=torch.int32, device="cuda")
    inputs["block_table"] = torch.cat([inputs["block_table"], blocks], dim=1)
    assert_scores(inputs | {"max_seq_len": max_seq_len}, FP8_ERROR)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("bad", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_hopper_logits_of_an_invalid_block(bad: int) -> None:
    inputs = card_inputs(RAGGED, 1000)
    for column in (0, 3, 15):
        inputs["block_table"][0, column] = bad
    inputs["block_table"][6] = bad
    # what is read in their stead must not show
    inputs["k_cache"][0] = 0xFF
    inputs["block_table"][inputs["block_table"] == 0] = 1
    assert_scores(inputs, FP8_ERROR)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_hopper_logits_of_nan_keys_and_scales() -> None:
    inputs = card_inputs(RAGGED, 1000)
    block = int(inputs["block_table"][0, 2])
    inputs["k_cache"][block, 5 * 128 + 7] = 0x7F
    inputs["k_cache"][block, 8192 + 9 * 4 : 8192 + 10 * 4] = 0xFF
    inputs["weights"][0] = 0
    actual = launch(**inputs)
    assert actual[0, 2 * 64 + 5].isnan()
    assert actual[0, 2 * 64 + 9].isnan()
    assert int(actual.isnan().sum()) == 2
    assert_scores(inputs, FP8_ERROR)


@pytest.mark.gpu
def test_strided_inputs_on_hopper() -> None:
    """They go to the portable kernel."""
    inputs = card_inputs(RAGGED, 1000)
    pool = torch.full((inputs["k_cache"].shape[0], 8512), 0xFF, dtype=torch.uint8, device="cuda")
    pool[:, 64:] = inputs["k_cache"]
    strided = {
        "k_cache": pool[:, 64:],
        "block_table": inputs["block_table"].t().contiguous().t(),
        "query_start_loc": inputs["query_start_loc"].repeat_interleave(2)[::2],
        "seq_lens": inputs["seq_lens"].repeat_interleave(2)[::2],
    }
    for name, tensor in strided.items():
        assert_scores(inputs | {name: tensor}, FP8_ERROR)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "finders_of_runs")
@pytest.mark.parametrize(
    ("starts", "shared"),
    [
        ([0, 5, 2, 9], True),
        ([3, 4, 6, 7], False),
        ([0, 0, 0, 0], False),
        ([-2, 4, 300, 9], False),
        ([9, 5, 2, 0], False),
    ],
)
def test_hopper_logits_of_malformed_starts(
    starts: list[int], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the portable kernel, where no row is of two requests; and never outside."""
    inputs = card_inputs([3, 3, 3], 500)
    inputs["query_start_loc"] = torch.tensor(starts, dtype=torch.int32, device="cuda")
    guarded = torch.full((11, 500), 7.0, device="cuda")
    logits = guarded[1:10]
    indexer_logits.score_keys(*inputs.values(), logits, None, 0)
    torch.cuda.synchronize()
    assert bool((guarded[0] == 7).all())
    assert bool((guarded[10] == 7).all())
    assert not bool((logits == 7).any())
    if not shared:
        monkeypatch.setattr(hopper, "supports", lambda *tensors: False)
        torch.testing.assert_close(logits, launch(**inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "finders_of_runs")
@pytest.mark.parametrize("length", [-1, -5, -(2**31)])
def test_hopper_logits_of_a_negative_seq_len(length: int) -> None:
    inputs = card_inputs([2, 3], 500)
    inputs["seq_lens"][1] = length
    actual = launch(**inputs)
    assert bool((actual[2:] == float("-inf")).all())


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_hopper_logits_replay() -> None:
    query_lens = [[1, 3, 2, 8], [4, 4, 3, 3], [0, 14, 0, 0]]
    inputs = [card_inputs(lens, 2000, seed=seed) for seed, lens in enumerate(query_lens)]
    assert_replays(ops.indexer_logits, inputs)
    assert_replays(functools.partial(ops.indexer_logits, logits_dtype=torch.bfloat16), inputs)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "finders_of_runs")
@pytest.mark.parametrize("topk", [1, 64, 2048])
@pytest.mark.parametrize("num_heads", [32, 64])
def test_hopper_select_equals_logits_and_topk(num_heads: int, topk: int) -> None:
    """With what a batch may have: padding, requests without tokens, none at all."""
    large = card_inputs(RAGGED, 3000, num_heads=num_heads)
    for inputs in [large, *(small(case, num_heads) for case in BATCHES.values())]:
        lens = (inputs["query_start_loc"], inputs["seq_lens"])
        row_lens = ops.flatten_decode(*lens, inputs["q"].shape[0])[0]
        expected = ops.indexer_topk(ops.indexer_logits(**inputs), row_lens, topk)
        assert torch.equal(ops.indexer_select(**inputs, topk=topk), expected)


def pages_of(k_cache: Tensor, num_pages: int, page: int) -> Tensor:
    """The same blocks in pages of ``page`` bytes, 128 in, among NaN."""
    pages = torch.full((num_pages, page), 0xFF, dtype=torch.uint8, device="cuda")
    pages[: len(k_cache), 128 : 128 + 8448] = k_cache
    return pages[:, 128 : 128 + 8448]


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("page", [8448 + 128, 5 * 8448, 1 << 20])
def test_hopper_logits_of_blocks_in_pages(page: int) -> None:
    inputs = card_inputs(RAGGED, 1000)
    paged = inputs | {"k_cache": pages_of(inputs["k_cache"], len(inputs["k_cache"]), page)}
    assert_same_bits(launch(**paged), launch(**inputs))
    selected = ops.indexer_select(**paged, topk=64)
    assert_same_bits(selected, ops.indexer_select(**inputs, topk=64))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_hopper_logits_of_pages_past_2_31_bytes() -> None:
    inputs = card_inputs([2], 200)
    page = 1 << 20
    pages = pages_of(inputs["k_cache"], 2**31 // page + len(inputs["k_cache"]), page)
    far = pages.shape[0] - len(inputs["k_cache"])
    pages[far:] = inputs["k_cache"]
    paged = inputs | {"k_cache": pages, "block_table": inputs["block_table"] + far}
    assert_same_bits(launch(**paged), launch(**inputs))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_hopper_logits_past_2_31_bytes() -> None:
    """A block far behind, and logits of more than 2**31 elements."""
    inputs = card_inputs([2], 200)
    expected = launch(**inputs)
    huge = torch.empty(2**31 // 8448 + 4, 8448, dtype=torch.uint8, device="cuda")
    table = inputs["block_table"].long() + huge.shape[0] - 4
    huge[table[0]] = inputs["k_cache"][inputs["block_table"][0].long()]
    far = inputs | {"k_cache": huge, "block_table": table.int()}
    assert_same_bits(launch(**far), expected)

    many = card_inputs([1] * 2200, 130)
    short = launch(**many)
    many["block_table"] = torch.nn.functional.pad(many["block_table"], (0, 2**20 // 64))
    wide = launch(**many | {"max_seq_len": 2**20})
    assert_same_bits(wide[:, :130].contiguous(), short)
    assert bool((wide[-1, 130:] == float("-inf")).all())
    assert bool((wide[1100, 130:] == float("-inf")).all())
    del wide
    wide = launch(**many | {"max_seq_len": 2**20}, logits_dtype=torch.bfloat16)
    assert_same_bits(wide[:, :130].contiguous(), short.bfloat16())
    assert bool((wide[-1, 130:] == float("-inf")).all())


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_hopper_select_past_2_31_elements_of_logits() -> None:
    inputs = {**card_inputs([1] * 2200, 130), "topk": 64}
    expected = ops.indexer_select(**inputs)
    inputs["block_table"] = torch.nn.functional.pad(inputs["block_table"], (0, 2**20 // 64))
    inputs["max_seq_len"] = 2**20
    assert torch.equal(ops.indexer_select(**inputs), expected)


@pytest.mark.gpu
def test_the_portable_kernel_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """It still serves whatever the other does not take."""
    monkeypatch.setattr(hopper, "supports", lambda *tensors: False)
    inputs = card_inputs([5, 8, 6, 1, 7, 11], 900)
    expected = launch(**inputs)
    assert_scores(inputs, FP8_ERROR)
    monkeypatch.setattr(indexer_logits, "L2_BYTES", 0)
    assert_same_bits(launch(**inputs), expected)
    assert_rows_equal_alone(card_inputs([1, 4, 0, 7, 2], 700))
