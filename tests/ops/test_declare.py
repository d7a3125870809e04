from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mtpgraph.ops import declare as module
from mtpgraph.ops.declare import Facts, Pad, Rows, declare, facts_of
from tests.test_import import OPS

# a copy treats any tensor as it is
ROW_OPS = [name for name in OPS if name != "snapshot"]


@pytest.fixture
def op() -> Iterator[Any]:
    library = torch.library.Library("declare_tests", "FRAGMENT")
    library.define("mix(Tensor hidden, Tensor slots, Tensor seq_lens) -> (Tensor, Tensor)")
    library.define("mix.wide(Tensor hidden, Tensor slots, SymInt width) -> (Tensor, Tensor)")
    yield torch.ops.declare_tests.mix
    for name in ("declare_tests::mix", "declare_tests::mix.wide"):
        module._facts.pop(name, None)
    library._destroy()


def facts(op: Any) -> Facts:
    found = facts_of(op)
    assert found is not None
    return found


def test_declare_every_op_of_this_package():
    for name in ROW_OPS:
        op = getattr(torch.ops.mtpgraph, name).default
        found = facts(op)
        assert found.row_independent
        assert found.rows, name
        assert len(found.results) == len(op._schema.returns), name


def test_declare_names_each_argument_with_rows():
    """What is left out never grows: states, caches, weights and what is none at all."""
    static = {"conv_state", "weight", "bias", "state", "k_cache", "kv_cache", "A", "D", "dt_bias"}
    for name in ROW_OPS:
        op = getattr(torch.ops.mtpgraph, name).default
        tensors = {a.name for a in op._schema.arguments if "Tensor" in str(a.type)}
        assert tensors - facts(op).rows.keys() <= static, name


def test_declare_pads_of_the_contract():
    found = facts(torch.ops.mtpgraph.flatten_decode.default)
    assert found.rows == {
        "query_start_loc": Rows("request", 1),
        "seq_lens": Rows("request"),
        "num_tokens": Rows("token"),
    }
    assert found.pads == {"query_start_loc": Pad("last"), "seq_lens": Pad(0, 0, 0)}
    assert [result.pad for result in found.results] == [(0, 0), (-1, -1)]


def test_declare_takes_names_packets_and_overloads(op: Any):
    for given in (op, op.default, "declare_tests::mix"):
        declare(given, pad_values={"slots": -1}, row_independent=True)
        assert facts(op.default).pads["slots"] == Pad(-1, -1, -1)
    declare("declare_tests::mix.wide", rows={"width": "token"})
    assert facts(op.wide).rows == {"width": Rows("token")}
    assert facts(op.default).row_independent


def test_declare_knows_arguments_of_the_contract_by_name(op: Any):
    declare(op.default)
    assert facts(op.default).rows == {"seq_lens": Rows("request")}
    declare(op.default, rows={"seq_lens": None})
    assert facts(op.default).rows == facts(op.default).pads == {}
    declare(op.default, pad_values={"seq_lens": 1}, rows={"seq_lens": "token"})
    assert facts(op.default).rows == {"seq_lens": Rows("token")}
    assert facts(op.default).pads == {"seq_lens": Pad(1, 1, 1)}


def test_declare_reads_rows_and_pads(op: Any):
    declare(
        op.default,
        rows={"hidden": "_, token", "slots": "request + 1"},
        pad_values={"slots": "last", "hidden": "any"},
        results=["token", None],
    )
    found = facts(op.default)
    assert found.rows["hidden"] == Rows("token", 0, 1)
    assert found.rows["slots"] == Rows("request", 1)
    assert found.pads["slots"] == Pad("last")
    assert found.pads["hidden"] == Pad(0)
    assert [result.rows for result in found.results] == [Rows("token"), None]


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (
            {"pad_values": {"slot": -1}},
            ValueError,
            r"pad_values must name .*; did you mean 'slots'",
        ),
        ({"rows": {"hiden": "token"}}, ValueError, r"rows must name .*; did you mean 'hidden'"),
        ({"rows": {"hidden": "row"}}, ValueError, 'rows of hidden must be "request" or "token"'),
        ({"rows": {"hidden": 1}}, ValueError, 'rows of hidden must be "request" or "token"'),
        ({"pad_values": {"slots": "first"}}, ValueError, r"pad_values\['slots'\] must be a number"),
        ({"results": ["token"]}, ValueError, "results must have an entry for each of 2"),
    ],
)
def test_declare_refuses(op: Any, given: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        declare(op.default, **given)


def test_declare_refuses_what_is_no_op(op: Any):
    with pytest.raises(TypeError, match=r"op must be torch\.ops"):
        declare(print)  # pyright: ignore[reportArgumentType]
    for name in ("declare_tests::mux", "declare_tests::mix.wider", "mix"):
        with pytest.raises(ValueError, match=f"op must be registered, got '{name}'"):
            declare(name)
    with pytest.raises(ValueError, match="did you mean 'declare_tests::mix'"):
        declare("declare_tests::mixx")
