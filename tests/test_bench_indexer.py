"""``mtpgraph bench indexer`` without a card: its arithmetic, its checks, and what it writes."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import bench_attention, bench_graph, bench_indexer, bench_peers, bench_scores, ops
from mtpgraph.__main__ import main
from mtpgraph.bench_graph import Arm, Plan, Timing
from mtpgraph.bench_peers import Peers
from mtpgraph.bench_shapes import SHAPES, Ceilings, Logits, Mla, Select, Shape, TopK

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_bytes=4e12, fp8_flops=1.2e15, bf16_flops=8e14)
PLAN = Plan(calls=4, sets=1, rounds=3, l2="cold")


def arm(name: str, problem: str = "", **more: Any) -> Arm:
    return Arm(name, lambda i: None, lambda: problem, ours=name.startswith("mtpgraph"), **more)


def timer(times: dict[str, float]) -> Callable[[Sequence[Arm], Plan], dict[str, Timing | str]]:
    """Every arm takes what ``times`` says."""

    def time_arms(arms: Sequence[Arm], plan: Plan) -> dict[str, Timing | str]:
        return {each.name: Timing(us := times[each.name], us - 1, us + 1) for each in arms}

    return time_arms


@pytest.mark.parametrize(
    ("shape", "num_bytes", "flops"),
    [
        # keys 2 * 64 * 132, queries 2 * 4 * 132, logits 2 * 64 * 4; 128 scores of 2 * 4 * 128
        (Logits(2, 64, (1,), num_heads=4), 16896 + 1056 + 512, 131072),
        # 3 tokens: one of 64 keys, then 63 and 64
        (Logits(2, 64, (1, 2), num_heads=4), 16896 + 1584 + 768, 191 * 1024),
        # the same without logits, with 3 * 16 indices
        (Select(2, 64, (1, 2), num_heads=4, topk=16), 16896 + 1584 + 192, 191 * 1024),
        (TopK(3, 100, 10), 4 * 3 * 110, 0),
        (TopK(3, 100, 10, columns=200), 4 * 3 * 110, 0),
        # a row: 8 keys of 1152 bytes and an index each, 2 heads of 1152 in, 1024 and 4 out
        (Mla(1, 2, topk=8), 8 * 1156 + 2 * 2180, 2 * 8 * (1152 + 1024)),
        (Mla(5, 2, topk=8), 5 * (8 * 1156 + 2 * 2180), 5 * 2 * 8 * 2176),
        # two requests of three tokens, 6 keys in common and 2 others each
        (
            Mla(6, 2, topk=8, next_n=3, common=75),
            2 * 12 * 1152 + 6 * (8 * 4 + 2 * 2180),
            6 * 2 * 8 * 2176,
        ),
        # a key of 512 bytes, four scales and a rotary part of 128
        (Mla(1, 2, topk=8, fp8=True), 8 * (656 + 4) + 2 * 2180, 2 * 8 * 2176),
    ],
)
def test_shapes_count_bytes_and_operations(shape: Shape, num_bytes: int, flops: int) -> None:
    assert (shape.bytes, shape.flops) == (num_bytes, flops)


def test_shapes_agree_with_the_formulas_per_token_of_context() -> None:
    """64 requests of 32K: 132 bytes a key, 2 * 128 * 64 operations a score."""
    shape = Logits(64, 32768, (4,))
    keys = 64 * 32768
    assert shape.bytes == 132 * keys + 132 * 256 * 64 + 4 * 256 * 32768
    # the last of 4 tokens sees every key, the first three fewer
    assert shape.flops == 2 * 128 * 64 * (4 * keys - 64 * 6)


@pytest.mark.parametrize(
    ("shape", "floor_us"),
    [
        (TopK(1, 1_000_000, 2000), 4 * 1_002_000 / 4e6),  # bytes over the copy rate
        (Logits(64, 32768, (8,)), Logits(64, 32768, (8,)).flops / 1.2e9),  # fp8 operations bind
        (Logits(64, 32768, (1,)), Logits(64, 32768, (1,)).bytes / 4e6),
        (Mla(64, 1024), Mla(64, 1024).flops / 8e8),  # bf16 operations bind
    ],
)
def test_shapes_floor_is_the_larger_of_two_times(shape: Shape, floor_us: float) -> None:
    assert shape.floor_us(CEILINGS) == pytest.approx(floor_us)


def test_shapes_have_names_of_their_own() -> None:
    names = [f"{what} {shape.name}" for what, shapes in SHAPES.items() for shape in shapes]
    assert len(set(names)) == len(names)
    assert {"logits 64x32K-n1-4", "topk 1x1M-k2048", "select 256x4K-n2", "mla 8x16h"} <= set(names)
    assert all(shape.what == what for what, shapes in SHAPES.items() for shape in shapes)
    assert Logits(4, 64, (1, 4, 2, 3)).query_lens == [1, 4, 2, 3]
    assert (Logits(6, 64, (1, 4, 2, 3)).num_tokens, Logits(6, 64, (1, 4)).next_n) == (15, None)


@pytest.mark.parametrize(
    ("set_bytes", "max_sets", "rotate", "sets", "l2"),
    [
        (200, 9, True, 1, "cold"),  # outgrows the L2 alone
        (30, 9, True, 7, "cold"),
        (30, 5, True, 5, "67% warm"),  # no memory for more
        (30, 9, False, 3, "warm"),
        (70, 9, False, 1, "warm"),
        (150, 9, False, 1, "67% warm"),
    ],
)
def test_plan_rotates_until_inputs_outgrow_the_l2(
    set_bytes: int, max_sets: int, rotate: bool, sets: int, l2: str
) -> None:
    plan = bench_graph.plan(set_bytes, 10.0, 5, 100, max_sets, rotate)
    assert (plan.sets, plan.l2) == (sets, l2)
    assert plan.calls >= 30
    assert plan.calls % sets == 0


def test_plan_calls_a_long_kernel_less_often() -> None:
    assert bench_graph.plan(500, 2000.0, 5, 100, 1).calls == 4


def test_shapes_are_chosen_by_part_and_name() -> None:
    chosen = bench_indexer.chosen_shapes(["logits", "select"], ["64x32K-n2", "1x128K-*"])
    assert {shape.name for shape in chosen} == {
        "64x32K-n2",
        *(f"1x128K-n{n}" for n in ("1", "2", "3", "4", "8")),
    }
    assert {shape.what for shape in chosen} == {"logits", "select"}


def test_ragged_batches_of_one_request_are_left_out() -> None:
    """One request of a mix has a length of its own, which another shape has already."""
    for what in ("logits", "select"):
        assert "1x128K-n1-4" not in {shape.name for shape in SHAPES[what]}


def test_command_needs_a_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "indexer"]) == 2
    assert capsys.readouterr().err == "mtpgraph bench: needs a CUDA card\n"


def test_command_names_the_shapes_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "indexer", "--what", "mla", "--shapes", "64x32K-n2"]) == 2
    error = capsys.readouterr().err
    assert "no shape is named ['64x32K-n2']" in error
    assert "256x128h" in error


def test_command_wants_a_folder_of_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "indexer", "--peers", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--what", "sorting"], ["--skip", "cuBLAS"], ["--rounds", "x"]])
def test_command_refuses_what_it_does_not_know(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "indexer", *wrong])
    assert wrong[0] in capsys.readouterr().err


def test_row_compares_with_the_fastest_peer_plans_in_and_out() -> None:
    shape = TopK(1, 1_000_000, 2000)
    times = {"mtpgraph": 10.0, "mtpgraph, two": 30.0, "a": 8.0, "b": 20.0, "b, apart": 5.0}
    arms = [arm(name, apart=name.endswith("apart")) for name in times]
    row = bench_indexer.measure(shape, arms, PLAN, CEILINGS, timer(times))
    assert (row["best_peer"], row["best_peer_us"], row["ratio"]) == ("a", 8.0, 1.25)
    assert (row["best_peer_apart"], row["ratio_apart"]) == ("b, apart", 2.0)
    assert (row["us"], row["us_min"], row["us_max"]) == (10.0, 9.0, 11.0)
    assert row["of_floor"] == pytest.approx(0.1002)
    assert row["gb_s"] == pytest.approx(400.8)
    assert set(row["peers"]) == {"a", "b", "b, apart"}
    assert set(row["also"]) == {"mtpgraph, two"}
    assert "wrong" not in row


def test_row_of_wrong_arms_names_and_does_not_time_them() -> None:
    def fail() -> str:
        raise ValueError("rows must be\nfewer")

    arms = [arm("mtpgraph", "3 of 4 rows differ"), arm("a"), Arm("b", lambda i: None, fail)]
    row = bench_indexer.measure(TopK(1, 100, 10), arms, PLAN, CEILINGS, timer({"a": 2.0}))
    assert row["wrong"] == {"mtpgraph": "3 of 4 rows differ", "b": "ValueError: rows must be"}
    assert set(row["peers"]) == {"a"}
    assert "us" not in row
    assert "ratio" not in row


def test_row_of_a_peer_that_is_not_always_exact() -> None:
    arms = [arm("mtpgraph"), arm("a", check_others=lambda: "clustered rows: recall 0.5"), arm("b")]
    times = {"mtpgraph": 6.0, "a": 5.0, "b": 12.0}
    row = bench_indexer.measure(TopK(1, 8192), arms, PLAN, CEILINGS, timer(times))
    assert row["inexact"] == {"a": "clustered rows: recall 0.5"}
    assert (row["best_peer"], row["ratio"]) == ("a", 1.2)
    assert (row["best_peer_exact"], row["ratio_exact"]) == ("b", 0.5)
    assert "wrong" not in row
    assert "| a* | 5.0 | 1.20 | 1.20 | 0.50 | cold |" in bench_indexer.table([row])


def test_row_of_an_arm_that_no_graph_holds() -> None:
    def time_arms(arms: Sequence[Arm], plan: Plan) -> dict[str, Timing | str]:
        return {"mtpgraph": Timing(2.0, 1.0, 3.0), "a": "RuntimeError: not permitted"}

    row = bench_indexer.measure(
        TopK(1, 100, 10), [arm("mtpgraph"), arm("a")], PLAN, CEILINGS, time_arms
    )
    assert row["wrong"] == {"a": "RuntimeError: not permitted"}
    assert row["us"] == 2.0
    assert "best_peer" not in row


def test_table_has_a_line_a_shape() -> None:
    times = {"mtpgraph": 100.0, "a": 200.0}
    arms = [arm(name) for name in times]
    shapes = [Logits(64, 32768, (2,)), TopK(1, 8192)]
    rows = [bench_indexer.measure(s, arms, PLAN, CEILINGS, timer(times)) for s in shapes]
    rows.append(
        bench_indexer.measure(
            TopK(4, 131072), [arm("mtpgraph", "wrong")], PLAN, CEILINGS, timer({})
        )
    )
    lines = bench_indexer.table(rows).splitlines()
    assert lines[2:] == [
        "| logits | 64x32K-n2 | 100.0 | 2947 | 687 | 74% | a | 200.0 | 0.50 | 0.50 | 0.50 | cold |",
        "| topk | 1x8K-k2048 | 100.0 | 0 |  | 0% | a | 200.0 | 0.50 | 0.50 | 0.50 | cold |",
        "| topk | 4x128K-k2048 |  |  |  |  |  |  |  |  |  | cold |",
    ]


SMALL: list[Shape] = [
    Logits(4, 128, (1, 4, 2, 3), num_heads=4),
    Select(2, 128, (2,), num_heads=4, topk=16),
    Select(2, 128, (2,), num_heads=4, topk=16, columns=256),
    TopK(3, 200, 20),
    TopK(3, 200, 20, columns=512),
    Mla(3, 4, topk=32),
    Mla(3, 4, topk=32, fp8=True),
]


def small_arms(monkeypatch: pytest.MonkeyPatch, peers: Peers) -> dict[str, list[Arm]]:
    """The arms of ``SMALL``, over caches of a few blocks."""
    monkeypatch.setattr(Mla, "context", 128)
    each = bench_indexer.each_shape(SMALL, peers, CEILINGS, 1 << 10, 3, CPU)
    kinds = {"fp8": " fp8", "of": " of more columns"}
    return {
        shape.what + "".join(text for part, text in kinds.items() if part in shape.name.split("-")):
        arms
        for shape, arms, _ in each
    }  # fmt: skip


def test_arms_of_ours_pass_their_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = small_arms(monkeypatch, Peers())
    assert {what: [each.name for each in group] for what, group in arms.items()} == {
        "logits": ["mtpgraph", "mtpgraph bf16"],
        "select": ["mtpgraph", "mtpgraph, two ops"],
        "select of more columns": ["mtpgraph", "mtpgraph, two ops"],
        "topk": ["mtpgraph", "torch.topk"],
        "topk of more columns": ["mtpgraph"],
        "mla": ["mtpgraph"],
        "mla fp8": ["mtpgraph"],
    }
    assert [each.check() for group in arms.values() for each in group] == [""] * 11


def spoiled(result: Tensor) -> Tensor:
    """One element of the first row, changed."""
    result = result.clone()
    result[0].view(-1)[0] += 1
    return result


@pytest.mark.parametrize(
    ("op", "what", "arm", "problem"),
    [
        ("indexer_logits", "logits", 0, "logits off by"),
        ("indexer_logits", "logits", 1, "logits off by"),
        ("indexer_topk", "topk", 0, "1 of 3 rows differ"),
        ("indexer_select", "select", 0, "1 of 4 rows differ"),
        ("sparse_mla_decode", "mla", 0, "outputs off by"),
        ("sparse_mla_decode", "mla fp8", 0, "outputs off by"),
    ],
)
def test_arms_find_a_wrong_result(
    op: str, what: str, arm: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(ops, op)

    def wrong(*args: Any) -> Any:
        result = right(*args)
        return (10 * result[0], result[1]) if isinstance(result, tuple) else spoiled(result)

    monkeypatch.setattr(ops, op, wrong)
    assert problem in small_arms(monkeypatch, Peers())[what][arm].check()


def test_one_wrong_row_among_many_is_found() -> None:
    lens = torch.full((100,), 500, dtype=torch.int32)
    expected = torch.randn(100, 500)
    assert bench_scores.wrong_logits(expected, expected, lens) == ""
    logits = expected.clone()
    logits[70] *= 1 + 2 * bench_scores.LOGITS_TOLERANCE
    assert "logits off by 2" in bench_scores.wrong_logits(logits, expected, lens)

    sums = torch.randn(100, 4, 64)
    assert bench_attention.wrong_attention(sums, sums) == ""
    out = sums.clone()
    out[70] *= 1 + 2 * bench_attention.TOLERANCE
    assert "outputs off by 2" in bench_attention.wrong_attention(out, sums)


def test_logits_that_are_cut_off_are_wrong() -> None:
    expected = torch.randn(4, 5000)
    lens = torch.full((4,), 5000, dtype=torch.int32)
    cut = (expected.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()
    assert bench_scores.wrong_logits(expected.bfloat16(), expected, lens) == ""
    assert "logits off by 3" in bench_scores.wrong_logits(cut, expected, lens)
    assert "logits off by 1" in bench_scores.wrong_logits(
        expected.bfloat16().float(), expected, lens
    )


def deep_gemm(seen: list[tuple[int, ...]]) -> Any:
    """A DeepGEMM that scores by our reference and notes the shape of each query."""

    def metadata(lens: Tensor, block_size: int, slots: int) -> Tensor:
        assert lens.dtype == torch.int32
        return torch.tensor([block_size, slots])

    def logits(q: Any, cache: Tensor, w: Tensor, lens: Tensor, table: Tensor, meta: Tensor, *rest):
        queries = q[0]
        num_reqs, next_n = queries.shape[:2]
        seen.append((num_reqs, next_n, int(meta[1])))
        starts = torch.arange(0, num_reqs * next_n + 1, next_n, dtype=torch.int32)
        pages = cache.flatten(1)
        # flattened, each row's length is its own request's
        return ops.indexer_logits(
            queries.flatten(0, 1), w, pages, table, starts, lens[:, -1].contiguous(), rest[0]
        )

    return SimpleNamespace(
        get_num_sms=lambda: 132,
        get_paged_mqa_logits_metadata=metadata,
        fp8_fp4_paged_mqa_logits=lambda *args, **_: logits(*args),
    )


def vllm() -> Any:
    """A vLLM whose selectors are ``torch.topk``."""

    def topk(logits: Tensor, lens: Tensor, out: Tensor, work: Tensor, k: int, width: int) -> None:
        seen = torch.arange(width) < lens.unsqueeze(1)
        out.copy_(torch.where(seen, logits, float("-inf")).topk(k, dim=1).indices)

    def per_row(
        logits: Tensor, next_n: int, lens: Tensor, out: Tensor, rows: int, *strides_k: int
    ) -> None:
        assert (next_n, rows, strides_k[:2]) == (1, len(logits), logits.stride())
        topk(logits, lens, out, out, strides_k[2], logits.shape[1])

    return SimpleNamespace(
        persistent_topk=topk, cooperative_topk=topk, top_k_per_row_decode=per_row
    )


@pytest.mark.parametrize(
    ("pattern", "forms"),
    [
        ((1,), [(2, 1, 132)]),
        ((2,), [(2, 2, 132), (4, 1, 132)]),
        ((3,), [(6, 1, 132)]),
        ((4,), [(2, 4, 66), (8, 1, 132)]),
        ((1, 2), [(3, 1, 132)]),
    ],
)
def test_peer_deep_gemm_is_native_where_it_can_be(
    pattern: tuple[int, ...], forms: list[tuple[int, ...]]
) -> None:
    seen: list[tuple[int, ...]] = []
    shape = Logits(2, 128, pattern, num_heads=4)
    peers = Peers({"DeepGEMM": deep_gemm(seen)})
    scores = bench_scores.make_scores(shape, 1, None, CPU)
    arms = bench_scores.logits_arms(scores, peers)
    assert [each.check() for each in arms] == [""] * len(arms)
    # each form twice: with its schedule, and with the schedule made ahead
    assert seen == [form for form in forms for _ in range(2)]
    assert [each.apart for each in arms] == [False, False, *([False, True] * len(forms))]


def test_peers_of_select_are_pairs_of_kernels() -> None:
    peers = Peers({"DeepGEMM": deep_gemm([]), "vLLM": vllm()})
    shape = Select(2, 1024, (1,), num_heads=2, topk=512)
    arms = bench_scores.select_arms(bench_scores.make_scores(shape, 1, None, CPU), peers)
    assert [each.name for each in arms[2:5]] == [
        "DeepGEMM native + vLLM per row",
        "DeepGEMM native + vLLM persistent",
        "DeepGEMM native + vLLM cooperative",
    ]
    assert len(arms) == 8
    assert [each.check() for each in arms] == [""] * 8
    assert arms[2].call(0).shape == (2, 512)


def test_peers_of_any_topk_are_few() -> None:
    shape = TopK(2, 4096, 100)
    peers = Peers({"vLLM": vllm()})
    arms = bench_scores.topk_arms(shape, bench_scores.make_row_sets(shape, 1, CPU), peers)
    assert [each.name for each in arms] == ["mtpgraph", "vLLM per row", "torch.topk"]
    assert [each.check() for each in arms] == [""] * 3


def test_selector_that_loses_winners_is_found_on_clustered_rows() -> None:
    """As one with a coarse key and a bounded buffer would."""
    peer = vllm()
    topk_op = peer.persistent_topk

    def coarse(logits: Tensor, *rest: Any) -> None:
        topk_op(logits.half().float(), *rest)

    peer.persistent_topk = coarse
    peers = Peers({"vLLM": peer})
    shape = TopK(2, 4096, 512)
    arms = bench_scores.topk_arms(shape, bench_scores.make_row_sets(shape, 1, CPU), peers)
    limits = {each.name: each.check_others() for each in arms}
    assert "clustered rows: recall 0." in limits.pop("vLLM persistent")
    assert set(limits.values()) == {""}
    assert {each.check() for each in arms if each.name != "vLLM persistent"} == {""}


def test_ours_is_checked_on_rows_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    topk_op = ops.indexer_topk
    monkeypatch.setattr(ops, "indexer_topk", lambda x, *rest: topk_op(x.half().float(), *rest))
    shape = TopK(2, 4096, 512)
    arms = bench_scores.topk_arms(shape, bench_scores.make_row_sets(shape, 1, CPU), Peers())
    assert "clustered rows: 2 of 2 rows differ" in arms[0].check()


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ([[3, 1]], ""),
        ([[1, 3]], ""),
        ([[1, 2]], "recall 0.5000"),
        ([[3, 3]], "1 rows with a position twice, 0 with one that is none"),
        ([[3, 4]], "0 rows with a position twice, 1 with one that is none"),
        ([[3, -1]], "0 rows with a position twice, 1 with one that is none"),
    ],
)
def test_selection_is_judged_by_value(chosen: list[list[int]], problem: str) -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 7.0, 9.0]])
    lens = torch.tensor([4], dtype=torch.int32)
    assert bench_scores.wrong_selection(torch.tensor(chosen), logits, lens, 2) == problem


def test_attention_of_several_tokens_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have what the shape says in common, and no other key; ours passes its checks."""
    monkeypatch.setattr(Mla, "context", 128)
    shape = Mla(6, 4, topk=32, next_n=3, common=75)
    pool = bench_attention.make_kv_cache(4, 576, CPU)
    inputs = bench_attention.make_attention(shape, 1, pool, bench_peers.fp8_kv_cache(pool))
    assert inputs.query_start_loc.tolist() == [0, 3, 6]
    for rows in inputs.topk_indices[0].view(2, 3, 32):
        counts = rows.flatten().bincount(minlength=128)
        assert (rows.diff(dim=1) > 0).all()
        assert counts.unique(return_counts=True)[1].tolist() == [128 - 48, 24, 24]
    for arm in bench_attention.attention_arms(inputs, Peers()):
        assert arm.check() == ""


