import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from mtpgraph import Batched, Static, declare, ops
from mtpgraph.compile_passes.check_row_independence import check_row_independence
from mtpgraph.compile_passes.infer_batch import Inferred, infer_inputs
from mtpgraph.compile_passes.row_rules import RULES, is_pointwise
from mtpgraph.compile_passes.rows import Call
from tests.helpers import assert_same_bits

from .row_cases import SAFE, UNSAFE
from .row_programs import PIECES, Piece, make_batch, padded, step_of
from .support import trace

NAN = float("nan")


def infer(fn: Callable[..., Any], *args: Any, **given: Any) -> Inferred:
    bound = inspect.signature(fn).bind(*args)
    bound.apply_defaults()
    with torch.no_grad():
        return infer_inputs(fn, bound, given)


def kinds(inferred: Inferred) -> Counter[str]:
    return Counter(finding.kind for finding in inferred.findings)


def assert_padding_stays_out(
    fn: Callable[..., Any], batch: Sequence[Any], inferred: Inferred
) -> None:
    """Real rows and kept tensors are the same whatever padding holds, and whatever its size."""
    names = list(inspect.signature(fn).parameters)
    requests, tokens = batch[1].shape[0], batch[0].shape[0]
    exact = [{k: v.clone() for k, v in a.items()} if isinstance(a, dict) else a for a in batch]
    expected = fn(*exact)
    for more_requests, more_tokens in ((3, 5), (1, 0), (2, 11)):
        results, kept = [], []
        for floats in (0.0, NAN, 1e30):
            size = (requests + more_requests, tokens + more_tokens)
            args = padded(batch, names, inferred.inputs, *size, floats)
            outputs = fn(*args)
            results.append(
                [
                    out[tuple(map(slice, like.shape))]
                    for out, like in zip(outputs, expected, strict=True)
                ]
            )
            kept.append(args[-1]["kept"])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert_same_bits(a, b)
        for other in kept:
            assert_same_bits(other, exact[-1]["kept"])
        for a, b in zip(results[0], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)


INPUTS = {
    "x": Batched(0, pad=0, per="token"),
    "y": Batched(0, pad=0),
    "query_start_loc": Batched(0, pad="last", extra=1),
    "seq_lens": Batched(0, pad=0),
    "ids": Batched(0, pad=0, per="token"),
    "static": Static(),
}


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name.replace(" ", "-"))
def test_check_row_independence_judges_each_piece(piece: Piece):
    fn, batch = step_of([piece]), make_batch([2, 1, 3], seed=0)
    inferred = infer(fn, *batch)
    assert inferred.row_safe == piece.safe, inferred.findings
    if piece.safe:
        assert inferred.inputs == INPUTS
        assert_padding_stays_out(fn, batch, inferred)
    else:
        assert kinds(inferred).keys() <= {"rows mixed", "batch size as value"}
        for finding in inferred.findings:
            assert finding.file.endswith("row_programs.py")
            assert finding.code
        # padding does get in
        declared = dataclasses.replace(inferred, inputs=INPUTS)
        with pytest.raises((AssertionError, RuntimeError)):
            assert_padding_stays_out(fn, batch, declared)


_seen: Counter[bool] = Counter()


@settings(
    max_examples=35, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    pieces=st.lists(
        st.one_of(
            st.sampled_from([piece for piece in PIECES if piece.safe]), st.sampled_from(PIECES)
        ),
        min_size=2,
        max_size=7,
    ),
    query_lens=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    seed=st.integers(0, 99),
)
def check_random_steps(pieces: list[Piece], query_lens: list[int], seed: int) -> None:
    torch._dynamo.reset()
    fn, batch = step_of(pieces), make_batch(query_lens, seed)
    inferred = infer(fn, *batch)
    assert inferred.row_safe == all(piece.safe for piece in pieces), inferred.findings
    _seen[inferred.row_safe] += 1
    if inferred.row_safe:
        assert_padding_stays_out(fn, batch, inferred)


def test_check_row_independence_never_calls_safe_what_is_not():
    _seen.clear()
    check_random_steps()
    assert min(_seen[True], _seen[False]) >= 10, _seen


