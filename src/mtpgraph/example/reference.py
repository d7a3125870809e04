"""The training forward: the same layers over whole sequences, in plain torch.

It uses none of the ops, so it is also an independent check of the decode step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import AttentionLayer, Projections
from .layers import DeltaLayer, MambaLayer

_FP8_MAX = 448.0


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu of a depthwise causal convolution; x [batch, length, dim], weight [dim, width]."""
    width = weight.shape[1]
    length = x.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    y = padded[:, :length] * weight[:, 0]
    for i in range(1, width):
        y = y + padded[:, i : i + length] * weight[:, i]
    return F.silu(y if bias is None else y + bias)


def mamba(layer: MambaLayer, hidden: Tensor, chunk: int = 64) -> Tensor:
    """Mamba-2 in its chunked dual form (Dao and Gu, 2024, listing 1)."""
    z, xbc, dt = layer.project(hidden)
    x, b, c = layer.split(causal_conv(xbc, layer.conv_weight, layer.conv_bias))
    batch, length, heads, head_dim = x.shape
    dt = F.softplus(dt + layer.dt_bias)
    steps = _chunks(dt * -layer.a_log.exp(), chunk).transpose(2, 3).cumsum(-1)  # [B, N, H, Q]
    values = _chunks(x * dt.unsqueeze(-1), chunk).transpose(2, 3)  # [B, N, H, Q, P]
    b, c = _chunks(b, chunk), _chunks(c, chunk)  # [B, N, Q, S]
    decay = _decay(steps)
    y = ((c @ b.mT).unsqueeze(2) * decay) @ values
    to_end = (steps[..., -1:] - steps).exp().unsqueeze(-1)
    added = (values * to_end).mT @ b.unsqueeze(2)  # [B, N, H, P, S]
    state = torch.zeros_like(added[:, 0])
    outs = []
    for n in range(added.shape[1]):
        from_start = steps[:, n].exp().unsqueeze(-1)
        outs.append(y[:, n] + from_start * (c[:, n].unsqueeze(1) @ state.mT))
        state = state * from_start[..., -1:, :] + added[:, n]
    y = torch.stack(outs, 1).transpose(2, 3).reshape(batch, -1, heads, head_dim)[:, :length]
    y = y + layer.d.unsqueeze(-1) * x
    return layer.out(y * F.silu(z).view_as(y))


