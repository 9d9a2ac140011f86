"""A line search sees the loss of the whole step, as a hand-written closure gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_thd import Packs, Sequences, THDDataModule
from lightning_thd.packing import PackPlanner
from lightning_thd.strategies.closure import uses_value_of_closure
from tests.ranks import run_ranks
from tests.strategies.jobs import full_parameters
from tests.tiny import TinyModule, largest_error, nll, planned, quiet_trainer, sequences, tiny_llama

CAPACITY = 48
STEPS = 2
SEARCH = {"lr": 1.0, "max_iter": 3, "line_search_fn": "strong_wolfe"}


class Searching(TinyModule):
    """Trains with LBFGS, whose line search compares losses of the same step on other weights."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.model.parameters(), **SEARCH)


def fit(strategy: str, step: Packs | Sequences, devices: int = 1) -> dict[str, Tensor]:
    module = Searching()
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_steps=STEPS)
    trainer.fit(module, THDDataModule(sequences(60, labels=True), capacity=CAPACITY, global_batch=step))
    return full_parameters(module.model)


def by_hand(step: Packs | Sequences, dp: int) -> dict[str, Tensor]:
    """Run LBFGS on the mean over the loss tokens of each step, every sequence alone."""
    samples = sequences(60, labels=True)
    planner = PackPlanner([len(s["input_ids"]) for s in samples], CAPACITY, global_batch=step)
    model = tiny_llama(torch.float64)
    optimizer = torch.optim.LBFGS(model.parameters(), **SEARCH)

    for ids in planned(planner, STEPS, dp):

        def closure(ids: list[int] = ids) -> Tensor:
            optimizer.zero_grad()
            results = [nll(model, samples[i]) for i in ids]
            loss = sum(total for total, _ in results) / sum(count for _, count in results)
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_line_search_sees_all_microbatches_of_a_step() -> None:
    assert largest_error(fit("thd", Sequences(12)), by_hand(Sequences(12), 1)) < 1e-8


@pytest.mark.parametrize(
    ("strategy", "step"),
    [("thd_ddp", Sequences(16)), ("thd_ddp", Packs(2)), ("thd_model_parallel", Sequences(16))],
)
def test_a_line_search_takes_the_same_step_on_all_ranks(strategy: str, step: Packs | Sequences) -> None:
    expected = by_hand(step, 2)
    for parameters in run_ranks(fit, 2, strategy, step, 2):
        assert largest_error(parameters, expected) < 1e-8


def test_a_line_search_over_accumulated_batches_is_refused() -> None:
    trainer = quiet_trainer(strategy="thd", max_steps=1, accumulate_grad_batches=3)
    data = THDDataModule(sequences(60), capacity=CAPACITY, global_batch=Packs(3))
    message = r"LBFGS with accumulate_grad_batches=3.*Sequences\(n\)"
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(Searching(), data)


class TheirOwn(torch.optim.SGD):
    """An optimizer of a user, which may compare the values of its closure."""


def test_only_optimizers_that_may_use_the_value_pay_for_its_reduction() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    assert not uses_value_of_closure(torch.optim.AdamW(weights))
    assert uses_value_of_closure(torch.optim.LBFGS(weights))
    assert uses_value_of_closure(TheirOwn(weights, lr=0.1))
