"""The files of a stream and the number of records per rank -> what all ranks read, known to every rank.

Here a shard is a file or part of a stream. A rank that fails sends its reason, so that all stop with it.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as worker_module

from lightning_thd.batch import THDBatch
from lightning_thd.data.read.records import Bad
from lightning_thd.data.store.index import OnError
from lightning_thd.data.streams.ranks import Held, Wire
from lightning_thd.data.streams.samples import META, POLICIES, Sample, Sampler
from lightning_thd.data.streams.schedule import POOL, IntArray, Scheduling, Table
from lightning_thd.data.streams.shards import Mark, Shard

Dry = Literal["restart", "stop", "rest"]

# For fewer sequences per rank and round, starting workers again takes longer than reading.
_WORKERS_FROM = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source of a stream: its shards, share and policies."""

    name: str = ""  # in a mixture; empty if there is one source
    first: int = 0  # number of its first shard among those of the stream
    stop: int  # number of its last shard, plus one
    share: int = 1  # a whole number; the source gets share / (sum of all shares)
    shuffle_buffer: int = 0  # sequences that each rank keeps to draw from at random; 0 keeps their order
    on_error: OnError = "raise"
    max_errors: int | None = None  # most bad records in the whole job; None for no limit


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a stream is read and packed: sources, shards, policies and scheduling."""

    shards: Sequence[Shard]
    sources: Sequence[Source]
    dry: Dry = "restart"
    make_sampler: Callable[[], Sampler]  # makes the policies of one reader
    scheduling: Scheduling
    collate: Callable[..., THDBatch]  # samples of a microbatch, ids and scales -> batch
    window: int  # sequences that each rank keeps ready to plan from
    seed: int = 0
    num_workers: int = 0  # processes that read
    timeout_s: float = 600.0  # seconds to wait for a rank that sends nothing

    @cached_property
    def source_of(self) -> IntArray:
        """Return the number of each shard's source, int64 ``[K]``."""
        return np.repeat(np.arange(len(self.sources)), [one.stop - one.first for one in self.sources])

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of a mixture's sources; empty if there is no mixture."""
        return tuple(source.name for source in self.sources) if self.sources[0].name else ()


