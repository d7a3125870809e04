"""What our ops touch of paged caches and state pools: a formula each.

A formula takes the arguments of the op, tensors as shapes, and the bytes of the outputs. It returns
bytes read, bytes written, and whether the two are a bound. Keys that a step reads: the sum of
``seq_lens`` where the values are at hand, else at most ``max_seq_len`` for each request. Rows of
a state pool: at most one slot for each request, and for each token that stores one.
"""

from typing import Any

_SCALE = 4  # bytes: one fp32 scale for each key in the index cache


def _flat(*shapes: Any) -> int:
    return sum(shape.nbytes for shape in shapes if shape is not None)


def _expand_block_table(block_table: Any, row_requests: Any, outputs: int) -> tuple:
    return outputs + row_requests.nbytes, outputs, False


def _indexer_cache_write(
    k: Any, slot_mapping: Any, k_cache: Any, power_of_two_scale: bool, outputs: int
) -> tuple:
    num_tokens, head_dim = k.sizes
    return _flat(k, slot_mapping), num_tokens * (head_dim + _SCALE), True


def _kv_cache_write(kv: Any, slot_mapping: Any, kv_cache: Any, outputs: int) -> tuple:
    row = kv_cache.sizes[2] * kv_cache.itemsize
    return _flat(kv, slot_mapping), kv.sizes[0] * row, True


def _keys(query_start_loc: Any, seq_lens: Any, max_seq_len: int) -> tuple[int, bool]:
    """Keys that all requests have together, and whether that is a bound."""
    num_reqs = seq_lens.sizes[0]
    if seq_lens.values is None:
        return num_reqs * max_seq_len, True
    return int(seq_lens.values.clamp(0, max_seq_len).sum()), False


def _indexer_logits(
    q: Any,
    weights: Any,
    k_cache: Any,
    block_table: Any,
    query_start_loc: Any,
    seq_lens: Any,
    max_seq_len: int,
    logits_dtype: Any,
    outputs: int,
) -> tuple:
    keys, at_most = _keys(query_start_loc, seq_lens, max_seq_len)
    head_dim = q.sizes[2]
    block_size = max(k_cache.sizes[1] // (head_dim + _SCALE), 1)
    table = -(-keys // block_size) * block_table.itemsize
    read = _flat(q, weights, query_start_loc, seq_lens) + table + keys * (head_dim + _SCALE)
    return read, outputs, at_most


def _indexer_topk(logits: Any, row_lens: Any, topk: int, outputs: int) -> tuple:
    if row_lens.values is None:
        return _flat(logits, row_lens), outputs, True
    seen = int(row_lens.values.clamp(0, logits.sizes[1]).sum()) * logits.itemsize
    return seen + row_lens.nbytes, outputs, False


def _indexer_select(
    q: Any,
    weights: Any,
    k_cache: Any,
    block_table: Any,
    query_start_loc: Any,
    seq_lens: Any,
    max_seq_len: int,
    topk: int,
    outputs: int,
) -> tuple:
    scored = (q, weights, k_cache, block_table, query_start_loc, seq_lens, max_seq_len, None)
    # the logits live in scratch memory: written once, read once; not at all if every key is chosen
    num_tokens = q.sizes[0]
    logits = 0 if topk >= max_seq_len else num_tokens * max_seq_len * 4
    read, written, _ = _indexer_logits(*scored, logits)
    return read + logits, written + outputs, True


def _topk_to_slots(
    topk_indices: Any, block_table: Any, row_requests: Any, block_size: int, outputs: int
) -> tuple:
    return _flat(topk_indices, row_requests) + outputs, outputs, True


def _sparse_mla_decode(
    q: Any,
    kv_cache: Any,
    topk_indices: Any,
    block_table: Any,
    query_start_loc: Any,
    scale: float,
    latent_dim: int,
    outputs: int,
) -> tuple:
    num_tokens, topk = topk_indices.sizes
    key = kv_cache.sizes[2] * kv_cache.itemsize + block_table.itemsize
    return _flat(q, topk_indices, query_start_loc) + num_tokens * topk * key, outputs, True


def _slot(state: Any) -> int:
    """Bytes of one slot of a pool."""
    num = state.itemsize
    for size in state.sizes[1:]:
        num *= size
    return num


def _reset_states(state: Any, state_indices: Any, has_initial_state: Any, outputs: int) -> tuple:
    return _flat(state_indices, has_initial_state), state_indices.sizes[0] * _slot(state), True


def _state_update(outputs: int, state_indices: Any, **arguments: Any) -> tuple:
    """Of the three recurrent updates: a slot read per request, a slot written per store."""
    state = arguments.pop("conv_state" if "conv_state" in arguments else "state")
    target = arguments.get("dst_indices") or state_indices
    num_reqs = state_indices.sizes[0]
    tokens = arguments["x" if "x" in arguments else "v"].sizes[0]
    stores = num_reqs if len(target.sizes) == 1 else min(tokens, num_reqs * target.sizes[1])
    beside = [a for a in arguments.values() if hasattr(a, "nbytes")]
    read = _flat(state_indices, *beside) + num_reqs * _slot(state)
    return read, outputs + stores * _slot(state), True


PAGED = {
    f"mtpgraph::{name}": formula
    for name, formula in {
        "expand_block_table": _expand_block_table,
        "indexer_cache_write_": _indexer_cache_write,
        "kv_cache_write_": _kv_cache_write,
        "indexer_logits": _indexer_logits,
        "indexer_topk": _indexer_topk,
        "indexer_select": _indexer_select,
        "topk_to_slots": _topk_to_slots,
        "sparse_mla_decode": _sparse_mla_decode,
        "reset_states_": _reset_states,
        "causal_conv1d_update_": _state_update,
        "selective_state_update_": _state_update,
        "gated_delta_update_": _state_update,
    }.items()
}
"""Formulas by the name of the op. ``flatten_decode`` and ``has_initial_state`` read and write what
their arguments and results hold, as any op does."""
