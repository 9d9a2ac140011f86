"""Preference losses against a brute force written row by row, and against TRL's own code."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from lightning_thd.loss import preference
from lightning_thd.loss.preference import DPOKind

KINDS = get_args(DPOKind)
SORTED = ("aot", "aot_unpaired")  # over the pairs of a step, so that no pair has a loss of its own
SMOOTH = ("robust", "exo_pair")


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def numbers(count: int, *, below_zero: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    rows = -torch.rand(4, count, generator=generator, dtype=torch.float64) * 5 - 0.05
    return [row.requires_grad_() for row in (rows if below_zero else rows + 2.5)]


def outputs_of(logps: Tensor) -> MagicMock:
    """A model whose fused head in TRL gives these log-probabilities; the rest is for TRL's metrics."""
    zeros = torch.zeros_like(logps)
    return MagicMock(
        return_value=SimpleNamespace(log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    )


def trl_trainer(**settings: Any) -> MagicMock:
    """What TRL's loss method reads of its trainer, on one rank."""
    stand_in = MagicMock(aux_loss_enabled=False, precompute_ref_logps=False, _total_train_tokens=0)
    stand_in.configure_mock(**settings)
    stand_in.accelerator.gather.side_effect = stand_in.accelerator.gather_for_metrics.side_effect = (
        torch.clone
    )
    stand_in.accelerator.device = torch.device("cpu")
    stand_in._tp_size = 1
    return stand_in


@pytest.mark.parametrize("kind", list(KINDS))
def test_dpo_equals_trl(kind: str) -> None:
    pytest.importorskip("trl", minversion="1.15")  # whose losses take log-probabilities, not logits
    trainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    generator = torch.Generator().manual_seed(0)
    pairs = 3
    columns = 7
    policy, reference = (-torch.rand(2 * pairs, columns, generator=generator) * 2 for _ in range(2))
    mask = torch.ones(2 * pairs, columns + 1, dtype=torch.long)

    for row, length in enumerate((7, 3, 5, 2, 6, 4)):
        mask[row, length + 1 :] = 0
        policy[row, length:] = 0.0
        reference[row, length:] = 0.0

    mask[:, 0] = 0  # the prompt
    e = 0.1 if kind in (*SMOOTH, *SORTED) else 0.0
    policy.requires_grad_()
    model = outputs_of(policy)
    stand_in = trl_trainer(
        loss_types=[kind], loss_weights=[1.0], beta=0.3, label_smoothing=e, ld_alpha=None, model=model,
        f_divergence_type="reverse_kl", use_weighting=False, ref_model=outputs_of(reference),
    )  # fmt: skip
    stand_in.args.discopop_tau = 0.05
    inputs = {
        "input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask,
    }  # fmt: skip
    theirs = trainer._compute_loss(stand_in, model, inputs, return_outputs=False)
    sums = [x.sum(1).chunk(2) for x in (policy, reference)]
    chosen_tokens, rejected_tokens = mask.sum(1).chunk(2)
    ours = preference.dpo_loss(
        sums[0][0], sums[0][1], sums[1][0], sums[1][1], kind=kind, beta=0.3,  # type: ignore[arg-type]
        label_smoothing=e, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens,
    )  # fmt: skip

    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(ours, policy, retain_graph=True),
        torch.autograd.grad(theirs, policy),
        rtol=1e-5,
        atol=1e-6,
    )


def test_orpo_equals_trl() -> None:
    chosen, rejected, *_ = numbers(5)
    ours = preference.orpo_loss(chosen, rejected, beta=0.2)
    for tiny in (-1e-12, -800.0):
        edge = torch.tensor([tiny], dtype=torch.float64, requires_grad=True)
        loss = preference.orpo_loss(edge, torch.tensor([-1.0], dtype=torch.float64))
        assert torch.autograd.grad(loss, edge)[0].isfinite()
        assert loss.isfinite()
    trainer = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    stand_in = SimpleNamespace(beta=0.2, accelerator=SimpleNamespace(device="cpu"))
    losses = trainer.odds_ratio_loss(stand_in, chosen, rejected)[0]
    assert ours.item() == pytest.approx(-losses.mean().item(), rel=1e-5)


@pytest.mark.parametrize("e", [0.0, 0.1])
def test_simpo_equals_trl(e: float) -> None:
    chosen, rejected, *_ = numbers(5)
    ours = preference.simpo_loss(chosen, rejected, beta=2.0, margin=0.7, label_smoothing=e)
    trainer = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    stand_in = SimpleNamespace(
        alpha=0.0, beta=2.0, loss_type="simpo", simpo_gamma=0.7, label_smoothing=e,
        accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    assert ours.item() == pytest.approx(
        trainer.cpo_loss(stand_in, chosen, rejected)[0].mean().item(), rel=1e-8
    )


@pytest.mark.parametrize("divergence", [False, True])
def test_kto_equals_trl(divergence: bool) -> None:
    pytest.importorskip("trl", minversion="1.15")  # whose losses take log-probabilities, not logits
    trainer = pytest.importorskip("trl.trainer.kto_trainer").KTOTrainer
    generator = torch.Generator().manual_seed(0)
    policy, reference = (-torch.rand(6, 4, generator=generator) for _ in range(2))
    kl, ref_kl = (-torch.rand(6, generator=generator) * (1 + i) for i in range(2))
    models = outputs_of(policy), outputs_of(reference)
    stand_in = trl_trainer(
        loss_type="kto" if divergence else "apo_zero_unpaired", calculate_KL=divergence, beta=0.3,
        desirable_weight=1.5, undesirable_weight=0.5, ref_model=models[1],
    )  # fmt: skip
    stand_in._compute_kl_logps.side_effect = lambda model, _: kl if model is models[0] else ref_kl
    mask = torch.ones(6, 5, dtype=torch.long)
    labels = [True, False, False, True, True, False]
    batch = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "label": torch.tensor(labels),
    }
    theirs = trainer._compute_loss(stand_in, models[0], batch, return_outputs=False)
    ours = preference.kto_loss(
        policy.sum(1), reference.sum(1), torch.tensor(labels), beta=0.3, desirable_weight=1.5,
        undesirable_weight=0.5, divergence=(kl - ref_kl).mean().clamp_min(0) if divergence else 0.0,
    )  # fmt: skip
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs

    torch.testing.assert_close(ours, theirs.nanmean(), rtol=1e-6, atol=1e-6)


