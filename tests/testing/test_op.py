import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops, testing
from tests.helpers import nan_pool

X = torch.arange(1, 13, dtype=torch.float32).view(4, 3)
LIBRARY = torch.library.Library("mtpgraph_tests_op", "FRAGMENT")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None) -> Any:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CPU")
    if fake is not None:
        torch.library.register_fake(f"mtpgraph_tests_op::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.mtpgraph_tests_op, name)


def broken_rules(op: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        testing.assert_op(op, *args, **kwargs)
    told = str(caught.value)
    # the place is where the op was written: its fake, or the library
    assert re.search(rf"1\. {re.escape(__file__)}:\d+: `", told)
    assert "reason: " in told
    assert "instead: " in told
    return told


def _like(x: Tensor, factor: float = 2.0) -> Tensor:
    return torch.empty_like(x)


good = define("good(Tensor x, float factor=2.) -> Tensor", lambda x, f=2.0: x * f, _like)


def test_op_passes() -> None:
    testing.assert_op(good, X)
    testing.assert_op(good.default, X, factor=3.0)
    testing.assert_op(good, X[:1])
    testing.assert_op(good, X.T)


def _accumulate(x: Tensor, total: Tensor) -> None:
    total.add_(x.sum(0))


accumulate = define(
    "accumulate(Tensor x, Tensor(a!) total) -> ()", _accumulate, lambda x, total: None
)


def test_op_that_writes_what_it_declares_passes() -> None:
    total = torch.zeros(3)
    testing.assert_op(accumulate, X, total)
    assert not total.any()


def test_op_of_ours_passes() -> None:
    slots = torch.tensor([5, -1, 2], dtype=torch.int64)
    cache = nan_pool(2, 4 * (8 + 4), dtype=torch.uint8)
    testing.assert_op(torch.ops.mtpgraph.indexer_cache_write_, torch.randn(3, 8), slots, cache)
    lens = torch.tensor([3, 2], dtype=torch.int32)
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    testing.assert_op(torch.ops.mtpgraph.flatten_decode, starts, lens, 4)


@torch.library.custom_op("mtpgraph_tests_op::custom", mutates_args=())
def custom(x: Tensor) -> Tensor:
    return x + 1


def test_op_without_a_fake() -> None:
    told = broken_rules(custom, X)
    line = custom._init_fn.__code__.co_firstlineno
    assert f"1. {__file__}:{line}: `@torch.library.custom_op" in told
    assert "it has no fake" in told
    assert '@torch.library.register_fake("mtpgraph_tests_op::custom")' in told


def _writes_secretly(x: Tensor) -> Tensor:
    y = x + 1
    x[1, 2] = 7
    return y


def test_op_that_writes_an_argument_secretly() -> None:
    op = define("secret(Tensor x) -> Tensor", _writes_secretly, torch.empty_like)
    told = broken_rules(op, X.clone())
    assert "it writes x, which its schema does not declare: x[1, 2]: before 6.0, after 7.0" in told
    assert "Tensor(a!) x" in told


def test_op_that_returns_its_input() -> None:
    op = define("same(Tensor x) -> Tensor", lambda x: x, torch.empty_like)
    told = broken_rules(op, X)
    assert "output 0 shares the memory of x" in told
    assert "return x.clone()" in told


def test_op_whose_outputs_share_memory() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y.view_as(y)

    op = define(
        "twice(Tensor x) -> (Tensor, Tensor)",
        twice,
        lambda x: (torch.empty_like(x), torch.empty_like(x)),
    )
    assert "outputs 0 and 1 share memory" in broken_rules(op, X)


def _leaves_unwritten(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:3] = x[:3]
    return y


def test_op_that_leaves_memory_unwritten() -> None:
    op = define("unwritten(Tensor x) -> Tensor", _leaves_unwritten, torch.empty_like)
    told = broken_rules(op, X)
    assert "output 0 holds memory that was never written: output 0[3, 0]" in told
    assert "when fresh memory holds NaN nan" in told


@pytest.mark.parametrize(
    ("fake", "told"),
    [
        (lambda x: x.new_empty(x.shape[0], 1), "shape [4, 1], the op gives [4, 3]"),
        (lambda x: torch.empty_like(x, dtype=torch.float64), "dtype torch.float64"),
        (lambda x: x.new_empty(3, 4).T, "strides [1, 4], the op gives [3, 1]"),
    ],
    ids=["shape", "dtype", "strides"],
)
def test_op_whose_fake_is_wrong(fake: Callable[..., Tensor], told: str, request: Any) -> None:
    name = f"wrong_{request.node.callspec.id}"
    op = define(f"{name}(Tensor x) -> Tensor", lambda x: x * 2, fake)
    assert f"the fake of output 0 has {told}" in broken_rules(op, X)


def test_op_that_fails_on_an_empty_batch() -> None:
    def kernel(x: Tensor) -> Tensor:
        return x - x.amax()

    op = define("no_rows(Tensor x) -> Tensor", kernel, torch.empty_like)
    told = broken_rules(op, X)
    assert "its fake accepts a batch of no rows, the op fails" in told


def test_op_that_takes_strides_for_granted() -> None:
    def kernel(x: Tensor) -> Tensor:
        flat = torch.tensor([], dtype=x.dtype).set_(x.untyped_storage())
        return flat[: x.numel()].view(x.shape) * 2

    op = define("flat(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape))
    told = broken_rules(op, X.clone())
    assert "output 0 depends on the memory layout of x: output 0[0, 1]: contiguous 4.0" in told


def test_op_that_refuses_strides_passes() -> None:
    def kernel(x: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise ValueError("x must be contiguous")
        return x * 2

    op = define("contiguous(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape))
    testing.assert_op(op, X)


def test_op_must_be_one_op() -> None:
    with pytest.raises(TypeError, match=r"op must be an op of torch\.ops or a custom_op"):
        testing.assert_op(lambda x: x, X)
    with pytest.raises(TypeError, match="op must be one overload"):
        testing.assert_op(torch.ops.aten.add, X, X)


def test_op_takes_a_function_of_ours() -> None:
    logits = torch.randn(3, 9)
    testing.assert_op(ops.indexer_topk, logits, torch.tensor([9, 4, 0], dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="topk must be at least 1"):
        testing.assert_op(ops.indexer_topk, logits, torch.tensor([9, 4, 0], dtype=torch.int32), 0)


def test_op_runs_on_copies() -> None:
    total = torch.zeros(3)
    testing.assert_op(accumulate, X, total=total)
    assert not total.any()
    assert Path(__file__).exists()
