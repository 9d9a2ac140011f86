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
    lse = logits.logsumexp(1)
    counts = targets != ignore
    index = targets.clamp_min(0)[:, None]
    loss = (1.0 - smoothing) * (lse - logits.gather(1, index).squeeze(1)) + z_loss * lse.square()
    if smoothing:
        loss = loss + smoothing * (lse - logits.mean(1))
    losses.copy_(torch.where(counts, weights * loss, 0.0))

    p = (logits - lse[:, None]).exp()
    gradient = p * (1.0 + 2.0 * z_loss * lse)[:, None] - smoothing / columns
    gradient.scatter_add_(1, index, torch.full_like(lse, smoothing - 1.0)[:, None])
    out[:, :columns] = torch.where(counts[:, None], gradient * weights[:, None] * bend, 0.0)


def statistics(
    z: Tensor, stats: Tensor, targets: Tensor, bias: Tensor | None, columns: int, start: int,
    entropy: bool, total: bool, *logit_map: float | None,
) -> None:  # fmt: skip
    logits, _ = mapped(z, bias, columns, *logit_map)
    here = (targets >= start) & (targets < start + columns)
    target_logits = logits.gather(1, (targets - start).clamp(0, columns - 1)[:, None]).squeeze(1)
    stats[TARGET] = torch.where(here, target_logits, stats[TARGET].double())
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
    of_softmax = log_p.exp() * (direct + (log_factor * log_p if slope else 0.0)) + flat
    onehot = torch.arange(start, start + columns, device=z.device) == targets[:, None]
    out[:, :columns] = (of_softmax + onehot * target) * bend


def log_probabilities(
    z: Tensor, lse: Tensor, bias: Tensor | None, columns: int, *logit_map: float | None
) -> tuple[Tensor, Tensor]:
    logits, bend = mapped(z, bias, columns, *logit_map)  # type: ignore[arg-type]
    return logits - lse.double()[:, None], bend


def parts_of(s: Tensor, t: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Each column's part of the divergence, and g of ``tiles/divergence.py``."""
    p = s.exp()
    q = t.exp()
    if kind == "kl":
        return torch.where(q == 0, 0.0, q * (t - s)), torch.zeros_like(s)
    if kind == "reverse_kl":
        return torch.where(p == 0, 0.0, p * (s - t)), s - t
    m = (beta * q + (1.0 - beta) * p).log()
    divergence = beta * torch.where(q == 0, 0.0, q * (t - m)) + (1.0 - beta) * torch.where(
        p == 0, 0.0, p * (s - m)
    )
    return divergence, (1.0 - beta) * (s - m)


def lse_of(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lse of student and of teacher."""
    top, log_mass, taught_top, taught_log_mass = factors[:4].double()
    return top + log_mass, taught_top + taught_log_mass


def divergence_terms(
    z: Tensor, u: Tensor, sums: Tensor, factors: Tensor, targets: Tensor, bias: Tensor | None,
    taught_bias: Tensor | None, columns: int, ignore: int, kind: str, beta: float, scale: float,
    softcap: float | None, taught_scale: float, taught_softcap: float | None, temperature: float,
) -> None:  # fmt: skip
    lse, taught_lse = lse_of(factors)
    s, _ = log_probabilities(z, lse, bias, columns, scale, softcap, temperature)
    t, _ = log_probabilities(u, taught_lse, taught_bias, columns, taught_scale, taught_softcap, temperature)
    divergence, g = parts_of(s, t, kind, beta)
    p = s.exp()
    largest, place = s.max(1)
    pivot = g.gather(1, place[:, None])
    inner = torch.where(p == 0, 0.0, p * (g - pivot)).sum(1)
    rows = torch.stack([divergence.sum(1), inner, pivot[:, 0], p.sum(1), largest])
    sums.copy_(torch.where(targets != ignore, rows, 0.0))


def divergence_gradient(
    z: Tensor, u: Tensor, out: Tensor, losses: Tensor, factors: Tensor, targets: Tensor, weights: Tensor,
    bias: Tensor | None, taught_bias: Tensor | None, columns: int, ignore: int, kind: str, beta: float,
    scale: float, softcap: float | None, taught_scale: float, taught_softcap: float | None,
    temperature: float,
) -> None:  # fmt: skip
    lse, taught_lse = lse_of(factors)
    s, bend = log_probabilities(z, lse, bias, columns, scale, softcap, temperature)
    t, _ = log_probabilities(u, taught_lse, taught_bias, columns, taught_scale, taught_softcap, temperature)
    divergence, g = parts_of(s, t, kind, beta)
    counts = targets != ignore
    if kind == "kl":
        losses.copy_(torch.where(counts, divergence.sum(1), 0.0))
        gradient = s.exp() - t.exp()
    else:
        inner, pivot = factors[4:].double()[..., None]
        gradient = torch.where(s.exp() == 0, 0.0, s.exp() * (g - pivot - inner))
    out[:, :columns] = torch.where(counts[:, None], gradient * weights[:, None] * bend, 0.0)
