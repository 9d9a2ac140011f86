"""What a user does with a Trainer around the data module: hooks, subclasses, settings, odd checkpoints."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule
from lightning_thd.data.streams import Stream
from lightning_thd.module import CausalLMModule
from tests.data.support import CAPACITY, Rows, make_trainer
from tests.tiny import TinyModule, largest_error, sequences, tiny_llama

SAMPLES = sequences(40)


def weights(module: TinyModule) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.model.named_parameters()}


class Indices(BasePredictionWriter):
    """Keeps the indices that Lightning hands to writers of predictions."""

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any
    ) -> None:
        assert indices == [i for i, _ in prediction]
        self.of_batches = [*getattr(self, "of_batches", []), *indices]

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.of_epoch = [i for batch in indices[0] for i in batch]


def test_writers_of_predictions_get_the_indices_of_each_packs_sequences() -> None:
    writer = Indices("batch_and_epoch")
    data = THDDataModule(SAMPLES, capacity=CAPACITY, predict=SAMPLES)
    make_trainer(callbacks=[writer]).predict(CausalLMModule(tiny_llama), data)
    assert sorted(writer.of_batches) == list(range(len(SAMPLES)))
    assert writer.of_epoch == writer.of_batches


class SavesAt(L.Callback):
    """Saves a checkpoint when a hook is called for the n-th time."""

    def __init__(self, hook: str, call: int, path: Path) -> None:
        self._left, self._path = call, path
        setattr(self, hook, self._save)

    def _save(self, trainer: L.Trainer, *args: Any) -> None:
        self._left -= 1
        if not self._left:
            trainer.save_checkpoint(self._path)


@pytest.mark.filterwarnings("ignore:The stream is a generator")  # which gives the same rows again here
@pytest.mark.parametrize(
    ("train", "step", "hook", "call", "left"),
    [
        # Lightning still counts the batches of the epoch before there
        (SAMPLES, Packs(2), "on_train_epoch_start", 2, 2),
        # inside the first step of an epoch
        (Rows(*SAMPLES), Packs(2), "on_train_batch_start", 2, 3),
        # an epoch's last validation is no beginning of the next
        (Rows(*SAMPLES), Packs(2), "on_validation_end", 1, 2),
    ],
)
def test_a_checkpoint_of_any_hook_goes_on_with_what_is_left(
    train: Any, step: Packs | Sequences, hook: str, call: int, left: int, tmp_path: Path
) -> None:
    def run(module: TinyModule, *callbacks: L.Callback, ckpt_path: Path | None = None) -> int:
        trainer = make_trainer(
            max_epochs=3,
            strategy="thd",
            accumulate_grad_batches=2 if isinstance(step, Packs) else 1,
            callbacks=list(callbacks),
            num_sanity_val_steps=0,
        )
        data = THDDataModule(train, capacity=CAPACITY, global_batch=step, val=SAMPLES[:4])
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return trainer.global_step

    whole, resumed = TinyModule(), TinyModule()
    steps = run(whole, SavesAt(hook, call, tmp_path / "at.ckpt"))
    assert run(resumed, ckpt_path=tmp_path / "at.ckpt") == steps
    assert resumed.seen == whole.seen[len(whole.seen) - len(resumed.seen) :]
    assert sum(map(len, resumed.seen)) == 40 * left
    assert largest_error(weights(resumed), weights(whole)) < 1e-12


@pytest.mark.parametrize("step", [None, Sequences(7)])
@pytest.mark.parametrize("train", [SAMPLES, Rows(*SAMPLES)], ids=["planned", "streamed"])
def test_accumulation_changed_while_it_trains_is_refused(train: Any, step: Sequences | None) -> None:
    changes = GradientAccumulationScheduler({0: 1, 1: 2})
    trainer = make_trainer(max_epochs=2, strategy="thd", callbacks=[changes])
    with pytest.raises(MisconfigurationException, match=r"accumulate_grad_batches is 2, but was 1 when the"):
        trainer.fit(TinyModule(), THDDataModule(train, capacity=CAPACITY, global_batch=step))


@pytest.mark.parametrize("mixed", [False, True])
def test_hooks_of_the_users_module_run(mixed: bool) -> None:
    class Doubles(TinyModule):
        """Learns twice the loss, by way of its batches."""

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch.replace(loss_scale=2 * batch.loss_scale)

    def first_loss(module: TinyModule) -> float:
        train: Any = {"a": (SAMPLES, 1.0)} if mixed else SAMPLES
        make_trainer(max_steps=1).fit(module, THDDataModule(train, capacity=CAPACITY))
        return module.outputs[0]

    with pytest.warns(UserWarning, match="on_before_batch_transfer"):  # Lightning's own
        found = first_loss(Doubles())
    assert found == pytest.approx(2 * first_loss(TinyModule()), rel=1e-12)


def test_a_subclass_brings_loaders_of_its_own() -> None:
    class Own(THDDataModule):
        def predict_dataloader(self) -> Any:
            return DataLoader(torch.arange(3))

    class Looks(TinyModule):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return int(batch)

    assert make_trainer().predict(Looks(), Own(SAMPLES, capacity=CAPACITY)) == [0, 1, 2]


def test_capacity_and_step_hold_for_the_loaders_made_after_they_were_set() -> None:
    data = THDDataModule(SAMPLES, capacity=CAPACITY)
    data.setup("fit")
    small = list(data.train_dataloader())
    data.capacity = 3 * CAPACITY
    large = list(data.train_dataloader())
    assert max(batch.stats.slots for batch in small) <= CAPACITY < max(batch.stats.slots for batch in large)
    assert len(large) < len(small)
    data.global_batch = Sequences(7)
    assert [sum(map(len, step.microbatches)) for step in data.train_dataloader()] == [7, 7, 7, 7, 7, 5]


@pytest.mark.parametrize("strategy", ["auto", "thd"])
@pytest.mark.parametrize("train", [SAMPLES, Rows(*SAMPLES)], ids=["planned", "streamed"])
def test_a_training_loader_without_its_data_module_is_refused(train: Any, strategy: str) -> None:
    module, data = TinyModule(), THDDataModule(train, capacity=CAPACITY)
    data.setup("fit")
    with pytest.raises(MisconfigurationException, match=r"by itself.*fit\(module, datamodule=data\)"):
        make_trainer(strategy=strategy).fit(module, data.train_dataloader())
    assert not module.seen


def run_on(train: Any, folder: Path, first: dict[str, Any], then: dict[str, Any]) -> TinyModule:
    """Train, go on from the checkpoint that Lightning writes by default, and compare with one run."""

    def run(module: TinyModule, path: Path | None = None, **settings: Any) -> int:
        trainer = make_trainer(strategy="thd", num_sanity_val_steps=0, **settings)
        trainer.fit(module, THDDataModule(train, capacity=CAPACITY, val=SAMPLES[:4]), ckpt_path=path)
        return trainer.global_step

    begun, resumed, whole = TinyModule(), TinyModule(), TinyModule()
    saver = ModelCheckpoint(folder, filename="end")
    run(begun, callbacks=[saver, *first.pop("callbacks", [])], enable_checkpointing=True, **first)
    steps = run(resumed, folder / "end.ckpt", **then)
    assert run(whole, **then) == steps
    assert begun.seen + resumed.seen == whole.seen
    assert largest_error(weights(resumed), weights(whole)) < 1e-12
    return whole


class Stops(L.Callback):
    """Stops a fit in its fourth batch, as a Timer or an early stop does."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        trainer.should_stop = len(pl_module.seen) == 4  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The stream is a generator")  # which gives the same rows again here
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(
    ("train", "first", "then"),
    [
        # Lightning counts an epoch that was broken off as run, and would go on with the next
        (SAMPLES, {"max_epochs": -1, "max_steps": 5}, {"max_epochs": 2}),
        pytest.param(
            SAMPLES,
            {"max_epochs": 2, "callbacks": [Stops()]},
            {"max_epochs": 2, "val_check_interval": 2},
            marks=pytest.mark.slow,
        ),
        # under max_steps it would run one batch of an epoch that was complete, and lose the others
        (SAMPLES, {"max_epochs": 1}, {"max_epochs": -1, "max_steps": 14}),
        # the states of loaders are not restored at the end of an epoch: a stream began anew
        (
            Stream(source=Rows(*SAMPLES), steps_per_epoch=3),
            {"max_epochs": -1, "max_steps": 5},
            {"max_epochs": -1, "max_steps": 8},
        ),
    ],
)
def test_the_checkpoint_at_a_fits_end_goes_on(
    train: Any, first: dict[str, Any], then: dict[str, Any], tmp_path: Path
) -> None:
    whole = run_on(train, tmp_path, dict(first), then)
    assert len(whole.seen) > 7


