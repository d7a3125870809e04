import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import mtpgraph
from mtpgraph import ops
from mtpgraph.compile_passes import PASSES, graph_pass
from mtpgraph.compile_passes.backend import Artifact
from mtpgraph.compile_passes.graph_pass import PassManager
from mtpgraph.compile_passes.report import ReportError
from tests.helpers import assert_same_bits

from .support import DIM, Stream, copy_pools, hybrid_step, make_pools


def run_alone(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_backend_is_found_without_an_import():
    """torch finds the backend by its entry point; nothing of ours is imported before its use."""
    out = run_alone(
        "import sys, torch\n"
        "assert 'mtpgraph' in torch._dynamo.list_backends()\n"
        "assert 'mtpgraph' not in sys.modules\n"
        "f = torch.compile(lambda x: x + 1, backend='mtpgraph', fullgraph=True,\n"
        "                  options={'engine': 'eager'})\n"
        "print(f(torch.ones(2)).tolist(), 'mtpgraph' in sys.modules)\n"
    )
    assert out.strip() == "[2.0, 2.0] True"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_backend_equals_eager_on_poisoned_pools(dtype: torch.dtype, engine: str):
    stream, pools = Stream(4, dtype), make_pools(4, dtype)
    expected_pools = copy_pools(pools)
    compiled = torch.compile(
        hybrid_step, backend="mtpgraph", fullgraph=True, options={"engine": engine}
    )
    # Inductor keeps the sum of a step in fp32 where eager rounds it to the half type
    exact = dtype == torch.float32 or engine == "eager"
    for query_lens, new in ([2, 1, 2, 2], ()), ([2, 2, 1, 2], (1,)), ([1, 2, 2, 2], (3,)):
        batch = stream.batch(query_lens, new)
        expected = hybrid_step(*batch, expected_pools)
        actual = compiled(*batch, pools)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, **({} if exact else {"rtol": 0.05, "atol": 0.05}))
            assert not a.isnan().any()
        if exact:
            for name, pool in pools.items():
                torch.testing.assert_close(pool, expected_pools[name], equal_nan=True)
    stats = mtpgraph.stats(compiled)
    assert stats.rewrites == {"fuse_select": 1, "fuse_state_reset": 2}
    assert stats.graph_breaks == 0


def test_backend_updates_pools_in_place():
    """Compiled code makes no copy of a cache: no buffer of its shape, no copy back."""
    stream, pools = Stream(4), make_pools(4)
    compiled = torch.compile(hybrid_step, backend="mtpgraph", fullgraph=True)
    _, (code,) = run_and_get_code(compiled, *stream.batch([2, 2, 2, 2]), pools)
    for name in ("index_k", "conv", "ssm"):
        shape = tuple(pools[name].shape)
        assert f"empty_strided_cpu({shape}" not in code, f"{name} is copied"
        assert f"empty_strided({shape}" not in code, f"{name} is copied"
    assert "auto_functionalized" not in code


def test_backend_counts_graphs_breaks_and_recompiles():
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    compiled = torch.compile(fn, backend="mtpgraph", options={"engine": "eager"}, dynamic=False)
    compiled(torch.ones(2))
    assert (mtpgraph.stats(compiled).graphs, mtpgraph.stats(compiled).graph_breaks) == (2, 1)
    assert mtpgraph.stats(compiled).recompiles == 0

    whole = torch.compile(
        lambda x: x * 3, backend="mtpgraph", options={"engine": "eager"}, dynamic=False
    )
    for size in (2, 3, 2):
        whole(torch.ones(size))
    assert mtpgraph.stats(whole).graphs == 2
    assert mtpgraph.stats(whole).recompiles == 1


class Twice(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("module", [Twice(), torch.nn.ReLU()])
def test_backend_stats_of_a_module(module: torch.nn.Module):
    compiled = torch.compile(module, backend="mtpgraph", options={"engine": "eager"})
    compiled(torch.ones(1, 2))
    assert mtpgraph.stats(compiled).graphs == 1


def test_stats_refuse_what_is_not_compiled():
    with pytest.raises(TypeError, match="compiled must be a compiled function or step, got"):
        mtpgraph.stats(len)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"engin": "eager"}, "unknown option 'engin'; did you mean 'engine'"),
        ({"sizes": [1]}, "option 'sizes' needs mtpgraph.compile"),
        ({"next_n": 2}, "option 'next_n' needs mtpgraph.compile"),
    ],
)
def test_backend_refuses_options(options: dict, match: str):
    compiled = torch.compile(lambda x: x + 1, backend="mtpgraph", options=options)
    with pytest.raises(Exception, match=match):
        compiled(torch.ones(1))


