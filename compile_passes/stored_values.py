"""What a step leaves in Python objects that outlive it, beside what it returns."""

from collections.abc import Iterator, Mapping

import torch

from . import _compat
from .inputs import Batched, Static
from .pad_flow import Problem
from .report import source_line
from .roles import Roles
from .rows import Trace


def find_stored(
    trace: Trace, roles: Roles | None, given: Mapping[str, Batched | Static]
) -> Iterator[Problem]:
    """Tensors and sizes that are stored in an argument, an attribute, a global or a closure.

    Outputs can be cut to the real batch, and replayed calls return them. What else a step does with
    a tensor happens in Python, which a replay does not run. An input that does not grow may be
    stored: it is the caller's own.

    Args:
        trace: the graph
        roles: what grows in it; None if that is not known
        given: what the caller declared
    """
    nodes = {node.name: node for node in trace.gm.graph.nodes}
    batched = {f"L[{name!r}]" for name, spec in given.items() if isinstance(spec, Batched)}

    def follows_batch(value: str | torch.SymInt) -> bool:
        if isinstance(value, torch.SymInt):
            return roles is None or roles.grows(value)
        tensor = trace.inputs.get(nodes[value]) if value in nodes else None
        if tensor is None:
            return value in nodes or value in batched
        return roles is None or bool(roles.dims(tensor))

    for value, places in _compat.stored_in_trace(trace.gm):
        if not follows_batch(value):
            continue
        node = nodes.get(str(value), trace.gm.graph.output_node())
        reason = (
            "stores a tensor or a size of the batch in what outlives the step: padded, it would "
            "count padding, and a replay would store nothing"
        )
        for file, line in places or [_compat.user_frame(node)]:
            place = (file, line, source_line(file, line))
            yield Problem(node, "padding unknown", reason, "return it", place=place)
