"""Losses and log-probabilities of packed batches without materialised logits."""

from lightning_thd._static import static_shapes
from lightning_thd.loss import contrastive, policy, preference
from lightning_thd.loss.causal_lm import (
    TokenStats,
    causal_lm_logprobs,
    causal_lm_loss,
    causal_lm_loss_and_stats,
    dft_loss,
    mtp_targets,
)
from lightning_thd.loss.distillation import fused_linear_distillation
from lightning_thd.loss.linear_logprobs import LogProbs, fused_linear_logprobs
from lightning_thd.loss.linear_nll import fused_linear_cross_entropy
from lightning_thd.loss.rollouts import PackedRollouts
from lightning_thd.loss.watch import log_token_losses

__all__ = [
    "LogProbs",
    "PackedRollouts",
    "TokenStats",
    "causal_lm_logprobs",
    "causal_lm_loss",
    "causal_lm_loss_and_stats",
    "contrastive",
    "dft_loss",
    "fused_linear_cross_entropy",
    "fused_linear_distillation",
    "fused_linear_logprobs",
    "log_token_losses",
    "mtp_targets",
    "policy",
    "preference",
    "static_shapes",
]
