"""Written inputs that lie in one storage, as Inductor takes them: pages that hold several states.

AOTAutograd takes inputs of one storage of which one is written if they are views of one tensor, of
its dtype. States of two dtypes in the pages of one raw pool are not. But where no byte belongs to
two of them, each may pass for a tensor with a storage of its own: what writes one leaves the
others as they are. They are compiled as that, if it is so of the inputs at hand, and what is
compiled looks whether it still is when it is called with others: Dynamo has no guard on where in
its storage a tensor begins. Their offsets stay, by which Inductor knows whether they are aligned.

A step that looks past the end of an input, as ``as_strided`` may, has its inputs as they are; so
has one that autograd follows.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from ._compat import example_value, has_storage, is_fake, storage_key, with_own_storage
from ._hazard_effects import name_called
from ._memory import disjoint
from ._writes import may_write, storages, touched
from .rows import input_name

# What may reach bytes of a storage that its argument has not.
_REACHES = {"as_strided", "as_strided_", "as_strided_scatter", "resize_", "resize_as_", "set_"}
# Layouts that need no second look: of a target and its draft, say, which take turns.
_MAX_LAYOUTS = 16


class SharedBytesError(ValueError):
    """Inputs share bytes that did not when the step was compiled."""


def compile_apart(
    graph: fx.Graph,
    example_inputs: Sequence[Any],
    compile_inputs: Callable[[list[Any], bytes], Callable[..., Any]],
) -> Callable[..., Any]:
    """What ``compile_inputs`` makes of the inputs of a graph, those of a page apart.

    It gets what the caches of torch do not know of inputs in one storage as well: which they are,
    and where, or that they are apart.
    """
    inputs, pages, key = list(example_inputs), [], []
    for page in _pages(graph):
        if page.is_apart(graph, example_inputs):
            pages.append(page)
            key.append((page.places, "apart"))
            for place, fake in zip(page.places, page.fakes, strict=True):
                inputs[place] = with_own_storage(fake)
        else:
            offsets = [str(example_inputs[place].storage_offset()) for place in page.places]
            key.append((page.places, offsets))
    run = compile_inputs(inputs, repr(key).encode() if key else b"")
    if not pages:
        return run

    def run_apart(*args: Any) -> Any:
        for page in pages:
            page.look(args)
        return run(*args)

    return run_apart


def explain_sharing(graph: fx.Graph, example_inputs: Sequence[Any]) -> list[str]:
    """Which inputs Inductor does not take, why, and what to do instead."""
    return [
        f"{page.blamed(example_inputs)} share memory of which some is written, which Inductor "
        "takes only of views of one tensor and dtype, or where no byte is known to belong to two "
        'of them: make them so, or say engine="eager"'
        for page in _pages(graph)
        if not page.is_taken and not page.is_apart(graph, example_inputs)
    ]


class _Page:
    """Inputs in one storage, which is written."""

    def __init__(self, nodes: Mapping[int, fx.Node]) -> None:
        self.places = tuple(nodes)
        self.fakes = list(map(example_value, nodes.values()))
        self.is_taken = _is_taken(self.fakes)
        self._names = list(map(input_name, nodes.values()))
        self._nodes = list(nodes.values())
        self._seen: set[Any] = set()

    def is_apart(self, graph: fx.Graph, inputs: Sequence[Any]) -> bool:
        """They are compiled as if each had a storage of its own."""
        if self.is_taken or not all(map(_is_plain, self.fakes)):
            return False
        stored = storages(self._nodes)
        if any(name_called(node) in _REACHES and touched(node) & stored for node in graph.nodes):
            return False
        return self.sharing_bytes(inputs) is None

    def blamed(self, inputs: Sequence[Any]) -> str:
        """Two that share bytes, or all."""
        pair = self.sharing_bytes(inputs)
        return " and ".join(sorted(self._names if pair is None else (self._names[i] for i in pair)))

    def sharing_bytes(self, inputs: Sequence[Any]) -> tuple[int, int] | None:
        """Two that are not known to have no byte in common."""
        values = [inputs[place] for place in self.places]
        pairs = itertools.combinations(range(len(values)), 2)
        return next((pair for pair in pairs if not disjoint(*(values[i] for i in pair))), None)

    def look(self, inputs: Sequence[Any]) -> None:
        """Refuse inputs of which two share bytes by now."""
        values = [inputs[place] for place in self.places]
        layout = tuple((value.data_ptr(), value.shape, value.stride()) for value in values)
        if layout in self._seen:
            return
        if pair := self.sharing_bytes(inputs):
            one, other = (
                f"{self._names[i]} of shape {list(values[i].shape)}, strides {values[i].stride()} "
                f"and offset {values[i].storage_offset()}"
                for i in pair
            )
            raise SharedBytesError(
                f"{one} and {other} share bytes of one storage, as they did not when the step was "
                'compiled: lay them apart, or say engine="eager"'
            )
        if len(self._seen) == _MAX_LAYOUTS:
            self._seen.clear()
        self._seen.add(layout)


def _pages(graph: fx.Graph) -> list[_Page]:
    stored = set().union(*map(may_write, graph.nodes))
    groups: dict[int, dict[int, fx.Node]] = {}
    for place, node in enumerate(graph.find_nodes(op="placeholder")):
        value = example_value(node)
        if isinstance(value, Tensor) and has_storage(value) and storage_key(value) in stored:
            groups.setdefault(storage_key(value), {})[place] = node
    return [_Page(group) for group in groups.values() if len(group) > 1]


def _is_plain(value: Tensor) -> bool:
    return is_fake(value) and not (value.requires_grad or value.is_conj() or value.is_neg())


def _is_taken(values: Sequence[Tensor]) -> bool:
    """AOTAutograd takes written inputs of one storage as they are."""
    bases = [value if value._base is None else value._base for value in values]
    views = any(value._base is not None for value in values)
    one_base = not views or all(base is bases[0] for base in bases)
    return one_base and len({tensor.dtype for tensor in (*values, *bases)}) == 1
