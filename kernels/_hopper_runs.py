"""How the logits on compute capability 9.0 are shared out: ``_runs`` in Gluon, with other costs.

A run is what one program scores: tiles of ``TILE`` keys, one request after the other. A ``batch``
is ``query_start_loc, seq_lens, num_tokens, num_reqs, max_seq_len, min_keys``, the first two as
pointers to contiguous int32; a ``run`` is what ``find_run`` returns, at the request that it has
come to. Work is counted in halves of a row of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._hopper import blocks_of, group_barrier, prefetch, reinterpret
from ._hopper_weighing import BLOCK, TILE

# What the keys of a tile cost: where the memory is what all wait for, and where it is not. H200, 64
# requests of 32K keys and 1, 4, 2, 3 tokens, us: 96 with 1, 108 with 0, 99 with 2, 106 with 4; of 1
# and 2 tokens 79 with 4 or 6, 81 with 1.
MEMORY_COST, L2_COST = gl.constexpr(4), gl.constexpr(1)

# Logits of a selection that stay in the L2 until they are read, if they are at most so many.
MAX_KEPT_BYTES = gl.constexpr(16 << 20)

OF_A_WARP = gl.constexpr(64)  # requests that a warp looks at by itself, two a lane

NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # one by one


@gluon.jit
def request_rows(request, batch):
    """As ``_runs.request_rows``: first row, end of its rows, sequence length, tiles to score."""
    query_start_loc_ptr, seq_lens_ptr, num_tokens, num_reqs, max_seq_len, min_keys = batch
    known = request < num_reqs
    start_ptr = query_start_loc_ptr + request.to(gl.int64)
    start = gl.load(start_ptr, mask=request <= num_reqs, other=0)
    stop_ptr = gl.where(known, start_ptr + 1, query_start_loc_ptr)
    stop = gl.load(stop_ptr, mask=request != num_reqs, other=num_tokens)
    start = gl.minimum(gl.maximum(start, 0), num_tokens)
    stop = gl.minimum(gl.maximum(stop, 0), num_tokens)
    seq_len = gl.load(seq_lens_ptr + request.to(gl.int64), mask=known, other=0)
    seq_len = gl.maximum(seq_len, 0)
    keys = gl.minimum(seq_len, max_seq_len)
    tiles = gl.where((stop > start) & (keys > min_keys), (keys + TILE - 1) // TILE, 0)
    return start, stop, seq_len, tiles


@gluon.jit
def count_tiles(requests, COUNT: gl.constexpr):
    """Of what ``request_rows`` gives: the tiles of all rows of a request, and its tiles."""
    start, stop, _, tiles = requests
    tiles = tiles.to(COUNT)
    return tiles * gl.maximum(stop - start, 0), tiles


@gluon.jit
def keys_cost(row_tiles, tiles):
    """What the keys of a tile cost in this batch: up to 1.625 rows a tile memory takes longest (1.5
    do, 1.75 do not: H200, 64 requests of 32K keys)."""
    return gl.where(row_tiles < tiles + (tiles >> 1) + (tiles >> 3), MEMORY_COST, L2_COST)


@gluon.jit
def work_of(row_tiles, tiles, cost):
    """The work of some tiles, ``row_tiles`` if each is counted for each of its rows."""
    return row_tiles * 2 + tiles * cost


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@gluon.jit
def number(smem, index):
    """One of the numbers in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(smem.index(index).load(LAYOUT), axis=0)


