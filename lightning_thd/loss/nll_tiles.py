"""Hidden states x head weight -> a weighted negative log-likelihood and its gradients in one go, 6THV operations.

R rows, H hidden size, V vocabulary. A scalar's gradient is known up to a factor before anybody asks for it, so the
logits of a few rows are kept just long enough to become gradients, and never made again. The few rows span the
whole vocabulary: their number follows from a byte budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_thd.loss.products import accumulate
from lightning_thd.loss.tiles import (
    MAX,
    SUM,
    TARGET,
    TOTAL,
    Head,
    HeadGradients,
    RowGradients,
    logit_gradient,
    update_statistics,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """What is added to the likelihood.

    Attributes:
        label_smoothing: share of the target's mass spread over the vocabulary, 0 to 1.
        z_loss: factor of lse squared.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing!r}, wanted at least 0 and below 1.")
        if not 0.0 <= self.z_loss < float("inf"):
            raise ValueError(f"z_loss is {self.z_loss!r}, wanted a finite factor, 0 or more; 1e-4 is usual.")

    def loss(self, logp: Tensor, lse: Tensor, mean_logit: Tensor) -> Tensor:
        """Combine into the loss of each row, ``[R]``."""
        loss = -logp
        if self.label_smoothing:
            loss = loss * (1.0 - self.label_smoothing) + (lse - mean_logit) * self.label_smoothing
        if self.z_loss:
            loss = loss + self.z_loss * lse.square()
        return loss

    def gradients(self, weights: Tensor, lse: Tensor, vocabulary: int) -> RowGradients:
        """Differentiate ``weights * loss`` for the tiles."""
        direct = weights
        if self.z_loss:
            direct = direct * (1.0 + 2.0 * self.z_loss * lse)
        flat = -weights * (self.label_smoothing / vocabulary) if self.label_smoothing else None
        return RowGradients(
            direct=direct, slope=None, target=-weights * (1.0 - self.label_smoothing), flat=flat
        )


def nll_and_gradients(
    head: Head,
    targets: Tensor,
    weights: Tensor,
    penalties: Penalties,
    *,
    needs: tuple[bool, bool, bool, bool],
    stash_rows: int,
) -> tuple[Tensor, HeadGradients]:
    """Sum ``weights * loss`` over the rows and differentiate it.

    Args:
        head: the operands; all columns on this rank.
        targets: int64 ``[R]``.
        weights: ``[R]`` in the accumulator's dtype; 0 for rows that do not count.
        penalties: label smoothing and z-loss.
        needs: whether hidden, weight, bias and the LoRA need gradients.
        stash_rows: rows whose logits are kept at a time.

    Returns:
        The loss ``[]`` and the gradients. The weight's is summed in its own dtype, once every ``stash_rows`` rows.
    """
    rows_in_all, zeros = head.hidden.shape[0], head.hidden.new_zeros
    loss = zeros((), dtype=head.accumulator)
    d_hidden = zeros(head.hidden.shape, dtype=head.hidden.dtype) if needs[0] else None
    d_weight = torch.zeros_like(head.weight, memory_format=torch.contiguous_format) if needs[1] else None
    d_bias = zeros(head.weight.shape[:1], dtype=head.accumulator) if needs[2] else None
    d_low: tuple[Tensor | None, Tensor | None] = (None, None)
    if needs[3] and head.low_rank is not None:
        d_low = (
            torch.zeros_like(head.low_rank[0]),
            torch.zeros_like(head.low_rank[1], dtype=head.accumulator),
        )
    stash = _Stash(head, min(stash_rows, rows_in_all))
    for start in range(0, rows_in_all, max(1, stash_rows)):
        rows = slice(start, min(start + stash_rows, rows_in_all))
        stats = stash.fill(rows, targets[rows], total=penalties.label_smoothing > 0)
        log_sum = stats[SUM].log()
        lse = stats[MAX] + log_sum
        mean_logit = stats[TOTAL] / head.columns
        loss += (weights[rows] * penalties.loss(stats[TARGET] - stats[MAX] - log_sum, lse, mean_logit)).sum()
        wanted = penalties.gradients(weights[rows], lse, head.columns)
        part = (
            zeros((rows.stop - rows.start, head.hidden.shape[1]), dtype=head.accumulator)
            if needs[0]
            else None
        )
        for columns in head.column_tiles():
            dx = stash.gradient(columns, targets[rows], lse, wanted)
            if part is not None:
                accumulate(part, dx, head.weight[columns], head.compute)
            if d_weight is not None:
                _add_weight_gradient(d_weight[columns], dx, head.hidden[rows], head)
            if d_bias is not None:
                d_bias[columns] += dx.sum(0)
            if d_low[0] is not None and d_low[1] is not None:
                x, w = head.low_rank_tile(rows, columns)
                low = zeros(x.shape, dtype=head.accumulator)
                accumulate(low, dx, w, head.compute)
                d_low[0][rows] += low
                accumulate(d_low[1][columns], dx.t(), x, head.compute)
        if d_hidden is not None and part is not None:
            d_hidden[rows] = part
    return loss, HeadGradients(hidden=d_hidden, weight=d_weight, bias=d_bias, low_rank=d_low)


