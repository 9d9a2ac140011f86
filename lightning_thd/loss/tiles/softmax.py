"""Hidden states x head weight, in tiles of tokens and vocabulary -> statistics of the softmax, and gradients.

R rows (tokens with a target), H hidden size, V vocabulary columns held here, c x v one tile. The
vocabulary is the outer loop: a tile of the weight is read once, widened once, and its gradient is finished
before the next one. Memory is two tiles; nothing of size R x V exists at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_thd.loss.tiles.gradient_sums import GradientSums, HeadGradients
from lightning_thd.loss.tiles.logit_map import LogitMap
from lightning_thd.loss.tiles.logits import Head
from lightning_thd.loss.tiles.processor import exponential

# Exponents below this are zero in any dtype; sums of them times zero must not meet an infinity.
LOWEST = -1e4
# Columns of the statistics: largest logit m, sum e^(z-m), sum e^(z-m) (z-m), the target's z, sum z.
MAX, SUM, WEIGHTED, TARGET, TOTAL = range(5)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGradients:
    """The factors ``[R]`` of every row's gradient, combined from the gradients of its outputs.

    With ``p`` the softmax, ``dz = p * (direct + slope * log p) + onehot * target + flat``.
    """

    direct: Tensor
    slope: Tensor | None
    target: Tensor
    flat: Tensor | None

    def at(self, rows: slice) -> RowGradients:
        """Return the factors of some of the rows."""
        return RowGradients(
            direct=self.direct[rows],
            slope=None if self.slope is None else self.slope[rows],
            target=self.target[rows],
            flat=None if self.flat is None else self.flat[rows],
        )


def softmax_statistics(
    head: Head,
    targets: Tensor,
    *,
    entropy: bool,
    total: bool,
    seen: Callable[[Tensor, slice, slice], None] | None = None,
) -> Tensor:
    """Compute five statistics of every row's logits, ``[5, R]``, in one pass over the tiles.

    Args:
        head: the operands.
        targets: int64 ``[R]``, vocabulary indices; rows of targets held elsewhere get TARGET 0.
        entropy: fill WEIGHTED.
        total: fill TOTAL.
        seen: is shown every tile of logits ``[c, v]``, its rows and its columns; must not change it.
    """
    stats = head.hidden.new_zeros((5, head.hidden.shape[0]), dtype=head.accumulator)
    stats[MAX] = -torch.inf
    first, second = head.scratch(), head.scratch()
    for columns in head.column_tiles():
        weight = head.weight_tile(columns)
        for rows in head.row_tiles():
            z = head.logits(rows, columns, weight, first)
            if seen is not None:
                seen(z, rows, columns)
            e = second[: z.numel()].view_as(z)
            update_statistics(
                stats[:, rows], z, e, targets[rows] - head.start - columns.start, entropy, total
            )
    return stats


def update_statistics(
    stats: Tensor, z: Tensor, e: Tensor, targets: Tensor, entropy: bool, total: bool
) -> None:
    """Update the statistics ``[5, c]`` of some rows with a tile of their logits.

    Args:
        stats: changed in place.
        z: ``[c, v]``; destroyed when ``entropy`` is wanted.
        e: scratch ``[c, v]``.
        targets: int64 ``[c]``, counted from the tile's first column.
        entropy: fill WEIGHTED.
        total: fill TOTAL.
    """
    here, index = _targets_here(targets, z.shape[1])
    stats[TARGET] += torch.where(here, z.gather(1, index).squeeze(1), 0.0)
    if total:
        stats[TOTAL] += z.sum(1)
    largest = torch.maximum(stats[MAX], z.amax(1))
    base = without_infinity(largest)
    shift = (stats[MAX] - base).clamp_min_(LOWEST)
    decay = shift.exp()
    if entropy:
        exponential(z.sub_(base[:, None]).clamp_min_(LOWEST), out=e)
        stats[WEIGHTED] = decay * (stats[WEIGHTED] + stats[SUM] * shift) + z.mul_(e).sum(1)
    else:
        exponential(torch.sub(z, base[:, None], out=e), out=e)
    stats[SUM] = decay * stats[SUM] + e.sum(1)
    stats[MAX] = largest


def without_infinity(largest: Tensor) -> Tensor:
    """Replace maxima of rows that hold only -inf by 0, as -inf minus -inf is NaN."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _targets_here(targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return which rows have their target in a tile, ``[c]``, and an index safe for all, ``[c, 1]``."""
    here = (targets >= 0) & (targets < columns)
    return here, targets.clamp(0, columns - 1)[:, None]


def gradients(
    head: Head,
    targets: Tensor,
    lse: Tensor,
    wanted: RowGradients,
    *,
    needs: tuple[bool, bool, bool, bool],
    exact: Tensor | None = None,
) -> HeadGradients:
    """Recompute the logits tile by tile and return the gradients of the operands.

    Args:
        head: the operands of the forward pass.
        targets: int64 ``[R]``.
        lse: ``[R]``, over the whole vocabulary.
        wanted: the gradients of the outputs.
        needs: whether hidden, weight, bias and the LoRA need theirs.
        exact: bool ``[tiles, R]``, the rows of each tile of columns whose logits may not be rounded, as
            ``rounded_statistics`` chose them; None for all.
    """
    sums = GradientSums(head, needs=needs, rows_outside=False)
    first, second = head.scratch(), head.scratch()
    narrow = None if exact is None else head.scratch(head.compute)
    for i, columns in enumerate(head.column_tiles()):
        weight = head.weight_tile(columns)
        sums.open(columns)
        for rows in head.row_tiles():
            if exact is None or narrow is None:
                z = head.logits(rows, columns, weight, first)
            else:
                z = head.mixed_logits(rows, columns, weight, narrow, first, exact[i])
            e = second[: z.numel()].view_as(z)
            local = targets[rows] - head.start - columns.start
            sums.add(logit_gradient(head.logit_map, z, e, local, lse[rows], wanted.at(rows)), rows, columns)
        sums.close(columns)
    return sums.result()


def logit_gradient(
    logit_map: LogitMap, z: Tensor, e: Tensor, targets: Tensor, lse: Tensor, wanted: RowGradients
) -> Tensor:
    """Turn mapped logits ``z`` into the gradient of the raw product, in ``z`` or ``e`` (both destroyed).

    Args:
        logit_map: what was applied to the product.
        z: ``[c, v]``.
        e: scratch ``[c, v]``.
        targets: int64 ``[c]``, counted from the tile's first column.
        lse: ``[c]``.
        wanted: of these rows.
    """
    factor = logit_map.scale / logit_map.temperature
    direct = (wanted.direct * factor)[:, None]
    capped = logit_map.softcap is not None
    dz = torch.sub(z, lse[:, None], out=e) if capped else z.sub_(lse[:, None])
    if wanted.slope is None:
        exponential(dz, out=dz).mul_(direct)
    else:
        p = exponential(dz, out=torch.empty_like(dz) if capped else e)
        dz.clamp_min_(LOWEST)  # p is 0 there
        dz.mul_((wanted.slope * factor)[:, None]).add_(direct).mul_(p)
    if wanted.flat is not None:
        dz.add_((wanted.flat * factor)[:, None])
    here, index = _targets_here(targets, dz.shape[1])
    extra = torch.where(here, wanted.target * factor, 0.0)[:, None]
    dz.scatter_(1, index, dz.gather(1, index) + extra)
    if logit_map.softcap is not None:  # 1 - tanh^2, with tanh = z * temperature / cap
        dz.mul_(z.mul_(logit_map.temperature / logit_map.softcap).square_().neg_().add_(1.0))
    return dz
