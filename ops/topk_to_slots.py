"""From positions in a sequence to places in the cache."""

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_rule, check_shape
from ._register import register
from ._rows import rows_of

_INT32_MAX = 2**31 - 1


def topk_to_slots(
    topk_indices: Tensor, block_table: Tensor, row_requests: Tensor, block_size: int
) -> Tensor:
    """Translate the positions that each token selected to cache slots.

    Args:
        topk_indices: int32 [num_tokens, topk], logical key positions; -1 is none, anywhere
        block_table: int32 [num_reqs, max_blocks], physical block of each logical block
        row_requests: int32 [num_tokens], request of each token (``flatten_decode``)
        block_size: tokens per block, at least 1

    Returns:
        int32 [num_tokens, topk], ``block * block_size + offset``; -1 where the index is negative
        or past the table, the block is negative, the token is padding, or the slot does not fit
        in int32 (no cache has such a block)

    Raises:
        TypeError: a tensor is not int32
        ValueError: shapes or devices do not match, or block_size is below 1
    """
    return _op(topk_indices, block_table, row_requests, block_size)


def _check(
    topk_indices: Tensor, block_table: Tensor, row_requests: Tensor, block_size: int
) -> None:
    check_dtype("topk_indices", topk_indices, torch.int32)
    check_dtype("block_table", block_table, torch.int32)
    check_dtype("row_requests", row_requests, torch.int32)
    check_shape("topk_indices", topk_indices, num_tokens=None, topk=None)
    check_shape("block_table", block_table, num_reqs=None, max_blocks=None)
    check_shape("row_requests", row_requests, num_tokens=topk_indices.shape[0])
    check_rule(block_size >= 1, "block_size", "be at least 1", block_size)
    check_device(
        "topk_indices",
        topk_indices.device,
        block_table=block_table,
        row_requests=row_requests,
    )


def _reference(
    topk_indices: Tensor, block_table: Tensor, row_requests: Tensor, block_size: int
) -> Tensor:
    num_reqs, max_blocks = block_table.shape
    if num_reqs == 0 or max_blocks == 0:
        return torch.full_like(topk_indices, -1, memory_format=torch.contiguous_format)
    known = ((row_requests >= 0) & (row_requests < num_reqs)).unsqueeze(1)
    # int64: neither block_size nor a slot has to fit in int32.
    indices = topk_indices.long().contiguous()
    columns = indices.div(block_size, rounding_mode="floor")
    valid = known & (indices >= 0) & (columns < max_blocks)
    rows = rows_of(block_table, torch.where(known.squeeze(1), row_requests, -1))
    blocks = rows.gather(1, torch.where(valid, columns, 0)).long()
    slots = blocks * block_size + indices % block_size
    return torch.where(valid & (blocks >= 0) & (slots <= _INT32_MAX), slots, -1).to(torch.int32)


def _fake(
    topk_indices: Tensor, block_table: Tensor, row_requests: Tensor, block_size: int
) -> Tensor:
    return topk_indices.new_empty(topk_indices.shape)


_op = register(
    "topk_to_slots(Tensor topk_indices, Tensor block_table, Tensor row_requests,"
    " SymInt block_size) -> Tensor",
    check=_check,
    reference=_reference,
    fake=_fake,
    results=["topk_slots"],
)
