"""Which sizes of a step's outputs follow the batch, and the cut back to the real batch.

The symbolic graph says so: the size of an output is an expression in the symbols of the inputs
that were declared to grow. Nothing is guessed from numbers that happen to be equal.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from . import _compat
from .inputs import Batched, Static

_REQUESTS, _TOKENS = sympy.symbols("requests tokens", integer=True)
_UNITS = {"request": _REQUESTS, "token": _TOKENS}

# a dimension, and its size as a function of the numbers of requests and tokens
_Cut = tuple[int, Callable[[int, int], int]]


@dataclasses.dataclass(frozen=True)
class GraphSizes:
    """Sizes of a graph's inputs and outputs, ints or expressions; ``None`` for no tensor."""

    inputs: tuple[tuple[Any, ...] | None, ...]
    outputs: tuple[tuple[Any, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class OutputPlan:
    """Per leaf of a step's outputs, the dimensions to cut."""

    cuts: tuple[tuple[_Cut, ...], ...]
    copied: tuple[bool, ...]
    padded: Any

    @classmethod
    def learn(
        cls,
        sizes: GraphSizes,
        inputs: Sequence[Any],
        results: Sequence[Any],
        buffers: Mapping[str, Tensor],
        specs: Mapping[str, Batched | Static],
        outputs: Any,
    ) -> "OutputPlan":
        """Read the plan off one call of a symbolic graph.

        Args:
            sizes: expressions of the sizes of the graph's inputs and results
            inputs, results: what the graph got and gave in that call
            buffers: the buffers among the inputs, by the name of the step's argument
            specs: how each argument was declared
            outputs: what the step returned in that call
        """
        names = {id(buffer): name for name, buffer in buffers.items()}
        symbols: dict[sympy.Symbol, sympy.Expr] = {}
        known: dict[int, tuple[Any, ...]] = {}
        for value, expressions in zip(inputs, sizes.inputs, strict=True):
            name = names.get(id(value))
            if name is None or expressions is None:
                continue
            known[id(value)] = expressions
            spec = specs[name]
            assert isinstance(spec, Batched)
            length = sympy.sympify(expressions[spec.dim])
            if len(length.free_symbols) == 1:
                (symbol,) = length.free_symbols
                counted = _UNITS[spec.per] + spec.extra
                symbols[symbol] = sympy.solve(length - counted, symbol)[0]
        for value, expressions in zip(results, sizes.outputs, strict=True):
            if expressions is not None:
                known.setdefault(id(value), expressions)
        leaves = _compat.tree_leaves(outputs)
        return cls(
            cuts=tuple(_cuts(known.get(id(leaf), ()), symbols) for leaf in leaves),
            copied=tuple(id(leaf) in names for leaf in leaves),
            padded=outputs,
        )

    def cut(self, outputs: Any, requests: int, tokens: int) -> Any:
        """Outputs of a padded batch, cut to the real one."""
        leaves, structure = _compat.tree_flatten(outputs)
        for position, cuts in enumerate(self.cuts):
            for dim, size in cuts:
                length = size(requests, tokens)
                if leaves[position].shape[dim] != length:
                    leaves[position] = leaves[position].narrow(dim, 0, length)
            if self.copied[position]:
                leaves[position] = leaves[position].clone()
        return _compat.tree_unflatten(leaves, structure)

    def empty(self) -> Any | None:
        """Outputs of a batch of nothing; ``None`` if some output does not follow the batch."""
        if not all(self.cuts):
            return None
        return _compat.tree_map(torch.clone, self.cut(self.padded, 0, 0))


def _cuts(sizes: tuple[Any, ...], symbols: Mapping[sympy.Symbol, sympy.Expr]) -> tuple[_Cut, ...]:
    cuts = []
    for dim, size in enumerate(sizes):
        if isinstance(size, int):
            continue
        size = sympy.sympify(size)
        if size.free_symbols and size.free_symbols <= symbols.keys():
            follows = sympy.lambdify((_REQUESTS, _TOKENS), size.subs(symbols), modules="math")
            cuts.append((dim, follows))
    return tuple(cuts)
