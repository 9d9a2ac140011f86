"""Python objects of one rank -> the other ranks of a small group, through CPU memory."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_HEADER = 8  # bytes of a message's length, a little-endian integer
_FIRST_ROOM = 1 << 16  # bytes of the first buffer; it grows to the largest message


def host_group(ranks: list[int], timeout_s: float | None = None) -> dist.ProcessGroup:
    """Create a gloo group of some ranks, which communicates in CPU memory; only those ranks call this."""
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(
        ranks, backend="gloo", timeout=timeout, use_local_synchronization=True
    )
    return group


def on_host(group: dist.ProcessGroup, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a group of the same ranks that communicates in CPU memory: itself under gloo, else a new one."""
    if dist.get_backend(group) == "gloo":
        return group
    timeout_s = None if timeout is None else timeout.total_seconds()
    return host_group(dist.get_process_group_ranks(group), timeout_s)


class Messages:
    """Sends objects from one rank of a group to the others by one broadcast a message.

    A message that is larger than all before it takes a second broadcast, and the buffer grows.
    """

    def __init__(self, group: dist.ProcessGroup, source: int) -> None:
        self._group, self._source = group, source  # the source is a global rank
        self._buffer = torch.zeros(_FIRST_ROOM, dtype=torch.uint8)

    def send(self, value: Any) -> None:
        """Send an object to the other ranks."""
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        message = torch.frombuffer(
            bytearray(len(payload).to_bytes(_HEADER, "little") + payload), dtype=torch.uint8
        )
        room = len(self._buffer)
        self._buffer[: min(room, len(message))] = message[:room]
        dist.broadcast(self._buffer, self._source, group=self._group)
        if len(message) > room:
            dist.broadcast(message, self._source, group=self._group)
            self._buffer = torch.zeros_like(message)

    def receive(self) -> Any:
        """Receive the next object."""
        dist.broadcast(self._buffer, self._source, group=self._group)
        size = _HEADER + int.from_bytes(self._buffer[:_HEADER].numpy().tobytes(), "little")
        message = self._buffer[:size]
        if size > len(self._buffer):
            message = torch.empty(size, dtype=torch.uint8)
            dist.broadcast(message, self._source, group=self._group)
            self._buffer = torch.zeros_like(message)
        return pickle.loads(message[_HEADER:].numpy().tobytes())
