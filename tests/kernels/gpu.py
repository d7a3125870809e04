"""What the ``gpu`` tests of kernels share: a captured call serves every batch of its size."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..helpers import assert_same_bits, storage_bytes


def assert_replays(
    op: Callable[..., Any], inputs: Sequence[dict[str, Any]], writes: str = ""
) -> None:
    """One CUDA graph of ``op`` serves all of ``inputs``: the results and every byte behind the
    arguments, those between the rows of a pool included, are what a fresh call leaves; and that
    leaves all arguments but ``writes`` as they were.

    The graph is captured on the first of ``inputs``; the tensors of the others have its shapes,
    strides and dtypes, and the arguments that are no tensors are its own.
    """
    warm_up = _copies(inputs[0])
    op(**warm_up)
    torch.cuda.synchronize()

    static = _copies(inputs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _tensors(op(**static))

    # The first batch once more at the end: no replay leaves anything behind.
    for values in [*inputs, inputs[0]]:
        fresh = _copies(values)
        expected = _tensors(op(**fresh))
        for name, value in values.items():
            if isinstance(value, Tensor) and name != writes:
                same = torch.equal(storage_bytes(fresh[name]), storage_bytes(value))
                assert same, f"{name} is written"
        _copy_into(static, values)
        for result in results:
            _flat(result).fill_(0xA5)
        graph.replay()
        torch.cuda.synchronize()
        for result, other in zip(results, expected, strict=True):
            assert_same_bits(result, other)
        for name, value in fresh.items():
            if isinstance(value, Tensor):
                same = torch.equal(storage_bytes(static[name]), storage_bytes(value))
                assert same, f"{name} after the replay is not {name} after a fresh call"


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, Tensor)]


def _copies(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: twin(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def twin(tensor: Tensor) -> Tensor:
    """``tensor`` and all bytes around it once more, in a storage of its own."""
    flat = storage_bytes(tensor)
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _copy_into(static: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            assert static[name] == value, name
            continue
        target = static[name]
        layout = (target.shape, target.stride(), target.storage_offset(), target.dtype)
        assert layout == (value.shape, value.stride(), value.storage_offset(), value.dtype), name
        _flat(target).copy_(_flat(value))


def _flat(tensor: Tensor) -> Tensor:
    """All bytes behind ``tensor``, a view."""
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage())