def _add_weight_gradient(d_weight: Tensor, dx: Tensor, hidden: Tensor, head: Head) -> None:
    """Add ``dx.T @ hidden`` to a tile of the weight's gradient; a multiplier of its dtype adds inside."""
    if d_weight.dtype == head.compute:
        d_weight.addmm_(dx.t().to(head.compute), hidden.to(head.compute))
    else:
        accumulate(d_weight, dx.t(), hidden, head.compute)


class _Stash:
    """The logits of a few rows over all columns, tile by tile, written once and turned into gradients once.

    Kept exact in the accumulator's dtype, except where a CPU multiplies bf16 natively: it rounds its products to
    bf16 as the model's own head would, and they are kept so, at half the memory.
    """

    def __init__(self, head: Head, rows: int) -> None:
        self.head = head
        self.native = head.compute == torch.bfloat16 and not head.hidden.is_cuda
        dtype = head.compute if self.native else head.accumulator
        self.kept = head.hidden.new_empty(rows * head.columns, dtype=dtype)
        self.scratch = head.scratch()
        self.wide = head.scratch() if self.native else None
        self.rows = slice(0, 0)

    def fill(self, rows: slice, targets: Tensor, *, total: bool) -> Tensor:
        """Make the logits of ``rows`` and return their statistics, ``[5, c]``."""
        self.rows = rows
        head = self.head
        stats = head.hidden.new_zeros((5, rows.stop - rows.start), dtype=head.accumulator)
        stats[MAX] = -torch.inf
        for columns in head.column_tiles():
            kept = self._tile(columns)
            if self.native:
                hidden, weight = head.hidden[rows].to(head.compute), head.weight[columns].to(head.compute)
                torch.mm(hidden, weight.t(), out=kept)
                z = self._widened(kept, columns)
            else:
                z = head.logits(rows, columns, head.weight_tile(columns), kept.view(-1))
            e = self.scratch[: z.numel()].view_as(z)
            update_statistics(stats, z, e, targets - columns.start, entropy=False, total=total)
        return stats

    def gradient(self, columns: slice, targets: Tensor, lse: Tensor, wanted: RowGradients) -> Tensor:
        """Give the gradient of the raw products of a tile, ``[c, v]``; its logits are gone then."""
        kept = self._tile(columns)
        z = self._widened(kept, columns) if self.native else kept
        e = self.scratch[: z.numel()].view_as(z)
        return logit_gradient(self.head.logit_map, z, e, targets - columns.start, lse, wanted)

    def _tile(self, columns: slice) -> Tensor:
        rows = self.rows.stop - self.rows.start
        return self.kept[columns.start * rows : columns.stop * rows].view(rows, -1)

    def _widened(self, kept: Tensor, columns: slice) -> Tensor:
        assert self.wide is not None
        z = self.wide[: kept.numel()].view_as(kept)
        return self.head.finish(z.copy_(kept), self.rows, columns)
