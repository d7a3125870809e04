"""reset_states_(s, idx, mask); X_update_(s, idx)  ->  X_update_(s, idx, has_initial_state=mask)

``X_update_`` is ``causal_conv1d_update_``, ``selective_state_update_`` or ``gated_delta_update_``.
``idx`` may also be the first column of the update's two-dimensional ``state_indices``: that is the
slot where a new request starts. The reset disappears, and with it a pass over the state: the
update starts a new request from zero and reads nothing of what the slot held. An update that has
the same mask already needs no reset either.

The state is looked at as memory: ``pool[i]``, ``pool.select(0, i)`` and a part of ``pool.unbind()``
are one state. Other layers of a pool may be reset, updated and read between the two as long as
sizes and strides show that they have no element in common with this one: so resets may stand in a
loop of their own in front of all layers.

The two forms leave the same bytes behind and give the same outputs, with one exception that the
contract decides for the fused form: a new request whose ``num_accepted_tokens`` is not 1. The
fused form ignores that number; the explicit form needs it to be 1.

Left alone when
- the update has another mask, or ``dst_indices`` (the reset would touch the source slot);
- the reset covers more or other memory than the update's state, as one reset of a stacked pool;
- the mask is not ``has_initial_state`` of the update's own ``query_start_loc`` and the update is
  ragged: a row without tokens would then be reset by the one form only;
- the indices of the two are not provably the same;
- anything between the two may touch the state, or another argument of the update shares its
  memory;
- the indices, the mask or ``query_start_loc``, or what they were computed from, is written before
  the update.
"""

import math
from typing import Any

import torch
from torch import Tensor, fx

from ._compat import example_value, has_example_value, tree_leaves
from ._memory import disjoint, is_first_column, same_rows, shares_storage, sizes
from ._nodes import arguments, describe, nodes_in, op_of, set_argument, tensor_of
from ._values import (
    computed_apart,
    copied_from,
    is_copy,
    is_view,
    read_from,
    same_value,
    writer_between,
)
from ._writes import UNKNOWN, erase_all_unused, overlap, storages, touched
from .report import note

_ops = torch.ops.mtpgraph


def fuse_state_reset(graph: fx.Graph) -> int:
    """Apply the rewrite wherever it holds; returns how often."""
    count = 0
    for node in list(graph.nodes):
        if op_of(node) is _ops.reset_states_.default:
            refusal = _fuse(node)
            if refusal is None:
                count += 1
            else:
                note(node, "left alone", "fuse_state_reset", *refusal)
    return count


def _fuse(reset: fx.Node) -> tuple[str, str] | None:
    """Rewrite a reset and its update, or say why not and what to write instead."""
    cleared = arguments(reset)
    mask = cleared["has_initial_state"]
    state = tensor_of(cleared["state"])
    if state is None:
        return "nothing is known about the memory of the state", ""
    update = _next_user(reset, state)
    if update is None:
        return "no update of this state follows in the graph", ""
    refusal = _not_its_update(update, state) or _not_one_batch(reset, update)
    if refusal is not None:
        return refusal
    set_argument(update, "has_initial_state", mask)
    reset.graph.erase_node(reset)
    erase_all_unused(update.graph, cleared.values())
    return None


def _next_user(reset: fx.Node, state: Tensor) -> fx.Node | None:
    """The next node that may touch the state's memory; None if there is none."""
    whole = storages(arguments(reset)["state"])
    node = reset.next
    while node.op != "output":
        found = touched(node)
        if UNKNOWN in found:
            return node
        # making a view of the state reads nothing, and a second view may be what the update gets
        if (
            overlap(found, whole)
            and not is_view(node)
            and _may_touch([node.args, node.kwargs], state)
        ):
            return node
        node = node.next
    return None