ROWS = {"x": Batched(0), "i": Batched(0)}


# torch 2.11 takes the size of its result for a constant, and the step with it
CONSTANT = {"rows of as many numbers"} if torch.__version__.startswith("2.11.") else set[str]()


@pytest.mark.parametrize("name", SAFE, ids=lambda name: name.replace(" ", "-"))
def test_check_row_independence_proves(name: str):
    inferred = infer(SAFE[name], torch.randn(6, 4), torch.arange(6), torch.randn(8, 4), **ROWS)
    if name in CONSTANT:
        assert "takes its size for the constant 6" in inferred.findings[0].reason
        return
    assert inferred.row_safe, inferred.findings


# the tracer takes the size for a constant, or what is written is a copy of the caller's
FIXED = {"linspace", "pool rows", "triangle", "decimals of all", "zero the first row of the batch"}


@pytest.mark.parametrize("name", UNSAFE, ids=lambda name: name.replace(" ", "-"))
def test_check_row_independence_reports(name: str):
    inferred = infer(UNSAFE[name], torch.randn(6, 4), torch.arange(6), torch.randn(8, 4), **ROWS)
    expected = {"padding unknown"} if name in FIXED else {"rows mixed", "batch size as value"}
    assert kinds(inferred).keys() & expected, inferred.findings


def test_check_row_independence_reports_custom_ops():
    def step(x: Tensor, i: Tensor) -> Tensor:
        return torch.ops.row_tests.scale(x, 2.0)

    library = torch.library.Library("row_tests", "FRAGMENT")
    library.define("scale(Tensor x, float by) -> Tensor")
    library.impl("scale", lambda x, by: x * by, "CompositeExplicitAutograd")
    torch.library.register_fake("row_tests::scale", lambda x, by: x.new_empty(x.shape), lib=library)
    inferred = infer(step, torch.randn(6, 4), torch.arange(6), **ROWS)
    (finding,) = inferred.findings
    assert finding.kind == "rows mixed"
    assert finding.reason == "nothing is known of how row_tests::scale treats rows"
    assert 'mtpgraph.declare("row_tests::scale", row_independent=True)' in finding.remedy
    # of what does not grow nothing is asked
    static = infer(
        lambda x, w: x @ torch.ops.row_tests.scale(w, 2.0),
        torch.ones(3, 4),
        torch.ones(4, 4),
        x=ROWS["x"],
    )
    assert static.row_safe


def test_check_row_independence_says_which_line_and_what_instead():
    def step(x: Tensor, i: Tensor) -> Tensor:
        y = x * 2
        return y - y.mean(0)

    (finding,) = infer(step, torch.randn(6, 4), torch.arange(6), **ROWS).findings
    assert finding.file == __file__
    assert finding.code == "return y - y.mean(0)"
    assert finding.found_by == "check_row_independence"
    assert finding.reason.startswith("reduces over dimension 0, which grows with the batch")
    assert finding.remedy


WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "set": lambda x, i, kept: kept.__setitem__(i, x),
    "put": lambda x, i, kept: kept.index_put_((i,), x),
    "add": lambda x, i, kept: kept.index_add_(0, i, x),
    "front": lambda x, i, kept: kept.__setitem__(slice(None, x.shape[0]), x),
    "set a column": lambda x, i, kept: kept[:, 0].__setitem__(i, x[:, 0]),
}


@pytest.mark.parametrize("name", WRITES)
def test_check_row_independence_reports_a_write_once(name: str):
    def step(x: Tensor, i: Tensor, kept: Tensor) -> Tensor:
        WRITES[name](x, i, kept)
        return x * 2

    (finding,) = infer(step, torch.randn(6, 4), torch.arange(6), torch.zeros(8, 4), **ROWS).findings
    assert finding.kind == "rows mixed"
    assert finding.reason == "writes batched rows to kept, padding among them"
    assert finding.remedy.endswith("as ops.kv_cache_write_ does, and declare it: mtpgraph.declare")


