"""Fake tensors: what the tracer recorded, and graphs run on them."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ._compat_nodes import example_value, has_example_value
from ._compat_sizes import size_expression


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


def is_fake(value: Any) -> bool:
    """A tensor without memory, as the tracer records them."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def with_own_storage(fake: Any) -> Any:
    """The same tensor in a storage of its own, at the same offset of it."""
    size = fake.untyped_storage().nbytes()
    with fake.fake_mode, torch.no_grad():
        storage = torch.empty(size, dtype=torch.uint8, device=fake.device).untyped_storage()
        own = torch.empty(0, dtype=fake.dtype, device=fake.device)
        return own.set_(storage, fake.storage_offset(), fake.shape, fake.stride())


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


class _FakeRun(fx.Interpreter):
    """Runs the nodes of a graph on fake tensors; a node that cannot run has its recorded result.

    So has one that takes a size for the number that it is in the batch at hand: C++ code may.
    """

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
                result = super().run_node(n)
                if not _lost_symbols(example_value(n), result):
                    return result
            except Exception:
                if not has_example_value(n):
                    raise
        self._failed(n)
        return example_value(n)


def _lost_symbols(recorded: Any, result: Any) -> bool:
    """A size that the tracer recorded with symbols in it is a plain number in a result."""
    return any(
        getattr(size_expression(size), "free_symbols", None) and isinstance(now, int)
        for old, new in zip(pytree.tree_leaves(recorded), pytree.tree_leaves(result), strict=False)
        if isinstance(old, Tensor) and isinstance(new, Tensor)
        for size, now in zip(old.shape, new.shape, strict=False)
    )


def op_called(node: fx.Node) -> OpOverload | None:
    """The op behind a function of torch that is bound to C++, where there is just one."""
    name = getattr(node.target, "__name__", "")
    bound: Any = torch._C
    if node.op != "call_function" or getattr(bound._nn, name, None) is not node.target:
        return None
    packet = getattr(torch.ops.aten, name, None)
    return packet.default if packet is not None and packet.overloads() == ["default"] else None


@functools.cache
def _is_composite(op: OpOverload) -> bool:
    try:
        key = "CompositeImplicitAutograd"
        return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
    except RuntimeError:
        # sizes are asked for by ops that the dispatcher does not know
        return False


class _DecomposingMode(OpMode):
    """Sees what a composite op is made of, in inference mode too, where the dispatcher does not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and _is_composite(func):
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
