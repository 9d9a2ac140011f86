"""FLOPs of batches by part: linear, attention, logits, vision; they add with ``+``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopsBreakdown:
    """FLOPs by part; Python integers, which do not overflow.

    Attributes:
        linear: projections, MLPs, experts, scans.
        attention: scores and their product with the values.
        logits: the output projection.
        vision: vision tower and projector.
        recompute: forward passes run again by activation checkpointing.
        models: where several models run, the FLOPs of each by its name: ``(("policy", 600), ("reference",
            200))``; their sum is ``model``, up to the rounding of half squares.
    """

    linear: int = 0
    attention: int = 0
    logits: int = 0
    vision: int = 0
    recompute: int = 0
    models: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    @property
    def model(self) -> int:
        """Return the FLOPs that the model needs: the numerator of MFU."""
        return self.linear + self.attention + self.logits + self.vision

    @property
    def hardware(self) -> int:
        """Return the FLOPs that the device runs, recomputation included: the numerator of HFU."""
        return self.model + self.recompute

    def __add__(self, other: FlopsBreakdown) -> FlopsBreakdown:
        models = dict(self.models)
        for name, flops in other.models:
            models[name] = models.get(name, 0) + flops
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in COLUMNS}
        return FlopsBreakdown(**sums, models=tuple(models.items()))


COLUMNS = ("linear", "attention", "logits", "vision", "recompute")
