"""Ops in engines, without TensorRT: which of them, in which order, and what stays outside."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mtpgraph import ops
from mtpgraph.compile_passes.engine_ops import ENGINE_OPS
from mtpgraph.compile_passes.report import ReportError
from tests.helpers import assert_same_bits, assert_same_result, strided_pool

from .dense_steps import Compiled
from .fake_engines import FakeBuilder, builder, library
from .fake_plugins import PluginLibrary
from .pure_steps import INSIDE, PureSteps, make_pools, run_step
from .support import BLOCK_SIZE, DIM

__all__ = ["builder", "library"]  # fixtures


@torch.no_grad()
def test_pure_region_is_one_engine(builder: FakeBuilder, library: PluginLibrary):
    """All pure ops of a step in one engine, behind the writes of the caches that it reads: the
    keys of the same step are among those it sees. Sizes follow the batch; caches are where they
    were, and the ops that write stay outside."""
    pools = make_pools()
    stats = run_step(PureSteps().pure, pools)
    assert builder.ops == [INSIDE]
    assert (stats.graphs, stats.engines, stats.findings) == (1, {"built": 1}, [])
    assert (stats.plugins, stats.hybrid) == (dict.fromkeys(INSIDE, 1), {})
    assert stats.asdict()["plugins"] == dict.fromkeys(INSIDE, 1)
    assert len(set(map(tuple, builder.ran))) == 3
    for addresses in builder.addresses:
        assert {pool.data_ptr() for pool in pools.values()} <= set(addresses)
    assert {wanted.dtype for wanted in builder.inputs[0]} == {torch.float32, torch.int32}


@torch.no_grad()
def test_select_stays_on_its_side_of_a_write(builder: FakeBuilder, library: PluginLibrary):
    """One before the write of the cache that it reads, one behind it: engines of their own."""

    def fn(
        x: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        pools: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        def select() -> Tensor:
            chosen = ops.indexer_select(
                x.unflatten(1, (1, DIM)),
                torch.ones_like(x[:, :1]),
                pools["index_k"],
                block_table,
                query_start_loc,
                seq_lens,
                48,
                3,
            )
            _, requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
            return ops.topk_to_slots(chosen, block_table, requests, BLOCK_SIZE)

        before = select()
        ops.indexer_cache_write_(x, slot_mapping, pools["index_k"])
        return before, select()

    run_step(fn)
    assert [found.count("indexer_select") for found in builder.ops] == [1, 1]


@torch.no_grad()
def test_ops_and_products_share_an_engine(builder: FakeBuilder, library: PluginLibrary):
    """What an op gives goes straight into the next projection."""
    stats = run_step(PureSteps().dense_on_both_sides)
    assert builder.calls == [["linear", "relu"], ["linear", "relu", "add"]]
    assert builder.ops == [INSIDE[:1], INSIDE[1:]]
    assert (stats.plugins, stats.hybrid) == (dict.fromkeys(INSIDE, 1), {})


@torch.no_grad()
def test_ops_and_views_share_a_size(builder: FakeBuilder, library: PluginLibrary):
    """To an op the number of tokens comes as a tensor, to a view it does not."""
    stats = run_step(PureSteps().dense_views_by_the_same_size)
    inside = ["flatten_decode", "indexer_topk", "topk_to_slots"]
    assert (builder.ops, stats.findings) == ([inside], [])
    assert (stats.plugins, stats.hybrid) == (dict.fromkeys(inside, 1), {})


@torch.no_grad()
def test_results_with_gaps_keep_their_op_outside(builder: FakeBuilder, library: PluginLibrary):
    """Of a symbolic number of heads, no layout of what attention gives can be told."""

    def fn(x: Tensor, starts: Tensor, lens: Tensor, table: Tensor, kv: Tensor) -> Any:
        q = x.unflatten(1, (x.shape[1] // 4, 4))
        chosen = ops.indexer_topk(x, lens, 1)
        out, lse = ops.sparse_mla_decode(q, kv, chosen, table, starts, 0.3, 3)
        return out, lse, ops.indexer_topk(x + 1, lens, 1)

    compiled = Compiled(fn)
    x, lens = torch.randn(3, 8), torch.ones(3, dtype=torch.int32)
    starts, table = torch.arange(4).int(), torch.arange(3).int()[:, None].contiguous()
    kv = torch.randn(3, BLOCK_SIZE, 4)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    expected = fn(x, starts, lens, table, kv)
    for a, b in zip(compiled.fn(x, starts, lens, table, kv), expected, strict=True):
        assert_same_result(a, b)
    assert compiled.stats.hybrid == {"sparse_mla_decode": 1}


@torch.no_grad()
def test_ops_that_nobody_asks_for_are_not_counted(builder: FakeBuilder, library: PluginLibrary):
    def dead(logits: Tensor, lens: Tensor) -> tuple[Tensor]:
        ops.indexer_topk(logits, lens, 2)
        return (ops.indexer_topk(logits, lens, 1),)

    def alive(logits: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        ops.indexer_topk(logits, lens, 3)
        return ops.indexer_topk(logits, lens, 2), ops.indexer_topk(logits, lens, 1)

    for fn, engines, plugins in ((dead, {}, {}), (alive, {"built": 1}, {"indexer_topk": 2})):
        compiled = Compiled(fn, disable_passes=["share_step_metadata"])
        given = torch.randn(3, 8), torch.tensor([8, 3, 5], dtype=torch.int32)
        for a, b in zip(compiled(*given), fn(*given), strict=True):
            assert_same_result(a, b)
        assert (compiled.stats.engines, compiled.stats.plugins) == (engines, plugins)


@torch.no_grad()
def test_flavour_without_plugins_counts_ops_without_an_engine_too(builder: FakeBuilder):
    stats = run_step(PureSteps().pure)
    assert (stats.engines, stats.hybrid) == ({}, dict.fromkeys(INSIDE, 1))


@pytest.mark.parametrize("plugins", [True, False])
@torch.no_grad()
def test_flavour_without_plugins_runs_the_same_region_hybrid(builder: FakeBuilder, plugins: bool):
    """As the RTX flavour does, whatever the option: ops in torch, which are counted."""
    stats = run_step(PureSteps().dense_on_both_sides, plugins=plugins)
    assert builder.ops == [[], []]
    assert stats.engines == {"built": 2}
    assert (stats.hybrid, stats.plugins) == (dict.fromkeys(INSIDE, 1), {})
    assert stats.findings == []


@torch.no_grad()
def test_option_leaves_ops_outside(builder: FakeBuilder, library: PluginLibrary):
    stats = run_step(PureSteps().dense_in_front, plugins=False)
    assert (stats.hybrid, stats.plugins) == (dict.fromkeys(INSIDE, 1), {})
    assert (builder.ops, library.plugins) == ([[]], {})


@torch.no_grad()
def test_strided_cache_stays_outside(builder: FakeBuilder, library: PluginLibrary):
    """An engine would take a copy of it: the op that reads it runs in torch, the others do not."""
    pools = make_pools()
    pools["kv"] = strided_pool(pools["kv"])
    stats = run_step(PureSteps().pure, pools)
    assert builder.ops == [INSIDE[:3]]
    assert stats.hybrid == {"sparse_mla_decode": 1}


@torch.no_grad()
def test_cache_that_is_a_parameter_is_no_constant(builder: FakeBuilder, library: PluginLibrary):
    """An engine would keep a copy of it."""
    kv = nn.Parameter(torch.randn(128, BLOCK_SIZE, DIM), requires_grad=False)

    def fn(x: Tensor, lens: Tensor, table: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        chosen = ops.indexer_topk(x, lens, 3)
        again = ops.indexer_topk(x, lens, 2)
        q = x.unflatten(1, (1, DIM))
        return *ops.sparse_mla_decode(q, kv, chosen, table, starts, 0.3, 4), again

    x, lens = torch.randn(3, DIM), torch.tensor([2, 3, 1], dtype=torch.int32)
    table, starts = torch.eye(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    given = (x, lens, table, starts)
    compiled = Compiled(fn)
    for a, b in zip(compiled.fn(*given), fn(*given), strict=True):
        assert_same_bits(a, b)
    assert builder.ops == [["indexer_topk"] * 2]
    assert compiled.stats.hybrid == {"sparse_mla_decode": 1}
    assert not list(builder.graphs[0].parameters())


@pytest.mark.parametrize("head_dim", [4, 6])
@torch.no_grad()
def test_bytes_are_inside_where_they_are_whole_words(
    builder: FakeBuilder, library: PluginLibrary, head_dim: int
):
    """Queries of fp8, cast outside: a head is one word, or one and a half."""

    def fn(x: Tensor, lens: Tensor, table: Tensor, starts: Tensor, k_cache: Tensor) -> Any:
        q = x.unflatten(1, (2, head_dim)).to(torch.float8_e4m3fn)
        logits = ops.indexer_logits(q, x[:, :2], k_cache, table, starts, lens, 6)
        return ops.indexer_topk(logits, lens, 2), logits

    x, lens = torch.randn(3, 2 * head_dim), torch.tensor([2, 3, 1], dtype=torch.int32)
    table, starts = torch.eye(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    k_cache = torch.full((4, 2 * (head_dim + 4)), 0x30, dtype=torch.uint8)
    given = (x, lens, table, starts, k_cache)
    for a, b in zip(Compiled(fn).fn(*given), fn(*given), strict=True):
        assert_same_bits(a, b)
    assert builder.ops == ([["indexer_logits", "indexer_topk"]] if head_dim == 4 else [])
    if builder.inputs:
        whole = {wanted.usual: wanted.bytes_of for wanted in builder.inputs[0] if wanted.bytes_of}
        assert whole == {(3, 2, 1): torch.float8_e4m3fn, (4, 4): torch.uint8}


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_logits_in_bf16_stay_outside(
    builder: FakeBuilder, library: PluginLibrary, logits_dtype: torch.dtype
):
    """An engine has no argument that is a dtype; what takes the logits may be in one."""

    def fn(x: Tensor, lens: Tensor, table: Tensor, starts: Tensor, k_cache: Tensor) -> Any:
        q = x.unflatten(1, (2, 4))
        batch = (table, starts, lens, 6)
        logits = ops.indexer_logits(q, x[:, :2], k_cache, *batch, logits_dtype)
        chosen = ops.indexer_topk(logits, lens, 2)
        return chosen, ops.topk_to_slots(chosen, table, lens - 1, 2), logits

    x, lens = torch.randn(3, 8), torch.tensor([2, 3, 1], dtype=torch.int32)
    table, starts = torch.eye(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    k_cache = torch.full((4, 2 * (4 + 4)), 0x30, dtype=torch.uint8)
    given = (x, lens, table, starts, k_cache)
    compiled = Compiled(fn)
    for a, b in zip(compiled.fn(*given), fn(*given), strict=True):
        assert_same_bits(a, b)
    inside = ["indexer_topk", "topk_to_slots"]
    outside = {"indexer_logits": 1}
    if logits_dtype == torch.float32:
        inside.insert(0, outside.popitem()[0])
    assert builder.ops == [inside]
    assert compiled.stats.hybrid == outside


@torch.no_grad()
def test_number_that_is_no_constant_stays_outside(builder: FakeBuilder, library: PluginLibrary):
    def fn(logits: Tensor, lens: Tensor) -> tuple[Tensor, ...]:
        few = ops.indexer_topk(logits, lens, 2)
        more = ops.indexer_topk(logits, lens, logits.shape[0])
        again = ops.indexer_topk(logits + 1, lens, 3)
        return few, more, again

    compiled = Compiled(fn)
    for num_tokens in (5, 7):
        logits, lens = torch.randn(num_tokens, DIM), torch.full((num_tokens,), 4).int()
        torch._dynamo.maybe_mark_dynamic(lens, 0)
        for a, b in zip(compiled(logits, lens), fn(logits, lens), strict=True):
            assert_same_bits(a, b)
    assert builder.ops == [["indexer_topk"] * 2]
    assert compiled.stats.hybrid == {"indexer_topk": 1}


@torch.no_grad()
def test_number_of_tokens_comes_as_a_tensor_or_a_constant(
    builder: FakeBuilder, library: PluginLibrary
):
    """``specialize``: an engine of one size needs no tensor that tells."""
    run_step(PureSteps().pure, specialize=[4])
    assert builder.ops == [INSIDE] * 2
    static = [all(wanted.is_static for wanted in inputs) for inputs in builder.inputs]
    assert sorted(static) == [False, True]
    one, ranged = (builder.inputs[static.index(value)] for value in (True, False))
    assert len(ranged) == len(one) + 1


@torch.no_grad()
def test_failed_build_falls_back_to_engines_without_ops(
    builder: FakeBuilder, library: PluginLibrary
):
    """What is left of the region is an engine; what was built before is not built again, and the
    cause is said."""

    def fails(gm: fx.GraphModule) -> None:
        attention = ENGINE_OPS["sparse_mla_decode"].twin
        if any(node.target is attention for node in gm.graph.nodes):
            raise RuntimeError("no plugin today\nand a long log")

    builder.fails = fails
    step = PureSteps().dense_on_both_sides
    stats = run_step(step)
    assert builder.calls == [["linear", "relu"], ["linear", "relu", "add"]]
    assert builder.ops == [INSIDE[:1], []]
    assert (stats.engines, stats.plugins) == ({"built": 2}, {"flatten_decode": 1})
    assert stats.hybrid == dict.fromkeys(INSIDE[1:], 1)
    (found,) = stats.findings
    assert (found.kind, found.found_by) == ("engine fallback", "tensorrt")
    assert found.reason.endswith("they run in torch: RuntimeError: no plugin today")
    assert "ops." in found.code
    with pytest.raises(ReportError, match="no plugin today"):
        run_step(step, strict=True)


@torch.no_grad()
def test_region_that_fails_with_and_without_ops_runs_in_torch(
    builder: FakeBuilder, library: PluginLibrary
):
    """Both causes are said."""

    def fails(gm: fx.GraphModule) -> None:
        raise RuntimeError(f"{sum('mtpgraph' in str(n.target) for n in gm.graph.nodes)} ops")

    builder.fails = fails
    stats = run_step(PureSteps().dense_in_front)
    assert (stats.engines, stats.plugins) == ({"torch": 1}, {})
    reasons = [found.reason for found in stats.findings]
    assert [reason.rpartition(": ")[2] for reason in reasons] == ["0 ops", "1 ops", "3 ops"]


@torch.no_grad()
def test_plugins_that_the_library_refuses_are_none(builder: FakeBuilder, library: PluginLibrary):
    """Once and for all, as what was registered cannot be registered again."""

    def refuses(plugin: str) -> None:
        if plugin.endswith("topk"):
            raise ValueError("takes no such plugin")

    library.refuses = refuses
    for _ in range(2):
        stats = run_step(PureSteps().dense_in_front)
        assert (stats.hybrid, stats.plugins) == (dict.fromkeys(INSIDE, 1), {})
        (found,) = stats.findings
        assert found.reason.endswith("they run in torch: ValueError: takes no such plugin")
        library.refuses = lambda plugin: None
    assert builder.ops == [[], []]


@torch.no_grad()
def test_engines_with_ops_are_kept_on_disk(
    builder: FakeBuilder, library: PluginLibrary, tmp_path: Path
):
    """Under keys that those without ops do not have."""
    builder.exports = True
    first = PureSteps().first

    def fn(logits: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        return ops.indexer_topk(F.relu(first(logits)), lens, 2), lens * 2

    def engines(**options: Any) -> dict[str, int]:
        torch._dynamo.reset()
        compiled = Compiled(fn, engine_cache=tmp_path, **options)
        logits, lens = torch.randn(5, DIM), torch.full((5,), 4).int()
        for a, b in zip(compiled(logits, lens), fn(logits, lens), strict=True):
            assert_same_bits(a, b)
        return dict(compiled.stats.engines)

    assert engines() == {"built": 1}
    assert engines() == {"loaded": 1}
    assert engines(plugins=False) == {"built": 1}
    assert engines(plugins=False) == {"loaded": 1}
    assert len(list(tmp_path.glob("*.engine"))) == 2
