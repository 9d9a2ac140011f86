"""What the monitor logs of a fit, against sums made by hand."""

from __future__ import annotations

import contextlib
import csv
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_thd import THDDataModule, THDThroughputMonitor
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.callbacks.monitor import PARTS, StepMarks
from lightning_thd.flops import FlopsModel, SeqStats, measure_flops, peak_flops, throughput
from lightning_thd.report import read_metrics
from tests.callbacks.fits import (
    CONFIG,
    FLOPS,
    PEAK,
    UNEQUAL,
    Clock,
    Memory,
    Model,
    Module,
    flops_of,
    loader,
    monitor,
    pack,
    trainer,
)
from tests.device_reads import no_waiting
from tests.tiny import TinyModule, quiet_trainer, sequences
from tests.trackers import read_tensorboard, read_wandb, wandb_records


def fit(tmp_path: Path, batches: list[Any], *callbacks: L.Callback, **settings: Any) -> Memory:
    """Train on batches; without a clock, a monitor of its own measures the fit."""
    clock = settings.pop("clock", None)
    if clock is None:
        clock = Clock()
        callbacks = (*callbacks, monitor(clock, **settings.pop("measure", {})))
    module = settings.pop("module", None) or Module(clock, config=settings.pop("config", CONFIG))
    val = settings.pop("val", None)
    memory = Memory()
    run = trainer(tmp_path, *callbacks, **{"logger": memory, **settings})
    run.fit(module, loader(batches), loader(val) if val else None)
    return memory


def test_every_interval_holds_its_own_batches(tmp_path: Path) -> None:
    memory = fit(tmp_path, UNEQUAL)
    assert [step for step, _ in memory.rows] == [1, 3, 5]  # the steps that self.log would give
    for (_, row), start in zip(memory.rows, (0, 2, 4), strict=True):
        batches = UNEQUAL[start : start + 2]
        stats = batches[0].stats + batches[1].stats
        expected = throughput(stats, seconds=1.0, model=FLOPS, microbatches=2, peak=PEAK)
        for key, value in expected.items():
            assert row[f"train/{key}"] == pytest.approx(value, rel=1e-12), key
    assert memory.rows[-1][1]["train/total_flops"] == flops_of(UNEQUAL)
    last = memory.rows[-1][1]
    assert (last["train/time"], last["train/samples"]) == (pytest.approx(3.0), 11)
    assert last["train/lengths"] == sum(batch.stats.slots for batch in UNEQUAL)


def test_warmup_steps_are_left_out_of_the_rates_and_kept_in_the_totals(tmp_path: Path) -> None:
    memory = fit(tmp_path, UNEQUAL, measure={"warmup_steps": 3})
    assert ["train/device/mfu" in row for _, row in memory.rows] == [False, True, True]
    assert memory.rows[1][1]["train/device/flops_per_sec"] == pytest.approx(flops_of(UNEQUAL[3:4]) / 0.5)
    assert memory.rows[-1][1]["train/total_flops"] == flops_of(UNEQUAL)


def test_a_run_of_warmup_steps_rates_its_last_interval_by_its_own_time(tmp_path: Path) -> None:
    row = fit(tmp_path, UNEQUAL[:3], measure={"warmup_steps": 9}).rows[-1][1]
    assert row["train/device/flops_per_sec"] == pytest.approx(flops_of(UNEQUAL[2:3]) / 0.5)


def test_a_step_with_microbatches_counts_every_one_once(tmp_path: Path) -> None:
    steps = [THDStep(UNEQUAL[:3]), THDStep(UNEQUAL[3:4]), THDStep(UNEQUAL[4:])]
    rows = fit(tmp_path, steps, log_every_n_steps=3).rows
    assert len(rows) == 1
    row = rows[0][1]
    assert row["train/total_flops"] == flops_of(UNEQUAL)
    assert row["train/batches"] == 6


def test_the_last_steps_are_logged_if_only_the_monitor_has_an_interval(tmp_path: Path) -> None:
    memory = fit(tmp_path, UNEQUAL, measure={"every_n_steps": 4}, log_every_n_steps=0)
    assert [row["train/batches"] for _, row in memory.rows] == [4, 6]


