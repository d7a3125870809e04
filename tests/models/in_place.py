"""How caches and bookkeeping change: in place, out of place, and with the value of before."""

import torch
from torch import Tensor

from mtpgraph import ops

from .batches import PLACES, kv_cache, ssm_pool
from .corpus import Model
from .parts import mamba2


def written_by_op(x: Tensor, slot_mapping: Tensor, kv: Tensor) -> Tensor:
    ops.kv_cache_write_(x, slot_mapping, kv)
    return x.relu()


def written_by_index(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, slot_mapping: Tensor, kv: Tensor
) -> Tensor:
    """-1 is the last row, so padding would be written there."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    kv.view(-1, kv.shape[-1])[slot_mapping] = x
    return x + row_lens[:, None]


def out_of_place(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, slot_mapping: Tensor, kv: Tensor
) -> tuple[Tensor, Tensor]:
    """A new cache comes back, the given one stays."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    updated = kv.clone()
    ops.kv_cache_write_(x, slot_mapping, updated)
    return x + row_lens[:, None], updated


def bookkeeping(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    state_indices: Tensor,
    ssm: Tensor,
    lens: Tensor,
    previous: Tensor,
) -> Tensor:
    """Verify bookkeeping by copy: ``previous`` keeps the lengths of before the step."""
    before = lens.clone()
    lens.add_(1)
    previous.copy_(before)
    old = ops.has_initial_state(query_start_loc, seq_lens)
    return mamba2(ssm, x, state_indices, query_start_loc, has_initial_state=old)


def temperature(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Division by one must not give the logits themselves: the caller masks them in place."""
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    logits = x + row_lens[:, None]
    return logits, logits / 1.0


def read_before_write(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    state_indices: Tensor,
    ssm: Tensor,
) -> tuple[Tensor, Tensor]:
    """What a state was before the step is asked for after the update."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    level = ssm.nan_to_num().mean(-1) * 2
    y = mamba2(ssm, x, state_indices, query_start_loc, has_initial_state=old)
    return y, level + 1


MODELS = [
    Model(
        name="cache written by an op",
        step=written_by_op,
        kept=lambda: {"kv": kv_cache()},
        exact=True,
    ),
    Model(
        name="cache written by index",
        step=written_by_index,
        kept=lambda: {"kv": kv_cache()},
        findings=(("rows mixed", "[slot_mapping] = x"),),
        static=("slot_mapping",),  # nothing says what an index into a cache counts
        mixes="[slot_mapping] = x",
    ),
    Model(
        name="cache out of place", step=out_of_place, kept=lambda: {"kv": kv_cache()}, exact=True
    ),
    Model(
        name="lengths of before, by clone",
        step=bookkeeping,
        kept=lambda: {
            "ssm": ssm_pool(),
            "lens": torch.arange(PLACES),
            "previous": torch.zeros(PLACES, dtype=torch.int64),
        },
        rewrites={"find_mutation_hazards": 1},
        inductor=True,
        # a warm-up would count as well
        findings=(("rows mixed", "lens.add_(1)"), ("rows mixed", "previous.copy_(before)")),
        mixes="lens.add_(1)",
    ),
    Model(
        name="temperature of one",
        step=temperature,
        rewrites={"find_mutation_hazards": 1},
    ),
    Model(
        name="state read before its update",
        step=read_before_write,
        kept=lambda: {"ssm": ssm_pool()},
        rewrites={"find_mutation_hazards": 1},
    ),
]
