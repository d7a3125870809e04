"""A block-table row per query token, for kernels that know single-token requests only."""

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_shape
from ._register import register
from ._rows import rows_of


def expand_block_table(block_table: Tensor, row_requests: Tensor) -> Tensor:
    """Copy each request's block-table row to each of its tokens.

    Args:
        block_table: int32 [num_reqs, max_blocks], physical block of each logical block; entries
            are copied as they are, used or not
        row_requests: int32 [num_tokens], request of each token (``flatten_decode``)

    Returns:
        int32 [num_tokens, max_blocks]; all -1 where the request is not in ``0 .. num_reqs - 1``

    Raises:
        TypeError: an argument is not int32
        ValueError: shapes or devices do not match
    """
    return _op(block_table, row_requests)


def _check(block_table: Tensor, row_requests: Tensor) -> None:
    check_dtype("block_table", block_table, torch.int32)
    check_dtype("row_requests", row_requests, torch.int32)
    check_shape("block_table", block_table, num_reqs=None, max_blocks=None)
    check_shape("row_requests", row_requests, num_tokens=None)
    check_device("block_table", block_table.device, row_requests=row_requests)


def _reference(block_table: Tensor, row_requests: Tensor) -> Tensor:
    num_reqs, max_blocks = block_table.shape
    if num_reqs == 0:
        return block_table.new_full((row_requests.shape[0], max_blocks), -1)
    valid = (row_requests >= 0) & (row_requests < num_reqs)
    rows = rows_of(block_table, torch.where(valid, row_requests, -1))
    return rows.masked_fill_(~valid.unsqueeze(1), -1)


def _fake(block_table: Tensor, row_requests: Tensor) -> Tensor:
    return block_table.new_empty(row_requests.shape[0], block_table.shape[1])


_op = register(
    "expand_block_table(Tensor block_table, Tensor row_requests) -> Tensor",
    check=_check,
    reference=_reference,
    fake=_fake,
    results=["row_block_table"],
)
