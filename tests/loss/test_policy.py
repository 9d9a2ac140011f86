"""Policy losses on packs of rollouts against a brute force token by token, and against TRL's own code."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from lightning_thd.loss import PackedRollouts, policy

ROWS, COLUMNS, PROMPT = 4, 9, 2


def make_rollouts() -> tuple[PackedRollouts, Tensor]:
    lengths = torch.tensor([9, 5, 3, 7])
    mask = (torch.arange(COLUMNS) < lengths[:, None]).long()
    response = mask * (torch.arange(COLUMNS) >= PROMPT)
    response[2] = 0  # a row without a response
    ids = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
    return PackedRollouts.from_padded(ids, mask, response_mask=response, pad_to=27), response.bool()


def padded_values(seed: int, response: Tensor) -> list[Tensor]:
    """Log-probabilities under policy, old policy and reference, and advantages; NaN outside the responses."""
    generator = torch.Generator().manual_seed(seed)
    logp, old, reference = -torch.rand(3, ROWS, COLUMNS, generator=generator, dtype=torch.float64) * 2
    values = [torch.where(response, x, math.nan) for x in (logp, old, reference)]
    return [*values, torch.tensor([1.0, -0.5, 2.0, 0.7], dtype=torch.float64)]


def outputs(values: list[Tensor], response: Tensor, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """TRL's trainer and inputs for the same rollouts, responses moved to the left."""
    width = int(response.sum(1).max())
    mask = torch.arange(width) < response.sum(1)[:, None]
    dense = []
    for x in values[:3]:
        out = torch.zeros(ROWS, width, dtype=torch.float64)
        out[mask] = x[response]
        dense.append(out)
    stand_in = MagicMock()
    stand_in.configure_mock(**{
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
        "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.3, "loss_type": "grpo",
        "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False, "aux_loss_enabled": False,
        "max_completion_length": 20, **settings,
    })  # fmt: skip
    stand_in.args = SimpleNamespace(
        delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1
    )
    stand_in.accelerator.gather.side_effect = torch.clone
    stand_in.accelerator.reduce.side_effect = lambda x, reduction: x
    stand_in.accelerator.num_processes = 1
    stand_in._get_per_token_logps_and_entropies.return_value = (dense[0], torch.zeros_like(dense[0]), None)
    prompt = torch.ones(ROWS, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": values[3], "old_per_token_logps": dense[1], "ref_per_token_logps": dense[2],
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    return stand_in, inputs


_GRPO = {"largest_ratio": 2.0, "max_tokens": 20}
# Ours, its settings, TRL's name of the loss, and what TRL is told besides.
LOSSES: dict[str, tuple[Any, dict[str, Any], str, dict[str, Any]]] = {
    **{
        kind: (
            policy.grpo_loss,
            {"kind": kind, "largest_ratio": 2.0, "max_tokens": 20},
            theirs,
            {"delta": 2.0},
        )
        for kind, theirs in (("grpo", "grpo"), ("dr_grpo", "dr_grpo"), ("token_mean", "dapo"))
    },
    "ppo": (policy.ppo_clip_loss, {}, "bnpo", {}),
    "gspo": (policy.gspo_loss, {}, "grpo", {"importance_sampling_level": "sequence"}),
    # GSPO whose rows count by their tokens
    "luspo": (policy.gspo_loss, {}, "luspo", {"importance_sampling_level": "sequence"}),
    "cispo": (policy.cispo_loss, {"largest_ratio": 0.3}, "cispo", {}),
    "sapo": (policy.sapo_loss, {"temperature": 2.0, "temperature_negative": 1.25}, "sapo", {}),
    "vespo": (policy.vespo_loss, {}, "vespo", {}),
}


KINDS = ("grpo", "dr_grpo", "token_mean")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "beta"),
    [*((name, 0.0) for name in LOSSES), *((name, 0.1) for name in (*KINDS, "gspo", "luspo"))],
)
def test_equal_to_trl(name: str, beta: float) -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    function, how, trl_kind, settings = LOSSES[name]
    options = dict(how)
    if "clip" in inspect.signature(function).parameters:
        options |= {"clip": 0.2, "clip_high": 0.3}
    rollouts, response = make_rollouts()
    values = padded_values(2, response)
    values[0].requires_grad_()
    logp, old, reference = (rollouts.pack(x, fill=math.nan) for x in values[:3])
    if name == "luspo":
        options["weights"] = rollouts.counts.double()
    if beta:
        options |= {"beta": beta, "reference_logp": reference}
    stand_in, inputs = outputs(
        values, response, **{"loss_type": trl_kind, "beta": beta, "delta": None, **settings}
    )
    stand_in.args.sapo_temperature_pos, stand_in.args.sapo_temperature_neg = 2.0, 1.25  # exact in fp32
    stand_in.args.vespo_k_pos, stand_in.args.vespo_lambda_pos = 2.0, 3.0
    stand_in.args.vespo_k_neg, stand_in.args.vespo_lambda_neg = 3.0, 2.0
    stand_in.get_gamma_weights = trainer.get_gamma_weights
    if name == "vespo":  # TRL's rows hold their advantages in a column then
        inputs["advantages"] = inputs["advantages"][:, None]
    theirs = trainer._compute_loss(stand_in, None, inputs)
    ours = function(logp, old, values[3], rollouts, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    mine, other = (torch.autograd.grad(loss, values[0], retain_graph=True)[0] for loss in (ours, theirs))
    torch.testing.assert_close(mine[response], other[response], rtol=1e-8, atol=1e-10)
    assert not mine[~response].nan_to_num(0.0).any()  # log-probabilities are NaN outside responses


def test_microbatches_with_a_scale_make_the_loss_of_the_step() -> None:
    rollouts, response = make_rollouts()
    values = padded_values(3, response)
    for kind, total in (("grpo", ROWS), ("token_mean", int(response.sum()))):
        whole = policy.grpo_loss(
            *(rollouts.pack(x, fill=math.nan) for x in values[:2]), values[3], rollouts, kind=kind
        )
        losses = []
        for part in (slice(0, 1), slice(1, 4)):
            ids = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)[part]
            mask = rollouts.unpack(torch.ones(rollouts.held.shape), of="token")[part].long()
            own = PackedRollouts.from_padded(ids, mask, response_mask=response[part].long())
            logp, old = (own.pack(x[part], fill=math.nan) for x in values[:2])
            losses.append(policy.grpo_loss(logp, old, values[3][part], own, kind=kind, scale=2 / total))  # type: ignore[arg-type]
        torch.testing.assert_close(torch.stack(losses).mean(), whole)