def test_backend_refuses_a_mode():
    gm = torch.fx.symbolic_trace(lambda x: x)
    with pytest.raises(ValueError, match="backend 'mtpgraph' takes no mode, got 'max-autotune'"):
        mtpgraph.compile_passes.backend.backend(gm, [], mode="max-autotune")


def test_backend_leaves_out_disabled_passes():
    options = {"engine": "eager", "disable_passes": ["fuse_select"]}
    compiled = torch.compile(hybrid_step, backend="mtpgraph", fullgraph=True, options=options)
    compiled(*Stream(2).batch([2, 2]), make_pools(2))
    assert mtpgraph.stats(compiled).rewrites == {"fuse_state_reset": 2}


def test_backend_keeps_the_users_own_pass():
    """A pass that the user gave Inductor still runs, and its key stays part of the cache's."""
    seen = []

    class Own(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(len(graph.nodes))

        def uuid(self) -> str:
            return "own"

    with torch._inductor.config.patch(post_grad_custom_post_pass=Own(), fx_graph_cache=False):
        compiled = torch.compile(lambda x: x.sin() + 1, backend="mtpgraph", fullgraph=True)
        compiled(torch.ones(3))
    assert seen


def test_cache_key_of_a_list_of_the_users_passes():
    from mtpgraph.compile_passes._compat import _CacheKey

    seen = []
    hook = _CacheKey(b"ours", [lambda graph: seen.append(graph)])
    hook("graph")
    assert seen == ["graph"]
    assert hook.uuid() is None
    assert _CacheKey(b"ours", None).uuid() is not None


def test_a14_cache_key_follows_sources_and_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key = PassManager(PASSES).uuid()
    assert PassManager(PASSES).uuid() == key
    assert PassManager(PASSES[:1]).uuid() != key

    package = Path(graph_pass.__file__).parent.parent
    for folder in ("compile_passes", "ops"):
        (tmp_path / folder).mkdir()
        for path in (package / folder).glob("*.py"):
            (tmp_path / folder / path.name).write_bytes(path.read_bytes())
    copied = tmp_path / "compile_passes" / "graph_pass.py"
    monkeypatch.setattr(graph_pass, "__file__", str(copied))
    assert PassManager(PASSES).uuid() == key
    # a helper that no pass is named after counts, and so does an op
    for edited in ("compile_passes/_nodes.py", "ops/indexer_topk.py"):
        with (tmp_path / edited).open("a") as file:
            file.write("# edited\n")
        assert PassManager(PASSES).uuid() != key
        key = PassManager(PASSES).uuid()


def test_a14_cache_key_reaches_inductor(monkeypatch: pytest.MonkeyPatch):
    """Two keys, two entries: Inductor's cache does not serve code of an older pass."""
    from torch._dynamo.utils import counters

    def compile_once() -> int:
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(lambda x: x.cos() * 5, backend="mtpgraph", fullgraph=True)
        compiled(torch.ones(7))
        return counters["inductor"]["fxgraph_cache_hit"]

    with torch._inductor.config.patch(fx_graph_cache=True):
        compile_once()
        assert compile_once() == 1
        key = os.urandom(8)
        monkeypatch.setattr(PassManager, "uuid", lambda self: key)
        assert compile_once() == 0


def test_in_place_inputs_are_known():
    found: list[Artifact] = []

    def backend(gm, example_inputs):
        options = mtpgraph.Options(engine="eager")
        found.append(mtpgraph.compile_passes.backend.build(gm, example_inputs, options))
        return found[-1]

    def step(state, x, indices):
        ops.reset_states_(state[0], indices, x.sum(1) > 0)
        view = x[1:]
        view += 1
        return x * 2

    state, x = torch.ones(2, 3, 4), torch.ones(3, 2)
    torch.compile(step, backend=backend)(state, x, torch.zeros(3, dtype=torch.int32))
    assert sorted(found[0].in_place) == [False, True, True]


def test_compiled_and_eager_share_bits_of_a_simple_op():
    q = torch.tensor([0, 2, 3], dtype=torch.int32)
    lens = torch.tensor([2, 9], dtype=torch.int32)
    compiled = torch.compile(ops.has_initial_state, backend="mtpgraph", fullgraph=True)
    assert_same_bits(compiled(q, lens), ops.has_initial_state(q, lens))


def sync_step(x: Tensor) -> Tensor:
    return x * x.sum().item()


@pytest.fixture
def captures_numbers() -> Any:
    """By default ``.item()`` breaks the graph, and no pass sees it."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


@pytest.mark.usefixtures("captures_numbers")
def test_a_step_that_waits_for_the_device_is_no_whole_graph() -> None:
    inputs = {"x": mtpgraph.Batched()}
    with (
        pytest.warns(RuntimeWarning, match="padding may reach real rows"),
        pytest.raises(ReportError, match=r"cannot be a CUDA graph .*`return x \* x.sum\(\).item"),
    ):
        mtpgraph.compile(sync_step, sizes=[4], engine="eager", inputs=inputs)(torch.ones(3))


@pytest.mark.usefixtures("captures_numbers")
@pytest.mark.filterwarnings("ignore:padding may reach real rows:RuntimeWarning")
def test_a_step_that_waits_runs_where_no_graph_is_asked_for() -> None:
    inputs = {"x": mtpgraph.Batched()}
    step = mtpgraph.compile(sync_step, sizes=[4], engine="eager", inputs=inputs, cudagraph="off")
    assert step(torch.ones(3)).tolist() == [3, 3, 3]
    assert "host sync" in {finding.kind for finding in step.stats().findings}


@pytest.mark.usefixtures("captures_numbers")
def test_a_step_that_waits_is_refused_by_the_backend_alone_under_strict() -> None:
    options = {"engine": "eager"}
    compiled = torch.compile(sync_step, backend="mtpgraph", options=options)
    assert compiled(torch.ones(3)).tolist() == [3, 3, 3]
    assert [finding.kind for finding in mtpgraph.stats(compiled).findings] == ["host sync"]
    torch._dynamo.reset()
    strict = torch.compile(sync_step, backend="mtpgraph", options={**options, "strict": True})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="cannot be a CUDA graph"):
        strict(torch.ones(3))


def test_a_hazard_is_an_error_under_strict() -> None:
    def fn(lens: Tensor, previous: Tensor) -> Tensor:
        old = lens.clone()
        lens.add_(1)
        previous.copy_(old)
        return lens * 2

    for strict in (False, True):
        torch._dynamo.reset()
        options = {"engine": "eager", "strict": strict}
        compiled = torch.compile(fn, backend="mtpgraph", fullgraph=True, options=options)
        lens, previous = torch.arange(3.0), torch.zeros(3)
        if strict:
            with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="it overwrites"):
                compiled(lens, previous)
            assert lens.tolist() == [0, 1, 2]
        else:
            assert compiled(lens, previous).tolist() == [2, 4, 6]
            assert previous.tolist() == [0, 1, 2]


def by_row(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: (row - row.mean()).view(2, -1).sum(0))(x)


def by_row_of_a_cache(x: Tensor, kv: Tensor) -> Tensor:
    """Rows of the cache as they were before the write."""
    old = torch.vmap(lambda row: row.view(-1)[:DIM])(kv)
    ops.kv_cache_write_(x, torch.arange(x.shape[0]), kv)
    return old[: x.shape[0]] + x


@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_rows_that_vmap_shows_have_no_memory_of_their_own(engine: str):
    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, kv: Tensor) -> Any:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        h = x + row_lens[:, None]
        return by_row(h), by_row_of_a_cache(h, kv)

    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    args = torch.randn(3, DIM), starts, starts[1:] + 3
    kv = torch.randn(4, 4, DIM)
    other = kv.clone()
    compiled = torch.compile(step, backend="mtpgraph", options={"engine": engine})
    for actual, expected in zip(compiled(*args, kv), step(*args, other), strict=True):
        torch.testing.assert_close(actual, expected)
    assert_same_bits(kv, other)
