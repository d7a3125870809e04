"""``engine="tensorrt"``: dense regions of a step as TensorRT engines, the rest as it was written.

The graph of the passes is split here, not by the library: an engine gets pure arithmetic on
floating-point tensors, and pure ops of this package where the library has plugins. Other ops,
states and whatever is updated in place stay in torch, in the user's order. How regions are chosen
is in ``dense_regions``.
"""

import copy
import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from . import _compat
from ._writes import may_write, overlap, storages
from .dense_regions import DTYPES, find_regions
from .engine_input import EngineInput, engine_inputs
from .engine_ops import engine_form, name_of_op, pure_ops
from .engine_workshop import Builder, Engine, Workshop
from .options import Options
from .region_graph import copy_region, replace_region, with_gaps
from .report import Finding, ReportError, collect, note


def is_installed() -> bool:
    """Some flavour of torch-tensorrt is there; whether it imports is another matter."""
    return importlib.util.find_spec("torch_tensorrt") is not None


def require() -> None:
    """Raise where the library is not installed.

    Raises:
        ModuleNotFoundError: names the extra to install
    """
    if not is_installed():
        raise ModuleNotFoundError(
            'engine="tensorrt" needs torch-tensorrt, which is not installed: pip install '
            "'mtpgraph[tensorrt]', or choose engine=\"inductor\"",
            name="torch_tensorrt",
        )


def load_builder() -> Builder:
    """The builder of the installed torch-tensorrt, whichever flavour it is.

    Raises:
        ModuleNotFoundError: it is not installed
        ImportError: it is, and does not import: its libraries or the driver are missing
    """
    require()
    from .tensorrt_builder import TensorRTBuilder

    return TensorRTBuilder()


def compile_dense(
    gm: fx.GraphModule, example_inputs: Sequence[Any], passes: bytes, options: Options
) -> "HybridStep":
    """Build an engine for each dense region of a graph and put it in the region's place.

    A region that no engine can be built for is tried without the ops in it, then runs in torch; a
    finding says why.

    Args:
        gm: the graph after the passes, changed in place
        example_inputs: its inputs; parameters among them are constants of the engines, unless the
            graph writes them or ``freeze_weights`` is off
        passes: changes with the passes; part of the keys of cached engines
        options: sizes, cache, strictness

    Raises:
        ReportError: under ``strict``, something dense stays in torch for a reason that is noted
        ImportError: TensorRT cannot be used at all
    """
    workshop = Workshop(load_builder(), options, passes)
    with collect() as findings:
        run = _with_engines(gm, example_inputs, workshop, options, findings)
    if findings and options.strict:
        raise ReportError("part of the step cannot be in a TensorRT engine", findings)
    gm.graph.lint()
    gm.recompile()
    return run


def _with_engines(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    workshop: Workshop,
    options: Options,
    findings: list[Finding],
) -> "HybridStep":
    """Where no engine can be built for a region with ops, they stay outside, and the graph is split
    again: what is left of the region may be an engine without them."""
    plugins, cause = workshop.plugins()
    before = copy.deepcopy(gm.graph) if plugins else gm.graph
    nodes = list(before.nodes)
    ops = [node for node in nodes if name_of_op(node)]
    refused = {ops[0]: cause} if ops and cause else {}
    outside: set[int] = set()
    while True:
        findings.clear()
        try:
            run = _replace_regions(gm, example_inputs, workshop, options, plugins, outside)
            break
        except _OpsRefused as refusal:
            outside.update(refusal.places)
            refused[nodes[refusal.places[0]]] = refusal.cause
            gm.graph = copy.deepcopy(before)
            for name in [n for n, child in gm.named_children() if isinstance(child, DenseRegion)]:
                gm.delete_submodule(name)
    for node, cause in refused.items():
        reason = f"no engine could be built with ops in it, they run in torch: {cause}"
        note(node, "engine fallback", "tensorrt", reason)
    return dataclasses.replace(run, findings=findings)


class _OpsRefused(Exception):
    """No engine could be built for a region with ops.

    Attributes:
        places: of the ops, in the graph as it was
        cause: why
    """

    def __init__(self, places: list[int], cause: str) -> None:
        super().__init__(cause)
        self.places = places
        self.cause = cause


