"""Streams on ranks that share a pack (tensor, pipeline, context parallel) and in Accelerate's loops."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from lightning_thd import Sequences, THDDataModule, prepare_thd
from lightning_thd.data.streams import Stream
from tests.data.streams.jobs import samples_of, write_samples
from tests.ranks import run_ranks
from tests.strategies.jobs import (
    CAPACITY,
    Job,
    Layout,
    family_model,
    full_parameters,
    make_optimizer,
    make_trainer,
)
from tests.tiny import largest_error, tiny_llama, train_alone

STEPS = 3


class Watched(THDDataModule):
    """Writes down what the Trainer is handed."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.__dict__.setdefault("seen", []).append([b.sequence_ids for b in batch.microbatches])
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def train_dataloader(self) -> Any:
        self.loader = super().train_dataloader()
        return self.loader


def train(folder: str, layout: Layout) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    module = Job("qwen3@4" if layout.pp > 1 else "qwen3")
    data = Watched(Stream(f"{folder}/*.jsonl", window=8), capacity=CAPACITY, global_batch=Sequences(12))
    trainer = make_trainer(layout, max_steps=STEPS)
    trainer.fit(module, data)
    return {
        "params": full_parameters(module.model),
        "seen": data.seen,
        "read": data.loader.source.engine is not None,
        "losses": module.losses,
    }


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2),
        pytest.param(Layout(tp=2, dp=2), marks=pytest.mark.slow),
        pytest.param(Layout(cp=2, dp=2), marks=pytest.mark.slow),
    ],
    ids=lambda at: f"tp{at.tp}pp{at.pp}cp{at.cp}dp{at.dp}",
)
def test_peers_get_the_batch_of_one_reader(tmp_path: Path, layout: Layout) -> None:
    samples = write_samples(tmp_path)
    ranks = run_ranks(train, layout.world, str(tmp_path), layout, timeout_s=200)
    assert sum(one["read"] for one in ranks) == layout.dp
    readers = [one["seen"] for one in ranks if one["read"]]
    assert all(one["seen"] in readers for one in ranks)
    steps = [[i for seen in readers for batch in seen[k] for i in batch] for k in range(STEPS)]
    assert [len(set(ids)) for ids in steps] == [12] * STEPS
    model = family_model("qwen3@4" if layout.pp > 1 else "qwen3")
    wanted, _ = train_alone(model, samples_of(samples, steps), make_optimizer(model))
    for one in ranks:
        for name, value in one["params"].items():
            assert float((value - wanted[name]).abs().max()) < 1e-9, name


def accelerated(folder: str, steps: int, saved: str, resume: bool) -> Any:
    accelerator = accelerate.Accelerator(cpu=True)
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    data = THDDataModule(Stream(f"{folder}/*.jsonl", window=8), capacity=48, global_batch=Sequences(12))
    loop = prepare_thd(accelerator, model, data, optimizer, peak=1e9)
    if resume:
        accelerator.load_state(saved)
    seen = []
    for step in loop.loader:
        loop.backward(step)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        seen.append([i for batch in step.microbatches for i in batch.sequence_ids])
        if len(seen) == steps:
            break
    if not resume:
        accelerator.save_state(saved)
    inner = getattr(loop.model, "module", loop.model)
    return {name: p.detach().clone() for name, p in inner.named_parameters()}, seen


def test_an_accelerate_loop_streams_and_goes_on(tmp_path: Path) -> None:
    samples = write_samples(tmp_path)
    saved = str(tmp_path / "saved")
    first = run_ranks(accelerated, 2, str(tmp_path), 2, saved, False, timeout_s=150)
    rest = run_ranks(accelerated, 2, str(tmp_path), 9, saved, True, timeout_s=150)
    steps = [
        [i for _, seen in ranks for i in seen[k]] for ranks in (first, rest) for k in range(len(ranks[0][1]))
    ]
    assert sorted(i for ids in steps for i in ids) == sorted(s << 40 | r for s in range(3) for r in range(20))
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    wanted, _ = train_alone(model, samples_of(samples, steps), optimizer)
    for parameters, _ in rest:
        assert largest_error(parameters, wanted) < 1e-12
