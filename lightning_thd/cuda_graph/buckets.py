"""Host integers of a batch -> the fixed shape it is padded to, or the reason why none fits; the padding.

T slots and S sequences of a bucket. The choice looks at no tensor: it is made before anything is copied. A
bucket's tail becomes dummy sequences without targets, of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_thd._checks import host_ints
from lightning_thd.batch import THDBatch
from lightning_thd.seqlens import cu_seqlens_from_lengths, pad_cu_seqlens

Ints = npt.NDArray[np.int64]
Reason = Literal["num_sequences", "tokens", "max_seqlen", "extras"]


class Layout(NamedTuple):
    """Sizes of a batch that decide its bucket: slots and number of its sequences, slots of the longest."""

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
    """A fixed shape that steps are captured for."""

    slots: int  # T, which every batch is padded to
    sequences: int  # S, entries of cu_seqlens less one
    max_seqlen: int  # longest sequence the kernels are built for, dummies of the tail included

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
        """Return why a batch does not fit this bucket, or None."""
        if layout.slots > self.slots:
            return "tokens"
        if layout.max_seqlen > self.max_seqlen:
            return "max_seqlen"
        dummies = -(-(self.slots - layout.slots) // self.max_seqlen)
        return "num_sequences" if layout.sequences + dummies > self.sequences else None


def choose(buckets: Sequence[Bucket], batch: THDBatch) -> tuple[Bucket | None, Reason | None]:
    """Pick the cheapest bucket a batch fits, or None and what the bucket that came nearest lacks."""
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
    """Make one bucket per number of sequences, smallest first."""
    counts = sorted(set(host_ints(max_sequences, "max_sequences", advice="Pass (24, 80), say.").tolist()))
    if not counts:
        raise ValueError("max_sequences is empty; wanted at least one number, for example 64, or 'auto'.")
    longest = slots if max_seqlen is None else max_seqlen
    return [Bucket(slots=slots, sequences=s, max_seqlen=longest) for s in counts]


def padded_lengths_of(batch: THDBatch, bucket: Bucket) -> Ints:
    """Return a batch's padded lengths and those of the dummies that fill the tail, int64 ``[S]``."""
    kept = batch.padded_lengths[: Layout.of_batch(batch).sequences]
    offsets = pad_cu_seqlens(
        cu_seqlens_from_lengths(kept),
        bucket.sequences,
        bucket.slots,
        max_seqlen=bucket.max_seqlen,
        lengths=kept,
    )
    lengths: Ints = np.diff(offsets.numpy()).astype(np.int64)
    return lengths


def real_lengths_of(batch: THDBatch, padded_lengths: Ints) -> Ints:
    """Return real lengths, dummies included, int64 ``[S]``: 3, 2 in 4, 4 and a dummy of 8: [3, 2, 8]."""
    kept = Layout.of_batch(batch).sequences
    return np.concatenate([np.asarray(batch.lengths[:kept], dtype=np.int64), padded_lengths[kept:]])


def offsets_of(lengths: Ints) -> Tensor:
    """Return int32 offsets ``[S + 1]`` on the CPU: the lengths summed up from 0."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def dummy_batch(layout: Layout, device: torch.device, *, axes: int | None = None) -> THDBatch:
    """Make a batch of token 0 with a target in every slot but the last, for warm-up and timing."""
    count = max(1, min(layout.sequences, layout.slots))
    lengths = [layout.slots // count + (i < layout.slots % count) for i in range(count)]
    batch = THDBatch.collate([{"input_ids": torch.zeros(length, dtype=torch.int64)} for length in lengths])
    if axes is not None:
        batch = batch.replace(position_ids=batch.position_ids.expand(axes, -1).contiguous())
    return batch.to(device)
