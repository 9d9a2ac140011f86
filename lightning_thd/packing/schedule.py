"""A schedule made elsewhere, each sequence already in a microbatch -> the same packs in every epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_thd.packing.entries import Entries
from lightning_thd.packing.lengths import Slots
from lightning_thd.packing.plan import Spans

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScheduledPacks:
    """Packs given from outside, in the order of their numbers, the same in every epoch.

    Attributes:
        entries: the sequences that take part.
        indices: int64 ``[S]``, dataset indices, microbatch after microbatch.
        offsets: int64 ``[P + 1]`` of each microbatch in them.
    """

    entries: Entries
    indices: IntArray
    offsets: IntArray

    @property
    def total(self) -> int:
        """Return the number of packs of an epoch."""
        return len(self.offsets) - 1

    def digest(self) -> str:
        """Return a hexadecimal hash of which sequence is in which pack."""
        hashed = hashlib.blake2b(self.indices.astype("<i8").tobytes(), digest_size=16)
        hashed.update(self.offsets.astype("<i8").tobytes())
        return hashed.hexdigest()

    def read(self, epoch: int, first: int, last: int) -> tuple[Spans, IntArray]:
        """Return the packs ``first`` to ``last``: their spans, and int64 offsets of each pack in them."""
        begin = self.offsets[first]
        spans = self.entries.spans(self.indices[begin : self.offsets[last]])
        return spans, self.offsets[first : last + 1] - begin


def open_schedule(
    schedule: npt.ArrayLike | Sequence[int], entries: Entries, count: int, slots: Slots
) -> ScheduledPacks:
    """Sort sequences by microbatch after a checked schedule ``[N]`` (gaps allowed); empty ones stay out.

    Raises:
        ValueError: when it is not one number a sequence, or a microbatch holds more than a pack offers.
    """
    numbers = np.asarray(schedule)
    if numbers.shape != (count,) or numbers.dtype.kind not in "iu" or (count and numbers.min() < 0):
        raise ValueError(
            f"schedule has the shape {numbers.shape} and the type {numbers.dtype} for {count} sequences. "
            "Pass one microbatch number a sequence, each at least 0."
        )
    if entries.oversize in ("truncate", "split"):
        raise ValueError(
            f"oversize={entries.oversize!r} changes sequences that the schedule has already placed. "
            "Cut them beforehand, or set oversize='error', 'drop' or 'own_pack'."
        )
    indices = np.argsort(numbers, kind="stable")
    indices = indices[~np.isin(indices, entries.left_out)]
    ordered = numbers[indices]
    offsets = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1], [True]]))
    packs = ScheduledPacks(entries=entries, indices=indices, offsets=offsets)
    padded = np.concatenate([[0], np.cumsum(slots.padded(entries.spans(indices).lengths))])
    totals = np.diff(padded[offsets])
    over = (totals > slots.usable) & ((np.diff(offsets) > 1) | (entries.oversize != "own_pack"))
    if over.any():
        first = int(over.argmax())
        raise ValueError(
            f"Microbatch {ordered[offsets[first]]} of the schedule takes {totals[first]} slots, but "
            f"{slots.usable} of a pack are usable. Raise capacity, or schedule fewer sequences there."
        )
    return packs
