"""What the arguments of a step are to its batch: declared, inferred at the first call, or both.

A step that was not proven to keep padding away from real rows is not padded, unless its inputs were
all declared: then padding is what the caller asked for, and what stands against it is a warning.

Calls with other constants, dtypes or containers trace other graphs: each such variant is looked at
by itself.
"""

import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from .infer_batch import Inferred, infer_inputs
from .inputs import Batched, Specs, Static, check_specs, mode
from .options import Options
from .relations import Bounds
from .report import Finding, ReportError
from .size_limits import NO_LIMITS, Limits
from .stats import Stats
from .survey import Survey, Surveyor

_HERE = os.path.dirname(__file__) + os.sep


@dataclasses.dataclass(eq=False)
class Variant:
    """What is known of calls of one variant.

    Attributes:
        given: what was declared of the arguments, and what calls have shown not to grow
        specs: what each argument that holds tensors is; what was declared until a call settles it
        pads: batches are padded, or run at their own sizes
        sizes: what they are padded to, over the tables of the last call
        uniform: the step takes equally many tokens of each request
        multiple: what divides the tokens of a batch that can be padded
        by_index: inputs that grow, as far as one call has shown
        limits: what must hold of the size of a batch
        tables: sizes of the tables in the limits, of the last call
        proven: padding is known to stay behind real rows
        settled: a call has shown what the arguments are
        examined: a call has shown whether anything stands against padding
        declared: the caller said of every argument what it is
        fixed: sizes that do not grow, and tensors in containers, of the call that settled it
    """

    given: Specs
    specs: Specs
    sizes: tuple[int, ...]
    pads: bool = False
    uniform: bool = False
    multiple: int = 1
    by_index: frozenset[str] = frozenset()
    limits: Limits = NO_LIMITS
    tables: tuple[int, ...] = ()
    proven: bool = False
    settled: bool = False
    examined: bool = False
    declared: bool = False
    fixed: Any = None
    # sizes of the calls that could not tell, so that none of them is looked at twice
    undecided: set[Any] = dataclasses.field(default_factory=set)
    possible: dict[tuple[int, ...], tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def batched(self) -> dict[str, Batched]:
        """The arguments that grow."""
        return {name: spec for name, spec in self.specs.items() if isinstance(spec, Batched)}

    def symbolic_size(self, size: int, next_n: int) -> int:
        """The requests that symbolic code runs a size with, of ``next_n`` tokens each.

        Whatever the step counts, the tracer takes one of it for a constant: there are two groups of
        tokens at least.
        """
        if self.uniform or self.multiple > 1:
            size = max(size, 2)
            while size * next_n < 2 * self.multiple or size * next_n % self.multiple:
                size += 1
        return size

    def follow(self, bound: inspect.BoundArguments, options: Options) -> None:
        """Take the sizes that are possible with the tables of a call."""
        self.tables = self.limits.sizes_of_tables(bound)
        found = self.possible.get(self.tables)
        if found is None:
            found = self.possible[self.tables] = tuple(
                size for size in options.sizes if self._is_possible(size, options)
            )
        self.sizes = found

    def _is_possible(self, size: int, options: Options) -> bool:
        next_n = options.next_n
        if size * next_n % self.multiple:
            return False
        if size not in options.specialize:
            size = self.symbolic_size(size, next_n)
            requests, tokens = max(size, 2), max(size * next_n, 2)
        else:
            return self.limits.allow_padded(size, size * next_n, self.tables)
        return self.limits.allow_padded(requests, tokens, self.tables) and self._has_room(
            requests, tokens
        )

    def _has_room(self, requests: int, tokens: int) -> bool:
        """Batches of other sizes are possible, too: of a single one the tracer makes a constant.

        A table of two rows leaves no more than two requests, and symbolic code has two at least.
        """

        def is_possible(more_requests: int, more_groups: int) -> bool:
            size = requests + more_requests, tokens + more_groups * self.multiple
            is_large = size[0] >= 2 and size[1] >= 2 * self.multiple
            return is_large and self.limits.allow(*size, self.tables)

        some, any_ = (1, -1), (0, 1, -1, 1024)
        return any(is_possible(more, groups) for more in some for groups in any_) and any(
            is_possible(more, groups) for groups in some for more in any_
        )


class InputPlan:
    """Settles each variant at its first call, or at a later one where that could not tell.

    Attributes:
        specs: what the arguments are, those of all calls together
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: inspect.Signature,
        inputs: Mapping[str, Batched | Static | type[Static]] | None,
        options: Options,
        stats: Stats,
        surveyor: Surveyor,
    ) -> None:
        self._fn = fn
        self._given = {} if inputs is None else check_specs(inputs, signature)
        self._options = options
        self._stats = stats
        self._surveyor = surveyor
        # calls alike but for sizes that do not grow are one variant until a graph shows otherwise
        self._variants: dict[Any, list[Variant]] = {}
        self._tried: set[Any] = set()
        self._sizes: dict[Any, torch.Size | None] = {}
        self.specs: Specs = self._given

    def settle(self, bound: inspect.BoundArguments) -> tuple[Variant, dict[str, Survey]]:
        """What is known of calls like this one, with what this one shows.

        Returns:
            that, and what lies in the arguments that are no tensors, by name

        Raises:
            ReportError: under ``strict``, what stands against padding
            ValueError: the step has another number of tokens per request than ``next_n``
            whatever Dynamo does on a step that is not one graph
        """
        surveys = {
            name: self._surveyor.look(name, value)
            for name, value in bound.arguments.items()
            if not isinstance(value, Tensor)
        }
        key, holding, sizes = _look(bound, surveys)
        group = self._variants.setdefault(key, [])
        if not group:
            group.append(Variant(self._given, self._given, self._options.sizes))
        variant = group[0] if len(group) == 1 else _like(group, bound, surveys)
        at = group.index(variant)
        if not variant.examined and sizes not in variant.undecided:
            self._examine(variant, bound, holding, sizes)
        if variant.by_index and (wrong := _not_as_many(variant, bound)):
            # tables that happened to have as many rows as the batch of the first call
            given = {**variant.given, **dict.fromkeys(wrong, Static())}
            variant = group[at] = Variant(given, given, self._options.sizes)
            self._examine(variant, bound, holding, sizes)
        if variant.pads and self._disagree(variant, bound):
            # counts of requests and tokens that were the same in the first call, and are two
            if sizes not in variant.undecided:
                variant.undecided.add(sizes)
                again = Variant(variant.given, variant.given, self._options.sizes)
                self._examine(again, bound, holding, sizes)
                if again.settled and not (again.pads and self._disagree(again, bound)):
                    variant = group[at] = again
            if variant.pads and self._disagree(variant, bound):
                return dataclasses.replace(variant, pads=False, examined=False), surveys
        if variant.fixed is None and variant.settled:
            variant.fixed = _fixed(variant.specs, bound, surveys)
        elif variant.examined and not variant.pads and not variant.declared:
            ones = _ones(_fixed(variant.specs, bound, surveys))
            # of one of something it is another graph, which may be padded
            if ones != _ones(variant.fixed) and (key, ones) not in self._tried:
                self._tried.add((key, ones))
                variant = self.look_again(variant, bound, surveys) or variant
        self._watch_sizes(key, variant, bound)
        variant.follow(bound, self._options)
        return variant, surveys

    def look_again(
        self, variant: Variant, bound: inspect.BoundArguments, surveys: Mapping[str, Survey]
    ) -> Variant | None:
        """What is known of a call whose graph is not as its variant has it.

        Returns:
            a variant of its own, from now on for calls with these sizes; ``None`` where these sizes
            are those that the variant was settled with
        """
        if variant.declared or variant.fixed == _fixed(variant.specs, bound, surveys):
            return None
        key, holding, sizes = _look(bound, surveys)
        new = Variant(self._given, self._given, self._options.sizes)
        try:
            self._examine(new, bound, holding, sizes)
        except ReportError:
            raise
        except Exception:
            # the call itself will say what is wrong with it
            return None
        if not new.settled:
            return None
        new.fixed = _fixed(new.specs, bound, surveys)
        new.follow(bound, self._options)
        self._variants[key].append(new)
        return new

    def _watch_sizes(self, key: Any, variant: Variant, bound: inspect.BoundArguments) -> None:
        """Say of an argument that is of another size now and then that nothing ties it to a batch.

        It is right as it is, and compiled anew for each size.
        """
        tables = {name for _, name, _ in variant.limits.tables}
        for name, spec in variant.specs.items() if variant.pads else ():
            value = bound.arguments.get(name)
            if not isinstance(spec, Static) or name in self._given or not isinstance(value, Tensor):
                continue
            place = (key, name)
            if name in tables or self._sizes.get(place, value.shape) is None:
                continue
            if self._sizes.setdefault(place, value.shape) != value.shape:
                self._stats.findings.append(_changed(name, self._sizes[place], value.shape))
                self._sizes[place] = None

    @property
    def bounds(self) -> Bounds:
        """The largest batch that is padded to."""
        largest = max(2, *self._options.sizes)
        return Bounds(largest, largest * self._options.next_n)

    def _disagree(self, variant: Variant, bound: inspect.BoundArguments) -> bool:
        """Arguments that were inferred to grow are not all for one number of requests or tokens.

        Where the caller declared them, that is the caller's mistake.
        """
        counts = _counts(variant, bound)
        inferred = variant.batched.keys() - self._given.keys()
        return bool(inferred) and any(len(found) > 1 for found in counts.values())

    def _examine(
        self, variant: Variant, bound: inspect.BoundArguments, holding: list[str], sizes: Any
    ) -> None:
        declared = variant.declared = all(name in self._given for name in holding)
        try:
            inferred = infer_inputs(self._fn, bound, variant.given, self.bounds)
        except Exception:
            if not declared:
                raise
            # what is wrong with the step or its arguments, the call itself says better
            inferred = Inferred(dict(self._given), (), (), row_safe=False, decided=False)
        if not variant.settled and (declared or inferred.decided):
            variant.settled = True
            variant.specs = inferred.inputs
            self.specs = {**self.specs, **variant.specs}
            variant.pads = bool(variant.batched) and (declared or inferred.row_safe)
            variant.by_index = inferred.by_index if variant.pads else frozenset()
        if not inferred.decided:
            variant.undecided.add(sizes)
            return
        variant.examined = True
        ratio = inferred.tokens_per_request
        variant.uniform, variant.multiple = ratio is not None, inferred.multiple
        variant.proven, variant.limits = inferred.row_safe, inferred.limits
        variant.possible.clear()
        variant.pads = variant.pads and inferred.paddable
        if ratio is not None and ratio != self._options.next_n:
            variant.examined = variant.settled = variant.pads = False
            raise ValueError(
                f"next_n must be {ratio}, the tokens of each request in this step, got "
                f"{self._options.next_n}"
            )
        findings = inferred.findings
        if variant.pads and all(n * self._options.next_n % inferred.multiple for n in
                                self._options.sizes):  # fmt: skip
            variant.pads = False
            findings += (self._no_whole_groups(inferred.multiple),)
        if variant.pads or not declared or findings != inferred.findings or not inferred.paddable:
            self.report(variant, findings, padded=variant.pads)

    def _no_whole_groups(self, multiple: int) -> Finding:
        reason = (
            f"the step views {multiple} tokens as one group, and no size holds whole groups of "
            f"{self._options.next_n} tokens per request"
        )
        remedy = f"pass next_n={multiple}, or sizes that are multiples of {multiple}"
        return Finding("padding unknown", "infer_batch", "", "", 0, "", reason, remedy)

    def report(self, variant: Variant, findings: tuple[Finding, ...], *, padded: bool) -> None:
        """Say what stands against padding.

        Args:
            variant: what is known of the calls that it is said of
            findings: what was found
            padded: batches are padded all the same

        Raises:
            ReportError: under ``strict``
        """
        new = [finding for finding in findings if finding not in self._stats.findings]
        self._stats.findings.extend(new)
        if findings and (new or self._options.strict):
            what = "padding may reach real rows" if padded else "batches are not padded"
            error = ReportError(what, findings)
            if self._options.strict:
                variant.examined = variant.settled = variant.pads = False
                raise error
            warnings.warn(str(error), RuntimeWarning, stacklevel=_above())


def _above() -> int:
    """How far up the caller of this package is, for a warning."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    return max(1, level)


def _look(
    bound: inspect.BoundArguments, surveys: Mapping[str, Survey]
) -> tuple[Any, list[str], Any]:
    """What sets a variant apart, which arguments hold tensors, and the sizes of those that are
    tensors."""
    key: list[Any] = [mode()]
    holding, sizes = [], []
    for name, value in bound.arguments.items():
        survey = surveys.get(name)
        if survey is None:
            key.append((name, value.dtype, value.device, value.dim()))
            sizes.append(value.shape)
        else:
            key.append((name, survey.structure))
        if survey is None or survey.tensors:
            holding.append(name)
    return tuple(key), holding, tuple(sizes)


def _fixed(
    specs: Specs, bound: inspect.BoundArguments, surveys: Mapping[str, Survey]
) -> tuple[Any, ...]:
    """What of a call does not grow: sizes, and what tensors lie in containers."""
    found: list[Any] = []
    for name, value in bound.arguments.items():
        survey, spec = surveys.get(name), specs.get(name)
        if survey is not None:
            found.append(tuple((tensor.shape, tensor.dtype) for tensor in survey.tensors))
        else:
            grown = spec.dim if isinstance(spec, Batched) else None
            found.append(tuple(n for dim, n in enumerate(value.shape) if dim != grown))
    return tuple(found)


def _like(
    group: list[Variant], bound: inspect.BoundArguments, surveys: Mapping[str, Survey]
) -> Variant:
    """The variant that was settled by a call with these sizes, or by one that is traced alike."""
    known = [(variant, _fixed(variant.specs, bound, surveys)) for variant in group]
    alike = [variant for variant, fixed in known if _ones(variant.fixed) == _ones(fixed)]
    return next(
        (variant for variant, fixed in known if variant.fixed == fixed), (*alike, *group)[0]
    )


def _ones(fixed: Any) -> Any:
    """Which sizes are none or one: a tracer takes these for constants, and others for symbols."""
    if isinstance(fixed, int):
        return min(fixed, 2)
    return tuple(map(_ones, fixed)) if isinstance(fixed, tuple) else fixed


def _changed(name: str, before: Any, now: Any) -> Finding:
    reason = (
        f"{name} was {list(before)} and is {list(now)}: nothing in the step ties it to the batch, "
        "so the step is compiled anew for each of its sizes"
    )
    remedy = f'declare inputs={{"{name}": Batched(...)}} or Static'
    return Finding("padding unknown", "infer_batch", "", "", 0, name, reason, remedy)


def _counts(
    variant: Variant, bound: inspect.BoundArguments, leave_out: Collection[str] = ()
) -> dict[str, set[int]]:
    """For how many requests, and how many tokens, the arguments that grow are."""
    counts: dict[str, set[int]] = {"request": set(), "token": set()}
    for name, spec in variant.batched.items():
        value = bound.arguments.get(name)
        if name not in leave_out and isinstance(value, Tensor) and spec.dim < value.dim():
            counts[spec.per].add(value.shape[spec.dim] - spec.extra)
    return counts


def _not_as_many(variant: Variant, bound: inspect.BoundArguments) -> list[str]:
    """Inputs that were taken for rows of a batch as something indexes them, and are not of this
    one."""
    counts = _counts(variant, bound, leave_out=variant.by_index)
    return [
        name
        for name in sorted(variant.by_index)
        if isinstance(spec := variant.specs.get(name), Batched)
        and isinstance(value := bound.arguments.get(name), Tensor)
        and counts[spec.per]
        and value.shape[spec.dim] - spec.extra not in counts[spec.per]
    ]
