"""Every model of the corpus, from its first trace to its numbers."""

import contextlib
import dataclasses
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.utils import _pytree as pytree

import mtpgraph
from mtpgraph import Batched, CompiledStep, Static, Stats, testing
from mtpgraph.compile_passes import input_plan
from mtpgraph.compile_passes.infer_batch import Inferred, infer_inputs
from mtpgraph.compile_passes.report import Finding, ReportError
from tests.helpers import TOLERANCES, assert_same_bits

from . import (
    einops_style,
    flattened,
    in_place,
    layers,
    metadata,
    mixing,
    other_namespaces,
    python_effects,
    requests,
    resets,
    syncs,
)
from .batches import NEXT_N
from .corpus import INPUTS, PADS, Model, Setup

MODELS = [
    *flattened.MODELS,
    *metadata.MODELS,
    *resets.MODELS,
    *in_place.MODELS,
    *layers.MODELS,
    *other_namespaces.MODELS,
    *mixing.MODELS,
    *requests.MODELS,
    *syncs.MODELS,
    *python_effects.MODELS,
    *einops_style.MODELS,
]
SIZES = (2, 4, 8)


def each(models: list[Model]) -> Any:
    """A test of each of the models."""
    found = []
    for model in models:
        marks = []
        if model.needs and importlib.util.find_spec(model.needs) is None:
            marks.append(pytest.mark.skip(reason=f"needs {model.needs}"))
        name = model.name.replace(",", "").replace(" ", "-")
        found.append(pytest.param(model, id=name, marks=marks))
    return pytest.mark.parametrize("model", found)


def of_note(model: Model) -> bool:
    noted = (model.spelling, model.breaks, model.rewrites)
    return any(map(bool, noted))


WHOLE = [model for model in MODELS if not model.refused]
PADDED = [model for model in WHOLE if not model.findings]
WAITING = [model for model in WHOLE if model.syncs]


def names_of(step: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(getattr(step, "forward", step)).parameters)


def arguments(setup: Setup, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    return setup.arguments(names_of(setup.step), batch)


def assert_equal(actual: Any, expected: Any, exact: bool) -> None:
    """Bits, or numbers within the tolerance of their dtype, of every tensor in two results."""
    pairs = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
    for one, other in pairs:
        if not isinstance(other, Tensor):
            assert one == other
        elif exact or not other.is_floating_point():
            assert_same_bits(one, other)
        else:
            rtol, atol = TOLERANCES[other.dtype]
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


def in_eager(model: Model, batches: list[dict[str, Tensor]]) -> tuple[list[Any], Setup]:
    """The results of all batches one after the other, and the caches behind them."""
    setup = model.fresh()
    with torch.no_grad():
        return [setup.step(**arguments(setup, batch)) for batch in batches], setup


def lines(found: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.code) for finding in found]


def left_alone(found: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(at.found_by, at.reason) for at in found if at.kind == "left alone"]


def assert_lines(found: Iterable[tuple[str, str]], expected: Iterable[tuple[str, str]]) -> None:
    """Each finding is expected, of its kind and at its line, and each that is expected is there."""
    found, expected = set(found), set(expected)
    matches = {
        (of, code): {e for e in expected if e[0] == of and e[1] in code} for of, code in found
    }
    assert all(matches.values()), matches
    assert set().union(*matches.values()) == expected, matches


def test_the_corpus_is_a_corpus() -> None:
    names = [model.name for model in MODELS]
    assert len(set(names)) == len(names) >= 32
    assert not [name for name in INPUTS if not any(name in used(model) for model in MODELS)]


def used(model: Model) -> list[str]:
    if model.needs:
        return []
    return names_of(model.fresh().step)


@each([model for model in MODELS if of_note(model)])
def test_graphs_breaks_and_rewrites(model: Model) -> None:
    """One call by the plain door: what is compiled, what the passes do, and the bits of eager.

    A model of one graph that passes leave as it is shows all of this as a compiled step.
    """
    batch = model.stream(poisoned=not model.findings)[1]
    setup, expected = model.fresh(), model.fresh()
    options: dict[str, Any] = {"engine": "eager", "cudagraph": "off"}
    compiled = torch.compile(setup.step, backend="mtpgraph", options=options)
    with torch.no_grad(), testing.record() as found:
        actual = compiled(**arguments(setup, batch))
        assert_equal(actual, expected.step(**arguments(expected, batch)), exact=True)
    assert_equal(setup.tensors(), expected.tensors(), exact=True)
    assert_lines((("break", at.code) for at in found.breaks), of_kind("break", model.breaks))
    assert len(found.graphs) == model.graphs
    assert dict(found.rewrites) == dict(model.rewrites)
    # what breaks the graph is not in it
    waiting = [line for line in model.syncs if line not in model.breaks]
    assert_lines(lines(found.host_syncs), of_kind("host sync", waiting))
    assert_lines(left_alone(found.findings), model.left_alone)
    hazards = [at for at in found.findings if at.kind == "mutation hazard"]
    assert len(hazards) == model.rewrites.get("find_mutation_hazards", 0)


def of_kind(kind: str, codes: Iterable[str]) -> list[tuple[str, str]]:
    return [(kind, code) for code in codes]


@each([model for model in MODELS if model.refused])
def test_a_step_that_is_no_single_graph_is_refused_with_its_line(model: Model) -> None:
    setup = model.fresh()
    step = mtpgraph.compile(setup.step, sizes=SIZES, next_n=NEXT_N, engine="eager")
    with pytest.raises(TorchDynamoException) as caught:
        step(**arguments(setup, model.stream()[0]))
    assert model.refused in str(caught.value)


