"""Hidden states x head weight, in tiles of tokens and vocabulary -> softmax statistics, and gradients.

R rows (selected tokens), V vocabulary columns held here, c x v one tile. The vocabulary is the outer
loop: a tile of the weight is read and widened once a pass, and its gradient is finished before the next tile.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

from lightning_thd._static import shapes_are_static
from lightning_thd.loss.tiles.logits import GradientSums, Head, HeadGradients, Needs, by_kernels
from lightning_thd.loss.tiles.products import product
from lightning_thd.loss.tiles.softmax import (
    MAX,
    SUM,
    TARGET,
    TOTAL,
    WEIGHTED,
    RowGradients,
    blank_statistics,
    logit_gradient,
    merge_parts,
    update_statistics,
)
from lightning_thd.loss.tiles.trial import kernels_hold

# Largest relative error of rounding to bf16, which keeps eight significant bits.
_ROUNDING = 2.0**-8
# Allowed standard errors of a row's log-sum and entropy, in nats, so that actual errors stay below 0.01.
_LOG_SUM_ERROR = 2e-3
_ENTROPY_ERROR = 8e-3


def softmax_statistics(head: Head, targets: Tensor, *, entropy: bool, total: bool) -> Tensor:
    """Compute the statistics ``[5, R]`` of all rows; ``entropy`` fills WEIGHTED, ``total`` TOTAL."""
    stats = blank_statistics(head.hidden, head.hidden.shape[0], head.settings.accumulator)
    fill = _fill_by_operators
    if by_kernels(head):
        ways = (_fill_by_kernels, _fill_by_operators)
        if kernels_hold("log-probabilities", head, _outputs, ways, entropy, total):
            fill = _fill_by_kernels
    fill(stats, head, targets, entropy=entropy, total=total)
    return stats


def _outputs(
    fill: Callable[..., None], few: Head, targets: Tensor, weights: Tensor, entropy: bool, total: bool
) -> tuple[Tensor, ...]:
    """Return what follows from the statistics of a small head: lse, and the terms of the rest."""
    stats = blank_statistics(few.hidden, len(few.hidden), few.settings.accumulator)
    fill(stats, few, targets, entropy=entropy, total=total)
    outputs = [stats[MAX] + stats[SUM].log(), stats[TARGET]]
    if entropy:
        outputs.append(stats[WEIGHTED] / stats[SUM])
    if total:
        outputs.append(stats[TOTAL])
    return tuple(outputs)


def _fill_by_operators(stats: Tensor, head: Head, targets: Tensor, *, entropy: bool, total: bool) -> None:
    """Compute ``softmax_statistics`` with torch's operators."""
    first = head.scratch()
    second = head.scratch()
    for columns in head.column_tiles:
        w = head.weights(columns)
        for rows in head.row_tiles:
            z = head.logits(head.inputs(rows), w, columns, first)
            e = second[: z.numel()].view_as(z)
            local = targets[rows] - head.settings.start - columns.start
            update_statistics(stats[:, rows], z, e, local, entropy=entropy, total=total)


def gradients(
    head: Head,
    targets: Tensor,
    lse: Tensor,
    factors: RowGradients,
    *,
    needs: Needs,
    exact: Tensor | None = None,
) -> HeadGradients:
    """Compute the logits again and return the gradients; ``exact`` comes from ``rounded_statistics``."""
    if exact is None and by_kernels(head):
        ways = (_gradients_by_kernels, _gradients_by_operators)
        if kernels_hold("log-probabilities", head, _hidden_gradients, ways, factors.slope is None):
            return _gradients_by_kernels(head, targets, lse, factors, needs=needs)
    return _gradients_by_operators(head, targets, lse, factors, needs=needs, exact=exact)


