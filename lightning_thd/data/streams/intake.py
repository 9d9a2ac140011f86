"""The shards of a stream, and how many sequences to read -> a table of what all ranks read, on every rank."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_thd._private import private
from lightning_thd._workers import begin_worker, own_generator
from lightning_thd.batch import THDBatch
from lightning_thd.data.read.records import Bad
from lightning_thd.data.store.index import OnError
from lightning_thd.data.streams.ranks import Payloads, Wire
from lightning_thd.data.streams.samples import META, PER_SOURCE, POLICIES, Form, Sample, Sampler
from lightning_thd.data.streams.schedule import POOL, IntArray, Ledger, Pending, Place, Scheduling, Table
from lightning_thd.data.streams.shards import Mark, Shard

Dry = Literal["restart", "stop", "rest"]
Marks = dict[Place, list[Mark]]  # (shard, pass) -> its saved states, in order

# With fewer sequences in the last pass over a mixture's source, starting workers takes longer than reading.
_WORKERS_FROM = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source of a stream: its shards, share and policies."""

    name: str = ""  # name in a mixture; empty if there is one source
    first: int = 0  # number of the first shard among all shards of the stream
    stop: int  # number of the last shard, plus one
    share: int = 1  # a whole number; the source gets share / (sum of all shares)
    shuffle_buffer: int = 0  # sequences that each rank keeps to draw from at random; 0 keeps their order
    on_error: OnError = "raise"
    max_errors: int | None = None  # most bad records in the whole job; None sets no bound


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a stream is read and packed: sources, shards, policies and scheduling."""

    shards: Sequence[Shard]
    sources: Sequence[Source]
    dry: Dry = "restart"  # what happens when a source runs dry: see ``Mixing``
    make_sampler: Callable[[], Sampler]  # makes the sampler of one reader
    scheduling: Scheduling
    collate: Callable[..., THDBatch]  # samples of a microbatch, ids and scales -> batch
    window: int  # sequences that each rank holds for planning
    seed: int = 0
    num_workers: int = 0  # processes that read
    timeout_s: float = 600.0  # seconds to wait for a rank that sends nothing

    @cached_property
    def source_of(self) -> IntArray:
        """Return the number of each shard's source, int64, one for each shard."""
        return np.repeat(np.arange(len(self.sources)), [s.stop - s.first for s in self.sources])

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of a mixture's sources; empty if there is no mixture."""
        return tuple(source.name for source in self.sources) if self.sources[0].name else ()


