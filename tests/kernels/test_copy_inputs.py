"""One launch that fills the buffers of a step against slices of torch."""

import random

import pytest
import torch
from torch import Tensor

from mtpgraph.kernels.copy_inputs import MAX_INPUTS, InputCopy, Target

from ..helpers import assert_same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool, torch.uint8)


def make(dtype: torch.dtype, *shape: int, device: str) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).to(device, dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(device, dtype)


def expected(target: Target, source: Tensor, count: int) -> Tensor:
    buffer = torch.empty_like(target.buffer)
    buffer[:count] = source
    if target.pad is None:
        buffer[count:] = source[-1:] if count else 0
    else:
        buffer[count:] = target.pad
    return buffer


def check(targets: list[Target], requests: int, tokens: int) -> InputCopy:
    copy = InputCopy(targets)
    fill(copy, targets, requests, tokens)
    return copy


def fill(copy: InputCopy, targets: list[Target], requests: int, tokens: int) -> None:
    counts = [(tokens if t.counts_tokens else requests) + t.extra for t in targets]
    sources = [
        make(t.buffer.dtype, count, *t.buffer.shape[1:], device=str(t.buffer.device))
        for t, count in zip(targets, counts, strict=True)
    ]
    copy([source.data_ptr() for source in sources], requests, tokens)
    for target, source, count in zip(targets, sources, counts, strict=True):
        assert_same_bits(target.buffer, expected(target, source, count))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_are_copied_and_the_rest_is_padding(dtype: torch.dtype, device: str) -> None:
    pad = float("nan") if dtype.is_floating_point else True
    targets = [
        Target(make(dtype, 9, device=device), False, 1, None),
        Target(make(dtype, 8, 3, device=device), False, 0, pad),
        Target(make(dtype, 20, 5, 7, device=device), True, 0, 0),
        Target(make(dtype, 20, device=device), True, 0, 1),
    ]
    copy = check(targets, 3, 7)
    for requests, tokens in [(8, 20), (1, 1), (0, 0), (5, 12)]:
        fill(copy, targets, requests, tokens)


def test_any_number_of_inputs(device: str) -> None:
    dtypes = random.choices(DTYPES, k=2 * MAX_INPUTS + 3)
    targets = [
        Target(make(dtype, 6, place % 4, device=device), bool(place % 2), 0, place % 2)
        for place, dtype in enumerate(dtypes)
    ]
    check(targets, 4, 5)


def test_entries_of_more_than_one_block(device: str) -> None:
    targets = [
        Target(make(torch.bfloat16, 6, 3001, device=device), True, 0, 0),
        Target(make(torch.int32, 3, 4099, device=device), False, 0, None),
    ]
    check(targets, 2, 5)


def test_an_input_in_its_place_is_left_there(device: str) -> None:
    targets = [
        Target(make(torch.int32, 5000, device=device), False, 0, None),
        Target(make(torch.int32, 8, 3, device=device), True, 0, -1),
    ]
    copy = InputCopy(targets)
    fronts = [targets[0].buffer[:4096], targets[1].buffer[:5]]
    wanted = [
        expected(target, front.clone(), len(front))
        for target, front in zip(targets, fronts, strict=True)
    ]
    copy([front.data_ptr() for front in fronts], 4096, 5)
    for target, want in zip(targets, wanted, strict=True):
        assert_same_bits(target.buffer, want)


def test_an_input_at_an_odd_address(device: str) -> None:
    target = Target(make(torch.uint8, 64, device=device), False, 0, 7)
    source = make(torch.uint8, 41, device=device)[1:]
    InputCopy([target])([source.data_ptr()], 40, 40)
    assert_same_bits(target.buffer, expected(target, source, 40))


@pytest.mark.gpu
def test_a_second_launch_takes_other_addresses_and_sizes() -> None:
    targets = [
        Target(make(torch.bfloat16, 64, 2048, device="cuda"), True, 0, 0),
        Target(make(torch.int32, 65, device="cuda"), False, 1, None),
    ]
    copy = InputCopy(targets)
    for requests in (64, 1, 37, 0, 64):
        fill(copy, targets, requests, requests)
