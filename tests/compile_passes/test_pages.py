"""States in the pages of one raw pool, compiled by Inductor."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mtpgraph
from mtpgraph.compile_passes import _compat, pages
from tests.helpers import assert_same_bits

from .support import INPUTS, Stream, hybrid_step, make_pools

GAP = 52  # bytes of a page in front of a state, which are nobody's; of no size that a batch has


def paged(states: Sequence[Tensor], order: Sequence[int], gap: int) -> tuple[Tensor, list[Tensor]]:
    """The raw pool, and the states as views into its pages, one behind the other in an order."""
    sizes = [math.prod(state.shape[1:]) * state.itemsize for state in states]
    ends, end = [0] * len(states), 0
    for i in order:
        end += gap + sizes[i]
        ends[i] = end
    page = -(-end // 16) * 16
    raw = torch.full((max(map(len, states)) * page,), 0xFF, dtype=torch.uint8)
    views = []
    for state, size, last in zip(states, sizes, ends, strict=True):
        view = raw.view(state.dtype).as_strided(
            state.shape,
            (page // state.itemsize, *state.stride()[1:]),
            (last - size) // state.itemsize,
        )
        view.copy_(state)
        views.append(view)
    return raw, views


def in_pages(
    pools: dict[str, Tensor], order: Sequence[int] = (0, 1), gap: int = GAP
) -> tuple[Tensor, dict[str, Tensor]]:
    """The pools of the hybrid step, of which the recurrent ones share pages."""
    raw, (conv, ssm) = paged([pools["conv"], pools["ssm"]], order, gap)
    others = {name: pool.clone() for name, pool in pools.items()}
    return raw, {**others, "conv": conv, "ssm": ssm}


def make_states(dtype: torch.dtype, state_dtype: torch.dtype, places: int = 4) -> dict[str, Tensor]:
    pools = make_pools(places, dtype)
    return pools | {"ssm": pools["ssm"].to(state_dtype)}


def check_steps(step: Any, stream: Stream, pools: dict[str, Tensor], *, exact: bool) -> None:
    """A few steps equal eager ones, in the states and in all bytes around them."""
    (raw, actual_pools), (expected_raw, expected_pools) = in_pages(pools), in_pages(pools)
    close = {} if exact else {"rtol": 0.05, "atol": 0.05}
    states = [(actual_pools[name], expected_pools[name]) for name in ("conv", "ssm")]
    for query_lens, new in ([2, 1, 2, 2], ()), ([2, 2, 1, 2], (1,)), ([1, 2, 2], (2,)):
        batch = stream.batch(query_lens, new)
        expected = hybrid_step(*batch, expected_pools)
        for a, b in zip(step(*batch, actual_pools), expected, strict=True):
            torch.testing.assert_close(a, b, **close)
            assert not a.isnan().any()
        for a, b in states:
            torch.testing.assert_close(a, b, equal_nan=True, **close)
            # each step begins with the same states
            a.copy_(b)
    # what lies around the states
    for state in itertools.chain(*states):
        state.zero_()
    assert_same_bits(raw, expected_raw)


each_dtypes = pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=["one dtype", "two dtypes", "half"],
)


@each_dtypes
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_pages_of_several_states(
    dtype: torch.dtype, state_dtype: torch.dtype, dynamic: bool | None
) -> None:
    step = torch.compile(hybrid_step, backend="mtpgraph", fullgraph=True, dynamic=dynamic)
    exact = dtype == torch.float32
    check_steps(step, Stream(4, dtype), make_states(dtype, state_dtype), exact=exact)
    stats = mtpgraph.stats(step)
    assert stats.rewrites["fuse_state_reset"] == 2 * stats.graphs
    _, pools = in_pages(make_states(dtype, state_dtype))
    assert mtpgraph.explain(hybrid_step, *Stream(4, dtype).batch([2, 1, 2, 2]), pools).notes == []


def test_pages_of_a_padded_step() -> None:
    dtypes = (torch.bfloat16, torch.float32)
    step = mtpgraph.compile(hybrid_step, inputs=INPUTS, sizes=[2, 4], next_n=2)
    check_steps(step, Stream(4, dtypes[0]), make_states(*dtypes), exact=False)


def test_pages_may_be_more_and_batches_longer_without_compiling_again() -> None:
    step = torch.compile(hybrid_step, backend="mtpgraph", fullgraph=True, dynamic=True)
    for places in (5, 7, 11):
        stream = Stream(places)
        _, actual = in_pages(make_pools(places))
        _, expected = in_pages(make_pools(places))
        for _ in range(2):
            batch = stream.batch([2] * places)
            for a, b in zip(step(*batch, actual), hybrid_step(*batch, expected), strict=True):
                torch.testing.assert_close(a, b)
    assert mtpgraph.stats(step).recompiles == 0


@pytest.mark.parametrize("layout", [{"order": (1, 0)}, {"gap": 68}], ids=["turned", "larger"])
def test_pages_of_another_layout_need_no_other_code(layout: dict[str, Any]) -> None:
    step = torch.compile(hybrid_step, backend="mtpgraph", fullgraph=True, dynamic=True)
    for given in ({}, layout):
        stream = Stream(5)
        _, actual = in_pages(make_pools(5), **given)
        _, expected = in_pages(make_pools(5), **given)
        for _ in range(2):
            batch = stream.batch([2, 1, 2, 2, 2])
            for a, b in zip(step(*batch, actual), hybrid_step(*batch, expected), strict=True):
                torch.testing.assert_close(a, b)
    assert mtpgraph.stats(step).recompiles == 0


def add_to_both(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    y.mul_(2)
    return x.sum() + y.sum()


def add_to_one(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x.sum() + y.sum()


def pairs(size: int, offset: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Two views into pages of 64 bytes, the second at an offset in bytes."""
    raw = torch.zeros(7 * 64, dtype=torch.uint8)
    x = raw.view(torch.float32).as_strided((5, size), (16, 1))
    stride = 64 // dtype.itemsize
    return x, raw.view(dtype).as_strided((5, 4), (stride, 1), offset // dtype.itemsize)


@pytest.mark.parametrize("fn", [add_to_both, add_to_one])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("size", "offset", "dtype"),
    [
        (8, 28, torch.float32),  # the last of a row is the first of the other
        (8, 24, torch.bfloat16),
        (20, 32, torch.float32),  # reaches into the next page, to nobody's bytes but its own
        (16, 56, torch.bfloat16),
    ],
)
def test_pages_that_share_bytes_need_eager(
    fn: Any, size: int, offset: int, dtype: torch.dtype, dynamic: bool | None
) -> None:
    step = torch.compile(fn, backend="mtpgraph", fullgraph=True, dynamic=dynamic)
    with pytest.raises(
        Exception, match=r' x and y share memory of which some is written.*engine="eager"'
    ):
        step(*pairs(size, offset, dtype))

    (note,) = mtpgraph.explain(fn, *pairs(size, offset, dtype)).notes
    assert note.startswith(
        "x and y share memory of which some is written, which Inductor takes only"
    )
    eager = mtpgraph.compile(fn, engine="eager")
    assert mtpgraph.explain(eager, *pairs(size, offset, dtype)).notes == []
    torch._dynamo.reset()
    step = torch.compile(fn, backend="mtpgraph", fullgraph=True, options={"engine": "eager"})
    actual, expected = pairs(size, offset, dtype), pairs(size, offset, dtype)
    torch.testing.assert_close(step(*actual), fn(*expected))
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("fn", [add_to_both, add_to_one])
@pytest.mark.parametrize(
    ("size", "offset", "dtype"),
    [(8, 32, torch.float32), (8, 32, torch.bfloat16), (3, 12, torch.bfloat16), (13, 52, None)],
)
def test_pages_side_by_side(fn: Any, size: int, offset: int, dtype: torch.dtype | None) -> None:
    """Byte behind byte, of plain PyTorch; the second may reach the next page."""
    dtype = dtype or torch.bfloat16
    step = torch.compile(fn, backend="mtpgraph", fullgraph=True)
    actual, expected = pairs(size, offset, dtype), pairs(size, offset, dtype)
    for _ in range(2):
        torch.testing.assert_close(step(*actual), fn(*expected))
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)


