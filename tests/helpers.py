"""What tests share: the tolerances, batches with every kind of garbage, poisoned pools."""

import itertools
import math
import mmap
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

# (rtol, atol) of a result in this dtype against float64. The only place that states tolerances.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 8e-3),
}

OPCHECK_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """``actual`` is ``expected`` (float64, any device) within the tolerance of its own dtype."""
    rtol, atol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(
        actual.double().cpu(), expected.double().cpu(), rtol=rtol, atol=atol, equal_nan=True
    )


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal dtype, shape and bytes: NaN equals the same NaN, -0.0 does not equal 0.0."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(_bytes(actual), _bytes(expected.to(actual.device)))


def assert_same_result(actual: Tensor, expected: Tensor) -> None:
    """The same row computed in another layout or batch: equal bits on a CPU; within the tolerance
    on a GPU, whose kernels may split the same sum differently."""
    if actual.is_cuda and actual.is_floating_point():
        assert_close(actual, expected)
    else:
        assert_same_bits(actual, expected)


def assert_untouched(pool: Tensor, before: Tensor, touched: Sequence[int] = ()) -> None:
    """Every row of ``pool``, the ``touched`` ones aside, holds the bytes it had in ``before``."""
    keep = [row for row in range(pool.shape[0]) if row not in set(touched)]
    assert_same_bits(pool[keep], before[keep])


def storage_bytes(tensor: Tensor) -> Tensor:
    """A copy of all bytes behind ``tensor``, those between its rows included."""
    storage = tensor.untyped_storage()
    view = torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(storage)
    return view.clone()


def nan_pool(
    *shape: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Tensor:
    """A pool of 0xFF bytes: NaN in every float dtype, scales and codes of a cache included."""
    size = math.prod(shape) * dtype.itemsize
    return torch.full((size,), 0xFF, dtype=torch.uint8, device=device).view(dtype).view(shape)


def strided_pool(pool: Tensor, before: int = 16, after: int = 48) -> Tensor:
    """``pool`` as a view into bigger pages: a storage offset, and a gap of NaN between rows."""
    row = math.prod(pool.shape[1:])
    page = nan_pool(pool.shape[0], before + row + after, dtype=pool.dtype, device=pool.device)
    view = page[:, before : before + row].unflatten(1, pool.shape[1:])
    _byte_view(view).copy_(_byte_view(pool))
    return view


def virtual(
    numel: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Tensor:
    """A flat tensor of zeros; on a CPU only the pages that are written take up memory.

    Views into it have strides past 2**31 elements without a huge tensor.
    """
    if torch.device(device).type == "cuda":
        return torch.zeros(numel, dtype=dtype, device=device)
    no_reserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=flags), dtype=dtype)


def huge_rows(rows: Tensor, gap: int = 2**31 + 64) -> Tensor:
    """``rows`` as a view whose rows lie ``gap`` elements apart."""
    size = math.prod(rows.shape[1:])
    flat = virtual((rows.shape[0] - 1) * gap + size, rows.dtype, rows.device)
    view = flat.as_strided((rows.shape[0], size), (gap, 1)).unflatten(1, rows.shape[1:])
    _byte_view(view).copy_(_byte_view(rows))
    return view


