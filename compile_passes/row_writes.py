"""Which writes of a step let padding into memory that outlives it."""

from collections.abc import Iterator

from torch import Tensor

from ..ops.declare import Facts
from . import _compat
from .pad_flow import Problem
from .roles import Roles, roots_of
from .row_effects import OWN_WRITE, cuts_end
from .rows import Call, Trace, input_name, is_symbolic


class Memory:
    """Which memory outlives the step, and which tensors are windows.

    A window is a view in which padding lies where a batch without padding has something else: into
    what does not grow, or into what grows and goes on behind the view.
    """

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
        """Take note of views that leave out what stands at the end of a growing dimension."""
        for result in call.results:
            source = _viewed(call, result)
            if source is not None and (
                id(source) in self._windows or self._is_window(call, source, result)
            ):
                self._windows.add(id(result))

    def _is_window(self, call: Call, source: Tensor, result: Tensor) -> bool:
        if len(self._roles.dims(result)) > len(self._roles.dims(source)):
            return True
        return call.name == "slice" and cuts_end(call, self._roles)

    def check_writes(self, call: Call, facts: Facts | None) -> Iterator[Problem]:
        """Writes that a batch without padding would not make.

        Args:
            call: any call, also one that takes nothing that grows
            facts: what its op declares, if it does
        """
        roles = self._roles
        for tensor in call.written():
            key = _compat.storage_key(tensor)
            if key in self._batched:
                yield Problem(
                    call.node,
                    "padding unknown",
                    "writes an input that grows with the batch: padded, the input is a copy",
                    "write to a tensor of the step's own and return it",
                )
            elif key in self._kept and facts is None and self.concerns(call):
                yield Problem(
                    call.node,
                    "rows mixed",
                    f"writes batched rows to {self._kept[key]}, padding among them",
                    OWN_WRITE,
                )
            elif key in self._kept and not self._leaves_padding_out(call, facts):
                yield Problem(
                    call.node,
                    "rows mixed",
                    f"writes {self._kept[key]} also when only padding runs, as in warm-up and the "
                    "recording of a graph",
                    "write it outside of the step, or in an op that is declared with a pad for "
                    "something that grows",
                )
            elif id(tensor) in self._windows and (facts is None or roles.dims(tensor)):
                yield Problem(
                    call.node,
                    "rows mixed",
                    "writes to a view that ends before the tensor does, so that padding is written "
                    "to entries which a batch without padding has behind it",
                    "use torch.where or torch.cat, or write outside of the step",
                )

    def _leaves_padding_out(self, call: Call, facts: Facts | None) -> bool:
        """Padding keeps an op from writing, or it is noted elsewhere that it may not."""
        if facts is None:
            return False
        roles = self._roles
        if any(name in facts.pads and roles.dims(tensor) for name, tensor in call.tensors()):
            return True
        return (not facts.complete and self.concerns(call)) or any(
            not roles.grows(root.count) for root in roots_of(call)
        )


def _viewed(call: Call, result: Tensor) -> Tensor | None:
    """The argument that a result shares memory with: of several, the one that is written."""
    key = _compat.storage_key(result)
    arguments = (*call.written(), *(tensor for _, tensor in call.tensors()))
    return next((t for t in arguments if _compat.storage_key(t) == key), None)
