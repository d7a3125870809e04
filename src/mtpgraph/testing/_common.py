"""Parts that the ``assert_...`` functions share."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from ..compile_passes import _compat
from .record import Problem


def user_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What the user wrote: neither ``torch.compile`` nor ``mtpgraph.compile`` around it."""
    from ..compile_passes.step import CompiledStep

    if not callable(fn):
        raise TypeError(f"fn must be callable, got {fn!r}")
    return _compat.uncompiled(fn._fn if isinstance(fn, CompiledStep) else fn)


def place_of(fn: Callable[..., Any]) -> tuple[str, int]:
    """File and first line of a function, of a module's ``forward``, of an object's call."""
    while hasattr(fn, "func"):
        fn = fn.func  # pyright: ignore[reportFunctionMemberAccess]
    if isinstance(fn, nn.Module):
        fn = type(fn).forward
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)


def name_of(fn: Callable[..., Any]) -> str:
    """A function's name, a module's class."""
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def named(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, those of ``*args`` and ``**kwargs`` too."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{f"args[{i}]": value for i, value in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found


def outputs_by_path(value: Any, path: str = "output") -> dict[str, Any]:
    """Leaves of what a function returned, by where they are in it."""
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, dict):
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [(f"{path}.{key}", getattr(value, key)) for key in value._fields]  # pyright: ignore[reportAttributeAccessIssue]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    elif _is_plain_object(value):
        items = [(f"{path}.{key}", item) for key, item in vars(value).items()]
    else:
        return {path: value}
    return {name: leaf for key, item in items for name, leaf in outputs_by_path(item, key).items()}


def _is_plain_object(value: Any) -> bool:
    return hasattr(value, "__dataclass_fields__") and hasattr(value, "__dict__")


def fail(title: str, problems: Sequence[Problem], more: Sequence[str] = ()) -> NoReturn:
    """Raise AssertionError: what is wrong, then each line of the user's with reason and remedy."""
    __tracebackhide__ = True
    listed = [f"{number}. {problem}" for number, problem in enumerate(problems, 1)]
    raise AssertionError("\n".join([title, *more, *listed]))


def counted(count: int, what: str) -> str:
    """``1 graph``, ``2 graphs``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
