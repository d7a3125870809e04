"""Whose padding tokens are, by the offsets of query tokens that an op gets.

Where padding repeats the last real offset, they are of no request. Where each token is a request of
its own, padding tokens are those of padding requests. What an op declares of padding in its results
depends on it, and of other offsets nothing is known.
"""

from collections.abc import Collection
from typing import Any, Literal

import sympy
from torch import Tensor

from ..ops.declare import Facts, Result
from .pad_facts import Fact, any_of
from .roles import Roles, count_of, roots_of
from .rows import Call
from .spans import Span, below_size

Owner = Literal["none", "own"]
"""A padding token is of no request, or of a padding request of its own."""


def owner_of(
    call: Call, facts: Facts, name: str, offsets: Fact, roles: Roles, inputs: Collection[str]
) -> Owner | None:
    """Whose the padding tokens of a call are; None if that is not known.

    Args:
        call, facts: the call, and what is declared of its op
        name, offsets: the argument that holds offsets, and what it may hold
        roles: what grows in the graph
        inputs: those that feed offsets of tokens to an op
    """
    if _one_token_each(call, facts, name, offsets, roles):
        return "own"
    return "none" if _repeats_last(offsets, inputs) else None


def _repeats_last(offsets: Fact, inputs: Collection[str]) -> bool:
    """Padding repeats the last real entry, so that no token is a padding request's.

    Nor may a padding token be a real request's: offsets end with the real tokens, or before.
    """
    if offsets.last is None or offsets.pad != offsets.last or len(offsets.pad.pieces) != 1:
        return False
    piece = offsets.pad.pieces[0]
    known = piece.base is None or piece.base in inputs
    return known and piece.low == piece.high <= 0


def _one_token_each(call: Call, facts: Facts, name: str, offsets: Fact, roles: Roles) -> bool:
    """Offsets count 0, 1, 2, ..., for as many requests as the call has tokens.

    With more tokens than requests, real ones behind the last real request would be those of padding
    requests.
    """
    requests = _requests(call, facts, name, roles)
    if requests is None or facts.rows[name].extra != 1 or not offsets.counts:
        return False
    tokens = [_expanded(root.count, roles) for root in roots_of(call) if root.unit == "token"]
    return all(count == requests for count in tokens)


def declared_result(
    call: Call, facts: Facts, place: int, tensor: Tensor, owner: Owner | None, roles: Roles
) -> Fact:
    """What a result holds by its declaration, with padding tokens of such an owner.

    Args:
        call, facts: the call, and what is declared of its op
        place, tensor: which result
        owner: None where arguments do not hold in padding what is declared of them
        roles: what grows in the graph
    """
    result: Result = facts.results[place]
    anything = any_of(tensor.dtype).real
    real = Span(max(anything.low, result.low), anything.high)
    if owner is None:
        return Fact(real, anything)
    if owner == "none":
        return Fact(real, Span(*result.pad))
    if result.names != "request":
        return Fact(real, Span(*result.own))
    # a padding token names its own request
    counts = [
        count
        for name, pad in facts.pads.items()
        if pad.fill == "last" and (count := _requests(call, facts, name, roles)) is not None
    ]
    return Fact(real, below_size(counts[0]))


def _requests(call: Call, facts: Facts, name: str, roles: Roles) -> sympy.Expr | None:
    """How many requests an argument is for."""
    rows = facts.rows.get(name)
    count = count_of(call.values.get(name), rows) if rows is not None else None
    return None if count is None else _expanded(count, roles)


def _expanded(count: Any, roles: Roles) -> sympy.Expr:
    return sympy.expand(roles.size(count))
