"""Watching Dynamo at work, and keeping it quiet."""

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import fx
from torch._dynamo.exc import Unsupported
from torch._guards import CompileContext


@contextlib.contextmanager
def quiet_tracing() -> Iterator[None]:
    """Keep off the log what tracing has to say: whoever traces here says it in their own words."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._subclasses")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def watch_graph_breaks(found: Callable[[str], None]) -> Iterator[None]:
    """Call ``found`` with what Dynamo says of each graph break, and keep it off the log."""
    breaks = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    handler = logging.Handler()
    handler.emit = lambda record: found(record.getMessage())
    before = breaks.level, breaks.propagate
    breaks.addHandler(handler)
    breaks.setLevel(logging.DEBUG)
    breaks.propagate = False
    try:
        yield
    finally:
        breaks.removeHandler(handler)
        breaks.setLevel(before[0])
        breaks.propagate = before[1]


class CompileObserver(Protocol):
    """Is told of Dynamo's work by :func:`observe_compiles`."""

    def graph(
        self, compile_id: str, attempt: int, gm: fx.GraphModule, place: "Place"
    ) -> Callable[[], None]:
        """A graph goes to the backend; what is returned is called once that has compiled it.

        A second attempt of a compilation replaces the first.
        """
        ...

    def graph_break(self, message: str, stack_trace: str) -> None:
        """The trace leaves the graph, or gives the function up."""

    def recompile(self, compile_id: str, reasons: list[str], stack_trace: str, place: "Place"):
        """A compiled function is compiled again; one reason for each version it had."""


Place = tuple[str, str, int]
"""Name, file and first line of a function."""


_observers: list[CompileObserver] = []


@contextlib.contextmanager
def observe_compiles(observer: CompileObserver) -> Iterator[None]:
    """Tell ``observer`` of every compilation of Dynamo, whatever the backend.

    Of several that are nested, only the innermost is told.
    """
    with contextlib.ExitStack() as stack:
        if not _observers:
            for owner, name, hook in _compile_hooks():
                original = getattr(owner, name)
                setattr(owner, name, hook(original))
                stack.callback(setattr, owner, name, original)
        _observers.append(observer)
        stack.callback(_observers.pop)
        yield


def _compile_hooks() -> list[tuple[Any, str, Callable[..., Any]]]:
    from torch._dynamo import convert_frame, output_graph, symbolic_convert

    return [
        (output_graph.OutputGraph, "call_user_compiler", _tell_graph),
        (symbolic_convert.InstructionTranslatorBase, "log_graph_break", _tell_graph_break),
        (convert_frame, "get_and_maybe_log_recompilation_reasons", _tell_recompile),
    ]


def _tell_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_user_compiler(self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        context = CompileContext.get()
        code = self.co_fields
        place = (code["co_name"], code["co_filename"], code["co_firstlineno"])
        # the backend may rewrite the graph, so it is looked at before
        done = _observers[-1].graph(str(context.compile_id), context.attempt, gm, place)
        compiled = original(self, gm, *args, **kwargs)
        done()
        return compiled

    return call_user_compiler


def _tell_graph_break(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def log_graph_break(self: Any, code_options: Any, reason: Any, exc: Any) -> None:
        if not exc.logged:
            # a loop that breaks is given up with a reason of its own: the cause says more
            cause = exc.__cause__ if "graph break in loop" in str(exc) else None
            told = cause if isinstance(cause, Unsupported) else exc
            stack = getattr(told, "real_stack", None) or getattr(exc, "real_stack", None) or []
            message = getattr(told, "msg", None) or str(told)
            _observers[-1].graph_break(message, "".join(traceback.format_list(stack)))
        original(self, code_options, reason, exc)

    return log_graph_break


def _tell_recompile(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_reasons(entries: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        reasons = original(entries, frame, *args, **kwargs)
        # a function compiled for another backend was not compiled again for this one
        told = [reason for reason in reasons if "BACKEND_MATCH" not in reason]
        if told or not reasons:
            compile_id = str(CompileContext.current_compile_id())
            code = frame.f_code
            place = (code.co_name, code.co_filename, code.co_firstlineno)
            # newer torch appends the stack that read the guarded value
            traces = [reason.partition("\nUser stack trace:\n")[2] for reason in told]
            reasons_alone = [reason.partition("\nUser stack trace:\n")[0] for reason in told]
            _observers[-1].recompile(compile_id, reasons_alone, next(iter(traces), ""), place)
        return reasons

    return get_reasons
