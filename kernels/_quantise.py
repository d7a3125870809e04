"""Quantising a vector to e4m3 with one scale.

    amax  = max(max_d |x[d]|, 1e-4)
    scale = amax / 448                            IEEE division, rounded up to 2**n on request
    code  = e4m3(clamp(x[d] / scale, +-448))      IEEE division, round to nearest even

A vector that is not finite throughout: codes 0x7F, scale 0x7FC00000. All rounding to fp8 is integer
arithmetic: the bytes are the same on every device.
"""

import triton
import triton.language as tl


@triton.jit
def quantise(x, POWER_OF_TWO_SCALE: tl.constexpr):
    """The codes of the vector ``x`` of fp32, and the bits of its scale, all int32."""
    # Magnitudes order as their bits do, infinities and NaN above all numbers.
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, axis=0)
    finite = largest < 0x7F800000
    amax = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.maximum(amax, 1e-4), 448.0)
    if POWER_OF_TWO_SCALE:
        # Add all mantissa bits, then clear them: exact, and powers of two stay as they are.
        bits = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    codes = tl.where(finite, _e4m3(tl.div_rn(x, scale)), 0x7F)
    return codes, tl.where(finite, scale.to(tl.int32, bitcast=True), 0x7FC00000)


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
