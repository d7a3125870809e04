"""What a batch is padded to, and whether padding can stand behind it."""

import bisect
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .input_plan import Variant
from .inputs import Batch
from .options import Options


class Shape(NamedTuple):
    """What a batch is padded to, and the code that serves it; exact is symbolic, and not kept."""

    requests: int
    tokens: int
    code: Literal["symbolic", "static", "exact"] = "symbolic"


def symbolic_shape(requests: int, tokens: int) -> Shape:
    """Two at least: the tracer takes for granted that a symbolic size is neither zero nor one."""
    return Shape(max(requests, 2), max(tokens, 2))


def shape_of(size: int, variant: Variant, options: Options) -> Shape:
    """What batches of a capture size are padded to."""
    next_n = options.next_n
    if size in options.specialize:
        return Shape(size, size * next_n, "static")
    size = variant.symbolic_size(size, next_n)
    return symbolic_shape(size, size * next_n)


def size_of(batch: Batch, sizes: Sequence[int], next_n: int) -> int | None:
    """The capture size that holds the batch; ``None`` above the largest."""
    needed = max(batch.requests, -(-batch.tokens // next_n))
    index = bisect.bisect_left(sizes, needed)
    return sizes[index] if index < len(sizes) else None


def is_of(batch: Batch, shape: Shape) -> bool:
    """A batch fills a shape: there is no padding."""
    return (batch.requests, batch.tokens) == (shape.requests, shape.tokens)


def fits(batch: Batch, variant: Variant, next_n: int) -> bool:
    """Padding can stand behind the tokens of a batch: they are whole groups, if they must be.

    Of a batch that they are not, the step itself has to say what comes of it.
    """
    counts_tokens = any(batch.specs[name].per == "token" for name in batch.batched)
    if variant.uniform and counts_tokens and batch.tokens != batch.requests * next_n:
        return False
    if not variant.limits.allow(batch.requests, batch.tokens, variant.tables):
        return False
    return not counts_tokens or batch.tokens % variant.multiple == 0


def fits_exactly(batch: Batch, variant: Variant) -> bool:
    """Symbolic code serves a batch without padding: it has more than one of what is counted."""
    if variant.uniform or variant.multiple > 1:
        return batch.requests > 1 and batch.tokens >= 2 * variant.multiple
    return variant.limits.allow_padded(max(batch.requests, 2), max(batch.tokens, 2), variant.tables)
