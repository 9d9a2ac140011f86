"""Host integers of a batch -> the fixed shape it is padded to, or the reason why none fits.

T slots, S sequences. Nothing here looks at a tensor: the decision is made before anything is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_thd._checks import host_ints, whole_number
from lightning_thd.batch import THDBatch

Reason = Literal["num_sequences", "tokens", "max_seqlen", "extras"]


class Layout(NamedTuple):
    """The sizes of a batch that decide which bucket it fits.

    Attributes:
        slots: slots of its sequences, a trailing pad left out.
        sequences: sequences in it, empty ones at the end left out.
        max_seqlen: slots of the longest.
    """

    slots: int
    sequences: int
    max_seqlen: int

    @classmethod
    def of(cls, padded_lengths: Sequence[int]) -> Layout:
        """Return the layout of sequences by padded length: ``(3, 2, 0)`` is 5 slots in 2, longest 3."""
        count = len(padded_lengths)
        while count and padded_lengths[count - 1] == 0:
            count -= 1
        return cls(sum(padded_lengths), count, max(1, max(padded_lengths, default=1)))

    @classmethod
    def of_batch(cls, batch: THDBatch) -> Layout:
        """Return the layout of a batch without its trailing pad, whose place a bucket's tail takes."""
        return cls.of(batch.padded_lengths[: len(batch.lengths)])


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Bucket:
    """A fixed shape (slots, sequences, longest sequence) that steps are captured for.

    Attributes:
        slots: T, every batch is padded to.
        sequences: S, entries of cu_seqlens less one.
        max_seqlen: longest sequence the kernels are built for, dummies of the tail included.
    """

    slots: int
    sequences: int
    max_seqlen: int

    def __post_init__(self) -> None:
        for name in ("slots", "sequences", "max_seqlen"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Bucket({name}={value!r}): wanted an int of at least 1.")
        if self.max_seqlen > self.slots:
            object.__setattr__(self, "max_seqlen", self.slots)
        if self.sequences * self.max_seqlen < self.slots:
            raise ValueError(
                f"{self}: {self.sequences} sequences of at most {self.max_seqlen} cover "
                f"{self.sequences * self.max_seqlen} of {self.slots} slots, and a slot of no sequence makes "
                f"gradients NaN. Give sequences={-(-self.slots // self.max_seqlen)} or more."
            )

    def misfit(self, layout: Layout) -> Reason | None:
        """Return why a batch does not fit this bucket, or None.

        The tail needs dummy sequences of at most ``max_seqlen`` each: 10 sequences in 90 of 100 slots do not
        fit a bucket of 10, as nothing would cover the last 10 slots.
        """
        if layout.slots > self.slots:
            return "tokens"
        if layout.max_seqlen > self.max_seqlen:
            return "max_seqlen"
        dummies = -(-(self.slots - layout.slots) // self.max_seqlen)
        return "num_sequences" if layout.sequences + dummies > self.sequences else None


def choose(buckets: Sequence[Bucket], batch: THDBatch) -> tuple[Bucket | None, Reason | None]:
    """Pick the cheapest bucket a batch fits: the fewest slots, then the fewest sequences.

    Returns:
        The bucket, or None and what the bucket that came nearest lacks.
    """
    if batch.extras:
        return None, "extras"
    layout = Layout.of_batch(batch)
    order: tuple[Reason, ...] = ("tokens", "max_seqlen", "num_sequences")
    nearest: Reason = "tokens"
    for bucket in buckets:
        reason = bucket.misfit(layout)
        if reason is None:
            return bucket, None
        nearest = max(nearest, reason, key=order.index)
    return None, nearest


def make_buckets(max_sequences: Sequence[int], *, slots: int, max_seqlen: int | None = None) -> list[Bucket]:
    """Make one bucket per number of sequences, smallest first.

    Args:
        max_sequences: numbers of sequences, for example ``(24, 80)``.
        slots: T of every bucket.
        max_seqlen: longest sequence; none means ``slots``.

    Raises:
        ValueError: for an empty list or numbers below 1.
    """
    counts = sorted(set(host_ints(max_sequences, "max_sequences", advice="Pass (24, 80), say.").tolist()))
    if max_seqlen is not None:
        whole_number(max_seqlen, "max_seqlen", least=1, advice="None means all slots.")
    if not counts:
        raise ValueError("max_sequences is empty; wanted at least one number, for example 64, or 'auto'.")
    return [Bucket(slots=slots, sequences=s, max_seqlen=max_seqlen or slots) for s in counts]
