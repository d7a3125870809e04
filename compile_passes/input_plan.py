"""What the arguments of a step are to its batch: declared, inferred at the first call, or both.

A step that was not proven to keep padding away from real rows is not padded, unless its inputs were
all declared: then padding is what the caller asked for, and what stands against it is a warning.

Calls with other constants, dtypes or containers trace other graphs: each such variant is looked at
by itself.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .infer_batch import Inferred, infer_inputs
from .inputs import Batched, Specs, Static, check_specs, mode
from .options import Options
from .report import Finding, ReportError
from .stats import Stats
from .survey import Surveyor


@dataclasses.dataclass
class Variant:
    """What is known of calls of one variant.

    Attributes:
        specs: what each argument that holds tensors is; what was declared until a call settles it
        pads: batches are padded, or run at their own sizes
        uniform: the step takes equally many tokens of each request
        examined: a call has shown whether anything stands against padding
    """

    specs: Specs
    pads: bool = False
    uniform: bool = False
    settled: bool = False
    examined: bool = False
    # sizes of the calls that could not tell, so that none of them is looked at twice
    undecided: set[Any] = dataclasses.field(default_factory=set)

    @property
    def batched(self) -> dict[str, Batched]:
        """The arguments that grow."""
        return {name: spec for name, spec in self.specs.items() if isinstance(spec, Batched)}


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

    def settle(self, bound: inspect.BoundArguments) -> Variant:
        """What is known of calls like this one, with what this one shows.

        Raises:
            ReportError: under ``strict``, what stands against padding
            ValueError: the step has another number of tokens per request than ``next_n``
            whatever Dynamo does on a step that is not one graph
        """
        key, holding, sizes = self._look(bound)
        variant = self._variants.setdefault(key, Variant(self._given))
        if not variant.examined and sizes not in variant.undecided:
            self._examine(variant, bound, holding, sizes)
        return variant

    def _look(self, bound: inspect.BoundArguments) -> tuple[Any, list[str], Any]:
        """What sets a variant apart, which arguments hold tensors, and the sizes of those that
        are tensors."""
        key: list[Any] = [mode()]
        holding, sizes = [], []
        for name, value in bound.arguments.items():
            if isinstance(value, Tensor):
                key.append((name, value.dtype, value.device, value.dim()))
                holding.append(name)
                sizes.append(value.shape)
            else:
                survey = self._surveyor.look(name, value)
                key.append((name, survey.structure))
                if survey.tensors:
                    holding.append(name)
        return tuple(key), holding, tuple(sizes)

    def _examine(
        self, variant: Variant, bound: inspect.BoundArguments, holding: list[str], sizes: Any
    ) -> None:
        declared = all(name in self._given for name in holding)
        try:
            inferred = infer_inputs(self._fn, bound, self._given)
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
        if not inferred.decided:
            variant.undecided.add(sizes)
            return
        variant.examined = True
        ratio = inferred.tokens_per_request
        variant.uniform = ratio is not None
        if ratio is not None and ratio != self._options.next_n:
            variant.examined = variant.settled = variant.pads = False
            raise ValueError(
                f"next_n must be {ratio}, the tokens of each request in this step, got "
                f"{self._options.next_n}"
            )
        if variant.pads or not declared:
            self._report(variant, inferred.findings)

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
