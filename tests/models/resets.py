"""Recurrent layers and the states of new requests."""

import torch
from torch import Tensor

from mtpgraph import Batched, ops

from .batches import conv_pool, ssm_pool
from .corpus import Model
from .parts import delta, mamba2, short_conv


def in_a_loop_before(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    state_indices: Tensor,
    states: list[Tensor],
) -> Tensor:
    old = ops.has_initial_state(query_start_loc, seq_lens)
    for state in states:
        ops.reset_states_(state, state_indices[:, 0], old)
    for state in states:
        x = mamba2(state, x, state_indices, query_start_loc)
    return x


def next_to_updates(
    x: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor,
    conv: Tensor,
    ssm: Tensor,
    memory: Tensor,
) -> Tensor:
    """A hybrid of a short convolution, Mamba-2 and the gated delta rule."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    accepted = {"num_accepted_tokens": num_accepted_tokens}
    ops.reset_states_(conv, state_indices[:, 0], old)
    x = short_conv(conv, x, state_indices, query_start_loc, **accepted)
    ops.reset_states_(ssm, state_indices[:, 0], old)
    x = mamba2(ssm, x, state_indices, query_start_loc, **accepted)
    ops.reset_states_(memory, state_indices[:, 0], old)
    return delta(memory, x, state_indices, query_start_loc, **accepted)


def layers_of_a_pool(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_indices: Tensor, pool: Tensor
) -> Tensor:
    """Layers are views of one pool, and all are reset in front."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    for layer in range(pool.shape[0]):
        ops.reset_states_(pool[layer], state_indices[:, 0], old)
    for layer in range(pool.shape[0]):
        x = mamba2(pool[layer], x, state_indices, query_start_loc)
    return x


def stacked_pool(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_indices: Tensor, pool: Tensor
) -> Tensor:
    """One reset for the layers of a pool [num_slots, layers, ...]: it covers more than each."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    ops.reset_states_(pool, state_indices[:, 0], old)
    for layer in range(pool.shape[1]):
        x = mamba2(pool[:, layer], x, state_indices, query_start_loc)
    return x


def mask_reused(
    x: Tensor,
    row_bias: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    state_indices: Tensor,
    ssm: Tensor,
) -> tuple[Tensor, Tensor]:
    """The mask serves the reset and an embedding of new requests."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    ops.reset_states_(ssm, state_indices[:, 0], old)
    x = mamba2(ssm, x, state_indices, query_start_loc)
    return x, torch.where(old[:, None], row_bias, row_bias * 2)


def mask_by_hand(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_indices: Tensor, ssm: Tensor
) -> Tensor:
    """The same numbers, without the op that says so."""
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    old = (seq_lens > query_lens) | (seq_lens == 0)
    ops.reset_states_(ssm, state_indices[:, 0], old)
    return mamba2(ssm, x, state_indices, query_start_loc)


def mask_given(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_indices: Tensor, ssm: Tensor
) -> Tensor:
    old = ops.has_initial_state(query_start_loc, seq_lens)
    return mamba2(ssm, x, state_indices, query_start_loc, has_initial_state=old)


def one_token_each(x: Tensor, seq_lens: Tensor, state_indices: Tensor, ssm: Tensor) -> Tensor:
    """Plain decode: without offsets a row has one token, and any mask will do."""
    first = state_indices[:, 0]
    ops.reset_states_(ssm, first, seq_lens != 1)
    return mamba2(ssm, x, first)


def read_between(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_indices: Tensor, ssm: Tensor
) -> tuple[Tensor, Tensor]:
    """Somebody looks at the pool after the reset."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    ops.reset_states_(ssm, state_indices[:, 0], old)
    peak = ssm.nan_to_num().abs().amax()
    return mamba2(ssm, x, state_indices, query_start_loc), peak


def times_mask(
    x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_indices: Tensor, ssm: Tensor
) -> Tensor:
    """A reset by hand: -1 is the last slot, and padding writes there."""
    old = ops.has_initial_state(query_start_loc, seq_lens)
    first = state_indices[:, 0]
    ssm[first] = torch.where(old[:, None, None, None], ssm[first], 0)
    return mamba2(ssm, x, state_indices, query_start_loc)


MODELS = [
    Model(
        name="resets in a loop before the layers",
        step=in_a_loop_before,
        kept=lambda: {"states": [ssm_pool(), ssm_pool()]},
        rewrites={"fuse_state_reset": 2},
    ),
    Model(
        name="hybrid, resets next to updates",
        step=next_to_updates,
        kept=lambda: {"conv": conv_pool(), "ssm": ssm_pool(), "memory": ssm_pool()},
        rewrites={"fuse_state_reset": 3},
        inductor=True,
    ),
    Model(
        name="resets of the layers of a pool",
        step=layers_of_a_pool,
        kept=lambda: {"pool": ssm_pool(2)},
        rewrites={"fuse_state_reset": 2},
    ),
    Model(
        name="reset of a stacked pool",
        step=stacked_pool,
        kept=lambda: {"pool": ssm_pool(2).transpose(0, 1).contiguous()},
        left_alone=(("fuse_state_reset", "the reset covers a state of shape"),),
    ),
    Model(
        name="reset with a mask in use",
        step=mask_reused,
        kept=lambda: {"ssm": ssm_pool()},
        rewrites={"fuse_state_reset": 1},
    ),
    Model(
        name="reset with a mask by hand",
        step=mask_by_hand,
        kept=lambda: {"ssm": ssm_pool()},
        left_alone=(("fuse_state_reset", "has_initial_state"),),
    ),
    Model(name="mask given to the update", step=mask_given, kept=lambda: {"ssm": ssm_pool()}),
    Model(
        name="reset of one token each",
        step=one_token_each,
        batches="single",
        inputs={"x": Batched(0, pad=0)},
        kept=lambda: {"ssm": ssm_pool()},
        rewrites={"fuse_state_reset": 1},
    ),
    Model(
        name="state read after its reset",
        step=read_between,
        kept=lambda: {"ssm": ssm_pool()},
        rewrites={"find_mutation_hazards": 1},
        left_alone=(("fuse_state_reset", ".nan_to_num()"),),
    ),
    Model(
        name="reset by hand",
        step=times_mask,
        kept=lambda: {"ssm": ssm_pool()},
        # it is harmless as long as no new request has the last slot
        findings=(("rows mixed", "ssm[first] = torch.where"),),
    ),
]
