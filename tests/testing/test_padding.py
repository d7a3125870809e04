import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mtpgraph
from mtpgraph import Batched, Static, ops, testing
from mtpgraph.testing import remedies
from tests.compile_passes import support

from . import models

ROWS = {"x": Batched(0)}


def line_of(marker: str) -> str:
    """``file:line`` of the line of this file that ends in ``# marker``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"{__file__}:{number}"


def refused(fn: Callable[..., object], *args: object, **kwargs: object) -> str:
    with pytest.raises(AssertionError) as caught:
        testing.assert_padding_safe(fn, *args, **kwargs)
    return str(caught.value)


def normalised(x: Tensor) -> Tensor:
    y = x * 2
    return y - y.mean(0)  # mean


def masked(x: Tensor, seq_lens: Tensor) -> Tensor:
    """A product with a mask keeps the NaN of padding."""
    y = x * (seq_lens > 0)[:, None]
    return x + y.sum(0)  # masked sum


def chosen(x: Tensor, seq_lens: Tensor) -> Tensor:
    y = torch.where((seq_lens > 0)[:, None], x, 0.0)
    return x + y.sum(0)


def averaged(x: Tensor, seq_lens: Tensor) -> Tensor:
    y = torch.where((seq_lens > 0)[:, None], x, 0.0)
    return x + y.sum(0) / x.shape[0]  # size


def sorted_rows(x: Tensor) -> Tensor:
    return x.cumsum(0).flip(0)  # flip


def any_large(x: Tensor) -> Tensor:
    """NaN is not larger than anything: only large padding shows here."""
    return x + (x > 100).any()  # large


def attention(x: Tensor) -> Tensor:
    scores = x @ x.T
    return scores.softmax(-1) @ x  # attention


UNSAFE = {
    "mean": (normalised, "aten.mean", "divide by the number of real rows"),
    "masked sum": (masked, "aten.sum", r"torch\.where"),
    "size": (averaged, "the size of the batch shows", r"\(seq_lens > 0\)\.sum\(\)"),
    "flip": (sorted_rows, "aten.flip", "not along the batch"),
    "large": (any_large, "aten.any", r"torch\.where"),
    "attention": (attention, "aten._softmax", "within a row"),
}


REMEDIES = {
    "aten.mul.Tensor": "number of real rows",
    "aten.div_.Scalar": "number of real rows",
    "aten.mm": "a product with a mask keeps NaN",
    "aten.multinomial": "before rows meet",
    "aten.max_pool2d_with_indices": "before rows meet",
    "aten.add.Tensor": "number of real rows",
    "aten.addmm.out": "a product with a mask",
    "aten.mean.dim": "reduce within a row only",
    "aten.native_layer_norm": "normalise within a row",
    "aten._softmax": "along a dimension within a row",
    "aten.sort.stable": "along a dimension within a row",
    "aten.index_put_": "pad the index with -1",
    "aten.scatter_add_": "pad the index with -1",
    "aten.copy_": "write real rows alone",
    "aten._scaled_dot_product_flash_attention_for_cpu": "keys of its own request alone",
    "mine.mean": "before rows meet",
    "": "before rows meet",
}


@pytest.mark.parametrize("op", REMEDIES)
def test_a_remedy_is_for_the_op_and_not_for_one_named_alike(op: str) -> None:
    assert REMEDIES[op] in remedies.of_row_mixing(op)
    assert "pad the index with -1" in remedies.of_row_mixing(op, writes=True)


def test_row_mixing_has_a_remedy_for_ops_that_exist() -> None:
    names = remedies._REMEDIES.keys()
    known = {
        name.split("::")[1].strip("_")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    known = {name.partition(".")[0].strip("_") for name in known}
    # in newer versions of torch alone, or older
    assert names - known <= {"fused_rms_norm", "safe_softmax"}


@pytest.mark.parametrize("marker", UNSAFE)
def test_padding_safe_says_line_reason_and_remedy(marker: str) -> None:
    fn, reason, remedy = UNSAFE[marker]
    args = [torch.randn(3, 5)]
    if "seq_lens" in fn.__code__.co_varnames:
        args.append(torch.tensor([4, 1, 9]))
    told = refused(
        fn, *args, inputs={"x": Batched(0), "seq_lens": Batched(0)} if args[1:] else ROWS
    )
    assert f"1. {line_of(marker)}: `" in told
    assert re.search(f"reason: .*{reason}", told)
    assert re.search(f"instead: .*{remedy}", told)


def test_padding_safe_passes() -> None:
    testing.assert_padding_safe(models.Mlp(), torch.randn(3, 3), inputs=ROWS)
    lens = torch.tensor([4, 1, 9])
    inputs = {"x": Batched(0), "seq_lens": Batched(0)}
    testing.assert_padding_safe(chosen, torch.randn(3, 5), lens, inputs=inputs)


def test_padding_safe_of_one_request_and_of_none() -> None:
    testing.assert_padding_safe(models.Mlp(), torch.randn(1, 3), inputs=ROWS)
    testing.assert_padding_safe(models.Mlp(), torch.randn(0, 3), inputs=ROWS)


def test_padding_safe_of_tokens_in_groups() -> None:
    """Padding comes in whole groups, of which there are as many tokens here as requests."""

    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return (x + row_lens[:, None]).view(-1, 3, 2).softmax(1)

    starts = torch.arange(4, dtype=torch.int32)
    testing.assert_padding_safe(step, torch.randn(3, 2), starts, starts[1:])


def test_padding_safe_in_half_precision_and_other_dimension() -> None:
    def step(x: Tensor) -> Tensor:
        return x.T.softmax(-1) * 2

    testing.assert_padding_safe(step, torch.randn(5, 3).bfloat16(), inputs={"x": Batched(1)})


def hybrid() -> tuple[list[Tensor], dict[str, Tensor]]:
    stream = support.Stream(4)
    pools = support.make_pools(4)
    for query_lens in ([2, 1, 2], [1, 1, 2]):
        batch = stream.batch(query_lens)
        support.hybrid_step(*batch, pools)
    return stream.batch([1, 2, 2, 1], new=[1]), pools


def test_padding_safe_of_our_ops() -> None:
    batch, pools = hybrid()
    before = support.copy_pools(pools)
    testing.assert_padding_safe(support.hybrid_step, *batch, pools, inputs=support.INPUTS)
    for name, pool in pools.items():
        assert torch.equal(pool.view(torch.uint8), before[name].view(torch.uint8)), name


def test_padding_safe_takes_inputs_from_a_compiled_step() -> None:
    batch, pools = hybrid()
    step = mtpgraph.compile(support.hybrid_step, inputs=support.INPUTS, sizes=[4])
    testing.assert_padding_safe(step, *batch, pools)


def test_padding_safe_finds_a_pad_value_that_writes_to_a_cache() -> None:
    """Slot 63 belongs to a request that has not come so far: no real row reads it in this step."""
    batch, pools = hybrid()
    wrong = support.INPUTS | {"slot_mapping": Batched(0, pad=63, per="token")}
    told = refused(support.hybrid_step, *batch, pools, inputs=wrong)
    assert "padding is written: pools['index_k'][15, " in told
    assert f"1. {support.__file__}:" in told
    assert "padding gets through at mtpgraph.indexer_cache_write_" in told
    assert "Batched(pad=-1)" in told


def test_padding_safe_finds_a_pad_value_that_reaches_real_rows() -> None:
    """Slot 0 is read by the request that owns it."""
    batch, pools = hybrid()
    wrong = support.INPUTS | {"slot_mapping": Batched(0, pad=0, per="token")}
    told = refused(support.hybrid_step, *batch, pools, inputs=wrong)
    assert "padding gets through at mtpgraph.indexer_cache_write_" in told


class Cached(nn.Module):
    """Writes rows to a buffer by an index."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(7, 5))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.cache[slots] = x  # cache
        return x + 1


