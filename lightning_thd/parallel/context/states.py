"""Padded lengths of a pack, number of ranks, layout -> the recurrent states that ranks send each other.

A rank holds stretches of sequences, and a recurrent layer runs every stretch by itself. Ranks with a later
stretch of a sequence need the end state of every earlier stretch. Of all but the first, they also need the
change: how the end state depends on the state that enters the stretch.
Legend: Q stretches on all ranks, P' of one kind on one rank, K of one rank that a state enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from lightning_thd.alignment import Layout
from lightning_thd.parallel.context import partition
from lightning_thd.parallel.context.partition import Ints

Mask: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]


class Stretches(NamedTuple):
    """The stretches of all ranks, ordered by sequence and then by position; each field is ``[Q]``."""

    sequence: Ints  # the index of the stretch's sequence
    place: Ints  # the stretch's number inside the sequence, from 0
    last: Mask  # whether the stretch is the last of the sequence
    rank: Ints  # the rank that holds the stretch
    row: Ints  # the stretch's first row in the shard
    length: Ints  # the stretch's number of slots

    @classmethod
    def of(cls, padded_lengths: Sequence[int], *, cp: int, layout: Layout) -> Stretches:
        """List the stretches that a layout cuts; neighbouring stretches on one rank are merged."""
        columns = [_of_rank(padded_lengths, cp, rank, layout) for rank in range(cp)]
        sequence, start, length, row, rank = np.concatenate(columns, axis=1)
        order = np.lexsort((start, sequence))
        sequence = sequence[order]

        is_first = np.ones(len(order), dtype=bool)
        is_first[1:] = np.diff(sequence) > 0
        firsts = np.flatnonzero(is_first)
        counts = np.diff(np.append(firsts, len(order)))
        place = np.arange(len(order)) - np.repeat(firsts, counts)
        last = place == np.repeat(counts, counts) - 1
        return cls(sequence, place, last, rank[order], row[order], length[order])


def _of_rank(padded_lengths: Sequence[int], cp: int, rank: int, layout: Layout) -> Ints:
    """Return a rank's stretches as columns: sequence, first slot in it, length, row in the shard, rank."""
    pieces = partition.pieces_of_rank(padded_lengths, cp=cp, rank=rank, layout=layout)
    rows = np.cumsum(pieces.lengths) - pieces.lengths
    begins = np.ones(len(rows), dtype=bool)  # whether a piece does not go on from the one before it
    begins[1:] = (np.diff(pieces.sequence) > 0) | (pieces.start[1:] != pieces.stop[:-1])
    first = np.flatnonzero(begins)
    length = np.add.reduceat(pieces.lengths, first) if len(first) else np.empty(0, np.int64)
    ranks = np.full(len(first), rank)
    return np.stack([pieces.sequence[first], pieces.start[first], length, rows[first], ranks])


class Step(NamedTuple):
    """One step along n sequences: every stretch turns the state that enters it into the state at its end."""

    # ``[n]``, for each sequence the index of its stretch's end state, computed as if no state entered. This
    # rank's own states come first, then the received ones.
    states: Ints
    changes: Ints  # ``[n]``, the index of the stretch's change, in the same order; empty in the first step


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePlan:
    """The stretches that one rank runs, and the states it sends and receives."""

    # The first four are int64 ``[2, P']``: first rows and lengths of this rank's stretches.
    whole: Ints  # whole sequences: no state enters or leaves
    opening: Ints  # first stretches of sequences that continue in another stretch; their states are sent
    spanning: Ints  # stretches in the middle of sequences; their states and changes are sent
    closing: Ints  # last stretches of sequences that began in another stretch
    # For every rank the states to send: indices in the list of this rank's opening, then spanning stretches.
    send_states: list[Ints]
    send_changes: list[Ints]  # for every rank the changes to send: indices in the list of spanning stretches
    receive_states: list[int]  # number of states from every rank
    receive_changes: list[int]  # number of changes from every rank
    steps: list[Step]  # how to combine states along the sequences
    # ``[K]``, indices into the results of all steps, end to end: the states that enter spanning stretches,
    # then those that enter closing stretches.
    entering: Ints
    moved: Ints  # ``[cp, cp, 2]``, numbers of states and changes that rank r receives from rank s


