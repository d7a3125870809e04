"""The indexer and its fp8 cache once more, in float64 and plain loops, from their definitions."""

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from .helpers import Batch, nan_pool

NAN_CODE = 0x7F


def e4m3_value(code: int) -> float:
    """The number of an e4m3fn byte: sign, 4 exponent bits of bias 7, 3 mantissa bits, no inf."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e4m3_code(value: float) -> int:
    """The byte nearest to ``value``, ties to the even one, in -448 .. 448."""
    magnitude = abs(value)
    best = min(range(0x7F), key=lambda code: (abs(e4m3_value(code) - magnitude), code & 1))
    return best | (0x80 if math.copysign(1.0, value) < 0 else 0)


def rounding_points(width: int) -> Tensor:
    """Rows of ``width`` latents or dims whose largest is 448, so that their scale is 1: all codes,
    the points between two of them, and the numbers next to those points."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (values[1:] + values[:-1]) / 2
    above = torch.nextafter(halfway, torch.tensor(math.inf))
    below = torch.nextafter(halfway, torch.tensor(0.0))
    points = torch.cat([values, halfway, above, below])
    points = torch.cat([points, -points])
    # the 448 is one of the row
    points = torch.cat([points, points.new_zeros(-len(points) % (width - 1))]).view(-1, width - 1)
    return torch.cat([points, torch.full((len(points), 1), 448.0)], dim=1)


def float32(value: float) -> float:
    """``value`` rounded to fp32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def quantise(key: Sequence[float], power_of_two_scale: bool = False) -> tuple[list[int], float]:
    """The codes and the scale of one key."""
    if not all(map(math.isfinite, key)):
        return [NAN_CODE] * len(key), math.nan
    amax = max(*map(abs, key), float32(1e-4))
    scale = float32(amax / 448)
    if power_of_two_scale:
        scale = 2.0 ** math.ceil(math.log2(scale))
    return [e4m3_code(float32(value / scale)) for value in key], scale


def read_key(k_cache: Tensor, slot: int, head_dim: int) -> tuple[list[int], float]:
    """The codes and the scale that ``k_cache`` holds in ``slot``."""
    block_size = k_cache.shape[1] // (head_dim + 4)
    block = k_cache[slot // block_size].tolist()
    offset = slot % block_size
    codes = block[offset * head_dim : (offset + 1) * head_dim]
    start = block_size * head_dim + 4 * offset
    return codes, struct.unpack("f", bytes(block[start : start + 4]))[0]


def make_index_cache(batch: Batch, head_dim: int) -> tuple[Tensor, list[Tensor]]:
    """A cache with random keys for ``batch``, and those keys in float64 per request.

    Every byte that no key of the batch owns is 0xFF: a NaN code, a NaN scale.
    """
    block_size, device = batch.block_size, batch.seq_lens.device
    k_cache = nan_pool(batch.num_blocks, block_size * (head_dim + 4), dtype=torch.uint8)
    keys = []
    for blocks, seq_len in zip(batch.blocks, batch.seq_lens.tolist(), strict=True):
        codes = torch.randint(0, 255, (seq_len, head_dim), dtype=torch.uint8)
        codes[codes == NAN_CODE] = 0
        scales = torch.rand(seq_len) * 0.01 + 1e-3
        values = torch.tensor([e4m3_value(code) for code in codes.flatten().tolist()])
        keys.append(values.double().view(seq_len, head_dim) * scales.double().unsqueeze(1))
        for position in range(seq_len):
            block, offset = blocks[position // block_size], position % block_size
            k_cache[block, offset * head_dim : (offset + 1) * head_dim] = codes[position]
            start = block_size * head_dim + 4 * offset
            k_cache[block, start : start + 4] = scales[position : position + 1].view(torch.uint8)
    return k_cache.to(device), keys


def logits_oracle(
    q: Tensor, weights: Tensor, keys: list[Tensor], batch: Batch, max_seq_len: int
) -> Tensor:
    """float64 [num_tokens, max_seq_len]."""
    out = torch.full((len(batch.rows), max_seq_len), -math.inf, dtype=torch.float64)
    q, weights = q.double().cpu(), weights.double().cpu()
    for token, (request, row_len) in enumerate(batch.rows):
        for position in range(min(row_len, max_seq_len)):
            score = 0.0
            for head in range(q.shape[1]):
                dot = torch.dot(q[token, head], keys[request][position]).item()
                score += weights[token, head].item() * max(dot, 0.0)
            out[token, position] = score
    return out


def topk_oracle(logits: Tensor, row_lens: Sequence[int], topk: int) -> Tensor:
    """int32 [num_tokens, topk], by Python's own sort."""
    rows = []
    for values, row_len in zip(logits.tolist(), row_lens, strict=True):
        row_len = max(0, min(row_len, len(values)))
        scores = [-math.inf if math.isnan(value) else value for value in values[:row_len]]
        order = sorted(range(row_len), key=lambda position: (-scores[position], position))
        best = sorted(order[:topk])
        rows.append(best + [-1] * (topk - len(best)))
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), topk)
