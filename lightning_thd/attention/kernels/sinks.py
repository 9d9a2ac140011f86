"""Attention sinks for any kernel: out and lse are rescaled, and its own backward gives the right gradients.

A sink is one more key that every query of a head sees, with a learned logit and no value (gpt_oss). It only
rescales: ``lse' = log(exp(lse) + exp(sink))`` and ``out' = out * exp(lse - lse')``. A flash backward
recomputes its weights from lse, so given out' and lse' it returns the right gradients to q, k and v as it is.

Legend: T slots, H query heads, E value head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_sinks(out_THE: Tensor, lse_TH: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Rescale out and lse as if every query saw one more key, of logit ``sinks[h]`` and value zero.

    Returns:
        out and lse with them. One key of logit 0 and a sink of logit 0 halve out and make lse log 2.
    """
    total = torch.logaddexp(lse_TH, sinks.to(lse_TH.dtype))
    return out_THE * (lse_TH - total).exp().unsqueeze(-1).to(out_THE.dtype), total


def sinks_gradient(grad_out: Tensor, out_THE: Tensor, lse_TH: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient to ``sinks``, from the out and lse that include them.

    Returns:
        ``[H]`` in the dtype of sinks: minus the sink's weight times ``grad_out . out``, summed over the rows.
    """
    delta = torch.linalg.vecdot(grad_out.to(lse_TH.dtype), out_THE.to(lse_TH.dtype))
    weight = (sinks.to(lse_TH.dtype) - lse_TH).exp()
    gradient: Tensor = -(weight * delta).sum(0)
    return gradient.to(sinks.dtype)
