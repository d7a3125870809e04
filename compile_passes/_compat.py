"""Everything private of torch that this package touches, in one place."""

import contextlib
import functools
import logging
import os
import re
import shutil
import sys
import sysconfig
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported
from torch._guards import CompileContext, TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._ops import OpOverload
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, guard_or_false
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# torch installs ``patch`` on its config modules when they are imported
_symbolic_config: Any = _config

# the line of a frame in a traceback
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# frames in here are the user's last of all: our own and torch's, then installed libraries
_OWN = (
    str(Path(__file__).parent) + os.sep,
    str(Path(__file__).parent.parent / "ops") + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
)
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))


@contextlib.contextmanager
def symbolic_batch(recompile_limit: int) -> Iterator[None]:
    """Trace with a symbol of its own for each size, even for those that happen to be equal."""
    with _symbolic_config.patch(use_duck_shape=False), many_recompiles(recompile_limit):
        try:
            yield
        except ConstraintViolationError as error:
            raise ValueError(
                "the step fixes a size that was declared to grow with the batch, so one "
                f"compilation cannot serve all: {error}"
            ) from error


@contextlib.contextmanager
def many_recompiles(recompile_limit: int) -> Iterator[None]:
    """A function may be compiled this often."""
    config = torch._dynamo.config
    with config.patch(recompile_limit=max(recompile_limit, config.recompile_limit)):
        try:
            yield
        except BackendCompilerFailed as error:
            # our own words need no wrapping in Dynamo's
            if isinstance(error.inner_exception, ValueError):
                raise error.inner_exception from None
            raise


def is_off() -> bool:
    """``torch.compile`` runs eager code just now: Dynamo is off, or the caller is being traced."""
    return torch._dynamo.config.disable or is_suspended()


def is_suspended() -> bool:
    """``is_off`` for a time: by a stance, or since the caller is being traced."""
    stance = torch._dynamo.eval_frame._stance.stance
    return stance == "force_eager" or torch.compiler.is_compiling()


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Ask the tracer for a symbol in this dimension."""
    torch._dynamo.mark_dynamic(tensor, dim)


def storage_key(tensor: Tensor) -> int:
    """Equal for two tensors, fake ones too, exactly when they share a storage."""
    return tensor.untyped_storage()._cdata


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target, with few launches on a GPU."""
    if targets:
        foreach_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        foreach_copy(targets, sources, non_blocking=True)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of nested containers."""
    return pytree.tree_flatten(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Leaves of nested containers."""
    return pytree.tree_leaves(tree)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Nested containers with a function applied to each leaf."""
    return pytree.tree_map(function, tree)


def tree_unflatten(leaves: list[Any], structure: Any) -> Any:
    """Nested containers from leaves and structure."""
    return pytree.tree_unflatten(leaves, structure)


def example_value(node: fx.Node) -> Any:
    """The fake result that the tracer recorded for a node of a Dynamo-level graph."""
    return node.meta.get("example_value", node.meta.get("val"))


def has_example_value(node: fx.Node) -> bool:
    """The tracer recorded a result for the node, be it None."""
    return "example_value" in node.meta or "val" in node.meta


def size_expression(size: int | torch.SymInt) -> Any:
    """The sympy expression of a size, or the int itself."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], cache_key: bytes
) -> Callable[..., Any]:
    """Compile with Inductor; ``cache_key`` becomes part of its cache keys."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    hook = _CacheKey(cache_key, config.post_grad_custom_post_pass)
    compiled: Any = compile_fx(
        gm, example_inputs, config_patches={"post_grad_custom_post_pass": hook}
    )
    return compiled


class _CacheKey(CustomGraphPass):
    """Changes nothing itself: carries a key into Inductor's caches, past a pass of the user's."""

    def __init__(self, key: bytes, users: Any) -> None:
        self.key = key
        # newer torch takes a list of passes too
        self.users = users if isinstance(users, list | tuple) else [users] if users else []

    def __call__(self, graph: fx.Graph) -> None:
        for users in self.users:
            users(graph)

    def uuid(self) -> Any:
        # without a uuid of its own a user's pass turns the caches off, with us as without us
        users = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.users]
        return None if None in users else (self.key, *users)


def compiled_callables(function: Any) -> tuple[list[Any], int]:
    """What backends returned for the compiled versions of a function, and its graph breaks.

    ``function`` is what ``torch.compile`` returned or was given.
    """
    module = getattr(function, "_orig_mod", None)
    function = _unwrap(function if module is None else function.forward)
    if getattr(function, "__func__", None) is torch.nn.Module._wrapped_call_impl:
        # Dynamo compiles the module's own code behind torch's call machinery
        function = function.__self__.forward
    function = getattr(function, "__func__", function)
    return _compiled_callables(function.__code__, function.__globals__)


def _compiled_callables(code: types.CodeType, namespace: dict[str, Any]) -> tuple[list[Any], int]:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    found, breaks = [], 0
    for entry in reversed(_debug_get_cache_entry_list(code)):
        for name in entry.code.co_names:
            if name.startswith("__compiled_fn"):
                found.append(_unwrap(namespace.get(name)))
            elif name.startswith("__resume_at"):
                resumed, more = _compiled_callables(namespace[name].__code__, namespace)
                found += resumed
                breaks += 1 + more
    return found, breaks


def _unwrap(function: Any) -> Any:
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    return function


def copy_meta(source: fx.Node, target: fx.Node) -> None:
    """A new node stands for an old one: the same fake result, the same line of the user's."""
    target.meta.update(source.meta)


