"""Steps with dense parts, what engines their parts are to become, and the first door to them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mtpgraph
from mtpgraph import Batched, Static, ops
from tests.helpers import nan_pool

from .support import BLOCK_SIZE, DIM, make_pools, recurrent_layer

WIDE = 16
KEYS = 12  # of a cache


class Steps(nn.Module):
    """Small steps, one method each; ``pool`` is a tensor that some of them write."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.up = nn.Linear(DIM, WIDE)
        self.down = nn.Linear(WIDE, DIM, bias=False)
        self.side = nn.Linear(DIM, DIM)
        self.to(dtype).requires_grad_(False)

    def mlp(self, x: Tensor, pool: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.side(F.silu(gate) * value)

    def lone_product(self, x: Tensor, pool: Tensor) -> Tensor:
        return self.up(x)

    def no_product(self, x: Tensor, pool: Tensor) -> Tensor:
        return F.silu(self.norm(x)) + x

    def asked_by_nobody(self, x: Tensor, pool: Tensor) -> Tensor:
        self.down(F.silu(self.up(x)))
        return x.cumsum(1)

    def an_op_between(self, x: Tensor, pool: Tensor) -> Tensor:
        key = self.side(self.norm(x))
        slots = torch.arange(x.shape[0], device=x.device)
        ops.kv_cache_write_(key, slots, pool.view(-1, BLOCK_SIZE, DIM))
        return self.down(F.silu(self.up(pool[: x.shape[0]])))

    def residual_in_place(self, x: Tensor, pool: Tensor) -> Tensor:
        hidden = self.side(self.norm(x))
        before = hidden * 2
        hidden += self.down(F.relu(self.up(hidden)))
        return self.down(F.relu(self.up(hidden))) + before

    def a_result_written_later(self, x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        y = self.side(F.silu(x))
        first = y[:, :4]
        y.mul_(3)
        return self.up(F.silu(y)), first

    def view_behind_a_write(self, x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        h = self.side(F.silu(x))
        h.add_(1)
        heads = h.unflatten(1, (2, DIM // 2))
        y = self.side(F.silu(heads.flatten(1) + x))
        heads.mul_(2)
        return h, y

    def view_of_an_input(self, x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        own = x * 1
        own.mul_(2)
        heads = own.unflatten(1, (2, DIM // 2))
        y = self.side(F.silu(heads.flatten(1))) + self.side(own)
        heads.mul_(2)
        return own, y

    def shape_in_place(self, x: Tensor, pool: Tensor) -> Tensor:
        heads = (x * 2).unflatten(1, (2, DIM // 2))
        heads.transpose_(1, 2)
        return self.side(F.silu(heads).flatten(1)) + x

    def cast_of_an_input_to_a_result(self, x: Tensor, pool: Tensor) -> Tensor:
        hidden = F.silu(self.side(x))
        pool.to(hidden).add_(1)
        pool.type_as(hidden)[:, :4].mul_(2)
        return hidden

    def cast_of_a_result_to_another(self, x: Tensor, pool: Tensor) -> Tensor:
        hidden = self.side(x)
        return hidden.type_as(F.silu(hidden))

    def reads_on_both_sides_of_a_write(self, x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        rows = pool[: x.shape[0]]
        before = self.side(F.silu(rows)) + x
        pool.add_(1)
        after = self.side(F.silu(rows)) + x
        return before, after

    def write_of_other_memory(self, x: Tensor, pool: Tensor) -> Tensor:
        y = F.silu(self.up(x))
        pool.add_(1)
        return self.down(y) + x

    def write_of_what_an_earlier_call_read(self, x: Tensor, pool: Tensor) -> Tensor:
        y = F.silu(self.side(pool[: x.shape[0]]))
        pool.add_(1)
        return self.down(F.silu(self.up(y))) + pool[: x.shape[0]]

    def integers_and_masks(self, x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        said = self.up(self.norm(x)).argmax(-1)
        chosen = pool[said % pool.shape[0]]
        return self.down(F.silu(self.up(chosen))), torch.where(said[:, None] > 3, x, chosen)

    def random_numbers(self, x: Tensor, pool: Tensor) -> Tensor:
        y = F.dropout(F.silu(self.up(x)), 0.5, training=True)
        return self.down(F.silu(y)) + torch.rand_like(x)

    def batch_as_size(self, x: Tensor, pool: Tensor) -> Tensor:
        heads = self.up(self.norm(x)).view(x.shape[0], 2, DIM)
        return self.down(F.silu(heads).reshape(x.shape[0], WIDE))

    def split_with_nothing_left(self, x: Tensor, pool: Tensor) -> Tensor:
        a, b, rest = self.up(self.norm(x)).split([DIM, WIDE - DIM, 0], dim=-1)
        return self.down(torch.cat([b, a.cos(), rest], dim=-1))

    def transposed_result(self, x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.up(self.norm(x)).unflatten(-1, (2, DIM))
        mixed = torch.einsum("thd,ehd->the", heads, self.down.weight.unflatten(1, (2, DIM)))
        return mixed, mixed.flatten(1)

    def weights_alone(self, x: Tensor, pool: Tensor) -> Tensor:
        merged = self.side.weight @ self.side.weight.exp()
        steps = torch.arange(DIM, device=x.device, dtype=x.dtype).mul(0.1).exp()
        return self.down(self.up(x * steps).sigmoid()) @ merged

    def pieces_of_an_op(self, x: Tensor, pool: Tensor) -> Tensor:
        _, right = torch.cat([x, x], 1).cumsum(1).chunk(2, dim=1)
        return self.side(F.silu(right))


class Recurrent(nn.Module):
    """A decode step: dense, then a short conv, a Mamba-2 update and a cache write, then dense."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.into = nn.Linear(DIM, DIM)
        self.up = nn.Linear(DIM, WIDE)
        self.down = nn.Linear(WIDE, DIM, bias=False)
        self.to(dtype).requires_grad_(False)

    def forward(
        self,
        x: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        state_indices: Tensor,
        num_accepted_tokens: Tensor,
        pools: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        old = ops.has_initial_state(query_start_loc, seq_lens)
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        h = self.into(self.norm(x))
        ops.kv_cache_write_(h, slot_mapping, pools["kv"])
        _, y = recurrent_layer(h, query_start_loc, state_indices, num_accepted_tokens, old, pools)
        return x + self.down(F.silu(self.up(y))), row_lens

    @staticmethod
    def pools(num_requests: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """Caches and states that hold NaN throughout, and two weights."""
        found = make_pools(num_requests, dtype)
        del found["index_k"]
        found["kv"] = nan_pool(num_requests * 16, BLOCK_SIZE, DIM, dtype=dtype)
        return {name: pool.to(device) for name, pool in found.items()}


SILU_MLP = ["rms_norm", "linear", "silu", "mul", "linear", "add"]
UP_DOWN = ["linear", "silu", "linear"]
# name of the step -> what each region calls, in the order in which they run
PARTITIONS: dict[str, list[list[str]]] = {
    "mlp": [SILU_MLP],
    "lone_product": [],
    "no_product": [],
    "asked_by_nobody": [],
    "an_op_between": [["rms_norm", "linear"], UP_DOWN],
    "residual_in_place": [
        ["rms_norm", "linear", "mul", "linear", "relu", "linear"],
        ["linear", "relu", "linear", "add"],
    ],
    "a_result_written_later": [["silu", "linear"], ["silu", "linear"]],
    "shape_in_place": [["linear", "add"]],
    "cast_of_an_input_to_a_result": [["linear", "silu"]],
    "cast_of_a_result_to_another": [["linear"]],
    "view_behind_a_write": [["silu", "linear"], ["add", "silu", "linear"]],
    "view_of_an_input": [["silu", "linear", "linear", "add"]],
    "reads_on_both_sides_of_a_write": [["silu", "linear", "add"], ["silu", "linear", "add"]],
    "write_of_other_memory": [["linear", "silu", "linear", "add"]],
    "write_of_what_an_earlier_call_read": [["linear", "silu", "linear", "silu", "linear"]],
    "integers_and_masks": [["rms_norm", "linear"], UP_DOWN],
    "random_numbers": [["linear", "silu"], ["silu", "linear", "add"]],
    "batch_as_size": [["rms_norm", "linear", "silu", "reshape", "linear"]],
    "split_with_nothing_left": [["rms_norm", "linear", "cos", "cat", "linear"]],
    "transposed_result": [["rms_norm", "linear", "einsum"]],
    "weights_alone": [["mul", "linear", "sigmoid", "linear", "matmul"]],
    "pieces_of_an_op": [["silu", "linear"]],
}


SPECS = {"x": Batched(per="token"), "pool": Static}


class Compiled:
    """A step through the first door; one compilation for every number of tokens."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        options = {"engine": "tensorrt", **options}
        self.fn = torch.compile(fn, backend="mtpgraph", fullgraph=True, options=options)

    def __call__(self, x: Tensor, pool: Tensor) -> Any:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return self.fn(x, pool)

    @property
    def stats(self) -> mtpgraph.Stats:
        return mtpgraph.stats(self.fn)


def make_pool(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(KEYS, DIM).to(dtype)
