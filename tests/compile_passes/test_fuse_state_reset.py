from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mtpgraph import ops
from mtpgraph.compile_passes.fuse_state_reset import fuse_state_reset
from tests.helpers import assert_same_bits, nan_pool

from .support import trace

DIM, WIDTH, NEXT_N = 8, 3, 2
SLOTS = 9
DECAY = torch.tensor([-0.5, -1.5])
TAPS = torch.linspace(-1, 1, DIM * WIDTH).view(DIM, WIDTH)
KINDS = ["conv", "conv_slot_per_token", "ssm", "ssm_one_slot", "delta", "delta_one_slot"]


def update(kind: str, state: Tensor, x: Tensor, indices: Tensor, qsl: Tensor | None, **given):
    """The update of a kind, over numbers made from ``x``; ``indices`` [num_reqs, NEXT_N]."""
    one_slot = kind == "conv" or kind.endswith("one_slot")
    if one_slot:
        indices = indices[:, 0]
    if kind.endswith("one_slot"):
        given.pop("num_accepted_tokens", None)
    if kind.startswith("conv"):
        return ops.causal_conv1d_update_(state, x, TAPS, None, indices, qsl, **given)
    heads = x.unflatten(1, (2, 4))
    if kind.startswith("ssm"):
        dt = heads.sum(-1)
        return ops.selective_state_update_(
            state, heads, dt, DECAY, heads[:, :1], heads[:, 1:], indices, qsl, **given
        )
    gate = -heads.abs().float().sum(-1)
    beta = heads.sigmoid().float().sum(-1) / 4
    return ops.gated_delta_update_(state, heads, heads, heads, gate, beta, indices, qsl, **given)


