"""Values that Inductor would compute from overwritten memory get a copy that it cannot drop.

Inductor (seen in 2.11 to 2.14) takes some copies for nothing, and computes some values later than
the program says. Where memory is written in between, the result is silently wrong. The pass finds
five forms of this and inserts ``mtpgraph::snapshot``, an opaque copy:

- **late read**: a value computed from memory that a custom op then writes, used after the op, or
  by something that Inductor may move behind the op. The snapshot is of the value:
  ``new = lens + n; op_(lens, new - 1); new * 2``;
- **merged arguments**: an op that writes one argument gets another that is a copy of it:
  ``y = x.clone(); op_(y, x)`` runs as ``op_(x, x)``. The snapshot takes the place of the copy;
- **stale copy**: a copy of an input ends up in another input after the first was written:
  ``old = lens.clone(); lens.add_(n); prev.copy_(old)`` stores the new lens. Likewise a copy, or a
  scatter, that is changed in place itself: ``y = x.index_add(...); x.copy_(z)``;
- **aliased output**: ``logits / 1.0`` and other arithmetic that changes nothing come back as the
  input, or as another output, itself; so does a copy of an input that an op or a scatter wrote;
- **own operand**: ``x[i] = 7; x.add_(x.flip(0))`` reads ``x`` while it is being written, and so
  does ``torch._foreach_add_([x], [x.flip(0)])``.

A snapshot is of a value computed from the memory, or stands for a copy that the user wrote; it is
never of a state pool that the user did not copy.

Left alone
- views: what is read through a view after a write is the written value, in eager too;
- results of custom ops and of matrix products: Inductor computes these where they stand;
- pointwise values that are live across in-place functions of torch: these are safe, but for
  values read through a view as another dtype;
- ``prev.copy_(lens); op_(lens, n)`` where ``prev`` is the earlier input of the graph: the order
  in which Inductor stores inputs is then the right one;
- what a Triton kernel of the user's writes counts for merged arguments alone;
- memory that the tracer recorded nothing about, such as arrays of other libraries.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ..ops import snapshot as _registers_the_op  # noqa: F401
from ._compat import example_value, user_frame
from ._hazard_effects import copies_into, operands_of, replace_taken, scattered_over, targets_of
from ._hazard_scan import Form, Hazard, Place, Scan, Storages
from .report import name_of, note

_ops = torch.ops.mtpgraph


def find_mutation_hazards(graph: fx.Graph) -> int:
    """Insert snapshots wherever a hazard is found; returns how many."""
    count = 0
    memory = Storages()
    cut: set[Place] = set()
    while hazards := Scan(graph, memory, cut).hazards():
        settled: set[int] = set()
        for hazard in hazards:
            node = hazard.place.node
            filled = targets_of(node) if hazard.place.of_operands else [node]
            # a second snapshot for the same memory may not be needed after the first
            if hazard.place not in cut and not memory.of_all(filled) & settled:
                settled |= memory.of_all(filled)
                cut.add(hazard.place)
                count += _insert(graph, hazard, memory)
    return count


def remove_snapshots(graph: fx.Graph) -> int:
    """Take out what the pass put in, for an engine that runs calls in order; returns how many."""
    snapshots = graph.find_nodes(op="call_function", target=_ops.snapshot.default)
    # a call of the user's own stays
    inserted = [node for node in snapshots if node.meta.get(_INSERTED)]
    for node in inserted:
        value: Any = node.args[0]
        if node.meta[_INSERTED] == "of result":
            # what are views of the copy become views of the value again
            value.meta["example_value"] = example_value(node)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    return len(inserted)


_INSERTED = "mtpgraph_inserted"


_REASONS: dict[Form, tuple[str, str]] = {
    "late read": (
        "this value reads memory that {writer} writes, and is used after that; Inductor would "
        "compute it from what was written",
        "a copy of the value was inserted; to save it, finish what needs the value before the op, "
        "or let a functional op compute what is written and store that by copy_",
    ),
    "merged arguments": (
        "{writer} gets this copy together with its source and writes one of them; Inductor would "
        "drop the copy and give the op one tensor twice",
        "the copy was made one that cannot be dropped; to save it, let the op write into "
        "torch.empty_like(...)",
    ),
    "stale copy": (
        "this copy is in use after {writer} writes its source; Inductor would drop the copy and "
        "use what was written",
        "the copy was made one that cannot be dropped",
    ),
    "aliased output": (
        "this is equal to its source, so Inductor would return the source itself, which the caller "
        "or a later step may write to",
        "a copy was inserted; to save it, return the source",
    ),
    "own operand": (
        "this writes what it reads at other places; Inductor would read what was already written",
        "a copy of what it reads was inserted",
    ),
}


def _insert(graph: fx.Graph, hazard: Hazard, memory: Storages) -> int:
    node = hazard.place.node
    if hazard.place.of_operands:
        targets = (
            [o for o in operands_of(node) if memory.may_hold(o, hazard.sources)]
            if hazard.form in ("late read", "own operand")
            else [*copies_into(node)[0], *scattered_over(node)]
        )
        copies = {}
        for value in targets:
            with graph.inserting_before(node):
                copies[value] = _snapshot(graph, value, node)
        replace_taken(node, copies)
    else:
        targets = _results(node)
        for value in targets:
            with graph.inserting_after(value):
                copy = _snapshot(graph, value, node)
            value.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user != copy)
            # what were views of the value are now views of the copy
            fakes = example_value(copy), example_value(value)
            value.meta["example_value"], copy.meta["example_value"] = fakes
            copy.meta[_INSERTED] = "of result"
            memory.forget(value)
    reason, remedy = _REASONS[hazard.form]
    reason = reason.format(writer=_spoken(hazard.writer))
    if not targets:
        remedy = "write it as one op, or keep the value in memory of its own before that"
    note(node, "mutation hazard", "find_mutation_hazards", reason, remedy)
    return len(targets)


def _snapshot(graph: fx.Graph, value: fx.Node, line: fx.Node) -> fx.Node:
    copy = graph.call_function(_ops.snapshot.default, (value,))
    copy.meta.update(value.meta)
    copy.meta["example_value"] = torch.empty_like(example_value(value))
    copy.meta[_INSERTED] = "of operand"
    if "stack_trace" in line.meta:
        copy.meta["stack_trace"] = line.meta["stack_trace"]
    return copy


def _spoken(writer: fx.Node) -> str:
    file, line = user_frame(writer)
    return f"{name_of(writer)} in line {line}" if file else name_of(writer)


def _results(node: fx.Node) -> list[fx.Node]:
    """The tensors that a call gives: itself, or what is taken from its tuple."""
    if isinstance(example_value(node), Tensor):
        return [node]
    items = [user for user in node.users if user.target is operator.getitem]
    return [item for item in items if isinstance(example_value(item), Tensor)]
