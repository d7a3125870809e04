"""Which request does a token belong to, and how many keys does it see? Without a host sync."""

import torch
from torch import Tensor


def token_requests(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """The request of each token, int32 [num_tokens]; -1 from ``query_start_loc[-1]`` on."""
    num_reqs = query_start_loc.shape[0] - 1
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    # The last start at or before the token: requests without a query token are passed over.
    ends = torch.searchsorted(query_start_loc.contiguous(), tokens, right=True, out_int32=True)
    return torch.where(ends <= num_reqs, ends - 1, -1)


def token_row_lens(query_start_loc: Tensor, seq_lens: Tensor, requests: Tensor) -> Tensor:
    """The keys that each token sees, int32 [num_tokens]; 0 where its request is -1."""
    if seq_lens.shape[0] == 0:
        return torch.zeros_like(requests)
    # seq_len - query_len + j + 1, with j = token - start and query_len = end - start
    tokens = torch.arange(requests.shape[0], dtype=torch.int32, device=requests.device)
    lens = rows_of(seq_lens - query_start_loc[1:], requests) + tokens + 1
    return torch.where(requests >= 0, lens.clamp_min(0), 0)


def rows_of(table: Tensor, requests: Tensor) -> Tensor:
    """``table[requests]``; an arbitrary row where the request is -1. Needs at least one row."""
    return table.index_select(0, requests.clamp_min(0))
