"""Define one op: schema, checks, reference, fake."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Held for the life of the process: the registrations live as long as this object.
_LIBRARY = torch.library.Library("mtpgraph", "FRAGMENT")


def register(
    schema: str,
    *,
    check: Callable[..., None],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
) -> torch._ops.OpOverload:
    """Register an op and return its ``.default`` overload.

    ``check``, ``reference`` and ``fake`` take the arguments of the schema, with its defaults.
    ``check`` runs in front of both others, so eager and traced calls refuse the same inputs with
    the same words, before anything is written. The reference serves every device that has no
    kernel.
    """
    name = schema[: schema.index("(")]

    def run(*args: Any, **kwargs: Any) -> Any:
        _refuse_grad(name, args, kwargs)
        check(*args, **kwargs)
        return reference(*args, **kwargs)

    def trace(*args: Any, **kwargs: Any) -> Any:
        _refuse_grad(name, args, kwargs)
        check(*args, **kwargs)
        return fake(*args, **kwargs)

    # needs_exact_strides: a cache must reach the op with the strides it has, never as a copy.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mtpgraph::{name}", trace, lib=_LIBRARY)
    return getattr(torch.ops.mtpgraph, name).default


def _refuse_grad(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not torch.is_grad_enabled():
        return
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.requires_grad:
            raise RuntimeError(
                f"mtpgraph::{name} has no gradient, got an input that requires grad under grad "
                "mode; call it under torch.no_grad() or torch.inference_mode()"
            )
