"""Where a value may be computed from overwritten memory: one walk over a graph.

``find_mutation_hazards`` says which forms there are, and cuts each with a snapshot.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

from torch import fx

from ._compat import has_example_value
from ._hazard_effects import (
    SHAPED_LIKE,
    changes_nothing,
    copied_by,
    copies_into,
    effect_of,
    is_base,
    is_copy,
    is_product,
    is_reinterpreted,
    is_scatter,
    left_equal_to,
    name_called,
    op_targets,
    op_writes,
    operands_of,
    scattered_over,
    stores_elsewhere,
    taken_by,
    targets_at_risk,
    targets_of,
    view_chain,
)
from ._nodes import nodes_in
from ._writes import UNKNOWN, mutated, storages

Form = Literal["late read", "merged arguments", "stale copy", "aliased output", "own operand"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a snapshot can go: after a call, of its result, or before a write, of what it takes."""

    node: fx.Node
    of_operands: bool


@dataclasses.dataclass(frozen=True)
class Hazard:
    """A snapshot that is needed, of values that come from ``sources``, and the write behind it."""

    place: Place
    form: Form
    sources: frozenset[int]
    writer: fx.Node


class Storages:
    """Storages of nodes, remembered."""

    def __init__(self) -> None:
        self._of: dict[fx.Node, frozenset[int]] = {}
        # what a storage may still have to be computed from, as of the last scan
        self.pending: dict[int, set[int]] = {}

    def of(self, node: fx.Node) -> frozenset[int]:
        found = self._of.get(node)
        if found is None:
            known = storages(node) if has_example_value(node) else set()
            found = self._of[node] = frozenset(known - {UNKNOWN})
        return found

    def forget(self, node: fx.Node) -> None:
        """What was recorded for a node is another tensor now."""
        self._of.pop(node, None)

    def of_all(self, nodes: Iterable[fx.Node]) -> set[int]:
        return set().union(*map(self.of, nodes))

    def may_hold(self, node: fx.Node, sources: frozenset[int]) -> bool:
        """A value is in one of ``sources``, or computed from it."""
        return any(s in sources or self.pending.get(s, set()) & sources for s in self.of(node))


@dataclasses.dataclass
class Memory:
    """What is known of a storage at one point of the program.

    Attributes:
        values: ids of the values it may hold; two storages that share one may hold equal bytes
        links: for a value that came by copying, the copy to make opaque
        based: values that it was changed in place from, and the copy likewise
        arithmetic: for a value that came by arithmetic that changes nothing, that call
        pending: storages that it may still have to be computed from, and through which calls
        moved: holds what an op or a scatter left, which Inductor may have put into an input
    """

    values: set[int]
    links: dict[int, Place] = dataclasses.field(default_factory=dict)
    based: dict[int, Place] = dataclasses.field(default_factory=dict)
    arithmetic: dict[int, fx.Node] = dataclasses.field(default_factory=dict)
    pending: dict[int, set[Place]] = dataclasses.field(default_factory=dict)
    moved: bool = False


