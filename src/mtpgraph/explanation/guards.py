"""What a trace holds for: sizes and Python values that another call must share."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..compile_passes import _compat
from ..compile_passes._writes import overlap, storages, written
from ..compile_passes.report import source_line
from .record import Input, Recompile

# containers that torch keeps the content of a module in
_CONTENT = re.compile(r"\._(?:parameters|modules|buffers)\[")
_QUOTED = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\")\]")
_LAYER = re.compile(r"\.\d+\.")
_OWN_OP = re.compile(r"mtpgraph/ops/(\w+)\.py$")
_SIZE = re.compile(r"\.size\(\)\[(\d+)\]$")


class Sources:
    """The places that Dynamo found values in, by the names it gives them.

    ``local`` are the arguments of the step by name, ``module`` the globals of its function.
    """

    def __init__(self, local: Mapping[str, Any], module: Mapping[str, Any]) -> None:
        self._places = {"L": dict(local), "G": module}

    @classmethod
    def of(cls, fn: Any, bound: inspect.BoundArguments) -> "Sources":
        """The places of a call."""
        local = dict(bound.arguments)
        if (owner := getattr(fn, "__self__", None)) is not None:
            local["self"] = owner
        function = getattr(fn, "__func__", fn)
        return cls(local, getattr(function, "__globals__", {}))

    def value(self, source: str) -> Any:
        """What lies there; ``None`` if it cannot be reached this way."""
        try:
            return eval(source, {"__builtins__": {}}, self._places)
        except Exception:
            # some sources are calls of the tracer's own helpers
            return None

    @staticmethod
    def is_argument(source: str) -> bool:
        """An argument, or what lies in its containers; not an attribute of an object."""
        return source.startswith("L[") and "." not in _SIZE.sub("", source)


def shown(source: str) -> str:
    """A source as a user would write it: ``L['self']._modules['head'].bias`` is self.head.bias."""
    text = _CONTENT.sub("[", source).removesuffix(".size()")
    root = re.match(r"[LG]\[(?:'([^']*)'|\"([^\"]*)\")\]", text)
    if root is None:
        return text
    rest = text[root.end() :]
    if _CONTENT.search(source):
        rest = _QUOTED.sub(lambda match: f".{match[1] or match[2]}", rest)
    return (root[1] or root[2]) + rest


def read_inputs(graph: fx.Graph, sources: Sources) -> list[Input]:
    """The inputs of a graph, in order; only while the backend is called."""
    changed = set().union(*map(written, graph.nodes))
    inputs = []
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        source = _compat.source_name(node)
        value = _compat.example_value(node)
        is_parameter = isinstance(value, torch.nn.Parameter) or bool(_CONTENT.search(source))
        is_number = isinstance(sources.value(source), float)
        if isinstance(value, Tensor) and not is_number:
            sizes = tuple(map(_compat.size_hint, value.shape))
            free = tuple(_is_free(size) for size in value.shape)
            dtype = str(value.dtype).removeprefix("torch.")
            is_written = overlap(storages(node), changed)
        else:
            sizes, free, is_written = (), (), False
            dtype = "float" if is_number else "int"
        name = shown(source) if source else str(node.target)
        if not _SIZE.search(source):
            inputs.append(Input(name, dtype, sizes, free, is_written, is_parameter))
    return inputs


def _is_free(size: int | torch.SymInt) -> bool:
    return bool(getattr(_compat.size_expression(size), "free_symbols", None))


def read_recompiles(graph: fx.Graph, sources: Sources) -> list[Recompile]:
    """What the current trace was made to hold for; only while the backend is called."""
    files = _files(graph)
    states = {shown(_compat.source_name(node)) for node in _written_inputs(graph)}
    found = []
    for source, size, needed_by in _compat.sizes_guarded():
        code, _, where = needed_by.rpartition("  # ")
        dim = _SIZE.search(source)
        owner = shown(source[: dim.start()]) if dim else shown(source)
        kind = "value" if dim is None else "state" if owner in states else "size"
        name = f"{owner}.shape[{dim[1]}]" if dim else owner
        where, code = _place(where.split(" in ")[0], code.strip(), files)
        found.append(Recompile(kind, name, str(size), where, code))
    found += _ones(graph)
    found += _numbers(graph, sources)
    for source, stack in _compat.constants_guarded():
        value = sources.value(source)
        is_argument = sources.is_argument(source)
        # defaults and modules change with the program alone; an absent bias is no choice of a value
        if not is_argument and ("__" in source or value is None):
            continue
        frames = _compat.user_frames(stack)
        file, line = frames[-1] if frames else ("", 0)
        name = shown(source) if is_argument else _LAYER.sub(".*.", shown(source))
        where = f"{file}:{line}" if file else ""
        code = source_line(file, line)
        kind = "value" if is_argument else "constant"
        found.append(Recompile(kind, name, _short(repr(value)), where, code))
    return list(dict.fromkeys(found))


def _written_inputs(graph: fx.Graph) -> list[fx.Node]:
    changed = set().union(*map(written, graph.nodes))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [node for node in inputs if overlap(storages(node), changed)]


def _place(where: str, code: str, files: set[str]) -> tuple[str, str]:
    """A place that a guard names, whose path torch has cut at the front."""
    short, _, line = where.rpartition(":")
    own = _OWN_OP.search(short)
    if own is not None:
        return "", f"mtpgraph.{own[1]} needs it"
    full = next((file for file in sorted(files) if short and file.endswith(short)), short)
    return (f"{full}:{line}" if full else ""), code


def _files(graph: fx.Graph) -> set[str]:
    """The user's files that the graph comes from."""
    traces = {node.meta.get("stack_trace") or "" for node in graph.nodes}
    return {file for trace in traces for file, _ in _compat.user_frames(trace)}


def _ones(graph: fx.Graph) -> list[Recompile]:
    """Sizes of arguments that the tracer takes as constants for being 0 or 1."""
    found = []
    for node in graph.nodes:
        value = _compat.example_value(node) if node.op == "placeholder" else None
        source = _compat.source_name(node) if node.op == "placeholder" else ""
        if not isinstance(value, Tensor) or not Sources.is_argument(source):
            continue
        for dim, size in enumerate(value.shape):
            if isinstance(size, int) and size in (0, 1):
                name = f"{shown(source)}.shape[{dim}]"
                code = "the compiler takes sizes of 0 and 1 as constants"
                found.append(Recompile("size", name, str(size), "", code))
    return found


def _numbers(graph: fx.Graph, sources: Sources) -> list[Recompile]:
    """Python numbers among the arguments, open in this trace, constants of a compiled step."""
    found = []
    why = "mtpgraph.compile takes a Python number as a constant; a 0-d tensor may change"
    for node in graph.nodes:
        source = _compat.source_name(node) if node.op == "placeholder" else ""
        value = sources.value(source) if source and sources.is_argument(source) else None
        if isinstance(value, int | float) and not _SIZE.search(source):
            found.append(Recompile("value", shown(source), repr(value), "", why))
    return found


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
