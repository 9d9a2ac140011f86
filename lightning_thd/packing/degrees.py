"""The most ranks that may share a sequence -> the degrees, and each sequence's slots and work at each degree.

The degree of a sequence is the number of ranks that share it.
Legend: S sequences, C degrees (1, 2, 4, ...), R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import choice, flags, whole_number
from lightning_thd.alignment import Alignment, Layout
from lightning_thd.packing.lengths import MOST_RANKS

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Waits = Literal["microbatch", "step"]

# Default cost of sending a token's keys to one other rank, as a share of the token's linear work. It holds
# for 8 key heads of 128 in 32 layers, in a model of 7e9 weights, at 100 GB/s.
_EXCHANGE = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How many ranks may share a sequence, and the cost of exchanging its keys."""

    max_degree: int  # most ranks of a group, a power of two
    layout: Layout = "dual_chunk"  # how a group cuts its pack
    tp: int = 1  # tensor-parallel ranks; each tensor-parallel group counts as one rank here
    sequence_parallel: bool = False  # whether tensor-parallel ranks also cut slots (sequence parallelism)
    # What a rank pays in the exchange for each of its slots, in units of a token's linear work: one number if
    # the group has 2 ranks, one if it has 4, and so on. None means 0.02 for each other rank of the group.
    exchange: tuple[float, ...] | None = None
    # When ranks wait for the slowest rank: in each microbatch (FSDP, which gathers weights there), or only at
    # the end of the step (DDP).
    waits: Waits = "microbatch"

    def __post_init__(self) -> None:
        # Messages name the strategy's arguments, by which users set most of these fields.
        advice = "It is the most ranks that share a sequence."
        degree = whole_number(self.max_degree, "max_context_parallel_size", least=1, advice=advice)
        object.__setattr__(self, "max_degree", degree)  # an int, also if numpy's was given
        if self.max_degree & (self.max_degree - 1):
            raise ValueError(
                f"max_context_parallel_size={self.max_degree} is not a power of two. Use 1, 2, 4, 8, ..."
            )
        choice(self.layout, "context_parallel_layout", *get_args(Layout))
        choice(self.waits, "waits", *get_args(Waits))
        whole_number(self.tp, "tensor_parallel_size", least=1, advice="1 means no tensor parallelism.")
        flags(sequence_parallel=self.sequence_parallel)
        if self.exchange is not None and len(self.exchange) != len(self.degrees) - 1:
            raise ValueError(f"exchange={self.exchange}: wanted one number for each of {self.degrees[1:]}.")

    @property
    def degrees(self) -> list[int]:
        """Return the degrees: 1, 2, 4, ... up to ``max_degree``."""
        return [2**i for i in range(self.max_degree.bit_length())]

    @property
    def exchanges(self) -> list[float]:
        """Return what a rank pays in the exchange for each of its slots, at every degree."""
        if self.exchange is None:
            return [_EXCHANGE * (degree - 1) for degree in self.degrees]
        return [0.0, *self.exchange]

    def align(self, degree: int) -> Alignment | None:
        """Return the alignment of packs of a group of ``degree`` ranks; None if it needs none."""
        if degree == 1 and not (self.sequence_parallel and self.tp > 1):
            return None
        return Alignment.for_(
            cp=degree, tp=self.tp, sequence_parallel=self.sequence_parallel, layout=self.layout
        )

    def room(self, capacity: int, degree: int) -> tuple[int, int]:
        """Return the number of slots of a group, and the multiple to which lengths are padded."""
        align = self.align(degree)
        slots = capacity * degree
        if align is None:
            return slots, 1
        return slots // align.total_multiple * align.total_multiple, align.sequence_multiple


