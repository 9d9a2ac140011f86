"""Public functions of data, for ``tests.fuzz``."""

from __future__ import annotations

import json
import random
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.data import (
    ByteTokenizer,
    StdlibText,
    THDDataModule,
    TokenStore,
    read_documents,
    stdlib_documents,
)
from lightning_thd.data.streams import Stream
from lightning_thd.data.streams.shards import is_stream
from lightning_thd.packing import Packs
from lightning_thd.packing.mixtures import Mixing
from tests.fuzz import Entry

_KEPT = tempfile.TemporaryDirectory()  # goes with the process
HERE = Path(_KEPT.name)
_NUMBERS = count()
(HERE / "a.jsonl").write_text("".join(json.dumps({"text": "word " * k}) + "\n" for k in range(1, 6)))
TokenStore.from_rows([[1, 2], [3]]).save(HERE / "store")
TOKENIZE = ByteTokenizer()


def _new() -> Path:
    return HERE / f"new{next(_NUMBERS)}"


def _rows(rng: random.Random) -> list[dict[str, Any]]:
    made = []
    for _ in range(rng.randint(1, 9)):
        ids = [rng.randint(0, 99) for _ in range(rng.randint(1, 20))]
        made.append({"input_ids": rng.choice([list, np.array])(ids)})
    return made


def _module(rng: random.Random) -> dict[str, Any]:
    source: Any = rng.choice([_rows(rng), str(HERE / "a.jsonl"), [HERE / "a.jsonl"], HERE / "store"])
    if rng.random() < 0.3:
        source = {"a": (source, 0.5), "b": (_rows(rng), 0.5)}
    arguments = {
        "train": source,
        "capacity": 32,
        "global_batch": rng.choice([None, Packs(2)]),
        "val": rng.choice([None, _rows(rng), {"a": _rows(rng), "b": str(HERE / "a.jsonl")}]),
        "tokenizer": rng.choice([None, TOKENIZE]),
        "oversize": rng.choice(["drop", "truncate", "split", "own_pack"]),
        "cache_dir": HERE / "cache",
    }
    more = {
        "text_key": "text",
        "append_eos": True,
        "records": "auto",
        "metadata_keys": ("topic",),
        "packed": "off",
        "empty": "drop",
        "on_error": "skip",
        "max_errors": 10,
        "tail": "pad",
        "window": 16,
        "seed": 3,
        "schedule": None,
        "scheduler": None,
        "cost": None,
        "pad_to": 64,
        "mixing": Mixing(),
        "vocab_size": 300,
        "num_workers": 0,
        "prefetch_factor": None,
        "pin_memory": False,
        "test": _rows(rng),
        "predict": _rows(rng),
    }
    return arguments | {name: more[name] for name in rng.sample(list(more), 3)}


def _run_module(**given: Any) -> list[THDBatch]:
    module = THDDataModule(**given)
    if given["global_batch"] == Packs(2):
        module.attach(accumulate=2)
    module.prepare_data()
    batches = []
    for stage in ("fit", "test", "predict"):
        module.setup(stage)
    for name in ("train", "val", "test", "predict"):
        if given.get(name) is not None:
            loaders = getattr(module, f"{name}_dataloader")()
            for loader in loaders if isinstance(loaders, list) else [loaders]:
                batches += [next(iter(loader))]
    return batches


def _stream(rng: random.Random) -> dict[str, Any]:
    return {
        "source": str(HERE / "a.jsonl"),
        "window": 4,
        "shuffle_buffer": rng.choice([0, 3]),
        "steps_per_epoch": rng.choice([None, 2]),
        "on_error": "raise",
        "max_errors": None,
        "timeout_s": 60.0,
    }


def _run_stream(**given: Any) -> THDBatch | THDStep:
    module = THDDataModule(Stream(**given), capacity=64, oversize="truncate")
    module.setup("fit")
    return next(iter(module.train_dataloader()))


TABLE = {
    "data.THDDataModule": Entry(_run_module, _module),
    "data.ByteTokenizer()": Entry(TOKENIZE, lambda _: {"text": "hi \u00e4", "add_special_tokens": True}),
    "data.ByteTokenizer.decode": Entry(
        lambda ids: TOKENIZE.decode(ids), lambda rng: {"ids": rng.choice([list, np.array])([104, 105, 257])}
    ),
    "data.TokenStore": Entry(
        TokenStore,
        lambda rng: {
            "tokens": np.arange(5),
            "offsets": np.array([0, 2, 5]),
            "labels": rng.choice([None, np.arange(5)]),
            "loss_tokens": rng.choice([None, [1, 2]]),
        },
    ),
    "data.TokenStore.from_rows": Entry(
        lambda rows: TokenStore.from_rows(rows), lambda rng: {"rows": [[1, 2], np.array([3])]}
    ),
    "data.TokenStore.open": Entry(
        lambda folder: TokenStore.open(folder), lambda _: {"folder": HERE / "store"}
    ),
    "data.TokenStore.save": Entry(
        lambda folder: TokenStore.from_rows([[1]]).save(folder), lambda _: {"folder": _new()}, also=(OSError,)
    ),
    "data.read_documents": Entry(
        lambda path, text_key: list(read_documents(path, text_key=text_key)),
        lambda _: {"path": HERE / "a.jsonl", "text_key": "text"},
    ),
    "data.stdlib_documents": Entry(stdlib_documents, lambda _: {"max_bytes": 10}),
    "data.StdlibText": Entry(StdlibText, lambda _: {"max_bytes": 10}),
    "data.streams.Stream": Entry(Stream, _stream),
    "data.streams.Stream read": Entry(_run_stream, _stream),
    "data.streams.is_stream": Entry(is_stream, lambda _: {"source": iter([1])}),
}
