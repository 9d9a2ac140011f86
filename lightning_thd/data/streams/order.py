"""Sequences read but not planned, of several sources -> the order in which they are used, what to read next.

With one source that is the order in which it came, or one drawn at random. With several, sources take turns
by their shares, each giving its own in order. The rule is Tijdeman's for the chairman assignment problem
(Discrete Mathematics 32, 1980): among the sources that are behind by at least 1 / (2 n - 2), the one that
must come soonest. After any number of turns no source is off its share by more than 1 - 1 / (2 n - 2) turns,
the least that any rule can promise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_thd.data.streams.intake import Source
from lightning_thd.data.streams.ledger import Ledger
from lightning_thd.data.streams.schedule import IntArray, Planned, Table

Dry = Literal["restart", "stop", "rest"]
BoolArray = npt.NDArray[np.bool_]
# Weights become fractions of at most this denominator: 0.3 is 3/10, and numbers of tokens stay what they are.
_DENOMINATOR = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order in which unplanned sequences are used, as far as it is decided.

    Attributes:
        rows: int64, positions in the pool, in order, of those whose turn is known.
        rest: int64, positions of the others, in the order of the pool.
        ended: nothing more comes before the pass ends.
        phases: where in ``rows`` a source left the others to themselves, and which: ``(position, source)``.
        dry: sources that ran dry.
    """

    rows: IntArray
    rest: IntArray
    ended: bool
    phases: tuple[tuple[int, int], ...] = ()
    dry: frozenset[int] = frozenset()

    def after(
        self, ledger: Ledger, steps: Sequence[Planned], source_of: IntArray
    ) -> tuple[IntArray, BoolArray]:
        """Return how many sequences each source has given after some steps, and which sources are used up.

        A source is out once all that it gave is planned; from there the others count from 0.

        Args:
            ledger: whose pool was ordered.
            steps: planned of it; the column ``at`` of their tables is the position in the pool.
            source_of: int64 ``[K]``, the source of each shard.

        Returns:
            What ``Ledger.drawn`` and ``Ledger.out`` become.
        """
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
    """Return how many sequences of each source each rank has to read, int64 ``[N, ranks]``.

    Args:
        window: sequences that each rank is to hold together.
        needed: sequences of a step.
        shares: of the sources that take part, by their number.
        buffers: sequences of each source that each rank is to hold at least.
        pool_source: int64 ``[S]``, the source of what nobody planned.
        holder: int ``[S]``, the rank that holds it.
        exhausted: bool ``[N, ranks]``.
    """
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


def dry_notice(name: str, dry: Dry) -> str:
    """Return the message on what follows from a source of a mixture having run dry."""
    return (
        f"The source {name!r} of the mixture ran dry: "
        + {
            "restart": "it begins again, and keeps its share (dry='restart').",
            "stop": "the epoch ends here; it begins again in the next, the others go on (dry='stop').",
            "rest": "the others share what remains of the epoch (dry='rest').",
        }[dry]
    )


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Convert weights above 0 to whole numbers of the same proportions, so that shares stay exact for ever.

    Returns:
        Whole numbers without a common divisor: ``[0.3, 0.7]`` becomes ``[3, 7]``.
    """
    fractions = [Fraction(weight).limit_denominator(_DENOMINATOR) or Fraction(weight) for weight in weights]
    common = lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * common) for fraction in fractions]
    divisor = gcd(*whole)
    return [number // divisor for number in whole]


def take_turns(
    shares: Mapping[int, int], used: Sequence[int], waiting: Sequence[int], most: int | None = None
) -> tuple[list[int], int | None]:
    """Return the source of each next sequence, up to the first source with none at hand.

    Args:
        shares: whole numbers of the sources that take part, by their number.
        used: sequences that each source gave since it takes part with these.
        waiting: sequences that each source has at hand.
        most: turns that are enough; None for all there are.

    Returns:
        The numbers of the sources, turn after turn, and the one whose turn could not be taken; None where
        ``most`` turns were found. ``({0: 1, 1: 2}, [0, 0], [9, 4])`` gives ``([1, 0, 1, 1, 0, 1], 1)``.
    """
    names, total = list(shares), sum(shares.values())
    taken = {i: int(used[i]) for i in names}
    left = {i: int(waiting[i]) for i in names}
    number = sum(taken.values())
    twice = 2 * len(names) - 2
    found: list[int] = []
    if not twice:
        (only,) = names
        count = left[only] if most is None else min(most, left[only])
        return [only] * count, only if count != most else None
    while len(found) != most:
        number += 1
        first, chosen = None, None
        for i in names:
            behind = shares[i] * number - taken[i] * total
            if behind * twice >= total:
                due = ((twice - 1) * total - twice * behind) / shares[i]
                if first is None or due < first:
                    first, chosen = due, i
        assert chosen is not None  # together they are behind by one turn, so that some source is by 1 / n
        if not left[chosen]:
            return found, chosen
        found.append(chosen)
        taken[chosen] += 1
        left[chosen] -= 1
    return found, None
