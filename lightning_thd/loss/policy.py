"""Log-probabilities of a pack of rollouts -> policy losses: PPO, GRPO, GSPO, CISPO, SAPO and VESPO.

T slots, B rows (rollouts). A value of a slot belongs to the token that the slot predicts, as in
``causal_lm_logprobs(model, rollouts.batch).logp``; ``rollouts.pack`` converts padded values. Slots that
predict no response token are ignored. Each loss is one number ``[]``. The losses share these arguments:

- ``logp`` and ``old_logp``, floats ``[T]``: log-probabilities under the trained policy, and under the policy
  that sampled the responses,
- ``advantages``, ``[T]``, or ``[B]`` for one per row: they get no gradient,
- ``rollouts``: the pack,
- ``clip`` and ``clip_high``: the ratio of the policies is clipped to values from ``1 - clip`` to
  ``1 + clip_high``; None for ``clip_high`` means ``clip``,
- ``reference_logp``, floats ``[T]``: log-probabilities under the reference model; ``beta``: the factor of the
  divergence from that model,
- ``weights``, floats ``[T]``: a factor of each token's loss, which does not change the divisor,
- ``scale``: replaces the division by the number of rows or tokens. For a step of several microbatches or
  ranks, pass ranks x microbatches / the step's rows or tokens. The mean over microbatches and ranks is then
  exact for every packing.

In formulas, r is the ratio ``e^(logp - old_logp)`` and A the advantage. Shapes and settings that do not fit
raise ValueError, arguments of another type TypeError.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_thd._checks import choice, flags, real_number, shaped, whole_number
from lightning_thd.batch import IGNORE_INDEX
from lightning_thd.loss.rollouts import PackedRollouts

GRPOKind = Literal["grpo", "dr_grpo", "token_mean"]


def ppo_clip_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    rollouts: PackedRollouts,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute PPO's clipped policy-gradient loss: ``-min(r A, clip(r) A)`` per token.

    PPO, arXiv:1707.06347, equation 7, averaged over all response tokens. ``dual_clip``, above 1, bounds the
    loss of negative advantages by ``-dual_clip A``, arXiv:1912.09729, equation 5. DAPO, arXiv:2503.14476,
    uses ``clip_high=0.28``. Ratios of 1 and advantages of 1 give -1.
    """
    bounds = _bounds(clip, clip_high)
    _, ratio, of_slot = _slot_values(logp, old_logp, advantages, rollouts, weights)
    losses = -torch.minimum(ratio * of_slot, ratio.clamp(*bounds) * of_slot)
    if dual_clip is not None:
        real_number(dual_clip, "dual_clip", above=1.0)
        losses = torch.where(of_slot < 0, torch.minimum(losses, -dual_clip * of_slot), losses)
    return _reduced(losses, rollouts, "token_mean", None, weights, scale)


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    rollouts: PackedRollouts,
    *,
    kind: GRPOKind = "grpo",
    clip: float = 0.2,
    clip_high: float | None = None,
    largest_ratio: float | None = None,
    reference_logp: Tensor | None = None,
    beta: float = 0.0,
    max_tokens: int | None = None,
    weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the GRPO loss: a clipped policy gradient with group advantages and a divergence penalty.

    A token's loss is ``-min(r A, clip(r) A) + beta (e^(ref - logp) - (ref - logp) - 1)``, GRPO,
    arXiv:2402.03300, equations 3 and 4. ``largest_ratio`` bounds the unclipped ratio, as INTELLECT-2 does,
    arXiv:2505.07291. If the trained policy also sampled, pass ``logp.detach()`` as ``old_logp``. Kinds:

    - "grpo": the mean over rows of each row's mean over its tokens.
    - "dr_grpo": the sum over all tokens / (rows x ``max_tokens``), Dr. GRPO, arXiv:2503.20783; tokens of long
      answers keep their weight. ``max_tokens`` is the longest response that could have been sampled. A given
      ``scale`` replaces this whole division.
    - "token_mean": the mean over all tokens, DAPO, arXiv:2503.14476, equation 8.

    Ratios of 1 and advantages of 1 give -1 for "grpo" and "token_mean".
    """
    choice(kind, "kind", *get_args(GRPOKind))
    bounds = _bounds(clip, clip_high)
    logp, ratio, of_slot = _slot_values(logp, old_logp, advantages, rollouts, weights)
    clipped = ratio.clamp(*bounds)
    if largest_ratio is not None:
        real_number(largest_ratio, "largest_ratio", above=1.0)
        ratio = ratio.clamp(max=largest_ratio)

    losses = -torch.minimum(ratio * of_slot, clipped * of_slot)
    losses = losses + _divergence(logp, reference_logp, beta, rollouts, weights)
    return _reduced(losses, rollouts, kind, max_tokens, weights, scale)


def gspo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    rollouts: PackedRollouts,
    *,
    clip: float = 3e-4,
    clip_high: float | None = 4e-4,
    reference_logp: Tensor | None = None,
    beta: float = 0.0,
    weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the GSPO loss: a clipped policy gradient with one probability ratio per response.

    ``-min(s A, clip(s) A)`` with ``s = exp(mean(logp - old_logp))``, GSPO, arXiv:2507.18071, equations 5
    and 7, averaged over rows. The default clips are the paper's. ``advantages`` and ``weights`` are ``[B]``,
    and the divergence is averaged over each row's tokens. Equal policies and advantages of 1 give -1.
    """
    low, high = _bounds(clip, clip_high)
    rows = rollouts.shape[:1]
    shaped(advantages, "advantages", rows, "one per row.")
    advantages = advantages.detach()
    slot_weights: Tensor | None = None
    if weights is not None:
        shaped(weights, "weights", rows, "one per row.")
        advantages = torch.where(weights != 0, advantages, 0.0)  # a NaN of weight 0 reaches no gradient
        # The trailing pad has row B, one past the last: a weight of 0.
        slot_weights = torch.cat([weights, weights.new_zeros(1)]).index_select(0, rollouts.row)

    masked = _masked(rollouts, slot_weights, logp=logp, old_logp=old_logp)
    logp = masked["logp"]
    ratio = _ratio(rollouts.means(logp - masked["old_logp"].detach()))
    losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    losses = torch.where(rollouts.counts > 0, losses, 0.0)
    losses = losses + rollouts.means(_divergence(logp, reference_logp, beta, rollouts, slot_weights))
    if weights is not None:
        losses = losses * weights.detach()

    factor = 1.0 / max(1, *rows) if scale is None else real_number(scale, "scale")
    return losses.sum() * factor


