"""What a traced function stores by Python: in arguments, attributes, globals and closures."""

import traceback
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.symbolic_convert import tls
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from ._compat_nodes import user_frames
from ._compat_sizes import name_of_source

_Place = tuple[str, int]


def stored_by_python() -> list[tuple[str | torch.SymInt, list[_Place]]]:
    """Tensors and sizes that the traced function leaves in what was there before it ran.

    Dynamo puts them there when the graph has run. Nothing, unless a backend is being called.

    Returns:
        the name of each tensor's node, or where an input that the graph does not read was found, as
        ``L['x']``, or the size; and the lines that stored something there
    """
    # torch has no name for a thread that has traced nothing yet
    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return []
    side_effects = translator.output.side_effects
    found: list[tuple[str | torch.SymInt, list[_Place]]] = []
    for variable in side_effects._get_modified_vars():
        kind = variable.mutation_type
        if not isinstance(kind, AttributeMutationExisting | ValueMutationExisting):
            continue
        stacks = side_effects.mutation_user_stacks
        places = _places(stack for part in _parts(variable) for stack in stacks.get(part, ()))
        found += [(value, places) for value in _values(variable, side_effects)]
    return found


def _parts(variable: Any) -> list[Any]:
    """A variable, and what an object of a class that extends ``dict``, say, holds as a dict."""
    names = ("_base_vt", "_dict_vt", "_list_vt")
    parts = (getattr(variable, name, None) for name in names)
    return [variable, *(part for part in parts if part is not None)]


def _values(variable: Any, side_effects: Any) -> list[str | torch.SymInt]:
    """Nodes and sizes in what was stored in a variable."""
    found: list[str | torch.SymInt] = []
    # of an object the attributes that were there already are not looked at
    attributes = side_effects.store_attr_mutations.get(variable, {})
    own, *others = _parts(variable)
    pending: list[Any] = [*(attributes.values() or [own]), *others]
    seen: dict[int, Any] = {}

    def look(value: Any) -> None:
        # to ask any other class for an instance of its own would make the graph read the input
        if isinstance(value, LazyVariableTracker):
            if isinstance(value.peek_value(), Tensor):
                found.append(name_of_source(value.original_source()))
        elif isinstance(value, TensorVariable):
            found.append(value.as_proxy().node.name)
        elif isinstance(value, SymNodeVariable) and isinstance(value.sym_num, torch.SymInt):
            found.append(value.sym_num)
        else:
            # an object that the function made, with tensors in it
            pending.extend(side_effects.store_attr_mutations.get(value, {}).values())
            # members of a set, keys of a dict
            items = vars(value).get("items")
            keys = list(items) if isinstance(items, dict) else []
            pending.extend(getattr(key, "vt", None) for key in keys)

    while pending:
        VariableTracker.visit(look, pending.pop(), seen)
    return found


def _places(stacks: Any) -> list[_Place]:
    frames = (user_frames("".join(traceback.format_list(stack))) for stack in stacks)
    return list(dict.fromkeys(frame[-1] for frame in frames if frame))