@dataclass
class Batch:
    """The metadata of one step, and what a plain loop says about it."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    num_blocks: int
    num_tokens: int
    max_seq_len: int
    query_lens: list[int]
    # per token: its request (-1: padding token) and how many keys it sees
    rows: list[tuple[int, int]]
    # per request: its blocks, in logical order, none of them shared
    blocks: list[list[int]]

    @property
    def row_lens(self) -> Tensor:
        lens = [row_len for _, row_len in self.rows]
        return torch.tensor(lens, dtype=torch.int32, device=self.seq_lens.device)

    @property
    def row_requests(self) -> Tensor:
        requests = [request for request, _ in self.rows]
        return torch.tensor(requests, dtype=torch.int32, device=self.seq_lens.device)


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int = 4,
    *,
    trailing: int = 0,
    extra_columns: int = 3,
    spare_blocks: int = 3,
    device: str | torch.device = "cpu",
) -> Batch:
    """A batch whose requests own permuted blocks of a pool.

    Past the blocks that a request needs its block-table row holds -1, huge, negative and stale
    entries in turn. ``trailing`` tokens follow ``query_start_loc[-1]``; a sequence length of 0
    makes a padding request, with any query length.
    """
    needed = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(needed) + spare_blocks
    order = iter(torch.randperm(num_blocks).tolist())
    blocks = [list(itertools.islice(order, count)) for count in needed]

    garbage = itertools.cycle([-1, 2**31 - 1, -(2**31), num_blocks, 0, -7])
    width = max(needed, default=0) + extra_columns
    table = [row + [next(garbage) for _ in range(width - len(row))] for row in blocks]

    rows: list[tuple[int, int]] = []
    slots: list[int] = []
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for j in range(query_len):
            position = seq_len - query_len + j
            rows.append((request, max(0, position + 1)))
            if position < 0:
                slots.append(-1)
            else:
                block = blocks[request][position // block_size]
                slots.append(block * block_size + position % block_size)
    rows += [(-1, 0)] * trailing
    slots += [-1] * trailing

    def int32(values: Sequence[int] | list[list[int]], *shape: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device).view(shape)

    num_reqs = len(query_lens)
    return Batch(
        query_start_loc=int32([0, *itertools.accumulate(query_lens)], num_reqs + 1),
        seq_lens=int32(list(seq_lens), num_reqs),
        block_table=int32(table, num_reqs, width),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        block_size=block_size,
        num_blocks=num_blocks,
        num_tokens=len(rows),
        max_seq_len=max(1, *seq_lens) if seq_lens else 1,
        query_lens=list(query_lens),
        rows=rows,
        blocks=blocks,
    )


# query_lens, seq_lens, trailing tokens: the mixes that a scheduler can send
BATCHES: dict[str, tuple[list[int], list[int], int]] = {
    "one token": ([1], [9], 0),
    "one row": ([4], [9], 0),
    "uniform": ([2, 2, 2], [9, 5, 12], 0),
    "ragged": ([1, 3, 2, 5], [7, 3, 10, 11], 0),
    "long prefill": ([1, 19, 2], [13, 30, 2], 0),
    "ragged padding": ([2, 0, 1, 0, 0], [6, 0, 4, 0, 0], 0),
    "uniform padding": ([2, 2, 2, 2], [6, 3, 0, 0], 0),
    "padding in the middle": ([2, 0, 3, 1, 2], [7, 0, 0, 5, 8], 3),
    "longer query than sequence": ([6, 1], [1, 4], 1),
    "padding alone": ([0, 2], [0, 0], 2),
    "no request": ([], [], 3),
    "no token": ([0, 0], [0, 0], 0),
    "nothing": ([], [], 0),
}
each_batch = pytest.mark.parametrize("case", BATCHES.values(), ids=BATCHES.keys())


def random_case(max_reqs: int = 5) -> tuple[list[int], list[int], int]:
    """A drawn ``case``, padding requests of both kinds included."""
    query_lens, seq_lens = [], []
    for _ in range(random.randint(0, max_reqs)):
        seq_len = random.choice([0, random.randint(1, 20)])
        query_lens.append(random.choice([0, 1, random.randint(1, 8)]))
        seq_lens.append(seq_len)
    return query_lens, seq_lens, random.choice([0, 0, random.randint(1, 4)])


def assert_refused(
    op: Callable[..., Any], inputs: dict[str, Any], error: type[Exception], match: str
) -> None:
    """``op`` refuses ``inputs`` in the same words whether eager or traced, and writes nothing."""
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    before = [storage_bytes(tensor) for tensor in tensors if not tensor.is_meta]
    with pytest.raises(error, match=match):
        op(**inputs)
    after = [storage_bytes(tensor) for tensor in tensors if not tensor.is_meta]
    assert all(map(torch.equal, before, after))

    mode = FakeTensorMode()
    fakes = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    with mode, pytest.raises(error, match=match):
        op(**fakes)


def assert_refuses_grad(op: Callable[..., Any], inputs: dict[str, Any], name: str) -> None:
    """``op`` refuses ``inputs[name]`` under grad mode when it requires grad, and only then."""
    inputs = {**inputs, name: inputs[name].clone().requires_grad_()}
    with pytest.raises(RuntimeError, match="has no gradient, got an input that requires grad"):
        op(**inputs)
    with torch.no_grad():
        op(**inputs)


def assert_compiled_equals_eager(
    op: Callable[..., Any],
    make_inputs: Sequence[Callable[[], dict[str, Any]]],
    *,
    backend: str = "inductor",
) -> None:
    """One graph of ``op`` serves every one of ``make_inputs``, and returns and leaves in the
    arguments the very bits that eager does."""
    torch._dynamo.reset()
    # Sizes that happen to be equal in the first call must not be tied to each other.
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        _compare_with_compiled(op, make_inputs, backend)


def _compare_with_compiled(
    op: Callable[..., Any], make_inputs: Sequence[Callable[[], dict[str, Any]]], backend: str
) -> None:
    compiled = torch.compile(op, backend=backend, fullgraph=True, dynamic=True)
    for number, make in enumerate(make_inputs):
        state = torch.get_rng_state()
        expected_inputs = make()
        torch.set_rng_state(state)
        inputs = make()
        expected = op(**expected_inputs)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            actual = compiled(**inputs)
        for tensor, other in zip(_tensors(actual), _tensors(expected), strict=True):
            assert_same_bits(tensor, other)
            assert tensor.stride() == other.stride()
        for name, value in expected_inputs.items():
            if isinstance(value, Tensor):
                assert torch.equal(storage_bytes(inputs[name]), storage_bytes(value)), name


def assert_opcheck(op: torch._ops.OpOverload, *samples: dict[str, Any]) -> None:
    """``torch.library.opcheck`` holds for each sample of keyword arguments."""
    for sample in samples:
        tests = list(OPCHECK_TESTS)
        if any(tensor.dtype == torch.float8_e4m3fn for tensor in _tensors([*sample.values()])):
            # It compares arguments before and after with allclose, which fp8 does not have.
            tests.remove("test_schema")
        torch.library.opcheck(op, (), sample, test_utils=tests)


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, Tensor)]


def _byte_view(tensor: Tensor) -> Tensor:
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    )


def _bytes(tensor: Tensor) -> Tensor:
    return _byte_view(tensor.contiguous())
