from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from mtpgraph import ops
from mtpgraph.compile_passes._memory import disjoint, same_elements, same_rows
from mtpgraph.compile_passes._values import copied_from, is_view, same_value
from mtpgraph.compile_passes._writes import erase_unused, mutated, named_in_place


def graph_of(fn: Callable[..., object], *args: Tensor, dynamic: bool = False) -> fx.Graph:
    graphs = []

    def keep(gm: fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(gm.graph)
        return gm.forward

    torch.compile(fn, backend=keep, fullgraph=True, dynamic=dynamic)(*args)
    return graphs[0]


def returned(graph: fx.Graph) -> tuple[fx.Node, ...]:
    (nodes,) = graph.output_node().args
    assert isinstance(nodes, tuple)
    return nodes  # type: ignore[return-value]


# two views of one storage, and whether an element belongs to both
VIEWS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], bool]] = {
    "layers": (lambda t: (t[0], t[1]), True),
    "one layer": (lambda t: (t[1], t[1]), False),
    "layer and whole": (lambda t: (t[1], t), False),
    "columns": (lambda t: (t[:, 0], t[:, 1]), True),
    "column and row": (lambda t: (t[:, 0], t[0]), False),
    "column and other row's rest": (lambda t: (t[:, 0], t[1, 1:]), True),
    "halves of the last dim": (lambda t: (t[..., :2], t[..., 2:]), True),
    "overlapping parts": (lambda t: (t[..., :3], t[..., 2:]), False),
    "even and odd": (lambda t: (t[..., ::2], t[..., 1::2]), True),
    "even and every third": (lambda t: (t[..., ::2], t[..., ::3]), False),
    "even and odd layers": (lambda t: (t[::2], t[1::2]), True),
    "corner of a page, wrapped": (
        lambda t: (t.as_strided((2, 4), (20, 1), 18), t.as_strided((3, 18), (20, 1), 0)),
        False,
    ),
    "end of a page and its middle": (
        lambda t: (t.as_strided((3, 2), (20, 1), 18), t.as_strided((3, 18), (20, 1), 0)),
        True,
    ),
    "other bytes of one place": (lambda t: (t.view(torch.int32)[0], t[0]), False),
    "empty": (lambda t: (t[:0], t), True),
    "expanded": (lambda t: (t[0, 0, :1].expand(7, 4), t[0, 0, 1:]), True),
    "another storage": (lambda t: (t, t.clone()), True),
}


@pytest.mark.parametrize(("views", "expected"), VIEWS.values(), ids=VIEWS.keys())
def test_disjoint(views: Callable[[Tensor], tuple[Tensor, Tensor]], expected: bool):
    """Against the elements themselves; ``disjoint`` may not say more than is true."""
    a, b = views(torch.arange(60, dtype=torch.float32).view(3, 5, 4))
    assert disjoint(a, b) is disjoint(b, a) is expected
    if a.dtype == b.dtype and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
        common = set(a.flatten().tolist()) & set(b.flatten().tolist())
        assert bool(common) is not expected


def test_disjoint_is_never_wrong_about_drawn_views():
    generator = torch.Generator().manual_seed(0)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    memory, proven, apart = torch.arange(400), 0, 0
    for _ in range(3000):
        views = []
        for _ in range(2):
            size = [1 + draw(4) for _ in range(3)]
            stride = [[0, 1, 2, 3, 8, 16, 24, 48][draw(8)] for _ in range(3)]
            views.append(memory.as_strided(size, stride, draw(64)))
        a, b = views
        common = set(a.flatten().tolist()) & set(b.flatten().tolist())
        proven += disjoint(a, b)
        apart += not common
        assert not (disjoint(a, b) and common), (a.stride(), a.shape, b.stride(), b.shape)
    assert proven > apart / 4


