"""Log-probabilities of responses -> preference losses of pairs, or of desirable and undesirable responses.

P pairs, N responses, S sequences, T slots. All losses take one number per response, as
``PackedRollouts.sequence_logprobs`` or ``sequence_sums`` return it. If the first half of the rows has the
chosen responses and the second half the rejected ones, use ``chosen, rejected = logps.chunk(2)``. Each loss
is one number ``[]``. The losses share these arguments:

- ``chosen`` and ``rejected``, floats ``[P]``: log-probabilities (or rewards) of each pair's responses, and
  ``reference_chosen`` and ``reference_rejected``: the same under the reference model, without gradient,
- ``beta``: the strength of the pull to the reference model, or the scale of the rewards,
- ``label_smoothing``: the share of labels that are assumed to be wrong, below 0.5,
- ``weights``, floats ``[P]``: factors of the pairs; the loss is then divided by their sum,
- ``scale``: replaces the division. For a step of several microbatches or ranks, pass ranks x microbatches /
  the step's pairs (or the sum of their weights). The mean over microbatches and ranks is then exact.

Shapes and settings that do not fit raise ValueError, arguments of another type TypeError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightning_thd._checks import choice, instance, real_number
from lightning_thd.batch import IGNORE_INDEX, THDBatch
from lightning_thd.batch.noted import unnoted
from lightning_thd.loss.rollouts import segment_sums
from lightning_thd.seqlens import seq_idx_from_cu_seqlens

DPOKind = Literal[
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm", "aot", "aot_unpaired",
]  # fmt: skip
_SMOOTH = ("sigmoid", "sigmoid_norm", "aot", "aot_unpaired", "robust", "exo_pair")  # have label smoothing
# DiscoPOP's temperature, arXiv:2406.08414, equation 5.
_DISCOPOP_TAU = 0.05


def sequence_sums(values: Tensor, batch: THDBatch) -> Tensor:
    """Sum values of slots, floats ``[T]``, over the loss tokens of every sequence, ``[S]``; differentiable.

    Values ``[1, 2, 4]`` of the sequences ``[5, 6]`` and ``[7]`` give ``[1, 0]``, in the order of
    ``batch.sequence_ids``: the last token of a sequence predicts nothing. A shard of a batch is refused.
    """
    instance(batch, "batch", THDBatch, advice="Pass the pack.")
    batch = unnoted(batch)
    if batch.boundaries.ranks > 1:
        raise ValueError(
            "The batch is one rank's shard, whose slots hold parts of sequences. Set context_parallel_size=1."
        )

    targets = batch.token_targets
    if not values.is_floating_point() or values.shape != targets.shape:
        raise ValueError(
            f"values is {values.dtype} {list(values.shape)}, wanted floats {list(targets.shape)}."
        )

    sequence = seq_idx_from_cu_seqlens(batch.token_offsets, values.shape[0]).flatten().long()
    counted = torch.where(targets != IGNORE_INDEX, values, 0.0)
    return segment_sums(counted, sequence, len(batch.lengths))


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    kind: DPOKind = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
    weights: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the DPO loss, or a variant, of pairs of responses and their reference log-probabilities.

    ``chosen`` and ``rejected`` are sums over the tokens of a response. ``c`` and ``r`` are their differences
    from the reference log-probabilities, ``b`` is ``beta``, ``e`` is ``label_smoothing``, and
    ``d = b (c - r)``:

    - "sigmoid": ``-log sigmoid(d)``, DPO, arXiv:2305.18290, equation 7; with ``label_smoothing``
      ``-(1 - e) log sigmoid(d) - e log sigmoid(-d)``, cDPO.
    - "hinge": ``max(0, 1 - d)``, SLiC, arXiv:2305.10425.
    - "ipo": ``(c / tokens - r / tokens - 1 / (2 b))^2``, IPO, arXiv:2310.12036, equation 17, averaged over
      each response's tokens.
    - "robust": ``(-(1 - e) log sigmoid(d) + e log sigmoid(-d)) / (1 - 2 e)``, arXiv:2403.00409.
    - "exo_pair": ``KL((s, 1 - s), (1 - e, e))``, ``s = sigmoid(d)``, e > 0, EXO, arXiv:2402.00856, eq. 16.
    - "nca_pair": ``-log sigmoid(b c) - (log sigmoid(-b c) + log sigmoid(-b r)) / 2``, NCA, arXiv:2402.05369.
    - "bco_pair": ``-log sigmoid(b c) - log sigmoid(-b r)``, BCO without its shift, arXiv:2404.04656.
    - "sppo_hard": ``(c - 1 / (2 b))^2 + (r + 1 / (2 b))^2``, SPPO, arXiv:2405.00675, equation 4.7.
    - "apo_zero": ``1 - sigmoid(b c) + sigmoid(b r)``; "apo_down": ``sigmoid(b c) + 1 - sigmoid(d)``, APO,
      arXiv:2408.06266, equations 7 and 8.
    - "discopop": ``-(1 - w) log sigmoid(d) + w e^-d``, ``w = sigmoid(d / 0.05)``, arXiv:2406.08414, eq. 5.
    - "sigmoid_norm": "sigmoid" of ``c / tokens`` and ``r / tokens``.
    - "aot_unpaired": "sigmoid" of ``c`` and ``r``, each sorted over the pairs; "aot" sorts
      ``chosen - rejected`` and the same difference of the reference, arXiv:2406.05882. Pass all pairs of a
      step in one call, without ``weights`` and ``scale``.

    ``label_smoothing`` is for "sigmoid", "sigmoid_norm", "aot", "aot_unpaired", "robust" and "exo_pair".
    "ipo" and "sigmoid_norm" need ``chosen_tokens`` and ``rejected_tokens``, ``[P]``, the tokens of each
    response. Equal log-probabilities everywhere give ``log 2`` for "sigmoid".
    """
    choice(kind, "kind", *get_args(DPOKind))
    references = {"reference_chosen": reference_chosen, "reference_rejected": reference_rejected}
    _check_rows(chosen=chosen, rejected=rejected, **references)
    real_number(beta, "beta", above=0.0)
    _check_smoothing(kind, label_smoothing)
    chosen, rejected, reference_chosen, reference_rejected = _masked(
        weights, chosen, rejected, reference_chosen.detach(), reference_rejected.detach()
    )

    # c and r as in the formulas above.
    c = chosen - reference_chosen
    r = rejected - reference_rejected
    if kind in ("ipo", "sigmoid_norm"):
        if chosen_tokens is None or rejected_tokens is None:
            raise ValueError(f"{kind=} averages over tokens, wanted chosen_tokens and rejected_tokens.")
        _check_rows(chosen=chosen, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens)
        c = c / chosen_tokens.clamp_min(1)
        r = r / rejected_tokens.clamp_min(1)

    if kind in ("aot", "aot_unpaired"):
        if weights is not None or scale is not None:
            raise ValueError(f"{kind=} sorts the pairs of a step. Leave weights and scale out.")
        if kind == "aot":
            c = chosen - rejected
            r = reference_chosen - reference_rejected
        c = c.sort().values
        r = r.sort().values

    return _weighted_mean(_DPO[kind](c, r, beta, label_smoothing), weights, scale)