def user_frame(node: fx.Node) -> tuple[str, int]:
    """File and line of the user's that a node comes from; empty and 0 where none was recorded.

    The innermost frame outside of torch, of our ops and, if there is one, of installed packages.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(_OWN)]
    users = [frame for frame in own if not frame[0].startswith(_INSTALLED)]
    for found in (users, own, frames):
        if found:
            return found[-1][0], int(found[-1][1])
    return "", 0


def user_frames(stack_trace: str) -> list[tuple[str, int]]:
    """File and line of the user's in a traceback, outermost first.

    Frames of torch, of our ops and of installed packages are left out, unless nothing else is left.
    """
    frames = [(file, int(line)) for file, line in _FRAME.findall(stack_trace)]
    own = [frame for frame in frames if not frame[0].startswith(_OWN)]
    users = [frame for frame in own if not frame[0].startswith(_INSTALLED)]
    return users or own[-1:] or frames[-1:]


def size_hint(size: int | torch.SymInt) -> int | None:
    """The value of a size in the traced call, without a guard; None where only a run would tell."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if isinstance(hint, int) else None


def source_name(placeholder: fx.Node) -> str:
    """Where Dynamo found an input of its graph, as ``L['x']``; only while the backend is called."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return "" if source is None else _name_of_source(source)


def _name_of_source(source: Any) -> str:
    # a method in older torch, a property in newer
    return source.name if isinstance(source.name, str) else source.name()


def constants_guarded() -> list[tuple[str, str]]:
    """Sources of the Python values that the current trace holds for, and the stacks that read them.

    Only while the backend is called.
    """
    guards = TracingContext.get().guards_context.dynamo_guards
    found = {}
    for guard in guards:
        if guard.create_fn_name() in ("CONSTANT_MATCH", "EQUALS_MATCH"):
            stack = "".join((guard.user_stack or traceback.StackSummary()).format())
            found.setdefault(guard.name, stack)
    return list(found.items())


def sizes_guarded() -> list[tuple[str, int, str]]:
    """Sizes that the current trace was made to hold for: source, size, and what needed it.

    Only while the backend is called.
    """
    fake_mode = TracingContext.get().fake_mode
    shapes = fake_mode.shape_env if fake_mode is not None else None
    if shapes is None:
        return []
    reasons: dict[Any, str] = {}
    for guard in shapes.guards:
        if guard.expr.func.__name__ == "Equality":
            for symbol in guard.expr.free_symbols:
                reasons.setdefault(symbol, guard.sloc.maybe_user_loc or "")
    return [
        (_name_of_source(sources[0]), int(value), reasons.get(symbol, ""))
        for symbol, sources in shapes.var_to_sources.items()
        if sources and (value := shapes.replacements.get(symbol)) is not None and value.is_Integer
    ]


GraphBreak = Unsupported
"""What ``fullgraph=True`` raises where the graph would break."""

FakeRunError = TorchRuntimeError
"""What tracing raises where a call fails on its inputs: shapes that do not fit, for one."""


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


def uncompiled(function: Any) -> Any:
    """What the user wrote, where they hand over the result of ``torch.compile``."""
    return _unwrap(getattr(function, "_orig_mod", function))


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


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Memory that torch allocates holds NaN, or the largest integer, until something is written.

    An allocation of a CPU or CUDA tensor is filled, one in C++ too.
    """
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    enabled = torch.are_deterministic_algorithms_enabled()
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    # torch.use_deterministic_algorithms would import Inductor
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # of kernels that have no deterministic form: nobody asked for one
            warnings.filterwarnings("ignore", message="(?is).*determinis")
            yield
    finally:
        torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill


