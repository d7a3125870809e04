"""The index-key cache: fp8 codes and their scales, paged, in one uint8 pool.

    k_cache  uint8 [num_blocks, block_size * (head_dim + 4)]
    a block: block_size * head_dim bytes of float8_e4m3fn codes, key after key,
             then block_size fp32 scales (4 bytes each, native order)
    key[i] = codes[i] * scale[i]

DeepGEMM and vLLM keep DeepSeek-V3.2's index keys in this layout.
"""

import torch
from torch import Tensor

from ._checks import check_dtype, check_rule, check_shape


def check_index_cache(k_cache: Tensor, head_dim: int) -> None:
    """``k_cache`` can hold keys of ``head_dim`` and be read in words of 4 bytes."""
    check_dtype("k_cache", k_cache, torch.uint8)
    check_shape("k_cache", k_cache, num_blocks=None, block_bytes=None)
    check_rule(head_dim >= 1, "head_dim", "be at least 1", head_dim)
    num_blocks, block_bytes = k_cache.shape
    block_stride, byte_stride = k_cache.stride()
    check_rule(
        (block_bytes % (head_dim + 4) == 0) & (block_bytes >= head_dim + 4),
        "k_cache",
        f"have a multiple of head_dim + 4 = {head_dim + 4} bytes per block",
        block_bytes,
    )
    check_rule(
        index_block_size(k_cache, head_dim) * head_dim % 4 == 0,
        "k_cache",
        f"have its scales on a multiple of 4 bytes in the block (head_dim {head_dim})",
        f"{block_bytes} bytes per block",
    )
    check_rule(byte_stride == 1, "k_cache", "have a stride of 1 in its last dim", byte_stride)
    check_rule(
        (num_blocks <= 1) | (block_stride % 4 == 0),
        "k_cache",
        "have a block stride that is a multiple of 4 bytes",
        block_stride,
    )
    check_rule(
        k_cache.storage_offset() % 4 == 0,
        "k_cache",
        "have a storage offset that is a multiple of 4 bytes",
        k_cache.storage_offset(),
    )


def index_block_size(k_cache: Tensor, head_dim: int) -> int:
    """Keys per block."""
    return k_cache.shape[1] // (head_dim + 4)


def code_bytes(blocks: Tensor, head_dim: int) -> Tensor:
    """The codes of ``blocks``, a view: uint8 [num_blocks, block_size, head_dim]."""
    block_size = index_block_size(blocks, head_dim)
    return blocks[:, : block_size * head_dim].unflatten(1, (block_size, head_dim))


def code_values(blocks: Tensor, head_dim: int) -> Tensor:
    """The codes of ``blocks`` as numbers: float64 [num_blocks, block_size, head_dim]."""
    codes = code_bytes(blocks, head_dim)
    # A table of 256 values: on a CPU a cast from fp8 takes ten times as long.
    table = torch.arange(256, dtype=torch.uint8, device=blocks.device)
    values = table.view(torch.float8_e4m3fn).double()
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


def scale_bytes(blocks: Tensor, head_dim: int) -> Tensor:
    """The scales of ``blocks``, a view: uint8 [num_blocks, block_size, 4]."""
    block_size = index_block_size(blocks, head_dim)
    return blocks[:, block_size * head_dim :].unflatten(1, (block_size, 4))
