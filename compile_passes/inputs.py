"""What the arguments of a step are to its batch, and one batch read by that."""

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from .survey import Survey, Surveyor


@dataclasses.dataclass(frozen=True)
class Batched:
    """An input that grows with the batch.

    Attributes:
        dim: its dimension that grows
        pad: what padding holds: a number, or "last", which repeats the last real entry (for
            ``query_start_loc``, so that padding requests have no tokens)
        per: what it holds one entry for, a "request" or a "token"
        extra: entries beyond one each (1 for ``query_start_loc``)
    """

    dim: int = 0
    pad: float | bool | Literal["last"] = 0
    per: Literal["request", "token"] = "request"
    extra: int = 0

    def __post_init__(self) -> None:
        if type(self.dim) is not int or self.dim < 0:
            raise ValueError(f"dim must be a non-negative int, got {self.dim!r}")
        if not (isinstance(self.pad, int | float) or self.pad == "last"):
            raise ValueError(f'pad must be a number or "last", got {self.pad!r}')
        if self.per not in ("request", "token"):
            raise ValueError(f'per must be "request" or "token", got {self.per!r}')
        if type(self.extra) is not int or self.extra < 0:
            raise ValueError(f"extra must be a non-negative int, got {self.extra!r}")

    def length(self, requests: int, tokens: int) -> int:
        """Its size along ``dim`` for so many requests and tokens."""
        return (requests if self.per == "request" else tokens) + self.extra


@dataclasses.dataclass(frozen=True)
class Static:
    """An input that does not grow with the batch: caches, states, weights. Used where it lies."""


Specs = Mapping[str, Batched | Static]


def check_specs(
    inputs: Mapping[str, Batched | Static | type[Static]], signature: inspect.Signature
) -> Specs:
    """The declared inputs, checked against the arguments of the step."""
    names = list(signature.parameters)
    specs: dict[str, Batched | Static] = {}
    for name, spec in inputs.items():
        if name not in names:
            match = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {match[0]!r}?" if match else f"it has {', '.join(names)}"
            raise ValueError(f"inputs must name arguments of the step, got {name!r}; {hint}")
        spec = spec() if spec is Static else spec
        if not isinstance(spec, Batched | Static):
            raise TypeError(f"inputs[{name!r}] must be Batched or Static, got {spec!r}")
        specs[name] = spec
    return specs


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arguments of one call, sorted by what they are to the batch.

    Attributes:
        bound: the arguments as they came
        batched: those that grow, by name
        specs: how these were declared
        surveys: what lies in those that do not
        requests, tokens: the size of the batch
        mode: inference mode and autocast
        kind: equal for calls that one compilation can serve
    """

    bound: inspect.BoundArguments
    batched: dict[str, Tensor]
    specs: dict[str, Batched]
    surveys: list[Survey]
    requests: int
    tokens: int
    mode: Any
    kind: Any

    @classmethod
    def read(
        cls,
        bound: inspect.BoundArguments,
        specs: Specs,
        surveyor: Surveyor,
        next_n: int,
        known: Mapping[str, Survey] | None = None,
    ) -> "Batch":
        """Sort the arguments of a call and count its requests and tokens.

        Args:
            bound: the call, with defaults
            specs: what its arguments are
            surveyor: looks into those that do not grow
            next_n: tokens of a request, where nothing else counts requests
            known: arguments that were looked into for this call already

        Raises:
            TypeError: a batched argument is no tensor, or a constant is not hashable
            ValueError: two arguments disagree on the size of the batch, none of those that grow
                was given, or ``specs`` does not say what an argument that holds tensors is
        """
        batched: dict[str, Tensor] = {}
        surveys: list[Survey] = []
        modes = mode()
        kind: list[Any] = [modes]
        counts: dict[str, tuple[int, str]] = {}
        for name, value in bound.arguments.items():
            spec = specs.get(name)
            if isinstance(spec, Batched) and value is not None:
                if not isinstance(value, Tensor):
                    raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
                batched[name] = value
                _count(name, value, spec, counts)
                others = tuple(n for axis, n in enumerate(value.shape) if axis != spec.dim)
                kind.append((name, others, value.dtype, value.device))
            else:
                survey = known.get(name) if known else None
                survey = survey or surveyor.look(name, value)
                kind.append((name, survey.structure))
                surveys.append(survey)
                if spec is None and survey.tensors:
                    raise ValueError(
                        f"inputs must declare {name!r}, which holds tensors, as Batched(dim, pad) "
                        "or Static"
                    )
        if not counts:
            raise ValueError(f"no batched argument was given, expected {', '.join(specs)}")
        if "token" not in counts:
            counts["token"] = counts["request"]
        if "request" not in counts:
            counts["request"] = (-(-counts["token"][0] // next_n), counts["token"][1])
        requests, tokens = counts["request"][0], counts["token"][0]
        grow = {name: spec for name, spec in specs.items() if isinstance(spec, Batched)}
        return cls(bound, batched, grow, surveys, requests, tokens, modes, tuple(kind))

    def with_inputs(self, inputs: Mapping[str, Tensor]) -> inspect.BoundArguments:
        """The arguments with the batched ones replaced."""
        arguments = {name: inputs.get(name, value) for name, value in self.bound.arguments.items()}
        return inspect.BoundArguments(self.bound.signature, arguments)  # pyright: ignore[reportArgumentType]


def mode() -> tuple[Any, ...]:
    """What of torch's state a compilation depends on: inference mode and autocast."""
    return (
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
    )


def _count(name: str, value: Tensor, spec: Batched, counts: dict[str, tuple[int, str]]) -> None:
    if spec.dim >= value.dim():
        raise ValueError(f"{name} must have a dimension {spec.dim}, got {list(value.shape)}")
    count = value.shape[spec.dim] - spec.extra
    if count < 0:
        raise ValueError(
            f"{name} must have at least {spec.extra} entries, got {value.shape[spec.dim]}"
        )
    first, of = counts.setdefault(spec.per, (count, name))
    if count != first:
        raise ValueError(
            f"{name} must be for {first} {spec.per}s as {of} is, got {list(value.shape)}, "
            f"which is for {count}"
        )
