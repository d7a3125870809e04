"""The TensorRT engine without TensorRT: what goes where, in which order, and what is said of it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mtpgraph
from mtpgraph import Options, ops
from mtpgraph.compile_passes import padded_runs, region_graph, tensorrt
from mtpgraph.compile_passes.report import ReportError
from mtpgraph.example.decoder import Decoder
from mtpgraph.example.demo import compile_step
from mtpgraph.example.model import Config, Model
from mtpgraph.example.runs import Request
from tests.helpers import assert_same_bits, storage_bytes

from .dense_steps import (
    BLOCK_SIZE,
    DIM,
    PARTITIONS,
    SPECS,
    WIDE,
    Compiled,
    Steps,
    make_pool,
)
from .fake_engines import FakeBuilder, builder, library
from .test_capture import PretendedDevice

__all__ = ["builder", "library"]  # fixtures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", PARTITIONS)
@torch.no_grad()
def test_tensorrt_partition_and_numbers(builder: FakeBuilder, name: str, dtype: torch.dtype):
    """Each call is where it belongs; results, strides and the written pool equal eager, on several
    batches, with engines that write into NaN."""
    steps = Steps(dtype)
    fn = getattr(steps, name)
    compiled = Compiled(fn)
    for num_tokens in (5, 3, 7):
        x, pool = torch.randn(num_tokens, DIM).to(dtype), make_pool(dtype)
        expected_pool = pool.clone()
        torch.manual_seed(3)
        expected = fn(x, expected_pool)
        torch.manual_seed(3)
        actual = compiled(x, pool)
        pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (actual, expected)), strict=True)
        for a, b in pairs:
            assert_same_bits(a, b)
            assert a.stride() == b.stride()
        assert_same_bits(pool, expected_pool)
    assert builder.calls == PARTITIONS[name]
    assert len(builder.ran) == 3 * len(builder.graphs)
    stats = compiled.stats
    assert (stats.graphs, stats.engines["built"]) == (1, len(PARTITIONS[name]))
    assert stats.findings == []


@torch.no_grad()
def test_tensorrt_needs_no_copy_for_what_only_inductor_reads_late(builder: FakeBuilder):
    """What the hazard pass copies for Inductor's sake does not cut a region in two."""
    steps = Steps()

    def fn(x: Tensor, pool: Tensor) -> Tensor:
        rows = pool[: x.shape[0]] * 2
        slots = torch.arange(x.shape[0], device=x.device)
        ops.kv_cache_write_(x, slots, pool.view(-1, BLOCK_SIZE, DIM))
        return steps.down(F.silu(steps.up(rows)))

    compiled = Compiled(fn)
    x, pool = torch.randn(5, DIM), make_pool()
    expected_pool = pool.clone()
    assert_same_bits(compiled(x, pool), fn(x, expected_pool))
    assert_same_bits(pool, expected_pool)
    assert compiled.stats.rewrites["find_mutation_hazards"]
    assert builder.calls == [["mul", "linear", "silu", "linear"]]


@torch.no_grad()
def test_tensorrt_views_of_a_result_alias_it(builder: FakeBuilder):
    """A view that the step took of a value sees what is written to the value, and is no copy."""
    steps = Steps()
    x, pool = torch.randn(5, DIM), make_pool()
    _, first = Compiled(steps.a_result_written_later)(x, pool)
    assert first.untyped_storage().nbytes() == 5 * DIM * 4
    torch.testing.assert_close(first, 3 * steps.side(F.silu(x))[:, :4], rtol=0, atol=0)


@torch.no_grad()
def test_tensorrt_views_are_made_inside_only_where_an_input_would_be_copied(builder: FakeBuilder):
    """``pieces_of_an_op``: the engine takes what was split, whole, and cuts it itself."""
    steps = Steps()
    Compiled(steps.pieces_of_an_op)(torch.randn(5, DIM), make_pool())
    (inputs,) = builder.inputs
    assert [wanted.usual[1:] for wanted in inputs] == [(2 * DIM,)]


