"""A copy that a compiler can neither drop nor delay."""

import torch
from torch import Tensor

from ._register import register


def snapshot(x: Tensor) -> Tensor:
    """Copy ``x`` as it is now.

    What ``x.clone()`` does, as an op that a compiler cannot see into: it is computed where it
    stands, into memory of its own. ``find_mutation_hazards`` puts it into graphs. It has a
    gradient, that of the identity, for it may land in any graph.

    Args:
        x: any shape, dtype and strides

    Returns:
        a copy, with the strides that ``clone`` gives it
    """
    return _op(x)


def _check(x: Tensor) -> None:
    pass


def _reference(x: Tensor) -> Tensor:
    return x.clone()


def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(_: object, gradient: Tensor) -> Tensor:
    return gradient


_op = register("snapshot(Tensor x) -> Tensor", check=_check, reference=_reference, fake=_fake)
torch.library.register_autograd("mtpgraph::snapshot", _backward)
