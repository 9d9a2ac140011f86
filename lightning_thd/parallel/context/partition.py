"""Padded lengths of a pack, number of ranks, layout -> the slots of each rank, and the keys its queries see.

- ``contiguous`` cuts the row of T slots into cp equal stretches.
- ``dual_chunk`` cuts every sequence into 2 cp chunks, of which a rank holds chunks ``rank`` and
  ``2 cp - 1 - rank``. So all ranks have the same work under causal attention (Transformer Engine's rule).
- ``mixed`` cuts a sequence as ``dual_chunk`` does if it is longer than 1 / (2 cp) of the pack. Each other
  sequence goes whole to the rank with the least attention work that has enough free slots. The few that fit
  on no rank are cut to fill the free slots. So ranks exchange few keys and have about the same work.
- ``striped`` gives slot i of the row to rank i modulo cp.
Legend: T slots in a pack, P pieces, which are the stretches of a rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_thd.alignment import Layout

Stretch = tuple[int, int, int]  # index of a sequence, first slot inside it, slot after the last


@lru_cache(maxsize=128)
def cut_mixed(padded_lengths: tuple[int, ...], cp: int) -> tuple[NDArray[np.int64], ...]:
    """Return each rank's stretches in the mixed layout, int64 ``[3, P]``; lengths are multiples of 2 cp."""
    total = sum(padded_lengths)
    held: list[list[Stretch]] = [[] for _ in range(cp)]
    short = []
    for i, length in enumerate(padded_lengths):
        if length * 2 * cp <= total:
            short.append(i)
            continue
        chunk = length // (2 * cp)
        for rank in range(cp):
            first = rank * chunk
            second = (2 * cp - 1 - rank) * chunk
            held[rank] += [(i, first, first + chunk), (i, second, second + chunk)]

    longest_first = sorted(short, key=lambda i: (-padded_lengths[i], i))
    _deal(padded_lengths, longest_first, held)
    return tuple(np.array(sorted(stretches), dtype=np.int64).reshape(-1, 3).T for stretches in held)


