"""What a strategy of ours costs a step beyond Lightning's own: python -m benchmarks.strategy_overhead.

One device, a model that does next to nothing, so that what is measured is the strategies themselves. Goal:
the difference is at most 1 % of a step of 100 ms, that is 1,000 us.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule

GOAL_US = 1_000.0
STEPS, WARM = 400, 50


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


def step_us(strategy: str, step: Packs | Sequences) -> float:
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
    samples = [{"input_ids": torch.arange(64)}] * 2048
    trainer.fit(module, THDDataModule(samples, capacity=256, global_batch=step))
    gaps = [b - a for a, b in zip(module.times[WARM:], module.times[WARM + 1 :], strict=False)]
    return statistics.median(gaps) * 1e6


def main() -> None:
    """Print microseconds a step, ours beside Lightning's."""
    warnings.simplefilter("ignore")
    runs: dict[str, list[float]] = {}
    for _ in range(3):  # in turn, so that a busy machine disturbs all alike
        for name, strategy, step in (
            ("Lightning's auto, Packs(1)", "auto", Packs(1)),
            ("thd, Packs(1)", "thd", Packs(1)),
            ("thd, Sequences(4), one microbatch", "thd", Sequences(4)),
        ):
            runs.setdefault(name, []).append(step_us(strategy, step))
    (_, peer), *ours = [(name, min(times)) for name, times in runs.items()]
    print(f"{'strategy':<36}{'us':>9}{'peer us':>9}{'over, us':>10}{'goal':>8}")
    for name, us in ours:
        verdict = "met" if us - peer <= GOAL_US else "missed"
        print(f"{name:<36}{us:>9.0f}{peer:>9.0f}{us - peer:>10.0f}{GOAL_US:>8.0f} {verdict}")


if __name__ == "__main__":
    main()
