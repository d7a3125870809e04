"""The kernel of reset_states_: the rows of new requests become zero, and nothing else changes."""

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.kernels import reset_states
from mtpgraph.kernels.reset_states import launch

from ..helpers import assert_same_bits, huge_rows, nan_pool, storage_bytes, strided_pool
from .gpu import assert_replays, twin

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_batch(num_slots: int, device: str) -> tuple[Tensor, Tensor]:
    indices = torch.tensor([5, 2, -1, 0, num_slots, 7, 5, -(2**31)], dtype=torch.int32)
    old = torch.tensor([False, True, False, False, False, True, False, False])
    return indices.to(device), old.to(device)


def assert_resets(state: Tensor) -> None:
    """Slots 5 and 0 of nine become zero; every other byte of the storage stays."""
    expected = twin(state)
    expected[[5, 0]] = 0
    launch(state, *make_batch(9, str(state.device)))
    assert torch.equal(storage_bytes(state), storage_bytes(expected))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 5), (2, 3, 4), (2, 1, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reset_states_kernel_zeroes_new_rows_alone(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    assert_resets(torch.randn(9, *shape, device=device).to(dtype))
    assert_resets(nan_pool(9, *shape, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reset_states_kernel_in_pages_writes_nothing_between_the_rows(
    dtype: torch.dtype, device: str
) -> None:
    assert_resets(strided_pool(torch.ones(9, 3, 4, dtype=dtype, device=device)))


def test_reset_states_kernel_of_any_strides(device: str) -> None:
    """Rows that are no one run of memory, up to one dim more than a launch takes."""
    assert_resets(nan_pool(9, 4, 3, device=device).transpose(1, 2))
    assert_resets(nan_pool(4, 9, 3, device=device).transpose(0, 1))
    assert_resets(nan_pool(9, 4, 6, 5, device=device)[:, ::2, 1:4, ::2])
    assert_resets(nan_pool(9, 3, 4, 6, 5, device=device)[:, :2, ::2, 1:4, ::2])
    assert_resets(nan_pool(9, 3, 3, 4, 6, 5, device=device)[:, :2, :2, ::2, 1:4, ::2])


def test_reset_states_kernel_of_rows_longer_than_a_block(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs a row, and several blocks a program."""
    monkeypatch.setattr(reset_states, "BLOCK", 16)
    for programs in (1, 32):
        monkeypatch.setattr(reset_states, "PROGRAMS_PER_SM", programs)
        monkeypatch.setattr(reset_states, "num_sms", lambda device: 1)
        assert_resets(nan_pool(9, 7, 11, device=device))
        assert_resets(nan_pool(9, 7, 11, device=device).transpose(1, 2))


@pytest.mark.parametrize("num_slots", [0, 9])
def test_reset_states_kernel_of_an_empty_batch(num_slots: int, device: str) -> None:
    state = nan_pool(num_slots, 4, device=device)
    before = state.clone()
    indices, old = make_batch(num_slots, device)
    launch(state, indices[:0], old[:0])
    if num_slots == 0:
        launch(state, indices, old)
    assert_same_bits(state, before)


def test_reset_states_kernel_reads_strided_metadata(device: str) -> None:
    state = nan_pool(9, 4, device=device)
    indices, old = make_batch(9, device)
    launch(state, indices.repeat_interleave(2)[::2], torch.stack([old, ~old], dim=1)[:, 0])
    assert state.isfinite().all(-1).nonzero().flatten().tolist() == [0, 5]


def test_reset_states_kernel_past_2_31_elements(device: str) -> None:
    state = huge_rows(torch.ones(2, 3, 4, dtype=torch.bfloat16, device=device))
    indices = torch.tensor([1], dtype=torch.int32, device=device)
    launch(state, indices, torch.tensor([False], device=device))
    assert (state[0] == 1).all()
    assert (state[1] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reset_states_replays(dtype: torch.dtype) -> None:
    def make(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return {
            "state": strided_pool(nan_pool(70, 32, 64, 128, dtype=dtype, device="cuda")),
            "state_indices": (torch.randperm(80)[:64].int() - 5).cuda(),
            "has_initial_state": (torch.rand(64) > 0.3).cuda(),
        }

    inputs = [make(seed) for seed in range(3)]
    for values in inputs:
        state = values["state"].clone()
        launch(**{**values, "state": state})
        cpu = {name: tensor.cpu() for name, tensor in values.items()}
        ops.reset_states_(**cpu)
        assert_same_bits(state.cpu(), cpu["state"])
    assert_replays(ops.reset_states_, inputs, writes="state")
