"""Seconds of a step, eager and replayed -> the expected speed-up of a choice of buckets.

S sequences of a bucket. A replay costs ``graph + per_sequence * S``: every entry of cu_seqlens costs its
share of every varlen kernel's grid, used or not. So one bucket for the rarest batch is slower than eager.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
# What a further bucket has to save, of an eager step.
_WORTH = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCosts:
    """Times of a step, eager and replayed, in seconds or any one unit.

    The defaults stand for a launch-bound step and are a guess to be replaced by measured numbers: a replay of
    2 / 3 of eager is the 1.5 times speed-up that such steps should reach, and a sequence of 4e-4 lets a
    bucket of 2,048 fall to 0.67 times eager, in the middle of the modelled range of 0.43 to 0.92.

    Attributes:
        eager: a step without a graph.
        graph: a replay with no sequences.
        per_sequence: what each sequence of the bucket adds.
    """

    eager: float = 1.0
    graph: float = 2 / 3
    per_sequence: float = 4e-4

    def __post_init__(self) -> None:
        for name, least in (("eager", 0.0), ("graph", 0.0), ("per_sequence", 0.0)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < least or (value == 0 and name == "eager"):
                raise ValueError(f"GraphCosts({name}={value}): wanted a positive time, in any one unit.")

    def replay(self, sequences: int) -> float:
        """Return the cost of replaying a bucket of S sequences; ``GraphCosts().replay(100)`` is 0.7067."""
        return self.graph + self.per_sequence * sequences

    @classmethod
    def from_replays(cls, eager: float, replays: Mapping[int, float]) -> GraphCosts:
        """Fit the linear cost of a replay to two or more measured buckets.

        Args:
            eager: of a step.
            replays: sequences of a bucket -> of its replay.
        """
        if len(replays) < 2:
            raise ValueError(f"Got replays of {len(replays)} bucket(s); wanted two or more to fit a line.")
        slope, start = np.polyfit([*replays], [*replays.values()], 1)
        return cls(eager=eager, graph=max(0.0, float(start)), per_sequence=max(0.0, float(slope)))


def expected_cost(needs: IntArray, sequences: Sequence[int], costs: GraphCosts) -> float:
    """Return the expected cost of batches that need ``[N]`` sequences under a choice of buckets.

    Returns:
        ``sum P(bucket) * replay(S) + P(fallback) * eager``. Needs ``[10, 20]`` with a bucket of 10 cost
        ``0.5 * replay(10) + 0.5 * eager``.
    """
    total, done = 0.0, 0
    ordered = np.sort(needs)
    for s in sorted(sequences):
        upto = int(np.searchsorted(ordered, s, side="right"))
        total += (upto - done) * costs.replay(s)
        done = upto
    return (total + (len(ordered) - done) * costs.eager) / len(ordered)


def best_sequences(needs: IntArray, num_buckets: int, costs: GraphCosts) -> tuple[int, ...]:
    """Choose at most ``num_buckets`` buckets of least expected cost, exactly, by dynamic programming.

    Returns:
        S of every bucket, ascending; empty when eager is cheapest. Every bucket beyond the first has to
        save half a per cent of an eager step, as each costs a capture.
    """
    values, counts = np.unique(needs, return_counts=True)
    best: tuple[float, tuple[int, ...]] = (costs.eager, ())
    before = np.concatenate([[0], np.cumsum(counts)]).astype(float)
    # ends[i]: the cost of all batches up to the i-th value with k buckets, the last of them ending there.
    ends: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *((math.inf, ()) for _ in values)]
    for _ in range(num_buckets):
        previous = ends
        ends = [(math.inf, ())]
        for i, value in enumerate(values.tolist(), start=1):
            step = costs.replay(value)
            ends.append(
                min(
                    (cost + (before[i] - before[j]) * step, (*sequences, value))
                    for j, (cost, sequences) in enumerate(previous[:i])
                )
            )
        for i, (cost, sequences) in enumerate(ends[1:], start=1):
            total = (cost + (before[-1] - before[i]) * costs.eager) / before[-1]
            if total < best[0] - _WORTH * costs.eager:
                best = (total, sequences)
    return best[1]


def lengths_from_quantiles(quantiles: Mapping[float, int], largest: int, *, count: int = 10_000) -> IntArray:
    """Make ``[count]`` ascending lengths with given quantiles (share -> value), log-normal between.

    Numbers of sequences in a pack are near log-normal; straight lines through the logarithms over the normal
    quantiles hit what is published exactly and stay close between.
    """
    if len(quantiles) < 2 or any(not 0 < q < 1 for q in quantiles):
        raise ValueError(f"quantiles={dict(quantiles)}: wanted two or more shares between 0 and 1.")
    points = sorted(quantiles.items())
    if any(a[1] >= b[1] for a, b in pairwise(points)) or points[0][1] < 1 or points[-1][1] > largest:
        raise ValueError(
            f"quantiles={dict(quantiles)}, largest={largest}: wanted ascending values of at least 1."
        )
    normal = NormalDist()
    z = np.array([normal.inv_cdf(q) for q, _ in points])
    logs = np.log([value for _, value in points])
    shares = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    below = logs[0] + (shares - z[0]) * (logs[1] - logs[0]) / (z[1] - z[0])
    above = logs[-1] + (shares - z[-1]) * (logs[-1] - logs[-2]) / (z[-1] - z[-2])
    found = np.where(shares < z[0], below, np.where(shares > z[-1], above, np.interp(shares, z, logs)))
    values: IntArray = np.clip(np.ceil(np.exp(found) - 1e-9), 1, largest).astype(np.int64)
    values[-1] = largest
    return values
