"""What the decode loop is given, what it came to, and where two runs differ."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt of at least one byte; the request shows up at step ``arrival``."""

    prompt: bytes
    max_new_tokens: int
    arrival: int = 0
    stop: int = -1
    """Decoding ends behind this byte; -1: never."""


@dataclasses.dataclass
class Result:
    """What one request came to."""

    prompt: bytes
    tokens: list[int] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    """Lead of each token over the second choice, in logits."""
    verify_rows: int = 0
    verified_tokens: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def text(self) -> str:
        return bytes(self.tokens).decode(errors="replace")

    @property
    def tokens_per_step(self) -> float:
        return self.verified_tokens / max(self.verify_rows, 1)


@dataclasses.dataclass
class Run:
    """What a whole run came to; ``seconds`` is the time inside the steps."""

    results: list[Result]
    seconds: float = 0.0
    steps: int = 0
    batch_sizes: set[int] = dataclasses.field(default_factory=set)
    mixed_steps: int = 0
    """Steps that held verify rows and pieces of prompts at once."""

    @property
    def tokens(self) -> int:
        return sum(len(result.tokens) for result in self.results)

    @property
    def tokens_per_step(self) -> float:
        rows = sum(result.verify_rows for result in self.results)
        return sum(result.verified_tokens for result in self.results) / max(rows, 1)

    @property
    def acceptance(self) -> float:
        proposed = sum(result.proposed for result in self.results)
        return sum(result.accepted for result in self.results) / max(proposed, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token at which two runs of one request part."""

    request: int
    position: int
    gap: float
    """Lead of the oracle's choice there, in logits: near zero is a tie."""

    def is_tie(self, tolerance: float = 1e-4) -> bool:
        return self.gap < tolerance


def differences(oracle: Run, other: Run) -> list[Difference]:
    """Where the tokens of ``other`` leave those of ``oracle``; empty if they are equal."""
    found = []
    for i, (a, b) in enumerate(zip(oracle.results, other.results, strict=True)):
        if a.tokens != b.tokens:
            pairs = zip(a.tokens, b.tokens, strict=False)
            shorter = min(len(a.tokens), len(b.tokens))
            at = next((k for k, (x, y) in enumerate(pairs) if x != y), shorter)
            gap = a.gaps[at] if at < len(a.gaps) else float("inf")
            found.append(Difference(i, at, gap))
    return found
