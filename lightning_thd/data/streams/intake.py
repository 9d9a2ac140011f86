"""Sources and how much each rank is to read of them -> what all ranks read, known to every rank.

A rank that cannot go on says so in its message, so that all stop with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_thd.data.streams.ranks.exchange import Held
from lightning_thd.data.streams.ranks.message import (
    Layout,
    Table,
    decode,
    encode,
    header_type,
    in_runs,
    settled,
    widened,
)
from lightning_thd.data.streams.ranks.wire import Wire
from lightning_thd.data.streams.reader import OnError, Read, Reader, Reading, assign, shard_order
from lightning_thd.data.streams.samples import META, POLICIES, Sampler
from lightning_thd.data.streams.schedule import POOL, IntArray
from lightning_thd.data.streams.shards import Mark, Shard

_WORKERS_FROM = 1000  # sequences of a rank's round: below it starting workers again takes longer than reading


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source of a stream: its shards, share and policies.

    Attributes:
        name: in a mixture; empty where there is one source.
        first: number of its first shard among those of the stream.
        stop: one past the number of its last.
        share: whole number, of all sources' together.
        shuffle_buffer: sequences each rank keeps at hand to draw from at random; 0 keeps their order.
        on_error: what becomes of records that cannot be used.
        max_errors: most such records of the whole job; None for no limit.
    """

    name: str = ""
    first: int = 0
    stop: int
    share: int = 1
    shuffle_buffer: int = 0
    on_error: OnError = "raise"
    max_errors: int | None = None


