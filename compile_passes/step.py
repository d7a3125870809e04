"""``mtpgraph.compile``: one compilation for every batch size, batches padded to a few sizes.

Padding happens outside of Dynamo: inputs that grow with the batch are copied into buffers of the
next size, the rest of a buffer holds padding, and outputs are cut back. On a GPU each size is one
CUDA graph over its buffers.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import _compat
from .backend import Artifact
from .capture import clone
from .dispatch import Dispatcher
from .inputs import Batched, Static
from .options import Options
from .replay import Replay, Replays
from .stats import Stats
from .tensorrt import require


def compile(
    fn: Callable[..., Any],
    *,
    inputs: Mapping[str, Batched | Static | type[Static]] | None = None,
    **options: Any,
) -> "CompiledStep":
    """Compile a decode step once and serve every batch size with it.

    Args:
        fn: the step: plain PyTorch with the ops of this package, traceable as one graph. Where it
            is not proven that padding cannot reach real rows, a warning says why, and batches run
            at their own sizes. With ``inputs`` for every argument they are padded all the same,
            unless they are of sizes that the step does not take, like an odd number of tokens
            where it views them in pairs. Such a step is padded to those ``sizes`` whose tokens,
            ``next_n`` for each request, are whole groups
        inputs: arguments of ``fn`` that are :class:`Batched` or :class:`Static`. What it does not
            name is inferred at the first call, from what the ops of the step say of their
            arguments. Arguments without tensors are constants, and each new value compiles anew
        **options: fields of :class:`Options`

    Returns:
        a callable with the signature of ``fn``. Runs without gradients. Outputs whose sizes follow
        the batch are cut to the real one. On a GPU they hold until the next call, unless
        ``clone_outputs`` is set

    Raises:
        ValueError: an unknown option or name
        TypeError: a value of the wrong kind
        ModuleNotFoundError: ``engine="tensorrt"`` without torch-tensorrt
    """
    parsed = Options.parse(options)
    if parsed.engine == "tensorrt":
        require()
    return CompiledStep(fn, inputs, parsed)


class CompiledStep:
    """A step that pads, runs compiled code, and cuts the outputs back. See :func:`compile`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Mapping[str, Batched | Static | type[Static]] | None,
        options: Options,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {fn!r}")
        self._fn = fn
        self._signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = self._signature.parameters.values()
        # of a step that takes anything else, every call is bound
        plain = all(parameter.kind is positional for parameter in parameters)
        self._names = [parameter.name for parameter in parameters] if plain else []
        self._options = options
        self._stats = Stats()
        self._replays = Replays(self._signature) if self._names else None
        self._dispatcher = Dispatcher(
            fn, self._signature, inputs, options, self._stats, self._replays
        )
        # these are asked in every call
        self._frozen = self._dispatcher.code.frozen
        self._is_capturing = self._dispatcher.runs.is_capturing
        self._busy = threading.Lock()

    @property
    def inputs(self) -> Mapping[str, Batched | Static]:
        """What each argument is to the batch: as declared, and from the first call as inferred."""
        return self._dispatcher.inputs.specs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on a batch of any size.

        Raises:
            RuntimeError: another thread is in a call of this step, whose buffers it has one of
        """
        # as _alone does it, without the cost of a context manager in every call
        self._enter()
        try:
            outputs = self._serve(args, kwargs)
            return _compat.tree_map(clone, outputs) if self._options.clone_outputs else outputs
        finally:
            self._busy.release()

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Compile, and on a GPU capture a CUDA graph of every size, largest first.

        Args:
            *args, **kwargs: what a call takes; a batch shows dtypes and shapes. Its values are not
                used, caches and states keep theirs: only padding runs. A step that is not padded
                is left to its calls

        Raises:
            ValueError: the batch has one request or token, which does not show what grows
        """
        with self._alone(), torch.no_grad():
            self._dispatcher.warm_up(self._bind(args, kwargs))

    def buffers(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Where the batched inputs of a call are read: written there, they need no copy.

        Args:
            *args, **kwargs: what a call takes; a batch of the size in question

        Returns:
            for each batched input, a tensor of its shape in front of the buffer of that size, to
            be filled and given to the call. A batch of the next size overwrites nothing in it

        Raises:
            ValueError: the batch is above the largest size, or the step is not padded
        """
        with self._alone(), torch.no_grad():
            return self._dispatcher.buffers(self._bind(args, kwargs))

    def stats(self) -> Stats:
        """Counts so far, all compilations together."""
        total = Stats()
        total.merge(self._stats)
        self._dispatcher.code.add_counts(total)
        return total

    def _enter(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("a compiled step serves one call at a time, and is in one just now")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._busy.release()

    def _serve(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for weights in self._frozen:
            # a replay would not look
            weights.check()
        if self._replays is not None and not _compat.is_suspended():
            found = self._replays.find(args, kwargs)
            if found is not None and not self._is_capturing():
                return self._replay(*found)
        with torch.no_grad():
            if _compat.is_off():
                return self._fn(*args, **kwargs)
            return self._dispatcher.serve(self._bind(args, kwargs))

    def _replay(self, replay: Replay, args: Sequence[Any]) -> Any:
        served = replay.served
        self._stats.count_call(served.size, served.tokens, served.padding)
        self._stats.replays += 1
        return replay.run(args)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        if kwargs or len(args) != len(self._names):
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return bound
        # what bind would come to, in a tenth of the time
        arguments: Any = dict(zip(self._names, args, strict=True))
        return inspect.BoundArguments(self._signature, arguments)


def stats(compiled: Callable[..., Any]) -> Stats:
    """Counts of a function compiled by either door.

    Args:
        compiled: what ``torch.compile(fn, backend="mtpgraph")`` or ``mtpgraph.compile(fn)``
            returned

    Raises:
        TypeError: ``compiled`` is neither
    """
    if isinstance(compiled, CompiledStep):
        return compiled.stats()
    if not hasattr(compiled, "_torchdynamo_orig_callable") and not hasattr(compiled, "_orig_mod"):
        raise TypeError(f"compiled must be a compiled function or step, got {compiled!r}")
    callables, breaks = _compat.compiled_callables(compiled)
    artifacts = [entry for entry in callables if isinstance(entry, Artifact)]
    total = Stats()
    for artifact in artifacts:
        total.merge(artifact.stats)
    total.graph_breaks = breaks
    # one graph for each stretch between breaks is planned, and one more for each recompile
    total.recompiles = max(0, len(artifacts) - 1 - breaks)
    return total
