"""One row per query token: its request, and how many keys it sees."""

from torch import Tensor

from ._checks import check_lens, check_rule
from ._register import register
from ._rows import token_requests, token_row_lens


def flatten_decode(
    query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Flatten a ragged batch into rows of a single query token, on the device.

    Token ``j`` of request ``r`` sees ``max(0, seq_lens[r] - query_len[r] + j + 1)`` keys: all of
    the past, and this step's tokens up to itself. The clamp matters for padding requests, whose
    ``seq_lens`` of 0 would go negative.

    Args:
        query_start_loc: int32 [num_reqs + 1], first query token of each request
        seq_lens: int32 [num_reqs], keys per request, this step's tokens included; 0 is padding
        num_tokens: tokens in the step; those from ``query_start_loc[-1]`` on are padding

    Returns:
        row_lens: int32 [num_tokens], keys each token sees; 0 for padding
        row_requests: int32 [num_tokens], request each token belongs to; -1 for a padding token.
            A token of a padding request names that request, and sees 0 keys.

    Raises:
        TypeError: a tensor is not int32
        ValueError: shapes or devices do not match, or num_tokens is negative
    """
    return _op(query_start_loc, seq_lens, num_tokens)


def _check(query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int) -> None:
    check_lens(query_start_loc, seq_lens)
    check_rule(num_tokens >= 0, "num_tokens", "be at least 0", num_tokens)


def _reference(query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    row_requests = token_requests(query_start_loc, num_tokens)
    return token_row_lens(query_start_loc, seq_lens, row_requests), row_requests


def _fake(query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    return seq_lens.new_empty(num_tokens), seq_lens.new_empty(num_tokens)


_op = register(
    "flatten_decode(Tensor query_start_loc, Tensor seq_lens, SymInt num_tokens)"
    " -> (Tensor row_lens, Tensor row_requests)",
    check=_check,
    reference=_reference,
    fake=_fake,
    results=["row_lens", "row_requests"],
)