def reset_dynamo() -> None:
    """Forget every compiled function, and which sizes were seen to change."""
    torch._dynamo.reset()


def same_random_numbers() -> contextlib.AbstractContextManager[Any]:
    """Inductor draws the random numbers that eager draws."""
    from torch._inductor import config

    settings: Any = config
    return settings.patch(fallback_random=True)


_TORCH = str(Path(torch.__file__).parent) + os.sep


def place_of_op(op: OpOverload) -> tuple[str, int]:
    """File and line where a custom op was written; empty and 0 where torch does not know."""
    from torch._library import custom_ops
    from torch._library.simple_registry import singleton

    definition = custom_ops.OPDEFS.get(op._schema.name)
    if definition is not None:
        code = getattr(definition._init_fn, "__code__", None)
        if code is not None:
            return code.co_filename, code.co_firstlineno
    kernel = singleton.find(op._schema.name).fake_impl.kernel
    sources = [kernel.source] if kernel is not None else []
    sources += re.findall(r"registered at (\S+\.py:\d+)", torch._C._dispatch_dump(op._schema.name))
    for source in sources:
        file, _, line = source.rpartition(":")
        if line.isdigit() and not file.startswith(_TORCH):
            return file, int(line)
    return "", 0


def has_fake(op: OpOverload) -> bool:
    """The op can run on fake tensors: it has a fake, or a kernel that serves as one."""
    from torch._library.simple_registry import singleton

    name = op.name()
    return (
        singleton.find(op._schema.name).fake_impl.kernel is not None
        or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        or torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")
    )


def fake_mode() -> Any:
    """A mode that runs ops on shapes alone, data-dependent sizes as unknowns."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def is_known(size: int | torch.SymInt) -> bool:
    """A size that does not depend on data."""
    return isinstance(size, int) or size.node.has_hint()


class OpMode(TorchDispatchMode):
    """Hands every op that runs meanwhile to ``seen(op, args, kwargs, result)``."""

    def __init__(self, seen: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen(func, args, kwargs or {}, result)
        return result


def current_user_frame() -> tuple[str, int]:
    """File and line of the user's that runs now: the innermost, outside of installed packages."""
    own = (*_OWN, str(Path(__file__).parent.parent / "testing") + os.sep)
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *own, *_INSTALLED)):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def guard_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Two sizes are equal; where only their values in tracing say so, a guard holds them to it.

    Adds no guard where the traced values differ, or are not known.
    """
    if size_expression(a) == size_expression(b):
        return True
    hints = [size.node.hint if isinstance(size, torch.SymInt) else size for size in (a, b)]
    return bool(None not in hints and hints[0] == hints[1] and guard_or_false(a == b))


class _Traced(Exception):
    """Ends a compilation whose graph is all that was wanted."""


def trace_only(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    symbolic: list[Tensor],
) -> tuple[fx.GraphModule, Sequence[Any]]:
    """Dynamo's graph of a call and its inputs; nothing of the call is run.

    Args:
        function, args, kwargs: the call
        symbolic: tensors in it whose sizes become symbols, each one of its own; other sizes are
            constants

    Raises:
        whatever Dynamo does on a function that is not one graph
    """
    found: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def keep(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        found.append((gm, example_inputs))
        raise _Traced

    for tensor in symbolic:
        for dim in range(tensor.dim()):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    config = torch._dynamo.config
    # an error that is suppressed would run the function after all
    with (
        _symbolic_config.patch(use_duck_shape=False),
        config.patch(suppress_errors=False, recompile_limit=max(256, config.recompile_limit)),
    ):
        try:
            torch.compile(function, backend=keep, fullgraph=True, dynamic=False)(*args, **kwargs)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _Traced):
                raise
    if not found:
        raise ValueError("the step calls no op on a tensor")
    # Dynamo remembers every backend, and with it what it refers to
    return found.pop()


class _FakeRun(fx.Interpreter):
    """Runs the nodes of a graph on fake tensors; a node that cannot run has its recorded result."""

    def __init__(self, gm: fx.GraphModule, mode: Any, failed: Callable[[fx.Node], None]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._mode, self._failed = mode, failed
        self.node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        if n.op == "get_attr":
            value = self.fetch_attr(str(n.target))
            is_real = isinstance(value, Tensor) and not hasattr(value, "fake_mode")
            return self._mode.from_tensor(value, static_shapes=True) if is_real else value
        higher_order = isinstance(n.target, torch._ops.HigherOrderOperator)
        if n.op in ("placeholder", "output") or not (higher_order or n.op == "call_module"):
            try:
                return super().run_node(n)
            except Exception:
                if not has_example_value(n):
                    raise
        self._failed(n)
        return example_value(n)


class _DecomposingMode(OpMode):
    """Sees what a composite op is made of, in inference mode too, where the dispatcher does not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return super().__torch_dispatch__(func, types, args, kwargs)


