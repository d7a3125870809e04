"""``indexer_logits`` for compute capability 9.0 in Gluon: fp8, 32 or 64 heads of 128, blocks of 64.

The layouts are those of ``indexer_logits``, as far as ``supports`` takes them.

Grid (multiprocessors,), for as long as there is work: a program finds its run of tiles of 128 keys
in the lengths, as there. Its warps have roles:

    load_keys     one warp: the keys and scales of the tiles, by block id, through the tensor memory
                  accelerator into shared memory
    load_queries  one warp: the queries and weights of their requests, likewise
    score         three groups of four warps, each with every third tile in registers (operand A of
                  the tensor cores), against the queries of one row after the other (operand B)
    fill          two warps: -inf behind the tiles of a request, and the rows of no request; or the
                  lengths of the rows

A stage of shared memory always goes to the same group: a group that could find a stage after
another had used it might take the keys before for its own, as barriers tell odd phases from even
ones alone.

Each row of a tile costs 256 cycles of the tensor cores and about 180 instructions a warp. A group
waits for its own products, and weighs them while those of the other groups run.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ._common import capability, num_sms
from ._hopper import blocks_of, group_barrier
from ._hopper_loads import DIM, STAGES, fill, load_keys, load_queries
from ._hopper_runs import (
    MEMORY_COST,
    NUMBERS,
    OF_A_WARP,
    end_of_columns,
    find_run,
    has_work,
    next_request,
    request_rows,
)
from ._hopper_weighing import BLOCK, TILE, score_row, sum_quads, weigh

GROUPS = gl.constexpr(3)  # of four warps, that score
# Rows of a request that go together, and buffers for their queries: the next request's are loaded
# ahead where two fit.
FEW_ROWS, FEW_ROWS_SLOTS = 4, 2
MAX_ROWS, MAX_ROWS_SLOTS = 8, 1
# Registers: 128 a thread when the kernel starts, 512 threads. What load and fill give up goes to
# score.
MAX_REGISTERS, SCORE_REGISTERS, LOAD_REGISTERS = 128, 160, 32
# Requests that every warp looks at by itself, and that all warps look at together.
WARP_REQUESTS, BLOCK_REQUESTS = OF_A_WARP.value, 256
# Up to here work is counted in int32: int64 takes longer.
MAX_INT32 = 2**31 - 1
# As few requests have too few tiles for the next queries to be loaded ahead of.
MIN_REQUESTS_AHEAD = 33


@gluon.jit
def score(batch, run, table, logits, smem, bars, ROWS: gl.constexpr, SLOTS: gl.constexpr,
          HEADS: gl.constexpr, KEEP: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    max_seq_len = batch[4]
    num_blocks = table[2]
    logits_ptr, logits_stride = logits
    q_smem, weights_smem, codes_smem, scales_smem = smem
    q_full, q_empty, keys_full, keys_empty = bars

    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    CODES: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    HEAD: gl.constexpr = gl.SliceLayout(0, MMA)
    # no instructions: its layout is what is wanted
    nothing = weigh(
        gl.full([BLOCK, HEADS], 0.0, gl.float32, layout=MMA),
        gl.full([HEADS], 0.0, gl.float32, layout=HEAD),
    )
    KEY: gl.constexpr = sum_quads(nothing, nothing).type.layout
    keys = gl.arange(0, TILE, layout=KEY)
    half = keys // BLOCK

    gl.static_assert(STAGES == 2 * GROUPS)
    done = 0  # tiles of the program before these rows
    count = 0  # tiles of the group
    slot = 0
    slot_phase = 0
    more = has_work(run)
    while more:
        part, request, start, stop, seq_len, first, last, _ = run
        kept = part[3]
        if last > first:
            columns = end_of_columns(last, seq_len, batch)
            table_row = blocks_of(request, table)
            for row in range(start, stop, ROWS):
                rows = gl.minimum(stop - row, ROWS)
                mine = first + (GROUP + GROUPS - done % GROUPS) % GROUPS
                row_ptr = logits_ptr + row.to(gl.int64) * logits_stride
                # A tile ahead; whether a block is outside the pool is all that is asked of it.
                column = mine * 2 + half
                block = gl.load(table_row + column, mask=column < columns, other=-1)
                mbarrier.wait(q_full.index(slot), slot_phase)
                for tile in range(mine, last, GROUPS):
                    stage = GROUP + GROUPS * (count & 1)
                    known = (block >= 0) & (block < num_blocks)
                    # The last position that the row sees; none of an unknown block.
                    last_position = gl.where(known, row + (seq_len - stop), -1 - ROWS)
                    column = (tile + GROUPS) * 2 + half
                    block = gl.load(table_row + column, mask=column < columns, other=-1)
                    mbarrier.wait(keys_full.index(stage), (count >> 1) & 1)
                    count += 1
                    scale = scales_smem.index(stage).reshape([TILE]).load(KEY) * 0.5
                    left_codes = codes_smem.index(stage * 2).load(CODES)
                    right_codes = codes_smem.index(stage * 2 + 1).load(CODES)

                    positions = tile * TILE + keys
                    mask = positions < max_seq_len
                    masks = (mask & kept, mask & ~kept) if KEEP else (mask, None)
                    box = slot * ROWS
                    out_ptr = row_ptr  # of scalars: a pointer a thread would spill
                    score_row(
                        left_codes, right_codes, q_smem.index(box), weights_smem.index(box),
                        scale, positions, last_position, out_ptr, masks,
                        keys_empty.index(stage), HEAD, KEEP,
                    )  # fmt: skip
                    # Else the compiler puts one into the loop.
                    group_barrier()
                    for n in range(1, rows):
                        out_ptr += logits_stride
                        last_position += 1
                        score_row(
                            left_codes, right_codes, q_smem.index(box + n),
                            weights_smem.index(box + n), scale, positions, last_position,
                            out_ptr, masks, None, HEAD, KEEP,
                        )  # fmt: skip
                mbarrier.arrive(q_empty.index(slot), count=1)
                done += last - first
                slot += 1
                if slot == SLOTS:
                    slot = 0
                    slot_phase ^= 1
        more, run = next_request(run, batch)


# fmt: off
@gluon.jit(do_not_specialize=["num_tokens", "num_reqs", "num_blocks", "block_rows", "min_keys"])
def indexer_logits_hopper_kernel(
    q_desc, weights_desc, codes_desc, scales_desc,
    block_table_ptr, query_start_loc_ptr, seq_lens_ptr, logits_ptr, row_lens_ptr,
    num_tokens, num_reqs, num_blocks, block_rows, max_seq_len, min_keys,
    table_stride, logits_stride,
    HEADS: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr,
    REQUESTS: gl.constexpr, MANY: gl.constexpr, WIDE: gl.constexpr,
    SCORE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):
    # fmt: on
    # On their way while the barriers are set up.
    batch = (query_start_loc_ptr, seq_lens_ptr, num_tokens, num_reqs, max_seq_len, min_keys)
    block = gl.arange(0, REQUESTS, layout=gl.BlockedLayout([2], [32], [4], [0]))
    first_rows = request_rows(block, batch)

    q_smem = gl.allocate_shared_memory(q_desc.dtype, [SLOTS * ROWS, HEADS, DIM], q_desc.layout)
    weights_smem = gl.allocate_shared_memory(
        gl.float32, [SLOTS * ROWS, HEADS], weights_desc.layout
    )
    codes_smem = gl.allocate_shared_memory(
        codes_desc.dtype, [STAGES * 2, BLOCK, DIM], codes_desc.layout
    )
    scales_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK], scales_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    keys_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    COUNT: gl.constexpr = gl.int64 if WIDE else gl.int32
    ends_smem = gl.allocate_shared_memory(COUNT, [2 * REQUESTS, 1], NUMBERS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=GROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(keys_full.index(i), count=1)
        mbarrier.init(keys_empty.index(i), count=1)
    fence_async_shared()

    # A selection asks for the lengths of its rows, and reads the logits next.
    KEEP: gl.constexpr = row_lens_ptr is not None
    table = (block_table_ptr, table_stride, num_blocks)
    run = find_run(first_rows, batch, table, ends_smem, MANY)
    logits = (logits_ptr, logits_stride)
    q_sources, k_sources = (q_desc, weights_desc), (codes_desc, scales_desc, block_rows)
    q_smem, k_smem = (q_smem, weights_smem), (codes_smem, scales_smem)
    q_bars, k_bars = (q_full, q_empty), (keys_full, keys_empty)
    smem, bars = q_smem + k_smem, q_bars + k_bars
    gl.warp_specialize(
        [
            (score, (batch, run, table, logits, smem, bars, ROWS, SLOTS, HEADS, KEEP, 0)),
            (score, (batch, run, table, logits, smem, bars, ROWS, SLOTS, HEADS, KEEP, 1)),
            (score, (batch, run, table, logits, smem, bars, ROWS, SLOTS, HEADS, KEEP, 2)),
            (load_queries, (batch, run, q_sources, q_smem, q_bars, ROWS, SLOTS, HEADS)),
            (load_keys, (batch, run, table, k_sources, k_smem, k_bars, ROWS)),
            (fill, (batch, logits, row_lens_ptr)),
        ],
        [4, 4, 1, 1, 2],
        [SCORE_REGISTERS, SCORE_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


def supports(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
) -> bool:
    """Whether the kernel takes these; the portable one takes everything.

    Strides are compared, as torch calls a tensor of one token contiguous whatever its strides: the
    choice must not depend on the batch.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_bytes = k_cache.shape
    return (
        q.dtype == torch.float8_e4m3fn
        and capability(q.device) == 90
        and num_heads in (32, 64)
        and head_dim == DIM.value
        and block_bytes == BLOCK.value * (DIM.value + 4)
        and num_blocks > 0
        and q.stride() == (num_heads * head_dim, head_dim, 1)
        and weights.stride() == (num_heads, 1)
        and k_cache.stride(1) == 1
        # rows of 128 bytes: a block may be a view into a page
        and k_cache.stride(0) % DIM.value == 0
        and k_cache.stride(0) >= block_bytes
        and (block_table.stride(1), query_start_loc.stride(0), seq_lens.stride(0)) == (1, 1, 1)
        # which are found by int32 numbers
        and num_blocks * (k_cache.stride(0) // DIM.value) < 2**31
        and (num_tokens + MAX_ROWS) * num_heads < 2**31
        # and so are the columns of the tiles that the groups look ahead for
        and max_seq_len <= 2**31 - TILE.value * (GROUPS.value + 2)
        and all(_is_aligned(tensor) for tensor in (q, weights, k_cache))
    )


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" or tensor.data_ptr() % 16 == 0


def score_keys(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    logits: Tensor,
    row_lens: Tensor | None,
    min_keys: int,
) -> None:
    """As ``indexer_logits.score_keys``, for what ``supports`` takes."""
    num_tokens, num_heads, _ = q.shape
    num_reqs = seq_lens.shape[0]
    # What the work can come to, whatever the starts of the requests are.
    tiles = (num_reqs + 1) * (-(-max_seq_len // TILE.value) + 1)
    most = (2 * num_tokens + MEMORY_COST.value) * tiles
    few = num_reqs >= MIN_REQUESTS_AHEAD and num_tokens <= FEW_ROWS * num_reqs
    indexer_logits_hopper_kernel[(num_sms(q.device),)](
        *_descriptors(q, weights, k_cache),
        block_table, query_start_loc, seq_lens, logits, row_lens,
        num_tokens, num_reqs, k_cache.shape[0], k_cache.stride(0) // DIM.value,
        max_seq_len, min_keys,
        block_table.stride(0), logits.stride(0),
        HEADS=num_heads, ROWS=FEW_ROWS if few else MAX_ROWS,
        SLOTS=FEW_ROWS_SLOTS if few else MAX_ROWS_SLOTS,
        REQUESTS=WARP_REQUESTS if num_reqs <= WARP_REQUESTS else BLOCK_REQUESTS,
        MANY=num_reqs > BLOCK_REQUESTS, WIDE=most > MAX_INT32,
        SCORE_REGISTERS=SCORE_REGISTERS, LOAD_REGISTERS=LOAD_REGISTERS,
        num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def _descriptors(q: Tensor, weights: Tensor, k_cache: Tensor) -> tuple[TensorDescriptor, ...]:
    """Of the queries, a row's heads at a time; the weights; the codes of a block; its scales."""
    num_tokens, num_heads, dim = q.shape
    num_blocks, block_bytes = k_cache.shape
    stride = k_cache.stride(0)
    block, codes = BLOCK.value, gl.NVMMASharedLayout(128, 8, 2)
    # All heads, and all blocks, as rows of one matrix; what else a page has is passed over.
    heads, keys = num_tokens * num_heads, (num_blocks - 1) * (stride // dim) + block
    return (
        TensorDescriptor(q, [heads, dim], [dim, 1], [num_heads, dim], codes),
        TensorDescriptor(weights, [heads], [1], [num_heads], gl.NVMMASharedLayout(0, 32, 1)),
        TensorDescriptor(
            k_cache.view(torch.float8_e4m3fn), [keys, dim], [dim, 1], [block, dim], codes
        ),
        TensorDescriptor(
            k_cache.view(torch.float32), [num_blocks, block_bytes // 4], [stride // 4, 1],
            [1, block], gl.NVMMASharedLayout(0, 32, 2),
        ),
    )  # fmt: skip
