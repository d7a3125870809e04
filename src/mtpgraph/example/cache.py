"""Caches and pools of the example decoder, and who holds which part of them."""

import torch

from .config import Config
from .layers import AttentionCache, Caches, StateCache


class FreeList:
    """Hands out the numbers 0 .. size - 1. What was given back last is taken first, so a new
    request starts on blocks and slots that still hold the past of another one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise RuntimeError(f"{count} taken where {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, numbers: list[int]) -> None:
        self._free.extend(numbers)


def make_caches(
    config: Config,
    num_blocks: int,
    block_size: int,
    num_slots: int,
    fill: float = float("nan"),
    device: torch.device | str = "cpu",
) -> Caches:
    """The caches of ``Model.step``. What they hold at first is never read, hence the default."""

    def attention() -> AttentionCache:
        kv = torch.full((num_blocks, block_size, config.kv_dim), fill, device=device)
        width = block_size * (config.index_dim + 4)
        # 0xff is NaN both as an fp8 code and in a scale.
        index_k = torch.full((num_blocks, width), 0xFF, dtype=torch.uint8, device=device)
        return AttentionCache(kv, index_k)

    def states(conv_dim: int, *shape: int) -> StateCache:
        conv = torch.full((num_slots, conv_dim, config.conv_width - 1), fill, device=device)
        return StateCache(conv, torch.full((num_slots, *shape), fill, device=device))

    def layer(kind: str) -> AttentionCache | StateCache:
        c = config
        if kind == "attention":
            return attention()
        if kind == "mamba":
            return states(c.mamba_conv_dim, c.mamba_heads, c.mamba_head_dim, c.mamba_state_dim)
        return states(c.delta_conv_dim, c.delta_heads, c.delta_key_dim, c.delta_value_dim)

    return Caches([layer(kind) for kind in config.layers], attention())
