"""Shapes of ``mtpgraph bench indexer``, and the least that each must move and compute.

Bytes count every input read once and every output written once, whatever a kernel does. A floor is
the larger of two times, bytes over the rate of a copy and operations over the rate of a matrix
product, both as measured on the card: the time of no launch is in it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

TOPK = 2048
BLOCK_SIZE = 64
# A key of the index cache is a byte a dim and an fp32 scale; a query head is the same and a weight.
KEY_EXTRA = 4


@dataclass(frozen=True)
class Ceilings:
    """What the card was measured to do, per second; a copy counts bytes read and written."""

    copy_bytes: float
    fp8_flops: float
    bf16_flops: float


@dataclass(frozen=True)
class Logits:
    """Requests of one context length; ``pattern`` of query lengths is repeated over them. Longer
    ones have ``columns`` in the logits and the block table, as where a graph is captured for them.
    """

    num_reqs: int
    context: int
    pattern: tuple[int, ...]
    num_heads: int = 64
    head_dim: int = 128
    columns: int = 0

    what = "logits"

    @property
    def name(self) -> str:
        return f"{self.num_reqs}x{_short(self.context)}-n{_lens(self.pattern)}{_of(self.columns)}"

    @property
    def max_seq_len(self) -> int:
        return self.columns or self.context

    @property
    def query_lens(self) -> list[int]:
        return list(itertools.islice(itertools.cycle(self.pattern), self.num_reqs))

    @property
    def next_n(self) -> int | None:
        """The query length of every request, None where they differ."""
        return self.pattern[0] if len(set(self.pattern)) == 1 else None

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def input_bytes(self) -> int:
        """Keys, queries and weights."""
        rows = self.num_reqs * self.context + self.num_tokens * self.num_heads
        return (self.head_dim + KEY_EXTRA) * rows

    @property
    def bytes(self) -> int:
        return self.input_bytes + 4 * self.num_tokens * self.context

    @property
    def flops(self) -> int:
        # token j of n sees context - n + j + 1 keys
        scores = sum(n * self.context - n * (n - 1) // 2 for n in self.query_lens)
        return 2 * self.head_dim * self.num_heads * scores

    def floor_us(self, ceilings: Ceilings) -> float:
        return _floor_us(self.bytes, self.flops, ceilings.copy_bytes, ceilings.fp8_flops)


@dataclass(frozen=True)
class Select(Logits):
    """Logits and top-k; the logits themselves need not leave the chip."""

    topk: int = TOPK

    what = "select"

    @property
    def bytes(self) -> int:
        return self.input_bytes + 4 * self.num_tokens * self.topk


@dataclass(frozen=True)
class TopK:
    """The ``topk`` largest of each fp32 row, ``width`` keys of as many ``columns`` or more."""

    num_rows: int
    width: int
    topk: int = TOPK
    columns: int = 0

    what = "topk"

    @property
    def name(self) -> str:
        return f"{self.num_rows}x{_short(self.width)}-k{self.topk}{_of(self.columns)}"

    @property
    def num_columns(self) -> int:
        return self.columns or self.width

    @property
    def bytes(self) -> int:
        return 4 * self.num_rows * (self.width + self.topk)

    @property
    def flops(self) -> int:
        return 0

    def floor_us(self, ceilings: Ceilings) -> float:
        return _floor_us(self.bytes, 0, ceilings.copy_bytes, 1)


@dataclass(frozen=True)
class Mla:
    """Latent attention of ``num_rows`` tokens, ``next_n`` of each request, to ``topk`` keys each
    in bf16 or fp8, of which those of a request have ``common`` percent in common, and no other."""

    num_rows: int
    num_heads: int
    topk: int = TOPK
    latent: int = 512
    rope: int = 64
    next_n: int = 1
    common: int = 0
    fp8: bool = False

    what = "mla"

    @property
    def name(self) -> str:
        several = f"-n{self.next_n}-{self.common}%" if self.next_n > 1 else ""
        return f"{self.num_rows}x{self.num_heads}h{several}{'-fp8' if self.fp8 else ''}"

    @property
    def num_reqs(self) -> int:
        return self.num_rows // self.next_n

    @property
    def context(self) -> int:
        """Keys per request: a cache of two million tokens holds all of them."""
        return min(1 << 15, (1 << 21) // self.num_reqs)

    @property
    def common_keys(self) -> int:
        """Keys that all tokens of a request select."""
        return self.topk * self.common // 100 if self.next_n > 1 else 0

    @property
    def keys_of_request(self) -> int:
        """Keys that any token of a request selects."""
        return self.common_keys + self.next_n * (self.topk - self.common_keys)

    @property
    def key_bytes(self) -> int:
        """A key in fp8 is a byte a latent, an fp32 scale for each 128 of them, and bf16 beyond."""
        latents = self.latent + self.latent // 128 * 4 if self.fp8 else 2 * self.latent
        return latents + 2 * self.rope

    @property
    def bytes(self) -> int:
        keys = self.key_bytes * self.keys_of_request
        queries = self.num_heads * (2 * (self.latent + self.rope) + 2 * self.latent + 4)
        return self.num_reqs * keys + self.num_rows * (4 * self.topk + queries)

    @property
    def flops(self) -> int:
        per_key = 2 * (self.latent + self.rope) + 2 * self.latent
        return self.num_rows * self.num_heads * self.topk * per_key

    def floor_us(self, ceilings: Ceilings) -> float:
        return _floor_us(self.bytes, self.flops, ceilings.copy_bytes, ceilings.bf16_flops)


Shape = Logits | Select | TopK | Mla

_BATCHES = ((1, 131072), (8, 32768), (64, 8192), (64, 32768), (256, 4096), (64, 131072))
_QUERIES = ((1,), (2,), (3,), (4,), (8,), (1, 4, 2, 3))
_ROWS = (
    *((1, 8192), (1, 131072), (1, 1 << 20), (4, 131072), (8, 32768), (32, 32768), (64, 8192)),
    *((64, 32768), (128, 32768), (256, 4096), (256, 32768), (256, 131072)),
)
# Of a model of 160K positions.
_COLUMNS = 163840
_SHORT_ROWS = ((8, 32768), (64, 32768), (256, 4096))
SHAPES: dict[str, list[Shape]] = {
    "logits": [
        Logits(*batch, queries)
        for batch in _BATCHES
        for queries in _QUERIES
        if len(queries) <= batch[0]
    ],
    "topk": [
        *(TopK(*rows) for rows in _ROWS),
        TopK(256, 131072, 512),
        *(TopK(*rows, columns=_COLUMNS) for rows in _SHORT_ROWS),
    ],
    "select": [
        *(
            Select(*_BATCHES[i], queries)
            for i in (0, 1, 3, 4)  # one context a batch size
            for queries in _QUERIES
            if len(queries) <= _BATCHES[i][0]
        ),
        *(
            Select(*rows, queries, columns=_COLUMNS)
            for rows in _SHORT_ROWS
            for queries in ((1,), (2,))
        ),
    ],
    "mla": [
        *(
            Mla(rows, heads, fp8=fp8)
            for fp8 in (False, True)
            for rows in (1, 8, 64, 256)
            for heads in (16, 64, 128)
        ),
        *(Mla(rows, 16, next_n=4, common=75) for rows in (64, 128)),
        *(Mla(256, 16, next_n=4, common=common) for common in (0, 50, 75, 90)),
        *(Mla(256, heads, next_n=next_n, common=75) for heads, next_n in ((8, 8), (32, 4))),
        Mla(256, 16, next_n=4, common=75, fp8=True),
    ],
}


def _short(count: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def _of(columns: int) -> str:
    return f"-of-{_short(columns)}" if columns else ""


def _lens(pattern: Sequence[int]) -> str:
    return str(pattern[0]) if len(set(pattern)) == 1 else f"{min(pattern)}-{max(pattern)}"


def _floor_us(num_bytes: int, flops: int, copy_bytes: float, flops_per_s: float) -> float:
    return max(num_bytes / copy_bytes, flops / flops_per_s) * 1e6
