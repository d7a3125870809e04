"""Real engines on a card. What needs none of TensorRT runs on a CPU as well, with fake ones."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mtpgraph
from mtpgraph import Batched, Static, ops
from mtpgraph.compile_passes import padded_runs, tensorrt
from mtpgraph.compile_passes.engine_ops import ENGINE_OPS
from mtpgraph.compile_passes.tensorrt_builder import TensorRTBuilder
from mtpgraph.example.decoder import Decoder
from mtpgraph.example.demo import compile_step
from mtpgraph.example.model import load
from mtpgraph.example.runs import Request, differences

from .dense_steps import DIM, PARTITIONS, SPECS, Compiled, Recurrent, Steps, make_pool
from .fake_engines import FakeBuilder, builder
from .pure_steps import INSIDE, PureSteps, make_pools, run_step
from .support import INPUTS, NEXT_N, Stream, copy_pools
from .test_capture import PretendedDevice

__all__ = ["builder"]  # a fixture

# the library warns of its own affairs as it is imported and as it converts
pytestmark = pytest.mark.filterwarnings("default")

# how far a chain of fused calls may be from the same calls one by one, each rounded
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# inputs of products are rounded to TF32, which has the mantissa of float16
TF32_TOLERANCE = 1e-2

SLOT_SPECS = {"x": Batched(per="token"), "slots": Batched(per="token", pad=-1), "pool": Static}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of a fused chain; NaN equals NaN."""
    limit = TOLERANCES.get(expected.dtype, 0)
    if expected.dtype == torch.float32 and expected.device.type == "cuda":
        limit = TF32_TOLERANCE
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit, equal_nan=True)


@pytest.fixture
def library() -> Iterator[Any]:
    """The real torch-tensorrt; without it a test on a card is skipped, not passed. Products in TF32
    are permitted, as TensorRT-RTX has no others of float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("torch_tensorrt")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield found
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A card with real engines and graphs, or a CPU that pretends to both."""
    if request.param == "cuda":
        request.getfixturevalue("library")
        return request.param
    request.getfixturevalue("builder")
    device = PretendedDevice()
    monkeypatch.setattr(padded_runs, "device_of", lambda values: device)
    return request.param


# in half precision an argmax may go either way, and random numbers differ by the device's generator
CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name in PARTITIONS
    for dtype in TOLERANCES
    if name != "random_numbers" and (name != "integers_and_masks" or dtype == torch.float32)
]


@pytest.mark.gpu
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("name", "dtype"), CASES)
@torch.no_grad()
def test_gpu_engines_equal_eager(name: str, dtype: torch.dtype):
    """Every small step, its results, strides and the pool that it writes, also from a replay."""
    steps = Steps(dtype).cuda()
    fn = getattr(steps, name)
    compiled = Compiled(fn, strict=True)
    for num_tokens in (5, 3, 7, 5, 3, 5):
        x, pool = torch.randn(num_tokens, DIM).to("cuda", dtype), make_pool(dtype).cuda()
        expected_pool = pool.clone()
        expected, actual = fn(x, expected_pool), compiled(x, pool)
        pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (actual, expected)), strict=True)
        for a, b in pairs:
            assert a.stride() == b.stride()
            assert_near(a, b)
        assert_near(pool, expected_pool)
    stats = compiled.stats
    assert stats.engines["torch"] == 0, stats.findings
    assert stats.engines["built"] == len(PARTITIONS[name])
    assert stats.replays >= 3