def cispo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    rollouts: PackedRollouts,
    *,
    largest_ratio: float = 5.0,
    weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the CISPO loss: ``-min(r, largest_ratio) A logp`` per token; only ``logp`` gets a gradient.

    MiniMax-M1, arXiv:2506.13585, equation 4, with no lower bound, averaged over all response tokens.
    Unlike a clip, the bound leaves every token its gradient. Ratios of 1, advantages of 1 and
    log-probabilities of -2 give 2.
    """
    real_number(largest_ratio, "largest_ratio", above=0.0)
    logp, ratio, of_slot = _slot_values(logp, old_logp, advantages, rollouts, weights)
    losses = -ratio.detach().clamp(max=largest_ratio) * of_slot * logp
    return _reduced(losses, rollouts, "token_mean", None, weights, scale)


def sapo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    rollouts: PackedRollouts,
    *,
    temperature: float = 1.0,
    temperature_negative: float = 1.05,
    weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the SAPO loss: ``-4 / t sigmoid(t (r - 1)) A`` per token, a soft gate instead of a clip.

    SAPO, arXiv:2511.20347: the mean over rows of each row's mean over its tokens. ``temperature`` is t for
    tokens with a positive advantage, ``temperature_negative`` for all other tokens. With a larger t the gate
    closes earlier. Ratios of 1 and advantages of 1 give -2.
    """
    real_number(temperature, "temperature", above=0.0)
    real_number(temperature_negative, "temperature_negative", above=0.0)
    _, ratio, of_slot = _slot_values(logp, old_logp, advantages, rollouts, weights)
    t = torch.full_like(ratio, temperature).masked_fill(of_slot <= 0, temperature_negative)
    losses = -4.0 / t * torch.sigmoid(t * (ratio - 1.0)) * of_slot
    return _reduced(losses, rollouts, "grpo", None, weights, scale)


