"""Ops, compile passes and a torch.compile backend for speculative (MTP) decode.

Importing the package registers every op in the namespace ``mtpgraph``; the compiler is imported
when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import ops
from ._version import __version__

if TYPE_CHECKING:
    from .compile_passes.backend import stats
    from .compile_passes.inputs import Batched, Static
    from .compile_passes.options import Options
    from .compile_passes.stats import Stats
    from .compile_passes.step import CompiledStep, compile

_LAZY = {
    "Batched": "inputs",
    "CompiledStep": "step",
    "Options": "options",
    "Static": "inputs",
    "Stats": "stats",
    "compile": "step",
    "stats": "backend",
}

__all__ = [
    "Batched",
    "CompiledStep",
    "Options",
    "Static",
    "Stats",
    "__version__",
    "compile",
    "ops",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".compile_passes.{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
