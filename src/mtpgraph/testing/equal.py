"""Compiled code must give what eager gives, in its outputs and in every buffer that it writes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..compile_passes import _compat
from ._common import fail, name_of, named, outputs_by_path, place_of, user_function
from .graphs import _refuse_nothing
from .record import Problem, Record, record
from .state import Snapshot, difference, differs, far, tolerance

_OUTPUT = (
    "compute it in another way, or keep it out of the compiled code; if it is rounding alone, "
    "give rtol and atol"
)
_BUFFER = (
    "write the buffer after everything that reads its old value, or read from a copy that the "
    "compiler cannot see through (an op of your own that clones)"
)


def assert_compiled_equals_eager(
    fn: Callable[..., Any],
    *args: Any,
    backend: str | Callable[..., Any] = "inductor",
    rtol: float | None = None,
    atol: float | None = None,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Record:
    """Two calls of ``fn``, compiled, give what they give in eager, and write what they write.

    Compared are the outputs of both calls, and after the second every tensor that ``fn`` can
    reach: arguments, parameters and buffers, tensors in containers, closures and globals. Memory
    that torch allocates holds NaN, so nothing passes that was never written. What the calls write
    is put back. Dynamo is reset before and after.

    Args:
        fn: a function, method or module
        *args, **kwargs: of the call
        backend, dynamic, options: as for ``torch.compile``
        rtol, atol: how far compiled floats may be; those of ``torch.testing`` for the dtype if
            left out

    Returns:
        what was compiled

    Raises:
        AssertionError: names the tensor, the first index, both values, and what in the graph is
            known to be computed wrongly, with its line. Also if nothing was compiled at all
    """
    __tracebackhide__ = True
    fn = user_function(fn)
    snapshot = Snapshot.take(fn, named(fn, args, kwargs))
    before = snapshot.now()
    _compat.reset_dynamo()
    try:
        with _poisoned():
            eager = _two_calls(fn, args, kwargs, snapshot)
            compiled_fn = torch.compile(fn, backend=backend, dynamic=dynamic, options=options)
            with record(check=True) as found:
                compiled = _two_calls(compiled_fn, args, kwargs, snapshot)
    finally:
        snapshot.restore()
        _compat.reset_dynamo()
    _refuse_nothing(fn, found)
    _compare(fn, eager, compiled, before, found, (rtol, atol))
    return found


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    with _compat.filled_memory(), _compat.same_random_numbers():
        yield


_Outcome = tuple[dict[str, Any], dict[str, Tensor]]


def _two_calls(
    fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], snapshot: Snapshot
) -> _Outcome:
    """Outputs of two calls in a row from where the check began, and all tensors after them."""
    snapshot.restore()
    outputs = {}
    with _compat.seeded():
        for path in ("output", "output of the second call"):
            found = outputs_by_path(fn(*args, **kwargs), path)
            outputs |= {k: _copied(v) for k, v in found.items()}
    return outputs, snapshot.now()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _compare(
    fn: Callable[..., Any],
    eager: _Outcome,
    compiled: _Outcome,
    before: Mapping[str, Tensor],
    found: Record,
    given: tuple[float | None, float | None],
) -> None:
    __tracebackhide__ = True
    outputs = _different(eager[0], compiled[0], given)
    buffers = []
    for name, value in eager[1].items():
        untouched = before[name].shape == value.shape and not bool(
            differs(before[name], value).any()
        )
        # what eager leaves alone has no rounding to differ by
        limits = (0.0, 0.0) if untouched else given
        buffers += _different({name: value}, {name: compiled[1][name]}, limits)
    if not outputs and not buffers:
        return
    reason = "; ".join([*outputs, *(f"written differently: {text}" for text in buffers)])
    hazards = [f for f in found.findings if f.kind == "mutation hazard"]
    if hazards:
        problems = [
            Problem(
                hazard.kind,
                hazard.file,
                hazard.line,
                hazard.code or hazard.op,
                f"{hazard.reason}; {reason}",
                f"with backend='mtpgraph' this is put right: {hazard.remedy}",
            )
            for hazard in hazards
        ]
    else:
        remedy = _BUFFER if buffers else _OUTPUT
        problems = [Problem.at("compiled is not eager", _place(fn, found), reason, remedy)]
    fail(f"{name_of(fn)} gives another result when it is compiled", problems)


def _place(fn: Callable[..., Any], found: Record) -> tuple[str, int]:
    """The last line that writes in place, where there is one: it is where buffers part."""
    file, first = place_of(fn)
    for graph in reversed(found.graphs):
        for op, where, line in reversed(graph.ops):
            if where and (
                op.rstrip("()").endswith("_") or op in ("setitem", "iadd", "imul", "isub")
            ):
                return where, line
    return file, first


def _different(
    eager: Mapping[str, Any],
    compiled: Mapping[str, Any],
    given: tuple[float | None, float | None],
) -> list[str]:
    """What differs between two sets of values, in words."""
    told = []
    for name in (*eager, *(name for name in compiled if name not in eager)):
        a, b = eager.get(name), compiled.get(name)
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or (not isinstance(a, Tensor) and a != b):
                told.append(f"{name}: eager {a!r}, compiled {b!r}")
        elif (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            told.append(f"{name}: eager {_kind(a)}, compiled {_kind(b)}")
        else:
            where = far(a, b, *tolerance(a.dtype, *given))
            if bool(where.any()):
                told.append(difference(name, a, b, where, ("eager", "compiled")))
    return told


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
