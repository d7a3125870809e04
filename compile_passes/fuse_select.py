"""indexer_logits(...) -> indexer_topk(logits, row_lens, topk)  ->  indexer_select(..., topk)

The select stands where the logits stood, so it reads the cache that they read. The logits never
reach memory as a tensor of the graph.

Left alone when
- the logits have another user;
- ``row_lens`` is not what the select would compute: the first result of ``flatten_decode`` of the
  same ``query_start_loc`` and ``seq_lens``, for as many tokens as there are logits;
- one of these, or ``row_lens`` itself, is written before the top-k reads it;
- ``topk`` is computed after the logits.
"""

import operator

import torch
from torch import fx

from ._compat import copy_meta, example_value
from ._nodes import arguments, comes_before, erase_unused, op_of, same_value, steady

_ops = torch.ops.mtpgraph


def fuse_select(graph: fx.Graph) -> int:
    """Apply the rewrite wherever it holds; returns how often."""
    count = 0
    for node in list(graph.nodes):
        if op_of(node) is _ops.indexer_topk.default and _fuse(graph, node):
            count += 1
    return count


def _fuse(graph: fx.Graph, topk: fx.Node) -> bool:
    chosen = arguments(topk)
    logits, row_lens, k = chosen["logits"], chosen["row_lens"], chosen["topk"]
    if op_of(logits) is not _ops.indexer_logits.default or list(logits.users) != [topk]:
        return False
    scored = arguments(logits)
    if not _are_row_lens_of(row_lens, logits, scored):
        return False
    if isinstance(k, fx.Node) and not comes_before(graph, k, logits):
        return False
    if not steady(
        (row_lens, scored["query_start_loc"], scored["seq_lens"]), since=logits, until=topk
    ):
        return False
    with graph.inserting_before(logits):
        select = graph.call_function(_ops.indexer_select.default, (*scored.values(), k))
    copy_meta(topk, select)
    topk.replace_all_uses_with(select)
    graph.erase_node(topk)
    graph.erase_node(logits)
    erase_unused(row_lens)
    return True


def _are_row_lens_of(row_lens: object, logits: fx.Node, scored: dict[str, object]) -> bool:
    """``row_lens`` is the first result of the ``flatten_decode`` that fits the logits."""
    if not isinstance(row_lens, fx.Node) or row_lens.target is not operator.getitem:
        return False
    flatten, index = row_lens.args
    if op_of(flatten) is not _ops.flatten_decode.default or index != 0:
        return False
    assert isinstance(flatten, fx.Node)
    lens = arguments(flatten)
    if not all(same_value(lens[name], scored[name]) for name in ("query_start_loc", "seq_lens")):
        return False
    # compares two sizes that the check of indexer_topk made one
    return example_value(row_lens).shape == example_value(logits).shape[:1]
