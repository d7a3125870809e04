"""Multi-head latent attention over the keys that the indexer selected."""

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_rule, check_shape, check_starts
from ._fp8_kv_cache import check_fp8_kv_cache
from ._register import register
from ._rows import rows_of, token_requests

# Bytes that the reference spends on the selected keys of one group of tokens.
_CHUNK_BYTES = 1 << 26


def sparse_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    scale: float,
    latent_dim: int = 512,
) -> tuple[Tensor, Tensor]:
    """Attend from each query token to its selected keys.

    ::

        key, value = kv[s], kv[s, :latent_dim]
        lse[t, h]  = log sum_s exp(scale * q[t, h] . key[s])
        out[t, h]  = sum_s exp(scale * q[t, h] . key[s] - lse[t, h]) * value[s]

    This is the absorbed form of DeepSeek-V2's multi-head latent attention: all heads share one
    key per token, its latent part first and its rotary part after. Sums are taken in fp32.

    An index that is negative or past the table is skipped, wherever it stands in the row, and so
    is one whose block lies outside the cache; one that comes twice counts twice.

    A cache of uint8 is one of fp8 keys, FlashMLA's layout: a key is ``latent_dim`` bytes of
    float8_e4m3fn codes, one fp32 scale for each 128 of them, and its rotary part in bf16; with 512
    + 64 dims, 656 bytes. Its latents are ``codes * scale``, and the whole key is rounded to the
    dtype of q.

    Args:
        q: bf16, fp16 or fp32 [num_tokens, num_heads, head_dim]
        kv_cache: the dtype of q, [num_blocks, block_size, head_dim], or uint8 [num_blocks,
            block_size, latent_dim + latent_dim / 128 * 4 + (head_dim - latent_dim) * 2], with a
            latent_dim that is a multiple of 128, and with strides of whole 4 bytes between keys;
            last stride 1
        topk_indices: int32 [num_tokens, topk], logical key positions; -1 is none
        block_table: int32 [num_reqs, max_blocks], physical block of each logical block
        query_start_loc: int32 [num_reqs + 1], first query token of each request
        scale: softmax scale
        latent_dim: width of the value, ``1 .. head_dim``

    Returns:
        out: [num_tokens, num_heads, latent_dim] in the dtype of q
        lse: fp32 [num_tokens, num_heads], natural logarithm
        A token without a valid key has 0 and -inf.

    Raises:
        TypeError: a dtype is not the one above
        ValueError: shapes, devices, strides or alignment do not fit, or latent_dim is out of range
    """
    return _op(q, kv_cache, topk_indices, block_table, query_start_loc, scale, latent_dim)


def _check(
    q: Tensor,
    kv_cache: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    scale: float,
    latent_dim: int = 512,
) -> None:
    check_dtype("q", q, torch.bfloat16, torch.float16, torch.float32)
    check_dtype("kv_cache", kv_cache, q.dtype, torch.uint8)
    check_dtype("topk_indices", topk_indices, torch.int32)
    check_dtype("block_table", block_table, torch.int32)
    check_dtype("query_start_loc", query_start_loc, torch.int32)
    check_shape("q", q, num_tokens=None, num_heads=None, head_dim=None)
    check_rule(
        (latent_dim >= 1) & (latent_dim <= q.shape[2]),
        "latent_dim",
        f"be in 1 .. head_dim ({q.shape[2]})",
        latent_dim,
    )
    if kv_cache.dtype == torch.uint8:
        check_fp8_kv_cache(kv_cache, q.shape[2], latent_dim)
    else:
        check_shape("kv_cache", kv_cache, num_blocks=None, block_size=None, head_dim=q.shape[2])
    check_shape("topk_indices", topk_indices, num_tokens=q.shape[0], topk=None)
    check_shape("block_table", block_table, num_reqs=None, max_blocks=None)
    check_starts(query_start_loc, block_table.shape[0], "block_table")
    check_rule(
        kv_cache.shape[1] >= 1, "kv_cache", "have a block_size of at least 1", list(kv_cache.shape)
    )
    check_rule(
        kv_cache.stride(2) == 1,
        "kv_cache",
        "have a stride of 1 in its last dim",
        kv_cache.stride(2),
    )
    check_device(
        "q",
        q.device,
        kv_cache=kv_cache,
        topk_indices=topk_indices,
        block_table=block_table,
        query_start_loc=query_start_loc,
    )


