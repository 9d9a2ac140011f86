"""A Lightning module, litgpt's GPT in Fabric and nanochat's in plain torch train on packs as alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_thd import Sequences, THDBatch, THDDataModule, check_packing
from lightning_thd.batch.noted import UnreadBoundariesError
from lightning_thd.integrations import prepare_fabric
from lightning_thd.models.probe_report import PackingLeakError
from tests.ports.oracle import STEPS, Ran, check, note_gradients, optimizer_of, parameters_of
from tests.ports.own import LitGPT, NanoChat, Plain
from tests.tiny import VOCAB, quiet_trainer, sequences

ROWS = sequences(60)
KINDS = (Plain, LitGPT, NanoChat)


def made(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = kind().double()
    return model


def row_alone(model: nn.Module, row: dict[str, Any]) -> tuple[Tensor, int]:
    ids = torch.as_tensor(row["input_ids"])
    return F.cross_entropy(model(ids)[:-1], ids[1:], reduction="sum"), len(ids) - 1


def loss_of(model: nn.Module, batch: THDBatch, *, ported: bool = True) -> Tensor:
    logits = model(batch.input_ids, batch if ported else None)
    return F.cross_entropy(logits, batch.targets, reduction="sum") * batch.loss_scale


def in_lightning(model: nn.Module, *, ported: bool = True) -> Ran:
    ran = Ran.nothing()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
            ran.steps.append(list(batch.sequence_ids))
            loss = loss_of(self.model, batch, ported=ported)
            ran.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return note_gradients(optimizer_of(self.parameters()), model, ran)

    quiet_trainer(max_steps=STEPS).fit(Module(), THDDataModule(ROWS, capacity=64))
    return ran._replace(parameters=parameters_of(model))


def in_fabric(model: nn.Module, *, ported: bool = True) -> Ran:
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    data = THDDataModule(ROWS, capacity=64, global_batch=Sequences(6))
    loss_fn = partial(loss_of, ported=ported)
    ran = Ran.nothing()
    optimizer = note_gradients(optimizer_of(model.parameters()), model, ran)
    loop = prepare_fabric(fabric, model, data, optimizer, loss_fn=loss_fn, peak=1e9)
    for _, step in zip(range(STEPS), loop.loader, strict=False):
        ran.losses.append(float(loop.backward(step)))
        ran.steps.append([i for batch in step.microbatches for i in batch.sequence_ids])
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return ran._replace(parameters=parameters_of(model))


def in_torch(model: nn.Module, *, ported: bool = True) -> Ran:
    """Two optimizers and a hand-written step, as nanochat has them."""
    optimizers = [optimizer_of(model.wte.parameters()), optimizer_of([*model.lm_head.parameters()])]
    optimizers.append(optimizer_of(model.h.parameters()))
    data = THDDataModule(ROWS, capacity=64, global_batch=Sequences(6))
    data.attach(model=model)
    data.setup("fit")
    ran = Ran.nothing()
    note_gradients(optimizers[0], model, ran)

    for _, step in zip(range(STEPS), data.train_steps(), strict=False):
        losses = [loss_of(model, batch, ported=ported) / len(step) for batch in step.microbatches]
        torch.stack(losses).sum().backward()
        ran.losses.append(float(sum(loss.detach() for loss in losses)))
        ran.steps.append([i for batch in step.microbatches for i in batch.sequence_ids])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return ran._replace(parameters=parameters_of(model))


HOSTS = dict(zip(KINDS, (in_lightning, in_fabric, in_torch), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_equal_the_unported_module(kind: Any) -> None:
    check(made(kind), ROWS, HOSTS[kind](made(kind)), row_alone)


@pytest.mark.parametrize("kind", KINDS)
def test_the_unported_module_is_refused_at_its_first_step(kind: Any) -> None:
    with pytest.raises(UnreadBoundariesError, match="did not ask where they begin"):
        HOSTS[kind](made(kind), ported=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_port_is_refused_by_the_check(kind: Any) -> None:
    """A window that is one key too small keeps sequences apart."""
    options: Any = {"vocab_size": VOCAB, "reference": lambda ids: made(kind)(ids[0])[None]}
    check_packing(made(kind), forward=lambda model, batch: model(batch.input_ids, batch), **options)
    with pytest.raises(PackingLeakError):
        check_packing(made(kind), forward=lambda model, batch: model(batch.input_ids), **options)
    if kind is LitGPT:
        small = made(kind)
        small.h[1].window = 4  # type: ignore[index, union-attr]
        with pytest.raises(PackingLeakError, match="LitGPT differs from the reference"):
            check_packing(small, forward=lambda model, batch: model(batch.input_ids, batch), **options)