def test_same_rows_and_elements():
    pool = torch.zeros(3, 5, 2, 4)
    assert same_elements(pool[1], pool.select(0, 1))
    assert not same_elements(pool[1], pool[1].flatten(1))
    assert same_rows(pool[1], pool[1].flatten(1))
    assert same_rows(pool[1], pool[1].transpose(1, 2))
    assert same_rows(pool[:, 1], pool.unbind(1)[1].flatten(1))
    assert not same_rows(pool[1], pool[1][:4])
    assert not same_rows(pool[1], pool[1][:, :1])
    assert not same_rows(pool[1], pool[1].transpose(0, 1))
    assert not same_rows(pool[1], pool[2])
    assert not same_rows(pool[1], pool[1].view(torch.int32))
    assert not same_rows(pool.transpose(0, 1), pool[0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_same_value(dynamic: bool):
    def fn(x: Tensor, y: Tensor):
        return (
            *(x[:, 0], x.select(1, 0), x.unbind(1)[0], x.t()[0]),  # one
            *(x[:, 1], y[:, 0], x[:, 0] + 0, torch.rand_like(x)[:, 0], torch.rand_like(x)[:, 0]),
        )

    graph = graph_of(fn, torch.zeros(5, 3), torch.zeros(6, 4), dynamic=dynamic)
    nodes = returned(graph)
    one, others = nodes[:4], nodes[4:]
    assert all(same_value(a, b) for a in one for b in one)
    assert not any(same_value(a, b) for a in nodes for b in others if a is not b)


def test_copied_from():
    def fn(x: Tensor):
        return (
            *(x.contiguous().clone(), x.long().int(), x.to(torch.int32), x.detach()),
            *(x.short().int(), x.float().int(), x[1:].clone(), x + 0),
        )

    graph = graph_of(fn, torch.arange(4, dtype=torch.int32))
    (x,) = (node for node in graph.nodes if node.op == "placeholder")
    found = [copied_from(node) is x for node in returned(graph)]
    assert found == [True] * 4 + [False] * 4


def looks(x: Tensor) -> list[Tensor]:
    return [x[0], x.T, x.unbind()[0], x.view(-1), x.flatten(), x[:1].squeeze(0), x.mT, x.detach()]


def reads(x: Tensor) -> list[Tensor]:
    return [x.t().reshape(-1), x.clone(), x[torch.tensor([0, 1])], x.mul_(2), x.sum(), x.t().int()]


@pytest.mark.parametrize(("fn", "expected"), [(looks, True), (reads, False)])
def test_is_view_reads_nothing(fn: Callable[[Tensor], list[Tensor]], expected: bool):
    graph = graph_of(lambda x: [result + 1 for result in fn(x)], torch.ones(2, 3))
    users = [node for node in graph.nodes if node.name.startswith("add")]
    assert len(users) == len(fn(torch.ones(2, 3)))
    assert [is_view(node.args[0]) for node in users] == [expected] * len(users)


def test_mutated_sees_what_a_packet_of_several_overloads_writes():
    def fn(x: Tensor, y: Tensor):
        transposed = x.T
        torch.ops.aten.add(x, 1, out=y)
        torch.ops.aten.mul_(x, 2)
        return transposed

    graph = graph_of(fn, torch.ones(2, 2), torch.ones(2, 2))
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert [len(mutated(node)) for node in calls] == [0, 2, 1]


def test_erase_unused_keeps_what_has_effects():
    def fn(state: Tensor, indices: Tensor, old: Tensor, x: Tensor):
        y = ops.causal_conv1d_update_(state, x, torch.ones(4, 3), None, indices)
        return y.clone().detach()

    state, old = torch.zeros(3, 4, 2), torch.ones(2, dtype=torch.bool)
    indices = torch.tensor([0, 1], dtype=torch.int32)
    graph = graph_of(fn, state, indices, old, torch.ones(2, 4))
    (result,) = returned(graph)
    graph.output_node().args = ((),)
    erase_unused(result)
    targets = [str(node.target) for node in graph.nodes if node.op != "placeholder"]
    assert not [target for target in targets if target in ("clone", "detach")]
    assert [target for target in targets if "causal_conv1d_update_" in target]


@pytest.mark.parametrize(
    ("name", "writes"),
    [
        ("add_", True),
        ("__iadd__", True),
        ("__setitem__", True),
        ("add", False),
        ("__eq__", False),
        ("__add__", False),
        ("__getitem__", False),
    ],
)
def test_a_name_says_what_writes(name: str, writes: bool) -> None:
    """Some versions of the tracer call ``x == 0`` by the method's name."""
    assert named_in_place(name) == writes