class Intake:
    """Reads the sources of a stream on one rank, and exchanges with all ranks what each has read."""

    def __init__(self, settings: Settings, wire: Wire) -> None:
        self._settings, self._sources, self._wire = settings, settings.sources, wire
        self.held: Held = {}
        self.failure: Exception | None = None  # an error of this rank, to be sent to the others
        self.exhausted = np.zeros((len(self._sources), wire.ranks), bool)
        self.marks: dict[int, list[Mark]] = {}  # the states of shards that have one, in order
        self.counts = dict.fromkeys(("bad", "tail_dropped", *POLICIES), 0)
        self._tallies = [Tally() for _ in self._sources]  # this rank's
        self._readers: dict[int, Reader] = {}  # by source

    def open(self, number: int, round_: int, cursors: IntArray) -> None:
        """Begin a pass over a source; worker processes start in the calling thread."""
        settings, source, before = self._settings, self._sources[number], self._readers.get(number)
        shards = np.arange(source.first, source.stop)
        sizes = [settings.shards[i].size for i in shards.tolist()]
        own = shards[assign(sizes, self._wire.ranks, first=source.first)[self._wire.rank]]
        if source.shuffle_buffer:
            order = np.random.default_rng([settings.seed, round_]).permutation(shards)
            own = order[np.isin(order, own)]
        few = before is not None and before.taken < _WORKERS_FROM and len(self._sources) > 1
        reading = Reading(
            shards=settings.shards,
            own=own.tolist(),
            starts={i: int(cursors[i]) for i in own.tolist()},
            sampler=settings.make_sampler(),
            round=round_,
            marks={i: marks[0] for i in own.tolist() if (marks := self.marks.get(i))},
        )
        self._readers[number] = Reader(
            reading,
            self._tallies[number],
            skips=source.on_error == "skip",
            num_workers=0 if few else settings.num_workers,
        )
        self.exhausted[number] = False

    @property
    def dry(self) -> npt.NDArray[np.bool_]:
        """Return which of the N sources all ranks have read to their end, bool ``[N]``."""
        return np.asarray(self.exhausted.all(axis=1))

    def gather(self, wanted: IntArray) -> Table:
        """Read as many sequences as ``wanted`` ``[N, ranks]`` asks of this rank; a collective."""
        own = wanted[:, self._wire.rank].tolist()
        return self._shared(lambda: self._take(own))

    def again(self, pending: dict[int, dict[int, list[int]]]) -> Table:
        """Read a checkpoint's unused sequences again, each on the rank with its shard; a collective."""
        return self._shared(
            lambda: [one for reader in self._readers.values() for one in reader.again(pending)]
        )

    def _take(self, counts: list[int]) -> list[Read]:
        return [one for number, reader in self._readers.items() for one in reader.take(counts[number])]

    def _shared(self, read: Callable[[], list[Read]]) -> Table:
        """Read on every rank, and return a ``POOL`` table of what all ranks read; a collective."""
        failure, reads, marks = self.failure, list[Read](), dict[int, list[Mark]]()
        try:
            reads = read() if failure is None else reads
        except Exception as err:  # sent to the other ranks, which wait
            failure = err
        for reader in self._readers.values():
            marks |= reader.marks
            reader.marks = {}
        told: list[Told] = self._wire.objects(
            Told(
                table=self._table(reads),
                failure=None if failure is None else f"{failure}",
                exhausted=[reader.exhausted for reader in self._readers.values()],
                tallies=self._tallies,
                marks=marks,
            )
        )
        if failed := [f"Rank {rank}: {of.failure}" for rank, of in enumerate(told) if of.failure is not None]:
            raise ValueError(" ".join(failed)) from failure
        for one in told:
            for shard, found in one.marks.items():
                self.marks.setdefault(shard, []).extend(found)
        self._count(told)
        return _pooled([one.table for one in told])

    def forget(self, number: int) -> None:
        """Drop the saved states of a source whose pass is over."""
        for shard in range(self._sources[number].first, self._sources[number].stop):
            self.marks.pop(shard, None)

    def drop_marks(self, pending: Table, cursors: IntArray) -> None:
        """Keep the last saved state from which all unused records can be read; drop older states."""
        for shard, marks in self.marks.items():
            rows = pending["row"][pending["shard"] == shard]
            least = min(int(rows.min()) if len(rows) else int(cursors[shard]), int(cursors[shard]))
            before = sum(mark[0] <= least for mark in marks)
            self.marks[shard] = marks[max(0, before - 1) :]

    def _table(self, reads: list[Read]) -> Table:
        table = np.zeros(len(reads), META)
        for i, one in enumerate(reads):
            assert one.sample is not None
            meta = {**one.sample.meta, "shard": one.shard, "row": one.row, "round": one.round}
            table[i] = tuple(meta[name] for name in META.names or ())
            self.held[one.round, one.shard, one.row] = one.sample.payload
        return table[np.lexsort((table["row"], table["round"], table["shard"]))]

    def _count(self, told: list[Told]) -> None:
        self.exhausted = np.array([one.exhausted for one in told]).T
        for name in POLICIES:
            self.counts[name] = sum(tally.counts[name] for one in told for tally in one.tallies)
        self.counts["bad"] = sum(tally.bad for one in told for tally in one.tallies)
        for number, source in enumerate(self._sources):
            tallies = [one.tallies[number] for one in told]
            bad = sum(tally.bad for tally in tallies)
            if source.max_errors is not None and bad > source.max_errors:
                of = f" of {source.name!r}" if source.name else ""
                raise ValueError(
                    f"{bad} records{of} could not be used, more than max_errors={source.max_errors}. "
                    f"The last: {'; '.join(text for tally in tallies for text in tally.last)}"
                )


