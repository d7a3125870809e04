"""The items of sparse MLA decode on compute capability 9.0: where their columns and heads are.

An item is 64 heads, or 32 or 16, of one part of a query token. A ``batch`` is the top-k indices and
``query_start_loc``, pointers with their strides, and ``num_reqs, topk, split_size, num_splits,
groups``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MAX_ALONE = gl.constexpr(256)  # columns that a warp looks at by itself, eight a lane: a default


@gluon.jit
def place(item, batch):
    """Which heads of which part of which token an item is, and its first column and their limit."""
    _num_reqs, topk, split_size, num_splits, groups = batch[1]
    group = item % groups
    part = item // groups
    token = part // num_splits
    first = part % num_splits * split_size
    return group, part, token, first, gl.minimum(first + split_size, topk)


@gluon.jit
def bounds(token, first, limit, batch, SCAN: gl.constexpr):
    """The request of a token, and the end of its valid columns in ``first .. limit - 1``.

    Where the columns are few, each warp looks at all of them and at the requests by itself, and
    waits for no other warp.
    """
    starts_ptr, starts_stride = batch[0][3:]
    num_reqs = batch[1][0]
    WARP: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1]))
    GROUP: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    ALONE: gl.constexpr = SCAN <= MAX_ALONE
    LAYOUT: gl.constexpr = WARP if ALONE else GROUP
    REQUESTS: gl.constexpr = 64 if ALONE else 512

    # The two loads do not wait for one another.
    topk_row = topk_row_of(token, batch)
    columns = first + gl.arange(0, SCAN, layout=LAYOUT)
    index = load_index(topk_row, batch[0][2], columns, limit)
    lanes = gl.arange(0, REQUESTS, layout=LAYOUT)
    request = -1
    for start in range(0, num_reqs + 1, REQUESTS):
        at = start + lanes
        known = at <= num_reqs
        begin = gl.load(starts_ptr + at.to(gl.int64) * starts_stride, mask=known, other=0)
        request = gl.maximum(request, gl.max(gl.where(known & (begin <= token), at, -1), axis=0))
    request = gl.where(request < num_reqs, request, -1)
    # A row that sees fewer keys than topk ends in -1, and need not be walked to its end.
    last = gl.maximum(first, gl.max(gl.where(index >= 0, columns + 1, 0), axis=0))
    for start in range(first + SCAN, limit, SCAN):
        columns = start + gl.arange(0, SCAN, layout=LAYOUT)
        index = load_index(topk_row, batch[0][2], columns, limit)
        last = gl.maximum(last, gl.max(gl.where(index >= 0, columns + 1, 0), axis=0))
    return request, gl.where(request >= 0, last, first)


@gluon.jit
def topk_row_of(token, batch):
    return batch[0][0] + token.to(gl.int64) * batch[0][1]


@gluon.jit
def load_index(topk_row, stride, columns, end):
    return gl.load(topk_row + columns.to(gl.int64) * stride, mask=columns < end, other=-1)


@gluon.jit
def heads_of_rows(group, rows, heads):
    """The head of each of the 64 rows of a program, and whether it has one.

    Each warp has a quarter of the heads in its 16 rows: all of them share the stores.
    """
    num_heads, block_h = heads
    share = block_h // 4
    head = group * block_h + rows // 16 * share + rows % 16
    return head, (rows % 16 < share) & (head < num_heads)
