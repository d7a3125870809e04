import random
from collections.abc import Callable
from typing import Any

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


def numbers_of_the_update_read_from_the_state(state, x, qsl, seq_lens, indices, accepted):
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


MAY_TOUCH = "may read or write the state between the reset and its update"
OTHER_INDICES = "the reset's state_indices are not known to be those where"
OTHER_MASK = "the mask is not has_initial_state of the query_start_loc"
NEAR_MISSES = {
    own_mask: "has a has_initial_state of its own",
    stores_elsewhere: "has dst_indices",
    mask_of_unknown_rows: OTHER_MASK,
    mask_of_another_batch: OTHER_MASK,
    other_indices: OTHER_INDICES,
    second_column: OTHER_INDICES,
    read_between: f".sum() in line {{}} {MAY_TOUCH}",
    read_between_through_a_view: f"add in line {{}} {MAY_TOUCH}",
    written_between: f"setitem in line {{}} {MAY_TOUCH}",
    indices_written_between: "setitem in line {} may write",
    mask_written_between: ".fill_() in line {} may write",
    lens_written_between: ".clamp_() in line {} may write",
    starts_computed_anew_after_a_write: ".clamp_() in line {} may write",
    indices_computed_anew_after_a_write: "setitem in line {} may write",
    numbers_of_the_update_read_from_the_state: f".sum() in line {{}} {MAY_TOUCH}",
    reset_after_the_update: "no update of this state follows",
    reset_of_another_state: "no update of this state follows",
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES)
def test_fuse_state_reset_leaves_alone(near_miss: Callable[..., Tensor]):
    batch, state = make_batch(), make_state("ssm")
    expected_state = state.clone()
    expected = near_miss(expected_state, *(value.clone() for value in batch.values()))
    result, probe = trace(near_miss, state, *batch.values(), passes=[fuse_state_reset])
    assert probe.counts == {"fuse_state_reset": 0}
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert_same_bits(state, expected_state)
    (finding,) = probe.manager.findings
    assert (finding.kind, finding.found_by) == ("left alone", "fuse_state_reset")
    assert "ops.reset_states_" in finding.code
    before, _, after = NEAR_MISSES[near_miss].partition("{}")
    assert before in finding.reason
    assert after in finding.reason
    assert bool(finding.remedy) != ("no update" in finding.reason)


def test_fuse_state_reset_leaves_alone_an_update_that_reads_the_state_beside():
    """The update would read what the reset has cleared, and no longer does."""

    def step(state, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        beside = state.flatten(1)[:8, :8]
        ops.reset_states_(state, indices[:, 0], old)
        return update("conv_slot_per_token", state, beside, indices, qsl)

    probe = check_against_eager(step, make_state("conv_slot_per_token"), 0)
    (finding,) = probe.manager.findings
    assert "another argument of mtpgraph.causal_conv1d_update_" in finding.reason


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


# a pool of three layers, as others lay it out, and the state of one of them
LAYERS = 3
POOLS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "layers first": (lambda: stacked(0), lambda pool, i: pool[i]),
    "select": (lambda: stacked(0), lambda pool, i: pool.select(0, i)),
    "torch.select": (lambda: stacked(0), lambda pool, i: torch.select(pool, 0, i)),
    "unbind": (lambda: stacked(0), lambda pool, i: pool.unbind()[i]),
    "chunk": (lambda: stacked(0), lambda pool, i: pool.chunk(LAYERS)[i].squeeze(0)),
    "split": (lambda: stacked(0), lambda pool, i: torch.split(pool, 1)[i][0]),
    "slice of one": (lambda: stacked(0).flatten(0, 1), lambda pool, i: pool[i * SLOTS :][:SLOTS]),
    "view": (lambda: stacked(0).flatten(2), lambda pool, i: pool[i].view(SLOTS, 2, 4, 4)),
    "slots first": (lambda: stacked(1), lambda pool, i: pool[:, i]),
    "slots first, unbind": (lambda: stacked(1), lambda pool, i: pool.unbind(1)[i]),
    "part of a page": (
        lambda: stacked(1).flatten(1),
        lambda pool, i: pool[:, i * 32 : (i + 1) * 32].unflatten(1, (2, 4, 4)),
    ),
    "heads of a layer": (
        lambda: stacked(1).transpose(1, 2).flatten(1, 2),
        lambda pool, i: pool.unflatten(1, (2, LAYERS))[:, :, i],
    ),
}
each_pool = pytest.mark.parametrize("pool_form", POOLS.values(), ids=POOLS.keys())


