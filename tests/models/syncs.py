"""Steps that ask the device for a number or a shape, and sampling that does not."""

import itertools

import torch
from torch import Tensor

from mtpgraph import ops

from .corpus import Model


def greedy(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Argmax, and how many drafts agree, without a sync."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    logits = x + row_lens[:, None]
    sampled = logits.argmax(-1)
    return sampled, logits.gather(1, sampled[:, None])


def multinomial(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    # all of the weight on one id: what is drawn does not depend on the generator
    weights = torch.zeros_like(x).scatter_(1, (row_lens % 7).long()[:, None], 1.0)
    return torch.multinomial(weights, 1)


def item_as_branch(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    if seq_lens.max().item() > 3:
        x = x * 2
    return x + row_lens[:, None]


def item_as_value(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    longest = seq_lens.max().item()
    return x * longest + row_lens[:, None]


def any_new(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """The question that the masks of this package exist for."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    if (~old).any():
        x = x * 2
    return x + 1


def masked(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    y = x + row_lens[:, None]
    return y[row_lens > 0]


def nonzero(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    rows = torch.nonzero(row_lens).squeeze(1)
    return x.index_select(0, rows)


def unique(x: Tensor, tokens: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """How many different ids there are in the batch."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    ids = torch.unique(tokens)
    return x + (row_lens + tokens)[:, None] + ids.shape[0]


def by_lengths(
    x: Tensor, row_bias: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """The flattening that everyone writes first."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    old = ops.has_initial_state(query_start_loc, seq_lens)
    bias = row_bias * old[:, None]
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    return x + row_lens[:, None], bias.repeat_interleave(query_lens, dim=0)


def over_requests(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """A loop over requests that asks for the bounds of each."""
    ops.has_initial_state(query_start_loc, seq_lens)
    bounds = query_start_loc.tolist()
    parts = [x[a:b].cumsum(0) for a, b in itertools.pairwise(bounds)]
    return torch.cat(parts)


MODELS = [
    Model(
        name="greedy sampling",
        step=greedy,
        exact=True,
    ),
    Model(
        name="multinomial sampling",
        step=multinomial,
        syncs=("torch.multinomial(",),
        findings=(("rows mixed", "torch.multinomial("),),
    ),
    Model(
        name="item in a branch",
        step=item_as_branch,
        graphs=2,
        breaks=("seq_lens.max().item()",),
        refused="if seq_lens.max().item() > 3",
    ),
    Model(
        name="item as a value",
        step=item_as_value,
        graphs=2,
        breaks=("seq_lens.max().item()",),
        # lengths of padding are 0, and none is less
        syncs=("seq_lens.max().item()",),
    ),
    Model(
        name="any in a branch",
        step=any_new,
        graphs=2,
        breaks=("if (~old).any():",),
        refused="if (~old).any():",
    ),
    Model(
        name="boolean mask",
        step=masked,
        breaks=("y[row_lens > 0]",),
        syncs=("y[row_lens > 0]",),
        findings=(("rows mixed", "y[row_lens > 0]"),),
    ),
    Model(
        name="nonzero",
        step=nonzero,
        graphs=2,
        breaks=("torch.nonzero(row_lens)",),
        syncs=("torch.nonzero(row_lens)",),
        findings=(("rows mixed", "torch.nonzero(row_lens)"),),
    ),
    Model(
        name="unique",
        step=unique,
        graphs=2,
        breaks=("torch.unique(tokens)",),
        syncs=("torch.unique(tokens)",),
        findings=(("rows mixed", "torch.unique(tokens)"),),
    ),
    Model(
        name="repeat by lengths",
        step=by_lengths,
        breaks=("repeat_interleave(query_lens",),
        syncs=("repeat_interleave(query_lens",),
        findings=(("rows mixed", "repeat_interleave(query_lens"),),
    ),
    Model(
        name="loop over requests",
        step=over_requests,
        graphs=2,
        breaks=("query_start_loc.tolist()",),
        syncs=("query_start_loc.tolist()",),
        findings=(("padding unknown", "ops.has_initial_state("),),
        static=("x", "query_start_loc", "seq_lens"),
    ),
]