def test_accumulation_closes_intervals_at_optimizer_steps(tmp_path: Path) -> None:
    memory = fit(tmp_path, UNEQUAL, log_every_n_steps=1, accumulate_grad_batches=3)
    assert [row["train/batches"] for _, row in memory.rows] == [3, 6]
    assert memory.rows[0][1]["train/device/flops_per_sec"] == pytest.approx(flops_of(UNEQUAL[:3]) / 1.5)


def test_validation_and_checkpoints_take_no_part_in_the_rates(tmp_path: Path) -> None:
    clock = Clock()
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    options: Any = {"val": UNEQUAL[:2], "val_check_interval": 2, "num_sanity_val_steps": 2}
    measures = monitor(clock)
    memory = fit(tmp_path, UNEQUAL, saver, measures, clock=clock, enable_checkpointing=True, **options)
    assert clock.now - 100 > 5000  # six checkpoints of 1000 s were saved
    train = [row for _, row in memory.rows if "train/device/mfu" in row]
    assert [row["train/time"] for row in train] == pytest.approx([1.0, 2.0, 3.0])
    assert train[-1]["train/total_flops"] == flops_of(UNEQUAL)
    validate = [row for _, row in memory.rows if "validate/device/mfu" in row]
    assert len(validate) == 3
    forward = sum(FLOPS.forward_flops(batch.stats).model for batch in UNEQUAL[:2])
    for row in validate:
        assert row["validate/device/flops_per_sec"] == pytest.approx(forward / 10.0)


def test_compiling_and_capturing_steps_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    graphs = iter([0, 0, 1, 1, 1, 1, 1])  # once at the start, then after every step: the second one compiles
    monkeypatch.setattr("lightning_thd.callbacks.monitor._compiled_graphs", lambda: next(graphs))
    watched = monitor(clock)

    class Capture(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                clock.sleep(77)
                watched.exclude_step()

    memory = fit(tmp_path, UNEQUAL, watched, Capture(), clock=clock, log_every_n_steps=3)
    first, second = (row for _, row in memory.rows)
    assert first["train/device/flops_per_sec"] == pytest.approx(flops_of(UNEQUAL[2:3]) / 0.5)
    assert second["train/device/flops_per_sec"] == pytest.approx(flops_of(UNEQUAL[5:]) / 0.5)
    assert second["train/total_flops"] == flops_of(UNEQUAL)


def test_hooks_on_packs_launch_nothing_but_the_log(tmp_path: Path) -> None:
    clock = Clock()
    watched = monitor(clock, every_n_steps=6)
    counts = list[int]()

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[-1] += 1
            return func(*args, **(kwargs or {}))

    def spied(hook: Any, *args: Any) -> None:
        counts.append(0)
        with Spy():
            hook(*args)

    for name in ("on_train_batch_start", "on_train_batch_end"):
        setattr(watched, name, partial(spied, getattr(watched, name)))
    fit(tmp_path, UNEQUAL, watched, clock=clock)
    assert counts[:-1] == [0] * 11
    assert 0 < counts[-1] < 100  # the log of the last step


def test_without_a_logger_the_values_are_in_the_bar_and_in_callback_metrics(tmp_path: Path) -> None:
    clock = Clock()
    bar = TQDMProgressBar(refresh_rate=1)
    run = trainer(tmp_path, monitor(clock), bar, enable_progress_bar=True)
    run.fit(Module(clock), loader(UNEQUAL))
    shown = bar.get_metrics(run, run.lightning_module)
    assert {"tokens/s", "TFLOP/s", "MFU"} <= set(shown)
    assert shown["tokens/s"] == pytest.approx((6 + 7) / 1.0)
    assert run.callback_metrics["train/device/mfu"] == pytest.approx(flops_of(UNEQUAL[4:]) / PEAK)


def test_windows_are_counted_from_the_lengths_where_the_collator_knew_none(tmp_path: Path) -> None:
    config = {**CONFIG, "model_type": "mistral", "sliding_window": 4}
    model = FlopsModel.from_config(config)
    memory = fit(tmp_path, UNEQUAL, config=config)
    expected = sum(
        model.training_flops(SeqStats.from_lengths(batch.lengths, windows=(4,))).model for batch in UNEQUAL
    )
    assert memory.rows[-1][1]["train/total_flops"] == expected
    assert expected < flops_of(UNEQUAL)


@pytest.mark.parametrize("window", [None, 4])
def test_shared_prefixes_count_once_as_work_and_each_as_a_token(tmp_path: Path, window: int | None) -> None:
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7], [1, 2], [1, 2], [8, 9, 1, 2, 3]]
    batch = THDBatch.collate([{"input_ids": row} for row in rows], share_prefixes=True, pad_to=16)
    prefixes = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}  # a query each
    pairs = [sum(min(len(p), most) for p in prefixes) for most in (99, 4)]
    config = CONFIG if window is None else {**CONFIG, "model_type": "mistral", "sliding_window": window}
    memory = fit(tmp_path, [batch] * 2, measure={"every_n_steps": 1}, config=config)
    work = SeqStats(
        real_tokens=len(prefixes),
        slots=16,
        loss_tokens=14,
        sequences=5,
        sum_squares=2 * pairs[0] - len(prefixes),
        window_pairs=() if window is None else ((window, pairs[1]),),
    )
    row = memory.rows[-1][1]
    tokens = sum(map(len, rows))
    flops = FlopsModel.from_config(config).training_flops(work)

    assert row["train/device/mfu"] == pytest.approx(flops.model / 0.5 / PEAK)
    assert row["train/device/real_items_per_sec"] == pytest.approx(tokens / 0.5)
    assert row["train/packing/shared"] == pytest.approx(1 - len(prefixes) / tokens)
    assert row["train/packing/fill"] == pytest.approx(len(prefixes) / 16)


