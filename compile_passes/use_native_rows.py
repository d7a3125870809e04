"""indexer_logits(q, weights, k_cache, row_block_table, arange, row_lens, max_seq_len)
    ->  indexer_logits(q, weights, k_cache, block_table, query_start_loc, seq_lens, max_seq_len)

where ``row_lens, row_requests = flatten_decode(query_start_loc, seq_lens, num_tokens)``,
``row_block_table = expand_block_table(block_table, row_requests)`` and
``arange = torch.arange(num_tokens + 1, dtype=torch.int32)``: a batch that was flattened by hand
into requests of one token each. The same for ``indexer_select``, and for ``sparse_mla_decode``,
which has no lengths. The native op reads a key once per request instead of once per token, and no
row of the block table is copied.

Results are the same, bit for bit: the length, the blocks and the maths of a row depend on its own
token alone, and a padding token sees no key in either form. They may differ in two cases. Tokens of
a request that share their keys in attention, which a kernel for many of them does, have those keys
summed in another order. And where ``query_start_loc`` decreases, which the contract rules out, a
token that two requests claim has the result of either.

Left alone when
- the rows that the table was expanded by, or the lengths, are not those of one ``flatten_decode``;
- ``query_start_loc`` is not made by ``torch.arange`` in the step: its values are not known then;
- the batch was flattened into another number of tokens than there are queries;
- the block table does not have one row per request, which the native op needs;
- one of these values, or what it was computed from, is written before the call reads it.
"""

import operator
from typing import Any

import torch
from torch import fx

from ._compat import example_value, guard_equal
from ._memory import is_head, sizes
from ._nodes import arguments, describe, op_of, set_argument, size_of, tensor_of
from ._values import (
    computed_apart,
    copied_from,
    is_copy,
    is_view,
    read_from,
    same_value,
    writer_between,
)
from ._writes import erase_all_unused
from .report import note

_ops = torch.ops.mtpgraph


def use_native_rows(graph: fx.Graph) -> int:
    """Apply the rewrite wherever it holds; returns how often."""
    natives = (
        _ops.indexer_logits.default,
        _ops.indexer_select.default,
        _ops.sparse_mla_decode.default,
    )
    count = 0
    for node in list(graph.nodes):
        if op_of(node) in natives and _is_flattened(node):
            refusal = _use_native(node)
            if refusal is None:
                count += 1
            else:
                note(node, "left alone", "use_native_rows", *refusal)
    return count


def _is_flattened(call: fx.Node) -> bool:
    """The call gets rows of single tokens, or looks as if it was meant to."""
    given = arguments(call)
    return (
        op_of(copied_from(given["block_table"])) is _ops.expand_block_table.default
        or _flatten_of(given.get("seq_lens"), 0) is not None
    )


