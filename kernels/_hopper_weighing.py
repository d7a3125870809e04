"""The products of a tile of the logits on compute capability 9.0, their weighted sums, the scores.

A relu is doubled, and the scale halved: a sum above 2**127 overflows, and one of products that are
all zero may be -0.0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK = gl.constexpr(64)  # keys
TILE = gl.constexpr(128)  # two blocks


@gluon.jit
def multiply(codes, q):
    """Begin ``codes @ q.T``: [64, HEADS]."""
    HEADS: gl.constexpr = q.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    zero = gl.full([BLOCK, HEADS], 0.0, gl.float32, layout=MMA)
    return warpgroup_mma(codes, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def by_lane(x):
    """[64, HEADS] of an accumulator as [64, lane of its quad, what the lane holds]."""
    HEADS: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(x, [BLOCK, HEADS // 8, 4, 2]), (0, 2, 1, 3))
    return gl.reshape(x, [BLOCK, 4, HEADS // 4])


@gluon.jit
def add_products(total, x, y):
    """``total + (x * y).sum(-1)`` in registers, one product after the other.

    Fused by hand, so that every copy of the code rounds alike.
    """
    HALF: gl.constexpr = x.shape[2] // 2
    x0, x1 = gl.split(gl.permute(gl.reshape(x, [BLOCK, 4, 2, HALF]), (0, 1, 3, 2)))
    y0, y1 = gl.split(gl.permute(gl.reshape(y, [BLOCK, 4, 2, HALF]), (0, 1, 3, 2)))
    if HALF == 1:
        x0, y0 = gl.reshape(x0, [BLOCK, 4]), gl.reshape(y0, [BLOCK, 4])
        x1, y1 = gl.reshape(x1, [BLOCK, 4]), gl.reshape(y1, [BLOCK, 4])
        total = x0 * y0 if total is None else gl.fma(x0, y0, total)
        return gl.fma(x1, y1, total)
    else:  # noqa: RET505 - compiled for one of the two
        return add_products(add_products(total, x0, y0), x1, y1)


@gluon.jit
def weigh(dots, weights):
    """``2 * sum_h weights[h] * relu(dots[:, h])`` over the heads of each lane of a quad: [64, 4].

    The double of a relu is a sum, which costs half of a maximum.
    """
    ones = gl.full(dots.shape, 1.0, gl.float32, layout=dots.type.layout)
    return add_products(
        None, by_lane(dots + gl.abs(dots)), by_lane(gl.expand_dims(weights, 0) * ones)
    )


@gluon.jit
def swap(x, LANES: gl.constexpr):
    """What the lane ``lane ^ LANES`` holds."""
    ASM: gl.constexpr = (
        "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;"
        if LANES == 2
        else "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;"
    )
    return gl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def split_rows(x):
    """Of [64, 4] the keys ``16 w + r`` and ``16 w + 8 + r``, one a thread each: [4, 8, 4]."""
    return gl.split(gl.permute(gl.reshape(x, [4, 2, 8, 4]), (0, 2, 3, 1)))


@gluon.jit
def sum_quads(left, right):
    """Sums over the lanes of a quad, of which each thread is left with that of one key: [128].

    The lane ``2 half + upper`` of quad ``r`` of warp ``w`` has the key ``64 half + 16 w + 8 upper +
    r``: three exchanges, where four sums on their own take eight.
    """
    left_lower, left_upper = split_rows(left)
    right_lower, right_upper = split_rows(right)
    LAYOUT: gl.constexpr = left_lower.type.layout
    lanes = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    lanes = gl.expand_dims(gl.expand_dims(lanes, 0), 1)
    second = lanes >= 2
    lower = gl.where(second, right_lower, left_lower)
    lower += swap(gl.where(second, left_lower, right_lower), 2)
    upper = gl.where(second, right_upper, left_upper)
    upper += swap(gl.where(second, left_upper, right_upper), 2)
    odd = (lanes & 1) != 0
    sums = gl.where(odd, upper, lower) + swap(gl.where(odd, lower, upper), 1)
    return gl.reshape(gl.permute(gl.reshape(sums, [4, 8, 2, 2]), (2, 0, 3, 1)), [TILE])


# fmt: off
@gluon.jit
def score_row(
    left_codes, right_codes, q, weights, scale, positions, last_position, out_ptr, masks,
    keys_empty, HEAD: gl.constexpr, KEEP: gl.constexpr,
):
    # fmt: on
    """Score and store a tile for one row; ``keys_empty``: where to say that it is in registers.

    That is not before products have begun, which need them all: a barrier does not wait for loads
    that are under way, and the next keys do not queue behind them. KEEP: there are two
    masks, and the L2 is to hold the scores of the first longer than the keys, which are read once.
    """
    left = multiply(left_codes, q)
    right = multiply(right_codes, q)
    weights = weights.load(HEAD)
    if keys_empty is not None:
        mbarrier.arrive(keys_empty, count=1)
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    left_sum = weigh(left, weights)
    right_sum = weigh(right, weights)
    scores = sum_quads(left_sum, right_sum) * scale
    scores = gl.where(positions <= last_position, scores, float("-inf"))
    POLICY: gl.constexpr = "evict_last" if KEEP else ""
    gl.store(out_ptr + positions, scores, mask=masks[0], eviction_policy=POLICY)
    if KEEP:
        gl.store(out_ptr + positions, scores, mask=masks[1])