def stacked(dim: int) -> Tensor:
    return torch.stack([make_state("ssm") for _ in range(LAYERS)], dim).contiguous()


def per_layer(state_of: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def step(pool, x, qsl, seq_lens, indices, accepted):
        for i in range(LAYERS):
            old = ops.has_initial_state(qsl, seq_lens)
            ops.reset_states_(state_of(pool, i), indices[:, 0], old)
            x = x + update("ssm", state_of(pool, i), x, indices, qsl).flatten(1)
        return x

    return step


def hoisted(state_of: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def step(pool, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        for i in range(LAYERS):
            ops.reset_states_(state_of(pool, i), indices[:, 0], old)
        for i in range(LAYERS):
            x = torch.nn.functional.silu(x)
            x = x + update("ssm", state_of(pool, i), x, indices, qsl).flatten(1)
        return x

    return step


def check_against_eager(
    step: Callable[..., Tensor], pool: Tensor, rewrites: int, dynamic: bool = False
) -> Any:
    batch = make_batch()
    batch["x"] = batch["x"].to(pool.dtype)
    expected_pool = pool.clone()
    expected = step(expected_pool, *batch.values())
    result, probe = trace(step, pool, *batch.values(), passes=[fuse_state_reset], dynamic=dynamic)
    assert_same_bits(result, expected)
    assert_same_bits(pool, expected_pool)
    assert probe.counts == {"fuse_state_reset": rewrites}
    return probe


@each_pool
@pytest.mark.parametrize(
    ("order", "dynamic"), [(per_layer, False), (hoisted, False), (hoisted, True)]
)
def test_fuse_state_reset_of_layers_of_one_pool(pool_form, order, dynamic: bool):
    make, state_of = pool_form
    # how many layers there are is a symbol then, and with it how many of them make a chunk
    is_open = dynamic and order is hoisted and pool_form is POOLS["chunk"]
    probe = check_against_eager(order(state_of), make(), 0 if is_open else LAYERS, dynamic)
    assert probe.calls["reset_states_"] == LAYERS * is_open
    assert bool(probe.manager.findings) == is_open


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fuse_state_reset_of_layers_of_one_pool_in_half_precision(dtype: torch.dtype):
    pool = torch.stack([make_state("ssm", dtype) for _ in range(LAYERS)])
    check_against_eager(hoisted(lambda pool, i: pool[i]), pool, LAYERS)


@pytest.mark.parametrize("dynamic", [False, True])
def test_fuse_state_reset_past_the_other_state_of_a_page(dynamic: bool):
    """A page of a slot holds the state of a conv and of an ssm, one behind the other."""

    def step(pages, x, qsl, seq_lens, indices, accepted):
        conv = pages[:, : DIM * (WIDTH - 1)].unflatten(1, (DIM, WIDTH - 1))
        ssm = pages[:, DIM * (WIDTH - 1) :].unflatten(1, (2, 4, 4))
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(conv, indices[:, 0], old)
        ops.reset_states_(ssm, indices[:, 0], old)
        x = update("conv_slot_per_token", conv, x, indices, qsl)
        return update("ssm", ssm, x, indices, qsl)

    pages = torch.cat(
        [make_state("conv_slot_per_token").flatten(1), make_state("ssm").flatten(1)], 1
    )
    check_against_eager(step, pages, 2, dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_fuse_state_reset_past_a_read_of_another_layer(dynamic: bool):
    def step(pool, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(pool[1], indices[:, 0], old)
        seen = pool[0].nan_to_num().sum() + pool[2, 2].sum()
        pool[2][0] = seen
        return update("ssm", pool[1], x, indices, qsl) + seen

    check_against_eager(step, stacked(0), 1, dynamic)


def test_fuse_state_reset_of_the_same_rows_in_another_shape():
    def step(pool, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(pool[1].flatten(1), indices[:, 0], old)
        ops.reset_states_(pool[0].transpose(1, 2), indices[:, 0], old)
        x = update("ssm", pool[0], x, indices, qsl).flatten(1)
        return update("ssm", pool[1], x, indices, qsl)

    check_against_eager(step, stacked(0), 2)


def test_fuse_state_reset_before_an_update_with_the_same_mask():
    def step(state, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(state, indices[:, 0], old)
        return update("ssm", state, x, indices, qsl, has_initial_state=old)

    probe = check_against_eager(step, make_state("ssm"), 1)
    assert probe.calls == {"selective_state_update_": 1, "has_initial_state": 1}


FIRST_COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "getitem": lambda indices: indices[:, 0],
    "ellipsis": lambda indices: indices[..., 0],
    "select": lambda indices: indices.select(1, 0),
    "torch.select": lambda indices: torch.select(indices, 1, 0),
    "unbind": lambda indices: indices.unbind(1)[0],
    "chunk": lambda indices: indices.chunk(NEXT_N, 1)[0].squeeze(1),
    "narrow": lambda indices: indices.narrow(1, 0, 1)[:, 0],
    "slice": lambda indices: indices[:, :1].squeeze(-1),
    "transposed": lambda indices: indices.t()[0],
    "T": lambda indices: indices.T[0],
    "contiguous": lambda indices: indices[:, 0].contiguous(),
    "clone": lambda indices: indices[:, 0].clone(),
    "of a copy": lambda indices: indices.contiguous()[:, 0],
    "of another copy": lambda indices: indices.clone().unbind(1)[0],
    "to": lambda indices: indices[:, 0].to(torch.int32),
    "there and back": lambda indices: indices[:, 0].long().int(),
    "flattened": lambda indices: indices.flatten()[::NEXT_N],
}


@pytest.mark.parametrize("column", FIRST_COLUMNS.values(), ids=FIRST_COLUMNS.keys())
def test_fuse_state_reset_knows_the_first_column(column: Callable[..., Tensor]):
    def step(state, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(state, column(indices), old)
        return update("ssm", state, x, indices, qsl, num_accepted_tokens=accepted)

    check_against_eager(step, make_state("ssm"), 1)


def test_fuse_state_reset_knows_the_first_column_of_a_symbolic_batch():
    def step(pool, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        for i, column in enumerate(FIRST_COLUMNS.values()):
            ops.reset_states_(pool[i], column(indices), old)
            x = x + update("ssm", pool[i], x, indices, qsl).flatten(1)
        return x

    pool = torch.stack([make_state("ssm") for _ in FIRST_COLUMNS])
    check_against_eager(step, pool, len(FIRST_COLUMNS), dynamic=True)


@pytest.mark.parametrize(
    "column", [form for name, form in FIRST_COLUMNS.items() if name != "of another copy"]
)
def test_fuse_state_reset_of_one_slot_given_in_two_ways(column: Callable[..., Tensor]):
    def step(state, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(state, column(indices), old)
        return update("ssm_one_slot", state, x, indices, qsl)

    check_against_eager(step, make_state("ssm"), 1)


@pytest.mark.parametrize(
    "cast_first", [lambda wide: wide.int()[:, 0], lambda wide: wide[:, 0].int()]
)
def test_fuse_state_reset_of_indices_cast_in_the_step(cast_first: Callable[..., Tensor]):
    def step(state, x, qsl, seq_lens, indices, accepted):
        wide = indices.long()
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(state, cast_first(wide), old)
        return update("ssm", state, x, wide.int(), qsl, num_accepted_tokens=accepted)

    check_against_eager(step, make_state("ssm"), 1)


def column_of_shuffled_rows(pool, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(pool[1], indices.flip(0)[:, 0], old)
    return update("ssm", pool[1], x, indices, qsl)


def column_of_a_changed_copy(pool, x, qsl, seq_lens, indices, accepted):
    copy = indices.clone()
    copy[0, 0] = 5
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(pool[1], copy[:, 0], old)
    return update("ssm", pool[1], x, indices, qsl)


def column_of_wrapped_numbers(pool, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(pool[1], (indices[:, 0] + 256).to(torch.uint8).int(), old)
    return update("ssm", pool[1], x, indices + 256, qsl)


def stacked_pool_reset_at_once(pool, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(pool.transpose(0, 1), indices[:, 0], old)
    for i in range(LAYERS):
        x = update("ssm", pool[i], x, indices, qsl).flatten(1)
    return x


def reset_of_another_layer(pool, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(pool[0], indices[:, 0], old)
    return update("ssm", pool[1], x, indices, qsl)


def states_that_overlap(pool, x, qsl, seq_lens, indices, accepted):
    """The update's slots begin one after the reset's, in the same memory."""
    flat = pool.flatten(0, 1)
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(flat[:SLOTS], indices[:, 0], old)
    return update("ssm", flat[1 : SLOTS + 1], x, indices, qsl)


def pool_read_as_a_whole(pool, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(pool[1], indices[:, 0], old)
    seen = pool.nan_to_num(7.0).sum()
    return update("ssm", pool[1], x, indices, qsl) + seen


def pool_written_as_a_whole(pool, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(pool[1], indices[:, 0], old)
    pool.nan_to_num_(7.0)
    return update("ssm", pool[1], x, indices, qsl)


def read_through_strides(pool, x, qsl, seq_lens, indices, accepted):
    """A view of the first layer that reaches into the second."""
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(pool[1], indices[:, 0], old)
    seen = pool[0].as_strided((SLOTS + 1, 32), (32, 1)).nan_to_num(7.0).sum()
    return update("ssm", pool[1], x, indices, qsl) + seen


def other_slots_of_one_layer(pool, x, qsl, seq_lens, indices, accepted):
    old = ops.has_initial_state(qsl, seq_lens)
    ops.reset_states_(pool[1][1:], indices[:, 0], old)
    return update("ssm", pool[1], x, indices, qsl)


POOL_NEAR_MISSES = {
    column_of_shuffled_rows: OTHER_INDICES,
    column_of_a_changed_copy: "setitem in line",
    column_of_wrapped_numbers: OTHER_INDICES,
    stacked_pool_reset_at_once: "part of the reset's work would be lost",
    reset_of_another_layer: "no update of this state follows",
    states_that_overlap: "are not known to be one",
    pool_read_as_a_whole: f".nan_to_num() in line {{}} {MAY_TOUCH}",
    pool_written_as_a_whole: f".nan_to_num_() in line {{}} {MAY_TOUCH}",
    read_through_strides: f".nan_to_num() in line {{}} {MAY_TOUCH}",
    other_slots_of_one_layer: "part of the reset's work would be lost",
}


@pytest.mark.parametrize("near_miss", POOL_NEAR_MISSES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_fuse_state_reset_leaves_parts_of_a_pool_alone(near_miss, dynamic: bool):
    pool, batch = stacked(0), make_batch()
    expected_pool = pool.clone()
    expected = near_miss(expected_pool, *(value.clone() for value in batch.values()))
    result, probe = trace(
        near_miss, pool, *batch.values(), passes=[fuse_state_reset], dynamic=dynamic
    )
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert_same_bits(pool, expected_pool)
    assert probe.counts == {"fuse_state_reset": 0}
    (finding,) = probe.manager.findings
    before, _, after = POOL_NEAR_MISSES[near_miss].partition("{}")
    assert before in finding.reason
    assert after in finding.reason


def test_fuse_state_reset_where_symbols_leave_layers_apart_open():
    """Steps of a symbolic size from layer to layer, slots of another: they might overlap."""

    def step(flat, gap, x, qsl, seq_lens, indices, accepted):
        first, second = (
            flat.as_strided((SLOTS, 2, 4, 4), (32, 16, 4, 1), i * gap.shape[0]) for i in range(2)
        )
        old = ops.has_initial_state(qsl, seq_lens)
        ops.reset_states_(first, indices[:, 0], old)
        ops.reset_states_(second, indices[:, 0], old)
        x = update("ssm", first, x, indices, qsl).flatten(1)
        return update("ssm", second, x, indices, qsl)

    batch = make_batch()
    flat, gap = torch.full((2 * SLOTS * 32,), float("nan")), torch.empty(SLOTS * 32)
    expected_flat = flat.clone()
    expected = step(expected_flat, gap, *batch.values())
    result, probe = trace(step, flat, gap, *batch.values(), passes=[fuse_state_reset], dynamic=True)
    assert_same_bits(result, expected)
    assert_same_bits(flat, expected_flat)
    assert probe.counts == {"fuse_state_reset": 0}
    assert len(probe.manager.findings) == 2
    first, second = probe.manager.findings
    assert MAY_TOUCH in first.reason
    assert "nor to have no element in common" in second.reason


# what a drawn step does to the layers of a pool, one call after the other
ACTIONS = ("reset", "reset", "reset", "update", "update", "update", "read", "write", "touch all")


def drawn_step(actions: list[tuple[str, int]], state_of: Callable[..., Tensor]):
    # a number that the step closes over would be a symbol under dynamic shapes
    layers = {0: lambda pool: state_of(pool, 0), 1: lambda pool: state_of(pool, 1)}
    layers[2] = lambda pool: state_of(pool, 2)
    calls = [(action, layers[i]) for action, i in actions]

    def step(pool, x, qsl, seq_lens, indices, accepted):
        old = ops.has_initial_state(qsl, seq_lens)
        for action, layer in calls:
            if action == "reset":
                ops.reset_states_(layer(pool), indices[:, 0], old)
            elif action == "update":
                x = x + update("ssm", layer(pool), x, indices, qsl).flatten(1)
            elif action == "read":
                x = x + layer(pool).nan_to_num(3.0).mean()
            elif action == "write":
                layer(pool)[4:6] = x.nan_to_num().mean()
            else:
                pool.mul_(0.5)
        return x

    return step


SEEDS = range(18)


def draw_actions(seed: int) -> list[tuple[str, int]]:
    draw = random.Random(seed)
    return [(draw.choice(ACTIONS), draw.randrange(LAYERS)) for _ in range(9)]


@pytest.mark.parametrize("seed", SEEDS)
def test_fuse_state_reset_of_drawn_steps(seed: int):
    """Whatever the order of resets, updates, reads and writes: the numbers are those of eager, and
    a reset is fused exactly where an update touches its layer next."""
    dynamic = seed % 3 == 0
    names = [name for name in POOLS if not (dynamic and name == "chunk")]
    make, state_of = POOLS[names[seed % len(names)]]
    actions = draw_actions(seed)
    step, batch, pool = drawn_step(actions, state_of), make_batch(), make()
    expected_pool = pool.clone()
    expected = step(expected_pool, *batch.values())
    result, probe = trace(step, pool, *batch.values(), passes=[fuse_state_reset], dynamic=dynamic)
    assert_same_bits(result, expected)
    assert_same_bits(pool, expected_pool)
    assert probe.counts == {"fuse_state_reset": fusable_resets(actions)}


def fusable_resets(actions: list[tuple[str, int]]) -> int:
    """Resets whose layer is next touched by an update."""
    count = 0
    for place, (action, layer) in enumerate(actions):
        if action == "reset":
            touching = [
                later
                for later, other in actions[place + 1 :]
                if other == layer or later == "touch all"
            ]
            count += touching[:1] == ["update"]
    return count


def test_drawn_steps_fuse_some_and_leave_some():
    drawn = [draw_actions(seed) for seed in SEEDS]
    resets = sum(action == "reset" for actions in drawn for action, _ in actions)
    assert 5 < sum(map(fusable_resets, drawn)) < resets - 5