@torch.no_grad()
def test_tensorrt_weights_are_constants_and_the_batch_is_a_range(builder: FakeBuilder):
    steps = Steps()
    fn = mtpgraph.compile(
        steps.mlp,
        inputs=SPECS,
        engine="tensorrt",
        sizes=[1, 2, 8],
        next_n=3,
    )
    fn(torch.randn(5, DIM), make_pool())
    (inputs,) = builder.inputs
    assert [(w.least, w.usual, w.most) for w in inputs] == [((2, DIM), (6, DIM), (24, DIM))]
    assert {name: tuple(w.shape) for name, w in builder.graphs[0].named_parameters()} == {
        "weight_0": (DIM,),
        "weight_1": (WIDE, DIM),
        "weight_2": (WIDE,),
        "weight_3": (DIM, DIM),
        "weight_4": (DIM,),
    }
    assert fn.stats().hybrid == {}
    # above the table torch computes what the engine was not built for
    ran, x = len(builder.ran), torch.randn(30, DIM)
    assert_same_bits(fn(x, make_pool()), steps.mlp(x, make_pool()))
    assert len(builder.ran) == ran
    assert fn.stats().engines == {"built": 1}


@torch.no_grad()
def test_tensorrt_specialized_sizes_have_static_engines(builder: FakeBuilder):
    steps = Steps()
    fn = mtpgraph.compile(
        steps.mlp,
        inputs=SPECS,
        engine="tensorrt",
        sizes=[1, 4, 8],
        specialize=[4],
    )
    for num_tokens in (4, 8):
        x = torch.randn(num_tokens, DIM)
        assert_same_bits(fn(x, make_pool()), steps.mlp(x, make_pool()))
    assert any(wanted.is_static and wanted.most == (4, DIM) for (wanted,) in builder.inputs)
    assert any(wanted.least == (2, DIM) for (wanted,) in builder.inputs)


