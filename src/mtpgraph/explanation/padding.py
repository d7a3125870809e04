"""The padding table: which inputs grow with the batch, what fills them up, and whether it may."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..compile_passes.infer_batch import InputRow, infer_inputs
from ..compile_passes.inputs import Batched, Static
from ..compile_passes.survey import Survey
from .record import Explanation, Padding
from .words import place

_Specs = Mapping[str, Batched | Static]


def explain_padding(
    explanation: Explanation,
    fn: Callable[..., Any],
    bound: inspect.BoundArguments,
    declared: _Specs,
) -> None:
    """Fill in how a step of one graph is padded; its findings go with the others."""
    try:
        inferred = infer_inputs(fn, bound, declared)
    except Exception as error:
        # all else that there is to say does not depend on it
        explanation.padding_verdict = f"Cannot be inferred: {' '.join(str(error).split())}"
        return
    rows = {row.argument: row for row in inferred.rows}
    if not rows and all(finding.kind == "padding unknown" for finding in inferred.findings):
        said = (f"{f.reason}; {f.remedy}" for f in inferred.findings)
        explanation.padding_verdict = f"Not padded: {'. '.join(said)}."
        return
    explanation.findings += inferred.findings
    explanation.padding_verdict = (
        "Padding cannot reach a real row: proven on the graph."
        if inferred.row_safe
        else "Not proven harmless, so each batch runs at its exact size unless inputs are declared."
    )
    specs = {**inferred.inputs, **declared}
    explanation.padding = [
        _row(name, value, specs.get(name), rows.get(name), name in declared)
        for name, value in bound.arguments.items()
    ]


def _row(
    name: str,
    value: Any,
    spec: Batched | Static | None,
    inferred: InputRow | None,
    declared: bool,
) -> Padding:
    if isinstance(spec, Batched):
        entries = f"{spec.per} + {spec.extra}" if spec.extra else spec.per
        why = "declared"
        if not declared and inferred is not None:
            why = f"{inferred.because.replace('::', '.')} at {place(inferred.file, inferred.line)}"
        return Padding(name, spec.dim, entries, str(spec.pad), why)
    if isinstance(value, Tensor) or Survey(value).tensors:
        said = "declared: " if declared else ""
        return Padding(name, None, "", "", f"{said}does not grow, used where it lies")
    return Padding(name, None, "", "", "a constant of the compilation")
