"""Batches that a graphed step replayed or ran eagerly -> counts, and metrics to log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class GraphStats:
    """Counts of the batches that a graphed step replayed and of those that ran eagerly.

    Attributes:
        replays: batches that ran from a graph.
        fallbacks: batches that ran eagerly, by reason.
        captures: graphs captured.
        capture_s: seconds spent on capturing, warm-up included.
    """

    replays: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    captures: int = 0
    capture_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Return the share of batches that were replayed; 0 before the first."""
        total = self.replays + self.fallbacks.total()
        return self.replays / total if total else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the values to log, by key."""
        counts = {f"cuda_graph/fallback_{reason}": float(n) for reason, n in sorted(self.fallbacks.items())}
        return {
            "cuda_graph/hit_rate": self.hit_rate,
            "cuda_graph/capture_time_s": self.capture_s,
            **counts,
        }