@pytest.mark.parametrize("plugins", [False, True], ids=["hybrid", "plugins"])
def test_tensorrt_example_step_has_an_engine_around_every_layer(
    builder: FakeBuilder, plugins: bool, request: pytest.FixtureRequest
):
    """Requests of all kinds come and go over caches of NaN: outputs and caches keep every bit, and
    between two writes of a layer there is one engine, with the ops or between them."""
    if plugins:
        request.getfixturevalue("library")
    torch.set_num_threads(1)
    model = Model(EXAMPLE).requires_grad_(False).eval()
    decoder = Decoder(model, max_reqs=6, max_seq_len=64)
    in_torch = compile_step(model, engine="eager")
    step = compile_step(model, engine="tensorrt", strict=True)
    sizes = set()

    def both(*args: Any) -> Any:
        *batch, caches = args
        sizes.add(len(batch[3]))
        twin = copy.deepcopy(caches)
        expected, actual = in_torch(*batch, twin), step(*batch, caches)
        for a, b in zip(actual, expected, strict=True):
            assert_same_bits(a, b)
        for a, b in zip(_leaves(caches), _leaves(twin), strict=True):
            assert torch.equal(storage_bytes(a), storage_bytes(b))
        return [value.clone() for value in actual]

    requests = [
        Request(bytes(torch.randint(0, 256, (length,)).tolist()), 3, arrival=place // 2)
        for place, length in enumerate([3, 17, 2, 9, 1])
    ]
    decoder.decode_speculative(requests, both)
    assert len(sizes) > 2
    stats = step.stats()
    assert (stats.graphs, stats.recompiles) == (1, 0)
    assert stats.engines == {"built": len(EXAMPLE_REGIONS)}
    inside = EXAMPLE_OPS.keys() - EXAMPLE_OPS_OUTSIDE if plugins else set()
    assert stats.plugins == {name: EXAMPLE_OPS[name] for name in inside}
    assert stats.hybrid == {name: EXAMPLE_OPS[name] for name in EXAMPLE_OPS.keys() - inside}
    assert stats.asdict()["hybrid"] == stats.hybrid
    products = [[name for name in calls if name in ("linear", "einsum")] for calls in builder.calls]
    assert products == EXAMPLE_REGIONS
    # nothing dense is left but what follows from weights alone
    assert all(not name.startswith("kv_cache") for calls in builder.calls for name in calls)


# a layer of each kind, and two drafts: with more, the compiler sees the same again
EXAMPLE = Config(layers=("mamba", "attention", "delta"), num_drafts=2)
EXAMPLE_OPS = {
    "flatten_decode": 1,
    "has_initial_state": 1,
    "indexer_select": 2,
    "topk_to_slots": 1,
    "sparse_mla_decode": 3,
}
# a mask, and one that has no dense call or op beside it
EXAMPLE_OPS_OUTSIDE = {"has_initial_state", "topk_to_slots"}
LINEAR = "linear"
ATTENTION_IN = [LINEAR, "einsum", *[LINEAR] * 4]  # queries, keys, and three of the indexer
ATTENTION_OUT = ["einsum", LINEAR]
MLP = [LINEAR, LINEAR]
EXAMPLE_REGIONS = [
    [LINEAR],  # into the Mamba layer
    [LINEAR, *MLP, *ATTENTION_IN],
    [*ATTENTION_OUT, *MLP, LINEAR],  # into the delta layer
    [LINEAR, *MLP, LINEAR],  # to the logits
    [LINEAR, *ATTENTION_IN],  # the MTP module joins its two inputs
    ATTENTION_OUT,
    [*MLP, LINEAR],
    # one more draft, whose index keys are written and not asked for
    [LINEAR, LINEAR, "einsum", LINEAR, LINEAR],
    [*ATTENTION_OUT, *MLP, LINEAR],
]


def _leaves(caches: Any) -> list[Tensor]:
    if isinstance(caches, Tensor):
        return [caches]
    return [leaf for value in caches for leaf in _leaves(value)]


@torch.no_grad()
def test_tensorrt_build_failure_runs_in_torch_and_says_why(builder: FakeBuilder):
    """One region fails, the other is an engine; what is computed does not change."""

    def fails(gm: torch.fx.GraphModule) -> None:
        if any(node.target is F.relu for node in gm.graph.nodes):
            raise RuntimeError("no kernel for relu\nand a long log")

    builder.fails = fails
    steps = Steps()

    def fn(x: Tensor, pool: Tensor) -> Tensor:
        hidden = steps.side(F.silu(x))
        pool.copy_(hidden[:1])
        return steps.down(F.relu(steps.up(hidden + pool[:1])))

    compiled = Compiled(fn)
    x, pool, expected_pool = torch.randn(5, DIM), make_pool(), make_pool()
    expected = fn(x, expected_pool)
    assert_same_bits(compiled(x, pool), expected)
    assert_same_bits(pool, expected_pool)
    stats = compiled.stats
    assert stats.engines == {"built": 1, "torch": 1}
    assert stats.asdict()["engines"] == {"built": 1, "torch": 1}
    (found,) = stats.findings
    assert (found.kind, found.found_by) == ("engine fallback", "tensorrt")
    assert found.reason.endswith("the region runs in torch: RuntimeError: no kernel for relu")
    assert "steps.up(" in found.code

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"cannot be in a TensorRT engine.*no kernel for relu"):
        Compiled(fn, strict=True)(x, pool)


