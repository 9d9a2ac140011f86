"""Exchanges of attention layers, counted on the host -> bytes received since the last log, by method."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

_bytes: Counter[str] = Counter()
_calls: Counter[str] = Counter()
_slots: Counter[str] = Counter()


class Traffic(NamedTuple):
    """The bytes this rank received in attention's exchanges since the last ``take``."""

    received_bytes: int  # by all methods, forward and backward
    slots: int  # the slots of the packs and shards that ran
    shares: dict[str, float]  # method, such as "ring" -> its share of the layers' exchanges


def count(received_bytes: int, way: str) -> None:
    """Add a layer's exchange: its forward bytes count twice, or three times if a ring sends keys again."""
    _bytes[way] += received_bytes * (3 if way == "ring" else 2)
    _calls[way] += 1


def run(slots: int) -> None:
    """Add the slots of a pack or shard that this rank runs to the counters."""
    _slots["run"] += slots


def take() -> Traffic:
    """Return the bytes and slots that attention exchanged since the last call, and reset the counters."""
    total = sum(_calls.values())
    found = Traffic(
        sum(_bytes.values()), _slots["run"], {way: calls / total for way, calls in sorted(_calls.items())}
    )
    _bytes.clear()
    _slots.clear()
    _calls.clear()
    return found
