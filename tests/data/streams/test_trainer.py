"""Streams under a Lightning Trainer: losses of the map-style planner, checkpoints, and peers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import Packs, Sequences, THDDataModule, THDDDPStrategy
from lightning_thd.data.streams import Stream
from tests.data.streams.jobs import samples_of, write_samples
from tests.data.support import make_trainer
from tests.ranks import run_ranks
from tests.tiny import TinyModule, largest_error, train_alone

CAPACITY = 48


class Seen(TinyModule):
    """Records the sequences of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, tuple[int, ...]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.append((self.global_step, batch.sequence_ids))
        return super().training_step(batch, batch_idx)


def fit(
    folder: str,
    *,
    packs: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train a pass over the shards; return parameters, losses and what each step held."""
    warnings.simplefilter("ignore")
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    cp = kwargs.pop("context_parallel_size", 1)
    plain = "thd" if ranks == 1 else THDDDPStrategy(context_parallel_size=cp, **kwargs.pop("strategy", {}))
    module = Seen()
    trainer = make_trainer(
        max_epochs=kwargs.pop("max_epochs", 1),
        devices=ranks,
        strategy=plain,
        accumulate_grad_batches=2 if packs else 1,
        gradient_clip_val=0.5,
    )
    data = THDDataModule(
        Stream(source=f"{folder}/*.jsonl", window=8, **kwargs),
        capacity=CAPACITY,
        global_batch=Packs(2 * ranks // cp) if packs else Sequences(6),
    )
    trainer.fit(module, data)
    return {
        "steps": module.steps,
        "losses": module.outputs,
        "parameters": {name: p.detach() for name, p in module.model.named_parameters()},
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def by_hand(samples: list[dict[str, Any]], steps: list[list[int]]) -> tuple[Any, list[float]]:
    """Train on the same steps, every sequence alone, the mean over all loss tokens."""
    module = TinyModule()
    optimizer = torch.optim.SGD(module.model.parameters(), lr=module.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return train_alone(module.model, samples_of(samples, steps), optimizer, schedule)


def grouped(runs: list[dict[str, Any]]) -> list[list[int]]:
    """List the sequences of every optimizer step over all ranks."""
    steps: dict[int, list[int]] = {}
    for one in runs:
        for step, ids in one["steps"]:
            steps.setdefault(step, []).extend(ids)
    return [steps[k] for k in sorted(steps)]


@pytest.mark.parametrize("packs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_is_the_mean_over_its_tokens(tmp_path: Path, packs: bool) -> None:
    samples = write_samples(tmp_path, 120)
    one = fit(str(tmp_path), packs=packs)
    steps = grouped([one])
    assert sorted(i for ids in steps for i in ids) == sorted(s << 40 | r for s in range(3) for r in range(40))
    assert packs or [len(ids) for ids in steps] == [6] * 20
    wanted, losses = by_hand(samples, steps)
    assert largest_error(one["parameters"], wanted) < 1e-12
    if not packs:
        assert one["losses"] == pytest.approx(losses, rel=1e-12)


def test_epochs_of_a_given_length(tmp_path: Path) -> None:
    write_samples(tmp_path, 60)
    one = fit(str(tmp_path), max_epochs=5, steps_per_epoch=4)
    assert (one["global_step"], one["epoch"]) == (20, 5)
    used = [i for ids in grouped([one]) for i in ids]
    assert len(set(used[:60])) == len(set(used[60:])) == 60


def job(folder: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return fit(folder, **kwargs)


def test_data_parallel_ranks_train_as_one(tmp_path: Path) -> None:
    samples = write_samples(tmp_path, 60)
    runs = run_ranks(job, 2, str(tmp_path), {}, timeout_s=150)
    wanted, _ = by_hand(samples, grouped(runs))
    assert len(grouped(runs)) == 10
    for one in runs:
        assert largest_error(one["parameters"], wanted) < 1e-12


def test_ranks_that_share_a_pack_get_it_from_one_reader(tmp_path: Path) -> None:
    samples = write_samples(tmp_path, 36)
    runs = run_ranks(job, 2, str(tmp_path), {"context_parallel_size": 2}, timeout_s=150)
    assert runs[0]["steps"] == runs[1]["steps"]
    wanted, _ = by_hand(samples, grouped(runs[:1]))
    assert largest_error(runs[0]["parameters"], wanted) < 1e-12


def test_what_a_stream_cannot_do(tmp_path: Path) -> None:
    write_samples(tmp_path, 6)
    data = THDDataModule(Stream(source=f"{tmp_path}/*.jsonl"), capacity=CAPACITY, global_batch=Sequences(6))
    trainer = make_trainer(strategy="thd", overfit_batches=1)
    with pytest.raises(MisconfigurationException, match="overfit_batches repeats the first batches"):
        trainer.fit(Seen(), data)


@pytest.mark.parametrize(
    ("steps", "options", "batches"),
    [
        (None, {"limit_train_batches": 3}, None),
        (None, {"fast_dev_run": True}, None),
        (4, {"limit_train_batches": 0.4}, None),
        (None, {"limit_train_batches": 4}, 4),
        (4, {"limit_train_batches": 0.5}, 4),
        (4, {"limit_train_batches": 9}, 8),
    ],
)
def test_a_limit_inside_a_step_of_a_stream_is_refused(
    tmp_path: Path, steps: int | None, options: dict[str, Any], batches: int | None
) -> None:
    write_samples(tmp_path, 60)
    data = THDDataModule(Stream(source=f"{tmp_path}/*.jsonl", steps_per_epoch=steps), capacity=CAPACITY)
    trainer = make_trainer(accumulate_grad_batches=2, **options)
    module = Seen()
    if batches is None:
        with pytest.raises(MisconfigurationException, match="made whole: .* Take another multiple"):
            trainer.fit(module, data)
    else:
        trainer.fit(module, data)
        assert len(module.steps) == batches
