"""The losses' public functions, for ``tests.fuzz``."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import torch

from lightning_thd import loss
from lightning_thd.batch import THDBatch
from lightning_thd.loss import PackedRollouts, static_shapes
from tests.batch.fuzz_table import BATCH
from tests.fuzz import Entry
from tests.tiny import tiny_llama

MODEL = tiny_llama(torch.float32)
BASE = MODEL.model  # without its head
ROLES = THDBatch.collate([{"query": [1, 2], "positive": [3, 4], "negative": [5]}])
FIVE = THDBatch.collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])


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
        "rows": rng.choice([None, torch.tensor([0, 1]), torch.tensor([True, False, True])]),
        "entropy": rng.random() < 0.5,
        "token_weights": rng.choice([None, 2.0, torch.rand(3)]),
        "label_smoothing": rng.choice([0.0, 0.1]),
        "z_loss": rng.choice([0.0, 1e-4]),
        "reduction": rng.choice(["sum", "mean"]),
        "teacher_hidden": torch.randn(3, 5),
        "teacher_weight": torch.randn(7, 5),
        "teacher_bias": rng.choice([None, torch.randn(7)]),
        "teacher_softcap": rng.choice([None, 3.0]),
        "teacher_logit_scale": 1.0,
        "kind": rng.choice(["kl", "reverse_kl", "jsd"]),
        "alpha": rng.choice([1.0, 0.5, 0.0]),
        "beta": 0.5,
    }


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


def _of_model(rng: random.Random) -> dict[str, Any]:
    return {
        "model": MODEL,
        "batch": BATCH,
        "reduction": rng.choice(["tokens", "sequences"]),
        "weights": rng.choice([None, torch.rand(3)]),
        "label_smoothing": rng.choice([0.0, 0.1]),
        "z_loss": rng.choice([None, 1e-4]),
        "mtp_weight": 0.3,
        "router_balance": None,
        "router_z_loss": 0.0,
        "temperature": 0.5,
        "entropy": True,
    }


def _of_five(rng: random.Random) -> dict[str, Any]:
    values = {name: -torch.rand(5) for name in ("values", "losses", "logp")}
    return {**values, "batch": FIVE, "weights": rng.choice([None, torch.ones(5)])}


def _contrastive(rng: random.Random) -> dict[str, Any]:
    dims = rng.choice([None, (4, 2)])
    return {
        "queries": torch.randn(2, 4),
        "documents": torch.randn(3, 4),
        "pairs": rng.choice([None, [[0, 1], [1, 0]]]),
        "temperature": rng.choice([0.05, 1]),
        "symmetric": rng.random() < 0.5,
        "normalize": rng.random() < 0.5,
        "dims": dims,
        "dim_weights": None if dims is None else rng.choice([None, (1.0, 0.5)]),
    }


def _embeddings(rng: random.Random) -> dict[str, Any]:
    options = _contrastive(rng)
    return {
        **options,
        "model": BASE if options["dims"] is None else torch.randn(3, 4),
        "batch": ROLES,
        "pooling": rng.choice(["last", "first", "mean"]),
        "group": None,
    }


def _of_base(rng: random.Random) -> dict[str, Any]:
    return {**_embeddings(rng), "model": BASE}


def _others(rng: random.Random) -> dict[str, Any]:
    return {
        **{n: getattr(_rollouts(), n) for n in PackedRollouts.__dataclass_fields__},
        "input_ids": torch.arange(8).view(2, 4),
        "attention_mask": torch.ones(2, 4),
        "response_mask": rng.choice([None, torch.ones(2, 4)]),
        "align": None,
        "pad_to": rng.choice([None, 9]),
        "targets": torch.tensor([6, 7, -100, 9, -100]),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
        "depth": rng.choice([0, 1, 9]),
        "rewards": torch.rand(6),
        "group_size": rng.choice([2, 3]),
        "normalise": True,
        "epsilon": 1e-4,
    }


def _static() -> None:
    with static_shapes():
        pass


# The functions, and what makes arguments of these names for them.
_MADE: dict[Callable[[random.Random], dict[str, Any]], str] = {
    _linear: "fused_linear_logprobs fused_linear_cross_entropy fused_linear_distillation",
    _of_model: "causal_lm_loss causal_lm_loss_and_stats causal_lm_logprobs",
    _pairs: "preference.dpo_loss preference.orpo_loss preference.simpo_loss preference.kto_loss "
    "preference.reward_pair_loss",
    _policy: "policy.ppo_clip_loss policy.grpo_loss policy.cispo_loss policy.sapo_loss policy.vespo_loss",
    _of_rows: "policy.gspo_loss",
    _of_five: "dft_loss log_token_losses preference.sequence_sums",
    _contrastive: "contrastive.pair_losses",
    _of_base: "contrastive.embed",
    _embeddings: "contrastive.info_nce",
    _others: "PackedRollouts PackedRollouts.from_padded mtp_targets policy.group_advantages",
}


def _entry(name: str, every: Callable[[random.Random], dict[str, Any]]) -> Entry:
    function: Any = loss
    for part in name.split("."):
        function = getattr(function, part)
    names = inspect.signature(function).parameters
    return Entry(function, lambda rng: {n: value for n, value in every(rng).items() if n in names})


TABLE = {
    "loss.static_shapes": Entry(_static, lambda _: {}),
    **{f"loss.{name}": _entry(name, made) for made, row in _MADE.items() for name in row.split()},
}