@pytest.mark.parametrize("freeze_weights", [True, False], ids=["frozen", "inputs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@torch.no_grad()
def test_caches_and_states_are_updated_between_engines(
    place: str, dtype: torch.dtype, freeze_weights: bool
):
    """Batches of every size and of new requests among old ones, padded, over pools of NaN: outputs,
    cache and recurrent states are those of eager after every step, and no padding is seen."""
    model, stream = Recurrent(dtype).to(place), Stream(8, dtype)
    compiled = mtpgraph.compile(
        model.forward,
        inputs=INPUTS,
        engine="tensorrt",
        sizes=[2, 4, 8],
        next_n=NEXT_N,
        strict=True,
        freeze_weights=freeze_weights,
    )
    pools = Recurrent.pools(8, dtype, place)
    expected_pools = copy_pools(pools)
    batches = [
        ([1 + (row + num_reqs) % NEXT_N for row in range(num_reqs)], (num_reqs // 2,))
        for num_reqs in (3, 8, 4, 2, 5, 7, 3, 6)
    ]
    for query_lens, new in batches:
        batch = [value.to(place) for value in stream.batch(query_lens, new)]
        expected = model(*batch, expected_pools)
        actual = compiled(*batch, pools)
        for a, b in zip(actual, expected, strict=True):
            assert not a.isnan().any()
            assert_near(a, b)
        for name, pool in pools.items():
            assert_near(pool, expected_pools[name])
    stats = compiled.stats()
    assert (stats.graphs, stats.recompiles, stats.fallbacks) == (1, 0, [])
    assert stats.engines == {"built": 2}
    # one of them a plugin, where there are plugins
    hybrid = {"has_initial_state": 1, "flatten_decode": 1}
    assert stats.plugins.keys() <= {"flatten_decode"}
    assert stats.hybrid + stats.plugins == hybrid
    assert (stats.captures, stats.recaptures, stats.replays) == (3, 0, len(batches))


@torch.no_grad()
def test_one_graph_per_size_replays_engines_and_state(place: str):
    """Each size has its own execution context: a graph recorded early replays right after the
    engine ran in other shapes. The state that an op writes between two engines is not lost."""
    steps = Steps().to(place)

    def fn(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
        key = steps.side(steps.norm(x))
        ops.kv_cache_write_(key, slots, pool)
        return steps.mlp(pool.flatten(0, 1)[slots.clamp(min=0)], pool) + key

    compiled = mtpgraph.compile(
        fn, inputs=SLOT_SPECS, engine="tensorrt", sizes=[1, 2, 4, 8], strict=True
    )
    pool = torch.zeros(4, 4, DIM, device=place)
    expected_pool = pool.clone()
    x, slots = torch.randn(8, DIM, device=place), torch.randperm(16, device=place)[:8]
    compiled.warm_up(x, slots, pool)
    # a size of 1 runs with a request of padding, in the graph of 2
    assert compiled.stats().captures == len({2, 4, 8})
    assert not pool.any()
    for num_tokens in (8, 3, 1, 7, 2, 4, 8, 1, 5):
        x = torch.randn(num_tokens, DIM, device=place)
        slots = torch.randperm(16, device=place)[:num_tokens]
        expected = fn(x, slots, expected_pool)
        assert_near(compiled(x, slots, pool), expected)
        assert_near(pool, expected_pool)
    stats = compiled.stats()
    assert stats.engines["built"] == 2
    assert (stats.graphs, stats.captures, stats.fallbacks) == (1, 3, [])
    assert stats.replays == 9
    steps.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="was updated in place"):
        compiled(x, slots, pool)


@torch.no_grad()
def test_weights_as_inputs_follow_updates(place: str):
    """``freeze_weights=False``: also in a replay, which reads weights where they are."""
    steps = Steps().to(place)
    compiled = mtpgraph.compile(
        steps.mlp, inputs=SPECS, engine="tensorrt", sizes=[4], strict=True, freeze_weights=False
    )
    pool = make_pool().to(place)
    for _ in range(4):
        x = torch.randn(3, DIM, device=place)
        assert_near(compiled(x, pool), steps.mlp(x, pool))
        steps.up.weight.mul_(-0.5)
        steps.norm.weight.add_(1)


@torch.no_grad()
def test_engines_are_loaded_from_the_cache(place: str, tmp_path: Any, request: Any):
    if place == "cpu":
        request.getfixturevalue("builder").exports = True
    steps = Steps().to(place)
    x, pool = torch.randn(5, DIM, device=place), make_pool().to(place)
    for came in ("built", "loaded"):
        torch._dynamo.reset()
        compiled = Compiled(steps.mlp, engine_cache=tmp_path)
        assert_near(compiled(x, pool), steps.mlp(x, pool))
        assert compiled.stats.engines == {came: 1}


@torch.no_grad()
def test_a_region_without_an_engine_is_part_of_the_graph(
    place: str, monkeypatch: pytest.MonkeyPatch
):
    """A build that fails, and a dtype that engines do not have: torch computes these, which is
    said, and the step is a CUDA graph all the same."""
    building = FakeBuilder if place == "cpu" else TensorRTBuilder
    build = building.build

    def fails_on_relu(self: Any, gm: torch.fx.GraphModule, *args: Any) -> bytes:
        if any(node.target is F.relu for node in gm.graph.nodes):
            raise RuntimeError("no kernel for relu")
        return build(self, gm, *args)

    monkeypatch.setattr(building, "build", fails_on_relu)
    steps, double = Steps().to(place), Steps(torch.float64).to(place)

    def fn(x: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
        key = steps.side(F.silu(x))
        ops.kv_cache_write_(key, slots, pool)
        hidden = steps.down(F.relu(steps.up(pool.flatten(0, 1)[slots.clamp(min=0)])))
        return double.up(double.side(hidden.double()))

    compiled = mtpgraph.compile(fn, inputs=SLOT_SPECS, engine="tensorrt", sizes=[8])
    pool = torch.zeros(4, 4, DIM, device=place)
    expected_pool = pool.clone()
    for num_tokens in (5, 8, 3):
        x = torch.randn(num_tokens, DIM, device=place)
        slots = torch.randperm(16, device=place)[:num_tokens]
        expected = fn(x, slots, expected_pool)
        torch.testing.assert_close(
            compiled(x, slots, pool), expected, rtol=1e-4, atol=TF32_TOLERANCE
        )
        assert_near(pool, expected_pool)
    stats = compiled.stats()
    assert stats.engines == {"built": 1, "torch": 1}
    reasons = [found.reason for found in stats.findings if found.kind == "engine fallback"]
    assert sum("no kernel for relu" in reason for reason in reasons) == 1
    assert sum("got float64" in reason for reason in reasons) == 1
    assert (stats.captures, stats.replays, stats.fallbacks) == (1, 3, [])


@pytest.mark.gpu
@torch.no_grad()
def test_gpu_rtx_leaves_float32_to_torch_unless_tf32_is_permitted(library: Any):
    if TensorRTBuilder().flavour != "rtx":
        pytest.skip("the standard flavour can do without TF32")
    torch.set_float32_matmul_precision("highest")
    steps = Steps().cuda()
    x, pool = torch.randn(5, DIM).cuda(), make_pool().cuda()
    compiled = Compiled(steps.mlp)
    torch.testing.assert_close(compiled(x, pool), steps.mlp(x, pool))
    assert compiled.stats.engines == {"torch": 1}
    assert "multiplies float32 as TF32" in compiled.stats.findings[0].reason


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_example_decodes_the_same_tokens(library: Any):
    """Over 200 steps of requests that come and go: tokens of the plain eager decoder, ties aside,
    an engine on both sides of every layer's ops, one graph per size, and no cache lost."""
    model = load().cuda()
    prompts = [bytes(torch.randint(32, 127, (length,)).tolist()) for length in range(3, 43)]
    requests = [Request(prompt, 48, arrival=5 * i) for i, prompt in enumerate(prompts)]
    oracle = Decoder(model, max_reqs=8).decode_plain(requests)
    compiled = compile_step(model, engine="tensorrt", strict=True)
    run = Decoder(model, max_reqs=8).decode_speculative(requests, compiled)
    assert run.steps >= 200
    assert [found for found in differences(oracle, run) if not found.is_tie(TF32_TOLERANCE)] == []
    stats = compiled.stats()
    assert stats.engines == {"built": 12}, stats.findings
    has_plugins = bool(library.ENABLED_FEATURES.qdp_plugin)
    assert (stats.plugins if has_plugins else stats.hybrid)["sparse_mla_decode"] == 5
    assert (stats.graphs, stats.recompiles, stats.fallbacks) == (1, 0, [])
    assert stats.captures == len({size for size in stats.calls if size is not None})
    assert stats.replays == sum(stats.calls.values())


@pytest.mark.gpu
@pytest.mark.parametrize("plugins", [True, False], ids=["plugins", "option-off"])
@pytest.mark.parametrize("step_name", ["pure", "dense_in_front", "dense_on_both_sides"])
@torch.no_grad()
def test_gpu_ops_are_inside_or_between_engines(library: Any, step_name: str, plugins: bool):
    """As the installed library says, and neither because something failed: with plugins all pure
    ops of a step are in engines; without, they run in torch and are counted. What is computed,
    padded and replayed too, is the same."""
    has_plugins = bool(library.ENABLED_FEATURES.qdp_plugin) and plugins
    dtype = torch.bfloat16
    steps = PureSteps(dtype).cuda()
    stats = run_step(
        getattr(steps, step_name), make_pools(dtype, "cuda"), plugins=plugins, strict=True
    )
    every = dict.fromkeys(INSIDE, 1)
    engines = {"pure": 0, "dense_in_front": 1, "dense_on_both_sides": 2}[step_name]
    if has_plugins:
        engines = {"pure": 1}.get(step_name, 2)
        assert (stats.plugins, stats.hybrid) == (every, {})
    else:
        assert (stats.plugins, stats.hybrid) == ({}, every)
    assert stats.engines == ({"built": engines} if engines else {})
    assert (stats.findings, stats.fallbacks) == ([], [])
    assert stats.replays == sum(stats.calls.values())


@pytest.mark.gpu
def test_gpu_flavour_says_whether_plugins_exist(library: Any):
    """The RTX flavour has none. The standard one has, unless it says itself that they do not work
    with the TensorRT beside it; then it is hybrid, too."""
    builder = TensorRTBuilder()
    has_plugins = bool(library.ENABLED_FEATURES.qdp_plugin)
    assert not (has_plugins and builder.flavour == "rtx")
    assert builder.plugins() == (ENGINE_OPS.keys() if has_plugins else set())
    assert tensorrt.is_installed()
