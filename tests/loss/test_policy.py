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

ROWS = 4
COLUMNS = 9
PROMPT = 2


def make_rollouts() -> tuple[PackedRollouts, Tensor]:
    """Four rollouts, one without a response, and the mask of their responses ``[rows, columns]``."""
    lengths = torch.tensor([9, 5, 3, 7])
    mask = (torch.arange(COLUMNS) < lengths[:, None]).long()
    response = mask * (torch.arange(COLUMNS) >= PROMPT)
    response[2] = 0  # a row without a response
    ids = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
    return PackedRollouts.from_padded(ids, mask, response_mask=response, pad_to=27), response.bool()


def padded_values(seed: int, response: Tensor) -> list[Tensor]:
    """Log-probabilities under policy, old policy and reference, and advantages; NaN outside the responses."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(3, ROWS, COLUMNS, generator=generator, dtype=torch.float64) * 2
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.7], dtype=torch.float64)
    return [*(torch.where(response, x, math.nan) for x in log_probs), advantages]


def trls_trainer(values: list[Tensor], response: Tensor, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """A stand-in for TRL's trainer, and its inputs for the same rollouts, responses moved to the left."""
    width = int(response.sum(1).max())
    mask = torch.arange(width) < response.sum(1)[:, None]
    moved = []
    for x in values[:3]:
        row = torch.zeros(ROWS, width, dtype=torch.float64)
        row[mask] = x[response]
        moved.append(row)
    logp, old, reference = moved

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
    stand_in._get_per_token_logps_and_entropies.return_value = (logp, torch.zeros_like(logp), None)

    prompt = torch.ones(ROWS, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": values[3], "old_per_token_logps": old, "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    return stand_in, inputs


_GRPO = {"largest_ratio": 2.0, "max_tokens": 20}
# Our function, its settings, TRL's name of the loss, and the other settings of TRL's trainer.
LOSSES: dict[str, tuple[Any, dict[str, Any], str, dict[str, Any]]] = {
    "grpo": (policy.grpo_loss, {"kind": "grpo", **_GRPO}, "grpo", {"delta": 2.0}),
    "dr_grpo": (policy.grpo_loss, {"kind": "dr_grpo", **_GRPO}, "dr_grpo", {"delta": 2.0}),
    "token_mean": (policy.grpo_loss, {"kind": "token_mean", **_GRPO}, "dapo", {"delta": 2.0}),
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
    """A packed loss and its gradient equal those of TRL's own code on padded rows, with and without KL."""
    pytest.importorskip("trl", minversion="1.15")  # whose losses take log-probabilities, not logits
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    function, loss_options, trls_name, trls_settings = LOSSES[name]
    rollouts, response = make_rollouts()
    values = padded_values(2, response)
    values[0].requires_grad_()
    logp, old, reference = (rollouts.pack(x, fill=math.nan) for x in values[:3])

    options = dict(loss_options)
    if "clip" in inspect.signature(function).parameters:
        options |= {"clip": 0.2, "clip_high": 0.3}
    if name == "luspo":
        options["weights"] = rollouts.counts.double()
    if beta:
        options |= {"beta": beta, "reference_logp": reference}
    ours = function(logp, old, values[3], rollouts, **options)

    settings = {"loss_type": trls_name, "beta": beta, "delta": None, **trls_settings}
    stand_in, inputs = trls_trainer(values, response, **settings)
    stand_in.args.sapo_temperature_pos = 2.0
    stand_in.args.sapo_temperature_neg = 1.25  # exact in fp32
    stand_in.args.vespo_k_pos = 2.0
    stand_in.args.vespo_lambda_pos = 3.0
    stand_in.args.vespo_k_neg = 3.0
    stand_in.args.vespo_lambda_neg = 2.0
    stand_in.get_gamma_weights = trainer.get_gamma_weights
    if name == "vespo":  # TRL's rows hold their advantages in a column then
        inputs["advantages"] = inputs["advantages"][:, None]
    theirs = trainer._compute_loss(stand_in, None, inputs)

    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    our_gradient = torch.autograd.grad(ours, values[0], retain_graph=True)[0]
    their_gradient = torch.autograd.grad(theirs, values[0])[0]
    torch.testing.assert_close(our_gradient[response], their_gradient[response], rtol=1e-8, atol=1e-10)
    assert not our_gradient[~response].nan_to_num(0.0).any()  # log-probabilities are NaN outside responses


def test_microbatches_with_a_scale_make_the_loss_of_the_step() -> None:
    """The mean of two microbatches' losses is the loss of all rows in one batch."""
    rollouts, response = make_rollouts()
    values = padded_values(3, response)
    ids = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
    mask = rollouts.unpack(torch.ones(rollouts.held.shape), of="token").long()
    for kind, total in (("grpo", ROWS), ("token_mean", int(response.sum()))):
        logp, old = (rollouts.pack(x, fill=math.nan) for x in values[:2])
        whole = policy.grpo_loss(logp, old, values[3], rollouts, kind=kind)  # type: ignore[arg-type]

        losses = []
        for rows in (slice(0, 1), slice(1, 4)):
            part = PackedRollouts.from_padded(ids[rows], mask[rows], response_mask=response[rows].long())
            logp, old = (part.pack(x[rows], fill=math.nan) for x in values[:2])
            losses.append(policy.grpo_loss(logp, old, values[3][rows], part, kind=kind, scale=2 / total))  # type: ignore[arg-type]
        torch.testing.assert_close(torch.stack(losses).mean(), whole)


def test_weights_and_the_dual_clip() -> None:
    """Weights of tokens and of rows multiply their terms; the dual clip bounds the loss where a < 0."""
    rollouts, response = make_rollouts()
    values = padded_values(4, response)
    logp, old = (rollouts.pack(x, fill=math.nan) for x in values[:2])
    advantages = values[3]
    has_target = rollouts.batch.targets != -100

    of_tokens = torch.rand(len(logp), dtype=torch.float64)
    loss = policy.ppo_clip_loss(logp, old, advantages, rollouts, weights=of_tokens, dual_clip=1.1)
    ratio = (logp - old).exp()
    a = torch.cat([advantages, advantages.new_zeros(1)])[rollouts.row]  # the last is that of padding
    expected = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    expected = torch.where(a < 0, torch.minimum(expected, -1.1 * a), expected)
    torch.testing.assert_close(loss, (expected * of_tokens)[has_target].sum() / has_target.sum())

    of_rows = torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.float64)
    loss = policy.gspo_loss(logp, old, advantages, rollouts, weights=of_rows, scale=1.0)
    ratios = rollouts.means(torch.where(has_target, logp - old, 0.0)).exp()
    expected = -torch.minimum(ratios * advantages, ratios.clamp(1 - 3e-4, 1 + 4e-4) * advantages)
    torch.testing.assert_close(loss, (expected * of_rows)[rollouts.counts > 0].sum())


def test_nan_in_a_row_of_weight_0_reaches_no_gradient_of_gspo() -> None:
    """Whatever stands in a row of weight 0, number or NaN, loss and gradient are the same."""
    rollouts, response = make_rollouts()
    values = padded_values(4, response)
    logp, old = (rollouts.pack(x) for x in values[:2])
    weights = torch.ones(ROWS, dtype=torch.float64)
    weights[1] = 0.0

    results = []
    for poison in (0.5, math.nan):
        leaf = logp.clone().requires_grad_()
        poisoned_old = old + torch.where(rollouts.row == 1, poison, 0.0)
        advantages = torch.where(weights == 0, poison, values[3])
        loss = policy.gspo_loss(
            leaf,
            poisoned_old,
            advantages,
            rollouts,
            reference_logp=poisoned_old,
            beta=0.1,
            weights=weights,
        )
        results.append((loss, *torch.autograd.grad(loss, leaf)))
    assert results[0][1].norm() > 0
    torch.testing.assert_close(results[1], results[0])


def test_group_advantages() -> None:
    """An advantage is the reward minus its group's mean, divided by the group's deviation if asked."""
    assert policy.group_advantages(torch.tensor([1.0, 3.0]), 2, normalise=False).tolist() == [-1.0, 1.0]
    rewards = torch.rand(6, dtype=torch.float64)
    advantages = policy.group_advantages(rewards, 3)
    for i in range(6):
        first = i // 3 * 3
        group = rewards[first : first + 3]
        expected = (rewards[i] - group.mean()) / (group.std() + 1e-4)
        assert advantages[i].item() == pytest.approx(expected.item())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_no_float_has_gives_a_finite_gradient(name: str, dtype: torch.dtype) -> None:
    """A token that the sampler thought impossible: e^2000 where the advantage is positive, or 0."""
    rollouts, response = make_rollouts()
    values = [x.to(dtype) for x in padded_values(0, response)]
    values[3][0] = 1.0
    values[3][1] = 0.0
    values[1][0, 4] -= 2_000.0
    values[1][1, 3] -= 2_000.0
    logp = rollouts.pack(values[0]).nan_to_num(0.0).requires_grad_()
    old = rollouts.pack(values[1]).nan_to_num(0.0)

    function, options, *_ = LOSSES[name]
    loss = function(logp, old, values[3], rollouts, **options)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, logp)[0].isfinite().all()


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "token_mean", "cispo", "sapo"])
def test_a_token_of_weight_zero_touches_nothing(name: str) -> None:
    """Whatever log-probability and advantage a token of weight 0 has, loss and gradient are the same."""
    rollouts, response = make_rollouts()
    values = padded_values(0, response)
    logp, old, reference = (rollouts.pack(x).nan_to_num(0.0) for x in values[:3])
    advantages = torch.cat([values[3], values[3].new_zeros(1)])[rollouts.row]
    first_target = int((rollouts.batch.targets != -100).nonzero()[0])
    weights = torch.ones_like(logp)
    weights[first_target] = 0.0

    function, loss_options, *_ = LOSSES[name]
    options = dict(loss_options)
    if function is policy.grpo_loss:
        options |= {"reference_logp": reference, "beta": 0.1}
    results = []
    for poison in (0.0, math.inf, -math.inf, math.nan):
        leaf = torch.where(weights == 0, poison, logp).requires_grad_()
        poisoned = torch.where(weights == 0, poison, advantages)
        loss = function(leaf, old, poisoned, rollouts, weights=weights, **options)
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_advantages_of_as_many_rows_as_slots_are_refused() -> None:
    """Four advantages could be of rows or of slots if both are four; with other numbers both are taken."""
    mask = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]])  # 4 rows in 4 slots
    ids = torch.arange(12).view(4, 3)
    logp = -torch.rand(5, dtype=torch.float64)
    of_rows = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    with pytest.raises(ValueError, match=r"4 rows and 4 slots.* pad_to=5\)"):
        policy.grpo_loss(logp[:4], logp[:4], of_rows, PackedRollouts.from_padded(ids, mask))

    wider = PackedRollouts.from_padded(ids, mask, pad_to=5)
    of_slots = wider.pack(of_rows[:, None].expand(4, 3))
    for advantages in (of_rows, of_slots):
        assert policy.grpo_loss(logp, logp, advantages, wider).item() == pytest.approx(-1.0 / 4)
    gate = policy.sapo_loss(logp, logp, of_rows, wider, temperature=0.5)
    assert gate == policy.sapo_loss(logp, logp, of_rows.int(), wider, temperature=0.5)

    without_targets = PackedRollouts.from_padded(ids, torch.eye(3).repeat(2, 1)[:4].long())
    loss = policy.grpo_loss(logp[:4], logp[:4], torch.ones(4).double(), without_targets)
    assert loss.item() == 0.0
