"""What a schema does not say of an op: which arguments grow with the batch, what padding must hold.

The compiler needs both to pad a step. Ops of this package declare them where they are registered;
``declare`` does it for any other op. Arguments that have a name of the batch contract
(``query_start_loc``, ``seq_lens``, ...) are known by that name.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch._ops import OpOverload, OpOverloadPacket


@dataclasses.dataclass(frozen=True)
class Rows:
    """A dimension ``dim`` that has one entry per request or token, and ``extra`` more."""

    unit: Literal["request", "token"]
    extra: int = 0
    dim: int = 0


@dataclasses.dataclass(frozen=True)
class Pad:
    """What an argument may hold in padding.

    Attributes:
        fill: what to choose where there is a choice; "last" repeats the last real entry, so that
            a padding request has no token. Each token may be a request of its own, too
        low, high: the numbers that do no harm
    """

    fill: float | bool | Literal["last"]
    low: float = -math.inf
    high: float = math.inf


@dataclasses.dataclass(frozen=True)
class Result:
    """One result of an op.

    Attributes:
        rows: its dimension that grows, if one is declared
        low: the least number in a real row
        pad: the least and the greatest number in a padding row
        own: the same where each token is a request of its own, padding tokens too: then a padding
            row is of a padding request, and not of none
        names: what its real numbers are numbers of, if of either
    """

    rows: Rows | None = None
    low: float = -math.inf
    pad: tuple[float, float] = (-math.inf, math.inf)
    own: tuple[float, float] = (-math.inf, math.inf)
    names: Literal["request", "token"] | None = None


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of an op.

    Attributes:
        rows: the dimension that grows, by argument; an int argument is such a size itself
        pads: what padding must hold, by argument
        results: one each; empty if nothing is declared
        row_independent: a row of a result depends on the same row of the arguments alone, or on
            rows of the same request as the batch contract has it
        complete: no other argument grows than those in ``rows``
    """

    rows: Mapping[str, Rows]
    pads: Mapping[str, Pad]
    results: tuple[Result, ...]
    row_independent: bool
    complete: bool = False


_WORDS: dict[str, tuple[str, Pad | None]] = {
    "query_start_loc": ("request+1", Pad("last")),
    "seq_lens": ("request", Pad(0, 0, 0)),
    "block_table": ("request", Pad(-1)),
    "slot_mapping": ("token", Pad(-1, high=-1)),
    "row_lens": ("token", Pad(0, high=0)),
    "row_requests": ("token", Pad(-1, high=-1)),
    "topk_indices": ("token", Pad(-1)),
    "state_indices": ("request", Pad(-1, high=-1)),
    "dst_indices": ("request", Pad(-1, high=-1)),
    "has_initial_state": ("request", Pad(True)),
    "num_accepted_tokens": ("request", Pad(1)),
    "num_tokens": ("token", None),
}
"""Arguments by their name in the batch contract: their rows and their padding."""

_RESULTS = {
    # a padding request has no keys
    "row_lens": Result(Rows("token"), low=0, pad=(0, 0), own=(0, 0)),
    # -1 in a real row is a token of no request, which is padding of the caller's own
    "row_requests": Result(Rows("token"), low=0, pad=(-1, -1), own=(0, math.inf), names="request"),
    "row_block_table": Result(Rows("token"), pad=(-1, -1)),
    "topk_indices": Result(Rows("token"), low=-1, pad=(-1, -1), own=(-1, -1)),
    "topk_slots": Result(Rows("token"), low=-1, pad=(-1, -1)),
    "has_initial_state": Result(Rows("request"), low=0, pad=(1, 1), own=(1, 1)),
}
"""Results by their name in the batch contract."""

_facts: dict[str, Facts] = {}


def facts_of(op: OpOverload) -> Facts | None:
    """What was declared of an op."""
    return _facts.get(op.name())


