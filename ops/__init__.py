"""The ops: importing this package registers every schema in the namespace ``mtpgraph``."""

from .batch import BatchOrder, BatchSplit, reorder, split_decodes_and_prefills
from .causal_conv1d_update import causal_conv1d_update_
from .expand_block_table import expand_block_table
from .flatten_decode import flatten_decode
from .gated_delta_update import gated_delta_update_
from .has_initial_state import has_initial_state
from .indexer_cache_write import indexer_cache_write_
from .indexer_logits import indexer_logits
from .indexer_select import indexer_select
from .indexer_topk import indexer_topk
from .kv_cache_write import kv_cache_write_
from .reset_states import reset_states_
from .selective_state_update import selective_state_update_
from .sparse_mla_decode import sparse_mla_decode
from .topk_to_slots import topk_to_slots

__all__ = [
    "BatchOrder",
    "BatchSplit",
    "reorder",
    "split_decodes_and_prefills",
    "flatten_decode",
    "expand_block_table",
    "indexer_cache_write_",
    "indexer_logits",
    "indexer_topk",
    "indexer_select",
    "topk_to_slots",
    "kv_cache_write_",
    "sparse_mla_decode",
    "has_initial_state",
    "reset_states_",
    "causal_conv1d_update_",
    "selective_state_update_",
    "gated_delta_update_",
]
