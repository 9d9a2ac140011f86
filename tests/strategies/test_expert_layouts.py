"""Mixtures of experts in every layout: the balancing loss of a step, and expert weights over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_thd import Sequences, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.callbacks import ExpertBias
from tests.loss.test_router_balance import alone, exact, one_at_a_time, over_a_step
from tests.ranks import run_ranks
from tests.strategies.jobs import (
    CAPACITY,
    Job,
    Layout,
    family_model,
    full_parameters,
    make_trainer,
    strict_warnings,
)
from tests.tiny import largest_error, nll, sequences

SAMPLES = [{**one, "input_ids": one["input_ids"] % 63 + 1} for one in sequences(40, labels=True)]
# The layout, and over which tokens experts are balanced.
Run = tuple[Layout, str]


class Balanced(Job):
    """Makes one step of gradient descent, and records which sequences each of its microbatches held."""

    def __init__(self, family: str, balance: Any) -> None:
        super().__init__(family)
        exact(self.model)
        self.balance = balance
        self.packs = list[tuple[int, ...]]()

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.packs.append(batch.sequence_ids)
        return causal_lm_loss(self.model, batch, router_balance=self.balance)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=1.0)


def train(family: str, layout: Layout, balance: str) -> dict[str, Any]:
    """Return what a step of this rank subtracts from the parameters, and its packs."""
    strict_warnings()
    module = Balanced(family, balance)
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}

    trainer = make_trainer(layout, family, max_steps=1, gradient_clip_val=None)
    data = THDDataModule(SAMPLES, capacity=CAPACITY, global_batch=Sequences(12 * layout.dp))
    trainer.fit(module, data)

    strategy: Any = trainer.strategy
    after = full_parameters(module.model)
    experts = [p for name, p in module.model.named_parameters() if name.endswith("experts.down_proj")]

    return {
        "rank": strategy.data_rank,
        "packs": module.packs,
        "losses": module.losses,
        "gradients": {name: before[name] - value.cpu() for name, value in after.items()},
        "held": sum(getattr(p, "_local_tensor", p).numel() for p in experts),
    }


def train_all(family: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [train(family, *run) for run in runs]


def by_hand(
    family: str, microbatches: Sequence[Sequence[int]], balance: str
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of one process that runs the sequences one at a time."""
    model = Balanced(family, balance).model
    packs = [[SAMPLES[i] for i in ids] for ids in microbatches]
    samples = [sample for pack in packs for sample in pack]
    if balance == "sequence":
        loss = one_at_a_time(model, samples, sigmoid=family == "deepseek_v3")
    else:
        results = [nll(model, sample) for sample in samples]
        loss = sum(total for total, _ in results) / sum(count for _, count in results)
        if balance == "step":
            loss = loss + sum(over_a_step(model, packs))
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(family: str, runs: Sequence[Run]) -> list[list[dict[str, Any]]]:
    """Run layouts on the same ranks, and compare each with one process."""
    ranks = runs[0][0].world
    of_ranks = run_ranks(train_all, ranks, family, runs)

    for number, (layout, balance) in enumerate(runs):
        of_run = [rank[number] for rank in of_ranks]
        packs = {rank["rank"]: rank["packs"] for rank in of_run}
        # Microbatches that ranks run at once are balanced together.
        merged = [[i for ids in together for i in ids] for together in zip(*packs.values(), strict=True)]
        assert len(packs) == layout.dp
        assert len(merged) > 1
        loss, gradients = by_hand(family, merged, balance)
        losses = [value for rank in of_run for value in rank["losses"]]
        assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-9)
        together = {name: value for rank in of_run for name, value in rank["gradients"].items()}
        assert together.keys() >= gradients.keys()  # a stage has its own layers
        for rank in of_run:
            of_rank = {name: value for name, value in rank["gradients"].items() if name in gradients}
            assert largest_error(of_rank, {name: gradients[name] for name in of_rank}) < 1e-9

    return of_ranks


BALANCES = ("sequence", "step")
PAIRS = [Layout(dp=2), Layout(cp=2), Layout(pp=2), Layout(strategy="thd_ddp", dp=2)]
FOURS = [
    *(Layout(dp=4), Layout(dp=2, cp=2), Layout(strategy="thd_ddp", dp=2, cp=2)),
    *(Layout(dp=2, pp=2), Layout(cp=2, tp=2), Layout(tp=2, pp=2)),
]


EXPERTS = ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"]
TENSOR = [Layout(tp=2), Layout(tp=2, options={"sequence_parallel": True})]


def halves(family: str, found: list[dict[str, Any]]) -> bool:
    """Return whether every rank held half of the experts' weights."""
    held = {
        n: p.numel() for n, p in family_model(family).named_parameters() if n.endswith("experts.down_proj")
    }
    return {run["held"] for run in found} == {sum(held.values()) // 2}


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERTS)
def test_ranks_share_whole_experts(family: str) -> None:
    ranks = compare(family, [(layout, "sequence") for layout in TENSOR])
    assert halves(family, [run for rank in ranks for run in rank])


def test_a_step_of_experts_equals_one_process() -> None:
    others = [(Layout(cp=2), "sequence"), (Layout(dp=2), "step"), (Layout(pp=2), "sequence")]
    ranks = compare("qwen3_moe", [*others, (TENSOR[1], "sequence")])
    assert halves("qwen3_moe", [rank[-1] for rank in ranks])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("layouts", [PAIRS, FOURS], ids=["2", "4"])
def test_every_layout_of_experts(family: str, layouts: list[Layout]) -> None:
    compare(family, [(layout, balance) for layout in layouts for balance in BALANCES])


def move_biases(layout: Layout) -> dict[str, Any]:
    strict_warnings()
    module = Balanced("deepseek_v3", "microbatch")
    options = {"max_steps": 1, "gradient_clip_val": None, "callbacks": [ExpertBias(0.5)]}
    trainer = make_trainer(layout, "deepseek_v3", **options)
    trainer.fit(module, THDDataModule(SAMPLES, capacity=CAPACITY, global_batch=Sequences(12)))
    biases = {n: b for n, b in module.model.named_buffers() if n.endswith("bias")}
    strategy: Any = trainer.strategy
    return {"rank": strategy.data_rank, "packs": module.packs, "biases": biases}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(cp=2), Layout(tp=2), Layout(pp=2)])
def test_biases_move_by_the_choices_of_all_ranks(layout: Layout) -> None:
    ranks = run_ranks(move_biases, 2, layout)
    ids = {i for rank in ranks for pack in rank["packs"] for i in pack}
    assert len(ids) == 12
    with torch.no_grad():
        model = Balanced("deepseek_v3", "microbatch").model
        chosen = torch.cat([alone(model, SAMPLES[i])[0].topk(2).indices.flatten() for i in ids])
    counts = torch.bincount(chosen, minlength=4)
    expected = 0.5 * torch.sign(counts.double().mean() - counts)
    (moved,) = {tuple(b.tolist()) for rank in ranks for b in rank["biases"].values()}
    assert moved == tuple(expected.tolist())
