"""Requests and their tokens: attention by request, gathers between the two, uniform views."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpgraph import ops

from .batches import BLOCK_SIZE, BLOCKS, DIM, MAX_SEQ_LEN, NEXT_N, kv_cache, ssm_pool
from .corpus import Model
from .parts import mamba2


def last_tokens(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    hidden = x + row_lens[:, None]
    return hidden[(query_start_loc[1:] - 1).clamp(min=0)]


def last_tokens_unclamped(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """A first request without tokens takes the last row of all: in a padded batch, of padding."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return (x + row_lens[:, None])[query_start_loc[1:] - 1]


def last_tokens_alone(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """Sampling of new requests: the gather is all that says what the rows of ``x`` are."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    return torch.where(old[:, None], 0, x[(query_start_loc[1:] - 1).clamp(min=0)])


def first_tokens(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """A request without tokens, if it is the last, begins past the end."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    hidden = torch.cat([x + row_lens[:, None], x.new_zeros(1, DIM)])
    return hidden[query_start_loc[:-1]]


def per_token(x: Tensor, row_bias: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """What each request has, for each of its tokens."""
    _, row_requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return x + row_bias[row_requests]


def sdpa_by_request(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    kv: Tensor,
) -> Tensor:
    """Attention with torch alone: each token gathers the keys of its own request."""
    row_lens, row_requests = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    ops.kv_cache_write_(x, slot_mapping, kv)
    table = ops.expand_block_table(block_table, row_requests).clamp(min=0)
    keys = kv[table].flatten(1, 2)  # [num_tokens, MAX_SEQ_LEN, DIM]
    seen = torch.arange(MAX_SEQ_LEN) < row_lens[:, None]
    keys = torch.where(seen[:, :, None], keys, 0)
    y = F.scaled_dot_product_attention(x[:, None], keys, keys, attn_mask=seen[:, None])
    return torch.where(row_lens[:, None] > 0, y[:, 0], 0)


def sdpa_of_the_batch(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """Attention in which all tokens of the batch see each other."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    y = F.scaled_dot_product_attention(x[None], x[None], x[None])
    return y[0] + row_lens[:, None]


def uniform_view(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_indices: Tensor, ssm: Tensor
) -> Tensor:
    """``next_n`` from a view: the drafts of a request attend to each other."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    x = mamba2(ssm, x, state_indices, query_start_loc, has_initial_state=old)
    drafts = x.view(seq_lens.shape[0], NEXT_N, DIM)
    y = F.scaled_dot_product_attention(drafts, drafts, drafts, is_causal=True)
    return x + y.flatten(0, 1)


def uniform_mean(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over the drafts of each request, not over the batch."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    drafts = (x + row_lens[:, None]).unflatten(0, (-1, NEXT_N))
    return drafts.mean(1), drafts.argmax(1) + seq_lens[:, None]


def rotary(
    x: Tensor, positions: Tensor, query_start_loc: Tensor, seq_lens: Tensor, table: Tensor
) -> Tensor:
    """Positions look up a table of angles."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    cos, sin = table[positions].chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1) + row_lens[:, None]


def positions_by_hand(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """Positions from the lengths, as drafts compute them."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    positions = (row_lens - 1).clamp(min=0)
    blocks = positions // BLOCK_SIZE % BLOCKS
    return x + blocks[:, None]


def angles() -> Tensor:
    steps = torch.arange(MAX_SEQ_LEN)[:, None] / torch.arange(1, DIM // 2 + 1)
    return torch.cat([steps.cos(), steps.sin()], -1)


MODELS = [
    Model(name="last token of each request", step=last_tokens, exact=True),
    Model(
        name="last token of each request, unclamped",
        step=last_tokens_unclamped,
        findings=(("rows mixed", "(x + row_lens[:, None])[query_start_loc[1:] - 1]"),),
        exact=True,
    ),
    Model(
        name="last token of each request, alone",
        step=last_tokens_alone,
        exact=True,
    ),
    Model(
        name="first token of each request",
        step=first_tokens,
        findings=(
            ("rows mixed", "torch.cat([x + row_lens"),
            ("padding unknown", "hidden[query_start_loc[:-1]]"),
        ),
        exact=True,
    ),
    Model(
        name="per-request rows for tokens",
        step=per_token,
        exact=True,
    ),
    Model(
        name="attention by request",
        step=sdpa_by_request,
        kept=lambda: {"kv": kv_cache()},
    ),
    Model(
        name="attention across the batch",
        step=sdpa_of_the_batch,
        findings=(("rows mixed", "F.scaled_dot_product_attention(x[None]"),),
        mixes="F.scaled_dot_product_attention(x[None]",
    ),
    Model(
        name="next_n from a view",
        step=uniform_view,
        kept=lambda: {"ssm": ssm_pool()},
        batches="uniform",
    ),
    Model(
        name="mean of drafts",
        step=uniform_mean,
        batches="uniform",
    ),
    Model(name="rotary table", step=rotary, kept=lambda: {"table": angles()}),
    Model(name="positions by hand", step=positions_by_hand, exact=True),
]
