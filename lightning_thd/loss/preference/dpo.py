"""Log-probabilities of pairs under policy and reference -> the DPO loss and its variants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightning_thd._checks import real_number
from lightning_thd.loss.preference.rows import check_rows, counted, smoothed, weighted_mean

DPOKind = Literal[
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm",
]  # fmt: skip
# DiscoPOP's temperature, arXiv:2406.08414, equation 5.
_DISCOPOP_TAU = 0.05


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

    With ``c`` and ``r`` the differences of log-probabilities from the reference's, and ``d = beta (c - r)``:

    - "sigmoid": ``-log sigmoid(d)``, DPO, arXiv:2305.18290, equation 7; with ``label_smoothing`` e
      ``-(1 - e) log sigmoid(d) - e log sigmoid(-d)``, cDPO.
    - "hinge": ``max(0, 1 - d)``, SLiC, arXiv:2305.10425.
    - "ipo": ``(c / tokens - r / tokens - 1 / (2 beta))^2``, IPO, arXiv:2310.12036, equation 17, averaged over
      each response's tokens.
    - "robust": ``(-(1 - e) log sigmoid(d) + e log sigmoid(-d)) / (1 - 2 e)``, arXiv:2403.00409.
    - "exo_pair": the reverse divergence from ``(1 - e, e)``, EXO, arXiv:2402.00856, equation 16; needs e > 0.
    - "nca_pair": ``-log sigmoid(b c) - (log sigmoid(-b c) + log sigmoid(-b r)) / 2``, NCA, arXiv:2402.05369.
    - "bco_pair": ``-log sigmoid(b c) - log sigmoid(-b r)``, BCO without its shift, arXiv:2404.04656.
    - "sppo_hard": ``(c - 1 / (2 b))^2 + (r + 1 / (2 b))^2``, SPPO, arXiv:2405.00675, equation 4.7.
    - "apo_zero": ``1 - sigmoid(b c) + sigmoid(b r)``; "apo_down": ``sigmoid(b c) + 1 - sigmoid(d)``, APO,
      arXiv:2408.06266, equations 7 and 8.
    - "discopop": a blend of ``-log sigmoid(d)`` and ``e^-d``, arXiv:2406.08414, equation 5.
    - "sigmoid_norm": "sigmoid" of ``c / tokens`` and ``r / tokens``.

    Args:
        chosen: floats ``[P]``, sums of log-probabilities in nats.
        rejected: likewise, of the same pairs.
        reference_chosen: of the chosen responses under the reference.
        reference_rejected: likewise.
        kind: the variant.
        beta: strength of the pull to the reference.
        label_smoothing: share of labels that are taken to be wrong, for "sigmoid", "robust" and "exo_pair".
        chosen_tokens: ``[P]``, tokens of each response, for "ipo" and "sigmoid_norm".
        rejected_tokens: likewise.
        weights: floats ``[P]``; the loss is then divided by their sum.
        scale: see the module; replaces the division.

    Returns:
        ``[]``. Equal log-probabilities everywhere give ``log 2`` for "sigmoid".

    Raises:
        TypeError: for arguments of another type.
        ValueError: for shapes or settings that do not fit.
    """
    if kind not in get_args(DPOKind):
        raise ValueError(f"kind is {kind!r}, wanted one of {', '.join(get_args(DPOKind))}.")
    given = {"chosen": chosen, "rejected": rejected}
    given |= {"reference_chosen": reference_chosen, "reference_rejected": reference_rejected}
    check_rows(**given)
    real_number(beta, "beta", above=0.0)
    check_smoothing(kind, label_smoothing)
    chosen, rejected, reference_chosen, reference_rejected = counted(
        weights, chosen, rejected, reference_chosen, reference_rejected
    )
    c, r = chosen - reference_chosen, rejected - reference_rejected
    if kind in ("ipo", "sigmoid_norm"):
        if chosen_tokens is None or rejected_tokens is None:
            raise ValueError(
                f"kind={kind!r} averages over tokens, wanted chosen_tokens and rejected_tokens, the tokens "
                "of each response."
            )
        check_rows(chosen=chosen, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens)
        c, r = c / chosen_tokens.clamp_min(1), r / rejected_tokens.clamp_min(1)
    return weighted_mean(_DPO[kind](c, r, beta, label_smoothing), weights, scale)


def _sigmoid(c: Tensor, r: Tensor, beta: float, e: float) -> Tensor:
    return smoothed(beta * (c - r), e)


def _robust(c: Tensor, r: Tensor, beta: float, e: float) -> Tensor:
    d = beta * (c - r)
    right = -(1.0 - e) * logsigmoid(d)
    return (right + e * logsigmoid(-d) if e else right) / (1.0 - 2.0 * e)


def _exo(c: Tensor, r: Tensor, beta: float, e: float) -> Tensor:
    d = beta * (c - r)
    limit = torch.finfo(d.dtype).max / 2  # whose sigmoid is 0 or 1; 0 times infinity would be NaN
    d = d.clamp(-limit, limit)
    likelier = d.sigmoid() * (logsigmoid(d) - math.log1p(-e))
    return likelier + (-d).sigmoid() * (logsigmoid(-d) - math.log(e))


def _discopop(c: Tensor, r: Tensor, beta: float, e: float) -> Tensor:
    d = beta * (c - r)
    blend = (d / _DISCOPOP_TAU).sigmoid()
    # e^-d alone overflows where the blend leaves nothing of it
    return -logsigmoid(d) * (1.0 - blend) + (logsigmoid(d / _DISCOPOP_TAU) - d).exp()


_DPO: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
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


def check_smoothing(kind: str, value: float) -> None:
    """Check that label smoothing is in range for the variant of the loss.

    Raises:
        ValueError: for a share of a half or more, or with a variant that has none or needs one.
    """
    real_number(value, "label_smoothing", least=0.0)
    if value >= 0.5 or (value and kind not in ("sigmoid", "robust", "exo_pair", "sigmoid_norm")):
        raise ValueError(
            f"label_smoothing is {value!r} with kind={kind!r}, wanted below 0.5, and 0 but for 'sigmoid', "
            "'sigmoid_norm', 'robust' and 'exo_pair'."
        )
    if kind == "exo_pair" and not value:
        raise ValueError(
            "kind='exo_pair' needs label_smoothing above 0: its target is (1 - e, e); 1e-3 is usual."
        )
