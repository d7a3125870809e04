"""The kernels of the sparse-attention path on batches and sizes that hypothesis draws.

In the interpreter all sizes are free. On the card, which compiles for each of them, they come from
short lists, and the kernels of compute capability 9.0 have tests of their own, with the sizes that
they take. A failure prints what was drawn, the seed of all numbers included.
"""

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtpgraph.kernels import (
    _indexer_logits_hopper,
    _shared_keys,
    _topk_plan,
    indexer_logits,
    indexer_topk,
    sparse_mla_decode,
    topk_to_slots,
)
from mtpgraph.ops._index_cache import code_bytes, scale_bytes
from mtpgraph.ops.indexer_topk import largest_positions

from ..helpers import assert_same_bits, make_batch, nan_pool
from ..malformed_lens import MAX, MIN
from ..ops.test_indexer_logits import DTYPES, Case
from ..ops.test_indexer_logits import make_inputs as make_index_inputs
from ..ops.test_sparse_mla_decode import DTYPES as ATTENTION_DTYPES
from ..ops.test_sparse_mla_decode import fp8_keys
from ..ops.test_sparse_mla_decode import make_inputs as make_attention_inputs
from .test_indexer_logits import (
    FP8_ERROR,
    FP32_ERROR,
    assert_rounded,
    assert_scores,
    card_inputs,
    error_on_the_card,
)
from .test_indexer_select import assert_equals_two_launches
from .test_indexer_topk import VALUES, assert_equals_sort, int32
from .test_indexer_topk import small_blocks as small_blocks
from .test_sparse_mla_decode import (
    assert_equals_float64,
    assert_equals_reference64,
    assert_shares,
)
from .test_topk_to_slots import assert_equals_loops

# As in the tests of indexer_topk: infinities in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

ON_THE_CARD = torch.cuda.is_available()
Sizes = dict[str, Any]
CheckDraws = Callable[..., None]

each_cache = pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])


def examples(count: int, *phases: Phase) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases,
        suppress_health_check=[HealthCheck.too_slow],
    )


@pytest.fixture
def check_draws(seed: int, full: bool) -> CheckDraws:
    """Calls a check with ``few`` draws of each strategy, ``many`` under ``--full``; each run the
    same ones.

    Not with more than ten of a seed: later ones hypothesis makes of those. What fails is made
    smaller in the interpreter alone: a card would compile for each attempt, and after an illegal
    access all of them fail.
    """
    phases = [Phase.generate] if ON_THE_CARD else [Phase.generate, Phase.shrink]

    def run(check: Callable[..., None], few: int, many: int, *strategies: Any) -> None:
        count = many if full else few
        for first in range(0, count, 10):
            some = examples(min(count - first, 10), *phases)(given(*strategies)(check))
            hypothesis.seed(seed + first)(some)()

    return run


def of_sizes(few: list[Sizes], free: st.SearchStrategy[Sizes]) -> st.SearchStrategy[Sizes]:
    """On the card one of ``few``."""
    return st.sampled_from(few) if ON_THE_CARD else free


@st.composite
def cases(
    draw: st.DrawFn,
    max_reqs: int = 4,
    max_query_len: int = 5,
    max_seq_len: int = 40,
    min_reqs: int = 1,
) -> Case:
    """query_lens, seq_lens, trailing tokens."""
    query_lens, seq_lens = [], []
    for _ in range(draw(st.integers(min_reqs, max_reqs))):
        query_lens.append(draw(st.integers(0, max_query_len)))
        longest = draw(st.sampled_from([0, max_query_len, *[max_seq_len] * 3]))
        seq_lens.append(draw(st.integers(min(longest, 1), longest)))
    return query_lens, seq_lens, draw(st.integers(0, 4))


def repeated(case: Case, times: int) -> Case:
    """``times`` as many requests."""
    return case[0] * times, case[1] * times, case[2]


seeds = st.integers(0, MAX)

