"""Public functions of parallel, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.parallel import shard_batch, shard_step
from lightning_thd.parallel.pipeline import (
    LayerCost,
    Schedule,
    Split,
    expected_bubble,
    make_schedule,
    split_layers,
)
from tests.fuzz import Entry

BATCH = THDBatch.collate(
    [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}], align=Alignment.for_(cp=2, layout="dual_chunk")
)
SCHEDULE = make_schedule(2, 4)
SPLIT = split_layers([LayerCost(flops=1.0)] * 4, ranks=2)


def _cut(rng: random.Random) -> dict[str, Any]:
    return {
        "batch": BATCH,
        "group": None,
        "cp": 2,
        "rank": rng.choice([0, 1]),
        "layout": rng.choice(["dual_chunk", "contiguous"]),
        "communication": rng.choice(["auto", "all_gather"]),
    }


def _half(given: dict[str, Any], shard: THDBatch) -> None:
    assert 2 * len(shard.input_ids) == len(BATCH.input_ids)


def _steps(rng: random.Random) -> dict[str, Any]:
    return {"step": THDStep([BATCH, BATCH]), "group": None, "cp": 2, "rank": 0, "layout": "dual_chunk"}


def _layers(rng: random.Random) -> dict[str, Any]:
    return {
        "layers": [LayerCost(flops=1.0 + rng.random()) for _ in range(rng.randint(4, 9))],
        "ranks": 2,
        "stages_per_rank": rng.choice([1, 2]),
        "embedding": rng.choice([None, LayerCost(flops=0.5)]),
        "head": rng.choice([None, LayerCost(flops=2)]),
        "split": "auto",
    }


TABLE = {
    "parallel.shard_batch": Entry(shard_batch, _cut, _half),
    "parallel.shard_step": Entry(shard_step, _steps),
    "parallel.pipeline.LayerCost": Entry(LayerCost, lambda rng: {"flops": rng.random(), "parameters": 3}),
    "parallel.pipeline.Schedule": Entry(
        Schedule, lambda _: {name: getattr(SCHEDULE, name) for name in Schedule.__dataclass_fields__}
    ),
    "parallel.pipeline.Split": Entry(
        Split, lambda _: {name: getattr(SPLIT, name) for name in Split.__dataclass_fields__}
    ),
    "parallel.pipeline.expected_bubble": Entry(
        expected_bubble, lambda _: {"ranks": 2, "microbatches": 4, "chunks": 1}
    ),
    "parallel.pipeline.make_schedule": Entry(
        make_schedule, lambda rng: {"ranks": 2, "microbatches": 4, "chunks": rng.choice([1, 2])}
    ),
    "parallel.pipeline.split_layers": Entry(split_layers, _layers),
}
