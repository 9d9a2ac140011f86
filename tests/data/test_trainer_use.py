"""What a user does with a Trainer around the data module: hooks, settings, resuming, and leaving."""

from __future__ import annotations

import contextlib
import csv
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_thd import Sequences, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.data.streams import Stream
from lightning_thd.module import CausalLMModule
from tests.data.support import CAPACITY, Rows, make_trainer
from tests.ranks import run_ranks
from tests.scripts import run_python
from tests.tiny import TinyModule, largest_error, nll, sequences, tiny_llama

SAMPLES = sequences(40)


def weights(module: TinyModule) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.model.named_parameters()}


class Indices(BasePredictionWriter):
    """Keeps the indices that Lightning hands to writers of predictions."""

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.found = [i for batch in indices[0] for i in batch]
        assert self.found == [i for batch in predictions for i, _ in batch]


def test_writers_of_predictions_get_the_indices_of_each_packs_sequences() -> None:
    writer = Indices("epoch")
    data = THDDataModule(SAMPLES, capacity=CAPACITY, predict=[{**x, "label": 1} for x in SAMPLES])
    make_trainer(callbacks=[writer]).predict(CausalLMModule(tiny_llama), data)
    assert sorted(writer.found) == list(range(len(SAMPLES)))


class SavesAt(L.Callback):
    """Saves a checkpoint when a hook is called for the n-th time."""

    def __init__(self, hook: str, call: int, path: Path) -> None:
        self._left = call
        self._path = path
        setattr(self, hook, self._save)

    def _save(self, trainer: L.Trainer, *args: Any) -> None:
        self._left -= 1
        if not self._left:
            trainer.save_checkpoint(self._path)


@pytest.mark.parametrize("step", [None, Sequences(7)])
@pytest.mark.parametrize("train", [SAMPLES, Rows(*SAMPLES)], ids=["planned", "streamed"])
def test_accumulation_changed_while_it_trains_is_refused(train: Any, step: Sequences | None) -> None:
    changes = GradientAccumulationScheduler({0: 1, 1: 2})
    trainer = make_trainer(max_epochs=2, strategy="thd", callbacks=[changes])
    with pytest.raises(
        MisconfigurationException,
        match=r"accumulate_grad_batches is 2, but was 1 when the training steps were planned",
    ):
        trainer.fit(TinyModule(), THDDataModule(train, capacity=CAPACITY, global_batch=step))


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize(("step", "accumulate"), [(Sequences(7), 1), (None, 2)])
def test_a_step_that_reads_the_loader_itself_has_one_batch(step: Sequences | None, accumulate: int) -> None:
    class Reads(TinyModule):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            self.seen.append(batch.sequence_ids)
            return causal_lm_loss(self.model, batch)

    trainer = make_trainer(max_steps=2, strategy="thd", accumulate_grad_batches=accumulate)
    with pytest.raises(MisconfigurationException, match="reads batches itself"):
        trainer.fit(Reads(), THDDataModule(SAMPLES, capacity=CAPACITY, global_batch=step))
    module = Reads()
    make_trainer(max_steps=2, strategy="thd").fit(module, THDDataModule(SAMPLES, capacity=CAPACITY))
    assert len(module.seen) == 2


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
        loss = first_loss(Doubles())
    assert loss == pytest.approx(2 * first_loss(TinyModule()), rel=1e-12)


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
    data.num_workers = 1  # also to tokenise and count
    assert data._settings.opener.num_workers == 1


@pytest.mark.parametrize("strategy", ["auto", "thd"])
@pytest.mark.parametrize("train", [SAMPLES, Rows(*SAMPLES)], ids=["planned", "streamed"])
def test_a_training_loader_without_its_data_module_is_refused(train: Any, strategy: str) -> None:
    module = TinyModule()
    data = THDDataModule(train, capacity=CAPACITY)
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

    begun = TinyModule()
    resumed = TinyModule()
    whole = TinyModule()
    saver = ModelCheckpoint(folder, filename="end")
    run(begun, callbacks=[saver], enable_checkpointing=True, **first)
    steps = run(resumed, folder / "end.ckpt", **then)
    assert run(whole, **then) == steps
    assert begun.seen + resumed.seen == whole.seen
    assert largest_error(weights(resumed), weights(whole)) < 1e-12
    return whole


