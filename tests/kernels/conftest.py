"""Kernels run in Triton's interpreter where there is no card, and not at all without Triton."""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip(
            "needs triton, which this build of torch comes without", allow_module_level=True
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector):
    if importlib.util.find_spec("triton") is None:
        return _Skipped.from_parent(parent, path=module_path)
    return None


@pytest.fixture(scope="session", autouse=True)
def loop_bounds() -> None:
    """Let a scalar of the interpreter be a loop bound: Triton 3.6 converts its array of one
    element with ``int``, which NumPy 2.4 refuses."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


@pytest.fixture(scope="session", autouse=True)
def patches_of_a_launch() -> None:
    """Let the interpreter replace the functions of the language once in each launch: Triton does so
    at each call of a function, which takes longer than most functions do."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[frozenset[str]] = set()

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()

    @functools.cache
    def languages(fn: Any) -> frozenset[str]:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        names = frozenset(module.__name__ for module in modules)
        return names & {"triton.language", "triton.language.core"}

    def patch_once(fn: Any) -> Any:
        found = languages(fn)
        if found in patched:
            return interpreter._LangPatchScope()
        patched.add(found)
        return patch(fn)

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._patch_lang = patch_once


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on compute capability 9.0, whose kernels take all that the test gives them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    from mtpgraph.kernels import _indexer_logits_hopper, _sparse_mla_decode_hopper

    for kernel in (_indexer_logits_hopper, _sparse_mla_decode_hopper):

        def supports(*inputs: Any, taken: Callable[..., bool] = kernel.supports) -> bool:
            assert taken(*inputs)
            return True

        monkeypatch.setattr(kernel, "supports", supports)


@pytest.fixture
def device() -> str:
    """Where kernels run: on the card, or in the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
