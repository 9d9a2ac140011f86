"""The losses' public functions, for ``tests.fuzz``."""

from __future__ import annotations

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


def _pairs(rng: random.Random) -> dict[str, Any]:
    return {
        "chosen": -torch.rand(3) - 0.1,
        "rejected": -torch.rand(3) - 0.1,
        "beta": rng.choice([0.1, 2]),
        "weights": rng.choice([None, torch.rand(3)]),
        "scale": rng.choice([None, 0.5]),
    }


def _dpo(rng: random.Random) -> dict[str, Any]:
    return {
        **_pairs(rng),
        "reference_chosen": -torch.rand(3),
        "reference_rejected": -torch.rand(3),
        "kind": rng.choice(["sigmoid", "robust", "exo_pair", "sigmoid_norm"]),
        "label_smoothing": 0.1,
        "chosen_tokens": torch.tensor([3, 4, 5]),
        "rejected_tokens": torch.tensor([3, 4, 5]),
    }


def _simpo(rng: random.Random) -> dict[str, Any]:
    return {**_pairs(rng), "margin": rng.choice([0.0, 1]), "label_smoothing": rng.choice([0.0, 0.1])}


def _kto(rng: random.Random) -> dict[str, Any]:
    return {
        "logps": -torch.rand(3),
        "reference_logps": -torch.rand(3),
        "desirable": torch.tensor([True, False, True]),
        "divergence": rng.choice([0.0, 0.5, torch.tensor(0.5)]),
        "beta": 0.1,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.5,
        "weights": rng.choice([None, torch.rand(3)]),
        "scale": rng.choice([None, 0.5]),
    }


def _reward(rng: random.Random) -> dict[str, Any]:
    pairs = {name: value for name, value in _pairs(rng).items() if name != "beta"}
    return {**pairs, "margin": rng.choice([0.0, torch.rand(3)]), "centre": rng.choice([0.0, 0.1])}


def _rollouts() -> PackedRollouts:
    return PackedRollouts.from_padded(torch.arange(8).view(2, 4), torch.ones(2, 4))


ROLLOUTS = _rollouts()


def _ppo(rng: random.Random) -> dict[str, Any]:
    return {
        "logp": -torch.rand(8),
        "old_logp": -torch.rand(8),
        "advantages": rng.choice([torch.randn(2), torch.randn(8)]),
        "rollouts": _rollouts(),
        "clip": 0.2,
        "clip_high": rng.choice([None, 0.28]),
        "dual_clip": rng.choice([None, 3.0]),
        "weights": rng.choice([None, torch.rand(8)]),
        "scale": rng.choice([None, 0.5]),
    }


def _grpo(rng: random.Random) -> dict[str, Any]:
    arguments = {name: value for name, value in _ppo(rng).items() if name != "dual_clip"}
    more = {"kind": rng.choice(["grpo", "dr_grpo", "token_mean"]), "largest_ratio": rng.choice([None, 4.0])}
    return {**arguments, **more, "reference_logp": -torch.rand(8), "beta": 0.1, "max_tokens": 4}


def _gspo(rng: random.Random) -> dict[str, Any]:
    dropped = ("dual_clip", "weights", "advantages")
    arguments = {name: value for name, value in _ppo(rng).items() if name not in dropped}
    return {**arguments, "advantages": torch.randn(2), "weights": rng.choice([None, torch.rand(2)])}


def _token_policy(*more: str) -> Callable[[random.Random], dict[str, Any]]:
    names = ("logp", "old_logp", "advantages", "rollouts", "weights", "scale")

    def made(rng: random.Random) -> dict[str, Any]:
        arguments = {name: value for name, value in _ppo(rng).items() if name in names}
        return arguments | {name: rng.choice([1.5, 3.0]) for name in more}

    return made


def _vespo(rng: random.Random) -> dict[str, Any]:
    names = ("logp", "old_logp", "advantages", "rollouts", "scale")
    return {name: value for name, value in _gspo(rng).items() if name in names} | {"k": (2.0, 3.0)}


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
    "loss.preference.dpo_loss": Entry(preference.dpo_loss, _dpo),
    "loss.preference.orpo_loss": Entry(preference.orpo_loss, _pairs),
    "loss.preference.simpo_loss": Entry(preference.simpo_loss, _simpo),
    "loss.preference.kto_loss": Entry(preference.kto_loss, _kto),
    "loss.preference.reward_pair_loss": Entry(preference.reward_pair_loss, _reward),
    "loss.preference.sequence_sums": Entry(preference.sequence_sums, _sums),
    "loss.policy.ppo_clip_loss": Entry(policy.ppo_clip_loss, _ppo),
    "loss.policy.grpo_loss": Entry(policy.grpo_loss, _grpo),
    "loss.policy.gspo_loss": Entry(policy.gspo_loss, _gspo),
    "loss.policy.cispo_loss": Entry(policy.cispo_loss, _token_policy("largest_ratio")),
    "loss.policy.sapo_loss": Entry(policy.sapo_loss, _token_policy("temperature", "temperature_negative")),
    "loss.policy.vespo_loss": Entry(policy.vespo_loss, _vespo),
    "loss.policy.group_advantages": Entry(policy.group_advantages, _advantages),
    "loss.PackedRollouts.from_padded": Entry(PackedRollouts.from_padded, _padded),
    "loss.mtp_targets": Entry(mtp_targets, _mtp),
}
