"""Which sizes count requests or tokens because rows are indexed by their numbers, or row by row.

``row_bias[row_requests]`` takes a row for each request, ``x[query_start_loc[1:] - 1]`` one for each
token: an op declares what its results are numbers of, or that an argument holds offsets of tokens.
``block_table.gather(1, (seq_lens // 64)[:, None])`` and ``block_table[arange(num_reqs), place]``
pair the rows of two tensors; torch asks for enough rows alone.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, fx

from ..ops.declare import facts_of
from . import _compat
from .rows import Call, Trace, expression

_Unit = Literal["request", "token"]
# what it is a number of, or how many numbers from 0 on there are; moved by so many
_Name = tuple[Any, int]


def count_by_index(
    trace: Trace,
    same: dict[Any, sympy.Expr],
    requests: set[Any],
    tokens: set[Any],
    fixed: Collection[fx.Node],
) -> frozenset[Any]:
    """Add to what is known the sizes of what is indexed by numbers of requests or tokens, or row by
    row with what is counted.

    Only where they are as many in the batch at hand: a table may be longer.

    Args:
        trace: the graph
        same: what symbols are equal to; added to
        requests, tokens: what counts them; added to
        fixed: inputs whose sizes are not looked at

    Returns:
        the symbols that were added
    """
    hints = _hints(trace)
    kept = {
        symbol for node in fixed if node in trace.inputs
        for size in trace.inputs[node].shape for symbol in expression(size).free_symbols
    }  # fmt: skip
    counts = {"request": requests, "token": tokens}
    known = set[Any]().union(*(c.free_symbols for c in (*requests, *tokens)), same)
    found: set[Any] = set()

    def is_new(symbol: Any) -> bool:
        return symbol.is_Symbol and symbol in hints and symbol not in known | kept

    def take(symbol: Any, count: Any) -> bool:
        if count.xreplace(hints) != hints[symbol]:
            return False
        same[symbol] = count
        known.add(symbol)
        found.add(symbol)
        return True

    numbered, paired = _indexed(trace)
    for unit, size in numbered:
        symbol = expression(size)
        if not is_new(symbol):
            continue
        count = min(
            (c.xreplace(same) for c in counts[unit] if c.free_symbols),
            key=lambda c: (c.count_ops(), str(c)),
            default=None,
        )
        if count is not None:
            take(symbol, count)
        else:
            counts[unit].add(symbol)
            known.add(symbol)
            found.add(symbol)
    pairs = [(expression(a), expression(b)) for pair in paired for a, b in (pair, pair[::-1])]
    learning = True
    while learning:
        # what was learnt of one tensor may tell of another
        learning = False
        counted = {c.xreplace(same) for c in (*requests, *tokens) if c.free_symbols}
        for symbol, other in pairs:
            count = other.xreplace(same)
            if is_new(symbol) and count in counted and take(symbol, count):
                learning = True
    return frozenset(found)


def _hints(trace: Trace) -> dict[Any, int]:
    """Sizes of the batch at hand."""
    found: dict[Any, int] = {}
    for tensor in trace.inputs.values():
        for size in tensor.shape:
            hint = _compat.size_hint(size)
            if hint is not None and expression(size).is_Symbol:
                found[expression(size)] = hint
    return found


def _indexed(trace: Trace) -> tuple[list[tuple[_Unit, Any]], list[tuple[Any, Any]]]:
    """Sizes that are indexed by numbers of requests or of tokens, and sizes of paired rows."""
    names: dict[int, _Name] = {}
    for call in trace.calls:
        facts = facts_of(call.op) if call.op is not None else None
        for argument, tensor in call.tensors():
            pad = facts.pads.get(argument) if facts is not None else None
            if pad is not None and pad.fill == "last":
                names[id(tensor)] = ("token", 0)
    numbered: list[tuple[_Unit, Any]] = []
    paired: list[tuple[Any, Any]] = []
    for call in trace.calls:
        facts = facts_of(call.op) if call.op is not None else None
        if facts is not None:
            for result, tensor in zip(facts.results, call.results, strict=False):
                if result.names is not None:
                    names[id(tensor)] = (result.names, 0)
        elif call.op is not None and call.op.namespace == "aten":
            paired += _paired_by(call)
            for source, index in _rows_taken(call):
                of, moved = names.get(id(index), (None, 0))
                if not source.dim():
                    continue
                # the offset of a request is its first token, the next one its last and one more
                if of in ("request", "token") and moved in (0, -1):
                    numbered.append((of, source.shape[0]))
                elif isinstance(of, sympy.Expr):
                    paired.append((source.shape[0], of))
            name = _follow(call, names)
            if name is not None:
                names.update((id(result), name) for result in call.results)
        for tensor in call.written():
            names.pop(id(tensor), None)
    return numbered, paired


_ALONG = frozenset({"gather", "scatter", "scatter_add", "scatter_reduce"})


def _paired_by(call: Call) -> list[tuple[Any, Any]]:
    """Sizes in the dimensions that a gather or scatter does not work along, and of indices that
    together say where something is put."""
    name = call.name.removesuffix("_")
    if name == "index_put":
        first, *others = [index for index in call.values["indices"] if index is not None]
        return [
            (a, b)
            for other in others
            for a, b in zip(reversed(first.shape), reversed(other.shape), strict=False)
        ]
    if name not in _ALONG:
        return []
    target, index, source = (call.values.get(name) for name in ("self", "index", "src"))
    return [
        (tensor.shape[dim], index.shape[dim])
        for tensor in (target, source)
        if isinstance(tensor, Tensor) and isinstance(index, Tensor)
        for dim in range(min(tensor.dim(), index.dim()))
        if dim != call.values["dim"] % tensor.dim()
    ]


def _rows_taken(call: Call) -> list[tuple[Tensor, Tensor]]:
    """What a call takes rows of, and by which index."""
    values = call.values
    indexing = call.name.removesuffix("_") in ("index", "index_put")
    if indexing and values["indices"] and values["indices"][0] is not None:
        return [(values["self"], values["indices"][0])]
    if call.name == "index_select" and values["dim"] == 0:
        return [(values["self"], values["index"])]
    if call.name == "embedding":
        return [(values["weight"], values["indices"])]
    return []


def _follow(call: Call, names: Mapping[int, _Name]) -> _Name | None:
    """What the results of a call are numbers of, if it passes on what it is given."""
    rule = _PASSED_ON.get(call.name)
    return rule(call, names) if rule is not None else None


_Rule = Callable[[Call, Mapping[int, _Name]], _Name | None]


def _same(call: Call, names: Mapping[int, _Name]) -> _Name | None:
    source, result = call.values["self"], call.results[0]
    whole = not (result.dtype.is_floating_point or result.dtype == torch.bool)
    cast = call.name == "_to_copy" or result.dtype == source.dtype
    return names.get(id(source)) if whole and cast else None


def _clamped(call: Call, names: Mapping[int, _Name]) -> _Name | None:
    bounds = call.values.get("min"), call.values.get("max")
    return _same(call, names) if bounds == (0, None) else None


def _moved(sign: int) -> _Rule:
    def rule(call: Call, names: Mapping[int, _Name]) -> _Name | None:
        known, by = names.get(id(call.values["self"])), call.values["other"]
        if known is None or known[0] != "token" or type(by) is not int:
            return None
        return ("token", known[1] + sign * by) if call.values.get("alpha", 1) == 1 else None

    return rule


def _counting(call: Call, names: Mapping[int, _Name]) -> _Name | None:
    from_0 = (call.values.get("start", 0), call.values.get("step", 1)) == (0, 1)
    return (expression(call.results[0].shape[0]), 0) if from_0 else None


_PASSED_ON: dict[str, _Rule] = {
    "arange": _counting,
    **dict.fromkeys(("slice", "view", "reshape", "_to_copy", "clone", "alias", "detach"), _same),
    **dict.fromkeys(("unsqueeze", "squeeze", "expand", "lift_fresh"), _same),
    **dict.fromkeys(("clamp", "clamp_min"), _clamped),
    "add": _moved(1),
    "sub": _moved(-1),
}
