"""Symbolic sizes: what they are, and what tracing took for granted of them."""

import os
import re
import traceback
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils import _pytree as pytree

from ._compat_nodes import _OWN, _TORCH, example_value, user_frames


def size_expression(size: int | torch.SymInt) -> Any:
    """The sympy expression of a size, or the int itself."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def size_hint(size: int | torch.SymInt) -> int | None:
    """The value of a size in the traced call, without a guard; None where only a run would tell."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if isinstance(hint, int) else None


def source_name(placeholder: fx.Node) -> str:
    """Where Dynamo found an input of its graph, as ``L['x']``; only while the backend is called."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return "" if source is None else name_of_source(source)


def name_of_source(source: Any) -> str:
    """Where Dynamo found something, as ``L['x']``."""
    # a method in older torch, a property in newer
    return source.name if isinstance(source.name, str) else source.name()


def constants_guarded() -> list[tuple[str, str]]:
    """Sources of the Python values that the current trace holds for, and the stacks that read them.

    Only while the backend is called.
    """
    guards = TracingContext.get().guards_context.dynamo_guards
    found = {}
    for guard in guards:
        if guard.create_fn_name() in ("CONSTANT_MATCH", "EQUALS_MATCH"):
            stack = "".join((guard.user_stack or traceback.StackSummary()).format())
            found.setdefault(guard.name, stack)
    return list(found.items())


def sizes_guarded() -> list[tuple[str, int, str]]:
    """Sizes that the current trace was made to hold for: source, size, and what needed it.

    Only while the backend is called.
    """
    fake_mode = TracingContext.get().fake_mode
    shapes = fake_mode.shape_env if fake_mode is not None else None
    if shapes is None:
        return []
    reasons: dict[Any, str] = {}
    for guard in shapes.guards:
        if guard.expr.func.__name__ == "Equality":
            for symbol in guard.expr.free_symbols:
                reasons.setdefault(symbol, guard.sloc.maybe_user_loc or "")
    return [
        (name_of_source(sources[0]), int(value), reasons.get(symbol, ""))
        for symbol, sources in shapes.var_to_sources.items()
        if sources and (value := shapes.replacements.get(symbol)) is not None and value.is_Integer
    ]


def guard_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Two sizes are equal; where only their values in tracing say so, a guard holds them to it.

    Adds no guard where the traced values differ, or are not known.
    """
    if size_expression(a) == size_expression(b):
        return True
    hints = [size.node.hint if isinstance(size, torch.SymInt) else size for size in (a, b)]
    return bool(None not in hints and hints[0] == hints[1] and guard_or_false(a == b))


def size_decisions(gm: fx.GraphModule) -> list[tuple[Any, str, int, str]]:
    """What branches of Python code took for granted of sizes: expression, file, line and code.

    What torch's own kernels and shape functions assume is left out: it chooses how something is
    computed, not what. A place that is not known is empty and 0.
    """
    env = _shape_env(gm)
    if env is None:
        return []
    return [
        (env.replace(guard.expr), *_user_place(gm, str(guard.sloc.maybe_user_loc or "")))
        for guard in env.guards
        if _is_decision(guard.sloc.framework_loc)
    ]


def size_equalities(gm: fx.GraphModule) -> list[Any]:
    """What a trace took for equal among sizes, as far as symbols were not made one by it."""
    env = _shape_env(gm)
    found = [] if env is None else [env.replace(guard.expr) for guard in env.guards]
    return [guard for guard in found if guard.func.__name__ == "Equality"]


def size_assumptions(gm: fx.GraphModule) -> list[tuple[Any, str, int, str]]:
    """What torch's own kernels and shape functions took for granted of sizes, as of decisions."""
    env = _shape_env(gm)
    if env is None:
        return []
    return [
        (env.replace(guard.expr), *_user_place(gm, str(guard.sloc.maybe_user_loc or "")))
        for guard in env.guards
        if not _is_decision(guard.sloc.framework_loc)
    ]


def _shape_env(gm: fx.GraphModule) -> Any:
    """What the trace of a graph knows of its sizes; ``None`` where it kept nothing."""
    for node in gm.graph.nodes:
        mode = getattr(example_value(node), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return mode.shape_env
    return None


def _is_decision(frame: Any) -> bool:
    file = getattr(frame, "filename", "")
    if file.startswith(_TORCH):
        place = file.removeprefix(_TORCH).replace(os.sep, "/")
        return place.startswith(("_dynamo/variables/", "_dynamo/symbolic_convert"))
    return not file.startswith(_OWN)


def _user_place(gm: fx.GraphModule, text: str) -> tuple[str, int, str]:
    # code  # the/end/of/a/path.py:33 in function
    code, _, place = text.rpartition("  # ")
    found = re.fullmatch(r"(.*):(\d+) in .*", place)
    if found is None:
        return "", 0, text
    for node in gm.graph.nodes:
        for file, _ in user_frames(node.meta.get("stack_trace") or ""):
            if file.endswith(found[1]):
                return file, int(found[2]), code.strip()
    return "", 0, code.strip()


def known_at_least_0(expression: Any, *tensors: Tensor) -> bool:
    """An expression of sizes is never negative, by what tracing knows of the symbols in it.

    ``tensors`` are those whose sizes it is of. Adds no guard.
    """
    for tensor in tensors:
        for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset()):
            if isinstance(size, torch.SymInt):
                shape_env: Any = size.node.shape_env
                return bool(shape_env.bound_sympy(expression).lower >= 0)
    return False


def unbacked_symbols(value: Any) -> set[Any]:
    """Symbols in a fake result that stand for what only the data can tell."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    kinds = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, kinds)]
    return set().union(*map(free_unbacked_symbols, leaves))


def size_sources(gm: fx.GraphModule) -> dict[fx.Node, tuple[str, int]]:
    """Where Dynamo found the symbolic sizes of a graph: source of the tensor, and dimension."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    modes = (getattr(example_value(node), "fake_mode", None) for node in placeholders)
    env = next((mode.shape_env for mode in modes if mode is not None), None)
    sources = {str(symbol): found for symbol, found in env.var_to_sources.items()} if env else {}
    places: dict[fx.Node, tuple[str, int]] = {}
    for node in placeholders:
        for source in sources.get(node.name, ()):
            match = re.fullmatch(r"(.*)\.size\(\)\[(\d+)\]", name_of_source(source))
            if match is not None:
                places.setdefault(node, (match[1], int(match[2])))
    return places


def holds_in_range(relation: Any, ranges: dict[Any, tuple[int, int | None]]) -> bool:
    """A relation of sizes is true wherever each symbol is in its range, as intervals tell.

    ``None`` for the end of a range is none.
    """
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    known = {
        symbol: ValueRanges(low, int_oo if high is None else high)
        for symbol, (low, high) in ranges.items()
    }
    try:
        found: Any = bound_sympy(relation, known)
    except Exception:
        # of a function that torch knows no range of
        return False
    return bool(found.is_bool and found.lower == found.upper and found.lower)
