from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_thd import THDDataModule
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.callbacks import THDThroughputMonitor
from lightning_thd.flops import FlopsModel, SeqStats, throughput
from tests.callbacks.fits import (
    CONFIG,
    FLOPS,
    PEAK,
    UNEQUAL,
    Clock,
    Memory,
    Module,
    flops_of,
    loader,
    monitor,
    trainer,
)


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
    assert memory.rows[-1][1]["train/time"] == pytest.approx(3.0)
    assert memory.rows[-1][1]["train/samples"] == 11
    assert memory.rows[-1][1]["train/lengths"] == sum(batch.stats.slots for batch in UNEQUAL)


def test_warmup_steps_are_left_out_of_the_rates_and_kept_in_the_totals(tmp_path: Path) -> None:
    memory = fit(tmp_path, UNEQUAL, measure={"warmup_steps": 3})
    rated = ["train/device/mfu" in row for _, row in memory.rows]
    assert rated == [False, True, True]
    second = memory.rows[1][1]
    assert second["train/device/flops_per_sec"] == pytest.approx(flops_of(UNEQUAL[3:4]) / 0.5)
    assert memory.rows[-1][1]["train/total_flops"] == flops_of(UNEQUAL)


def test_a_step_with_microbatches_counts_every_one_once(tmp_path: Path) -> None:
    steps = [THDStep(UNEQUAL[:3]), THDStep(UNEQUAL[3:4]), THDStep(UNEQUAL[4:])]
    memory = fit(tmp_path, steps, log_every_n_steps=3)
    ((_, row),) = memory.rows
    assert row["train/total_flops"] == flops_of(UNEQUAL)
    assert row["train/batches"] == 6


def test_accumulation_closes_intervals_at_optimizer_steps(tmp_path: Path) -> None:
    memory = fit(tmp_path, UNEQUAL, log_every_n_steps=1, accumulate_grad_batches=3)
    assert [row["train/batches"] for _, row in memory.rows] == [3, 6]
    first = memory.rows[0][1]
    assert first["train/device/flops_per_sec"] == pytest.approx(flops_of(UNEQUAL[:3]) / 1.5)


def test_validation_and_checkpoints_take_no_part_in_the_rates(tmp_path: Path) -> None:
    clock = Clock()
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    memory = fit(
        tmp_path,
        UNEQUAL,
        saver,
        monitor(clock),
        clock=clock,
        val=UNEQUAL[:2],
        val_check_interval=2,
        num_sanity_val_steps=2,
        enable_checkpointing=True,
    )
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


