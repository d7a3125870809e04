"""Define one op: schema, checks, reference, kernel, fake."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .declare import declare

# Held for the life of the process: the registrations live as long as this object.
_LIBRARY = torch.library.Library("mtpgraph", "FRAGMENT")


def register(
    schema: str,
    *,
    check: Callable[..., None],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    rows: Mapping[str, str] | None = None,
    results: Sequence[str] = (),
) -> torch._ops.OpOverload:
    """Register an op and return its ``.default`` overload.

    ``check``, ``reference`` and ``fake`` take the arguments of the schema, with its defaults.
    ``check`` runs in front of the others, so eager and traced calls refuse the same inputs with
    the same words, before anything is written. On a CUDA card ``launch`` of the module of this
    name in ``mtpgraph.kernels`` runs, imported at the first call; the reference serves every
    device that has no kernel.

    ``rows`` and ``results`` say what has an entry per request or token, see ``declare``; arguments
    of the batch contract are known by their names. By that contract no op lets padding reach a
    real row.
    """
    name = schema[: schema.index("(")]

    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            _refuse_grad(name, args, kwargs)
            check(*args, **kwargs)
            return call(*args, **kwargs)

        return run

    def launch(*args: Any, **kwargs: Any) -> Any:
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        kernel = _kernel(name.removesuffix("_")) if _has_kernels(device) else None
        if device.index == torch.cuda.current_device():
            return (kernel or reference)(*args, **kwargs)
        with torch.cuda.device(device):
            return (kernel or reference)(*args, **kwargs)

    # needs_exact_strides: a cache must reach the op with the strides it has, never as a copy.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, checked(reference), "CompositeExplicitAutograd")
    _LIBRARY.impl(name, checked(launch), "CUDA")
    torch.library.register_fake(f"mtpgraph::{name}", checked(fake), lib=_LIBRARY)
    op = getattr(torch.ops.mtpgraph, name).default
    declare(op, rows=rows, results=results, row_independent=True, complete=True)
    return op


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    """Triton is there and the card is one that the kernels are built for, sm_80 or newer."""
    return (
        torch.version.cuda is not None
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@functools.cache
def _kernel(name: str) -> Callable[..., Any] | None:
    package = f"{__name__.rsplit('.', 2)[0]}.kernels"
    if importlib.util.find_spec(f"{package}.{name}") is None:
        return None
    return importlib.import_module(f"{package}.{name}").launch


def _refuse_grad(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not torch.is_grad_enabled():
        return
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.requires_grad:
            raise RuntimeError(
                f"mtpgraph::{name} has no gradient, got an input that requires grad under grad "
                "mode; call it under torch.no_grad() or torch.inference_mode()"
            )
