"""Streams under a Trainer, on ranks that share a pack, and in Accelerate's loops."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd import Packs, Sequences, THDDataModule, THDDDPStrategy
from lightning_thd.data.streams import Stream
from tests.data.streams.jobs import samples_of, write_samples
from tests.data.support import CAPACITY, make_trainer
from tests.integrations.support import make_loop, run
from tests.ranks import run_ranks
from tests.strategies import jobs
from tests.strategies.jobs import Job, Layout, family_model, full_parameters, make_optimizer
from tests.tiny import TinyModule, largest_error, train_alone


class Seen(TinyModule):
    """Records the sequences of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, tuple[int, ...]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.append((self.global_step, batch.sequence_ids))
        return super().training_step(batch, batch_idx)


def fit(folder: str, *, packs: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Train a pass over the shards; return parameters, losses and what each step held."""
    warnings.simplefilter("ignore")
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    cp = kwargs.pop("context_parallel_size", 1)
    shared = THDDDPStrategy(context_parallel_size=cp, broadcast_data=kwargs.pop("broadcast_data", False))

    module = Seen()
    trainer = make_trainer(
        max_epochs=kwargs.pop("max_epochs", 1),
        devices=ranks,
        strategy="thd" if ranks == 1 else shared,
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
    expected, losses = by_hand(samples, steps)
    assert largest_error(one["parameters"], expected) < 1e-12
    if not packs:
        assert one["losses"] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("broadcast", [None, False, True])
def test_ranks_train_as_one_and_those_that_share_a_pack_get_it_from_one_reader(
    tmp_path: Path, broadcast: bool | None
) -> None:
    samples = write_samples(tmp_path, 36)
    options: Any = {} if broadcast is None else {"context_parallel_size": 2, "broadcast_data": broadcast}
    runs = run_ranks(partial(fit, **options), 2, str(tmp_path), timeout_s=150)
    readers = runs[:1] if options else runs
    assert not options or runs[0]["steps"] == runs[1]["steps"]
    assert len(grouped(readers)) == 6
    expected, _ = by_hand(samples, grouped(readers))
    assert largest_error(runs[-1]["parameters"], expected) < 1e-12


@pytest.mark.parametrize(
    ("steps", "options", "batches"),
    [
        (None, {"limit_train_batches": 3}, None),
        (None, {"fast_dev_run": True}, None),
        (None, {"overfit_batches": 1}, None),
        (4, {"limit_train_batches": 0.4}, None),
        (None, {"limit_train_batches": 4}, 4),
        (4, {"limit_train_batches": 0.5}, 4),
        (4, {"limit_train_batches": 9}, 8),
    ],
)
def test_a_limit_inside_a_step_of_a_stream_is_refused_and_others_lose_nothing(
    tmp_path: Path, steps: int | None, options: dict[str, Any], batches: int | None
) -> None:
    write_samples(tmp_path, 60)
    data = THDDataModule(Stream(source=f"{tmp_path}/*.jsonl", steps_per_epoch=steps), capacity=CAPACITY)
    trainer = make_trainer(accumulate_grad_batches=2, max_epochs=2, **options)
    module = Seen()
    if batches is None:
        with pytest.raises(MisconfigurationException, match="would cut the last step|overfit_batches"):
            trainer.fit(module, data)
    else:
        trainer.fit(module, data)
        assert len(module.steps) == 2 * batches
        used = [i for _, ids in module.steps for i in ids]
        assert len(set(used[:60])) == len(used[:60])


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
    data = Watched(Stream(f"{folder}/*.jsonl", window=8), capacity=jobs.CAPACITY, global_batch=Sequences(12))
    trainer = jobs.make_trainer(layout, max_steps=STEPS)
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
    expected, _ = train_alone(model, samples_of(samples, steps), make_optimizer(model))
    for one in ranks:
        for name, value in one["params"].items():
            assert float((value - expected[name]).abs().max()) < 1e-9, name


def accelerated(folder: str, steps: int, saved: str, resume: bool) -> Any:
    warnings.simplefilter("ignore")
    data = THDDataModule(Stream(f"{folder}/*.jsonl", window=8), capacity=48, global_batch=Sequences(12))
    accelerator, loop = make_loop("accelerate", None, data=data)
    if resume:
        accelerator.load_state(saved)
    parameters, _, seen = run(loop, steps, iter(loop.loader))
    if not resume:
        accelerator.save_state(saved)
    return parameters, [[i for ids in step for i in ids] for step in seen]


def test_an_accelerate_loop_streams_and_goes_on(tmp_path: Path) -> None:
    samples = write_samples(tmp_path)
    saved = str(tmp_path / "saved")
    first = run_ranks(accelerated, 2, str(tmp_path), 2, saved, False, timeout_s=150)
    rest = run_ranks(accelerated, 2, str(tmp_path), 9, saved, True, timeout_s=150)
    steps = [
        [i for _, seen in ranks for i in seen[k]] for ranks in (first, rest) for k in range(len(ranks[0][1]))
    ]
    assert sorted(i for ids in steps for i in ids) == sorted(s << 40 | r for s in range(3) for r in range(20))
    expected, _ = by_hand(samples, steps)
    for parameters, _ in rest:
        assert largest_error(parameters, expected) < 1e-12
