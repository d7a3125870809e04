"""Continuous batching around the decode step: requests arrive, run, finish, are replaced."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mtpgraph import ops

from .cache import FreeList, make_caches
from .model import Model
from .runs import Request, Result, Run

StepFn = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


@dataclasses.dataclass
class _Live:
    """A running request: ``tokens`` are known, the first ``computed`` of them are in the caches."""

    request: Request
    result: Result
    tokens: list[int]
    slots: list[int]
    blocks: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    num_accepted: int = 1
    drafts: list[int] = dataclasses.field(default_factory=list)
    row: list[int] = dataclasses.field(default_factory=list)

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.request.prompt)


class Decoder:
    """A model with its caches, and the loop that keeps them busy.

    Blocks and state slots go from one request to the next as they are. ``chunk_size`` is the
    longest piece of a prompt in one step; what is left of a prompt at ``next_n`` tokens or fewer
    runs as a decode.
    """

    def __init__(
        self,
        model: Model,
        max_reqs: int = 24,
        max_seq_len: int = 512,
        block_size: int = 16,
        chunk_size: int = 128,
        fill: float = float("nan"),
    ) -> None:
        config = model.config
        self.model = model
        self.max_reqs = max_reqs
        self.max_seq_len = max_seq_len
        self.block_size = block_size
        self.chunk_size = chunk_size
        # The drafts of the last step lie behind the last token.
        self.max_blocks = -(-(max_seq_len + 2 * config.next_n) // block_size)
        self.blocks = FreeList(max_reqs * self.max_blocks)
        self.slots = FreeList(max_reqs * config.next_n)
        self.device = model.embed.weight.device
        self.caches = make_caches(
            config, self.blocks.size, block_size, self.slots.size, fill, self.device
        )

    def decode_plain(
        self, requests: Iterable[Request], on_step: Callable[[int], None] | None = None
    ) -> Run:
        """One token per request and step, no drafts, eager: the oracle."""
        return self._decode(requests, self.model.plain_step, self.model.plain_step, 1, on_step)

    def decode_speculative(
        self,
        requests: Iterable[Request],
        step_fn: StepFn | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> Run:
        """Draft, verify, accept; ``step_fn`` is ``model.step``, or the same compiled."""
        step = self.model.step
        return self._decode(requests, step_fn or step, step, self.model.config.next_n, on_step)

    @torch.no_grad()
    def _decode(
        self,
        requests: Iterable[Request],
        decode: StepFn,
        prefill: StepFn,
        next_n: int,
        on_step: Callable[[int], None] | None,
    ) -> Run:
        requests = list(requests)
        for request in requests:
            length = len(request.prompt) + request.max_new_tokens
            if not request.prompt or length > self.max_seq_len:
                raise ValueError(
                    f"a request must have 1 to max_seq_len={self.max_seq_len} tokens with a prompt "
                    f"of at least one, got {len(request.prompt)} + {request.max_new_tokens}"
                )
        run = Run([Result(request.prompt) for request in requests])
        waiting = sorted(zip(requests, run.results, strict=True), key=lambda pair: pair[0].arrival)
        live: list[_Live] = []
        now = 0
        while waiting or live:
            while waiting and waiting[0][0].arrival <= now and len(live) < self.max_reqs:
                request, result = waiting.pop(0)
                slots = self.slots.take(self.model.config.next_n)
                live.append(_Live(request, result, list(request.prompt), slots))
            if live:
                self._step(live, decode, prefill, next_n, run)
            now += 1
            for one in [one for one in live if self._finished(one)]:
                live.remove(one)
                self.slots.give_back(one.slots)
                self.blocks.give_back(one.blocks)
            if on_step is not None:
                on_step(run.tokens)
        return run

    def _step(
        self, live: list[_Live], decode: StepFn, prefill: StepFn, next_n: int, run: Run
    ) -> None:
        for one in live:
            one.row = self._next_row(one, next_n)
        query_lens = [len(one.row) for one in live]
        seq_lens = [one.computed + len(one.row) for one in live]
        prefilling = [one.prefilling for one in live]
        order = ops.reorder(query_lens, seq_lens, next_n, is_prefilling=prefilling).order
        ordered = [live[i] for i in order]
        split = ops.split_decodes_and_prefills(
            [query_lens[i] for i in order],
            [seq_lens[i] for i in order],
            next_n,
            is_prefilling=[prefilling[i] for i in order],
        )
        decodes = ordered[: split.num_decodes]
        run.batch_sizes.add(len(decodes))
        run.steps += 1
        run.mixed_steps += len({one.prefilling for one in decodes}) > 1
        for rows, step_fn, is_prefill in (
            (ordered[split.num_decodes :], prefill, True),
            (decodes, decode, False),
        ):
            if rows:
                self._run_rows(rows, step_fn, is_prefill, run)

    def _next_row(self, one: _Live, next_n: int) -> list[int]:
        """The tokens of this step: a piece of the prompt, or the last token and its drafts."""
        left = len(one.tokens) - one.computed
        if left > next_n:
            count = min(self.chunk_size, left - next_n)
            return one.tokens[one.computed : one.computed + count]
        if one.prefilling:
            return one.tokens[one.computed :]
        # A step says one token more than it accepts drafts.
        useful = one.request.max_new_tokens - len(one.result.tokens) - 1
        return one.tokens[one.computed :] + one.drafts[:useful]

    def _run_rows(self, rows: list[_Live], step_fn: StepFn, is_prefill: bool, run: Run) -> None:
        batch = [x.to(self.device) for x in self._batch(rows, is_prefill)]
        started = time.perf_counter()
        outputs = [x.tolist() for x in step_fn(*batch, self.caches)]
        run.seconds += time.perf_counter() - started
        self._advance(rows, is_prefill, outputs)

    def _batch(self, rows: list[_Live], is_prefill: bool) -> tuple[Tensor, ...]:
        """The arguments of ``Model.step`` up to the caches."""
        tokens, next_tokens, slot_mapping, starts = [], [], [], [0]
        block_table = torch.full((len(rows), self.max_blocks), -1, dtype=torch.int32)
        size = self.block_size
        for r, one in enumerate(rows):
            end = one.computed + len(one.row)
            # Room for the drafts that the MTP module writes behind the row.
            needed = -(-(end + self.model.config.num_drafts) // size)
            one.blocks += self.blocks.take(max(needed - len(one.blocks), 0))
            block_table[r, : len(one.blocks)] = torch.tensor(one.blocks)
            prompt = one.request.prompt
            tokens += one.row
            for i in range(one.computed, end):
                next_tokens.append(prompt[i + 1] if i + 1 < len(prompt) else -1)
                slot_mapping.append(one.blocks[i // size] * size + i % size)
            starts.append(len(tokens))
        slots = [one.slots[0] if is_prefill else one.slots for one in rows]
        return (
            torch.tensor(tokens),
            torch.tensor(next_tokens),
            _int32(starts),
            _int32([one.computed + len(one.row) for one in rows]),
            block_table,
            torch.tensor(slot_mapping),
            _int32(slots),
            _int32([one.num_accepted for one in rows]),
        )

    def _advance(self, rows: list[_Live], is_prefill: bool, outputs: list[Any]) -> None:
        """Take over what a step said: tokens that stand, and drafts for the next step."""
        said, accepted, drafts, gaps = outputs
        start = 0
        for r, one in enumerate(rows):
            count, result, was_prompt = accepted[r], one.result, one.prefilling
            known = len(one.tokens) - one.computed
            one.computed += count
            one.num_accepted = 1 if is_prefill else count
            one.drafts = drafts[r]
            # The token said at the last known one is new, and so are those behind it.
            new = range(start + known - 1, start + count)
            start += len(one.row)
            if not was_prompt:
                result.verify_rows += 1
                result.verified_tokens += count
                result.proposed += len(one.row) - 1
                result.accepted += count - 1
            for i in new:
                one.tokens.append(said[i])
                result.tokens.append(said[i])
                result.gaps.append(gaps[i])
                if said[i] == one.request.stop:
                    break

    def _finished(self, one: _Live) -> bool:
        done = one.result.tokens
        return len(done) >= one.request.max_new_tokens or one.request.stop in done[-1:]


def _int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
