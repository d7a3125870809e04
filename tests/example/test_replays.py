"""The example step from CUDA graphs, batch after batch, is the same step run anew."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpgraph.example.decoder import Decoder
from mtpgraph.example.demo import compile_step
from mtpgraph.example.model import Config, Model
from mtpgraph.example.runs import Request

from ..helpers import assert_same_bits, storage_bytes


def tensors_of(caches: Any) -> list[Tensor]:
    values = caches if isinstance(caches, list | tuple) else vars(caches).values()
    return [
        leaf
        for value in values
        for leaf in ([value] if isinstance(value, Tensor) else tensors_of(value))
    ]


@pytest.mark.parametrize(
    ("engine", "device"),
    [
        ("eager", "cpu"),
        pytest.param("eager", "cuda", marks=pytest.mark.gpu),
        pytest.param("inductor", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_example_step_replays_bit_for_bit(engine: str, device: str) -> None:
    """Requests of all kinds come and go, and at the end there is padding alone."""
    # a layer of each kind
    config = Config(layers=("mamba", "attention", "delta"), num_drafts=2)
    model = Model(config).requires_grad_(False).eval().to(device)
    decoder = Decoder(model, max_reqs=6, max_seq_len=64)
    fresh = compile_step(model, engine=engine, cudagraph="off")
    replayed = compile_step(model, engine=engine, strict=True)
    calls: list[tuple[Tensor, ...]] = []

    def both(*args: Any) -> Any:
        *batch, caches = args
        calls.append(tuple(batch))
        twin = copy.deepcopy(caches)
        expected = fresh(*batch, twin)
        actual = replayed(*batch, caches)
        for a, b in zip(actual, expected, strict=True):
            assert_same_bits(a, b)
        for a, b in zip(tensors_of(caches), tensors_of(twin), strict=True):
            assert torch.equal(storage_bytes(a), storage_bytes(b))
        return [value.clone() for value in actual]

    lens = [3, 17, 2, 4, 40, 1, 4, 9, 2, 5]
    requests = [
        Request(torch.randint(0, 256, (length,)).tolist(), 6 + place % 5, arrival=place // 2)
        for place, length in enumerate(lens)
    ]
    decoder.decode_speculative(requests, both)
    assert len({len(batch[3]) for batch in calls}) > 2

    padding = list(calls[-1])
    for place, value in ((2, 0), (3, 0), (4, -1), (5, -1), (6, -1)):
        padding[place] = torch.full_like(padding[place], value)
    with torch.no_grad():
        _, accepted, _, _ = both(*padding, decoder.caches)
    assert accepted.tolist() == [0] * len(accepted)
    stats = replayed.stats()
    assert (stats.graphs, stats.recompiles, stats.findings) == (1, 0, fresh.stats().findings)
    if device == "cuda":
        assert (stats.replays, stats.eager_calls) == (len(calls), 0)
