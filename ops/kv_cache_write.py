"""Store this step's latent keys in the paged MLA cache, as they are or in fp8."""

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_rule, check_shape, check_writable
from ._fp8_kv_cache import check_fp8_kv_cache, infer_latent_dim
from ._quantise import quantise
from ._register import register


def kv_cache_write_(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    """Store one row per token in ``kv_cache``: as it is, or in fp8 in a cache of uint8.

    What indexing with ``slot_mapping`` cannot do in a step with padding: a slot of -1 would wrap
    to the last row of the cache.

    A cache of uint8 is the one that ``sparse_mla_decode`` reads, FlashMLA's layout: a key is
    ``latent_dim`` bytes of float8_e4m3fn codes, one fp32 scale for each 128 of them, and its rotary
    part in bf16; with 512 + 64 dims, 656 bytes. ``latent_dim`` follows from ``head_dim`` and the
    bytes of a key. For each group of 128 latents::

        amax  = max(max_d |kv[t, d]|, 1e-4)
        scale = amax / 448                             in fp32
        code  = e4m3(clamp(kv[t, d] / scale, ±448))    IEEE division, round to nearest even

    as in ``indexer_cache_write_``: the scale of a group of zeros is 1e-4 / 448, and a group that
    holds a NaN or an infinity is stored as NaN throughout (codes 0x7F, scale 0x7FC00000); other
    groups and tokens are not affected. The rotary part is rounded to nearest even, to an infinity
    past the largest bf16, and a NaN in it is stored as 0x7FC0.

    Args:
        kv: fp32, bf16 or fp16 [num_tokens, head_dim], any strides; for a cache of uint8 the latents
            first, then the rotary part
        slot_mapping: int64 [num_tokens], ``block * block_size + offset`` of each token; a token
            whose slot is outside ``0 .. num_blocks * block_size - 1`` is not stored. Slots
            inside are distinct.
        kv_cache: updated in place. The dtype of ``kv``, [num_blocks, block_size, head_dim], any
            strides; or uint8 [num_blocks, block_size, latent_dim + latent_dim / 128 * 4 +
            (head_dim - latent_dim) * 2], with a latent_dim that is a multiple of 128, last stride
            1, other strides and storage offset multiples of 4 bytes

    Raises:
        TypeError: a dtype is not the one above
        ValueError: shapes, devices, strides or alignment do not fit, no latent_dim gives the bytes
            of a key, or the cache overlaps itself; nothing is written then
    """
    _op(kv, slot_mapping, kv_cache)


def _check(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    check_dtype("kv", kv, torch.float32, torch.bfloat16, torch.float16)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_dtype("kv_cache", kv_cache, kv.dtype, torch.uint8)
    check_shape("kv", kv, num_tokens=None, head_dim=None)
    check_shape("slot_mapping", slot_mapping, num_tokens=kv.shape[0])
    if kv_cache.dtype == torch.uint8:
        check_fp8_kv_cache(kv_cache, kv.shape[1], infer_latent_dim(kv_cache, kv.shape[1]))
        check_rule(
            kv_cache.stride(2) == 1,
            "kv_cache",
            "have a stride of 1 in its last dim with dtype uint8",
            kv_cache.stride(2),
        )
    else:
        check_shape("kv_cache", kv_cache, num_blocks=None, block_size=None, head_dim=kv.shape[1])
    check_rule(kv_cache.shape[1] >= 1, "kv_cache", "have a block_size of at least 1", 0)
    check_writable("kv_cache", kv_cache)
    check_device("kv", kv.device, slot_mapping=slot_mapping, kv_cache=kv_cache)


def _reference(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    num_blocks, block_size, _ = kv_cache.shape
    stored = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    slots, rows = slot_mapping[stored], kv[stored]
    if kv_cache.dtype == torch.uint8:
        rows = _fp8_rows(rows, infer_latent_dim(kv_cache, kv.shape[1]))
    kv_cache[slots // block_size, slots % block_size] = rows


def _fp8_rows(keys: Tensor, latent_dim: int) -> Tensor:
    """Rows of an fp8 cache: uint8 [num_keys, key_bytes]."""
    num_keys = keys.shape[0]
    latents, rope = keys.float().tensor_split([latent_dim], dim=1)
    codes, scales = quantise(latents.reshape(-1, 128))
    # The bits of a NaN would depend on the device: the same for all.
    rope = rope.contiguous()
    bits = rope.bfloat16().view(torch.int16).masked_fill(rope.isnan(), 0x7FC0)
    return torch.cat(
        [
            codes.view(num_keys, latent_dim),
            scales.view(num_keys, latent_dim // 128).view(torch.uint8),
            bits.view(torch.uint8),
        ],
        dim=1,
    )


def _fake(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    return None


_op = register(
    "kv_cache_write_(Tensor kv, Tensor slot_mapping, Tensor(a!) kv_cache) -> ()",
    check=_check,
    reference=_reference,
    fake=_fake,
    rows={"kv": "token"},
)