def check_tiling(ranks: int, max_degree: int) -> None:
    """Refuse a number of ranks that is not a multiple of the largest degree."""
    whole_number(ranks, "ranks", least=1, most=MOST_RANKS, advice="It is the number of data-parallel ranks.")
    whole_number(max_degree, "max_degree", least=1, advice="It is the most ranks of a sequence.")
    if ranks % max_degree:
        powers = [2**i for i in range(max_degree.bit_length())]
        fits = max(degree for degree in powers if ranks % degree == 0)
        raise ValueError(
            f"max_context_parallel_size={max_degree} does not divide the {ranks} ranks that read data, so "
            f"they cannot form groups of that size. Use max_context_parallel_size={fits}, or a multiple of "
            f"{max_degree} ranks."
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tables:
    """The slots and work of every sequence at every degree."""

    degrees: list[int]  # 1, 2, 4 and so on
    room: list[int]  # slots of a group of each degree
    slots: IntArray  # int64 ``[C, S]``, padded
    load: FloatArray  # float64 ``[C, S]``, work of each rank of the group, including its exchange
    least: IntArray  # int64 ``[S]``, index of the first degree that holds the sequence

    @classmethod
    def of(
        cls, lengths: IntArray, capacity: int, sharing: Sharing, cost: Callable[[IntArray], FloatArray]
    ) -> Tables:
        """Compute the tables; raise if no degree holds a sequence, or if its work is not above 0."""
        degrees = sharing.degrees
        rooms, multiples = zip(*(sharing.room(capacity, degree) for degree in degrees), strict=True)
        slots = np.stack([-(-lengths // multiple) * multiple for multiple in multiples])
        fits = slots <= np.array(rooms)[:, None]
        if not fits[-1].all():
            worst = int(np.argmax(slots[-1]))
            wanted = -(-int(lengths[worst]) // capacity)  # ranks whose slots hold the sequence
            enough = 1 << (wanted - 1).bit_length()  # the next power of two
            raise ValueError(
                f"Sequence {worst} has {lengths[worst]} tokens, which fit at no degree: {degrees[-1]} ranks "
                f"of {capacity} slots hold {rooms[-1]}. Raise max_context_parallel_size to {enough}, raise "
                "capacity, or set oversize='drop', 'truncate' or 'split'."
            )

        work = _work(cost, lengths)
        # In a short sequence nearly all work is linear, so this is about the linear work of one token.
        work_of_token = float(_work(cost, np.array([1024]))[0]) / 1024
        exchanged = np.array(sharing.exchanges)[:, None] * work_of_token * slots
        ranks = np.array(degrees, dtype=np.float64)[:, None]
        return cls(
            degrees=degrees,
            room=list(rooms),
            slots=slots,
            load=(work + exchanged) / ranks,
            least=np.argmax(fits, axis=0),
        )

    @property
    def possible(self) -> BoolArray:
        """Return bool ``[C, S]``: whether a group of each degree has enough slots for each sequence."""
        return np.asarray(np.arange(len(self.degrees))[:, None] >= self.least)

    @property
    def total_work(self) -> FloatArray:
        """Return each sequence's work over all ranks, ``[C, S]``; infinite where a degree is too small."""
        return np.where(self.possible, self.load * np.array(self.degrees)[:, None], np.inf)

    @property
    def cheapest(self) -> FloatArray:
        """Return the work of each sequence over all ranks at its cheapest degree, float64 ``[S]``."""
        return np.asarray(self.total_work.min(axis=0))

    def even_time(self, ranks: int) -> float:
        """Return the time of a step if all work, at the cheapest degrees, were spread evenly over R ranks."""
        return float(self.cheapest.sum()) / ranks


def _work(cost: Callable[[IntArray], FloatArray], lengths: IntArray) -> FloatArray:
    """Compute the work of sequences; raise if one costs nothing, because shares of work divide by it."""
    work = cost(lengths)
    good = np.isfinite(work) & (work > 0)
    if not good.all():
        bad = int(np.argmin(good))
        raise ValueError(
            f"The cost of a sequence of {lengths[bad]} tokens is {work[bad]}; wanted a finite number above 0."
        )
    return work