def test_weights_and_the_dual_clip() -> None:
    rollouts, response = make_rollouts()
    values = padded_values(4, response)
    (logp, old), advantages = (rollouts.pack(x, fill=math.nan) for x in values[:2]), values[3]
    weights = torch.rand(len(logp), dtype=torch.float64)
    loss = policy.ppo_clip_loss(logp, old, advantages, rollouts, weights=weights, dual_clip=1.1)
    counts = rollouts.batch.targets != -100
    ratio, a = (logp - old).exp(), torch.cat([advantages, advantages.new_zeros(1)])[rollouts.row]
    wanted = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    wanted = torch.where(a < 0, torch.minimum(wanted, -1.1 * a), wanted)
    torch.testing.assert_close(loss, (wanted * weights)[counts].sum() / counts.sum())
    by_row = torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.float64)
    one = policy.gspo_loss(logp, old, advantages, rollouts, weights=by_row, scale=1.0)
    ratios = rollouts.means(torch.where(counts, logp - old, 0.0)).exp()
    rows = -torch.minimum(ratios * advantages, ratios.clamp(1 - 3e-4, 1 + 4e-4) * advantages)
    torch.testing.assert_close(one, (rows * by_row)[rollouts.counts > 0].sum())


def test_nan_in_a_row_of_weight_0_reaches_no_gradient_of_gspo() -> None:
    rollouts, response = make_rollouts()
    values = padded_values(4, response)
    logp, old = (rollouts.pack(x) for x in values[:2])
    weights = torch.ones(ROWS, dtype=torch.float64)
    weights[1] = 0.0
    found = []
    for lost in (0.5, math.nan):
        leaf, blank = logp.clone().requires_grad_(), torch.where(rollouts.row == 1, lost, 0.0)
        reference, advantages = old + blank, torch.where(weights == 0, lost, values[3])
        loss = policy.gspo_loss(
            leaf, old + blank, advantages, rollouts, reference_logp=reference, beta=0.1, weights=weights
        )
        found.append((loss, *torch.autograd.grad(loss, leaf)))
    assert found[0][1].norm() > 0
    torch.testing.assert_close(found[1], found[0])