class Intake:
    """Reads the sources of a stream on one rank, and exchanges tables of what was read with all ranks."""

    def __init__(self, settings: Settings, wire: Wire) -> None:
        self._settings, self._sources, self._wire = settings, settings.sources, wire
        self.payloads: Payloads = {}  # unused sequences that this rank holds
        self.exhausted = np.zeros((len(self._sources), wire.ranks), bool)  # ``[N, ranks]``, all shards read
        # int64 ``[ranks, N, 3]``: the last shard read or -1, whether no workers read, and the sequences read
        self.turns = np.full((wire.ranks, len(self._sources), 3), [-1, 0, 0])
        self.marks: Marks = {}
        self.counts = dict.fromkeys(("bad", "tail_dropped", *POLICIES), 0)  # over all ranks
        self._tallies = [Tally() for _ in self._sources]  # counts of this rank
        self.forms: Form = {}  # the form of most of the first records that were read
        self._readers: dict[int, Reader] = {}  # the reader of each source

    def open(self, number: int, round_: int, cursors: IntArray) -> None:
        """Begin a pass over a source; the calling thread starts its workers."""
        settings, source = self._settings, self._sources[number]
        shards = np.arange(source.first, source.stop)
        sizes = [settings.shards[i].size for i in shards.tolist()]
        mine = shards[assign(sizes, self._wire.ranks, first=source.first)[self._wire.rank]]
        if source.shuffle_buffer:
            order = np.random.default_rng([settings.seed, round_]).permutation(shards)
            mine = order[np.isin(order, mine)]
        reading = Reading(
            shards=settings.shards,
            mine=mine.tolist(),
            starts={i: int(cursors[i]) for i in mine.tolist()},
            sampler=settings.make_sampler(),
            round=round_,
            turn=self.turns[self._wire.rank, number].tolist(),
            marks={place: marks[0] for place, marks in self.marks.items() if place[0] in mine},
        )
        self._readers[number] = Reader(reading, self._tallies[number], source, settings.num_workers)

    def end_pass(self, numbers: IntArray) -> None:
        """Forget how far the pass over some sources has come; ``open`` begins the next."""
        self.exhausted[numbers] = False
        few = self.turns[:, numbers, 2] < (_WORKERS_FROM if len(self._sources) > 1 else 0)
        self.turns[:, numbers] = np.stack([np.full(few.shape, -1), few, 0 * few], -1)

    def gather(self, wanted: IntArray) -> Table:
        """Read ``wanted[source, rank]`` sequences of each source on each rank; a collective."""
        counts = wanted[:, self._wire.rank].tolist()
        return self._exchange(lambda number, reader: reader.take(counts[number]))

    def read_again(self, pending: Pending, ended: npt.NDArray[np.bool_]) -> Table:
        """Read the unused sequences of a checkpoint again, on the ranks of their shards; a collective."""
        mine = ended[:, self._wire.rank].tolist()
        return self._exchange(lambda number, reader: reader.read_again(pending, ended=mine[number]))

    def fail(self, error: Exception) -> NoReturn:
        """Send an error of this rank in the collective with which the others read on; all ranks raise it."""
        self._exchange(lambda *_: [], error)
        raise error

    def _exchange(self, read: Callable[[int, Reader], list[Read]], failure: Exception | None = None) -> Table:
        """Call ``read`` for each source, and return a ``POOL`` table of what all ranks read; a collective."""
        reads, marks = list[Read](), Marks()
        try:
            for number, reader in self._readers.items():
                reads += read(number, reader)
        except Exception as err:  # the error is sent to the other ranks, which wait
            failure, reads = err, []
        for reader in self._readers.values():
            marks |= reader.marks
            reader.marks = {}
        status = [(reader.exhausted, *reader.turn) for reader in self._readers.values()]
        forms = {x.sample.meta["form"]: x.sample.form for x in reads if x.sample is not None}
        sent = (failure and f"{failure}", self._table(reads), status, self._tallies, marks, forms)
        messages, tables, statuses, tallies, marks_of, forms_of = zip(*self._wire.objects(sent), strict=True)
        if failed := [f"Rank {i}: {x}" for i, x in enumerate(messages) if x is not None]:
            raise ValueError(" ".join(failed)) from failure
        for place, some in (item for of_rank in marks_of for item in of_rank.items()):
            self.marks[place] = self.marks.get(place, []) + some
        self.exhausted, self.turns = np.array(statuses)[..., 0].T.astype(bool), np.array(statuses)[..., 1:]
        self._add_up(tallies)
        return self._alike(_pooled(tables), {code: form for some in forms_of for code, form in some.items()})

    def _alike(self, table: Table, forms: dict[int, Form]) -> Table:
        """Leave out records that cannot be in a batch with most of the first, or raise; all ranks do."""
        sources = self._settings.source_of[table["shard"]].tolist()
        read = list(zip(table["form"].tolist(), sources, strict=True))
        keyed = {pair: _keyed(forms[pair[0]], pair[1]) for pair in set(read)}
        votes = Counter[tuple[str, str]]()
        if any(form.keys() - self.forms for form in keyed.values()):
            for pair in read:
                votes.update(keyed[pair].items())
        self.forms = dict(pair for pair, _ in reversed(votes.most_common())) | self.forms
        odd = {pair: key for pair, form in keyed.items() for key in form if form[key] != self.forms[key]}
        wrong = np.array([pair in odd for pair in read], bool)
        for code, *place, holder in table[["form", "round", "shard", "row", "holder"]][wrong].tolist():
            self.payloads.pop(tuple(place), None)
            number = self._settings.source_of[place[1]]
            key = odd[code, number]
            name = key.partition(" ")[0]
            shapes = [keyed[code, number][key], self.forms[key]]
            of_shape = "" if name in PER_SOURCE else " of shape {}"
            has, most = (f"{name!r}{of_shape.format(x)}" if x else f"no {name!r}" for x in shapes)
            fault = f"it has {has}, but most of the first records have {most}."
            if holder == self._wire.rank or self._sources[number].on_error == "raise":
                name = self._settings.shards[place[1]].name
                self._tallies[number].add(f"shard {name}, row {place[2]}: {fault}", self._sources[number])
        kept: Table = table[~wrong]
        return kept

    def drop_marks(self, pending: IntArray, ledger: Ledger) -> None:
        """Keep the last state of each shard and pass from which all unused records can be read, and later."""
        for (shard, round_), marks in list(self.marks.items()):
            ahead = round_ - int(ledger.rounds[self._settings.source_of[shard]])
            rows = pending[(pending[:, 0] == shard) & (pending[:, 2] == round_), 1].tolist()
            rows += [] if ahead else [int(ledger.cursors[shard])]
            before = sum(mark[0] <= min(rows, default=0) for mark in marks)
            self.marks[shard, round_] = marks[max(0, before - 1) :]
            if ahead < 0 and not rows:
                del self.marks[shard, round_]

    def _table(self, reads: list[Read]) -> Table:
        table = np.zeros(len(reads), META)
        for i, read in enumerate(reads):
            assert read.sample is not None
            meta = {**read.sample.meta, "shard": read.shard, "row": read.row, "round": read.round}
            table[i] = tuple(meta[name] for name in META.names or ())
            self.payloads[read.round, read.shard, read.row] = read.sample.payload
        return table[np.lexsort((table["row"], table["round"], table["shard"]))]

    def _add_up(self, tallies: Sequence[list[Tally]]) -> None:
        """Add up the counts of all ranks; raise if more than ``max_errors`` records of a source are bad."""
        for name in POLICIES:
            self.counts[name] = sum(tally.counts[name] for of_rank in tallies for tally in of_rank)
        self.counts["bad"] = sum(tally.bad for of_rank in tallies for tally in of_rank)
        for source, of_ranks in zip(self._sources, zip(*tallies, strict=True), strict=True):
            bad = sum(tally.bad for tally in of_ranks)
            if source.max_errors is not None and bad > source.max_errors:
                of = f" of {source.name!r}" if source.name else ""
                raise ValueError(
                    f"{bad} records{of} could not be used, more than max_errors={source.max_errors}. "
                    f"The last: {'; '.join(text for tally in of_ranks for text in tally.last)}"
                )