def _replace_regions(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    workshop: Workshop,
    options: Options,
    plugins: Collection[str],
    outside: Collection[int],
) -> "HybridStep":
    """Put engines in the place of regions.

    Args:
        plugins: ops that engines can hold, by name
        outside: places of calls to leave out

    Raises:
        _OpsRefused: the graph is to be split again, from the start
    """
    weights = _weights(gm.graph, example_inputs) if options.freeze_weights else {}
    places = {node: place for place, node in enumerate(gm.graph.nodes)}
    left_out = {node for node, place in places.items() if place in outside}
    while True:
        regions = find_regions(gm.graph, weights, left_out, plugins)
        gaps = [node for region in regions for node in with_gaps(region)]
        if not gaps:
            break
        left_out.update(gaps)
    ops: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    frozen: dict[str, tuple[int, Tensor]] = {}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    stands_at: dict[fx.Node, fx.Node] = {}
    for place, region in enumerate(regions):
        taken = copy_region(region, weights)
        program = engine_form(taken.module)
        inputs = engine_inputs(program.graph.find_nodes(op="placeholder"), options)
        engine, came = workshop.engine(
            places[region.nodes[0]], program, inputs, taken.output_dtypes
        )
        if engine is None and region.ops:
            raise _OpsRefused([places[node] for node in region.ops], came)
        if engine is None:
            reason = f"no engine could be built, the region runs in torch: {came}"
            note(region.product, "engine fallback", "tensorrt", reason)
        counts["torch" if engine is None else came] += 1
        name = f"dense_region_{place}"
        gm.add_submodule(name, DenseRegion(taken.module, engine, inputs))
        behind = stands_at.get(region.behind, region.behind)
        stands_at[region.behind] = replace_region(gm, region, taken, name, behind)
        if engine is not None:
            ops.update(pure_ops(program.graph, "mtpgraph_engine"))
            kept = set(map(id, taken.module.parameters()))
            frozen |= {
                _compat.source_name(node) or node.name: (placeholders.index(node), weight)
                for node, weight in weights.items()
                if id(weight) in kept
            }
    hybrid = Counter(pure_ops(gm.graph, "mtpgraph"))
    return HybridStep(gm, FrozenWeights(frozen), counts, hybrid, ops, [])


class DenseRegion(nn.Module):
    """One region: its engine for the shapes that it was built for, torch for all others."""

    def __init__(
        self, in_torch: fx.GraphModule, engine: Engine | None, inputs: Sequence[EngineInput]
    ) -> None:
        super().__init__()
        self.in_torch = in_torch
        self.engine = engine
        self.inputs = tuple(inputs)

    def forward(self, *given: Tensor | int) -> Sequence[Tensor]:
        if self.engine is None:
            return self.in_torch(*given)
        taken = []
        for wanted, value in zip(self.inputs, given, strict=True):
            tensor = wanted.take(value)
            if tensor is None:
                return self.in_torch(*given)
            taken.append(tensor)
        return self.engine(*taken)


class FrozenWeights:
    """Parameters that are constants of engines. Their change is an error, never an old result."""

    def __init__(self, weights: Mapping[str, tuple[int, Tensor]]) -> None:
        self._names = list(weights)
        self._places = [place for place, _ in weights.values()]
        self._tensors = [tensor for _, tensor in weights.values()]
        self._versions = self._read()
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def __len__(self) -> int:
        return len(self._tensors)

    def check(self) -> None:
        """Refuse to run on weights that were updated in place.

        Seen is what torch counts: an optimiser's step, ``copy_``, ``load_state_dict``. What is
        written through ``parameter.data`` or by a kernel of somebody's own is not.

        Raises:
            RuntimeError: names the parameter
        """
        versions = self._read()
        if versions != self._versions:
            pairs = zip(versions, self._versions, strict=True)
            place = next(i for i, (now, then) in enumerate(pairs) if now != then)
            self._refuse(place, "was updated in place")

    def check_given(self, args: Sequence[Any]) -> None:
        """Also refuse other tensors in the place of the weights.

        Args:
            args: the inputs of the graph
        """
        self.check()
        for place, (index, tensor) in enumerate(zip(self._places, self._tensors, strict=True)):
            if args[index] is not tensor or tensor.data_ptr() != self._addresses[place]:
                self._refuse(place, "was replaced")

    def _read(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]

    def _refuse(self, place: int, what: str) -> None:
        raise RuntimeError(
            f"the parameter {self._names[place]} {what} after TensorRT engines were built with "
            "it: compile the step again, or with freeze_weights=False, which makes weights inputs "
            "of the engines"
        )


@dataclasses.dataclass
class HybridStep:
    """The graph with its engines.

    Attributes:
        gm: the graph; an engine is a call of a submodule ``dense_region_<n>``
        frozen: the weights in the engines
        counts: regions by what became of them: "built", "loaded" from the cache, "shared" with an
            equal region, or "torch", without an engine
        hybrid: calls of pure ops that run in torch, by the name of the op
        plugins: calls of ops inside of engines, by the name of the op
        findings: what stays in torch though it is dense
    """

    gm: fx.GraphModule
    frozen: FrozenWeights
    counts: Counter[str]
    hybrid: Counter[str]
    plugins: Counter[str]
    findings: list[Finding]

    def __call__(self, *args: Any) -> Any:
        self.frozen.check_given(args)
        return self.gm.forward(*args)


def _weights(graph: fx.Graph, example_inputs: Sequence[Any]) -> dict[fx.Node, Tensor]:
    """The inputs that can be constants of an engine: parameters that the graph does not write."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    written = set().union(*map(may_write, graph.nodes))
    return {
        node: value
        for node, value in zip(placeholders, example_inputs, strict=True)
        if isinstance(value, nn.Parameter)
        and not hasattr(value, "fake_mode")
        # its updates are not counted
        and not value.is_inference()
        and value.dtype in DTYPES
        and not overlap(storages(node), written)
    }
