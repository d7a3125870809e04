"""What the three state updates share: which tokens and slots a program reads and writes."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from .. import state_modes
from ..helpers import assert_same_bits, assert_untouched, huge_rows, strided_pool
from ..ops.test_state_rules import make_step
from ..state_modes import NEXT_N, Mode, starts
from .gpu import assert_replays
from .state_kernels import DEVICE, MODES, all_modes, big_modes, check, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASK = torch.tensor([True, False, True])
BIG = big_modes()
all_big_modes = pytest.mark.parametrize("mode", BIG.values(), ids=BIG.keys())


def make_rows(mode: Mode, lens: list[int]) -> dict[str, Any]:
    """Rows of which the second is new."""
    return {
        "query_start_loc": starts(lens),
        "has_initial_state": MASK,
        **mode.accepted(2, 99, NEXT_N),
    }


@all_modes
def test_random_steps_match_the_oracle(mode: Mode, full: bool) -> None:
    for _ in range(60 if full else 2):
        state = mode.pool(40)
        indices, rows = make_step(mode, 40)
        num_tokens = len(indices)
        if "query_start_loc" in rows:
            num_tokens = int(rows["query_start_loc"][-1]) + random.choice([0, 0, 3])
        check(mode, state, mode.inputs(num_tokens), indices, **rows)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        pytest.param(mode, dtype, id=f"{name}-{dtype}".replace("torch.", ""))
        for name, mode in MODES.items()
        for dtype in (DTYPES if name in ("conv-slots", "mamba2-slots", "gdn-slots") else DTYPES[:1])
    ],
)
def test_a_new_row_reads_nothing_of_its_slots(mode: Mode, dtype: torch.dtype) -> None:
    stale = mode.nan_pool(12, dtype).to(DEVICE)
    clean = torch.zeros_like(stale)
    inputs, indices, rows = mode.inputs(4), mode.indices([0, 4, 8]), make_rows(mode, [1, 2, 1])
    rows["has_initial_state"] = torch.tensor([False] * 3)
    out = run(mode, stale, inputs, indices, **rows)
    assert out.isfinite().all()
    assert_same_bits(out, run(mode, clean, inputs, indices, **rows))
    written = [0, 4, 5, 8] if mode.slot_per_token else [0, 4, 8]
    assert_same_bits(stale[written], clean[written])
    assert stale[written].isfinite().all()
    # and beside an old row
    rows["has_initial_state"] = MASK
    state = mode.nan_pool(12, dtype)
    state[[0, 1, 8, 11]] = mode.pool(4, dtype)
    out, _ = check(mode, state, mode.inputs(4, dtype), indices, **rows)
    assert out.isfinite().all()
    assert out.dtype == dtype


@all_modes
@pytest.mark.parametrize("num_reqs", [0, 1, 2])
def test_padding_tokens_are_dealt_out_among_the_requests(mode: Mode, num_reqs: int) -> None:
    lens = [1, 0][:num_reqs]
    rows = {"query_start_loc": starts(lens), **mode.accepted(*[1] * num_reqs)}
    state = mode.pool(8)
    out, _ = check(mode, state, mode.inputs(8), mode.indices([0, 4])[:num_reqs], **rows)
    assert_same_bits(out[num_reqs > 0 :].cpu(), torch.zeros(out[num_reqs > 0 :].shape))


@all_modes
def test_rows_that_are_inactive_for_every_reason(mode: Mode) -> None:
    state = mode.pool(16)
    before = state.clone()
    none = [-1] * mode.columns
    far = [2**31 - 1] * mode.columns
    indices = mode.indices([none, 4, far, 8, [16] * mode.columns])
    rows: dict[str, Any] = {"query_start_loc": starts([2, 1, 3, 0, 1])}
    rows["has_initial_state"] = torch.tensor([False, True, True, False, False])
    _, pool = check(mode, state, mode.inputs(9), indices, **rows, **mode.accepted(1, 1, 1, 1, 1))
    assert_untouched(pool.cpu(), before, [4])


# A card has no memory for pages of 2**31 elements; the last test has what fits.
PLACES = [strided_pool] if DEVICE == "cuda" else [strided_pool, huge_rows]


@all_modes
@pytest.mark.parametrize("place", PLACES)
def test_pools_in_pages(mode: Mode, place: Any) -> None:
    state, rows = mode.pool(6), {"query_start_loc": starts([2, 1]), **mode.accepted(1, 2)}
    check(mode, state, mode.inputs(3), mode.indices([1, 2]), place=place, **rows)


@all_modes
def test_pools_and_metadata_of_any_stride(mode: Mode) -> None:
    def backwards(pool: Tensor) -> Tensor:
        order = list(range(pool.dim()))[::-1]
        return pool.permute(order).contiguous().permute(order)

    def spread(tensor: Tensor) -> Tensor:
        wide = tensor.new_full((*tensor.shape, 3), 1)
        wide[..., 1] = tensor
        return wide[..., 1]

    rows = {name: spread(tensor) for name, tensor in make_rows(mode, [1, 2, 1]).items()}
    rows["dst_indices"] = spread(mode.indices([12, 16, 20]))
    inputs = {
        name: spread(value) if isinstance(value, Tensor) else value
        for name, value in mode.inputs(4).items()
    }
    indices = spread(mode.indices([0, 4, 8]))
    check(mode, mode.pool(24), inputs, indices, place=backwards, **rows)


@all_modes
def test_a_slot_is_source_and_target_of_one_row(mode: Mode) -> None:
    # The last token goes to the slot that the row started from, and the first one elsewhere.
    state, rows = mode.pool(8), {"query_start_loc": starts([3]), **mode.accepted(3)}
    indices = mode.indices([[5, 2, 7, 1]]) if mode.slot_per_token else mode.indices([5])
    check(mode, state, mode.inputs(3), indices, **rows)


def test_no_request_and_no_token() -> None:
    for mode in MODES.values():
        for num_reqs in (0, 2):
            state = mode.pool(8)
            rows = {"query_start_loc": starts([0] * num_reqs), **mode.accepted(*[1] * num_reqs)}
            out, _ = check(mode, state, mode.inputs(0), mode.indices([0, 4])[:num_reqs], **rows)
            assert out.numel() == 0


@pytest.mark.gpu
@all_big_modes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_sizes_of_models(mode: Mode, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    lens = [4, 1, 2, 0, 8, 3]
    rows = {
        "query_start_loc": starts(lens),
        "has_initial_state": torch.tensor([True, True, False, True, False, True]),
        **mode.accepted(2, 1, 0, 1, 77, 4),
    }
    state, inputs = mode.pool(32, state_dtype), mode.inputs(sum(lens) + 5, dtype)
    check(mode, state, inputs, mode.indices([0, 4, 8, 8, 16, 20]), **rows)
    indices = mode.indices([0, 4, 8, [-1] * mode.columns, 16, 20])
    check(
        mode, state, mode.inputs(6, dtype), indices, place=strided_pool, **mode.accepted(*[1] * 6)
    )


@pytest.mark.gpu
@all_big_modes
def test_a_captured_step_serves_every_batch(mode: Mode) -> None:
    name = "conv_state" if mode.name.startswith("conv") else "state"

    def step(lens: list[int], slots: list[int], new: list[int], accepted: list[int]) -> Any:
        state = mode.nan_pool(48)
        state[16:32] = mode.pool(16)
        mask = torch.tensor([r not in new for r in range(6)])
        inputs = {
            name: state,
            **mode.inputs(24, torch.bfloat16),
            "state_indices": mode.indices([[-1] * mode.columns if s < 0 else s for s in slots]),
            "query_start_loc": starts(lens),
            "has_initial_state": mask,
            **mode.accepted(*accepted),
        }
        return {k: v.cuda() if isinstance(v, Tensor) else v for k, v in inputs.items()}

    assert_replays(
        state_modes.MODES[mode.name].op,
        [
            step([0] * 6, [-1] * 6, [], [1] * 6),
            step([4] * 6, [16, 20, 24, 28, 0, 4], [4, 5], [1, 2, 3, 4, 0, 0]),
            step([1, 2, 0, 0, 0, 0], [16, 0, -1, -1, -1, -1], [1], [1, 9, 1, 1, 1, 1]),
            step([1, 3, 4, 0, 2, 7], [28, 24, 0, 20, -1, 4], [2, 5], [4, 1, 0, 1, 1, 1]),
        ],
        writes=name,
    )


@pytest.mark.gpu
@all_big_modes
def test_a_slot_beyond_2_to_the_31_elements(mode: Mode) -> None:
    last = 2**31 // 2**20 + mode.columns
    flat = torch.zeros((last + 1) << 20, dtype=torch.bfloat16, device="cuda")
    strides = torch.empty(mode.state_shape, device="meta").stride()
    state = flat.as_strided((last + 1, *mode.state_shape), (2**20, *strides))
    live = [0, 1, 2, 3, *range(last - mode.columns + 1, last + 1)]
    state[live] = mode.pool(len(live), torch.bfloat16).cuda()
    small = state[live].clone()
    rows = {"query_start_loc": starts([2, 3]), **mode.accepted(1, mode.columns)}
    inputs = mode.inputs(5, torch.bfloat16)
    out = run(mode, state, inputs, mode.indices([0, live[4]]), **rows)
    assert_same_bits(out, run(mode, small, inputs, mode.indices([0, 4]), **rows))
    assert_same_bits(state[live], small)
    assert state[last // 2].count_nonzero() == 0
