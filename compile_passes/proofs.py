"""The proofs of a compiled step: which batches the graphs that Dynamo made for it may serve."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from . import _compat
from .input_plan import InputPlan
from .inputs import Batch
from .kind import Kind, corner_of
from .prove_graph import (
    NotProven,
    Proof,
    beyond_limits,
    cannot_be_padded,
    check_alike,
    fixed_tokens,
    outline_of,
    outline_of_batch,
    prove_graph,
)
from .report import Finding
from .shape import Shape, fits, is_of, symbolic_shape


class Observed(NamedTuple):
    """What runs through Dynamo just now; ``blank`` if it is padding alone."""

    batch: Batch
    kind: Kind
    shape: Shape
    buffers: Mapping[str, Tensor]
    blank: bool

    @property
    def specs(self) -> Any:
        """What a proof depends on beyond the graph: what grows, and its padding."""
        return tuple(self.batch.specs.items())


class Proofs:
    """Looks at the graphs of a step, and at batches that a graph says nothing of."""

    def __init__(self, fn: Callable[..., Any], inputs: InputPlan) -> None:
        self._fn = fn
        self._inputs = inputs

    def of_graph(
        self, gm: fx.GraphModule, inputs: Sequence[Any], observed: Observed
    ) -> dict[Any, Proof]:
        """Look at a graph that Dynamo hands over, for the call that it does so for.

        Returns:
            the proof, by what it depends on beyond the graph
        """
        return {observed.specs: self._prove(gm, inputs, observed)}

    def require(self, proofs: dict[Any, Proof], observed: Observed) -> None:
        """A graph is proven, or runs a batch that fills it, or the caller answers for it.

        Args:
            proofs: of the graph
            observed: the call that it is to run for

        Raises:
            NotProven: none of these
        """
        if observed.specs not in proofs:
            # the same graph for calls that were found to be of another kind
            proofs[observed.specs] = self._prove_again(observed)
        proof = proofs[observed.specs]
        batch, kind, shape, _, blank = observed
        kind.proofs[shape] = proof
        if findings := self._against(proof, kind):
            if shape.code == "static":
                kind.not_padded_to.add(shape)
            elif shape.code == "symbolic":
                kind.against = findings
            if blank or shape.code == "symbolic" or not is_of(batch, shape):
                raise NotProven(findings, of_graph=shape.code == "symbolic")
        if not blank:
            self.check_served(proof, batch, kind, shape)

    def check_served(self, proof: Proof, batch: Batch, kind: Kind, shape: Shape) -> None:
        """A graph that is proven serves this batch, too.

        Raises:
            NotProven: it is for larger or smaller ones
        """
        kind.limits.add(proof.limits)
        if not kind.serves(batch.requests, batch.tokens):
            raise NotProven([beyond_limits(batch.requests, batch.tokens)], of_graph=True)
        if not is_of(batch, shape) or not all(map(Tensor.is_contiguous, batch.batched.values())):
            self.check_corner(batch, kind, proof)

    def check_corner(self, batch: Batch, kind: Kind, proof: Proof) -> None:
        """A batch with one of something, or that is not contiguous, is computed as larger ones are.

        Raises:
            NotProven: it is not
        """
        corner, variant = corner_of(batch), kind.variant
        if corner is None or (variant.declared and not variant.proven):
            return
        findings = kind.corners.get((proof, corner))
        if findings is None:
            findings = self._compare(proof, batch, corner)
            if findings and variant.declared:
                self._inputs.report(variant, findings, padded=True)
                findings = ()
            kind.corners[proof, corner] = findings
        if findings:
            raise NotProven(findings)

    def check_one(self, batch: Batch, kind: Kind, shape: Shape, next_n: int) -> None:
        """Find out whether batches of one request are padded to a shape, before one comes."""
        for tokens in dict.fromkeys((next_n, 1)):
            inputs = {}
            for name, value in kind.buffers_of(batch, shape).tensors.items():
                spec = batch.specs[name]
                inputs[name] = value.narrow(spec.dim, 0, spec.length(1, tokens)).contiguous()
            one = dataclasses.replace(batch, batched=inputs, requests=1, tokens=tokens)
            proof = kind.proofs.get(shape)
            if proof is not None and fits(one, kind.variant, next_n):
                try:
                    self.check_corner(one, kind, proof)
                except NotProven as error:
                    self._inputs.report(kind.variant, error.findings, padded=False)

    def _against(self, proof: Proof, kind: Kind) -> tuple[Finding, ...]:
        """What stands against padding to a graph; nothing where the caller declared all inputs."""
        variant, findings = kind.variant, proof.findings
        if variant.declared:
            if variant.proven and findings:
                self._inputs.report(variant, findings, padded=True)
            return ()
        if proof.ratio is not None and not variant.uniform:
            findings += (fixed_tokens(proof.ratio, "for each request"),)
        elif variant.multiple % proof.multiple:
            findings += (fixed_tokens(proof.multiple, "in each group"),)
        return findings

    def _prove(self, gm: fx.GraphModule, inputs: Sequence[Any], observed: Observed) -> Proof:
        batch, kind, shape, buffers, _ = observed
        given = batch.bound.arguments
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        tensors.update(buffers)
        variant, bounds = kind.variant, self._inputs.bounds
        if shape.code != "static":
            return prove_graph(gm, inputs, tensors, variant.specs, bounds, variant.declared)
        proven = self._proven(observed)
        other = outline_of(gm, inputs, tensors, variant.specs)
        findings = check_alike(proven, other, shape.requests, shape.tokens, bounds)
        return dataclasses.replace(proven, findings=proven.findings + findings)

    def _proven(self, observed: Observed) -> Proof:
        """What is known of the symbolic code that static code stands in for."""
        batch, kind, shape, _, _ = observed
        for known, proof in kind.proofs.items():
            if known.code == "symbolic":
                return proof
        shape = symbolic_shape(shape.requests, shape.tokens)
        buffers = kind.buffers_of(batch, shape).tensors
        return self._prove_again(observed._replace(shape=shape, buffers=buffers))

    def _prove_again(self, observed: Observed) -> Proof:
        bound = observed.batch.with_inputs(observed.buffers)
        gm, inputs = _compat.trace_only(self._fn, bound.args, bound.kwargs, [])
        return self._prove(gm, inputs, observed)

    def _compare(self, proof: Proof, batch: Batch, corner: Any) -> tuple[Finding, ...]:
        requests, tokens, _ = corner
        if proof.ratio is not None:
            # tokens are so many requests, and no number of their own
            requests, tokens = batch.requests, batch.tokens
        try:
            other = outline_of_batch(self._fn, batch, requests, tokens)
        except Exception as error:
            # nothing is in a batch of none: what an op makes of it does not matter
            return () if 0 in (requests, tokens) else (cannot_be_padded(error),)
        return check_alike(proof, other, requests, tokens, self._inputs.bounds)
