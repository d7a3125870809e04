"""The arms of ``mtpgraph bench indexer`` for logits, top-k and both, with their checks.

Every request has K blocks of its own, permuted over a pool of random keys; an input set is other
blocks of that pool. What a peer needs beside the batch (row lengths, block tables repeated for each
row where it flattens) is ready before its clock starts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ops
from .bench_graph import Arm
from .bench_peers import Peers, deep_gemm_logits, topk_selectors, torch_topk
from .bench_shapes import BLOCK_SIZE, KEY_EXTRA, Logits, Select, TopK
from .ops.indexer_topk import largest_positions

Selector = Callable[[Tensor, Tensor], Tensor]

# By norm of a row: fp8 products are summed in fp32, in any order.
LOGITS_TOLERANCE = 1e-3
ROUNDED_TOLERANCE = 2.5e-3  # of bf16: to round is 1.7e-3 by norm, to cut off 3.3e-3
# Whose rows a selector must get right: real logits cluster and tie.
# The first kind is timed.
ROW_KINDS = ("random", "clustered", "tied")


@dataclass
class Scores:
    """Inputs of the indexer: one query side, a block table for each input set."""

    shape: Logits
    q: Tensor
    weights: Tensor
    k_cache: Tensor
    block_tables: list[Tensor]
    query_start_loc: Tensor
    seq_lens: Tensor
    row_lens: Tensor
    row_requests: Tensor

    def logits(self, i: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return ops.indexer_logits(self.q, self.weights, self.k_cache, *self._batch(i), dtype)

    def select(self, i: int, topk: int) -> Tensor:
        return ops.indexer_select(self.q, self.weights, self.k_cache, *self._batch(i), topk)

    def _batch(self, i: int) -> tuple[Tensor, Tensor, Tensor, int]:
        return self.block_tables[i], self.query_start_loc, self.seq_lens, self.shape.max_seq_len


def make_keys(num_blocks: int, head_dim: int, device: torch.device) -> Tensor:
    """A pool of random keys."""
    width = BLOCK_SIZE * (head_dim + KEY_EXTRA)
    k_cache = torch.empty(num_blocks, width, dtype=torch.uint8, device=device)
    for first in range(0, num_blocks, 4096):
        part = k_cache[first : first + 4096]
        codes = torch.randn(len(part), BLOCK_SIZE * head_dim, device=device)
        part[:, : BLOCK_SIZE * head_dim] = codes.to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.rand(len(part), BLOCK_SIZE, device=device) * 0.02 + 0.01
        part[:, BLOCK_SIZE * head_dim :] = scales.view(torch.uint8)
    return k_cache


def make_scores(shape: Logits, sets: int, k_cache: Tensor | None, device: torch.device) -> Scores:
    """Random inputs; ``k_cache`` is used again where it has the blocks for them."""
    blocks = shape.num_reqs * (shape.context // BLOCK_SIZE)
    width = BLOCK_SIZE * (shape.head_dim + KEY_EXTRA)
    if k_cache is None or k_cache.shape[0] < sets * blocks or k_cache.shape[1] != width:
        k_cache = make_keys(sets * blocks, shape.head_dim, device)
    order = torch.randperm(k_cache.shape[0], device=device)[: sets * blocks].int()
    tables = order.view(sets, shape.num_reqs, -1)
    # Blocks that no request has are block 0.
    missing = shape.max_seq_len // BLOCK_SIZE - tables.shape[2]
    lens = torch.tensor(shape.query_lens)
    starts = torch.cat([torch.zeros(1), lens.cumsum(0)]).to(device, torch.int32)
    seq_lens = torch.full((shape.num_reqs,), shape.context, dtype=torch.int32, device=device)
    row_lens, row_requests = ops.flatten_decode(starts, seq_lens, shape.num_tokens)
    q = torch.randn(shape.num_tokens, shape.num_heads, shape.head_dim, device=device)
    return Scores(
        shape,
        q.to(torch.float8_e4m3fn),
        torch.randn(shape.num_tokens, shape.num_heads, device=device) * 0.1,
        k_cache,
        list(F.pad(tables, (0, missing))),
        starts,
        seq_lens,
        row_lens,
        row_requests,
    )


def reference_logits(scores: Scores, i: int) -> Tensor:
    """fp32 logits, request by request; what lies past a row's length is left as it comes."""
    head_dim = scores.shape.head_dim
    codes_end = BLOCK_SIZE * head_dim
    rows = []
    for q, w, table in zip(
        scores.q.split(scores.shape.query_lens),
        scores.weights.split(scores.shape.query_lens),
        scores.block_tables[i],
        strict=True,
    ):
        pages = scores.k_cache[table[: scores.shape.context // BLOCK_SIZE].long()]
        codes = pages[:, :codes_end].contiguous().view(torch.float8_e4m3fn).float()
        scales = pages[:, codes_end:].contiguous().view(torch.float32)
        dots = torch.relu(q.float() @ codes.view(-1, head_dim).t())  # [n, num_heads, context]
        rows.append(torch.einsum("nhs,nh->ns", dots, w) * scales.flatten())
    return torch.cat(rows)


def logits_arms(scores: Scores, peers: Peers) -> list[Arm]:
    """Ours in fp32 and bf16, and DeepGEMM with and without its schedule, native and flattened."""
    calls: list[tuple[str, bool, Callable[[int], Tensor]]] = [
        ("mtpgraph", False, scores.logits),
        ("mtpgraph bf16", False, lambda i: scores.logits(i, torch.bfloat16)),
    ]
    for name, apart, call in _deep_gemm(scores, peers):
        calls.append((name, apart, call))
    expected: list[Tensor] = []

    def check(call: Callable[[int], Tensor]) -> str:
        if not expected:
            expected.append(reference_logits(scores, 0))
        return wrong_logits(call(0), expected[0], scores.row_lens)

    return [
        Arm(
            name, call, lambda call=call: check(call), ours=name.startswith("mtpgraph"), apart=apart
        )
        for name, apart, call in calls
    ]


def wrong_logits(logits: Tensor, expected: Tensor, row_lens: Tensor) -> str:
    """How far the worst row of ``logits`` is off within ``row_lens``, "" if they are right."""
    width = expected.shape[1]
    allowed = LOGITS_TOLERANCE if logits.dtype == torch.float32 else ROUNDED_TOLERANCE
    seen = torch.arange(width, device=logits.device) < row_lens.unsqueeze(1)
    difference = torch.where(seen, logits[:, :width] - expected, 0)
    sizes = torch.where(seen, expected, 0).norm(dim=1)
    error = float((difference.norm(dim=1) / sizes).max())
    return "" if error <= allowed else f"logits off by {error:.1e}"


def _deep_gemm(scores: Scores, peers: Peers) -> list[tuple[str, bool, Callable[[int], Tensor]]]:
    deep_gemm, shape = peers.get("DeepGEMM"), scores.shape
    if deep_gemm is None:
        return []
    forms = [("flat", scores.q.unsqueeze(1), scores.row_lens.unsqueeze(1), True)]
    if shape.next_n in (1, 2, 4):
        lens = scores.row_lens.view(shape.num_reqs, shape.next_n)
        forms.insert(0, ("native", scores.q.view(*lens.shape, *scores.q.shape[1:]), lens, False))
    if shape.next_n == 1:
        forms.pop()  # the same
    found = []
    for form, q, lens, flat in forms:
        rows = scores.row_requests.long() if flat else slice(None)
        tables = [table[rows] for table in scores.block_tables]
        common = (q, scores.weights, scores.k_cache, tables, lens, shape.max_seq_len)
        for apart in (False, True):
            name = f"DeepGEMM {form}{', schedule apart' if apart else ''}"
            found.append((name, apart, deep_gemm_logits(deep_gemm, *common, apart=apart)))
    return found


def make_rows(shape: TopK, kind: str, device: torch.device) -> Tensor:
    """Rows of logits: of one of ``ROW_KINDS``."""
    rows = torch.randn(shape.num_rows, shape.num_columns, device=device)
    if kind == "clustered":
        return rows.mul_(1e-3).add_(10)
    return rows if kind == "random" else rows.mul_(4).round_().div_(4)


def make_row_sets(shape: TopK, sets: int, device: torch.device) -> list[Tensor]:
    """Random rows, other ones in each input set."""
    return [make_rows(shape, "random", device) for _ in range(sets)]


def topk_arms(shape: TopK, rows: Sequence[Tensor], peers: Peers) -> list[Arm]:
    """Ours and every selector that takes such rows; ``rows`` are the input sets."""
    device = rows[0].device
    lens = torch.full((shape.num_rows,), shape.width, dtype=torch.int32, device=device)
    kinds = {kind: make_rows(shape, kind, device) for kind in ROW_KINDS}
    selectors: dict[str, Selector] = {
        "mtpgraph": lambda logits, lens: ops.indexer_topk(logits, lens, shape.topk),
        **topk_selectors(peers, shape.num_rows, shape.num_columns, shape.topk, device),
    }
    if shape.num_columns == shape.width:
        selectors["torch.topk"] = lambda logits, lens: torch_topk(logits, lens, shape.topk)

    def check(select: Selector, ours: bool, *chosen: str) -> str:
        wrong = wrong_positions if ours else wrong_selection
        found = {
            kind: wrong(select(kinds[kind], lens), kinds[kind], lens, shape.topk) for kind in chosen
        }
        return "; ".join(f"{kind} rows: {what}" for kind, what in found.items() if what)

    def arm(name: str, select: Selector) -> Arm:
        ours = name == "mtpgraph"
        timed, *others = ROW_KINDS
        # a peer whose buffers hold any but unusual rows is measured on the usual ones
        needed = ROW_KINDS if ours else (timed,)
        return Arm(
            name,
            lambda i: select(rows[i], lens),
            lambda: check(select, ours, *needed),
            ours=ours,
            check_others=lambda: "" if ours else check(select, ours, *others),
        )

    return [arm(name, select) for name, select in selectors.items()]


def wrong_positions(chosen: Tensor, logits: Tensor, row_lens: Tensor, topk: int) -> str:
    """Ours must be the positions of the contract, in their order."""
    expected = largest_positions(logits, row_lens, topk)
    differing = int((chosen != expected).any(dim=1).sum())
    return f"{differing} of {len(chosen)} rows differ" if differing else ""


def wrong_selection(chosen: Tensor, logits: Tensor, row_lens: Tensor, topk: int) -> str:
    """A peer may order and break ties as it likes; the values it chose must be the largest."""
    width = logits.shape[1]
    seen = torch.arange(width, device=logits.device) < row_lens.unsqueeze(1)
    ranked = torch.where(seen, logits, float("-inf"))
    best = ranked.topk(min(topk, width), dim=1).values
    places = chosen.long().sort(dim=1).values
    repeated = int((places[:, 1:] == places[:, :-1]).any(dim=1).sum())
    outside = int(((places < 0) | (places >= row_lens.unsqueeze(1))).any(dim=1).sum())
    if repeated or outside:
        return f"{repeated} rows with a position twice, {outside} with one that is none"
    got = ranked.gather(1, places).sort(dim=1, descending=True).values
    recall = float((got >= best[:, -1:]).float().mean())
    return "" if torch.equal(got, best) else f"recall {recall:.4f}"


def select_arms(scores: Scores, peers: Peers) -> list[Arm]:
    """Ours in one op and in two; DeepGEMM followed by each selector, logits in between."""
    shape = scores.shape
    assert isinstance(shape, Select)
    topk, lens = shape.topk, scores.row_lens
    expected: list[Tensor] = []

    def check(
        make: Callable[[int], Tensor], choose: Callable[[Tensor], Tensor], wrong: Callable[..., str]
    ) -> str:
        if not expected:
            expected.append(reference_logits(scores, 0))
        logits = make(0)
        problem = wrong_logits(logits, expected[0], lens)
        return problem or wrong(choose(logits), logits, lens, topk)

    def two_ops(i: int) -> Tensor:
        return ops.indexer_topk(scores.logits(i), lens, topk)

    def ours(name: str, call: Callable[[int], Tensor]) -> Arm:
        return Arm(
            name, call, lambda: check(scores.logits, lambda _: call(0), wrong_positions), ours=True
        )

    def pair(name: str, apart: bool, make: Callable[[int], Tensor], select: Selector) -> Arm:
        def choose(logits: Tensor) -> Tensor:
            return select(logits, lens)

        return Arm(
            name,
            lambda i: choose(make(i)),
            lambda: check(make, choose, wrong_selection),
            apart=apart,
        )

    selectors = topk_selectors(peers, shape.num_tokens, shape.max_seq_len, topk, lens.device)
    return [
        ours("mtpgraph", lambda i: scores.select(i, topk)),
        ours("mtpgraph, two ops", two_ops),
        *(
            pair(f"{form} + {name}", apart, make, select)
            for form, apart, make in _deep_gemm(scores, peers)
            for name, select in selectors.items()
        ),
    ]
