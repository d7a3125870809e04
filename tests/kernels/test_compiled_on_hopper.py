"""The kernels of compute capability 9.0 in one compiled graph that serves every batch."""

import pytest

from mtpgraph import ops
from mtpgraph.kernels import _shared_keys

from ..helpers import assert_compiled_equals_eager
from .test_indexer_logits import card_inputs
from .test_sparse_mla_decode import model_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]

each_backend = pytest.mark.parametrize("backend", ["inductor", "mtpgraph"])
QUERY_LENS = [[1, 3, 2, 8], [2, 2, 2], [1] * 40, [4, 0, 1, 7, 3]]


@each_backend
def test_logits_compiled_on_hopper(backend: str) -> None:
    assert_compiled_equals_eager(
        ops.indexer_logits,
        [lambda lens=lens: card_inputs(lens, 90 * len(lens)) for lens in QUERY_LENS],
        backend=backend,
    )


@each_backend
def test_select_compiled_on_hopper(backend: str) -> None:
    assert_compiled_equals_eager(
        ops.indexer_select,
        [lambda lens=lens: {**card_inputs(lens, 3000), "topk": 512} for lens in QUERY_LENS],
        backend=backend,
    )


@each_backend
@pytest.mark.parametrize("num_heads", [16, 64], ids=["shared", "one by one"])
@pytest.mark.parametrize("fp8", [False, True], ids=["cache of q", "fp8"])
def test_sparse_mla_compiled_on_hopper(
    fp8: bool, num_heads: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared_keys, "MIN_TOKENS", 24)
    assert_compiled_equals_eager(
        ops.sparse_mla_decode,
        [
            lambda n=num_reqs: model_inputs(n, n, num_heads, fp8=fp8)
            for num_reqs in (5, 3, 40)  # 24 tokens and more share
        ],
        backend=backend,
    )
