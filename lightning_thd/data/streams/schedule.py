"""One table of the sequences that all ranks hold -> the next optimizer steps, and the stream's position.

It is a pure function of numbers that every rank has, so every rank computes the same steps by itself.
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
from lightning_thd.packing.balance import balanced_bins, order_by_rank, patch_bound, scheduled_bins
from lightning_thd.packing.bins import best_fit
from lightning_thd.packing.lengths import Slots
from lightning_thd.packing.planner import Tail

# META, the rank that holds the sequence, and its position in the pool when it was planned.
POOL = np.dtype([*META.descr, ("holder", "<i4"), ("at", "<i4")])
Table = npt.NDArray[np.void]
# A plan of at least so many sequences deals packs to ranks by work. The search for packs of equal work takes
# 0.4 s for 8,192 sequences of 512 ranks, and 12 s for 65,536 of 4,096. Dealing takes 6 and 20 ms.
_MANY = 8192
# Such a plan rounds lengths up to so many classes, because best fit takes one turn per distinct length. For
# 65,536 sequences this takes 3 ms in place of 16, and makes 0.05 % more packs.
_CLASSES = 1024
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling:
    """The settings that decide a stream's steps: what a step takes, pack size, cost and ranks."""

    step: Packs | Sequences
    slots: Slots
    cost: Cost  # work of a sequence by its length
    dp: int  # data-parallel ranks
    tail: Tail = "pad"
    scheduler: Scheduler | None = None  # replaces ``packing.balance``, for ``Sequences(n)``

    @property
    def needed(self) -> int:
        """Return the fewest sequences that make a step."""
        return self.step.n if isinstance(self.step, Sequences) else 1


@dataclass(frozen=True, slots=True)
class Planned:
    """One planned optimizer step: its sequences by rank and microbatch."""

    table: Table  # ``POOL`` rows of its sequences, rank after rank, microbatch after microbatch
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
    """Return the work of each sequence of a table, its images included."""
    return cost(table["length"], np.stack([table["patches"], table["squares"]], axis=1))


