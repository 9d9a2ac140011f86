"""Collectives of a stream's ranks: what they read, samples that change ranks, steps for their peers.

Only sequences that change ranks move: ids, labels where there are any, and further keys, 4 bytes a number.
Every rank knows the sizes from the plan, so nothing but the numbers themselves is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lightning_thd.data.streams.samples import LABELS, Sample, unpacked
from lightning_thd.data.streams.schedule import IntArray, Planned, Table
from lightning_thd.parallel.messages import Messages, host_group

Bytes = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]
Held = dict[tuple[int, int, int], Sample]  # by round, shard and row


class Wire:
    """Collectives among the ranks that read a stream, which count the bytes they move."""

    def __init__(self, rank: int, ranks: int, members: list[int], *, timeout_s: float) -> None:
        self.rank, self.ranks, self._timeout_s = rank, ranks, timeout_s
        self.gathered_bytes = self.exchanged_bytes = 0
        self._group: Any = None
        if ranks > 1:
            with self._waiting():
                self._group = host_group(members, timeout_s)

    def gather(self, message: Bytes) -> list[Bytes]:
        """Return the messages of all ranks, which have one length."""
        self.gathered_bytes += message.nbytes
        if self._group is None:
            return [message]
        own = torch.from_numpy(message)
        found = [torch.empty_like(own) for _ in range(self.ranks)]
        self._call(dist.all_gather, found, own)
        return [one.numpy() for one in found]

    def objects(self, value: Any) -> list[Any]:
        """Return the Python objects that every rank gave, in the order of ranks."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.ranks
        self._call(dist.all_gather_object, found, value)
        return found

    def exchange(self, outgoing: list[Int32], sizes: list[int]) -> list[Int32]:
        """Send each rank its part, int32, the own one empty, and receive ``sizes[rank]`` int32 from each."""
        if self._group is None:
            return outgoing
        self.exchanged_bytes += sum(part.nbytes for part in outgoing)
        given = torch.from_numpy(np.concatenate(outgoing))
        found = torch.empty(sum(sizes), dtype=torch.int32)
        self._call(
            dist.all_to_all_single,
            found,
            given,
            output_split_sizes=sizes,
            input_split_sizes=[len(part) for part in outgoing],
        )
        return np.split(found.numpy(), np.cumsum(sizes)[:-1])

    def _call(self, collective: Any, *args: Any, **kwargs: Any) -> None:
        with self._waiting():
            collective(*args, group=self._group, **kwargs)

    def _waiting(self) -> Any:
        return waiting(f"Rank {self.rank} of {self.ranks} that read the stream", self._timeout_s)


@contextmanager
def waiting(who: str, timeout_s: float) -> Iterator[None]:
    """Add to the error of a failed collective which rank waited, and for which others."""
    try:
        yield
    except RuntimeError as err:
        raise RuntimeError(
            f"{who} waited for the others in vain: one ended, or gave nothing for timeout_s={timeout_s:g} "
            f"seconds. Look for the first error in the logs of the others; raise timeout_s where shards are "
            f"slow. ({err})"
        ) from err


class Peers:
    """The ranks that share one data rank: the first of them reads, the others receive its steps."""

    def __init__(
        self,
        readers: list[int],
        own: list[int],
        rank: int,
        *,
        timeout_s: float,
        told: list[Any] | None = None,
    ) -> None:
        self.readers, self._own, self.told = readers, own, told or []
        self.reads = own[0] == rank
        self._timeout_s = timeout_s
        self._who = f"Rank {rank}, one of {own} that train on the same packs,"
        self._group: Any = None
        if len(own) > 1:
            with waiting(self._who, timeout_s):
                self._group = host_group(own, timeout_s)
        self._messages = Messages(self._group, own[0])

    @classmethod
    def of_job(cls, data_rank: int, data_ranks: int, *, timeout_s: float, tell: Any = None) -> Peers:
        """Find which ranks share a data rank and receive the same packs; a collective over the job."""
        if not (dist.is_available() and dist.is_initialized()):
            if data_ranks > 1:
                raise ValueError(
                    f"The stream is shared by {data_ranks} data-parallel ranks, but torch.distributed is not "
                    "initialised. Let the Trainer, Accelerate or Fabric start the job first."
                )
            return cls([0], [0], 0, timeout_s=timeout_s, told=[tell])
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (data_rank, tell))
        found = [of for of, _ in everyone]
        own = [[rank for rank, of in enumerate(found) if of == wanted] for wanted in range(data_ranks)]
        if not all(own):
            raise ValueError(
                f"The ranks of the job have the data ranks {found}; wanted each of 0 to {data_ranks - 1}. "
                "Give attach() of every process its own rank, and the same ranks."
            )
        readers = [ranks[0] for ranks in own]
        told = [everyone[reader][1] for reader in readers]
        return cls(readers, own[data_rank], dist.get_rank(), timeout_s=timeout_s, told=told)

    def send(self, value: Any) -> None:
        """Send a step, or the error that ended the stream, to the other ranks of this data rank."""
        if self._group is None:
            return
        with waiting(self._who, self._timeout_s):
            self._messages.send(value)

    def receive(self) -> Any:
        """Receive the reader's step: one broadcast, and a second for a message larger than all before."""
        try:
            value = self._messages.receive()
        except RuntimeError as err:
            raise RuntimeError(
                f"Rank {self._own[0]}, which reads for this rank, gave nothing for timeout_s="
                f"{self._timeout_s:g} seconds. Look for the first error in its log. ({err})"
            ) from err
        if isinstance(value, Exception):
            raise value
        return value


