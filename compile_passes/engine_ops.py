"""Pure ops of this package that a TensorRT engine can hold, and what they look like inside of one.

An engine has no tensors of one byte an element and no sizes among its inputs. So each op has a
twin in the namespace ``mtpgraph_engine``, which gives the same results (logits in fp32) and takes

- a cache of bytes, or a query of fp8, as int32 words: a view with a quarter of the last dimension;
- a number of tokens as a tensor that has as many rows, or as a constant.

A region is exported with the twins; ``tensorrt_plugins`` makes TensorRT plugins of them. Ops that
write stay outside, and so does ``has_initial_state``, whose result is a mask.
"""

import dataclasses
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ..ops.declare import facts_of
from . import _compat
from ._nodes import arguments, op_of, size_of, tensor_of

# of these an engine is given tensors as they are
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32)
_WORD = 4
_MOST_ELEMENTS = 2**31
"""A tensor of TensorRT has fewer."""

Shaped = tuple[Sequence[Any], torch.dtype]
"""Sizes, numbers or expressions of some kind, and dtype of one result."""


@dataclasses.dataclass(frozen=True)
class EngineOp:
    """An op that engines can hold.

    Attributes:
        twin: what stands for it in an engine
        results: sizes and dtypes of its results, from the arguments of the twin by name; of a
            tensor, anything that has ``shape`` and ``dtype``
        bytes_of: the dtype of what an int32 tensor holds, by argument
        caches: arguments that do not grow with the batch, which are never copied
    """

    twin: OpOverload
    results: Callable[..., list[Shaped]]
    bytes_of: dict[str, torch.dtype]
    caches: frozenset[str]

    @property
    def tensors(self) -> list[str]:
        """The arguments that are tensors, which come first."""
        return [a.name for a in self.twin._schema.arguments if str(a.type) == "Tensor"]

    @property
    def attributes(self) -> dict[str, type]:
        """The arguments that are numbers, and what kind of number."""
        kinds = {"int": int, "float": float}
        others = [a for a in self.twin._schema.arguments if str(a.type) != "Tensor"]
        return {a.name: kinds[str(a.type)] for a in others}


ENGINE_OPS: dict[str, EngineOp] = {}
"""By the name of the op."""

# Held for the life of the process: the registrations live as long as this object.
_LIBRARY = torch.library.Library("mtpgraph_engine", "FRAGMENT")


