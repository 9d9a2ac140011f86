"""Public functions of integrations, for ``tests.fuzz``."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import accelerate
import lightning as L
import torch
import transformers
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import THDDataModule, causal_lm_loss
from lightning_thd.integrations import (
    PackedLoop,
    ThroughputCallback,
    packed_trainer,
    prepare_fabric,
    prepare_thd,
)
from tests.flops.fuzz_table import FLOPS
from tests.fuzz import Entry
from tests.tiny import sequences, tiny_llama

MODEL = tiny_llama(torch.float32)


_accelerator = cache(lambda: accelerate.Accelerator(cpu=True))
_fabric = cache(lambda: L.Fabric(accelerator="cpu", devices=1))


def _prepared(rng: random.Random) -> dict[str, Any]:
    return {
        "model": MODEL,
        "data": THDDataModule(sequences(9), capacity=48),
        "optimizer": torch.optim.SGD(MODEL.parameters(), lr=0.1),
        "loss_fn": causal_lm_loss,
        "router_balance": None,
        "peak": 1e9,
        "log_every_n_steps": 5,
        "context_parallel_size": 1,
        "context_parallel_layout": rng.choice(["dual_chunk", "contiguous"]),
        "context_parallel_communication": "auto",
    }


def _loop(**given: Any) -> PackedLoop:
    prepared = _prepared(random.Random(0))
    return prepare_fabric(_fabric(), **{**prepared, **given})


_CLASH = (MisconfigurationException,)
TABLE = {
    "integrations.ThroughputCallback": Entry(
        ThroughputCallback,
        lambda rng: {
            "peak": rng.choice(["auto", 1e9]),
            "flops_model": rng.choice([None, FLOPS]),
            "warmup_steps": rng.randint(0, 3),
        },
        also=(MisconfigurationException,),
    ),
    "integrations.prepare_thd=prepare_accelerate": Entry(
        prepare_thd,
        lambda rng: {"accelerator": _accelerator(), "scheduler": None, **_prepared(rng)},
        also=_CLASH,
    ),
    "integrations.prepare_fabric": Entry(
        prepare_fabric, lambda rng: {"fabric": _fabric(), "accumulate": 1, **_prepared(rng)}, also=_CLASH
    ),
    "integrations.PackedLoop": Entry(
        _loop, lambda _: {"peak": 1e9, "log_every_n_steps": 5, "accumulate": 1}, also=_CLASH
    ),
    "integrations.packed_trainer": Entry(
        packed_trainer, lambda rng: {"trainer_class": rng.choice([None, transformers.Trainer])}
    ),
}