class Scan:
    """One walk over a graph in the order of the program."""

    def __init__(self, graph: fx.Graph, memory: Storages, cut: set[Place]) -> None:
        self.nodes = list(graph.nodes)
        self.memory = memory
        self.cut = cut
        self.state: dict[int, Memory] = {}
        # position among the inputs; None where it is not known
        self.inputs: dict[int, int | None] = {}
        self.past: dict[int, set[int]] = defaultdict(set)
        self.readers: dict[int, set[int]] = defaultdict(set)
        self.linked: set[int] = set()
        self.writers: dict[int, fx.Node] = {}
        # pairs of a storage and one that it is computed from through a view as another dtype
        self.reinterpreted: set[tuple[int, int]] = set()
        self.found: dict[tuple[Any, ...], Hazard] = {}
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.fresh_value = iter(range(1, 1 << 62))

    def hazards(self) -> list[Hazard]:
        """The snapshots that are needed first; those behind them may then not be."""
        effects = {node: effect_of(node) for node in self.nodes}
        if not any(effect in ("write", "op") for effect in effects.values()) and not any(
            copied_by(node)[1] for node in self.nodes
        ):
            return []
        self.at_risk = self.memory.of_all(
            target for node, effect in effects.items() for target in targets_at_risk(node, effect)
        )
        self._find_uses(effects)
        visit = {
            "input": self._input,
            "value": self._value,
            "write": self._write,
            "op": self._op,
            "kernel": self._kernel,
            "output": self._output,
        }
        for node in self.nodes:
            visit[effects[node]](node)
        self.memory.pending = {s: set(memory.pending) for s, memory in self.state.items()}
        return sorted(self.found.values(), key=lambda hazard: self.order[hazard.place.node])

    def _find_uses(self, effects: dict[fx.Node, str]) -> None:
        """Who uses each storage, and how far Inductor may move each use.

        It moves what writes nothing behind what does, up to the first use of the result.
        """
        self.last_use: dict[int, int] = {}
        self.uses: dict[int, list[fx.Node]] = defaultdict(list)
        # the first and the last use of what a call gives that cannot be moved itself
        self.pinned: dict[fx.Node, tuple[float, float]] = {}
        inputs = self.memory.of_all(node for node in self.nodes if effects[node] == "input")
        for node in reversed(self.nodes):
            given = self.memory.of_all(node.all_input_nodes)
            made = self.memory.of(node) - given
            if effects[node] == "write":
                made |= self.memory.of_all(targets_of(node))
            order = float(self.order[node])
            if effects[node] not in ("value", "write", "op") or op_writes(node, effects[node]):
                self.pinned[node] = order, order
            else:
                spans = [self.pinned[user] for storage in made for user in self.uses[storage]]
                last = float("inf") if made & inputs else max((b for _, b in spans), default=-1.0)
                self.pinned[node] = min((a for a, _ in spans), default=float("inf")), last
            for storage in given:
                self.last_use.setdefault(storage, self.order[node])
                # a view has no use of its own, those of the view are seen themselves
                if made or order == self.pinned[node][0]:
                    self.uses[storage].append(node)

    def _straddles(self, storage: int, at: fx.Node) -> bool:
        """Some uses of a value stay before a call, and others may be moved behind it."""
        order = self.order[at]
        spans = [self.pinned[user] for user in self.uses[storage] if self.order[user] <= order]
        stay = any(first <= order for first, _ in spans)
        return stay and any(first > order and last > order for first, last in spans)

    def _at(self, storage: int) -> Memory:
        if storage not in self.state:
            self.state[storage] = Memory({next(self.fresh_value)})
        return self.state[storage]

    def _hazard(
        self, place: Place, form: Form, sources: Iterable[int], writer: fx.Node, key: Any
    ) -> None:
        if place in self.cut:
            return
        hazard = Hazard(place, form, frozenset(sources), writer)
        known = self.found.get((form, writer, key))
        if known is None or self.order[place.node] < self.order[known.place.node]:
            self.found[form, writer, key] = hazard

    def _input(self, node: fx.Node) -> None:
        order = self.order[node] if node.op == "placeholder" else None
        for storage in self.memory.of(node):
            self.inputs[storage] = None if storage in self.inputs else order
            self._at(storage)

    def _value(self, node: fx.Node) -> None:
        """A call of torch that writes nothing: fresh memory, or a view of what there is."""
        given = self.memory.of_all(node.all_input_nodes)
        fresh = self.memory.of(node) - given
        if not fresh:
            return
        place = Place(node, False)
        settled = is_product(node) or name_called(node) in SHAPED_LIKE or place in self.cut
        reads = set() if settled else self._late(given)
        viewed = self.memory.of_all(filter(is_reinterpreted, node.all_input_nodes))
        viewed |= {read for storage, read in self.reinterpreted if storage in given}
        copied, arithmetic = copied_by(node)
        bases = self.memory.of_all(scattered_over(node))
        for storage in fresh:
            memory = self.state[storage] = Memory({next(self.fresh_value)})
            self._read_late(storage, reads, place)
            self.reinterpreted |= {(storage, read) for read in viewed & reads}
            for source in self.memory.of_all(copied):
                self._copy(storage, source, place, node if arithmetic else None)
            for base in bases:
                self._change_copy(storage, self._at(base), node)
                memory.based |= dict.fromkeys(self._at(base).values, place)
                self.linked.add(storage)
                memory.moved = True

    def _late(self, given: Iterable[int]) -> set[int]:
        """Storages at risk that a value computed from ``given`` may read when it is used."""
        reads = {storage for storage in given if storage in self.at_risk}
        return reads.union(*(self._at(storage).pending for storage in given))

    def _read_late(self, storage: int, reads: Iterable[int], place: Place) -> None:
        for source in reads:
            if source != storage:
                self._at(storage).pending.setdefault(source, set()).add(place)
                self.readers[source].add(storage)

    def _copy(self, target: int, source: int, place: Place, arithmetic: fx.Node | None) -> None:
        """``target`` may hold from now on what ``source`` holds."""
        to, of = self._at(target), self._at(source)
        if place in self.cut:
            return
        to.values |= of.values
        for value in of.values:
            to.links[value] = of.links.get(value, place)
            call = of.arithmetic.get(value, arithmetic)
            if call is not None:
                to.arithmetic[value] = call
        to.based |= of.based
        to.moved |= of.moved
        self.linked.add(target)

    def _write(self, node: fx.Node) -> None:
        """An in-place function of torch."""
        # some give a result besides
        self._value(node)
        targets = self.memory.of_all(targets_of(node)) or _known(mutated(node))
        operands = operands_of(node)
        place = Place(node, True)
        copies, whole = copies_into(node)
        given = self.memory.of_all(operands)
        read = self.memory.of_all(nodes_in(taken_by(node)))
        copy = bool(copies) and is_copy(node)
        stores = stores_elsewhere(node)
        scatters = is_scatter(node) and not stores
        bases = self.memory.of_all(scattered_over(node)) if not scatters else set()
        for target in targets:
            self._before_write(target, node)
            before = self._at(target)
            if self._reads_own(node, target, operands) or self._restores(target, copies):
                self._hazard(place, "own operand", (target, *given), node, target)
            memory = self.state[target] = Memory({next(self.fresh_value)})
            memory.moved = before.moved
            copied = self.memory.of_all(copies)
            replaced = whole and (copy or stores) and target not in read
            if not replaced:
                for source in before.pending:
                    for earlier in before.pending[source]:
                        self._read_late(target, (source,), earlier)
            if not scatters and place not in self.cut:
                self._read_late(target, self._late(given), place)
            if target in self.memory.of_all(left_equal_to(node)) | copied:
                memory.values |= before.values
                memory.links |= before.links
            for source in copied - {target}:
                self._copy(target, source, place, None)
                memory.moved |= changes_nothing(node)[0]
            for base in bases:
                self._change_copy(target, before if base == target else self._at(base), node)
                values = before.values if base == target else self._at(base).values
                memory.based |= dict.fromkeys(values, place)
                memory.moved = True
                self.linked.add(target)
            if not whole or scatters:
                self._change_copy(target, before, node)
                memory.based |= {**before.links, **before.based}
                memory.moved = True
                self.linked.add(target)
            self.writers[target] = node

    def _change_copy(self, target: int, copy: Memory, writer: fx.Node) -> None:
        """A copy of what an input held before it was written is changed itself."""
        for source in self.inputs:
            for value in copy.links.keys() & self.past[source]:
                if source != target:
                    self._hazard(copy.links[value], "stale copy", (source,), writer, target)

    def _reads_own(self, node: fx.Node, target: int, operands: Iterable[fx.Node]) -> bool:
        """What an in-place function takes is computed from what it writes, in the same kernel."""
        if is_scatter(node) and not stores_elsewhere(node):
            return False
        memory = self._at(target)
        at_once = memory.moved or "_foreach" in name_called(node)
        of_a_part = not copies_into(node)[1]
        for operand in operands:
            for storage in self.memory.of(operand) - {target}:
                other = self._at(storage)
                # a view, or a copy that is dropped, is not in memory where its source is not
                unmade = len(view_chain(operand)) > 1 or bool(other.links)
                if target in other.pending and (at_once or (of_a_part and unmade)):
                    return True
                if of_a_part and memory.values & other.values:
                    return True
        return False

    def _restores(self, target: int, copies: Iterable[fx.Node]) -> bool:
        """An input gets back what it held; Inductor may by then have put a changed copy there."""
        own = self._at(target).values | self.past[target]
        given = (self._at(source).values for source in self.memory.of_all(copies))
        return target in self.inputs and any(values & own for values in given)

    def _before_write(self, target: int, writer: fx.Node) -> None:
        """What holds a copy of an input must not lose it with the input's next write."""
        memory = self._at(target)
        if target not in self.inputs:
            return
        self.past[target] |= memory.values
        for reader in self.readers[target]:
            places = self._at(reader).pending.get(target)
            if places and (reader, target) in self.reinterpreted and self._is_live(reader, writer):
                place = min(places, key=lambda place: self.order[place.node])
                self._hazard(place, "late read", (target,), writer, target)
        for other in list(self.linked):
            if other == target or not self._is_live(other, writer):
                continue
            holder = self._at(other)
            risky = memory.values & holder.based.keys()
            for value in risky:
                self._hazard(holder.based[value], "stale copy", (target,), writer, other)
            if memory.moved:
                for value in memory.values & holder.links.keys():
                    self._hazard(holder.links[value], "stale copy", (target,), writer, other)

    def _is_live(self, storage: int, at: fx.Node) -> bool:
        stored = storage in self.inputs and storage in self.writers
        return stored or self.last_use.get(storage, -1) > self.order[at]

    def _op(self, node: fx.Node) -> None:
        """A call of a custom op, or of what this pass cannot see into."""
        given = self.memory.of_all(node.all_input_nodes)
        written = nodes_in(op_targets(node))
        targets = self.memory.of_all(written)
        for target in targets:
            for reader in list(self.readers[target]):
                places = self._at(reader).pending.get(target)
                if not places:
                    continue
                if not self._is_live(reader, node) and not self._straddles(reader, node):
                    continue
                if self._is_stored_first(reader, target, places):
                    continue
                place = min(places, key=lambda place: self.order[place.node])
                self._hazard(place, "late read", (target,), node, target)
        self._merged(node, given, targets)
        for target in targets:
            self._before_write(target, node)
            before = self._at(target)
            self._change_copy(target, before, node)
            memory = self.state[target] = Memory({next(self.fresh_value)}, moved=True)
            memory.based = {**before.links, **before.based}
            if not all(map(is_base, written)):
                memory.pending = before.pending
            self.linked.add(target)
            self.writers[target] = node
        for storage in self.memory.of(node) - given:
            self.state[storage] = Memory({next(self.fresh_value)})

    def _kernel(self, node: fx.Node) -> None:
        """A Triton kernel of the user's: its writes are in order, its arguments may be merged."""
        given = self.memory.of_all(node.all_input_nodes)
        self._merged(node, given, given)
        for target in given:
            self._before_write(target, node)
            self._at(target).values = {next(self.fresh_value)}
            self.writers[target] = node

    def _is_stored_first(self, reader: int, target: int, places: Iterable[Place]) -> bool:
        """``reader`` is an input, a plain copy of ``target``, and stored before that is."""
        copied = self._at(reader)
        shared = copied.values & self._at(target).values
        links = {copied.links.get(value) for value in shared}
        return bool(shared) and links >= set(places) and self._is_earlier(reader, target)

    def _is_earlier(self, one: int, other: int) -> bool:
        """Both are inputs, and Inductor stores what was written to the one before the other."""
        first, second = self.inputs.get(one), self.inputs.get(other)
        return first is not None and second is not None and first < second

    def _merged(self, node: fx.Node, given: Iterable[int], targets: Iterable[int]) -> None:
        for target in targets:
            for other in given:
                if other == target:
                    continue
                one, two = self._at(target), self._at(other)
                for value in one.values & two.values:
                    place = one.links.get(value) or two.links.get(value)
                    if place is not None:
                        self._hazard(
                            place, "merged arguments", (target, other), node, (target, other)
                        )

    def _output(self, node: fx.Node) -> None:
        for storage, writer in self.writers.items():
            if storage not in self.inputs:
                continue
            memory = self._at(storage)
            for value, place in memory.links.items():
                for source in self.inputs:
                    if (
                        source != storage
                        and value in memory.values
                        and value in self.past[source]
                        and not self._is_earlier(storage, source)
                    ):
                        behind = self.writers.get(source, writer)
                        self._hazard(place, "stale copy", (source,), behind, storage)
        returned = self.memory.of_all(node.all_input_nodes)
        held = [value for storage in returned for value in self._at(storage).values]
        twice = {value for value in held if held.count(value) > 1}
        for storage in returned - self.inputs.keys():
            memory = self._at(storage)
            others = (self.inputs.keys() | returned) - {storage}
            elsewhere = set().union(*(self._at(s).values | self.past[s] for s in others))
            for value in memory.values & elsewhere:
                if value in memory.arithmetic:
                    place = Place(memory.arithmetic[value], False)
                    self._hazard(place, "aliased output", (), node, storage)
                elif value in memory.links and (memory.moved or value in twice):
                    self._hazard(memory.links[value], "aliased output", others, node, storage)


def _known(found: set[int]) -> set[int]:
    return found - {UNKNOWN}
