"""Public functions of flops, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

import torch

from lightning_thd import flops
from tests.fuzz import Entry
from tests.tiny import tiny_llama

MODEL = tiny_llama(torch.float32)
FLOPS = flops.FlopsModel.from_config(MODEL.config)
STATS = flops.SeqStats.from_lengths([4, 3])
IDS = torch.arange(7)[None]
LINEAR = torch.nn.Linear(4, 3)


def _counted(given: dict[str, Any], found: flops.FlopsBreakdown) -> None:
    assert 0 < found.model <= found.hardware


def _throughput(rng: random.Random) -> dict[str, Any]:
    return {
        "stats": STATS,
        "seconds": 0.5,
        "model": rng.choice([None, FLOPS]),
        "work": "training",
        "recompute": None,
        "microbatches": rng.choice([None, 2]),
        "devices": 1,
        "peak": rng.choice([None, 1e9]),
    }


TABLE = {
    "flops.FlopsModel": Entry(
        flops.FlopsModel,
        lambda _: {"name": "x", "layers": FLOPS.layers, "causal": "half", "tokens": "real", "merge": 4},
    ),
    "flops.FlopsModel.from_config": Entry(
        flops.FlopsModel.from_config,
        lambda rng: {"config": MODEL.config, "causal": rng.choice(["half", "full"])},
    ),
    "flops.FlopsModel.training_flops": Entry(
        FLOPS.training_flops, lambda rng: {"stats": STATS, "recompute": rng.choice([None, "full"])}, _counted
    ),
    "flops.FlopsModel.forward_flops": Entry(FLOPS.forward_flops, lambda _: {"stats": STATS}, _counted),
    "flops.FlopsModel.from_module": Entry(
        flops.FlopsModel.from_module,
        lambda _: {"module": LINEAR, "run": lambda: LINEAR(torch.ones(7, 4)), "stats": STATS},
    ),
    "flops.from_module": Entry(
        flops.from_module,
        lambda _: {"module": LINEAR, "run": lambda: LINEAR(torch.ones(7, 4)), "stats": STATS},
    ),
    "flops.Chunk": Entry(flops.Chunk, lambda rng: {"size": rng.randint(1, 9)}),
    "flops.FlopsBreakdown": Entry(
        flops.FlopsBreakdown, lambda rng: {"linear": rng.randint(0, 9), "attention": 2, "logits": 0}
    ),
    "flops.Member": Entry(
        flops.Member,
        lambda rng: {"name": "a", "model": FLOPS, "training": rng.choice([0, 1.0]), "forward": 1.0},
    ),
    "flops.join": Entry(
        flops.join,
        lambda _: {"members": [flops.Member(name="a", model=FLOPS), flops.Member(name="b", model=FLOPS)]},
    ),
    "flops.measure_flops": Entry(
        flops.measure_flops, lambda _: {"device": "cpu", "dtype": torch.float32, "seconds": 0.001}
    ),
    "flops.peak_flops": Entry(
        flops.peak_flops,
        lambda rng: {"device_name": "NVIDIA H100", "dtype": rng.choice([torch.bfloat16, "fp8"])},
    ),
    "flops.throughput": Entry(flops.throughput, _throughput),
}