class Thaw(L.Callback):
    """Trains the weights again after the second batch, or in the evaluation that follows it."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if args[-1] == 1 and trainer.val_dataloaders is None:
            pl_module.thawed.requires_grad_(True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.thawed.requires_grad_(True)


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("known", [True, False])
def test_weights_thawed_inside_an_interval_count_from_there(
    tmp_path: Path, known: bool, evaluated: bool
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    clock = Clock()
    module = Module(clock, config=None)
    forward = 2 * 4 * 31 * 8
    module.thawed = module.model.embed.requires_grad_(False)
    if known:
        module.thawed = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "head_dim": 8})).requires_grad_(False)
        forward = FLOPS.forward_flops(UNEQUAL[0].stats).model
    options: Any = {"val": UNEQUAL[:1], "val_check_interval": 2} if evaluated else {}
    options |= {"clock": clock, "module": module, "num_sanity_val_steps": 0}
    memory = fit(tmp_path, [UNEQUAL[0]] * 6, Thaw(), monitor(clock, every_n_steps=6), **options)
    before = forward if known else 2 * forward  # the head is trained from the start
    (row,) = [row for _, row in memory.rows if "train/total_flops" in row]
    assert row["train/total_flops"] == pytest.approx(2 * before + 4 * 3 * forward)


def test_a_fit_after_one_that_failed_counts_its_own_model(tmp_path: Path) -> None:
    clock = Clock()
    measures = monitor(clock)
    small = Module(clock, config={**CONFIG, "num_hidden_layers": 1})
    with pytest.raises(AttributeError, match="input_ids"):
        fit(tmp_path, ["no batch"], measures, clock=clock, module=small)
    fit(tmp_path, UNEQUAL, measures, clock=clock)
    assert measures.latest["train/total_flops"] == flops_of(UNEQUAL)


def test_a_flops_model_that_is_given_is_used(tmp_path: Path) -> None:
    flops_model = FlopsModel.from_config(CONFIG, causal="full", tokens="slots", recompute="full")
    row = fit(tmp_path, UNEQUAL, measure={"flops_model": flops_model}, config=None).rows[-1][1]
    assert row["train/total_flops"] == sum(flops_model.training_flops(batch.stats).model for batch in UNEQUAL)
    assert row["train/device/hfu"] > 1.2 * row["train/device/mfu"]


@pytest.mark.parametrize("config", [None, {"model_type": "nope"}])
def test_without_a_known_config_a_step_is_counted_once_per_shape_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any
) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO):
        memory = fit(tmp_path, [UNEQUAL[0]] * 6, monitor(clock), clock=clock, config=config)
    assert caplog.text.count("the products of the first step are counted") == 1
    assert ("No FLOP count is known for model_type='nope'" in caplog.text) == (config is not None)
    head = 2 * 4 * 31  # forward of the module's only matmul, per slot; its input is trained
    assert memory.rows[-1][1]["train/device/flops_per_sec"] == pytest.approx(3 * head * 8 / 0.5)
    assert memory.rows[0][1]["train/time"] == pytest.approx(0.5)  # the counted step is no part of the rates


def test_padding_of_packs_is_no_work_of_a_model_without_a_config(tmp_path: Path) -> None:
    memory = fit(tmp_path, [pack(3, 2, pad_to=8)] * 3, config=None)
    assert memory.rows[-1][1]["train/total_flops"] == 3 * 2 * 4 * 31 * 15


def test_batches_that_tell_nothing_warn_and_are_no_error(tmp_path: Path) -> None:
    class Blind(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(torch.ones(1, 4, dtype=torch.long), batch_idx)

    clock = Clock()
    message = r"type Tensor has no sequence lengths.*can count a THDBatch"
    with pytest.warns(UserWarning, match=message):
        memory = fit(tmp_path, [torch.ones(3)] * 4, monitor(clock), clock=clock, module=Blind(clock))
    assert memory.rows == []


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"idx": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 4)},
            r"no token ids under 'input_ids'.*keys are 'idx', 'attention_mask'.*Rename the key",
        ),
        ({"input_ids": torch.ones(2, 4)}, r"'input_ids' of the batch is a Tensor of torch.float32 \[2, 4\]"),
    ],
)
def test_a_dict_that_cannot_be_counted_names_its_keys(batch: dict[str, torch.Tensor], message: str) -> None:
    monitor = THDThroughputMonitor(peak=1e12)
    model = torch.nn.Linear(4, 4)
    monitor.watch(model)
    with pytest.warns(UserWarning, match=message), monitor.step(batch):
        pass
    renamed = {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 4)}
    with monitor.step(renamed):
        model(torch.ones(2, 4, 4)).sum().backward()
    assert monitor.finish()["train/lengths"] == 8


def test_an_unknown_device_has_no_mfu_and_says_how_to_set_a_peak(tmp_path: Path) -> None:
    clock = Clock()
    with pytest.warns(UserWarning, match=r"No peak FLOP/s is known for 'cpu' in torch.float32.*='measure'"):
        memory = fit(tmp_path, UNEQUAL, monitor(clock, peak="auto"), clock=clock)
    assert memory.rows[-1][1]["train/device/flops_per_sec"] > 0
    assert "train/device/mfu" not in memory.rows[-1][1]


def test_measuring_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def measure(device: Any, *, dtype: torch.dtype) -> float:
        calls.append((device, dtype))
        return 5e9

    monkeypatch.setattr("lightning_thd.callbacks.meter.measure_flops", measure)
    options: dict[str, Any] = {"measure": {"peak": "measure"}, "precision": "bf16-mixed", "val": UNEQUAL}
    memory = fit(tmp_path, UNEQUAL, **options)
    assert calls == [(torch.device("cpu"), torch.bfloat16)]
    train = [row for _, row in memory.rows if "train/device/mfu" in row]
    assert train[0]["train/device/mfu"] == pytest.approx(flops_of(UNEQUAL[:2]) / 5e9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peak": "fast"}, "peak='fast' is not a device's dense FLOP/s.* 'measure' to time matmuls"),
        ({"every_n_steps": 0}, "every_n_steps=0; wanted 1 or more"),
        ({"warmup_steps": -1}, "warmup_steps=-1; wanted 0 or more"),
        *[({name: "third"}, f"{name}='third'; wanted one of") for name in ("causal", "tokens", "recompute")],
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        THDThroughputMonitor(**settings)


def test_fill_is_the_share_of_the_capacity(tmp_path: Path) -> None:
    clock = Clock()
    rows = [{"input_ids": [1] * length} for length in (5, 3, 7, 2)]
    measured = monitor(clock)
    runner = trainer(tmp_path, measured)
    data = THDDataModule(rows, capacity=10, needs_boundaries=False)
    runner.fit(Module(clock), data)

    assert measured.latest["train/packing/fill"] == pytest.approx(17 / 20)
    assert measured.latest["train/lengths"] == 17

    other = THDDataModule(val=rows, capacity=20)
    other.setup("validate")
    runner.validate(Module(clock), other.val_dataloader(), verbose=False)

    assert measured.latest["validate/packing/fill"] == pytest.approx(17 / 20)
    measured = monitor(clock)
    trainer(tmp_path, measured).fit(Module(clock), data.train_dataloader())

    assert measured.latest["train/packing/fill"] == pytest.approx(17 / 20)


def test_fill_of_packs_in_a_loop_takes_their_capacity(caplog: pytest.LogCaptureFixture) -> None:
    for capacity, expected in ((10, pytest.approx(17 / 20)), (None, 1.0)):
        measured = monitor(Clock())
        measured.watch(TinyModule().model, capacity=capacity)
        with caplog.at_level("INFO"):
            for lengths in ((5, 3, 2), (7,)):
                with measured.step(THDBatch.collate([{"input_ids": [1] * length} for length in lengths])):
                    pass
            assert measured.finish().get("train/packing/fill") == expected
        assert ("Pass watch(capacity=...)" in caplog.text) is (capacity is None)


def test_a_loop_is_not_finished_before_it_is_watched() -> None:
    with pytest.raises(ValueError, match=r"finish\(\) was called before watch"):
        monitor(Clock()).finish()


MFU = "train/device/mfu"


def test_loggers_keep_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    clock = Clock()
    memory = Memory()
    loggers = [
        TensorBoardLogger(tmp_path / "board"),
        CSVLogger(tmp_path / "csv"),
        WandbLogger(save_dir=tmp_path, offline=True),
        memory,
    ]
    measured = monitor(clock, all_keys=False)
    trainer(tmp_path, measured, logger=loggers).fit(Module(clock), loader(UNEQUAL))
    loggers[2].experiment.finish()

    expected = [(step, row[MFU]) for step, row in memory.rows]
    assert len(expected) == 3
    board = read_tensorboard(tmp_path / "board")[MFU]
    assert [step for step, _ in board] == [step for step, _ in expected]
    assert [value for _, value in board] == pytest.approx([value for _, value in expected])
    (file,) = (tmp_path / "csv").rglob("metrics.csv")
    with file.open() as text:
        rows = list(csv.DictReader(text))
    assert [(int(row["step"]), float(row[MFU])) for row in rows if row[MFU]] == expected
    short = {key for _, row in memory.rows for key in row}
    assert {MFU, "train/device/real_items_per_sec", "train/packing/fill", "train/total_flops"} < short
    assert {"train/device/batches_per_sec", "train/time"} <= measured.latest.keys() - short
    rows = read_wandb(tmp_path)
    assert [(row["trainer/global_step"], row[MFU]) for row in rows if MFU in row] == expected
    hidden = {record.metric.name for record in wandb_records(tmp_path) if record.metric.options.hidden}
    assert "train/total_flops" in hidden
    assert MFU not in hidden


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_steps_between_logs_never_wait_for_the_device(tmp_path: Path) -> None:
    watched = THDThroughputMonitor(peak=1e12, warmup_steps=1)
    for name in ("on_train_batch_start", "on_train_batch_end"):
        original = getattr(watched, name)

        def strict(run: Any, module: Any, *args: Any, original: Any = original) -> None:
            quiet = 2 < args[-1] < 9  # after the warm-up, before the log
            with no_waiting() if quiet else contextlib.nullcontext():
                original(run, module, *args)

        setattr(watched, name, strict)
    memory = Memory()
    run = trainer(tmp_path, watched, accelerator="gpu", logger=memory, log_every_n_steps=10)
    run.fit(Module(Clock()), loader([pack(5, 3)] * 10))
    assert memory.rows[-1][1]["train/device/mfu"] > 0


@pytest.mark.gpu
@needs_cuda
def test_a_measured_peak_is_within_the_vendors() -> None:
    vendor = peak_flops(torch.cuda.get_device_name(), torch.bfloat16)
    if vendor is None:
        pytest.skip(f"{torch.cuda.get_device_name()} has no row")
    assert 0.3 * vendor < measure_flops("cuda", dtype=torch.bfloat16) < 1.1 * vendor


SLOW_S = 0.05


class Loader:
    waited_s = 0.0


def test_the_parts_of_a_step() -> None:
    clock = Clock()
    loader = Loader()
    marks = StepMarks(clock)

    for _ in range(2):
        marks.waited(loader)
        marks.mark("other")
        clock.sleep(5.0)
        marks.mark("forward_backward")
        clock.sleep(1.0)
        marks.mark("optimizer")
        marks.end_step()
        clock.sleep(0.25)
        marks.mark("other")
        clock.sleep(0.5)
        marks.mark("checkpoint")
        clock.sleep(7.0)
        marks.skip()
        clock.sleep(2.0)
        loader.waited_s += 2.0

    marks.waited(loader)
    marks.mark("other")
    parts = marks.close()

    assert parts == {
        "train/step_time/data_wait": 2.0,
        "train/step_time/forward_backward": 5.0,
        "train/step_time/optimizer": 1.0,
        "train/step_time/checkpoint": 0.5,
        "train/step_time/other": 0.25,
    }
    assert marks.close() == {}


class Tidies(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.sleep(0.25)


@pytest.mark.parametrize("settings", [{}, {"val_check_interval": 2}], ids=["alone", "evaluated"])
def test_the_parts_of_all_steps_add_up_to_their_time(tmp_path: Path, settings: Any) -> None:
    """Work after a step counts before an evaluation and at the end of a run, too."""
    clock = Clock()
    memory = Memory()
    run = trainer(tmp_path, monitor(clock), logger=memory, num_sanity_val_steps=0, **settings)
    run.fit(Tidies(clock), loader(UNEQUAL), loader(UNEQUAL[:1]))
    rows = [row for _, row in memory.rows if "train/time" in row]
    parts = sum(value for row in rows for key, value in row.items() if "step_time" in key)
    assert len(rows) == 3
    assert 2 * parts == pytest.approx(rows[-1]["train/time"], abs=0.26)  # the last 0.25 s has no row


class SlowData(list[Any]):
    def __getitem__(self, i: Any) -> Any:
        time.sleep(SLOW_S / 4)
        return super().__getitem__(i)


class SlowModule(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(2 * SLOW_S)
        return super().training_step(batch, batch_idx)


def test_a_run_logs_where_its_time_goes(tmp_path: Path) -> None:
    samples = SlowData(sequences(48))
    trainer = quiet_trainer(
        max_steps=8,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=2,
        enable_checkpointing=True,
        callbacks=[
            THDThroughputMonitor(peak=1e12),
            ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2),
        ],
    )
    began = time.perf_counter()
    trainer.fit(SlowModule(), THDDataModule(samples, capacity=48))
    took = time.perf_counter() - began
    series = read_metrics(tmp_path)
    mean = {part: sum(v for _, v in series[f"train/step_time/{part}"]) / 4 for part in PARTS}

    assert mean["forward_backward"] > 2 * SLOW_S
    assert mean["data_wait"] > SLOW_S / 4  # at least one row a pack
    assert mean["checkpoint"] > 0
    assert sum(mean.values()) * 8 < took


def test_a_checkpoint_inside_an_evaluation_starts_no_part_of_the_step() -> None:
    clock = Clock()
    monitor = THDThroughputMonitor(clock=clock)
    with monitor.paused():  # no training clock runs
        monitor._marks.mark("checkpoint")
    clock.sleep(100)  # the rest of the evaluation
    monitor._marks.mark("other")
    monitor._marks.end_step()
    assert sum(monitor._marks.close().values()) == 0.0


BATCHES = [pack(5, 3), pack(8), pack(1, 7), pack(6), pack(2, 2, 2), pack(4, 3)]


class Skips(Module):
    """Trains on every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx % 2 else None


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("config", [CONFIG, None], ids=["config", "counted"])
def test_batches_that_training_step_skips_are_not_counted(tmp_path: Path, config: Any) -> None:
    clock = Clock()
    throughput = monitor(clock)
    run = trainer(tmp_path, throughput)
    run.fit(Skips(clock, config=config), loader(BATCHES))
    trained = BATCHES[1::2]
    latest = throughput.latest
    assert latest["train/batches"] == 3
    assert latest["train/samples"] == sum(map(len, trained))
    if config is None:  # a product of [slots, 4] and [4, 31], whose input is trained
        assert latest["train/total_flops"] == 3 * 2 * 4 * 31 * sum(batch.stats.slots for batch in trained)
    else:
        assert latest["train/total_flops"] == flops_of(trained)
        assert latest["train/time"] == pytest.approx(0.5 * len(BATCHES))  # time goes by all the same


