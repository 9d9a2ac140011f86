"""Every loss on a tiny model, with its model and what it is given: for comparisons of devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_thd import THDBatch, causal_lm_loss
from lightning_thd.loss import (
    PackedRollouts,
    causal_lm_logprobs,
    causal_lm_loss_and_stats,
    dft_loss,
    fused_linear_distillation,
    policy,
    preference,
)
from tests.models.families import build

LENGTHS = (40, 1, 23, 57)
SIZES = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
CONFIG = Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16)


def _samples(**more: Any) -> list[dict[str, Any]]:
    return [{"input_ids": [(7 * i + j) % 60 + 1 for j in range(n)], **more} for i, n in enumerate(LENGTHS)]


def _forked() -> list[dict[str, Any]]:
    return [{"input_ids": [*range(1, 20), *range(30 + i, 36 + 2 * i)]} for i in range(4)]


def _rollouts(*, share_prefixes: bool) -> PackedRollouts:
    ids = torch.cat([torch.arange(1, 9).expand(4, 8), torch.arange(20, 44).view(4, 6)], dim=1)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    response = mask.clone()
    response[:, :8] = 0
    return PackedRollouts.from_padded(ids, mask, response_mask=response, share_prefixes=share_prefixes)


def _policy(loss: Callable[..., Tensor]) -> Callable[[Any, PackedRollouts], Tensor]:
    def run(model: Any, rollouts: PackedRollouts) -> Tensor:
        logp = causal_lm_logprobs(model, rollouts.batch, entropy=False).logp
        advantages = policy.group_advantages(rollouts.counts.float() + rollouts.counts.cumsum(0), 2)
        return loss(logp, logp.detach() - 0.1, advantages, rollouts)

    return run


def _pairs(loss: Callable[..., Tensor], references: int) -> Callable[[Any, THDBatch], Tensor]:
    def run(model: Any, batch: THDBatch) -> Tensor:
        sums = preference.sequence_sums(causal_lm_logprobs(model, batch).logp, batch) / 60.0 - 0.01
        return loss(sums[0::2], sums[1::2], *(sums.detach()[i::2] - 0.1 for i in range(references)))

    return run


def _kto(model: Any, batch: THDBatch) -> Tensor:
    sums = preference.sequence_sums(causal_lm_logprobs(model, batch).logp, batch)
    return preference.kto_loss(sums, sums.detach() - 0.3, torch.arange(4, device=sums.device) % 2 == 0)


def _distilled(**options: Any) -> Callable[[Any, THDBatch], Tensor]:
    def run(model: Any, batch: THDBatch) -> Tensor:
        hidden = model.model(**batch.hf_kwargs()).last_hidden_state[0]
        teacher = {"teacher_hidden": hidden.detach().flip(0), "teacher_weight": model.lm_head.weight.detach()}
        how = {**teacher, "loss_tokens": batch.loss_tokens, **options}
        return fused_linear_distillation(hidden, model.lm_head.weight, batch.targets, **how)

    return run


def _stats(model: Any, batch: THDBatch) -> Tensor:
    loss, stats = causal_lm_loss_and_stats(model, batch)
    return loss + 0 * stats.correct


def _of_tokens(**options: Any) -> Callable[[Any, THDBatch], Tensor]:
    return lambda model, batch: causal_lm_loss(model, batch, **options)


PLAIN: dict[str, Callable[[Any, Any], Tensor]] = {
    "tokens": _of_tokens(),
    "sequences": _of_tokens(reduction="sequences"),
    "smoothed": _of_tokens(label_smoothing=0.1, z_loss=1e-3),
    "stats": _stats,
    "entropy": lambda model, batch: causal_lm_logprobs(model, batch).entropy.sum(),
    "dft": lambda model, batch: dft_loss(causal_lm_logprobs(model, batch).logp, batch),
}
UNSHARED: dict[str, Callable[[Any, Any], Tensor]] = {
    kind: _distilled(kind=kind, temperature=2.0) for kind in ("kl", "reverse_kl", "jsd")
}
PREFERENCES: dict[str, Callable[[Any, Any], Tensor]] = {
    "dpo": _pairs(preference.dpo_loss, 2),
    "kto": _kto,
    **{name: _pairs(getattr(preference, f"{name}_loss"), 0) for name in ("orpo", "simpo", "reward_pair")},
}
POLICIES: dict[str, Callable[[Any, Any], Tensor]] = {
    name: _policy(getattr(policy, f"{name}_loss"))
    for name in ("ppo_clip", "grpo", "gspo", "cispo", "sapo", "vespo")
}
BALANCED = {
    name: _of_tokens(router_balance=name, router_z_loss=1e-3) for name in ("microbatch", "sequence", "step")
}


def _dense() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, attn_implementation="thd").train()


def _experts() -> Any:
    torch.manual_seed(0)
    model = build("qwen3_moe", "thd").train()
    model.set_experts_implementation("batched_mm")  # in fp32 torch reads the offsets of a grouped one
    model.config.output_router_logits = True
    return model


def cases() -> list[tuple[str, Callable[[], Any], Callable[[Any, Any], Tensor], Any]]:
    scale = {"loss_scale": 0.01}
    plain = THDBatch.collate(_samples(), pad_to=128).replace(**scale)
    weighted = THDBatch.collate(_samples(weights=0.5)).replace(**scale)
    forked = THDBatch.collate(_forked(), share_prefixes=True).replace(**scale)
    named = []

    for kind, batch, losses in (
        ("plain", plain, PLAIN | UNSHARED | PREFERENCES),
        ("weighted", weighted, PLAIN),
        ("shared", forked, PLAIN | PREFERENCES),
        ("rollouts", _rollouts(share_prefixes=False), POLICIES),
        ("shared rollouts", _rollouts(share_prefixes=True), POLICIES),
    ):
        named += [(f"{kind} {name}", _dense, loss, batch) for name, loss in losses.items()]

    named += [(f"experts {name}", _experts, loss, plain) for name, loss in BALANCED.items()]
    return named


def run(model: Any, loss: Callable[[Any, Any], Tensor], given: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    value = loss(model, given)
    value.backward()
    return value.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
