"""Store this step's latent keys in the paged MLA cache."""

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_rule, check_shape, check_writable
from ._register import register


def kv_cache_write_(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    """Store one row per token in ``kv_cache``, as it is.

    What indexing with ``slot_mapping`` cannot do in a step with padding: a slot of -1 would wrap
    to the last row of the cache.

    Args:
        kv: fp32, bf16 or fp16 [num_tokens, head_dim], any strides
        slot_mapping: int64 [num_tokens], ``block * block_size + offset`` of each token; a token
            whose slot is outside ``0 .. num_blocks * block_size - 1`` is not stored. Slots
            inside are distinct.
        kv_cache: [num_blocks, block_size, head_dim] in the dtype of ``kv``, any strides, updated
            in place

    Raises:
        TypeError: a dtype is not the one above
        ValueError: shapes or devices do not fit, or the cache overlaps itself; nothing is written
            then
    """
    _op(kv, slot_mapping, kv_cache)


def _check(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    check_dtype("kv", kv, torch.float32, torch.bfloat16, torch.float16)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_dtype("kv_cache", kv_cache, kv.dtype)
    check_shape("kv", kv, num_tokens=None, head_dim=None)
    check_shape("slot_mapping", slot_mapping, num_tokens=kv.shape[0])
    check_shape("kv_cache", kv_cache, num_blocks=None, block_size=None, head_dim=kv.shape[1])
    check_rule(kv_cache.shape[1] >= 1, "kv_cache", "have a block_size of at least 1", 0)
    check_writable("kv_cache", kv_cache)
    check_device("kv", kv.device, slot_mapping=slot_mapping, kv_cache=kv_cache)


def _reference(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    num_blocks, block_size, _ = kv_cache.shape
    stored = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    slots = slot_mapping[stored]
    kv_cache[slots // block_size, slots % block_size] = kv[stored]


def _fake(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    return None


_op = register(
    "kv_cache_write_(Tensor kv, Tensor slot_mapping, Tensor(a!) kv_cache) -> ()",
    check=_check,
    reference=_reference,
    fake=_fake,
    rows={"kv": "token"},
)
