"""The losses' public functions, for ``tests.fuzz``."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import torch

from lightning_thd.batch import THDBatch
from lightning_thd.loss import (
    PackedRollouts,
    causal_lm_logprobs,
    causal_lm_loss,
    causal_lm_loss_and_stats,
    dft_loss,
    fused_linear_cross_entropy,
    fused_linear_distillation,
    fused_linear_logprobs,
    log_token_losses,
    mtp_targets,
    policy,
    preference,
    static_shapes,
)
from tests.batch.fuzz_table import BATCH
from tests.fuzz import Entry
from tests.tiny import tiny_llama

MODEL = tiny_llama(torch.float32)


def _linear(rng: random.Random) -> dict[str, Any]:
    return {
        "hidden": torch.randn(3, 4),
        "weight": torch.randn(7, 4),
        "targets": torch.tensor([0, 6, -100]),
        "bias": rng.choice([None, torch.randn(7)]),
        "temperature": rng.choice([1.0, 0.5]),
        "softcap": rng.choice([None, 5.0]),
        "logit_scale": rng.choice([1.0, -2]),
        "ignore_index": -100,
        "valid_vocab_size": rng.choice([None, 7]),
        "chunk": rng.choice(["auto", 2]),
        "tp_group": None,
    }


def _logprobs(rng: random.Random) -> dict[str, Any]:
    rows = rng.choice([None, torch.tensor([0, 1]), torch.tensor([True, False, True])])
    return {**_linear(rng), "rows": rows, "entropy": rng.random() < 0.5}


def _cross_entropy(rng: random.Random) -> dict[str, Any]:
    return {
        **_linear(rng),
        "token_weights": rng.choice([None, 2.0, torch.rand(3)]),
        "label_smoothing": rng.choice([0.0, 0.1]),
        "z_loss": rng.choice([0.0, 1e-4]),
        "reduction": rng.choice(["sum", "mean"]),
    }


def _distillation(rng: random.Random) -> dict[str, Any]:
    return {
        **_linear(rng),
        "teacher_hidden": torch.randn(3, 5),
        "teacher_weight": torch.randn(7, 5),
        "teacher_bias": rng.choice([None, torch.randn(7)]),
        "teacher_softcap": rng.choice([None, 3.0]),
        "teacher_logit_scale": 1.0,
        "kind": rng.choice(["kl", "reverse_kl", "jsd"]),
        "alpha": rng.choice([1.0, 0.5, 0.0]),
        "beta": 0.5,
        "token_weights": rng.choice([None, 2.0, torch.rand(3)]),
        "reduction": rng.choice(["sum", "mean"]),
    }


def _taken(function: Callable[..., Any], every: Callable[[random.Random], dict[str, Any]]) -> Entry:
    """Return an entry whose arguments are those of ``every`` that the function takes."""
    names = inspect.signature(function).parameters

    def made(rng: random.Random) -> dict[str, Any]:
        arguments = every(rng)
        return {name: arguments[name] for name in names}

    return Entry(function, made)


def _pairs(rng: random.Random) -> dict[str, Any]:
    rows = ("chosen", "rejected", "reference_chosen", "reference_rejected", "logps", "reference_logps")
    return {
        **{name: -torch.rand(3) - 0.1 for name in rows},
        "kind": rng.choice(["sigmoid", "robust", "exo_pair", "sigmoid_norm"]),
        "label_smoothing": 0.1,
        "chosen_tokens": torch.tensor([3, 4, 5]),
        "rejected_tokens": torch.tensor([3, 4, 5]),
        "margin": rng.choice([0.0, 1]),
        "centre": rng.choice([0.0, 0.1]),
        "desirable": torch.tensor([True, False, True]),
        "divergence": rng.choice([0.0, 0.5, torch.tensor(0.5)]),
        "desirable_weight": 1.0,
        "undesirable_weight": 1.5,
        "beta": rng.choice([0.1, 2]),
        "weights": rng.choice([None, torch.rand(3)]),
        "scale": rng.choice([None, 0.5]),
    }


def _rollouts() -> PackedRollouts:
    return PackedRollouts.from_padded(torch.arange(8).view(2, 4), torch.ones(2, 4))


ROLLOUTS = _rollouts()


def _policy(rng: random.Random) -> dict[str, Any]:
    return {
        **{name: -torch.rand(8) for name in ("logp", "old_logp", "reference_logp")},
        "advantages": torch.randn(2),
        "rollouts": _rollouts(),
        "kind": rng.choice(["grpo", "dr_grpo", "token_mean"]),
        "clip": 0.2,
        "clip_high": rng.choice([None, 0.28]),
        "dual_clip": rng.choice([None, 3.0]),
        "largest_ratio": rng.choice([1.5, 4.0]),
        "beta": 0.1,
        "max_tokens": 4,
        "temperature": rng.choice([1.5, 3.0]),
        "temperature_negative": rng.choice([1.5, 3.0]),
        "k": (2.0, 3.0),
        "lam": (3.0, 2.0),
        "weights": rng.choice([None, torch.rand(8)]),
        "scale": rng.choice([None, 0.5]),
    }


def _of_rows(rng: random.Random) -> dict[str, Any]:
    return {**_policy(rng), "weights": rng.choice([None, torch.rand(2)])}


def _sums(rng: random.Random) -> dict[str, Any]:
    return {
        "values": torch.rand(5),
        "batch": THDBatch.collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]),
    }


def _advantages(rng: random.Random) -> dict[str, Any]:
    return {"rewards": torch.rand(6), "group_size": rng.choice([2, 3]), "normalise": True, "epsilon": 1e-4}


def _padded(rng: random.Random) -> dict[str, Any]:
    return {
        "input_ids": torch.arange(8).view(2, 4),
        "attention_mask": torch.ones(2, 4),
        "response_mask": rng.choice([None, torch.ones(2, 4)]),
        "align": None,
        "pad_to": rng.choice([None, 9]),
    }


def _mtp(rng: random.Random) -> dict[str, Any]:
    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
    return {
        "targets": torch.tensor([6, 7, -100, 9, -100]),
        "cu_seqlens": cu_seqlens,
        "depth": rng.choice([0, 1, 9]),
    }


def _token_losses(rng: random.Random) -> dict[str, Any]:
    batch = THDBatch.collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    return {"batch": batch, "losses": torch.rand(5), "weights": rng.choice([None, torch.ones(5)])}


def _model_loss(rng: random.Random) -> dict[str, Any]:
    return {
        "model": MODEL,
        "batch": BATCH,
        "reduction": rng.choice(["tokens", "sequences"]),
        "weights": rng.choice([None, torch.rand(3)]),
        "label_smoothing": rng.choice([0.0, 0.1]),
        "z_loss": rng.choice([None, 1e-4]),
        "mtp_weight": 0.3,
        "router_balance": "microbatch",
        "router_z_loss": 0.0,
    }


def _static() -> None:
    with static_shapes():
        pass


TABLE = {
    "loss.static_shapes": Entry(_static, lambda _: {}),
    "loss.causal_lm_loss": Entry(causal_lm_loss, _model_loss),
    "loss.causal_lm_loss_and_stats": Entry(
        causal_lm_loss_and_stats,
        lambda rng: {
            "model": MODEL,
            "batch": BATCH,
            "label_smoothing": rng.choice([0.0, 0.1]),
            "router_balance": "microbatch",
        },
    ),
    "loss.causal_lm_logprobs": Entry(
        causal_lm_logprobs,
        lambda rng: {"model": MODEL, "batch": BATCH, "temperature": 0.5, "entropy": True},
    ),
    "loss.dft_loss": Entry(
        dft_loss, lambda _: {"logp": -torch.rand(BATCH.token_targets.shape), "batch": BATCH}
    ),
    "loss.log_token_losses": Entry(log_token_losses, _token_losses),
    "loss.PackedRollouts": Entry(
        PackedRollouts,
        lambda _: {n: getattr(ROLLOUTS, n) for n in PackedRollouts.__dataclass_fields__},
    ),
    "loss.fused_linear_logprobs": Entry(fused_linear_logprobs, _logprobs),
    "loss.fused_linear_cross_entropy": Entry(fused_linear_cross_entropy, _cross_entropy),
    "loss.fused_linear_distillation": Entry(fused_linear_distillation, _distillation),
    "loss.preference.dpo_loss": _taken(preference.dpo_loss, _pairs),
    "loss.preference.orpo_loss": _taken(preference.orpo_loss, _pairs),
    "loss.preference.simpo_loss": _taken(preference.simpo_loss, _pairs),
    "loss.preference.kto_loss": _taken(preference.kto_loss, _pairs),
    "loss.preference.reward_pair_loss": _taken(preference.reward_pair_loss, _pairs),
    "loss.preference.sequence_sums": Entry(preference.sequence_sums, _sums),
    "loss.policy.ppo_clip_loss": _taken(policy.ppo_clip_loss, _policy),
    "loss.policy.grpo_loss": _taken(policy.grpo_loss, _policy),
    "loss.policy.gspo_loss": _taken(policy.gspo_loss, _of_rows),
    "loss.policy.cispo_loss": _taken(policy.cispo_loss, _policy),
    "loss.policy.sapo_loss": _taken(policy.sapo_loss, _policy),
    "loss.policy.vespo_loss": _taken(policy.vespo_loss, _policy),
    "loss.policy.group_advantages": Entry(policy.group_advantages, _advantages),
    "loss.PackedRollouts.from_padded": Entry(PackedRollouts.from_padded, _padded),
    "loss.mtp_targets": Entry(mtp_targets, _mtp),
}
