"""What a strategy of ours costs a step beyond Lightning's own: python -m benchmarks.strategy_overhead.

One device, a model that does next to nothing, so that what is measured is the strategies themselves: on
batches made before, and on those that the data module plans in the same process. Goal: the difference is at
most 1 % of a step of 100 ms, that is 1,000 us.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks import results
from lightning_thd import Packs, Sequences, THDBatch, THDDataModule
from lightning_thd.batch import THDStep

GOAL_US = 1_000.0
STEPS, WARM = 400, 50
SAMPLES = [{"input_ids": torch.arange(64)}] * 2048


class Nothing(L.LightningModule):
    """A loss of one number, and clocks around every step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(1, 1)
        self.times: list[float] = []

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        """Do next to nothing."""
        loss = self.model.weight.sum() * batch.loss_scale
        self.log("train/loss", loss.detach())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Read the clock."""
        self.times.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The cheapest one."""
        return torch.optim.SGD(self.model.parameters(), lr=1e-3)


def step_us(strategy: str, data: L.LightningDataModule | DataLoader[Any]) -> float:
    """Median microseconds from one step's end to the next's."""
    module = Nothing()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    gaps = [b - a for a, b in zip(module.times[WARM:], module.times[WARM + 1 :], strict=False)]
    return statistics.median(gaps) * 1e6


def ready(batch: THDBatch | THDStep) -> DataLoader[Any]:
    """The same batch again and again, made before."""
    return DataLoader([batch] * STEPS, batch_size=None)  # type: ignore[arg-type]


def planned(step: Packs | Sequences) -> THDDataModule:
    """Batches planned, packed and collated in the training process."""
    return THDDataModule(SAMPLES, capacity=256, global_batch=step)


def main(argv: list[str] | None = None) -> None:
    """Print microseconds a step, ours beside Lightning's."""
    warnings.simplefilter("ignore")
    batch = THDBatch.collate(SAMPLES[:4], loss_scale=1 / 252)
    ways = (
        ("auto", "one batch, ready", lambda: ready(batch)),
        ("thd", "one batch, ready", lambda: ready(batch)),
        ("thd", "a step of one microbatch, ready", lambda: ready(THDStep([batch]))),
        ("auto", "Packs(1), planned", lambda: planned(Packs(1))),
        ("thd", "Packs(1), planned", lambda: planned(Packs(1))),
        ("thd", "Sequences(4), planned", lambda: planned(Sequences(4))),
    )
    runs: dict[int, list[float]] = {}
    for _ in range(3):  # in turn, so that a busy machine disturbs all alike
        for i, (strategy, _, data) in enumerate(ways):
            runs.setdefault(i, []).append(step_us(strategy, data()))
    print("planned: the plan of every step is counted too, which loader processes make otherwise")
    print(f"{'data':<34}{'thd, us':>9}{'auto, us':>10}{'over, us':>10}{'goal':>8}")
    for i, (strategy, name, _) in enumerate(ways):
        us = min(runs[i])
        if strategy == "auto":
            peer = us
            continue
        found = results.less(f"strategy beyond Lightning's, {name}", us - peer, "us", GOAL_US)
        verdict = "met" if found.met else "MISSED"
        print(f"{name:<34}{us:>9.0f}{peer:>10.0f}{us - peer:>10.0f}{GOAL_US:>8.0f} {verdict}")


if __name__ == "__main__":
    main()
