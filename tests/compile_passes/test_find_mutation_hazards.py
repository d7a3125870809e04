"""Where Inductor would compute from overwritten memory, a snapshot makes it equal to eager.

``TORCH_IS_WRONG`` says which programs Inductor alone gets wrong, per version of torch: a version
that mends one fails here, so that the table, and the pass, can shrink.
"""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mtpgraph import bench_step
from mtpgraph.compile_passes import _compat, backend
from mtpgraph.compile_passes.find_host_syncs import find_host_syncs
from mtpgraph.compile_passes.find_mutation_hazards import (
    find_mutation_hazards,
    remove_snapshots,
)
from mtpgraph.compile_passes.graph_pass import PassManager
from mtpgraph.compile_passes.report import Finding
from mtpgraph.compile_passes.step import stats
from mtpgraph.example.cache import make_caches
from mtpgraph.example.model import load
from tests.compile_passes import support

_LIBRARY = torch.library.Library("mtpgraph_hazards", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mtpgraph_hazards::{name}", fake, lib=_LIBRARY)


def write_(buffer: Tensor, x: Tensor) -> None:
    buffer.copy_(x)


def advance_(buffer: Tensor, x: Tensor) -> None:
    buffer.add_(x)


def reverse_(out: Tensor, x: Tensor) -> None:
    """Element by element, so that one tensor given twice shows."""
    for i in range(len(out)):
        out[i].copy_(x[len(out) - 1 - i])


def update_(state: Tensor, x: Tensor) -> Tensor:
    before = state * 2 + x
    state.add_(x)
    return before


def exchange_(a: Tensor, b: Tensor) -> None:
    a_before = a.clone()
    a.copy_(b)
    b.copy_(a_before)


def nothing(*_: Tensor) -> None:
    return None


define("write_(Tensor(a!) buffer, Tensor x) -> ()", write_, nothing)
define("advance_(Tensor(a!) buffer, Tensor x) -> ()", advance_, nothing)
define("reverse_(Tensor(a!) out, Tensor x) -> ()", reverse_, nothing)
define("exchange_(Tensor(a!) a, Tensor(b!) b) -> ()", exchange_, nothing)
define(
    "update_(Tensor(a!) state, Tensor x) -> Tensor", update_, lambda state, _: state.new_empty(4)
)
define("same(Tensor x) -> Tensor", Tensor.clone, torch.empty_like)
OPS = torch.ops.mtpgraph_hazards

# every program gets lens [4], n [4], prev [4], rows [2] of indices
Program = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def make_inputs() -> list[Tensor]:
    values = [[5, 7, 9, 4], [1, 2, 1, 3], [10, 30, 20, 60], [2, 0]]
    return [torch.tensor(value) for value in values]


def a1_used_in_an_expression_and_after(lens, n, prev, rows):
    new = lens + n
    OPS.write_(lens, new - 1)
    return new * 2


def a1_mask_of_a_reset(lens, n, prev, rows):
    has = lens > 6
    v = n * has
    OPS.write_(lens, has.int() + 1)
    return v + has


def a1_op_that_returns(lens, n, prev, rows):
    new = lens + n
    y = OPS.update_(lens, new - 1)
    return new * 2 + y


def a1_buffer_of_the_step_itself(lens, n, prev, rows):
    buffer = torch.zeros_like(lens)
    OPS.write_(buffer, n)
    new = buffer + n
    OPS.write_(buffer, new - 1)
    return new * 2 + buffer


def a1_gathered(lens, n, prev, rows):
    new = lens[n]
    OPS.write_(lens, new - 1)
    return new * 2


def a1_op_gets_a_view_of_it(lens, n, prev, rows):
    new = lens + n
    OPS.write_(prev[1:], new[1:])
    OPS.write_(lens, new - 1)
    return new * 2


def a1_op_gets_the_value_itself(lens, n, prev, rows):
    """The op gets a copy of its own, and the value is computed once more after it."""
    new = lens * 2
    OPS.write_(lens, new)
    return new * 2


def a1_scatter_moved_behind_the_op(lens, n, prev, rows):
    """Nothing is used late in the program; the scatter moves to where its target is read."""
    new = torch.where(prev > 10, n, lens)
    prev[rows] = new[:2] + 1
    OPS.advance_(lens, new - 1)
    return prev + n


def a1_stored_in_another_input(lens, n, prev, rows):
    prev.copy_(lens + 1)
    OPS.advance_(lens, n)


def a1_added_to_another_input(lens, n, prev, rows):
    prev.add_(lens)
    OPS.advance_(lens, n)


def a2_clone_and_source(lens, n, prev, rows):
    z = lens * 2
    y = z.clone()
    OPS.reverse_(y, z)
    return y


def a2_source_is_written(lens, n, prev, rows):
    y = lens.clone()
    OPS.reverse_(lens, y)
    return lens + 0


def a2_to_with_copy(lens, n, prev, rows):
    z = lens * 2
    y = z.to(torch.int64, copy=True)
    OPS.reverse_(y, z)
    return y


def a2_cat_of_one(lens, n, prev, rows):
    z = lens * 2
    y = torch.cat([z])
    OPS.reverse_(y, z)
    return y


def a2_persistent_buffer(lens, n, prev, rows):
    z = lens * 2
    prev.copy_(z)
    OPS.reverse_(prev, z)
    return prev + 0


def a2_times_one(lens, n, prev, rows):
    z = lens * 2
    y = z * 1
    OPS.reverse_(y, z)
    return y


def a3_old_lens(lens, n, prev, rows):
    old = lens.clone()
    OPS.advance_(lens, n)
    prev.copy_(old)
    return prev + 0


def a3_old_lens_without_ops(lens, n, prev, rows):
    old = lens.clone()
    lens.add_(n)
    prev.copy_(old)


def a3_swap(lens, n, prev, rows):
    old = lens.clone()
    lens.copy_(prev)
    prev.copy_(old)


def a3_new_lens_first(lens, n, prev, rows):
    new = lens + n
    prev.copy_(lens)
    lens.copy_(new)


def a3_slices(lens, n, prev, rows):
    y = lens + n
    prev[:] = lens[:]
    lens.add_(1)
    return y


def a3_copied_before_the_op_but_read_earlier(lens, n, prev, rows):
    y = lens * 2
    prev.copy_(lens)
    OPS.advance_(lens, n)
    return y


def a3_between_two_writes(lens, n, prev, rows):
    OPS.advance_(lens, n)
    old = lens.clone()
    lens.add_(n)
    prev.copy_(old)


def a3_clone_changed_by_an_op_after_its_source(lens, n, prev, rows):
    old = lens.clone()
    lens[rows] = n[:2]
    OPS.advance_(old, n)
    return old


def a3_scatter_into_a_clone(lens, n, prev, rows):
    changed = lens.clone()
    changed[rows] = n[:2]
    lens.copy_(n)
    return changed


def a4_divided_by_one(lens, n, prev, rows):
    return lens.float(), (prev + 0), n // 1


def a4_times_ones(lens, n, prev, rows):
    return lens * torch.ones(4, dtype=torch.int64)


def a4_scatter_of_an_input_written_later(lens, n, prev, rows):
    y = torch.index_add(lens, 0, rows, n[:2])
    lens.copy_(n)
    return y


def a4_view_as_another_dtype(lens, n, prev, rows):
    y = lens.view(torch.int32) * 2
    y.sub_(-4)
    lens[1:3] = 2
    return y.view(torch.int64)


def a4_clone_of_what_a_scatter_wrote(lens, n, prev, rows):
    lens[rows] = n[:2]
    return lens.clone()


def own_operand_after_a_scatter(lens, n, prev, rows):
    lens[rows] = n[:2]
    lens.add_(lens.flip(0))
    return lens * 2


def own_operand_of_foreach(lens, n, prev, rows):
    foreach_add: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
    foreach_add([lens], [lens.flip(0)])
    return lens * 2


def own_operand_is_a_view_of_what_reads_it(lens, n, prev, rows):
    doubled = lens * 2
    lens[1:] = doubled[:-1]


def own_part_copied_to_another(lens, n, prev, rows):
    lens[1:] = lens[:-1].clone()


def own_copy_after_a_scatter(lens, n, prev, rows):
    old = lens.clone()
    changed = lens.index_put((rows,), n[:2])
    lens.copy_(old)
    return changed.sum()


def a1_sum_stored_by_out(lens, n, prev, rows):
    torch.add(lens, prev, out=prev)
    OPS.advance_(n, prev.flip(0))
    OPS.advance_(lens, lens.flip(0) - 1)
    return prev * 2


def a1_sum_stored_by_an_out_overload(lens, n, prev, rows):
    torch.ops.aten.add.out(lens, prev, out=prev)
    OPS.advance_(lens, n)


def a1_sum_stored_by_a_packet_with_out(lens, n, prev, rows):
    torch.ops.aten.add(lens, prev, out=prev)
    OPS.advance_(lens, n)


def a1_arguments_of_out_by_name(lens, n, prev, rows):
    torch.add(input=lens, other=prev, out=prev)
    OPS.advance_(lens, n)


def a1_out_into_an_empty_buffer(lens, n, prev, rows):
    buffer = torch.empty_like(lens)
    torch.mul(lens, 2, out=buffer)
    OPS.write_(lens, buffer - 1)
    return buffer * 2


def a2_cat_with_out(lens, n, prev, rows):
    z = lens * 2
    y = torch.empty_like(z)
    torch.cat([z], out=y)
    OPS.reverse_(y, z)
    return y


def a2_ones_times_it_in_place(lens, n, prev, rows):
    z = lens * 2
    y = torch.ones_like(lens)
    y.mul_(z)
    OPS.reverse_(y, z)
    return y


def a3_old_lens_with_out(lens, n, prev, rows):
    old = torch.empty_like(lens)
    torch.cat([lens], out=old)
    lens.add_(n)
    prev.copy_(old)


def a4_scatter_with_out(lens, n, prev, rows):
    y = torch.empty_like(lens)
    torch.index_add(lens, 0, rows, n[:2], out=y)
    lens.copy_(n)
    return y


def a4_ones_times_it_in_place(lens, n, prev, rows):
    y = torch.ones_like(lens)
    y.mul_(lens)
    return y


def own_operand_with_out(lens, n, prev, rows):
    lens[rows] = n[:2]
    torch.add(lens, lens.flip(0), out=lens)
    return lens * 2


def own_first_operand_with_out(lens, n, prev, rows):
    """What is read is the first argument, and is not what is written."""
    lens[rows] = n[:2]
    torch.add(lens.flip(0), lens, out=lens)
    return lens * 2


TRIGGERS: list[Program] = [
    a1_used_in_an_expression_and_after,
    a1_mask_of_a_reset,
    a1_op_that_returns,
    a1_buffer_of_the_step_itself,
    a1_gathered,
    a1_op_gets_a_view_of_it,
    a1_op_gets_the_value_itself,
    a1_scatter_moved_behind_the_op,
    a1_stored_in_another_input,
    a1_added_to_another_input,
    a2_clone_and_source,
    a2_source_is_written,
    a2_to_with_copy,
    a2_cat_of_one,
    a2_persistent_buffer,
    a2_times_one,
    a3_old_lens,
    a3_old_lens_without_ops,
    a3_swap,
    a3_new_lens_first,
    a3_slices,
    a3_copied_before_the_op_but_read_earlier,
    a3_between_two_writes,
    a3_clone_changed_by_an_op_after_its_source,
    a3_scatter_into_a_clone,
    a4_divided_by_one,
    a4_times_ones,
    a4_scatter_of_an_input_written_later,
    a4_view_as_another_dtype,
    a4_clone_of_what_a_scatter_wrote,
    own_operand_after_a_scatter,
    own_operand_of_foreach,
    own_operand_is_a_view_of_what_reads_it,
    own_part_copied_to_another,
    own_copy_after_a_scatter,
    a1_sum_stored_by_out,
    a1_sum_stored_by_an_out_overload,
    a1_sum_stored_by_a_packet_with_out,
    a1_arguments_of_out_by_name,
    a1_out_into_an_empty_buffer,
    a2_cat_with_out,
    a2_ones_times_it_in_place,
    a3_old_lens_with_out,
    a4_scatter_with_out,
    a4_ones_times_it_in_place,
    own_operand_with_out,
    own_first_operand_with_out,
]
_RIGHT_BEFORE_2_14 = {"a2_persistent_buffer", "a2_times_one", "a4_divided_by_one"}
_ALL = {program.__name__ for program in TRIGGERS}
TORCH_IS_WRONG = {
    "2.11": _ALL - _RIGHT_BEFORE_2_14,
    "2.13": _ALL - _RIGHT_BEFORE_2_14,
    "2.14": _ALL,
}


def a1_read_through_an_opaque_op(lens, n, prev, rows):
    new = OPS.same(lens)
    OPS.write_(lens, n)
    return new * 2


def a1_functional_op_and_copy(lens, n, prev, rows):
    new = lens + n
    lens.copy_(OPS.same(new - 1))
    return new * 2


def a1_in_place_function_of_torch(lens, n, prev, rows):
    new = lens + n
    lens.copy_(new - 1)
    prev[rows] = new[:2]
    return new * 2


def a1_view_reads_the_written_value(lens, n, prev, rows):
    view = lens[1:]
    OPS.advance_(lens, n)
    return view * 2


def a1_finished_before_the_op(lens, n, prev, rows):
    new = lens + n
    OPS.write_(prev, new)
    OPS.write_(lens, new * 2 - 1)


def a1_wide_matrix_product(lens, n, prev, rows):
    wide = lens.view(4, 1).float().expand(4, 16)
    product = wide @ torch.full((16, 4), 0.5)
    OPS.advance_(lens, n)
    return product * 2


def a2_empty(lens, n, prev, rows):
    z = lens * 2
    y = torch.empty_like(z)
    OPS.reverse_(y, z)
    return y


def a2_zeros(lens, n, prev, rows):
    z = lens * 2
    y = torch.zeros_like(z)
    OPS.reverse_(y, z)
    return y


def a2_changed_in_between(lens, n, prev, rows):
    z = lens * 2
    y = z.clone()
    y.add_(n)
    OPS.reverse_(y, z)
    return y


def a3_two_lines(lens, n, prev, rows):
    prev.copy_(lens)
    OPS.advance_(lens, n)


def a3_two_lines_without_ops(lens, n, prev, rows):
    prev.copy_(lens)
    lens.add_(n)


def a3_one_op_for_both(lens, n, prev, rows):
    OPS.exchange_(lens, prev)


def a3_snapshot_of_the_users(lens, n, prev, rows):
    old = torch.ops.mtpgraph.snapshot(lens)
    OPS.advance_(lens, n)
    prev.copy_(old)


def a4_nothing_to_alias(lens, n, prev, rows):
    z = lens * 2
    return z * 1, lens.clone()


def a_part_is_rotated_in_place(lens, n, prev, rows):
    """As rotary embeddings written in place do."""
    q = lens * 3
    q[:2] = torch.cat([-q[1:2], q[:1]]) * n[:2] + q[:2]
    lens[:2] = lens[:2].flip(0) * 3
    return q


def gather_compute_and_scatter_back(lens, n, prev, rows):
    """A state update written out in torch."""
    h = lens[rows] * 3 + n[:2]
    lens[rows] = h
    return (h * n[:2]).sum()


def out_into_what_nothing_else_writes(lens, n, prev, rows):
    new = torch.empty_like(lens)
    torch.add(lens, n, out=new)
    lens.copy_(new)
    return new * 2


def out_over_the_first_operand(lens, n, prev, rows):
    torch.add(prev, n, out=prev)
    torch.mul(lens, prev, out=lens)
    return prev * 2


def out_replaces_what_was_read(lens, n, prev, rows):
    """What ``new`` was computed from at first is of no matter once it is filled anew."""
    new = lens * 2
    torch.add(prev, n, out=new)
    OPS.advance_(lens, n)
    return new * 2


def out_of_none(lens, n, prev, rows):
    torch.add(lens, n, out=None)
    return torch.mul(prev, n, out=None)


SAFE: list[Program] = [
    a1_read_through_an_opaque_op,
    a1_functional_op_and_copy,
    a1_in_place_function_of_torch,
    a1_view_reads_the_written_value,
    a1_finished_before_the_op,
    a1_wide_matrix_product,
    a2_empty,
    a2_zeros,
    a2_changed_in_between,
    a3_two_lines,
    a3_two_lines_without_ops,
    a3_one_op_for_both,
    a3_snapshot_of_the_users,
    a4_nothing_to_alias,
    a_part_is_rotated_in_place,
    gather_compute_and_scatter_back,
    out_into_what_nothing_else_writes,
    out_over_the_first_operand,
    out_replaces_what_was_read,
    out_of_none,
]


class Inductor:
    """Inductor behind passes; keeps how many snapshots were inserted, and the findings."""

    def __init__(self, *passes: Callable[[fx.Graph], int]) -> None:
        self.manager = PassManager(passes)
        self.snapshots = 0

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.snapshots += sum(self.manager(gm).values())
        return _compat.inductor(gm, inputs, self.manager.uuid())


def leaves(result: Any) -> list[Tensor]:
    return [leaf for leaf in _compat.tree_leaves(result) if isinstance(leaf, Tensor)]


def shared(outputs: list[Tensor], inputs: list[Tensor]) -> list[list[bool]]:
    """Which outputs lie over which inputs and outputs."""
    keys = [_compat.storage_key(x) for x in (*inputs, *outputs)]
    return [[_compat.storage_key(x) == key for key in keys] for x in outputs]


def is_as_eager(fn: Callable[..., Any], backend: Any, make: Callable[[], list[Tensor]]) -> bool:
    """Outputs, inputs afterwards, and what lies over what."""
    torch._dynamo.reset()
    eager_inputs, inputs = make(), make()
    expected = leaves(fn(*eager_inputs))
    compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)
    actual = leaves(compiled(*inputs))
    pairs = [*zip(actual, expected, strict=True), *zip(inputs, eager_inputs, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs) and (
        shared(actual, inputs) == shared(expected, eager_inputs)
    )


def each(programs: list[Program]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("program", programs, ids=lambda program: program.__name__)


@each(TRIGGERS)
def test_trigger_becomes_right(program: Program):
    inductor = Inductor(find_mutation_hazards)
    assert is_as_eager(program, inductor, make_inputs)
    assert inductor.snapshots >= 1
    assert {finding.kind for finding in inductor.manager.findings} == {"mutation hazard"}


@each(TRIGGERS)
def test_torch_alone_is_wrong_where_the_table_says(program: Program):
    wrong = TORCH_IS_WRONG.get(".".join(torch.__version__.split(".")[:2]))
    if wrong is None:
        pytest.skip(f"nothing is known of torch {torch.__version__}")
    # A loop over its own operand goes wrong or not by how many elements it loads at once, which on
    # some processors are all of them: one here.
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        assert is_as_eager(program, Inductor(), make_inputs) == (program.__name__ not in wrong)


@each(SAFE)
def test_safe_form_is_left_alone_and_right(program: Program):
    inductor = Inductor(find_mutation_hazards)
    assert is_as_eager(program, inductor, make_inputs)
    assert inductor.snapshots == 0
    assert inductor.manager.findings == []


def trace(program: Callable[..., Any], *inputs: Any) -> tuple[Any, support.Probe]:
    return support.trace(program, *inputs, passes=(find_mutation_hazards,))


def test_one_snapshot_serves_all_that_was_computed_from_it():
    def step(lens: Tensor, n: Tensor) -> Tensor:
        new = lens + n
        doubled = new * 2
        OPS.advance_(lens, n)
        return new + doubled

    _, probe = trace(step, *make_inputs()[:2])
    assert probe.counts == {"find_mutation_hazards": 1}


def test_a_snapshot_takes_the_place_of_an_operand_and_never_of_what_is_written():
    def step(lens: Tensor, prev: Tensor, n: Tensor) -> None:
        torch.add(lens, prev, out=prev)
        OPS.advance_(lens, n)

    inputs = make_inputs()[:3]
    _, probe = trace(step, *inputs)
    add = next(node for node in probe.graphs[0].graph.nodes if node.target is torch.add)
    first, second = add.args
    assert first.target is torch.ops.mtpgraph.snapshot.default
    assert second.op == add.kwargs["out"].op == "placeholder"
    expected = make_inputs()[:3]
    step(*expected)
    assert all(map(torch.equal, inputs, expected))


def test_two_writes_need_two_snapshots():
    def step(lens: Tensor, prev: Tensor, n: Tensor) -> Tensor:
        a = lens + n
        OPS.advance_(lens, n)
        b = prev * n
        OPS.advance_(prev, n)
        return a + b

    result, probe = trace(step, *make_inputs()[:3])
    assert probe.counts == {"find_mutation_hazards": 2}
    assert torch.equal(result, step(*make_inputs()[:3]))


def test_both_results_of_one_call():
    def step(x: Tensor, n: Tensor) -> Tensor:
        values, indices = x.sort()
        OPS.write_(x, n)
        return values + indices

    inputs = make_inputs()[:2]
    result, probe = trace(step, *inputs)
    assert probe.counts == {"find_mutation_hazards": 2}
    assert torch.equal(result, step(*make_inputs()[:2]))


def test_a_copy_whose_source_stays_in_use_is_not_relied_upon():
    """Here torch happens to keep the copy."""

    def step(x: Tensor) -> Tensor:
        z = x * 2
        y = z.clone()
        OPS.reverse_(y, z)
        return y + z

    assert trace(step, make_inputs()[0])[1].counts == {"find_mutation_hazards": 1}


def test_a_pool_is_never_copied():
    """The snapshot is of the rows that were read."""

    def step(pool: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        chosen = pool[rows] * 2
        OPS.advance_(pool, x)
        return chosen + 1

    pool = torch.arange(64.0).view(16, 4)
    _, probe = trace(step, pool, torch.tensor([3, 1]), torch.ones(4))
    graph = probe.graphs[0].graph
    (copy,) = (n for n in graph.nodes if n.target is torch.ops.mtpgraph.snapshot.default)
    assert copy.args[0].meta["example_value"].shape == (2, 4)
    assert copy.meta["example_value"].shape == (2, 4)


def test_views_of_a_value_are_views_of_its_snapshot():
    def step(lens: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        new = lens + n
        view = new.view(2, 2)
        OPS.advance_(lens, n)
        OPS.write_(new[1:], n[1:])
        return view * 2, view.view(4) + 1

    result, probe = trace(step, *make_inputs()[:2])
    assert probe.counts == {"find_mutation_hazards": 1}
    for actual, expected in zip(result, step(*make_inputs()[:2]), strict=True):
        assert torch.equal(actual, expected)


def test_other_layers_of_a_pool_are_not_confused_with_fresh_memory():
    """Storages tell memory apart, so a view of a pool counts as the pool."""

    def step(pool: Tensor, x: Tensor) -> Tensor:
        new = pool[0] + x
        OPS.advance_(pool[0], x)
        return new

    pool, x = torch.arange(8.0).view(2, 4), torch.ones(4)
    _, probe = trace(step, pool, x)
    assert probe.counts == {"find_mutation_hazards": 1}


def test_finding_names_the_line_the_writer_and_what_to_write():
    def step(lens: Tensor, n: Tensor) -> Tensor:
        new = lens + n
        OPS.write_(lens, new - 1)
        return new * 2

    _, probe = trace(step, *make_inputs()[:2])
    (finding,) = probe.manager.findings
    assert isinstance(finding, Finding)
    assert (finding.kind, finding.found_by) == ("mutation hazard", "find_mutation_hazards")
    assert finding.file == __file__
    assert finding.code == "new = lens + n"
    assert finding.line == step.__code__.co_firstlineno + 1
    assert f"mtpgraph_hazards.write_ in line {finding.line + 1} writes" in finding.reason
    assert "finish what needs the value before the op" in finding.remedy


@each(TRIGGERS)
def test_the_engine_that_runs_calls_in_order_needs_no_snapshot(program: Program):
    """Without them the graph is the one that the tracer made, which eager code runs as written."""
    found: list[str] = []

    def run(gm: fx.GraphModule, _: Any) -> Any:
        before = str(gm.graph)
        recorded = [node.meta.get("example_value") for node in gm.graph.nodes]
        assert find_mutation_hazards(gm.graph)
        assert str(gm.graph) != before
        assert remove_snapshots(gm.graph)
        gm.recompile()
        found.extend((before, str(gm.graph)))
        # whoever asks for aliases next reads them off the same values
        left = [node.meta.get("example_value") for node in gm.graph.nodes]
        assert all(a is b for a, b in zip(left, recorded, strict=True))
        return gm.forward

    assert is_as_eager(program, run, make_inputs)
    assert found[0] == found[1]
    engine: Any = functools.partial(backend.backend, options={"engine": "eager"})
    assert is_as_eager(program, engine, make_inputs)


def test_the_engine_that_runs_calls_in_order_makes_no_copy(monkeypatch: pytest.MonkeyPatch):
    def step(lens: Tensor, previous: Tensor) -> Tensor:
        kept = torch.ops.mtpgraph.snapshot(lens)
        old = lens.clone()
        lens.add_(1)
        previous.copy_(old)
        return kept

    graphs: list[str] = []
    monkeypatch.setitem(
        backend._ENGINES,
        "eager",
        lambda gm, *rest: (backend._run_eager(gm, *rest), graphs.append(str(gm.graph)))[0],
    )
    compiled = torch.compile(step, backend="mtpgraph", options={"engine": "eager"})
    lens, previous = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    assert compiled(lens, previous).tolist() == previous.tolist() == [0, 1, 2]
    assert stats(compiled).rewrites == {"find_mutation_hazards": 1}
    # the user's own stays
    assert graphs[0].count("mtpgraph.snapshot") == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_hybrid_step_needs_none(dynamic: bool):
    batch = support.Stream(3).batch([2, 1, 2])
    _, probe = support.trace(
        support.hybrid_step,
        *batch,
        support.make_pools(3),
        passes=(find_mutation_hazards,),
        dynamic=dynamic,
    )
    assert probe.counts == {"find_mutation_hazards": 0}
    assert probe.manager.findings == []


def test_the_benchmarked_step_needs_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_step, "DEVICE", "cpu")
    sizes = bench_step.Sizes(
        layers=4, hidden=64, index_heads=2, index_dim=16, heads=2, latent=16, rope=8, topk=8, mlp=32
    )
    model = bench_step.Model(sizes).to(torch.bfloat16)
    caches = bench_step.make_caches(sizes, 2, 8)
    with torch.no_grad():
        _, probe = trace(model, *bench_step.make_batch(sizes, 2, 2, 70, 4), caches)
    assert probe.counts == {"find_mutation_hazards": 0}


def test_the_example_decoder_needs_none_and_never_syncs():
    model = load()
    caches = make_caches(model.config, 8, 16, 4)
    tokens, following = torch.tensor([1, 2, 3]), torch.tensor([2, 3, -1])

    def int32(*values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    slots, accepted = int32([0, 1, 2, 3]), int32(1)
    batch = (int32(0, 3), int32(3), int32(list(range(8))), torch.arange(3), slots, accepted)
    with torch.no_grad():
        _, probe = support.trace(
            model.step,
            tokens,
            following,
            *batch,
            caches,
            passes=(find_mutation_hazards, find_host_syncs),
        )
    assert probe.counts == {"find_mutation_hazards": 0, "find_host_syncs": 0}
    assert probe.manager.findings == []


class Programs:
    """Random straight-line programs over three buffers ``a b c`` and two indices ``i``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.buffers = ["a", "b", "c"]
        self.temporaries: list[str] = []

    def source(self) -> str:
        order = self.random.sample(self.buffers, 3)
        lines = [self.line() for _ in range(self.random.randint(3, 8))]
        known = self.buffers + self.temporaries
        chosen = [x for x in self.random.sample(known, 3) if x not in self.buffers]
        returned = [x + self.random.choice(["", "", " * 2", " + 1"]) for x in chosen] or ["a + b"]
        lines.append(f"return ({', '.join(returned)},)")
        return "\n    ".join([f"def program({', '.join(order)}, i):", *lines]) + "\n"

    def value(self) -> str:
        return self.random.choice(self.buffers + self.temporaries)

    def expression(self) -> str:
        x, y, z = self.value(), self.value(), self.value()
        forms = {
            f"{x}.clone()": 5,
            f"{x} + {y}": 3,
            f"{x} * 2": 3,
            f"{x} + 0": 1,
            f"{x} * 1": 1,
            f"torch.where({x} > 3, {y}, {z})": 1,
            f"{x}.flip(0)": 1,
            f"same({x})": 1,
            f"{x}.index_put((i,), {y}[:2])": 1,
            f"torch.cat([{x}])": 1,
            f"{x}.cumsum(0)": 1,
            f"{x}.view(4)": 1,
            f"{x}.to(torch.int64, copy=True)": 1,
            f"{x}.sum() + {y}": 1,
        }
        return self.random.choices(list(forms), list(forms.values()))[0]

    def line(self) -> str:
        target = self.random.choice(self.buffers * 2 + self.temporaries)
        x, expression = self.value(), self.expression()
        operand = self.random.choice([x, f"{x} - 1", f"({expression})"])
        other = operand if operand != target else f"{target} - 1"
        op = self.random.choice(["write_", "advance_", "reverse_"])
        forms = {
            self.name(expression): 8,
            f"{target}.copy_({operand})": 4,
            f"{op}({target}, {other})": 4,
            f"{op}({target}[1:], ({other})[1:])": 1,
            f"{target}.add_({x})": 1,
            f"{target}.mul_(3)": 1,
            f"{target}[1:] = {x}[:-1].clone()": 1,
            f"{target}[:2] = {x}[2:] * 2": 1,
            f"{target}[:] = {x}": 1,
            f"{target}[i] = {x}[:2] + 1": 1,
            self.name(f"update_({target}, {x} + 1)"): 2,
        }
        line = self.random.choices(list(forms), list(forms.values()))[0]
        if line.startswith(self.name("")):
            self.temporaries.append(f"t{len(self.temporaries)}")
        return line

    def name(self, expression: str) -> str:
        return f"t{len(self.temporaries)} = {expression}"


def random_inputs() -> list[Tensor]:
    values = [[3, 1, 4, 2], [7, 5, 9, 8], [10, 30, 20, 60], [2, 0]]
    return [torch.tensor(value) for value in values]


def test_random_programs_equal_eager(full: bool, tmp_path: Path):
    """``--full`` runs 300 of them in place of 8."""
    names = {name: getattr(OPS, name) for name in ("write_", "advance_", "reverse_", "update_")}
    snapshots = 0
    for seed in range(300 if full else 8):
        source = Programs(seed).source()
        scope = {"torch": torch, "same": OPS.same, **names}
        exec(compile(source, str(tmp_path / f"program_{seed}.py"), "exec"), scope)
        program: Any = scope["program"]
        inductor = Inductor(find_mutation_hazards)
        assert is_as_eager(program, inductor, random_inputs), f"seed {seed}:\n{source}"
        snapshots += inductor.snapshots
    assert snapshots > 0
