"""One number a response -> checked rows and their weighted mean; values of slots -> one sum a sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightning_thd._checks import real_number
from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.loss.checks import check_tensors
from lightning_thd.loss.rollouts.reduce import segment_sums, sum_over_group
from lightning_thd.seqlens import seq_idx_from_cu_seqlens


def sequence_sums(values: Tensor, batch: THDBatch, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum values of slots over the loss tokens of every sequence; differentiable.

    Args:
        values: floats ``[T]``, log-probabilities of ``causal_lm_logprobs`` for example.
        batch: the pack they belong to.
        group: context-parallel ranks, each with other slots of the same sequences; the gradient is that of
            the sum of all ranks' losses, so that their mean is right.

    Returns:
        ``[S]``, in the order of ``batch.sequence_ids``. Values ``[1, 2, 4]`` of the sequences ``[5, 6]`` and
        ``[7]`` give ``[1, 0]``: the last token of a sequence predicts nothing.

    Raises:
        ValueError: for another number of slots.
    """
    check_tensors(values=values)
    if not isinstance(batch, THDBatch):
        raise TypeError(f"batch is a {type(batch).__name__}, wanted a THDBatch.")
    if not values.is_floating_point() or values.device != batch.targets.device:
        raise ValueError(
            f"values is {values.dtype} on {values.device}, wanted floats on {batch.targets.device}. Pass "
            "what causal_lm_logprobs(model, batch) gives."
        )
    if values.shape != batch.targets.shape:
        raise ValueError(f"values is {list(values.shape)}, wanted one a slot: {list(batch.targets.shape)}.")
    sequence = seq_idx_from_cu_seqlens(batch.cu_seqlens_padded, values.shape[0]).flatten().long()
    counted = torch.where(batch.targets != IGNORE_INDEX, values, 0.0)
    total = segment_sums(counted, sequence, len(batch.lengths))
    return total if group is None else sum_over_group(total, group)


def weighted_mean(losses: Tensor, weights: Tensor | None, scale: float | None) -> Tensor:
    """Average losses ``[P]`` by their number or the sum of their weights; ``scale`` is the factor instead."""
    if weights is not None:
        check_rows(losses=losses, weights=weights)
        losses = losses * weights.detach()
    if scale is not None:
        real_number(scale, "scale")
        return losses.sum() * scale
    if weights is None:
        return losses.sum() / max(1, losses.numel())
    total = weights.detach().sum()
    return losses.sum() / torch.where(total == 0, torch.ones_like(total), total)


def smoothed(z: Tensor, e: float) -> Tensor:
    """Return ``-(1 - e) log sigmoid(z) - e log sigmoid(-z)``, the loss of a margin with label smoothing."""
    loss = -(1.0 - e) * logsigmoid(z)
    return loss - e * logsigmoid(-z) if e else loss


def counted(weights: Tensor | None, *rows: Tensor, blank: float = 0.0) -> tuple[Tensor, ...]:
    """Return rows with those of weight 0 blanked, so that a NaN there reaches neither loss nor gradient.

    Args:
        weights: floats ``[P]``, None where all rows count.
        rows: ``[P]`` each.
        blank: what stands in them instead.
    """
    if weights is None:
        return rows
    check_rows(losses=rows[0], weights=weights)
    return tuple(torch.where(weights != 0, row, blank) for row in rows)


def check_rows(**tensors: Tensor) -> None:
    """Check that all arguments hold one float a response, on one device.

    Raises:
        TypeError: for what is no tensor.
        ValueError: naming the argument and its shape, device or dtype.
    """
    check_tensors(**tensors)
    (first, one), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != one.shape or tensor.device != one.device:
            raise ValueError(
                f"{name} is {list(tensor.shape)} on {tensor.device} and {first} {list(one.shape)} on "
                f"{one.device}, wanted the same."
            )
    if one.ndim != 1:
        raise ValueError(f"{first} is {list(one.shape)}, wanted one number a response, [P].")
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point and not name.endswith("_tokens"):
            raise ValueError(f"{name} is {tensor.dtype}, wanted floats.")
