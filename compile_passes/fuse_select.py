"""indexer_logits(...) -> indexer_topk(logits, row_lens, topk)  ->  indexer_select(..., topk)

The select stands where the logits stood, so it reads the cache that they read. The logits never
reach memory as a tensor of the graph.

Left alone when
- the logits have another user, are changed before the top-k, or are rounded to bf16;
- ``row_lens`` is not what the select would compute: the first result of ``flatten_decode`` of the
  same ``query_start_loc`` and ``seq_lens``, for as many tokens as there are logits;
- one of these, or ``row_lens`` itself, is written before the top-k reads it;
- ``topk`` is computed after the logits.
"""

import operator

import torch
from torch import fx

from ._compat import copy_meta
from ._memory import sizes
from ._nodes import arguments, comes_before, describe, op_of, tensor_of
from ._values import computed_apart, copied_from, same_value, writer_between
from ._writes import erase_unused
from .report import note

_ops = torch.ops.mtpgraph


def fuse_select(graph: fx.Graph) -> int:
    """Apply the rewrite wherever it holds; returns how often."""
    count = 0
    for node in list(graph.nodes):
        if op_of(node) is _ops.indexer_topk.default and _chooses_from_logits(node):
            refusal = _fuse(graph, node)
            if refusal is None:
                count += 1
            else:
                note(node, "left alone", "fuse_select", *refusal)
    return count


def _chooses_from_logits(topk: fx.Node) -> bool:
    """The top-k is of ``indexer_logits``, or of what a single call made of them."""
    logits = arguments(topk)["logits"]
    return any(
        op_of(node) is _ops.indexer_logits.default for node in (logits, *logits.all_input_nodes)
    )


def _fuse(graph: fx.Graph, topk: fx.Node) -> tuple[str, str] | None:
    """Rewrite a top-k and its logits, or say why not and what to write instead."""
    chosen = arguments(topk)
    logits, row_lens, k = chosen["logits"], chosen["row_lens"], chosen["topk"]
    if op_of(logits) is not _ops.indexer_logits.default:
        return (
            f"the logits are changed by {describe(logits)} before the top-k",
            "scale the weights of indexer_logits instead, or keep both ops",
        )
    scores = tensor_of(logits)
    if scores is not None and scores.dtype != torch.float32:
        return (
            f"the logits are rounded to {scores.dtype}, which can make equal ones of them",
            "leave logits_dtype out: the fused op hands out no logits, and chooses from fp32",
        )
    others = [user for user in logits.users if user is not topk]
    if others:
        return (
            f"the logits are also used by {describe(others[0])}, so they must reach memory",
            "use topk_indices alone",
        )
    flatten = _flatten_of(row_lens, logits)
    if flatten is None:
        return (
            "row_lens is not the first result of flatten_decode of the query_start_loc and "
            "seq_lens that the logits were computed with",
            "row_lens, _ = flatten_decode(query_start_loc, seq_lens, q.shape[0])",
        )
    if isinstance(k, fx.Node) and not comes_before(graph, k, logits):
        return "topk is computed after the logits", "compute topk before indexer_logits"
    apart = computed_apart(_lens(flatten), _lens(logits))
    values = row_lens, _lens(logits)
    writer = writer_between(values, since=logits, until=topk, computed={flatten, *apart})
    if writer is not None:
        return (
            f"{describe(writer)} may write row_lens, query_start_loc, seq_lens or what they were "
            "computed from while the two ops use them",
            "write before flatten_decode or after the top-k",
        )
    scored = arguments(logits)
    del scored["logits_dtype"]
    with graph.inserting_before(logits):
        select = graph.call_function(_ops.indexer_select.default, (*scored.values(), k))
    copy_meta(topk, select)
    topk.replace_all_uses_with(select)
    graph.erase_node(topk)
    graph.erase_node(logits)
    erase_unused(row_lens)
    return None


def _flatten_of(row_lens: object, logits: fx.Node) -> fx.Node | None:
    """The ``flatten_decode`` that fits the logits, if ``row_lens`` is its first result."""
    origin = copied_from(row_lens)
    if not isinstance(origin, fx.Node) or origin.target is not operator.getitem:
        return None
    flatten, index = origin.args
    if op_of(flatten) is not _ops.flatten_decode.default or index != 0:
        return None
    assert isinstance(flatten, fx.Node)
    given, scores = tensor_of(origin), tensor_of(logits)
    if given is None or scores is None or not same_value(_lens(flatten), _lens(logits)):
        return None
    # two sizes that the check of indexer_topk made one
    return flatten if sizes(given)[0] == sizes(scores)[0] else None


def _lens(call: fx.Node) -> tuple[object, object]:
    """The two tensors that describe the batch of a call."""
    given = arguments(call)
    return given["query_start_loc"], given["seq_lens"]
