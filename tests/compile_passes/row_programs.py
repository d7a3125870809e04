"""Random step functions from pieces whose treatment of rows is known, and their padded batches."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpgraph import Batched, Static, ops

DIM = 4
Rows = tuple[Tensor, Tensor]


@dataclasses.dataclass
class Context:
    """What a piece may use besides the rows of tokens and of requests."""

    query_start_loc: Tensor
    seq_lens: Tensor
    ids: Tensor
    row_requests: Tensor
    row_lens: Tensor
    weight: Tensor
    table: Tensor
    kept: Tensor


@dataclasses.dataclass(frozen=True)
class Piece:
    name: str
    safe: bool
    run: Callable[[Tensor, Tensor, Context], Rows]


def _last_token(t: Tensor, r: Tensor, c: Context) -> Rows:
    return t, r + t[(c.query_start_loc[1:] - 1).clamp(min=0)]


def _per_request(t: Tensor, r: Tensor, c: Context) -> Rows:
    return t + r[c.row_requests.clamp(min=0)], r


def _experts(t: Tensor, r: Tensor, c: Context) -> Rows:
    weights, chosen = t.softmax(-1).topk(2, dim=-1)
    experts = c.weight.expand(DIM, DIM, DIM)[chosen]  # [tokens, 2, DIM, DIM]
    return torch.einsum("tkij,tj,tk->ti", experts, t, weights), r


def _routed(t: Tensor, r: Tensor, c: Context) -> Rows:
    weights, chosen = t.topk(2, dim=-1)
    return t * torch.zeros_like(t).scatter_(1, chosen, weights.sigmoid()), r


def _attend(t: Tensor, r: Tensor, c: Context) -> Rows:
    heads = t.view(-1, 2, 1, DIM // 2)
    keys = c.table[:6].view(1, 2, 6, DIM // 2).expand(t.shape[0], -1, -1, -1)
    return F.scaled_dot_product_attention(heads, keys, keys).reshape(-1, DIM), r


def _attend_across(t: Tensor, r: Tensor, c: Context) -> Rows:
    heads = t.view(1, -1, 2, DIM // 2).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads)
    return mixed.transpose(1, 2).reshape(-1, DIM), r


def _write_kept(t: Tensor, r: Tensor, c: Context) -> Rows:
    c.kept[: r.shape[0]] = r
    return t, r


def _put_kept(t: Tensor, r: Tensor, c: Context) -> Rows:
    c.kept.index_put_((c.row_requests.clamp(min=0).long(),), t)
    return t, r


def _in_place(t: Tensor, r: Tensor, c: Context) -> Rows:
    t = t * 1
    t[:, 1:3] += 1
    t.mul_(2)
    return t, r


def _window(t: Tensor, r: Tensor, c: Context) -> Rows:
    kept = c.table * 1
    kept[: r.shape[0]] = r
    return t + kept.sum(0), r


def _rows_behind(t: Tensor, r: Tensor, c: Context) -> Rows:
    shifted = r * 1
    shifted[1:] = r[:-1]
    shifted[1:] *= 2
    return t, shifted


def _rows_in_front(t: Tensor, r: Tensor, c: Context) -> Rows:
    shifted = t * 1
    shifted[:-1] = t[1:]
    return shifted, r


def _doubled(t: Tensor, r: Tensor, c: Context) -> Rows:
    doubled = r * 1
    doubled[:-1] *= 2
    return t, doubled


def _longer(t: Tensor, r: Tensor, c: Context) -> Rows:
    longer = t.new_zeros(t.shape[0] + 2, DIM)
    longer[: t.shape[0]] = t + 1
    return longer[2:], r


def _split_table(t: Tensor, r: Tensor, c: Context) -> Rows:
    _, rest = c.table.split([r.shape[0], 64 - r.shape[0]])
    return t + rest[:1], r


def _scaled_attention(t: Tensor, r: Tensor, c: Context) -> Rows:
    keys = c.table[:6].unsqueeze(0)
    return F.scaled_dot_product_attention(t[None], keys, keys, scale=1 / t.shape[0])[0], r


def _conv(t: Tensor, r: Tensor, c: Context) -> Rows:
    return F.conv1d(t.unsqueeze(1), c.weight[:1, :3].unsqueeze(1), padding=1).squeeze(1), r


def _branch(t: Tensor, r: Tensor, c: Context) -> Rows:
    return (t * 2 if t.shape[0] > 9 else t * 3), r


def _lens(t: Tensor, r: Tensor, c: Context) -> Rows:
    query_lens = c.query_start_loc[1:] - c.query_start_loc[:-1]
    return t, torch.where((query_lens > 0).unsqueeze(1), r, query_lens.unsqueeze(1).to(r.dtype))


def _offset_ids(t: Tensor, r: Tensor, c: Context) -> Rows:
    return t + F.embedding((c.ids + 1).clamp(max=len(c.table) - 1), c.table), r


def _counted_again(t: Tensor, r: Tensor, c: Context) -> Rows:
    starts = torch.arange(t.shape[0] + 1, dtype=torch.int32)
    lens, numbers = ops.flatten_decode(starts, c.row_lens, t.shape[0])
    return t + lens.unsqueeze(1) + t[numbers], r


def _greedy(t: Tensor, r: Tensor, c: Context) -> Rows:
    return t.gather(1, t.argmax(1, keepdim=True)) - t, r.gather(1, r.topk(2).indices).repeat(1, 2)


PIECES = [
    Piece("pointwise", True, lambda t, r, c: (F.silu(t) * 2 + t, r.abs())),
    Piece("linear", True, lambda t, r, c: (F.linear(t, c.weight), r @ c.weight)),
    Piece("softmax", True, lambda t, r, c: (t.softmax(-1), r)),
    Piece("rms norm", True, lambda t, r, c: (F.rms_norm(t, (DIM,)), r)),
    Piece("layer norm", True, lambda t, r, c: (t, F.layer_norm(r, (DIM,)))),
    Piece("sum of features", True, lambda t, r, c: (t + t.sum(1, keepdim=True), r)),
    Piece("sort of features", True, lambda t, r, c: (t.sort(dim=1).values, r)),
    Piece("scan of rows", True, lambda t, r, c: (t, r.cumsum(0).tanh())),
    Piece("scan of features", True, lambda t, r, c: (t.cumsum(1), r)),
    Piece("flip of features", True, lambda t, r, c: (t.flip(1), r.roll(1, 1))),
    Piece("heads", True, lambda t, r, c: (t.view(-1, 2, 2).transpose(1, 2).reshape(-1, DIM), r)),
    Piece("split", True, lambda t, r, c: (torch.cat(t.chunk(2, dim=1)[::-1], dim=1), r)),
    Piece("stack", True, lambda t, r, c: (torch.stack([t, t * 2], 1).flatten(0, 1)[::2], r)),
    Piece("embedding", True, lambda t, r, c: (t + F.embedding(c.ids, c.table), r)),
    Piece("embedding of the next id", True, _offset_ids),
    Piece("table by id", True, lambda t, r, c: (t * c.table[c.ids], r)),
    Piece("last token", True, _last_token),
    Piece("row of the request", True, _per_request),
    Piece("mask", True, lambda t, r, c: (t, r.masked_fill((c.seq_lens == 0).unsqueeze(1), 0))),
    Piece("where", True, lambda t, r, c: (torch.where((c.row_lens > 1)[:, None], t, -t), r)),
    Piece("experts", True, _experts),
    Piece("routed", True, _routed),
    Piece("attend to a table", True, _attend),
    Piece("conv over features", True, _conv),
    Piece("in place", True, _in_place),
    Piece("query lens", True, _lens),
    Piece("positions", True, lambda t, r, c: (t + torch.arange(t.shape[0]).unsqueeze(1), r)),
    Piece("front of a table", True, lambda t, r, c: (t, r + c.table[: r.shape[0]])),
    Piece("outer", True, lambda t, r, c: (t * (t[:, :1] * torch.ones(1, DIM)), r)),
    Piece("shift", True, lambda t, r, c: (F.pad(t, (0, 0, 1, 0))[: t.shape[0]], r)),
    Piece("first row", True, lambda t, r, c: (t + t[0], r + r[:1])),
    Piece("real requests", True, lambda t, r, c: (t / (c.seq_lens > 0).sum(), r)),
    Piece("rows behind by writing", True, _rows_behind),
    Piece("greedy", True, _greedy),
    Piece("a request per token", True, _counted_again),
    Piece("row by number", True, lambda t, r, c: (t * c.table[: r.shape[0]][c.row_requests], r)),
    Piece("rows in front by writing", False, _rows_in_front),
    Piece("write all but the last", False, _doubled),
    Piece("front of a longer buffer", False, _longer),
    Piece("split of a table", False, _split_table),
    Piece("scale of attention", False, _scaled_attention),
    Piece("size as a tensor", False, lambda t, r, c: (t * torch.as_tensor(float(len(t))), r)),
    Piece("size as eps", False, lambda t, r, c: (t, F.rms_norm(r, (DIM,), eps=1 / len(r)))),
    Piece("sum of rows", False, lambda t, r, c: (t + t.sum(0), r)),
    Piece("mean of requests", False, lambda t, r, c: (t, r - r.mean(0, keepdim=True))),
    Piece("norm", False, lambda t, r, c: (t / torch.linalg.vector_norm(t), r)),
    Piece("softmax over rows", False, lambda t, r, c: (t.softmax(0), r)),
    Piece("largest of rows", False, lambda t, r, c: (t + t.amax(0), r)),
    Piece("sort of rows", False, lambda t, r, c: (t.sort(0, descending=True).values, r)),
    Piece("scan of flipped rows", False, lambda t, r, c: (t, r.flip(0).cumsum(0))),
    Piece("flip of rows", False, lambda t, r, c: (t.flip(0), r)),
    Piece("roll of rows", False, lambda t, r, c: (t.roll(1, 0), r)),
    Piece("gram", False, lambda t, r, c: (t @ (t.t() @ t), r)),
    Piece("einsum over rows", False, lambda t, r, c: (t, r @ torch.einsum("ri,rj->ij", r, r))),
    Piece("attend across", False, _attend_across),
    Piece("reshape across", False, lambda t, r, c: (t.t().reshape(-1, DIM), r)),
    Piece("last row", False, lambda t, r, c: (t + t[-1], r)),
    Piece("last requests", False, lambda t, r, c: (t, r + r[-1:])),
    Piece("cat of rows", False, lambda t, r, c: (torch.cat([t, t * 2])[::2], r)),
    Piece("pad behind", False, lambda t, r, c: (F.pad(t, (0, 0, 0, 1))[1:], r)),
    Piece("tile", False, lambda t, r, c: (t.repeat(2, 1)[::2], r)),
    Piece("size as value", False, lambda t, r, c: (t / t.shape[0], r)),
    Piece("size in a tensor", False, lambda t, r, c: (t, r + torch.full((1,), r.shape[0]))),
    Piece("size decides", False, _branch),
    Piece("write a buffer", False, _write_kept),
    Piece("put in a buffer", False, _put_kept),
    Piece("buffer of its own", False, _window),
    Piece("index from the end", False, lambda t, r, c: (t, r + t[c.seq_lens - c.seq_lens - 1])),
    Piece("outer product reduced", False, lambda t, r, c: (t + (t[:, None] * t[None]).amax(1), r)),
    Piece("batch norm", False, lambda t, r, c: (F.batch_norm(t, None, None, training=True), r)),
    Piece("variance", False, lambda t, r, c: (t, r * r.var())),
    Piece("arange back", False, lambda t, r, c: (t + torch.arange(t.shape[0], 0, -1)[:, None], r)),
]


def step_of(pieces: Sequence[Piece]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A step that applies pieces in order."""

    def step(
        x: Tensor,
        y: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        ids: Tensor,
        static: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        row_lens, row_requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        # y has a row per request: this op says so of the mask, and the mask is as long
        old = ops.has_initial_state(query_start_loc, seq_lens)
        context = Context(query_start_loc, seq_lens, ids, row_requests, row_lens, **static)
        t, r = x, torch.where(old.unsqueeze(1), y, y + 1)
        t = t + context.table[ids]
        for piece in pieces:
            t, r = piece.run(t, r, context)
        return t, r

    return step


def make_batch(query_lens: Sequence[int], seed: int) -> list[Any]:
    """Arguments of a step; small integers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(seed)
    tokens, requests = sum(query_lens), len(query_lens)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return [
        torch.randn(tokens, DIM, generator=generator),
        torch.randn(requests, DIM, generator=generator),
        starts,
        torch.tensor(query_lens, dtype=torch.int32) + 3,
        torch.randint(0, 12, (tokens,), generator=generator),
        {
            "weight": torch.randn(DIM, DIM, generator=generator),
            "table": torch.randn(64, DIM, generator=generator),
            "kept": torch.zeros(64, DIM),
        },
    ]


def padded(
    batch: Sequence[Any],
    names: Sequence[str],
    inputs: Mapping[str, Batched | Static],
    requests: int,
    tokens: int,
    floats: float,
) -> list[Any]:
    """A batch at a larger size, the padding of float inputs holding ``floats``."""
    result: list[Any] = []
    for name, value in zip(names, batch, strict=True):
        spec = inputs[name]
        if not isinstance(spec, Batched):
            result.append({key: tensor.clone() for key, tensor in value.items()})
            continue
        size = list(value.shape)
        size[spec.dim] = spec.length(requests, tokens)
        fill = floats if value.is_floating_point() else spec.pad
        last: Any = value.select(spec.dim, -1).unsqueeze(spec.dim) if fill == "last" else fill
        buffer = value.new_empty(size)
        buffer[:] = last
        buffer.narrow(spec.dim, 0, value.shape[spec.dim]).copy_(value)
        result.append(buffer)
    return result
