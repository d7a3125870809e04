"""Order a batch and split it into decodes and prefills, on the host.

Plain Python over lists or CPU tensors: nothing here touches a device or waits for one. The ops
themselves need neither function, they take any mix of rows in any order. Both serve the code around
them, which chooses between a captured decode step and a prefill kernel and wants each as one slice.
"""

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, SupportsIndex

from torch import Tensor

# In the order that reorder gives them.
_DECODE, _SHORT_EXTEND, _SHORT_NEW, _LONG_PREFILL, _PADDING = range(5)

ShortPrefills = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Sizes of the slices of a batch, in the order in which they lie: decodes, prefills, padding.

    The requests of a batch are ``num_decodes + num_prefills + num_padding``, and its query tokens
    are the sum of the three ``*_tokens``.
    """

    num_decodes: int
    num_prefills: int
    num_padding: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_padding_tokens: int
    num_demoted: int
    """Prefills that would be decodes, had they stood in front; 0 after ``reorder``."""


class BatchOrder(NamedTuple):
    """A permutation of the requests of a batch, and the way back.

    ``order[new]`` is the old position, so ``tensor[order]`` reorders; ``inverse[old]`` is the new
    position, so ``reordered[inverse]`` restores.
    """

    order: list[int]
    inverse: list[int]


def split_decodes_and_prefills(
    query_lens: Iterable[int] | Tensor,
    seq_lens: Iterable[int] | Tensor,
    decode_threshold: int,
    require_uniform: bool = False,
    short_prefills: ShortPrefills = "decode",
    is_prefilling: Iterable[bool] | Tensor | None = None,
) -> BatchSplit:
    """Count the decodes at the front of a batch and the prefills behind them.

    A request is one of five kinds:

    - *padding*: ``seq_len == 0`` or ``query_len == 0``, whatever the other one is
    - *long prefill*: ``query_len > decode_threshold``, with or without a past
    - *short new request*: all of its tokens are in this step (``seq_len == query_len``)
    - *short extend*: it has a past and ``is_prefilling`` says that its prompt is not through yet
    - *decode*: any other short request with a past

    The lengths alone cannot tell the last two apart: a last prompt chunk of 4 tokens looks like 4
    tokens to verify. Without ``is_prefilling`` every short request with a past is a decode.

    Decodes count as decodes, long prefills as prefills; ``short_prefills`` says what short extends
    and short new requests count as. "decode" is the fast choice, and a safe one for recurrent
    layers whose ops take ``has_initial_state``. "prefill" is for layers that cannot start a new
    request in a decode step.

    The decodes are the requests in front of the first prefill. One that stands behind it counts as
    a prefill, which is right but slow, and is reported in ``num_demoted``: call ``reorder`` first,
    with the same arguments, and there are none.

    Args:
        query_lens: [num_reqs], query tokens of each request in this step
        seq_lens: [num_reqs], keys of each request, this step's tokens included; 0 is padding
        decode_threshold: longest query of a decode, usually ``next_n``
        require_uniform: the decodes must share one query length; the other short requests count
            as prefills. It is the most frequent length among the decodes, the longer of two that
            are equally frequent; short prefills have a say only where there is no decode
        short_prefills: what short extends and short new requests count as
        is_prefilling: [num_reqs] bool, the prompt of the request reaches past its last computed
            token; None if not known

    Returns:
        The sizes of the slices. Padding requests must come last and are counted apart.

    Raises:
        TypeError: an argument is no sequence of ints (bools) and no CPU tensor of them
        ValueError: lengths differ, a length is negative, ``query_len > seq_len > 0``, padding in
            front of a request with tokens, ``decode_threshold < 1``, unknown ``short_prefills``
    """
    lens, kinds, may_decode = _classify(
        query_lens, seq_lens, decode_threshold, short_prefills, is_prefilling
    )
    num_reqs = _check_padding_last(kinds)
    if require_uniform:
        may_decode = _uniform(lens, kinds, may_decode)

    num_decodes = next((row for row in range(num_reqs) if not may_decode[row]), num_reqs)
    return BatchSplit(
        num_decodes=num_decodes,
        num_prefills=num_reqs - num_decodes,
        num_padding=len(lens) - num_reqs,
        num_decode_tokens=sum(lens[:num_decodes]),
        num_prefill_tokens=sum(lens[num_decodes:num_reqs]),
        num_padding_tokens=sum(lens[num_reqs:]),
        num_demoted=sum(may_decode[num_decodes:]),
    )


def reorder(
    query_lens: Iterable[int] | Tensor,
    seq_lens: Iterable[int] | Tensor,
    decode_threshold: int,
    require_uniform: bool = False,
    short_prefills: ShortPrefills = "decode",
    is_prefilling: Iterable[bool] | Tensor | None = None,
) -> BatchOrder:
    """Order a batch so that no prefill demotes a decode behind it.

    The order is decodes, short extends, short new requests, long prefills, padding (the kinds are
    those of ``split_decodes_and_prefills``); requests of one kind keep their order. It is the same
    for both choices of ``short_prefills``, so one batch serves layers that differ in theirs.

    With ``require_uniform`` the requests that may be decodes and have the uniform length come
    first, in this order, then the others, in this order.

    Args:
        query_lens: [num_reqs], as for ``split_decodes_and_prefills``, like all arguments
        seq_lens: [num_reqs]
        decode_threshold: longest query of a decode
        require_uniform: the decodes must share one query length
        short_prefills: what short prefills count as; it matters with ``require_uniform`` alone
        is_prefilling: [num_reqs] bool, or None

    Returns:
        The permutation and its inverse, lists of num_reqs ints.

    Raises:
        TypeError, ValueError: as ``split_decodes_and_prefills``, but padding may stand anywhere
    """
    lens, kinds, may_decode = _classify(
        query_lens, seq_lens, decode_threshold, short_prefills, is_prefilling
    )
    # Without require_uniform the kinds alone already put every decode in front.
    first = _uniform(lens, kinds, may_decode) if require_uniform else may_decode

    def place(row: int) -> tuple[bool, bool, int]:
        return kinds[row] == _PADDING, not first[row], kinds[row]

    order = sorted(range(len(lens)), key=place)
    inverse = [0] * len(order)
    for new, old in enumerate(order):
        inverse[old] = new
    return BatchOrder(order, inverse)


def _classify(
    query_lens: Iterable[int] | Tensor,
    seq_lens: Iterable[int] | Tensor,
    decode_threshold: int,
    short_prefills: ShortPrefills,
    is_prefilling: Iterable[bool] | Tensor | None,
) -> tuple[list[int], list[int], list[bool]]:
    """Query length, kind, and whether it may count as a decode, of each request."""
    if type(decode_threshold) is not int:
        raise TypeError(f"decode_threshold must be an int, got {decode_threshold!r}")
    if decode_threshold < 1:
        raise ValueError(f"decode_threshold must be at least 1, got {decode_threshold}")
    if short_prefills not in ("decode", "prefill"):
        raise ValueError(f'short_prefills must be "decode" or "prefill", got {short_prefills!r}')

    lens = _ints("query_lens", query_lens)
    totals = _ints("seq_lens", seq_lens)
    _check_len("seq_lens", totals, len(lens))
    if is_prefilling is None:
        prefilling = [False] * len(lens)
    else:
        prefilling = _bools("is_prefilling", is_prefilling)
        _check_len("is_prefilling", prefilling, len(lens))

    kinds = []
    for row, (query_len, seq_len) in enumerate(zip(lens, totals, strict=True)):
        if query_len > seq_len > 0:
            raise ValueError(
                "seq_lens must count this step's tokens (seq_len >= query_len, or 0 for padding), "
                f"got seq_len {seq_len} with query_len {query_len} at request {row}"
            )
        kinds.append(_kind(query_len, seq_len, decode_threshold, prefilling[row]))

    last = _SHORT_NEW if short_prefills == "decode" else _DECODE
    return lens, kinds, [kind <= last for kind in kinds]


def _kind(query_len: int, seq_len: int, decode_threshold: int, prefilling: bool) -> int:
    if query_len == 0 or seq_len == 0:
        return _PADDING
    if query_len > decode_threshold:
        return _LONG_PREFILL
    if seq_len == query_len:
        return _SHORT_NEW
    return _SHORT_EXTEND if prefilling else _DECODE


def _uniform(lens: list[int], kinds: list[int], may_decode: list[bool]) -> list[bool]:
    """``may_decode`` without the requests that do not have the uniform length."""
    counts = Counter(n for n, kind in zip(lens, kinds, strict=True) if kind == _DECODE)
    if not counts:
        counts = Counter(n for n, may in zip(lens, may_decode, strict=True) if may)
    uniform_len = max(counts, key=lambda n: (counts[n], n), default=0)
    return [may and n == uniform_len for n, may in zip(lens, may_decode, strict=True)]


def _check_padding_last(kinds: list[int]) -> int:
    """The number of requests in front of the padding."""
    num_reqs = kinds.index(_PADDING) if _PADDING in kinds else len(kinds)
    for row in range(num_reqs, len(kinds)):
        if kinds[row] != _PADDING:
            raise ValueError(
                "query_lens must have padding (query_len 0 or seq_len 0) at the end alone, "
                f"got request {row} behind padding request {num_reqs}; reorder the batch first"
            )
    return num_reqs


def _check_len(name: str, values: list[Any], num_reqs: int) -> None:
    if len(values) != num_reqs:
        raise ValueError(f"{name} must have shape [num_reqs={num_reqs}], got [{len(values)}]")


def _ints(name: str, values: Iterable[int] | Tensor) -> list[int]:
    items = _items(name, values)
    for row, item in enumerate(items):
        if not isinstance(item, SupportsIndex) or isinstance(item, bool | Tensor):
            raise TypeError(f"{name} must hold ints, got {item!r} at request {row}")
        items[row] = operator.index(item)
        if items[row] < 0:
            raise ValueError(f"{name} must not be negative, got {item} at request {row}")
    return items


def _bools(name: str, values: Iterable[bool] | Tensor) -> list[bool]:
    items = _items(name, values)
    for row, item in enumerate(items):
        if not isinstance(item, bool):
            raise TypeError(f"{name} must hold bools, got {item!r} at request {row}")
    return items


def _items(name: str, values: Iterable[Any] | Tensor) -> list[Any]:
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise TypeError(
                f"{name} needs CPU values (a sequence or a CPU tensor), got a tensor on "
                f"{values.device}; pass the scheduler's numbers, a copy would wait for the device"
            )
        if values.dim() != 1:
            raise ValueError(f"{name} must have shape [num_reqs], got {list(values.shape)}")
        return values.tolist()
    # An array's own conversion gives Python numbers, iterating over it would not.
    tolist = getattr(values, "tolist", None)
    try:
        return list(tolist() if tolist is not None else values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence or a CPU tensor, got {values!r}") from None
