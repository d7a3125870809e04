"""Everything private of torch that this package touches, in one place."""

import contextlib
import os
import re
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils import _pytree as pytree

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
    config = torch._dynamo.config
    with (
        _symbolic_config.patch(use_duck_shape=False),
        config.patch(recompile_limit=max(recompile_limit, config.recompile_limit)),
    ):
        try:
            yield
        except ConstraintViolationError as error:
            raise ValueError(
                "the step fixes a size that was declared to grow with the batch, so one "
                f"compilation cannot serve all: {error}"
            ) from error


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