def keys_of(table: Table) -> list[tuple[int, int, int]]:
    """Return the key (pass, shard, row) of every sequence of a table."""
    return list(zip(*(table[name].tolist() for name in ("round", "shard", "row")), strict=True))


def words_of(table: Table) -> IntArray:
    """Return how many int32 numbers each sequence takes in a message, int64 ``[S]``."""
    lengths = table["length"].astype(np.int64)
    words: IntArray = lengths * (1 + (table["keys"] & LABELS)) + table["extra"] // 4
    return words


def moved_bytes(planned: Planned) -> int:
    """Return the bytes that a step moves between all ranks together."""
    moves = planned.table["holder"] != planned.targets()
    return 4 * int(words_of(planned.table)[moves].sum())


def exchange(planned: Planned, held: Held, wire: Wire) -> list[list[dict[str, Any]]]:
    """Exchange the samples of a step between ranks, and drop those that are used; a collective."""
    table, targets, holders = planned.table, planned.targets(), planned.table["holder"]
    words = words_of(table)
    keys = keys_of(table)
    mine = {keys[i]: held.pop(keys[i]) for i in np.flatnonzero(holders == wire.rank)}
    outgoing, sizes = [], []
    for rank in range(wire.ranks):
        sent = np.flatnonzero((holders == wire.rank) & (targets == rank) & (rank != wire.rank))
        outgoing.append(_flat([mine[keys[i]] for i in sent]))
        comes = (holders == rank) & (targets == wire.rank) & (rank != wire.rank)
        sizes.append(int(words[comes].sum()))
    received = wire.exchange(outgoing, sizes)
    read = [0] * wire.ranks
    microbatches: list[list[dict[str, Any]]] = []
    m = planned.microbatches
    for start, stop in zip(
        planned.offsets[wire.rank * m : (wire.rank + 1) * m].tolist(),
        planned.offsets[wire.rank * m + 1 : (wire.rank + 1) * m + 1].tolist(),
        strict=True,
    ):
        samples = []
        for i in range(start, stop):
            holder = int(holders[i])
            if holder == wire.rank:
                sample = mine[keys[i]]
                samples.append(unpacked(sample.ids, sample.labels, sample.extra))
                continue
            at, read[holder] = read[holder], read[holder] + int(words[i])
            samples.append(_parsed(received[holder][at : read[holder]], table[i]))
        microbatches.append(samples)
    return microbatches


def _flat(samples: list[Sample]) -> Int32:
    parts: list[Int32] = [np.empty(0, np.int32)]
    for sample in samples:
        parts.append(sample.ids)
        if sample.labels is not None:
            parts.append(sample.labels)
        if sample.extra:
            parts.append(np.frombuffer(sample.extra, np.int32))
    return np.concatenate(parts)


def _parsed(numbers: Int32, entry: Any) -> dict[str, Any]:
    length, labelled = int(entry["length"]), bool(entry["keys"] & LABELS)
    end = length * (1 + labelled)
    labels = numbers[length:end] if labelled else None
    return unpacked(numbers[:length], labels, numbers[end:].tobytes())
