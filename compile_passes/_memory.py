"""Where in its storage a tensor lies: two views cover the same elements, or have none in common.

Decided on the expressions of sizes, strides and offsets: no guard is added, and what the
expressions leave open counts as not proven. Tensors may be fake.
"""

import functools
from typing import Any

import sympy
import torch
from torch import Tensor

from ._compat import has_storage, known_at_least_0, size_expression, storage_key

# a size, stride or offset: an int, or a sympy expression of symbols that are at least 0
Expression = Any


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """The two lie in one storage, wherever in it."""
    return has_storage(a) and has_storage(b) and storage_key(a) == storage_key(b)


def same_elements(a: Tensor, b: Tensor) -> bool:
    """Element for element the two are the same memory, read as the same dtype."""
    return (
        shares_storage(a, b)
        and a.dtype == b.dtype
        and _offset(a) == _offset(b)
        and sizes(a) == sizes(b)
        and _strides(a) == _strides(b)
    )


def same_rows(a: Tensor, b: Tensor) -> bool:
    """Row ``i`` of both covers the same elements, whatever the shape of a row."""
    return (
        shares_storage(a, b)
        and a.dtype == b.dtype
        and min(a.dim(), b.dim()) >= 1
        and _offset(a) == _offset(b)
        and (sizes(a)[0], _strides(a)[0]) == (sizes(b)[0], _strides(b)[0])
        and _merged(a) == _merged(b)
    )


def is_first_column(column: Tensor, matrix: Tensor) -> bool:
    """``column`` is ``matrix[:, 0]``, in its memory."""
    return (
        (column.dim(), matrix.dim()) == (1, 2)
        and shares_storage(column, matrix)
        and column.dtype == matrix.dtype
        and _offset(column) == _offset(matrix)
        and sizes(column)[0] == sizes(matrix)[0]
        and _strides(column)[0] == _strides(matrix)[0]
    )


def is_head(view: Tensor, vector: Tensor) -> bool:
    """``view`` is ``vector[:n]``, both of adjacent elements."""
    return (
        (view.dim(), vector.dim()) == (1, 1)
        and shares_storage(view, vector)
        and view.dtype == vector.dtype
        and _offset(view) == _offset(vector)
        and _strides(view) == _strides(vector) == [1]
    )


def disjoint(a: Tensor, b: Tensor) -> bool:
    """No byte belongs to both, provably.

    The bytes of a view lie in an interval. They also do modulo a stride: the dimensions that step
    by a multiple of it do not count then. That tells layers apart whose slots interleave, as in
    ``pool[:, layer]``.
    """
    if not shares_storage(a, b):
        return True
    if 0 in sizes(a) or 0 in sizes(b):
        return True
    gap = _offset(b) * b.itemsize - _offset(a) * a.itemsize
    length_a, length_b = _extent(a), _extent(b)
    if _at_least_0(gap - length_a, a, b) or _at_least_0(-gap - length_b, a, b):
        return True
    strides = [stride * t.itemsize for t in (a, b) for stride in _strides(t)]
    return any(_disjoint_modulo(period, gap, a, b) for period in dict.fromkeys(strides))


def sizes(tensor: Tensor) -> list[Expression]:
    """The sizes of a tensor as expressions."""
    return [size_expression(size) for size in tensor.shape]


def _strides(tensor: Tensor) -> list[Expression]:
    return [size_expression(stride) for stride in tensor.stride()]


def _offset(tensor: Tensor) -> Expression:
    # a SymInt under dynamic shapes, whatever the annotation says
    offset: int | torch.SymInt = tensor.storage_offset()
    return size_expression(offset)


def _extent(tensor: Tensor, period: Expression = None) -> Expression:
    """Bytes from the first to the last, without the dimensions that step by periods."""
    elements: Expression = 1
    for size, stride in zip(sizes(tensor), _strides(tensor), strict=True):
        if period is None or not _is_multiple(stride * tensor.itemsize, period):
            elements += (size - 1) * stride
    return elements * tensor.itemsize


def _disjoint_modulo(period: Expression, gap: Expression, a: Tensor, b: Tensor) -> bool:
    if period == 0:
        return False
    if isinstance(period, int) and isinstance(gap, int):
        gap %= period
    elif not _at_least_0(gap, a, b):
        # the same question about the two in the other order
        gap, a, b = -gap, b, a
    return _at_least_0(gap - _extent(a, period), a, b) and _at_least_0(
        period - gap - _extent(b, period), a, b
    )


def _at_least_0(value: Expression, *tensors: Tensor) -> bool:
    if isinstance(value, int):
        return value >= 0
    value = _expanded(value)
    return value.is_nonnegative is True or known_at_least_0(value, *tensors)


# the gaps between the layers of a pool are few, the pairs of layers many
@functools.lru_cache(maxsize=4096)
def _expanded(value: sympy.Expr) -> sympy.Expr:
    return sympy.expand(value)


def _is_multiple(value: Expression, period: Expression) -> bool:
    if isinstance(value, int) and isinstance(period, int):
        return value % period == 0
    return (sympy.sympify(value) / period).is_integer is True


def _merged(tensor: Tensor) -> list[tuple[Expression, Expression]]:
    """Sizes and strides of a row: without dimensions of one, what is dense merged into one."""
    pairs = zip(sizes(tensor)[1:], _strides(tensor)[1:], strict=True)
    dims = [(size, stride) for size, stride in pairs if size != 1]
    if all(isinstance(stride, int) for _, stride in dims):
        # the order of a row's elements does not change which they are
        dims.sort(key=lambda dim: -dim[1])
    merged: list[tuple[Expression, Expression]] = []
    for size, stride in dims:
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    return merged
