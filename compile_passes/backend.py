"""``torch.compile(fn, backend="mtpgraph")``: passes on the Dynamo-level graph, then the engine.

Found through the entry point ``torch_dynamo_backends``; nothing is registered at import.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import PASSES, _compat, pages, tensorrt
from ._writes import may_write, overlap, storages, written
from .capture import device_of
from .find_mutation_hazards import remove_snapshots
from .graph_pass import PassManager
from .graphed_callable import GraphedCallable
from .options import Options
from .output_plan import GraphSizes
from .report import Finding, ReportError
from .stats import Stats

_ONLY_STEP = ("sizes", "next_n", "specialize")


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> "Artifact":
    """Compile one graph; called by Dynamo.

    Args:
        gm: the graph, rewritten in place
        example_inputs: its inputs, tensors (fake or real) and sizes
        options: fields of :class:`Options` but those that pad, which need ``mtpgraph.compile``
        mode: not supported; torch.compile passes it on when given

    Raises:
        ValueError: an unknown option, or one that needs ``mtpgraph.compile``
        ModuleNotFoundError: ``engine="tensorrt"`` without torch-tensorrt
    """
    if mode is not None:
        raise ValueError(f"backend 'mtpgraph' takes no mode, got {mode!r}; use options")
    given = dict(options or {})
    if padding := [name for name in _ONLY_STEP if name in given]:
        raise ValueError(
            f"option {padding[0]!r} needs mtpgraph.compile: a backend alone does not pad"
        )
    parsed = Options.parse(given)
    if parsed.engine == "tensorrt":
        tensorrt.require()
    return build_graphed(gm, example_inputs, parsed)


def build_graphed(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, *, whole: bool = False
) -> "Artifact":
    """``build``, and on a GPU a CUDA graph for every combination of shapes."""
    stored = _outputs_stored(gm.graph)
    artifact = build(gm, example_inputs, options, whole=whole)
    device = device_of(example_inputs)
    if device is None or options.cudagraph == "off":
        return artifact
    if syncs := [found for found in artifact.stats.findings if found.kind == "host sync"]:
        message = f"no CUDA graph, running the compiled code: {syncs[0]}"
        artifact.stats.fallbacks.append(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return artifact
    artifact.run = GraphedCallable(
        artifact.run, device, artifact.maybe_in_place, artifact.stats, options, stored
    )
    return artifact


def _outputs_stored(graph: fx.Graph) -> tuple[int, ...]:
    """Which outputs of a graph that Dynamo compiles just now are stored in what outlives a call."""
    names = {value for value, _ in _compat.stored_by_python() if isinstance(value, str)}
    returned = graph.output_node().args[0]
    leaves = returned if isinstance(returned, list | tuple) else (returned,)
    return tuple(
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, fx.Node) and leaf.name in names
    )


def build(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, *, whole: bool = True
) -> "Artifact":
    """Run the passes and the engine over one graph, without capture.

    Args:
        gm: the graph, rewritten in place
        example_inputs: its inputs
        options: how
        whole: the graph is to be a CUDA graph, here or on another machine: what cannot be in one is
            refused

    Raises:
        ReportError: the graph waits for the device where it must not, or under ``strict`` holds
            what the engine may compute wrongly
    """
    manager = PassManager(
        graph_pass for graph_pass in PASSES if graph_pass.__name__ not in options.disable_passes
    )
    in_place = _inputs_in(gm.graph, written)
    maybe_in_place = _inputs_in(gm.graph, may_write)
    sizes = _graph_sizes(gm.graph)
    rewrites = manager(gm)
    _refuse(manager.findings, options, whole)
    run = _ENGINES[options.engine](gm, example_inputs, manager.uuid(), options)
    stats = Stats(graphs=1, findings=manager.findings)
    stats.rewrites.update({name: count for name, count in rewrites.items() if count})
    frozen = None
    if isinstance(run, tensorrt.HybridStep):
        stats.findings = [*stats.findings, *run.findings]
        stats.engines.update(run.counts)
        stats.hybrid.update(run.hybrid)
        stats.plugins.update(run.plugins)
        frozen = run.frozen if len(run.frozen) else None
    return Artifact(run, in_place, maybe_in_place, sizes, stats, frozen)


def _refuse(findings: Sequence[Finding], options: Options, whole: bool) -> None:
    syncs = [found for found in findings if found.kind == "host sync"]
    if syncs and options.cudagraph == "full" and (whole or options.strict):
        raise ReportError('the step cannot be a CUDA graph (cudagraph="off" runs it)', syncs)
    hazards = [found for found in findings if found.kind == "mutation hazard"]
    if hazards and options.strict:
        raise ReportError("the step reads what it overwrites", hazards)


# What AOTAutograd says of written inputs that share memory, which it refuses.
_REFUSES_SHARED = (
    "input mutations on views with different dtypes",
    "non-differentiable view input mutations",
)


def _run_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], passes: bytes, _options: Options
) -> Callable[..., Any]:
    try:
        return pages.compile_apart(
            gm.graph,
            example_inputs,
            lambda inputs, key: _compat.inductor(gm, inputs, passes + key),
        )
    except Exception as error:
        if not any(text in str(error) for text in _REFUSES_SHARED):
            raise
        found = pages.explain_sharing(gm.graph, example_inputs)
        raise ValueError("; ".join(found) or str(error)) from error


def _run_eager(gm: fx.GraphModule, *_: Any) -> Callable[..., Any]:
    # every call runs where it stands, into memory of its own: nothing is read late
    if remove_snapshots(gm.graph):
        gm.recompile()
    return gm.forward


def _run_tensorrt(
    gm: fx.GraphModule, example_inputs: Sequence[Any], passes: bytes, options: Options
) -> Callable[..., Any]:
    # what is not in an engine runs as in eager
    remove_snapshots(gm.graph)
    return tensorrt.compile_dense(gm, example_inputs, passes, options)


_Engine = Callable[[fx.GraphModule, Sequence[Any], bytes, Options], Callable[..., Any]]
_ENGINES: dict[str, _Engine] = {
    "inductor": _run_inductor,
    "eager": _run_eager,
    "tensorrt": _run_tensorrt,
}


@dataclasses.dataclass
class Artifact:
    """One compiled graph: what Dynamo calls with the graph's inputs.

    Attributes:
        run: the compiled code
        in_place: for each input, whether the graph writes it for certain
        maybe_in_place: the same, or this cannot be ruled out
        sizes: sizes of the inputs and outputs as expressions
        stats: counts of this graph
        frozen: weights that the compiled code holds copies of
    """

    run: Callable[..., Any]
    in_place: tuple[bool, ...]
    maybe_in_place: tuple[bool, ...]
    sizes: GraphSizes
    stats: Stats
    frozen: tensorrt.FrozenWeights | None = None

    def __call__(self, *args: Any) -> Any:
        if self.frozen is not None:
            # a replay would not look
            self.frozen.check()
        return self.run(*args)


def _graph_sizes(graph: fx.Graph) -> GraphSizes:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    returned = graph.output_node().args[0]
    leaves = returned if isinstance(returned, list | tuple) else (returned,)
    return GraphSizes(tuple(map(_sizes, placeholders)), tuple(map(_sizes, leaves)))


def _sizes(node: Any) -> Any:
    value = _compat.example_value(node) if isinstance(node, fx.Node) else node
    if isinstance(value, Tensor):
        return tuple(map(_compat.size_expression, value.shape))
    return _compat.size_expression(value) if isinstance(value, torch.SymInt) else None


def _inputs_in(graph: fx.Graph, writes: Callable[[fx.Node], set[int]]) -> tuple[bool, ...]:
    """For each input, whether a node writes it."""
    found = set().union(*map(writes, graph.nodes))
    return tuple(overlap(storages(node), found) for node in graph.nodes if node.op == "placeholder")
