"""Products rounded to bf16 -> softmax statistics that are exact where the rounding would show.

R rows, H hidden size, V vocabulary columns held here. A CPU's bf16 product rounds a logit by up to 2^-8 of
it, which a log-probability feels as the sum of each token's error times its probability: nothing where
thousands of tokens share the mass, 0.06 where one of them has it all. So all tiles are multiplied once,
rounded, and those rows of a tile where the error of the log-sum would show are multiplied again, exactly: of
a trained model a few tiles a row. The target's own logit is always exact.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from lightning_thd._static import shapes_are_static
from lightning_thd.loss.tiles.logits import Head
from lightning_thd.loss.tiles.softmax import MAX, SUM, TARGET, WEIGHTED, update_statistics
from lightning_thd.loss.tiles.vocab_parallel import merge_ranks

# Half a unit in the last of bf16's eight bits, relative to the number.
_ROUNDING = 2.0**-8
# Standard error allowed to a row's log-sum, and to its entropy, in nats: the goal is 0.01 at most.
_LOG_SUM_ERROR, _ENTROPY_ERROR = 2e-3, 8e-3


def may_round(head: Head) -> bool:
    """Return whether a head's logits are its rounded products times a factor, as the estimate assumes."""
    plain = head.logit_map.softcap is None and head.bias is None and head.low_rank is None
    return head.native and plain and head.columns > 0 and not shapes_are_static()


def rounded_statistics(head: Head, targets: Tensor, *, entropy: bool, total: bool) -> tuple[Tensor, Tensor]:
    """Compute the statistics of ``softmax_statistics`` from rounded products, and exact ones where it shows.

    Args:
        head: the operands, for which ``may_round`` holds.
        targets: int64 ``[R]``, vocabulary indices.
        entropy: fill WEIGHTED.
        total: fill TOTAL.

    Returns:
        The statistics ``[5, R]``, and bool ``[tiles, R]``: the rows of each tile of columns made exactly.
    """
    tiles = list(head.column_tiles())
    each = head.hidden.new_zeros((len(tiles), 5, head.hidden.shape[0]), dtype=head.accumulator)
    each[:, MAX] = -torch.inf
    nowhere, local = torch.full_like(targets, -1), targets - head.start
    first, second, narrow = head.scratch(), head.scratch(), head.scratch(head.compute)
    for i, columns in enumerate(tiles):
        weight = head.weight_tile(columns)
        for rows in head.row_tiles():
            z = head.rounded_logits(rows, columns, weight, narrow, first)
            e = second[: z.numel()].view_as(z)
            update_statistics(each[i][:, rows], z, e, nowhere[rows], entropy, total)
    exact = rounding_shows(each, [t.stop - t.start for t in tiles], entropy=entropy)
    for i, columns in enumerate(tiles):
        weight, rows_there = head.weight_tile(columns), exact[i].nonzero().squeeze(1)
        for at in range(0, len(rows_there), head.tile[0]):
            chosen = rows_there[at : at + head.tile[0]]
            z = head.wide_logits(chosen, columns, weight, first)
            e = second[: z.numel()].view_as(z)
            found = each.new_zeros((5, len(chosen)))
            found[MAX] = -torch.inf
            update_statistics(found, z, e, local[chosen] - columns.start, entropy, total)
            each[i][:, chosen] = found
    stats = merge_ranks(each)
    for rows in head.row_tiles():
        tile = local[rows].clamp(0, head.columns - 1) // head.tile[1]
        found_there = exact[:, rows].gather(0, tile[None]).squeeze(0)  # beside the largest, to the last bit
        stats[TARGET, rows] = torch.where(
            found_there, stats[TARGET, rows], target_logits(head, rows, local[rows])
        )
    return stats, exact


def rounding_shows(each: Tensor, widths: list[int], *, entropy: bool) -> Tensor:
    """Estimate the error of every row in every tile of columns, and compare it with what is allowed.

    Independent errors of ``|z| 2^-8 / sqrt(3)`` at most add up to their root mean square, weighted by the
    probabilities: ``sqrt(largest p * the tile's mass)`` bounds the root of the sum of squares. Where a tile
    is flat its logits may be rounded all to one number: their errors add up as they are.

    Args:
        each: ``[tiles, 5, R]``, the statistics of every tile on its own.
        widths: columns of every tile.
        entropy: whether the entropy is wanted too.

    Returns:
        Bool ``[tiles, R]``.
    """
    tiles = len(widths)
    whole = merge_ranks(each)
    log_sum = whole[SUM].log()
    log_p = each[:, MAX] - whole[MAX] - log_sum  # of the likeliest token of each tile
    size = (each[:, MAX].abs() + 0.5) * _ROUNDING
    spread = each[:, SUM].sqrt() / sqrt(3.0)
    flat = each[:, SUM] > 0.5 * each.new_tensor(widths)[:, None]
    factor = torch.where(flat, each[:, SUM], spread)
    error = log_p.exp() * factor * size
    shows = ~(error <= _LOG_SUM_ERROR / sqrt(tiles))  # NaN shows
    if entropy:
        row_entropy = log_sum - whole[WEIGHTED] / whole[SUM]
        shows |= ~(error * ((log_p + row_entropy).abs() + 1.0) <= _ENTROPY_ERROR / sqrt(tiles))
    return shows


def target_logits(head: Head, rows: slice, local: Tensor) -> Tensor:
    """Compute the exact logits of targets ``[c]`` counted from this rank's first column; 0 for others."""
    here = (local >= 0) & (local < head.columns)
    weight = head.weight[local.clamp(0, head.columns - 1)]
    x, w = (part.to(head.compute).to(head.accumulator) for part in (head.hidden_tile(rows), weight))
    return torch.where(here, head.logit_map.apply_((x * w).sum(1)), 0.0)