@torch.no_grad()
def test_tensorrt_unsupported_dtype_stays_in_torch_and_is_reported(builder: FakeBuilder):
    steps = Steps(torch.float64)
    x, pool = torch.randn(5, DIM).double(), make_pool(torch.float64)
    compiled = Compiled(steps.mlp)
    assert_same_bits(compiled(x, pool), steps.mlp(x, pool))
    findings = compiled.stats.findings
    assert [found.kind for found in findings] == ["engine fallback"] * 2
    assert "float32, float16 or bfloat16, got float64" in findings[0].reason
    assert findings[0].code == "gate, value = self.up(self.norm(x)).chunk(2, dim=-1)"
    assert builder.graphs == []

    with pytest.raises(ReportError, match="got float64"):
        mtpgraph.compile(steps.mlp, inputs=SPECS, engine="tensorrt", strict=True)(x, pool)


def test_tensorrt_has_no_gradient_and_does_not_drop_one(builder: FakeBuilder):
    """A step that is called with gradients keeps them: it runs in torch, which is said."""
    steps = Steps().requires_grad_(True)
    compiled = Compiled(steps.mlp)
    compiled(torch.randn(5, DIM), make_pool()).sum().backward()
    assert steps.up.weight.grad is not None
    assert builder.graphs == []
    assert "torch.no_grad()" in compiled.stats.findings[0].reason


