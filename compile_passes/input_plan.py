"""What the arguments of a step are to its batch: declared, inferred at the first call, or both.

A step that was not proven to keep padding away from real rows is not padded, unless its inputs were
all declared: then padding is what the caller asked for, and what stands against it is a warning.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from .infer_batch import Inferred, infer_inputs
from .inputs import Batched, Specs, Static, check_specs, holding_tensors, sizes_of
from .options import Options
from .report import Finding, ReportError
from .stats import Stats


class InputPlan:
    """Settled at the first call, and again where that could not tell.

    Attributes:
        specs: what each argument that holds tensors is; what was declared until a call settles it
        pads: batches are padded, or run at their own sizes
        examined: a call has shown whether anything stands against padding
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: inspect.Signature,
        inputs: Mapping[str, Batched | Static | type[Static]] | None,
        options: Options,
        stats: Stats,
    ) -> None:
        self._fn = fn
        self._given = {} if inputs is None else check_specs(inputs, signature)
        self._options = options
        self._stats = stats
        self.specs: Specs = self._given
        self.pads = False
        self.examined = False
        self._settled = False
        # sizes of the calls that could not tell, so that none of them is looked at twice
        self._undecided: set[Any] = set()

    @property
    def batched(self) -> dict[str, Batched]:
        """The arguments that grow."""
        return {name: spec for name, spec in self.specs.items() if isinstance(spec, Batched)}

    def settle(self, bound: inspect.BoundArguments) -> bool:
        """Learn from a call what is not known yet; true if it changed what the arguments are.

        Raises:
            ReportError: under ``strict``, what stands against padding
            ValueError: the step has another number of tokens per request than ``next_n``
            whatever Dynamo does on a step that is not one graph
        """
        if self.examined or sizes_of(bound) in self._undecided:
            return False
        declared = all(name in self._given for name in holding_tensors(bound))
        try:
            inferred = infer_inputs(self._fn, bound, self._given)
        except Exception:
            if not declared:
                raise
            # what is wrong with the step or its arguments, the call itself says better
            inferred = Inferred(dict(self._given), (), (), row_safe=False, decided=False)
        settles = not self._settled and (declared or inferred.decided)
        if settles:
            self._settled = True
            self.specs = {**self.specs, **inferred.inputs}
            self.pads = bool(self.batched) and (declared or inferred.row_safe)
        if inferred.decided:
            self.examined = True
            self._check_next_n(inferred)
            if self.pads or not declared:
                self._report(inferred.findings, declared)
        else:
            self._undecided.add(sizes_of(bound))
        return settles

    def reopen(self) -> None:
        """An argument came that no call had before."""
        self._settled = self.examined = False

    def shown(self, bound: inspect.BoundArguments) -> str:
        """Shapes of the tensors among the arguments, for a message."""
        sizes = zip(bound.arguments, sizes_of(bound), strict=True)
        return ", ".join(f"{name} {list(size)}" for name, size in sizes if size is not None)

    def _check_next_n(self, inferred: Inferred) -> None:
        ratio = inferred.tokens_per_request
        if ratio is not None and ratio != self._options.next_n:
            raise ValueError(
                f"next_n must be {ratio}, the tokens of each request in this step, got "
                f"{self._options.next_n}"
            )

    def _report(self, findings: tuple[Finding, ...], declared: bool) -> None:
        self._stats.findings.extend(findings)
        if findings:
            padded = declared and self.pads
            error = ReportError(
                "padding may reach real rows" if padded else "batches are not padded", findings
            )
            if self._options.strict:
                raise error
            warnings.warn(str(error), RuntimeWarning, stacklevel=6)
