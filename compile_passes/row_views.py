"""Whether a reshape leaves real entries in front of each dimension that grows."""

from collections.abc import Sequence
from typing import Any

import sympy
from torch import Tensor

from .roles import Roles
from .row_effects import Mixed
from .rows import Call


def view(call: Call, roles: Roles) -> None:
    """The rule of ``view`` and what is like it."""
    if "size" not in call.values and "shape" not in call.values:
        return  # another dtype
    source, result = call.values["self"], call.results[0]
    if not keeps_front(source.shape, result.shape, roles):
        raise Mixed(
            f"reshapes {_shape(source, roles)} to {_shape(result, roles)}, which spreads padding "
            "among real rows",
            "keep the dimension that grows in front of what it is merged with",
        )


def squeeze(call: Call, roles: Roles) -> None:
    """A dimension that grows is one of those that go where there is one entry."""
    source, dims = call.values["self"], call.values.get("dim")
    given = range(source.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % max(1, source.dim()) for dim in given} & set(roles.dims(source))
    if gone:
        raise Mixed(
            f"drops dimension {min(gone)}, which grows with the batch, in a batch of one alone",
            "name the dimension that is meant, as in squeeze(-1)",
        )


def keeps_front(before: Sequence[Any], after: Sequence[Any], roles: Roles) -> bool:
    """Reshaping leaves real entries in front of each dimension that grows."""
    start = (0, 0)
    starts, ends = _prefixes(before, roles), _prefixes(after, roles)
    cuts = []
    for i, product in enumerate(starts):
        for j in range(start[1], len(ends)):
            if sympy.expand(product - ends[j]) == 0:
                cuts.append((i, j))
                start = (i, j + 1)
                break
    cuts.append((len(before), len(after)))
    last = (0, 0)
    for i, j in cuts:
        groups = [_larger(before[last[0] : i], roles), _larger(after[last[1] : j], roles)]
        if groups[0] != groups[1] and any(
            any(roles.grows(size) for size in group[1:]) for group in groups
        ):
            return False
        last = (i, j)
    return True


def _prefixes(shape: Sequence[Any], roles: Roles) -> list[sympy.Expr]:
    products: list[sympy.Expr] = [sympy.Integer(1)]
    for size in shape:
        products.append(products[-1] * roles.size(size))
    return products


def _larger(sizes: Sequence[Any], roles: Roles) -> list[sympy.Expr]:
    return [size for size in map(roles.size, sizes) if size != 1]


def _shape(tensor: Tensor, roles: Roles) -> str:
    names = {roles.requests: "requests", roles.tokens: "tokens"}
    sizes = [roles.size(size) for size in tensor.shape]
    return "[" + ", ".join(names.get(size) or str(size) for size in sizes) + "]"