def _pooled(tables: list[Table]) -> Table:
    """Join the tables of all ranks: the first record of each rank and shard, then each second, and so on."""
    joined: npt.NDArray[np.void] = np.zeros(sum(map(len, tables)), POOL)
    for name in META.names or ():
        joined[name] = np.concatenate([table[name] for table in tables])
    joined["holder"] = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    place = np.stack([joined["holder"], joined["shard"], joined["round"]])
    begins = np.ones(len(joined), bool)
    begins[1:] = (np.diff(place, axis=1) != 0).any(0)
    starts = np.flatnonzero(begins)
    within = np.arange(len(joined)) - np.repeat(starts, np.diff(starts, append=len(joined)))
    return joined[np.argsort(within, kind="stable")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """One record that was read, or the place at which reading failed."""

    shard: int  # number of its shard
    row: int  # its row in the shard
    round: int = 0  # the pass over its source
    sample: Sample | None  # None if a policy left it out, or if it is bad
    bad: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    mark: Mark | None = None  # a state from which its shard can resume at the next row; mostly None


def assign(sizes: Sequence[int], ranks: int, *, first: int = 0) -> list[list[int]]:
    """Assign shards to ranks by falling size: rank ``first``, then always the rank with the least."""
    heap = [(0, (rank - first) % ranks, rank) for rank in range(ranks)]
    heapq.heapify(heap)
    own: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, count, rank = heapq.heappop(heap)
        own[rank].append(number)
        heapq.heappush(heap, (load + sizes[number], count + ranks, rank))
    return [sorted(numbers) for numbers in own]


@dataclass(kw_only=True, eq=False)
class Reading(IterableDataset[Read]):
    """The shards that a rank reads, their order, and the sampler that turns records into samples."""

    shards: Sequence[Shard]  # all shards of the stream
    own: Sequence[int]  # numbers of the shards that this rank reads, in reading order
    starts: Mapping[int, int]  # the first row to read of each shard
    sampler: Sampler
    round: int = 0  # the pass over the source
    marks: Mapping[int, Mark] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Read]:
        """Read the shards; each of n workers reads every n-th shard."""
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None:
            # Hide the worker from datasets that divide their records among workers: here one reads a shard.
            worker_module._worker_info = None
        for number in self.own[first::every]:
            yield from self.rows(number, self.starts[number])

    def rows(self, number: int, start: int) -> Iterator[Read]:
        """Yield the records of one shard from a row on."""
        shard, row, mark = self.shards[number], start - 1, self.marks.get(number)
        try:
            for row, record, after in shard.read(
                start, mark if mark is not None and mark[0] <= start else None
            ):
                yield self._read(number, row, record, after)
        except ModuleNotFoundError:
            raise
        except Exception as err:  # a file system, decoder or user's iterator failed: no records follow
            yield Read(shard=number, row=row + 1, sample=None, bad=f"reading stopped: {err}")

    def _read(self, number: int, row: int, record: Any, mark: Mark | None) -> Read:
        before = dict(self.sampler.counts)
        try:
            if isinstance(record, Bad):
                raise ValueError(record.reason)
            sample = self.sampler(record, row)
        except (ValueError, TypeError) as err:
            return Read(shard=number, row=row, round=self.round, sample=None, bad=str(err), mark=mark)
        counts = {name: count - before[name] for name, count in self.sampler.counts.items()}
        return Read(shard=number, row=row, round=self.round, sample=sample, counts=counts, mark=mark)


@dataclass(slots=True)
class Tally:
    """How many records of one source a rank has left out or changed so far."""

    bad: int = 0
    last: deque[str] = field(default_factory=lambda: deque(maxlen=3))  # places and faults of bad records
    counts: Counter[str] = field(default_factory=Counter)  # by policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """The message of a rank to the others after it has read."""

    table: Table  # the ``META`` of the records it read
    failure: str | None  # why it failed, if it did
    exhausted: list[bool]  # by source
    tallies: list[Tally]  # by source
    marks: dict[int, list[Mark]]  # new states of its shards


class Reader:
    """Reads the shards of a rank in order, in this process or in workers, and counts records left out."""

    def __init__(self, reading: Reading, tally: Tally, *, skips: bool, num_workers: int) -> None:
        self._reading, self._tally, self._skips = reading, tally, skips
        self.exhausted, self.taken = False, 0
        self.marks: dict[int, list[Mark]] = {}  # found since the last exchange
        self._rows = iter(reading)
        if workers := min(num_workers, len(reading.own)):
            # Workers start here, in the thread that makes the reader.
            self._rows = iter(DataLoader(reading, batch_size=None, num_workers=workers))

    def take(self, count: int) -> list[Read]:
        """Return up to ``count`` samples; fewer only at the end of the shards."""
        taken: list[Read] = []
        while len(taken) < count:
            try:
                read = next(self._rows, None)
            except RuntimeError as err:  # a worker died
                names = ", ".join(self._reading.shards[i].name for i in self._reading.own[:4])
                raise ValueError(f"A worker that reads {names} ended: {err}") from err
            if read is None:
                self.exhausted = True
                break
            if read.mark is not None:
                self.marks.setdefault(read.shard, []).append(read.mark)
            self._tally.counts.update(read.counts)
            if read.bad is not None:
                place = f"shard {self._reading.shards[read.shard].name}, row {read.row}: {read.bad}"
                if not self._skips:
                    raise ValueError(f"{place} To leave such records out, pass on_error='skip'.")
                self._tally.bad += 1
                self._tally.last.append(place)
            elif read.sample is not None:
                taken.append(read)
        self.taken += len(taken)
        return taken

    def again(self, pending: dict[int, dict[int, list[int]]]) -> list[Read]:
        """Read again the records, by shard, row and pass, that were read but unused at a checkpoint."""
        found = []
        for number in self._reading.own:
            rows = pending.get(number)
            if not rows:
                continue
            read = self._reading.rows(number, min(rows))
            reads = list(islice((one for one in read if one.row in rows and one.bad is None), len(rows)))
            if len(reads) != len(rows):
                raise ValueError(
                    f"Shard {self._reading.shards[number].name} held {len(rows)} sequences when the "
                    f"checkpoint was written, but gives {len(reads)} of them now. Restore the file."
                )
            for one in reads:
                self._tally.counts.update(one.counts)
            found += [replace(one, round=of) for one in reads if one.sample for of in rows[one.row]]
        return found
