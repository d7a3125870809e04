"""Batches as a scheduler sends them, and the caches of a small model."""

import dataclasses
import itertools
import random

import torch
from torch import Tensor

from tests.helpers import nan_pool

NEXT_N = 2
BLOCK_SIZE = 4
PLACES = 7
BLOCKS = 8  # of each place
MAX_SEQ_LEN = BLOCKS * BLOCK_SIZE
DIM, HEADS, HEAD_DIM, STATE_DIM, WIDTH = 8, 2, 4, 4, 3
VOCAB = 11


@dataclasses.dataclass(frozen=True)
class Request:
    """A request in a batch: where it lives, -1 for padding, and its tokens of this step."""

    place: int
    query_len: int
    new: bool = False


def new(place: int, query_len: int) -> Request:
    return Request(place, query_len, new=True)


def old(place: int, query_len: int) -> Request:
    return Request(place, query_len)


def padding(query_len: int) -> Request:
    return Request(-1, query_len)


# requests start, verify drafts, and are replaced; padding of the scheduler's own, of both kinds
SCHEDULES: dict[str, list[list[Request]]] = {
    "ragged": [
        [new(0, 2), new(1, 1), new(2, 2)],
        [old(0, 2), padding(0), old(1, 2), old(2, 1), padding(2)],
        [new(1, 2), old(0, 1)],
        [old(0, 1), new(3, 1), old(1, 2), new(4, 2), old(2, 2), padding(0), new(5, 2)],
        [old(3, 2), new(0, 2), old(1, 1)],
        [old(4, 1)],
    ],
    "several": [
        [new(0, 2), new(1, 1), new(2, 2)],
        [old(0, 2), padding(0), old(1, 2), old(2, 1), padding(2)],
        [new(1, 2), old(0, 1)],
        [old(0, 1), new(3, 1), old(1, 2), new(4, 2), old(2, 2), padding(0), new(5, 2)],
    ],
    "uniform": [
        [new(0, 2), new(1, 2), new(2, 2)],
        [old(0, 2), old(1, 2), old(2, 2), new(3, 2), padding(2)],
        [new(1, 2), old(0, 2)],
        [old(3, 2), new(0, 2), old(1, 2)],
        [old(0, 2)],
    ],
    "single": [
        [new(0, 1), new(1, 1), new(2, 1)],
        [old(0, 1), old(1, 1), old(2, 1), new(3, 1), padding(1)],
        [new(1, 1), old(0, 1)],
        [old(3, 1), new(0, 1), old(1, 1)],
        [old(0, 1)],
    ],
}


class Stream:
    """Requests that live in places of their own; a new one finds what its predecessor left."""

    def __init__(self, dtype: torch.dtype, poisoned: bool) -> None:
        self.dtype = dtype
        self.poisoned = poisoned
        self.seq_lens = [0] * PLACES
        self.accepted = [1] * PLACES

    def batch(self, requests: list[Request]) -> dict[str, Tensor]:
        """The arguments of a step, by name."""
        seq_lens, accepted, table, slots, positions, states, real = [], [], [], [], [], [], []
        for request in requests:
            seq_len = self._advance(request)
            seq_lens.append(seq_len)
            is_padding = request.place < 0
            first = request.place * BLOCKS
            table.append([-1] * BLOCKS if is_padding else list(range(first, first + BLOCKS)))
            state = request.place * NEXT_N
            states.append([-1] * NEXT_N if is_padding else list(range(state, state + NEXT_N)))
            accepted.append(1 if is_padding else self.accepted[request.place])
            for j in range(request.query_len):
                position = max(0, seq_len - request.query_len + j)
                positions.append(position)
                slots.append(-1 if is_padding else first * BLOCK_SIZE + position)
                real.append(not is_padding)
            if not is_padding:
                self.accepted[request.place] = random.randint(1, request.query_len)
        x = torch.randn(len(real), DIM).to(self.dtype)
        row_bias = torch.randn(len(requests), DIM).to(self.dtype)
        if self.poisoned:
            x[[not flag for flag in real]] = float("nan")
            row_bias[[request.place < 0 for request in requests]] = float("nan")
        starts = [0, *itertools.accumulate(request.query_len for request in requests)]
        return {
            "x": x,
            "row_bias": row_bias,
            "tokens": torch.randint(VOCAB, (len(real),)),
            "positions": torch.tensor(positions),
            "query_start_loc": torch.tensor(starts, dtype=torch.int32),
            "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
            "block_table": torch.tensor(table, dtype=torch.int32),
            "slot_mapping": torch.tensor(slots),
            "state_indices": torch.tensor(states, dtype=torch.int32),
            "num_accepted_tokens": torch.tensor(accepted, dtype=torch.int32),
        }

    def _advance(self, request: Request) -> int:
        if request.place < 0:
            return 0
        if request.new:
            self.seq_lens[request.place], self.accepted[request.place] = 0, 1
        self.seq_lens[request.place] += request.query_len
        return self.seq_lens[request.place]


def index_cache() -> Tensor:
    return nan_pool(PLACES * BLOCKS, BLOCK_SIZE * (DIM + 4), dtype=torch.uint8)


def kv_cache(dtype: torch.dtype = torch.float32) -> Tensor:
    return nan_pool(PLACES * BLOCKS, BLOCK_SIZE, DIM, dtype=dtype)


def ssm_pool(*layers: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return nan_pool(*layers, PLACES * NEXT_N, HEADS, HEAD_DIM, STATE_DIM, dtype=dtype)


def conv_pool(*layers: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return nan_pool(*layers, PLACES * NEXT_N, DIM, WIDTH - 1, dtype=dtype)
