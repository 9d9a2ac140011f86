"""Exchanges between context-parallel ranks -> the bytes received since the last log."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

_counts: Counter[str] = Counter()  # received "bytes", "slots" that ran, and exchanges of layers by method


class Traffic(NamedTuple):
    """The bytes that this rank received since the last ``read_and_reset``."""

    received_bytes: int  # by all methods, in forward, backward and repeated forward passes
    slots: int  # the slots of the packs and shards that ran
    shares: dict[str, float]  # method, such as "ring" -> its share of the layers' exchanges


def count(name: str, number: int = 1) -> None:
    """Add received "bytes", "slots" that this rank runs, or a layer's exchange by its method."""
    _counts[name] += number


def read_and_reset() -> Traffic:
    """Return the counts since the last call, and reset them."""
    received = _counts.pop("bytes", 0)
    slots = _counts.pop("slots", 0)
    total = _counts.total()
    shares = {way: calls / total for way, calls in sorted(_counts.items())}
    _counts.clear()
    return Traffic(received, slots, shares)