@each(WAITING)
@pytest.mark.filterwarnings("ignore:batches are not padded:RuntimeWarning")
def test_a_step_that_waits_is_refused_with_its_line(model: Model) -> None:
    setup = model.fresh()
    step = mtpgraph.compile(setup.step, sizes=SIZES, next_n=NEXT_N, engine="eager")
    with pytest.raises(ReportError) as caught:
        step(**arguments(setup, model.stream()[0]))
    assert_lines(lines(caught.value.findings), of_kind("host sync", model.syncs))


@each([m for m in WHOLE if not m.syncs and not m.spelling])
def test_padding_reaches_no_real_row_or_is_reported(model: Model) -> None:
    """The verdict holds: in eager, with NaN and large numbers in padding."""
    setup = model.fresh()
    kept = {name: Static for name, value in setup.kept.items() if value is not None}
    given = {n: INPUTS[n] for n in names_of(setup.step) if n in INPUTS} | dict(model.inputs)
    batch = arguments(setup, model.stream()[0])
    if model.mixes is None:
        testing.assert_padding_safe(setup.step, **batch, inputs={**given, **kept})
        return
    with pytest.raises(AssertionError, match="is not safe to pad") as caught:
        testing.assert_padding_safe(setup.step, **batch, inputs={**given, **kept})
    assert model.mixes in str(caught.value)


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> list[Inferred]:
    """What compiled steps infer of their inputs. Floats are then padded with NaN, if with any."""
    found: list[Inferred] = []

    def infer(*args: Any) -> Inferred:
        found.append(infer_inputs(*args))
        inputs = {
            name: dataclasses.replace(spec, pad=math.nan)
            if name in ("x", "row_bias") and isinstance(spec, Batched)
            else spec
            for name, spec in found[-1].inputs.items()
        }
        return dataclasses.replace(found[-1], inputs=inputs)

    monkeypatch.setattr(input_plan, "infer_inputs", infer)
    return found


def compiled(model: Model, setup: Setup, engine: str) -> CompiledStep:
    return mtpgraph.compile(
        setup.step,
        sizes=SIZES,
        next_n=1 if model.batches == "single" else NEXT_N,
        engine=engine,
        cudagraph="off" if model.syncs else "full",
    )


def serve(model: Model, engine: str) -> Stats:
    """Changing batches through a compiled step: outputs and caches are those of eager."""
    batches = model.stream(poisoned=not model.findings)
    if model.findings:
        # a new size compiles anew: worth it where a cache carries over from batch to batch
        batches = batches[: 2 if model.fresh().tensors() else 1]
    else:
        # one size comes three times, past Dynamo at last
        batches = [batches[0], batches[0], *batches]
    setup = model.fresh()
    step = compiled(model, setup, engine)
    expected, other = in_eager(model, batches)
    exact = model.exact and engine == "eager"
    for number, (batch, want) in enumerate(zip(batches, expected, strict=True)):
        with warned(bool(model.findings) and number == 0):
            actual = step(**arguments(setup, batch))
        assert_equal(actual, want, exact)
    assert_equal(setup.tensors(), other.tensors(), exact)
    return step.stats()


@contextlib.contextmanager
def warned(expected: bool) -> Iterator[None]:
    if not expected:
        yield
        return
    with pytest.warns(RuntimeWarning, match="batches are not padded"):
        yield


def assert_inferred(model: Model, found: Inferred) -> None:
    assert_lines(lines(found.findings), model.findings)
    assert found.row_safe == (not model.findings)
    batched = {name: spec for name, spec in found.inputs.items() if isinstance(spec, Batched)}
    names = {name for name in names_of(model.fresh().step) if name in INPUTS}
    assert batched.keys() == names - set(model.static)
    for name, spec in batched.items():
        wanted = model.inputs.get(name, INPUTS[name])
        assert (spec.dim, spec.per, spec.extra) == (wanted.dim, wanted.per, wanted.extra), name
        assert spec.pad in PADS.get(name, (wanted.pad,)), name


@each([model for model in WHOLE if not model.spelling])
def test_inputs_and_numbers_of_the_compiled_step(model: Model, inferred: list[Inferred]) -> None:
    """Nothing is declared: what grows is found, padding is harmless, numbers are those of eager."""
    stats = serve(model, "eager")
    assert_inferred(model, inferred[0])
    assert len(inferred) == 1
    safe = not model.findings
    assert all((size is not None) == safe for size in stats.calls), stats.calls
    if safe:
        assert model.recompiles in (stats.recompiles > 0, None)
        per_graph = {name: count * stats.graphs for name, count in model.rewrites.items()}
        assert dict(stats.rewrites) == per_graph
        assert stats.graphs == 1 + stats.recompiles
    assert stats.graph_breaks == 0
    assert_lines(left_alone(stats.findings), model.left_alone)


@each([model for model in WHOLE if model.inductor])
@pytest.mark.usefixtures("inferred")
def test_numbers_by_inductor(model: Model) -> None:
    graphs = serve(model, "inductor").graphs
    assert graphs == 1 or model.findings


@each([model for model in WHOLE if model.build and not model.needs])
def test_warm_up_leaves_states_alone(model: Model) -> None:
    """Warm-up runs padding alone, as every recording of a CUDA graph does, or nothing."""
    setup, other = model.fresh(), model.fresh()
    with warned(bool(model.findings)):
        compiled(model, setup, "eager").warm_up(**arguments(setup, model.stream()[0]))
    assert_equal(setup.tensors(), other.tensors(), exact=True)