@pytest.mark.parametrize(
    ("fp8", "others"), [(False, ["FA3", "FlashMLA forward"]), (True, [])], ids=["bf16", "fp8"]
)
def test_peers_of_attention_get_slots_and_their_own_caches(
    fp8: bool, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mla, "context", 128)
    shape = Mla(3, 64, topk=32, fp8=fp8)
    pool = bench_attention.make_kv_cache(8, 576, CPU)
    fp8_pool = bench_peers.fp8_kv_cache(pool)
    assert fp8_pool.shape == (8, 64, 656)
    inputs = bench_attention.make_attention(shape, 1, pool, fp8_pool)

    def attend(q: Tensor, keys: Tensor, scale: float) -> Tensor:
        weights = torch.einsum("nhd,nkd->nhk", q.float(), keys) * scale
        return torch.einsum("nhk,nkd->nhd", weights.softmax(2), keys[..., :512]).bfloat16()

    def fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
        q_latent, starts, lens, table = rest[2], rest[4], rest[8], rest[11]
        assert (starts.tolist(), lens.tolist()) == ([0, 1, 2, 3], [32] * 3)
        keys = torch.cat([v, k], dim=3).flatten(0, 2)[table.long()].float()
        # what FA3's schema calls softmax_scale
        return [attend(torch.cat([q_latent, q], dim=2), keys, rest[20])]

    def decode(q: Tensor, cache: Tensor, *rest: Any) -> tuple[Tensor, None]:
        tokens = cache.flatten(0, 2)[rest[8].flatten().long()]
        keys = bench_peers.fp8_kv_values(tokens).view(3, 32, 576)
        return attend(q.squeeze(1), keys, rest[5]).unsqueeze(1), None

    def forward(q: Tensor, cache: Tensor, indices: Tensor, scale: float) -> tuple[Tensor]:
        return (attend(q, cache.squeeze(1)[indices.squeeze(1).long()].float(), scale),)

    peers = Peers(
        {
            "FA3": SimpleNamespace(fwd=fwd),
            "FlashMLA": SimpleNamespace(
                get_mla_metadata=lambda: (object(), None),
                flash_mla_with_kvcache=decode,
                flash_mla_sparse_fwd=forward,
            ),
        }
    )
    arms = bench_attention.attention_arms(inputs, peers)
    names = ["mtpgraph", "FlashMLA fp8", "FlashMLA fp8, split apart", *others]
    assert {each.name: each.check() for each in arms} == dict.fromkeys(names, "")


