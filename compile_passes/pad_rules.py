"""How integers and flags follow from one op to the next: the table that ``PadFlow`` goes by."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor

from .pad_facts import Fact, any_of, is_tracked, narrow_to, scalar
from .roles import Roles
from .row_rules import base_name
from .rows import Call, is_symbolic
from .spans import BINARY, UNARY, Span, below_size


class Facts(Protocol):
    """What is known so far."""

    roles: Roles

    def fact(self, value: Any) -> Fact:
        """What a tensor or number may hold."""
        ...

    def spread(self, value: Any, result: Tensor) -> Fact:
        """The fact of an operand where it is broadcast to a result."""
        ...

    def carry(self, source: Tensor, result: Tensor, same_place: bool = False) -> Fact:
        """The fact of a result that holds entries of a source, each in the rows it was in."""
        ...


_Rule = Callable[[Facts, Call, int, Tensor], Fact | None]


def flow_through(flow: Facts, call: Call, place: int, result: Tensor) -> Fact:
    """What one result of a call holds, by what its arguments do."""
    name = _BINARY_NAMES.get((base_name(call), call.values.get("rounding_mode")), "")
    name = name if "other" in call.values and name else base_name(call)
    inputs = frozenset[str]().union(*(flow.fact(t).inputs for _, t in call.tensors()))
    rule = _RULES.get(name)
    if call.op is None or call.op.namespace != "aten":
        return any_of(result.dtype, inputs)
    fact = None
    if name in BINARY:
        fact = _binary(flow, name, call, result)
    elif rule is not None:
        fact = rule(flow, call, place, result)
    if fact is None:
        return any_of(result.dtype, inputs)
    return dataclasses.replace(fact, inputs=fact.inputs | inputs)


def _binary(flow: Facts, name: str, call: Call, result: Tensor) -> Fact | None:
    values = call.values
    second = values.get("other", values.get("max" if name == "clamp_max" else "min"))
    for operand in (values["self"], second):
        if isinstance(operand, Tensor) and not is_tracked(operand):
            return None
        if isinstance(operand, float) and not operand.is_integer():
            return None
    if values.get("alpha", 1) != 1:
        return None
    a, b = (flow.spread(x, result) for x in (values["self"], second))
    function = BINARY[name]
    last = None if a.last is None or b.last is None else function(a.last, b.last)
    real, pad = function(a.real, b.real), function(a.pad, b.pad)
    if result.dtype != torch.bool and torch.iinfo(result.dtype).bits < 32:
        # small numbers wrap
        limits = torch.iinfo(result.dtype)
        if not (real.within(limits.min, limits.max) and pad.within(limits.min, limits.max)):
            return None
    return Fact(real, pad, last)


def _slice(flow: Facts, call: Call, place: int, result: Tensor) -> Fact:
    source = call.values["self"]
    dim = (call.values.get("dim") or 0) % source.dim()
    start, step = call.values.get("start") or 0, call.values.get("step", 1)
    fact = flow.carry(source, result, same_place=True)
    if not flow.roles.grows(source.shape[dim]):
        return fact
    before, after = (flow.roles.size(t.shape[dim]) for t in (source, result))
    dropped = sympy.expand(before - after - start) if not is_symbolic(start) else None
    if step != 1 or dropped is None or not dropped.is_Integer:
        return Fact(fact.real, fact.real.join(fact.pad))
    real, pad, last = fact.real, fact.pad, fact.last
    if dropped > 0:
        # real entries at the end are where padding is now
        pad = pad.join(last if dropped == 1 and last is not None else real)
        last = None
    counts = fact.counts and not is_symbolic(start) and start == 0
    return Fact(real, pad, last, fact.inputs, fact.copy_of, counts)


def _where(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    condition = flow.spread(call.values["condition"], result)
    a, b = (flow.spread(call.values.get(name), result) for name in ("self", "other"))

    def choose(chosen: Span | None, x: Span | None, y: Span | None) -> Span | None:
        if chosen is None or x is None or y is None:
            return None
        return x if chosen.low >= 1 else y if chosen.high <= 0 else x.join(y)

    real, pad = choose(condition.real, a.real, b.real), choose(condition.pad, a.pad, b.pad)
    assert real is not None
    assert pad is not None
    return Fact(real, pad, choose(condition.last, a.last, b.last))


def _clamp(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    if not is_tracked(call.values["self"]):
        return None
    fact = flow.spread(call.values["self"], result)
    for name, function in (("min", BINARY["clamp_min"]), ("max", BINARY["clamp_max"])):
        bound = call.values.get(name)
        if bound is not None:
            if isinstance(bound, Tensor) and not is_tracked(bound):
                return None
            limit = flow.spread(bound, result)
            fact = Fact(function(fact.real, limit.real), function(fact.pad, limit.pad))
    return fact


def _cast(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    source = call.values["self"]
    if not is_tracked(source):
        return None
    fact = flow.fact(source)
    real, pad = (narrow_to(result.dtype, span, source.dtype) for span in (fact.real, fact.pad))
    last = fact.last and narrow_to(result.dtype, fact.last, source.dtype)
    same = (real, pad, last) == (fact.real, fact.pad, fact.last)
    return dataclasses.replace(fact, real=real, pad=pad, last=last) if same else Fact(real, pad)


def _unary(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    source = call.values["self"]
    name = base_name(call)
    if name == "bitwise_not" and source.dtype == torch.bool:
        name = "logical_not"
    function = UNARY.get(name)
    if function is None or not is_tracked(source):
        return None
    fact = flow.fact(source)
    return Fact(function(fact.real), function(fact.pad), fact.last and function(fact.last))


def _view(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    source = call.values["self"]
    if result.dtype != source.dtype:
        return None  # the same bytes, other numbers
    grown = flow.roles.dims(source), flow.roles.dims(result)
    sizes = [[flow.roles.size(t.shape[d]) for d in dims] for t, dims in
             zip((source, result), grown, strict=True)]  # fmt: skip
    fact = flow.carry(source, result, same_place=sizes[0] == sizes[1])
    # along several dimensions, the entries may come in another order
    return fact if result.dim() == 1 else dataclasses.replace(fact, counts=False)


def _same(flow: Facts, call: Call, place: int, result: Tensor) -> Fact:
    return flow.carry(call.values["self"], result, same_place=True)


def _arranged(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    start, step = call.values.get("start", 0), call.values.get("step", 1)
    if not all(isinstance(x, int) for x in (start, step)) or step <= 0:
        return None
    if not flow.roles.dims(result):
        end = call.values["end"]
        span = Span(start, end - 1 if isinstance(end, int) else math.inf)
        return Fact(span, span)
    # what the last real entry holds has no name but this one
    base = f"arange {id(result)}"
    if start < 0:
        return Fact(Span(start), Span(start))
    # small numbers wrap
    counts = (start, step) == (0, 1) and result.dtype in (torch.int32, torch.int64)
    return Fact(Span(start), Span(step, math.inf, base), Span(0, 0, base), counts=counts)


def _filled(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    name = base_name(call).removeprefix("new_").removesuffix("_like")
    values = {"zeros": 0, "ones": 1, "zero": 0}
    value = values.get(name, call.values.get("fill_value", call.values.get("value")))
    value = call.values["s"] if name == "scalar_tensor" else value
    return scalar(value) if not isinstance(value, Tensor) else flow.spread(value, result)


def _copied(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    source = call.values["src"]
    return flow.spread(source, result) if is_tracked(source) else None


def _masked_fill(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    values = [flow.spread(call.values[name], result) for name in ("self", "value")]
    mask = flow.spread(call.values["mask"], result)
    real, pad = (
        new if chosen.low >= 1 else old if chosen.high <= 0 else old.join(new)
        for chosen, old, new in zip(
            (mask.real, mask.pad), *((v.real, v.pad) for v in values), strict=True
        )
    )
    return Fact(real, pad)


def _joined(flow: Facts, call: Call, place: int, result: Tensor) -> Fact:
    facts = [flow.carry(tensor, result) for tensor in call.values["tensors"]]
    fact = facts[0]
    for other in facts[1:]:
        fact = fact.join(other)
    if len(facts) > 1:
        # a real entry of one stands where another pads, where they are put along that dimension
        fact = dataclasses.replace(fact, pad=fact.pad.join(fact.real))
    return fact


def _taken(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    source = call.values.get("self", call.values.get("weight"))
    if not isinstance(source, Tensor) or not is_tracked(source):
        return None
    fact = flow.fact(source)
    # padding may take any row
    return Fact(fact.real, fact.real.join(fact.pad), None, fact.inputs)


def _positions(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    """Indices that an op returns of a dimension it works along."""
    name = base_name(call)
    source = call.values["self"]
    if name not in ("argmax", "argmin") and place == 0:
        return _taken(flow, call, place, result)
    dim = call.values.get("dim", -1)
    if not isinstance(dim, int):
        return Fact(Span(0), Span(0))
    size = source.shape[dim] if source.dim() else 1
    span = Span(0, size - 1) if isinstance(size, int) else below_size(flow.roles.size(size))
    return Fact(span, span)


def _summed(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    source = call.values["self"]
    if not is_tracked(source):
        return None
    fact = _scanned(call, flow.carry(source, result))
    real, pad = (
        Span(0, 0) if span.within(0, 0) else Span(0) if span.low >= 0 else Span()
        for span in (fact.real, fact.pad)
    )
    return Fact(real, pad)


def _scanned(call: Call, fact: Fact) -> Fact:
    """What padding of a scan is computed from: behind the real entries it goes on with theirs."""
    return Fact(fact.real, fact.real.join(fact.pad)) if base_name(call).startswith("cum") else fact


def _multiplied(flow: Facts, call: Call, place: int, result: Tensor) -> Fact | None:
    source = call.values["self"]
    fact = _scanned(call, flow.carry(source, result))
    real, pad = (
        Span(0, 1) if span.within(0, 1) else Span(0) if span.low >= 0 else Span()
        for span in (fact.real, fact.pad)
    )
    return Fact(real, pad) if is_tracked(source) else None


def _found(flow: Facts, call: Call, place: int, result: Tensor) -> Fact:
    return Fact(Span(0), Span(0))


_RESHAPING = ("view", "_unsafe_view", "_reshape_alias", "reshape")
_PASSING_ON = ("unsqueeze", "squeeze", "clone", "alias", "detach", "lift_fresh")
_TURNING = ("expand", "permute", "transpose", "t", "select")
COPIES = frozenset({"slice", *_RESHAPING, *_PASSING_ON, *_TURNING})
"""Results hold what the argument holds, floats too."""

_BINARY_NAMES = {
    ("div", "floor"): "floor_divide",
    ("max", None): "maximum",
    ("min", None): "minimum",
}
_RULES: dict[str, _Rule] = {
    "slice": _slice,
    "where": _where,
    "clamp": _clamp,
    "_to_copy": _cast,
    "masked_fill": _masked_fill,
    "copy": _copied,
    "arange": _arranged,
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("neg", "logical_not", "bitwise_not", "abs"), _unary),
    **dict.fromkeys((*_RESHAPING, *_TURNING), _view),
    **dict.fromkeys((*_PASSING_ON, "lift_fresh_copy"), _same),
    **dict.fromkeys(("split", "split_with_sizes", "unbind", "repeat", "flip"), _taken),
    **dict.fromkeys(("index", "index_select", "gather", "embedding"), _taken),
    **dict.fromkeys(("amax", "amin"), _taken),
    **dict.fromkeys(("topk", "sort", "argmax", "argmin", "max", "min"), _positions),
    **dict.fromkeys(("sum", "cumsum", "count_nonzero"), _summed),
    **dict.fromkeys(("prod", "cumprod"), _multiplied),
    **dict.fromkeys(("zeros", "ones", "full", "scalar_tensor", "fill", "zero"), _filled),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like"), _filled),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), _filled),
    **dict.fromkeys(("searchsorted", "bucketize"), _found),
}
"""How the results of an op follow from its arguments, where they are no plain arithmetic."""
