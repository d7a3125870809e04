"""What happened to a compiled function so far."""

import dataclasses
from collections import Counter
from typing import Any

from .report import Finding


@dataclasses.dataclass
class Stats:
    """Counts since the function was compiled.

    Attributes:
        graphs: compilations, one for each graph that Dynamo handed over
        graph_breaks: places where a call left the graph, over all compilations
        recompiles: compilations beyond the planned ones
        captures: CUDA graphs captured
        graph_bytes: device memory that captures took, by size; ``None`` where nothing is padded.
            What later graphs share with earlier ones counts for the first
        recaptures: captures of a size again, because a tensor in use by address had moved
        replays: calls served by a CUDA graph
        eager_calls: calls served by compiled code without a CUDA graph; on a CPU all of them
        padded_tokens: query tokens added to real batches to fill their size
        tokens: query tokens of real batches
        calls: calls by the size they were padded to; ``None`` for exact sizes
        rewrites: rewrites by the name of the pass, over all compilations
        engines: dense regions by what became of them under ``engine="tensorrt"``: an engine
            "built", "loaded" from the cache or "shared" with an equal region, or "torch"
        hybrid: calls of pure ops of this package that run in torch under ``engine="tensorrt"``, by
            name of the op
        plugins: calls of ops of this package inside of TensorRT engines, by name of the op
        fallbacks: why a call ran without the CUDA graph it should have had
        findings: what the passes noted about the user's lines, over all compilations
    """

    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    captures: int = 0
    graph_bytes: Counter[int | None] = dataclasses.field(default_factory=Counter)
    recaptures: int = 0
    replays: int = 0
    eager_calls: int = 0
    padded_tokens: int = 0
    tokens: int = 0
    calls: Counter[int | None] = dataclasses.field(default_factory=Counter)
    rewrites: Counter[str] = dataclasses.field(default_factory=Counter)
    engines: Counter[str] = dataclasses.field(default_factory=Counter)
    hybrid: Counter[str] = dataclasses.field(default_factory=Counter)
    plugins: Counter[str] = dataclasses.field(default_factory=Counter)
    fallbacks: list[str] = dataclasses.field(default_factory=list)
    findings: list[Finding] = dataclasses.field(default_factory=list)

    def count_call(self, size: int | None, tokens: int, padding: int) -> None:
        """Count a padded batch and the tokens that padding added to it."""
        self.calls[size] += 1
        self.tokens += tokens
        self.padded_tokens += padding

    def merge(self, more: "Stats") -> None:
        """Add the counts of another."""
        for field in dataclasses.fields(self):
            own, other = getattr(self, field.name), getattr(more, field.name)
            if isinstance(own, Counter):
                own.update(other)
            else:
                setattr(self, field.name, own + other)

    def asdict(self) -> dict[str, Any]:
        """A plain copy, ready for JSON."""
        values = dataclasses.asdict(self)
        for name in ("calls", "graph_bytes"):
            values[name] = {str(size): count for size, count in getattr(self, name).items()}
        for name in ("rewrites", "engines", "hybrid", "plugins"):
            values[name] = dict(getattr(self, name))
        return values