def test_a_stream_goes_on_where_its_loader_is_asked_for_again() -> None:
    def seen(**settings: Any) -> list[tuple[int, ...]]:
        module = TinyModule()
        stream = Stream(source=Rows(*SAMPLES), steps_per_epoch=2)
        make_trainer(max_epochs=4, **settings).fit(module, THDDataModule(stream, capacity=CAPACITY))
        return module.seen

    class Widens(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.datamodule.capacity += 1  # type: ignore[attr-defined]

    plain = seen()
    assert seen(reload_dataloaders_every_n_epochs=1) == plain
    with pytest.warns(UserWarning, match="The stream is a generator"):
        widened = seen(reload_dataloaders_every_n_epochs=1, callbacks=[Widens()])
    used = sorted(i for ids in widened for i in ids)
    assert len(used) == len(set(used)) >= sum(map(len, plain))


@pytest.mark.filterwarnings("ignore:The stream is a generator")
@pytest.mark.parametrize("steps", [None, 3])
def test_another_fit_of_a_trainer_goes_on_in_a_stream(steps: int | None) -> None:
    def data() -> THDDataModule:
        return THDDataModule(Stream(source=Rows(*SAMPLES), steps_per_epoch=steps), capacity=CAPACITY)

    module, whole, given = TinyModule(), TinyModule(), data()
    trainer = make_trainer(max_epochs=-1, max_steps=2)
    for until in (2, 4, 5):
        trainer.fit_loop.epoch_loop.max_steps = until
        trainer.fit(module, given)
    make_trainer(max_epochs=-1, max_steps=5).fit(whole, data())
    assert module.seen == whole.seen
    make_trainer(max_epochs=-1, max_steps=2).fit(module, given)
    assert module.seen[5:] == whole.seen[:2]


class Accumulates(TinyModule):
    """Steps once every three batches, under manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: THDBatch, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx) / 3)
        if batch_idx % 3 == 2:
            optimizer: Any = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()  # type: ignore[union-attr]

    def on_train_batch_end(self, *args: Any) -> None:
        """There is no loss to keep."""


def test_a_module_that_accumulates_by_itself_names_its_packs() -> None:
    module, automatic = Accumulates(), TinyModule()
    data = THDDataModule(SAMPLES, capacity=CAPACITY, global_batch=Packs(3))
    make_trainer().fit(module, data)
    trainer = make_trainer(accumulate_grad_batches=3, gradient_clip_val=0.5)
    trainer.fit(automatic, THDDataModule(SAMPLES, capacity=CAPACITY))
    assert module.seen == automatic.seen
    assert largest_error(weights(module), weights(automatic)) < 1e-12
    with pytest.raises(MisconfigurationException, match=r"global_batch=Packs\(n=3\) but 1 data-parallel"):
        make_trainer().fit(TinyModule(), THDDataModule(SAMPLES, capacity=CAPACITY, global_batch=Packs(3)))


@pytest.mark.filterwarnings("ignore:The stream is a generator")  # which gives the same rows again here
@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tokens_of_a_mixtures_sources_go_on_after_a_resume(streamed: bool, tmp_path: Path) -> None:
    def logged(*callbacks: L.Callback, path: Path | None = None) -> dict[str, float]:
        logger = CSVLogger(tmp_path)
        trainer = make_trainer(
            max_epochs=2,
            accumulate_grad_batches=2,
            log_every_n_steps=3,
            logger=logger,
            callbacks=list(callbacks),
        )
        parts = {"a": SAMPLES[:25], "b": SAMPLES[25:]}
        train: Any = {name: (Rows(*rows) if streamed else rows, 0.5) for name, rows in parts.items()}
        trainer.fit(TinyModule(), THDDataModule(train, capacity=CAPACITY), ckpt_path=path)
        logger.save()
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            last = [row for row in csv.DictReader(file) if row.get("data/a/tokens")][-1]
        return {name: float(last[f"data/{name}/tokens"]) for name in parts}

    # the second batch of the fourth step has begun: the step is run, and counted, again
    whole = logged(SavesAt("on_train_batch_start", 8, tmp_path / "at.ckpt"))
    assert logged(path=tmp_path / "at.ckpt") == whole
    assert min(whole.values()) > 0