@gluon.jit
def find_run(first_rows, batch, table, ends_smem, MANY: gl.constexpr):
    """As ``_runs.find_run``: the run of the program, ``begin, end`` in work, what the keys of a
    tile cost, and whether the L2 can hold the logits of the batch; the request that it begins in,
    and ``rows_of`` that request. Work is counted in the dtype of ``ends_smem``. ``first_rows`` are
    those of the first requests, two a lane; MANY: there are more.
    """
    num_reqs = batch[3]
    REQUESTS: gl.constexpr = first_rows[0].shape[0]
    # Each warp has all of them, and waits for no other.
    FEW: gl.constexpr = REQUESTS <= OF_A_WARP
    COUNT: gl.constexpr = ends_smem.dtype
    block = gl.arange(0, REQUESTS, layout=first_rows[0].type.layout)
    row_tiles, tiles = count_tiles(first_rows, COUNT)
    ends = gl.associative_scan((row_tiles, tiles), 0, add_pairs)
    if FEW:
        # These do not wait for the ends.
        seen = (gl.sum(row_tiles, axis=0), gl.sum(tiles, axis=0))
    else:
        stored = reinterpret(ends_smem, COUNT, [2, REQUESTS], NUMBERS)
        stored.index(0).store(ends[0])
        stored.index(1).store(ends[1])
        seen = (number(ends_smem, REQUESTS - 1), number(ends_smem, 2 * REQUESTS - 1))
    all_row_tiles, all_tiles = seen
    if MANY:
        for first in range(REQUESTS, num_reqs, REQUESTS):
            row_tiles, tiles = count_tiles(request_rows(first + block, batch), COUNT)
            all_row_tiles += gl.sum(row_tiles, axis=0)
            all_tiles += gl.sum(tiles, axis=0)
    cost = keys_cost(all_row_tiles, all_tiles)
    total = work_of(all_row_tiles, all_tiles, cost)
    share = total // gl.num_programs(0)
    rest = total - share * gl.num_programs(0)
    begin = share * gl.program_id(0) + gl.minimum(gl.program_id(0), rest)
    kept = all_row_tiles <= MAX_KEPT_BYTES // (4 * TILE)
    part = (begin, begin + share + (gl.program_id(0) < rest).to(COUNT), cost, kept)

    request, passed = find_request(begin, cost, ends, seen, batch, block, ends_smem, MANY)
    # What the partitions take over may be laid over numbers in shared memory that a slower warp has
    # yet to read, without a barrier between.
    group_barrier()
    start, stop, seq_len, first, last, passed = rows_of(request, passed, part, batch)
    # On its way into the L2 while the warps take up their roles.
    prefetch((blocks_of(request, table) + first * 2).to(gl.int64), first < last)
    return part, request, start, stop, seq_len, first, last, passed


@gluon.jit
def find_request(begin, cost, ends, seen, batch, block, ends_smem, MANY: gl.constexpr):
    """The request in which the work ``begin`` lies, and the work before it. ``ends`` and ``seen``
    are the counts up to each of the first requests, and of them all."""
    num_reqs = batch[3]
    REQUESTS: gl.constexpr = block.shape[0]
    FEW: gl.constexpr = REQUESTS <= OF_A_WARP
    COUNT: gl.constexpr = ends_smem.dtype
    work_ends = work_of(ends[0], ends[1], cost)
    before = (work_ends <= begin) & (block < num_reqs)
    request = gl.sum(before.to(gl.int32), axis=0)
    if FEW:
        passed = gl.max(gl.where(before, work_ends, 0), axis=0)
    else:
        previous = gl.maximum(request - 1, 0)
        end = work_of(number(ends_smem, previous), number(ends_smem, REQUESTS + previous), cost)
        passed = gl.where(request > 0, end, 0)
    if MANY:
        seen_work = work_of(seen[0], seen[1], cost)
        for first in range(REQUESTS, num_reqs, REQUESTS):
            row_tiles, tiles = count_tiles(request_rows(first + block, batch), COUNT)
            work = work_of(row_tiles, tiles, cost)
            work_ends = seen_work + gl.associative_scan(work, 0, add)
            before = (work_ends <= begin) & (first + block < num_reqs)
            request += gl.sum(before.to(gl.int32), axis=0)
            passed = gl.maximum(passed, gl.max(gl.where(before, work_ends, 0), axis=0))
            seen_work += gl.sum(work, axis=0)
    return request, passed


@gluon.jit
def rows_of(request, passed, part, batch):
    """The rows of a request and its sequence length; the first tile of it that belongs to the run
    ``part``, and the one behind the last; and the work up to the request's end.

    A tile belongs to the run in which its work begins.
    """
    begin, end, cost, _kept = part
    start, stop, seq_len, tiles = request_rows(request, batch)
    work = work_of(gl.maximum(stop - start, 0), 1, cost).to(passed.dtype)
    first = gl.maximum((begin - passed + work - 1) // work, 0).to(gl.int32)
    last = gl.minimum((end - passed + work - 1) // work, tiles.to(passed.dtype)).to(gl.int32)
    return start, stop, seq_len, first, last, passed + tiles * work


@gluon.jit
def has_work(run):
    return run[0][0] < run[0][1]


@gluon.jit
def next_request(run, batch):
    """Whether the run goes on behind its request, and the run at the next one."""
    part, request, start, stop, seq_len, first, last, passed = run
    request += 1
    more = (passed < part[1]) & (request < batch[3])
    if more:
        start, stop, seq_len, first, last, passed = rows_of(request, passed, part, batch)
    return more, (part, request, start, stop, seq_len, first, last, passed)


@gluon.jit
def end_of_columns(last, seq_len, batch):
    """Where the columns of the block table end that the tiles up to ``last - 1`` have keys in."""
    keys = gl.minimum(seq_len, batch[4])
    return gl.minimum(last * 2, (keys + BLOCK - 1) // BLOCK)