def _keys(rows: Tensor, dtype: torch.dtype, latent_dim: int) -> Tensor:
    """Rows of a cache as fp32 keys; those of an fp8 cache rounded to ``dtype``."""
    if rows.dtype != torch.uint8:
        return rows.float()
    scales_end = latent_dim + latent_dim // 128 * 4
    codes, scales, rope = rows.tensor_split([latent_dim, scales_end], dim=-1)
    codes = codes.contiguous().view(torch.float8_e4m3fn).float()
    latents = codes.unflatten(-1, (-1, 128)) * scales.contiguous().view(torch.float32).unsqueeze(-1)
    rope = rope.contiguous().view(torch.bfloat16).float()
    return torch.cat([latents.flatten(-2), rope], dim=-1).to(dtype).float()


def _reference(
    q: Tensor,
    kv_cache: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    scale: float,
    latent_dim: int = 512,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_dim = q.shape
    num_reqs, max_blocks = block_table.shape
    num_blocks, block_size, _ = kv_cache.shape
    topk = topk_indices.shape[1]
    out = q.new_zeros(num_tokens, num_heads, latent_dim)
    lse = q.new_full((num_tokens, num_heads), float("-inf"), dtype=torch.float32)
    if min(num_reqs, max_blocks, num_blocks, topk) == 0:
        return out, lse

    requests = token_requests(query_start_loc, num_tokens).unsqueeze(1)
    columns = topk_indices.long().div(block_size, rounding_mode="floor")
    valid = (requests >= 0) & (topk_indices >= 0) & (columns < max_blocks)
    rows = rows_of(block_table, requests.squeeze(1))
    blocks = rows.gather(1, torch.where(valid, columns, 0)).long()
    valid &= (blocks >= 0) & (blocks < num_blocks)
    if q.device.type == "cpu":
        # Reading a value costs nothing here, columns without a key do.
        used = valid.any(dim=0).nonzero()
        topk = int(used[-1]) + 1 if used.numel() else 1
        valid, blocks, topk_indices = valid[:, :topk], blocks[:, :topk], topk_indices[:, :topk]
    blocks = torch.where(valid, blocks, 0)
    offsets = torch.where(valid, topk_indices % block_size, 0)

    step = max(1, _CHUNK_BYTES // (4 * topk * head_dim))
    for first in range(0, num_tokens, step):
        part = slice(first, first + step)
        # An absent key may hold NaN, and 0 * NaN is NaN.
        keys = _keys(kv_cache[blocks[part], offsets[part]], q.dtype, latent_dim)
        keys.masked_fill_(~valid[part].unsqueeze(2), 0)
        scores = torch.bmm(q[part].float(), keys.transpose(1, 2)) * scale
        scores.masked_fill_(~valid[part].unsqueeze(1), float("-inf"))
        lse[part] = scores.logsumexp(dim=2)
        # -inf - (-inf) is NaN: a row without keys subtracts 0.
        total = lse[part].masked_fill(lse[part] == float("-inf"), 0)
        weights = (scores - total.unsqueeze(2)).exp()
        out[part] = torch.bmm(weights, keys[:, :, :latent_dim]).to(q.dtype)
    return out, lse


def _fake(
    q: Tensor,
    kv_cache: Tensor,
    topk_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    scale: float,
    latent_dim: int = 512,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    return (
        q.new_empty(num_tokens, num_heads, latent_dim),
        q.new_empty(num_tokens, num_heads, dtype=torch.float32),
    )


_op = register(
    "sparse_mla_decode(Tensor q, Tensor kv_cache, Tensor topk_indices, Tensor block_table,"
    " Tensor query_start_loc, float scale, SymInt latent_dim=512) -> (Tensor out, Tensor lse)",
    check=_check,
    reference=_reference,
    fake=_fake,
    rows={"q": "token"},
    results=["token", "token"],
)