@pytest.mark.filterwarnings("ignore:The stream cannot save its position")  # it gives the same rows again
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(
    ("train", "first", "then"),
    [
        # Lightning counts an epoch that was broken off as run, and would go on with the next
        (SAMPLES, {"max_epochs": -1, "max_steps": 5}, {"max_epochs": 2}),
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
    whole = run_on(train, tmp_path, first, then)
    assert len(whole.seen) > 7


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_stop_before_an_epochs_first_batch_loses_no_epoch(epoch: int, tmp_path: Path) -> None:
    class Stops(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.current_epoch == epoch - 1

    module = TinyModule()
    whole = TinyModule()
    trainer = make_trainer(max_epochs=3, callbacks=[Stops()])
    trainer.fit(module, THDDataModule(SAMPLES, capacity=CAPACITY))
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    for fitted, path in ((module, tmp_path / "stopped.ckpt"), (whole, None)):
        make_trainer(max_epochs=3).fit(fitted, THDDataModule(SAMPLES, capacity=CAPACITY), ckpt_path=path)
    assert module.seen == whole.seen


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
    with pytest.warns(UserWarning, match="The stream cannot save its position"):
        widened = seen(reload_dataloaders_every_n_epochs=1, callbacks=[Widens()])
    used = sorted(i for ids in widened for i in ids)
    assert len(used) == len(set(used)) >= sum(map(len, plain))


@pytest.mark.filterwarnings("ignore:The stream cannot save its position")
@pytest.mark.parametrize("steps", [None, 3])
def test_another_fit_of_a_trainer_goes_on_in_a_stream(steps: int | None) -> None:
    def data() -> THDDataModule:
        return THDDataModule(Stream(source=Rows(*SAMPLES), steps_per_epoch=steps), capacity=CAPACITY)

    module = TinyModule()
    whole = TinyModule()
    datamodule = data()
    trainer = make_trainer(max_epochs=-1, max_steps=2)
    for until in (2, 4, 5):
        trainer.fit_loop.epoch_loop.max_steps = until
        trainer.fit(module, datamodule)
    make_trainer(max_epochs=-1, max_steps=5).fit(whole, data())
    assert module.seen == whole.seen
    make_trainer(max_epochs=-1, max_steps=2).fit(module, datamodule)
    assert module.seen[5:] == whole.seen[:2]


class FailsOnce(L.Callback):
    at = 9

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == self.at:
            self.at = -1
            raise KeyError


@pytest.mark.filterwarnings("ignore:The stream cannot save its position")  # it gives the same rows again
@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tokens_of_a_mixtures_sources_go_on_after_a_resume(streamed: bool, tmp_path: Path) -> None:
    parts = {"a": SAMPLES[:25], "b": SAMPLES[25:]}

    def make_data() -> THDDataModule:
        train: Any = {name: (Rows(*rows) if streamed else rows, 0.5) for name, rows in parts.items()}
        return THDDataModule(train, capacity=CAPACITY)

    def logged(data: Any, *callbacks: L.Callback, path: Path | None = None) -> dict[str, float]:
        logger = CSVLogger(tmp_path)
        options: Any = {"accumulate_grad_batches": 2, "log_every_n_steps": 3, "callbacks": list(callbacks)}
        trainer = make_trainer(max_epochs=2, logger=logger, **options)
        with contextlib.suppress(KeyError):
            trainer.fit(TinyModule(), data, ckpt_path=path)
        if trainer.state.status == "interrupted":
            trainer.fit(TinyModule(), data, ckpt_path=tmp_path / "at.ckpt")
        logger.save()
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            last = [row for row in csv.DictReader(file) if row.get("data/a/tokens")][-1]
        return {name: float(last[f"data/{name}/tokens"]) for name in parts}

    # the second batch of the fourth step has begun: the step is run, and counted, again
    first = make_data()
    whole = logged(first, SavesAt("on_train_batch_start", 8, tmp_path / "at.ckpt"))
    for data, others in ((first, ()), (make_data(), ()), (make_data(), (FailsOnce(),))):
        assert logged(data, *others, path=None if others else tmp_path / "at.ckpt") == whole
    assert min(whole.values()) > 0


LENGTH = 4
ROWS = 7
EPOCHS = 2
LIMITS = ("none", "below", "above", "not a multiple")


class Steps(DummyLogger):
    """Keeps the steps at which the weight was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.steps += [step] if "weight" in metrics else []


class Records(L.LightningModule):
    """Records each batch with its epoch, and where the optimizer steps; saves after each batch and epoch."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.folder = folder
        self.events: list[Any] = []
        self.logger_of_steps = Steps()
        self.saved: dict[Path, int] = {}  # checkpoint -> events before the first that a resumed fit repeats

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.events.append((self.current_epoch, batch.input_ids.tolist()))
        self.log("weight", self.weight.detach())
        return self.weight * batch.input_ids.sum() * batch.loss_scale

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.events.append("step")

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        """Validate nothing."""

    def on_train_epoch_start(self) -> None:
        self._save("begin")  # Lightning still counts the batches of the epoch before there

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._save("batch")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._save("batched")

    def on_validation_end(self) -> None:
        self._save("validated")  # which is no beginning of the next epoch

    def on_train_epoch_end(self) -> None:
        self._save("epoch")

    def on_train_end(self) -> None:
        self._save("end")

    def _save(self, name: str) -> None:
        if self.folder is not None:
            path = self.folder / f"{name}{len(self.saved)}.ckpt"
            self.trainer.save_checkpoint(path)
            whole = [number for number, event in enumerate(self.events, 1) if event == "step"]
            self.saved[path] = whole[-1] if whole else 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def source(kind: str) -> Any:
    rows = [{"input_ids": [i] * LENGTH} for i in range(9)]
    if kind == "map":
        return rows[:ROWS]
    if kind == "stream":
        return Rows(*rows[:ROWS])
    a, b = (rows[:4], rows[4:]) if kind == "mixture" else (Rows(*rows[:4]), Rows(*rows[4:]))
    return {"a": (a, 0.5), "b": (b, 0.5)}


def fit(module: Records, kind: str, accumulate: int, limit: str, *, epochs: int, path: Any = None) -> None:
    batches = {"none": None, "below": accumulate, "above": 24, "not a multiple": accumulate + 1}[limit]
    trainer = make_trainer(
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        limit_train_batches=batches,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=module.logger_of_steps,
    )
    data = THDDataModule(source(kind), capacity=LENGTH, val=[{"input_ids": [1]}])
    trainer.fit(module, data, ckpt_path=path)
    if path is None:
        module.trainer = trainer
        module._save("finished")


def check(kind: str, accumulate: int, limit: str, folder: Path, *, only: tuple[str, ...] = ()) -> int:
    """Resume from every checkpoint of a fit, for as many epochs and one more; return how many were tried."""
    whole = Records(folder)
    longer = Records()
    fit(whole, kind, accumulate, limit, epochs=EPOCHS)
    fit(longer, kind, accumulate, limit, epochs=EPOCHS + 1)

    assert longer.events[: len(whole.events)] == whole.events
    tried = 0

    for path, begun in whole.saved.items():
        if only and path.stem not in only:
            continue
        for epochs, expected in ((EPOCHS, whole.events), (EPOCHS + 1, longer.events)):
            resumed = Records()
            fit(resumed, kind, accumulate, limit, epochs=epochs, path=path)
            assert resumed.events == expected[begun:], f"{path.stem}, {epochs} epochs"
            steps = range(expected[:begun].count("step"), expected.count("step"))
            assert resumed.logger_of_steps.steps == [*steps], f"{path.stem}, {epochs} epochs"
            tried += 1

    return tried


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The stream cannot save its position")  # it gives the same rows again
@pytest.mark.parametrize("kind", ["map", "mixture", "stream", "streamed mixture"])
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_resumed_fit_trains_on_what_is_left(kind: str, accumulate: int, limit: str, tmp_path: Path) -> None:
    if kind.startswith("stream") and limit == "not a multiple" and accumulate > 1:
        pytest.skip("refused: a stream's steps are made whole")
    assert check(kind, accumulate, limit, tmp_path) > 8


@pytest.mark.filterwarnings("ignore:The stream cannot save its position")
@pytest.mark.parametrize(
    ("kind", "accumulate", "limit", "only"),
    [
        ("map", 3, "not a multiple", ("batch7", "batched8", "epoch10", "begin11", "batched15", "finished23")),
        ("mixture", 2, "none", ("batched25",)),
        ("stream", 2, "above", ("batched16", "epoch17", "batched20", "finished37")),
        ("stream", 2, "none", ("batch7", "batch15", "validated17", "begin19")),
        ("map", 2, "below", ("batch3",)),
    ],
)
def test_a_sample_of_the_matrix(kind: str, accumulate: int, limit: str, only: Any, tmp_path: Path) -> None:
    assert check(kind, accumulate, limit, tmp_path, only=only) == 2 * len(only)


# A forked process calls `os._exit` when all handlers have run: tests/scripts.py. Here it ends as Python does.
SCRIPT = """
import ctypes, os, random, sys, threading, time

def look_and_end(code):
    left = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if left:
        print("threads are left:", left, flush=True)
    ctypes.pythonapi.Py_Exit(3 if left else code)

os._exit = look_and_end
import torch
from lightning_thd import Sequences, THDDataModule
from lightning_thd.data.streams import Stream

class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            square = torch.randn(64, 64) @ torch.randn(64, 64)
            yield {"input_ids": torch.randint(0, 60, (int(square.abs().sum()) % 20 + 2,))}

def leave(random):
    rows = [{"input_ids": [i % 60] * 9} for i in range(300)]
    train = Stream(Rows(), window=8) if random.random() < 0.7 else rows
    data = THDDataModule(train, capacity=64, global_batch=Sequences(random.choice([4, 64])))
    data.setup("fit")
    loader = data.train_steps()
    steps = iter(loader)
    for _ in range(random.randrange(1, 5)):
        next(steps)
    time.sleep(random.random() * 0.05)
    how = random.randrange(4)
    if how == 0:
        del steps, loader, data
    elif how == 1:
        next(iter(loader))
    elif how == 2:
        globals()["kept"] = steps
    sys.exit(0)

for seed in range(int(sys.argv[1])):
    pid = os.fork()
    if not pid:
        leave(random.Random(seed))
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"seed {seed} ended with {status}")
"""


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_processes_end_whenever_they_leave_a_loop(count: int) -> None:
    run_python("-c", SCRIPT, count, timeout_s=600.0)


SETS = {"code": sequences(9, seed=1), "prose": sequences(4, seed=2)}


class LogsSets(TinyModule):
    """Logs by the names that its batches carry; a rate of zero, so that nothing ever improves."""

    def validation_step(self, batch: THDBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = causal_lm_loss(self.model, batch)
        self.log(f"val/loss/{batch.set_name}", loss, sync_dist=True, add_dataloader_idx=False)


def fit_until_stopped(folder: str) -> tuple[dict[str, float], int, str]:
    warnings.filterwarnings("ignore", ".*(accelerator|num_workers|does not have many workers).*")
    stop = EarlyStopping("val/loss/code", patience=2, verbose=False)
    keep = ModelCheckpoint(folder, monitor="val/loss/prose", filename="best-{epoch}")
    world = {"strategy": "thd_ddp", "devices": dist.get_world_size(), "enable_checkpointing": True}
    trainer = make_trainer(max_epochs=9, callbacks=[stop, keep], **world)
    data = THDDataModule(sequences(12), capacity=CAPACITY, val=SETS, global_batch=Sequences(4))
    trainer.fit(LogsSets(lr=0.0), data)
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
    return metrics, trainer.current_epoch, Path(keep.best_model_path).name


@pytest.mark.parametrize("ranks", [1, 2])
def test_callbacks_stop_and_save_by_the_metric_of_a_named_set(ranks: int, tmp_path: Path) -> None:
    expected = {}
    with torch.no_grad():
        for name, rows in SETS.items():
            losses = [nll(TinyModule().model, row) for row in rows]
            expected[f"val/loss/{name}"] = float(sum(x for x, _ in losses)) / sum(n for _, n in losses)
    for metrics, epochs, kept in run_ranks(fit_until_stopped, ranks, str(tmp_path)):
        assert metrics == pytest.approx(expected, rel=1e-6)
        assert epochs == 3  # the first and two that were no better
        assert kept == "best-epoch=0.ckpt"


@pytest.mark.parametrize(("run", "name"), [("validate", "val"), ("test", "test"), ("predict", "predict")])
def test_an_evaluation_without_data_asks_for_its_argument(run: str, name: str) -> None:
    data = THDDataModule(SAMPLES, capacity=CAPACITY)
    with pytest.raises(MisconfigurationException, match="was not set up for 'train'. Pass it as datamodule="):
        data.train_dataloader()
    with pytest.raises(MisconfigurationException, match=rf"no data for '{name}'. Pass .*, {name}="):
        getattr(data, f"{name}_dataloader")()
    with pytest.raises(MisconfigurationException, match=rf"no data for '{name}'. Pass .*, {name}="):
        getattr(make_trainer(), run)(Indexed(), datamodule=data)


class Indexed(TinyModule):
    """Tests like it validates."""

    test_step = TinyModule.validation_step
