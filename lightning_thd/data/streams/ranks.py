"""Collectives that gather tables from the ranks of a stream, exchange samples, and send steps to peers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lightning_thd.data.streams.schedule import PlannedStep
from lightning_thd.data.trainer_link import Job
from lightning_thd.parallel.across_ranks import broadcast_object, host_group

Payloads = dict[tuple[int, int, int], bytes]  # (round, shard, row) of a sequence -> its payload


class Wire:
    """Collectives among the ranks that read a stream."""

    def __init__(self, rank: int, ranks: int, members: list[int], *, timeout_s: float) -> None:
        self.rank = rank  # data rank
        self.ranks = ranks
        self._waiting = partial(waiting, f"Rank {rank} of {ranks} that read the stream", timeout_s)
        self._group: Any = None
        if ranks > 1:
            with self._waiting():
                self._group = host_group(members, timeout_s)

    def objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks."""
        values: list[Any] = [value] * self.ranks
        if self._group is not None:
            with self._waiting():
                dist.all_gather_object(values, value, group=self._group)
        return values

    def exchange(self, outgoing: list[bytes], sizes: list[int]) -> list[bytes]:
        """Send ``outgoing[rank]`` to each rank, and receive ``sizes[rank]`` bytes from each."""
        if self._group is None:
            return outgoing
        # Copied, because torch warns of an array that cannot be written to.
        sent = torch.from_numpy(np.frombuffer(b"".join(outgoing), np.uint8).copy())
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        sent_sizes = [len(message) for message in outgoing]
        with self._waiting():
            dist.all_to_all_single(received, sent, sizes, sent_sizes, group=self._group)
        return [part.tobytes() for part in np.split(received.numpy(), np.cumsum(sizes)[:-1])]


@contextmanager
def waiting(who: str, timeout_s: float) -> Iterator[None]:
    """Add the rank that waited and its timeout to the error of a failed collective."""
    try:
        yield
    except RuntimeError as err:
        raise RuntimeError(
            f"{who} got no answer from others within timeout_s={timeout_s:g} seconds, or one ended ({err})."
        ) from err


class Peers:
    """The ranks that train on the same packs, and so share a data rank; the first reads for the others."""

    def __init__(self, readers: list[int], peers: list[int], rank: int, *, timeout_s: float) -> None:
        self.readers = readers  # the rank that reads, for each data rank
        self._reader = peers[0]
        self.reads = peers[0] == rank
        self._waiting = partial(
            waiting, f"Rank {rank}, one of {peers} that train on the same packs,", timeout_s
        )
        self._group: Any = None
        if len(peers) > 1:
            with self._waiting():
                self._group = host_group(peers, timeout_s)

    @classmethod
    def of_job(cls, job: Job, value: Any, *, timeout_s: float) -> tuple[Peers, list[Any]]:
        """Find which ranks share a data rank, and gather readers' values; a collective in parallel jobs."""
        if job.alone or not (dist.is_available() and dist.is_initialized()):
            return cls([0], [0], 0, timeout_s=timeout_s), [value]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (job.rank, value))
        data_ranks = [data_rank for data_rank, _ in gathered]
        if set(data_ranks) != set(range(job.ranks)):
            raise ValueError(f"The ranks have the data ranks {data_ranks}; wanted 0 to {job.ranks - 1}.")

        # The ranks of the job that share each data rank; the first of them reads.
        groups: list[list[int]] = [[] for _ in range(job.ranks)]
        for rank, data_rank in enumerate(data_ranks):
            groups[data_rank].append(rank)
        readers = [group[0] for group in groups]
        peers = cls(readers, groups[job.rank], dist.get_rank(), timeout_s=timeout_s)
        return peers, [gathered[reader][1] for reader in readers]

    def send(self, value: Any) -> None:
        """Send a step, or the error that ended the stream, to the other ranks of this data rank."""
        if self._group is not None:
            with self._waiting():
                broadcast_object(value, self._group, self._reader)

    def receive(self) -> Any:
        """Receive a step from the reader, or raise the error that ended the stream."""
        with self._waiting():
            value = broadcast_object(None, self._group, self._reader)
        if isinstance(value, Exception):
            raise value
        return value


def exchange(planned: PlannedStep, held: Payloads, wire: Wire) -> list[list[dict[str, Any]]]:
    """Exchange the samples of a step, and drop them from ``held``; return this rank's microbatches.

    Every rank knows from the plan which sequences each other rank sends, so messages are bare payloads.
    """
    table = planned.table
    rank = wire.rank
    holders = table["holder"]  # the rank that has read each sequence
    targets = planned.targets()  # the rank that runs each sequence
    keys = list(zip(*(table[name].tolist() for name in ("round", "shard", "row")), strict=True))
    payloads = {i: held.pop(keys[i]) for i in np.flatnonzero(holders == rank).tolist()}

    outgoing: list[bytes] = []
    coming: list[npt.NDArray[np.int64]] = []  # for each other rank, the sequences that it sends
    for other in range(wire.ranks):
        is_moved = other != rank
        sent = np.flatnonzero((holders == rank) & (targets == other) & is_moved)
        outgoing.append(b"".join(payloads[i] for i in sent.tolist()))
        coming.append(np.flatnonzero((holders == other) & (targets == rank) & is_moved))
    received = wire.exchange(outgoing, [int(table["bytes"][rows].sum()) for rows in coming])

    for rows, message in zip(coming, received, strict=True):
        start = 0
        for i, size in zip(rows.tolist(), table["bytes"][rows].tolist(), strict=True):
            payloads[i] = message[start : start + size]
            start += size

    first = rank * planned.microbatches
    bounds = planned.offsets[first : first + planned.microbatches + 1].tolist()
    # Only ranks of this job wrote these pickles.
    return [[pickle.loads(payloads[i]) for i in range(start, stop)] for start, stop in pairwise(bounds)]