def run_on_fakes(
    gm: fx.GraphModule,
    seen: Callable[[fx.Node, Any, Any, Any, Any], None],
    failed: Callable[[fx.Node, Any, Any], None],
) -> dict[fx.Node, Any]:
    """Run a Dynamo-level graph on the fake tensors that its tracer recorded.

    Args:
        gm: the graph
        seen: told of every op of the dispatcher: the node it is part of, op, arguments, result
        failed: told of a node that cannot run: the node, what it was given and what the tracer
            recorded

    Returns:
        the value of each node
    """
    inputs = [example_value(n) for n in gm.graph.nodes if n.op == "placeholder"]
    modes = [value.fake_mode for value in inputs if hasattr(value, "fake_mode")]
    mode = modes[0] if modes else fake_mode()
    run: Any = None

    def tell_failed(node: fx.Node) -> None:
        given = fx.map_arg((node.args, node.kwargs), lambda arg: run.env.get(arg))
        failed(node, given, example_value(node))

    run = _FakeRun(gm, mode, tell_failed)
    guards = mode.shape_env.suppress_guards() if mode.shape_env else contextlib.nullcontext()
    fake_log = logging.getLogger("torch._subclasses.fake_tensor")
    level = fake_log.level
    # torch logs what cannot run; the caller is told
    fake_log.setLevel(logging.CRITICAL)
    try:
        with torch.no_grad(), mode, _DecomposingMode(lambda *call: seen(run.node, *call)), guards:
            run.run(*inputs)
    finally:
        fake_log.setLevel(level)
    return run.env


def size_decisions(gm: fx.GraphModule) -> list[tuple[Any, str, int, str]]:
    """What branches of Python code took for granted of sizes: expression, file, line and code.

    What torch's own kernels and shape functions assume is left out: it chooses how something is
    computed, not what. A place that is not known is empty and 0.
    """
    env = _shape_env(gm)
    if env is None:
        return []
    return [
        (env.replace(guard.expr), *_user_place(gm, str(guard.sloc.maybe_user_loc or "")))
        for guard in env.guards
        if _is_decision(guard.sloc.framework_loc)
    ]


def size_equalities(gm: fx.GraphModule) -> list[Any]:
    """What a trace took for equal among sizes, as far as symbols were not made one by it."""
    env = _shape_env(gm)
    found = [] if env is None else [env.replace(guard.expr) for guard in env.guards]
    return [guard for guard in found if guard.func.__name__ == "Equality"]


