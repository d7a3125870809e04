"""Every tensor that a call can reach, and the way back to what they all held."""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compile_passes import _compat


@dataclasses.dataclass
class Snapshot:
    """Tensors that a call can reach, with a copy of all that lies in their storages.

    Found are tensors in the arguments, in a module's parameters, buffers and attributes, in
    closures, and in globals that the function's code names, through containers and objects.

    Attributes:
        tensors: the tensors by where they are: ``cache['k']``, ``self.state``, ``closure pool``
    """

    tensors: dict[str, Tensor]
    _places: list[tuple[Any, Any, Any]]
    _storages: list[tuple[Tensor, Tensor]]

    @classmethod
    def take(cls, fn: Callable[..., Any], arguments: Mapping[str, Any]) -> "Snapshot":
        """Look at a call of ``fn`` with arguments by name."""
        search = _Search()
        for name, value in arguments.items():
            search.look(value, name)
        search.look(fn, "", callee=True)
        storages: dict[int, tuple[Tensor, Tensor]] = {}
        for tensor in search.tensors.values():
            for part in _parts(tensor):
                key = _compat.storage_key(part)
                if key not in storages:
                    view = storage_bytes(part)
                    storages[key] = (view, view.clone())
        return cls(search.tensors, search.places, list(storages.values()))

    def restore(self) -> None:
        """Put every tensor back where it was, with what it held."""
        for container, key, value in self._places:
            _put(container, key, value)
        for view, copied in self._storages:
            if view.shape != copied.shape:
                view.untyped_storage().resize_(copied.numel())
            view.copy_(copied)

    def now(self) -> "dict[str, Tensor]":
        """Copies of what the tensors hold now, by where they are.

        A tensor that was replaced by another counts as what replaced it.
        """
        replaced = {id(old): _get(c, k) for c, k, old in self._places if isinstance(old, Tensor)}
        found = {}
        for name, tensor in self.tensors.items():
            value = replaced.get(id(tensor), tensor)
            found[name] = value.detach().clone() if isinstance(value, Tensor) else tensor[:0]
        return found


def storage_bytes(tensor: Tensor) -> Tensor:
    """A view of all bytes behind a tensor, those between its rows included."""
    storage = tensor.untyped_storage()
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(storage)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold the data, of a subclass too; none for one without data."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return []
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    return [tensor]


# modules of other packages hold no state of the user's
_FOREIGN = (
    "torch",
    "numpy",
    "builtins",
    "triton",
    "functools",
    "mtpgraph.ops",
    "typing",
    "logging",
)


class _Search:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        # container, key, value: as they were
        self.places: list[tuple[Any, Any, Any]] = []
        self._seen: set[int] = set()
        # what has no other owner must outlive the ids in ``_seen``
        self._alive: list[Any] = []

    def look(self, value: Any, path: str, callee: bool = False) -> None:
        if isinstance(value, str | bytes | int | float | complex | type | types.ModuleType | None):
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, Tensor):
            self.tensors[path] = value
        elif isinstance(value, Mapping):
            self._items(value, [(f"{path}[{key!r}]", key) for key in value])
        elif isinstance(value, list | tuple):
            self._items(value, [(f"{path}[{i}]", i) for i in range(len(value))])
        elif isinstance(value, set | frozenset):
            for item in value:
                self.look(item, path)
        elif isinstance(value, functools.partial):
            self.look(value.func, path, callee)
            self.look(value.args, f"{path}.args" if path else "args")
            self.look(value.keywords, path)
        elif isinstance(value, types.MethodType):
            self.look(value.__self__, "self")
            self._function(value.__func__, path)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        else:
            self._object(value, "self" if callee else path)

    def _items(self, container: Any, places: list[tuple[str, Any]]) -> None:
        for path, key in places:
            value = container[key]
            self.places.append((container, key, value))
            self.look(value, path)

    def _object(self, value: Any, path: str) -> None:
        if not isinstance(value, nn.Module) and _is_foreign(value):
            return
        attributes = dict(getattr(value, "__dict__", {}))
        for owner in type(value).__mro__:
            slots = owner.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    attributes[name] = getattr(value, name)
        if isinstance(value, nn.Module):
            for table in ("_parameters", "_buffers", "_modules"):
                found = attributes.pop(table, {})
                for name, item in found.items():
                    self.places.append((found, name, item))
                    self.look(item, f"{path}.{name}" if path else name)
            attributes = {k: v for k, v in attributes.items() if not k.startswith(_HOOKS)}
        for name, item in attributes.items():
            self.places.append((_Attributes(value), name, item))
            self.look(item, f"{path}.{name}" if path else name)

    def _function(self, function: types.FunctionType, path: str) -> None:
        inner = getattr(function, "_torchdynamo_orig_callable", None)
        if inner is not None:
            self.look(inner, path)
            return
        if _is_foreign(function):
            return
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:
                # not assigned yet
                continue
            self.places.append((_Attributes(cell), "cell_contents", held))
            self.look(held, name if isinstance(held, nn.Module) else f"closure {name}")
        for name in _names(code):
            if name in function.__globals__:
                held = function.__globals__[name]
                if not isinstance(held, types.FunctionType | types.ModuleType | type):
                    self.places.append((function.__globals__, name, held))
                self.look(held, name if isinstance(held, nn.Module) else f"global {name}")
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.look(default, f"{path or function.__name__} default")