def _smoothed(z: Tensor, e: float) -> Tensor:
    """Return ``-(1 - e) log sigmoid(z) - e log sigmoid(-z)``, the loss of a margin with label smoothing."""
    loss = -(1.0 - e) * logsigmoid(z)
    if e:  # 0 times the infinite loss of an infinite margin would be NaN
        loss = loss - e * logsigmoid(-z)
    return loss


def _robust(c: Tensor, r: Tensor, beta: float, e: float) -> Tensor:
    """Return the loss that is right on average, although a share ``e`` of the labels is wrong."""
    d = beta * (c - r)
    loss = -(1.0 - e) * logsigmoid(d)
    if e:  # as in ``_smoothed``
        loss = loss + e * logsigmoid(-d)
    return loss / (1.0 - 2.0 * e)


def _exo(c: Tensor, r: Tensor, beta: float, e: float) -> Tensor:
    """Return the divergence of the preferred response's distribution from the smoothed labels."""
    d = beta * (c - r)
    limit = torch.finfo(d.dtype).max / 2  # sigmoid is 0 or 1 there; 0 times infinity would be NaN
    d = d.clamp(-limit, limit)

    of_chosen = d.sigmoid() * (logsigmoid(d) - math.log1p(-e))
    of_rejected = (-d).sigmoid() * (logsigmoid(-d) - math.log(e))
    return of_chosen + of_rejected


