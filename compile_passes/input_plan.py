"""What the arguments of a step are to its batch: declared, inferred at the first call, or both.

A step that was not proven to keep padding away from real rows is not padded, unless its inputs were
all declared: then padding is what the caller asked for, and what stands against it is a warning.

Calls with other constants, dtypes or containers trace other graphs: each such variant is looked at
by itself.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from .infer_batch import Inferred, infer_inputs
from .inputs import Batched, Specs, Static, check_specs, mode
from .options import Options
from .report import Finding, ReportError
from .size_limits import NO_LIMITS, Limits
from .stats import Stats
from .survey import Survey, Surveyor


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
        self._variants: dict[Any, Variant] = {}
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
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = Variant(self._given, self._given, self._options.sizes)
        if not variant.examined and sizes not in variant.undecided:
            self._examine(variant, bound, holding, sizes)
        if variant.by_index and (wrong := _not_as_many(variant, bound)):
            # tables that happened to have as many rows as the batch of the first call
            given = {**variant.given, **dict.fromkeys(wrong, Static())}
            variant = self._variants[key] = Variant(given, given, self._options.sizes)
            self._examine(variant, bound, holding, sizes)
        if variant.pads and self._disagree(variant, bound):
            # counts of requests and tokens that were the same in the first call, and are two
            if sizes not in variant.undecided:
                variant.undecided.add(sizes)
                again = Variant(variant.given, variant.given, self._options.sizes)
                self._examine(again, bound, holding, sizes)
                if again.settled and not (again.pads and self._disagree(again, bound)):
                    variant = self._variants[key] = again
            if variant.pads and self._disagree(variant, bound):
                return dataclasses.replace(variant, pads=False, examined=False), surveys
        variant.follow(bound, self._options)
        return variant, surveys

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
        declared = all(name in self._given for name in holding)
        try:
            inferred = infer_inputs(self._fn, bound, variant.given)
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
            self._report(variant, findings)

    def _no_whole_groups(self, multiple: int) -> Finding:
        reason = (
            f"the step views {multiple} tokens as one group, and no size holds whole groups of "
            f"{self._options.next_n} tokens per request"
        )
        remedy = f"pass next_n={multiple}, or sizes that are multiples of {multiple}"
        return Finding("padding unknown", "infer_batch", "", "", 0, "", reason, remedy)

    def _report(self, variant: Variant, findings: tuple[Finding, ...]) -> None:
        new = [finding for finding in findings if finding not in self._stats.findings]
        self._stats.findings.extend(new)
        if findings and (new or self._options.strict):
            what = "padding may reach real rows" if variant.pads else "batches are not padded"
            error = ReportError(what, findings)
            if self._options.strict:
                variant.examined = variant.settled = variant.pads = False
                raise error
            warnings.warn(str(error), RuntimeWarning, stacklevel=6)


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
