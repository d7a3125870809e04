"""Calls that would wait for a GPU are found on any device, and nothing else is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mtpgraph import bench_step
from mtpgraph.compile_passes.find_host_syncs import find_host_syncs
from mtpgraph.compile_passes.report import Finding, collect
from tests.compile_passes import support

# each gets x [4, 3] floats, mask [4], i [4] positions, n, a number without dimensions
Program = Callable[[Any, Any, Any, Any], Any]

NUMBER = "a number is read"
SHAPE = "the shape of the result depends on values"
WRITE = "writing at a mask"
CHECK = "checks its input"
HOST = "copied to the host"


def make_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = torch.tensor([True, False, True, True])
    return torch.rand(4, 3), mask, torch.tensor([1, 0, 2, 3]), torch.tensor(2)


@pytest.fixture(autouse=True)
def capture_everything() -> Any:
    """By default the graph breaks at most of these; then nothing of them reaches a pass."""
    config: Any = torch._dynamo.config
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def findings_of(program: Callable[..., Any], *inputs: Any) -> list[Finding]:
    _, probe = support.trace(program, *inputs, passes=(find_host_syncs,))
    assert probe.counts == {"find_host_syncs": 0}
    return probe.manager.findings


def _branch(x, mask, i, n):
    return torch.cond(n > 1, lambda x: x + 1, lambda x: x - 1, (x,))


def _write_rows(x, mask, i, n):
    y = x * 1
    y[mask] = torch.ones(3)
    return y


def _write_cells(x, mask, i, n):
    y = x * 1
    y[mask, 0] = 1.0
    return y


def _write_at_number(x, mask, i, n):
    y = x * 1
    y[n] = 0.0
    return y


def _to_cpu_over_several_lines(x, mask, i, n):
    return x.to(
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


# name: program, what the reason begins with or holds, what the remedy holds
SYNCS: dict[str, tuple[Program, str, str]] = {
    "item": (lambda x, m, i, n: x * i[0].item(), NUMBER, "torch.where"),
    "int": (lambda x, m, i, n: x * int(i.max()), NUMBER, "pass the number"),
    "tolist": (lambda x, m, i, n: x * n.tolist(), NUMBER, "keep it a tensor"),
    "item of a reduction": (lambda x, m, i, n: x.mean().item(), NUMBER, "keep it a tensor"),
    "slice to a tensor": (lambda x, m, i, n: x[:n], NUMBER, "keep it a tensor"),
    "index by a number": (lambda x, m, i, n: x[n], NUMBER, "x[i[None]]"),
    "write at a number": (_write_at_number, NUMBER, "x[i[None]]"),
    "narrow from a tensor": (lambda x, m, i, n: x.narrow(0, n, 1), NUMBER, "keep it a tensor"),
    "arange to a tensor": (lambda x, m, i, n: torch.arange(n), NUMBER, "pass the number"),
    "topk by a tensor": (lambda x, m, i, n: x.topk(n)[0], NUMBER, "pass the number"),
    "zeros of a tensor": (lambda x, m, i, n: torch.zeros(n, 3), NUMBER, "pass the number"),
    "view by a tensor": (lambda x, m, i, n: x.view(n, -1), NUMBER, "pass the number"),
    "reshape by a tensor": (lambda x, m, i, n: x.reshape(n, -1), NUMBER, "pass the number"),
    "expand by a tensor": (lambda x, m, i, n: x[0].expand(n, 3), NUMBER, "pass the number"),
    "repeat by a tensor": (lambda x, m, i, n: x.repeat(n, 1), NUMBER, "pass the number"),
    "split by a tensor": (lambda x, m, i, n: x.split(n)[0], NUMBER, "pass the number"),
    "triu by a tensor": (lambda x, m, i, n: x.triu(n), NUMBER, "pass the number"),
    "roll by a tensor": (lambda x, m, i, n: x.roll(n, 0), NUMBER, "pass the number"),
    "randint to a tensor": (lambda x, m, i, n: torch.randint(n, (3,)), NUMBER, "pass the number"),
    "eye of a tensor": (lambda x, m, i, n: torch.eye(n), NUMBER, "pass the number"),
    "new_full of a tensor": (lambda x, m, i, n: x.new_full((3,), n), NUMBER, "pass the number"),
    "full_like of a tensor": (lambda x, m, i, n: torch.full_like(x, n), NUMBER, "the number"),
    "slope by a tensor": (lambda x, m, i, n: F.leaky_relu(x, n), NUMBER, "pass the number"),
    "addcmul by a tensor": (lambda x, m, i, n: x.addcmul(x, x, value=n), NUMBER, "the number"),
    "alpha": (lambda x, m, i, n: x.add(x, alpha=i[0]), NUMBER, "multiply by the tensor"),
    "linspace": (lambda x, m, i, n: torch.linspace(n, 9, 5), NUMBER, "torch.arange(steps)"),
    "tensor of tensors": (lambda x, m, i, n: torch.tensor([n, n]), NUMBER, "torch.stack"),
    "cond": (_branch, NUMBER, "compute both"),
    "nonzero": (lambda x, m, i, n: m.nonzero(), SHAPE, "nonzero_static"),
    "nonzero as tuple": (lambda x, m, i, n: m.nonzero(as_tuple=True)[0], SHAPE, "torch.where"),
    "argwhere": (lambda x, m, i, n: torch.argwhere(m), SHAPE, "torch.where"),
    "where of one": (lambda x, m, i, n: torch.where(m)[0], SHAPE, "torch.where(mask, a, b)"),
    "masked_select": (lambda x, m, i, n: x.masked_select(m[:, None]), SHAPE, "keep all rows"),
    "mask index": (lambda x, m, i, n: x[m], SHAPE, "torch.where(mask, a, b)"),
    "mask and number": (lambda x, m, i, n: x[m, 0], SHAPE, "torch.where(mask, a, b)"),
    "mask in aten": (lambda x, m, i, n: torch.ops.aten.index.Tensor(x, [m]), SHAPE, "all rows"),
    "unique": (lambda x, m, i, n: torch.unique(i), SHAPE, "sort"),
    "unique method": (lambda x, m, i, n: i.unique(), SHAPE, "sort"),
    "unique_consecutive": (lambda x, m, i, n: torch.unique_consecutive(i), SHAPE, "sort"),
    "repeat by lengths": (lambda x, m, i, n: x.repeat_interleave(i, 0), SHAPE, "output_size="),
    "repeat lengths": (lambda x, m, i, n: torch.repeat_interleave(i), SHAPE, "output_size="),
    "bincount": (lambda x, m, i, n: torch.bincount(i), SHAPE, "scatter_add_"),
    "bincount at least": (lambda x, m, i, n: torch.bincount(i, minlength=9), SHAPE, "fixed size"),
    "tensor_split": (lambda x, m, i, n: torch.tensor_split(x, i)[0] * 1, SHAPE, "Python numbers"),
    "write at a mask": (_write_rows, WRITE, "x.copy_(torch.where(mask, values, x))"),
    "write at a mask and a number": (_write_cells, WRITE, "x.copy_"),
    "index_put at a mask": (
        lambda x, m, i, n: x.index_put((m,), torch.ones(3, 3)),
        WRITE,
        "torch.where(mask, values, x)",
    ),
    "multinomial": (lambda x, m, i, n: torch.multinomial(x, 1), CHECK, "exponential_"),
    "inverse": (lambda x, m, i, n: torch.linalg.inv(x.T @ x), CHECK, "_ex"),
    "singular values": (lambda x, m, i, n: torch.linalg.svdvals(x), CHECK, "outside of the step"),
    "normal": (lambda x, m, i, n: torch.normal(0.0, x), CHECK, "randn_like"),
    "condition number": (lambda x, m, i, n: torch.linalg.cond(x.T @ x), CHECK, "outside"),
    "spectral norm": (lambda x, m, i, n: torch.linalg.matrix_norm(x, 2), CHECK, "outside"),
    "spectral norm by norm": (lambda x, m, i, n: torch.linalg.norm(x, -2), CHECK, "outside"),
    "nuclear norm": (lambda x, m, i, n: torch.linalg.norm(x, "nuc"), CHECK, "outside"),
    "negative power": (lambda x, m, i, n: (x.T @ x).matrix_power(-1), CHECK, "inv_ex"),
    "tensorinv": (lambda x, m, i, n: torch.linalg.tensorinv(x.T @ x, 1), CHECK, "outside"),
    "histc": (lambda x, m, i, n: torch.histc(x), CHECK, "min= and max="),
    "cpu": (lambda x, m, i, n: x.cpu() * 2, HOST, "after the step"),
    "to cpu": (lambda x, m, i, n: x.to("cpu") * 2, HOST, "after the step"),
    "to device cpu": (lambda x, m, i, n: x.to(device="cpu") * 2, HOST, "after the step"),
    "to a device object": (lambda x, m, i, n: x.to(torch.device("cpu")) * 2, HOST, "after the"),
    "to cpu and a dtype": (_to_cpu_over_several_lines, HOST, "after the step"),
}


@pytest.mark.parametrize("name", SYNCS)
def test_sync_is_found(name: str):
    program, reason, remedy = SYNCS[name]
    if name == "alpha" and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 cannot trace a number that it reads and does not return")
    (finding,) = findings_of(program, *make_inputs())
    assert (finding.kind, finding.found_by) == ("host sync", "find_host_syncs")
    assert reason in finding.reason
    assert remedy in finding.remedy
    first = program.__code__.co_firstlineno
    assert finding.file == __file__
    assert first <= finding.line <= first + 3


def test_finding_names_the_line():
    def step(x: Tensor, mask: Tensor) -> Tensor:
        y = x * 2
        z = y[mask]
        return z + 1

    (finding,) = findings_of(step, *make_inputs()[:2])
    assert finding.line == step.__code__.co_firstlineno + 2
    assert finding.code == "z = y[mask]"


def _fill(x, mask, i, n):
    y = x * 1
    y[mask] = 0
    y[mask, :] = 1.0
    return y.masked_fill_(mask[:, None], 2.0)


def _write_at_positions(x, mask, i, n):
    y = x * 1
    y[i] = x + 1
    y[1:, 0] = 0.0
    return y


NOT_SYNCS: dict[str, Program] = {
    "sizes": lambda x, m, i, n: x * x.shape[0] * x.numel() * len(x) + x.dim(),
    "where of three": lambda x, m, i, n: torch.where(m[:, None], x, 0.0),
    "fill at a mask": _fill,
    "fill by index_put": lambda x, m, i, n: x.index_put((m,), x.new_ones(())),
    "write at positions": _write_at_positions,
    "index by positions": lambda x, m, i, n: x[i] + x[i[:1]] + x[-1] + x[1:2, None].sum(),
    "any kept a tensor": lambda x, m, i, n: x * m.any() * (x == x).all(),
    "mask as a number": lambda x, m, i, n: x * m[:, None] + m.int().sum(),
    "nonzero_static": lambda x, m, i, n: torch.nonzero_static(m, size=3),
    "repeat by a number": lambda x, m, i, n: x.repeat_interleave(2, 0),
    "repeat with a size": lambda x, m, i, n: x.repeat_interleave(i, 0, output_size=6),
    "one_hot with classes": lambda x, m, i, n: F.one_hot(i, 9),
    "to a dtype": lambda x, m, i, n: x.to(torch.float64) + x.to(i) + x.double(),
    "to a device of another tensor": lambda x, m, i, n: x.to(device=i.device, dtype=torch.half),
    "to the same device": lambda x, m, i, n: x.to(i.device) * 2,
    "constants": lambda x, m, i, n: x + torch.tensor([1.0, 2.0, 3.0]) + torch.tensor(2.0),
    "add a number tensor": lambda x, m, i, n: x.add(n, alpha=2) * n + x.clamp(max=n),
    "a number tensor as an operand": lambda x, m, i, n: (
        torch.where(m[:, None], x, n).masked_fill(m[:, None], n).fill_(n).lerp(x, n.float()) == n
    ),
    "filled by a number tensor": lambda x, m, i, n: torch.full((3,), n) + x.new_empty(3).fill_(n),
    "tensor of numbers": lambda x, m, i, n: torch.tensor([x.shape[0], 2]) + len(x),
    "norms": lambda x, m, i, n: (
        torch.linalg.norm(x) + torch.linalg.vector_norm(x, 2) + torch.linalg.norm(x, 2, dim=0).sum()
    ),
    "power": lambda x, m, i, n: torch.linalg.matrix_power(x.T @ x, 2),
    "normal of numbers": lambda x, m, i, n: torch.normal(0.0, 1.0, (3,)) + torch.normal(x, 1.0)[0],
    "split by numbers": lambda x, m, i, n: torch.tensor_split(x, (1, 2))[0] + x.split([1, 3])[0],
    "topk and sort": lambda x, m, i, n: x.topk(2)[0].sum() + x.sort()[0] + x.cumsum(0),
    "histc with bounds": lambda x, m, i, n: torch.histc(x, 4, 0.0, 1.0),
    "inverse without check": lambda x, m, i, n: torch.linalg.inv_ex(x.T @ x)[0],
    "scatter and gather": lambda x, m, i, n: x.scatter_add(0, i[:, None], x).gather(0, i[:, None]),
    "masked_scatter": lambda x, m, i, n: x.masked_scatter(m[:, None], x),
    "full": lambda x, m, i, n: torch.full((3,), 2) + torch.arange(3),
}


@pytest.mark.parametrize("name", NOT_SYNCS)
def test_near_miss_is_left_alone(name: str):
    assert findings_of(NOT_SYNCS[name], *make_inputs()) == []


def test_what_only_a_name_tells():
    """Dynamo refuses these, some versions of it; graphs made otherwise may hold them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.arange(3)
    for function in (F.one_hot, torch.equal, torch.is_nonzero):
        graph.call_function(function, (x,) * (1 + (function is torch.equal)))
    graph.call_method("add", (x, x), {"alpha": x})
    graph.call_method("add", (x, x), {"alpha": 2})
    graph.output(x)
    with collect() as findings:
        find_host_syncs(graph)
    assert [finding.op for finding in findings] == [
        "torch._C._nn.one_hot",
        "torch.equal",
        "torch.is_nonzero",
        ".add()",
    ]
    assert findings[-1].remedy == "multiply by the tensor instead of passing it as alpha"


