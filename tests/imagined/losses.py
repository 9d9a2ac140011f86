"""Losses, or families, on an imagined GPU against the CPU; a script.

Arguments: the compute capability, then nothing for every loss, which gives the CPU's values and whose second
call reads nothing, or names of families, which equal stock eager attention in fp32.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

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
from lightning_thd.models import register_thd
from tests.imagined.gpu import data, imagined_gpu
from tests.imagined.sample import CONFIG
from tests.models import matrix
from tests.models.families import build

LENGTHS = (40, 1, 23, 57)
# AdamW is not here: a gradient is compared as it comes. fp32 sums in other orders.
RELATIVE, ABSOLUTE = 2e-4, 1e-6


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
    """Return names, models, losses and what they are given, on the CPU."""
    scale = {"loss_scale": 0.01}
    plain = THDBatch.collate(_samples(), pad_to=128).replace(**scale)
    weighted = THDBatch.collate(_samples(weights=0.5)).replace(**scale)
    forked = THDBatch.collate(_forked(), share_prefixes=True).replace(**scale)
    found = []
    for kind, batch, losses in (
        ("plain", plain, PLAIN | UNSHARED | PREFERENCES),
        ("weighted", weighted, PLAIN),
        ("shared", forked, PLAIN | PREFERENCES),
        ("rollouts", _rollouts(share_prefixes=False), POLICIES),
        ("shared rollouts", _rollouts(share_prefixes=True), POLICIES),
    ):
        found += [(f"{kind} {name}", _dense, loss, batch) for name, loss in losses.items()]
    found += [(f"experts {name}", _experts, loss, plain) for name, loss in BALANCED.items()]
    return found


def run(model: Any, loss: Callable[[Any, Any], Tensor], given: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    value = loss(model, given)
    value.backward()
    return value.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(log: Any, make: Callable[[], Any], loss: Callable[[Any, Any], Tensor], given: Any) -> str:
    """Compare a loss with the CPU's; return what its second call reads, and uploads without pinned memory."""
    here, there = make(), make().cuda()
    wanted, gradients = run(here, loss, given)
    run(there, loss, given.to("cuda"))
    moved = given.to("cuda")
    log.clear()
    value, found = run(there, loss, moved)
    seen = [" ".join(map(str, read)) for read in log.reads]
    seen += [f"{name} {place}" for name, _, pinned, free, place in log.uploads if not (pinned and free)]
    torch.testing.assert_close(data(value), wanted, rtol=RELATIVE, atol=ABSOLUTE)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        near = {"rtol": RELATIVE, "atol": ABSOLUTE + RELATIVE * float(gradient.abs().max())}
        torch.testing.assert_close(
            data(found[name]), gradient, **near, msg=lambda said, n=name: f"{n}: {said}"
        )
    return ", ".join(seen)


def compare_family(log: Any, name: str) -> str:
    """Compare logits, loss and gradients of a family with the oracle of ``tests/models``."""
    state, wanted = matrix.oracle(name)
    model = build(name, "thd")
    model.load_state_dict(state)
    model = model.eval().to("cuda")
    logits, targets = [], []
    for batch in (pack.to("cuda") for pack in matrix.packs()):
        logits += batch.unpack(model(**batch.hf_kwargs()).logits.float())
        targets += batch.unpack(batch.targets)
    found = matrix.result_of(model, logits, targets)
    gradients = {key: data(value) for key, value in found.gradients.items()}
    here = matrix.Result([data(x) for x in found.logits], data(found.loss), gradients)
    matrix.assert_same(here, wanted, tolerance=1e-5)
    return ""


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    register_thd()
    wrong = []
    capability = tuple(int(part) for part in sys.argv[1].split("."))
    families = [(name, compare_family, (name,)) for name in sys.argv[2:]]
    for name, function, given in families or [(name, compare, rest) for name, *rest in cases()]:
        with imagined_gpu(capability=capability) as log:
            try:
                said = function(log, *given)
            except Exception as error:  # the others still run
                said = f"{type(error).__name__} {str(error)[:400]}"
        wrong += [name] if said else []
        sys.stdout.write(f"{name}: {said or 'equal'}\n")
        sys.stdout.flush()
    sys.exit(f"different, or they read or wait: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
