"""Measurements of the leak probe -> errors, a verdict and a text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_thd._pages import see

# The rounding of a softmax in fp32, relative to the largest logit, with room for a few layers.
_SOFTMAX = 1e-5
# A port's largest error in fp32. A window that is one key too small changes a logit by more than this.
_PORT = 2e-5
_HALF = 1e-2  # tolerances from here on are those of half precision
_LEAK_OF_FP32 = 1e-6  # a larger leak in half precision is measured again


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingReport:
    """The errors that the leak probe measured, each relative to the largest value of its kind.

    Attributes:
        model: class of the model.
        attention: its attention implementation, if it has a transformers config.
        layers: its number of layers, if it has a transformers config.
        lengths: lengths of the sequences in the pack.
        leak: largest change of a logit when another sequence changes.
        gradient_leak: largest gradient that reaches an input of another sequence, if asked for.
        error: largest difference between a sequence's logits in the pack and in a pack of its own.
        gradient_error: the same for the gradients of the sequence's inputs, if asked for.
        leak_tolerance: largest ``leak``, ``gradient_leak``, ``training_leak`` and ``far_leak`` that pass.
        tolerance: largest ``error``, ``gradient_error`` and ``pad_error`` that pass.
        reference_error: largest difference of a logit from stock eager attention, if that was run.
        pad_error: largest change of a parameter's gradient by a trailing pad, relative to that gradient.
        port_error: largest difference of a logit from ``reference=``, if it was given.
        port_gradient: largest difference of a weight's gradient from that of ``reference=``.
        training_leak: ``leak`` in ``train()`` without dropout; None if the model did not run in it.
        far_leak: ``leak`` in a pack of more tokens, if ``lengths`` were left out.
        far_lengths: the lengths of the sequences of that pack.
        loss: how the checked loss counts its targets; None if it was not given or not measured.
        loss_fault: what is wrong with that loss, and what to do about it.
        batch_norms: names of the batch norms that average over a pack in the mode of the given model.
        skipped: the checks that were skipped, and why.
        module: the first batch norm, or the first module whose outputs differ for equal inputs in two runs
            that should agree; None if none is found.
    """

    model: str
    attention: str | None
    layers: int | None
    lengths: tuple[int, ...]
    leak: float
    gradient_leak: float | None
    error: float
    gradient_error: float | None
    leak_tolerance: float
    tolerance: float
    reference_error: float | None = None
    pad_error: float | None = None
    port_error: float | None = None
    port_gradient: float | None = None
    training_leak: float | None = None
    far_leak: float | None = None
    far_lengths: tuple[int, ...] = ()
    loss: str | None = None
    loss_fault: str | None = None
    batch_norms: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    module: str | None = None

    @property
    def leaks(self) -> bool:
        """Return whether a sequence sees another sequence."""
        return not self.largest_leak <= self.leak_tolerance  # written so that NaN counts as a leak

    @property
    def may_leak(self) -> bool:
        """Return whether half precision allows a leak that fp32 would not."""
        return not self.leaks and self.leak_tolerance >= _HALF and self.largest_leak > _LEAK_OF_FP32

    @property
    def largest_leak(self) -> float:
        """Return the largest of all leaks; NaN if one is NaN."""
        leaks = [self.leak, self.gradient_leak, self.training_leak, self.far_leak]
        measured = [leak for leak in leaks if leak is not None]
        return max(measured, key=lambda leak: math.inf if math.isnan(leak) else leak)

    @property
    def same(self) -> bool:
        """Return whether logits and gradients in the pack equal those of each sequence in its own pack."""
        return self.error <= self.tolerance and (self.gradient_error or 0.0) <= self.tolerance

    @property
    def ok(self) -> bool:
        """Return whether the pack passes every check."""
        agrees = self.same and not self.leaks and self.matches_stock
        is_right = self.pads_are_inert and self.matches_reference and not self.batch_norms
        return agrees and is_right and self.loss_fault is None

    @property
    def matches_stock(self) -> bool:
        """Return whether stock eager attention gives the same logits, if it was run."""
        return self.reference_error is None or self.reference_error <= self.reference_tolerance

    @property
    def matches_reference(self) -> bool:
        """Return whether logits and gradients are those of ``reference=``, if it was given."""
        measured = (self.port_error, self.port_gradient)
        return all(value is None or value <= self.port_tolerance for value in measured)

    @property
    def port_tolerance(self) -> float:
        """Return the largest ``port_error`` and ``port_gradient`` that pass; a lost key is a small error."""
        return min(self.tolerance, _PORT) if self.tolerance < _HALF else self.tolerance

    @property
    def reference_tolerance(self) -> float:
        """Return the largest allowed ``reference_error``: stock softmax is in fp32 at best."""
        return max(self.tolerance, _SOFTMAX)

    @property
    def pads_are_inert(self) -> bool:
        """Return whether a trailing pad leaves gradients equal and finite, if checked."""
        return self.pad_error is None or self.pad_error <= self.tolerance

    def __str__(self) -> str:
        built = ""
        if self.attention is not None:
            built = f" ({self.layers} layers, attention {self.attention})"
        checks = (
            ("leak into other sequences", self.leak, self.leak_tolerance),
            ("packed against alone", self.error, self.tolerance),
            ("gradient leak", self.gradient_leak, self.leak_tolerance),
            ("leak in training mode", self.training_leak, self.leak_tolerance),
            ("leak in a longer pack", self.far_leak, self.leak_tolerance),
            ("gradient against alone", self.gradient_error, self.tolerance),
            ("against stock eager", self.reference_error, self.reference_tolerance),
            ("gradient with trailing pad", self.pad_error, self.tolerance),
            ("against the reference", self.port_error, self.port_tolerance),
            ("gradient of the reference", self.port_gradient, self.port_tolerance),
        )
        lines = [f"{self.model}{built}, lengths {self.lengths}"]
        for name, value, allowed in checks:
            if value is not None:
                lines.append(f"  {name:<27} {value:.1e} (allowed {allowed:.0e})")

        if self.loss_fault is not None:
            lines.append("  the loss                    is wrong")
        elif self.loss is not None:
            lines.append(f"  the loss                    {self.loss}")
        lines += [f"  averages in training        {name}, a batch norm" for name in self.batch_norms]
        modes = "eval()" if self.training_leak is None else "eval() and train()"
        longest = max(*self.lengths, *self.far_lengths)
        slots = max(sum(self.lengths), sum(self.far_lengths))
        lines.append(
            f"  looked at                   up to {slots} tokens in a pack, {longest} in a sequence; {modes}"
        )
        lines += [f"  not looked at               {check}" for check in self.skipped]
        lines.append(f"  first wrong module          {self.module or 'none'}")
        return "\n".join(lines)


class PackingLeakError(RuntimeError):
    """Raised if a check of ``check_packing`` fails; ``report`` has the numbers."""

    def __init__(self, report: PackingReport) -> None:
        self.report = report
        if report.loss_fault is not None:  # it is measured only if the model itself is right
            super().__init__(
                f"{report.loss_fault}. The model keeps sequences apart; its loss is wrong.\n{report}\n"
                f"{see('losses')}"
            )
            return

        if report.leaks:
            fault = "lets sequences of a pack see each other"
            if max(report.leak, report.gradient_leak or 0.0) <= report.leak_tolerance:
                is_training = not (report.training_leak or 0.0) <= report.leak_tolerance
                fault += (
                    " in training mode" if is_training else f" in a pack of {sum(report.far_lengths)} tokens"
                )
        elif not report.same:
            fault = "differs between packed and alone"
        elif report.batch_norms:
            fault = "has batch norms, which average over all sequences of a pack in training"
        elif not report.matches_stock:
            fault = "differs between a pack and stock eager attention"
        elif not report.matches_reference:
            fault = "differs from the reference"
        else:
            fault = "gets different or non-finite gradients if a trailing pad is added"

        remedy = "Build the model with attn_implementation='thd' and call it with model(**batch.hf_kwargs())"
        if report.batch_norms and report.same and not report.leaks:
            remedy = "Use norms of single tokens, such as LayerNorm, or running statistics in eval()"
        elif report.same and not report.leaks and report.matches_stock and not report.matches_reference:
            remedy = "Compare its code with the reference's: scale, softcap, window (ours counts the token "
            remedy = f"{remedy}itself), heads, positions, norms and what is added up"
        elif report.attention is None:  # not a transformers model
            remedy = "Keep sequences apart in every layer: call varlen_attention with batch.boundaries, and "
            remedy = f"{remedy}take positions from batch.position_ids"
        elif report.attention == "thd":
            remedy = "Check forward= and the first wrong module, or train this model on padded rows"

        super().__init__(
            f"{report.model} {fault}; the first wrong module is {report.module or 'unknown'}.\n{report}\n"
            f"{remedy}. {see('leaks')}"
        )

    def __reduce__(self) -> tuple[type[PackingLeakError], tuple[PackingReport]]:
        return type(self), (self.report,)  # pickle would pass the message in place of the report
