"""A planner and the costs of a step -> the buckets to capture as CUDA graphs, and a table with the reasons.

A bucket has S sequences. A replay costs ``graph + per_sequence * S``, because every entry of cu_seqlens, used
or not, enlarges the grid of every varlen kernel. One bucket for the largest batch can be slower than eager.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_thd.cuda_graph.buckets import BatchShape, Bucket, make_buckets
from lightning_thd.packing.entries import summarize
from lightning_thd.packing.planner import Planner

IntArray = npt.NDArray[np.int64]
MaxSequences: TypeAlias = int | Sequence[int] | Literal["auto"]

_WORTH = 0.005  # An additional bucket must save this share of an eager step, because it costs a capture.
_MOST_BUCKETS = 3
_QUANTILES = 32
_SAMPLE = 512
_ROUND = 128  # Observed slots are rounded up to a multiple of this, so that later batches fit too.


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCosts:
    """Times of an eager and a replayed step, all in one unit; the defaults assume a launch-bound step."""

    eager: float = 1.0  # the time of a step without a graph
    graph: float = 2 / 3  # the time of a replay without sequences
    per_sequence: float = 4e-4  # the time that each sequence of the bucket adds to a replay

    def __post_init__(self) -> None:
        for field in fields(self):
            name = field.name
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name == "eager"):
                raise ValueError(f"GraphCosts({name}={value}): wanted a finite time >= 0 (eager: > 0).")

    def replay(self, sequences: int) -> float:
        """Return the time of a replay with S sequences; ``GraphCosts().replay(100)`` is 0.7067."""
        return self.graph + self.per_sequence * sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A line of the plan's table: the buckets' sequences, the share of batches that fit, the speed-up."""

    name: str
    sequences: tuple[int, ...]
    coverage: float
    speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphPlan:
    """The buckets to capture (none if eager seems fastest), and the other choices that were compared."""

    slots: int
    max_seqlen: int
    quantiles: tuple[int, ...]  # P50, P90, P99 and maximum of the sequences that batches need
    choices: tuple[Choice, ...]
    chosen: Choice

    def buckets(self) -> list[Bucket]:
        """Return the chosen buckets, smallest first; leave out buckets too small to cover every slot."""
        usable = [s for s in self.chosen.sequences if s * self.max_seqlen >= self.slots]
        return make_buckets(usable, slots=self.slots, max_seqlen=self.max_seqlen) if usable else []

    def table(self) -> str:
        """Return the plan as text, with one line per choice and a mark at the chosen one."""
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

    def problem(self) -> str | None:
        """Return why no graph is worth a capture, or None."""
        if not any(self.quantiles):
            reasons = "shared prefixes, context parallelism, weights, extras, or oversize='own_pack'"
            return f"no sampled batch fits a graph: {reasons}"
        if not self.chosen.sequences:
            return "a replay is not expected to be faster than eager for any number of sequences"
        if self.chosen.coverage == 0.0:
            return (
                f"max_sequences={self.chosen.sequences} is smaller than any batch needs: half of them need "
                f"{self.quantiles[0]} or more. Use max_sequences='auto' or {self.quantiles[2]}"
            )
        return None


def plan_for(
    planner: Planner, *, dp: int = 1, costs: GraphCosts | None = None, given: Sequence[int] = ()
) -> GraphPlan:
    """Plan the graphs for the batches that a planner will make for ``dp`` data-parallel ranks."""
    slots = planner.slots.usable
    longest = min(summarize(planner.entries.lengths).longest, slots)
    max_seqlen = int(planner.slots.padded(np.array([longest]))[0])
    shapes = sample_shapes(planner, dp=dp)
    return plan_graphs(shapes, slots=slots, max_seqlen=max_seqlen, costs=costs, given=given)


def plan_observed(
    seen: Sequence[BatchShape | None], *, costs: GraphCosts | None = None, given: Sequence[int] = ()
) -> GraphPlan:
    """Plan the graphs for batches like the observed ones; None stands for a batch that runs eagerly."""
    graphable = [shape for shape in seen if shape is not None] or [BatchShape(1, 1, 1)]
    slots = _rounded_up(max(shape.slots for shape in graphable))
    longest = min(slots, _rounded_up(max(shape.max_seqlen for shape in graphable)))

    # More slots than any bucket has: such a batch counts as one that runs eagerly.
    too_large = BatchShape(slots + 1, 1, 1)
    shapes = [too_large if shape is None else shape for shape in seen]
    return plan_graphs(shapes, slots=slots, max_seqlen=longest, costs=costs, given=given)


def _rounded_up(slots: int) -> int:
    return math.ceil(slots / _ROUND) * _ROUND


