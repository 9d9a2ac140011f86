"""Collectives of a stream's ranks on a gloo group of their own: messages, objects and exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lightning_thd.parallel.messages import host_group

__all__ = ["Wire", "host_group", "waiting"]

Bytes = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]


class Wire:
    """Collectives among the ranks that read a stream, which count the bytes they move.

    Args:
        rank: of this process among the readers.
        ranks: readers.
        members: global ranks of the readers, in the order of their data ranks; unused with one reader.
        timeout_s: seconds until a rank that does not answer is given up.
    """

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
    """Say of a failed collective who waited for ranks that are gone.

    Raises:
        RuntimeError: when the collective fails: gloo's own words name a socket, not what to look for.
    """
    try:
        yield
    except RuntimeError as err:
        raise RuntimeError(
            f"{who} waited for the others in vain: one ended, or gave nothing for timeout_s={timeout_s:g} "
            f"seconds. Look for the first error in the logs of the others; raise timeout_s where shards are "
            f"slow. ({err})"
        ) from err
