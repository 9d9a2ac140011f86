"""Public functions of models, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

import torch

from lightning_thd.models import PackingReport, check_packing, packed, register_thd
from tests.batch.fuzz_table import BATCH
from tests.fuzz import Entry
from tests.tiny import tiny_llama

MODEL = tiny_llama(torch.float32)


def _checked(rng: random.Random) -> dict[str, Any]:
    return {
        "model": MODEL,
        "vocab_size": rng.choice([None, 64]),
        "lengths": rng.choice([[3, 1], (2, 3)]),
        "grad": rng.random() < 0.5,
        "tolerance": rng.choice([None, 1e-3]),
        "raise_on_leak": True,
        "seed": 1,
        "thorough": False,
        "loss_fn": None,
    }


def _no_leak(given: dict[str, Any], report: PackingReport) -> None:
    assert report.leak < 1e-5


def _packed(batch: Any) -> None:
    with packed(batch):
        pass


REPORT = check_packing(MODEL, lengths=(2, 3), thorough=False)
TABLE = {
    "models.check_packing": Entry(check_packing, _checked, _no_leak),
    "models.packed": Entry(_packed, lambda _: {"batch": BATCH}),
    "models.register_thd": Entry(register_thd, lambda _: {}),
}
