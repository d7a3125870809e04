"""gated_delta_update_: its forms and errors; the common rules are in test_state_*.py."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops

from .. import oracles
from ..helpers import assert_close, assert_same_bits, nan_pool, strided_pool
from ..state_modes import int32, starts

OP = torch.ops.mtpgraph.gated_delta_update_.default
NUM_HEADS, NUM_V_HEADS, K_DIM, V_DIM = 2, 4, 3, 5


def make_inputs(lens: list[int], kda: bool = False, num_slots: int = 12) -> dict[str, Any]:
    tokens = sum(lens)
    decay_shape = (tokens, NUM_V_HEADS, K_DIM) if kda else (tokens, NUM_V_HEADS)
    return {
        "state": torch.randn(num_slots, NUM_V_HEADS, K_DIM, V_DIM),
        "q": torch.randn(tokens, NUM_HEADS, K_DIM),
        "k": torch.randn(tokens, NUM_HEADS, K_DIM),
        "v": torch.randn(tokens, NUM_V_HEADS, V_DIM),
        "g": -torch.rand(decay_shape),
        "beta": torch.rand(tokens, NUM_V_HEADS),
        "state_indices": torch.randperm(num_slots)[: len(lens)].int(),
        "query_start_loc": starts(lens),
    }


def check(inputs: dict[str, Any]) -> Tensor:
    expected, after = oracles.gated_delta(**inputs)
    out = ops.gated_delta_update_(**inputs)
    assert_close(out, expected)
    assert_close(inputs["state"], after)
    return out


def test_delta_by_hand() -> None:
    # One key, one value: h = 8/2, then h += k * beta * (v - k * h) with k = 2 and no norm.
    state = torch.tensor([[[[8.0]]]])
    one = torch.ones(1, 1, 1)
    out = ops.gated_delta_update_(
        state,
        3 * one,
        2 * one,
        10 * one,
        torch.tensor([[-math.log(2)]]),
        torch.tensor([[0.25]]),
        int32(0),
        scale=0.5,
        qk_l2norm=False,
    )
    assert_close(state, torch.tensor([[[[5.0]]]]))
    assert_close(out, torch.tensor([[[7.5]]]))


@pytest.mark.parametrize("qk_l2norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("scale", [None, 0.3, 1.0])
@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_delta_forms(kda: bool, scale: float | None, qk_l2norm: bool) -> None:
    inputs = make_inputs([1, 3, 2], kda)
    if not qk_l2norm:
        # Keys longer than one make the rule an unstable one.
        inputs["k"] = inputs["k"] / 3
    check(inputs | {"scale": scale, "qk_l2norm": qk_l2norm})


@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_delta_value_heads_share_keys(kda: bool, num_heads: int) -> None:
    inputs = make_inputs([2, 1], kda)
    for name in ("q", "k"):
        inputs[name] = torch.randn(3, num_heads, K_DIM)
    check(inputs)


def test_delta_decay_per_channel_equals_decay_per_head_when_tied() -> None:
    inputs = make_inputs([3, 2])
    other = inputs | {
        "g": inputs["g"][..., None].expand(-1, -1, K_DIM),
        "state": inputs["state"].clone(),
    }
    out = ops.gated_delta_update_(**inputs)
    assert_same_bits(out, ops.gated_delta_update_(**other))
    assert_same_bits(inputs["state"], other["state"])


def test_delta_of_beta_1_recalls_the_value_at_its_key() -> None:
    inputs = make_inputs([4])
    inputs["beta"] = torch.ones(4, NUM_V_HEADS)
    inputs["q"] = inputs["k"]
    out = ops.gated_delta_update_(**inputs, scale=1.0)
    # The norm is a little under one, by the 1e-6 under its root.
    torch.testing.assert_close(out, inputs["v"], rtol=1e-3, atol=1e-3)


def test_delta_of_a_key_of_zeros() -> None:
    inputs = make_inputs([2])
    for name in ("q", "k"):
        inputs[name] = torch.zeros(2, NUM_HEADS, K_DIM)
    assert (check(inputs) == 0).all()


def test_delta_of_a_decay_to_nothing() -> None:
    inputs = make_inputs([2])
    inputs["g"] = torch.full((2, NUM_V_HEADS), -torch.inf)
    check(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_delta_inputs_have_dtypes_of_their_own(dtype: torch.dtype) -> None:
    inputs = make_inputs([1, 2])
    for name in ("k", "g", "beta"):
        inputs[name] = inputs[name].to(dtype)
    inputs["v"] = inputs["v"].half()
    assert check(inputs).dtype == torch.float16


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "state": (
        {"state": torch.zeros(12, 4, 5, 3)},
        ValueError,
        r"state must have shape \[num_slots, num_v_heads=4, k_dim=3, v_dim=5\], "
        r"got \[12, 4, 5, 3\]",
    ),
    "q rank": (
        {"q": torch.zeros(3, 6)},
        ValueError,
        r"q must have shape \[num_tokens, num_heads, k_dim\], got \[3, 6\]",
    ),
    "k": (
        {"k": torch.zeros(3, 4, 3)},
        ValueError,
        r"k must have shape \[num_tokens=3, num_heads=2, k_dim=3\], got \[3, 4, 3\]",
    ),
    "k dtype": (
        {"k": torch.zeros(3, 2, 3).double()},
        TypeError,
        r"k must have dtype torch.float32 or torch.bfloat16 or torch.float16, got torch.float64",
    ),
    "v": (
        {"v": torch.zeros(2, 4, 5)},
        ValueError,
        r"v must have shape \[num_tokens=3, num_v_heads, v_dim\], got \[2, 4, 5\]",
    ),
    "heads": (
        {"q": torch.zeros(3, 3, 3), "k": torch.zeros(3, 3, 3)},
        ValueError,
        "v must have a multiple of 3 heads, got 4",
    ),
    "no heads": (
        {"q": torch.zeros(3, 0, 3), "k": torch.zeros(3, 0, 3)},
        ValueError,
        "q must have num_heads >= 1, got 0",
    ),
    "g": (
        {"g": torch.zeros(3)},
        ValueError,
        r"g must have shape \[num_tokens=3, num_v_heads=4\] or "
        r"\[num_tokens=3, num_v_heads=4, k_dim=3\], got \[3\]",
    ),
    "g per key head": (
        {"g": torch.zeros(3, 2)},
        ValueError,
        r"g must have shape \[num_tokens=3, num_v_heads=4\], got \[3, 2\]",
    ),
    "beta": (
        {"beta": torch.zeros(3, 2)},
        ValueError,
        r"beta must have shape \[num_tokens=3, num_v_heads=4\], got \[3, 2\]",
    ),
    "beta device": (
        {"beta": torch.zeros(3, 4, device="meta")},
        ValueError,
        "beta must be on cpu as state is, got meta",
    ),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS.keys())
def test_delta_of_arguments_that_do_not_fit(
    case: tuple[dict[str, Any], type[Exception], str],
) -> None:
    changes, error, message = case
    inputs = make_inputs([1, 2])
    before = inputs["state"].clone()
    with pytest.raises(error, match=message):
        ops.gated_delta_update_(**(inputs | changes))
    assert_same_bits(inputs["state"], before)


@pytest.mark.parametrize(
    "case", ["gdn", "kda", "batch 1", "slots", "destination", "paged", "strided", "empty"]
)
def test_delta_opcheck(case: str) -> None:
    lens = {"batch 1": [1], "empty": []}.get(case, [1, 3, 2])
    inputs = make_inputs(lens, kda=case == "kda")
    inputs["has_initial_state"] = torch.arange(len(lens)) != 1
    if case == "slots":
        inputs["state_indices"] = torch.arange(12, dtype=torch.int32).view(3, 4)
        inputs["num_accepted_tokens"] = int32(1, 2, 3)
    if case == "destination":
        inputs["state_indices"] = int32(0, 1, 2)
        inputs["dst_indices"] = torch.arange(3, 12, dtype=torch.int32).view(3, 3)
    if case == "paged":
        inputs["state"] = strided_pool(inputs["state"])
    if case == "strided":
        inputs["state"] = torch.randn(12, NUM_V_HEADS, V_DIM, K_DIM).transpose(2, 3)
        inputs["v"] = torch.randn(V_DIM, NUM_V_HEADS, 6).permute(2, 1, 0)
    torch.library.opcheck(OP, (), inputs | {"scale": 0.5})


def test_delta_compiled_equals_eager() -> None:
    def step(
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state_indices: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        num_accepted_tokens: Tensor,
    ) -> Tensor:
        mask = ops.has_initial_state(query_start_loc, seq_lens)
        y = ops.gated_delta_update_(
            state,
            q,
            k,
            v + 1,
            g,
            beta,
            state_indices,
            query_start_loc,
            has_initial_state=mask,
            num_accepted_tokens=num_accepted_tokens,
        )
        first = state_indices[:, 0] + 20
        ops.reset_states_(state, first, mask)
        return 2 * ops.gated_delta_update_(
            state, q, k, y, g, beta, first, query_start_loc, scale=0.5, qk_l2norm=False
        )

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for lens, seq_lens, accepted in (
        ([2, 1, 3], [9, 1, 3], [2, 4, 0]),
        ([1, 4, 0, 1, 2], [1, 4, 0, 7, 8], [0, 1, 1, 3, 9]),
    ):
        inputs = make_inputs(lens)
        num_reqs = len(lens)
        args = (
            *(inputs[name] for name in ("q", "k", "v", "g", "beta")),
            torch.arange(4 * num_reqs, dtype=torch.int32).view(num_reqs, 4),
            inputs["query_start_loc"],
            int32(*seq_lens),
            int32(*accepted),
        )
        eager = nan_pool(50, NUM_V_HEADS, K_DIM, V_DIM)
        eager[::3] = torch.randn(17, NUM_V_HEADS, K_DIM, V_DIM)
        traced = eager.clone()
        expected = step(eager, *args)
        assert_same_bits(compiled(traced, *args), expected)
        assert_same_bits(traced, eager)
