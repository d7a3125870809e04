"""What an argument of a step holds: its structure, its constants, and the tensors in it.

A step looks at its caches in every call, for one of them may have been replaced. A ``Surveyor``
remembers what it saw: an argument whose containers hold the same objects is not looked into again.
"""

import functools
import operator
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# code, which Dynamo guards by itself
_CLOSED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_CONSTANTS = frozenset({bool, int, str, bytes, type(None)})


class Survey:
    """One argument at one time.

    Attributes:
        structure: containers and constants, hashable; equal for two values that differ in their
            tensors alone
        tensors, generators: what lies in the argument, in order
    """

    def __init__(self, value: Any) -> None:
        self.tensors: list[Tensor] = []
        self.generators: list[torch.Generator] = []
        self._value = value
        # what can change without becoming another object, and what it held
        self._seen: list[tuple[Any, list[Any]]] = []
        self.structure = self._look(value, ())
        self._addresses = self._now()

    def holds(self, value: Any) -> bool:
        """``value`` is what was surveyed, unchanged but for the content of its tensors."""
        return (
            value is self._value
            and all(_same(_content(container), content) for container, content in self._seen)
            and self._addresses == self._now()
        )

    def _now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.tensors))

    def _look(self, value: Any, inside: tuple[int, ...]) -> Any:
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            self.tensors.append(value)
            return Tensor
        if kind in _CONSTANTS:
            # 1, 1.0 and True are equal, and three constants
            return (kind, value)
        if isinstance(value, float):
            return (kind, value.hex())
        if isinstance(value, torch.Generator):
            self.generators.append(value)
            return value
        if id(value) in inside:
            return "itself"
        inside = (*inside, id(value))
        if kind is tuple:
            return (kind, *(self._look(item, inside) for item in value))
        content = _content(value)
        if content:
            self._seen.append((value, content))
            return (kind, *(self._look(item, inside) for item in content))
        if isinstance(value, list | tuple | Mapping | set | frozenset):
            self._seen.append((value, content))
            return (kind,)
        try:
            hash(value)
        except TypeError:
            array = hasattr(value, "__array_interface__")
            raise TypeError(
                "arguments must hold tensors, containers and objects that can be hashed, got "
                + ("an array of numpy: pass torch.from_numpy(it)" if array else repr(value))
            ) from None
        return value


class Surveyor:
    """Surveys the arguments of a step, by name."""

    def __init__(self) -> None:
        self._last: dict[str, Survey] = {}
        self._numbers: dict[Any, int] = {}

    def look(self, name: str, value: Any) -> Survey:
        """What the argument holds now."""
        last = self._last.get(name)
        if last is None or not last.holds(value):
            last = self._last[name] = Survey(value)
            # a number is sooner hashed than nested tuples, call after call
            last.structure = self._numbers.setdefault(last.structure, len(self._numbers))
        return last


def _content(value: Any) -> list[Any]:
    """What is in a container or an object, names in front of values."""
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if not isinstance(value, Mapping):
        value = _attributes(value)
    return [*value.keys(), *value.values()]


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, _CLOSED):
        return {}
    if isinstance(value, types.MethodType):
        return {"__self__": value.__self__}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))
