"""Public callbacks, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd.callbacks import ExpertBias, PackingCheck, THDFlops, THDThroughputMonitor
from lightning_thd.callbacks.cuda_graph import CUDAGraphCallback
from lightning_thd.cuda_graph import GraphCosts
from tests.flops.fuzz_table import FLOPS, STATS
from tests.fuzz import Entry


def _monitor(rng: random.Random) -> dict[str, Any]:
    return {
        "peak": rng.choice(["auto", 1e9]),
        "flops_model": rng.choice([None, FLOPS]),
        "causal": "half",
        "tokens": "real",
        "recompute": "auto",
        "every_n_steps": rng.choice([None, 5]),
        "warmup_steps": 1,
        "progress_bar": True,
        "clock": None,
    }


def _graphs(rng: random.Random) -> dict[str, Any]:
    return {
        "max_sequences": rng.choice(["auto", 8, [4, 8]]),
        "costs": rng.choice([None, GraphCosts()]),
        "require": False,
        "backend": rng.choice(["cuda", "recording"]),
    }


def _counted(**given: Any) -> float:
    metric = THDFlops(given["model"], work=given["work"])
    metric.update(given["stats"])
    return float(metric.compute())


TABLE = {
    "callbacks.ExpertBias": Entry(ExpertBias, lambda _: {"rate": 1e-3}),
    "callbacks.PackingCheck": Entry(
        PackingCheck,
        lambda _: {"model": None, "vocab_size": 64, "lengths": (3, 2), "grad": True, "loss": True},
    ),
    "callbacks.THDFlops": Entry(_counted, lambda _: {"model": FLOPS, "work": "training", "stats": STATS}),
    "callbacks.THDThroughputMonitor": Entry(
        THDThroughputMonitor, _monitor, also=(MisconfigurationException,)
    ),
    "callbacks.cuda_graph.CUDAGraphCallback": Entry(
        CUDAGraphCallback, _graphs, also=(MisconfigurationException,)
    ),
}