def delta(layer: DeltaLayer, hidden: Tensor, chunk: int = 64) -> Tensor:
    """Gated delta rule in its chunked WY form (Yang, Kautz and Hatamizadeh, 2024)."""
    z, qkv, g, beta = layer.project(hidden)
    q, k, v = layer.split(causal_conv(qkv, layer.conv_weight, None))
    batch, length, heads, value_dim = v.shape
    q = _unit(q) * layer.config.delta_key_dim**-0.5
    k = _unit(k)
    q, k, v = (_chunks(u, chunk).transpose(2, 3) for u in (q, k, v))  # [B, N, H, Q, ..]
    beta = _chunks(beta, chunk).transpose(2, 3).unsqueeze(-1)
    steps = _chunks(g, chunk).transpose(2, 3).cumsum(-1)  # [B, N, H, Q]
    decay = _decay(steps)
    from_start = steps.exp().unsqueeze(-1)
    mixing = ((k * beta) @ k.mT * decay).tril(-1)
    rhs = torch.cat([v * beta, k * beta * from_start], dim=-1)
    eye = torch.eye(chunk, device=v.device)
    solved = torch.linalg.solve_triangular(mixing + eye, rhs, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inner = (q @ k.mT) * decay
    k_end = k * (steps[..., -1:] - steps).exp().unsqueeze(-1)
    q_start = q * from_start
    state = v.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
    outs = []
    for n in range(v.shape[1]):
        new = u[:, n] - w[:, n] @ state
        outs.append(q_start[:, n] @ state + inner[:, n] @ new)
        state = state * from_start[:, n, :, -1:] + k_end[:, n].mT @ new
    o = torch.stack(outs, 1).transpose(2, 3).reshape(batch, -1, heads, value_dim)[:, :length]
    return layer.out(o, z)


def attention(
    layer: AttentionLayer, hidden: Tensor, sparse: bool = True, indexer: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sparse MLA over whole sequences.

    Returns the output, the keys, the additive mask of what was attended to
    [batch, length, length], and the indexer's loss: the divergence of its softmax from the mean
    attention of the heads, over the keys attended to (DeepSeek-V3.2, section 2.1). Without
    ``sparse`` every key is attended to; without ``indexer`` there is no loss either.
    """
    length = hidden.shape[1]
    p = layer.project(hidden, torch.arange(length, device=hidden.device))
    causal = torch.full((length, length), -torch.inf, device=hidden.device).triu(1)
    mask = causal.unsqueeze(0)
    index_logits = _index_logits(p) if indexer or sparse else None
    if sparse and length > layer.config.topk:
        assert index_logits is not None
        with torch.no_grad():
            chosen = _choose(index_logits + causal, layer.config.topk, layer.training)
            mask = torch.full_like(index_logits, -torch.inf).scatter_(-1, chosen, 0.0) + causal
    scores = torch.einsum("bthd,bsd->bths", p.query, p.key) * layer.scale
    weights = (scores + mask.unsqueeze(2)).softmax(-1)
    attended = torch.einsum("bths,bsd->bthd", weights, p.key[..., : layer.config.latent_dim])
    index_loss = hidden.new_zeros(())
    if indexer and index_logits is not None:
        target = weights.detach().mean(2)
        said = (index_logits + mask).log_softmax(-1).masked_fill(mask < 0, 0.0)
        index_loss = (torch.xlogy(target, target) - target * said).sum(-1).mean()
    return layer.out(attended), p.key, mask, index_loss


def attention_shared(
    layer: AttentionLayer, hidden: Tensor, step: int, keys: list[Tensor], mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Draft ``step`` >= 1 at every position: the keys and the choice (``mask``) of step 0, and the
    own keys of the steps since. Returns the output and this step's key."""
    positions = torch.arange(hidden.shape[1], device=hidden.device) + step
    p = layer.project(hidden, positions)
    first, own = keys[0], torch.stack([*keys[1:], p.key], dim=2)  # own [B, T, step, kv_dim]
    scores = torch.cat(
        [
            torch.einsum("bthd,bsd->bths", p.query, first) * layer.scale + mask.unsqueeze(2),
            torch.einsum("bthd,btsd->bths", p.query, own) * layer.scale,
        ],
        dim=-1,
    )
    latent = layer.config.latent_dim
    weights_first, weights_own = scores.softmax(-1).split([first.shape[1], own.shape[2]], dim=-1)
    attended = torch.einsum("bths,bsd->bthd", weights_first, first[..., :latent])
    attended = attended + torch.einsum("bths,btsd->bthd", weights_own, own[..., :latent])
    return layer.out(attended), p.key


def _index_logits(p: Projections) -> Tensor:
    scores = F.relu(torch.einsum("bthd,bsd->bths", p.index_q, _fp8(p.index_k)))
    return (scores * p.index_weights.unsqueeze(-1)).sum(2)


def _choose(index_logits: Tensor, topk: int, training: bool) -> Tensor:
    """The positions of the largest logits; of equal ones the lower position, as in decode, except
    in training, where it does not matter and a sort takes longer. Zeros are often equal."""
    if training:
        return index_logits.topk(topk, dim=-1).indices
    return index_logits.sort(dim=-1, descending=True, stable=True).indices[..., :topk]


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[batch, length, ..] -> [batch, num_chunks, chunk, ..], zeros at the end."""
    missing = -x.shape[1] % chunk
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
    return x.unflatten(1, (-1, chunk))


def _decay(steps: Tensor) -> Tensor:
    """exp(steps_i - steps_j) for j <= i, 0 elsewhere."""
    gaps = steps.unsqueeze(-1) - steps.unsqueeze(-2)
    above = torch.ones(gaps.shape[-2:], dtype=torch.bool, device=gaps.device).triu(1)
    return gaps.masked_fill(above, -torch.inf).exp()


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _fp8(k: Tensor) -> Tensor:
    """``k`` as the index cache gives it back; the gradient passes through."""
    with torch.no_grad():
        scale = k.abs().amax(-1, keepdim=True).clamp(min=1e-4) / _FP8_MAX
        error = (k / scale).to(torch.float8_e4m3fn).to(k.dtype) * scale - k
    return k + error
