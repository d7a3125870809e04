"""What runs: memory, containers, random numbers, and Inductor."""

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils import _pytree as pytree


def storage_key(tensor: Tensor) -> int:
    """Equal for two tensors, fake ones too, exactly when they share a storage."""
    return tensor.untyped_storage()._cdata


def has_storage(tensor: Tensor) -> bool:
    """Where a tensor lies is known: not of a sparse one, nor of a row as ``vmap`` shows it."""
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


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


def same_random_numbers() -> contextlib.AbstractContextManager[Any]:
    """Inductor draws the random numbers that eager draws."""
    from torch._inductor import config

    settings: Any = config
    return settings.patch(fallback_random=True)


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


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Random numbers are the same in every such block, and outside of it go on as if it was not."""
    card = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=card):
        torch.manual_seed(0)
        yield


def is_autocast() -> bool:
    """Some device computes under autocast just now."""
    return bool(torch._C._is_any_autocast_enabled())
