"""Hidden states x head weight -> a weighted negative log-likelihood and its gradients, 6RHV operations.

A scalar's gradient is known up to a factor in the forward pass. So the logits of a few rows, of the whole
vocabulary, are kept until they become gradients.
Legend: R rows, H hidden size, V vocabulary, c x v one tile. ``z`` are logits, ``e`` their exponentials, and
``dx`` is the gradient of the raw products of hidden states and weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_thd._checks import real_number
from lightning_thd.loss.tiles.logits import GradientSums, Head, HeadGradients, Needs, by_kernels
from lightning_thd.loss.tiles.products import product
from lightning_thd.loss.tiles.softmax import (
    MAX,
    SUM,
    TARGET,
    TOTAL,
    RowGradients,
    blank_statistics,
    logit_gradient,
    targets_here,
    update_statistics,
)
from lightning_thd.loss.tiles.trial import kernels_hold

# The maximum, sum and so on of rows, by the numbers of ``softmax``: ``[5, c]``, or some of them ``[c]`` each.
Statistics = Tensor | dict[int, Tensor]
# Computes ``nll_and_gradients`` in one way.
NllOfRows = Callable[..., tuple[Tensor, HeadGradients]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """Label smoothing and z-loss, which change the negative log-likelihood."""

    label_smoothing: float = 0.0  # share of the target's mass that is spread over the vocabulary, below 1
    z_loss: float = 0.0  # factor of the squared lse, the log of the sum of a row's exponentiated logits

    def __post_init__(self) -> None:
        are_floats = type(self.label_smoothing) is type(self.z_loss) is float
        if are_floats and self.label_smoothing == self.z_loss == 0.0:  # as in most steps
            return
        if not 0.0 <= real_number(self.label_smoothing, "label_smoothing") < 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing!r}, wanted at least 0 and below 1.")
        real_number(self.z_loss, "z_loss", least=0.0, advice="1e-4 is usual.")

    def loss(self, logp: Tensor, lse: Tensor, mean_logit: Tensor | None) -> Tensor:
        """Return the loss of each row, ``[R]``; only smoothed labels need the mean logit."""
        loss = -logp
        if self.label_smoothing:
            assert mean_logit is not None
            loss = loss * (1.0 - self.label_smoothing) + (lse - mean_logit) * self.label_smoothing
        if self.z_loss:
            loss = loss + self.z_loss * lse.square()
        return loss

    def gradients(self, weights: Tensor, lse: Tensor, vocabulary: int) -> RowGradients:
        """Return the factors of each row's gradient of ``weights * loss`` for the logits."""
        direct = weights
        if self.z_loss:
            direct = direct * (1.0 + 2.0 * self.z_loss * lse)
        flat: Tensor | None = None
        target = -weights
        if self.label_smoothing:
            flat = target * (self.label_smoothing / vocabulary)
            target = target * (1.0 - self.label_smoothing)
        return RowGradients(direct=direct, slope=None, target=target, flat=flat)


def nll_and_gradients(
    head: Head,
    targets: Tensor,
    weights: Tensor,
    needs: Needs,
    *,
    penalties: Penalties,
    seen: Tensor | None = None,
) -> tuple[Tensor, HeadGradients]:
    """Return the sum of ``weights * loss`` over rows, and gradients; ``seen`` ``[R]`` gets the summands."""
    compute: NllOfRows = _nll_by_operators
    if by_kernels(head):
        ways = (_nll_by_kernels, _nll_by_operators)
        if kernels_hold("nll", head, _losses_and_gradients, ways, penalties):
            compute = _nll_by_kernels
    return compute(head, targets, weights, needs, penalties=penalties, seen=seen)


def _losses_and_gradients(
    compute: NllOfRows, few: Head, targets: Tensor, weights: Tensor, penalties: Penalties
) -> tuple[Tensor, ...]:
    """Return the loss of each row of a small head, and the gradients of its hidden states."""
    losses = torch.zeros_like(weights)
    needs = (True, False, False)
    _, gradients = compute(few, targets, weights, needs, penalties=penalties, seen=losses)
    assert gradients.hidden is not None
    return losses, gradients.hidden


