"""A batch and a reduction -> the factor of every slot's loss in the loss of the step.

T slots in a pack, S sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.batch.thd_step import check_batch
from lightning_thd.loss.checks import check_tensors
from lightning_thd.seqlens import seq_idx_from_cu_seqlens

Reduction = Literal["tokens", "sequences"]
Factors = Callable[[Tensor, int, int], tuple[Tensor, Tensor | float]]


def loss_weights(
    batch: THDBatch,
    reduction: Reduction,
    weights: Tensor | None,
    class_weights: Tensor | None,
    *,
    smoothed: bool,
) -> Factors:
    """Return what computes the factor of every slot's loss; ``weights`` are ``[T]``, of classes ``[V]``.

    Returns:
        From targets int64 ``[T]``, their depth (0 for the next token) and V to targets, -100 where a weight
        of zero leaves nothing to do, and factors: ``[T]``, or one number for all.

    Raises:
        TypeError: for another batch.
        ValueError: for what does not fit the batch.
    """
    check_batch(batch)
    if not isinstance(reduction, str) or reduction not in get_args(Reduction):
        raise ValueError(f"reduction is {reduction!r}, wanted 'tokens' or 'sequences'.")
    check_tensors(**{"weights": weights} if weights is not None else {})
    check_tensors(**{"class_weights": class_weights} if class_weights is not None else {})
    if weights is not None and weights.shape != batch.targets.shape:
        raise ValueError(
            f"weights is {list(weights.shape)}, wanted one a slot, {list(batch.targets.shape)}: that of slot "
            "i weighs the token after it. Weights of the data belong into the samples, as 'weights'."
        )
    if class_weights is not None and (class_weights.ndim != 1 or smoothed):
        raise ValueError(
            f"class_weights is {list(class_weights.shape)}"
            + (" and label_smoothing above 0, wanted one of the two." if smoothed else ", wanted [V].")
        )
    scale = _sequence_scale(batch) if reduction == "sequences" else batch.loss_scale
    given = [part for part in (batch.weights, weights) if part is not None]

    def factors(targets: Tensor, depth: int, vocabulary: int) -> tuple[Tensor, Tensor | float]:
        if depth and (given or class_weights is not None or reduction == "sequences"):
            raise ValueError(
                "Weights and reduction='sequences' say nothing of predictions further than the next token, "
                "and this model makes some. Use reduction='tokens' without weights."
            )
        if not given and class_weights is None and reduction == "tokens":
            return targets, scale
        wide = torch.float32 if targets.device.type == "mps" else torch.float64  # rounded once, at the end
        total = torch.ones(targets.shape, dtype=wide, device=targets.device)
        for part in given:
            total = total * part.detach()
        if class_weights is not None:
            if len(class_weights) != vocabulary:
                raise ValueError(
                    f"class_weights has {len(class_weights)} entries, wanted {vocabulary}, one a row of "
                    "the head."
                )
            total = total * class_weights.detach().index_select(0, targets.clamp(0, vocabulary - 1))
        if reduction == "sequences":
            total = total * _shares(batch, wide)
        return torch.where(total == 0, IGNORE_INDEX, targets), total * scale

    return factors


def _sequence_scale(batch: THDBatch) -> float:
    if batch.sequence_scale is None:
        raise ValueError(
            "reduction='sequences' needs batch.sequence_scale, the weight of the step's sequences, and this "
            "batch was made with a loss_scale alone. Use THDDataModule, pass sequence_scale to "
            "THDBatch.collate, or use reduction='tokens'."
        )
    return batch.sequence_scale


def _shares(batch: THDBatch, dtype: torch.dtype) -> Tensor:
    """Spread every sequence's share over its slots, ``[T]``; 0 in a trailing pad."""
    shares = torch.tensor([*batch.sequence_shares, 0.0], dtype=dtype).to(batch.targets.device)
    sequence = seq_idx_from_cu_seqlens(batch.cu_seqlens_padded, batch.targets.shape[-1])
    return shares.index_select(0, sequence.flatten().clamp(0, len(shares) - 1))
