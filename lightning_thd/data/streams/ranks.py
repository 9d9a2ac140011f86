"""Collectives that gather tables from the ranks of a stream, exchange samples, and send steps to peers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_thd.data.streams.schedule import PlannedStep
from lightning_thd.data.trainer_link import Job
from lightning_thd.parallel.across_ranks import broadcast_object, host_group

Payloads = dict[tuple[int, int, int], bytes]  # (round, shard, row) of a sequence -> its payload


class Wire:
    """Collectives among the ranks that read a stream."""

    def __init__(self, rank: int, ranks: int, members: list[int], *, timeout_s: float) -> None:
        self.rank, self.ranks = rank, ranks
        self._waiting = partial(waiting, f"Rank {rank} of {ranks} that read the stream", timeout_s)
        self._group: Any = None
        if ranks > 1:
            with self._waiting():
                self._group = host_group(members, timeout_s)

    def objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks."""
        found: list[Any] = [value] * self.ranks
        if self._group is not None:
            with self._waiting():
                dist.all_gather_object(found, value, group=self._group)
        return found

    def exchange(self, outgoing: list[bytes], sizes: list[int]) -> list[bytes]:
        """Send ``outgoing[rank]`` to each rank, and receive ``sizes[rank]`` bytes from each."""
        if self._group is None:
            return outgoing
        sent = torch.from_numpy(np.frombuffer(b"".join(outgoing), np.uint8).copy())
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        with self._waiting():
            dist.all_to_all_single(received, sent, sizes, [*map(len, outgoing)], group=self._group)
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
        self.readers, self._reader, self.reads = readers, peers[0], peers[0] == rank
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
        found = [number for number, _ in gathered]
        groups = [[rank for rank, number in enumerate(found) if number == i] for i in range(job.ranks)]
        if set(found) != set(range(job.ranks)):
            raise ValueError(f"The ranks have the data ranks {found}; wanted 0 to {job.ranks - 1}.")
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
    """Exchange the samples of a step, and drop them from ``held``; return this rank's microbatches."""
    table, holders, rank = planned.table, planned.table["holder"], wire.rank
    keys = list(zip(*(table[name].tolist() for name in ("round", "shard", "row")), strict=True))
    targets = planned.targets()
    payloads = {i: held.pop(keys[i]) for i in np.flatnonzero(holders == rank).tolist()}
    outgoing, coming = [], []
    for other in range(wire.ranks):
        sent = np.flatnonzero((holders == rank) & (targets == other) & (other != rank))
        outgoing.append(b"".join(payloads[i] for i in sent.tolist()))
        coming.append(np.flatnonzero((holders == other) & (targets == rank) & (other != rank)))
    received = wire.exchange(outgoing, [int(table["bytes"][rows].sum()) for rows in coming])
    for rows, message in zip(coming, received, strict=True):
        at = 0
        for i, size in zip(rows.tolist(), table["bytes"][rows].tolist(), strict=True):
            payloads[i], at = message[at : at + size], at + size
    m = planned.microbatches
    bounds = planned.offsets[rank * m : (rank + 1) * m + 1].tolist()
    return [[pickle.loads(payloads[i]) for i in range(a, b)] for a, b in pairwise(bounds)]
