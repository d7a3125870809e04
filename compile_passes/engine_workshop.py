"""Engines of regions: built, loaded from disk or shared, whatever the library that builds them."""

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from . import _compat
from .engine_cache import EngineCache, describe, engine_key
from .engine_input import EngineInput
from .options import Options

Engine = Callable[..., Sequence[Tensor]]
"""Takes the inputs of a region, contiguous; gives its outputs, fresh and contiguous."""


class Builder(Protocol):
    """Makes engines of regions; tests put another in the place of TensorRT's."""

    def fingerprint(self, device: torch.device) -> str:
        """What an engine depends on besides its region: libraries, card, settings of torch."""
        ...

    def plugins(self) -> Collection[str]:
        """The ops of this package that its engines can hold, by name; none where the library has no
        plugins.

        Raises:
            Exception: it has, and does not take ours
        """
        ...

    def build(
        self, gm: fx.GraphModule, inputs: Sequence[EngineInput], outputs: Sequence[torch.dtype]
    ) -> bytes:
        """An engine that serves every shape in the ranges of its inputs.

        Args:
            gm: the region, its ops as ``engine_ops`` has them; its parameters are constants of the
                engine
            inputs: dtypes and ranges
            outputs: dtypes of what it gives
        """
        ...

    def load(
        self, engine: bytes, inputs: Sequence[EngineInput], outputs: Sequence[torch.dtype]
    ) -> Engine:
        """Make an engine ready to run."""
        ...


class Workshop:
    """Gets engines from the cache or from the builder."""

    def __init__(self, builder: Builder, options: Options, passes: bytes) -> None:
        self._builder = builder
        self._passes = passes
        self._plugins = options.plugins
        self._cache = EngineCache.of(options.engine_cache)
        # without weights in them, the engines of equal layers are one
        self._made: dict[tuple[str, torch.device], Engine] = {}
        # of this graph, which may be split more than once
        self._seen: dict[Any, tuple[Engine | None, str]] = {}

    def plugins(self) -> tuple[Collection[str], str]:
        """The ops that engines can hold, and what is wrong with the library's plugins, if there are
        any."""
        if not self._plugins:
            return (), ""
        try:
            with _compat.outside_of_tracing():
                return self._builder.plugins(), ""
        except Exception as error:
            return (), _first_line(error)

    def engine(
        self,
        place: int,
        gm: fx.GraphModule,
        inputs: Sequence[EngineInput],
        outputs: Sequence[torch.dtype],
    ) -> tuple[Engine | None, str]:
        """The engine of a region, and whether it was "built", "loaded" or is "shared"; ``None`` and
        the cause if there can be none.

        Args:
            place: of the region in the graph
            gm, inputs, outputs: see ``Builder.build``
        """
        key = (place, describe(gm.graph), *inputs, *map(id, gm.parameters()))
        if key not in self._seen:
            try:
                # Dynamo compiles the step just now: its sizes and fake tensors are not the engine's
                with _compat.outside_of_tracing():
                    self._seen[key] = self._get(gm, inputs, outputs)
            except Exception as error:
                self._seen[key] = None, _first_line(error)
        return self._seen[key]

    def _get(
        self, gm: fx.GraphModule, inputs: Sequence[EngineInput], outputs: Sequence[torch.dtype]
    ) -> tuple[Engine, str]:
        """An engine, and whether it was built, loaded or shared."""
        has_weights = next(gm.parameters(), None) is not None
        device = inputs[0].device
        key = None
        if self._cache is not None or not has_weights:
            key = engine_key(gm, inputs, self._builder.fingerprint(device), self._passes)
            if (key, device) in self._made:
                return self._made[key, device], "shared"
            stored = self._cache.load(key) if self._cache is not None else None
            if stored is not None:
                try:
                    engine = self._builder.load(stored, inputs, outputs)
                except Exception:  # of another card or library after all: it is built anew
                    pass
                else:
                    return self._made.setdefault((key, device), engine), "loaded"
        built = self._builder.build(gm, inputs, outputs)
        engine = self._builder.load(built, inputs, outputs)
        if key is not None:
            self._made[key, device] = engine
            if self._cache is not None:
                self._keep(self._cache, key, built)
        return engine, "built"

    def _keep(self, cache: EngineCache, key: str, built: bytes) -> None:
        try:
            cache.store(key, built)
        except OSError as error:
            message = f"cannot keep TensorRT engines in {cache.directory}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
