"""How much one optimizer step takes: a number of packs, or a number of sequences."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_thd.packing.lengths import check_count


@dataclass(frozen=True, slots=True)
class Packs:
    """``n`` packs of the whole job to an optimizer step: ranks times microbatches.

    Args:
        n: packs, at least one; a multiple of the data-parallel ranks.
    """

    n: int

    def __post_init__(self) -> None:
        check_count("Packs.n", self.n, "Pass the packs of a step, for example Packs(8).")


@dataclass(frozen=True, slots=True)
class Sequences:
    """Exactly ``n`` sequences to an optimizer step, in as many microbatches as they need.

    Args:
        n: sequences, at least one.
    """

    n: int

    def __post_init__(self) -> None:
        check_count("Sequences.n", self.n, "Pass the sequences of a step, for example Sequences(512).")
