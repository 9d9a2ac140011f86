"""Two gloo ranks, one with images: rates, totals and imbalance count the vision tower."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_thd.batch import THDBatch
from lightning_thd.flops import FlopsModel, SeqStats
from tests.callbacks.fits import Clock, Memory, Module, trainer
from tests.callbacks.fits import loader as loader_of
from tests.packing.test_media import CONFIG
from tests.ranks import run_ranks

FLOPS, STEPS, PEAK = FlopsModel.from_config(CONFIG), 4, 1e15
LENGTHS, GRIDS = ([40, 24], [30, 30]), ([[1, 8, 12], [1, 4, 4]], None)


def pack_of(rank: int) -> THDBatch:
    samples: list[dict[str, Any]] = [{"input_ids": [1] * n} for n in LENGTHS[rank]]
    for sample, grid in zip(samples, GRIDS[rank] or (), strict=False):
        sample |= {"image_grid_thw": np.array([grid]), "pixel_values": np.zeros((grid[1] * grid[2], 4))}
    return THDBatch.collate(samples)


def _fit() -> dict[str, float]:
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_thd.callbacks import THDThroughputMonitor

    clock, memory = Clock(), Memory()
    monitor = THDThroughputMonitor(peak=PEAK, warmup_steps=0, clock=clock, all_keys=True)
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(
            folder, monitor, strategy=DDPStrategy(), devices=2, log_every_n_steps=STEPS, logger=memory
        )
        run.fit(Module(clock, config=CONFIG), loader_of([pack_of(dist.get_rank())] * STEPS))
    return {} if dist.get_rank() else memory.rows[-1][1]


def test_rates_and_imbalance_count_towers() -> None:
    own, text = (
        [
            FLOPS.training_flops(SeqStats.from_lengths(LENGTHS[rank], image_grid_thw=grids[rank]))
            for rank in range(2)
        ]
        for grids in (GRIDS, (None, None))
    )
    assert own[0].vision > 0.2 * own[0].model
    assert own[0].hardware > 1.2 * own[1].hardware
    row = run_ranks(_fit, 2)[0]
    total = sum(flops.model for flops in own)
    assert row["train/total_flops"] == STEPS * total > STEPS * sum(flops.model for flops in text)
    assert row["train/device/flops_per_sec"] == pytest.approx(total / 2 / 0.5)
    assert row["train/device/mfu"] == pytest.approx(total / 2 / 0.5 / PEAK)
    work = [flops.hardware for flops in own]
    assert row["train/packing/imbalance"] == pytest.approx(max(work) * 2 / sum(work))
