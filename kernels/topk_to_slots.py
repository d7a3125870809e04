"""From positions in a sequence to slots of the cache.

    block      = block_table[row_requests[t], index // block_size]
    slot[t, k] = block * block_size + index % block_size, with index = topk_indices[t, k]

and -1 where the request, the index or the block is not there, or the slot does not fit in int32.

Layout:
    topk_indices  [num_tokens, topk] int32       any strides
    block_table   [num_reqs, max_blocks] int32   any strides
    row_requests  [num_tokens] int32             any stride
    topk_slots    [num_tokens, topk] int32       contiguous

Grid (num_tokens, cdiv(topk, BLOCK)): a program owns BLOCK columns of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # default


# fmt: off
@triton.jit(do_not_specialize=["num_reqs", "max_blocks"])
def topk_to_slots_kernel(
    topk_indices_ptr, block_table_ptr, row_requests_ptr, topk_slots_ptr,
    num_reqs, max_blocks, topk,
    topk_token_stride, topk_stride, table_request_stride, table_stride, row_requests_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < topk
    request = tl.load(row_requests_ptr + token * row_requests_stride)
    topk_row = topk_indices_ptr + token * topk_token_stride
    index = tl.load(topk_row + columns.to(tl.int64) * topk_stride, mask=mask, other=-1)

    # int64: neither block_size nor a slot has to fit in int32, and a stale entry must not wrap
    # around into a slot that exists.
    index = index.to(tl.int64)
    block_column = index // BLOCK_SIZE
    in_table = tl.where((request >= 0) & (request < num_reqs), True, False)
    known = in_table & (index >= 0) & (block_column < max_blocks)
    table_row = block_table_ptr + request.to(tl.int64) * table_request_stride
    block = tl.load(table_row + block_column * table_stride, mask=known, other=-1)
    slot = block.to(tl.int64) * BLOCK_SIZE + index % BLOCK_SIZE
    slot = tl.where((block >= 0) & (slot <= 0x7FFFFFFF), slot, -1)
    tl.store(topk_slots_ptr + token * topk + columns, slot.to(tl.int32), mask=mask)


def launch(
    topk_indices: Tensor, block_table: Tensor, row_requests: Tensor, block_size: int
) -> Tensor:
    num_tokens, topk = topk_indices.shape
    num_reqs, max_blocks = block_table.shape
    topk_slots = torch.empty(num_tokens, topk, dtype=torch.int32, device=topk_indices.device)
    if topk_slots.numel() == 0:
        return topk_slots
    topk_to_slots_kernel[(num_tokens, triton.cdiv(topk, BLOCK))](
        topk_indices, block_table, row_requests, topk_slots,
        num_reqs, max_blocks, topk,
        *topk_indices.stride(), *block_table.stride(), row_requests.stride(0),
        BLOCK_SIZE=block_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return topk_slots
