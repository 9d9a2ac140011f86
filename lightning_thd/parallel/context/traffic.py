"""Exchanges between context-parallel ranks -> the bytes received since the last log.

A job makes one ``Traffic``. It travels in the layouts of shards, so that exchanges in backward count too.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist


class Received(NamedTuple):
    """What this rank received since the last ``Traffic.read_and_reset``."""

    received_bytes: int  # by all methods, in forward, backward and repeated forward passes
    slots: int  # the slots of the packs and shards that ran
    shares: dict[str, float]  # method, such as "ring" -> its share of the layers' exchanges


class Traffic:
    """Counts what one rank receives from the ranks that share its packs."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._connected: set[str] = set()  # names of the groups that have run a collective

    def count(self, name: str, number: int = 1) -> None:
        """Add received "bytes", "slots" that this rank runs, or a layer's exchange by its method."""
        self._counts[name] += number

    def connect(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Run one collective over all ranks of a group; NCCL needs it before point-to-point messages."""
        if group.group_name not in self._connected:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            self._connected.add(group.group_name)

    def read_and_reset(self) -> Received:
        """Return the counts since the last call, and reset them."""
        received = self._counts.pop("bytes", 0)
        slots = self._counts.pop("slots", 0)
        total = self._counts.total()
        shares = {way: calls / total for way, calls in sorted(self._counts.items())}
        self._counts.clear()
        return Received(received, slots, shares)
