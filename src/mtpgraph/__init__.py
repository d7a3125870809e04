"""Ops, compile passes and a torch.compile backend for speculative (MTP) decode.

Importing the package registers every op in the namespace ``mtpgraph``; the compiler is imported
when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import ops
from ._version import __version__
from .ops.declare import declare

if TYPE_CHECKING:
    from .compile_passes.inputs import Batched, Static
    from .compile_passes.options import Options
    from .compile_passes.report import Finding
    from .compile_passes.stats import Stats
    from .compile_passes.step import CompiledStep, compile, stats
    from .explanation.record import Explanation
    from .explanation.trace import explain

_LAZY = {
    "Batched": ".compile_passes.inputs",
    "CompiledStep": ".compile_passes.step",
    "Explanation": ".explanation.record",
    "Finding": ".compile_passes.report",
    "Options": ".compile_passes.options",
    "Static": ".compile_passes.inputs",
    "Stats": ".compile_passes.stats",
    "compile": ".compile_passes.step",
    "explain": ".explanation.trace",
    "stats": ".compile_passes.step",
}

__all__ = [
    "Batched",
    "CompiledStep",
    "Explanation",
    "Finding",
    "Options",
    "Static",
    "Stats",
    "__version__",
    "compile",
    "declare",
    "explain",
    "ops",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
