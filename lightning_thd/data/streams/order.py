"""Sequences read but not planned, of several sources -> the order in which they are used, what to read next.

With one source that is the order in which it came, or one drawn at random. With several, sources take turns
by their shares (``packing.mixtures.take_turns``), each giving its own in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_thd.data.streams.intake import Dry, Source
from lightning_thd.data.streams.schedule import IntArray, Ledger, Planned, Table
from lightning_thd.packing.mixtures import take_turns

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order in which unplanned sequences are used, as far as it is decided."""

    rows: IntArray  # int64, positions in the pool, in order, of those whose turn is known
    rest: IntArray  # int64, positions of the others, in the order of the pool
    ended: bool  # nothing more comes before the pass ends
    phases: tuple[tuple[int, int], ...] = ()
    dry: frozenset[int] = frozenset()  # sources that ran dry

    def after(
        self, ledger: Ledger, steps: Sequence[Planned], source_of: IntArray
    ) -> tuple[IntArray, BoolArray]:
        """Return how many sequences each source has given after some steps, and which sources are used up."""
        used = np.zeros(len(ledger.pool), bool)
        for step in steps:
            used[step.table["at"]] = True
        sources = source_of[ledger.pool["shard"]]
        out, drawn, begin = ledger.out.copy(), ledger.drawn, 0
        left = set(np.unique(sources[~used]).tolist())
        for position, source in self.phases:
            if source in left:
                break
            out[source], begin = True, position
            drawn = np.zeros_like(drawn)
        of_phase = self.rows[begin:]
        counts = np.bincount(sources[of_phase[used[of_phase]]], minlength=len(drawn))
        return drawn + counts, out


def shares_of(sources: Sequence[Source], out: BoolArray) -> dict[int, int]:
    """Return the shares of the sources that still take part, by their number."""
    return {number: source.share for number, source in enumerate(sources) if not out[number]}


def order_of(
    pool: Table,
    source: IntArray,
    *,
    sources: Sequence[Source],
    ledger: Ledger,
    exhausted: BoolArray,
    dry: Dry,
    seed: int = 0,
    most: int | None = None,
) -> Order:
    """Order a pool of unplanned sequences: shuffled, and with sources taking turns by their shares."""
    rng = np.random.default_rng([seed, ledger.number, ledger.steps, 1])
    queues = []
    for number, one in enumerate(sources):
        queue = np.flatnonzero(source == number) if len(sources) > 1 else np.arange(len(pool))
        if one.shuffle_buffer:
            queue = queue[rng.permutation(len(queue))]
            queue = queue[np.argsort(pool["round"][queue], kind="stable")]  # a pass after the other
        queues.append(queue)
    if len(sources) == 1:
        return Order(rows=queues[0], rest=queues[0][:0], ended=bool(exhausted.all()))
    out, drawn = ledger.out.copy(), ledger.drawn
    turns: list[int] = []
    phases: list[tuple[int, int]] = []
    used = np.zeros(len(sources), np.int64)
    ended, found_dry = bool(out.all()), set()
    while not ended:
        waiting = [len(queue) - count for queue, count in zip(queues, used.tolist(), strict=True)]
        left = None if most is None else most - len(turns)
        more, blocked = take_turns(shares_of(sources, out), drawn.tolist(), waiting, left)
        turns += more
        used += np.bincount(np.array(more, np.int64), minlength=len(sources))
        if blocked is None or not exhausted[blocked]:
            break
        out[blocked], drawn = True, np.zeros_like(drawn)
        phases.append((len(turns), blocked))
        ended = dry == "stop" or bool(out.all())
        if not out.all():
            found_dry.add(blocked)
    rows = np.empty(len(turns), np.int64)
    of_turn = np.array(turns, np.int64)
    for number, queue in enumerate(queues):
        rows[of_turn == number] = queue[: used[number]]
    rest = np.ones(len(pool), bool)
    rest[rows] = False
    return Order(
        rows=rows,
        rest=np.flatnonzero(rest),
        ended=ended,
        phases=tuple(phases) if dry == "rest" else (),
        dry=frozenset(found_dry),
    )


def wanted_of(
    window: int,
    *,
    needed: int,
    shares: Mapping[int, int],
    buffers: Sequence[int],
    pool_source: IntArray,
    holder: npt.NDArray[np.integer],
    exhausted: BoolArray,
) -> IntArray:
    """Return how many sequences of each source each rank has to read, int64 ``[N, ranks]``."""
    sources, ranks = exhausted.shape
    held = np.bincount(pool_source * ranks + holder, minlength=sources * ranks).reshape(sources, ranks)
    wanted = np.zeros((sources, ranks), np.int64)
    reading = [i for i in shares if not exhausted[i].all()]
    if not reading:
        return wanted
    active = int((~exhausted[reading]).any(0).sum())
    total, parts = max(window * active, needed), sum(shares.values())
    for i in reading:
        own = -(-total * shares[i] // parts) + (len(shares) > 1)
        each = max(-(-own // int((~exhausted[i]).sum())), buffers[i])
        wanted[i] = np.where(exhausted[i], 0, np.maximum(0, each - held[i]))
    return wanted
