"""Failures that decode stacks have shipped, as small inputs to the indexer and attention ops.

A test is named after the group and number of its case; its docstring says what went wrong.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph import ops

from .helpers import (
    assert_close,
    assert_same_bits,
    assert_same_result,
    huge_rows,
    make_batch,
    nan_pool,
    random_case,
    strided_pool,
)
from .index_oracles import make_index_cache, quantise, read_key
from .ops import test_expand_block_table as expand
from .ops import test_flatten_decode as flatten
from .ops import test_indexer_cache_write as write
from .ops import test_indexer_logits as scores
from .ops import test_indexer_select as select
from .ops import test_indexer_topk as top
from .ops import test_sparse_mla_decode as attention
from .ops import test_topk_to_slots as slots

Case = tuple[list[int], list[int], int]

# Keyword arguments of each op for a batch.
INPUTS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "flatten_decode": flatten.make_inputs,
    "expand_block_table": expand.make_inputs,
    "indexer_cache_write_": write.make_inputs,
    "indexer_logits": lambda case: scores.make_inputs(case)[0],
    "indexer_topk": lambda case: top.make_inputs(sum(case[0]) + case[2]),
    "indexer_select": select.make_inputs,
    "topk_to_slots": slots.make_inputs,
    "sparse_mla_decode": lambda case: attention.make_inputs(case)[0],
}
each_op = pytest.mark.parametrize("name", list(INPUTS))


def int32(values: Any, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def uniform_row_lens(seq_lens: list[int], next_n: int, device: str) -> list[list[int]]:
    starts = int32([next_n * request for request in range(len(seq_lens) + 1)], device)
    row_lens, _ = ops.flatten_decode(starts, int32(seq_lens, device), next_n * len(seq_lens))
    return row_lens.view(-1, next_n).tolist()


def tensors(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


@each_op
def test_a6_outputs_have_the_strides_that_the_fake_promises(name: str) -> None:
    """A kernel with padded rows behind a fake with packed ones breaks the compiled code (pytorch
    #182328); transposed inputs must not show in the strides of an output either."""
    for case in (([1, 3, 2], [7, 3, 9], 2), ([1], [9], 0), ([], [], 0)):
        inputs = INPUTS[name](case)
        for key, value in inputs.items():
            if isinstance(value, Tensor) and value.dim() > 1 and "cache" not in key:
                inputs[key] = value.transpose(0, -1).contiguous().transpose(0, -1)
        real = tensors(getattr(ops, name)(**inputs))
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = {
                key: mode.from_tensor(value) if isinstance(value, Tensor) else value
                for key, value in inputs.items()
            }
            fake = tensors(getattr(ops, name)(**fakes))
        assert len(real) == len(fake)
        for actual, promised in zip(real, fake, strict=True):
            assert actual.shape == promised.shape
            assert actual.stride() == promised.stride()
            assert actual.dtype == promised.dtype
            assert actual.is_contiguous()


@each_op
def test_a10_schema_declares_exactly_what_is_written(name: str) -> None:
    """An update that the schema does not declare may be dropped or reordered by the compiler; one
    that it declares in vain costs a copy of the cache (aiter's "unknown")."""
    inputs = INPUTS[name](([1, 3, 2], [7, 3, 9], 2))
    schema = getattr(torch.ops.mtpgraph, name).default._schema
    declared = {
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    before = {key: value.clone() for key, value in inputs.items() if isinstance(value, Tensor)}
    results = tensors(getattr(ops, name)(**inputs))
    written = {
        key for key, value in before.items() if not torch.equal(raw(inputs[key]), raw(value))
    }
    assert written == declared == ({"k_cache"} if name == "indexer_cache_write_" else set())
    memory = {inputs[key].untyped_storage().data_ptr() for key in before}
    assert all(result.untyped_storage().data_ptr() not in memory for result in results)


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@each_op
def test_a13_one_graph_serves_every_batch(name: str) -> None:
    """Batch sizes 0, 1 and 2 used to make a graph each (vLLM-omni #1102 and others): with the
    batch dimensions unbacked, no check of ours may ask for their value."""
    op = getattr(ops, name)
    torch._dynamo.reset()
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        compiled = torch.compile(op, backend="eager", fullgraph=True, dynamic=True)
        for number, num_reqs in enumerate((3, 1, 2, 5, 0)):
            made = INPUTS[name](([2] * num_reqs, [9] * num_reqs, min(num_reqs, 1)))
            inputs = {key: copy(value) for key, value in made.items()}
            expected_inputs = {key: copy(value) for key, value in made.items()}
            for key, value in inputs.items():
                if isinstance(value, Tensor) and "cache" not in key:
                    torch._dynamo.decorators.mark_unbacked(value, 0)
            expected = tensors(op(**expected_inputs))
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                actual = tensors(compiled(**inputs))
            for tensor, other in zip(actual, expected, strict=True):
                assert_same_bits(tensor, other)
            for key, value in expected_inputs.items():
                if isinstance(value, Tensor):
                    assert_same_bits(inputs[key], value)


def copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def test_b1_padding_row_of_negative_length(device: str) -> None:
    """0 - 2 + 1 = -1 was read as four billion keys and hung the GPU (vLLM #51593)."""
    row_lens = uniform_row_lens([0, 1, 5], 2, device)
    assert row_lens == [[0, 0], [0, 1], [4, 5]]
    flat = int32(row_lens, device).flatten()
    indices = ops.indexer_topk(torch.randn(6, 8, device=device), flat, 4)
    assert (indices[:3] == -1).all()
    # the same length unclamped, from a caller's own arithmetic
    indices = ops.indexer_topk(torch.randn(1, 8, device=device), int32([-1], device), 4)
    assert indices.tolist() == [[-1] * 4]


def test_b2_query_longer_than_the_padded_sequence(device: str) -> None:
    """Padding a draft's sequence length with 1 gave lengths from -4 on (SGLang #30378)."""
    assert uniform_row_lens([1], 6, device) == [[0, 0, 0, 0, 0, 1]]
    inputs, expected, _ = scores.make_inputs(([6], [1], 0), device=device)
    assert_close(ops.indexer_logits(**inputs), expected)


def test_b4_length_zero_selects_nothing(device: str) -> None:
    """Without a clamp the fill started at a negative offset (FlashInfer top_k_varlen)."""
    batch = make_batch([2], [0], device=device)
    row_lens, _ = ops.flatten_decode(batch.query_start_loc, batch.seq_lens, 2)
    indices = ops.indexer_topk(torch.zeros(2, 512, device=device), row_lens, 512)
    assert (indices == -1).all()
    assert indices.shape == (2, 512)


def test_b5_rows_of_unequal_requests_keep_their_own_request(device: str) -> None:
    """Reshaping 1 + 2 + 3 tokens to rows of two mixed requests silently (vLLM #52500)."""
    inputs, expected, batch = scores.make_inputs(([1, 2, 3], [6, 8, 9], 0), device=device)
    _, row_requests = ops.flatten_decode(batch.query_start_loc, batch.seq_lens, 6)
    assert row_requests.tolist() == [0, 1, 1, 2, 2, 2]
    assert_close(ops.indexer_logits(**inputs), expected)


def test_b7_weights_are_packed_as_the_queries_are(device: str) -> None:
    """Queries padded per request and weights sliced flat paired q1 with another's weights."""
    inputs, _, batch = scores.make_inputs(([1, 2], [6, 8], 0), device=device)
    together = ops.indexer_logits(**inputs)
    for token, (request, row_len) in enumerate(batch.rows):
        alone = ops.indexer_logits(
            inputs["q"][token : token + 1],
            inputs["weights"][token : token + 1],
            inputs["k_cache"],
            inputs["block_table"][request : request + 1],
            int32([0, 1], device),
            int32([row_len], device),
            inputs["max_seq_len"],
        )
        assert_close(alone, together[token : token + 1])
    padded = {**inputs, "q": torch.zeros(4, 3, scores.HEAD_DIM, device=device)}
    with pytest.raises(ValueError, match=r"weights must have shape \[num_tokens=4, num_heads=3\]"):
        ops.indexer_logits(**padded)


def test_b8_padded_tokens_have_rows_of_their_own(device: str) -> None:
    """A result of 3 rows for 3 tokens was written with the 4 rows they are padded to (vLLM
    #42810)."""
    case = ([1, 1, 1], [5, 6, 7], 1)
    inputs = select.make_inputs(case, device=device)
    indices = ops.indexer_select(**inputs)
    assert indices.shape == (4, 5)
    assert (indices[:3] >= 0).all()
    assert (indices[3] == -1).all()


def test_b9_tail_of_a_captured_batch_has_length_zero(device: str) -> None:
    """Two requests in a graph of four rows: the tail kept lengths of an older step (vLLM
    #56237)."""
    for query_lens in ([1, 1, 0, 0], [1, 1, 1, 1]):
        batch = make_batch(query_lens, [8, 5, 0, 0], trailing=4 - sum(query_lens), device=device)
        row_lens, _ = ops.flatten_decode(batch.query_start_loc, batch.seq_lens, 4)
        assert row_lens.tolist() == [8, 5, 0, 0]


def test_b10_padded_queries_and_real_lengths_are_refused() -> None:
    """8 rows of q with 6 lengths read past the end (SGLang #33059)."""
    with pytest.raises(ValueError, match=r"row_lens must have shape \[num_tokens=8\], got \[6\]"):
        ops.indexer_topk(torch.zeros(8, 4), int32([1] * 6), 2)
    with pytest.raises(ValueError, match=r"row_requests must have shape \[num_tokens=8\]"):
        ops.topk_to_slots(int32([[0]] * 8), int32([[0]]), int32([0] * 6), 4)
    with pytest.raises(ValueError, match=r"topk_indices must have shape \[num_tokens=8, topk\]"):
        ops.sparse_mla_decode(
            torch.zeros(8, 1, 4),
            torch.zeros(1, 4, 4),
            int32([[0]] * 6),
            int32([[0]]),
            int32([0, 8]),
            1.0,
            4,
        )


@pytest.mark.parametrize("num_heads", [1, 2, 8, 16])
def test_b12_few_heads_work_in_any_step(num_heads: int, device: str) -> None:
    """Fewer than 32 index heads failed an assert, in decode steps only (SGLang #32738)."""
    for case in (([1, 1], [9, 4], 0), ([9], [9], 0)):
        inputs, expected, _ = scores.make_inputs(case, num_heads=num_heads, device=device)
        assert_close(ops.indexer_logits(**inputs), expected)


def test_b13_sequence_shorter_than_the_selection(device: str) -> None:
    """With fewer keys than the window, absent ones entered the sum (pypto #397)."""
    inputs, _ = attention.make_inputs(([1, 1], [2, 32], 0), topk=16, device=device)
    attention.assert_equals_float64(inputs)
    assert int((inputs["topk_indices"][0] >= 0).sum()) == 2
    logits, _, _ = scores.make_inputs(([1, 1], [2, 32], 0), device=device)
    indices = ops.indexer_select(**logits, topk=16)
    assert indices[0].tolist() == [0, 1] + [-1] * 14
    assert (indices[1] >= 0).all()


def test_b14_draft_step_maps_tokens_afresh(device: str) -> None:
    """The first forward's map of tokens was reused once each request had one (TRT-LLM #16925)."""
    seq_lens = int32([9, 7], device)
    _, first = ops.flatten_decode(int32([0, 2, 4], device), seq_lens, 4)
    _, second = ops.flatten_decode(int32([0, 1, 2], device), seq_lens + 1, 2)
    assert first.tolist() == [0, 0, 1, 1]
    assert second.tolist() == [0, 1]


def test_c1_more_ties_than_places(device: str) -> None:
    """1536 keys in one bin overflowed it, and places stayed unwritten (SGLang #30512)."""
    values = torch.cat([torch.full((889,), 2.0), torch.ones(1536), torch.zeros(7613 - 889 - 1536)])
    order = torch.randperm(7613)
    row = values[order].unsqueeze(0).to(device)
    indices = ops.indexer_topk(row, int32([7613], device), 2048)[0]
    assert indices.unique().numel() == 2048
    above = (row[0] == 2).nonzero().flatten()
    equal = (row[0] == 1).nonzero().flatten()[: 2048 - 889]
    expected = torch.cat([above, equal]).sort().values
    assert indices.tolist() == expected.tolist()


def test_c3_scores_below_the_range_of_fp16_are_scores(device: str) -> None:
    """Logits of -1e5 became -inf in fp16 and mixed with the fill (cudnn-frontend #446)."""
    row = torch.full((1, 5), -1e5, device=device)
    assert ops.indexer_topk(row, int32([5], device), 4).tolist() == [[0, 1, 2, 3]]
    row[0, 4] = -9.9e4
    row[0, 0] = -1.1e5
    assert ops.indexer_topk(row, int32([5], device), 4).tolist() == [[1, 2, 3, 4]]
    row[0, 1] = -3e38
    assert ops.indexer_topk(row, int32([4], device), 3).tolist() == [[0, 2, 3]]


def test_c4_nan_logits_never_make_an_invalid_index(device: str) -> None:
    """NaN logits came back as the bits of a NaN, or as uninitialised ids (vLLM #49896)."""
    row = torch.tensor([[1.0, math.nan, 2.0, 2.0]], device=device)
    assert ops.indexer_topk(row, int32([4], device), 4).tolist() == [[0, 1, 2, 3]]
    assert ops.indexer_topk(row, int32([4], device), 3).tolist() == [[0, 2, 3]]
    assert ops.indexer_topk(row, int32([2], device), 3).tolist() == [[0, 1, -1]]
    row.fill_(math.nan)
    assert ops.indexer_topk(row, int32([3], device), 2).tolist() == [[0, 1]]


def test_c5_leading_empty_block_and_empty_row_stay_finite(device: str) -> None:
    """A first block of -1 only made -inf - (-inf) = NaN in the running maximum (vLLM #48364)."""
    inputs, _ = attention.make_inputs(([2], [9], 0), topk=4, device=device)
    found = inputs["topk_indices"]
    inputs["topk_indices"] = torch.cat([found.new_full((2, 16), -1), found], dim=1)
    inputs["topk_indices"][1] = -1
    out, lse = ops.sparse_mla_decode(**inputs)
    assert out.isfinite().all()
    assert lse[0].isfinite().all()
    assert (out[1] == 0).all()
    assert (lse[1] == -math.inf).all()
    attention.assert_equals_float64(inputs)


def test_c6_ties_go_to_lower_positions(device: str) -> None:
    """Sums of relu are often exactly 0: ranks that broke such ties differently attended to
    different keys (SGLang #31115)."""
    zeros = torch.zeros(1, 8, device=device)
    for _ in range(3):
        assert ops.indexer_topk(zeros, int32([8], device), 4).tolist() == [[0, 1, 2, 3]]
    inputs, _, _ = scores.make_inputs(([1], [9], 0), device=device)
    inputs["weights"].zero_()
    assert ops.indexer_select(**inputs, topk=4).tolist() == [[0, 1, 2, 3]]


def test_c7_fewer_keys_than_topk(device: str) -> None:
    """torch.topk refuses 2048 of 249 (NeMo Automodel #3035)."""
    row = torch.randn(1, 249, device=device)
    indices = ops.indexer_topk(row, int32([249], device), 2048)
    assert indices.tolist() == [[*range(249)] + [-1] * (2048 - 249)]


@pytest.mark.parametrize("topk", [1, 3, 512, 705])
def test_c8_topk_is_the_callers(topk: int, device: str) -> None:
    """A kernel's default of 2048 wrote past rows of index_topk columns (TRT-LLM #8882)."""
    row = torch.randn(2, 800, device=device)
    lens = int32([800, 600], device)
    indices = ops.indexer_topk(row, lens, topk)
    assert_same_bits(indices.cpu(), top.topk_oracle(row, [800, 600], topk))


@pytest.mark.parametrize("topk", [0, -1])
def test_c8_topk_that_cannot_be_served_is_refused(topk: int) -> None:
    """The same: a width without meaning is an error, not a default (TRT-LLM #8882)."""
    with pytest.raises(ValueError, match=f"topk must be at least 1, got {topk}"):
        ops.indexer_topk(torch.zeros(2, 8), int32([1, 1]), topk)


def test_c11_draft_steps_that_share_indices_still_write_their_keys(device: str) -> None:
    """Skipping the indexer on reuse skipped the write of the new token's key as well (xLLM
    #2339), and shared buffers changed under the reader (vLLM #48261)."""
    batch = make_batch([1, 1], [5, 9], device=device)
    head_dim, steps = 8, 3
    k_cache, _ = make_index_cache(batch, head_dim)
    lens = [5, 9]
    keys = torch.randn(steps, 2, head_dim)
    kept, first = None, None
    written = []
    for step in range(steps):
        slot_list = []
        for request in range(2):
            position = lens[request] + step
            # a request that outgrows its last block gets a spare one
            if position // 4 == len(batch.blocks[request]):
                used = {block for blocks in batch.blocks for block in blocks}
                spare = min(set(range(batch.num_blocks)) - used)
                batch.blocks[request].append(spare)
                batch.block_table[request, position // 4] = spare
            slot_list.append(batch.blocks[request][position // 4] * 4 + position % 4)
        written += slot_list
        ops.indexer_cache_write_(
            keys[step].to(device), torch.tensor(slot_list, device=device), k_cache
        )
        if step == 0:
            first = ops.indexer_select(
                torch.randn(2, 3, head_dim, device=device),
                torch.ones(2, 3, device=device),
                k_cache,
                batch.block_table,
                batch.query_start_loc,
                int32([6, 10], device),
                12,
                4,
            )
            kept = first.clone()
    for slot, key in zip(written, keys.flatten(0, 1).double().tolist(), strict=True):
        assert read_key(k_cache.cpu(), slot, head_dim) == quantise(key)
    assert first is not None
    assert kept is not None
    assert_same_bits(first, kept)


def test_d1_index_or_block_outside_the_table_has_no_slot(device: str) -> None:
    """The mapper trusted the table and the buffer: -1 wraps to the last block, 99 reads past the
    row (vLLM #55692)."""
    wide = int32([[5, 6, -1, 7, 8], [1, 2, 3, 4, 5]], device)
    table = wide[:1, :3]
    indices = int32([[0, 9, 11, -1, 99]], device)
    mapped = ops.topk_to_slots(indices, table, int32([0], device), 4)
    assert mapped.tolist() == [[20, -1, -1, -1, -1]]

    kv_cache = nan_pool(9, 4, 12, device=device)
    kv_cache[5, 0] = 1.0
    q = torch.randn(1, 2, 12, device=device)
    out, lse = ops.sparse_mla_decode(q, kv_cache, indices, table, int32([0, 1], device), 0.5, 9)
    assert_close(out, torch.ones(1, 2, 9))
    assert_close(lse, 0.5 * q.double().sum(dim=2))


def test_d2_offsets_past_32_bits(device: str) -> None:
    """row * stride * 4 overflows int32: rows from 2**31 bytes on went elsewhere (aiter #4244)."""
    logits = torch.randn(3, 40, device=device)
    lens = int32([40, 33, 7], device)
    expected = ops.indexer_topk(logits, lens, 6)
    for gap in (2**29 + 64, 2**31 + 64):
        assert_same_bits(ops.indexer_topk(huge_rows(logits, gap), lens, 6), expected)

    case: Case = ([2, 1], [9, 6], 0)
    for gap in (2**29 + 64, 2**31 + 64):
        inputs, want, batch = scores.make_inputs(case, device=device)
        used = max(max(blocks) for blocks in batch.blocks) + 1
        inputs["k_cache"] = huge_rows(inputs["k_cache"][:used], gap)
        assert_close(ops.indexer_logits(**inputs), want)


def test_d4_strided_inputs_equal_contiguous_ones(device: str) -> None:
    """Every other table row, logits with a row stride of 1028, the made-up stride of a tensor of
    one row (SGLang #39266, TRT-LLM #17821)."""
    case: Case = ([1, 2], [7, 9], 0)
    inputs, _, batch = scores.make_inputs(case, device=device)
    expected = ops.indexer_logits(**inputs)
    table = inputs["block_table"]
    both = torch.stack([table, table.flip(0)], dim=1).flatten(0, 1)
    actual = ops.indexer_logits(**{**inputs, "block_table": both[::2]})
    assert_same_result(actual, expected)

    logits = torch.randn(3, 1028, device=device)
    lens = int32([1025, 7, 600], device)
    view = logits[:, :1025]
    for topk in (5, 2000):
        packed = ops.indexer_topk(view.contiguous(), lens, topk)
        assert_same_bits(ops.indexer_topk(view, lens, topk), packed)

    # one row each: any stride is right for a dimension of size 1
    one, _, batch = scores.make_inputs(([1], [9], 0), device=device)
    expected = ops.indexer_logits(**one)
    for key in ("q", "weights", "block_table"):
        shape, stride = one[key].shape, one[key].stride()
        one[key] = one[key].as_strided(shape, (1, *stride[1:]))
    assert_same_result(ops.indexer_logits(**one), expected)
    k_cache = strided_pool(one["k_cache"])
    assert_same_result(ops.indexer_logits(**{**one, "k_cache": k_cache}), expected)
    assert len(batch.rows) == 1


@pytest.mark.parametrize("uniform", [False, True], ids=["ragged", "uniform"])
@pytest.mark.parametrize("num_reqs", [6, 7, 9])
def test_e3_batch_padded_to_a_bucket_equals_the_batch(
    num_reqs: int, uniform: bool, device: str
) -> None:
    """33 requests of 4 tokens in buckets of 8 overran buffers, or fell out of the graph (vLLM
    #50065): padded requests have length 0, and real rows do not notice them."""
    next_n, bucket = 4, 8
    seq_lens = [5 + 3 * (request % 4) for request in range(num_reqs)]
    exact: Case = ([next_n] * num_reqs, seq_lens, 0)
    inputs, _, batch = scores.make_inputs(exact, device=device)
    attend, _ = attention.make_inputs(exact, device=device)
    num_tokens = num_reqs * next_n
    padded_reqs = -(-num_reqs // bucket) * bucket
    padded_tokens = padded_reqs * next_n

    def pad(tensor: Tensor, rows: int, value: float) -> Tensor:
        more = tensor.new_full((rows - tensor.shape[0], *tensor.shape[1:]), value)
        return torch.cat([tensor, more])

    starts = batch.query_start_loc
    if uniform:
        more = torch.arange(num_tokens, padded_tokens + 1, next_n, device=device)
        starts = torch.cat([starts, more[1:].int()])
    else:
        starts = pad(starts, padded_reqs + 1, num_tokens)
    table = pad(batch.block_table, padded_reqs, 2**31 - 1)
    padded = {
        **inputs,
        "q": pad(inputs["q"], padded_tokens, math.nan),
        "weights": pad(inputs["weights"], padded_tokens, math.nan),
        "block_table": table,
        "query_start_loc": starts,
        "seq_lens": pad(batch.seq_lens, padded_reqs, 0),
    }
    expected = ops.indexer_select(**inputs, topk=6)
    actual = ops.indexer_select(**padded, topk=6)
    assert_same_result(actual[:num_tokens], expected)
    assert (actual[num_tokens:] == -1).all()

    want = ops.sparse_mla_decode(**attend)
    attend = {
        **attend,
        "q": pad(attend["q"], padded_tokens, math.nan),
        "topk_indices": pad(attend["topk_indices"], padded_tokens, -1),
        "block_table": pad(attend["block_table"], padded_reqs, 2**31 - 1),
        "query_start_loc": starts,
    }
    out, lse = ops.sparse_mla_decode(**attend)
    assert_same_result(out[:num_tokens], want[0])
    assert_same_result(lse[:num_tokens], want[1])
    assert (out[num_tokens:] == 0).all()
    assert (lse[num_tokens:] == -math.inf).all()


def test_e7_empty_batch_has_empty_results(device: str) -> None:
    """An idle rank launched a grid of zero programs (SGLang #31350)."""
    nothing: Case = ([], [], 0)
    row_lens, row_requests = ops.flatten_decode(**flatten.make_inputs(nothing, device))
    assert row_lens.shape == row_requests.shape == (0,)
    table = ops.expand_block_table(**expand.make_inputs(nothing, device))
    assert table.shape == (0, 3)
    cache = write.make_inputs(nothing, device=device)
    before = cache["k_cache"].clone()
    ops.indexer_cache_write_(**cache)
    assert_same_bits(cache["k_cache"], before)
    inputs, _, batch = scores.make_inputs(nothing, device=device)
    assert ops.indexer_logits(**inputs).shape == (0, batch.max_seq_len)
    assert ops.indexer_topk(torch.zeros(0, 9, device=device), row_lens, 4).shape == (0, 4)
    assert ops.indexer_select(**inputs, topk=4).shape == (0, 4)
    assert ops.topk_to_slots(**slots.make_inputs(nothing, device=device)).shape == (0, 6)
    out, lse = ops.sparse_mla_decode(**attention.make_inputs(nothing, device=device)[0])
    assert out.shape == (0, 3, attention.LATENT_DIM)
    assert lse.shape == (0, 3)


def test_whole_chain_equals_dense_attention_when_everything_is_selected(device: str) -> None:
    """Index, select, attend: with topk above every length it is plain causal attention."""
    for _ in range(4):
        case = random_case()
        inputs, _, batch = scores.make_inputs(case, device=device)
        indices = ops.indexer_select(**inputs, topk=25)
        kv_cache = torch.randn(batch.num_blocks, scores.BLOCK_SIZE, 12)
        q = torch.randn(batch.num_tokens, 2, 12)
        out, _ = ops.sparse_mla_decode(
            q.to(device),
            kv_cache.to(device),
            indices,
            batch.block_table,
            batch.query_start_loc,
            0.4,
            9,
        )
        expected = torch.zeros(batch.num_tokens, 2, 9, dtype=torch.float64)
        for token, (request, row_len) in enumerate(batch.rows):
            if row_len:
                keys = kv_cache[batch.blocks[request]].flatten(0, 1)[:row_len].double()
                weights = (0.4 * q[token].double() @ keys.t()).softmax(dim=1)
                expected[token] = weights @ keys[:, :9]
        assert_close(out, expected)
