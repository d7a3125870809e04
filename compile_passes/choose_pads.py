"""Which padding of the inputs satisfies all that they feed."""

from collections.abc import Mapping

import torch
from torch import fx

from .inputs import Batched, Static
from .pad_flow import Fill, Need, PadFlow
from .roles import Roles
from .rows import Trace

_WALKS = 60
# arguments of the batch contract
_LENGTHS = frozenset({"seq_lens", "row_lens"})


def choose_pads(
    trace: Trace,
    roles: Roles,
    names: Mapping[fx.Node, str],
    given: Mapping[str, Batched | Static],
) -> tuple[dict[str, Fill], PadFlow]:
    """Padding that satisfies all that the inputs feed, as far as there is one."""
    grown = {names[node]: t for node, t in trace.inputs.items() if roles.dims(t)}
    fills: dict[str, Fill] = dict.fromkeys(grown, 0)
    needs = PadFlow(trace, roles, names, fills).needs
    offsets = frozenset(
        name for name, wanted in needs.items() if any(n.pad.fill == "last" for n in wanted)
    )
    lengths = frozenset(
        name for name, wanted in needs.items() if any(n.argument in _LENGTHS for n in wanted)
    )
    choices = {name: _choices(t.dtype, needs.get(name, [])) for name, t in grown.items()}
    for name in grown:
        spec = given.get(name)
        choices[name] = [spec.pad] if isinstance(spec, Batched) else choices[name]
        fills[name] = choices[name][0]
    best = PadFlow(trace, roles, names, fills, offsets, lengths)
    walks, improved = 0, True
    while improved and best.problems:
        improved = False
        blamed = sorted(set().union(*(p.inputs for p in best.problems)))
        for name in blamed:
            for fill in choices.get(name, [])[1:]:
                walks += 1
                if walks > _WALKS:
                    return fills, best
                flow = PadFlow(trace, roles, names, {**fills, name: fill}, offsets, lengths)
                if len(flow.problems) < len(best.problems):
                    best, improved = flow, True
                    fills[name] = fill
    return fills, best


def _choices(dtype: torch.dtype, needs: list[Need]) -> list[Fill]:
    """What may pad an input, first what the ops that it feeds ask for."""
    strict = sorted(needs, key=lambda need: need.pad.low == -need.pad.high == -float("inf"))
    wanted: list[Fill] = [need.pad.fill for need in strict]
    if dtype == torch.bool:
        wanted = [*(bool(fill) for fill in wanted if fill != "last"), False, True]
    elif dtype.is_floating_point or dtype.is_complex:
        wanted = [*(fill for fill in wanted if fill != "last"), 0]
    else:
        limits = torch.iinfo(dtype)
        wanted = [
            fill if fill == "last" else int(fill)
            for fill in (*wanted, 0, -1, 1)
            if fill == "last" or limits.min <= fill <= limits.max
        ]
    return list(dict.fromkeys(wanted))
