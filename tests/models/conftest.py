from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No test meets the compilations of another: recompiles and limits are its own."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
