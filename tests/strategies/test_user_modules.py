"""What a user's module brings along: metric objects, random numbers, weights that are frozen for a time."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import MeanMetric, SumMetric

from lightning_thd import THDBatch
from lightning_thd.strategies.logs import refuse_sums
from tests.ranks import run_ranks
from tests.strategies.jobs import Layout, data, full_parameters, make_trainer
from tests.strategies.matrix import STEP, Plain


class LogsOwn(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.own = MeanMetric()

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.own(1.0)
        self.log("own", self.own)
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


def fit_own() -> None:
    trainer = make_trainer(Layout(), strategy="thd", max_steps=1)
    with pytest.raises(
        MisconfigurationException,
        match=r"self\.log\('own', MeanMetric, on_step=True\) in a step of several microb.*on_epoch=True",
    ):
        trainer.fit(LogsOwn(), data(STEP))


def test_a_metric_object_by_step_is_refused() -> None:
    run_ranks(fit_own, 1)


def test_sums_under_context_parallelism_must_say_of_what() -> None:
    module = L.LightningModule()
    module.parts = nn.ModuleDict({"tokens": SumMetric(), "mean": MeanMetric()})
    with pytest.raises(
        MisconfigurationException,
        match=r"LightningModule\.parts\.tokens is a SumMetric while.*strategy\.data_parallel_group for",
    ):
        refuse_sums(module, dynamic=False)
    with pytest.raises(MisconfigurationException, match="no group has every pack once"):
        refuse_sums(module, dynamic=True)
    module.parts["tokens"].process_group = object()
    refuse_sums(module, dynamic=False)


class Drops(Plain):
    """Drops half of what goes into the head, and keeps a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

        def drop(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if not self.training:
                return output
            mask = torch.rand_like(output) < 0.5
            self.masks.append(mask)
            return output * mask

        self.model.model.norm.register_forward_hook(drop)


def train_dropping(axes: dict[str, int]) -> tuple[dict[str, Tensor], list[Tensor]]:
    torch.manual_seed(dist.get_rank())  # as seed + rank would
    module = Drops()
    layout = Layout(**axes)
    make_trainer(layout, max_steps=2).fit(module, data(STEP))
    return full_parameters(module.model), module.masks


@pytest.mark.parametrize("axes", [{"tp": 2}, pytest.param({"tp": 2, "dp": 2}, marks=pytest.mark.slow)])
def test_tensor_parallel_ranks_drop_the_same_activations(axes: dict[str, int]) -> None:
    ranks = run_ranks(train_dropping, 2 * axes.get("dp", 1), axes)
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        assert all(map(torch.equal, first[1], second[1]))
    masks = [mask for params, found in ranks[::2] for mask in found]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    for params, _ in ranks[1:]:
        assert all(torch.equal(params[name], value) for name, value in ranks[0][0].items())


class DoRA(Plain):
    """Has adapters with a norm of each row of weights, which tensor parallelism cuts."""

    def __init__(self) -> None:
        import peft

        super().__init__()
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
        self.model = peft.get_peft_model(self.model, config).double()


def fit_dora() -> str:
    try:
        make_trainer(Layout(tp=2), max_steps=1).fit(DoRA(), data(STEP))
    except ValueError as err:
        return str(err)
    return ""


def test_dora_under_tensor_parallelism_is_refused_by_name() -> None:
    pytest.importorskip("peft")
    for message in run_ranks(fit_dora, 2):
        assert "is a DoRA layer whose weight tensor parallelism has cut over ranks" in message
