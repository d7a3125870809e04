"""What a model of the corpus is: a decode step, and everything that is expected of it."""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mtpgraph import Batched

from .batches import SCHEDULES, Stream

INPUTS = {
    "x": Batched(0, pad=0, per="token"),
    "tokens": Batched(0, pad=0, per="token"),
    "positions": Batched(0, pad=0, per="token"),
    "query_start_loc": Batched(0, pad="last", extra=1),
    "seq_lens": Batched(0, pad=0),
    "block_table": Batched(0, pad=-1),
    "slot_mapping": Batched(0, pad=-1, per="token"),
    "state_indices": Batched(0, pad=-1),
    "num_accepted_tokens": Batched(0, pad=1),
    "row_bias": Batched(0, pad=0),
}
"""What the arguments of a step are to its batch, by the names that all models use."""

PADS: dict[str, tuple[Any, ...]] = {"tokens": (0, -1), "positions": (0, -1), "block_table": (-1, 0)}
"""Further pads that would do as well."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A decode step and what is expected of it. Lines are named by a part of their code.

    Attributes:
        name: of the model; unique
        step: the step, or
        build: makes it, for a step that owns its caches. Its arguments that are named in
            ``INPUTS`` are the batch
        kept: makes the other arguments: caches and states
        spelling: it is a model from above in other words: only what is compiled is looked at
        batches: of several lengths, never of a single row, all of ``NEXT_N`` tokens, or all of one
        dtype: of ``x``
        graphs: graphs of one call under ``torch.compile``
        breaks: line of each graph break there
        refused: line that ``mtpgraph.compile`` cannot get into one graph, if there is one
        rewrites: by the name of the pass; those of ``find_mutation_hazards`` are snapshots
        left_alone: pass and a part of its reason, for what a pass does not rewrite
        syncs: lines that wait for the device
        findings: what stands against padding: its kind, and its line
        mixes: line where padding does reach real rows if the step is padded all the same; None
            where a finding is a doubt
        static: arguments of ``INPUTS`` that do not grow, as far as one can know
        recompiles: Python values that the step reads change from call to call, and Dynamo compiles
            for each; None where it depends on the version of torch
        inputs: arguments that pad in another way than ``INPUTS`` says
        exact: padded calls give the bits of eager; else within the tolerance, for products of
            matrices and functions like ``exp`` round by the size of the batch
        inductor: the numbers of generated code are looked at, too
        needs: a module without which the model is skipped
    """

    name: str
    step: Callable[..., Any] | None = None
    build: Callable[[], Callable[..., Any]] | None = None
    kept: Callable[[], dict[str, Any]] = dict
    spelling: bool = False
    batches: Literal["ragged", "several", "uniform", "single"] = "ragged"
    dtype: torch.dtype = torch.float32
    graphs: int = 1
    breaks: tuple[str, ...] = ()
    refused: str = ""
    rewrites: Mapping[str, int] = dataclasses.field(default_factory=dict)
    left_alone: tuple[tuple[str, str], ...] = ()
    syncs: tuple[str, ...] = ()
    findings: tuple[tuple[str, str], ...] = ()
    mixes: str | None = None
    static: tuple[str, ...] = ()
    recompiles: bool | None = False
    inputs: Mapping[str, Batched] = dataclasses.field(default_factory=dict)
    exact: bool = False
    inductor: bool = False
    needs: str = ""

    def fresh(self) -> "Setup":
        """The step with caches of its own, the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            step = self.step or (self.build and self.build())
            assert step is not None
            return Setup(step, self.kept())

    def stream(self, poisoned: bool = False) -> list[dict[str, Tensor]]:
        """The batches of a run, by argument name; ``poisoned`` has NaN in padding of its own."""
        state = random.getstate()
        random.seed(1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            stream = Stream(self.dtype, poisoned)
            found = [stream.batch(rows) for rows in SCHEDULES[self.batches]]
        random.setstate(state)
        return found


@dataclasses.dataclass(frozen=True)
class Setup:
    """A step, and the caches and states that are its arguments."""

    step: Callable[..., Any]
    kept: dict[str, Any]

    def arguments(self, names: list[str], batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {name: self.kept[name] if name in self.kept else batch[name] for name in names}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that lasts from one step to the next."""
        found: dict[str, Tensor] = {}
        owner = getattr(self.step, "__self__", self.step)
        for name, value in {**self.kept, "inputs": owner}.items():
            _collect(name, value, found)
        return found


def _collect(name: str, value: Any, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[name] = value
    elif isinstance(value, nn.Module):
        found.update({f"{name}.{key}": tensor for key, tensor in value.state_dict().items()})
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(f"{name}[{key!r}]", item, found)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(f"{name}[{index}]", item, found)
    elif dataclasses.is_dataclass(value):
        _collect(name, vars(value), found)
