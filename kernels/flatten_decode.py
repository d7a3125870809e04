"""The request of each query token, and the keys that it sees.

    request[i]  = (starts at or before i) - 1, or -1 from query_start_loc[-1] on
    row_len[i]  = max(0, seq_lens[request] - query_start_loc[request + 1] + i + 1)

Starts are clamped to 0 .. num_tokens, a negative length counts as 0.

with seq_lens of at least 0 and query_start_loc of at most num_tokens.

Layout:
    query_start_loc          [num_reqs + 1] int32  any stride
    seq_lens                 [num_reqs] int32      any stride
    row_lens, row_requests   [num_tokens] int32    contiguous

Grid (cdiv(num_tokens, BLOCK),): a program owns BLOCK tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import token_requests

BLOCK = 128  # default


# fmt: off
@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def flatten_decode_kernel(
    query_start_loc_ptr, seq_lens_ptr, row_lens_ptr, row_requests_ptr,
    num_reqs, num_tokens,
    query_start_loc_stride, seq_lens_stride,
    BLOCK: tl.constexpr,
):
    # fmt: on
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < num_tokens
    requests = token_requests(query_start_loc_ptr, query_start_loc_stride, num_reqs, tokens)
    known = mask & (requests >= 0)
    row = requests.to(tl.int64)
    end = tl.load(query_start_loc_ptr + (row + 1) * query_start_loc_stride, mask=known, other=0)
    seq_len = tl.load(seq_lens_ptr + row * seq_lens_stride, mask=known, other=0)
    end = tl.minimum(end, num_tokens)
    row_lens = tl.maximum(tl.maximum(seq_len, 0) - end + tokens + 1, 0)
    row_lens = tl.where(known, row_lens, 0)
    tl.store(row_lens_ptr + tokens, row_lens, mask=mask)
    tl.store(row_requests_ptr + tokens, requests, mask=mask)


def launch(query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    row_lens = torch.empty(num_tokens, dtype=torch.int32, device=seq_lens.device)
    row_requests = torch.empty_like(row_lens)
    if num_tokens == 0:
        return row_lens, row_requests
    flatten_decode_kernel[(triton.cdiv(num_tokens, BLOCK),)](
        query_start_loc, seq_lens, row_lens, row_requests,
        seq_lens.shape[0], num_tokens,
        query_start_loc.stride(0), seq_lens.stride(0),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return row_lens, row_requests
