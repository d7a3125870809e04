"""Which writes of a step let padding into memory that outlives it."""

from collections.abc import Iterator

from . import _compat
from .pad_flow import Problem
from .roles import Roles
from .rows import Call, Trace, input_name, is_symbolic


class Memory:
    """Which memory outlives the step, and which tensors are windows into what does not grow."""

    def __init__(self, trace: Trace, roles: Roles) -> None:
        self._roles = roles
        self._kept: dict[int, str] = {}
        self._batched: dict[int, str] = {}
        for node, tensor in trace.inputs.items():
            batched = roles.dims(tensor)
            (self._batched if batched else self._kept)[_compat.storage_key(tensor)] = input_name(
                node
            )
        for tensor in trace.constants:
            self._kept[_compat.storage_key(tensor)] = "a constant"
        self._windows: set[int] = set()

    def concerns(self, call: Call) -> bool:
        """Something that grows goes in or comes out."""
        roles = self._roles
        return (
            any(roles.dims(tensor) for _, tensor in call.tensors())
            or any(roles.dims(tensor) for tensor in call.results)
            or any(
                is_symbolic(leaf) and roles.grows(leaf)
                for leaf in _compat.tree_leaves(list(call.values.values()))
            )
        )

    def follow(self, call: Call) -> None:
        """Take note of views."""
        sources = {id(tensor): tensor for _, tensor in call.tensors()}
        keys = {_compat.storage_key(t) for i, t in sources.items() if i in self._windows}
        for result in call.results:
            if _compat.storage_key(result) in keys:
                self._windows.add(id(result))
        if call.name in ("slice", "narrow") and call.results:
            source, result = call.values["self"], call.results[0]
            if len(self._roles.dims(result)) > len(self._roles.dims(source)):
                self._windows.add(id(result))

    def check_writes(self, call: Call, declared: bool) -> Iterator[Problem]:
        """Writes that a batch without padding would not make."""
        for tensor in call.written():
            key = _compat.storage_key(tensor)
            if key in self._batched:
                yield Problem(
                    call.node,
                    "padding unknown",
                    "writes an input that grows with the batch: padded, the input is a copy",
                    "write to a tensor of the step's own and return it",
                )
            elif not declared and (key in self._kept or id(tensor) in self._windows):
                yield Problem(
                    call.node,
                    "rows mixed",
                    f"writes batched rows to {self._kept.get(key, 'a window')}, padding among them",
                    "use an op that leaves padding out, as ops.kv_cache_write_, and declare it",
                )
