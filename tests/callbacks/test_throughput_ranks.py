"""Gloo ranks with unequal packs and images: what is logged is their sum, for one collective an interval."""

from __future__ import annotations

import pickle
import tempfile
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_thd.batch import THDBatch
from lightning_thd.callbacks import THDFlops
from lightning_thd.flops import FlopsModel, SeqStats
from lightning_thd.parallel import across_ranks
from tests.callbacks.fits import CONFIG, FLOPS, Clock, Memory, Module, loader, monitor, pack, trainer
from tests.packing.test_media import CONFIG as VISION
from tests.ranks import run_ranks

STEPS = 6
INTERVAL = 3
PEAK = 1e9
LENGTHS = ([64], [16, 16], [8], [2, 2])  # of the packs of each rank


def batches_of(rank: int) -> list[THDBatch]:
    return [pack(*LENGTHS[rank], pad_to=64) for _ in range(STEPS)]


def work(rank: int) -> int:
    return FLOPS.training_flops(batches_of(rank)[0].stats).model


def _fit(dp_ranks: list[int] | None) -> dict[str, Any]:
    """One rank: fit its batches and report the rows, and how often the monitor called a collective."""
    from lightning.pytorch.strategies import DDPStrategy

    rank = dist.get_rank()
    world = dist.get_world_size()
    clock = Clock()
    memory = Memory()

    class Grouped(DDPStrategy):
        """Peers of another axis hold the same sequences: rank and rank + 2 when dp_ranks has two."""

        @property
        def data_parallel_group(self) -> Any:
            return groups[rank // 2] if dp_ranks else None

    # two copies of the data-parallel group, one for either half of the world
    groups = [dist.new_group(half) for half in ([0, 1], [2, 3])] if dp_ranks else []
    data_rank = rank % len(dp_ranks) if dp_ranks else rank
    calls = 0
    gather = across_ranks._all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return gather(*args, **kwargs)

    across_ranks._all_gather = counted
    watched = monitor(clock, peak=PEAK)
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(
            folder, watched, strategy=Grouped(), devices=world, log_every_n_steps=INTERVAL, logger=memory
        )
        run.fit(Module(clock), loader(batches_of(data_rank)))
    return {"rows": memory.rows, "calls": calls, "flops": watched.latest}


def test_global_flops_are_the_sum_over_four_unequal_ranks() -> None:
    results = run_ranks(_fit, 4, None)
    total = sum(work(rank) for rank in range(4))
    assert len({work(rank) for rank in range(4)}) == 4

    rows = [row for _, row in results[0]["rows"]]
    assert len(rows) == STEPS // INTERVAL
    for row in rows:
        assert row["train/flops_per_sec"] == pytest.approx(total / 0.5)
        assert row["train/device/flops_per_sec"] == pytest.approx(total / 4 / 0.5)
        assert row["train/device/mfu"] == pytest.approx(total / 4 / 0.5 / PEAK)
        assert row["train/packing/imbalance"] == pytest.approx(work(0) / (total / 4), rel=1e-2)
    assert rows[-1]["train/total_flops"] == STEPS * total
    for result in results:
        # one an interval, and one at the end for the steps after the last, here none
        assert result["calls"] == STEPS // INTERVAL + 1
        assert result["flops"]["train/total_flops"] == STEPS * total  # the same on every rank


def test_peers_that_hold_the_same_sequences_are_counted_once() -> None:
    """Two data-parallel ranks x two of another axis: half the FLOPs of four, on as many devices."""
    results = run_ranks(_fit, 4, [0, 1])
    total = work(0) + work(1)
    row = results[0]["rows"][-1][1]
    assert row["train/total_flops"] == STEPS * total
    assert row["train/device/flops_per_sec"] == pytest.approx(total / 4 / 0.5)


IMAGES = ([40, 24], [30, 30]), ([[1, 8, 12], [1, 4, 4]], None)  # lengths and grids of either rank


def _fit_images() -> dict[str, float]:
    from lightning.pytorch.strategies import DDPStrategy

    lengths, grids = (of_ranks[dist.get_rank()] for of_ranks in IMAGES)
    samples: list[dict[str, Any]] = [{"input_ids": [1] * n} for n in lengths or ()]
    for sample, grid in zip(samples, grids or (), strict=False):
        sample |= {"image_grid_thw": np.array([grid]), "pixel_values": np.zeros((grid[1] * grid[2], 4))}
    clock = Clock()
    memory = Memory()
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(
            folder, monitor(clock), strategy=DDPStrategy(), devices=2, log_every_n_steps=4, logger=memory
        )
        run.fit(Module(clock, config=VISION), loader([THDBatch.collate(samples)] * 4))
    return {} if dist.get_rank() else memory.rows[-1][1]


def test_rates_and_imbalance_count_towers() -> None:
    model = FlopsModel.from_config(VISION)
    of_ranks = [
        model.training_flops(SeqStats.from_lengths(lengths, image_grid_thw=grids))
        for lengths, grids in zip(*IMAGES, strict=True)
    ]
    assert of_ranks[0].vision > 0.2 * of_ranks[0].model
    row = run_ranks(_fit_images, 2)[0]
    total = sum(flops.model for flops in of_ranks)
    assert row["train/total_flops"] == 4 * total
    assert row["train/device/flops_per_sec"] == pytest.approx(total / 2 / 0.5)
    work = [flops.hardware for flops in of_ranks]
    assert row["train/packing/imbalance"] == pytest.approx(max(work) * 2 / sum(work))


def _counted() -> float:
    metric = THDFlops(FLOPS)
    for batch in batches_of(dist.get_rank()):
        metric.update(batch.stats)
    return float(metric.compute())


def test_the_metric_sums_over_ranks() -> None:
    total = sum(work(rank) for rank in range(2))
    assert run_ranks(_counted, 2) == [STEPS * total] * 2


def test_the_metric_sums_over_batches_beyond_int64_and_counts_forward_passes() -> None:
    metric = THDFlops(FlopsModel.from_config({**CONFIG, "vocab_size": 2**40}))
    huge = SeqStats.from_lengths([2**20])
    for _ in range(4):
        metric.update(huge)
    exact = 4 * metric.model.training_flops(huge).model
    assert exact > 2**63
    assert float(pickle.loads(pickle.dumps(metric)).compute()) == pytest.approx(exact, rel=1e-15)
    forward = THDFlops(FLOPS, work="forward")
    batch = batches_of(0)[0]
    assert 3 * forward(batch.stats) == work(0)
    metric = THDFlops(FlopsModel.from_config({**CONFIG, "model_type": "mistral", "sliding_window": 4}))
    with pytest.raises(ValueError, match=r"has attention windows \[4\], which the stats do not count"):
        metric.update(batch.stats)
    assert metric.compute() == 0
