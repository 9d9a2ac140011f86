"""Four gloo ranks with unequal packs: what is logged is the sum over them, for one collective an interval."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch.distributed as dist

from lightning_thd.batch import THDBatch
from lightning_thd.flops import FlopsModel
from lightning_thd.parallel import across_ranks
from tests.callbacks.fits import CONFIG, Clock, Memory, Module, loader, pack, trainer
from tests.ranks import run_ranks

FLOPS = FlopsModel.from_config(CONFIG)
STEPS, INTERVAL, PEAK = 6, 3, 1e9


LENGTHS = ([64], [16, 16], [8], [2, 2])  # of the packs of each rank


def batches_of(rank: int) -> list[THDBatch]:
    return [pack(*LENGTHS[rank], pad_to=64) for _ in range(STEPS)]


def work(rank: int) -> int:
    return FLOPS.training_flops(batches_of(rank)[0].stats).model


def _fit(dp_ranks: list[int] | None, lightnings: bool) -> dict[str, Any]:
    """One rank: fit its batches and report the rows, and how often the monitor called a collective."""
    from lightning.pytorch.callbacks import ThroughputMonitor
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import RunningStage

    from lightning_thd.callbacks import THDThroughputMonitor

    rank, world = dist.get_rank(), dist.get_world_size()
    clock, memory = Clock(), Memory()

    class Grouped(DDPStrategy):
        """Peers of another axis hold the same sequences: rank and rank + 2 when dp_ranks has two."""

        @property
        def data_parallel_group(self) -> Any:
            return groups[rank % len(dp_ranks)] if dp_ranks else None

    groups = []
    if dp_ranks:
        # two copies of the data-parallel group, one for either half of the world
        halves = [[0, 1], [2, 3]]
        made = [dist.new_group(half) for half in halves]
        groups = [made[0] if rank < 2 else made[1]] * len(dp_ranks)
    data_rank = rank % len(dp_ranks) if dp_ranks else rank
    calls = 0
    gather = across_ranks._all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return gather(*args, **kwargs)

    across_ranks._all_gather = counted
    module = Module(clock)
    watched: Any = THDThroughputMonitor(peak=PEAK, warmup_steps=0, clock=clock, all_keys=True)
    if lightnings:
        module.flops_per_batch = FLOPS.training_flops(batches_of(data_rank)[0].stats).model
        watched = ThroughputMonitor(batch_size_fn=lambda batch: 1, window_size=2)
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(
            folder, watched, strategy=Grouped(), devices=world, log_every_n_steps=INTERVAL, logger=memory
        )
        run.fit(module, loader(batches_of(data_rank)))
    if lightnings:
        return {"lightning": list(watched._throughputs[RunningStage.TRAINING]._flops)}
    return {"rows": memory.rows, "calls": calls, "flops": watched.latest}


def test_global_flops_are_the_sum_over_four_unequal_ranks() -> None:
    results = run_ranks(_fit, 4, None, False)
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


def test_lightnings_rank_0_times_world_is_wrong_on_unequal_ranks() -> None:
    """Beside the sum that ours logs above, what Lightning divides by the seconds: 2.5 times as much."""
    counted = run_ranks(_fit, 4, None, True)[0]["lightning"]
    total = sum(work(rank) for rank in range(4))
    assert counted == [4 * work(0)] * len(counted)
    assert counted[0] / total > 2.4


def test_peers_that_hold_the_same_sequences_are_counted_once() -> None:
    """Two data-parallel ranks x two of another axis: half the FLOPs of four, on as many devices."""
    results = run_ranks(_fit, 4, [0, 1], False)
    total = work(0) + work(1)
    row = results[0]["rows"][-1][1]
    assert row["train/total_flops"] == STEPS * total
    assert row["train/device/flops_per_sec"] == pytest.approx(total / 4 / 0.5)


def _counted() -> float:
    from lightning_thd.callbacks import THDFlops

    metric = THDFlops(FLOPS)
    for batch in batches_of(dist.get_rank()):
        metric.update(batch.stats)
    return float(metric.compute())


def test_the_metric_sums_over_ranks() -> None:
    total = sum(work(rank) for rank in range(2))
    assert run_ranks(_counted, 2) == [STEPS * total] * 2
