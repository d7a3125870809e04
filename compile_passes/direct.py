"""A compiled call without Dynamo in front of it.

Once a step ran over buffers of its own and caches at known places, Dynamo's guards would look at
the same things each time again. A ``DirectCall`` remembers what the graph was given and how the
step's outputs were made of its results, and calls the compiled code with it. It holds as long as
the caches lie where they lay.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from . import _compat


@dataclasses.dataclass(frozen=True)
class DirectCall:
    """One call of compiled code, to be repeated on the same memory."""

    run: Callable[..., Any]
    given: Sequence[Any]
    made_of: tuple[int | None, ...]
    outputs: Any

    @classmethod
    def learn(
        cls,
        run: Callable[..., Any],
        given: Sequence[Any],
        results: Sequence[Any],
        outputs: Any,
    ) -> "DirectCall | None":
        """From one call through Dynamo; ``None`` if an output was made outside of the graph.

        Args:
            run: the compiled code
            given, results: what it got and gave
            outputs: what the step returned
        """
        places = {id(result): place for place, result in enumerate(results)}
        kept = {id(tensor) for tensor in given if isinstance(tensor, Tensor)}
        made_of = []
        for leaf in _compat.tree_leaves(outputs):
            place = places.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if isinstance(leaf, Tensor) and place is None and id(leaf) not in kept:
                return None
            made_of.append(place)
        return cls(run, given, tuple(made_of), outputs)

    def __call__(self) -> Any:
        results = self.run(*self.given)
        leaves, structure = _compat.tree_flatten(self.outputs)
        for position, place in enumerate(self.made_of):
            if place is not None:
                leaves[position] = results[place]
        return _compat.tree_unflatten(leaves, structure)