def rows_of(table: Table, rows: IntArray) -> Table:
    """Return rows of a table as ``table[rows]`` does, but 40 times faster for 65,536 rows."""
    words = np.ascontiguousarray(table).view(np.uint32).reshape(len(table), table.itemsize // 4)
    return np.take(words, rows, axis=0).view(table.dtype).reshape(len(rows))


def plan_steps(pool: Table, how: Scheduling, *, ended: bool) -> tuple[list[Planned], Table]:
    """Plan as many steps as the sequences at hand allow, in the order of the pool."""
    if not len(pool):
        return [], pool
    if isinstance(how.step, Sequences):
        n = how.step.n
        if len(pool) < n and not (ended and how.tail == "pad"):
            return [], pool
        return [_step(pool[:n], how, None)], pool[n:]
    return _pack_steps(pool, how, how.step.n // how.dp, ended)


def _pack_steps(pool: Table, how: Scheduling, each: int, ended: bool) -> tuple[list[Planned], Table]:
    """Fill the fewest packs with equal work, and make steps with ``each`` packs per rank of them."""
    whole = _step(pool, how, None)
    microsteps = whole.microbatches
    bins = np.split(np.arange(len(whole.table)), whole.offsets[1:-1])
    bin_of = np.arange(len(bins)).reshape(how.dp, microsteps)
    steps = []
    for first in range(0, microsteps - each + 1, each):
        chosen = [bins[b] for b in bin_of[:, first : first + each].ravel()]
        rows = np.concatenate([np.empty(0, np.int64), *chosen])
        steps.append(Planned(rows_of(whole.table, rows), np.cumsum([0, *map(len, chosen)]), how.dp))
    # The lightest packs come last. Those that do not fill a step are packed again with later sequences.
    left = [bins[b] for b in bin_of[:, len(steps) * each :].ravel()]
    rest = whole.table[np.sort(np.concatenate([np.empty(0, np.int64), *left]))]
    if ended and how.tail == "pad" and len(rest):
        return [*steps, _step(rest, how, each)], rest[:0]
    return steps, rest


def _step(table: Table, how: Scheduling, num_microbatches: int | None) -> Planned:
    lengths = table["length"].astype(np.int64)
    padded, patches = how.slots.padded(lengths), table["patches"].astype(np.int64)
    if how.scheduler is not None:
        bound = patch_bound(patches, how.slots)
        usable = how.slots.usable
        order, offsets = scheduled_bins(how.scheduler, padded, usable, dp=how.dp, cost=how.cost, bound=bound)
    elif len(table) >= _MANY:
        order, offsets = _dealt_bins(table, padded, patches, how, num_microbatches)
    else:
        order, offsets = balanced_bins(
            padded,
            work_of(table, how.cost),
            how.slots,
            dp=how.dp,
            num_microbatches=num_microbatches,
            patches=patches,
        )
    return Planned(rows_of(table, order), offsets, how.dp)


def _dealt_bins(
    table: Table, padded: IntArray, patches: IntArray, how: Scheduling, num_microbatches: int | None
) -> tuple[IntArray, IntArray]:
    """Fill few packs and deal them to ranks by work, without searching for packs of equal work."""
    usable, multiple = how.slots.usable, how.slots.multiple
    coarse = max(1, usable // (_CLASSES * multiple)) * multiple
    sizes = np.where(padded <= usable, np.minimum(-(-padded // coarse) * coarse, usable), padded)
    packs = best_fit(sizes, how.slots, patches)
    if num_microbatches is not None and len(packs) > how.dp * num_microbatches:
        packs = best_fit(padded, how.slots, patches)
    count = how.dp * (num_microbatches or -(-len(packs) // how.dp))
    offsets = np.concatenate([packs.offsets, np.full(count - len(packs), packs.offsets[-1])])
    sums = np.concatenate([[0.0], np.cumsum(work_of(table, how.cost)[packs.indices])])
    return order_by_rank(packs.indices, offsets, np.diff(sums[offsets]), how.dp)


_VERSION = 2
_PLACE = ("shard", "row", "round")  # These fields identify a sequence.


@dataclass(kw_only=True)
class Ledger:
    """The position of a stream, on which all ranks agree."""

    cursors: IntArray  # int64 ``[K]``, rows of each shard that were read in the present round of its source
    rounds: IntArray  # int64 ``[N]``, the present pass over each source
    drawn: IntArray  # int64 ``[N]``, sequences used of each source since the last one ran dry
    out: npt.NDArray[np.bool_]  # bool ``[N]``, sources that ran dry, so that the others finish this pass
    pool: Table = field(default_factory=lambda: np.empty(0, POOL))
    planned: deque[Planned] = field(default_factory=deque)  # steps that are planned but not made, in order
    number: int = 0  # the number of this pass
    steps: int = 0  # made in this pass
    pace: int = 0  # sequences that each rank reads ahead per step

    @classmethod
    def fresh(cls, shards: int, sources: int) -> Ledger:
        """Return the position at the start of a stream with so many shards and sources."""
        return cls(
            cursors=np.zeros(shards, np.int64),
            rounds=np.zeros(sources, np.int64),
            drawn=np.zeros(sources, np.int64),
            out=np.zeros(sources, bool),
        )

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


def begun(state: dict[str, Any]) -> Ledger:
    """Build a ledger from a saved state, without its pending sequences."""
    if state.get("version") != _VERSION:
        raise ValueError(f"The checkpoint holds version {state.get('version')} of a stream, not {_VERSION}.")
    return Ledger(
        cursors=state["cursors"].numpy().copy(),
        rounds=np.array(state["rounds"], np.int64),
        drawn=np.array(state["drawn"], np.int64),
        out=np.array(state["out"], bool),
        number=int(state["pass"]),
        steps=int(state["steps"]),
        pace=int(state["pace"]),
    )


def pending_rows(state: dict[str, Any]) -> dict[int, dict[int, list[int]]]:
    """Return the records that were read but unused at the checkpoint, by shard, row and pass."""
    rows: dict[int, dict[int, list[int]]] = {}
    for shard, row, number in state["pending"].tolist():
        rows.setdefault(shard, {}).setdefault(row, []).append(number)
    return rows


def restored(state: dict[str, Any], found: Table, *, dp: int, same: bool, source_of: IntArray) -> Ledger:
    """Build a ledger from a saved state and the pending sequences, which were read again."""
    keys = zip(*(found[name].tolist() for name in _PLACE), strict=True)
    places = {key: i for i, key in enumerate(keys)}
    pending = state["pending"].tolist()
    order = [places.get(tuple(place), -1) for place in pending]  # policies may leave some out now
    table = found[np.array([i for i in order if i >= 0], np.int64)]
    ledger = begun(state)
    if same and len(table) == len(pending):
        for offsets in state["planned"]:
            ledger.planned.append(Planned(table[: offsets[-1]], np.array(offsets, np.int64), dp))
            table = table[offsets[-1] :]
    else:  # the planned steps are dropped, so their sequences are drawn again
        unmade = pending[: sum(offsets[-1] for offsets in state["planned"])]
        shards = np.array([shard for shard, *_ in unmade], np.int64)
        again = np.bincount(source_of[shards], minlength=len(ledger.drawn))
        ledger.drawn = np.maximum(0, ledger.drawn - again)
    ledger.pool = table
    return ledger
