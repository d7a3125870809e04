"""The parts of rows of sparse MLA decode, weighed by their lse.

    lse[t, h] = log sum_p exp(part_lse[t, p, h])
    out[t, h] = sum_p exp(part_lse[t, p, h] - lse[t, h]) * part_out[t, p, h]

Layout:
    part_out   [num_tokens, num_splits, num_heads, latent_dim] fp32   contiguous
    part_lse   [num_tokens, num_splits, num_heads] fp32               contiguous
    out        [num_tokens, num_heads, latent_dim]                    contiguous
    lse        [num_tokens, num_heads] fp32                           contiguous

Grid (num_tokens, num_heads, cdiv(latent_dim, BLOCK_D)): a program owns BLOCK_D latents of a head. A
part without a valid key has lse -inf, and what its ``part_out`` holds does not count.
"""

import triton
import triton.language as tl
from torch import Tensor


# fmt: off
@triton.jit(do_not_specialize=["num_heads", "num_splits"])
def combine_kernel(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr,
    num_heads, num_splits,
    LATENT_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token * num_heads + head
    splits = tl.arange(0, BLOCK_S)
    parts = (token * num_splits + splits) * num_heads + head
    latents = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = latents < LATENT_DIM
    part_ptrs = part_out_ptr + parts[:, None] * LATENT_DIM + latents[None, :]
    part_mask = (splits < num_splits)[:, None] & mask[None, :]
    if OVERLAP:
        # The parts are written when the kernel before has ended.
        tl.extra.cuda.gdc_wait()
    # Neither load waits for the other.
    part_lse = tl.load(part_lse_ptr + parts, mask=splits < num_splits, other=float("-inf"))
    part_out = tl.load(part_ptrs, mask=part_mask, other=0.0)

    # NaN is not -inf: it counts, and reaches the result.
    live = part_lse != float("-inf")
    highest = tl.max(part_lse, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(part_lse - shift)
    total = tl.sum(weights, axis=0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    part_out = tl.where(live[:, None], part_out * weights[:, None], 0.0)
    out = tl.sum(part_out, axis=0) / total
    tl.store(out_ptr + row * LATENT_DIM + latents, out.to(out_ptr.dtype.element_ty), mask=mask)
    if tl.program_id(2) == 0:
        tl.store(lse_ptr + row, tl.where(empty, float("-inf"), highest + tl.log(total)))


def combine_parts(
    part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, num_programs: int, overlap: bool
) -> None:
    """Write ``out`` and ``lse``; ``overlap``: the kernel before lets this one begin early."""
    num_tokens, num_splits, num_heads, latent_dim = part_out.shape
    # Few sizes serve every number of splits; a program is one warp and reads 1024 numbers or fewer,
    # and 512 where that leaves multiprocessors idle (defaults).
    block_s = next(size for size in (2, 4, 8, 16, 32, 64) if size >= num_splits)
    numbers = 512 if num_tokens * num_heads <= num_programs else 1024
    block_d = min(triton.next_power_of_2(latent_dim), max(16, numbers // block_s))
    # Three axes, as a division of 64 bits would take longer than the loads.
    combine_kernel[(num_tokens, num_heads, triton.cdiv(latent_dim, block_d))](
        part_out, part_lse, out, lse,
        num_heads, num_splits,
        LATENT_DIM=latent_dim, BLOCK_S=block_s, BLOCK_D=block_d, OVERLAP=overlap,
        num_warps=1, launch_pdl=overlap,
    )  # fmt: skip