def test_an_op_that_makes_its_own_size():
    """What is not on the list is known by a size that the trace could not know."""
    library = torch.library.Library("mtpgraph_host_syncs", "FRAGMENT")
    library.define("positive(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("positive", lambda x: x[x > 0], "CompositeExplicitAutograd")

    def fake(x: Tensor) -> Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    torch.library.register_fake("mtpgraph_host_syncs::positive", fake, lib=library)

    def step(x: Tensor) -> Tensor:
        y = torch.ops.mtpgraph_host_syncs.positive(x)
        return y * 2

    (finding,) = findings_of(step, make_inputs()[0])
    assert finding.op == "mtpgraph_host_syncs.positive"
    assert finding.remedy == "give the result a fixed size, with padding or a mask"


class TestDevices:
    """Graphs of a card, by hand: their fake tensors need no card."""

    def findings(self, target: Any, *names: str, result: str) -> list[str]:
        """Reasons noted of one call: of ``x`` on a card, ``table`` and a ``number`` on the CPU."""
        graph = fx.Graph()
        with FakeTensorMode():
            x, table, number = torch.empty(4, device="cuda"), torch.empty(4), torch.empty(())
            made = torch.empty(4, device=result)
        nodes = {}
        for name, value in {"x": x, "table": table, "number": number}.items():
            nodes[name] = graph.placeholder(name)
            nodes[name].meta["example_value"] = value
        args = tuple(nodes.get(name, name) for name in names)
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = graph.create_node(kind, target, args)
        node.meta["example_value"] = made
        graph.output(node)
        with collect() as findings:
            find_host_syncs(graph)
        return [finding.reason for finding in findings]

    def test_copy_to_the_host(self):
        (reason,) = self.findings("to", "x", "cpu", result="cpu")
        assert HOST in reason

    def test_copy_to_where_another_tensor_is(self):
        (reason,) = self.findings("to", "x", "table", result="cpu")
        assert HOST in reason

    @pytest.mark.parametrize("call", [("to", "table", "cuda"), ("cuda", "table")])
    def test_copy_to_the_device(self, call: tuple[str, ...]):
        (reason,) = self.findings(*call, result="cuda")
        assert "copied to the device within the step" in reason

    def test_copy_into_a_tensor_of_the_device(self):
        (reason,) = self.findings("copy_", "x", "table", result="cuda")
        assert "copied to the device within the step" in reason

    def test_a_number_of_the_host_is_an_argument_of_the_kernel(self):
        assert self.findings(torch.mul, "x", "number", result="cuda") == []

    def test_work_on_the_device_alone(self):
        assert self.findings(torch.mul, "x", "x", result="cuda") == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_hybrid_step_has_none(dynamic: bool):
    batch = support.Stream(3).batch([2, 1, 2])
    _, probe = support.trace(
        support.hybrid_step,
        *batch,
        support.make_pools(3),
        passes=(find_host_syncs,),
        dynamic=dynamic,
    )
    assert probe.manager.findings == []


def test_the_benchmarked_step_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_step, "DEVICE", "cpu")
    sizes = bench_step.Sizes(
        layers=2, hidden=64, index_heads=2, index_dim=16, heads=2, latent=16, rope=8, topk=8, mlp=32
    )
    model = bench_step.Model(sizes).to(torch.bfloat16)
    caches = bench_step.make_caches(sizes, 2, 8)
    with torch.no_grad():
        assert findings_of(model, *bench_step.make_batch(sizes, 2, 2, 70, 4), caches) == []


