"""Options of both doors, ``torch.compile(backend="mtpgraph")`` and ``mtpgraph.compile``."""

import dataclasses
import difflib
import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

Cudagraph = Literal["full", "off"]
Engine = Literal["inductor", "eager", "tensorrt"]

DEFAULT_SIZES = (1, 2, 4, *range(8, 513, 8))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a step is compiled.

    Attributes:
        sizes: batch sizes that are compiled for, in requests, increasing; a batch is padded to
            the next one
        next_n: query tokens a request has in a uniform decode, 1 + number of speculative tokens;
            a size of n requests holds n * next_n tokens
        specialize: sizes that get a static compilation of their own
        cudagraph: "full", one CUDA graph per size on a GPU, or "off"
        clone_outputs: return copies; otherwise the outputs of a CUDA graph hold until the next call
        engine: "inductor"; "eager", which runs the rewritten graph call by call, without the copies
            that ``find_mutation_hazards`` makes for Inductor; or "tensorrt", which runs dense
            regions as TensorRT engines and the rest as "eager" does
        engine_cache: directory that keeps TensorRT engines; by default that of the environment
            variable MTPGRAPH_ENGINE_CACHE, if it is set
        freeze_weights: parameters are constants of TensorRT engines; otherwise they are inputs,
            which sees every update and keeps one copy of them
        plugins: TensorRT engines hold the pure ops of this package too, where the library has
            plugins; otherwise ops run between engines
        disable_passes: names of passes to leave out
        strict: a fallback or report becomes an error
        debug: check before each replay that no input in use by address has moved
    """

    sizes: tuple[int, ...] = DEFAULT_SIZES
    next_n: int = 1
    specialize: tuple[int, ...] = ()
    cudagraph: Cudagraph = "full"
    clone_outputs: bool = False
    engine: Engine = "inductor"
    engine_cache: str | None = None
    freeze_weights: bool = True
    plugins: bool = True
    disable_passes: tuple[str, ...] = ()
    strict: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("sizes", "specialize"):
            object.__setattr__(self, name, _sizes(name, getattr(self, name)))
        if not self.sizes:
            raise ValueError("sizes must hold at least one size, got ()")
        if unknown := [size for size in self.specialize if size not in self.sizes]:
            raise ValueError(f"specialize must be a subset of sizes, got {unknown} beside them")
        _one_of("cudagraph", self.cudagraph, get_args(Cudagraph))
        _one_of("engine", self.engine, get_args(Engine))
        if type(self.next_n) is not int or self.next_n < 1:
            raise ValueError(f"next_n must be a positive int, got {self.next_n!r}")
        if isinstance(self.engine_cache, os.PathLike):
            object.__setattr__(self, "engine_cache", os.fspath(self.engine_cache))
        if not isinstance(self.engine_cache, str | None):
            raise TypeError(f"engine_cache must be a path, got {self.engine_cache!r}")
        for name in ("clone_outputs", "freeze_weights", "plugins", "strict", "debug"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        object.__setattr__(self, "disable_passes", _pass_names(self.disable_passes))

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "Options":
        """Options from a mapping; an unknown name is refused with the nearest match."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"unknown option {name!r}{_nearest(name, known)}")
        return cls(**given)


def _sizes(name: str, given: Iterable[int]) -> tuple[int, ...]:
    if isinstance(given, str | int) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a sequence of ints, got {given!r}")
    sizes = tuple(given)
    for size in sizes:
        if type(size) is not int:
            raise TypeError(f"{name} must hold ints, got {size!r} in {sizes}")
        if size < 1:
            raise ValueError(f"{name} must be positive, got {size} in {sizes}")
    if any(a >= b for a, b in itertools.pairwise(sizes)):
        raise ValueError(f"{name} must increase, got {sizes}")
    return sizes


def _pass_names(given: Iterable[str]) -> tuple[str, ...]:
    from . import PASSES

    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"disable_passes must be a sequence of pass names, got {given!r}")
    names = tuple(given)
    known = [graph_pass.__name__ for graph_pass in PASSES]
    for name in names:
        if name not in known:
            raise ValueError(
                f"disable_passes must name passes, got {name!r}{_nearest(name, known)}"
            )
    return names


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _nearest(name: object, known: list[str]) -> str:
    match = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(known)}"
