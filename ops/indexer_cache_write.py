"""Quantise this step's index keys to fp8 and store them in the paged cache."""

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_rule, check_shape, check_writable
from ._index_cache import check_index_cache, code_bytes, index_block_size, scale_bytes
from ._quantise import quantise
from ._register import register


def indexer_cache_write_(
    k: Tensor, slot_mapping: Tensor, k_cache: Tensor, *, power_of_two_scale: bool = False
) -> None:
    """Store one key per token in ``k_cache``, as e4m3 codes with one fp32 scale.

    ::

        amax  = max(max_d |k[t, d]|, 1e-4)
        scale = amax / 448                            in fp32
        code  = e4m3(clamp(k[t, d] / scale, ±448))    IEEE division, round to nearest even

    A key that holds a NaN or an infinity is stored as NaN throughout (codes 0x7F, scale
    0x7FC00000), so it can never pass for a number; the keys of other tokens are not affected.
    The maths is that of DeepSeek-V3.2's lightning indexer, the layout that of DeepGEMM and vLLM.

    Args:
        k: fp32, bf16 or fp16 [num_tokens, head_dim], any strides
        slot_mapping: int64 [num_tokens], ``block * block_size + offset`` of each token; a token
            whose slot is outside ``0 .. num_blocks * block_size - 1`` is not stored. Slots
            inside are distinct.
        k_cache: uint8 [num_blocks, block_size * (head_dim + 4)], updated in place. A block holds
            ``block_size * head_dim`` bytes of codes, then ``block_size`` fp32 scales. Last stride
            1; block stride and storage offset are multiples of 4 bytes.
        power_of_two_scale: round the scale up to a power of two

    Raises:
        TypeError: a dtype is not the one above
        ValueError: shapes, devices, strides or alignment do not fit; nothing is written then
    """
    _op(k, slot_mapping, k_cache, power_of_two_scale=power_of_two_scale)


def _check(
    k: Tensor, slot_mapping: Tensor, k_cache: Tensor, *, power_of_two_scale: bool = False
) -> None:
    check_dtype("k", k, torch.float32, torch.bfloat16, torch.float16)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_shape("k", k, num_tokens=None, head_dim=None)
    check_shape("slot_mapping", slot_mapping, num_tokens=k.shape[0])
    check_rule(k.shape[1] >= 1, "k", "have a head_dim of at least 1", list(k.shape))
    check_index_cache(k_cache, k.shape[1])
    check_writable("k_cache", k_cache)
    check_device("k", k.device, slot_mapping=slot_mapping, k_cache=k_cache)


def _reference(
    k: Tensor, slot_mapping: Tensor, k_cache: Tensor, *, power_of_two_scale: bool = False
) -> None:
    head_dim = k.shape[1]
    block_size = index_block_size(k_cache, head_dim)
    stored = (slot_mapping >= 0) & (slot_mapping < k_cache.shape[0] * block_size)
    codes, scales = quantise(k[stored], power_of_two_scale)
    slots = slot_mapping[stored]
    blocks, offsets = slots // block_size, slots % block_size
    code_bytes(k_cache, head_dim)[blocks, offsets] = codes
    scale_bytes(k_cache, head_dim)[blocks, offsets] = scales.view(torch.uint8)


def _fake(
    k: Tensor, slot_mapping: Tensor, k_cache: Tensor, *, power_of_two_scale: bool = False
) -> None:
    return None


_op = register(
    "indexer_cache_write_(Tensor k, Tensor slot_mapping, Tensor(a!) k_cache, *,"
    " bool power_of_two_scale=False) -> ()",
    check=_check,
    reference=_reference,
    fake=_fake,
    rows={"k": "token"},
)
