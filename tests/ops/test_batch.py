"""The split and the order of a batch: named examples, then properties over any batch."""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpgraph import ops

# The policies of the split, as arguments of both functions.
policies = st.sampled_from(
    [
        {"short_prefills": "decode"},
        {"short_prefills": "prefill"},
        {"require_uniform": True},
        {"require_uniform": True, "short_prefills": "prefill"},
    ]
)

relaxed = settings(deadline=None)  # a loaded machine is no failure

Row = tuple[int, int, int, bool]  # kind, query_len, seq_len, is_prefilling
Rows = tuple[int, list[Row]]  # threshold, the requests in any order

DECODE, SHORT_EXTEND, SHORT_NEW, LONG, PADDING = range(5)


@st.composite
def requests(
    draw: st.DrawFn,
    threshold: int,
    kinds: Sequence[int] = (DECODE, SHORT_EXTEND, SHORT_NEW, LONG, PADDING),
) -> Row:
    kind = draw(st.sampled_from(kinds))
    short = draw(st.integers(1, threshold))
    past = draw(st.integers(1, 50))
    if kind == DECODE:
        return kind, short, short + past, False
    if kind == SHORT_EXTEND:
        return kind, short, short + past, True
    if kind == SHORT_NEW:
        return kind, short, short, draw(st.booleans())
    if kind == LONG:
        long = threshold + draw(st.integers(1, 20))
        return kind, long, long + draw(st.sampled_from([0, past])), draw(st.booleans())
    return draw(st.sampled_from([(kind, 0, 0, False), (kind, short, 0, False), (kind, 0, 9, True)]))


@st.composite
def batches(draw: st.DrawFn, **options: Any) -> Rows:
    threshold = draw(st.integers(1, 8))
    return threshold, draw(st.lists(requests(threshold, **options), max_size=24))


def columns(rows: list[Row]) -> tuple[list[int], list[int], list[bool]]:
    """query_lens, seq_lens, is_prefilling."""
    return [row[1] for row in rows], [row[2] for row in rows], [row[3] for row in rows]


def order_of(threshold: int, rows: list[Row], **policy: Any) -> ops.BatchOrder:
    query_lens, seq_lens, is_prefilling = columns(rows)
    return ops.reorder(query_lens, seq_lens, threshold, is_prefilling=is_prefilling, **policy)


def split_of(threshold: int, rows: list[Row], **policy: Any) -> ops.BatchSplit:
    query_lens, seq_lens, is_prefilling = columns(rows)
    return ops.split_decodes_and_prefills(
        query_lens, seq_lens, threshold, is_prefilling=is_prefilling, **policy
    )


def padding_last(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row[0] == PADDING)


def test_batch_f7_one_short_prefill_does_not_demote_the_decodes_behind_it() -> None:
    """A one-token prompt among two-token decodes once made prefills of the two behind it."""
    query_lens, seq_lens = [2, 2, 1, 2, 2], [10, 11, 1, 12, 13]
    mixed = ops.split_decodes_and_prefills(query_lens, seq_lens, 2, require_uniform=True)
    assert (mixed.num_decodes, mixed.num_prefills, mixed.num_demoted) == (2, 3, 2)

    order, inverse = ops.reorder(query_lens, seq_lens, 2)
    assert order == [0, 1, 3, 4, 2]
    assert inverse == [0, 1, 4, 2, 3]
    ordered = [query_lens[i] for i in order], [seq_lens[i] for i in order]
    assert ops.split_decodes_and_prefills(*ordered, 2, require_uniform=True) == ops.BatchSplit(
        num_decodes=4,
        num_prefills=1,
        num_padding=0,
        num_decode_tokens=8,
        num_prefill_tokens=1,
        num_padding_tokens=0,
        num_demoted=0,
    )