def past_the_end(x: Tensor, y: Tensor) -> Tensor:
    """Reads bytes of ``y`` through ``x``."""
    y.fill_(7)
    return x.as_strided((4, 2), (16, 1), 3).view(torch.int32) + 1


def with_grad(x: Tensor, y: Tensor) -> Tensor:
    y.add_(1)
    return (x * 2).sum() + y.sum()


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_steps_that_look_past_the_end_of_an_input_need_eager(dynamic: bool | None) -> None:
    step = torch.compile(past_the_end, backend="mtpgraph", fullgraph=True, dynamic=dynamic)
    with pytest.raises(Exception, match=r" x and y share memory of which some is written"):
        step(*pairs(3, 12, torch.bfloat16))


def test_inputs_that_autograd_follows_are_left_to_torch() -> None:
    x, y = pairs(3, 12, torch.bfloat16)
    step = torch.compile(with_grad, backend="mtpgraph", fullgraph=True)
    with pytest.raises(Exception, match=r" x and y share memory of which some is written"):
        step(x.detach().requires_grad_(), y)


@pytest.mark.parametrize("first", [(3, 12, torch.bfloat16), (3, 12, torch.float32), None])
def test_caches_of_torch_do_not_serve_inputs_that_share_other_bytes(
    first: tuple[int, int, torch.dtype] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their keys have neither the offset of an input nor which inputs share a storage."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    dtype = first[2] if first else torch.float32
    apart = [view.clone(memory_format=torch.preserve_format) for view in pairs(3, 12, dtype)]
    apart = [torch.zeros(5, 64 // v.itemsize, dtype=v.dtype)[:, : v.shape[1]] for v in apart]
    layouts = [apart, pairs(*first)] if first else [apart, torch.zeros(5, 16).split(8, dim=1)]
    if not first:
        whole = torch.zeros(5, 16)
        layouts.append((whole[:, :3], whole[:, 2:6]))
    for args in layouts:
        torch._dynamo.reset()
        step = torch.compile(add_to_both, backend="mtpgraph", fullgraph=True)
        copies = _detached(args)
        torch.testing.assert_close(step(*args), add_to_both(*copies))
        for a, b in zip(args, copies, strict=True):
            assert_same_bits(a, b)


def _detached(views: Sequence[Tensor]) -> list[Tensor]:
    """The same views of a copy of what they lie in."""
    copies: dict[int, Any] = {}
    found = []
    for view in views:
        storage = view.untyped_storage()
        copy = copies.setdefault(storage.data_ptr(), storage.clone())
        empty = torch.empty(0, dtype=view.dtype)
        found.append(empty.set_(copy, view.storage_offset(), view.shape, view.stride()))
    return found


def test_layouts_that_take_turns_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = torch.compile(add_to_both, backend="mtpgraph", fullgraph=True)
    layouts = [pairs(3, 12, torch.bfloat16) for _ in range(2)]
    for args in layouts:
        step(*args)
    monkeypatch.setattr(pages, "disjoint", None)
    for args in layouts * 2:
        step(*args)


def aliases(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    add_to_both(x, y)
    return x[1:], y.t(), y.view(torch.int16)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_pages_that_are_returned_stay_where_they_are(dynamic: bool | None) -> None:
    step = torch.compile(aliases, backend="mtpgraph", fullgraph=True, dynamic=dynamic)
    actual, expected = pairs(3, 12, torch.bfloat16), pairs(3, 12, torch.bfloat16)
    for a, b in zip(step(*actual), aliases(*expected), strict=True):
        assert_same_bits(a, b)
        assert a.data_ptr() - actual[0].data_ptr() == b.data_ptr() - expected[0].data_ptr()


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_no_pages(dynamic: bool | None) -> None:
    step = torch.compile(add_to_both, backend="mtpgraph", fullgraph=True, dynamic=dynamic)
    x, y = pairs(3, 12, torch.bfloat16)
    assert step(x[:0], y[:0]) == 0
    assert step(x, y) == 15


@torch.inference_mode()
def test_pages_in_inference_mode() -> None:
    step = torch.compile(add_to_both, backend="mtpgraph", fullgraph=True)
    assert step(*pairs(3, 12, torch.bfloat16)) == 15


def test_pages_that_share_bytes_later_are_refused() -> None:
    """Sizes, strides and dtypes are those that were compiled for, but not the offset."""
    step = torch.compile(add_to_both, backend="mtpgraph", fullgraph=True)
    step(*pairs(3, 12, torch.bfloat16))
    x, y = pairs(3, 10, torch.bfloat16)
    rule = (
        r"x of shape \[5, 3\], strides \(16, 1\) and offset 0 and y of shape \[5, 4\], "
        r"strides \(32, 1\) and offset 5 share bytes of one storage"
    )
    with pytest.raises(ValueError, match=rule):
        step(x, y)
    assert not x.any()
    step(*pairs(3, 12, torch.bfloat16))
    step(torch.zeros(5, 16)[:, :3], torch.zeros(5, 32, dtype=torch.bfloat16)[:, :4])


def seen_by_inductor(
    fn: Any, args: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[Any]]:
    """The inputs of the graph, and what Inductor gets in their place."""
    seen: list[tuple[list[Any], list[Any]]] = []
    compile_apart = pages.compile_apart

    def watched(graph: Any, inputs: Sequence[Any], compile_inputs: Any) -> Any:
        def compiled(got: list[Any], key: bytes) -> Any:
            seen.append((list(inputs), got))
            return compile_inputs(got, key)

        return compile_apart(graph, inputs, compiled)

    monkeypatch.setattr(pages, "compile_apart", watched)
    torch.compile(fn, backend="mtpgraph", fullgraph=True)(*args)
    return seen[0]


def test_layers_of_one_tensor_and_what_is_read_alone_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, read = torch.zeros(5, 2, 8), torch.randn(2, 6)

    def step(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return add_to_both(x, y) + (a.int() * b).sum()

    args = pool[:, 0], pool[:, 1], read.view(torch.int32)[:, 3:], read[:, :3]
    given, got = seen_by_inductor(step, args, monkeypatch)
    assert all(a is b for a, b in zip(given, got, strict=True))


def test_each_state_of_a_page_has_a_storage_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given, got = seen_by_inductor(add_to_both, pairs(3, 12, torch.bfloat16), monkeypatch)
    assert len({_compat.storage_key(value) for value in got}) == 2
    for a, b in zip(given, got, strict=True):
        layout = (a.shape, a.stride(), a.storage_offset(), a.dtype)
        assert layout == (b.shape, b.stride(), b.storage_offset(), b.dtype)