def _keyed(form: Form, source: int) -> Form:
    """Return a form in which the keys of ``PER_SOURCE`` carry the number of the source."""
    return {f"{key} {source}" if key in PER_SOURCE else key: shape for key, shape in form.items()}


def _pooled(tables: Sequence[Table]) -> Table:
    """Join the tables of all ranks: the first records of all shards, then the second of all shards, ..."""
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

    shard: int  # number of the shard
    row: int  # row in the shard
    round: int = 0  # number of the pass over the source
    sample: Sample | None  # None if a policy left the record out, or if it is bad
    bad: str | None = None  # the fault of a bad record
    counts: Counter[str] = field(default_factory=Counter)  # what the policies did to the record
    mark: Mark | None = None  # a state of the shard in this pass; mostly None


def assign(sizes: Sequence[int], ranks: int, *, first: int = 0) -> list[list[int]]:
    """Assign each shard, largest first, to the least loaded rank; ties begin at rank ``first % ranks``."""
    heap = [(0, (rank - first) % ranks, rank) for rank in range(ranks)]
    heapq.heapify(heap)
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, count, rank = heapq.heappop(heap)
        assigned[rank].append(number)
        heapq.heappush(heap, (load + sizes[number], count + ranks, rank))
    return [sorted(numbers) for numbers in assigned]


@dataclass(kw_only=True, eq=False)
class Reading(IterableDataset[Read]):
    """The shards that a rank reads, their order, and the sampler that turns records into samples."""

    shards: Sequence[Shard]  # all shards of the stream
    mine: Sequence[int]  # numbers of the shards that this rank reads, in reading order
    starts: Mapping[int, int]  # the first row to read of each shard
    sampler: Sampler
    round: int = 0  # number of the pass over the source
    turn: list[int]  # see ``Intake.turns``
    marks: Mapping[Place, Mark] = field(default_factory=dict)  # by shard and pass, a state to resume from

    def __iter__(self) -> Iterator[Read]:
        """Read the shards; each of n workers reads every n-th shard."""
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None:
            first += self.mine.index(self.turn[0]) + 1 if self.turn[0] in self.mine else 0
            # A dataset that sees a worker may read only a part of its shard. So hide the worker.
            worker_module = private("torch.utils.data._utils.worker")
            if not hasattr(worker_module, "_worker_info"):
                raise RuntimeError(
                    "torch.utils.data of this release has no _worker_info, so a stream's records would be "
                    "divided twice. Set num_workers=0, or install a tested release: see lightning-thd doctor."
                )
            worker_module._worker_info = None
        for number in self.mine[first % every :: every]:
            yield from self.rows(number, self.starts[number])

    def rows(self, number: int, start: int) -> Iterator[Read]:
        """Yield the records of one shard from a row on, and a bad one where reading fails."""
        row, mark = start - 1, self.marks.get((number, self.round))
        mark = mark if mark is not None and mark[0] <= start else None
        try:
            for row, record, saved in self.shards[number].read(start, mark):
                yield self._read(number, row, record, saved)
            if (ended := getattr(getattr(self.shards[number], "beginning", None), "ended", None)) is not None:
                yield Read(shard=number, row=-1, round=self.round + 1, sample=None, mark=(0, ended))
        except (ModuleNotFoundError, MisconfigurationException):
            raise
        except Exception as err:  # a file system, a decoder or the user's iterator failed: no records follow
            yield Read(shard=number, row=row + 1, sample=None, bad=f"reading stopped: {err}")

    def _read(self, number: int, row: int, record: Any, mark: Mark | None) -> Read:
        self.sampler.counts, sample, bad = Counter(), None, None
        try:
            if isinstance(record, Bad):
                raise ValueError(record.reason)
            sample = self.sampler(record, row, getattr(self.shards[number], "folder", None))
        except ModuleNotFoundError:
            raise
        except Exception as err:  # images, templates and extras_cost raise many types of errors
            bad = str(err) if isinstance(err, ValueError | TypeError) else f"{type(err).__name__}: {err}"
        place: Any = {"shard": number, "row": row, "round": self.round}
        return Read(**place, sample=sample, bad=bad, counts=self.sampler.counts, mark=mark)


