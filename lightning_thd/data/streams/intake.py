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
        shards_each = [source.stop - source.first for source in self.sources]
        return np.repeat(np.arange(len(self.sources)), shards_each)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of a mixture's sources; empty if there is no mixture."""
        return tuple(source.name for source in self.sources) if self.sources[0].name else ()


class Intake:
    """Reads the sources of a stream on one rank, and exchanges tables of what was read with all ranks."""

    def __init__(self, settings: Settings, wire: Wire) -> None:
        self._settings = settings
        self._sources = settings.sources
        self._wire = wire
        self.payloads: Payloads = {}  # unused sequences that this rank holds
        # Whether each rank has read its shards of each of N sources to the end, bool ``[N, ranks]``.
        self.exhausted = np.zeros((len(self._sources), wire.ranks), bool)
        # int64 ``[ranks, N, 3]``: the last shard read or -1, whether no workers read, and the sequences read
        self.turns = np.full((wire.ranks, len(self._sources), 3), [-1, 0, 0])
        self.marks: Marks = {}
        self.counts = dict.fromkeys(("bad", "tail_dropped", *POLICIES), 0)  # over all ranks
        self.bad = [0] * len(self._sources)  # the bad records of each source, over all ranks

        # What the state of a resume has counted, and the counts of this rank since then.
        self._earlier_counts = dict(self.counts)
        self._earlier_bad = list(self.bad)
        self._tallies = [Tally() for _ in self._sources]
        self._odd = [Tally() for _ in self._sources]  # records of another form, of all ranks: see ``_alike``

        # By shard, the row behind the last that was used or left out since the last call of ``advance``.
        self._reached: dict[int, int] = {}
        self.forms: Form = {}  # the form of most of the first records that were read
        self._readers: dict[int, Reader] = {}  # the reader of each source

    def restore_counts(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a state; one of an older release counts from 0."""
        self._earlier_counts |= state.get("counts", {})
        self._earlier_bad = list(state.get("bad", self._earlier_bad))
        self.counts.update(self._earlier_counts)
        self.bad = list(self._earlier_bad)

    def open(self, number: int, round_: int, cursors: IntArray) -> None:
        """Begin a pass over a source; the calling thread starts its workers."""
        settings = self._settings
        source = self._sources[number]
        shards = np.arange(source.first, source.stop)
        sizes = [settings.shards[shard].size for shard in shards.tolist()]
        # Counting on from the first shard, small sources of a mixture do not all begin at rank 0.
        of_ranks = assign(sizes, self._wire.ranks, first=source.first)
        mine = shards[of_ranks[self._wire.rank]]
        if source.shuffle_buffer:
            order = np.random.default_rng([settings.seed, round_]).permutation(shards)
            mine = order[np.isin(order, mine)]

        reading = Reading(
            shards=settings.shards,
            mine=mine.tolist(),
            starts={shard: int(cursors[shard]) for shard in mine.tolist()},
            sampler=settings.make_sampler(),
            round=round_,
            turn=self.turns[self._wire.rank, number].tolist(),
            marks={place: marks[0] for place, marks in self.marks.items() if place[0] in mine},
        )
        most_bad = math.inf if source.max_errors is None else source.max_errors - self._earlier_bad[number]
        self._readers[number] = Reader(
            reading, self._tallies[number], source, most_bad=most_bad, num_workers=settings.num_workers
        )

    def end_pass(self, numbers: IntArray) -> None:
        """Forget how far the pass over some sources has come; ``open`` begins the next."""
        self.exhausted[numbers] = False
        workers_from = _WORKERS_FROM if len(self._sources) > 1 else 0
        reads_alone = self.turns[:, numbers, 2] < workers_from  # in the next pass, without workers
        no_shard = np.full(reads_alone.shape, -1)
        nothing_read = np.zeros(reads_alone.shape, np.int64)
        self.turns[:, numbers] = np.stack([no_shard, reads_alone, nothing_read], -1)

    def gather(self, wanted: IntArray) -> Table:
        """Read ``wanted[source, rank]`` sequences of each source on each rank; a collective."""
        counts = wanted[:, self._wire.rank].tolist()
        return self._exchange(lambda number, reader: reader.take(counts[number]))

    def read_again(self, pending: Pending, ended: npt.NDArray[np.bool_]) -> Table:
        """Read the unused sequences of a checkpoint again, on the ranks of their shards; a collective."""
        mine = ended[:, self._wire.rank].tolist()
        return self._exchange(lambda number, reader: reader.read_again(pending, ended=mine[number]))

    def advance(self, cursors: IntArray) -> None:
        """Move the cursors of shards behind all records that were read since the last call, bad ones too.

        Otherwise, a resume would read a bad record again at another turn of its worker, and count it twice.
        """
        for shard, row in self._reached.items():
            cursors[shard] = max(int(cursors[shard]), row)
        self._reached = {}

    def fail(self, error: Exception) -> NoReturn:
        """Send an error of this rank in the collective with which the others read on; all ranks raise it."""
        self._exchange(lambda *_: [], error)
        raise error

    def _exchange(self, read: Callable[[int, Reader], list[Read]], failure: Exception | None = None) -> Table:
        """Call ``read`` for each source, and return a ``POOL`` table of what all ranks read; a collective."""
        reads: list[Read] = []
        try:
            for number, reader in self._readers.items():
                reads += read(number, reader)
        except Exception as err:  # the error is sent to the other ranks, which wait
            failure = err
            reads = []

        of_this_rank = self._report(reads, failure)
        reports: list[_Report] = self._wire.objects(of_this_rank)
        failures = [f"Rank {rank}: {x.failure}" for rank, x in enumerate(reports) if x.failure is not None]
        if failures:
            raise ValueError(" ".join(failures)) from failure

        for report in reports:
            for place, marks in report.marks.items():
                self.marks[place] = self.marks.get(place, []) + marks
            self._reached |= report.reached
        status = np.array([report.status for report in reports])  # int64 ``[ranks, N, 4]``
        self.exhausted = status[..., 0].T.astype(bool)
        self.turns = status[..., 1:]
        forms: dict[int, Form] = {}
        for report in reports:
            forms |= report.forms
        table = self._alike(_pooled([report.table for report in reports]), forms)
        self._add_up([*(report.tallies for report in reports), self._odd])
        return table

    def _report(self, reads: list[Read], failure: Exception | None) -> _Report:
        """Return the message to the other ranks about what was read, and keep the sequences."""
        marks = Marks()
        reached: dict[int, int] = {}
        for reader in self._readers.values():
            marks |= reader.marks
            reached |= reader.reached
            reader.marks = {}
            reader.reached = {}

        return _Report(
            failure=None if failure is None else str(failure),
            table=self._table(reads),
            status=[(reader.exhausted, *reader.turn) for reader in self._readers.values()],
            tallies=self._tallies,
            marks=marks,
            reached=reached,
            forms={read.sample.meta["form"]: read.sample.form for read in reads if read.sample is not None},
        )

    def _alike(self, table: Table, forms: dict[int, Form]) -> Table:
        """Leave out records that cannot be in a batch with most of the first, or raise; all ranks do."""
        sources = self._settings.source_of[table["shard"]].tolist()
        read = list(zip(table["form"].tolist(), sources, strict=True))
        keyed = {(code, number): _keyed(forms[code], number) for code, number in set(read)}
        self._vote(read, keyed)

        # For each form of a source that differs from the usual one, a key in which it does.
        odd = {pair: key for pair, form in keyed.items() for key in form if form[key] != self.forms[key]}
        is_odd = np.array([pair in odd for pair in read], bool)
        for code, *place in table[["form", "round", "shard", "row"]][is_odd].tolist():
            self.payloads.pop(tuple(place), None)
            _, shard, row = place
            number = self._settings.source_of[shard]
            key = odd[code, number]
            fault = _odd_form(key, keyed[code, number][key], self.forms[key])
            name = self._settings.shards[shard].name
            # All ranks see the same table, so each of them counts all of its odd records, or raises.
            self._odd[number].add(f"shard {name}, row {row}: {fault}", self._sources[number])
        alike: Table = table[~is_odd]
        return alike

    def _vote(self, read: list[tuple[int, int]], keyed: Mapping[tuple[int, int], Form]) -> None:
        """Let the records vote on the shapes of keys that had none so far; a decided shape stays."""
        votes = Counter[tuple[str, str]]()
        if any(form.keys() - self.forms for form in keyed.values()):
            for pair in read:
                votes.update(keyed[pair].items())
        # The last entry of a key wins, so those with the most votes come last.
        winners = dict(key_and_shape for key_and_shape, _ in reversed(votes.most_common()))
        self.forms = winners | self.forms

    def drop_marks(self, pending: IntArray, ledger: Ledger) -> None:
        """Keep the last state of each shard and pass from which all unused records can be read, and later."""
        for (shard, round_), marks in list(self.marks.items()):
            ahead = round_ - int(ledger.rounds[self._settings.source_of[shard]])
            rows = pending[(pending[:, 0] == shard) & (pending[:, 2] == round_), 1].tolist()
            if ahead == 0:  # records behind the cursor are read in this pass
                rows.append(int(ledger.cursors[shard]))
            if ahead < 0 and not rows:
                del self.marks[shard, round_]
                continue
            usable = sum(row <= min(rows, default=0) for row, _ in marks)
            self.marks[shard, round_] = marks[max(0, usable - 1) :]

    def _table(self, reads: list[Read]) -> Table:
        """Return the table of sequences that were read, and keep their payloads."""
        table = np.zeros(len(reads), META)
        for i, read in enumerate(reads):
            assert read.sample is not None
            meta = {**read.sample.meta, "shard": read.shard, "row": read.row, "round": read.round}
            table[i] = tuple(meta[name] for name in META.names or ())
            self.payloads[read.round, read.shard, read.row] = read.sample.payload
        return table[np.lexsort((table["row"], table["round"], table["shard"]))]

    def _add_up(self, tallies: Sequence[list[Tally]]) -> None:
        """Add up counts of all ranks, by source; raise if more than ``max_errors`` records of one are bad."""
        for name in POLICIES:
            added = sum(tally.counts[name] for of_rank in tallies for tally in of_rank)
            self.counts[name] = self._earlier_counts[name] + added
        for number, of_ranks in enumerate(zip(*tallies, strict=True)):
            self.bad[number] = self._earlier_bad[number] + sum(tally.bad for tally in of_ranks)
        self.counts["bad"] = sum(self.bad)

        for source, bad, of_ranks in zip(self._sources, self.bad, zip(*tallies, strict=True), strict=True):
            if source.max_errors is not None and bad > source.max_errors:
                of = f" of {source.name!r}" if source.name else ""
                raise ValueError(
                    f"{bad} records{of} could not be used, more than max_errors={source.max_errors}. "
                    f"The last: {'; '.join(text for tally in of_ranks for text in tally.last)}"
                )


def _keyed(form: Form, source: int) -> Form:
    """Return a form in which the keys of ``PER_SOURCE`` carry the number of the source."""
    return {f"{key} {source}" if key in PER_SOURCE else key: shape for key, shape in form.items()}


def _odd_form(key: str, shape: str, usual: str) -> str:
    """Return the fault of a record whose ``shape`` under a key of ``_keyed`` is not the usual one."""
    name = key.partition(" ")[0]

    def described(shape: str) -> str:
        if not shape:
            return f"no {name!r}"
        return f"{name!r}" if name in PER_SOURCE else f"{name!r} of shape {shape}"

    advice = ""
    if name == "labels":  # text, of which each token is learned, has none; prompts with completions have some
        advice = " Give labels to all records of a source, or make text and prompts two sources of a mixture."
    return f"it has {described(shape)}, but most of the first records have {described(usual)}.{advice}"


def _pooled(tables: Sequence[Table]) -> Table:
    """Join the tables of all ranks: the first records of all shards, then the second of all shards, ..."""
    joined: npt.NDArray[np.void] = np.zeros(sum(map(len, tables)), POOL)
    for name in META.names or ():
        joined[name] = np.concatenate([table[name] for table in tables])
    joined["holder"] = np.repeat(np.arange(len(tables)), [len(table) for table in tables])

    # Number the records of each shard and pass, which lie together in the table of one rank.
    place = np.stack([joined["holder"], joined["shard"], joined["round"]])
    begins = np.ones(len(joined), bool)
    begins[1:] = (np.diff(place, axis=1) != 0).any(0)
    starts = np.flatnonzero(begins)
    number_in_shard = np.arange(len(joined)) - np.repeat(starts, np.diff(starts, append=len(joined)))
    return joined[np.argsort(number_in_shard, kind="stable")]


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
    stopped: bool = False  # whether no record could be read from this row on


def assign(sizes: Sequence[int], ranks: int, *, first: int = 0) -> list[list[int]]:
    """Assign each shard, largest first, to the least loaded rank; ties begin at rank ``first % ranks``."""
    # Entries are (load, tie, rank). A tie grows by the number of ranks with each shard, so that of ranks with
    # equal loads the one with the fewest shards comes first.
    heap = [(0, (rank - first) % ranks, rank) for rank in range(ranks)]
    heapq.heapify(heap)
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for shard in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, tie, rank = heapq.heappop(heap)
        assigned[rank].append(shard)
        heapq.heappush(heap, (load + sizes[shard], tie + ranks, rank))
    return [sorted(shards) for shards in assigned]


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
        if worker is None:
            first = 0
            step = 1
        else:
            # torch asks workers in turn from worker 0 on, so worker 0 gets the shard whose turn is next.
            next_turn = self.mine.index(self.turn[0]) + 1 if self.turn[0] in self.mine else 0
            first = (worker.id + next_turn) % worker.num_workers
            step = worker.num_workers
            _hide_worker()
        for shard in self.mine[first::step]:
            yield from self.rows(shard, self.starts[shard])

    def rows(self, number: int, start: int) -> Iterator[Read]:
        """Yield the records of one shard from a row on, and a bad one where reading fails."""
        shard = self.shards[number]
        mark = self.marks.get((number, self.round))
        if mark is not None and mark[0] > start:
            mark = None

        row = start - 1
        try:
            for row, record, saved in shard.read(start, mark, epoch=self.round):
                yield self._read(number, row, record, saved)
            state_at_end = getattr(getattr(shard, "beginning", None), "ended", None)
            if state_at_end is not None:
                yield Read(shard=number, row=-1, round=self.round + 1, sample=None, mark=(0, state_at_end))
        except (ModuleNotFoundError, MisconfigurationException):
            raise
        except Exception as err:  # a file system, a decoder or the user's iterator failed: no records follow
            yield Read(shard=number, row=row + 1, sample=None, bad=f"reading stopped: {err}", stopped=True)

    def _read(self, number: int, row: int, record: Any, mark: Mark | None) -> Read:
        """Convert a record to a sample; what fails there makes the record bad."""
        self.sampler.counts = Counter()
        sample = None
        bad = None
        try:
            if isinstance(record, Bad):
                raise ValueError(record.reason)
            sample = self.sampler(record, row, getattr(self.shards[number], "folder", None))
        except ModuleNotFoundError:
            raise
        except Exception as err:  # images, templates and extras_cost raise many types of errors
            bad = str(err) if isinstance(err, ValueError | TypeError) else f"{type(err).__name__}: {err}"

        return Read(
            shard=number,
            row=row,
            round=self.round,
            sample=sample,
            bad=bad,
            counts=self.sampler.counts,
            mark=mark,
        )


def _hide_worker() -> None:
    """Make this process the only worker: a dataset that sees several may read only a part of its shard."""
    worker = get_worker_info()
    if worker is None:
        return
    for name, value in (("id", 0), ("num_workers", 1)):
        object.__setattr__(worker, name, value)  # a frozen object, of which every caller gets the same

    seen = get_worker_info()
    if seen is None or (seen.id, seen.num_workers) != (0, 1):
        raise RuntimeError(
            "get_worker_info() of this release of torch cannot be changed, so a stream's records would be "
            "divided twice. Set num_workers=0, or install a tested release: see lightning-thd doctor."
        )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """The message of a rank to the others after it has read."""

    failure: str | None  # the error of this rank
    table: Table  # a ``META`` row for each sequence that was read
    # For each source, whether all shards of the rank are read, and the three numbers of ``Intake.turns``.
    status: list[tuple[int, ...]]
    tallies: list[Tally]  # for each source, from the first record on
    marks: Marks
    reached: dict[int, int]  # see ``Reader.reached``
    forms: dict[int, Form]  # by their hashes


class Reader:
    """Reads a rank's shards of a source, in this process or in workers, and counts the records left out."""

    def __init__(
        self, reading: Reading, tally: Tally, source: Source, *, most_bad: float, num_workers: int
    ) -> None:
        self._reading = reading
        self._tally = tally
        self._source = source
        self._most_bad = most_bad  # with more bad records in ``tally``, reading ends
        self.turn = reading.turn  # see ``Intake.turns``
        self.exhausted = False  # whether all shards of this rank are read
        self.marks: Marks = {}  # saved states since the last exchange
        # By shard, the row behind the last that was handed out or left out since the last exchange.
        self.reached: dict[int, int] = {}
        self._read_ahead: list[Read] = []  # samples that are read, but not yet asked for

        reads_alone = bool(self.turn[1])
        workers = 0 if reads_alone else min(num_workers, len(reading.mine))
        self._rows = iter(reading)
        if workers:
            loader = DataLoader(
                reading,
                batch_size=None,
                num_workers=workers,
                worker_init_fn=begin_worker,
                generator=own_generator(reading.round),
            )
            self._rows = iter(loader)  # the workers start here, in the thread that makes the reader

    def take(self, count: int) -> list[Read]:
        """Return up to ``count`` samples; fewer at the end of the shards, or after too many bad records."""
        taken = self._read_ahead[:count]
        self._read_ahead = self._read_ahead[count:]
        self.reached |= {read.shard: read.row + 1 for read in taken}
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
            is_record = read.row >= 0 and not read.stopped  # where reading stopped, a resume tries again
            if is_record:
                self.reached[read.shard] = read.row + 1
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
        samples = []
        for (shard, round_), rows in pending.items():
            if shard not in self._reading.mine:
                continue
            again = replace(self._reading, round=round_).rows(shard, min(rows))
            of_pending = (read for read in again if read.row in rows and read.bad is None)
            reads = list(islice(of_pending, len(rows)))
            if len(reads) != len(rows):
                raise ValueError(
                    f"Shard {self._reading.shards[shard].name} had {len(rows)} unused records when "
                    f"the checkpoint was written, but gives {len(reads)} of them now. Restore its data."
                )

            for read in reads:
                if read.sample is not None:  # its policies are in the counts of the state
                    samples.append(read)
                else:  # a policy that is new leaves the record out
                    self._tally.counts.update(read.counts)

        if ended:  # all shards had been read; records may have been added since
            self._read_ahead = self.take(1)
            self.reached |= {read.shard: read.row for read in self._read_ahead}  # it is not handed out yet
        return samples
