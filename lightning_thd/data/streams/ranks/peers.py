"""Ranks of a job -> which of them read a stream, and a message a step to those that share their packs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_thd.data.streams.ranks.wire import host_group, waiting
from lightning_thd.parallel.messages import Messages


class Peers:
    """The ranks that share one data rank: the first of them reads, the others receive its steps.

    Args:
        readers: global ranks that read, by data rank.
        own: global ranks with this data rank.
        rank: global rank of this process.
        timeout_s: seconds until a reader that gives nothing is given up.
        told: what each rank that reads told the others, by data rank.
    """

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
        """Find which ranks share a data rank and receive the same packs; a collective over the job.

        Raises:
            ValueError: when data ranks are missing: a job of several processes without a process group.
        """
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
