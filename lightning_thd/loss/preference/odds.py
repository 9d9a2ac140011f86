"""Log-probabilities of pairs without a reference -> the ORPO and SimPO losses."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightning_thd._checks import real_number
from lightning_thd.loss.preference.dpo import check_smoothing
from lightning_thd.loss.preference.rows import check_rows, counted, smoothed, weighted_mean


def orpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute ORPO's odds-ratio term of chosen and rejected responses, without a reference.

    ``-beta log sigmoid(log odds(chosen) - log odds(rejected))`` with ``odds = p / (1 - p)`` and p the
    geometric mean of a response's token probabilities; arXiv:2403.07691, equations 4 and 7. Its first
    term is the cross entropy of the chosen responses: ``causal_lm_loss``.

    Args:
        chosen: floats ``[P]``, means of log-probabilities over each response's tokens, below 0.
        rejected: likewise.
        beta: the paper's lambda.
        weights: as for ``dpo_loss``.
        scale: likewise.

    Returns:
        ``[]``. Equal log-probabilities give ``beta log 2``.

    Raises:
        TypeError: for arguments of another type.
        ValueError: for shapes or settings that do not fit.
    """
    check_rows(chosen=chosen, rejected=rejected)
    real_number(beta, "beta", above=0.0)
    chosen, rejected = counted(weights, chosen, rejected, blank=-1.0)
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return weighted_mean(-beta * logsigmoid(log_odds), weights, scale)


def _log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - e^x)`` for x below 0, exact at both ends (Maechler, 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)  # a response that is certain: finite odds, no gradient
    near = x > -math.log(2.0)
    inner = torch.where(near, x, -1.0)
    outer = torch.where(near, -1.0, x)
    return torch.where(near, (-torch.expm1(inner)).log(), torch.log1p(-outer.exp()))


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 2.0,
    margin: float = 1.0,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the SimPO loss: mean log-probabilities of pairs with a margin, without a reference.

    ``-log sigmoid(beta (chosen - rejected) - margin)``, SimPO, arXiv:2405.14734, equation 6; smoothed as in
    ``dpo_loss``.

    Args:
        chosen: floats ``[P]``, means of log-probabilities over each response's tokens.
        rejected: likewise.
        beta: scale of the rewards.
        margin: the paper's gamma, by which the chosen reward is to be larger.
        label_smoothing: share of labels that are taken to be wrong.
        weights: as for ``dpo_loss``.
        scale: likewise.

    Returns:
        ``[]``. Equal log-probabilities and no margin give ``log 2``.

    Raises:
        TypeError: for arguments of another type.
        ValueError: for shapes or settings that do not fit.
    """
    check_rows(chosen=chosen, rejected=rejected)
    real_number(beta, "beta", above=0.0)
    real_number(margin, "margin")
    check_smoothing("sigmoid", label_smoothing)
    chosen, rejected = counted(weights, chosen, rejected)
    z = beta * (chosen - rejected) - margin
    return weighted_mean(smoothed(z, label_smoothing), weights, scale)
