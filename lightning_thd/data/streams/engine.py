"""Shards of all ranks -> one planned, exchanged and collated step after the other, in lockstep on every rank.

Each turn gathers what ranks read since the last (40 bytes a sequence), plans by ``schedule`` on the same
numbers everywhere, and moves what has to move. A rank that cannot go on says so in the gathering, so that all
stop with its message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.data.streams import ledger as ledgers
from lightning_thd.data.streams.exchange import Held, exchange, moved_bytes
from lightning_thd.data.streams.ledger import Ledger
from lightning_thd.data.streams.reader import OnError, Read, Reader, Reading, assign, shard_order
from lightning_thd.data.streams.samples import META, POLICIES, Sampler, check_keys
from lightning_thd.data.streams.schedule import POOL, IntArray, Planned, Scheduling, Table, plan_steps
from lightning_thd.data.streams.shards import Shard
from lightning_thd.data.streams.wire import Wire

_HEADER = np.dtype([(name, "<i8") for name in ("failed", "exhausted", "count", "bad", *POLICIES)])
_ROW_BITS = 40  # of a sequence id, below the number of its shard


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a stream is read and packed.

    Attributes:
        shards: of the whole job.
        make_sampler: makes the policies of one reader.
        scheduling: what decides the steps.
        collate: samples of a microbatch, ids and scales -> batch.
        window: sequences each rank keeps at hand.
        shuffle: draw steps, and the order of shards, at random.
        seed: of these.
        num_workers: processes that read.
        on_error: what becomes of records that cannot be used.
        max_errors: most such records of the whole job; None for no limit.
        timeout_s: seconds until a rank or worker that gives nothing is given up.
    """

    shards: Sequence[Shard]
    make_sampler: Callable[[], Sampler]
    scheduling: Scheduling
    collate: Callable[..., THDBatch]
    window: int
    shuffle: bool = False
    seed: int = 0
    num_workers: int = 0
    on_error: OnError = "raise"
    max_errors: int | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A step that is ready.

    Attributes:
        step: this rank's microbatches.
        state: of the stream after it.
        last: the pass over the shards ends with it.
    """

    step: THDStep
    state: dict[str, Any]
    last: bool


class Engine:
    """Makes the steps of a stream, pass after pass. All its methods are collective.

    Args:
        settings: how the stream is read and packed.
        wire: to the other ranks that read.
        state: of a checkpoint; None starts anew.
        same: the planned steps of the state fit this job.
    """

    def __init__(
        self, settings: Settings, wire: Wire, state: dict[str, Any] | None = None, *, same: bool = False
    ) -> None:
        self._settings, self._wire = settings, wire
        self._names = [shard.name for shard in settings.shards]
        self.ledger = Ledger(cursors=np.zeros(len(settings.shards), np.int64))
        if state is not None:
            self.ledger.cursors, self.ledger.number = state["cursors"].numpy().copy(), int(state["pass"])
        self.counts = dict.fromkeys(("bad", "tail_dropped", *POLICIES), 0)
        self.moved_bytes = 0
        self._held: Held = {}
        self._restore = None if state is None else (state, same)
        self._before = dict(self.counts)  # of the passes that are over
        self._next: Planned | None = None
        self.open_pass()

    def open_pass(self) -> None:
        """Begin to read the pass that the ledger is in; workers start in the thread that calls this."""
        settings, number = self._settings, self.ledger.number
        order = shard_order(len(self._names), seed=settings.seed, number=number, shuffle=settings.shuffle)
        own = set(assign([shard.size for shard in settings.shards], self._wire.ranks)[self._wire.rank])
        self._reading = Reading(
            shards=settings.shards,
            own=[i for i in order if i in own],
            sampler=settings.make_sampler(),
            on_error=settings.on_error,
        )
        starts = {i: int(self.ledger.cursors[i]) for i in own}
        self._reader = Reader(
            self._reading, starts, num_workers=settings.num_workers, timeout_s=settings.timeout_s
        )
        self._exhausted = np.zeros(self._wire.ranks, bool)

    def make(self) -> Made | None:
        """Plan, exchange and collate the next step; None when this pass over the shards has none left.

        Raises:
            ValueError: for what any rank could not read, on every rank.
            RuntimeError: when a rank does not answer in time.
        """
        if self._restore is not None:
            (state, same), self._restore = self._restore, None
            self._read_again(state, same)
        planned = self._next if self._next is not None else self._plan()
        self._next = None
        if planned is None:
            self._end_pass()
            return None
        self.moved_bytes += moved_bytes(planned)
        step = self._collated(planned, exchange(planned, self._held, self._wire))
        self.ledger.steps += 1
        state = self.ledger.state()
        self._next = self._plan()  # gathered and planned while the model runs this step
        last = self._next is None
        if last:
            self._end_pass()
            state = self.ledger.state()
        return Made(step=step, state=state, last=last)

    def _end_pass(self) -> None:
        self.ledger = Ledger(cursors=np.zeros_like(self.ledger.cursors), number=self.ledger.number + 1)
        found = {name: count for name, count in self.counts.items() if count != self._before[name]}
        if found:
            counts = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in found.items())
            rank_zero_info(f"Pass {self.ledger.number - 1} over the stream: {counts} so far")
        self._before = dict(self.counts)
        self._held.clear()

    def _plan(self) -> Planned | None:
        """Take the next planned step, reading ahead; None at the end of the pass."""
        ledger, window = self.ledger, self._settings.window
        if ledger.planned:
            self._gather(self._wanted(window, most=ledger.pace))
            return ledger.planned.popleft()
        target = window
        while True:
            active = max(1, int((~self._exhausted).sum()))
            self._gather(self._wanted(max(target, -(-self._settings.scheduling.needed // active))))
            ended = bool(self._exhausted.all())
            pool = self._ordered(ledger.pool)
            steps, ledger.pool = plan_steps(pool, self._settings.scheduling, ended=ended)
            if steps:
                ledger.planned.extend(steps)
                ledger.pace = -(-window // len(steps))
                return ledger.planned.popleft()
            if ended:
                self.counts["tail_dropped"] += len(ledger.pool)
                return None
            target += window

    def _wanted(self, target: int, *, most: int | None = None) -> IntArray:
        """Count what each rank is to read so that it holds ``target`` sequences nobody planned."""
        held = np.bincount(self.ledger.pool["holder"], minlength=self._wire.ranks)
        wanted = np.where(self._exhausted, 0, np.maximum(0, target - held))
        return wanted if most is None else np.minimum(wanted, most)

    def _ordered(self, pool: Table) -> Table:
        """Draw the order in which sequences are used; without shuffling as they came."""
        if not self._settings.shuffle:
            return pool
        rng = np.random.default_rng([self._settings.seed, self.ledger.number, self.ledger.steps, 1])
        return pool[rng.permutation(len(pool))]

    def _gather(self, wanted: IntArray) -> None:
        """Read what is wanted of this rank, and add what all ranks read to the pool."""
        if not wanted.any():
            return
        own = int(wanted[self._wire.rank])
        tables = self._shared(int(wanted.max()), lambda: self._reader.take(own) if own else [])
        for table in tables:
            np.maximum.at(self.ledger.cursors, table["shard"], table["row"] + 1)
        joined = np.concatenate([self.ledger.pool, *tables])
        check_keys(joined, self._names)
        fresh = np.concatenate([np.arange(len(table)) for table in tables])
        order = np.argsort(fresh, kind="stable")  # one of each rank, then the next of each
        self.ledger.pool = np.concatenate([self.ledger.pool, joined[len(self.ledger.pool) :][order]])

    def _read_again(self, state: dict[str, Any], same: bool) -> None:
        """Read what a checkpoint left pending, each row by the rank that reads its shard now."""
        pending = ledgers.pending_rows(state)
        owners = assign([shard.size for shard in self._settings.shards], self._wire.ranks)
        most = max(sum(len(pending.get(i, [])) for i in own) for own in owners)
        tables = self._shared(most, lambda: self._reader.again(pending))
        self.ledger = ledgers.restored(state, np.concatenate(tables), dp=self._wire.ranks, same=same)

    def _shared(self, most: int, read: Callable[[], list[Read]]) -> list[Table]:
        """Read on every rank, and give each the ``POOL`` of what every other read.

        Raises:
            ValueError: when any rank cannot go on; the message names rank, shard and row.
        """
        failure: Exception | None = None
        reads: list[Read] = []
        try:
            reads = read()
        except Exception as err:  # told to the other ranks, which wait
            failure = err
        header = np.zeros(1, _HEADER)
        header["failed"], header["exhausted"] = failure is not None, self._reader.exhausted
        header["count"], header["bad"] = len(reads), len(self._reader.bad)
        for name, count in self._reader.counts.items():
            header[name] = count
        table = np.zeros(most, META)
        for i, one in enumerate(reads):
            assert one.sample is not None
            meta = {**one.sample.meta, "shard": one.shard, "row": one.row}
            table[i] = tuple(meta[name] for name in META.names or ())
            self._held[one.shard, one.row] = one.sample
        message = np.concatenate([header.view(np.uint8), table.view(np.uint8)])
        found = self._wire.gather(message)
        headers = np.concatenate([one[: _HEADER.itemsize].view(_HEADER) for one in found])
        if headers["failed"].any():
            self._raise(failure)
        self._exhausted = headers["exhausted"].astype(bool)
        for name in ("bad", *POLICIES):
            self.counts[name] = self._before[name] + int(headers[name].sum())
        self._check_bad()
        return [
            _held_by(one[_HEADER.itemsize :].view(META)[: int(head["count"])], rank)
            for rank, (one, head) in enumerate(zip(found, headers, strict=True))
        ]

    def _raise(self, failure: Exception | None) -> None:
        texts = self._wire.texts("" if failure is None else f"{failure}")
        failed = [f"Rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        raise ValueError(" ".join(failed) or "A rank could not read its shards.") from failure

    def _check_bad(self) -> None:
        """End the job on every rank when too many records could not be used."""
        limit = self._settings.max_errors
        if limit is not None and self.counts["bad"] > limit:
            texts = self._wire.texts("; ".join(self._reader.bad[-3:]))
            raise ValueError(
                f"{self.counts['bad']} records could not be used, more than max_errors={limit}. The last: "
                + "; ".join(text for text in texts if text)
            )

    def _collated(self, planned: Planned, microbatches: list[list[dict[str, Any]]]) -> THDStep:
        """Collate this rank's microbatches with the scales of the whole step."""
        table, rank, m = planned.table, self._wire.rank, planned.microbatches
        # Law 2: the mean over microbatches and ranks of sum * loss_scale is the mean over the step's tokens.
        tokens, sequences = (
            planned.dp * m / total if total else 0.0
            for total in (float(table["weight"].sum()), float(table["sequences"].sum()))
        )
        ids = (table["shard"].astype(np.int64) << _ROW_BITS) | table["row"]
        bounds = planned.offsets[rank * m : (rank + 1) * m + 1].tolist()
        return THDStep(
            [
                self._settings.collate(
                    samples,
                    sequence_ids=ids[start:stop].tolist(),
                    loss_scale=tokens,
                    sequence_scale=sequences,
                )
                for samples, start, stop in zip(microbatches, bounds[:-1], bounds[1:], strict=True)
            ]
        )


def _held_by(table: Table, rank: int) -> Table:
    pool = np.zeros(len(table), POOL)
    for name in META.names or ():
        pool[name] = table[name]
    pool["holder"] = rank
    return pool
