"""``mtpgraph.explain``: trace a step, run the passes, and write down what there is to see.

The step is traced as one graph, and stopped where the graph would run. Only if it breaks is it run,
once, for Dynamo goes past a break in no other way: on deep copies of the function's object, its
closure and its arguments, with what a graph writes besides copied once more.
"""

import contextlib
import copy
import functools
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..compile_passes import PASSES, _compat
from ..compile_passes.backend import build
from ..compile_passes.options import Options
from ..compile_passes.pages import explain_sharing
from ..compile_passes.report import source_line
from ..compile_passes.stats import Stats
from ..compile_passes.step import CompiledStep
from .breaks import first_break, read_break
from .calls import detached, name_of, plain_call, with_fresh_code
from .guards import Sources, read_inputs, read_recompiles, shown
from .ops import read_ops
from .padding import explain_padding
from .record import Explanation, PassReport

# the error of the call itself, in what Dynamo says of it
_INNER = re.compile(r": got (\w+)\((['\"])(.*?)\2\)\s", re.DOTALL)


class StepError(ValueError):
    """The step itself fails on the given inputs."""


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Say how a step compiles: graphs, breaks, passes, padding, bytes; nothing is written to.

    Args:
        fn: the step, or what ``mtpgraph.compile`` or ``torch.compile`` made of it
        *args, **kwargs: what it takes; their sizes are an example, other sizes are traced along

    Returns:
        an :class:`Explanation`: print it, or show it in a notebook

    Raises:
        TypeError: ``fn`` cannot be called, or not with these arguments
        ValueError: the step fails on these inputs
        RuntimeError: torch.compile is switched off
    """
    return examine(fn, args, kwargs)


def examine(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str | None = None,
    made_up: bool = False,
) -> Explanation:
    """:func:`explain` with a name for the step, and whether the values of tensors mean nothing."""
    options, declared, engine = Options(engine="eager"), {}, "inductor"
    if isinstance(fn, CompiledStep):
        fn, declared, given = fn._fn, fn.inputs, fn._options
        options = Options(engine="eager", disable_passes=given.disable_passes)
        engine = given.engine
    fn = _compat.uncompiled(fn)
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {fn!r}")
    if _compat.is_off():
        raise RuntimeError(
            "torch.compile is switched off, so nothing can be traced; unset TORCH_COMPILE_DISABLE "
            "and torch.compiler.set_stance, and call this outside of compiled code"
        )
    explanation = Explanation(name or name_of(fn), str(torch.__version__))
    fn, args, kwargs = plain_call(fn, args, kwargs)
    signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    probe = Probe(explanation, options, engine, made_up)
    try:
        probe.trace_whole(fn, bound)
    except _compat.GraphBreak as error:
        probe.trace_parts(fn, bound, error)
    except _compat.FakeRunError as error:
        raise _step_error(error) from error
    explanation.passes = _pass_reports(options, probe.stats)
    explanation.findings = [f for f in probe.stats.findings if f.kind != "left alone"]
    if explanation.breaks or not explanation.graphs:
        explanation.padding_verdict = "Not looked into: the step is not one graph."
    else:
        with _tracing():
            explain_padding(explanation, fn, bound, declared)
    return explanation


def _step_error(error: Exception) -> StepError:
    """In the words of what failed first, with the user's line where the tracer tells it."""
    stack = getattr(error, "real_stack", None)
    frames = _compat.user_frames("".join(stack.format())) if stack else []
    file, line = frames[-1] if frames else ("", 0)
    code = source_line(file, line)
    at = f" at {file}:{line}, `{code}`" if file else ""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, _compat.FakeRunError) and (inner := _INNER.search(str(error))):
        said = f"{inner[1]}: {inner[3]}"
    return StepError(f"the step fails on these inputs{at}: {said}")


class _Stop(Exception):
    """Raised in place of running a graph."""