def _nll_by_operators(
    head: Head,
    targets: Tensor,
    weights: Tensor,
    needs: Needs,
    *,
    penalties: Penalties,
    seen: Tensor | None,
) -> tuple[Tensor, HeadGradients]:
    """Compute ``nll_and_gradients`` with torch's operators."""
    losses = []
    sums = GradientSums(head, needs=needs, rows_outside=True)
    whole = head.hidden.device.type != "cpu" and head.settings.logit_map.softcap is None
    stash = WholeRows(head) if whole else Stash(head)

    for rows in head.row_tiles:
        row_targets = targets[rows]
        row_weights = weights[rows]
        stats: Statistics = stash.fill(rows, row_targets, total=penalties.label_smoothing > 0)
        largest = stats[MAX]
        log_sum = stats[SUM].log()
        lse = largest + log_sum
        logp = stats[TARGET] - largest - log_sum
        mean_logit = stats[TOTAL] / head.settings.columns if penalties.label_smoothing else None
        row_losses = row_weights * penalties.loss(logp, lse, mean_logit)
        if head.counts is not None:
            row_losses = torch.where(head.counts[rows], row_losses, 0.0)

        losses.append(row_losses.sum())
        if seen is not None:
            seen[rows] = row_losses

        factors = penalties.gradients(row_weights, lse, head.settings.columns)
        sums.open(rows)
        for columns in head.column_tiles:
            sums.add(stash.gradient(columns, row_targets, lse, factors), rows, columns)

        sums.close(rows)

    del stash  # free its memory before the weight's gradient is rounded
    loss = losses[0] if len(losses) == 1 else _added(losses, head)
    return loss, sums.result()


def _added(losses: list[Tensor], head: Head) -> Tensor:
    """Return the sum of the losses of tiles, ``[]``; 0 without tiles."""
    if not losses:
        return head.hidden.new_zeros((), dtype=head.settings.accumulator)
    return torch.stack(losses).sum()


def _nll_by_kernels(
    head: Head,
    targets: Tensor,
    weights: Tensor,
    needs: Needs,
    *,
    penalties: Penalties,
    seen: Tensor | None,
) -> tuple[Tensor, HeadGradients]:
    """Compute ``nll_and_gradients`` with one kernel for each tile of rows, between products of whole rows."""
    from lightning_thd.loss.kernels.operators import RowBuffer, nll_of_rows

    settings = head.settings
    whole = slice(0, settings.columns)
    head = head.cut(head.tile[0], halves(head))
    sums = GradientSums(head, needs=needs, rows_outside=True)
    weight = head.weights(whole)
    losses = weights.new_empty(weights.shape) if seen is None else seen
    buffer = RowBuffer(min(head.tile[0], len(targets)), settings.columns, head.hidden.device)

    for rows, hidden in tiles_of_inputs(head):
        count = rows.stop - rows.start
        product(hidden, weight, out=buffer.products(count, settings.columns))
        nll_of_rows(
            buffer.memory(count),
            losses[rows],
            targets[rows],
            weights[rows],
            head.plain_bias(whole),
            settings.compute,
            settings.columns,
            -100 if settings.ignore_index is None else settings.ignore_index,
            penalties.label_smoothing,
            penalties.z_loss,
            *settings.logit_map.numbers(),
        )
        dx = buffer.gradient(count, settings.columns, settings.compute)
        sums.open(rows)
        sums.add_bias(dx, whole)
        sums.add_hidden(dx, weight, rows, whole)

        for columns in head.column_tiles:
            sums.add_weight(dx[:, columns], hidden, rows, columns)

        sums.close(rows)
        del dx

    del buffer  # free its memory before the weight's gradient is rounded
    return losses.sum(), sums.result()


def tiles_of_inputs(head: Head) -> Iterator[tuple[slice, Tensor]]:
    """Yield each tile of rows and its hidden states, cast and without rows that do not count.

    That takes a launch for every six tiles. Their copy is small beside the products of one tile.
    """
    for first in range(0, len(head.row_tiles), 6):
        tiles = head.row_tiles[first : first + 6]
        start = tiles[0].start
        hidden = head.inputs(slice(start, tiles[-1].stop))
        for rows in tiles:
            yield rows, hidden[rows.start - start : rows.stop - start]


def halves(head: Head) -> list[slice]:
    """Return the two parts of a ``WideSum`` of the weight's gradient, or all columns if it needs none."""
    columns = head.settings.columns
    half = columns // 2 // 16 * 16  # a product of columns at a multiple of 32 bytes is fast
    if half == 0 or head.weight.dtype == head.settings.accumulator:
        return [slice(0, columns)]
    return [slice(0, half), slice(half, columns)]