def test_reward_pairs_equal_their_rows() -> None:
    chosen, rejected, margins, _ = numbers(5, below_zero=False)
    rows = [
        -math.log(sigmoid(c - r - m)) + 0.1 * (c + r) ** 2
        for c, r, m in zip(chosen.tolist(), rejected.tolist(), margins.tolist(), strict=True)
    ]
    ours = preference.reward_pair_loss(chosen, rejected, margin=margins, centre=0.1)
    assert ours.item() == pytest.approx(sum(rows) / 5, rel=1e-8)


LOSSES: dict[str, Any] = {
    **{kind: (preference.dpo_loss, 4, {"kind": kind}) for kind in KINDS},
    "orpo": (preference.orpo_loss, 2, {}),
    "simpo": (preference.simpo_loss, 2, {"label_smoothing": 0.1}),
    "reward": (preference.reward_pair_loss, 2, {"centre": 0.1}),
    "kto": (preference.kto_loss, 2, {"desirable": True}),
}


def settings_of(name: str, count: int) -> dict[str, Any]:
    settings = dict(LOSSES[name][2])
    if name in ("ipo", "sigmoid_norm"):
        settings |= {"chosen_tokens": torch.full((count,), 3), "rejected_tokens": torch.full((count,), 2)}
    if name in SMOOTH:
        settings["label_smoothing"] = 0.1
    if name == "kto":
        settings["desirable"] = torch.arange(count) % 2 == 0
    return settings


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in SORTED])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_weights_and_scale_are_those_of_single_pairs_and_no_weight_touches_nothing(
    name: str, poison: float
) -> None:
    function, rows, _ = LOSSES[name]
    clean = numbers(4)[:rows]
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5]).double()
    settings = settings_of(name, 4)
    one = [{k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in settings.items()} for i in range(4)]
    each = torch.stack([function(*(row[i : i + 1] for row in clean), **one[i]) for i in range(4)])

    torch.testing.assert_close(function(*clean, **settings), each.mean())
    leaves = [torch.where(weights == 0, poison, row.detach()).requires_grad_() for row in clean]

    for how, divisor in (({}, weights.sum()), ({"scale": 0.25}, 4.0)):
        ours = function(*leaves, weights=weights, **settings, **how)
        wanted = (each * weights).sum() / divisor
        torch.testing.assert_close(ours, wanted)
        gradients = torch.autograd.grad(ours, leaves, materialize_grads=True)
        expected = torch.autograd.grad(wanted, clean, retain_graph=True, materialize_grads=True)
        torch.testing.assert_close(gradients, expected)
        assert not any(gradient[1] for gradient in gradients)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("distance", [0.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_and_huge_margins_have_finite_losses_and_gradients(
    name: str, distance: float, dtype: torch.dtype
) -> None:
    """The other way round too; a difference of 1,000 nats is e^1000, which no float has."""
    function, rows, _ = LOSSES[name]
    ones = torch.full((2,), -1.0, dtype=dtype)
    away = ones - torch.tensor([0.0, distance], dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in (away, away.flip(0), ones, ones)[:rows]]
    loss = function(*leaves, **settings_of(name, 2))
    assert loss.isfinite()
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_references_get_no_gradient_and_the_divergence_of_kto_is_at_least_0() -> None:
    """A reference computed without no_grad would pull the policy's own weights the other way."""
    for name in ("sigmoid", "aot", "ipo", "kto"):
        function, rows, _ = LOSSES[name]
        leaves = numbers(4)[: max(2, rows)]
        loss = function(*leaves, **settings_of(name, 4))
        *_, last = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert last is None, name
    logps, references, *_ = numbers(4)
    losses = [
        preference.kto_loss(logps, references, torch.ones(4).bool(), divergence=below)
        for below in (0.0, -1.0, torch.tensor([[-1.0]]))
    ]
    assert len({loss.item() for loss in losses}) == 1


def test_a_response_of_no_probability_and_one_that_is_certain() -> None:
    impossible = torch.tensor([-math.inf], requires_grad=True)
    certain = torch.tensor([0.0], requires_grad=True)
    reference = torch.tensor([-1.0])
    for kind in ("sigmoid", "exo_pair", "apo_zero"):
        smoothing = 1e-3 if kind == "exo_pair" else 0.0
        loss = preference.dpo_loss(
            *(certain, impossible, reference, reference), kind=kind, label_smoothing=smoothing
        )
        assert loss.isfinite(), kind
        assert all(x.isfinite().all() for x in torch.autograd.grad(loss, (certain, impossible))), kind
    for pair in ((certain, reference), (reference, certain)):
        loss = preference.orpo_loss(*pair)
        assert loss.isfinite()
        assert torch.autograd.grad(loss, certain)[0].isfinite().all()
