"""Which requests are not new.

    query_len[r]          = query_start_loc[r + 1] - query_start_loc[r]
    has_initial_state[r]  = seq_lens[r] > query_len[r]  or  seq_lens[r] <= 0

Layout:
    query_start_loc    [num_reqs + 1] int32  any stride
    seq_lens           [num_reqs] int32      any stride
    has_initial_state  [num_reqs] bool       contiguous

Grid (cdiv(num_reqs, BLOCK),): a program owns BLOCK requests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # default


# fmt: off
@triton.jit(do_not_specialize=["num_reqs"])
def has_initial_state_kernel(
    query_start_loc_ptr, seq_lens_ptr, has_initial_state_ptr,
    num_reqs,
    query_start_loc_stride, seq_lens_stride,
    BLOCK: tl.constexpr,
):
    # fmt: on
    requests = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = requests < num_reqs
    row = requests.to(tl.int64)
    start_ptr = query_start_loc_ptr + row * query_start_loc_stride
    start = tl.load(start_ptr, mask=mask, other=0)
    end = tl.load(start_ptr + query_start_loc_stride, mask=mask, other=0)
    seq_len = tl.load(seq_lens_ptr + row * seq_lens_stride, mask=mask, other=0)
    old = (seq_len > tl.maximum(end, 0) - tl.maximum(start, 0)) | (seq_len <= 0)
    tl.store(has_initial_state_ptr + requests, old, mask=mask)


def launch(query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    num_reqs = seq_lens.shape[0]
    has_initial_state = torch.empty(num_reqs, dtype=torch.bool, device=seq_lens.device)
    if num_reqs == 0:
        return has_initial_state
    has_initial_state_kernel[(triton.cdiv(num_reqs, BLOCK),)](
        query_start_loc, seq_lens, has_initial_state,
        num_reqs,
        query_start_loc.stride(0), seq_lens.stride(0),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return has_initial_state
