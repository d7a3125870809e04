"""The keys that tokens of a request share, listed once, against a plain count of them."""

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph.kernels import _shared_keys
from mtpgraph.kernels._shared_keys import max_groups, share_keys, tokens_of_group

from ..malformed_lens import NUM_TOKENS, STARTS

POSITION_BITS = _shared_keys.POSITION_BITS.value


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The interpreter scans starts one by one."""
    if device == "cpu":
        monkeypatch.setattr(_shared_keys, "_BLOCK_REQUESTS", 32)


def make(
    lens: list[int], topk: int, max_keys: int, *, before: int = 0, after: int = 0, device: str
) -> tuple[Tensor, Tensor]:
    """Indices and starts: of each row fewer than topk, anywhere, half of them those of the row
    before it; also positions that there are not."""
    starts = torch.tensor([before, *lens]).cumsum(0)
    num_tokens = int(starts[-1]) + after
    rows = torch.full((num_tokens, topk), -1)
    for row in range(num_tokens):
        count = random.randint(0, min(topk, max_keys))
        if row % 3 == 2:
            count = min(topk, max_keys)
        positions = torch.randperm(max_keys)[:count]
        if row and row % 2:
            own = rows[row - 1][(rows[row - 1] >= 0) & (rows[row - 1] < max_keys)]
            positions = torch.cat([own[: count // 2], positions]).unique()[:count]
        if row % 4 < 2:
            positions = positions.sort().values
        where = torch.randperm(topk)[: len(positions)]
        rows[row, where if row % 5 == 0 else where.sort().values] = positions
        if row % 7 == 6:
            rows[row, 0] = max_keys + row
    return rows.int().to(device), starts.int().to(device)


def groups_of(starts: Tensor, num_tokens: int, tokens: int) -> list[tuple[int, int, int]]:
    """First token, tokens and request of each group; requests -1 and the last are none."""
    bounds = [0, *starts.tolist(), num_tokens]
    return [
        (first, min(tokens, end - first), request)
        for request, (begin, end) in enumerate(itertools.pairwise(bounds), -1)
        for first in range(begin, end, tokens)
    ]


def assert_lists_each_key_once(
    indices: Tensor, starts: Tensor, max_keys: int, tokens: int, num_splits: int
) -> None:
    num_tokens, topk = indices.shape
    split_size = -(-topk // num_splits)
    results = share_keys(indices, starts, max_keys, tokens, num_splits, split_size)
    entries, parts = (each.cpu() for each in results)
    expected = groups_of(starts.cpu(), num_tokens, tokens)
    assert len(expected) <= max_groups(num_tokens, len(starts) - 1, tokens)
    assert parts[0, 0] == len(expected) * num_splits
    rows = indices.cpu()
    for number, (first, count, request) in enumerate(expected):
        wanted: Counter[tuple[int, int]] = Counter()
        if 0 <= request < len(starts) - 1:
            for token in range(count):
                row = rows[first + token]
                wanted.update((int(at), token) for at in row[(row >= 0) & (row < max_keys)])
        found: Counter[tuple[int, int]] = Counter()
        listed = 0
        for part in range(number * num_splits, (number + 1) * num_splits):
            assert parts[1 + part, :3].tolist() == [first, count, request]
            for entry in entries[part, : int(parts[1 + part, 3])].tolist():
                position, chosen = entry & ((1 << POSITION_BITS) - 1), entry >> POSITION_BITS & 255
                assert chosen
                found.update((position, token) for token in range(8) if chosen >> token & 1)
                listed += 1
        assert found == wanted
        # One entry for each position, and one more for each time that a row has it again.
        again = sum(times - 1 for times in wanted.values())
        assert listed == len({position for position, _ in wanted}) + again


@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_shared_keys_of_batches(tokens: int, num_splits: int, device: str) -> None:
    for lens, topk, max_keys in [
        ([4, 4], 16, 40),
        ([1, 0, 9, 3], 17, 64),
        ([0, 17], 7, 5000),
        ([2, 2, 2], 1, 3),
    ]:
        batch = make(lens, topk, max_keys, before=1, after=5, device=device)
        assert_lists_each_key_once(*batch, max_keys, tokens, num_splits)


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_shared_keys_that_a_row_has_twice(tokens: int, device: str) -> None:
    """Each time has an entry, in whichever part it stands, and the others are shared still."""
    indices, starts = make([5, 3], 20, 30, device=device)
    for row in range(8):
        indices[row, 19] = indices[row, 0] = 7
        indices[row, 10] = 7 if row % 2 else 11
    assert_lists_each_key_once(indices, starts, 30, tokens, 4)


def test_shared_keys_do_not_trust_what_memory_held(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of an earlier batch are where those of this one will be written, or are not."""
    old, starts = make([4, 4], 16, 64, device=device)
    indices, _ = make([4, 4], 16, 64, device=device)
    new_empty = Tensor.new_empty
    held: dict[Any, Tensor] = {}

    def kept(self: Tensor, *size: Any, **options: Any) -> Tensor:
        if options.get("dtype") != torch.int16:
            return new_empty(self, *size, **options)
        return held.setdefault(size, new_empty(self, *size, **options).fill_(3))

    monkeypatch.setattr(Tensor, "new_empty", kept)
    for batch in (old, indices, old):
        assert_lists_each_key_once(batch, starts, 64, 4, 2)
    assert len(held) == 1
    for garbage in (-1, 15, 16):
        next(iter(held.values())).fill_(garbage)
        assert_lists_each_key_once(indices, starts, 64, 4, 2)


