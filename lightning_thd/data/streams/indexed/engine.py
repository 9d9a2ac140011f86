"""Lengths of all sequences -> the steps of later epochs: planned by ``PackPlanner`` and read by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.data.streams.engine import ROW_BITS, Made
from lightning_thd.data.streams.indexed.lengths import LengthIndex
from lightning_thd.data.streams.samples import POLICIES, Sampler, unpacked
from lightning_thd.data.streams.schedule import IntArray
from lightning_thd.data.streams.shards import Bad, Shard
from lightning_thd.data.streams.workers import from_workers
from lightning_thd.packing import PackPlanner


@dataclass(frozen=True, kw_only=True)
class PlannedSteps(Dataset[THDStep]):
    """The planned steps of one rank as a dataset, indexed by their number in an epoch.

    Attributes:
        planner: of all sequences of the index.
        index: what they are.
        shards: where they are.
        make_sampler: makes the policies that made the sequences when they were counted.
        collate: samples of a microbatch, ids and scales -> batch.
        epoch: that is planned.
        rank: data-parallel rank.
        dp: data-parallel ranks.
    """

    planner: PackPlanner
    index: LengthIndex
    shards: Sequence[Shard]
    make_sampler: Callable[[], Sampler]
    collate: Callable[..., THDBatch]
    epoch: int
    rank: int
    dp: int

    def __len__(self) -> int:
        return self.planner.num_steps(self.epoch)

    def __getitem__(self, k: int) -> THDStep:
        """Read and collate this rank's microbatches of a step."""
        plan = self.planner.step(self.epoch, k, self.dp)
        of_step, m = plan.spans.index, plan.num_microbatches
        # Law 2: the mean over microbatches and ranks of sum * loss_scale is the mean over the step's tokens.
        tokens, sequences = (
            self.dp * m / total if total else 0.0
            for total in (float(self.index.weight[of_step].sum()), float(self.index.sequences[of_step].sum()))
        )
        own = [spans.index for spans in plan.microbatches(self.rank)]
        samples = dict(zip(np.concatenate(own).tolist(), self._read(np.concatenate(own)), strict=True))
        return THDStep(
            [
                self.collate(
                    [samples[i] for i in ids.tolist()],
                    sequence_ids=self._ids(ids).tolist(),
                    loss_scale=tokens,
                    sequence_scale=sequences,
                )
                for ids in own
            ]
        )

    def _ids(self, positions: IntArray) -> IntArray:
        """Return the sequence ids that the stream used: shard number and row in one integer."""
        return (self.index.shard[positions].astype(np.int64) << ROW_BITS) | self.index.row[positions]

    def _read(self, positions: IntArray) -> list[dict[str, Any]]:
        """Read sequences by record number, shard after shard, and convert them to samples.

        Raises:
            ValueError: when a record is not what it was when it was counted.
        """
        found: dict[int, dict[str, Any]] = {}
        shards, rows = self.index.shard[positions], self.index.row[positions]
        sampler = self.make_sampler()
        for number in np.unique(shards).tolist():
            of = np.flatnonzero(shards == number)
            of = of[np.argsort(rows[of])]
            offsets = self.index.offset[positions[of]].tolist()
            records = self.shards[number].fetch(rows[of].tolist(), offsets)
            for at, record in zip(of.tolist(), records, strict=True):
                found[at] = self._sample(sampler, record, int(positions[at]))
        return [found[at] for at in range(len(positions))]

    def _sample(self, sampler: Sampler, record: Any, position: int) -> dict[str, Any]:
        row, length = int(self.index.row[position]), int(self.index.length[position])
        made = None if isinstance(record, Bad) else sampler(record, row)
        if (
            made is None
            or made.meta["length"] != length
            or made.meta["weight"] != self.index.weight[position]
        ):
            raise ValueError(
                f"Row {row} of {self.shards[int(self.index.shard[position])].name} is not what it was when "
                f"its length ({length} tokens) was written down. The shards changed while they were used: "
                "start the job anew, and the lengths are counted again."
            )
        return unpacked(made.ids, made.labels, made.extra)


class PlannedEngine:
    """Makes the steps of planned epochs, with the interface of ``Engine``."""

    moved_bytes = 0

    def __init__(
        self, steps: PlannedSteps, first: int, *, num_workers: int = 0, timeout_s: float = 600.0
    ) -> None:
        self._steps, self._next, self._num_workers = steps, first, num_workers
        self._timeout_s = timeout_s
        self.counts = dict.fromkeys(("bad", "tail_dropped", *POLICIES), 0)
        self._batches: Iterator[THDStep]
        self.open_pass()

    def open_pass(self) -> None:
        """Start to read an epoch; worker processes start in the calling thread."""
        left = range(self._next, len(self._steps))
        if self._num_workers:
            workers, timeout_s = self._num_workers, self._timeout_s
            self._batches = from_workers(self._steps, workers=workers, timeout_s=timeout_s, sampler=left)
        else:
            self._batches = map(self._steps.__getitem__, left)

    def make(self) -> Made | None:
        """Read and collate the next step of this rank; None where an epoch has none."""
        step = next(self._batches, None)
        if step is None:
            return None
        self._next += 1
        last = self._next == len(self._steps)
        number = self._steps.epoch
        state = {"of_index": self._steps.planner.state(number, self._next)}
        if last:
            self._steps = PlannedSteps(**{**vars(self._steps), "epoch": number + 1})
            self._next = 0
        return Made(step=step, state=state, last=last, tokens=np.zeros(1, np.int64))