def plan_graphs(
    shapes: Sequence[BatchShape],
    *,
    slots: int,
    max_seqlen: int,
    costs: GraphCosts | None = None,
    given: Sequence[int] = (),
) -> GraphPlan:
    """Choose up to three buckets with the least expected cost for sampled shapes; or take the ``given``."""
    needs = needed_sequences(shapes, slots, max_seqlen)
    if not len(needs):
        none = Choice(name="none", sequences=(), coverage=0.0, speedup=1.0)
        return GraphPlan(slots=slots, max_seqlen=max_seqlen, quantiles=(0,) * 4, choices=(none,), chosen=none)

    costs = costs or GraphCosts()
    fit = len(needs) / len(shapes)
    choices = [
        _evaluate(f"{k} bucket{'s' * (k > 1)}", best_sequences(needs, k, costs), needs, costs, fit)
        for k in range(1, _MOST_BUCKETS + 1)
    ]
    chosen = max(choices, key=lambda choice: choice.speedup)
    if given:
        chosen = _evaluate("given", tuple(sorted(set(given))), needs, costs, fit)
        choices.append(chosen)

    quantiles = np.quantile(needs, [0.5, 0.9, 0.99, 1.0], method="inverted_cdf").astype(int).tolist()
    return GraphPlan(
        slots=slots,
        max_seqlen=max_seqlen,
        quantiles=tuple(quantiles),
        choices=tuple(choices),
        chosen=chosen,
    )


def needed_sequences(shapes: Sequence[BatchShape], slots: int, max_seqlen: int) -> IntArray:
    """Return the sequences that each batch with few enough slots needs, dummies included, int64 ``[N]``."""
    needs = []
    for shape in shapes:
        if shape.slots <= slots:
            # Dummies of at most max_seqlen slots fill the bucket, whose slots are all part of a sequence.
            dummies = math.ceil((slots - shape.slots) / max_seqlen)
            needs.append(shape.sequences + dummies)
    return np.array(needs, dtype=np.int64)


def sample_shapes(planner: Planner, *, dp: int = 1) -> list[BatchShape]:
    """Return up to 512 microbatch shapes, from random steps of epoch 0; every rank gets the same ones."""
    steps = np.random.default_rng(0).choice(len(planner), size=min(len(planner), _SAMPLE), replace=False)
    # For batches with shared prefixes, which run eagerly.
    too_large = BatchShape(planner.slots.usable + 1, 1, 1)
    shapes: list[BatchShape] = []
    for step in steps.tolist():
        for microbatches in planner.step(0, step, dp).spans_by_rank():
            for spans in microbatches:
                if planner.shares(spans.index):
                    shapes.append(too_large)
                else:
                    shapes.append(BatchShape.of(planner.slots.padded(spans.lengths).tolist()))
                if len(shapes) == _SAMPLE:
                    return shapes
    return shapes


def expected_cost(needs: IntArray, sequences: Sequence[int], costs: GraphCosts) -> float:
    """Return the mean cost of N batches with these ``needs``, if buckets of ``sequences`` are captured."""
    sizes = sorted(sequences)
    fitting: list[int] = np.searchsorted(np.sort(needs), sizes, side="right").tolist()

    # A batch replays the smallest bucket it fits: those that fit this bucket, less those that fit the last.
    total = 0.0
    fitting_smaller = 0
    for size, fitting_this in zip(sizes, fitting, strict=True):
        total += (fitting_this - fitting_smaller) * costs.replay(size)
        fitting_smaller = fitting_this

    total += (len(needs) - fitting_smaller) * costs.eager
    return total / len(needs)


def best_sequences(needs: IntArray, num_buckets: int, costs: GraphCosts) -> tuple[int, ...]:
    """Choose up to ``num_buckets`` quantiles of ``needs`` ``[N]`` as the buckets of least expected cost."""
    levels = np.linspace(0, 1, _QUANTILES)
    values = np.unique(np.quantile(needs, levels, method="inverted_cdf")).astype(int).tolist()
    best: tuple[int, ...] = ()
    for count in range(1, min(num_buckets, len(values)) + 1):
        cheapest = min(combinations(values, count), key=lambda sizes: expected_cost(needs, sizes, costs))
        saving = _WORTH * costs.eager
        if expected_cost(needs, cheapest, costs) < expected_cost(needs, best, costs) - saving:
            best = cheapest
    return best


def _evaluate(name: str, sizes: tuple[int, ...], needs: IntArray, costs: GraphCosts, fit: float) -> Choice:
    """Evaluate buckets for batches of which the share ``fit`` has few enough slots; others run eagerly."""
    cost = fit * expected_cost(needs, sizes, costs) + (1.0 - fit) * costs.eager
    coverage = fit * float(np.mean(needs <= max(sizes, default=0)))
    return Choice(name=name, sequences=sizes, coverage=coverage, speedup=costs.eager / cost)


def sequence_counts(max_sequences: object) -> tuple[int, ...]:
    """Return ``max_sequences`` as a sorted tuple, empty for "auto"; raise for other values than ints >= 1."""
    if isinstance(max_sequences, str) and max_sequences == "auto":
        return ()
    counts: Any = max_sequences if isinstance(max_sequences, list | tuple) else [max_sequences]
    if not counts or any(not isinstance(s, int) or isinstance(s, bool) or s < 1 for s in counts):
        raise ValueError(
            f"max_sequences={max_sequences!r}: wanted 'auto', a number of sequences such as 64, or several "
            "such as (24, 80)."
        )
    return tuple(sorted(set(counts)))
