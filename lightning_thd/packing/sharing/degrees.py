"""The most ranks that may share a sequence -> degrees, their alignment, and the slots of a group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_thd._checks import choice, flags, whole_number
from lightning_thd.alignment import Alignment, Layout
from lightning_thd.packing.lengths import MOST_RANKS

Waits = Literal["microbatch", "step"]

_EXCHANGE = 0.02  # of a token's work: keys of 8 heads of 128 in 32 layers of 7e9 weights at 100 GB/s


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How many ranks may share a sequence (its degree), and the cost of their exchange.

    Attributes:
        max_degree: most ranks of a group, a power of two.
        layout: how a group cuts its pack.
        tp: tensor-parallel ranks, each set of which counts as one rank here.
        sequence_parallel: whether these share slots between their products.
        exchange: what a rank's exchange costs it for each of its slots, in tokens' worth of linear work: one
            number for groups of 2, one for groups of 4, and so on. None is 0.02 for each other rank of the
            group, whose keys it receives.
        waits: until when all ranks wait for the slowest: the end of every microbatch, as in FSDP, whose ranks
            gather weights together, or that of the step, as in DDP.
        together: neighbours that wait for each other in every microbatch where ``waits`` says so: those that
            share weights where not all ranks do, as in HSDP. The others meet at the step's end. None is all.
    """

    max_degree: int
    layout: Layout = "dual_chunk"
    tp: int = 1
    sequence_parallel: bool = False
    exchange: tuple[float, ...] | None = None
    waits: Waits = "microbatch"
    together: int | None = None

    def __post_init__(self) -> None:
        advice = "It is the most ranks that share a sequence."
        whole_number(self.max_degree, "max_context_parallel_size", least=1, advice=advice)
        if self.max_degree & (self.max_degree - 1):
            raise ValueError(
                f"max_context_parallel_size={self.max_degree} is no power of two; groups of 1, 2, 4, ... "
                f"ranks are made. Use {1 << (self.max_degree.bit_length() - 1)} or "
                f"{1 << self.max_degree.bit_length()}."
            )
        choice(self.layout, "context_parallel_layout", *get_args(Layout))
        choice(self.waits, "waits", *get_args(Waits))
        whole_number(self.tp, "tensor_parallel_size", least=1, advice="1 means not at all.")
        flags(sequence_parallel=self.sequence_parallel)
        if self.together is not None:
            whole_number(self.together, "together", least=1, advice="The ranks that share weights.")
        wanted = len(self.degrees) - 1
        if self.exchange is not None and (
            len(self.exchange) != wanted or not all(0 <= x < float("inf") for x in self.exchange)
        ):
            raise ValueError(
                f"exchange={self.exchange}: wanted {wanted} finite numbers of 0 or more tokens, one for each "
                f"of the degrees {self.degrees[1:]}."
            )

    @property
    def degrees(self) -> list[int]:
        """Return the degrees: 1, 2, 4, ... up to ``max_degree``."""
        return [1 << i for i in range(self.max_degree.bit_length())]

    @property
    def exchanges(self) -> list[float]:
        """Return the cost of the exchange for each slot of a rank, at every degree."""
        if self.exchange is None:
            return [_EXCHANGE * (degree - 1) for degree in self.degrees]
        return [0.0, *self.exchange]

    def waiting(self, ranks: int) -> int:
        """Return how many neighbours wait for each other in every microbatch; 1 where none do.

        Ranks of a group wait for each other, too: with groups of up to 8, no fewer than 8 do.

        Raises:
            ValueError: for ranks that cannot be divided so.
        """
        if self.waits == "step":
            return 1
        if self.together is None:
            return ranks
        if ranks % self.together:
            raise ValueError(
                f"together={self.together} does not divide the {ranks} ranks that read data. Pass the number "
                "of ranks that share weights, or None where all do."
            )
        return math.lcm(self.together, self.max_degree)

    def align(self, degree: int) -> Alignment | None:
        """Return the alignment of a group of this size, or None."""
        if degree == 1 and not (self.sequence_parallel and self.tp > 1):
            return None
        return Alignment.for_(
            cp=degree, tp=self.tp, sequence_parallel=self.sequence_parallel, layout=self.layout
        )

    def room(self, capacity: int, degree: int) -> tuple[int, int]:
        """Return all slots of a group, and the multiple that padded lengths in it must be of."""
        align = self.align(degree)
        if align is None:
            return capacity * degree, 1
        return capacity * degree // align.total_multiple * align.total_multiple, align.sequence_multiple


def check_tiling(ranks: int, max_degree: int) -> None:
    """Refuse a number of ranks that groups of the largest degree do not divide.

    Raises:
        ValueError: saying which degrees do.
    """
    whole_number(ranks, "ranks", least=1, most=MOST_RANKS, advice="It is the number of data-parallel ranks.")
    whole_number(max_degree, "max_degree", least=1, advice="Most ranks of a sequence.")
    if ranks % max_degree:
        fits = max(d for d in (1 << i for i in range(max_degree.bit_length())) if ranks % d == 0)
        raise ValueError(
            f"max_context_parallel_size={max_degree} does not divide the {ranks} ranks that read data, so "
            f"that groups cannot tile them. Use max_context_parallel_size={fits}, or a multiple of "
            f"{max_degree} ranks."
        )
