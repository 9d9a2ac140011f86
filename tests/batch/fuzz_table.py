"""Public functions of batch, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch, THDStep, refuse_keys
from tests.fuzz import Entry

_FORMS = (list, np.array, torch.tensor)


def _sample(rng: random.Random) -> dict[str, Any]:
    ids = [rng.randint(0, 99) for _ in range(rng.randint(1, 6))]
    sample: dict[str, Any] = {"input_ids": rng.choice(_FORMS)(ids)}
    if rng.random() < 0.4:
        sample["labels"] = rng.choice(_FORMS)([i if rng.random() < 0.5 else -100 for i in ids])
    if rng.random() < 0.2:
        sample["next_label"] = rng.choice([-100, 5])
    if rng.random() < 0.2:
        sample["attention_mask"] = [1] * len(ids)
    if rng.random() < 0.2:
        sample["position_ids"] = list(range(len(ids)))
    return sample


def _samples(rng: random.Random) -> dict[str, Any]:
    samples = [_sample(rng) for _ in range(rng.randint(0, 4))]
    return {
        "samples": samples,
        "align": rng.choice([None, Alignment(sequence_multiple=2, total_multiple=4)]),
        "pad_to": rng.choice([None, 64]),
        "sequence_ids": rng.choice([None, list(range(7, 7 + len(samples)))]),
        "loss_scale": rng.choice([None, 0.5]),
        "windows": rng.choice([(), (4,)]),
    }


def _collated(given: dict[str, Any], batch: THDBatch) -> None:
    rows = batch.unpack(batch.input_ids)
    assert [r.tolist() for r in rows] == [[int(x) for x in s["input_ids"]] for s in given["samples"]]
    assert batch.loss_tokens == int((batch.targets != -100).sum())


def _one(rng: random.Random) -> dict[str, Any]:
    """Spread the keys of one sample over arguments, so that each may turn to junk."""
    ids = [rng.randint(0, 99) for _ in range(4)]
    return {
        "input_ids": rng.choice(_FORMS)(ids),
        "labels": rng.choice(_FORMS)(ids),
        "next_label": rng.choice([3, -100]),
        "weights": rng.choice([0.5, [1.0, 0.0, 2.0, 1.0]]),
        "token_type_ids": [0, 0, 1, 1],
        "attention_mask": rng.choice(_FORMS)([1] * 4),
        "position_ids": rng.choice([list(range(4)), np.zeros((3, 4), int)]),
        "pixel_values": torch.ones(4, 6),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }


def _rows(rng: random.Random) -> dict[str, Any]:
    form = rng.choice(_FORMS)
    return {
        "input_ids": form([[0, 5, 6], [7, 8, 9]]),
        "attention_mask": form([[0, 1, 1], [1, 1, 1]]),
        "labels": rng.choice([None, form([[0, -100, 6], [7, 8, 9]])]),
    }


BATCH = THDBatch.collate([{"input_ids": [5, 6]}, {"input_ids": [7]}])

TABLE = {
    "batch.refuse_keys": Entry(refuse_keys, lambda _: {"keys": ["pixel_values"]}),
    "THDBatch.collate": Entry(THDBatch.collate, _samples, _collated),
    "THDBatch.collate of one": Entry(lambda **sample: THDBatch.collate([sample]), _one),
    "THDBatch.collate of two": Entry(
        lambda a, b, c: THDBatch.collate([{"input_ids": [1], "x": a}, {"input_ids": [1], "x": b}, c]),
        lambda rng: {"a": torch.ones(1, 2), "b": torch.ones(3, 2), "c": _sample(rng)},
    ),
    "THDBatch.from_padded": Entry(THDBatch.from_padded, _rows),
    "THDBatch.unpack": Entry(BATCH.unpack, lambda rng: {"x": torch.zeros(rng.choice([(3,), (1, 3, 2)]))}),
    "THDBatch.to": Entry(BATCH.to, lambda rng: {"device": rng.choice(["cpu", torch.device("meta")])}),
    "THDBatch.replace": Entry(
        lambda name: BATCH.replace(**{name if isinstance(name, str) else "junk": 1.0}),
        lambda rng: {"name": "loss_scale"},
    ),
    "THDStep": Entry(THDStep, lambda rng: {"microbatches": [BATCH] * rng.randint(1, 3)}),
    "THDBatch": Entry(
        lambda **changes: THDBatch(**{n.lstrip("_"): getattr(BATCH, n) for n in BATCH.__slots__} | changes),
        lambda rng: {"input_ids": BATCH.input_ids, "sequence_ids": (1, 2), "boundaries": BATCH.boundaries},
    ),
    "junk in a sample": Entry(
        lambda key, value: THDBatch.collate([{"input_ids": [1, 2], key: value}]),
        lambda rng: {"key": "labels", "value": [1, 2]},
    ),
}