def plan_states(padded_lengths: Sequence[int], *, cp: int, rank: int, layout: Layout) -> StatePlan:
    """Plan the exchange of the states that enter each rank's stretches, for any layout but striped."""
    stretches = Stretches.of(padded_lengths, cp=cp, layout=layout)
    # Stretches that another one continues send their states; of these, spanning ones send changes too.
    sends = ~stretches.last
    spans = sends & (stretches.place > 0)
    needs = [_needed(stretches, r) for r in range(cp)]

    moved = np.zeros((cp, cp, 2), dtype=np.int64)
    for r in range(cp):
        moved[r, :, 0] = np.bincount(stretches.rank[needs[r]], minlength=cp)
        moved[r, :, 1] = np.bincount(stretches.rank[needs[r] & spans], minlength=cp)
        moved[r, r] = 0

    is_own = stretches.rank == rank
    openers = np.flatnonzero(is_own & sends & ~spans)
    spanners = np.flatnonzero(is_own & spans)
    # For each stretch, the index of its state, and of its change, among those that this rank knows.
    state_of = np.full(len(is_own), -1, dtype=np.int64)
    change_of = np.full(len(is_own), -1, dtype=np.int64)
    _number(state_of, np.concatenate([openers, spanners]))
    _number(change_of, spanners)

    sent = [np.flatnonzero(is_own & needs[r]) if r != rank else np.empty(0, np.int64) for r in range(cp)]
    send_states = [state_of[of_rank] for of_rank in sent]
    send_changes = [change_of[of_rank[spans[of_rank]]] for of_rank in sent]

    # What arrives is numbered after the rank's own.
    received = [np.flatnonzero(needs[rank] & (stretches.rank == s) & ~is_own) for s in range(cp)]
    _number(state_of, np.concatenate(received))
    _number(change_of, np.concatenate([of_rank[spans[of_rank]] for of_rank in received]))

    steps, entering = _join(stretches, np.flatnonzero(is_own), state_of, change_of)
    return StatePlan(
        whole=_rows(stretches, is_own & stretches.last & (stretches.place == 0)),
        opening=_rows(stretches, is_own & sends & ~spans),
        spanning=_rows(stretches, is_own & spans),
        closing=_rows(stretches, is_own & stretches.last & (stretches.place > 0)),
        send_states=send_states,
        send_changes=send_changes,
        receive_states=moved[rank, :, 0].tolist(),
        receive_changes=moved[rank, :, 1].tolist(),
        steps=steps,
        entering=entering,
        moved=moved,
    )


def _needed(stretches: Stretches, rank: int) -> Mask:
    """Mark the stretches that lie before a rank's last stretch of the same sequence."""
    furthest = np.zeros(int(stretches.sequence.max(initial=-1)) + 1, dtype=np.int64)
    is_own = stretches.rank == rank
    np.maximum.at(furthest, stretches.sequence[is_own], stretches.place[is_own])
    marked: Mask = stretches.place < furthest[stretches.sequence]
    return marked


def _number(index_of: Ints, stretches: Ints) -> None:
    """Give stretches the next indices, in their order."""
    first = int(index_of.max(initial=-1)) + 1
    index_of[stretches] = np.arange(first, first + len(stretches))


def _rows(stretches: Stretches, marked: Mask) -> Ints:
    """Return first rows and lengths of the marked stretches."""
    return np.stack([stretches.row[marked], stretches.length[marked]])


def _join(stretches: Stretches, own: Ints, state_of: Ints, change_of: Ints) -> tuple[list[Step], Ints]:
    """Return the steps along the sequences that a rank continues, and ``StatePlan.entering``."""
    continuing = own[stretches.place[own] > 0]
    furthest = np.zeros(int(stretches.sequence.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(furthest, stretches.sequence[continuing], stretches.place[continuing])
    # The sequences of step i are the first ones of step i - 1, because sequences with more steps come first.
    sequences = np.argsort(-furthest, kind="stable")[: np.count_nonzero(furthest)]
    position = np.empty(len(furthest), dtype=np.int64)
    position[sequences] = np.arange(len(sequences))
    first = np.searchsorted(stretches.sequence, np.arange(len(furthest)))

    steps = []
    offsets = [0]

    for place in range(int(furthest.max(initial=0))):
        of_step = first[sequences[furthest[sequences] > place]] + place
        changes = change_of[of_step] if place else change_of[:0]
        steps.append(Step(state_of[of_step], changes))
        offsets.append(offsets[-1] + len(of_step))

    is_last = stretches.last[continuing]
    spanning_first = np.concatenate([continuing[~is_last], continuing[is_last]])
    begin = np.array(offsets, dtype=np.int64)[stretches.place[spanning_first] - 1]
    return steps, begin + position[stretches.sequence[spanning_first]]