_HOOKS = ("_forward", "_backward", "_state_dict", "_load_state", "_non_persistent", "_is_full")


def _is_foreign(value: Any) -> bool:
    kind = value if isinstance(value, types.FunctionType) else type(value)
    module = getattr(kind, "__module__", None) or ""
    return module.split(".")[0] in _FOREIGN or module.startswith("mtpgraph.ops")


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


class _Attributes:
    """The attributes of an object as a container."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner


def _get(container: Any, key: Any) -> Any:
    if isinstance(container, _Attributes):
        return getattr(container.owner, key, None)
    try:
        return container[key]
    except LookupError:
        return None


def _put(container: Any, key: Any, value: Any) -> None:
    if _get(container, key) is value:
        return
    if isinstance(container, _Attributes):
        object.__setattr__(container.owner, key, value)
    elif isinstance(container, list | dict):
        container[key] = value


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Where the bits of two tensors of equal shape and dtype differ, bool of that shape."""
    if a.is_complex():
        return differs(torch.view_as_real(a), torch.view_as_real(b)).any(-1)
    a, b = a.detach(), b.detach()
    if a.dtype.is_floating_point or a.dtype == torch.bool:
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
        a, b = a.contiguous().view(kind), b.contiguous().view(kind)
    return a != b


def first_index(where: Tensor) -> tuple[int, ...]:
    """Index of the first true entry."""
    flat = int(where.flatten().to(torch.uint8).argmax())
    index = []
    for size in reversed(where.shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))


def far(a: Tensor, b: Tensor, rtol: float, atol: float) -> Tensor:
    """Where two tensors of equal shape and dtype differ beyond a tolerance; NaN equals NaN."""
    if not (a.is_floating_point() or a.is_complex()):
        return differs(a, b)
    kind = torch.complex128 if a.is_complex() else torch.float64
    return ~torch.isclose(a.detach().to(kind), b.detach().to(kind), rtol, atol, equal_nan=True)


# (rtol, atol) where a caller gives none; those of torch.testing, and for what it has none
_TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


def tolerance(dtype: torch.dtype, rtol: float | None, atol: float | None) -> tuple[float, float]:
    """The tolerance of a dtype where the caller leaves it open."""
    own = _TOLERANCES.get(dtype, (0.0, 0.0))
    return own[0] if rtol is None else rtol, own[1] if atol is None else atol


def difference(name: str, a: Tensor, b: Tensor, where: Tensor, words: tuple[str, str]) -> str:
    """``name[3, 1]: eager 0.5, compiled 0.25 (12 of 40 entries differ)``."""
    index = first_index(where)
    place = f"{name}[{', '.join(map(str, index))}]" if index else name
    count = int(where.sum())
    return (
        f"{place}: {words[0]} {_show(a[index])}, {words[1]} {_show(b[index])} "
        f"({count} of {where.numel()} entries differ)"
    )


def _show(value: Tensor) -> str:
    # an fp8 scalar has no Python value of its own
    is_fp8 = value.is_floating_point() and value.itemsize == 1
    return repr((value.float() if is_fp8 else value).item())
