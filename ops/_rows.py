"""Which request does a token belong to, and how many keys does it see?"""

import itertools

import torch
from torch import Tensor


def row_bounds(query_start_loc: Tensor, num_tokens: int) -> list[tuple[int, int]]:
    """First token of each request and the one after its last, on the host.

    Both lie in ``0 .. num_tokens``, whatever the tensor holds; a request has no token where they
    decrease.
    """
    bounds = [min(max(start, 0), num_tokens) for start in query_start_loc.tolist()]
    return list(itertools.pairwise(bounds))


def token_requests(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """The request of each token, int32 [num_tokens]; -1 from ``query_start_loc[-1]`` on.

    The token lies within the bounds of its request even where ``query_start_loc`` decreases:
    a binary search ends between a start at or before the token and one behind it.
    """
    num_reqs = query_start_loc.shape[0] - 1
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    # The last start at or before the token: requests without a query token are passed over.
    ends = torch.searchsorted(query_start_loc.contiguous(), tokens, right=True, out_int32=True)
    return torch.where(ends <= num_reqs, ends - 1, -1)


def token_row_lens(query_start_loc: Tensor, seq_lens: Tensor, requests: Tensor) -> Tensor:
    """The keys that each token sees, int32 [num_tokens]; 0 where its request is -1."""
    if seq_lens.shape[0] == 0:
        return torch.zeros_like(requests)
    num_tokens = requests.shape[0]
    # seq_len - query_len + j + 1, with j = token - start and query_len = end - start
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=requests.device)
    past = seq_lens.clamp_min(0) - query_start_loc[1:].clamp(0, num_tokens)
    lens = rows_of(past, requests) + tokens + 1
    return torch.where(requests >= 0, lens.clamp_min(0), 0)


def rows_of(table: Tensor, requests: Tensor) -> Tensor:
    """``table[requests]``; an arbitrary row where the request is -1. Needs at least one row."""
    return table.index_select(0, requests.clamp_min(0))
