"""``engine="tensorrt"``: dense regions of a step as TensorRT engines, the rest as it was written.

The graph of the passes is split here, not by the library: an engine gets pure arithmetic on
floating-point tensors. Ops, caches, states and whatever is updated in place stay in torch, in the
user's order. How regions are chosen is in ``dense_regions``.
"""

import dataclasses
import importlib.util
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from . import _compat
from ._nodes import may_write, op_of, overlap, storages
from .dense_regions import DTYPES, Region, find_regions
from .engine_cache import EngineCache, engine_key
from .engine_input import EngineInput, engine_inputs
from .options import Options
from .region_graph import copy_region, replace_region, with_gaps
from .report import Finding, ReportError, collect, note

Engine = Callable[..., Sequence[Tensor]]
"""Takes the inputs of a region, contiguous; gives its outputs, fresh and contiguous."""


class Builder(Protocol):
    """Makes engines of regions; tests put another in the place of TensorRT's."""

    def fingerprint(self, device: torch.device) -> str:
        """What an engine depends on besides its region: libraries, card, settings of torch."""
        ...

    def build(
        self, gm: fx.GraphModule, inputs: Sequence[EngineInput], outputs: Sequence[torch.dtype]
    ) -> bytes:
        """An engine that serves every shape in the ranges of its inputs.

        Args:
            gm: the region; its parameters are constants of the engine
            inputs: dtypes and ranges
            outputs: dtypes of what it gives
        """
        ...

    def load(
        self, engine: bytes, inputs: Sequence[EngineInput], outputs: Sequence[torch.dtype]
    ) -> Engine:
        """Make an engine ready to run."""
        ...


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

    A region that no engine can be built for runs in torch, and a finding says why.

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
    builder = load_builder()
    weights = _weights(gm.graph, example_inputs) if options.freeze_weights else {}
    outside: set[fx.Node] = set()
    with collect() as findings:
        while True:
            findings.clear()
            regions = find_regions(gm.graph, weights, outside)
            gaps = [node for region in regions for node in with_gaps(region)]
            if not gaps:
                break
            outside.update(gaps)
        workshop = _Workshop(builder, options, passes)
        frozen: dict[str, tuple[int, Tensor]] = {}
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        stands_at: dict[fx.Node, fx.Node] = {}
        for place, region in enumerate(regions):
            taken = copy_region(region, weights)
            inputs = engine_inputs(taken.inputs, options)
            engine = workshop.engine(region, taken.module, inputs, taken.output_dtypes)
            name = f"dense_region_{place}"
            gm.add_submodule(name, DenseRegion(taken.module, engine, inputs))
            behind = stands_at.get(region.behind, region.behind)
            stands_at[region.behind] = replace_region(gm, region, taken, name, behind)
            if engine is not None:
                kept = set(map(id, taken.module.parameters()))
                frozen |= {
                    _compat.source_name(node) or node.name: (placeholders.index(node), weight)
                    for node, weight in weights.items()
                    if id(weight) in kept
                }
    if findings and options.strict:
        raise ReportError("part of the step cannot be in a TensorRT engine", findings)
    gm.graph.lint()
    gm.recompile()
    has_engines = workshop.counts.total() > workshop.counts["torch"]
    hybrid = Counter(_pure_ops(gm.graph) if has_engines else ())
    return HybridStep(gm, FrozenWeights(frozen), workshop.counts, hybrid, findings)


class _Workshop:
    """Gets engines from the cache or from the builder, and counts where from."""

    def __init__(self, builder: Builder, options: Options, passes: bytes) -> None:
        self._builder = builder
        self._passes = passes
        self._cache = EngineCache.of(options.engine_cache)
        # without weights in them, the engines of equal layers are one
        self._made: dict[tuple[str, torch.device], Engine] = {}
        self.counts: Counter[str] = Counter()

    def engine(
        self,
        region: Region,
        gm: fx.GraphModule,
        inputs: Sequence[EngineInput],
        outputs: Sequence[torch.dtype],
    ) -> Engine | None:
        """The engine of a region; ``None``, and a note, if there can be none."""
        try:
            # Dynamo compiles the step just now: its sizes and fake tensors are none of the engine's
            with _compat.outside_of_tracing():
                return self._get(gm, inputs, outputs)
        except Exception as error:
            self.counts["torch"] += 1
            cause = f"{type(error).__name__}: {error}".partition("\n")[0]
            reason = f"no engine could be built, the region runs in torch: {cause}"
            note(region.product, "engine fallback", "tensorrt", reason)
            return None

    def _get(
        self, gm: fx.GraphModule, inputs: Sequence[EngineInput], outputs: Sequence[torch.dtype]
    ) -> Engine:
        has_weights = next(gm.parameters(), None) is not None
        device = inputs[0].device
        key = None
        if self._cache is not None or not has_weights:
            key = engine_key(gm, inputs, self._builder.fingerprint(device), self._passes)
            if (key, device) in self._made:
                self.counts["shared"] += 1
                return self._made[key, device]
            stored = self._cache.load(key) if self._cache is not None else None
            if stored is not None:
                try:
                    engine = self._builder.load(stored, inputs, outputs)
                except Exception:  # of another card or library after all: it is built anew
                    pass
                else:
                    self.counts["loaded"] += 1
                    return self._made.setdefault((key, device), engine)
        built = self._builder.build(gm, inputs, outputs)
        engine = self._builder.load(built, inputs, outputs)
        self.counts["built"] += 1
        if key is not None:
            self._made[key, device] = engine
            if self._cache is not None:
                self._keep(self._cache, key, built)
        return engine

    def _keep(self, cache: EngineCache, key: str, built: bytes) -> None:
        try:
            cache.store(key, built)
        except OSError as error:
            message = f"cannot keep TensorRT engines in {cache.directory}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


class DenseRegion(nn.Module):
    """One region: its engine for the shapes that it was built for, torch for all others."""

    def __init__(
        self, in_torch: fx.GraphModule, engine: Engine | None, inputs: Sequence[EngineInput]
    ) -> None:
        super().__init__()
        self.in_torch = in_torch
        self.engine = engine
        self.inputs = tuple(inputs)

    def forward(self, *given: Tensor) -> Sequence[Tensor]:
        if self.engine is None or not all(
            wanted.fits(tensor) for wanted, tensor in zip(self.inputs, given, strict=True)
        ):
            return self.in_torch(*given)
        return self.engine(*[tensor.contiguous() for tensor in given])


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
        hybrid: calls of pure ops that run in torch between the engines, by the name of the op
        findings: what stays in torch though it is dense
    """

    gm: fx.GraphModule
    frozen: FrozenWeights
    counts: Counter[str]
    hybrid: Counter[str]
    findings: list[Finding]

    def __call__(self, *args: Any) -> Any:
        self.frozen.check_given(args)
        return self.gm.forward(*args)


def _pure_ops(graph: fx.Graph) -> list[str]:
    """Ops of this package that write nothing: with plugins, an engine could hold them."""
    ops = [op for node in graph.nodes if (op := op_of(node)) is not None]
    ours = [op for op in ops if op.namespace == "mtpgraph" and not op._schema.is_mutable]
    return [op._opname for op in ours]


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