class Probe:
    """A backend that runs the passes over each graph and writes down what it sees."""

    def __init__(
        self, explanation: Explanation, options: Options, engine: str, made_up: bool
    ) -> None:
        self.stats = Stats()
        self._explanation = explanation
        self._options = options
        self._engine = engine
        self._made_up = made_up
        self._sources = Sources({}, {})
        self._own: set[int] | None = None

    def trace_whole(self, fn: Callable[..., Any], bound: inspect.BoundArguments) -> None:
        """Trace as one graph and run nothing.

        Raises:
            _compat.GraphBreak: it is more than one
        """
        target = with_fresh_code(fn)
        self._sources = Sources.of(target, bound)
        with _tracing(), contextlib.suppress(_Stop):
            torch.compile(target, backend=self, fullgraph=True, dynamic=True)(
                *bound.args, **bound.kwargs
            )
            self._explanation.notes.append("there was nothing to trace in it, so it ran as it is")

    def trace_parts(
        self, fn: Callable[..., Any], bound: inspect.BoundArguments, error: Exception
    ) -> None:
        """Trace past breaks, on copies; where these cannot be made, tell of the first break."""
        explanation = self._explanation
        try:
            memo: dict[int, Any] = {}
            target = detached(fn, memo)
            args, kwargs = copy.deepcopy((bound.args, bound.kwargs), memo)
        except Exception as reason:
            explanation.breaks.append(first_break(error))
            explanation.notes.append(
                "only the first graph break is known: to go past it the step has to run, on copies "
                f"of its arguments, which cannot be made: {reason}"
            )
            return
        self._own = {key for value in memo.values() for key in _storage_keys(value)}
        self._sources = Sources.of(target, bound)

        def found(said: str) -> None:
            one = read_break(said)
            if all((one.file, one.line) != (b.file, b.line) for b in explanation.breaks):
                explanation.breaks.append(one)

        compiled = torch.compile(with_fresh_code(target), backend=self, dynamic=True)
        try:
            # what the step prints is not part of the answer
            with (
                _tracing(),
                _compat.watch_graph_breaks(found),
                contextlib.redirect_stdout(sys.stderr),
                _same_random_numbers(),
            ):
                compiled(*args, **kwargs)
        except Exception as reason:
            raise _step_error(reason) from reason
        if not explanation.breaks:
            explanation.breaks.append(first_break(error))

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Called by Dynamo with each graph."""
        known = self._known_values(gm.graph)
        if not self._explanation.graphs:
            self._explanation.inputs = read_inputs(gm.graph, self._sources)
        for one in read_recompiles(gm.graph, self._sources):
            if one not in self._explanation.recompiles:
                self._explanation.recompiles.append(one)
        names = {
            node: shown(_compat.source_name(node)) or str(node.target)
            for node in gm.graph.nodes
            if node.op == "placeholder"
        }
        numbers = {
            node
            for node in names
            if isinstance(self._sources.value(_compat.source_name(node)), float)
        }
        for note in explain_sharing(gm.graph, inputs) if self._engine == "inductor" else ():
            if note not in self._explanation.notes:
                self._explanation.notes.append(note)
        artifact = build(gm, inputs, self._options, whole=False)
        self.stats.merge(artifact.stats)
        self._explanation.graphs.append(list(read_ops(gm.graph, names, known, numbers)))
        if self._own is None:
            return _stop
        return functools.partial(_run_on_copies, gm, artifact.maybe_in_place, self._own)

    def _known_values(self, graph: fx.Graph) -> dict[fx.Node, Tensor]:
        """Inputs of a graph that are arguments with values that mean something."""
        if self._made_up:
            return {}
        values = {
            node: self._sources.value(_compat.source_name(node))
            for node in graph.nodes
            if node.op == "placeholder"
        }
        return {
            node: value
            for node, value in values.items()
            if isinstance(value, Tensor) and not value.is_meta
        }


def _stop(*_: Any) -> Any:
    raise _Stop


def _run_on_copies(
    gm: fx.GraphModule, in_place: Sequence[bool], own: set[int], *inputs: Any
) -> Any:
    """Run a graph, with a copy of each input that it may write to and that is not a copy yet."""
    copies: dict[int, Any] = {}

    def copied(tensor: Tensor) -> Tensor:
        key = _compat.storage_key(tensor)
        if key in own:
            return tensor
        if key not in copies:
            copies[key] = tensor.untyped_storage().clone()
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(copies[key], tensor.storage_offset(), tensor.shape, tensor.stride())

    given = [
        copied(value) if written and isinstance(value, Tensor) else value
        for value, written in zip(inputs, in_place, strict=True)
    ]
    return gm(*given)


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    cards = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    state = random.getstate()
    try:
        with torch.random.fork_rng(cards):
            yield
    finally:
        random.setstate(state)


def _storage_keys(value: Any) -> list[int]:
    tensors = [leaf for leaf in _compat.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [_compat.storage_key(tensor) for tensor in tensors]


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    with (
        torch.no_grad(),
        _compat.quiet_tracing(),
        _compat.symbolic_batch(recompile_limit=256),
    ):
        yield


def _pass_reports(options: Options, stats: Stats) -> list[PassReport]:
    reports = []
    for graph_pass in PASSES:
        name = graph_pass.__name__
        module = inspect.getmodule(graph_pass)
        rewrite = ((module and module.__doc__) or "").strip().partition("\n\n")[0]
        left_alone = [f for f in stats.findings if (f.kind, f.found_by) == ("left alone", name)]
        reports.append(
            PassReport(
                name=name,
                rewrite=" ".join(rewrite.split()),
                count=stats.rewrites[name],
                disabled=name in options.disable_passes,
                left_alone=tuple(left_alone),
            )
        )
    return reports
