"""Arguments for every op, for what holds of all of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .helpers import make_batch
from .index_oracles import make_index_cache
from .state_modes import MODES, int32

Inputs = dict[str, Any]

NUM_TOKENS = 7
HEAD_DIM = 8
_STATE_MODES = {
    "causal_conv1d_update_": "conv-slots",
    "selective_state_update_": "mamba2-slots",
    "gated_delta_update_": "gdn-slots",
}


def make_inputs(name: str, device: str = "cpu") -> Inputs:
    """Three requests, of which the second is new, and 7 tokens; 12 slots or what the lengths need.

    Every argument but ``dst_indices`` is given.
    """
    batch = make_batch([2, 3, 2], [9, 3, 2], device=device)
    lens = {"query_start_loc": batch.query_start_loc, "seq_lens": batch.seq_lens}
    is_old = torch.tensor([True, False, True])
    values: Inputs
    if name in _STATE_MODES:
        mode = MODES[_STATE_MODES[name]]
        state = "conv_state" if mode.name.startswith("conv") else "state"
        values = {
            state: mode.pool(12),
            **mode.inputs(NUM_TOKENS),
            "state_indices": mode.indices([0, 4, 8]),
            "query_start_loc": batch.query_start_loc,
            "has_initial_state": is_old,
            "num_accepted_tokens": int32(2, 1, 4),
        }
    elif name in ("indexer_logits", "indexer_select"):
        values = {
            "q": torch.randn(NUM_TOKENS, 2, HEAD_DIM),
            "weights": torch.randn(NUM_TOKENS, 2),
            "k_cache": make_index_cache(batch, HEAD_DIM)[0],
            "block_table": batch.block_table,
            **lens,
            "max_seq_len": 12,
        }
        if name == "indexer_select":
            values["topk"] = 3
    else:
        values = _MAKERS[name](batch.block_table, batch.slot_mapping, batch.row_requests, lens)
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}


_MAKERS: dict[str, Callable[[Tensor, Tensor, Tensor, Inputs], Inputs]] = {
    "flatten_decode": lambda table, slots, requests, lens: {**lens, "num_tokens": NUM_TOKENS},
    "expand_block_table": lambda table, slots, requests, lens: {
        "block_table": table,
        "row_requests": requests,
    },
    "indexer_cache_write_": lambda table, slots, requests, lens: {
        "k": torch.randn(NUM_TOKENS, HEAD_DIM),
        "slot_mapping": slots,
        "k_cache": torch.zeros(12, 4 * (HEAD_DIM + 4), dtype=torch.uint8),
    },
    "indexer_topk": lambda table, slots, requests, lens: {
        "logits": torch.randn(NUM_TOKENS, 12),
        "row_lens": int32(*range(NUM_TOKENS)),
        "topk": 3,
    },
    "topk_to_slots": lambda table, slots, requests, lens: {
        "topk_indices": _topk_indices(),
        "block_table": table,
        "row_requests": requests,
        "block_size": 4,
    },
    "kv_cache_write_": lambda table, slots, requests, lens: {
        "kv": torch.randn(NUM_TOKENS, HEAD_DIM),
        "slot_mapping": slots,
        "kv_cache": torch.randn(12, 4, HEAD_DIM),
    },
    "sparse_mla_decode": lambda table, slots, requests, lens: {
        "q": torch.randn(NUM_TOKENS, 2, HEAD_DIM),
        "kv_cache": torch.randn(12, 4, HEAD_DIM),
        "topk_indices": _topk_indices(),
        "block_table": table,
        "query_start_loc": lens["query_start_loc"],
        "scale": 0.5,
        "latent_dim": 6,
    },
    "has_initial_state": lambda table, slots, requests, lens: lens,
    "reset_states_": lambda table, slots, requests, lens: {
        "state": torch.randn(12, 2, 3),
        "state_indices": int32(1, 4, 8),
        "has_initial_state": torch.tensor([True, False, True]),
    },
}

OPS = [*_MAKERS, "indexer_logits", "indexer_select", *_STATE_MODES]


def _topk_indices() -> Tensor:
    """Keys of the first block alone, which each of the requests has."""
    return torch.tensor([0, 2, -1], dtype=torch.int32).repeat(NUM_TOKENS, 1)