@pytest.mark.parametrize("again", ["resumed", "same_trainer"])
def test_totals_of_a_resumed_job_and_of_a_second_fit_go_on(tmp_path: Path, again: str) -> None:
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if args[3] == 4:  # the second batch of the second step
                trainer.save_checkpoint(tmp_path / "in.ckpt")

    def run(
        *callbacks: L.Callback, path: Path | None = None, epochs: tuple[int, ...] = (2,)
    ) -> dict[str, float]:
        clock = Clock()
        throughput = monitor(clock)
        rows = [{"input_ids": [1] * (1 + n % 7)} for n in range(30)]
        data = THDDataModule(rows, capacity=9, needs_boundaries=False)
        settings: dict[str, Any] = {"accumulate_grad_batches": 3, "log_every_n_steps": 50}
        fitting = trainer(tmp_path, throughput, *callbacks, **settings)
        for fitting.fit_loop.max_epochs in epochs:
            fitting.fit(Module(clock), data, ckpt_path=path)
        return throughput.latest

    whole = run(Saves())
    resumed = run(path=tmp_path / "in.ckpt") if again == "resumed" else run(epochs=(1, 2))
    for key in ("total_flops", "batches", "samples", "lengths", "time"):
        assert resumed[f"train/{key}"] == pytest.approx(whole[f"train/{key}"], rel=1e-12), key