@dataclass(slots=True)
class Tally:
    """How many records of one source a rank has left out or changed so far."""

    bad: int = 0
    last: deque[str] = field(default_factory=lambda: deque(maxlen=3))  # places and faults of bad records
    counts: Counter[str] = field(default_factory=Counter)  # for each name of ``POLICIES``

    def add(self, fault: str, source: Source) -> None:
        """Count a bad record, or raise its fault."""
        if source.on_error != "skip":
            raise ValueError(f"{fault} To leave such records out, pass on_error='skip'.")
        self.bad += 1
        self.last.append(fault)


class Reader:
    """Reads a rank's shards of a source, in this process or in workers, and counts the records left out."""

    def __init__(self, reading: Reading, tally: Tally, source: Source, num_workers: int) -> None:
        self._reading, self._tally, self._source, self.turn = reading, tally, source, reading.turn
        self._most_bad = math.inf if source.max_errors is None else source.max_errors
        self.exhausted, self._kept = False, list[Read]()  # samples that are read, but not yet asked for
        self.marks: Marks = {}  # saved states since the last exchange
        self._rows = iter(reading)
        if workers := 0 if self.turn[1] else min(num_workers, len(reading.mine)):
            own: Any = {"worker_init_fn": begin_worker, "generator": own_generator(reading.round)}
            self._rows = iter(DataLoader(reading, batch_size=None, num_workers=workers, **own))

    def take(self, count: int) -> list[Read]:
        """Return up to ``count`` samples; fewer at the end of the shards, or after too many bad records."""
        taken, self._kept = self._kept[:count], self._kept[count:]
        while len(taken) < count and self._tally.bad <= self._most_bad:
            try:
                read = next(self._rows, None)
            except RuntimeError as err:  # a worker died
                names = ", ".join(self._reading.shards[i].name for i in self._reading.mine[:4])
                raise ValueError(f"A worker that reads {names} ended: {err}") from err
            if read is None:
                self.exhausted = True
                break
            self.turn[0] = read.shard
            if read.mark is not None:
                self.marks.setdefault((read.shard, read.round), []).append(read.mark)
            self._tally.counts.update(read.counts)
            if read.bad is not None:
                name = self._reading.shards[read.shard].name
                self._tally.add(f"shard {name}, row {read.row}: {read.bad}", self._source)
            elif read.sample is not None:
                taken.append(read)
        self.turn[2] += len(taken)
        return taken

    def read_again(self, pending: Pending, *, ended: bool) -> list[Read]:
        """Read the pending records of this rank's shards again; with ``ended``, look for added ones too."""
        found = []
        for (number, round_), rows in pending.items():
            if number not in self._reading.mine:
                continue
            again = replace(self._reading, round=round_).rows(number, min(rows))
            reads = list(islice((x for x in again if x.row in rows and x.bad is None), len(rows)))
            if len(reads) != len(rows):
                raise ValueError(
                    f"Shard {self._reading.shards[number].name} had {len(rows)} unused records when "
                    f"the checkpoint was written, but gives {len(reads)} of them now. Restore its data."
                )
            for read in reads:
                self._tally.counts.update(read.counts)
            found += [read for read in reads if read.sample]
        if ended:  # all shards had been read; records may have been added since
            self._kept = self.take(1)
        return found