def _discopop(c: Tensor, r: Tensor, beta: float, e: float) -> Tensor:
    """Return the blend of a logistic and an exponential loss that DiscoPOP found."""
    d = beta * (c - r)
    blend = (d / _DISCOPOP_TAU).sigmoid()
    logistic = -logsigmoid(d) * (1.0 - blend)
    # The blend is a term of the exponent: e^-d can overflow, and a blend of 0 times infinity is NaN.
    exponential = (logsigmoid(d / _DISCOPOP_TAU) - d).exp()
    return logistic + exponential


# The losses of pairs from c, r, beta and label smoothing, named as in ``dpo_loss``.
_DPO: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    **dict.fromkeys(
        ("sigmoid", "sigmoid_norm", "aot", "aot_unpaired"), lambda c, r, beta, e: _smoothed(beta * (c - r), e)
    ),
    "robust": _robust,
    "exo_pair": _exo,
    "discopop": _discopop,
    "hinge": lambda c, r, beta, _: (1.0 - beta * (c - r)).relu(),
    "ipo": lambda c, r, beta, _: (c - r - 0.5 / beta).square(),
    "nca_pair": lambda c, r, beta, _: (
        -logsigmoid(beta * c) - 0.5 * logsigmoid(-beta * c) - 0.5 * logsigmoid(-beta * r)
    ),
    "bco_pair": lambda c, r, beta, _: -logsigmoid(beta * c) - logsigmoid(-beta * r),
    "sppo_hard": lambda c, r, beta, _: (c - 0.5 / beta).square() + (r + 0.5 / beta).square(),
    "apo_zero": lambda c, r, beta, _: 1.0 - (beta * c).sigmoid() + (beta * r).sigmoid(),
    "apo_down": lambda c, r, beta, _: (beta * c).sigmoid() + 1.0 - (beta * (c - r)).sigmoid(),
}


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
    geometric mean of a response's token probabilities; arXiv:2403.07691, equations 4 and 7. ``chosen`` and
    ``rejected`` are means over each response's tokens, below 0, and ``beta`` is the paper's lambda. The
    paper's other term is the cross entropy of the chosen responses: add ``causal_lm_loss``. Equal
    log-probabilities give ``beta log 2``.
    """
    _check_rows(chosen=chosen, rejected=rejected)
    real_number(beta, "beta", above=0.0)
    chosen, rejected = _masked(weights, chosen, rejected, blank=-1.0)
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return _weighted_mean(-beta * logsigmoid(log_odds), weights, scale)


def _log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - e^x)`` for x below 0, exact at both ends (Maechler, 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)  # finite odds and no gradient for a certain response
    near_zero = x > -math.log(2.0)
    # Each form gets only its own x: where it is not taken, it could still send NaN into the gradient.
    x_near = torch.where(near_zero, x, -1.0)
    x_far = torch.where(near_zero, -1.0, x)
    return torch.where(near_zero, (-torch.expm1(x_near)).log(), torch.log1p(-x_far.exp()))


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
    ``dpo_loss``. ``chosen`` and ``rejected`` are means over each response's tokens. ``margin`` is the paper's
    gamma, the least difference of rewards that is wanted. Equal log-probabilities and no margin give
    ``log 2``.
    """
    _check_rows(chosen=chosen, rejected=rejected)
    real_number(beta, "beta", above=0.0)
    real_number(margin, "margin")
    _check_smoothing("sigmoid", label_smoothing)
    chosen, rejected = _masked(weights, chosen, rejected)
    z = beta * (chosen - rejected) - margin
    return _weighted_mean(_smoothed(z, label_smoothing), weights, scale)


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
    """Compute the KTO loss of responses that are each desirable or not, relative to a reference.

    With ``r = logp - reference``: ``1 - sigmoid(beta (r - divergence))`` if desirable,
    ``1 - sigmoid(beta (divergence - r))`` if not, KTO, arXiv:2402.01306, equation 7. With divergence 0
    this is the unpaired "apo_zero" of arXiv:2408.06266.

    ``logps`` and ``reference_logps`` are floats ``[N]``, sums over the tokens of a response; ``desirable`` is
    bool ``[N]``, and ``weights`` are ``[N]``. ``divergence`` is an estimate, a float or ``[]``: the mean
    of ``logp - reference`` over mismatched prompts and responses of the whole step. A negative mean counts as
    0, and neither it nor the reference gets a gradient. ``desirable_weight`` and ``undesirable_weight`` are
    factors of the losses, and do not change the divisor. Equal log-probabilities and no divergence give 0.5.
    """
    _check_rows(logps=logps, reference_logps=reference_logps)
    if desirable.dtype != torch.bool or desirable.shape != logps.shape:
        raise ValueError(
            f"desirable is {desirable.dtype} {list(desirable.shape)}, wanted bool {list(logps.shape)}."
        )

    real_number(beta, "beta", above=0.0)
    real_number(desirable_weight, "desirable_weight", least=0.0)
    real_number(undesirable_weight, "undesirable_weight", least=0.0)
    if not isinstance(divergence, Tensor):
        divergence = max(0.0, real_number(divergence, "divergence"))
    elif divergence.numel() != 1:
        raise ValueError(f"divergence is {list(divergence.shape)}, wanted one number for the step.")
    else:
        divergence = divergence.detach().reshape(()).clamp_min(0.0)

    logps, reference_logps = _masked(weights, logps, reference_logps)
    distance = logps - reference_logps.detach() - divergence
    losses = torch.where(
        desirable,
        desirable_weight * (1.0 - (beta * distance).sigmoid()),
        undesirable_weight * (1.0 - (-beta * distance).sigmoid()),
    )
    return _weighted_mean(losses, weights, scale)


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

    Bradley-Terry, arXiv:2203.02155, equation 1. ``chosen`` and ``rejected`` are rewards. ``margin``, one
    number or ``[P]``, is that of arXiv:2307.09288, equation 2. ``centre`` is the factor of ``(chosen +
    rejected)^2``, arXiv:2312.09244, equation 2. Equal rewards give ``log 2``.
    """
    rows = {"chosen": chosen, "rejected": rejected}
    if isinstance(margin, Tensor):
        rows["margin"] = margin
    else:
        real_number(margin, "margin")
    _check_rows(**rows)
    real_number(centre, "centre", least=0.0)

    chosen, rejected = _masked(weights, chosen, rejected)
    if isinstance(margin, Tensor):
        (margin,) = _masked(weights, margin)

    losses = -logsigmoid(chosen - rejected - margin)
    if centre:
        losses = losses + centre * (chosen + rejected).square()
    return _weighted_mean(losses, weights, scale)


def _check_smoothing(kind: str, value: float) -> None:
    """Refuse a share of wrong labels that the formula of a kind of loss does not take."""
    real_number(value, "label_smoothing", least=0.0)
    has_smoothing = kind in _SMOOTH
    needs_smoothing = kind == "exo_pair"  # its formula has the logarithm of it
    if value < 0.5 and (has_smoothing or not value) and (value or not needs_smoothing):
        return

    wanted = "below 0.5"
    if not has_smoothing:
        wanted = f"0: only {', '.join(_SMOOTH)} have it"
    elif needs_smoothing:
        wanted += ", and above 0, 1e-3 for example"
    raise ValueError(f"label_smoothing is {value!r} with {kind=}, wanted {wanted}.")


def _weighted_mean(losses: Tensor, weights: Tensor | None, scale: float | None) -> Tensor:
    """Return the mean of losses ``[P]``, weighted if there are weights, or their sum times ``scale``."""
    if weights is not None:
        _check_rows(losses=losses, weights=weights)
        losses = losses * weights.detach()
    if scale is not None:
        return losses.sum() * real_number(scale, "scale")
    if weights is None:
        return losses.sum() / max(1, losses.numel())

    total = weights.detach().sum()
    return losses.sum() / torch.where(total == 0, torch.ones_like(total), total)


def _masked(weights: Tensor | None, *rows: Tensor, blank: float = 0.0) -> tuple[Tensor, ...]:
    """Set rows ``[P]`` of weight 0 to ``blank``, so that a NaN there reaches neither loss nor gradient."""
    if weights is None:
        return rows
    _check_rows(losses=rows[0], weights=weights)
    return tuple(torch.where(weights != 0, row, blank) for row in rows)


def _check_rows(**tensors: Tensor) -> None:
    """Refuse arguments that do not hold one number per response; only counts of tokens may be integers."""
    shape = next(iter(tensors.values())).shape
    for name, tensor in tensors.items():
        if tensor.ndim != 1 or tensor.shape != shape:
            shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
            raise ValueError(f"Shapes are {shapes}, wanted one number per response, [P], of each.")
        if not tensor.dtype.is_floating_point and not name.endswith("_tokens"):
            raise ValueError(f"{name} is {tensor.dtype}, wanted floats.")