def test_group_advantages() -> None:
    assert policy.group_advantages(torch.tensor([1.0, 3.0]), 2, normalise=False).tolist() == [-1.0, 1.0]
    rewards = torch.rand(6, dtype=torch.float64)
    found = policy.group_advantages(rewards, 3)
    for i in range(6):
        group = rewards[i // 3 * 3 : i // 3 * 3 + 3]
        assert found[i].item() == pytest.approx(((rewards[i] - group.mean()) / (group.std() + 1e-4)).item())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_no_float_has_gives_a_finite_gradient(name: str, dtype: torch.dtype) -> None:
    """A token that the sampler thought impossible: e^2000 where the advantage is positive, or 0."""
    rollouts, response = make_rollouts()
    values = [x.to(dtype) for x in padded_values(0, response)]
    values[3][0], values[3][1] = 1.0, 0.0
    values[1][0, 4] -= 2_000.0
    values[1][1, 3] -= 2_000.0
    logp = rollouts.pack(values[0]).nan_to_num(0.0).requires_grad_()
    old = rollouts.pack(values[1]).nan_to_num(0.0)
    loss = LOSSES[name][0](logp, old, values[3], rollouts, **LOSSES[name][1])
    assert loss.isfinite()
    assert torch.autograd.grad(loss, logp)[0].isfinite().all()


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "token_mean", "cispo", "sapo"])
def test_a_token_of_weight_zero_touches_nothing(name: str) -> None:
    rollouts, response = make_rollouts()
    values = padded_values(0, response)
    logp, old, reference = (rollouts.pack(x).nan_to_num(0.0) for x in values[:3])
    at = int((rollouts.batch.targets != -100).nonzero()[0])
    weights = torch.ones_like(logp)
    weights[at] = 0.0
    function, how, *_ = LOSSES[name]
    penalty: dict[str, Any] = {"reference_logp": reference, "beta": 0.1} if "kind" in how else {}
    found = []
    of_slot = torch.cat([values[3], values[3].new_zeros(1)])[rollouts.row]
    for poison in (0.0, math.inf, -math.inf, math.nan):
        leaf, advantages = (torch.where(weights == 0, poison, x) for x in (logp, of_slot))
        leaf.requires_grad_()
        loss = function(leaf, old, advantages, rollouts, weights=weights, **how, **penalty)
        found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_advantages_of_as_many_rows_as_slots_are_refused() -> None:
    mask = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]])  # 4 rows in 4 slots
    ids = torch.arange(12).view(4, 3)
    logp, advantages = -torch.rand(5, dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    with pytest.raises(ValueError, match=r"4 rows and 4 slots.* pad_to=5\)"):
        policy.grpo_loss(logp[:4], logp[:4], advantages, PackedRollouts.from_padded(ids, mask))
    wider = PackedRollouts.from_padded(ids, mask, pad_to=5)
    for given in (advantages, wider.pack(advantages[:, None].expand(4, 3))):
        assert policy.grpo_loss(logp, logp, given, wider).item() == pytest.approx(-1.0 / 4)
    gates = [policy.sapo_loss(logp, logp, x, wider, temperature=0.5) for x in (advantages, advantages.int())]
    assert gates[0] == gates[1]
    single = PackedRollouts.from_padded(ids, torch.eye(3).repeat(2, 1)[:4].long())
    assert policy.grpo_loss(logp[:4], logp[:4], torch.ones(4).double(), single).item() == 0.0
