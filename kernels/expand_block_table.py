"""A block-table row per query token.

    out[i, c]  = block_table[row_requests[i], c], or -1 where the request is not in the table

Layout:
    block_table   [num_reqs, max_blocks] int32    any strides
    row_requests  [num_tokens] int32              any stride
    out           [num_tokens, max_blocks] int32  contiguous

Grid (num_tokens, cdiv(max_blocks, BLOCK)): a program owns BLOCK columns of a row.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # default


# fmt: off
@triton.jit(do_not_specialize=["num_reqs"])
def expand_block_table_kernel(
    block_table_ptr, row_requests_ptr, out_ptr,
    num_reqs, max_blocks,
    table_request_stride, table_stride, row_requests_stride,
    BLOCK: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < max_blocks
    request = tl.load(row_requests_ptr + token * row_requests_stride)
    known = tl.where((request >= 0) & (request < num_reqs), mask, False)
    table_row = block_table_ptr + request.to(tl.int64) * table_request_stride
    blocks = tl.load(table_row + columns.to(tl.int64) * table_stride, mask=known, other=-1)
    tl.store(out_ptr + token * max_blocks + columns, blocks, mask=mask)


def launch(block_table: Tensor, row_requests: Tensor) -> Tensor:
    num_tokens = row_requests.shape[0]
    num_reqs, max_blocks = block_table.shape
    out = block_table.new_empty(num_tokens, max_blocks)
    if out.numel() == 0:
        return out
    expand_block_table_kernel[(num_tokens, triton.cdiv(max_blocks, BLOCK))](
        block_table, row_requests, out,
        num_reqs, max_blocks,
        *block_table.stride(), row_requests.stride(0),
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out