class Called(Model):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(ids))
        return logits


class Distils(Module):
    """Calls its model with gradients and without, and trains on all batches but those of ``skipped``."""

    def __init__(self, clock: Clock, *, config: Any = CONFIG, skipped: tuple[int, ...] = ()) -> None:
        super().__init__(clock, config=config)
        self.model = Called(config)
        self.skipped = skipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.model(batch.input_ids)
        loss = self.model(batch.input_ids).square().mean()
        return None if batch_idx in self.skipped else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch.input_ids)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize(
    ("skipped", "options"),
    [((), {"val_check_interval": 2, "accumulate_grad_batches": 3}), ((0, 4), {"accumulate_grad_batches": 3})],
    ids=["evaluation", "skipped"],
)
def test_the_calls_of_a_step_are_those_of_its_batches(
    tmp_path: Path, skipped: tuple[int, ...], options: Any
) -> None:
    """An evaluation between the batches of a step, and batches that are skipped, are no passes of it."""
    throughput = monitor(Clock())
    val = [pack(6, 2), pack(4)]
    run = trainer(tmp_path, throughput, num_sanity_val_steps=0, **options)
    run.fit(Distils(Clock(), skipped=skipped), loader([*BATCHES, *BATCHES]), loader(val))
    trained = [batch for i, batch in enumerate([*BATCHES, *BATCHES]) if i not in skipped]
    forward = sum(FLOPS.forward_flops(batch.stats).model for batch in trained)
    assert throughput.latest["train/total_flops"] == flops_of(trained) + forward
    evaluated = sum(FLOPS.forward_flops(batch.stats).model for batch in val)
    assert throughput.latest["validate/total_flops"] == evaluated


def test_a_counted_step_is_counted_from_its_first_batch(tmp_path: Path) -> None:
    """A second batch of a new shape begins no count of its step, which would miss the first."""
    throughput = monitor(Clock())
    run = trainer(tmp_path, throughput, accumulate_grad_batches=2)
    run.fit(Module(Clock(), config=None), loader(BATCHES))
    slots = sum(batch.stats.slots for batch in BATCHES)
    assert throughput.latest["train/total_flops"] == 3 * 2 * 4 * 31 * slots
