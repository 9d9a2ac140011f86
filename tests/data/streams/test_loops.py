"""Streams in a Fabric loop: steps, gradients of the whole step, and a state that is saved with the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_thd import Sequences, THDDataModule
from lightning_thd.data.streams import Stream
from lightning_thd.integrations import prepare_fabric
from tests.tiny import sequences, tiny_llama


def train(folder: Path, *, steps: int, resume: bool) -> list[tuple[float, list[int]]]:
    fabric = L.Fabric(accelerator="cpu", devices=1)
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = THDDataModule(Stream(f"{folder}/*.jsonl", window=8), capacity=48, global_batch=Sequences(6))
    loop = prepare_fabric(fabric, model, data, optimizer, peak=1e12)
    saved: dict[str, Any] = {
        "model": loop.model,
        "optimizer": loop.optimizer,
        "loader": loop.loader,
        "loop": loop,
    }
    if resume:
        fabric.load(folder / "saved", saved)
    found = []
    for step in loop.loader:
        found.append((float(loop.backward(step)), [i for b in step.microbatches for i in b.sequence_ids]))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if len(found) == steps:
            break
    fabric.save(folder / "saved", saved)
    return found


def test_a_fabric_loop_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    samples = sequences(36, labels=True)
    lines = (json.dumps({key: value.tolist() for key, value in sample.items()}) for sample in samples)
    (tmp_path / "0.jsonl").write_text("\n".join(lines))
    whole = train(tmp_path, steps=6, resume=False)
    assert sorted(i for _, ids in whole for i in ids) == list(range(36))
    assert train(tmp_path, steps=2, resume=False) == whole[:2]
    assert train(tmp_path, steps=9, resume=True) == whole[2:]
