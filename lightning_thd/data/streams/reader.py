"""The shards of one rank and how far each was read -> samples in order, and what was wrong with others."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as worker_module

from lightning_thd.data.streams.samples import Sample, Sampler
from lightning_thd.data.streams.shards import Bad, Mark, Shard
from lightning_thd.data.streams.workers import from_workers

OnError = Literal["raise", "skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """One record that was read, or the place at which reading failed.

    Attributes:
        shard: number of its shard.
        row: its row in the shard.
        round: the pass over its source.
        sample: None where a policy left it out or it is bad.
        bad: what is wrong with it; None otherwise.
        counts: what the policies count for it: 1 under ``dropped``, say.
        mark: a state from which its shard goes on with the row after it; mostly None.
    """

    shard: int
    row: int
    round: int = 0
    sample: Sample | None
    bad: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    mark: Mark | None = None


def assign(sizes: Sequence[int], ranks: int, *, first: int = 0) -> list[list[int]]:
    """Assign shards to ranks, the largest to rank ``first``, each next one to the rank with the least so far.

    Returns:
        The numbers of each rank's shards, in order; the same on every rank. ``([5, 1, 4], 2)`` gives
        ``[[0], [1, 2]]``.
    """
    heap = [(0, (rank - first) % ranks, rank) for rank in range(ranks)]
    heapq.heapify(heap)
    own: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, count, rank = heapq.heappop(heap)
        own[rank].append(number)
        heapq.heappush(heap, (load + sizes[number], count + ranks, rank))
    return [sorted(numbers) for numbers in own]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Which shards a rank reads, in which order, and how records become samples.

    Attributes:
        shards: all of the stream.
        own: numbers of those this rank reads, in the order they are read.
        sampler: makes samples.
        on_error: ``"raise"`` for the first record that cannot be used, or ``"skip"`` it.
        round: the pass over the source.
        marks: of shards that have a state, a row and the state that gives it next.
    """

    shards: Sequence[Shard]
    own: Sequence[int]
    sampler: Sampler
    on_error: OnError = "raise"
    round: int = 0
    marks: Mapping[int, Mark] = field(default_factory=dict)

    def rows(self, number: int, start: int, *, only: Iterable[int] | None = None) -> Iterator[Read]:
        """Yield the records of one shard from a row on; with ``only`` just these rows."""
        wanted = None if only is None else set(only)
        shard, row, mark = self.shards[number], start - 1, self.marks.get(number)
        try:
            for row, record, after in shard.read(
                start, mark if mark is not None and mark[0] <= start else None
            ):
                if wanted is None or row in wanted:
                    yield self._read(number, row, record, after)
                if wanted is not None:
                    wanted.discard(row)
                    if not wanted:
                        return
        except ModuleNotFoundError:
            raise
        except Exception as err:  # of a file system, a decoder or the user's iterator: no record comes after
            yield Read(shard=number, row=row + 1, sample=None, bad=f"reading stopped: {err}")

    def _read(self, number: int, row: int, record: Any, mark: Mark | None) -> Read:
        before = dict(self.sampler.counts)
        try:
            if isinstance(record, Bad):
                raise ValueError(record.reason)
            sample = self.sampler(record, row)
        except (ValueError, TypeError) as err:
            return Read(shard=number, row=row, round=self.round, sample=None, bad=str(err), mark=mark)
        after = self.sampler.counts
        counts = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        return Read(shard=number, row=row, round=self.round, sample=sample, counts=counts, mark=mark)

    def place(self, read: Read) -> str:
        """Return where a record stands as text, for messages."""
        return f"shard {self.shards[read.shard].name}, row {read.row}"


class _Rows(IterableDataset[Read]):
    """Reads every n-th shard of a rank in one worker."""

    def __init__(self, reading: Reading, starts: dict[int, int]) -> None:
        self._reading, self._starts = reading, starts

    def __iter__(self) -> Iterator[Read]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None:
            # A dataset that shares its records out among workers would leave some to those of other shards.
            worker_module._worker_info = None
        for number in self._reading.own[first::every]:
            yield from self._reading.rows(number, self._starts[number])


class Reader:
    """Reads the shards of a rank in order, in this process or in workers, and counts what is left out."""

    def __init__(
        self, reading: Reading, starts: dict[int, int], *, num_workers: int = 0, timeout_s: float = 600.0
    ) -> None:
        self._reading = reading
        self.exhausted = False
        self.bad: list[str] = []
        self.marks: dict[int, list[Mark]] = {}  # that were met since they were asked for last
        self.counts = dict.fromkeys(reading.sampler.counts, 0)
        rows = _Rows(reading, starts)
        self._rows: Iterator[Read]
        if num_workers and reading.own:
            workers = min(num_workers, len(reading.own))
            # Workers start here, in the thread that makes the reader.
            self._rows = from_workers(rows, workers=workers, timeout_s=timeout_s)
        else:
            self._rows = iter(rows)

    def take(self, count: int) -> list[Read]:
        """Return up to ``count`` samples; fewer only at the end of the shards.

        Raises:
            ValueError: for a record that cannot be used, with ``on_error="raise"``.
        """
        taken: list[Read] = []
        while len(taken) < count:
            try:
                read = next(self._rows, None)
            except RuntimeError as err:  # a worker that died or gave nothing
                names = ", ".join(self._reading.shards[i].name for i in self._reading.own[:4])
                raise ValueError(f"A worker that reads {names} ended: {err}") from err
            if read is None:
                self.exhausted = True
                break
            if read.mark is not None:
                self.marks.setdefault(read.shard, []).append(read.mark)
            for name, more in read.counts.items():
                self.counts[name] += more
            if read.bad is not None:
                place = f"{self._reading.place(read)}: {read.bad}"
                if self._reading.on_error == "raise":
                    raise ValueError(f"{place} To leave such records out, pass on_error='skip'.")
                self.bad.append(place)
            elif read.sample is not None:
                taken.append(read)
        return taken

    def again(self, pending: dict[int, dict[int, list[int]]]) -> list[Read]:
        """Read records again, by shard, row and pass, that a checkpoint tells were read but not used.

        What policies leave out now, as another capacity may, is counted and not returned.

        Raises:
            ValueError: when a row is not there any more.
        """
        found = []
        for number in self._reading.own:
            rows = pending.get(number)
            if not rows:
                continue
            reads = [read for read in self._reading.rows(number, min(rows), only=rows) if read.bad is None]
            if len(reads) != len(rows):
                raise ValueError(
                    f"Shard {self._reading.shards[number].name} held {len(rows)} sequences when the "
                    f"checkpoint was written that it gives {len(reads)} of now. Restore it, or start anew."
                )
            for name, more in ((name, more) for read in reads for name, more in read.counts.items()):
                self.counts[name] += more
            found += [replace(read, round=of) for read in reads if read.sample for of in rows[read.row]]
        return found


def shard_order(count: int, *, seed: int, number: int, shuffle: bool) -> list[int]:
    """Order the shards of a pass: as given, or drawn by the seed and the number of the pass."""
    return np.random.default_rng([seed, number]).permutation(count).tolist() if shuffle else [*range(count)]
