"""Tiles of logits -> statistics of their softmax, merged over tiles and ranks, and gradients of the logits.

R rows (selected tokens), c x v one tile, P ranks of the tensor-parallel group. Of the V vocabulary columns,
rank k holds those from k * V/P to (k + 1) * V/P.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_thd._static import shapes_are_static
from lightning_thd.loss.tiles.logits import LogitMap
from lightning_thd.loss.tiles.products import exponential
from lightning_thd.parallel.exchange import stacked

# e^x is zero in every dtype for lower x. Finite exponents avoid zero times infinity, which is NaN.
LOWEST = -1e4
# Rows of the statistics: largest logit m, sum e^(z-m), sum e^(z-m) (z-m), the target's z, sum z.
MAX, SUM, WEIGHTED, TARGET, TOTAL = range(5)


def blank_statistics(like: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return the statistics ``[5, R]`` of rows before their first tile."""
    stats = like.new_zeros((5, rows), dtype=dtype)
    stats[MAX] = -torch.inf
    return stats


def update_statistics(
    stats: Tensor, z: Tensor, e: Tensor, targets: Tensor, *, entropy: bool, total: bool
) -> None:
    """Update statistics ``[5, c]`` with logits z ``[c, v]``; e is scratch, and ``entropy`` overwrites z."""
    has_target, index = targets_here(targets, z.shape[1])
    stats[TARGET] += torch.where(has_target, z.gather(1, index).squeeze(1), 0.0)
    if total:
        stats[TOTAL] += z.sum(1)

    largest = torch.maximum(stats[MAX], z.amax(1))
    base = largest.masked_fill(largest == -torch.inf, 0.0)  # -inf minus -inf is NaN
    shift = (stats[MAX] - base).clamp_min_(LOWEST)
    decay = shift.exp()
    if entropy:
        exponential(z.sub_(base[:, None]).clamp_min_(LOWEST), out=e)
        stats[WEIGHTED] = decay * (stats[WEIGHTED] + stats[SUM] * shift) + z.mul_(e).sum(1)
    else:
        exponential(torch.sub(z, base[:, None], out=e), out=e)

    stats[SUM] = decay * stats[SUM] + e.sum(1)
    stats[MAX] = largest


def targets_here(targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return which rows have their target in a tile, ``[c]``, and a valid index for each row, ``[c, 1]``."""
    index = targets.clamp(0, columns - 1)
    return targets == index, index.unsqueeze(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGradients:
    """Factors ``[R]``, with softmax p: ``dz = p * (direct + slope * log p) + onehot * target + flat``."""

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

    def times(self, scale: float) -> RowGradients:
        """Return the factors for the gradient of ``x``, where the logits are ``scale * x``."""
        return RowGradients(
            direct=self.direct * scale,
            slope=None if self.slope is None else self.slope * scale,
            target=self.target * scale,
            flat=None if self.flat is None else self.flat * scale,
        )


def logit_gradient(
    logit_map: LogitMap, z: Tensor, e: Tensor, targets: Tensor, lse: Tensor, factors: RowGradients
) -> Tensor:
    """Turn mapped logits ``z`` ``[c, v]`` into the gradient of the raw product, in ``z`` or ``e``."""
    scale = logit_map.scale / logit_map.temperature
    if scale != 1.0:
        factors = factors.times(scale)
    direct = factors.direct[:, None]
    capped = logit_map.softcap is not None

    # ``dz`` begins as log p. A cap still needs z at the end; without one, z is free for the result.
    dz = torch.sub(z, lse[:, None], out=e) if capped else z.sub_(lse[:, None])
    if factors.slope is None:
        exponential(dz, out=dz).mul_(direct)
    else:
        p = exponential(dz, out=torch.empty_like(dz) if capped else e)
        dz.clamp_min_(LOWEST)  # p is 0 there
        dz.mul_(factors.slope[:, None]).add_(direct).mul_(p)

    if factors.flat is not None:
        dz.add_(factors.flat[:, None])

    has_target, index = targets_here(targets, dz.shape[1])
    at_target = torch.where(has_target, factors.target, 0.0)[:, None]
    dz.scatter_(1, index, dz.gather(1, index) + at_target)

    if logit_map.softcap is not None:  # 1 - tanh^2, with tanh = z * temperature / cap
        dz.mul_(z.mul_(logit_map.temperature / logit_map.softcap).square_().neg_().add_(1.0))
    return dz


def merge_parts(every: Tensor) -> Tensor:
    """Merge the statistics ``[P, 5, R]`` of all ranks, or tiles, into ``[5, R]``."""
    largest = every[:, MAX].amax(0)
    base = largest.masked_fill(largest == -torch.inf, 0.0)
    shift = (every[:, MAX] - base).clamp_min(LOWEST)  # ranks with only padding columns have the maximum -inf
    decay = shift.exp()
    sums = every[:, SUM]

    merged = torch.empty_like(every[0])
    merged[MAX] = largest
    merged[SUM] = (sums * decay).sum(0)
    merged[WEIGHTED] = (decay * (every[:, WEIGHTED] + sums * shift)).sum(0)
    merged[TARGET] = every[:, TARGET].sum(0)
    merged[TOTAL] = every[:, TOTAL].sum(0)
    return merged


def merge_ranks(
    stats: Tensor, others: Tensor, columns: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Merge all ranks' statistics by one all-gather; ``others`` ``[n, R]`` come back as ``[P, n, R]``."""
    ranks = dist.get_world_size(group)
    rows = torch.cat([stats, others])
    # One more column tells the other ranks how many columns of the vocabulary this rank holds.
    message = torch.cat([rows, rows.new_full((len(rows), 1), float(columns))], dim=1)
    messages = stacked(message, group).view(ranks, *message.shape)
    _check_equal(messages[:, 0, -1])

    every = messages[:, :, :-1]
    return merge_parts(every[:, : len(stats)]), every[:, len(stats) :]


def _check_equal(columns: Tensor) -> None:
    """Refuse ranks that hold different numbers of rows; on CUDA by an assert, which reads nothing."""
    if shapes_are_static():
        return
    if columns.is_cuda:
        message = "ranks of tp_group hold different numbers of rows of the head's weight"
        torch.ops.aten._assert_async.msg((columns == columns[0]).all(), message)
        return

    sizes = [int(size) for size in columns.tolist()]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"The ranks of tp_group hold {sizes} rows of the head's weight, wanted the same number on each. "
            "Pad the vocabulary to a multiple of the group (model.resize_token_embeddings(pad_to_multiple_of="
            f"{len(sizes)})) and pass valid_vocab_size."
        )
