"""What the logits on compute capability 9.0 read and fill: the roles of single warps.

``sources`` are descriptors, of the keys with the rows of a block, ``smem`` the buffers of what they
are for, and ``bars`` say that one is full, or empty again. Others are as in ``_hopper_runs``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ._hopper import blocks_of, tma_load
from ._hopper_runs import end_of_columns, has_work, next_request, request_rows
from ._hopper_weighing import BLOCK, TILE

DIM = gl.constexpr(128)
STAGES = gl.constexpr(6)  # of a tile each, two for each group
COLUMNS = gl.constexpr(1024)  # that are filled at a time


@gluon.jit
def load_queries(batch, run, sources, smem, bars, ROWS: gl.constexpr, SLOTS: gl.constexpr,
                 HEADS: gl.constexpr):  # fmt: skip
    q_desc, weights_desc = sources
    q_smem, weights_smem = smem
    q_full, q_empty = bars

    ROW_BYTES: gl.constexpr = HEADS * (DIM + 4)
    slot = 0
    slot_phase = 1
    more = has_work(run)
    while more:
        _, _, start, stop, _, first, last, _ = run
        if last > first:
            for row in range(start, stop, ROWS):
                rows = gl.minimum(stop - row, ROWS)
                mbarrier.wait(q_empty.index(slot), slot_phase)
                for n in gl.static_range(1, ROWS + 1):
                    mbarrier.expect(q_full.index(slot), n * ROW_BYTES, pred=rows == n)
                for n in range(0, rows):
                    tma_load(
                        q_desc, [(row + n) * HEADS, 0], q_full.index(slot),
                        q_smem.index(slot * ROWS + n),
                    )  # fmt: skip
                    tma_load(
                        weights_desc, [(row + n) * HEADS], q_full.index(slot),
                        weights_smem.index(slot * ROWS + n),
                    )  # fmt: skip
                slot += 1
                if slot == SLOTS:
                    slot = 0
                    slot_phase ^= 1
        more, run = next_request(run, batch)


@gluon.jit
def load_keys(batch, run, table, sources, smem, bars, ROWS: gl.constexpr):
    num_blocks = table[2]
    codes_desc, scales_desc, block_rows = sources
    codes_smem, scales_smem = smem
    keys_full, keys_empty = bars

    AHEAD: gl.constexpr = 32
    lanes = gl.arange(0, AHEAD, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    stage = 0
    phase = 1
    more = has_work(run)
    while more:
        _, request, start, stop, seq_len, first, last, _ = run
        if last > first:
            table_row = blocks_of(request, table)
            last_column = end_of_columns(last, seq_len, batch)
            for _row in range(start, stop, ROWS):
                columns = first * 2 + lanes
                blocks = gl.load(
                    table_row + columns.to(gl.int64), mask=columns < last_column, other=0
                )
                for chunk in range(first, last, AHEAD // 2):
                    columns = chunk * 2 + AHEAD + lanes
                    next_blocks = gl.load(
                        table_row + columns.to(gl.int64), mask=columns < last_column, other=0
                    )
                    # A block outside the pool is not read; its keys are masked.
                    blocks = gl.where((blocks >= 0) & (blocks < num_blocks), blocks, 0)
                    for i in range(0, gl.minimum(last - chunk, AHEAD // 2)):
                        mbarrier.wait(keys_empty.index(stage), phase)
                        mbarrier.expect(keys_full.index(stage), TILE * (DIM + 4))
                        for half in gl.static_range(2):
                            block = gl.max(gl.where(lanes == i * 2 + half, blocks, 0), axis=0)
                            tma_load(
                                codes_desc, [block * block_rows, 0], keys_full.index(stage),
                                codes_smem.index(stage * 2 + half),
                            )  # fmt: skip
                            tma_load(
                                scales_desc, [block, BLOCK * DIM // 4], keys_full.index(stage),
                                scales_smem.index(stage).slice(half, 1),
                            )  # fmt: skip
                        stage += 1
                        if stage == STAGES:
                            stage = 0
                            phase ^= 1
                    blocks = next_blocks
        more, run = next_request(run, batch)


@gluon.jit
def fill(batch, logits, row_lens_ptr):
    """Columns behind the tiles, or the lengths of the rows."""
    num_reqs, max_seq_len = batch[3], batch[4]
    logits_ptr, logits_stride = logits
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    WIDTH: gl.constexpr = 128 * gl.num_warps()
    lanes = gl.arange(0, WIDTH, layout=LAYOUT)
    nothing = gl.full([WIDTH], float("-inf"), gl.float32, layout=LAYOUT)
    spans = (max_seq_len + COLUMNS - 1) // COLUMNS if row_lens_ptr is None else 1
    for item in range(gl.program_id(0), (num_reqs + 2) * spans, gl.num_programs(0)):
        start, stop, seq_len, tiles = request_rows(item % (num_reqs + 2), batch)
        if row_lens_ptr is None:
            span = item // (num_reqs + 2) * COLUMNS
            begin = gl.maximum(span, tiles * TILE)
            end = gl.minimum(span + COLUMNS, max_seq_len)
            if begin < end:
                for row in range(start, stop):
                    row_ptr = logits_ptr + row.to(gl.int64) * logits_stride
                    for column in range(begin // WIDTH * WIDTH, end, WIDTH):
                        columns = column + lanes
                        mask = (columns >= begin) & (columns < end)
                        gl.store(row_ptr + columns, nothing, mask=mask)
        else:
            for first in range(start, stop, WIDTH):
                rows = first + lanes
                row_lens = gl.maximum(seq_len - stop + rows + 1, 0)
                gl.store(row_lens_ptr + rows, row_lens, mask=rows < stop)
