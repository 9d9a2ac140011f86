"""Sampled batches and costs -> which buckets to capture, and the table that says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd.cuda_graph.choice.costs import GraphCosts, IntArray, best_sequences, expected_cost
from lightning_thd.cuda_graph.shapes.buckets import Bucket, Layout, make_buckets

# What upstream pads to when nobody sets it: shown beside, as a warning.
_NAIVE = 2048
_MOST_BUCKETS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One choice of buckets with its expected cost: a line of the plan's table.

    Attributes:
        name: what it is.
        sequences: S of its buckets.
        coverage: share of the batches that fit.
        speedup: expected, over eager.
    """

    name: str
    sequences: tuple[int, ...]
    coverage: float
    speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphPlan:
    """The buckets to capture, and the other choices that were compared.

    Attributes:
        slots: T of every bucket.
        max_seqlen: of every bucket.
        quantiles: P50, P90, P99 and the largest number of sequences a batch needs.
        choices: one, two, three buckets, and a single one of 2,048.
        chosen: the best of them; its ``sequences`` are empty when eager is expected to be fastest.
    """

    slots: int
    max_seqlen: int
    quantiles: tuple[int, int, int, int]
    choices: tuple[Choice, ...]
    chosen: Choice

    def buckets(self) -> list[Bucket]:
        """Return the chosen buckets, smallest first, without those too small to cover every slot."""
        usable = [s for s in self.chosen.sequences if s * self.max_seqlen >= self.slots]
        return make_buckets(usable, slots=self.slots, max_seqlen=self.max_seqlen) if usable else []

    def table(self) -> str:
        """Return the plan as text, one line a choice, the chosen one marked."""
        names = ("P50", "P90", "P99", "max")
        spread = ", ".join(f"{name} {n}" for name, n in zip(names, self.quantiles, strict=True))
        lines = [
            f"Sequences in a batch of {self.slots} slots: {spread}",
            f"{'':2}{'choice':<14}{'buckets':<20}{'coverage':>9}{'expected speed-up':>19}",
        ]
        for choice in self.choices:
            mark = "* " if choice == self.chosen else "  "
            sizes = ", ".join(map(str, choice.sequences)) or "none"
            lines.append(f"{mark}{choice.name:<14}{sizes:<20}{choice.coverage:>9.1%}{choice.speedup:>18.2f}x")
        return "\n".join(lines)


def needed_sequences(layouts: Sequence[Layout], slots: int, max_seqlen: int) -> IntArray:
    """Count the sequences a bucket must have for each batch, dummies for its tail included.

    Returns:
        int64 ``[N]``. 5 sequences in 90 of 100 slots need 6.
    """
    found = [x.sequences + -(-(slots - x.slots) // max_seqlen) for x in layouts if x.slots <= slots]
    return np.array(found, dtype=np.int64)


def plan_graphs(
    needs: IntArray,
    *,
    slots: int,
    max_seqlen: int,
    costs: GraphCosts | None = None,
    given: Sequence[int] = (),
) -> GraphPlan:
    """Choose one to three buckets of the least expected cost.

    Args:
        needs: int64 ``[N]``, sequences that each sampled batch needs.
        slots: T of every bucket.
        max_seqlen: of every bucket.
        costs: of a step; a launch-bound one by default.
        given: numbers of sequences chosen by the user, which are then taken.

    Raises:
        ValueError: without samples.
    """
    if not len(needs):
        raise ValueError(f"No sampled batch fits into slots={slots}. Raise slots to the capacity of a pack.")
    costs = costs or GraphCosts()
    least = -(-slots // max_seqlen)
    choices = [
        _judge(f"{k} bucket{'s' * (k > 1)}", best_sequences(needs, k, costs), needs, costs)
        for k in range(1, _MOST_BUCKETS + 1)
    ]
    chosen = max(choices, key=lambda c: c.speedup)
    choices.append(_judge(f"one of {_NAIVE}", (max(_NAIVE, least),), needs, costs))
    if given:
        chosen = _judge("given", tuple(sorted(set(given))), needs, costs)
        choices.append(chosen)
    return GraphPlan(
        slots=slots,
        max_seqlen=max_seqlen,
        quantiles=tuple(int(q) for q in np.quantile(needs, [0.5, 0.9, 0.99, 1.0], method="inverted_cdf")),  # type: ignore[arg-type]
        choices=tuple(choices),
        chosen=chosen,
    )


def _judge(name: str, sequences: tuple[int, ...], needs: IntArray, costs: GraphCosts) -> Choice:
    return Choice(
        name=name,
        sequences=sequences,
        coverage=float(np.mean(needs <= max(sequences, default=0))),
        speedup=costs.eager / expected_cost(needs, sequences, costs),
    )


def problem_of(plan: GraphPlan, given: tuple[int, ...]) -> str | None:
    """Return why no graph is worth capturing, or None; print when a bucket is larger than any batch needs."""
    if not plan.chosen.sequences:
        return "a replay is not expected to be faster than eager for any number of sequences"
    if plan.chosen.coverage == 0.0:
        return (
            f"max_sequences={given} is smaller than any batch needs: half of them need "
            f"{plan.quantiles[0]} or more. Use max_sequences='auto' or {plan.quantiles[2]}"
        )
    if given and max(given) > 2 * plan.quantiles[3]:
        rank_zero_info(
            f"max_sequences={max(given)} is more than any sampled batch needs ({plan.quantiles[3]}), and a "
            "replay pays for every one. Use max_sequences='auto'."
        )
    return None


def sequence_counts(max_sequences: object) -> tuple[int, ...]:
    """Return ``max_sequences`` as a sorted tuple; an empty tuple for "auto".

    Raises:
        ValueError: for anything but "auto" and whole numbers of at least 1.
    """
    if max_sequences == "auto":
        return ()
    counts = (max_sequences,) if isinstance(max_sequences, int) else max_sequences
    if (
        not isinstance(counts, list | tuple)
        or not counts
        or any(not isinstance(s, int) or isinstance(s, bool) or s < 1 for s in counts)
    ):
        raise ValueError(
            f"max_sequences={max_sequences!r}: wanted 'auto', a number of sequences such as 64, or several "
            "such as (24, 80)."
        )
    return tuple(sorted(set(counts)))