def test_padding_safe_sees_a_buffer_of_a_module() -> None:
    inputs = {"x": Batched(0), "slots": Batched(0, pad=0)}
    told = refused(Cached(), torch.randn(2, 5), torch.tensor([3, 4]), inputs=inputs)
    assert "padding is written: self.cache[0, 0]" in told
    assert f"1. {line_of('cache')}: `" in told
    assert "Batched(pad=-1)" in told


def test_padding_safe_sees_a_spare_row() -> None:
    """Padding may have a row of its own, as long as it is not counted as state."""
    model = Cached()
    told = refused(
        model,
        torch.randn(2, 5),
        torch.tensor([3, 4]),
        inputs={"x": Batched(0), "slots": Batched(0, pad=6)},
    )
    assert "self.cache[6, 0]" in told
    assert bool((model.cache == 1).all())


def test_padding_safe_sees_padding_alone() -> None:
    """A write that does not depend on what padding holds, and that real rows make as well."""

    def step(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        cache[:1] += 1  # padding alone
        return x + 1

    inputs = {"x": Batched(0), "slots": Batched(0, pad=-1), "cache": Static}
    told = refused(step, torch.randn(2, 5), torch.tensor([0, 1]), torch.ones(3), inputs=inputs)
    assert "after a batch of padding alone" in told
    assert f"1. {line_of('padding alone')}: `" in told


def test_padding_safe_sees_memory_around_the_rows() -> None:
    """An op that reads past its rows meets NaN."""

    def step(x: Tensor) -> Tensor:
        return x + x.as_strided(x.shape, x.stride(), x.storage_offset() - x.stride(0))  # around

    told = refused(step, torch.randn(3, 5)[1:], inputs=ROWS, rtol=1e9)
    assert "around" in told


def test_padding_safe_infers_inputs() -> None:
    batch, pools = hybrid()
    testing.assert_padding_safe(support.hybrid_step, *batch, pools)

    def step(
        x, query_start_loc, seq_lens, block_table, slot_mapping, state_indices,
        num_accepted_tokens, pools,
    ):  # fmt: skip
        y, _, _ = support.hybrid_step(
            x, query_start_loc, seq_lens, block_table, slot_mapping, state_indices,
            num_accepted_tokens, pools,
        )  # fmt: skip
        return y - y.mean(0)  # leaky

    told = refused(step, *batch, pools)
    assert f"1. {line_of('leaky')}: `" in told


def test_padding_safe_keeps_to_tables_that_end() -> None:
    def step(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, table: Tensor) -> Tensor:
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
        return x * table[: x.shape[0]] + row_lens[:, None]

    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    args = torch.randn(3, 5), starts, torch.tensor([6, 4], dtype=torch.int32)
    for rows in (64, 11):
        testing.assert_padding_safe(step, *args, torch.randn(rows, 5))
    with pytest.raises(ValueError, match="must leave room for padding in the tables"):
        testing.assert_padding_safe(step, *args, torch.randn(3, 5))


def test_padding_safe_without_inputs_to_infer() -> None:
    told = refused(lambda x, y: x * y, torch.ones(2), torch.ones(2))
    assert "how to pad its inputs is not known" in told
    assert "no op in the step says which arguments have an entry per request or token" in told


def test_padding_safe_checks_inputs() -> None:
    with pytest.raises(ValueError, match="got 'X'; it has x"):
        testing.assert_padding_safe(models.doubled, torch.ones(2, 3), inputs={"X": Batched()})
