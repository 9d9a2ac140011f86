"""A mixture that is stopped and resumed anywhere runs the batches of the uninterrupted run, bit by bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule
from lightning_thd.packing.mixtures import Mixing
from tests.tiny import quiet_trainer

EPOCHS = 4
Ran = list[tuple[int, tuple[int, ...]]]  # the epoch of each step, and its sequences


class Recorder(L.LightningModule):
    """Has one weight, whose path depends on every token that was used, and records the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.ran: Ran = []

    def training_step(self, batch: THDBatch) -> torch.Tensor:
        self.ran.append((self.trainer.current_epoch, tuple(batch.sequence_ids)))
        seen = batch.input_ids.double().sum() + batch.targets.double().pow(2).sum()
        return (self.weight - seen / 100).square() * batch.loss_scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def make_case(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    sources = {}
    for name in "abc"[: draw.randint(2, 3)]:
        rows = [
            {"input_ids": [draw.randrange(50) for _ in range(draw.randint(2, draw.choice([6, 24])))]}
            for _ in range(draw.randint(2, 20))
        ]
        sources[name] = (rows, draw.choice([0.1, 0.25, 0.5, 1.0, 2.0]))
    epoch = draw.choice(["longest", "shortest", draw.randint(4, 30)])
    mixing = Mixing(epoch=epoch, shares=draw.choice(["sequences", "tokens"]))
    step: Packs | Sequences = draw.choice([Packs(1), Packs(1), Sequences(draw.randint(1, 4))])
    return {"train": sources, "mixing": mixing, "global_batch": step, "capacity": 24, "seed": seed}


def run(case: dict[str, Any], folder: Path, **trainer: Any) -> tuple[Ran, float]:
    """Train, resuming from the folder's checkpoint if it has one; return the steps and the weight."""
    module = Recorder()
    ckpt = folder / "last.ckpt"
    keep = ModelCheckpoint(folder, filename="x", save_last=True, every_n_train_steps=1, save_top_k=0)
    one_by_one = "thd" if isinstance(case["global_batch"], Sequences) else "auto"
    fit = quiet_trainer(callbacks=[keep], strategy=one_by_one, enable_checkpointing=True, **trainer)
    data = THDDataModule(**case, needs_boundaries=False)
    fit.fit(module, datamodule=data, ckpt_path=ckpt if ckpt.exists() else None)
    return module.ran, module.weight.item()


def check(seed: int, folder: Path) -> None:
    try:
        whole, weight = run(make_case(seed), folder / "whole", max_epochs=EPOCHS)
    except ValueError as err:
        if "has none of" in str(err) or "has no tokens" in str(err):  # the weights give a source no sequence
            return
        raise

    steps = len({(epoch, number) for number, (epoch, _) in enumerate(whole)})
    draw = random.Random(seed)
    is_packs = isinstance(make_case(seed)["global_batch"], Packs)
    cuts = sorted(draw.sample(range(1, max(2, steps)), min(2, max(1, steps - 1)))) if is_packs else []
    ran: Ran = []
    for cut in cuts:
        ran += run(make_case(seed), folder / "cut", max_epochs=EPOCHS, max_steps=cut)[0]

    if not is_packs:
        for epochs in range(1, EPOCHS):
            ran += run(make_case(seed), folder / "cut", max_epochs=epochs)[0]

    rest, again = run(make_case(seed), folder / "cut", max_epochs=EPOCHS)
    ran += rest
    assert [ids for _, ids in ran] == [ids for _, ids in whole], f"seed {seed}"
    assert again == weight, f"seed {seed}"


@pytest.mark.parametrize("seed", range(6))
def test_a_resumed_mixture_runs_the_same_batches(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_two_hundred_resumed_mixtures_run_the_same_batches(first: int, tmp_path: Path) -> None:
    for seed in range(1000 + first, 1000 + first + 20):
        check(seed, tmp_path / str(seed))