class Intake:
    """Reads the sources of a stream on one rank and tells all ranks what each has read."""

    def __init__(
        self,
        shards: Sequence[Shard],
        sources: Sequence[Source],
        make_sampler: Callable[[], Sampler],
        wire: Wire,
        *,
        seed: int = 0,
        num_workers: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        self._shards, self._sources, self._make_sampler, self._wire = shards, sources, make_sampler, wire
        self._seed, self._num_workers, self._timeout_s = seed, num_workers, timeout_s
        self.held: Held = {}
        self.failure: Exception | None = None  # of this rank, which the others are to be told
        self.exhausted = np.zeros((len(sources), wire.ranks), bool)
        self.marks: dict[int, list[Mark]] = {}  # of shards that have a state, in order
        self.counts = dict.fromkeys(("bad", "tail_dropped", *POLICIES), 0)
        self._bad = np.zeros(len(sources), np.int64)  # of rounds that are over
        self._policies = dict.fromkeys(POLICIES, 0)  # likewise, of this rank
        self._own_bad = np.zeros(len(sources), np.int64)  # likewise, of this rank
        self._readers: list[Reader | None] = [None] * len(sources)
        self._taken = [0] * len(sources)  # by this rank in the present round
        self._layout = Layout()
        self._header = header_type(len(sources))
        sizes = [shard.size for shard in shards]
        self._owners = [
            [
                [source.first + i for i in own]
                for own in assign(sizes[source.first : source.stop], wire.ranks, first=source.first)
            ]
            for source in sources
        ]

    def open(self, number: int, round_: int, cursors: IntArray) -> None:
        """Start to read a source, or its next pass; worker processes start in the calling thread."""
        source, before = self._sources[number], self._readers[number]
        own = set(self._owners[number][self._wire.rank])
        order = shard_order(
            source.stop - source.first, seed=self._seed, number=round_, shuffle=source.shuffle_buffer > 0
        )
        reading = Reading(
            shards=self._shards,
            own=[source.first + i for i in order if source.first + i in own],
            sampler=self._make_sampler(),
            on_error=source.on_error,
            round=round_,
            marks={i: marks[0] for i in own if (marks := self.marks.get(i))},
        )
        workers = self._num_workers
        if before is not None:
            self._own_bad[number] += len(before.bad)
            for name, count in before.counts.items():
                self._policies[name] += count
            workers = workers if self._taken[number] >= _WORKERS_FROM or len(self._sources) == 1 else 0
        starts = {i: int(cursors[i]) for i in own}
        self._readers[number] = Reader(reading, starts, num_workers=workers, timeout_s=self._timeout_s)
        self._taken[number] = 0
        self.exhausted[number] = False

    @property
    def dry(self) -> npt.NDArray[np.bool_]:
        """Return which sources every rank has read to their end, bool ``[N]``."""
        return np.asarray(self.exhausted.all(axis=1))

    def gather(self, wanted: IntArray) -> Table:
        """Read this rank's share of ``[N, ranks]`` sequences; return ``POOL`` of what all read; a collective.

        Raises:
            ValueError: when any rank cannot go on; the message names rank, shard and row.
        """
        own = wanted[:, self._wire.rank].tolist()
        return self._shared(int(wanted.sum(0).max()), lambda: self._take(own))

    def again(self, pending: dict[int, dict[int, list[int]]]) -> Table:
        """Read a checkpoint's pending sequences again, each on the rank that has its shard; a collective."""
        most = 0
        for rank in range(self._wire.ranks):
            shards = [i for owners in self._owners for i in owners[rank]]
            most = max(most, sum(len(of) for i in shards for of in pending.get(i, {}).values()))
        return self._shared(
            most, lambda: [read for reader in self._open_readers for read in reader.again(pending)]
        )

    @property
    def _open_readers(self) -> list[Reader]:
        return [reader for reader in self._readers if reader is not None]

    def _take(self, counts: list[int]) -> list[Read]:
        found: list[Read] = []
        for number, (reader, count) in enumerate(zip(self._readers, counts, strict=True)):
            if reader is not None and count:
                taken = reader.take(count)
                self._taken[number] += len(taken)
                found += taken
        return found

    def _shared(self, most: int, read: Callable[[], list[Read]]) -> Table:
        """Read on every rank, and return the ``POOL`` of what all ranks read; a collective."""
        failure, reads = self.failure, list[Read]()
        try:
            reads = read() if failure is None else reads
        except Exception as err:  # told to the other ranks, which wait
            failure = err
        table = self._table(reads)
        header = self._written_header(failure is not None)
        while True:
            found = self._wire.gather(encode(table, header, self._layout, most))
            headers = np.concatenate([one[: self._header.itemsize].view(self._header) for one in found])
            if headers["failed"].any():
                self._raise(failure)
            wider = widened(self._layout, headers)
            if wider is None:
                break
            self._layout = wider
        tables = [
            _held_by(decode(one, head, self._layout, most), rank)
            for rank, (one, head) in enumerate(zip(found, headers, strict=True))
        ]
        self._layout = settled(self._layout, headers)
        self._count(headers)
        if headers["marks"].any():
            self._share_marks()
        return _in_turn(tables)

    def _share_marks(self) -> None:
        """Send all ranks the saved states of this rank's sources that have one; a collective."""
        own: dict[int, list[Mark]] = {}
        for reader in self._open_readers:
            own |= reader.marks
            reader.marks = {}
        for found in self._wire.objects(own):
            for shard, marks in found.items():
                self.marks.setdefault(shard, []).extend(marks)

    def forget(self, number: int) -> None:
        """Drop the saved states of a source whose pass is over."""
        for shard in range(self._sources[number].first, self._sources[number].stop):
            self.marks.pop(shard, None)

    def drop_marks(self, pending: Table, cursors: IntArray) -> None:
        """Drop saved states older than the last one from which all unused records can be read."""
        for shard, marks in self.marks.items():
            rows = pending["row"][pending["shard"] == shard]
            least = min(int(rows.min()) if len(rows) else int(cursors[shard]), int(cursors[shard]))
            before = sum(mark[0] <= least for mark in marks)
            self.marks[shard] = marks[max(0, before - 1) :]

    def _table(self, reads: list[Read]) -> Table:
        table = np.zeros(len(reads), META)
        for i, one in enumerate(reads):
            assert one.sample is not None
            meta = {
                **one.sample.meta,
                "shard": one.shard,
                "row": one.row,
                "round": one.round,
            }
            table[i] = tuple(meta[name] for name in META.names or ())
            self.held[one.round, one.shard, one.row] = one.sample
        return table[in_runs(table)]

    def _written_header(self, failed: bool) -> Table:
        header = np.zeros(1, self._header)
        header["failed"] = failed
        header["marks"] = sum(len(reader.marks) for reader in self._open_readers)
        for number, reader in enumerate(self._readers):
            header["exhausted"][0, number] = reader is None or reader.exhausted
            header["bad"][0, number] = self._own_bad[number] + (0 if reader is None else len(reader.bad))
        for name in POLICIES:
            header[name] = self._policies[name] + sum(reader.counts[name] for reader in self._open_readers)
        return header

    def _count(self, headers: Table) -> None:
        self.exhausted = headers["exhausted"].T.astype(bool)
        bad = headers["bad"].sum(0)
        self.counts["bad"] = int(bad.sum())
        for name in POLICIES:
            self.counts[name] = int(headers[name].sum())
        for number, source in enumerate(self._sources):
            if source.max_errors is not None and bad[number] > source.max_errors:
                self._raise_bad(number, int(bad[number]))

    def _raise(self, failure: Exception | None) -> None:
        texts = self._wire.objects("" if failure is None else f"{failure}")
        failed = [f"Rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        raise ValueError(" ".join(failed) or "A rank could not read its shards.") from failure

    def _raise_bad(self, number: int, count: int) -> None:
        """Raise on every rank because too many records of a source were unusable."""
        reader, source = self._readers[number], self._sources[number]
        texts = self._wire.objects("; ".join(reader.bad[-3:]) if reader is not None else "")
        of = f" of {source.name!r}" if source.name else ""
        raise ValueError(
            f"{count} records{of} could not be used, more than max_errors={source.max_errors}. The last: "
            + "; ".join(text for text in texts if text)
        )


def _held_by(table: Table, rank: int) -> Table:
    pool: npt.NDArray[np.void] = np.zeros(len(table), POOL)
    for name in META.names or ():
        pool[name] = table[name]
    pool["holder"] = rank
    return pool


def _in_turn(tables: list[Table]) -> Table:
    """Order sequences by turns of ranks and shards: the first of each, then the second, and so on."""
    joined = np.concatenate(tables)
    place = np.stack([joined["holder"], joined["shard"], joined["round"]])
    begins = (
        np.concatenate([[True], (np.diff(place, axis=1) != 0).any(0)]) if len(joined) else np.empty(0, bool)
    )
    starts = np.flatnonzero(begins)
    within = np.arange(len(joined)) - np.repeat(starts, np.diff(starts, append=len(joined)))
    return joined[np.argsort(within, kind="stable")]