class WholeRows:
    """The softmax of a few rows over all columns, by a few large kernels, which suit accelerators."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.columns = slice(0, head.settings.columns)
        rows = min(head.tile[0], head.hidden.shape[0])
        self.kept = head.hidden.new_empty(rows * head.settings.columns, dtype=head.settings.accumulator)
        self.weight = head.weights(self.columns)
        self.softmax = self.kept
        self.found: tuple[Tensor, Tensor] | None = None  # ``targets_here`` of the rows, among all columns

    def fill(self, rows: slice, targets: Tensor, *, total: bool) -> dict[int, Tensor]:
        """Compute the softmax of ``rows`` and return the statistics of their logits, ``[c]`` each."""
        head = self.head
        z = head.logits(head.inputs(rows), self.weight, self.columns, self.kept)
        self.found = targets_here(targets, z.shape[1])
        has_target, index = self.found
        stats = {TARGET: torch.where(has_target, z.gather(1, index).squeeze(1), 0.0)}
        if total:
            stats[TOTAL] = z.sum(1)

        stats[MAX], top = z.max(1)
        self.softmax = torch.softmax(z, 1, out=z)
        stats[SUM] = self.softmax.gather(1, top[:, None]).squeeze(1).reciprocal()
        return stats

    def gradient(self, columns: slice, targets: Tensor, lse: Tensor, factors: RowGradients) -> Tensor:
        """Return the gradient of a tile's raw products, ``[c, v]``, in the dtype of their inputs."""
        settings = self.head.settings
        p = self.softmax[:, columns]
        scale = settings.logit_map.scale / settings.logit_map.temperature
        if scale != 1.0:
            factors = factors.times(scale)
        direct = factors.direct[:, None]
        if columns == self.columns and self.found is not None:
            has_target, index = self.found
        else:
            has_target, index = targets_here(targets - columns.start, p.shape[1])

        # The target's entry is computed from fp32 before all are rounded.
        onehot = torch.where(has_target, factors.target, 0.0)[:, None]
        at_target = p.gather(1, index) * direct + onehot

        if factors.flat is None:
            dx = torch.mul(p, direct, out=p.new_empty(p.shape, dtype=settings.compute))
        else:
            flat = factors.flat[:, None]
            dx = (p * direct + flat).to(settings.compute)
            at_target = at_target + flat

        return dx.scatter_(1, index, at_target.to(settings.compute))


class Stash:
    """The logits of a few rows over all columns; a CPU with native bf16 keeps them as rounded products."""

    def __init__(self, head: Head) -> None:
        self.head = head
        settings = head.settings
        rows = min(head.tile[0], head.hidden.shape[0])
        dtype = settings.compute if settings.native else settings.accumulator
        self.kept = head.hidden.new_empty(rows * settings.columns, dtype=dtype)
        self.scratch = head.scratch()
        self.wide = head.scratch() if settings.native else None
        self.rows = slice(0, 0)

    def fill(self, rows: slice, targets: Tensor, *, total: bool) -> Tensor:
        """Compute the logits of ``rows`` and return their statistics, ``[5, c]``."""
        self.rows = rows
        head = self.head
        hidden = head.inputs(rows)
        count = rows.stop - rows.start
        stats = blank_statistics(head.hidden, count, head.settings.accumulator)

        for columns in head.column_tiles:
            kept = self.kept[columns.start * count :]
            weight = head.weights(columns)
            if self.wide is None:
                z = head.logits(hidden, weight, columns, kept)
            else:
                z = head.rounded_logits(hidden, weight, columns, kept, self.wide)
            e = self.scratch[: z.numel()].view_as(z)
            update_statistics(stats, z, e, targets - columns.start, entropy=False, total=total)

        return stats

    def logits(self, columns: slice) -> Tensor:
        """Return a tile's mapped logits, ``[c, v]``, which are valid until the next call."""
        count = self.rows.stop - self.rows.start
        z = self.kept[columns.start * count : columns.stop * count].view(count, -1)
        if self.wide is None:
            return z
        wide = self.wide[: z.numel()].view_as(z)
        return self.head.finish(wide.copy_(z), columns)

    def gradient(self, columns: slice, targets: Tensor, lse: Tensor, factors: RowGradients) -> Tensor:
        """Return the gradient of a tile's raw products, ``[c, v]``; its logits are overwritten."""
        z = self.logits(columns)
        e = self.scratch[: z.numel()].view_as(z)
        return logit_gradient(self.head.settings.logit_map, z, e, targets - columns.start, lse, factors)
