"""Written inputs that lie in one storage, as Inductor takes them: pages that hold several states.

AOTAutograd takes inputs of one storage of which one is written if they are views of one tensor, of
its dtype. States of two dtypes in the pages of one raw pool are not. But where no byte belongs to
two of them, each may pass for a tensor with a storage of its own: what writes one leaves the
others as they are. They are compiled as that, if it is so of the inputs at hand, and what is
compiled looks whether it still is when it is called with others: Dynamo has no guard on where in
its storage a tensor begins. Their offsets stay, by which Inductor knows whether they are aligned.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from ._compat import example_value, has_storage, is_fake, storage_key, with_own_storage
from ._memory import disjoint
from ._writes import may_write
from .rows import input_name


def compile_apart(
    graph: fx.Graph,
    example_inputs: Sequence[Any],
    compile_inputs: Callable[[list[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """What ``compile_inputs`` makes of the inputs of a graph, those of a page apart."""
    inputs, pages = list(example_inputs), []
    for page, fakes in _pages(graph):
        if all(map(is_fake, fakes)) and page.sharing_bytes(example_inputs) is None:
            pages.append(page)
            for place, fake in zip(page.places, fakes, strict=True):
                inputs[place] = with_own_storage(fake)
    run = compile_inputs(inputs)
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
        f"{' and '.join(page.names)} share memory and are written, which Inductor takes only of "
        "views of one tensor and dtype, or where no byte is known to belong to two of them: make "
        'them so, or say engine="eager"'
        for page, _ in _pages(graph)
        if page.sharing_bytes(example_inputs) is not None
    ]


class _Page:
    """Inputs in one storage, which are compiled as if each had its own."""

    def __init__(self, places: Sequence[int], names: Sequence[str]) -> None:
        self.places = places
        self.names = names
        self._found: list[Any] = []

    def sharing_bytes(self, inputs: Sequence[Any]) -> tuple[int, int] | None:
        """Two that are not known to have no byte in common."""
        values = [inputs[place] for place in self.places]
        pairs = itertools.combinations(range(len(values)), 2)
        return next((pair for pair in pairs if not disjoint(*(values[i] for i in pair))), None)

    def look(self, inputs: Sequence[Any]) -> None:
        """Refuse inputs of which two share bytes by now."""
        values = [inputs[place] for place in self.places]
        found = [(value.data_ptr(), value.shape, value.stride()) for value in values]
        if found == self._found:
            return
        if pair := self.sharing_bytes(inputs):
            one, other = (
                f"{self.names[i]} of shape {list(values[i].shape)}, strides {values[i].stride()} "
                f"and offset {values[i].storage_offset()}"
                for i in pair
            )
            raise ValueError(
                f"{one} and {other} share bytes of one storage, as they did not when the step was "
                "compiled"
            )
        self._found = found


def _pages(graph: fx.Graph) -> Iterator[tuple[_Page, list[Tensor]]]:
    """Inputs in one storage, which is written, and their fakes, where AOTAutograd refuses them."""
    stored = set().union(*map(may_write, graph.nodes))
    groups: dict[int, list[tuple[int, fx.Node]]] = {}
    for place, node in enumerate(graph.find_nodes(op="placeholder")):
        value = example_value(node)
        if isinstance(value, Tensor) and has_storage(value) and storage_key(value) in stored:
            groups.setdefault(storage_key(value), []).append((place, node))
    for group in groups.values():
        fakes = [example_value(node) for _, node in group]
        if not _is_taken(fakes):
            places, nodes = zip(*group, strict=True)
            yield _Page(places, list(map(input_name, nodes))), fakes


def _is_taken(values: Sequence[Tensor]) -> bool:
    bases = [value if value._base is None else value._base for value in values]
    views = any(value._base is not None for value in values)
    one_base = not views or all(base is bases[0] for base in bases)
    alike = one_base and len({tensor.dtype for tensor in (*values, *bases)}) == 1
    return len(values) == 1 or alike
