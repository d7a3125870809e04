"""Timing of short kernels: graphs of several calls, the arms in turn, medians."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .bench_shapes import Ceilings


def first_line(error: Exception) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


@dataclass
class Arm:
    """One way of doing a shape's work."""

    name: str
    call: Callable[[int], Any]
    """Does it with one of the shape's input sets, on the current stream."""
    check: Callable[[], str]
    """What is wrong with its results, "" if nothing."""
    ours: bool = False
    apart: bool = False
    """A plan that each step has to make anew (schedule, split) was made beforehand."""
    check_others: Callable[[], str] = lambda: ""
    """What is wrong with its results for inputs of other kinds than those that are timed."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call: median, least and most over the rounds."""

    us: float
    us_min: float
    us_max: float


@dataclass(frozen=True)
class Plan:
    """How a shape is timed: calls in a graph, and the input sets that they go through in turn."""

    calls: int
    sets: int
    rounds: int
    l2: str
    """"cold": the inputs outgrow the L2 twice; "warm": they fit; else the share that fits."""


def plan(
    set_bytes: int, floor_us: float, rounds: int, l2_bytes: int, max_sets: int, rotate: bool = True
) -> Plan:
    """Enough input sets to outgrow the L2, and enough calls that a graph's launch does not show.

    Args:
        set_bytes: what one call has to read
        max_sets: input sets that there is memory for
        rotate: False leaves the inputs in the L2, where the step's own kernels would leave them
    """
    wanted = -(-2 * l2_bytes // set_bytes) if rotate else min(4, l2_bytes // set_bytes)
    sets = max(1, min(max_sets, wanted))
    # graphs of about 300 us: ten times what a launch of one takes, and more
    least = max(4, min(40, int(300 / max(floor_us, 5))))
    calls = -(-least // sets) * sets
    warm = min(1.0, l2_bytes / (sets * set_bytes))
    # in turn, least recently used first, not even half of what outgrows the L2 twice is found there
    l2 = "cold" if warm <= 0.5 else "warm" if warm == 1.0 else f"{warm:.0%} warm"
    return Plan(calls, sets, rounds, l2)


def time_arms(arms: Sequence[Arm], plan: Plan) -> dict[str, Timing | str]:
    """Replays of each arm's graph, in turn; the arm that begins changes from round to round.

    An arm that cannot be captured has the reason instead.
    """
    results: dict[str, Timing | str] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for arm in arms:
        try:
            graphs[arm.name] = _capture(arm, plan)
        except Exception as error:  # a peer may do what a capture does not allow
            results[arm.name] = first_line(error)
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    names = list(graphs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for first in range(plan.rounds):
        for step in range(len(names)):
            name = names[(first + step) % len(names)]
            times[name].append(_replay_us(graphs[name]) / plan.calls)
    for name, us in times.items():
        results[name] = Timing(statistics.median(us), min(us), max(us))
    graphs.clear()
    # the pools of the graphs are of no use to the next shape
    torch.cuda.empty_cache()
    return results


def _capture(arm: Arm, plan: Plan) -> torch.cuda.CUDAGraph:
    # what compiles or plans at a first call does so here, with each set that a call may meet
    for i in range(plan.sets):
        arm.call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(plan.calls):
            arm.call(i % plan.sets)
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def measure_ceilings(device: torch.device) -> Ceilings:
    """What a kernel that copies much and large products of random matrices reach on the card.

    A card without fp8 products multiplies keys as bf16.
    """
    size = 8192
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    # copy_ would be the driver's copy, which is slower than a kernel
    copy_us = _least_us(lambda _: torch.neg(source, out=target))
    left, right = source[: 2 * size * size].view(2, size, size).bfloat16()
    bf16_us = fp8_us = _least_us(lambda _: left @ right)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        left8, right8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        one = torch.ones(1, device=device)
        kind = F.ScalingType.TensorWise
        fp8_us = _least_us(lambda _: F.scaled_mm(left8, right8, one, kind, one, kind))
    flops = 2 * size**3 * 1e6
    return Ceilings(2 * source.nbytes / copy_us * 1e6, flops / fp8_us, flops / bf16_us)


def _least_us(call: Callable[[int], Any]) -> float:
    arm = Arm("a ceiling of the card", call, lambda: "")
    timing = time_arms([arm], Plan(calls=4, sets=1, rounds=7, l2="cold"))[arm.name]
    if isinstance(timing, str):
        raise RuntimeError(f"{arm.name} cannot be measured: {timing}")
    return timing.us_min