def test_fp8_cache_holds_the_same_keys() -> None:
    pool = bench_attention.make_kv_cache(2, 576, CPU)
    values = bench_peers.fp8_kv_values(bench_peers.fp8_kv_cache(pool).flatten(0, 1))
    keys = pool.flatten(0, 1).float()
    assert torch.equal(values[:, 512:], keys[:, 512:])
    error = (values - keys)[:, :512].norm() / keys[:, :512].norm()
    assert 0 < error < 0.04


def test_peers_absent_are_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "_vllm_fa3_C.abi3.so").write_bytes(b"no library")
    (tmp_path / "flash_mla.py").write_text("raise ImportError('built for another torch')")
    (tmp_path / "deep_gemm.py").write_text("def get_num_sms(): return 7")
    try:
        peers = bench_peers.find_peers(tmp_path, skip=["TokenSpeed"])
        assert peers.get("DeepGEMM").get_num_sms() == 7
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("deep_gemm", None)
    assert peers.absent["TokenSpeed"] == "skipped"
    assert peers.absent["FlashMLA"] == "ImportError: built for another torch"
    assert "_C_stable_libtorch.abi3.so" in peers.absent["vLLM"]
    assert "_vllm_fa3_C.abi3.so" in peers.absent["FA3"]
    assert peers.get("FA3") is None


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The command runs on the CPU, with shapes, facts and times that are made up."""
    monkeypatch.setattr(Mla, "context", 128)
    monkeypatch.setattr(bench_indexer, "DEVICE", "cpu")
    shapes = {each.what: [shape for shape in SMALL if shape.what == each.what] for each in SMALL}
    monkeypatch.setattr(bench_indexer, "SHAPES", shapes)
    monkeypatch.setattr(bench_graph, "measure_ceilings", lambda device: CEILINGS)
    ours = ["mtpgraph", "mtpgraph, two ops", "mtpgraph bf16"]
    times = dict.fromkeys([*ours, "torch.topk"], 5.0)
    monkeypatch.setattr(bench_graph, "time_arms", timer(times))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    facts = SimpleNamespace(L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    versions = {"card": "a card", "torch": "2.11.0", "triton": "3.6.0"}
    monkeypatch.setattr(bench_indexer, "versions", lambda: versions)
    return versions


SKIP = ["--skip", *bench_peers.SOURCES]


def test_command_writes_a_json_line_a_shape(
    card: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "indexer.jsonl"
    assert main(["bench", "indexer", *SKIP, "--out", str(out), "--commit", "abc"]) == 0
    printed = capsys.readouterr().out
    assert "no DeepGEMM: skipped" in printed
    assert "| topk | 3x200-k20 | 5.0 |" in printed
    rows = {line["shape"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert list(rows) == [shape.name for shape in SMALL]
    for row in rows.values():
        assert row.items() >= (card | {"commit": "abc", "us": 5.0, "us_min": 4.0}).items()
        assert row["ceilings"]["copy_bytes"] == 4e12
        assert row["rounds"] == 15
    assert rows["3x200-k20"]["peers"] == {
        "torch.topk": {"us": 5.0, "us_min": 4.0, "us_max": 6.0, "apart": False}
    }
    # which knows no lengths
    assert rows["3x200-k20-of-512"]["peers"] == {}
    assert rows["2x128-n2-of-256"]["also"]["mtpgraph, two ops"]["us"] == 5.0
    assert rows["4x128-n1-4"]["also"]["mtpgraph bf16"]["us"] == 5.0
    assert {"3x4h", "3x4h-fp8"} <= rows.keys()


def test_command_checks_without_timing(
    card: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "indexer.jsonl"
    assert main(["bench", "indexer", *SKIP, "--check", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "topk 3x200-k20: not timed" in printed
    assert "| topk" not in printed
    assert not out.exists()


@pytest.mark.parametrize("how", [[], ["--check"]])
def test_command_fails_where_ours_is_wrong(
    how: list[str],
    card: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = ops.indexer_topk
    monkeypatch.setattr(ops, "indexer_topk", lambda *args: spoiled(right(*args)))
    assert main(["bench", "indexer", "--what", "topk", *how, *SKIP]) == 1
    assert "mtpgraph is wrong: random rows: 1 of 3 rows differ" in capsys.readouterr().out


def test_command_goes_on_after_a_peer_that_fails(
    card: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(logits: Tensor, row_lens: Tensor, topk: int) -> Tensor:
        raise RuntimeError("no such kernel\nmore of it")

    monkeypatch.setattr(bench_scores, "torch_topk", fail)
    assert main(["bench", "indexer", "--what", "topk", *SKIP]) == 0
    printed = capsys.readouterr().out
    assert "torch.topk is wrong: RuntimeError: no such kernel\n" in printed
    assert "| topk | 3x200-k20 | 5.0 |" in printed


def test_command_stops_where_a_peer_breaks_the_card(
    card: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(bench_scores, "torch_topk", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match=r"torch\.topk at 3x200-k20 left the card unusable"):
        main(["bench", "indexer", "--what", "topk", *SKIP])


@pytest.mark.gpu
def test_command_measures_on_a_card(tmp_path: Path) -> None:
    out = tmp_path / "indexer.jsonl"
    shapes = ["1x128K-n2", "8x32K-n1-4", "64x8K-k2048", "8x16h"]
    assert main(["bench", "indexer", "--shapes", *shapes, "--rounds", "3", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["what"] for row in rows] == ["logits", "logits", "topk", "select", "select", "mla"]
    for row in rows:
        # a floor assumes what this card was measured to do; rows in the L2 may beat it
        assert 0 < row["of_floor"] < (1.1 if row["l2"] == "cold" else 3)
        assert row["us_min"] <= row["us"] <= row["us_max"]
