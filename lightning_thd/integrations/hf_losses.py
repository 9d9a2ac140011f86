"""Per-token losses and statistics of TRL, computed on packs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_thd.batch import THDBatch
from lightning_thd.loss import TokenStats, causal_lm_logprobs


def dft_loss(model: nn.Module, batch: THDBatch) -> tuple[Tensor, TokenStats]:
    """Compute the loss of dynamic fine-tuning (arXiv:2508.05629): each token weighs its probability.

    Returns:
        The sum of ``-p log p`` over the batch's tokens, p without a gradient, times its scale; and entropy
        and accuracy of the tokens.
    """
    found = causal_lm_logprobs(model, batch, top_k=1)
    known = batch.targets != -100
    weights = known * (1.0 if batch.weights is None else batch.weights)
    loss = -(found.logp * found.logp.detach().exp() * weights).sum() * batch.loss_scale
    entropy = found.entropy.detach().masked_fill(~known, 0.0).sum()
    right = ((found.top.tokens[:, 0] == batch.targets) & known).sum()
    return loss, TokenStats(entropy, right.to(entropy.dtype), known.sum().to(entropy.dtype))


class TokenMeter:
    """Sums entropy, right guesses and tokens, apart for training and evaluation, until they are logged."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, mode: str, stats: TokenStats) -> None:
        """Add the statistics of a batch without reading the device."""
        own = torch.stack(stats).double()
        self._sums[mode] = own + self._sums[mode] if mode in self._sums else own

    def take(self, mode: str, device: torch.device) -> Tensor:
        """Return and reset the sums of entropy, right guesses and tokens, fp64 ``[3]``."""
        return self._sums.pop(mode, torch.zeros(3, dtype=torch.float64, device=device))
