"""Tensors that a step leaves in Python objects: arguments, attributes, globals, closures."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import mtpgraph
from mtpgraph import Batched, Static, ops
from mtpgraph.compile_passes import backend, padded_runs
from tests.compile_passes.test_capture import PretendedDevice
from tests.helpers import assert_same_bits

Batch = tuple[Tensor, Tensor, Tensor]


def ragged(query_lens: list[int]) -> Batch:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(query_lens, dtype=torch.int32) + 3
    return torch.randn(sum(query_lens), 4), starts, lens


# the size of the first comes again, and would at last be served past Dynamo
BATCHES = [ragged(lens) for lens in ([2, 1, 2], [2, 1, 2], [1, 1], [2, 1, 2], [1, 2, 1, 1, 1])]


@dataclasses.dataclass
class Box:
    hidden: Any = None


class Holder:
    last: Any = None


holder = Holder()
history: list[Tensor] = []
last: Any = None


def hidden_of(x: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, x.shape[0])
    return x + row_lens[:, None]


def in_a_dict(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
    aux["kept"] = hidden_of(x, q, s)
    return aux["kept"] * 2


def returned_as_well(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
    h = hidden_of(x, q, s)
    aux["kept"] = h
    return h


def in_a_box_in_a_dict(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
    h = hidden_of(x, q, s)
    aux["kept"] = [Box(h)]
    return h * 2


def in_a_list_of_a_dict(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
    h = hidden_of(x, q, s)
    aux.setdefault("list", []).append(h)
    return h * 2


def in_a_set_in_a_dict(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
    h = hidden_of(x, q, s)
    aux["kept"] = {h}
    return h * 2


def an_input(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
    aux["kept"] = x
    return hidden_of(x, q, s)


def a_total(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
    """Padding does not show in it, but a replay would not store the one of its own batch."""
    aux["kept"] = (s > 0).sum()
    return hidden_of(x, q, s)


def a_size(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
    aux["kept"] = 2 * x.shape[0]
    return hidden_of(x, q, s)


def in_a_global(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
    global last
    last = hidden_of(x, q, s)
    return last * 2


def in_an_object(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
    holder.last = hidden_of(x, q, s)
    return x + 1


def in_a_history(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
    h = hidden_of(x, q, s)
    history.append(h)
    return h * 2


class Module(nn.Module):
    """Keeps its last hidden states, as drafting layers do."""

    last_hidden: Any = None

    def forward(self, x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
        self.last_hidden = hidden_of(x, q, s)
        return self.last_hidden * 2


def make_closure() -> Callable[..., Tensor]:
    kept: Any = None

    def in_a_closure(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Tensor:
        nonlocal kept
        kept = hidden_of(x, q, s)
        return kept * 2

    return in_a_closure


def in_aux(_: Any, aux: dict[str, Any]) -> Any:
    found = aux.get("kept", aux.get("list"))
    if isinstance(found, set):
        return list(found)
    return found[0].hidden if isinstance(found, list) and isinstance(found[0], Box) else found


STEPS: dict[str, tuple[Callable[[], Any], Callable[[Any, dict[str, Any]], Any], str]] = {
    "dict": (lambda: in_a_dict, in_aux, 'aux["kept"] = hidden_of('),
    "returned as well": (lambda: returned_as_well, in_aux, 'aux["kept"] = h'),
    "box in a dict": (lambda: in_a_box_in_a_dict, in_aux, 'aux["kept"] = [Box(h)]'),
    "set in a dict": (lambda: in_a_set_in_a_dict, in_aux, 'aux["kept"] = {h}'),
    "list in a dict": (lambda: in_a_list_of_a_dict, in_aux, "aux.setdefault("),
    "input": (lambda: an_input, in_aux, 'aux["kept"] = x'),
    "total": (lambda: a_total, in_aux, 'aux["kept"] = (s > 0).sum()'),
    "size": (lambda: a_size, in_aux, 'aux["kept"] = 2 * x.shape[0]'),
    "global": (lambda: in_a_global, lambda fn, aux: last, "last = hidden_of("),
    "object": (lambda: in_an_object, lambda fn, aux: holder.last, "holder.last = hidden_of("),
    "history": (lambda: in_a_history, lambda fn, aux: history[-1], "history.append(h)"),
    "module": (Module, lambda fn, aux: fn.last_hidden, "self.last_hidden = hidden_of("),
    "closure": (
        make_closure,
        lambda fn, aux: next(
            cell.cell_contents
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__, strict=True)
            if name == "kept"
        ),
        "kept = hidden_of(",
    ),
}
DECLARED = {
    "x": Batched(0, pad=0, per="token"),
    "q": Batched(0, pad="last", extra=1),
    "s": Batched(0, pad=0),
    "aux": Static,
}


def assert_kept(actual: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_kept(one, other)
    elif isinstance(expected, Tensor):
        assert_same_bits(actual, expected)
    else:
        assert actual == expected


@pytest.mark.parametrize("reused", [False, True], ids=["fresh dict", "reused dict"])
@pytest.mark.parametrize("inputs", [None, DECLARED], ids=["inferred", "declared"])
@pytest.mark.parametrize("name", STEPS)
def test_what_is_stored_is_that_of_eager_in_each_call(name: str, inputs: Any, reused: bool):
    """Once it had rows of padding, and from the fourth call on it was that of another batch."""
    make, find, line = STEPS[name]
    fn, plain = make(), make()
    compiled = mtpgraph.compile(fn, sizes=[2, 4, 8], next_n=2, engine="eager", inputs=inputs)
    mine: dict[str, Any] = {}
    other: dict[str, Any] = {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "batches are not padded")
        for batch in BATCHES:
            if not reused:
                mine, other = {}, {}
            expected = plain(*batch, other)
            kept = find(plain, other)
            assert_same_bits(compiled(*batch, mine), expected)
            assert_kept(find(fn, mine), kept)
    stats = compiled.stats()
    assert set(stats.calls) == {None}
    found = [finding for finding in stats.findings if finding.code.startswith(line)]
    assert found
    assert all(
        "stores a tensor or a size" in at.reason and at.remedy == "return it" for at in found
    )


def local_list(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Any:
    kept = []
    kept.append(hidden_of(x, q, s))
    return kept, {"twice": kept[0] * 2}


def local_object(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Any:
    box = Box()
    box.hidden = hidden_of(x, q, s)
    return box.hidden * 2


def a_constant(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Any:
    aux["width"] = x.shape[1]
    return hidden_of(x, q, s)


def taken_away_again(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Any:
    aux["hidden"] = hidden_of(x, q, s)
    return aux.pop("hidden") * 2


def a_cache(x: Tensor, q: Tensor, s: Tensor, aux: dict[str, Any]) -> Any:
    aux["same"] = aux["bias"]
    return hidden_of(x, q, s) + aux["bias"]


@pytest.mark.parametrize(
    "fn",
    [local_list, local_object, a_constant, taken_away_again, a_cache],
    ids=lambda f: f.__name__,
)
def test_what_stays_in_the_step_or_is_no_tensor_of_the_batch_is_padded(fn: Any):
    compiled = mtpgraph.compile(fn, sizes=[2, 4, 8], next_n=2, engine="eager")
    aux, other = {"bias": torch.ones(4)}, {"bias": torch.ones(4)}
    for batch in BATCHES:
        expected = fn(*batch, other)
        leaves = pytree.tree_leaves(compiled(*batch, aux))
        for one, want in zip(leaves, pytree.tree_leaves(expected), strict=True):
            assert_same_bits(one, want)
    assert aux.keys() == other.keys()
    stats = compiled.stats()
    assert None not in stats.calls
    assert not stats.findings


class Switched(nn.Module):
    keeps = False
    last: Any = None

    def forward(self, x: Tensor, q: Tensor, s: Tensor) -> Tensor:
        h = hidden_of(x, q, s)
        if self.keeps:
            self.last = h
        return h * 2


def test_a_step_that_stores_at_a_later_call_is_refused():
    """A Python value of the step says so: nobody has looked for padding in what it stores."""
    fn = Switched()
    compiled = mtpgraph.compile(fn, sizes=[2, 4], next_n=2, engine="eager")
    compiled(*ragged([1, 1]))
    fn.keeps = True
    with pytest.raises(ValueError, match=r"must not store .* of shape \[8, 4\] with padding"):
        compiled(*ragged([2, 1, 2]))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> PretendedDevice:
    pretended = PretendedDevice()
    for module in (backend, padded_runs):
        monkeypatch.setattr(module, "device_of", lambda values: pretended)
    return pretended


@pytest.mark.parametrize("door", ["step", "backend"])
@pytest.mark.filterwarnings("ignore:batches are not padded:RuntimeWarning")
def test_a_history_outlives_the_next_replay(door: str, device: PretendedDevice):
    """The graph writes its outputs at one place each time; what is stored is a copy of them."""
    box = Box()

    def fn(x: Tensor, q: Tensor, s: Tensor) -> Tensor:
        h = hidden_of(x, q, s)
        box.hidden = h
        return h * 2

    if door == "step":
        compiled: Any = mtpgraph.compile(fn, sizes=[2, 4, 8], next_n=2, engine="eager")
    else:
        compiled = torch.compile(fn, backend="mtpgraph", options={"engine": "eager"})
    kept, expected = [], []
    with torch.no_grad():
        for _ in range(5):
            batch = ragged([2, 1, 2])
            expected.append(hidden_of(*batch))
            compiled(*batch)
            kept.append(box.hidden)
    assert len(device.captured) == 1
    assert mtpgraph.stats(compiled).replays >= 3
    assert_kept(kept, expected)
