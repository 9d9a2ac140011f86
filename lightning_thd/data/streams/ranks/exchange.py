"""A planned step and what this rank holds -> the samples it runs, those of other ranks included.

Only sequences that change ranks move: ids, labels where there are any, and further keys, 4 bytes a number.
Every rank knows the sizes from the plan, so nothing but the numbers themselves is sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_thd.data.streams.ranks.wire import Int32, Wire
from lightning_thd.data.streams.samples import LABELS, Sample, unpacked
from lightning_thd.data.streams.schedule import IntArray, Planned, Table

Held = dict[tuple[int, int, int], Sample]  # by round, shard and row


def keys_of(table: Table) -> list[tuple[int, int, int]]:
    """Return the key (pass, shard, row) of every sequence of a table."""
    return list(zip(*(table[name].tolist() for name in ("round", "shard", "row")), strict=True))


def words_of(table: Table) -> IntArray:
    """Return how many int32 numbers each sequence takes in a message, int64 ``[S]``."""
    lengths = table["length"].astype(np.int64)
    words: IntArray = lengths * (1 + (table["keys"] & LABELS)) + table["extra"] // 4
    return words


def moved_bytes(planned: Planned) -> int:
    """Return the bytes that a step moves between all ranks together."""
    moves = planned.table["holder"] != planned.targets()
    return 4 * int(words_of(planned.table)[moves].sum())


def exchange(planned: Planned, held: Held, wire: Wire) -> list[list[dict[str, Any]]]:
    """Exchange the samples of a step between ranks, and drop those that are used; a collective.

    Returns:
        The samples of each microbatch of this rank.
    """
    table, targets, holders = planned.table, planned.targets(), planned.table["holder"]
    words = words_of(table)
    keys = keys_of(table)
    mine = {keys[i]: held.pop(keys[i]) for i in np.flatnonzero(holders == wire.rank)}
    outgoing, sizes = [], []
    for rank in range(wire.ranks):
        sent = np.flatnonzero((holders == wire.rank) & (targets == rank) & (rank != wire.rank))
        outgoing.append(_flat([mine[keys[i]] for i in sent]))
        comes = (holders == rank) & (targets == wire.rank) & (rank != wire.rank)
        sizes.append(int(words[comes].sum()))
    received = wire.exchange(outgoing, sizes)
    read = [0] * wire.ranks
    microbatches: list[list[dict[str, Any]]] = []
    m = planned.microbatches
    for start, stop in zip(
        planned.offsets[wire.rank * m : (wire.rank + 1) * m].tolist(),
        planned.offsets[wire.rank * m + 1 : (wire.rank + 1) * m + 1].tolist(),
        strict=True,
    ):
        samples = []
        for i in range(start, stop):
            holder = int(holders[i])
            if holder == wire.rank:
                sample = mine[keys[i]]
                samples.append(unpacked(sample.ids, sample.labels, sample.extra))
                continue
            at, read[holder] = read[holder], read[holder] + int(words[i])
            samples.append(_parsed(received[holder][at : read[holder]], table[i]))
        microbatches.append(samples)
    return microbatches


def _flat(samples: list[Sample]) -> Int32:
    parts: list[Int32] = [np.empty(0, np.int32)]
    for sample in samples:
        parts.append(sample.ids)
        if sample.labels is not None:
            parts.append(sample.labels)
        if sample.extra:
            parts.append(np.frombuffer(sample.extra, np.int32))
    return np.concatenate(parts)


def _parsed(numbers: Int32, entry: Any) -> dict[str, Any]:
    length, labelled = int(entry["length"]), bool(entry["keys"] & LABELS)
    end = length * (1 + labelled)
    labels = numbers[length:end] if labelled else None
    return unpacked(numbers[:length], labels, numbers[end:].tobytes())