def _may_touch(value: Any, state: Tensor) -> bool:
    """A tensor in a structure of nodes may have an element of the state."""
    return any(not disjoint(tensor, state) for tensor in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    known = [node for node in nodes_in(value) if has_example_value(node)]
    leaves = tree_leaves([example_value(node) for node in known])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _not_its_update(update: fx.Node, state: Tensor) -> tuple[str, str] | None:
    """Why what touches the state next is not an update of it that may take the mask."""
    name = _state_name(update)
    advanced = tensor_of(arguments(update)[name]) if name else None
    if advanced is None or not shares_storage(advanced, state):
        return (
            f"{describe(update)} may read or write the state between the reset and its update",
            "reset the state right before its update",
        )
    if not same_rows(advanced, state):
        if math.prod(sizes(advanced)) != math.prod(sizes(state)):
            return (
                f"the reset covers a state of shape {sizes(state)}, {describe(update)} one of "
                f"shape {sizes(advanced)}: part of the reset's work would be lost",
                "reset each layer's own state: reset_states_(pool[layer], ...)",
            )
        return (
            f"the states of the reset and of {describe(update)} are not known to be one, nor to "
            "have no element in common",
            "give both the same view of the pool",
        )
    beside = [value for key, value in arguments(update).items() if key != name]
    if UNKNOWN in storages(beside) or _may_touch(beside, state):
        return (
            f"another argument of {describe(update)} shares the memory of the state",
            "give the update a copy of it",
        )
    return None


def _not_one_batch(reset: fx.Node, update: fx.Node) -> tuple[str, str] | None:
    """Why the update does not start the same rows from zero that the reset clears."""
    cleared, advanced = arguments(reset), arguments(update)
    mask, starts = cleared["has_initial_state"], advanced["query_start_loc"]
    own = advanced["has_initial_state"]
    if own is not None and not same_value(copied_from(own), copied_from(mask)):
        return (
            f"{describe(update)} has a has_initial_state of its own",
            "give the update the mask of the reset, and leave out the reset",
        )
    if advanced["dst_indices"] is not None:
        return (
            f"{describe(update)} has dst_indices: the reset clears slots that the update only "
            "reads",
            "give the update has_initial_state, and leave out the reset",
        )
    if not _is_mask_of(mask, starts):
        return (
            f"the mask is not has_initial_state of the query_start_loc of {describe(update)}: it "
            "may clear the state of a request without tokens, which an update does not touch",
            "mask = has_initial_state(query_start_loc, seq_lens)",
        )
    if not _starts_at(advanced["state_indices"], cleared["state_indices"]):
        return (
            f"the reset's state_indices are not known to be those where {describe(update)} starts",
            "reset_states_(state, state_indices[:, 0], ...), or state_indices itself where it has "
            "one dimension",
        )
    indices = cleared["state_indices"], advanced["state_indices"]
    writer = writer_between(
        (mask, own, starts, *indices), reset, update, _reads_before(mask, own, starts, indices)
    )
    if writer is not None:
        return (
            f"{describe(writer)} may write the mask, the indices, query_start_loc or what they "
            "were computed from before the update reads them",
            "reset the state right before its update, after the write",
        )
    return None


def _reads_before(mask: Any, own: Any, starts: Any, indices: Any) -> set[fx.Node]:
    """The calls that read, maybe before the reset, what the update reads again."""
    values = indices if own is None or own is mask else (*indices, mask, own)
    calls = {node for node in read_from(values) if node.op != "placeholder"}
    if starts is not None:
        origin = copied_from(mask)
        calls |= {origin, *computed_apart(arguments(origin)["query_start_loc"], starts)}
    return calls


def _state_name(update: fx.Node) -> str | None:
    """The name of the argument that an update advances; None for anything else."""
    op = op_of(update)
    if op is _ops.causal_conv1d_update_.default:
        return "conv_state"
    if op in (_ops.selective_state_update_.default, _ops.gated_delta_update_.default):
        return "state"
    return None


def _starts_at(state_indices: Any, cleared: Any) -> bool:
    """A new request of the update starts at the slots that were cleared."""
    if _is_same_cast(state_indices, cleared) and _starts_at(state_indices.args[0], cleared.args[0]):
        return True
    whole, first = copied_from(state_indices), copied_from(cleared)
    if same_value(whole, first):
        return True
    column, matrix = tensor_of(first), tensor_of(whole)
    if column is None or matrix is None or column.dim() != 1 or matrix.dim() != 2:
        return False
    if is_first_column(column, matrix):
        return True
    base = first
    while is_view(base):
        base = base.args[0]
        matrix = tensor_of(base)
        if matrix is None:
            continue
        if is_first_column(column, matrix) and same_value(copied_from(base), whole):
            return True
    return False


def _is_same_cast(a: Any, b: Any) -> bool:
    return (
        is_copy(a)
        and is_copy(b)
        and (a.op, a.target) == (b.op, b.target)
        and same_value((a.args[1:], dict(a.kwargs)), (b.args[1:], dict(b.kwargs)))
    )


def _is_mask_of(mask: Any, query_start_loc: Any) -> bool:
    """The mask clears no row that the update leaves alone for want of tokens."""
    if query_start_loc is None:
        return True
    origin = copied_from(mask)
    if op_of(origin) is not _ops.has_initial_state.default:
        return False
    return same_value(arguments(origin)["query_start_loc"], query_start_loc)
