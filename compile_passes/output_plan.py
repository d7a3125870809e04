"""Which sizes of a step's outputs follow the batch, and the cut back to the real batch.

The symbolic graph says so: the size of an output is an expression in the symbols of the inputs
that were declared to grow. Nothing is guessed from numbers that happen to be equal.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from . import _compat
from .inputs import Batched

# the size of an input whose content the graph does not read: whether it grows is not known
_UNSEEN = sympy.Symbol("unseen", integer=True)
_UNITS = dict(
    zip(("request", "token"), sympy.symbols("requests tokens", integer=True), strict=True)
)
_GROUPS = sympy.Symbol("groups", integer=True, positive=True)


@dataclasses.dataclass(frozen=True)
class GraphSizes:
    """Sizes of a graph's inputs and outputs, ints or expressions.

    A tensor has a tuple of them, a number that is a size stands alone, anything else has ``None``.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


class _Cut(NamedTuple):
    """A dimension with ``(times * requests or tokens + more) // per`` real entries, in front."""

    dim: int
    unit: str
    more: int
    per: int
    times: int = 1

    def length(self, requests: int, tokens: int) -> int:
        count = requests if self.unit == "request" else tokens
        return max(0, (self.times * count + self.more) // self.per)


@dataclasses.dataclass(frozen=True)
class OutputPlan:
    """Per leaf of a step's outputs, the dimensions to cut.

    Attributes:
        cuts: the cuts of each leaf
        copied: whether the leaf lies in a buffer of padded inputs, which the next call overwrites
        empty_like: leaves without content, with the device of each
        structure: how the leaves are nested
    """

    cuts: tuple[tuple[_Cut, ...], ...]
    copied: tuple[bool, ...]
    empty_like: tuple[tuple[Any, Any], ...]
    structure: Any

    @classmethod
    def learn(
        cls,
        sizes: GraphSizes,
        inputs: Sequence[Any],
        results: Sequence[Any],
        buffers: Mapping[str, Tensor],
        specs: Mapping[str, Batched],
        outputs: Any,
        multiple: int = 1,
        proven: bool = False,
    ) -> "OutputPlan":
        """Read the plan off one call of a symbolic graph.

        Args:
            sizes: expressions of the sizes of the graph's inputs and results
            inputs, results: what the graph got and gave in that call
            buffers: the buffers among the inputs, by the name of the step's argument
            specs: how each of these was declared
            outputs: what the step returned in that call
            multiple: what divides the tokens of each batch
            proven: padding is known to stay behind real rows; otherwise several entries for each
                request or token may lie in any order, and are refused

        Raises:
            TypeError: an output is neither a tensor nor a constant
            ValueError: the real rows of an output are not known to stand in front
        """
        units = {unit: unit for unit in _UNITS.values()} | _units(sizes, inputs, buffers, specs)
        # a buffer that the graph does not take is as long as was declared
        known = {id(buffer): _declared(buffer, specs[name]) for name, buffer in buffers.items()} | {
            id(value): expressions
            for value, expressions in zip(
                (*results, *inputs), (*sizes.outputs, *sizes.inputs), strict=True
            )
            if isinstance(value, Tensor)
        }
        leaves, structure = _compat.tree_flatten(outputs)
        for place, leaf in enumerate(leaves):
            _check_leaf(place, leaf)
        storages = {_compat.storage_key(buffer) for buffer in buffers.values()}
        return cls(
            cuts=tuple(
                _cuts(place, known.get(id(leaf), ()), units, multiple, proven)
                for place, leaf in enumerate(leaves)
            ),
            copied=tuple(
                isinstance(leaf, Tensor) and _compat.storage_key(leaf) in storages
                for leaf in leaves
            ),
            empty_like=tuple(
                (torch.empty_like(leaf, device="meta"), leaf.device)
                if isinstance(leaf, Tensor)
                else (leaf, None)
                for leaf in leaves
            ),
            structure=structure,
        )

    def cut(self, outputs: Any, requests: int, tokens: int) -> Any:
        """Outputs of a padded batch, cut to the real one."""
        leaves, structure = _compat.tree_flatten(outputs)
        for place, cuts in enumerate(self.cuts):
            leaf = leaves[place]
            for cut in cuts:
                length = cut.length(requests, tokens)
                if leaf.shape[cut.dim] != length:
                    leaf = leaf.narrow(cut.dim, 0, length)
            if self.copied[place]:
                leaf = leaf.clone()
            elif leaf is leaves[place] and isinstance(leaf, Tensor):
                # what the caller does to the object, unsqueeze_ say, stays with the caller
                leaf = leaf.detach()
            leaves[place] = leaf
        return _compat.tree_unflatten(leaves, structure)

    def empty(self) -> Any | None:
        """Outputs of a batch of nothing; ``None`` if some output does not follow the batch."""
        if not all(self.cuts):
            return None
        leaves = []
        for (like, device), cuts in zip(self.empty_like, self.cuts, strict=True):
            sizes = list(like.shape)
            for cut in cuts:
                sizes[cut.dim] = cut.length(0, 0)
            leaves.append(torch.zeros(sizes, dtype=like.dtype, device=device))
        return _compat.tree_unflatten(leaves, self.structure)


def check_outputs(
    sizes: GraphSizes,
    inputs: Sequence[Any],
    buffers: Mapping[str, Tensor],
    specs: Mapping[str, Batched],
    multiple: int = 1,
    proven: bool = False,
) -> None:
    """The sizes of a graph's outputs can be cut; known before it runs.

    Raises:
        ValueError: the real rows of an output are not known to stand in front
    """
    units = _units(sizes, inputs, buffers, specs)
    for place, expressions in enumerate(sizes.outputs):
        if isinstance(expressions, tuple):
            _cuts(place, expressions, units, multiple, proven)


def _units(
    sizes: GraphSizes,
    inputs: Sequence[Any],
    buffers: Mapping[str, Tensor],
    specs: Mapping[str, Batched],
) -> dict[Any, sympy.Expr]:
    """The graph's symbols in requests and tokens, by the inputs that were declared to grow.

    Where the step fixes the tokens of a request, tokens themselves are so many requests.
    """
    names = {id(buffer): name for name, buffer in buffers.items()}
    grown = [
        (specs[names[id(value)]], expressions)
        for value, expressions in zip(inputs, sizes.inputs, strict=True)
        if id(value) in names
    ]
    units: dict[Any, sympy.Expr] = {}
    for spec, expressions in sorted(grown, key=lambda pair: pair[0].per):
        length = sympy.sympify(expressions[spec.dim]) - spec.extra
        unit = _UNITS[spec.per]
        if len(length.free_symbols) == 1:
            (symbol,) = length.free_symbols
            if symbol not in units:
                units[symbol] = sympy.solve(length - unit, symbol)[0]
            elif (count := sympy.expand(length.xreplace(units))) != unit:
                units[unit] = count
    seen = _symbols(size for shape in sizes.inputs if isinstance(shape, tuple) for size in shape)
    alone = _symbols(size for size in sizes.inputs if not isinstance(size, tuple | NoneType))
    return units | dict.fromkeys(alone - seen, _UNSEEN)


def _declared(buffer: Tensor, spec: Batched) -> tuple[Any, ...]:
    sizes: list[Any] = list(buffer.shape)
    sizes[spec.dim] = _UNITS[spec.per] + spec.extra
    return tuple(sizes)


def _symbols(expressions: Iterable[Any]) -> set[Any]:
    return set[Any]().union(*(sympy.sympify(size).free_symbols for size in expressions))


def _check_leaf(place: int, leaf: Any) -> None:
    if isinstance(leaf, bool | int | float | complex):
        raise ValueError(
            f"outputs must be tensors, got the number {leaf} as output {place}: whether it follows "
            "from a size of the batch, which counts padding, does not show; compute it outside of "
            "the step"
        )
    if not isinstance(leaf, Tensor | str | None):
        raise TypeError(
            f"outputs must be tensors in lists, tuples and dicts, got {type(leaf).__name__} as "
            f"output {place}"
        )


def _cuts(
    place: int,
    sizes: Sequence[Any],
    units: Mapping[Any, sympy.Expr],
    multiple: int,
    proven: bool,
) -> tuple[_Cut, ...]:
    cuts = []
    for dim, size in enumerate(sizes):
        expression = sympy.sympify(size)
        if expression.free_symbols & units.keys() and not _is_fixed(expression, units, multiple):
            cut = _cut(dim, expression, units, proven)
            cut = cut or _cut_groups(dim, expression, units, multiple, proven)
            if _UNSEEN in expression.xreplace(dict(units)).free_symbols:
                raise ValueError(
                    f"outputs must not take their size from an input that the step reads nothing "
                    f"else of, got dimension {dim} of output {place}: padding could not be cut"
                )
            if cut is None:
                raise ValueError(
                    f"outputs must have their real rows in front, got size {expression} in "
                    f"dimension {dim} of output {place}, which is not the number of requests or "
                    "tokens plus a constant: return it with the batch in a dimension of its own"
                )
            cuts.append(cut)
    return tuple(cuts)


def _is_fixed(size: sympy.Expr, units: Mapping[Any, sympy.Expr], multiple: int) -> bool:
    """A size that is the same for every whole number of groups: ``n // (n // 2)`` for even n."""
    return not _in_groups(size, units, multiple).free_symbols


def _in_groups(size: sympy.Expr, units: Mapping[Any, sympy.Expr], multiple: int) -> Any:
    counted: Any = size.xreplace(dict(units))
    return sympy.expand(counted.xreplace({_UNITS["token"]: multiple * _GROUPS}))


def _cut(dim: int, size: sympy.Expr, units: Mapping[Any, sympy.Expr], proven: bool) -> _Cut | None:
    length: Any = size
    per: Any = sympy.Integer(1)
    if size.func.__name__ == "FloorDiv":
        length, per = size.args
    length = length.xreplace(dict(units))
    if not per.is_Integer:
        return None
    for unit, symbol in _UNITS.items():
        more = sympy.expand(length - units.get(symbol, symbol))
        if more.is_Integer:
            return _Cut(dim, unit, int(more), int(per))
    for unit, symbol in _UNITS.items() if proven else ():
        times, more = _linear(length, symbol)
        if times:
            return _Cut(dim, unit, more, int(per), times)
    return None


def _cut_groups(
    dim: int, size: sympy.Expr, units: Mapping[Any, sympy.Expr], multiple: int, proven: bool
) -> _Cut | None:
    """A size that is one for whole groups of tokens: ``n // 2 * (n // (n // 2))`` for even n."""
    times, more = _linear(_in_groups(size, units, multiple), _GROUPS)
    if times and multiple % times == 0:
        per = multiple // times
        return _Cut(dim, "token", more * per, per)
    if times and proven:
        return _Cut(dim, "token", more * multiple, multiple, times)
    return None


def _linear(size: Any, symbol: sympy.Symbol) -> tuple[int, int]:
    """``times, more`` of ``times * symbol + more``; zero times if it is no such size."""
    size = sympy.expand(size)
    times = size.coeff(symbol)
    more = sympy.expand(size - times * symbol)
    if times.is_Integer and times > 0 and more.is_Integer:
        return int(times), int(more)
    return 0, 0
