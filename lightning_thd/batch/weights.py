"""Samples' ``weights`` -> one loss weight a slot, and the total weight of every sequence.

T slots in a pack, S sequences. A sample's ``weights`` is one number for the sequence, or one number a token,
aligned with its labels: ``weights[i]`` belongs to token i as a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_thd.batch.samples import IGNORE_INDEX


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleWeights:
    """The loss weights of one sample's tokens, and the weight of the sample among sequences.

    Attributes:
        tokens: fp32 ``[n]``, of each token as a target.
        sequence: of the sequence among sequences; 1 where ``tokens`` were given.
    """

    tokens: NDArray[np.float32]
    sequence: float


def sample_weights(sample: dict[str, Any], length: int, i: int) -> SampleWeights:
    """Read the weights of sample ``i``, one for all its tokens or one a token; 1 where there are none.

    Raises:
        ValueError: for another shape, or for weights that are negative or not finite.
    """
    given = sample.get("weights", 1.0)
    row = np.asarray(given.numpy() if isinstance(given, Tensor) else given)
    if row.dtype.kind not in "iufb" or row.shape not in ((), (length,)):
        raise ValueError(
            f"Sample {i} has {length} input_ids but weights of shape {row.shape} and dtype {row.dtype}. Give "
            "one number for the sequence, or one a token, aligned with labels."
        )
    row = row.astype(np.float32)
    if not np.isfinite(row).all() or (row < 0).any():
        raise ValueError(
            f"Sample {i} has the weight {float(row[~np.isfinite(row) | (row < 0)].flat[0])}. Weights are "
            "finite and at least 0; for a negative factor weigh the loss of a step yourself."
        )
    if row.ndim == 0:
        return SampleWeights(tokens=np.broadcast_to(row, (length,)), sequence=float(row))
    return SampleWeights(tokens=row, sequence=1.0)


def whole_weight(sample: dict[str, Any], i: int) -> tuple[float, float]:
    """Add up the weights of a sequence's loss tokens.

    Returns:
        That sum, and the weight of the sequence. Labels ``[-100, 7, 8]`` with weights ``[1, 2, 3]`` give
        ``(5.0, 1.0)``.
    """
    labels = np.asarray(sample.get("labels", sample["input_ids"]))
    weights = sample_weights(sample, len(labels), i)
    return float(weights.tokens[1:][labels[1:] != IGNORE_INDEX].sum(dtype=np.float64)), weights.sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class PackWeights:
    """The loss weights of a pack: one a slot, their sum, and each sequence's share.

    Attributes:
        slots: fp32 ``[T]``, the weight of each slot's target, 0 without one; None where no sample has
            weights.
        total: their sum; the number of targets where no sample has weights.
        shares: ``[S]``, each sequence's weight over the sum of its loss tokens' weights, 0 without any.
        sequences: what the pack's sequences count, a cut one in part.
    """

    slots: NDArray[np.float32] | None
    total: float
    shares: list[float]
    sequences: float


def pack_weights(
    samples: Sequence[dict[str, Any]],
    targets: NDArray[np.int64],
    starts: list[int],
    lengths: list[int],
    *,
    masked: bool,
) -> PackWeights:
    """Lay the weights of samples end to end, one for each slot's target.

    Args:
        samples: a cut one brings ``next_weight``, the weight of the token after its last, and
            ``whole_weight``, the sum over the loss tokens of the whole sequence.
        targets: int64 ``[T]``, shifted.
        starts: first slot of every sample.
        lengths: tokens of every sample.
        masked: some tokens that have a next one may have no target.
    """
    weighted = any("weights" in sample for sample in samples)
    if not weighted and not masked:
        own = [float(n - 1 + ("next_label" in sample)) for n, sample in zip(lengths, samples, strict=True)]
        return _pack(None, own, [1.0] * len(own), samples)
    counted = (targets != IGNORE_INDEX).astype(np.float32)
    sequence = [1.0] * len(samples)
    if weighted:
        for i, (sample, start, length) in enumerate(zip(samples, starts, lengths, strict=True)):
            weights = sample_weights(sample, length, i)
            counted[start : start + length - 1] *= weights.tokens[1:]
            counted[start + length - 1] *= sample.get("next_weight", weights.sequence)
            sequence[i] = weights.sequence
    sums = np.concatenate([[0.0], np.cumsum(counted, dtype=np.float64)])
    first = np.asarray(starts, np.int64)
    own = (sums[first + np.asarray(lengths, np.int64)] - sums[first]).tolist()
    return _pack(counted if weighted else None, own, sequence, samples)


def _pack(
    slots: NDArray[np.float32] | None,
    own: list[float],
    sequence: list[float],
    samples: Sequence[dict[str, Any]],
) -> PackWeights:
    whole = [sample.get("whole_weight", n) for sample, n in zip(samples, own, strict=True)]
    shares = [weight / n if n > 0 else 0.0 for weight, n in zip(sequence, whole, strict=True)]
    return PackWeights(
        slots=slots,
        total=sum(own),
        shares=shares,
        sequences=sum(n * share for n, share in zip(own, shares, strict=True)),
    )
