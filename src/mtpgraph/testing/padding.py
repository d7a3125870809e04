"""Padding rows must reach nothing: neither the rows of real requests nor a cache or state."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..compile_passes import _compat
from ..compile_passes.infer_batch import Inferred, infer_inputs
from ..compile_passes.inputs import Batch, Batched, Specs, Static, check_specs
from ..compile_passes.size_limits import NO_LIMITS, Limits
from ..compile_passes.survey import Surveyor
from . import remedies
from ._common import fail, name_of, outputs_by_path, place_of, user_function
from .op_trace import Call, watch_ops
from .record import Problem
from .state import Snapshot, difference, differs, far, tolerance

Fill = Literal["pad", "nan", "huge"]
"""What float padding holds: the declared value, NaN, or large numbers of both signs.

NaN shows through sums and products; large numbers show through comparisons, which NaN fails.
"""

_WORDS: dict[Fill, str] = {
    "pad": "the declared pad value",
    "nan": "NaN",
    "huge": "large numbers",
}


def assert_padding_safe(
    fn: Callable[..., Any],
    *args: Any,
    inputs: Mapping[str, Batched | Static | type[Static]] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> None:
    """Padding a batch changes no real row, no cache and no state.

    ``fn`` runs in eager on the batch as it is, on the batch padded to two sizes, and on padding
    alone. Padding goes to the end of every batched input: the declared value in inputs of integers
    and bools, and in inputs of floats in turn that value, NaN, and large numbers. Then

    - real rows of the outputs, and everything in caches and states, must hold the same bits
      whatever the padding holds;
    - they must equal the unpadded call's within ``rtol`` and ``atol``, and caches and states must
      keep their bits wherever the unpadded call leaves them alone;
    - a batch of padding alone must change no cache or state.

    All that the calls write is put back.

    Args:
        fn: a function, method or module, or what ``mtpgraph.compile`` made of it
        *args, **kwargs: of one call with real requests
        inputs: for every argument that holds tensors, ``Batched`` or ``Static``; inferred, or
            taken from the compiled step, where it is left out
        rtol, atol: how far a padded call may be from the unpadded one, whose kernels may round
            otherwise; those of ``torch.testing`` for the dtype if left out

    Raises:
        AssertionError: names the first op through which padding got through, its line, and what to
            write instead
        ValueError: ``inputs`` is wrong, or cannot be inferred from this call
    """
    __tracebackhide__ = True
    given = inputs if inputs is not None else getattr(fn, "inputs", None)
    fn = user_function(fn)
    signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    with torch.no_grad():
        multiple, limits = 1, NO_LIMITS
        if given is None:
            inferred = _inferred(fn, bound)
            given, multiple, limits = inferred.inputs, inferred.multiple, inferred.limits
        check = _Check(fn, bound, check_specs(given, signature), rtol, atol, multiple, limits)
        try:
            check.run()
        finally:
            check.snapshot.restore()


def _inferred(fn: Callable[..., Any], bound: inspect.BoundArguments) -> Inferred:
    """What the arguments of a step are to its batch, where the caller does not say."""
    __tracebackhide__ = True
    inferred = infer_inputs(fn, bound, {})
    unknown = [finding for finding in inferred.findings if finding.kind == "padding unknown"]
    if unknown:
        title = f"{name_of(fn)}: how to pad its inputs is not known; declare it, or give inputs"
        fail(title, [Problem.of(finding) for finding in unknown])
    return inferred


class _Check:
    def __init__(
        self,
        fn: Callable[..., Any],
        bound: inspect.BoundArguments,
        specs: Specs,
        rtol: float | None,
        atol: float | None,
        multiple: int,
        limits: Limits,
    ) -> None:
        self.fn = fn
        # tokens that the step views as one group
        self.multiple = multiple
        # sizes that the tables of the step have rows for
        self.limits = limits
        self.bound = bound
        self.specs = {k: v for k, v in specs.items() if isinstance(v, Batched)}
        self.batch = Batch.read(bound, specs, Surveyor(), 1)
        self.rtol, self.atol = rtol, atol
        self.snapshot = Snapshot.take(fn, bound.arguments)
        copied = {id(tensor) for tensor in self.batch.batched.values()}
        # inputs that grow are copied into padded ones: what is written there is of no account
        self.kept = {n: t for n, t in self.snapshot.tensors.items() if id(t) not in copied}

    def run(self) -> None:
        __tracebackhide__ = True
        before = self._states()
        exact = self._call(self.bound)
        sizes = list(self._sizes())
        if not sizes:
            raise ValueError(
                "the batch must leave room for padding in the tables that the step takes rows "
                f"from, got {self.batch.tokens} tokens: pass a smaller batch or longer tables"
            )
        for requests, tokens in sizes:
            padded: dict[Fill, inspect.BoundArguments] = {
                fill: self._padded(requests, tokens, fill) for fill in _WORDS
            }
            ran = {fill: self._call(padded[fill]) for fill in _WORDS}
            for fill in ("nan", "huge"):
                self._same_real_rows(exact, padded, ran, fill)
            self._like_unpadded(exact, ran["pad"], padded["pad"], before)
        for requests, tokens in sizes[:1]:
            for fill in _WORDS:
                blank = self._padded(requests, tokens, fill, blank=True)
                self._touches_nothing(blank, before, fill)

    def _call(self, bound: inspect.BoundArguments) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Outputs and states of one call from where the check began."""
        self.snapshot.restore()
        with _compat.seeded():
            outputs = outputs_by_path(self.fn(*bound.args, **bound.kwargs))
        outputs = {k: v.clone() if isinstance(v, Tensor) else v for k, v in outputs.items()}
        return outputs, self._states()

    def _states(self) -> dict[str, Tensor]:
        return {n: t for n, t in self.snapshot.now().items() if n in self.kept}

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Two padded sizes, in requests and tokens, that no other dimension happens to have."""
        requests, tokens = self.batch.requests, self.batch.tokens
        per_request = max(1, -(-tokens // max(1, requests)))
        per_request = -(-per_request // self.multiple) * self.multiple
        taken = {size for tensor in self.kept.values() for size in tensor.shape if size}
        for name, tensor in self.batch.batched.items():
            taken |= {n for d, n in enumerate(tensor.shape) if n and d != self.specs[name].dim}
        for more in (1, max(3, requests)):
            # nor a multiple of it, so that rows are told from heads and channels
            while any(
                size % padded == 0
                for size in taken
                for padded in (requests + more, tokens + more * per_request)
            ):
                more += 1
            padded_requests, padded_tokens = requests + more, tokens + more * per_request
            tables = self.limits.sizes_of_tables(self.bound)
            if self.limits.allow_padded(padded_requests, padded_tokens, tables):
                yield padded_requests, padded_tokens

    def _padded(
        self, requests: int, tokens: int, fill: Fill, blank: bool = False
    ) -> inspect.BoundArguments:
        """The arguments with every batched input padded; ``blank``: without any real row."""
        inputs = {}
        for name, tensor in self.batch.batched.items():
            spec = self.specs[name]
            real = tensor.narrow(spec.dim, 0, spec.extra) if blank else tensor
            if blank and spec.pad == "last":
                real = torch.zeros_like(real)
            inputs[name] = _pad(real, spec, spec.length(requests, tokens), fill)
        return self.batch.with_inputs(inputs)

    def _same_real_rows(
        self, exact: Any, padded: Mapping[Fill, inspect.BoundArguments], ran: Any, fill: Fill
    ) -> None:
        """Outputs and states must not tell what padding holds."""
        __tracebackhide__ = True
        (outputs, states), (others, other_states) = ran["pad"], ran[fill]
        words = (f"with {_WORDS['pad']} in padding", f"with {_WORDS[fill]}")
        for name, value in _real(outputs, exact[0]).items():
            other = _real(others, exact[0]).get(name)
            where = _unequal(value, other)
            if where is None:
                continue
            if isinstance(where, Tensor) and isinstance(other, Tensor):
                shown = difference(name, value, other, where, words)
            else:
                shown = f"{name} is of another shape or kind"
            told = f"real rows are not the same: {shown}"
            self._refuse(told, padded["pad"], padded[fill], exact=False)
        for name, value in states.items():
            where = _unequal(value, other_states[name])
            if where is not None:
                shown = difference(name, value, other_states[name], where, words)
                told = f"padding is written: {shown}"
                self._refuse(told, padded["pad"], padded[fill], exact=False)

    def _like_unpadded(
        self, exact: Any, ran: Any, padded: inspect.BoundArguments, before: Mapping[str, Tensor]
    ) -> None:
        """A padded call gives what the unpadded one gives."""
        __tracebackhide__ = True
        words = ("without padding", "with padding")
        for name, value in exact[0].items():
            other = _real(ran[0], exact[0]).get(name)
            if not isinstance(value, Tensor) or not isinstance(other, Tensor):
                if type(value) is not type(other) or (
                    not isinstance(value, Tensor) and value != other
                ):
                    told = f"{name} is {value!r} without padding, {other!r} with padding"
                    self._refuse(told, self.bound, padded, exact=True)
                continue
            if value.shape != other.shape or value.dtype != other.dtype:
                told = (
                    f"{name} has shape {list(value.shape)} without padding, and its real part "
                    f"{list(other.shape)} with padding"
                )
                self._refuse(told, self.bound, padded, exact=True)
            where = far(value, other, *tolerance(value.dtype, self.rtol, self.atol))
            if bool(where.any()):
                told = (
                    f"the size of the batch shows: {difference(name, value, other, where, words)}"
                )
                self._refuse(told, self.bound, padded, exact=True)
        for name, value in exact[1].items():
            other = ran[1][name]
            if value.shape != other.shape:
                continue
            where = far(value, other, *tolerance(value.dtype, self.rtol, self.atol))
            if value.itemsize == 1:
                # a code of a quantised value may turn where its value was rounded otherwise
                where = torch.zeros_like(where)
            if before[name].shape == value.shape:
                where |= ~differs(before[name], value) & differs(value, other)
            if bool(where.any()):
                told = f"padding is written: {difference(name, value, other, where, words)}"
                self._refuse(told, self.bound, padded, exact=True)

    def _touches_nothing(
        self, blank: inspect.BoundArguments, before: Mapping[str, Tensor], fill: Fill
    ) -> None:
        """Padding alone leaves every cache and state as it is."""
        __tracebackhide__ = True
        _, states = self._call(blank)
        for name, value in states.items():
            where = _unequal(before[name], value)
            if where is None:
                continue
            words = ("before", f"after a batch of padding alone, with {_WORDS[fill]} in it")
            shown = difference(name, before[name], value, where, words)
            told = f"padding is written: {shown}"
            problem = self._first_write(blank, name, before[name], told)
            fail(f"{name_of(self.fn)} is not safe to pad", [problem])

    def _first_write(
        self, bound: inspect.BoundArguments, name: str, before: Tensor, told: str
    ) -> Problem:
        """The op after which a state is not what it was."""
        self.snapshot.restore()
        found: list[Call] = []
        tensor = self.kept[name]

        def seen(call: Call) -> None:
            if not found and tensor.shape == before.shape and bool(differs(tensor, before).any()):
                found.append(call)

        with watch_ops(seen), _compat.seeded():
            self.fn(*bound.args, **bound.kwargs)
        return self._problem(found[0] if found else None, told)

    def _refuse(
        self, told: str, a: inspect.BoundArguments, b: inspect.BoundArguments, *, exact: bool
    ) -> None:
        """Fail with the first op whose real rows differ between two calls."""
        __tracebackhide__ = True
        first: list[Call] = []
        self.snapshot.restore()
        with watch_ops(first.append, keep=True), _compat.seeded():
            self.fn(*a.args, **a.kwargs)
        self.snapshot.restore()
        culprit: list[Call] = []
        calls = iter(first)
        grown = self._grown(b)

        def seen(call: Call) -> None:
            before = next(calls, None)
            if culprit or before is None or before.name != call.name:
                return
            for old, new in zip(before.results, call.results, strict=False):
                if self._rows_differ(old, new, grown, exact):
                    culprit.append(call)
                    return

        with watch_ops(seen, keep=True), _compat.seeded():
            self.fn(*b.args, **b.kwargs)
        problem = self._problem(culprit[0] if culprit else None, told)
        fail(f"{name_of(self.fn)} is not safe to pad", [problem])

    def _problem(self, call: Call | None, told: str) -> Problem:
        if call is None:
            return Problem.at("padding", place_of(self.fn), told, remedies.of_row_mixing(""))
        reason = f"padding gets through at {call.name}; {told}"
        remedy = remedies.of_row_mixing(call.name, writes=call.writes and call.is_custom)
        return Problem.at("padding", (call.file, call.line), reason, remedy)

    def _grown(self, padded: inspect.BoundArguments) -> list[tuple[int, int]]:
        """Sizes with padding, and how much of each is real."""
        sizes = set()
        for name, tensor in self.batch.batched.items():
            dim = self.specs[name].dim
            sizes.add((padded.arguments[name].shape[dim], tensor.shape[dim]))
        return sorted(sizes, reverse=True)

    def _rows_differ(
        self, old: Tensor, new: Tensor, grown: Sequence[tuple[int, int]], exact: bool
    ) -> bool:
        """Two results of the same op differ in what is no padding."""
        if old.dtype != new.dtype or old.dim() != new.dim():
            return True
        for dim, size in enumerate(new.shape):
            real = _real_part(size, grown)
            # a dimension may hold rows several times: heads of tokens, flattened
            if real is not None and (size != real):
                keep = min(real, old.shape[dim])
                old, new = old.narrow(dim, 0, keep), new.narrow(dim, 0, keep)
        if old.shape != new.shape:
            return True
        if exact:
            return bool(far(old, new, *tolerance(old.dtype, self.rtol, self.atol)).any())
        return bool(differs(old, new).any())


def _real_part(size: int, grown: Sequence[tuple[int, int]]) -> int | None:
    for padded, real in grown:
        if padded and size and size % padded == 0:
            return size // padded * real
    return None


def _pad(real: Tensor, spec: Batched, length: int, fill: Fill) -> Tensor:
    """``real`` padded along ``spec.dim``; floats lie between rows of NaN that belong to nobody."""
    shape = list(real.shape)
    shape[spec.dim] = length
    floats = real.is_floating_point() or real.is_complex()
    guard = _guard_rows(shape, real.itemsize) if floats and spec.dim == 0 else 0
    held = torch.empty(
        [shape[0] + 2 * guard, *shape[1:]] if guard else shape, dtype=real.dtype, device=real.device
    )
    if guard:
        held.fill_(math.nan)
    padded = held.narrow(0, guard, length) if guard else held
    have = real.shape[spec.dim]
    padded.narrow(spec.dim, 0, have).copy_(real)
    rest = padded.narrow(spec.dim, have, length - have)
    if spec.pad == "last":
        rest.copy_(real.narrow(spec.dim, have - 1, 1).expand_as(rest) if have else rest.zero_())
    elif not floats or fill == "pad":
        rest.fill_(spec.pad)
    elif fill == "nan":
        rest.fill_(math.nan)
    else:
        # far from anything real, and finite in half precision after a product or two
        rest.fill_(300.0)
        negative = (length - have) // 2
        rest.narrow(spec.dim, length - have - negative, negative).neg_()
    return padded


def _guard_rows(shape: Sequence[int], itemsize: int) -> int:
    """Rows in front that keep the alignment that kernels may count on."""
    row = math.prod(shape[1:]) * itemsize
    return 256 // math.gcd(256, row) if row else 0


def _real(outputs: Mapping[str, Any], exact: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of a padded call, cut to the sizes of the unpadded call's."""
    cut = {}
    for name, value in outputs.items():
        like = exact.get(name)
        if isinstance(value, Tensor) and isinstance(like, Tensor) and value.dim() == like.dim():
            for dim, size in enumerate(like.shape):
                if value.shape[dim] > size:
                    value = value.narrow(dim, 0, size)
        cut[name] = value
    return cut


def _unequal(a: Any, b: Any) -> Any:
    """Where two values differ, True for all over, None where they are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return True
        where = differs(a, b)
        return where if bool(where.any()) else None
    if type(a) is not type(b):
        return True
    return None if isinstance(a, Tensor) or a == b else True