def test_a_python_float_of_a_dynamic_trace_is_no_sync() -> None:
    """The tracer makes it a tensor and reads it; a tensor of the user's is another matter."""

    def program(x: Tensor, scale: Any) -> Tensor:
        return x * (scale if isinstance(scale, float) else scale.item())

    for scale, count in ((0.5, 0), (torch.tensor(0.5), 1)):
        _, probe = support.trace(
            program, torch.ones(3), scale, passes=(find_host_syncs,), dynamic=True
        )
        assert len(probe.manager.findings) == count


def test_looking_leaves_the_recorded_tensors_as_they_are() -> None:
    """A call that may read a number runs once more, on tensors of its own."""

    def program(x: Tensor, n: Any) -> Tensor:
        y = x * 2
        y.unsqueeze_(0).mul_(n)
        return y.reshape(n, -1)

    recorded: list[list[Any]] = []

    def look(graph: fx.Graph) -> int:
        values = [node.meta.get("example_value") for node in graph.nodes]
        recorded.append([(v.shape, v._version) for v in values if isinstance(v, Tensor)])
        return 0

    _, probe = support.trace(
        program, torch.ones(4, 3), torch.tensor(2), passes=(look, find_host_syncs, look)
    )
    assert recorded[0] == recorded[1] != []
    assert [finding.code for finding in probe.manager.findings] == ["return y.reshape(n, -1)"]
