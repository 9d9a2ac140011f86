"""What the kernels of ``loss/kernels/rows.py`` compute, in fp64 by torch's operators: their stand-in."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_thd.loss.tiles.softmax import MAX, SUM, TARGET, TOTAL, WEIGHTED


def mapped(
    z: Tensor, bias: Tensor | None, columns: int, scale: float, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Logits, and their derivative for the raw products: operators of torch's library have no autograd."""
    z = z[:, :columns].double()
    z = (z if bias is None else z + bias) * scale
    if softcap is None:
        return z / temperature, torch.full_like(z, scale / temperature)
    tanh = torch.tanh(z / softcap)
    return softcap * tanh / temperature, (1.0 - tanh.square()) * (scale / temperature)


def nll(
    z: Tensor, out: Tensor, losses: Tensor, targets: Tensor, weights: Tensor, bias: Tensor | None,
    columns: int, ignore: int, smoothing: float, z_loss: float, *logit_map: float | None,
) -> None:  # fmt: skip
    logits, bend = mapped(z, bias, columns, *logit_map)
    lse, counts, index = logits.logsumexp(1), targets != ignore, targets.clamp_min(0)[:, None]
    loss = (1.0 - smoothing) * (lse - logits.gather(1, index).squeeze(1)) + z_loss * lse.square()
    if smoothing:
        loss = loss + smoothing * (lse - logits.mean(1))
    losses.copy_(torch.where(counts, weights * loss, 0.0))

    p = (logits - lse[:, None]).exp()
    found = p * (1.0 + 2.0 * z_loss * lse)[:, None] - smoothing / columns
    found.scatter_add_(1, index, torch.full_like(lse, smoothing - 1.0)[:, None])
    out[:, :columns] = torch.where(counts[:, None], found * weights[:, None] * bend, 0.0)


def statistics(
    z: Tensor, stats: Tensor, targets: Tensor, bias: Tensor | None, columns: int, start: int,
    entropy: bool, total: bool, *logit_map: float | None,
) -> None:  # fmt: skip
    logits, _ = mapped(z, bias, columns, *logit_map)
    here = (targets >= start) & (targets < start + columns)
    found = logits.gather(1, (targets - start).clamp(0, columns - 1)[:, None]).squeeze(1)
    stats[TARGET] = torch.where(here, found, stats[TARGET].double())
    if total:
        stats[TOTAL] += logits.sum(1)
    largest = torch.maximum(stats[MAX].double(), logits.amax(1))
    base = largest.masked_fill(largest == -torch.inf, 0.0)[:, None]
    shift = (stats[MAX].double() - base[:, 0]).clamp_min(-1e4)
    away = (logits - base).clamp_min(-1e4)
    if entropy:
        older = stats[WEIGHTED] + stats[SUM] * shift
        stats[WEIGHTED] = shift.exp() * older + (away.exp() * away).sum(1)
    stats[SUM] = shift.exp() * stats[SUM] + away.exp().sum(1)
    stats[MAX] = largest


def gradient(
    z: Tensor, out: Tensor, factors: Tensor, targets: Tensor, bias: Tensor | None, columns: int, start: int,
    slope: bool, *logit_map: float | None,
) -> None:  # fmt: skip
    lse, direct, log_factor, target, flat = factors.double()[:, :, None]
    logits, bend = mapped(z, bias, columns, *logit_map)
    log_p = (logits - lse).clamp_min(-1e4)
    found = log_p.exp() * (direct + (log_factor * log_p if slope else 0.0)) + flat
    onehot = torch.arange(start, start + columns, device=z.device) == targets[:, None]
    out[:, :columns] = (found + onehot * target) * bend
