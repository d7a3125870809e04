"""The fp8 cache of latent keys: codes, scales and rotary part of a key side by side.

    kv_cache  uint8 [num_blocks, block_size, key_bytes]
    a key:    latent_dim bytes of float8_e4m3fn codes,
              an fp32 scale for each 128 of them (4 bytes each, native order),
              its head_dim - latent_dim rotary dims in bf16
    latents[i] = codes[i] * scales[i // 128]

FlashMLA and vLLM keep keys of 512 + 64 dims in this layout, in 656 bytes.
"""

from torch import Tensor

from ._checks import check_rule, check_shape


def check_fp8_kv_cache(kv_cache: Tensor, head_dim: int, latent_dim: int) -> None:
    """``kv_cache`` holds keys of these dims and can be accessed in words of 4 bytes."""
    check_rule(
        latent_dim % 128 == 0,
        "latent_dim",
        "be a multiple of 128 with a kv_cache of uint8, whose scales are for 128 latents each",
        latent_dim,
    )
    key_bytes = latent_dim + latent_dim // 128 * 4 + (head_dim - latent_dim) * 2
    check_shape("kv_cache", kv_cache, num_blocks=None, block_size=None, key_bytes=key_bytes)
    for axis, name in enumerate(["block", "token"]):
        check_rule(
            (kv_cache.shape[axis] <= 1) | (kv_cache.stride(axis) % 4 == 0),
            "kv_cache",
            f"have a {name} stride that is a multiple of 4 bytes",
            kv_cache.stride(axis),
        )
    check_rule(
        kv_cache.storage_offset() % 4 == 0,
        "kv_cache",
        "have a storage offset that is a multiple of 4 bytes",
        kv_cache.storage_offset(),
    )


def infer_latent_dim(kv_cache: Tensor, head_dim: int) -> int:
    """The one ``latent_dim`` for which ``kv_cache`` holds keys of ``head_dim``."""
    check_shape("kv_cache", kv_cache, num_blocks=None, block_size=None, key_bytes=None)
    # 128 latents take 128 + 4 bytes, and would take 256 in bf16.
    saved = head_dim * 2 - kv_cache.shape[2]
    latent_dim = saved // 124 * 128
    check_rule(
        (saved % 124 == 0) & (latent_dim >= 128) & (latent_dim <= head_dim),
        "kv_cache",
        "have keys of latent_dim + latent_dim / 128 * 4 + (head_dim - latent_dim) * 2 bytes with "
        f"dtype uint8, for a latent_dim that is a multiple of 128 in 128 .. head_dim ({head_dim})",
        f"{kv_cache.shape[2]} bytes",
    )
    return latent_dim