def test_check_row_independence_reports_a_scatter_into_memory_of_the_step():
    def step(x: Tensor, i: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[i % 2] = x
        return y

    found = infer(step, torch.randn(6, 4), torch.arange(6), **ROWS).findings
    assert [finding.reason for finding in found if finding.kind == "rows mixed"] == [
        "scatters rows by index, so padding rows are written too"
    ]


def test_check_row_independence_of_rows_repeated_by_lengths():
    def step(x: Tensor, i: Tensor) -> Tensor:
        return x.repeat_interleave(i, 0)

    finding, *_ = infer(step, torch.randn(6, 4), torch.arange(6), **ROWS).findings
    assert "repeats rows as often as a tensor says" in finding.reason
    assert "row_requests of ops.flatten_decode" in finding.remedy
    assert "declare" not in finding.remedy


@pytest.mark.parametrize("complete", [False, True])
def test_a_declaration_says_itself_that_it_is_complete(complete: bool):
    """Whatever the namespace: then nothing else may grow."""
    name = f"row_tests::paired_{complete}".lower()
    library = torch.library.Library("row_tests", "FRAGMENT")
    library.define(f"{name.split('::')[1]}(Tensor x, Tensor y) -> Tensor")
    library.impl(name.split("::")[1], lambda x, y: x + y, "CompositeExplicitAutograd")
    torch.library.register_fake(name, lambda x, y: x.new_empty(x.shape), lib=library)
    op = getattr(torch.ops.row_tests, name.split("::")[1])
    declare(op, rows={"x": "token"}, row_independent=True, complete=complete)
    inferred = infer(lambda x, i: op(x, x * 2), torch.randn(6, 4), torch.arange(6), **ROWS)
    reasons = [finding.reason for finding in inferred.findings]
    wrong = f"y of {name} grows with the batch in dimension 0, where the op is not declared to"
    assert any(reason.startswith(wrong) for reason in reasons) == complete
    assert inferred.row_safe != complete, reasons


def test_check_row_independence_points_at_a_branch():
    def step(x: Tensor, i: Tensor) -> Tensor:
        if x.shape[0] > 5:
            x = x * 2
        return x + 1

    (finding,) = infer(step, torch.randn(6, 4), torch.arange(6), **ROWS).findings
    assert finding.kind == "batch size as value"
    assert finding.code == "if x.shape[0] > 5:"
    assert finding.file == __file__
    assert "requests" in finding.reason


def test_check_row_independence_is_a_pass():
    """On a graph alone, rooted in what our ops declare."""

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return (x * row_lens.unsqueeze(1)).sum(0)

    starts = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    lens = torch.tensor([4, 5, 6], dtype=torch.int32)
    _, probe = trace(
        step, torch.randn(6, 4), starts, lens, passes=[check_row_independence], dynamic=True
    )
    (finding,) = probe.manager.findings
    assert finding.kind == "rows mixed"
    assert probe.counts == {"check_row_independence": 0}


def test_row_rules_are_of_ops_that_exist():
    """A misspelt rule would never apply."""
    aten = torch.ops.aten
    missing = {n for n in RULES if not hasattr(aten, n) and not hasattr(aten, n + "_")}
    # in newer versions of torch alone, or older
    assert missing <= {"_fused_rms_norm", "_safe_softmax"}


def test_pointwise_is_asked_of_the_overload():
    """``max`` of two tensors is pointwise, ``max`` over a dimension is not."""
    for overload, expected in (("other", True), ("dim", False), ("default", False)):
        call = Call(getattr(torch.ops.aten.max, overload), {}, [], fx.Graph().placeholder("x"))
        assert is_pointwise(call) == expected


@pytest.mark.parametrize("name", ["layer norm", "experts", "attend across"])
def test_check_row_independence_under_inference_mode(name: str):
    """There the dispatcher takes composite ops whole."""
    (piece,) = [piece for piece in PIECES if piece.name == name]
    with torch.inference_mode():
        inferred = infer(step_of([piece]), *make_batch([2, 1, 3], seed=0))
    assert inferred.row_safe == piece.safe, inferred.findings
