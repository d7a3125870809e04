"""What every test starts from: a seed of its own, poisoned allocations, and markers."""

import functools
import gc
import hashlib
import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Kernels then run in Triton's interpreter. Triton reads this when it is imported, its own
    # library included, so it is set before anything can import it.
    os.environ["TRITON_INTERPRET"] = "1"

from torch._subclasses.fake_tensor import FakeTensor

# Tracing makes many objects that live long: by default a tenth of its time goes to the search for
# cycles among them.
gc.set_threshold(50_000, 20, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="widen the random sweeps, compile every case"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA card"))


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """True under ``--full``: a sweep may then take its time."""
    return pytestconfig.getoption("--full")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that an op runs on."""
    return request.param


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """A test draws the same numbers alone, in any order, and next to any other test."""
    digest = hashlib.sha256(request.node.nodeid.encode()).digest()
    value = int.from_bytes(digest[:4], "little")
    random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def poisoned_empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Memory that an op allocates holds NaN or garbage, so an output left unwritten cannot pass.

    It covers tests/ops, tests/kernels and the cases; elsewhere torch is left as it is.
    """
    path = request.path
    if path.parent.name not in ("ops", "kernels") and not path.name.startswith("test_cases"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def wrapper(*args: object, **kwargs: object) -> Tensor:
        tensor = allocate(*args, **kwargs)
        if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor) or tensor.is_meta:
            return tensor
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(0x5A if tensor.dtype.itemsize == 1 else 0x5A5A)

    return wrapper
