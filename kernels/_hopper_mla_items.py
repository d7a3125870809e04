"""The items of sparse MLA decode on compute capability 9.0: where their columns and heads are.

An item is 64 heads, or 32 or 16, of one part of a query token. A ``batch`` is the top-k indices and
``query_start_loc``, pointers with their strides, and ``num_reqs, topk, split_size, num_splits,
groups``.

Where TOKENS of a request share their keys (0: none do), an item is one part of such a group, with
all heads, and ``entries`` and ``parts`` of ``_shared_keys`` stand for the indices and
``query_start_loc``. ``share`` is which heads an item has, or how many tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MAX_ALONE = gl.constexpr(256)  # columns that a warp looks at by itself, eight a lane: a default


@gluon.jit
def place(item, batch, TOKENS: gl.constexpr):
    """Which share of which part of which token, the first of its group, an item is; its row of
    indices, and its first column there and their limit."""
    _num_reqs, topk, split_size, num_splits, groups = batch[1]
    if TOKENS > 0:
        token = _of_part(item, 0, batch)
        share = _of_part(item, 1, batch)
        part = token * num_splits + item % num_splits
        row = item
        first = 0
        limit = _of_part(item, 3, batch)
    else:
        share = item % groups
        part = item // groups
        token = part // num_splits
        row = token
        first = part % num_splits * split_size
        limit = gl.minimum(first + split_size, topk)
    return share, part, token, row, first, limit


@gluon.jit
def _of_part(part, FIELD: gl.constexpr, batch):
    parts_ptr, stride = batch[0][3:]
    return gl.load(parts_ptr + (part + 1).to(gl.int64) * stride + FIELD)


@gluon.jit
def bounds(row, first, limit, batch, SCAN: gl.constexpr, TOKENS: gl.constexpr):
    """The request of a row of indices, and the end of its valid columns in ``first .. limit - 1``.

    Where the columns are few, each warp looks at all of them and at the requests by itself, and
    waits for no other warp.
    """
    if TOKENS > 0:
        request = _of_part(row, 2, batch)
        end = limit
    else:
        request, end = _bounds(row, first, limit, batch, SCAN)
    return request, end


@gluon.jit
def _bounds(token, first, limit, batch, SCAN: gl.constexpr):
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
    index = load_index(topk_row, batch[0][2], columns, limit, 0)
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
        index = load_index(topk_row, batch[0][2], columns, limit, 0)
        last = gl.maximum(last, gl.max(gl.where(index >= 0, columns + 1, 0), axis=0))
    return request, gl.where(request >= 0, last, first)


@gluon.jit
def topk_row_of(row, batch):
    return batch[0][0] + row.to(gl.int64) * batch[0][1]


@gluon.jit
def load_index(topk_row, stride, columns, end, TOKENS: gl.constexpr):
    """An index, or an entry; -1 and 0 where there is none."""
    NONE: gl.constexpr = 0 if TOKENS > 0 else -1
    return gl.load(topk_row + columns.to(gl.int64) * stride, mask=columns < end, other=NONE)


@gluon.jit
def token_of_rows(rows, TOKENS: gl.constexpr):
    """Which token of its group each of the 64 rows of a program is of."""
    return rows // (64 // TOKENS)


@gluon.jit
def heads_of_rows(share, rows, heads, TOKENS: gl.constexpr):
    """The token of each of the 64 rows of a program, from the first on; its head; and whether it
    has one.

    Each warp has a quarter of the heads in its 16 rows: all of them share the stores.
    """
    num_heads, block_h, _num_splits = heads
    if TOKENS > 0:
        token = token_of_rows(rows, TOKENS)
        head = rows % (64 // TOKENS)
        stored = token < share
    else:
        share_of_warp = block_h // 4
        token = 0
        head = share * block_h + rows // 16 * share_of_warp + rows % 16
        stored = rows % 16 < share_of_warp
    return token, head, stored & (head < num_heads)


@gluon.jit
def out_rows(share, part, rows, heads, TOKENS: gl.constexpr):
    """Where each row of a program goes, in heads of parts, and whether it has a head."""
    num_heads, _block_h, num_splits = heads
    token, head, stored = heads_of_rows(share, rows, heads, TOKENS)
    if TOKENS > 0:
        part += token * num_splits
    return part.to(gl.int64) * num_heads + head, stored
