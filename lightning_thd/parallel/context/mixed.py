"""Padded lengths of a pack, ranks -> long sequences cut among all ranks, short ones whole on one rank.

A sequence longer than a chunk, 1 / (2 cp) of the pack, is cut into 2 cp chunks as ``dual_chunk`` does. The
others are dealt out by the work that attention has with them, up to the slots of each rank; the few that no
rank has room for are cut where room is left. So keys of long sequences alone travel, and all ranks have about
the same work.

Pure: host integers in, numpy arrays out, the same on every rank.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Stretch = tuple[int, int, int]  # sequence, first slot in it, slot after the last


@lru_cache(maxsize=128)
def cut_mixed(padded_lengths: tuple[int, ...], cp: int) -> tuple[NDArray[np.int64], ...]:
    """Return which stretches of which sequences, multiples of 2 cp, each rank holds under the mixed layout.

    Returns:
        For every rank int64 ``[3, P]``: sequence, first slot and the slot after the last, sequence after
        sequence. ``((16, 4, 4, 8), 2)``, chunks of 8, cuts the first alone: rank 0 holds 0..4 and 12..16 of
        it and the last sequence whole, rank 1 the rest.
    """
    total = sum(padded_lengths)
    held: list[list[Stretch]] = [[] for _ in range(cp)]
    short = []
    for i, length in enumerate(padded_lengths):
        if length * 2 * cp <= total:
            short.append(i)
            continue
        chunk = length // (2 * cp)
        for rank in range(cp):
            first, second = rank * chunk, (2 * cp - 1 - rank) * chunk
            held[rank] += [(i, first, first + chunk), (i, second, second + chunk)]
    _deal(padded_lengths, sorted(short, key=lambda i: (-padded_lengths[i], i)), held)
    return tuple(np.array(sorted(own), dtype=np.int64).reshape(-1, 3).T for own in held)


def _deal(lengths: tuple[int, ...], short: list[int], held: list[list[Stretch]]) -> None:
    """Assign each short sequence, longest first, to the rank with the least work that has room for it."""
    room = [sum(lengths[i] for i in short) // len(held)] * len(held)
    work = [(0, rank) for rank in range(len(held))]
    over = []
    for i in short:
        if not lengths[i]:
            continue
        full = []
        while work and room[work[0][1]] < lengths[i]:
            full.append(heapq.heappop(work))
        if work:
            before, rank = work[0]
            heapq.heapreplace(work, (before + lengths[i] ** 2, rank))
            held[rank].append((i, 0, lengths[i]))
            room[rank] -= lengths[i]
        else:
            over.append(i)
        for entry in full:
            heapq.heappush(work, entry)
    for i in over:
        at = 0
        for rank in range(len(held)):
            taken = min(room[rank], lengths[i] - at)
            if taken:
                held[rank].append((i, at, at + taken))
                room[rank] -= taken
                at += taken