def _use_native(call: fx.Node) -> tuple[str, str] | None:
    """Rewrite a call, or say why not and what to write instead."""
    rows = arguments(call)
    table, starts, lens = rows["block_table"], rows["query_start_loc"], rows.get("seq_lens")
    expand = copied_from(table)
    if op_of(expand) is not _ops.expand_block_table.default:
        return (
            "the lengths are the row_lens of flatten_decode, and the block table is not expanded "
            "by expand_block_table",
            _WRITE_NATIVE,
        )
    expanded = arguments(expand)
    flatten = _flatten_of(expanded["row_requests"], 1)
    if flatten is None:
        return (
            "the block table is expanded by other rows than the row_requests of flatten_decode",
            _WRITE_NATIVE,
        )
    flattened = arguments(flatten)
    reading = {flatten, expand}
    if "seq_lens" in rows:
        other = _flatten_of(lens, 0)
        if other is None or not same_value(flatten, other):
            return (
                "seq_lens is not the row_lens of the flatten_decode whose row_requests expanded "
                "the block table",
                _WRITE_NATIVE,
            )
        reading |= computed_apart(flatten, other)
    if not _counts_up(starts):
        return (
            "query_start_loc is not known to count 0, 1, 2, ...",
            "make it in the step: torch.arange(num_tokens + 1, dtype=torch.int32, device=...)",
        )
    num_tokens, queries = _number(flattened["num_tokens"]), tensor_of(rows["q"])
    if num_tokens is None or queries is None or not guard_equal(num_tokens, queries.shape[0]):
        return (
            f"the batch is flattened into {num_tokens} tokens, and not known to have as many "
            f"queries: q has shape {_shape(rows['q'])}",
            "call flatten_decode(query_start_loc, seq_lens, q.shape[0])",
        )
    block_table, seq_lens = tensor_of(expanded["block_table"]), tensor_of(flattened["seq_lens"])
    if (
        block_table is None
        or seq_lens is None
        # nothing in the flattened form says it, and few tables have more rows: worth a guard
        or not guard_equal(block_table.shape[0], seq_lens.shape[0])
    ):
        return (
            f"block_table of shape {_shape(expanded['block_table'])} is not known to have a row "
            f"for each of the requests of seq_lens of shape {_shape(flattened['seq_lens'])}",
            "cut the table to the requests: block_table[: seq_lens.shape[0]]",
        )
    native = {
        "block_table": expanded["block_table"],
        "query_start_loc": flattened["query_start_loc"],
        "seq_lens": flattened["seq_lens"],
    }
    reading |= read_from(starts)
    writer = writer_between((table, starts, lens, *native.values()), expand, call, reading)
    if writer is not None:
        return (
            f"{describe(writer)} may write the lengths, the table or what they were computed from "
            "before the call reads them",
            "flatten the batch after the write",
        )
    for name, value in native.items():
        if name in rows:
            set_argument(call, name, value)
    erase_all_unused(call.graph, (table, starts, lens))
    return None


_WRITE_NATIVE = (
    "give the op block_table, query_start_loc and seq_lens as they are: it takes any query length"
)


def _flatten_of(value: Any, index: int) -> fx.Node | None:
    """The ``flatten_decode`` whose result of this index a value is, or a copy of."""
    value = copied_from(value)
    if not isinstance(value, fx.Node) or value.target is not operator.getitem:
        return None
    call, place = value.args
    if op_of(call) is not _ops.flatten_decode.default or place != index:
        return None
    assert isinstance(call, fx.Node)
    return call


def _counts_up(value: Any) -> bool:
    """A tensor whose elements are known to be 0, 1, 2, ...; its dtype is int32."""
    node = value
    while is_copy(node) or _is_head(node):
        node = node.args[0]
        tensor = tensor_of(node)
        if tensor is None or tensor.dtype not in (torch.int32, torch.int64):
            return False
    if not isinstance(node, fx.Node) or node.target is not torch.arange:
        return False
    tensor = tensor_of(node)
    if tensor is None or tensor.dtype not in (torch.int32, torch.int64):
        return False
    # torch.arange(end) or torch.arange(start, end, step)
    start = node.args[0] if len(node.args) > 1 else node.kwargs.get("start", 0)
    step = node.args[2] if len(node.args) > 2 else node.kwargs.get("step", 1)
    return size_of(start) == 0 and size_of(step) == 1


def _is_head(node: Any) -> bool:
    """A view of the first elements of a vector, all one after the other."""
    if not isinstance(node, fx.Node) or not is_view(node):
        return False
    view, base = tensor_of(node), tensor_of(node.args[0])
    return view is not None and base is not None and is_head(view, base)


def _number(value: Any) -> int | torch.SymInt | None:
    number = example_value(value) if isinstance(value, fx.Node) else value
    return number if isinstance(number, int | torch.SymInt) else None


def _shape(node: Any) -> str:
    tensor = tensor_of(node)
    return "unknown" if tensor is None else str(sizes(tensor))
