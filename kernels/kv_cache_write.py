"""Rows of this step into their slots of a paged cache, bit for bit or in fp8.

    kv_cache[slot[t] // block_size, slot[t] % block_size, :]  = kv[t, :]

In a cache of uint8 a row is its latents as e4m3 codes, quantised in groups of 128 as
``_quantise`` says, an fp32 scale for each group, and its rotary part in bf16, rounded to nearest
even, NaN as 0x7FC0. A key of 128 * groups latents and rope_dim rotary dims has
132 * groups + 2 * rope_dim bytes.

Layout:
    kv            [num_tokens, head_dim]               any strides
    slot_mapping  [num_tokens] int64                   any stride; outside the cache: no write
    kv_cache      [num_blocks, block_size, head_dim]   any strides
            or    [num_blocks, block_size, key_bytes]  uint8: codes, scales, rotary part;
                                                       last stride 1, others multiples of 4

Grid of ``kv_cache_write_kernel`` (num_tokens, cdiv(head_dim, BLOCK_D)): a program owns BLOCK_D dims
of a token. Grid of ``kv_cache_write_fp8_kernel`` (num_tokens, cdiv(head_dim, 128)): a program owns
a group of 128 latents and its scale, or up to 128 rotary dims. The slots inside the cache are
distinct, so no two programs write the same place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._quantise import quantise

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


# fmt: off
@triton.jit(do_not_specialize=["num_slots"])
def kv_cache_write_fp8_kernel(
    kv_ptr, slot_mapping_ptr, kv_cache_ptr,
    num_slots,
    kv_token_stride, kv_dim_stride, slot_stride, cache_block_stride, cache_token_stride,
    HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token * slot_stride)
    if (slot < 0) | (slot >= num_slots):
        return
    part = tl.program_id(1)
    dims = part * 128 + tl.arange(0, 128)
    mask = dims < HEAD_DIM
    offsets = dims.to(tl.int64) * kv_dim_stride
    x = tl.load(kv_ptr + token * kv_token_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    block_ptr = kv_cache_ptr + slot // BLOCK_SIZE * cache_block_stride
    slot_ptr = block_ptr + slot % BLOCK_SIZE * cache_token_stride
    if part < GROUPS:
        codes, scale = quantise(x, False)
        tl.store(slot_ptr + dims, codes.to(tl.uint8))
        tl.store((slot_ptr + 128 * GROUPS).to(tl.pointer_type(tl.int32)) + part, scale)
    else:
        rope_ptr = (slot_ptr + 132 * GROUPS).to(tl.pointer_type(tl.int16))
        tl.store(rope_ptr + (dims - 128 * GROUPS), _bfloat16(x).to(tl.int16), mask=mask)


@triton.jit
def _bfloat16(x):
    """The bf16 bits of each number, rounded to nearest even, in int32."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    # 16 mantissa bits go: add half of the last one kept, less one where that one is even. A carry
    # runs on into the exponent, from the largest number to infinity.
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def launch(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    num_tokens, head_dim = kv.shape
    num_blocks, block_size, row_size = kv_cache.shape
    if kv.numel() == 0 or kv_cache.numel() == 0:
        return
    if kv_cache.dtype == torch.uint8:
        kv_cache_write_fp8_kernel[(num_tokens, triton.cdiv(head_dim, 128))](
            kv, slot_mapping, kv_cache,
            num_blocks * block_size,
            *kv.stride(), slot_mapping.stride(0), *kv_cache.stride()[:2],
            HEAD_DIM=head_dim,
            # a group takes 132 bytes, and would take 256 in bf16
            GROUPS=(head_dim * 2 - row_size) // 124,
            BLOCK_SIZE=block_size,
            # a lane for each four dims: default
            num_warps=1,
        )  # fmt: skip
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