def _hidden_gradients(
    compute: Callable[..., HeadGradients], few: Head, targets: Tensor, weights: Tensor, is_flat: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of the hidden states of a small head; without ``is_flat``, of an entropy too."""
    stats = blank_statistics(few.hidden, len(few.hidden), few.settings.accumulator)
    _fill_by_operators(stats, few, targets, entropy=False, total=False)
    lse = stats[MAX] + stats[SUM].log()
    slope = None if is_flat else 0.5 * weights
    factors = RowGradients(direct=weights, slope=slope, target=-weights, flat=None)
    gradients = compute(few, targets, lse, factors, needs=(True, False, False))
    assert gradients.hidden is not None
    return (gradients.hidden,)


def _gradients_by_operators(
    head: Head,
    targets: Tensor,
    lse: Tensor,
    factors: RowGradients,
    *,
    needs: Needs,
    exact: Tensor | None = None,
) -> HeadGradients:
    """Compute ``gradients`` with torch's operators."""
    sums = GradientSums(head, needs=needs, rows_outside=False)
    first = head.scratch()
    second = head.scratch()
    narrow = None if exact is None else head.scratch(head.settings.compute)

    for i, columns in enumerate(head.column_tiles):
        w = head.weights(columns)
        sums.open(columns)
        for rows in head.row_tiles:
            if exact is None or narrow is None:
                z = head.logits(head.inputs(rows), w, columns, first)
            else:
                z = _mixed_logits(head, rows, columns, w, narrow, first, exact[i])
            e = second[: z.numel()].view_as(z)
            local = targets[rows] - head.settings.start - columns.start
            dz = logit_gradient(head.settings.logit_map, z, e, local, lse[rows], factors.at(rows))
            sums.add(dz, rows, columns)

        sums.close(columns)

    return sums.result()


def _fill_by_kernels(stats: Tensor, head: Head, targets: Tensor, *, entropy: bool, total: bool) -> None:
    """Compute ``softmax_statistics`` with one kernel for each tile, which reads its products once."""
    from lightning_thd.loss.kernels.operators import RowBuffer, statistics_of_rows

    head = _widened_tiles(head)
    buffer = RowBuffer(*_largest_tile(head), head.hidden.device)
    for columns in head.column_tiles:
        width = columns.stop - columns.start
        weight = head.weights(columns)
        for rows in head.row_tiles:
            count = rows.stop - rows.start
            product(head.inputs(rows), weight, out=buffer.products(count, width))
            statistics_of_rows(
                buffer.memory(count),
                stats[:, rows],
                targets[rows],
                head.plain_bias(columns),
                width,
                head.settings.start + columns.start,
                entropy,
                total,
                *head.settings.logit_map.numbers(),
            )


def _gradients_by_kernels(
    head: Head, targets: Tensor, lse: Tensor, factors: RowGradients, *, needs: Needs
) -> HeadGradients:
    """Compute ``gradients`` with one kernel for each tile, which overwrites the products."""
    from lightning_thd.loss.kernels.operators import RowBuffer, gradient_of_rows

    head = _widened_tiles(head)
    compute = head.settings.compute
    zeros = torch.zeros_like(lse)
    slope = zeros if factors.slope is None else factors.slope
    flat = zeros if factors.flat is None else factors.flat
    rows_of_factors = torch.stack([lse, factors.direct, slope, factors.target, flat])
    sums = GradientSums(head, needs=needs, rows_outside=False)
    buffer = RowBuffer(*_largest_tile(head), head.hidden.device)

    for columns in head.column_tiles:
        width = columns.stop - columns.start
        weight = head.weights(columns)
        sums.open(columns)
        for rows in head.row_tiles:
            count = rows.stop - rows.start
            hidden = head.inputs(rows)
            product(hidden, weight, out=buffer.products(count, width))
            gradient_of_rows(
                buffer.memory(count),
                rows_of_factors[:, rows],
                targets[rows],
                head.plain_bias(columns),
                compute,
                width,
                head.settings.start + columns.start,
                factors.slope is not None,
                *head.settings.logit_map.numbers(),
            )
            dx = buffer.gradient(count, width, compute)
            sums.add_bias(dx, columns)
            sums.add_hidden(dx, weight, rows, columns)
            sums.add_weight(dx, hidden, rows, columns)

        sums.close(columns)

    return sums.result()


def _widened_tiles(head: Head) -> Head:
    """Return a head with tiles of twice as many rows: the kernels take one buffer, not two."""
    if head.settings.chunk != "auto":
        return head
    return head.cut(max(1, min(2 * head.tile[0], head.hidden.shape[0])), head.column_tiles)


def _largest_tile(head: Head) -> tuple[int, int]:
    """Return the rows and columns of a buffer for every tile of a head."""
    return min(head.tile[0], head.hidden.shape[0]), min(head.tile[1], head.settings.columns)


# The rest is for CPUs with native bf16. Rounding a product to bf16 changes a logit by up to 2^-8 of its size.
# The error of a log-sum is almost 0 if thousands of tokens share the probability. It is up to 0.06 if a token
# with logit 20 has all of it. So rows of a tile whose rounding would show are computed again exactly, and so
# is the logit of every target.


def may_round(head: Head) -> bool:
    """Return whether logits are rounded products times a factor, as the estimate of errors assumes."""
    plain = head.settings.logit_map.softcap is None and head.bias is None
    return (
        head.settings.native
        and plain
        and not by_kernels(head)
        and head.settings.columns > 0
        and not shapes_are_static()
    )


def rounded_statistics(head: Head, targets: Tensor, *, entropy: bool, total: bool) -> tuple[Tensor, Tensor]:
    """Compute ``softmax_statistics``, and bool ``[tiles, R]``: the rows of each tile that are exact."""
    tiles = head.column_tiles
    wide = head.settings.accumulator
    blank = blank_statistics(head.hidden, head.hidden.shape[0], wide)
    of_tiles = blank.repeat(len(tiles), 1, 1)
    nowhere = torch.full_like(targets, -1)
    local = targets - head.settings.start
    first = head.scratch()
    second = head.scratch()
    narrow = head.scratch(head.settings.compute)

    for i, columns in enumerate(tiles):
        w = head.weights(columns)
        for rows in head.row_tiles:
            z = head.rounded_logits(head.inputs(rows), w, columns, narrow, first)
            e = second[: z.numel()].view_as(z)
            update_statistics(of_tiles[i][:, rows], z, e, nowhere[rows], entropy=entropy, total=total)

    widths = [columns.stop - columns.start for columns in tiles]
    exact = rounding_shows(of_tiles, widths, entropy=entropy)
    for i, columns in enumerate(tiles):
        w = head.weights(columns)
        exact_rows = exact[i].nonzero().squeeze(1)
        for start in range(0, len(exact_rows), head.tile[0]):
            chosen = exact_rows[start : start + head.tile[0]]
            z = _wide_logits(head, chosen, columns, w, first)
            e = second[: z.numel()].view_as(z)
            recomputed = blank_statistics(of_tiles, len(chosen), wide)
            update_statistics(recomputed, z, e, local[chosen] - columns.start, entropy=entropy, total=total)
            of_tiles[i][:, chosen] = recomputed

    stats = merge_parts(of_tiles)
    for rows in head.row_tiles:
        tile = local[rows].clamp(0, head.settings.columns - 1) // head.tile[1]
        # In an exact tile the target's logit comes from the same product as the tile's largest logit, so both
        # have the same rounding.
        is_exact = exact[:, rows].gather(0, tile[None]).squeeze(0)
        computed = target_logits(head, rows, local[rows])
        stats[TARGET, rows] = torch.where(is_exact, stats[TARGET, rows], computed)
    return stats, exact


def rounding_shows(of_tiles: Tensor, widths: list[int], *, entropy: bool) -> Tensor:
    """Return where the rounding of a row in a tile shows, from each tile's statistics ``[tiles, 5, R]``.

    The estimate assumes independent errors of logits with a standard deviation of at most ``|z| 2^-8 /
    sqrt(3)``, weighted by probabilities. In a tile, the root of the sum of p^2 is at most ``sqrt(largest p *
    sum of p)``. If the mean ``e^(z - max)`` of a tile is above 1/2, all errors may have one sign.
    """
    tiles = len(widths)
    whole = merge_parts(of_tiles)
    log_sum = whole[SUM].log()
    log_p = of_tiles[:, MAX] - whole[MAX] - log_sum  # the likeliest token of each tile
    size = (of_tiles[:, MAX].abs() + 0.5) * _ROUNDING
    spread = of_tiles[:, SUM].sqrt() / sqrt(3.0)
    flat = of_tiles[:, SUM] > 0.5 * of_tiles.new_tensor(widths)[:, None]
    error = log_p.exp() * torch.where(flat, of_tiles[:, SUM], spread) * size
    shows = ~(error <= _LOG_SUM_ERROR / sqrt(tiles))  # NaN counts as showing
    if entropy:
        row_entropy = log_sum - whole[WEIGHTED] / whole[SUM]
        shows |= ~(error * ((log_p + row_entropy).abs() + 1.0) <= _ENTROPY_ERROR / sqrt(tiles))
    return shows


def target_logits(head: Head, rows: slice, local: Tensor) -> Tensor:
    """Compute exact logits ``[c]`` of the targets ``local``; 0 for targets in other ranks' columns."""
    has_target = (local >= 0) & (local < head.settings.columns)
    x, w = _widened(head, rows, head.weight[local.clamp(0, head.settings.columns - 1)])
    return torch.where(has_target, head.settings.logit_map.apply_((x * w).sum(1)), 0.0)


def _widened(head: Head, rows: slice | Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states of some rows, and ``w``, rounded to the compute dtype and widened."""
    compute = head.settings.compute
    wide = head.settings.accumulator
    return head.counted(head.hidden, rows).to(compute).to(wide), w.to(compute).to(wide)


def _wide_logits(head: Head, rows: slice | Tensor, columns: slice, w: Tensor, out: Tensor) -> Tensor:
    """Compute a tile's exact logits, by products in the accumulator's dtype."""
    x, w = _widened(head, rows, w)
    return head.finish(product(x, w, out=out[: len(x) * len(w)].view(len(x), len(w))), columns)


def _mixed_logits(
    head: Head, rows: slice, columns: slice, w: Tensor, kept: Tensor, out: Tensor, exact: Tensor
) -> Tensor:
    """Compute rounded logits, and exact ones in rows with ``exact`` ``[R]`` True, or in all if most are."""
    chosen = exact[rows].nonzero().squeeze(1)
    if 2 * len(chosen) > rows.stop - rows.start:
        return _wide_logits(head, rows, columns, w, out)

    z = head.rounded_logits(head.inputs(rows), w, columns, kept, out)
    if len(chosen):
        wide = z.new_empty(len(chosen) * w.shape[0])
        z[chosen] = _wide_logits(head, chosen + rows.start, columns, w, wide)
    return z
