"""reset_states_(s, idx, mask); X_update_(s, idx)  ->  X_update_(s, idx, has_initial_state=mask)

``X_update_`` is ``causal_conv1d_update_``, ``selective_state_update_`` or ``gated_delta_update_``.
``idx`` may also be the first column of the update's two-dimensional ``state_indices``: that is the
slot where a new request starts. The reset disappears, and with it a pass over the state: the
update starts a new request from zero and reads nothing of what the slot held.

The two forms leave the same bytes behind and give the same outputs, with one exception that the
contract decides for the fused form: a new request whose ``num_accepted_tokens`` is not 1. The
fused form ignores that number; the explicit form needs it to be 1.

Left alone when
- the update has a mask of its own, or ``dst_indices`` (the reset would touch the source slot);
- the mask is not ``has_initial_state`` of the update's own ``query_start_loc`` and the update is
  ragged: a row without tokens would then be reset by the one form only;
- the indices of the two are not provably the same;
- anything between the two touches the state's storage, or another argument of the update shares it;
- the indices, the mask or ``query_start_loc``, or what they were computed from, is written before
  the update.
"""

import operator

import torch
from torch import fx

from ._nodes import (
    arguments,
    erase_unused,
    op_of,
    overlap,
    same_value,
    set_argument,
    steady,
    storages,
    touched,
)

_ops = torch.ops.mtpgraph


def fuse_state_reset(graph: fx.Graph) -> int:
    """Apply the rewrite wherever it holds; returns how often."""
    count = 0
    for node in list(graph.nodes):
        if op_of(node) is _ops.reset_states_.default and _fuse(node):
            count += 1
    return count


def _fuse(reset: fx.Node) -> bool:
    cleared = arguments(reset)
    mask = cleared["has_initial_state"]
    update = _next_user(reset, cleared)
    if update is None:
        return False
    advanced = arguments(update)
    state = "conv_state" if "conv_state" in advanced else "state"
    if not (
        same_value(advanced[state], cleared["state"])
        and _starts_at(advanced["state_indices"], cleared["state_indices"])
        and advanced["has_initial_state"] is None
        and advanced["dst_indices"] is None
        and _is_mask_of(mask, advanced["query_start_loc"])
        and steady(
            (
                mask,
                cleared["state_indices"],
                advanced["state_indices"],
                advanced["query_start_loc"],
            ),
            since=reset,
            until=update,
        )
        and not overlap(_read_beside(update, state), storages(advanced[state]))
    ):
        return False
    set_argument(update, "has_initial_state", mask)
    reset.graph.erase_node(reset)
    erase_unused(cleared["state_indices"])
    if cleared["state"] is not advanced[state]:
        erase_unused(cleared["state"])
    return True


def _next_user(reset: fx.Node, cleared: dict[str, fx.Node]) -> fx.Node | None:
    """The update that touches the state next, if it is what touches the state next."""
    state = storages(cleared["state"])
    node = reset.next
    while node.op != "output":
        if op_of(node) in _updates() and overlap(storages(_state_of(node)), state):
            return node
        # making a view of the state reads nothing, and a second view may be what the update gets
        if overlap(touched(node), state) and not _is_view(node):
            return None
        node = node.next
    return None


def _read_beside(update: fx.Node, state: str) -> set[int]:
    """Storages of the update's other arguments."""
    return storages([value for name, value in arguments(update).items() if name != state])


def _updates() -> tuple[object, ...]:
    return (
        _ops.causal_conv1d_update_.default,
        _ops.selective_state_update_.default,
        _ops.gated_delta_update_.default,
    )


def _state_of(update: fx.Node) -> object:
    values = arguments(update)
    return values["conv_state"] if "conv_state" in values else values["state"]


def _is_view(node: fx.Node) -> bool:
    """An index or a transposition that shares its base's storage: nothing is read."""
    if node.target is operator.getitem or (
        node.op == "call_method" and node.target in ("select", "view", "transpose", "narrow")
    ):
        return storages(node) == storages(node.args[0])
    return False


def _starts_at(state_indices: object, cleared: object) -> bool:
    """A new request of the update starts at the slots that were cleared."""
    if same_value(state_indices, cleared):
        return True
    if not isinstance(cleared, fx.Node):
        return False
    first_column = (slice(None), 0)
    if cleared.target is operator.getitem:
        base, index = cleared.args
        return same_value(base, state_indices) and same_value(index, first_column)
    if cleared.op == "call_method" and cleared.target == "select":
        return same_value(cleared.args, (state_indices, 1, 0))
    return False


def _is_mask_of(mask: object, query_start_loc: object) -> bool:
    """The mask clears no row that the update leaves alone for want of tokens."""
    if query_start_loc is None:
        return True
    if op_of(mask) is not _ops.has_initial_state.default:
        return False
    assert isinstance(mask, fx.Node)
    return same_value(arguments(mask)["query_start_loc"], query_start_loc)