def vespo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    rollouts: PackedRollouts,
    *,
    k: tuple[float, float] = (2.0, 3.0),
    lam: tuple[float, float] = (3.0, 2.0),
    scale: float | None = None,
) -> Tensor:
    """Compute the VESPO loss: ``-phi(w) A logp`` per token, with a smooth weight per response, not a clip.

    VESPO, arXiv:2602.10693: ``phi(w) = w^k e^(lam (1 - w))`` gets no gradient. A response has
    ``w = exp(sum(logp - old_logp))``. The loss is the mean over all response tokens. A token's
    ``logp - old_logp`` is clamped to -20 to 20 nats, and w to 1e-8 to e^20. ``advantages`` are ``[B]``. ``k``
    and ``lam`` have one value for advantages of 0 and more, and one for negative advantages. Equal policies,
    advantages of 1 and log-probabilities of -2 give 2.
    """
    for name, pair in (("k", k), ("lam", lam)):
        for value in pair:
            real_number(value, name, least=0.0)

    masked = _masked(rollouts, logp=logp, old_logp=old_logp)
    shaped(advantages, "advantages", rollouts.shape[:1], "one per row.")
    of_row = advantages.detach()
    distance = (masked["logp"] - masked["old_logp"]).detach().clamp(-20.0, 20.0)
    log_w = rollouts.sums(distance).clamp(math.log(1e-8), 20.0)

    not_negative = of_row >= 0
    exponent = torch.where(not_negative, log_w.new_full((), k[0]), log_w.new_full((), k[1]))
    decay = torch.where(not_negative, log_w.new_full((), lam[0]), log_w.new_full((), lam[1]))
    phi = (exponent * log_w + decay * (1.0 - log_w.exp())).exp()
    losses = -_advantages(phi * of_row, rollouts) * masked["logp"]
    return _reduced(losses, rollouts, "token_mean", None, None, scale)


def group_advantages(
    rewards: Tensor, group_size: int, *, normalise: bool = True, epsilon: float = 1e-4
) -> Tensor:
    """Subtract the group's mean from each reward ``[B]``, and divide by the group's standard deviation.

    arXiv:2402.03300, section 4.1.2; without ``normalise`` nothing is divided (Dr. GRPO, arXiv:2503.20783).
    The ``group_size`` rollouts of a prompt are next to each other. The standard deviation is that of a sample
    (divisor n - 1), plus ``epsilon``. Rewards ``[1, 3]`` of one group without ``normalise`` give ``[-1, 1]``.
    """
    real_number(epsilon, "epsilon", least=0.0)
    flags(normalise=normalise)
    group_size = whole_number(group_size, "group_size", least=None, advice="Pass the rollouts per prompt.")
    least = 2 if normalise else 1
    whole = rewards.ndim == 1 and group_size >= least and not rewards.shape[0] % group_size
    if not whole or not rewards.is_floating_point():
        raise ValueError(
            f"rewards is {rewards.dtype} {list(rewards.shape)} with {group_size=}, wanted floats [B] "
            f"with B a multiple of group_size, a group of at least {least}."
        )

    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    if normalise:
        centred = centred / (groups.std(1, keepdim=True) + epsilon)
    return centred.flatten()


def _bounds(clip: float, clip_high: float | None) -> tuple[float, float]:
    """Return the lowest and highest ratio that is not clipped."""
    real_number(clip, "clip", above=0.0)
    if clip_high is None:
        return 1.0 - clip, 1.0 + clip
    real_number(clip_high, "clip_high", above=0.0)
    return 1.0 - clip, 1.0 + clip_high