def test_shared_keys_read_strided_inputs(device: str) -> None:
    indices, starts = make([4, 3, 5], 24, 100, device=device)
    wide = torch.full((24, 2, 12), -1, dtype=torch.int32, device=device)
    wide[:, 0] = indices.T
    far = torch.zeros(4, 3, dtype=torch.int32, device=device)
    far[:, 1] = starts
    assert_lists_each_key_once(wide[:, 0].T, far[:, 1], 100, 4, 2)


def test_shared_keys_of_many_requests(device: str) -> None:
    """More than one look at the starts takes; most of them without a token."""
    lens = [3 * (request % 300 == 0) for request in range(1100)]
    indices, starts = make(lens, 8, 20, device=device)
    assert_lists_each_key_once(indices, starts, 20, 2, 1)


@pytest.mark.parametrize("starts", STARTS, ids=str)
def test_shared_keys_of_malformed_starts(starts: list[int], device: str) -> None:
    """Each token is in one group, of the last request that begins at or before it."""
    tokens = 4
    num_reqs = len(starts) - 1
    indices, _ = make([NUM_TOKENS], 8, 20, device=device)
    given = torch.tensor(starts, dtype=torch.int32, device=device)
    entries, parts = share_keys(indices, given, 20, tokens, 2, 4)
    num_parts = int(parts[0, 0])
    assert num_parts <= 2 * max_groups(NUM_TOKENS, num_reqs, tokens) == len(entries)
    requests = [
        max((i for i, start in enumerate(starts) if start <= token), default=-1)
        for token in range(NUM_TOKENS)
    ]
    for split in range(2):
        covered = [
            (token, request)
            for first, count, request, _ in parts[1 + split : 1 + num_parts : 2].tolist()
            for token in range(first, first + count)
        ]
        assert covered == list(enumerate(requests))
    for _, _, request, count in parts[1 : 1 + num_parts].tolist():
        assert 0 <= count <= 4 * tokens
        assert count == 0 or 0 <= request < num_reqs


def test_shared_keys_are_for_many_tokens_of_few_heads() -> None:
    def tokens(num_tokens: int, num_heads: int = 16, **others: int) -> int:
        sizes = {"num_reqs": 64, "topk": 2048, "max_keys": 32768, **others}
        return tokens_of_group(num_tokens, num_heads=num_heads, **sizes)

    heads = (1, 8, 9, 16, 17, 32, 33, 128)
    assert [tokens(512, each) for each in heads] == [8, 8, 4, 4, 2, 2, 0, 0]
    # No more than a request has; and of 8 heads 4 tokens where 8 have too many columns.
    assert [tokens(64 * n, 8) for n in (1, 2, 3, 4, 5)] == [0, 2, 4, 4, 8]
    assert tokens(512, 8, topk=4096) == 4
    assert [tokens(each, num_reqs=8) for each in (32, 95, 96)] == [0, 0, 4]
    assert [tokens(256, num_reqs=each) for each in (128, 129, 256)] == [2, 0, 0]
    for name, size in [("num_reqs", 0), ("topk", 0), ("max_keys", 0), ("max_keys", 1 << 25)]:
        assert tokens(256, **{name: size}) == 0
    assert tokens(256, topk=1 << 14) == 0
    assert [tokens(256, max_keys=each) for each in (1 << 18, 1 << 19)] == [4, 0]
