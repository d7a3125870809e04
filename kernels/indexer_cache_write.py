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

    # Magnitudes order as their bits do, infinities and NaN above all numbers.
    magnitude = k.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, axis=0)
    finite = largest < 0x7F800000
    amax = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.maximum(amax, 1e-4), 448.0)
    if POWER_OF_TWO_SCALE:
        # Add all mantissa bits, then clear them: exact, and powers of two stay as they are.
        bits = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    codes = tl.where(finite, _e4m3(tl.div_rn(k, scale)), 0x7F)
    scale_bits = tl.where(finite, scale.to(tl.int32, bitcast=True), 0x7FC00000)

    block_ptr = k_cache_ptr + slot // BLOCK_SIZE * cache_block_stride
    offset = slot % BLOCK_SIZE
    tl.store(block_ptr + offset * HEAD_DIM + dims, codes.to(tl.uint8), mask=mask)
    scales_ptr = (block_ptr + BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.int32))
    tl.store(scales_ptr + offset, scale_bits)


@triton.jit
def _e4m3(x):
    """The e4m3 code of each number, clamped to +-448 and rounded to nearest even, in int32."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # 20 mantissa bits go: add half of the last one kept, less one where that one is even. A carry
    # runs on into the exponent, whose bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes are multiples of 2**-9, and so are the numbers around 2**14: the addition
    # rounds.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return sign | tl.where(magnitude < 0.015625, subnormal, normal)


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