def _deal(lengths: tuple[int, ...], short: list[int], held: list[list[Stretch]]) -> None:
    """Assign short sequences, longest first, to the least busy rank with room; cut those that fit nowhere."""
    room = [sum(lengths[i] for i in short) // len(held)] * len(held)
    work = [(0, rank) for rank in range(len(held))]
    unplaced = []
    for i in short:
        if not lengths[i]:
            continue

        # Look past ranks without room, from the least busy on, and put them back afterwards.
        full = []
        while work and room[work[0][1]] < lengths[i]:
            full.append(heapq.heappop(work))

        if work:
            work_of_rank, rank = work[0]
            heapq.heapreplace(work, (work_of_rank + lengths[i] ** 2, rank))
            held[rank].append((i, 0, lengths[i]))
            room[rank] -= lengths[i]
        else:
            unplaced.append(i)

        for entry in full:
            heapq.heappush(work, entry)

    for i in unplaced:
        start = 0
        for rank in range(len(held)):
            slots = min(room[rank], lengths[i] - start)
            if slots:
                held[rank].append((i, start, start + slots))
                room[rank] -= slots
                start += slots


Ints: TypeAlias = NDArray[np.int64]
_ADVICE = "THDBatch.collate(..., align=strategy.alignment) adds the padding, as THDDataModule does."


class Pieces(NamedTuple):
    """Stretches of sequences, int64 ``[P]`` each."""

    sequence: Ints  # the index of each stretch's sequence
    start: Ints  # the stretch's first slot, counted inside the sequence
    stop: Ints  # the slot after the stretch's last slot

    @property
    def lengths(self) -> Ints:
        """Return the slots of every piece, int64 ``[P]``."""
        return self.stop - self.start


def pieces_of_rank(padded_lengths: Sequence[int], *, cp: int, rank: int, layout: Layout) -> Pieces:
    """Return the stretches of sequences that a rank holds, in the order of its shard."""
    lengths = _checked(padded_lengths, cp, rank, layout)
    assert layout != "striped", "a striped shard is not a list of stretches"
    if layout == "mixed":
        return Pieces(*cut_mixed(tuple(lengths.tolist()), cp)[rank])
    if layout == "contiguous":
        share = int(lengths.sum()) // cp
        ends = np.cumsum(lengths)
        firsts = ends - lengths
        start = np.clip(rank * share - firsts, 0, lengths)
        stop = np.clip((rank + 1) * share - firsts, 0, lengths)
        sequence = np.arange(len(lengths), dtype=np.int64)
    else:
        chunk = lengths // (2 * cp)
        start = np.stack([rank * chunk, (2 * cp - 1 - rank) * chunk], 1).ravel()
        stop = start + np.repeat(chunk, 2)
        sequence = np.repeat(np.arange(len(lengths), dtype=np.int64), 2)

    held = stop > start
    return Pieces(sequence[held], start[held], stop[held])


def rank_indices(padded_lengths: Sequence[int], *, cp: int, rank: int, layout: Layout) -> Ints:
    """Return the slots of the pack that a rank holds, in the order of its shard."""
    if layout == "striped":
        total = int(_checked(padded_lengths, cp, rank, layout).sum())
        return np.arange(rank, total, cp, dtype=np.int64)
    pieces = pieces_of_rank(padded_lengths, cp=cp, rank=rank, layout=layout)
    firsts = firsts_of(padded_lengths)[pieces.sequence]
    return ranges(firsts + pieces.start, firsts + pieces.stop)


def restore_indices(padded_lengths: Sequence[int], *, cp: int, layout: Layout) -> Ints:
    """Return the position of every slot of the pack in the concatenation of all ranks' shards."""
    shards = [rank_indices(padded_lengths, cp=cp, rank=rank, layout=layout) for rank in range(cp)]
    order = np.concatenate(shards)
    restore = np.empty_like(order)
    restore[order] = np.arange(len(order))
    return restore


def held_lengths(padded_lengths: Sequence[int], *, cp: int, rank: int, layout: Layout) -> Ints:
    """Count the slots of every sequence that a rank holds."""
    return held_real_lengths(padded_lengths, padded_lengths, cp=cp, rank=rank, layout=layout)


def held_real_lengths(
    lengths: Sequence[int], padded_lengths: Sequence[int], *, cp: int, rank: int, layout: Layout
) -> Ints:
    """Count a rank's real tokens of every sequence; sequences after ``lengths`` are padding, counted too."""
    real = np.asarray([*lengths, *padded_lengths[len(lengths) :]], dtype=np.int64)
    if layout == "striped":
        first, stop = striped_rows(padded_lengths, cp=cp, rank=rank, real=real)
        return stop - first
    pieces = pieces_of_rank(padded_lengths, cp=cp, rank=rank, layout=layout)
    counted = np.clip(real[pieces.sequence] - pieces.start, 0, pieces.lengths)
    return np.bincount(pieces.sequence, counted, len(padded_lengths)).astype(np.int64)


def striped_rows(
    padded_lengths: Sequence[int], *, cp: int, rank: int, real: Ints | None = None
) -> tuple[Ints, Ints]:
    """Return each sequence's first row in a striped shard, and the row after its last (``real``) token."""
    lengths = _checked(padded_lengths, cp, rank, "striped")
    firsts = firsts_of(padded_lengths)
    stops = firsts + (lengths if real is None else real)
    return -((rank - firsts) // cp), -((rank - stops) // cp)


class KeyPlan(NamedTuple):
    """A kernel call for all queries of a rank, in pieces whose last key and last query are aligned."""

    q_lengths: Ints  # ``[P]``, number of queries of every piece, in the order of the shard
    kv_lengths: Ints  # ``[P]``, number of keys of every piece
    kv_slots: Ints  # slots of the pack from which the keys come, piece after piece


def plan_keys(
    padded_lengths: Sequence[int], *, cp: int, rank: int, layout: Layout, causal: bool = True, left: int = -1
) -> KeyPlan:
    """Plan the kernel call for a rank's queries and the keys that they see."""
    start, stop = key_spans(padded_lengths, cp=cp, rank=rank, layout=layout, causal=causal, left=left)
    queries = pieces_of_rank(padded_lengths, cp=cp, rank=rank, layout=layout).lengths
    return KeyPlan(queries, stop - start, ranges(start, stop))


def key_spans(
    padded_lengths: Sequence[int], *, cp: int, rank: int, layout: Layout, causal: bool = True, left: int = -1
) -> tuple[Ints, Ints]:
    """Return two int64 ``[P]``: the first slot that each piece of a rank sees, the slot after the last."""
    pieces = pieces_of_rank(padded_lengths, cp=cp, rank=rank, layout=layout)
    firsts = firsts_of(padded_lengths)[pieces.sequence]
    if not causal:
        return firsts, firsts + np.asarray(padded_lengths, dtype=np.int64)[pieces.sequence]
    start = np.zeros_like(pieces.start) if left < 0 else np.maximum(pieces.start - left, 0)
    return firsts + start, firsts + pieces.stop


def causal_work(
    padded_lengths: Sequence[int], *, cp: int, layout: Layout, per_slot: float = 0.0, per_pair: float = 1.0
) -> NDArray[np.float64]:
    """Estimate a pack's cost on each rank, ``[cp]``: ``per_slot`` x slots + ``per_pair`` x causal pairs."""
    work = np.empty(cp)
    for rank in range(cp):
        if layout == "striped":
            slots = rank_indices(padded_lengths, cp=cp, rank=rank, layout=layout)
            firsts = np.repeat(firsts_of(padded_lengths), np.asarray(padded_lengths, dtype=np.int64))
            work[rank] = per_slot * len(slots) + per_pair * (slots - firsts[slots] + 1).sum()
            continue

        pieces = pieces_of_rank(padded_lengths, cp=cp, rank=rank, layout=layout)
        pairs = (pieces.stop * (pieces.stop + 1) - pieces.start * (pieces.start + 1)) // 2
        work[rank] = per_slot * pieces.lengths.sum() + per_pair * pairs.sum()

    return work


def ranges(starts: Ints, stops: Ints) -> Ints:
    """Concatenate integer ranges: ``([0, 5], [2, 7])`` gives ``[0, 1, 5, 6]``."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    slots: Ints = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)
    return slots


def firsts_of(padded_lengths: Sequence[int] | Ints) -> Ints:
    """Return where each sequence begins if they are concatenated: lengths ``[2, 3]`` give ``[0, 2]``."""
    lengths = np.asarray(padded_lengths, dtype=np.int64)
    firsts: Ints = np.cumsum(lengths) - lengths
    return firsts


def _checked(padded_lengths: Sequence[int], cp: int, rank: int, layout: Layout) -> Ints:
    if cp < 1 or not 0 <= rank < cp:
        raise ValueError(f"rank={rank} of cp={cp}; wanted cp of 1 or more, and rank from 0 to cp - 1.")
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r}; wanted one of {', '.join(get_args(Layout))}.")

    lengths = np.asarray(padded_lengths, dtype=np.int64)
    total = int(lengths.sum())
    chunks = layout in ("dual_chunk", "mixed")
    if not chunks and total % cp:
        raise ValueError(
            f"A pack of {total} slots cannot be cut into {cp} equal shards; wanted a multiple of {cp}. "
            f"{_ADVICE}"
        )

    if chunks and (lengths % (2 * cp)).any():
        i = int(np.flatnonzero(lengths % (2 * cp))[0])
        raise ValueError(
            f"Sequence {i} has {lengths[i]} slots; layout={layout!r} over {cp} context-parallel ranks "
            f"wants a multiple of {2 * cp}. {_ADVICE}"
        )

    return lengths
