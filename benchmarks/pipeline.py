"""Pipelines of packs: the bubble of equal and unequal microbatches, simulated on real plans, and measured.

``python -m benchmarks.pipeline`` prints, for 1F1B and the interleaved schedule, the share of time that ranks
wait with equal packs beside the formula (p - 1) / (v n + p - 1); then, for steps of real plans, the length
of a step over the equal-work bound (all work spread evenly, plus p - 1 mean microbatches to fill and drain);
then the wait measured on gloo ranks of this machine. Goals: within 5 % of the formula, at most 1.1 of the
bound.

Work is that of Llama-3.1-8B by our FlopsModel; a backward pass takes twice a forward pass. Two ranks on two
cores share them with nothing, four share them with each other, so only the first measured figure says
anything of a pipeline.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch

from benchmarks import results
from benchmarks.balance import LLAMA_8B
from benchmarks.context_balance import SHAPES
from lightning_thd import Sequences, THDDataModule, THDModelParallelStrategy
from lightning_thd.flops import FlopsModel
from lightning_thd.packing import Cost, PackPlanner
from lightning_thd.parallel.pipeline import Schedule, expected_bubble, make_schedule
from lightning_thd.parallel.pipeline.schedule import Work, timeline
from tests.ranks import run_ranks
from tests.strategies.jobs import Job
from tests.tiny import sequences

STEPS, CAPACITY = 20, 8_192
EQUAL = [(p, n, v) for p, n in ((2, 8), (4, 16), (8, 64)) for v in (1, 2)]


def bubble_fraction(schedule: Schedule, work: Work) -> float:
    """Simulate a step and return the share of the ranks' time in which they wait."""
    lines = timeline(schedule, work)
    assert lines is not None
    busy = sum(timed.end - timed.start for line in lines for timed in line)
    return 1.0 - busy / (schedule.ranks * max(line[-1].end for line in lines))


def simulate_equal() -> None:
    print(f"{'ranks':>6}{'microbatches':>14}{'stages a rank':>15}{'bubble':>9}{'formula':>9}")
    worst = 0.0
    for p, n, v in EQUAL:
        found = bubble_fraction(make_schedule(p, n, chunks=v), lambda stage, m: 1.0)
        formula = expected_bubble(p, n, chunks=v)
        worst = max(worst, abs(found / formula - 1))
        print(f"{p:>6}{n:>14}{v:>15}{found:>9.1%}{formula:>9.1%}")
    results.less("bubble of equal packs, off the formula", 100 * worst, "%", 5.0)


def steps_of(shape: str, sequences_a_step: int) -> list[list[float]]:
    """Work of the microbatches of one data rank, step by step, of a real plan."""
    mean, sigma, low, high = SHAPES[shape]
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, sequences_a_step * STEPS), low, high)
    lengths = lengths.astype(np.int64)
    cost = Cost.from_flops(FlopsModel.from_config(LLAMA_8B), longest=CAPACITY)
    planner = PackPlanner(lengths, CAPACITY, global_batch=Sequences(sequences_a_step), cost=cost)
    found = []
    for k in range(STEPS):
        packs = [lengths[pack] for pack in planner.step(0, k, 1).indices_by_rank()[0]]
        found.append([float((cost.linear * s + cost.quadratic * s**2.0).sum()) for s in packs])
    return found


def simulate_plans() -> None:
    print(f"\n{'lengths':>9}{'ranks':>7}{'microbatches':>14}{'step / equal-work bound':>25}")
    for shape in ("long", "chat"):
        for p, n in ((2, 32), (4, 64), (8, 128)):
            ratios, counts = [], []
            for work in steps_of(shape, n if shape == "long" else 8 * n):
                bound = 3 * (sum(work) + (p - 1) * sum(work) / len(work))
                lines = timeline(make_schedule(p, len(work)), lambda _, m, of=work: of[m])
                assert lines is not None
                ratios.append(max(line[-1].end for line in lines) / bound)
                counts.append(len(work))
            found = float(np.mean(ratios))
            print(f"{shape:>9}{p:>7}{np.mean(counts):>14.1f}{found:>25.3f}")
            results.less(f"step / equal-work bound, {shape}, {p} ranks", found, "x", 1.1)


class Waiting(Job):
    """Keeps what the strategy says of its waits, and what a simulation of the same step says."""

    def __init__(self) -> None:
        super().__init__("qwen3@4", torch.float32)
        self.waits: list[float] = []
        self.simulated: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the wait of the step."""
        strategy: Any = self.trainer.strategy
        self.waits.append(strategy._pipeline.waited)
        split = strategy._pipeline.stage.split
        schedule = make_schedule(split.ranks, len(batch))
        slots = [float(part.stats.slots) for part in batch.microbatches]
        share = [part / sum(split.flops) for part in split.flops]
        self.simulated.append(bubble_fraction(schedule, lambda stage, m: share[stage] * slots[m]))


def train(ranks: int) -> tuple[float, float, float]:
    warnings.simplefilter("ignore")
    module = Waiting()
    trainer = L.Trainer(
        strategy=THDModelParallelStrategy(pipeline_parallel_size=ranks),
        devices=ranks,
        accelerator="cpu",
        max_steps=12,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module, THDDataModule(sequences(800, longest=200), capacity=1_024, global_batch=Sequences(64))
    )
    formula: float = trainer.strategy._pipeline.expected_wait  # type: ignore[attr-defined]
    return float(np.median(module.waits[2:])), float(np.median(module.simulated[2:])), formula


def measure() -> None:
    print(f"\n{'gloo ranks':>11}{'waited (mean rank)':>20}{'simulated':>11}{'formula':>9}  medians of ten")
    for ranks in (2, 4):
        found = run_ranks(train, ranks, ranks, timeout_s=400.0)
        waited = float(np.mean([wait for wait, _, _ in found]))
        print(f"{ranks:>11}{waited:>20.1%}{found[0][1]:>11.1%}{found[0][2]:>9.1%}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.parse_args(argv)
    simulate_equal()
    simulate_plans()
    measure()


if __name__ == "__main__":
    main()