KINDS: dict[str, Callable[[int, int], bool]] = {
    "padding with tokens": lambda query_len, seq_len: query_len > 0 == seq_len,
    "padding without tokens": lambda query_len, seq_len: query_len == 0 == seq_len,
    "keys without tokens": lambda query_len, seq_len: query_len == 0 < seq_len,
    "new": lambda query_len, seq_len: query_len == seq_len > 0,
    "shorter than its query": lambda query_len, seq_len: 0 < seq_len < query_len,
    "with a past": lambda query_len, seq_len: 0 < query_len < seq_len,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_request_is_drawn(kind: Callable[[int, int], bool]) -> None:
    """Among others, behind the first one, and with tokens behind it."""

    def has(case: Case) -> bool:
        kinds = [kind(*row) for row in zip(*case[:2], strict=True)]
        return any(kinds[1:]) and not all(kinds) and case[2] > 0

    hypothesis.find(cases(), has, settings=examples(500, Phase.generate))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """One program, and tiles of 16 keys, so that a short row has several; not on the card."""
    if device == "cpu":
        monkeypatch.setattr(indexer_logits, "num_sms", lambda device: 1)
        monkeypatch.setattr(indexer_logits, "TILE", 16)
        monkeypatch.setattr(indexer_logits, "BLOCK_COLUMNS", 32)
        monkeypatch.setattr(topk_to_slots, "BLOCK", 8)
        monkeypatch.setattr(sparse_mla_decode, "_blocks", lambda *sizes: (16, 16, 1))
        monkeypatch.setattr(sparse_mla_decode, "BLOCK_SCAN", 16)


def up_to(first: int, most: int) -> st.SearchStrategy[int]:
    """Every other one is near the most, which takes several parts of a kernel's block."""
    return st.one_of(st.integers(first, most), st.integers(most - 5, most))


def index_sizes(max_heads: int, max_dim: int) -> st.SearchStrategy[Sizes]:
    """The codes of a block end where a scale of 4 bytes may stand."""
    free = st.fixed_dictionaries(
        {
            "num_heads": up_to(0, max_heads),
            "head_dim": up_to(1, max_dim),
            "block_size": st.one_of(st.integers(1, 20), st.sampled_from([16, 32, 64])),
        }
    ).filter(lambda sizes: sizes["head_dim"] * sizes["block_size"] % 4 == 0)
    few = [
        {"num_heads": 3, "head_dim": 8, "block_size": 4},
        {"num_heads": 20, "head_dim": 64, "block_size": 16},
        {"num_heads": 70, "head_dim": 36, "block_size": 9},
    ]
    return of_sizes(few, free)


def draw_max_seq_len(data: st.DataObject, inputs: dict[str, Any], block_size: int) -> None:
    """As it is, or one that cuts rows or widens them, up to the columns of the table."""
    if data.draw(st.booleans(), label="another max_seq_len"):
        most = inputs["block_table"].shape[1] * block_size
        inputs["max_seq_len"] = data.draw(st.integers(1, most), label="max_seq_len")


def test_logits_of_random_shapes(check_draws: CheckDraws, device: str) -> None:
    def check(case: Case, sizes: Sizes, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
        torch.manual_seed(seed)
        inputs, _, _ = make_index_inputs(case, dtype=dtype, device=device, **sizes)
        draw_max_seq_len(data, inputs, sizes["block_size"])
        assert_scores(inputs, error_on_the_card(dtype) if ON_THE_CARD else FP32_ERROR)
        if data.draw(st.booleans(), label="in bf16 too"):
            assert_rounded(inputs)

    check_draws(
        check,
        7,
        300,
        cases(max_reqs=3, max_query_len=4),
        index_sizes(70, 140),
        st.sampled_from(DTYPES),
        seeds,
        st.data(),
    )


def test_select_of_random_shapes(check_draws: CheckDraws, device: str) -> None:
    batches = cases() if ON_THE_CARD else cases(max_reqs=2, max_query_len=3)

    def check(case: Case, sizes: Sizes, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
        torch.manual_seed(seed)
        inputs, _, _ = make_index_inputs(case, dtype=dtype, device=device, **sizes)
        draw_max_seq_len(data, inputs, sizes["block_size"])
        most = max(3, min(inputs["max_seq_len"], max([0, *case[1]])))
        all_but_one, about = st.just(most - 1), st.integers(most - 2, most + 1)
        topk = data.draw(st.one_of(st.integers(1, 9), all_but_one, about), label="topk")
        assert_equals_two_launches({**inputs, "topk": topk})

    check_draws(
        check,
        10,
        100,
        batches,
        index_sizes(20, 40),
        st.sampled_from(DTYPES),
        seeds,
        st.data(),
    )


@st.composite
def kinds_and_lens(
    draw: st.DrawFn, max_rows: int, width: int, topk: int
) -> tuple[list[str], list[int]]:
    """Of each row the kind of its values and its length: the first has more than ``topk`` keys, if
    it can, and the lengths of others may lie outside of 0 .. width."""
    longer = st.one_of(st.just(width), st.integers(min(topk + 1, width), width))
    lens = st.one_of(st.integers(-1, width + 1), longer, st.sampled_from([MIN, MAX]))
    row_lens = [draw(longer), *draw(st.lists(lens, max_size=max_rows - 1))]
    return [draw(st.sampled_from(list(VALUES))) for _ in row_lens], row_lens


def rows_of(
    kinds: list[str], row_lens: list[int], width: int, gap: int, dtype: torch.dtype
) -> Tensor:
    """Rows of these kinds of values, and infinities behind each, ``gap`` past its last column."""
    rows = torch.full((len(kinds), width + gap), float("inf"))
    for row, kind, row_len in zip(rows, kinds, row_lens, strict=True):
        row_len = max(0, min(row_len, width))
        row[:row_len] = VALUES[kind](max(width, 2))[:row_len]
    return rows.to(dtype)


# The widths and topk of each way to select, with ``small_blocks``.
WAYS = {
    "in one block": st.tuples(st.integers(0, 128), st.integers(1, 64)),
    "behind a filter": st.tuples(
        st.one_of(st.integers(129, 512), st.integers(513, 700)), st.integers(1, 100)
    ),
    "by a scan": st.tuples(st.integers(200, 700), st.integers(152, 199)),
}
ROW_DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def way_to_select(num_tokens: int, width: int, topk: int) -> str:
    plan = _topk_plan.plan(num_tokens, width, topk, 132)
    if plan is None:
        return "by a scan"
    return "behind a filter" if plan.chunk else "in one block"


@pytest.mark.skipif(ON_THE_CARD, reason="each example would be compiled")
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("way", WAYS)
def test_topk_of_random_shapes(way: str, check_draws: CheckDraws) -> None:
    def check(
        shape: tuple[int, int], gap: int, dtype: torch.dtype, seed: int, data: st.DataObject
    ) -> None:
        width, topk = shape
        kinds, row_lens = data.draw(kinds_and_lens(2, width, topk), label="rows")
        assert way_to_select(len(kinds), width, topk) == way
        torch.manual_seed(seed)
        logits = rows_of(kinds, row_lens, width, gap, dtype)[:, :width]
        assert_equals_sort(logits, int32(row_lens, "cpu"), topk)

    check_draws(check, 5, 100, WAYS[way], st.integers(0, 5), ROW_DTYPES, seeds, st.data())


def test_topk_to_slots_of_random_shapes(check_draws: CheckDraws, device: str) -> None:
    """Indices at either end of the table, in it, and any at all."""
    free = st.one_of(st.integers(1, 70), st.integers(1, 2**31))
    block_sizes = st.sampled_from([1, 7, 16, 64]) if ON_THE_CARD else free

    def check(case: Case, topk: int, block_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        batch = make_batch(*case[:2], block_size, trailing=case[2], device=device)
        end = min(batch.block_table.shape[1] * block_size, MAX - 3)
        shape = (batch.num_tokens, topk)
        bounds = [(-3, 4), (end - 3, end + 4), (0, end), (MIN, MAX)]
        indices = torch.stack([torch.randint(*each, shape) for each in bounds])
        indices = indices.gather(0, torch.randint(len(bounds), (1, *shape)))[0]
        assert_equals_loops(
            {
                "topk_indices": indices.to(device, torch.int32),
                "block_table": batch.block_table,
                "row_requests": batch.row_requests,
                "block_size": block_size,
            }
        )

    check_draws(
        check, 24, 500, cases(max_reqs=6, min_reqs=0), st.integers(0, 30), block_sizes, seeds
    )


def attention_sizes(fp8: bool) -> st.SearchStrategy[Sizes]:
    """An fp8 cache has latents in groups of 128, and keys in words of 4 bytes."""
    unit, word = (128, 2) if fp8 else (1, 1)
    dims = st.tuples(st.integers(1, 3 if fp8 else 40), st.integers(0, 20 // word)).map(
        lambda dims: {
            "latent_dim": unit * dims[0],
            "head_dim": unit * dims[0] + word * dims[1],
        }
    )
    others = st.fixed_dictionaries({"num_heads": up_to(1, 20), "block_size": st.integers(1, 20)})
    few: list[Sizes] = [
        {"num_heads": 3, "head_dim": 140, "latent_dim": 128, "block_size": 4},
        {"num_heads": 17, "head_dim": 288, "latent_dim": 256, "block_size": 16},
    ]
    if not fp8:
        few.append({"num_heads": 5, "head_dim": 12, "latent_dim": 9, "block_size": 3})
    return of_sizes(few, st.builds(dict.__or__, dims, others))


def misuse_trailing_tokens(inputs: dict[str, Any]) -> None:
    """They have queries of NaN, and say that they selected keys; the result is that of padding."""
    end = int(inputs["query_start_loc"][-1])
    inputs["q"][end:] = float("nan")
    inputs["topk_indices"][end:] = 0


@each_cache
def test_attention_of_random_shapes(fp8: bool, check_draws: CheckDraws, device: str) -> None:
    """In the interpreter with rows in one part, or in parts of one tile or two."""

    def check(
        case: Case, topk: int, sizes: Sizes, dtype: torch.dtype, tiles: int, seed: int
    ) -> None:
        torch.manual_seed(seed)
        inputs, _ = make_attention_inputs(
            case, topk=topk, dtype=dtype, fp8=fp8, device=device, **sizes
        )
        misuse_trailing_tokens(inputs)
        with pytest.MonkeyPatch.context() as patch:
            if not ON_THE_CARD:
                split = (-(-topk // (16 * tiles)), 16 * tiles)
                patch.setattr(sparse_mla_decode, "_splits", lambda *sizes: split)
            assert_equals_float64(inputs)

    check_draws(
        check,
        7,
        150,
        cases(max_reqs=3, max_query_len=4),
        st.integers(1, 40),
        attention_sizes(fp8),
        st.sampled_from(ATTENTION_DTYPES),
        st.sampled_from([1, 2, 64]),
        seeds,
    )


def hopper_index_inputs(case: Case, num_heads: int, seed: int) -> dict[str, Any]:
    """Those of ``card_inputs`` with the lengths of ``case``: keys that no request has are NaN, and
    entries of blocks that no key needs are garbage."""
    query_lens, seq_lens, trailing = case
    # As many columns for all batches: fewer strides to compile for.
    inputs = card_inputs([*query_lens, trailing], 1024, num_heads=num_heads, seed=seed)
    lens = int32([*seq_lens, 0], "cuda")
    k_cache, table = inputs["k_cache"], inputs["block_table"]
    positions = torch.arange(1024, device="cuda")
    request, position = (positions >= lens.unsqueeze(1)).nonzero(as_tuple=True)
    unknown = (table[request, position // 64].long(), position % 64)
    code_bytes(k_cache, 128)[unknown] = 0xFF
    scale_bytes(k_cache, 128)[unknown] = 0xFF
    garbage = int32([-1, MAX, MIN, len(k_cache)] * 4, "cuda")
    table = torch.where(positions[::64] < lens.unsqueeze(1), table, garbage)
    # The last request stood for the trailing tokens.
    return {
        **inputs,
        "block_table": table[:-1],
        "query_start_loc": inputs["query_start_loc"][:-1],
        "seq_lens": lens[:-1],
        "max_seq_len": max([1, *seq_lens]),
    }


large_cases = st.builds(
    repeated,
    cases(max_reqs=6, max_query_len=12, max_seq_len=900, min_reqs=0),
    st.sampled_from([1, 1, 1, 5, 60]),
)
hopper_heads = st.sampled_from([32, 64])


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_hopper_logits_of_random_shapes(check_draws: CheckDraws) -> None:
    """Of any number of programs, whether each warp finds its run or all together."""
    hopper = _indexer_logits_hopper
    warp_requests = st.sampled_from([hopper.WARP_REQUESTS, -1])

    def check(
        case: Case,
        num_heads: int,
        warp_requests: int,
        programs: int,
        seed: int,
        data: st.DataObject,
    ) -> None:
        inputs = hopper_index_inputs(case, num_heads, seed)
        draw_max_seq_len(data, inputs, 64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hopper, "WARP_REQUESTS", warp_requests)
            patch.setattr(hopper, "num_sms", lambda device: programs)
            assert_scores(inputs, FP8_ERROR)
            if data.draw(st.booleans(), label="in bf16 too"):
                assert_rounded(inputs)

    check_draws(
        check,
        20,
        200,
        large_cases,
        hopper_heads,
        warp_requests,
        st.sampled_from([132, 132, 1, 7]),
        seeds,
        st.data(),
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_hopper_select_of_random_shapes(check_draws: CheckDraws) -> None:
    def check(case: Case, num_heads: int, topk: int, seed: int, data: st.DataObject) -> None:
        inputs = hopper_index_inputs(case, num_heads, seed)
        draw_max_seq_len(data, inputs, 64)
        assert_equals_two_launches({**inputs, "topk": topk})

    check_draws(
        check,
        10,
        200,
        large_cases,
        hopper_heads,
        st.sampled_from([64, 512, 2048]),
        seeds,
        st.data(),
    )


# The width and topk of each way to select; each is compiled for.
CARD_SHAPES = {
    "in one block": [(130, 64), (4096, 2048), (16_383, 700)],
    "behind a filter": [(16_385, 1), (33_001, 512), (131_072, 4096), (300_003, 2048)],
    "by a scan": [(30_000, 12_500)],
}


@pytest.mark.parametrize("way", WAYS)
def test_topk_on_the_card_is_of_each_way(way: str) -> None:
    for width, topk in CARD_SHAPES[way]:
        for num_tokens in (1, 200):
            assert way_to_select(num_tokens, width, topk) == way


@pytest.mark.gpu
def test_topk_on_the_card_of_random_shapes(check_draws: CheckDraws) -> None:
    def check(
        shape: tuple[int, int],
        gap: int,
        dtype: torch.dtype,
        times: int,
        seed: int,
        data: st.DataObject,
    ) -> None:
        width, topk = shape
        kinds, row_lens = data.draw(kinds_and_lens(5, width, topk), label="rows")
        torch.manual_seed(seed)
        wide = rows_of(kinds, row_lens, width, gap, dtype).cuda()
        logits = wide.repeat(times, 1)[:, :width]
        lens = int32(row_lens * times, "cuda")
        expected = largest_positions(logits, lens, topk)
        for _ in range(2):
            assert_same_bits(indexer_topk.launch(logits, lens, topk), expected)

    check_draws(
        check,
        10,
        300,
        st.sampled_from([shape for shapes in CARD_SHAPES.values() for shape in shapes]),
        st.sampled_from([0, 16]),
        ROW_DTYPES,
        st.sampled_from([1, 1, 4, 40]),
        seeds,
        st.data(),
    )


def hopper_attention_inputs(
    case: Case, num_heads: int, topk: int, common: float, seed: int, fp8: bool
) -> dict[str, Any]:
    """Rows select keys that they see, in any order, with -1 between them, and first of all
    ``common`` of those that the first row of their request has. Other keys are NaN."""
    torch.manual_seed(seed)
    # A multiple of 16 columns: fewer strides to compile for.
    columns = -(-max([0, *case[1]]) // 64)
    batch = make_batch(
        *case[:2], 64, trailing=case[2], extra_columns=16 - columns % 16, device="cuda"
    )
    dtype, width = (torch.uint8, 656) if fp8 else (torch.bfloat16, 576)
    kv_cache = nan_pool(batch.num_blocks, 64, width, dtype=dtype)
    indices = torch.full((batch.num_tokens, topk), -1, dtype=torch.int32)
    selected: list[list[Tensor]] = [[] for _ in batch.blocks]
    for token, (request, row_len) in enumerate(batch.rows):
        if row_len:
            chosen = torch.randperm(row_len)
            if selected[request]:
                first = selected[request][0]
                first = first[: round(common * len(first))]
                chosen = torch.cat([first, chosen[~torch.isin(chosen, first)]])
            chosen = chosen[:topk]
            selected[request].append(chosen)
            indices[token, torch.randperm(topk)[: len(chosen)]] = chosen.int()
    for blocks, rows in zip(batch.blocks, selected, strict=True):
        if rows:
            positions = torch.cat(rows).unique()
            keys = torch.randn(len(positions), 576)
            places = (torch.tensor(blocks)[positions // 64], positions % 64)
            kv_cache[places] = fp8_keys(keys) if fp8 else keys.bfloat16()
    inputs = {
        "q": torch.randn(batch.num_tokens, num_heads, 576).bfloat16().cuda(),
        "kv_cache": kv_cache.cuda(),
        "topk_indices": indices.cuda(),
        "block_table": batch.block_table,
        "query_start_loc": batch.query_start_loc,
        "scale": 576**-0.5,
        "latent_dim": 512,
    }
    misuse_trailing_tokens(inputs)
    return inputs


attention_cases = st.builds(
    repeated,
    cases(max_reqs=5, max_query_len=9, max_seq_len=1500),
    st.sampled_from([1, 1, 1, 4]),
)
topks = st.sampled_from([63, 512, 2048, 4096])
commons = st.sampled_from([0.0, 0.75, 1.0])


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@each_cache
def test_hopper_attention_of_random_shapes(fp8: bool, check_draws: CheckDraws) -> None:
    heads = st.one_of(st.sampled_from([8, 16, 64, 128]), st.integers(1, 128))

    def check(case: Case, num_heads: int, topk: int, common: float, seed: int) -> None:
        inputs = hopper_attention_inputs(case, num_heads, topk, common, seed, fp8)
        assert_equals_reference64(inputs)

    check_draws(check, 10, 200, attention_cases, heads, topks, commons, seeds)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@each_cache
def test_hopper_attention_of_random_shapes_that_share_keys(
    fp8: bool, check_draws: CheckDraws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of any size share them here; trailing tokens make up two tokens a request."""
    monkeypatch.setattr(_shared_keys, "MIN_TOKENS", 0)
    heads = st.one_of(st.sampled_from([8, 16, 32]), st.integers(1, 32))

    def check(case: Case, num_heads: int, topk: int, common: float, seed: int) -> None:
        query_lens, seq_lens, trailing = case
        trailing = max(trailing, 2 * len(query_lens) - sum(query_lens))
        case = (query_lens, seq_lens, trailing)
        inputs = hopper_attention_inputs(case, num_heads, topk, common, seed, fp8)
        assert_shares(inputs, monkeypatch)
        assert_equals_reference64(inputs)

    check_draws(check, 10, 200, attention_cases, heads, topks, commons, seeds)
