"""flatten_decode(x); ...; flatten_decode(x)  ->  one call that serves all layers

and the same for ``has_initial_state``, ``expand_block_table`` and ``topk_to_slots``. The arguments
of two calls are the same when they are the same tensors, views of the same elements, or computed
by the same repeatable calls; sizes are the same when their expressions are, however they were
come by.

Left alone when
- an argument, or what it was computed from, is written between the two calls;
- the result of either is written anywhere in the graph: the two must stay two tensors;
- the results of both are returned: the caller may write one of them.
"""

import operator

import torch
from torch import fx

from ._nodes import describe, op_of, tensor_of
from ._values import computed_apart, same_value, writer_between
from ._writes import UNKNOWN, erase_all_unused, mutated, overlap, storages
from .report import note

_ops = torch.ops.mtpgraph


def share_step_metadata(graph: fx.Graph) -> int:
    """Apply the rewrite wherever it holds; returns the number of calls that went."""
    metadata = (
        _ops.flatten_decode.default,
        _ops.has_initial_state.default,
        _ops.expand_block_table.default,
        _ops.topk_to_slots.default,
    )
    writers = None
    count = 0
    kept: list[fx.Node] = []
    for node in list(graph.nodes):
        if op_of(node) not in metadata:
            continue
        # the latest first: an argument may have been written since the others
        alive = (other for other in reversed(kept) if other.users)
        twin = next((other for other in alive if same_value(other, node)), None)
        if twin is None:
            kept.append(node)
            continue
        if writers is None:
            writers = _writers(graph)
        refusal = _why_not(twin, node, writers)
        if refusal is None:
            _replace(node, twin)
            count += 1
        else:
            kept.append(node)
            note(node, "left alone", "share_step_metadata", *refusal)
    return count


def _writers(graph: fx.Graph) -> list[tuple[fx.Node, set[int]]]:
    """Each node that may write, with the storages: of what it cannot be told, all that it got."""
    found = []
    for node in graph.nodes:
        written = mutated(node)
        if UNKNOWN in written:
            written = storages((node.args, node.kwargs))
        if written:
            found.append((node, written))
    return found


def _why_not(
    first: fx.Node, second: fx.Node, writers: list[tuple[fx.Node, set[int]]]
) -> tuple[str, str] | None:
    apart = computed_apart(first, second)
    writer = writer_between(first.all_input_nodes + second.all_input_nodes, first, second, apart)
    if writer is not None:
        return (
            f"{describe(writer)} may write an argument of this call after {describe(first)} read "
            "it",
            "if the values are still the same, use the first result again",
        )
    results = storages(first), storages(second)
    for node, written in writers:
        if any(overlap(written, result) for result in results):
            return (
                f"{describe(node)} may write the result of this call or of {describe(first)}",
                "write to a clone of it, and use one result in all layers",
            )
    returned = storages(second.graph.output_node().args)
    if all(overlap(returned, result) for result in results):
        return (
            f"the step returns this result and that of {describe(first)}, two tensors to its "
            "caller",
            "return it once",
        )
    return None


def _replace(copy: fx.Node, kept: fx.Node) -> None:
    sources = copy.all_input_nodes
    copy.replace_all_uses_with(kept)
    copy.graph.erase_node(copy)
    erase_all_unused(kept.graph, sources)
    if tensor_of(kept) is not None:
        return
    # the parts of a result are one tensor each: those that were of the copy stand later
    parts: dict[object, fx.Node] = {}
    for part in list(kept.graph.nodes):
        if part in kept.users and part.target is operator.getitem:
            first = parts.setdefault(part.args[1], part)
            if first is not part:
                part.replace_all_uses_with(first)
                kept.graph.erase_node(part)
