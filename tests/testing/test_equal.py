from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from mtpgraph import testing
from tests.compile_passes import support

from . import models

X = torch.arange(12, dtype=torch.float32).view(4, 3)


def line_of(marker: str) -> str:
    """``file:line`` of the line of this file that ends in ``# marker``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"{__file__}:{number}"


def drops_writes(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that forgets every write in place."""
    for node in gm.graph.nodes:
        if node.op == "call_method" and str(node.target).endswith("_"):
            node.target = str(node.target).removesuffix("_")
    gm.recompile()
    return gm.forward


def off_by_little(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that rounds otherwise."""

    def run(*args: Any) -> Any:
        return tuple(output * (1 + 1e-4) for output in gm.forward(*args))

    return run


def refused(fn: Callable[..., object], *args: object, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        testing.assert_compiled_equals_eager(fn, *args, **kwargs)
    return str(caught.value)


def test_compiled_equals_eager_passes_with_inductor() -> None:
    step, total = models.with_closure()
    testing.assert_compiled_equals_eager(step, X)
    testing.assert_compiled_equals_eager(models.Mlp(), X)
    assert not total.any()


@pytest.mark.parametrize("backend", ["eager", "mtpgraph"])
def test_compiled_equals_eager_passes_with_ours(backend: str) -> None:
    stream = support.Stream(3)
    options = {"engine": "eager"} if backend == "mtpgraph" else None
    batch, pools = stream.batch([1, 2, 1]), support.make_pools(3)
    before = support.copy_pools(pools)
    found = testing.assert_compiled_equals_eager(
        support.hybrid_step, *batch, pools, backend=backend, options=options
    )
    assert len(found.graphs) == 1
    assert torch.equal(pools["ssm"].view(torch.uint8), before["ssm"].view(torch.uint8))


def test_compiled_equals_eager_draws_the_same_random_numbers() -> None:
    testing.assert_compiled_equals_eager(lambda x: x + torch.rand_like(x), X)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.cache.add_(x)  # module buffer
        return x + 1


def argument(x: Tensor, caches: list[dict[str, Tensor]]) -> Tensor:
    caches[1]["k"].add_(x)  # nested argument
    return x + 1


POOL = torch.zeros(4, 3)


def global_pool(x: Tensor) -> Tensor:
    POOL.add_(x)  # global
    return x + 1


BUFFERS = {
    "module buffer": (Cached(), (), "self.cache"),
    "nested argument": (
        argument,
        ([{"k": torch.zeros(4, 3)}, {"k": torch.zeros(4, 3)}],),
        "caches[1]['k']",
    ),
    "global": (global_pool, (), "global POOL"),
}


@pytest.mark.parametrize("marker", BUFFERS)
def test_compiled_equals_eager_compares_every_buffer(marker: str) -> None:
    fn, more, name = BUFFERS[marker]
    told = refused(fn, X, *more, backend=drops_writes)
    assert f"written differently: {name}[0, 1]: eager 2.0, compiled 0.0 (11 of 12" in told
    assert "instead: " in told


def test_compiled_equals_eager_compares_a_closure() -> None:
    step, _ = models.with_closure()
    assert "closure total[0]: eager 36.0, compiled 0.0" in refused(step, X, backend=drops_writes)


def test_compiled_equals_eager_names_output_index_and_values() -> None:
    told = refused(lambda x: {"y": [x + 1, x * 2]}, X, backend=off_by_little)
    assert "output['y'][0][0, 0]: eager 1.0, compiled 1.0001" in told
    assert f"1. {__file__}:" in told
    testing.assert_compiled_equals_eager(lambda x: x + 1, X, backend=off_by_little, rtol=1e-3)


def test_compiled_equals_eager_sees_memory_never_written() -> None:
    def step(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[:2] = x[:2]
        return y

    def zeroing(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            if node.target is torch.empty_like:
                node.target = torch.zeros_like
        gm.recompile()
        return gm.forward

    assert "output[2, 0]: eager nan, compiled 0.0" in refused(step, X, backend=zeroing)


def test_compiled_equals_eager_of_nothing_is_a_failure() -> None:
    assert "was not compiled" in refused(lambda x: 3, X, backend="eager")


LIBRARY = torch.library.Library("mtpgraph_tests_equal", "FRAGMENT")
LIBRARY.define("add_shifted_(Tensor(a!) into, Tensor source) -> ()")
LIBRARY.impl("add_shifted_", lambda into, source: _add_shifted(into, source), "CPU")
torch.library.register_fake(
    "mtpgraph_tests_equal::add_shifted_", lambda into, source: None, lib=LIBRARY
)


def _add_shifted(into: Tensor, source: Tensor) -> None:
    for row in range(1, len(into)):
        into[row] += source[row - 1]


def shifts(state: Tensor) -> Tensor:
    old = state.clone()  # hazard
    torch.ops.mtpgraph_tests_equal.add_shifted_(state, old)
    return state + 1


@pytest.mark.skipif(
    torch.__version__ >= "2.15", reason="torch 2.15 keeps the copy that older torch drops"
)
def test_compiled_equals_eager_names_the_hazard() -> None:
    """Inductor drops the copy and computes wrongly, silently; the backend of ours does not."""
    told = refused(shifts, X.clone() + 1)
    assert "written differently: state[2, 0]: eager " in told
    assert f"1. {line_of('hazard')}: `old = state.clone()" in told
    assert "Inductor would drop the copy" in told
    assert "instead: with backend='mtpgraph' this is put right" in told
