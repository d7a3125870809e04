"""Single expressions over ``x`` [rows, 4] and ``i`` [rows], which grow, and ``w`` [8, 4], which
does not: those that keep rows apart, and those that do not."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Case = Callable[[Any, Any, Any], Any]


def _shifted(x: Any, i: Any, w: Any) -> Any:
    y = torch.zeros_like(x)
    y[1:] = x[:-1]
    return y


def _behind(x: Any, i: Any, w: Any) -> Any:
    y = x.new_zeros(x.shape[0] + 5, 4)
    y[5:] = x
    return y[: x.shape[0]]


def _written(x: Any, write: Callable[[Any], Any]) -> Any:
    y = x.clone()
    write(y)
    return y


def _running(x: Any, i: Any, w: Any) -> Any:
    y = x.clone()
    y[1:] += y[:-1]
    y[1:] *= 2
    return y


def _set(target: Any, index: Any, value: Any) -> Any:
    target[index] = value
    return target


SAFE: dict[str, Case] = {
    "larger of two": lambda x, i, w: torch.max(x, x * 2),
    "max of features": lambda x, i, w: x.max(1).values + x.max(-1).indices,
    "flat": lambda x, i, w: x.view(-1)[::2],
    "normalize features": lambda x, i, w: F.normalize(x, dim=1),
    "outer": lambda x, i, w: torch.outer(x[:, 0], x[:, 1]),
    "shift by writing": _shifted,
    "front rows by writing": _behind,
    "random": lambda x, i, w: x + torch.rand_like(x) * torch.zeros_like(x),
    "one hot": lambda x, i, w: F.one_hot(i, 9).to(x.dtype),
    "repeat interleave": lambda x, i, w: x.repeat_interleave(2, 0),
    "stack behind": lambda x, i, w: torch.stack([x, x], 1).view(-1, 4),
    "einsum of rows": lambda x, i, w: torch.einsum("sd,sd->s", x, x),
    "transposed and back": lambda x, i, w: x.swapaxes(0, 1).reshape(4, -1),
    "group norm": lambda x, i, w: F.group_norm(x.unsqueeze(-1), 2),
    "pool features": lambda x, i, w: F.avg_pool1d(x.unsqueeze(1), 2),
    "gram": lambda x, i, w: x @ x.t(),
    "difference": lambda x, i, w: torch.diff(x, dim=0),
    "every other": lambda x, i, w: x[::2],
    "every other but the last": lambda x, i, w: x[: x.shape[0] - 1 : 2],
    "from the third": lambda x, i, w: x[2:],
    "gather features": lambda x, i, w: x.gather(1, (i % 4).unsqueeze(1)),
    "rows by index": lambda x, i, w: w.index_select(0, i % 8),
    "write from the second row": lambda x, i, w: _written(x, lambda y: y[1:].mul_(2)),
    "add the row in front": _running,
    "write every other row": lambda x, i, w: _written(x, lambda y: y[::2].zero_()),
    "write every row": lambda x, i, w: _written(x, lambda y: y[: x.shape[0]].copy_(x + 1)),
    "write a column": lambda x, i, w: _written(x, lambda y: y[:, :-1].zero_()),
    "write the first row": lambda x, i, w: _written(x, lambda y: y[:1].zero_()),
    "write to a front that is a copy": lambda x, i, w: x[:-1].clone().mul_(2),
    "count in memory of its own": lambda x, i, w: x + torch.zeros(4).add_(1),
    "unbind columns": lambda x, i, w: torch.stack(x.t().unbind(0)),
    "front of a split": lambda x, i, w: w.repeat(9, 1).split([x.shape[0], 72 - x.shape[0]])[0] + x,
    "as many rows from the second": lambda x, i, w: x.narrow(0, 1, x.shape[0] - 1),
    "view of as many rows": lambda x, i, w: x.reshape(x.shape[0], 2, -1).expand(x.shape[0], 2, 2),
    "rows of as many numbers": lambda x, i, w: x.repeat_interleave(2, 0, output_size=2 * len(x)),
    "pad features": lambda x, i, w: F.pad(x, (1, 2)),
    "baddbmm": lambda x, i, w: torch.baddbmm(x[:, None], x[:, None], w.t() @ w + x[:, :1, None]),
    "bias of linear": lambda x, i, w: F.linear(x, w, w[:, 0]),
    "glu": lambda x, i, w: F.glu(x, -1),
    "dropout off": lambda x, i, w: F.dropout(x, 0.5, training=False),
    "batch norm eval": lambda x, i, w: F.batch_norm(x, w[0], w[1].abs() + 1, training=False),
    "mask": lambda x, i, w: x.masked_fill(i.unsqueeze(1) > 3, -1.0).clamp(min=0),
    "lengths of rows": lambda x, i, w: torch.linalg.vector_norm(x, dim=-1),
    "eval of a tril": lambda x, i, w: torch.tril(x @ x.t()),
    "integers": lambda x, i, w: (i * 3 + 1) // 2 % 5,
    "windows of features": lambda x, i, w: x.unfold(1, 2, 1).amax(-1),
    "any of integers": lambda x, i, w: torch.where((i > 3).any(), x, -x),
    "autocast": lambda x, i, w: F.linear(x.bfloat16(), w.bfloat16()),
    "scan of rows": lambda x, i, w: (x.cumsum(0), x.cumprod(0), x.logcumsumexp(0)),
    "largest so far": lambda x, i, w: (*x.cummax(0), *i.cummin(0)),
    "scan of flat": lambda x, i, w: x.view(-1).cumsum(0),
    "scan of columns": lambda x, i, w: x.t().cumsum(1),
    "number of the token among some": lambda x, i, w: (i > 2).long().cumsum(0) - 1,
    "put in its own row": lambda x, i, w: _set(
        torch.zeros_like(x), (torch.arange(len(x)), i % 4), x.sum(1)
    ),
    "put in its own row, several": lambda x, i, w: _set(
        torch.zeros_like(x), (torch.arange(len(x))[:, None], x.topk(2).indices), x[:, :2]
    ),
    "put whole rows": lambda x, i, w: _set(torch.zeros_like(x), torch.arange(len(x)), x * 2),
    "add in its own row": lambda x, i, w: x.index_put(
        (torch.arange(len(x)), i % 4), x[:, 0], accumulate=True
    ),
    "scatter in its own row": lambda x, i, w: torch.zeros_like(x).scatter_add(1, i[:, None] % 4, x),
    "repeat the last feature": lambda x, i, w: F.pad(x.unsqueeze(1), (1, 2), mode="replicate"),
    "mirror features": lambda x, i, w: F.pad(x.unsqueeze(1), (1, 2), mode="reflect"),
    "row in front": lambda x, i, w: F.pad(x, (0, 0, 1, 0)),
    "drop a feature": lambda x, i, w: F.pad(x, (-1, 2)),
}  # fmt: skip

UNSAFE: dict[str, Case] = {
    "unflatten in front": lambda x, i, w: x.repeat_interleave(2, 0).unflatten(0, (2, -1)),
    "expand and merge": lambda x, i, w: x.expand(3, -1, -1).reshape(-1, 4),
    "sum from behind": lambda x, i, w: x.sum(dim=-2),
    "max of all": lambda x, i, w: x / x.max(),
    "argmax of all": lambda x, i, w: x.argmax() + i,
    "topk of flat": lambda x, i, w: x.flatten().topk(3).values,
    "normalize rows": lambda x, i, w: F.normalize(x, dim=0),
    "view across": lambda x, i, w: x.view(-1).view(4, -1),
    "cdist": lambda x, i, w: torch.cdist(x, x),
    "std": lambda x, i, w: x / x.std(),
    "cosine": lambda x, i, w: F.cosine_similarity(x, x * 2, dim=0),
    "put": lambda x, i, w: _set(torch.zeros_like(x), i % 2, x),
    "scatter add": lambda x, i, w: torch.zeros_like(x).scatter_add(0, i.unsqueeze(1) % 2, x),
    "index add": lambda x, i, w: torch.zeros_like(x).index_add_(0, i % 2, x),
    "full": lambda x, i, w: torch.full_like(x, x.shape[0]),
    "scalar tensor": lambda x, i, w: x / torch.tensor(x.shape[0]),
    "tensor of sizes": lambda x, i, w: x / torch.tensor([x.shape[0], 1, 1, 1]),
    "linspace": lambda x, i, w: torch.linspace(0, 1, x.shape[0]),
    "last position": lambda x, i, w: torch.arange(x.shape[0]) / (x.shape[0] - 1),
    "clamp to size": lambda x, i, w: i.clamp(max=x.shape[0] - 1),
    "stack and merge": lambda x, i, w: torch.stack([x, x]).view(-1, 4),
    "einsum over rows": lambda x, i, w: torch.einsum("sd,se->de", x, x),
    "windows": lambda x, i, w: x.unfold(0, 2, 1),
    "pool rows": lambda x, i, w: F.max_pool1d(x.t().unsqueeze(0), 2),
    "three rows": lambda x, i, w: x[:3],
    "half of the rows": lambda x, i, w: x[: x.shape[0] // 2],
    "half of the rows by twos": lambda x, i, w: x[: x.shape[0] // 2 : 2],
    "third row": lambda x, i, w: x[2],
    "sizes of a split": lambda x, i, w: torch.split(x, [2, x.shape[0] - 2]),
    "flat sum": lambda x, i, w: x.reshape(1, -1).sum(1),
    "any": lambda x, i, w: torch.where((x > 3).any(), x, -x),
    "histogram": lambda x, i, w: torch.histc(x),
    "attention by hand": lambda x, i, w: (x @ x.t()).softmax(-1) @ x,
    "logsumexp": lambda x, i, w: x.logsumexp(0),
    "write a window": lambda x, i, w: w.view(-1)[: x.shape[0]].copy_(x[:, 0]),
    "zero a window": lambda x, i, w: w[: x.shape[0]].zero_(),
    "first row kept": lambda x, i, w: w.add_(x[0]),
    "count up": lambda x, i, w: (w.add_(1), x),
    "fill a row that is kept": lambda x, i, w: (w[0].fill_(1), x),
    "zero the first row of the batch": lambda x, i, w: (x[0].zero_(), w),
    "write all but the last": lambda x, i, w: _written(x, lambda y: y[:-1].mul_(2)),
    "write all but the last of twos": lambda x, i, w: _written(x, lambda y: y[:-1:2].zero_()),
    "write all but the last by size": lambda x, i, w: _written(
        x, lambda y: y.narrow(0, 0, x.shape[0] - 1).zero_()
    ),
    "write a view of all but the last": lambda x, i, w: _written(
        x, lambda y: y.t()[:2, :-1].t()[1:].zero_()
    ),
    "out of all but the last": lambda x, i, w: _written(
        x, lambda y: torch.add(x[1:], 1, out=y[:-1])
    ),
    "mask all but the last": lambda x, i, w: _written(
        x, lambda y: y[:-1].masked_fill_(x[1:] > 0, 0)
    ),
    "shift to the front": lambda x, i, w: _written(x, lambda y: _set(y, slice(None, -1), x[1:])),
    "front of a longer buffer": lambda x, i, w: _set(
        x.new_zeros(x.shape[0] + 2, 4), slice(None, x.shape[0]), x
    ),
    "rest of a split": lambda x, i, w: w.repeat(9, 1).split([x.shape[0], 72 - x.shape[0]])[1],
    "write the front of a split": lambda x, i, w: _written(
        w.repeat(9, 1), lambda y: y.split([x.shape[0], 72 - x.shape[0]])[0].copy_(x)
    ),
    "tensor of a float": lambda x, i, w: x * torch.as_tensor(float(x.shape[0])),
    "array of a float": lambda x, i, w: x * torch.asarray(float(x.shape[0]) / 2),
    "scale of attention": lambda x, i, w: F.scaled_dot_product_attention(
        x.unsqueeze(1), w.expand(len(x), 8, 4), w.expand(len(x), 8, 4), scale=1 / x.shape[0]
    ),
    "eps of a norm": lambda x, i, w: F.rms_norm(x, (4,), eps=1 / x.shape[0]),
    "value of a pad": lambda x, i, w: F.pad(x, (0, 1), value=1 / x.shape[0]),
    "eps of logit": lambda x, i, w: torch.logit(x, 1 / x.shape[0]),
    "tolerance": lambda x, i, w: torch.isclose(x, x + 0.3, atol=1 / x.shape[0]),
    "decimals": lambda x, i, w: torch.round(x, decimals=min(x.shape[0], 3)),
    "decimals of all": lambda x, i, w: torch.round(x, decimals=x.shape[0]),
    "set to size": lambda x, i, w: _written(x, lambda y: _set(y, 0, x.shape[0])),
    "add to a table": lambda x, i, w: w.index_add_(0, i, x),
    "put in a table": lambda x, i, w: _set(w, i, x),
    "mean into a table": lambda x, i, w: w[0].copy_(x.mean(0)),
    "contiguous view": lambda x, i, w: x.permute(1, 0).contiguous().view(-1, 4),
    "median": lambda x, i, w: x.median(0).values,
    "kth value": lambda x, i, w: x.kthvalue(2, dim=0).values,
    "replicate": lambda x, i, w: F.pad(x.t().unsqueeze(0), (1, 1), mode="replicate"),
    "negative index": lambda x, i, w: x[i - 3],
    "search": lambda x, i, w: torch.searchsorted(i, i),
    "is in": lambda x, i, w: torch.isin(i, i * 2),
    "embedding bag": lambda x, i, w: F.embedding_bag(i, w, i * 0),
    "reversed arange": lambda x, i, w: x[torch.arange(x.shape[0] - 1, -1, -1)],
    "diagonal": lambda x, i, w: (x @ x.t()).diagonal(),
    "trace": lambda x, i, w: x * (x @ x.t()).trace(),
    "power of size": lambda x, i, w: x * x.shape[0] ** -0.5,
    "even sizes": lambda x, i, w: x * (2 if x.shape[0] % 2 else 3),
    "layer norm over all": lambda x, i, w: F.layer_norm(x.t(), (x.shape[0],)),
    "triangle": lambda x, i, w: torch.triu_indices(x.shape[0], x.shape[0])[0],
    "take": lambda x, i, w: x.take(i),
    "largest of flattened heads": lambda x, i, w: x.view(-1, 2).view(-1, 2, 2).amax(0),
    "inverse": lambda x, i, w: torch.linalg.inv(x.unsqueeze(1) * x.unsqueeze(2) + torch.eye(4)),
    "convolution over rows": lambda x, i, w: F.conv1d(x.t().unsqueeze(0), w[:4].view(1, 4, 4)),
    "weights of rows": lambda x, i, w: F.conv1d(w.view(1, 4, 8), x.unsqueeze(-1)),
    "fast fourier": lambda x, i, w: torch.fft.rfft(x, dim=0).abs(),
    "sum to size": lambda x, i, w: x.sum_to_size(1, 4),
    "tile": lambda x, i, w: x.tile(2, 1),
    "roll of all": lambda x, i, w: x.roll(1),
    "aminmax": lambda x, i, w: x - x.aminmax().min,
    "cat in the middle": lambda x, i, w: torch.cat([w, x, w]),
    "behind a row": lambda x, i, w: torch.cat([x, w[:1]])[1:],
    "cond": lambda x, i, w: torch.cond(w.sum() > 0, lambda a: a.sum(0), lambda a: a[0] * 1, (x,)),
    "masked": lambda x, i, w: torch.zeros_like(x).masked_scatter(x > 0, x),
    "scan from behind": lambda x, i, w: x.flip(0).cumsum(0),
    "scan of a sum": lambda x, i, w: (x - x.sum(0)).cumsum(0),
    "rows by a scan that may leave": lambda x, i, w: x[i.cumsum(0)],
    "put across": lambda x, i, w: _set(
        torch.zeros_like(x), (torch.arange(len(x)), i[:, None] % 4), x[:, :1]
    ),
    "put in a longer one": lambda x, i, w: _set(
        x.new_zeros(len(x) + 1, 4), torch.arange(len(x)), x
    ),
    "put in rows from the second": lambda x, i, w: _set(
        x.new_zeros(len(x) + 1, 4), torch.arange(len(x)) + 1, x
    ),
    "put in all but the last": lambda x, i, w: _set(
        torch.zeros_like(x), torch.arange(len(x) - 1), x[1:]
    ),
    "put where a mask says": lambda x, i, w: _set(
        torch.zeros_like(x), (torch.arange(len(x)), i > 2), x[:, 0]
    ),
    "put in rows of a table": lambda x, i, w: w.index_put((torch.arange(len(x)), i % 4), x[:, 0]),
    "repeat the last row": lambda x, i, w: F.pad(x.t().unsqueeze(0), (0, 1), mode="replicate"),
    "row behind": lambda x, i, w: F.pad(x, (0, 0, 0, 1)),
    "scatter along rows": lambda x, i, w: torch.zeros_like(x).scatter(0, i[:, None] % 2, 1.0),
    "largest of integers that may be negative": lambda x, i, w: x + i.max(),
    "least of integers": lambda x, i, w: x + i.amin(),
}  # fmt: skip