@pytest.mark.parametrize(
    ("policy", "is_prefilling", "num_decodes"),
    [
        ({}, None, 3),
        ({}, [False, False, True], 3),
        ({"short_prefills": "prefill"}, None, 3),
        ({"short_prefills": "prefill"}, [False, False, True], 2),
        ({"require_uniform": True}, None, 2),
    ],
)
def test_batch_f3_last_chunk_of_one_token_beside_verify_rows(
    policy: dict[str, Any], is_prefilling: list[bool] | None, num_decodes: int
) -> None:
    """A 9-token prompt in chunks of 8 leaves one token, which once broke the count of decodes."""
    split = ops.split_decodes_and_prefills(
        [4, 4, 1], [20, 24, 9], 4, is_prefilling=is_prefilling, **policy
    )
    assert (split.num_decodes, split.num_prefills) == (num_decodes, 3 - num_decodes)
    assert split.num_decode_tokens + split.num_prefill_tokens == 9


@pytest.mark.parametrize("num_reqs", [32, 33, 34])
@pytest.mark.parametrize("require_uniform", [False, True])
def test_batch_e3_sizes_that_are_no_multiple_of_the_capture_size(
    num_reqs: int, require_uniform: bool
) -> None:
    """33 requests of 4 tokens, padded to 34 requests: all 132 tokens are decodes."""
    padding = 34 - num_reqs
    split = ops.split_decodes_and_prefills(
        [4] * 34, [100] * num_reqs + [0] * padding, 4, require_uniform
    )
    assert astuple(split) == (num_reqs, 0, padding, 4 * num_reqs, 0, 4 * padding, 0)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "threshold", "expected"),
    [
        ([1, 1, 1], [10, 20, 30], 1, (3, 0, 3, 0)),
        ([7, 8, 9], [7, 8, 9], 1, (0, 3, 0, 24)),
        ([1, 1, 7, 9], [5, 6, 7, 20], 1, (2, 2, 2, 16)),
        ([2, 1, 4, 3], [9, 9, 9, 9], 4, (4, 0, 10, 0)),
        ([4, 4, 5, 4], [9, 9, 9, 9], 4, (2, 2, 8, 9)),
        ([1], [1], 1, (1, 0, 1, 0)),
        ([], [], 1, (0, 0, 0, 0)),
    ],
    ids=["decodes", "prefills", "mixed", "ragged", "long in front", "one-token prompt", "empty"],
)
def test_batch_split_of_plain_batches(
    query_lens: list[int], seq_lens: list[int], threshold: int, expected: tuple[int, ...]
) -> None:
    split = ops.split_decodes_and_prefills(query_lens, seq_lens, threshold)
    counts = split.num_decodes, split.num_prefills
    assert (*counts, split.num_decode_tokens, split.num_prefill_tokens) == expected


def test_batch_order_of_every_kind() -> None:
    #             long  new  pad  extend decode long-new decode
    query_lens = [9, 3, 0, 2, 4, 12, 1]
    seq_lens = [40, 3, 0, 18, 30, 12, 8]
    is_prefilling = [True, True, False, True, False, True, False]
    order, _ = ops.reorder(query_lens, seq_lens, 4, is_prefilling=is_prefilling)
    assert order == [4, 6, 3, 1, 0, 5, 2]


def test_batch_uniform_length_is_the_most_frequent_of_the_decodes() -> None:
    """A decode without drafts in front must not choose the length, nor must many short prompts."""
    query_lens, seq_lens = [1, 1, 1, 1, 4, 4], [9, 1, 1, 1, 9, 9]
    order, _ = ops.reorder(query_lens, seq_lens, 4, require_uniform=True)
    assert order == [4, 5, 0, 1, 2, 3]
    tie = ops.reorder([1, 4], [9, 9], 4, require_uniform=True)
    assert tie.order == [1, 0]
    only_prompts = ops.reorder([3, 1, 1], [3, 1, 1], 4, require_uniform=True)
    assert only_prompts.order == [1, 2, 0]


def test_batch_takes_lists_tensors_and_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    query_lens, seq_lens, is_prefilling = [4, 1, 2], [9, 9, 2], [False, True, True]
    expected = ops.reorder(query_lens, seq_lens, 4, is_prefilling=is_prefilling)
    for convert in (tuple, torch.tensor, numpy.array):
        args = convert(query_lens), convert(seq_lens)
        order = ops.reorder(*args, 4, is_prefilling=convert(is_prefilling))
        assert order == expected
        assert all(type(i) is int for i in order.order)
        assert type(ops.split_decodes_and_prefills(*args, 4).num_decode_tokens) is int