def _define(
    name: str, results: Callable[..., list[Shaped]], schema: str = "", **bytes_of: torch.dtype
) -> None:
    """Register the twin of an op.

    Args:
        name: that of the op
        results: see ``EngineOp``
        schema: the arguments of the twin, tensors first, where they are not those of the op
        bytes_of: see ``EngineOp``
    """
    op = getattr(torch.ops.mtpgraph, name).default

    def run(*args: Any) -> Any:
        given = []
        # of an argument that the twin does not have, the op takes its default
        for argument, value in zip(op._schema.arguments[: len(args)], args, strict=True):
            dtype = bytes_of.get(argument.name)
            given.append(value.view(dtype) if dtype and value.dtype == torch.int32 else value)
        return op(*given)

    call = _run_flatten_decode if name == "flatten_decode" else run
    _LIBRARY.define(
        schema or str(op._schema).removeprefix("mtpgraph::").replace("SymInt", "int"),
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    # on fake tensors the op gives fake results
    torch.library.register_fake(f"mtpgraph_engine::{name}", call, lib=_LIBRARY)
    facts = facts_of(op)
    assert facts is not None
    tensors = [a.name for a in op._schema.arguments if str(a.type) == "Tensor"]
    ENGINE_OPS[name] = EngineOp(
        getattr(torch.ops.mtpgraph_engine, name).default,
        results,
        bytes_of,
        frozenset(tensors) - facts.rows.keys(),
    )


def _run_flatten_decode(
    query_start_loc: Tensor, seq_lens: Tensor, rows: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    size = rows.shape[0] if num_tokens < 0 else num_tokens
    return torch.ops.mtpgraph.flatten_decode.default(query_start_loc, seq_lens, size)


_define(
    "flatten_decode",
    lambda rows, num_tokens, **_: (
        [((rows.shape[0] if num_tokens < 0 else num_tokens,), torch.int32)] * 2
    ),
    # num_tokens is negative where rows tells
    "flatten_decode(Tensor query_start_loc, Tensor seq_lens, Tensor rows, int num_tokens)"
    " -> (Tensor row_lens, Tensor row_requests)",
)
_define(
    "expand_block_table",
    lambda block_table, row_requests: [
        ((row_requests.shape[0], block_table.shape[1]), torch.int32)
    ],
)
_define(
    "indexer_logits",
    lambda q, max_seq_len, **_: [((q.shape[0], max_seq_len), torch.float32)],
    # fp32 alone: an engine has no argument that is a dtype
    "indexer_logits(Tensor q, Tensor weights, Tensor k_cache, Tensor block_table,"
    " Tensor query_start_loc, Tensor seq_lens, int max_seq_len) -> Tensor",
    q=torch.float8_e4m3fn,
    k_cache=torch.uint8,
)
_define(
    "indexer_topk",
    lambda logits, topk, **_: [((logits.shape[0], topk), torch.int32)],
)
_define(
    "indexer_select",
    lambda q, topk, **_: [((q.shape[0], topk), torch.int32)],
    q=torch.float8_e4m3fn,
    k_cache=torch.uint8,
)
_define(
    "topk_to_slots",
    lambda topk_indices, **_: [(tuple(topk_indices.shape), torch.int32)],
)
_define(
    "sparse_mla_decode",
    lambda q, latent_dim, **_: [
        ((q.shape[0], q.shape[1], latent_dim), q.dtype),
        ((q.shape[0], q.shape[1]), torch.float32),
    ],
    kv_cache=torch.uint8,
)


def name_of_op(node: fx.Node) -> str:
    """The name of the op of ``ENGINE_OPS`` that a node calls; empty for any other node."""
    op = op_of(node)
    if op is None or op.namespace != "mtpgraph":
        return ""
    return op._opname if op._opname in ENGINE_OPS else ""


def pure_ops(graph: fx.Graph, namespace: str) -> list[str]:
    """The names of the ops of a namespace that the calls of a graph are of, but for those that
    write: of a step's graph in torch, or of the twins in an engine's."""
    ops = [op for node in graph.nodes if (op := op_of(node)) is not None]
    return [op._opname for op in ops if op.namespace == namespace and not op._schema.is_mutable]


def results_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that take the several results of an op apart."""
    if not name_of_op(node) or tensor_of(node) is not None:
        return []
    return list(node.users)


def is_result(node: fx.Node) -> bool:
    """One of several results of an op: no view of anything, though it is a ``getitem``."""
    source: Any = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and node in results_of(source)


def fits_engine(node: fx.Node, fixed: Collection[fx.Node]) -> bool:
    """A call of an op can be in an engine: its numbers are constants, its dtypes those of engines
    or bytes in whole words, its logits are fp32, and its caches lie there as an engine wants them,
    for none is copied.

    Args:
        node: a call of one of ``ENGINE_OPS``
        fixed: what is the same in every call, and would be a constant of an engine
    """
    known = ENGINE_OPS[name_of_op(node)]
    if any(user.target is not operator.getitem for user in results_of(node)):
        return False
    for name, value in arguments(node).items():
        tensor = tensor_of(value)
        if name == "num_tokens":
            if size_of(value) is None:
                return False
        elif name == "logits_dtype":
            if value not in (None, torch.float32):
                return False
        elif tensor is None:
            if type(value) not in (int, float):
                return False
        elif not _has_dtype(tensor, known.bytes_of.get(name)):
            return False
    caches = [arguments(node)[name] for name in known.caches]
    return not any(cache in fixed or not _lies_still(cache) for cache in caches)


def _has_dtype(tensor: Tensor, bytes_of: torch.dtype | None) -> bool:
    if tensor.dtype in DTYPES:
        return True
    last = tensor.shape[-1]
    return tensor.dtype == bytes_of and type(last) is int and last % _WORD == 0


def _lies_still(node: fx.Node) -> bool:
    """A cache that is contiguous, of one size in every step, and not too large."""
    cache = tensor_of(node)
    assert cache is not None
    if any(type(number) is not int for number in (*cache.shape, *cache.stride())):
        return False
    elements = cache.numel() if cache.dtype in DTYPES else cache.numel() // _WORD
    return cache.is_contiguous() and elements < _MOST_ELEMENTS


def engine_form(gm: fx.GraphModule) -> fx.GraphModule:
    """What an engine computes for a region: twins in the place of ops.

    Its inputs are in the order of the region's, and their ``meta`` says how they are made: it has
    ``bytes_of`` for bytes that come as words, and ``is_cache`` for what must not be copied.

    Args:
        gm: the region as torch computes it; without an op it is given back as it is
    """
    if not any(map(name_of_op, gm.graph.nodes)):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in list(graph.nodes):
        if name := name_of_op(node):
            known, given = ENGINE_OPS[name], arguments(node)
            for argument in known.bytes_of.keys() & given.keys():
                _take_words(given[argument])
            for argument in known.caches:
                given[argument].meta["is_cache"] = True
            if name == "flatten_decode":
                given = _with_rows(given)
            tensors = [given[argument] for argument in known.tensors]
            numbers = [kind(given[argument]) for argument, kind in known.attributes.items()]
            node.target, node.args, node.kwargs = known.twin, (*tensors, *numbers), {}
    graph.lint()
    return fx.GraphModule(gm, graph, "EngineRegion")


def _take_words(node: fx.Node) -> None:
    """Make int32 of an input of bytes."""
    tensor = tensor_of(node)
    if tensor is None or tensor.dtype.itemsize != 1:
        return
    *sizes, last = tensor.shape
    node.meta["bytes_of"] = tensor.dtype
    node.meta["example_value"] = tensor.new_empty((*sizes, last // _WORD), dtype=torch.int32)


def _with_rows(given: dict[str, Any]) -> dict[str, Any]:
    size, seq_lens = given["num_tokens"], given["seq_lens"]
    if not isinstance(size, fx.Node):
        return {**given, "rows": seq_lens, "num_tokens": size}
    example = tensor_of(seq_lens)
    assert example is not None
    if tensor_of(size) is None:
        size.meta["example_value"] = example.new_empty((_compat.example_value(size),))
    return {**given, "rows": size, "num_tokens": -1}