def make_state(kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """A pool of NaN but for the slots of request 1, the one with a past."""
    columns = WIDTH - 1 + (NEXT_N - 1 if kind == "conv" else 0)
    shape = (DIM, columns) if kind.startswith("conv") else (2, 4, 4)
    state = nan_pool(SLOTS, *shape, dtype=dtype)
    state[2:4] = torch.randn(2, *shape).to(dtype)
    return state


def make_batch() -> dict[str, Tensor]:
    """A new request, one with a past, padding of both kinds, another new one of one token."""

    def int32(*values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return {
        "x": torch.randn(8, DIM),
        "qsl": int32(0, 2, 4, 4, 6, 7),
        "seq_lens": int32(2, 9, 0, 0, 1),
        "indices": int32([0, 1], [2, 3], [-1, -1], [-1, -1], [6, 7]),
        "accepted": int32(1, 2, 1, 1, 1),
    }


def fusable(kind: str) -> Callable[..., Tensor]:
    def step(state, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(state, indices[:, 0], old)
        return update(kind, state, x, indices, qsl, num_accepted_tokens=accepted)

    return step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["eager", "inductor"])
def test_fuse_state_reset_keeps_outputs_and_states(kind: str, dtype: torch.dtype, engine: str):
    """The mask reaches the compiled code: without it the new requests would start from NaN."""
    step, batch, state = fusable(kind), make_batch(), make_state(kind, dtype)
    expected_state = state.clone()
    expected = step(expected_state, *batch.values())
    assert expected.isfinite().all()

    compiled = torch.compile(step, backend="mtpgraph", fullgraph=True, options={"engine": engine})
    assert_same_bits(compiled(state, *batch.values()), expected)
    assert_same_bits(state, expected_state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_fuse_state_reset_removes_the_reset(kind: str, dynamic: bool):
    batch, state = make_batch(), make_state(kind)
    _, probe = trace(
        fusable(kind), state, *batch.values(), passes=[fuse_state_reset], dynamic=dynamic
    )
    assert probe.counts == {"fuse_state_reset": 1}
    assert probe.calls["reset_states_"] == 0
    assert probe.calls["has_initial_state"] == 1


def test_fuse_state_reset_ignores_the_accepted_count_of_a_new_request():
    """Where a new request comes with a stale count, the fused form follows the contract."""
    batch, state = make_batch(), make_state("ssm")
    right_state = state.clone()
    right = fusable("ssm")(right_state, *batch.values())
    batch["accepted"][0] = 99
    result, _ = trace(fusable("ssm"), state, *batch.values(), passes=[fuse_state_reset])
    assert_same_bits(result, right)
    assert_same_bits(state, right_state)


def test_fuse_state_reset_in_every_layer():
    def step(a, b, c, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        for kind, state in (("conv", a), ("ssm", b), ("delta", c)):
            ops.reset_states_(state, indices[:, 0], old)
            x = update(kind, state, x, indices, qsl, num_accepted_tokens=accepted).flatten(1)
        return x

    batch = make_batch()
    states = [make_state(kind) for kind in ("conv", "ssm", "delta")]
    expected_states = [state.clone() for state in states]
    expected = step(*expected_states, *batch.values())
    result, probe = trace(step, *states, *batch.values(), passes=[fuse_state_reset])
    assert probe.counts == {"fuse_state_reset": 3}
    assert_same_bits(result, expected)
    for state, expected_state in zip(states, expected_states, strict=True):
        assert_same_bits(state, expected_state)


def test_fuse_state_reset_hoisted_before_other_layers():
    def step(a, b, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(a, indices[:, 0], old)
        ops.reset_states_(b, indices[:, 0], old)
        x = update("conv", a, x, indices, qsl, num_accepted_tokens=accepted)
        return update("ssm", b, x, indices, qsl, num_accepted_tokens=accepted)

    batch, a, b = make_batch(), make_state("conv"), make_state("ssm")
    expected = step(a.clone(), b.clone(), *batch.values())
    result, probe = trace(step, a, b, *batch.values(), passes=[fuse_state_reset])
    assert probe.counts == {"fuse_state_reset": 2}
    assert_same_bits(result, expected)


def test_fuse_state_reset_of_one_layer_of_a_pool():
    def step(pool, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(pool[1], indices[:, 0], old)
        return update("ssm", pool[1], x, indices, qsl, num_accepted_tokens=accepted)

    batch = make_batch()
    pool = torch.stack([make_state("ssm") for _ in range(3)])
    expected_pool = pool.clone()
    expected = step(expected_pool, *batch.values())
    result, probe = trace(step, pool, *batch.values(), passes=[fuse_state_reset])
    assert probe.counts == {"fuse_state_reset": 1}
    assert_same_bits(result, expected)
    assert_same_bits(pool, expected_pool)


def test_fuse_state_reset_with_a_mask_of_the_callers_where_rows_have_one_token():
    def step(state, x, indices, old):
        ops.reset_states_(state, indices[:, 0], old)
        return update("ssm", state, x, indices, None)

    batch, state = make_batch(), make_state("ssm")
    old = torch.tensor([False, True, True, True, False])
    inputs = batch["x"][:5], batch["indices"], old
    expected_state = state.clone()
    expected = step(expected_state, *inputs)
    result, probe = trace(step, state, *inputs, passes=[fuse_state_reset])
    assert probe.counts == {"fuse_state_reset": 1}
    assert_same_bits(result, expected)
    assert_same_bits(state, expected_state)


def own_mask(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(state, indices[:, 0], old)
    return update("ssm", state, x, indices, qsl, has_initial_state=torch.ones_like(old))


def stores_elsewhere(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(state, indices[:, 0], old)
    return update("ssm", state, x, indices, qsl, dst_indices=indices + 1)


def mask_of_unknown_rows(state, x, qsl, seq_lens, indices, accepted):
    """Row 2 has no token: the reset clears its slot, which the update would not."""
    old = seq_lens > 8
    indices = indices.clamp(min=4)
    ops.reset_states_(state, indices[:, 0], old)
    return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted)


def mask_of_another_batch(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl.flip(0).neg(), seq_lens)
    ops.reset_states_(state, indices[:, 0], old)
    return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted)


def other_indices(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(state, indices[:, 0] + 1, old)
    return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted)


def second_column(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(state, indices[:, 1], old)
    return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted)


def read_between(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(state, indices[:, 0], old)
    seen = state.sum()
    return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted), seen


def read_between_through_a_view(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    first = state[0]
    ops.reset_states_(state, indices[:, 0], old)
    seen = first + 1
    return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted), seen


def written_between(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(state, indices[:, 0], old)
    state[0] = 1
    return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted)


def indices_written_between(state, x, qsl, seq_lens, indices, accepted):
    indices = indices.clone()
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(state, indices[:, 0], old)
    indices[4] = indices[0]
    indices[0] = 8
    return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted)


def mask_written_between(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(state, indices[:, 0], old)
    old.fill_(True)
    return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted)


def lens_written_between(state, x, qsl, seq_lens, indices, accepted):
    qsl = qsl.clone()
    old = ops.has_initial_state(qsl, seq_lens)
    qsl.clamp_(max=4)
    ops.reset_states_(state, indices[:, 0], old)
    return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted)


def starts_computed_anew_after_a_write(state, x, qsl, seq_lens, indices, accepted):
    wide = qsl.long()
    old = ops.has_initial_state(wide.int(), seq_lens)
    wide.clamp_(max=4)
    ops.reset_states_(state, indices[:, 0], old)
    return update("ssm", state, x, indices, wide.int(), num_accepted_tokens=accepted)


def indices_computed_anew_after_a_write(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    wide = indices.long()
    first = wide.int()[:, 0]
    wide[0, 0] = 8
    ops.reset_states_(state, first, old)
    return update("ssm", state, x, wide.int(), qsl, num_accepted_tokens=accepted)


def update_reads_the_state_beside(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    beside = state.flatten(1)[:8, :8]
    ops.reset_states_(state, indices[:, 0], old)
    return update("ssm", state, beside, indices, qsl, num_accepted_tokens=accepted)


def reset_after_the_update(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    out = update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted)
    ops.reset_states_(state, indices[:, 0], old)
    return out


def reset_of_another_state(state, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    other = state.clone()
    ops.reset_states_(other, indices[:, 0], old)
    return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted), other


@pytest.mark.parametrize(
    "near_miss",
    [
        own_mask,
        stores_elsewhere,
        mask_of_unknown_rows,
        mask_of_another_batch,
        other_indices,
        second_column,
        read_between,
        read_between_through_a_view,
        written_between,
        indices_written_between,
        mask_written_between,
        lens_written_between,
        starts_computed_anew_after_a_write,
        indices_computed_anew_after_a_write,
        update_reads_the_state_beside,
        reset_after_the_update,
        reset_of_another_state,
    ],
)
def test_fuse_state_reset_leaves_alone(near_miss: Callable[..., Tensor]):
    batch, state = make_batch(), make_state("ssm")
    expected_state = state.clone()
    expected = near_miss(expected_state, *(value.clone() for value in batch.values()))
    result, probe = trace(near_miss, state, *batch.values(), passes=[fuse_state_reset])
    assert probe.counts == {"fuse_state_reset": 0}
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert_same_bits(state, expected_state)


def test_fuse_state_reset_masks_the_first_update_alone():
    def step(state, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(state, indices[:, 0], old)
        first = update("ssm", state, x, indices, qsl)
        return first, update("ssm", state, x, indices, qsl)

    batch, state = make_batch(), make_state("ssm")
    expected_state = state.clone()
    expected = step(expected_state, *batch.values())
    result, probe = trace(step, state, *batch.values(), passes=[fuse_state_reset])
    assert probe.counts == {"fuse_state_reset": 1}
    for a, b in zip(result, expected, strict=True):
        assert_same_bits(a, b)
    assert_same_bits(state, expected_state)


@pytest.mark.parametrize("written", ["indices", "mask"])
def test_fuse_state_reset_leaves_alone_inputs_written_between(written: str):
    """Indices and a mask that are inputs are in use from the reset on: nothing computes them."""

    def step(state, x, indices, old):
        ops.reset_states_(state, indices, old)
        if written == "indices":
            indices.copy_(indices.flip(0))
        else:
            old.fill_(True)
        heads = x.unflatten(1, (2, 4))
        return ops.selective_state_update_(
            state, heads, heads.sum(-1), DECAY, heads[:, :1], heads[:, 1:], indices
        )

    def inputs() -> tuple[Tensor, ...]:
        indices = torch.tensor([0, 2, -1, 3, 6], dtype=torch.int32)
        return x, indices, torch.tensor([False, True, True, True, False])

    x, state = torch.randn(5, DIM), make_state("ssm")
    expected_state = state.clone()
    expected = step(expected_state, *inputs())
    result, probe = trace(step, state, *inputs(), passes=[fuse_state_reset])
    assert probe.counts == {"fuse_state_reset": 0}
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert_same_bits(state, expected_state)