def test_what_a_user_pauses_is_left_out(tmp_path: Path) -> None:
    clock = Clock()
    watched = monitor(clock)

    class Chores(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            with watched.paused():
                clock.sleep(100)

    memory = fit(tmp_path, UNEQUAL, watched, Chores(), clock=clock)
    assert memory.rows[-1][1]["train/time"] == pytest.approx(3.0)


def test_nothing_is_read_from_the_device_and_little_is_launched(tmp_path: Path) -> None:
    """Operators of ours between the start of a step and its end, outside a log: none at all."""
    clock = Clock()
    watched = monitor(clock, every_n_steps=6)
    counts: list[int] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[-1] += 1
            return func(*args, **(kwargs or {}))

    for name in ("on_train_batch_start", "on_train_batch_end"):
        original = getattr(watched, name)

        def spied(*args: Any, original: Any = original) -> None:
            counts.append(0)
            with Spy():
                original(*args)

        setattr(watched, name, spied)
    fit(tmp_path, UNEQUAL, watched, clock=clock)
    assert len(counts) == 12
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
    row, tokens = memory.rows[-1][1], sum(map(len, rows))
    flops = FlopsModel.from_config(config).training_flops(work)
    assert row["train/device/mfu"] == pytest.approx(flops.model / 0.5 / PEAK)
    assert row["train/device/real_items_per_sec"] == pytest.approx(tokens / 0.5)
    assert row["train/packing/shared"] == pytest.approx(1 - len(prefixes) / tokens)
    assert row["train/packing/fill"] == pytest.approx(len(prefixes) / 16)


class Thaw(L.Callback):
    """Trains the weights again after the second batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if args[-1] == 1:
            pl_module.llama.requires_grad_(True)


def test_weights_thawed_inside_an_interval_count_from_there(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    clock = Clock()
    module = Module(clock)
    module.model.config = None  # the one below is found
    module.llama = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "head_dim": 8})).requires_grad_(False)
    measured = monitor(clock, every_n_steps=6)
    memory = fit(tmp_path, [UNEQUAL[0]] * 6, Thaw(), measured, clock=clock, module=module)
    forward = FLOPS.forward_flops(UNEQUAL[0].stats).model
    assert memory.rows[-1][1]["train/total_flops"] == pytest.approx(2 * forward + 4 * 3 * forward)


def test_a_flops_model_that_is_given_is_used(tmp_path: Path) -> None:
    given = FlopsModel.from_config(CONFIG, causal="full", tokens="slots", recompute="full")
    memory = fit(tmp_path, UNEQUAL, measure={"flops_model": given}, config=None)
    row = memory.rows[-1][1]
    assert row["train/total_flops"] == sum(given.training_flops(batch.stats).model for batch in UNEQUAL)
    assert row["train/device/hfu"] > 1.2 * row["train/device/mfu"]


@pytest.mark.parametrize("config", [None, {"model_type": "nope"}])
def test_without_a_known_config_a_step_is_counted_once_per_shape_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any
) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO):
        memory = fit(tmp_path, [UNEQUAL[0]] * 6, monitor(clock), clock=clock, config=config)
    assert caplog.text.count("is counted with torch's FlopCounterMode") == 1
    assert ("No FLOP count is known for model_type='nope'" in caplog.text) == (config is not None)
    head = 2 * 4 * 31  # forward of the module's only matmul, per slot; its input is trained
    assert memory.rows[-1][1]["train/device/flops_per_sec"] == pytest.approx(3 * head * 8 / 0.5)
    assert memory.rows[0][1]["train/time"] == pytest.approx(0.5)  # the counted step is no part of the rates


def test_batches_that_tell_nothing_warn_and_are_no_error(tmp_path: Path) -> None:
    class Blind(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(torch.ones(1, 4, dtype=torch.long), batch_idx)

    clock = Clock()
    with pytest.warns(UserWarning, match=r"type Tensor tells nothing about its sequences.*Countable"):
        memory = fit(tmp_path, [torch.ones(3)] * 4, monitor(clock), clock=clock, module=Blind(clock))
    assert memory.rows == []


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


def test_testing_and_predicting_have_rates_of_their_own(tmp_path: Path) -> None:
    clock = Clock()
    memory = Memory()
    run = trainer(tmp_path, monitor(clock), logger=memory)
    run.test(Module(clock), loader(UNEQUAL[:2]), verbose=False)
    run.predict(Module(clock), loader(UNEQUAL[:2]))
    assert [sorted({key.partition("/")[0] for key in row} - {"epoch"}) for _, row in memory.rows] == [
        ["test"],
        ["predict"],
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peak": "fast"}, "peak='fast' is not a device's dense FLOP/s.* 'measure' to time matmuls"),
        ({"every_n_steps": 0}, "every_n_steps=0; wanted 1 or more"),
        ({"warmup_steps": -1}, "warmup_steps=-1; wanted 0 or more"),
        *[({name: "third"}, f"{name}='third' is not one of") for name in ("causal", "tokens", "recompute")],
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        THDThroughputMonitor(**settings)


def test_fill_is_the_share_of_the_capacity(tmp_path: Path) -> None:
    clock, rows = Clock(), [{"input_ids": [1] * length} for length in (5, 3, 7, 2)]
    measured = monitor(clock)
    trainer(tmp_path, measured).fit(Module(clock), THDDataModule(rows, capacity=10))
    assert measured.latest["train/packing/fill"] == pytest.approx(17 / 20)
    assert measured.latest["train/lengths"] == 17