def declare(
    op: OpOverload | OpOverloadPacket | str,
    *,
    pad_values: Mapping[str, float | bool | str] | None = None,
    rows: Mapping[str, str | None] | None = None,
    results: str | Sequence[str | None] | None = (),
    row_independent: bool = False,
    complete: bool = False,
) -> None:
    """Tell the compiler how an op behaves on a padded batch.

    Args:
        op: ``torch.ops.namespace.name``, one overload of it, or ``"namespace::name"``
        pad_values: what padding must hold, by argument: a number; "last", which repeats the last
            real entry, for offsets that never decrease; or "any". An argument that names rows of
            what the op writes must be here
        rows: what an argument has one entry for: "request", "token", with extra entries as in
            "request+1". Dimension 0 is meant; "_,token" is dimension 1. An int argument may be
            such a size. ``None``: the argument does not grow, whatever its name
        results: the same for each result; or its name in the batch contract
        row_independent: every row of a result depends on the same row of the arguments alone, and
            what the op writes it touches only in rows that arguments name
        complete: every argument that has an entry per request or token is in ``rows``, or named as
            below: a call in which another one grows is reported

    Arguments that are named as in the batch contract (``query_start_loc``, ``seq_lens``,
    ``block_table``, ``slot_mapping``, ``row_lens``, ``row_requests``, ``topk_indices``,
    ``state_indices``, ``dst_indices``, ``has_initial_state``, ``num_accepted_tokens``) need not be
    declared. A second call for an op replaces the first.

    Raises:
        ValueError: there is no such op or argument, or a value is none of the above
        TypeError: ``op`` is no op
    """
    pad_values, rows = dict(pad_values or {}), dict(rows or {})
    overloads = _overloads(op)
    known = {argument.name for overload in overloads for argument in overload._schema.arguments}
    for given in ("pad_values", "rows"):
        for name in {"pad_values": pad_values, "rows": rows}[given]:
            if name not in known:
                hint = _nearest(name, known)
                raise ValueError(f"{given} must name arguments of {op}, got {name!r}{hint}")
    for overload in overloads:
        _facts[overload.name()] = _facts_from(
            overload,
            {name: _parse_pad(name, value) for name, value in pad_values.items()},
            {name: _parse_rows(name, value) for name, value in rows.items()},
            [results] if isinstance(results, str | None) else list(results),
            row_independent,
            complete,
        )


def _facts_from(
    op: OpOverload,
    pads: Mapping[str, Pad],
    rows: Mapping[str, Rows | None],
    results: Sequence[str | None],
    row_independent: bool,
    complete: bool,
) -> Facts:
    found_rows: dict[str, Rows] = {}
    found_pads: dict[str, Pad] = {}
    for argument in op._schema.arguments:
        name = argument.name
        word, pad = _WORDS.get(name, (None, None))
        row = rows[name] if name in rows else word and _parse_rows(name, word)
        if row:
            found_rows[name] = row
        pad = pads.get(name, pad)
        if pad is not None and (row or name in pads):
            found_pads[name] = pad
    returned = len(op._schema.returns)
    if results and len(results) != returned:
        raise ValueError(f"results must have an entry for each of {returned}, got {results!r}")
    return Facts(
        found_rows,
        found_pads,
        tuple(_RESULTS.get(r or "") or Result(_parse_rows("results", r)) for r in results),
        row_independent,
        complete and bool(found_rows),
    )


_ROWS = re.compile(r"((?:_,)*)(request|token)(?:\+(\d+))?")


def _parse_rows(name: str, text: str | None) -> Rows | None:
    if text is None:
        return None
    match = _ROWS.fullmatch(text.replace(" ", "")) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f'rows of {name} must be "request" or "token", as in "request+1" or "_,token", '
            f"got {text!r}"
        )
    unit: Any = match[2]
    return Rows(unit, int(match[3] or 0), match[1].count("_"))


def _parse_pad(name: str, value: float | bool | str) -> Pad:
    if value == "last":
        return Pad("last")
    if value == "any":
        return Pad(0)
    if isinstance(value, bool | int | float):
        return Pad(value, value, value)
    raise ValueError(f'pad_values[{name!r}] must be a number, "last" or "any", got {value!r}')


def _overloads(op: OpOverload | OpOverloadPacket | str) -> list[OpOverload]:
    if isinstance(op, OpOverload):
        return [op]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    if not isinstance(op, str):
        raise TypeError(f'op must be torch.ops.namespace.name or "namespace::name", got {op!r}')
    namespace, _, name = op.partition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
    if packet is None or (overload and overload not in packet.overloads()):
        hint = _nearest(op, torch._C._dispatch_get_all_op_names())
        raise ValueError(f"op must be registered, got {op!r}{hint}")
    return [getattr(packet, overload)] if overload else _overloads(packet)


def _nearest(name: str, known: Sequence[str] | set[str]) -> str:
    match = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""
