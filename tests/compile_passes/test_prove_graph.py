"""The graph that runs on padding is the graph that is proven, whatever made Dynamo compile it."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtpgraph
from mtpgraph import Batched, Static, ops
from mtpgraph.compile_passes.buffers import Buffers

_NOT_PADDED = pytest.mark.filterwarnings("ignore:batches are not padded:RuntimeWarning")


@pytest.fixture(autouse=True)
def _nan_in_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding of floating point inputs holds NaN: whatever meets it shows."""
    pad = Buffers._pad

    def poison(self: Any, name: str, count: int) -> None:
        pad(self, name, count)
        spec, buffer = self._specs[name], self.tensors[name]
        if buffer.dtype.is_floating_point and spec.pad == 0 and count < buffer.shape[spec.dim]:
            buffer.narrow(spec.dim, count, buffer.shape[spec.dim] - count).fill_(torch.nan)

    monkeypatch.setattr(Buffers, "_pad", poison)


def lens(*query_lens: int) -> tuple[Tensor, Tensor]:
    """``query_start_loc`` and ``seq_lens``."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return starts, torch.tensor(query_lens, dtype=torch.int32) + 4


def batch_of(*query_lens: int) -> tuple[Tensor, ...]:
    return torch.randn(sum(query_lens), 4), *lens(*query_lens)


def with_lens(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return x + row_lens[:, None]


def make_step(value: Callable[..., Any]) -> Callable[..., Any]:
    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Any:
        return value(with_lens(x, query_start_loc, seq_lens), query_start_loc, seq_lens)

    return step


class MixesOnDemand(nn.Module):
    """Another graph from when its attribute is set."""

    mixes = False

    def forward(self, x: Tensor, q: Tensor, s: Tensor) -> Tensor:
        x = with_lens(x, q, s)
        return x - x.mean(0) if self.mixes else x  # here


def compile_step(step: Any, **options: Any) -> mtpgraph.CompiledStep:
    return mtpgraph.compile(step, **{"sizes": [2, 4, 8], "next_n": 3, "engine": "eager", **options})


def assert_like_eager(compiled: Any, step: Any, *calls: Sequence[Any]) -> None:
    for args in calls:
        torch.testing.assert_close(compiled(*args), step(*args), equal_nan=False)


def last_rows(x: Tensor, query_start_loc: Tensor) -> Tensor:
    return x[(query_start_loc[1:] - 1).clamp(min=0)]


def _uniform(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    if x.shape[0] == 3 * s.shape[0]:  # here
        return x.view(-1, 3, 4)[:, -1]
    return last_rows(x, q)


def _uniform_by_difference(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    if x.shape[0] - s.shape[0] == 2 * s.shape[0]:  # here
        return x.view(-1, 3, 4)[:, -1]
    return last_rows(x, q)


def _uniform_by_truth(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    ragged = not (x.shape[0] - 3 * s.shape[0])  # here
    return x * 2 if ragged else x


def _shapes_compared(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    if s.repeat_interleave(3).shape == x[:, 0].shape:  # here
        return x * 2
    return x


def _tuned(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return x - x.mean(0) if x.shape[0] in (24, 48) else x  # here


def _divided(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return x - x.mean(0) if x.shape[0] % 12 == 0 else x  # here


def _long(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 10 else x  # here


def _refused(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
    if x.shape[0] == 12:  # here
        raise ValueError("twelve")
    return x


DECISIONS = [
    _uniform,
    _uniform_by_difference,
    _uniform_by_truth,
    _shapes_compared,
    _tuned,
    _divided,
    _long,
    _refused,
]


@_NOT_PADDED
@pytest.mark.parametrize("value", DECISIONS)
@pytest.mark.parametrize("first", [(1, 3, 1), (3, 3)], ids=["ragged", "uniform"])
def test_a_branch_on_the_size_of_a_batch_runs_each_batch_as_it_is(
    value: Callable[..., Any], first: tuple[int, ...]
):
    step = make_step(value)
    compiled = compile_step(step)
    batches = [first, (3, 1, 1), (1, 2, 3, 1), (1, 1, 1, 1, 1, 3, 2), (3, 3, 3)]
    assert_like_eager(compiled, step, *(batch_of(*query_lens) for query_lens in batches))
    ragged = [lens for lens in batches if sum(lens) != 3 * len(lens)]
    assert compiled.stats().calls[None] >= len(ragged)
    if first == (1, 3, 1):
        assert set(compiled.stats().calls) == {None}
        source, start = inspect.getsourcelines(value)
        lines = [start + at for at, text in enumerate(source) if text.endswith("# here\n")]
        found = [f for f in compiled.stats().findings if f.kind == "batch size as value"]
        assert found[0].line == lines[0]


@_NOT_PADDED
def test_a_size_above_any_sample_is_asked_about():
    table = torch.randn(5000, 4)
    step = make_step(lambda x, q, s: (x, table[: x.shape[0]].sum(1)))
    compiled = compile_step(step, sizes=[4, 8192], next_n=1)
    assert_like_eager(compiled, step, batch_of(1, 1, 1), batch_of(*[1] * 4500))
    assert compiled.stats().calls == {4: 1, None: 1}


@_NOT_PADDED
def test_a_branch_beyond_old_samples():
    step = make_step(lambda x, q, s: x * 2 if x.shape[0] > 4096 else x)
    compiled = compile_step(step, sizes=[4, 8192], next_n=1)
    assert_like_eager(compiled, step, batch_of(1, 1, 1), batch_of(1, 1, 1, 1, 1))
    assert set(compiled.stats().calls) == {None}


def test_a_branch_that_no_padded_batch_comes_to_is_padded():
    step = make_step(lambda x, q, s: x * 2 if x.shape[0] > 4096 else x)
    compiled = compile_step(step)
    assert_like_eager(compiled, step, batch_of(1, 3, 1), batch_of(*[3] * 8))
    assert (compiled.stats().calls, compiled.stats().findings) == ({4: 1, 8: 1}, [])


ALIKE: dict[str, Callable[..., Any]] = {
    "always larger": lambda x, q, s: x * 2 if x.shape[0] + s.shape[0] > 1 else x,
    "never odd": lambda x, q, s: x if 2 * x.shape[0] + 1 == 2 * s.shape[0] else x * 2,
    "of a fixed size": lambda x, q, s: x * 2 if x.shape[1] == 4 else x,
    "offsets": lambda x, q, s: x * 2 if q.shape[0] == s.shape[0] + 1 else x,
    "elements": lambda x, q, s: x * 2 if x.numel() % 4 == 0 else x,
    "an even view": lambda x, q, s: x.reshape(-1, 2, 2).flip(-1).flatten(1),
    "squeeze of a fixed dimension": lambda x, q, s: x[:, :1].squeeze(-1) * 2,
    "squeeze of what was added": lambda x, q, s: (x[None].squeeze(0), s[:, None].squeeze(1)),
}
"""What holds whatever the size of the batch."""


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_alike_for_every_size_is_padded(name: str):
    step = make_step(ALIKE[name])
    compiled = compile_step(step, sizes=[1, 2, 4, 8])
    batches = [(1, 3, 1), (1,), (3,), (1, 1), (3, 3)]
    assert_like_eager(compiled, step, *(batch_of(*query_lens) for query_lens in batches))
    assert (compiled.stats().calls[None], compiled.stats().findings) == (0, [])


ONE: dict[str, tuple[Callable[..., Any], str]] = {
    "one token": (lambda x, q, s: x * 2 if x.shape[0] == 1 else x, "1 request and 1 token"),
    "one request": (lambda x, q, s: x * 2 if s.shape[0] == 1 else x, "1 request"),
    "more than one": (lambda x, q, s: x - x.mean(-1, True) if s.shape[0] > 1 else x, "1 request"),
    "one less": (lambda x, q, s: x * 2 if s.shape[0] - 1 else x * 3, "1 request"),
    "long ones": (
        lambda x, q, s: x * 2 if s.shape[0] == 1 and x.shape[0] > 2 else x,
        "1 request",
    ),
}
"""A branch that a trace of many folds, and what is found of it."""


@_NOT_PADDED
@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("first", [(2, 1, 2), (1,)], ids=["many", "one"])
@pytest.mark.parametrize("specialize", [[], [1]], ids=["symbolic", "static"])
def test_a_batch_of_one_that_is_computed_otherwise_runs_as_it_is(
    name: str, first: tuple[int, ...], specialize: list[int]
):
    value, what = ONE[name]
    step = make_step(value)
    compiled = compile_step(step, sizes=[1, 2, 4, 8], specialize=specialize)
    batches = [first, (1,), (1, 2), (2,), (3,), (1,), (2, 1, 2), (2,)]
    assert_like_eager(compiled, step, *(batch_of(*query_lens) for query_lens in batches))
    assert compiled.stats().calls[4] == batches.count((2, 1, 2))
    found = compiled.stats().findings
    assert {finding.kind for finding in found} == {"batch size as value"}
    assert any(what in finding.reason for finding in found)
    assert all(finding.file == __file__ and finding.line for finding in found)


@_NOT_PADDED
@pytest.mark.parametrize(
    "value",
    [
        lambda x, q, s: x[:, :1].squeeze(),
        lambda x, q, s: x.squeeze(0),
        lambda x, q, s: (x, s.squeeze() * 2),
        lambda x, q, s: x[None].squeeze((0, 1)),
    ],
    ids=["all", "first", "requests", "several"],
)
def test_squeeze_of_what_grows_is_not_padded(value: Callable[..., Any]):
    step = make_step(value)
    compiled = compile_step(step, sizes=[1, 2, 4, 8])
    batches = [(2, 1, 2), (1,), (2,), (1, 2)]
    assert_like_eager(compiled, step, *(batch_of(*query_lens) for query_lens in batches))
    assert set(compiled.stats().calls) == {None}
    (finding,) = compiled.stats().findings
    assert "squeeze(-1)" in finding.remedy
    assert ".squeeze(" in finding.code


def test_a_batch_of_one_is_traced_once_for_each_thing_there_is_one_of(
    monkeypatch: pytest.MonkeyPatch,
):
    from mtpgraph.compile_passes import proofs as module

    traced = []
    outline = module.outline_of_batch

    def count(*args: Any) -> Any:
        traced.append(args[2:])
        return outline(*args)

    monkeypatch.setattr(module, "outline_of_batch", count)
    step = make_step(lambda x, q, s: x * 2)
    compiled = compile_step(step, sizes=[1, 2, 4, 8])
    batches = [(2, 1), (1,), (2,), (3,), (1,), (5,), (1, 2), (2,)]
    assert_like_eager(compiled, step, *(batch_of(*query_lens) for query_lens in batches))
    assert traced == [(1, 1), (1, None)]
    assert compiled.stats().calls[None] == 0


@_NOT_PADDED
def test_a_batch_of_none_that_is_computed_otherwise_runs_as_it_is():
    step = make_step(lambda x, q, s: x.new_ones(1, 4) if x.shape[0] == 0 else x)
    compiled = compile_step(step)
    assert_like_eager(compiled, step, batch_of(2, 1), batch_of(), batch_of(0, 0), batch_of(2, 1))
    assert compiled.stats().calls == {2: 2, None: 2}


@_NOT_PADDED
@pytest.mark.parametrize("mixes", [False, True], ids=["alike", "otherwise"])
def test_warm_up_looks_at_batches_of_one(mixes: bool, monkeypatch: pytest.MonkeyPatch):
    step = make_step(lambda x, q, s: x * 2 if mixes and s.shape[0] == 1 else x)
    compiled = compile_step(step, sizes=[1, 2, 4])
    compiled.warm_up(*batch_of(2, 1))
    found = compiled.stats().findings
    assert [finding.kind for finding in found] == ["batch size as value"] * (2 * mixes)

    def refuse(*_: Any) -> None:
        raise AssertionError("traced after warm_up")

    monkeypatch.setattr("mtpgraph.compile_passes.proofs.outline_of_batch", refuse)
    monkeypatch.setattr("mtpgraph.compile_passes.proofs.prove_graph", refuse)
    batches = [(1,), (3,), (2,), (1, 2)]
    assert_like_eager(compiled, step, *(batch_of(*query_lens) for query_lens in batches))
    assert compiled.stats().calls[None] == 3 * mixes


class Sizes:
    """Steps whose graph is another for another size that does not grow."""

    @staticmethod
    def draft(x: Tensor, slots: Tensor, draft: Tensor, kv: Tensor) -> Tensor:
        unpadded = slots if draft.shape[1] > 1 else slots.clamp(min=0)
        ops.kv_cache_write_(x, unpadded, kv)  # here
        return draft * (slots >= 0)[:, None]


@_NOT_PADDED
@pytest.mark.parametrize("widths", [(2, 1, 2, 3), (1, 2, 1)], ids=str)
def test_another_width_is_another_graph_and_proven_by_itself(widths: tuple[int, ...]):
    compiled = compile_step(Sizes.draft, next_n=1)
    kv, expected = torch.ones(4, 4, 2), torch.ones(4, 4, 2)
    for width in widths:
        x, slots, draft = torch.randn(3, 2), torch.tensor([3, 5, 7]), torch.randn(3, width)
        actual = compiled(x, slots, draft, kv)
        torch.testing.assert_close(actual, Sizes.draft(x, slots, draft, expected))
        torch.testing.assert_close(kv, expected)
    assert compiled.stats().calls == {4: sum(k > 1 for k in widths), None: widths.count(1)}
    (finding,) = compiled.stats().findings
    assert finding.kind == "padding unknown"
    assert finding.code.endswith("# here")


@_NOT_PADDED
@pytest.mark.parametrize("rows", [(5, 1, 5), (1, 5)], ids=str)
def test_a_static_table_of_one_row_is_another_graph(rows: tuple[int, ...]):
    def step(x: Tensor, q: Tensor, s: Tensor, table: Tensor) -> Tensor:
        x = with_lens(x, q, s)
        return x - x.mean(0) if table.shape[0] == 1 else x + table[0]  # here

    compiled = compile_step(step)
    calls = [(*batch_of(2, 1, 2), torch.randn(count, 4)) for count in rows]
    assert_like_eager(compiled, step, *calls)
    assert compiled.stats().calls == {4: rows.count(5), None: rows.count(1)}
    assert "# here" in next(f for f in compiled.stats().findings if f.kind == "rows mixed").code


@_NOT_PADDED
@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_tensors_in_a_list_may_be_others(what: str):
    def step(x: Tensor, q: Tensor, s: Tensor, more: list[Tensor]) -> Tensor:
        x = with_lens(x, q, s)
        mixes = more[0].dtype == torch.int32 if what == "dtype" else more[0].shape[0] == 2
        return x - x.mean(0) if mixes else x + more[0].sum()

    compiled = compile_step(step)
    plain, other = torch.ones(3), torch.ones(3).int() if what == "dtype" else torch.ones(2)
    calls = [(*batch_of(2, 1, 2), [more]) for more in (plain, other, plain, other)]
    assert_like_eager(compiled, step, *calls)
    assert compiled.stats().calls == {4: 2, None: 2}


@_NOT_PADDED
def test_an_attribute_that_is_set_between_calls_is_another_graph():
    module = MixesOnDemand()
    compiled = compile_step(module)
    assert_like_eager(compiled, module, batch_of(1, 2, 1), batch_of(1, 1))
    module.mixes = True
    # of the two sizes that have run the graphs stay; this is a third
    assert_like_eager(compiled, module, batch_of(1, 2, 1, 1, 1), batch_of(2, 2, 2, 2, 1))
    assert compiled.stats().calls == {4: 1, 2: 1, None: 2}
    assert compiled.stats().findings[-1].code.endswith("# here")


@_NOT_PADDED
def test_inputs_that_lie_otherwise_are_asked_about():
    def step(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
        y = with_lens(x, q, s)
        return y if x.is_contiguous() else y * 2  # here

    compiled = compile_step(step)
    x, *others = batch_of(2, 1, 2)
    wide = torch.randn(5, 8)[:, :4]
    assert_like_eager(compiled, step, (x, *others), (wide, *others), (x, *others))
    assert compiled.stats().calls == {4: 2, None: 1}
    (finding,) = compiled.stats().findings
    assert "lies in memory otherwise" in finding.reason


def test_inputs_that_lie_otherwise_are_padded_where_nothing_asks():
    step = make_step(lambda x, q, s: x * 2)
    compiled = compile_step(step)
    x, *others = batch_of(2, 1, 2)
    wide, columns = torch.randn(5, 8)[:, :4], torch.randn(4, 5).t()
    assert_like_eager(compiled, step, *((y, *others) for y in (x, wide, columns, wide)))
    assert (compiled.stats().calls, compiled.stats().findings) == ({4: 4}, [])


@_NOT_PADDED
@pytest.mark.parametrize("rows", [("one", "tokens", "one"), ("tokens", "one"), ("one", "requests")])
def test_an_input_of_one_row_may_have_more_later(rows: tuple[str, ...]):
    def step(x: Tensor, q: Tensor, s: Tensor, bias: Tensor) -> Tensor:
        y = with_lens(x, q, s)
        return y + (bias if bias.shape[0] != s.shape[0] else bias.sum(0))

    compiled = compile_step(step)
    counts = {"one": 1, "tokens": 5, "requests": 3}
    calls = [(*batch_of(2, 1, 2), torch.randn(counts[row], 4)) for row in rows]
    assert_like_eager(compiled, step, *calls)


@_NOT_PADDED
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
def test_groups_of_another_width_are_other_groups(used: bool):
    def step(x: Tensor, q: Tensor, s: Tensor, draft: Tensor) -> Any:
        y = with_lens(x, q, s).view(-1, draft.shape[1] + 1, 4).cumsum(1).flatten(0, 1)
        return (y, draft * (s > 0)[:, None]) if used else y

    compiled = compile_step(step, next_n=6)
    for width in (2, 1, 2, 1):
        args: tuple[Any, ...] = (*batch_of(6, 6), torch.randn(2, width))
        torch.testing.assert_close(compiled(*args), step(*args))


@_NOT_PADDED
def test_a_table_in_a_dict_or_a_module_may_get_shorter():
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(64, 4), requires_grad=False)

        def forward(self, x: Tensor, q: Tensor, s: Tensor, tables: dict[str, Tensor]) -> Tensor:
            count = x.shape[0]
            return with_lens(x, q, s) * self.table[:count] + tables["cos"][:count]

    for where in ("module", "dict"):
        module: Any = Module()
        compiled = compile_step(module)
        for rows in (64, 6, 5):
            if where == "module":
                module.table = nn.Parameter(torch.randn(rows, 4), requires_grad=False)
            tables = {"cos": torch.randn(rows if where == "dict" else 64, 4)}
            args = (*batch_of(2, 1, 2), tables)
            torch.testing.assert_close(compiled(*args), module(*args))


def test_static_code_is_laid_beside_the_code_that_is_proven():
    step = make_step(lambda x, q, s: x * 2)
    compiled = compile_step(step, sizes=[2, 4], specialize=[2], next_n=2)
    assert_like_eager(compiled, step, batch_of(1, 1), batch_of(2, 2), batch_of(2, 1), batch_of(2))
    assert compiled.stats().calls == {2: 4}


@_NOT_PADDED
def test_static_code_that_is_other_code_serves_only_what_fills_it():
    module = MixesOnDemand()
    compiled = compile_step(module, sizes=[2, 4], specialize=[2], next_n=2)
    assert_like_eager(compiled, module, batch_of(1, 2, 1))
    module.mixes = True
    assert_like_eager(compiled, module, batch_of(2, 1), batch_of(1, 1))
    assert compiled.stats().calls == {4: 1, None: 2}


def test_declared_inputs_are_padded_with_a_warning():
    inputs = {
        "x": Batched(per="token"),
        "query_start_loc": Batched(pad="last", extra=1),
        "seq_lens": Batched(),
    }
    step = make_step(lambda x, q, s: x * 2 if x.shape[0] == 3 * s.shape[0] else x)
    compiled = compile_step(step, inputs=inputs)
    with pytest.warns(RuntimeWarning, match=r"padding may reach real rows: .*Ne\(tokens"):
        compiled(*batch_of(1, 3, 1))
    assert compiled.stats().calls == {4: 1}


def test_strict_refuses_a_graph_that_is_not_proven():
    compiled = compile_step(Sizes.draft, next_n=1, strict=True)
    slots, kv = torch.tensor([3, 5, 7]), torch.ones(4, 4, 2)
    compiled(torch.randn(3, 2), slots, torch.randn(3, 2), kv)
    for _ in range(2):
        before = kv.clone()
        with pytest.raises(ValueError, match=r"batches are not padded: .*slot_mapping"):
            compiled(torch.randn(3, 2), slots, torch.randn(3, 1), kv)
        assert torch.equal(kv, before)


def test_an_input_that_nothing_ties_to_the_batch_is_named():
    def step(x: Tensor, q: Tensor, s: Tensor, last: Tensor) -> Tensor:
        return with_lens(x, q, s)[last.clamp(min=0)]

    compiled = compile_step(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for query_lens in ((2, 1, 2), (1, 2), (1, 1, 1, 1)):
            args = batch_of(*query_lens)
            assert_like_eager(compiled, step, (*args, args[1][1:].long() - 1))
    assert compiled.inputs["last"] == Static()
    (finding,) = compiled.stats().findings
    assert finding.reason.startswith("last was [3] and is [2]")
    assert finding.remedy == 'declare inputs={"last": Batched(...)} or Static'
