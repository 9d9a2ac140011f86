"""Public functions of strategies, for ``tests.fuzz``."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd.strategies import (
    THDDDPStrategy,
    THDModelParallelStrategy,
    THDSingleDeviceStrategy,
    register_strategies,
)
from tests.fuzz import Entry


def _ddp(rng: random.Random) -> dict[str, Any]:
    return {
        "context_parallel_size": rng.choice([1, 2]),
        "context_parallel_layout": rng.choice(["dual_chunk", "contiguous"]),
        "context_parallel_communication": rng.choice(["auto", "all_gather"]),
    }


def _model_parallel(rng: random.Random) -> dict[str, Any]:
    return {
        **_ddp(rng),
        "data_parallel_size": rng.choice(["auto", 2]),
        "data_parallel_replicas": 1,
        "tensor_parallel_size": rng.choice([1, 2]),
        "tensor_parallel_plan": None,
        "sequence_parallel": False,
        "reshard_after_forward": True,
        "process_group_backend": None,
        "timeout": timedelta(seconds=9),
        "pipeline_parallel_size": 1,
        "pipeline_schedule": "1f1b",
        "stages_per_rank": 1,
        "pipeline_split": "auto",
    }


TABLE = {
    "strategies.THDDDPStrategy": Entry(THDDDPStrategy, _ddp, also=(MisconfigurationException,)),
    "strategies.THDModelParallelStrategy": Entry(
        THDModelParallelStrategy, _model_parallel, also=(MisconfigurationException,)
    ),
    "strategies.THDSingleDeviceStrategy": Entry(
        THDSingleDeviceStrategy, lambda _: {"device": "cpu"}, also=(RuntimeError,)
    ),
    "strategies.register_strategies": Entry(register_strategies, lambda _: {}),
}
