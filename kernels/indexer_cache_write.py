"""This step's index keys as e4m3 codes with one fp32 scale each, into their slots of a paged cache.

    amax  = max(max_d |k[t, d]|, 1e-4)
    scale = amax / 448                            IEEE division, rounded up to 2**n on request
    code  = e4m3(clamp(k[t, d] / scale, +-448))   IEEE division, round to nearest even

A key that is not finite throughout: codes 0x7F, scale 0x7FC00000.

Layout:
    k             [num_tokens, head_dim]                             any strides
    slot_mapping  [num_tokens] int64                                 any stride; outside: no write
    k_cache       [num_blocks, block_size * (head_dim + 4)] uint8    codes of a block, then scales

Grid (num_tokens,): a program owns a token. The slots inside the cache are distinct, so no two
programs write the same place. All rounding to fp8 is integer arithmetic: the bytes are the same on
every device.
"""

import triton
import triton.language as tl
from torch import Tensor

from ._quantise import quantise


# fmt: off
@triton.jit(do_not_specialize=["num_slots"])
def indexer_cache_write_kernel(
    k_ptr, slot_mapping_ptr, k_cache_ptr,
    num_slots,
    k_token_stride, k_dim_stride, slot_stride, cache_block_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    POWER_OF_TWO_SCALE: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token * slot_stride)
    if (slot < 0) | (slot >= num_slots):
        return
    dims = tl.arange(0, BLOCK_D)
    mask = dims < HEAD_DIM
    offsets = dims.to(tl.int64) * k_dim_stride
    k = tl.load(k_ptr + token * k_token_stride + offsets, mask=mask, other=0.0).to(tl.float32)

    codes, scale = quantise(k, POWER_OF_TWO_SCALE)
    block_ptr = k_cache_ptr + slot // BLOCK_SIZE * cache_block_stride
    offset = slot % BLOCK_SIZE
    tl.store(block_ptr + offset * HEAD_DIM + dims, codes.to(tl.uint8), mask=mask)
    scales_ptr = (block_ptr + BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.int32))
    tl.store(scales_ptr + offset, scale)


def launch(
    k: Tensor, slot_mapping: Tensor, k_cache: Tensor, *, power_of_two_scale: bool = False
) -> None:
    num_tokens, head_dim = k.shape
    block_size = k_cache.shape[1] // (head_dim + 4)
    if num_tokens == 0 or k_cache.shape[0] == 0:
        return
    block_d = triton.next_power_of_2(head_dim)
    indexer_cache_write_kernel[(num_tokens,)](
        k, slot_mapping, k_cache,
        k_cache.shape[0] * block_size,
        *k.stride(), slot_mapping.stride(0), k_cache.stride(0),
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_D=block_d,
        POWER_OF_TWO_SCALE=power_of_two_scale,
        # a lane for each four dims: default
        num_warps=max(1, min(4, block_d // 128)),
    )  # fmt: skip
