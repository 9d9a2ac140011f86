"""Lengths, capacity, degrees -> slots and work of sequences at every degree, and the least time of a step.

Legend: S sequences, C degrees (1, 2, 4, ...), R ranks, M microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_thd.packing.sharing.degrees import Sharing

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tables:
    """The slots and work of every sequence at every degree.

    Attributes:
        degrees: 1, 2, 4, ...
        room: slots of a group of each.
        slots: int64 ``[C, S]``, padded.
        load: float64 ``[C, S]``, work of each of the ranks, the exchange included.
        least: int64 ``[S]``, index of the first degree that holds the sequence.
    """

    degrees: list[int]
    room: list[int]
    slots: IntArray
    load: FloatArray
    least: IntArray

    @classmethod
    def of(
        cls, lengths: IntArray, capacity: int, sharing: Sharing, cost: Callable[[IntArray], FloatArray]
    ) -> Tables:
        """Compute the tables of given lengths, capacity and cost.

        Raises:
            ValueError: for a sequence that fits at no degree, and what to set; for work that is no finite
                number above 0.
        """
        degrees = sharing.degrees
        rooms, multiples = zip(*(sharing.room(capacity, degree) for degree in degrees), strict=True)
        slots = np.stack([-(-lengths // multiple) * multiple for multiple in multiples])
        ranks = np.array(degrees, dtype=np.float64)[:, None]
        own = _work(cost, lengths)
        token = float(_work(cost, np.array([1024]))[0]) / 1024  # near a token's linear work
        exchanged = np.array(sharing.exchanges)[:, None] * token * slots
        load = (own + exchanged) / ranks
        fits = slots <= np.array(rooms)[:, None]
        if not fits[-1].all():
            worst = int(np.argmax(slots[-1]))
            raise ValueError(
                f"Sequence {worst} has {lengths[worst]} tokens, which fit at no degree: {degrees[-1]} ranks "
                f"of {capacity} slots hold {rooms[-1]}. Raise max_context_parallel_size to "
                f"{_degree_for(int(lengths[worst]), capacity)}, raise capacity, or set oversize='drop', "
                "'truncate' or 'split'."
            )
        return cls(degrees=degrees, room=list(rooms), slots=slots, load=load, least=np.argmax(fits, axis=0))

    @property
    def possible(self) -> BoolArray:
        """Return which degrees hold each sequence, bool ``[C, S]``."""
        held: BoolArray = np.arange(len(self.degrees))[:, None] >= self.least
        return held

    @property
    def cheapest(self) -> FloatArray:
        """Return the work of each sequence, of all its ranks, at the cheapest degree, float64 ``[S]``."""
        work: FloatArray = self._spent().min(axis=0)
        return work

    def take(self, sequences: IntArray) -> Tables:
        """Return the tables of some of the sequences."""
        return replace(
            self, slots=self.slots[:, sequences], load=self.load[:, sequences], least=self.least[sequences]
        )

    def worth(self, waste: float) -> BoolArray:
        """Return which degrees cost at most ``waste`` times the cheapest one's work, bool ``[C, S]``."""
        spent = self._spent()
        within: BoolArray = self.possible & (spent <= waste * spent.min(axis=0))
        return within

    def _spent(self) -> FloatArray:
        """Return the work of all ranks of each degree that holds a sequence, float64 ``[C, S]``."""
        work: FloatArray = np.where(self.possible, self.load * np.array(self.degrees)[:, None], np.inf)
        return work

    def even_time(self, ranks: int) -> float:
        """Return the time of a step if all work, at the cheapest degrees, were spread evenly over R ranks."""
        return float(self.cheapest.sum()) / ranks

    def least_time(self, ranks: int) -> float:
        """Return a lower bound on a step's time, in work, summed over its microbatches.

        All work, each sequence at its cheapest degree, is spread evenly at best, but for what ranks leave
        undone in the microbatch that holds the sequence which makes them wait most.

        Returns:
            A bound that no plan can pass, which need not be reached: groups are whole, and so are sequences.
        """
        return float(self.cheapest.sum() + self.idle(ranks).max()) / ranks

    def idle(self, ranks: int, sets: int = 1) -> FloatArray:
        """Return work that a set of R ranks must leave undone while it runs each sequence, float64 ``[S]``.

        The set takes as long as the sequence at one of its degrees, and does its number of ranks times that:
        less what the degree costs beyond the cheapest one, and no more than an even share, of all the sets,
        of the sequences of most work a slot that fit their slots.
        """
        spent, work = self._spent(), self.cheapest
        order = np.argsort(-work / self.slots[0], kind="stable")
        filled = np.cumsum(self.slots[0, order])
        held = np.searchsorted(filled, sets * ranks * self.room[0], side="right")
        densest = float(work[order][: held + 1].sum()) / sets
        time = np.where(self.possible, self.load, np.inf)
        left: FloatArray = np.maximum(spent - work, ranks * time - densest).min(axis=0)
        return left


def _work(cost: Callable[[IntArray], FloatArray], lengths: IntArray) -> FloatArray:
    work = cost(lengths)
    if not (np.isfinite(work) & (work > 0)).all():
        bad = int(np.argmin(np.isfinite(work) & (work > 0)))
        raise ValueError(
            f"The cost of a sequence of {lengths[bad]} tokens is {work[bad]}; wanted a finite number above "
            "0. Pass Cost(linear=..., quadratic=...), in a larger unit of work where it overflows."
        )
    return work


def _degree_for(length: int, capacity: int) -> int:
    return 1 << (-(-length // capacity) - 1).bit_length()
