"""Models of other people's kind: no op of ours in most of them."""

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

THIS = str(Path(__file__))
LOG = logging.getLogger(__name__)
TABLE = torch.arange(12, dtype=torch.float32).view(4, 3)
STEPS = torch.zeros(())


def line_of(marker: str) -> str:
    """``file:line`` of the line of this file that ends in ``# marker``."""
    lines = Path(THIS).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"{THIS}:{number}"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Counting(nn.Module):
    """Keeps a number that changes in a Python attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # counting
        return x * self.calls


class CountingBuffer(nn.Module):
    """Keeps the same number in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Gated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # gated
            return x * 2
        return x


def item(x: Tensor) -> Tensor:
    return x * (x + 1).amax().item()  # item


def prints(x: Tensor) -> Tensor:
    y = x + 1
    print("step")  # print
    return y * 2


def logs(x: Tensor) -> Tensor:
    y = x + 1
    LOG.info("step")  # log
    return y * 2


def mask(x: Tensor) -> Tensor:
    return (x + 1)[x > 0] * 2  # mask


def clock(x: Tensor) -> Tensor:
    y = x + 1
    time.perf_counter_ns()  # clock
    return y * 2


@torch.compiler.disable
def eager_only(x: Tensor) -> Tensor:
    return x * 3


def disabled(x: Tensor) -> Tensor:
    return eager_only(x + 1) * 2  # disabled


def loop(x: Tensor) -> Tensor:
    """Dynamo gives up a function that breaks in a loop: there is no graph at all."""
    total = torch.zeros_like(x[0])
    for row in x:
        total = total + row
        if total.sum() > 100:  # loop
            break
    return total


def to_list(x: Tensor) -> Tensor:
    return x * len((x + 1).tolist())  # to_list


_LIBRARY = torch.library.Library("mtpgraph_tests_testing", "FRAGMENT")
_LIBRARY.define("no_fake(Tensor x) -> Tensor")
_LIBRARY.impl("no_fake", lambda x: x * 2, "CPU")


def no_fake(x: Tensor) -> Tensor:
    return torch.ops.mtpgraph_tests_testing.no_fake(x + 1)  # no_fake


def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor  # scaled


def repeated(x: Tensor, times: int) -> Tensor:
    if times == 1:  # repeated
        return x + 1
    return x * times


def added(x: Tensor, y: Tensor | None = None) -> Tensor:
    return x + 1 if y is None else x + y  # added


def doubled(x: Tensor) -> Tensor:
    return x * 2  # doubled


def summed(xs: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, xs) + 1


def looked_up(indices: Tensor) -> Tensor:
    """Reads one global and writes another."""
    STEPS.add_(1)
    return TABLE[indices] + STEPS


def with_closure() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A function that adds up what it was given, and where it does."""
    total = torch.zeros(3)

    def step(x: Tensor) -> Tensor:
        total.add_(x.sum(0))
        return x + total

    return step, total