def _shape_env(gm: fx.GraphModule) -> Any:
    """What the trace of a graph knows of its sizes; ``None`` where it kept nothing."""
    for node in gm.graph.nodes:
        mode = getattr(example_value(node), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return mode.shape_env
    return None


def _is_decision(frame: Any) -> bool:
    file = getattr(frame, "filename", "")
    if file.startswith(_TORCH):
        place = file.removeprefix(_TORCH).replace(os.sep, "/")
        return place.startswith(("_dynamo/variables/", "_dynamo/symbolic_convert"))
    return not file.startswith(_OWN)


def _user_place(gm: fx.GraphModule, text: str) -> tuple[str, int, str]:
    # code  # the/end/of/a/path.py:33 in function
    code, _, place = text.rpartition("  # ")
    found = re.fullmatch(r"(.*):(\d+) in .*", place)
    if found is None:
        return "", 0, text
    for node in gm.graph.nodes:
        for file, _ in user_frames(node.meta.get("stack_trace") or ""):
            if file.endswith(found[1]):
                return file, int(found[2]), code.strip()
    return "", 0, code.strip()


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use for the CPU; ``None`` if it finds none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = str(get_cpp_compiler())
    except (InvalidCxxCompiler, OSError, RuntimeError):
        return None
    # torch may name one that is not there
    return compiler if shutil.which(compiler.split()[0]) else None


def inductor_cache_dir() -> str:
    """Where Inductor keeps what it compiled, made or not."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return given or default_cache_dir()


def known_at_least_0(expression: Any, *tensors: Tensor) -> bool:
    """An expression of sizes is never negative, by what tracing knows of the symbols in it.

    ``tensors`` are those whose sizes it is of. Adds no guard.
    """
    for tensor in tensors:
        for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset()):
            if isinstance(size, torch.SymInt):
                shape_env: Any = size.node.shape_env
                return bool(shape_env.bound_sympy(expression).lower >= 0)
    return False


def unbacked_symbols(value: Any) -> set[Any]:
    """Symbols in a fake result that stand for what only the data can tell."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    kinds = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, kinds)]
    return set().union(*map(free_unbacked_symbols, leaves))


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Random numbers are the same in every such block, and outside of it go on as if it was not."""
    card = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=card):
        torch.manual_seed(0)
        yield


class _NumberIsRead(Exception):
    pass


class _NumbersMode(_DecomposingMode):
    """Stops what runs where it reads a number from a tensor."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
            raise _NumberIsRead
        return super().__torch_dispatch__(func, types, args, kwargs)


def reads_number(node: fx.Node) -> bool:
    """A call of torch reads a number from a tensor that it was given, as ``x.view(t, -1)`` does.

    The call runs on tensors made like those recorded, which stay as they are.
    """
    given = [example_value(argument) for argument in node.all_input_nodes]
    mode = next((value.fake_mode for value in given if hasattr(value, "fake_mode")), None)
    if mode is None:
        return False

    def anew(argument: fx.Node) -> Any:
        value = example_value(argument)
        return pytree.tree_map_only(
            Tensor,
            lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device),
            value,
        )

    env = mode.shape_env
    guards = env.suppress_guards() if env is not None else contextlib.nullcontext()
    symbols = env.ignore_fresh_unbacked_symbols() if env is not None else contextlib.nullcontext()
    fake_log = logging.getLogger("torch._subclasses.fake_tensor")
    level = fake_log.level
    fake_log.setLevel(logging.CRITICAL)
    try:
        with torch.no_grad(), mode, guards, symbols:
            args, kwargs = fx.map_arg((node.args, node.kwargs), anew)
            with _NumbersMode():
                if node.op == "call_method":
                    getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    function: Any = node.target
                    function(*args, **kwargs)
    except _NumberIsRead:
        return True
    # what cannot run for another reason, such as a shape that is not known, read no number first
    except Exception:
        return False
    finally:
        fake_log.setLevel(level)
    return False


def size_sources(gm: fx.GraphModule) -> dict[fx.Node, tuple[str, int]]:
    """Where Dynamo found the symbolic sizes of a graph: source of the tensor, and dimension."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    modes = (getattr(example_value(node), "fake_mode", None) for node in placeholders)
    env = next((mode.shape_env for mode in modes if mode is not None), None)
    sources = {str(symbol): found for symbol, found in env.var_to_sources.items()} if env else {}
    places: dict[fx.Node, tuple[str, int]] = {}
    for node in placeholders:
        for source in sources.get(node.name, ()):
            match = re.fullmatch(r"(.*)\.size\(\)\[(\d+)\]", _name_of_source(source))
            if match is not None:
                places.setdefault(node, (match[1], int(match[2])))
    return places
