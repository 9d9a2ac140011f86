"""Batches that a module skips, steps that a resumed job repeats or an evaluation divides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_thd import THDDataModule
from tests.callbacks.fits import CONFIG, FLOPS, Clock, Model, Module, flops_of, loader, monitor, pack, trainer

BATCHES = [pack(5, 3), pack(8), pack(1, 7), pack(6), pack(2, 2, 2), pack(4, 3)]


class Skips(Module):
    """Trains on every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else None


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("config", [CONFIG, None], ids=["config", "counted"])
def test_batches_that_training_step_skips_are_not_counted(tmp_path: Path, config: Any) -> None:
    clock = Clock()
    throughput = monitor(clock)
    run = trainer(tmp_path, throughput)
    run.fit(Skips(clock, config=config), loader(BATCHES))
    trained = BATCHES[1::2]
    latest = throughput.latest
    assert latest["train/batches"] == 3
    assert latest["train/samples"] == sum(map(len, trained))
    if config is None:  # a product of [slots, 4] and [4, 31], whose input is trained
        assert latest["train/total_flops"] == 3 * 2 * 4 * 31 * sum(batch.stats.slots for batch in trained)
    else:
        assert latest["train/total_flops"] == flops_of(trained)
        assert latest["train/time"] == pytest.approx(0.5 * len(BATCHES))  # time goes by all the same


def test_a_step_that_a_resumed_job_repeats_counts_once(tmp_path: Path) -> None:
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if args[3] == 4:  # the second batch of the second step
                trainer.save_checkpoint(tmp_path / "in.ckpt")

    def run(*callbacks: L.Callback, path: Path | None = None) -> dict[str, float]:
        clock = Clock()
        throughput = monitor(clock)
        data = THDDataModule([{"input_ids": [1] * (1 + n % 7)} for n in range(30)], capacity=9)
        settings: dict[str, Any] = {"accumulate_grad_batches": 3, "log_every_n_steps": 50}
        fitting = trainer(tmp_path, throughput, *callbacks, **settings)
        fitting.fit(Module(clock), data, ckpt_path=path)
        return throughput.latest

    whole = run(Saves())
    resumed = run(path=tmp_path / "in.ckpt")
    for key in ("total_flops", "batches", "samples", "lengths", "time"):
        assert resumed[f"train/{key}"] == pytest.approx(whole[f"train/{key}"], rel=1e-12), key


class Called(Model):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embed(ids))
        return found


class Distils(Module):
    """Calls its model with gradients and without, and trains on all batches but those of ``skipped``."""

    def __init__(self, clock: Clock, *, config: Any = CONFIG, skipped: tuple[int, ...] = ()) -> None:
        super().__init__(clock, config=config)
        self.model, self.skipped = Called(config), skipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.model(batch.input_ids)
        loss = self.model(batch.input_ids).square().mean()
        return None if batch_idx in self.skipped else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch.input_ids)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize(
    ("skipped", "options"),
    [((), {"val_check_interval": 2, "accumulate_grad_batches": 3}), ((0, 4), {"accumulate_grad_batches": 3})],
    ids=["evaluation", "skipped"],
)
def test_the_calls_of_a_step_are_those_of_its_batches(
    tmp_path: Path, skipped: tuple[int, ...], options: Any
) -> None:
    """An evaluation between the batches of a step, and batches that are skipped, are no passes of it."""
    throughput, val = monitor(Clock()), [pack(6, 2), pack(4)]
    run = trainer(tmp_path, throughput, num_sanity_val_steps=0, **options)
    run.fit(Distils(Clock(), skipped=skipped), loader([*BATCHES, *BATCHES]), loader(val))
    trained = [batch for i, batch in enumerate([*BATCHES, *BATCHES]) if i not in skipped]
    forward = sum(FLOPS.forward_flops(batch.stats).model for batch in trained)
    assert throughput.latest["train/total_flops"] == flops_of(trained) + forward
    evaluated = sum(FLOPS.forward_flops(batch.stats).model for batch in val)
    assert throughput.latest["validate/total_flops"] == evaluated


def test_a_counted_step_is_counted_from_its_first_batch(tmp_path: Path) -> None:
    """A second batch of a new shape begins no count of its step, which would miss the first."""
    throughput = monitor(Clock())
    run = trainer(tmp_path, throughput, accumulate_grad_batches=2)
    run.fit(Module(Clock(), config=None), loader(BATCHES))
    slots = sum(batch.stats.slots for batch in BATCHES)
    assert throughput.latest["train/total_flops"] == 3 * 2 * 4 * 31 * slots
