"""Plugins and their inputs, without TensorRT: shapes, dtypes and bits are those of the ops."""

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from mtpgraph.compile_passes import tensorrt_plugins
from mtpgraph.compile_passes.engine_input import EngineInput
from mtpgraph.compile_passes.engine_ops import ENGINE_OPS
from mtpgraph.ops.declare import facts_of
from tests.helpers import assert_same_bits
from tests.op_inputs import OPS, make_inputs

from .fake_engines import builder, library
from .fake_plugins import DTYPES, STREAM, PluginLibrary, TensorDesc

__all__ = ["builder", "library"]  # fixtures

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


SYMBOLS: dict[str, Any] = {unit: sympy.Symbol(unit) for unit in ("token", "request")}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


def describe_inputs(name: str, sizes: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of an op for a batch of some sizes, without data; and what TensorRT knows of
    them, which is symbols in the place of the sizes."""
    facts = facts_of(getattr(torch.ops.mtpgraph, name).default)
    assert facts is not None
    given, descs = make_inputs(name), {}
    for key, value in given.items():
        if isinstance(value, Tensor):
            shape, symbols = list(value.shape), list(value.shape)
            if row := facts.rows.get(key):
                shape[row.dim] = sizes[row.unit] + row.extra
                symbols[row.dim] = SYMBOLS[row.unit] + row.extra
            given[key] = torch.empty(shape, dtype=value.dtype, device="meta")
            descs[key] = TensorDesc(tuple(symbols), KINDS.get(value.dtype, "INT32"))
    if name == "flatten_decode":
        given["num_tokens"] = sizes["token"]
        descs["rows"] = TensorDesc((SYMBOLS["token"],), "INT32")
    return given, descs


@pytest.mark.parametrize("sizes", [(7, 3), (2, 2), (31, 5)], ids=str)
@pytest.mark.parametrize("name", ENGINE_OPS)
def test_plugin_describes_the_results_of_the_op(
    library: PluginLibrary, name: str, sizes: tuple[int, int]
):
    """Shapes, in symbols that are filled in afterwards, and dtypes are those of the op's fake."""
    tensorrt_plugins.register_plugins(library.trt)
    plugin = library.plugins[f"mtpgraph::{name}"]
    units = dict(zip(SYMBOLS, sizes, strict=True))
    given, descs = describe_inputs(name, units)
    expected = getattr(torch.ops.mtpgraph, name)(**given)
    numbers = {key: repr(given[key]) for key in plugin.attributes}
    if name == "flatten_decode":
        numbers["num_tokens"] = "-1"
    found = plugin.describe(*[descs[key] for key in plugin.tensors], **numbers)
    expected = [expected] if isinstance(expected, Tensor) else expected
    values = {SYMBOLS[unit]: size for unit, size in units.items()}
    for desc, result in zip(found, expected, strict=True):
        assert [sympy.sympify(size).subs(values) for size in desc.shape_expr] == [*result.shape]
        assert DTYPES[desc.dtype] == result.dtype


CASES = [
    *((name, torch.float32) for name in ENGINE_OPS),
    *(("sparse_mla_decode", dtype) for dtype in (torch.float16, torch.bfloat16)),
    *(("indexer_logits", dtype) for dtype in (torch.bfloat16, FP8)),
    *(("indexer_select", dtype) for dtype in (torch.bfloat16, FP8)),
    ("indexer_topk", torch.bfloat16),
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_plugin_gives_the_bits_of_the_op(library: PluginLibrary, name: str, dtype: torch.dtype):
    """Into memory of 0xFF, on the stream it is given, with bytes in the form of words."""
    tensorrt_plugins.register_plugins(library.trt)
    given = make_inputs(name)
    for key in {"q", "kv_cache", "logits"} & given.keys():
        given[key] = given[key].to(dtype)
    expected = getattr(torch.ops.mtpgraph, name)(**given)
    if name == "flatten_decode":
        given["rows"] = torch.empty(given["num_tokens"], dtype=torch.int32)
        given["num_tokens"] = -1
    plugin = library.plugins[f"mtpgraph::{name}"]
    tensors = [given[key] for key in plugin.tensors]
    words = [t.view(torch.int32) if t.dtype.itemsize == 1 else t for t in tensors]
    found = plugin.enqueue(words, {key: repr(given[key]) for key in plugin.attributes})
    expected = [expected] if isinstance(expected, Tensor) else expected
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)
    assert library.streams == [STREAM]


@torch.no_grad()
def test_failure_of_a_plugin_is_kept(library: PluginLibrary):
    """Raised to the library, and to whoever ran the engine."""
    tensorrt_plugins.register_plugins(library.trt)
    plugin = library.plugins["mtpgraph::indexer_topk"]
    logits, lens = torch.randn(3, 4), torch.zeros(2, dtype=torch.int32)
    with tensorrt_plugins.failures() as failed, pytest.raises(ValueError, match="row_lens must"):
        plugin.enqueue([logits, lens], {"topk": "2"})
    assert len(failed) == 1
    assert "row_lens must" in str(failed[0])
    with tensorrt_plugins.failures() as failed:
        plugin.enqueue([logits, lens.new_zeros(3)], {"topk": "2"})
    assert failed == []


def test_engine_input_takes_bytes_as_words():
    shape = (6, 12)
    wanted = EngineInput(torch.int32, *[shape] * 3, CPU, torch.uint8, is_cache=True)
    cache = torch.zeros(6, 48, dtype=torch.uint8)
    words = wanted.take(cache)
    assert words is not None
    assert (words.dtype, tuple(words.shape)) == (torch.int32, shape)
    assert words.data_ptr() == cache.data_ptr()
    assert wanted.take(torch.zeros(6, 96, dtype=torch.uint8)[:, ::2]) is None
    assert wanted.take(torch.zeros(6, 52, dtype=torch.uint8)) is None
    assert wanted.take(torch.zeros(6, 50, dtype=torch.uint8)) is None
    assert wanted.take(torch.zeros(6 * 48 + 1, dtype=torch.uint8)[1:].view(6, 48)) is None
    assert wanted.take(cache.view(torch.int8)) is None


def test_engine_input_copies_no_cache_and_makes_rows_of_a_size():
    cache = EngineInput(torch.float32, *[(6, 4)] * 3, CPU, is_cache=True)
    strided = torch.zeros(6, 8)[:, ::2]
    assert cache.take(strided) is None
    copied = EngineInput(torch.float32, *[(6, 4)] * 3, CPU).take(strided)
    assert copied is not None
    assert copied.is_contiguous()
    rows = EngineInput(torch.int32, (2,), (4,), (8,), CPU)
    taken = rows.take(5)
    assert taken is not None
    assert (taken.dtype, tuple(taken.shape)) == (torch.int32, (5,))
    assert rows.take(9) is None


def test_every_pure_op_is_known():
    """But for the one whose result, a mask, an engine does not give."""
    pure = {name for name in OPS if not name.endswith("_")}
    assert pure - ENGINE_OPS.keys() == {"has_initial_state"}
    assert ENGINE_OPS.keys() <= pure
