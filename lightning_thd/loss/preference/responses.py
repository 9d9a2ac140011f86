"""Log-probabilities of single responses -> the KTO loss; rewards of pairs -> the loss of a reward model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightning_thd._checks import real_number
from lightning_thd.loss.checks import check_tensors
from lightning_thd.loss.preference.rows import check_rows, counted, weighted_mean


def kto_loss(
    logps: Tensor,
    reference_logps: Tensor,
    desirable: Tensor,
    *,
    divergence: Tensor | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the KTO loss of responses that are each liked or not, beside a reference.

    With ``r = logp - reference``: ``1 - sigmoid(beta (r - divergence))`` where desirable,
    ``1 - sigmoid(beta (divergence - r))`` elsewhere, KTO, arXiv:2402.01306, equation 7. With divergence 0
    this is the unpaired "apo_zero" of arXiv:2408.06266.

    Args:
        logps: floats ``[N]``, sums of log-probabilities in nats.
        reference_logps: likewise, under the reference.
        desirable: bool ``[N]``.
        divergence: the estimate of the divergence, one number or ``[]``: the mean of ``logp - reference``
            over mismatched prompts and responses of the whole step, at least 0; gets no gradient.
        beta: strength of the pull to the reference.
        desirable_weight: factor of desirable responses' losses; no part of the divisor.
        undesirable_weight: likewise.
        weights: as for ``dpo_loss``.
        scale: likewise.

    Returns:
        ``[]``. Equal log-probabilities and no divergence give 0.5.

    Raises:
        TypeError: for arguments of another type.
        ValueError: for shapes or settings that do not fit.
    """
    check_rows(logps=logps, reference_logps=reference_logps)
    check_tensors(desirable=desirable)
    if desirable.dtype != torch.bool or desirable.shape != logps.shape:
        raise ValueError(
            f"desirable is {desirable.dtype} {list(desirable.shape)}, wanted bool {list(logps.shape)}."
        )
    for name, value in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        real_number(value, name)
    real_number(beta, "beta", above=0.0)
    if isinstance(divergence, Tensor):
        if divergence.numel() != 1:
            raise ValueError(f"divergence is {list(divergence.shape)}, wanted one number for the step.")
        divergence = divergence.detach()
    else:
        real_number(divergence, "divergence")
    logps, reference_logps = counted(weights, logps, reference_logps)
    distance = logps - reference_logps - divergence
    losses = torch.where(
        desirable,
        desirable_weight * (1.0 - (beta * distance).sigmoid()),
        undesirable_weight * (1.0 - (-beta * distance).sigmoid()),
    )
    return weighted_mean(losses, weights, scale)


def reward_pair_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | float = 0.0,
    centre: float = 0.0,
    weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute a reward model's loss of pairs: ``-log sigmoid(chosen - rejected - margin)``.

    Bradley-Terry, arXiv:2203.02155, equation 1; the margin is arXiv:2307.09288's, equation 2; ``centre`` adds
    ``(chosen + rejected)^2``, arXiv:2312.09244, equation 2.

    Args:
        chosen: floats ``[P]``, rewards.
        rejected: likewise.
        margin: one number, or ``[P]``.
        centre: factor of the squared sum of both rewards.
        weights: as for ``dpo_loss``.
        scale: likewise.

    Returns:
        ``[]``. Equal rewards give ``log 2``.

    Raises:
        TypeError: for arguments of another type.
        ValueError: for shapes or settings that do not fit.
    """
    check_rows(chosen=chosen, rejected=rejected, **{"margin": margin} if isinstance(margin, Tensor) else {})
    if not isinstance(margin, Tensor):
        real_number(margin, "margin")
    real_number(centre, "centre", least=0.0)
    chosen, rejected = counted(weights, chosen, rejected)
    if isinstance(margin, Tensor):
        (margin,) = counted(weights, margin)
    losses = -logsigmoid(chosen - rejected - margin)
    if centre:
        losses = losses + centre * (chosen + rejected).square()
    return weighted_mean(losses, weights, scale)
