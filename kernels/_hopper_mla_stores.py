"""What sparse MLA decode on compute capability 9.0 writes: the sums and the lse of an item."""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ._hopper import reinterpret
from ._hopper_mla_items import out_rows

# of products with 128 latents
SUM_MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SUM_HEADS = gl.constexpr(gl.SliceLayout(1, SUM_MMA.value))
_LN_2 = gl.constexpr(math.log(2))


@gluon.jit
def store_lse(highest, total, share, part, lse_ptr, heads, TOKENS: gl.constexpr):
    """``total`` is the sum of all weights, in powers of two relative to ``highest``.

    NaN counts as a sum: a total is 0 only if no key has a score above -inf.
    """
    empty = total == 0.0
    lse = (highest + gl.log2(gl.where(empty, 1.0, total))) * _LN_2
    row, stored = out_rows(share, part, gl.arange(0, 64, layout=total.type.layout), heads, TOKENS)
    gl.store(lse_ptr + row, gl.where(empty, float("-inf"), lse), mask=stored)


@gluon.jit
def _out_ptrs(rows, latents, share, part, out_ptr, heads, TOKENS: gl.constexpr):
    """Where the latents of some rows of a program go, and which of them there are."""
    row, stored = out_rows(share, part, rows, heads, TOKENS)
    ptrs = out_ptr + gl.expand_dims(row * 512, 1) + gl.expand_dims(latents, 0)
    return ptrs, gl.expand_dims(stored, 1)


@gluon.jit
def _store_lines(
    tile, rows_of_tile, share, part, out_ptr, heads, FIRST: gl.constexpr, TOKENS: gl.constexpr
):
    """Latents FIRST .. FIRST + 127 through shared memory: a warp writes whole lines.

    Few rows at a time: the sums hold the registers.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    latents = FIRST + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    tile.store(rows_of_tile)
    for r in gl.static_range(0, 64, 16):
        rows = r + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
        ptrs, mask = _out_ptrs(rows, latents, share, part, out_ptr, heads, TOKENS)
        values = tile.slice(r, 16, dim=0).load(LAYOUT)
        gl.store(ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def store_sums(
    left, right, factor, tile, any_key, share, part, out_ptr, heads, k_smem, k_empty,
    HALF: gl.constexpr, SPLIT: gl.constexpr, WHOLE_LINES: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """``left`` and ``right``, 128 latents each, times ``factor``; ``tile`` is the first of the next
    item.

    WHOLE_LINES: through the part of the last buffer that only this half reads, which is given up
    then. A part without a key is not written: the combination does not read it.
    """
    FIRST: gl.constexpr = HALF * 256
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    # The two chunks of a half are as large as 128 of its sums.
    stages = reinterpret(k_smem, gl.float32, [4, 64, 128], gl.NVMMASharedLayout(128, 32, 2))
    if WHOLE_LINES and any_key:
        stage = (tile - 1) & 1
        sums = stages.index(stage * 2 + HALF)
        _store_lines(sums, left * factor, share, part, out_ptr, heads, FIRST, TOKENS)
        _store_lines(sums, right * factor, share, part, out_ptr, heads, FIRST + 128, TOKENS)
        mbarrier.arrive(k_empty.index(stage), count=1)
    elif not SPLIT or any_key:
        rows = gl.arange(0, 64, layout=SUM_HEADS)
        latents = FIRST + gl.arange(0, 128, layout=gl.SliceLayout(0, SUM_MMA))
        ptrs, mask = _out_ptrs(rows, latents, share, part, out_ptr, heads, TOKENS)
        scaled = left * factor
        gl.store(ptrs, scaled.to(dtype), mask=mask)
        scaled = right * factor
        gl.store(ptrs + 128, scaled.to(dtype), mask=mask)