@torch.no_grad()
def test_tensorrt_autocast_stays_in_torch(builder: FakeBuilder):
    steps = Steps()

    def fn(x: Tensor, pool: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return steps.mlp(x, pool)

    def around(x: Tensor, pool: Tensor) -> Tensor:
        return steps.mlp(x, pool)

    x, pool = torch.randn(5, DIM), make_pool()
    compiled = Compiled(fn)
    assert_same_bits(compiled(x, pool), fn(x, pool))
    assert "autocast" in compiled.stats.findings[0].reason
    compiled = Compiled(around)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(compiled(x, pool), around(x, pool))
    assert "autocast" in compiled.stats.findings[0].reason
    assert builder.graphs == []


@torch.no_grad()
def test_tensorrt_result_with_gaps_stays_outside(
    builder: FakeBuilder, monkeypatch: pytest.MonkeyPatch
):
    """What an engine cannot lay out as torch does leaves the region; the rest stays one."""
    order = region_graph.memory_order

    def no_order(tensor: Tensor) -> Any:
        return None if tensor.shape[-1] == WIDE else order(tensor)

    monkeypatch.setattr(region_graph, "memory_order", no_order)
    steps = Steps()

    def fn(x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        y = steps.up(steps.side(F.silu(x)))
        return y, steps.side(F.silu(steps.down(y)))

    x, pool = torch.randn(5, DIM), make_pool()
    compiled = Compiled(fn)
    for a, b in zip(compiled(x, pool), fn(x, pool), strict=True):
        assert_same_bits(a, b)
    assert builder.calls == [["silu", "linear"], ["linear", "silu", "linear"]]


@pytest.mark.parametrize(
    ("shape", "view", "order"),
    [
        ((2, 3, 4), lambda x: x, (0, 1, 2)),
        ((2, 3, 4), lambda x: x.transpose(0, 1), (1, 0, 2)),
        ((2, 3, 4), lambda x: x.permute(2, 0, 1), (1, 2, 0)),
        ((2, 1, 4), lambda x: x.transpose(0, 1), (0, 1, 2)),
        ((2, 3, 4), lambda x: x[:, :, ::2], None),
        ((2, 3, 4), lambda x: x[:, 1:], None),
        ((2, 1, 4), lambda x: x.expand(2, 3, 4), None),
    ],
)
def test_memory_order(shape: tuple[int, ...], view: Callable[[Tensor], Tensor], order: Any):
    assert region_graph.memory_order(view(torch.empty(shape))) == order


WEIGHT_CHANGES = {
    "updated in place": lambda steps: steps.up.weight.mul_(2),
    "replaced": lambda steps: setattr(steps.up, "weight", nn.Parameter(steps.up.weight * 2)),
    "given other memory": lambda steps: setattr(steps.up.weight, "data", steps.up.weight * 2),
    "loaded": lambda steps: steps.load_state_dict(Steps().state_dict()),
}


@pytest.mark.parametrize("change", WEIGHT_CHANGES)
@torch.no_grad()
def test_tensorrt_changed_weights_are_refused(builder: FakeBuilder, change: str):
    """An engine holds a copy of the weights. It never answers for weights that are no more."""
    steps = Steps()
    x, pool = torch.randn(5, DIM), make_pool()
    compiled = Compiled(steps.mlp)
    compiled(x, pool)
    WEIGHT_CHANGES[change](steps)
    ran = len(builder.ran)
    if change == "replaced":
        # which Dynamo sees by itself, and compiles anew
        assert_same_bits(compiled(x, pool), steps.mlp(x, pool))
        return
    with pytest.raises(
        RuntimeError, match=r"parameter .*compile the step again, or with freeze_we"
    ):
        compiled(x, pool)
    assert len(builder.ran) == ran


def test_frozen_weights_know_what_they_are_given():
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    frozen = tensorrt.FrozenWeights({"the weight": (1, weight)})
    frozen.check_given([None, weight])
    with pytest.raises(RuntimeError, match="the parameter the weight was replaced after"):
        frozen.check_given([None, other])


@torch.no_grad()
def test_tensorrt_changed_weights_are_refused_by_replays(
    builder: FakeBuilder, monkeypatch: pytest.MonkeyPatch
):
    """A CUDA graph would replay the old engine without a look at the weights."""
    device = PretendedDevice()
    monkeypatch.setattr(padded_runs, "device_of", lambda values: device)
    steps = Steps()
    compiled = mtpgraph.compile(
        steps.mlp,
        inputs=SPECS,
        engine="tensorrt",
        sizes=[4, 8],
    )
    x, pool = torch.randn(4, DIM), make_pool()
    for _ in range(4):
        assert_same_bits(compiled(x, pool), steps.mlp(x, pool))
    assert (compiled.stats().replays, compiled.stats().captures) == (4, 1)
    steps.side.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"'side'.*'bias'.* was updated in place"):
        compiled(x, pool)
    assert compiled.stats().replays == 4


@torch.no_grad()
def test_tensorrt_weights_as_inputs_follow_every_update(builder: FakeBuilder):
    """``freeze_weights=False``: no copy, no staleness, and equal layers share an engine."""
    first, second = Steps(), Steps()

    def fn(x: Tensor, pool: Tensor) -> Tensor:
        # a sum along the batch is nothing for an engine, so there are two
        return second.mlp(first.mlp(x, pool).cumsum(0), pool)

    compiled = Compiled(fn, freeze_weights=False)
    x, pool = torch.randn(5, DIM), make_pool()
    assert_same_bits(compiled(x, pool), fn(x, pool))
    assert compiled.stats.engines == {"built": 1, "shared": 1}
    for change in WEIGHT_CHANGES.values():
        change(second)
        assert_same_bits(compiled(x, pool), fn(x, pool))
    assert not list(builder.graphs[0].parameters())


@torch.no_grad()
def test_tensorrt_weights_that_the_step_writes_are_inputs(builder: FakeBuilder):
    steps = Steps()

    def fn(x: Tensor, pool: Tensor) -> Tensor:
        y = steps.mlp(x, pool)
        steps.norm.weight.add_(1)
        return y

    compiled, twin = Compiled(fn), copy.deepcopy(steps)
    x, pool = torch.randn(5, DIM), make_pool()
    for _ in range(3):
        assert_same_bits(compiled(x, pool), twin.mlp(x, pool))
        twin.norm.weight.add_(1)
    assert len(list(builder.graphs[0].parameters())) == 4


@torch.no_grad()
def test_tensorrt_engines_are_kept_on_disk(builder: FakeBuilder, tmp_path: Path):
    """A second compilation loads; another weight, range, library or step builds; a broken file is
    built anew."""
    builder.exports = True
    steps = Steps()
    x, pool = torch.randn(5, DIM), make_pool()

    def engines(fn: Callable[..., Any] = steps.mlp, **options: Any) -> dict[str, int]:
        torch._dynamo.reset()
        options = {"engine_cache": tmp_path, "sizes": [1, 2, 8], **options}
        compiled = mtpgraph.compile(fn, inputs=SPECS, engine="tensorrt", **options)
        torch.testing.assert_close(compiled(x, pool), fn(x, pool))
        return dict(compiled.stats().engines)

    built, loaded = {"built": 1}, {"loaded": 1}
    assert engines() == built
    assert engines() == loaded
    assert engines(lambda x, pool: steps.mlp(x, pool)) == loaded
    assert engines(sizes=[1, 2, 16]) == built
    assert engines(steps.batch_as_size) == built
    builder.version = "fake 2"
    assert engines() == built
    builder.version = "fake 1"
    steps.up.weight[0, 0] += 1
    assert engines() == built
    steps.up.weight[0, 0] += 1
    assert engines(disable_passes=["fuse_select"]) == built
    assert engines(disable_passes=["fuse_select"]) == loaded

    for path in tmp_path.glob("*.engine"):
        path.write_bytes(path.read_bytes()[:-1])
    assert engines(disable_passes=["fuse_select"]) == built
    assert engines(disable_passes=["fuse_select"]) == loaded
    assert not list(tmp_path.glob("*.partial"))


@torch.no_grad()
def test_tensorrt_engine_that_does_not_load_is_built_anew(builder: FakeBuilder, tmp_path: Path):
    steps, x, pool = Steps(), torch.randn(5, DIM), make_pool()
    Compiled(steps.mlp, engine_cache=str(tmp_path))(x, pool)
    # names an engine of a process that is gone
    builder._copies.clear()
    builder._copies[b"another"] = None
    torch._dynamo.reset()
    compiled = Compiled(steps.mlp, engine_cache=str(tmp_path))
    assert_same_bits(compiled(x, pool), steps.mlp(x, pool))
    assert compiled.stats.engines == {"built": 1}


@torch.no_grad()
def test_tensorrt_cache_of_the_environment(
    builder: FakeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MTPGRAPH_ENGINE_CACHE", str(tmp_path / "new"))
    Compiled(Steps().mlp)(torch.randn(5, DIM), make_pool())
    assert len(list((tmp_path / "new").iterdir())) == 1


@torch.no_grad()
def test_tensorrt_cache_that_cannot_be_written_costs_no_engine(
    builder: FakeBuilder, tmp_path: Path
):
    (tmp_path / "file").write_text("no directory")
    steps, x, pool = Steps(), torch.randn(5, DIM), make_pool()
    compiled = Compiled(steps.mlp, engine_cache=str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="cannot keep TensorRT engines"):
        assert_same_bits(compiled(x, pool), steps.mlp(x, pool))
    assert compiled.stats.engines == {"built": 1}


def test_tensorrt_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensorrt, "is_installed", lambda: False)
    extra = r"pip install 'mtpgraph\[tensorrt\]'"
    with pytest.raises(ModuleNotFoundError, match=extra):
        mtpgraph.compile(lambda x: x, engine="tensorrt")
    with pytest.raises(Exception, match=extra):
        Compiled(lambda x, pool: x + 1)(torch.ones(2, 2), torch.ones(2))


def test_tensorrt_options_refuse() -> None:
    with pytest.raises(TypeError, match="engine_cache must be a path, got 3"):
        Options(engine_cache=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="freeze_weights must be a bool, got 1"):
        Options(freeze_weights=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="plugins must be a bool, got None"):
        Options(plugins=None)  # pyright: ignore[reportArgumentType]
    assert Options(engine_cache=Path("a") / "b").engine_cache == "a/b"  # pyright: ignore[reportArgumentType]
