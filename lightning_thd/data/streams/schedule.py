"""A table of the sequences that all ranks hold -> the next optimizer steps, and the position in the stream.

Both follow from numbers that every rank has. So every rank computes the same steps without a message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_thd.data.streams.samples import META
from lightning_thd.packing import Cost, Packs, Scheduler, Sequences
from lightning_thd.packing.balancing import balanced_bins, order_by_rank, scheduled_bins
from lightning_thd.packing.bins import best_fit
from lightning_thd.packing.lengths import Slots
from lightning_thd.packing.planner import Tail

# META, the rank that holds the sequence, and its position in the pool when it was planned.
POOL = np.dtype([*META.descr, ("holder", "<i4"), ("at", "<i4")])
Table = npt.NDArray[np.void]
Place = tuple[int, int]  # a shard, and a pass over it
Pending = dict[Place, set[int]]  # the rows that are still unused
# Plans of at least this many sequences fill packs first, and then deal them to ranks. For 65,536 sequences of
# 4,096 ranks, this takes 20 ms, while a search for packs of equal work takes 12 s.
_MANY = 8192
# Such plans round lengths up until fewer than twice this many differ; best fit iterates over those lengths.
# For 65,536 sequences that takes 3 ms in place of 16, and makes 0.05 % more packs.
_CLASSES = 1024
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling:
    """The settings that decide the steps of a stream: the size of a step and a pack, costs and ranks."""

    step: Packs | Sequences
    slots: Slots
    cost: Cost  # work of a sequence
    dp: int  # data-parallel ranks
    tail: Tail = "pad"
    scheduler: Scheduler | None = None  # replaces ``packing.balance``, for ``Sequences(n)``


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One planned optimizer step: its sequences by rank and microbatch."""

    table: Table  # a ``POOL`` row for each sequence, rank after rank, microbatch after microbatch
    offsets: IntArray  # int64 ``[dp * microbatches + 1]``, where each microbatch begins in the table
    dp: int  # data-parallel ranks

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches of each rank."""
        return (len(self.offsets) - 1) // self.dp

    def targets(self) -> IntArray:
        """Return the rank that runs each sequence of the table."""
        ranks = np.arange(len(self.offsets) - 1) // self.microbatches
        return np.repeat(ranks, np.diff(self.offsets))


def work_of(table: Table, cost: Cost) -> npt.NDArray[np.float64]:
    """Return the work of each sequence of a table, including its images."""
    return cost(table["length"], np.stack([table["patches"], table["squares"]], axis=1))


def rows_of(table: Table, rows: IntArray) -> Table:
    """Return rows of a table as ``table[rows]`` does, but 40 times faster for 65,536 rows."""
    # numpy copies a structured row field by field, and a row of numbers as one block.
    words_each = table.itemsize // 4
    words = np.ascontiguousarray(table).view(np.uint32).reshape(len(table), words_each)
    return np.take(words, rows, axis=0).view(table.dtype).reshape(len(rows))


def plan_steps(pool: Table, scheduling: Scheduling, *, ended: bool) -> tuple[list[PlannedStep], Table]:
    """Plan one step of ``Sequences(n)``, or all whole steps of ``Packs(n)``; return them and the rest."""
    if not len(pool):
        return [], pool
    if isinstance(scheduling.step, Packs):
        packs_of_rank = scheduling.step.n // scheduling.dp
        return _pack_steps(pool, scheduling, packs_of_rank, ended)

    n = scheduling.step.n
    if len(pool) < n and not (ended and scheduling.tail == "pad"):
        return [], pool
    return [_step(pool[:n], scheduling, None)], pool[n:]


def _pack_steps(
    pool: Table, scheduling: Scheduling, each: int, ended: bool
) -> tuple[list[PlannedStep], Table]:
    """Fill the fewest packs with equal work, and make steps of ``each`` packs per rank."""
    whole = _step(pool, scheduling, None)  # one step of all packs
    table = whole.table
    packs = np.split(np.arange(len(table)), whole.offsets[1:-1])
    # The numbers of the packs, int64 ``[dp, microbatches]``: each column is a pack for every rank.
    numbers = np.arange(len(packs)).reshape(scheduling.dp, whole.microbatches)
    no_row = np.empty(0, np.int64)

    steps = []
    for first in range(0, whole.microbatches - each + 1, each):
        chosen = [packs[number] for number in numbers[:, first : first + each].ravel()]
        rows = np.concatenate([no_row, *chosen])
        offsets = np.cumsum([0, *map(len, chosen)])
        steps.append(PlannedStep(rows_of(table, rows), offsets, scheduling.dp))

    # The lightest packs come last. If they do not fill a step, their sequences are packed again later.
    left = [packs[number] for number in numbers[:, len(steps) * each :].ravel()]
    rest = table[np.sort(np.concatenate([no_row, *left]))]
    if ended and scheduling.tail == "pad" and len(rest):
        return [*steps, _step(rest, scheduling, each)], rest[:0]
    return steps, rest


def _step(table: Table, scheduling: Scheduling, num_microbatches: int | None) -> PlannedStep:
    """Pack all sequences of a table as one step; None takes as few microbatches as they need."""
    lengths = table["length"].astype(np.int64)
    padded = scheduling.slots.padded(lengths)
    patches = table["patches"].astype(np.int64)

    if scheduling.scheduler is not None:
        order, offsets = scheduled_bins(
            scheduling.scheduler,
            padded,
            scheduling.slots,
            dp=scheduling.dp,
            cost=scheduling.cost,
            patches=patches,
        )
    elif len(table) >= _MANY:
        order, offsets = _dealt_bins(table, padded, patches, scheduling, num_microbatches)
    else:
        order, offsets = balanced_bins(
            padded,
            work_of(table, scheduling.cost),
            scheduling.slots,
            dp=scheduling.dp,
            num_microbatches=num_microbatches,
            patches=patches,
        )

    return PlannedStep(rows_of(table, order), offsets, scheduling.dp)


def _dealt_bins(
    table: Table, padded: IntArray, patches: IntArray, scheduling: Scheduling, num_microbatches: int | None
) -> tuple[IntArray, IntArray]:
    """Fill packs first, and deal them to ranks by their work: much faster than ``balanced_bins``."""
    slots = scheduling.slots
    coarse = max(1, slots.usable // (_CLASSES * slots.multiple)) * slots.multiple
    rounded = np.minimum(-(-padded // coarse) * coarse, slots.usable)
    sizes = np.where(padded <= slots.usable, rounded, padded)  # longer ones are packs of their own
    packs = best_fit(sizes, slots, patches)
    if num_microbatches is not None and len(packs) > scheduling.dp * num_microbatches:
        packs = best_fit(padded, slots, patches)  # rounding has made too many

    microbatches = num_microbatches or -(-len(packs) // scheduling.dp)
    empty = scheduling.dp * microbatches - len(packs)
    offsets = np.concatenate([packs.offsets, np.full(empty, packs.offsets[-1])])
    work = work_of(table, scheduling.cost)[packs.indices]
    work_before = np.concatenate([[0.0], np.cumsum(work)])
    return order_by_rank(packs.indices, offsets, np.diff(work_before[offsets]), scheduling.dp)


_VERSION = 3  # the version of a saved state
_PLACE = ("shard", "row", "round")  # the fields that identify a sequence


@dataclass(kw_only=True)
class Ledger:
    """The position in a stream, the same on all ranks. It has K shards and N sources."""

    cursors: (
        IntArray  # int64 ``[K]``, row behind the last that was read of each shard in this pass, if bad too
    )
    rounds: IntArray  # int64 ``[N]``, number of the present pass over each source
    drawn: IntArray  # int64 ``[N]``, sequences planned of each source since ``out`` last changed
    out: npt.NDArray[np.bool_]  # bool ``[N]``, sources that ran dry under dry="rest", until the pass ends
    pool: Table = field(default_factory=lambda: np.empty(0, POOL))  # sequences that no step has taken
    planned: deque[PlannedStep] = field(default_factory=deque)  # planned steps that are not made, in order
    number: int = 0  # number of this pass over the stream
    steps: int = 0  # steps made in this pass
    pace: int = 0  # most sequences of a source that a rank reads before each step that was planned ahead

    def state(self) -> dict[str, Any]:
        """Return the position as plain numbers and tensors, for a checkpoint."""
        tables = [*(step.table for step in self.planned), self.pool]
        pending = np.concatenate([np.stack([table[name] for name in _PLACE], 1) for table in tables])
        return {
            "version": _VERSION,
            "cursors": torch.from_numpy(self.cursors.copy()),
            "rounds": self.rounds.tolist(),
            "drawn": self.drawn.tolist(),
            "out": self.out.tolist(),
            "pending": torch.from_numpy(pending.astype(np.int64)),
            "planned": [step.offsets.tolist() for step in self.planned],
            "pass": self.number,
            "steps": self.steps,
            "pace": self.pace,
        }


def ledger_of(state: dict[str, Any]) -> Ledger:
    """Build a ledger from a saved state, still without its pending sequences."""
    version = state.get("version")
    if version != _VERSION:
        raise ValueError(f"The stream has version {version}, not {_VERSION}. Resume with the older release.")

    return Ledger(
        cursors=state["cursors"].numpy().copy(),
        rounds=np.array(state["rounds"], np.int64),
        drawn=np.array(state["drawn"], np.int64),
        out=np.array(state["out"], bool),
        number=int(state["pass"]),
        steps=int(state["steps"]),
        pace=int(state["pace"]),
    )


def pending_rows(state: dict[str, Any]) -> Pending:
    """Return the records that were read but unused when the state was saved."""
    rows: Pending = {}
    for shard, row, round_ in state["pending"].tolist():
        rows.setdefault((shard, round_), set()).add(row)
    return rows


def restored_ledger(
    state: dict[str, Any], read: Table, *, dp: int, same: bool, source_of: IntArray
) -> Ledger:
    """Build a ledger from a saved state and the pending sequences, which were read again.

    Args:
        state: a state of ``Ledger.state``.
        read: the pending sequences, in any order.
        dp: data-parallel ranks of this job.
        same: whether the planned steps of the state fit this job.
        source_of: the source of each shard, int64 ``[K]``.
    """
    places = zip(*(read[name].tolist() for name in _PLACE), strict=True)
    row_of = {place: row for row, place in enumerate(places)}
    pending = [tuple(place) for place in state["pending"].tolist()]
    rows = [row_of[place] for place in pending if place in row_of]  # a policy may leave some out now
    table = read[np.array(rows, np.int64)]

    ledger = ledger_of(state)
    if same and len(table) == len(pending):
        for offsets in state["planned"]:
            ledger.planned.append(PlannedStep(table[: offsets[-1]], np.array(offsets, np.int64), dp))
            table = table[offsets[-1] :]
    else:  # planned steps are dropped, so their sequences no longer count as drawn
        unmade = pending[: sum(offsets[-1] for offsets in state["planned"])]
        shards = np.array([shard for shard, *_ in unmade], np.int64)
        counts = np.bincount(source_of[shards], minlength=len(ledger.drawn))
        ledger.drawn = np.maximum(0, ledger.drawn - counts)
    ledger.pool = table
    return ledger
