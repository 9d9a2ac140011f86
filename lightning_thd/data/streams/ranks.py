"""Collectives of a stream's ranks, which gather tables, exchange samples and send steps to their peers.

A sequence is sent only if another rank runs it. Every rank knows the sizes from the plan.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_thd.data.streams.schedule import Planned
from lightning_thd.parallel.across_ranks import broadcast_object, host_group

Held = dict[tuple[int, int, int], bytes]  # payloads by round, shard and row


class Wire:
    """Collectives among the ranks that read a stream."""

    def __init__(self, rank: int, ranks: int, members: list[int], *, timeout_s: float) -> None:
        self.rank, self.ranks, self._timeout_s = rank, ranks, timeout_s
        self._group: Any = None
        if ranks > 1:
            with self._waiting():
                self._group = host_group(members, timeout_s)

    def objects(self, value: Any) -> list[Any]:
        """Return the Python objects that every rank gave, in the order of ranks."""
        found: list[Any] = [value] * self.ranks
        if self._group is not None:
            with self._waiting():
                dist.all_gather_object(found, value, group=self._group)
        return found

    def exchange(self, outgoing: list[bytes], sizes: list[int]) -> list[bytes]:
        """Send each other rank its part, and receive ``sizes[rank]`` bytes from each."""
        if self._group is None:
            return outgoing
        given = torch.from_numpy(np.frombuffer(b"".join(outgoing), np.uint8).copy())
        found = torch.empty(sum(sizes), dtype=torch.uint8)
        with self._waiting():
            dist.all_to_all_single(found, given, sizes, [*map(len, outgoing)], group=self._group)
        return [part.tobytes() for part in np.split(found.numpy(), np.cumsum(sizes)[:-1])]

    def _waiting(self) -> Any:
        return waiting(f"Rank {self.rank} of {self.ranks} that read the stream", self._timeout_s)


@contextmanager
def waiting(who: str, timeout_s: float) -> Iterator[None]:
    """Add the rank that waited, and for how long, to the error of a failed collective."""
    try:
        yield
    except RuntimeError as err:
        raise RuntimeError(
            f"{who} waited for the others in vain for timeout_s={timeout_s:g} seconds, or one ended ({err})."
        ) from err


class Peers:
    """The ranks that share one data rank; the first of them reads, and the others receive its steps."""

    def __init__(self, readers: list[int], own: list[int], rank: int, *, timeout_s: float) -> None:
        self.readers, self._reader, self.reads = readers, own[0], own[0] == rank
        self._who, self._timeout_s = f"Rank {rank}, one of {own} that train on the same packs,", timeout_s
        self._group: Any = None
        if len(own) > 1:
            with self._waiting():
                self._group = host_group(own, timeout_s)

    @classmethod
    def of_job(
        cls, data_rank: int, data_ranks: int, tell: Any, *, timeout_s: float
    ) -> tuple[Peers, list[Any]]:
        """Find which ranks share a data rank, and gather ``tell`` of each reader; a collective of the job."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls([0], [0], 0, timeout_s=timeout_s), [tell]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (data_rank, tell))
        found = [of for of, _ in everyone]
        own = [[rank for rank, of in enumerate(found) if of == wanted] for wanted in range(data_ranks)]
        if not all(own):
            raise ValueError(
                f"The ranks of the job have the data ranks {found}; wanted 0 to {data_ranks - 1}."
            )
        readers = [ranks[0] for ranks in own]
        peers = cls(readers, own[data_rank], dist.get_rank(), timeout_s=timeout_s)
        return peers, [everyone[reader][1] for reader in readers]

    def send(self, value: Any) -> None:
        """Send a step, or the error that ended the stream, to the other ranks of this data rank."""
        if self._group is not None:
            with self._waiting():
                broadcast_object(value, self._group, self._reader)

    def receive(self) -> Any:
        """Receive the reader's step, or raise the error that ended the stream."""
        with self._waiting():
            value = broadcast_object(None, self._group, self._reader)
        if isinstance(value, Exception):
            raise value
        return value

    def _waiting(self) -> Any:
        return waiting(self._who, self._timeout_s)


def exchange(planned: Planned, held: Held, wire: Wire) -> list[list[dict[str, Any]]]:
    """Exchange the samples of a step between ranks, and drop those that are used; a collective."""
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