GOOD: dict[str, Any] = {"query_lens": [2, 1], "seq_lens": [5, 1], "decode_threshold": 2}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"seq_lens": [5]},
            ValueError,
            r"seq_lens must have shape \[num_reqs=2\], got \[1\]",
        ),
        (
            {"is_prefilling": [True]},
            ValueError,
            r"is_prefilling must have shape \[num_reqs=2\], got \[1\]",
        ),
        (
            {"query_lens": [2, -1]},
            ValueError,
            "query_lens must not be negative, got -1 at request 1",
        ),
        (
            {"seq_lens": [-5, 1]},
            ValueError,
            "seq_lens must not be negative, got -5 at request 0",
        ),
        (
            {"seq_lens": [5, 1], "query_lens": [2, 3]},
            ValueError,
            r"seq_lens must count this step's tokens .* seq_len 1 with query_len 3 at request 1",
        ),
        (
            {"decode_threshold": 0},
            ValueError,
            "decode_threshold must be at least 1, got 0",
        ),
        (
            {"decode_threshold": 1.5},
            TypeError,
            "decode_threshold must be an int, got 1.5",
        ),
        (
            {"short_prefills": "extend"},
            ValueError,
            'short_prefills must be "decode" or "prefill", got \'extend\'',
        ),
        (
            {"query_lens": [2, 1.5]},
            TypeError,
            "query_lens must hold ints, got 1.5 at request 1",
        ),
        (
            {"query_lens": torch.tensor([2.0, 1.0])},
            TypeError,
            "query_lens must hold ints, got 2.0 at request 0",
        ),
        (
            {"is_prefilling": [0, 1]},
            TypeError,
            "is_prefilling must hold bools, got 0 at request 0",
        ),
        ({"seq_lens": 7}, TypeError, "seq_lens must be a sequence or a CPU tensor, got 7"),
        (
            {"seq_lens": torch.ones(2, 2, dtype=torch.int32)},
            ValueError,
            r"seq_lens must have shape \[num_reqs\], got \[2, 2\]",
        ),
        # A meta tensor stands in for one on a card: no machine is without it.
        (
            {"query_lens": torch.ones(2, dtype=torch.int32, device="meta")},
            TypeError,
            "query_lens needs CPU values .* got a tensor on meta",
        ),
    ],
)
@pytest.mark.parametrize("function", [ops.split_decodes_and_prefills, ops.reorder])
def test_batch_errors_name_argument_rule_and_what_came(
    function: Callable[..., Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    function(**GOOD)
    with pytest.raises(error, match=message):
        function(**GOOD | change)


def test_batch_split_refuses_padding_in_front() -> None:
    with pytest.raises(
        ValueError, match=r"query_lens must have padding .* request 2 behind padding"
    ):
        ops.split_decodes_and_prefills([1, 0, 1], [4, 0, 4], 1)
    assert ops.reorder([1, 0, 1], [4, 0, 4], 1).order == [0, 2, 1]


@relaxed
@given(batches(), policies)
def test_batch_order_is_a_permutation_with_its_inverse(batch: Rows, policy: dict[str, Any]) -> None:
    threshold, rows = batch
    order, inverse = order_of(threshold, rows, **policy)
    assert sorted(order) == list(range(len(rows)))
    assert [order[new] for new in inverse] == list(range(len(rows)))


@relaxed
@given(batches(), policies)
def test_batch_order_is_stable(batch: Rows, policy: dict[str, Any]) -> None:
    """Requests of one kind and one length keep their order, and an ordered batch stays as it is."""
    threshold, rows = batch
    order, _ = order_of(threshold, rows, **policy)
    for alike in {row[:2] for row in rows}:
        positions = [i for i in order if rows[i][:2] == alike]
        assert positions == sorted(positions)
    again, _ = order_of(threshold, [rows[i] for i in order], **policy)
    assert again == list(range(len(rows)))


@relaxed
@given(batches(), st.sampled_from(["decode", "prefill"]))
def test_batch_order_is_by_kind_and_stable_within_a_kind(batch: Rows, short_prefills: str) -> None:
    threshold, rows = batch
    order, _ = order_of(threshold, rows, short_prefills=short_prefills)
    assert order == sorted(range(len(rows)), key=lambda i: rows[i][0])


@relaxed
@given(batches(), policies)
def test_batch_counts_add_up(batch: Rows, policy: dict[str, Any]) -> None:
    threshold, rows = batch
    rows = padding_last(rows)
    split = split_of(threshold, rows, **policy)
    assert split.num_decodes + split.num_prefills + split.num_padding == len(rows)
    lens = [row[1] for row in rows]
    first_padding = split.num_decodes + split.num_prefills
    assert split.num_decode_tokens == sum(lens[: split.num_decodes])
    assert split.num_prefill_tokens == sum(lens[split.num_decodes : first_padding])
    assert split.num_padding_tokens == sum(lens[first_padding:])
    assert split.num_padding == sum(row[0] == PADDING for row in rows)


@relaxed
@given(batches(), policies)
def test_batch_decodes_are_what_the_policy_says(batch: Rows, policy: dict[str, Any]) -> None:
    """Any order: no slice of decodes holds a request that the policy forbids."""
    threshold, rows = batch
    rows = padding_last(rows)
    split = split_of(threshold, rows, **policy)
    decodes = rows[: split.num_decodes]
    assert all(query_len <= threshold for _, query_len, _, _ in decodes)
    if policy.get("short_prefills") == "prefill":
        assert all(kind == DECODE for kind, *_ in decodes)
    if policy.get("require_uniform"):
        assert len({query_len for _, query_len, _, _ in decodes}) <= 1


@relaxed
@given(batches(), policies)
def test_batch_order_leaves_nothing_demoted(batch: Rows, policy: dict[str, Any]) -> None:
    threshold, rows = batch
    before = split_of(threshold, padding_last(rows), **policy)
    order, _ = order_of(threshold, rows, **policy)
    after = split_of(threshold, [rows[i] for i in order], **policy)
    assert after.num_demoted == 0
    assert after.num_decodes == before.num_decodes + before.num_demoted

    wanted = [row for row in rows if row[0] == DECODE]
    if policy.get("short_prefills") != "prefill":
        wanted = [row for row in rows if row[0] in (DECODE, SHORT_EXTEND, SHORT_NEW)]
    if not policy.get("require_uniform"):
        assert after.num_decodes == len(wanted)


@relaxed
@given(batches(kinds=(DECODE,)), policies, st.data())
def test_batch_short_prefill_never_demotes_a_decode(
    batch: Rows, policy: dict[str, Any], data: st.DataObject
) -> None:
    """The decodes of a batch are decodes still when short prefills join it, anywhere."""
    threshold, decodes = batch
    alone, _ = order_of(threshold, decodes, **policy)
    num_decodes = split_of(threshold, [decodes[i] for i in alone], **policy).num_decodes
    kept = {id(decodes[i]) for i in alone[:num_decodes]}

    mixed = list(decodes)
    joining = requests(threshold, kinds=(SHORT_EXTEND, SHORT_NEW))
    for newcomer in data.draw(st.lists(joining, min_size=1, max_size=6)):
        mixed.insert(data.draw(st.integers(0, len(mixed))), newcomer)

    order, _ = order_of(threshold, mixed, **policy)
    ordered = [mixed[i] for i in order]
    split = split_of(threshold, ordered, **policy)
    assert kept <= {id(row) for row in ordered[: split.num_decodes]}


@relaxed
@given(batches(), policies)
def test_batch_without_is_prefilling_every_short_request_with_a_past_is_a_decode(
    batch: Rows, policy: dict[str, Any]
) -> None:
    threshold, rows = batch
    query_lens, seq_lens, _ = columns(rows)
    told_nothing = ops.reorder(query_lens, seq_lens, threshold, **policy)
    told_no = ops.reorder(
        query_lens, seq_lens, threshold, is_prefilling=[False] * len(rows), **policy
    )
    assert told_nothing == told_no
