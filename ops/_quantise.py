"""Vectors as e4m3 codes with one fp32 scale each."""

import torch
from torch import Tensor

# Keeps the scale of an all-zero vector above 0. DeepGEMM and vLLM have this floor for index keys.
_MIN_AMAX = 1e-4
_FP8_MAX = 448.0


def quantise(vectors: Tensor, power_of_two_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [num_vectors, dim], and scales, fp32 [num_vectors, 1], of [num_vectors, dim].

    A vector that holds a NaN or an infinity is NaN throughout: codes 0x7F, scale 0x7FC00000.
    """
    vectors = vectors.float()
    amax = vectors.abs().amax(dim=1, keepdim=True).clamp_min(_MIN_AMAX)
    # Divided by a tensor: on a GPU, dividing by a number multiplies by its reciprocal.
    scales = amax / torch.full_like(amax, _FP8_MAX)
    if power_of_two_scale:
        # Add all mantissa bits, then clear them: exact, and powers of two stay as they are.
        bits = (scales.view(torch.int32) + 0x007FFFFF) & 0x7F800000
        scales = torch.where(scales.isfinite(), bits.view(torch.float32), scales)
    scales = scales.masked_fill(~scales.isfinite(), float("nan"))
    codes = (vectors / scales).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    # The sign of a NaN would depend on the device: one byte for all.
    return codes.view(torch.uint8).masked_fill(scales.isnan(), 0x7F), scales
