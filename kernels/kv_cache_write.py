"""Rows of this step into their slots of a paged cache, bit for bit.

    kv_cache[slot[t] // block_size, slot[t] % block_size, :]  = kv[t, :]

Layout:
    kv            [num_tokens, head_dim]              any strides
    slot_mapping  [num_tokens] int64                  any stride; a slot outside the cache: no write
    kv_cache      [num_blocks, block_size, head_dim]  any strides

Grid (num_tokens, cdiv(head_dim, BLOCK_D)): a program owns BLOCK_D dims of a token. The slots inside
the cache are distinct, so no two programs write the same place.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_D = 1024  # default


# fmt: off
@triton.jit(do_not_specialize=["num_slots"])
def kv_cache_write_kernel(
    kv_ptr, slot_mapping_ptr, kv_cache_ptr,
    num_slots,
    kv_token_stride, kv_dim_stride, slot_stride,
    cache_block_stride, cache_token_stride, cache_dim_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token * slot_stride)
    if (slot < 0) | (slot >= num_slots):
        return
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = dims < HEAD_DIM
    wide = dims.to(tl.int64)
    row = tl.load(kv_ptr + token * kv_token_stride + wide * kv_dim_stride, mask=mask)
    block_ptr = kv_cache_ptr + slot // BLOCK_SIZE * cache_block_stride
    slot_ptr = block_ptr + slot % BLOCK_SIZE * cache_token_stride
    tl.store(slot_ptr + wide * cache_dim_stride, row, mask=mask)


def launch(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    num_tokens, head_dim = kv.shape
    num_blocks, block_size, _ = kv_cache.shape
    if kv.numel() == 0 or kv_cache.numel() == 0:
        return
    block_d = min(BLOCK_D, triton.next_power_of_2(head_dim))
    kv_cache_write_kernel[(num_tokens, triton.cdiv(head_dim, block_d))](
        kv, slot_mapping, kv_cache,
        num_blocks * block_size,
        *kv.stride(), slot_mapping.stride(0),
        *kv_cache.stride(),
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_D=block_d,
        num_warps=4,
    )  # fmt: skip
