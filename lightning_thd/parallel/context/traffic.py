"""Exchanges of layers between context-parallel ranks -> the bytes received since the last log."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

_totals: Counter[str] = Counter()  # received bytes, and slots that ran
_calls: Counter[str] = Counter()  # exchanges by method


class Traffic(NamedTuple):
    """The bytes that this rank received since the last ``read_and_reset``."""

    received_bytes: int  # by all methods, in forward and backward passes
    slots: int  # the slots of the packs and shards that ran
    shares: dict[str, float]  # method, such as "ring" -> its share of the layers' exchanges


def count(received_bytes: int, way: str) -> None:
    """Add a layer's exchange; the backward pass receives as many bytes again, and in a ring twice as many."""
    times = (3 if way == "ring" else 2) if torch.is_grad_enabled() else 1
    _totals["bytes"] += received_bytes * times
    _calls[way] += 1


def count_slots(slots: int) -> None:
    """Add the slots of a pack or shard that this rank runs."""
    _totals["slots"] += slots


def read_and_reset() -> Traffic:
    """Return the counts since the last call, and reset them."""
    total = sum(_calls.values())
    shares = {way: calls / total for way, calls in sorted(_calls.items())}
    found = Traffic(_totals["bytes"], _totals["slots"], shares)
    _totals.clear()
    _calls.clear()
    return found
