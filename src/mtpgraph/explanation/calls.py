"""The function that is traced: never the user's own object where a trace would leave its mark."""

import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def name_of(fn: Any) -> str:
    """A name for a step."""
    if isinstance(fn, nn.Module):
        return type(fn).__qualname__
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    module = getattr(fn, "__module__", None)
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return f"{module}:{name}" if module and module != "__main__" else name


def plain_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """The function, method or module that a call comes to, for partials and callable objects."""
    while isinstance(fn, functools.partial):
        args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
    if isinstance(fn, types.FunctionType | types.MethodType | nn.Module):
        return fn, args, kwargs
    method = getattr(fn, "__call__", None)  # noqa: B004
    return (method if isinstance(method, types.MethodType) else fn), args, kwargs


def with_fresh_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: Dynamo keeps what it compiled there.

    A module is traced by its ``forward``, unless hooks run around it; what else is callable, as it
    is.
    """
    if isinstance(fn, nn.Module):
        hooked = fn._forward_hooks or fn._forward_pre_hooks
        return fn if hooked else with_fresh_code(fn.forward)
    if isinstance(fn, types.MethodType) and isinstance(fn.__func__, types.FunctionType):
        return types.MethodType(_same(fn.__func__), fn.__self__)
    if isinstance(fn, types.FunctionType):
        return _same(fn)
    return fn


def _same(fn: types.FunctionType) -> types.FunctionType:
    return _function(fn, fn.__closure__, fn.__globals__)


def detached(fn: Callable[..., Any], memo: dict[int, Any]) -> Callable[..., Any]:
    """The function over deep copies of all that it reaches by name; ``memo`` as for ``deepcopy``.

    Its object and its closure; and of its module the data that it names, and the functions, over
    the same copies. What other modules hold stays what it is.
    """
    return _Detacher(memo).copied(fn)


class _Detacher:
    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        # by the id of the globals of a module
        self._modules: dict[int, dict[str, Any]] = {}

    def copied(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            owner = copy.deepcopy(value.__self__, self._memo)
            return types.MethodType(self.copied(value.__func__), owner)
        return copy.deepcopy(value, self._memo)

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        copies = self._modules.setdefault(id(fn.__globals__), dict(fn.__globals__))
        fresh = _function(fn, None, copies) if not fn.__closure__ else None
        if fresh is not None:
            self._memo[id(fn)] = fresh
        for name in _names(fn.__code__) & fn.__globals__.keys():
            value = fn.__globals__[name]
            if isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__:
                copies[name] = self.copied(value)
            elif isinstance(value, _DATA):
                copies[name] = copy.deepcopy(value, self._memo)
        if fresh is None:
            cells = tuple(_cell(cell, self._memo) for cell in fn.__closure__ or ())
            fresh = _function(fn, cells, copies)
        return fresh


# what a step may keep between calls, and change
_DATA = (Tensor, nn.Module, list, dict, set, deque)


def _names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _cell(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    try:
        content = cell.cell_contents
    except ValueError:
        # a name that was never given a value
        return types.CellType()
    return types.CellType(copy.deepcopy(content, memo))


def _function(
    fn: types.FunctionType,
    closure: tuple[types.CellType, ...] | None,
    names: dict[str, Any],
) -> types.FunctionType:
    code = fn.__code__.replace()
    fresh = types.FunctionType(code, names, fn.__name__, fn.__defaults__, closure)
    fresh.__kwdefaults__ = fn.__kwdefaults__
    fresh.__qualname__ = fn.__qualname__
    fresh.__module__ = fn.__module__
    fresh.__dict__.update(fn.__dict__)
    return fresh