def _ratio(distance: Tensor) -> Tensor:
    """Return ``e^distance``, bounded to finite values: a clipped infinite ratio has a gradient of NaN."""
    return distance.clamp(max=math.log(torch.finfo(distance.dtype).max) - 1.0).exp()


def _slot_values(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, rollouts: PackedRollouts, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities and ratios, 0 and 1 in slots that do not count, and advantages, ``[T]``."""
    masked = _masked(rollouts, weights, logp=logp, old_logp=old_logp)
    ratio = _ratio(masked["logp"] - masked["old_logp"].detach())
    return masked["logp"], ratio, _advantages(advantages, rollouts)


def _masked(rollouts: PackedRollouts, factors: Tensor | None = None, **values: Tensor) -> dict[str, Tensor]:
    """Check values of slots, and set them to 0 in slots that do not count or have a factor of 0."""
    counts = rollouts.batch.token_targets != IGNORE_INDEX
    if isinstance(factors, Tensor) and factors.shape == counts.shape:
        counts = counts & (factors != 0)
    for name, value in values.items():
        shaped(value, name, counts.shape, "one per slot. Convert padded values by rollouts.pack(...).")
    return {name: torch.where(counts, value, 0.0) for name, value in values.items()}


def _advantages(advantages: Tensor, rollouts: PackedRollouts) -> Tensor:
    """Return an advantage for each slot, ``[T]``, from those of slots or of rows."""
    slots = rollouts.held.shape
    rows = rollouts.shape[0]
    if advantages.shape == slots == (rows,) and max(rollouts.batch.lengths) > 1:
        raise ValueError(
            f"The pack has {rows} rows and {rows} slots, so advantages may belong to either. Add a slot: "
            f"PackedRollouts.from_padded(..., pad_to={rows + 1})."
        )

    if advantages.shape == (rows,) and slots != (rows,):
        of_row = torch.cat([advantages.detach(), advantages.new_zeros(1)])
        return of_row.index_select(0, rollouts.row)

    shaped(advantages, "advantages", slots, f"one per slot, or one per row, [{rows}].")
    return _masked(rollouts, advantages=advantages)["advantages"].detach()


def _divergence(
    logp: Tensor,
    reference_logp: Tensor | None,
    beta: float,
    rollouts: PackedRollouts,
    weights: Tensor | None = None,
) -> Tensor:
    """Return ``beta`` times the divergence estimate of arXiv:2402.03300, equation 4, ``[T]``."""
    real_number(beta, "beta", least=0.0)
    if (reference_logp is None) != (beta == 0):
        state = "absent" if reference_logp is None else "given"
        raise ValueError(f"beta is {beta} and reference_logp {state}, wanted both, or neither.")
    if reference_logp is None:
        return torch.zeros_like(logp)

    masked = _masked(rollouts, weights, reference_logp=reference_logp)
    distance = masked["reference_logp"].detach() - logp
    return beta * (distance.exp() - distance - 1.0)


def _reduced(
    losses: Tensor,
    rollouts: PackedRollouts,
    kind: str,
    max_tokens: int | None,
    weights: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Reduce the losses of slots to a scalar, by one of the kinds of averages."""
    if weights is not None:
        factors = _masked(rollouts, weights=weights)["weights"].detach()
        losses = torch.where(factors != 0, losses, 0.0) * factors

    rows = rollouts.means(losses) if kind == "grpo" else rollouts.sums(losses)
    if max_tokens is not None:
        whole_number(max_tokens, "max_tokens", least=1, advice="Pass the longest response's tokens.")
    if scale is not None:
        return rows.sum() * real_number(scale, "scale")
    if kind == "dr_grpo" and max_tokens is None:
        raise ValueError("kind='dr_grpo' got no max_tokens. Pass the longest response's number of tokens.")
    if kind == "token_mean":
        return rows.sum() / rollouts.counts.sum().clamp_min(1)

    divisor = max(1, rollouts.shape[0])
    if kind == "dr_grpo":
        divisor *= max_tokens or 1
    return rows.sum() / divisor
