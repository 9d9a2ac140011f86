"""Batches that pass through a Trainer -> FLOP/s, MFU, tokens/s and packing quality, once an interval."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.flop_counter import FlopCounterMode

from lightning_thd.callbacks.measuring.across_ranks import (
    communication_device,
    data_parallel_group,
    group_size,
)
from lightning_thd.callbacks.measuring.device_peak import compute_dtype, resolve_peak
from lightning_thd.callbacks.measuring.evaluation import EvaluationHooks
from lightning_thd.callbacks.measuring.interval import microbatches
from lightning_thd.callbacks.measuring.models import Policy, find_model, training_signature
from lightning_thd.callbacks.measuring.paused_saving import PausedSaving
from lightning_thd.callbacks.measuring.stage import Setting, Stage
from lightning_thd.flops.model import FlopsModel, check_conventions
from lightning_thd.flops.rates import check_peak
from lightning_thd.flops.terms import Causal, Tokens
from lightning_thd.flops.torch_counter import counted_layers
from lightning_thd.stats import combine

_FLUSH_STEPS = 1000  # where logging is off: bounds what is held on the host
_MAX_SHAPES = 4  # each costs a slow step
# the sum over devices, where there are several, comes last and wins
_BAR = (
    ("device/real_items_per_sec", "tokens/s"),
    ("real_items_per_sec", "tokens/s"),
    ("device/tflops_per_gpu", "TFLOP/s"),
    ("device/mfu", "MFU"),
)


class THDThroughputMonitor(EvaluationHooks):
    """Logs FLOP/s, MFU, HFU, tokens/s and packing quality, from the real lengths of the sequences.

    Every rank counts its own microbatches in host integers; one collective and one device read an interval
    turn them into metrics, under the names of Lightning's ``ThroughputMonitor`` and more: see the README.
    Validation, checkpoints, compilation, and the first ``warmup_steps`` are no part of the rates.

    Args:
        peak: dense FLOP/s of one device; "auto" looks the device up, "measure" times matmuls once.
        flops_model: counts FLOPs; None reads the transformers config of the model, or counts a step with
            torch's FLOP counter where there is none.
        causal: pairs of a causal layer: "half" of the square, "exact", or the "full" square.
        tokens: FLOPs of "real" tokens, or of "slots" with the padding.
        recompute: activation checkpointing, for HFU; "auto" reads it off the model.
        every_n_steps: optimizer steps between two logs; None is the Trainer's ``log_every_n_steps``.
        warmup_steps: optimizer steps at the start that are left out of the rates.
        progress_bar: show tokens/s, TFLOP/s and MFU in the progress bar.
        clock: returns seconds; None is ``time.perf_counter``.
    """

    def __init__(
        self,
        *,
        peak: Literal["auto", "measure"] | float = "auto",
        flops_model: FlopsModel | None = None,
        causal: Causal = "half",
        tokens: Tokens = "real",
        recompute: Policy = "auto",
        every_n_steps: int | None = None,
        warmup_steps: int = 1,
        progress_bar: bool = True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        if peak not in ("auto", "measure"):
            check_peak(peak)
        check_conventions(causal=causal, tokens=tokens)
        if recompute != "auto":
            check_conventions(recompute=recompute)
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: log every 1 or more steps, or None.")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps}: leave 0 or more steps out of the rates.")
        self.peak = peak
        self.flops_model = flops_model
        self.causal: Causal = causal
        self.tokens: Tokens = tokens
        self.recompute: Policy = recompute
        self.every_n_steps = every_n_steps
        self.warmup_steps = warmup_steps
        self.progress_bar = progress_bar
        self.latest: dict[str, float] = {}
        self._clock = clock or time.perf_counter
        self._setting: Setting | None = None
        self._stages: dict[str, Stage] = {}
        self._restored: dict[str, Any] = {}
        self._saving: PausedSaving | None = None
        self._steps = 0
        self._exclude = False
        self._failing = False
        self._graphs = 0
        self._signature = 0
        self._counting: FlopCounterMode | None = None
        self._counted: set[int] = set()

    def exclude_step(self) -> None:
        """Leave the running step out of the rates, as when it captures a graph; its FLOPs still count."""
        self._exclude = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the training rates, as checkpoints are."""
        stage = self._stages.get("train")
        was_running = stage is not None and self._setting is not None and stage.pause(self._setting)
        try:
            yield
        finally:
            if was_running and stage is not None and self._setting is not None:
                stage.resume(self._setting)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out what is counted and against which peak."""
        setting = self._ensure(trainer, pl_module)
        self._failing, self._steps, self._graphs = False, 0, _compiled_graphs()
        stage = self._stages["train"] = Stage("train", "training", self._clock)
        if self._restored:
            stage.load(self._restored, setting.model)
            self._restored = {}
        self._saving = PausedSaving(trainer, self._saved)

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Let time count, from the first batch on and after whatever paused it."""
        setting = self._ensure(trainer, pl_module)
        self._stages["train"].resume(setting)
        if setting.model is None or self._counted:
            self._count_once(batch)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch; close the interval where one ends."""
        stage, setting = self._stages["train"], self._ensure(trainer, pl_module)
        stage.meter.add(batch)
        if self._counting is not None:
            setting = self._counted_once(batch, setting, pl_module)
        if trainer.fit_loop._should_accumulate():
            return
        stage.meter.end_step()
        self._steps += 1
        graphs = _compiled_graphs()
        if self._exclude or graphs != self._graphs or self._steps <= self.warmup_steps:
            stage.leave_out(setting)
        self._exclude, self._graphs = False, graphs
        every = self.every_n_steps or _log_every(trainer)
        if every and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0:
            self._report(trainer, pl_module, stage)
        elif not every and self._steps % _FLUSH_STEPS == 0:
            stage.reduce(setting)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the steps after the last full interval, so that a short fit has numbers too."""
        if (stage := self._stages.get("train")) is not None and _log_every(trainer):
            self._report(trainer, pl_module, stage, last=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop talking to other ranks: they may not be there."""
        self._failing = True
        self._let_go()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the Trainer as it was."""
        self._let_go()
        self._setting = None

    def state_dict(self) -> dict[str, Any]:
        """Totals of training so far, over all ranks."""
        stage = self._stages.get("train")
        return stage.state() if stage is not None else self._restored

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the totals of a checkpoint."""
        self._restored = state_dict

    def _evaluation_start(self, trainer: Trainer, pl_module: LightningModule, name: str) -> None:
        setting = self._ensure(trainer, pl_module)
        if (train := self._stages.get("train")) is not None:
            train.pause(setting)
        stage = self._stages[name] = Stage(name, "forward", self._clock)
        stage.resume(setting)

    def _evaluation_batch(
        self,
        name: str,
        batch: Any,
    ) -> None:
        self._stages[name].meter.add(batch)

    def _evaluation_end(self, trainer: Trainer, pl_module: LightningModule, name: str) -> None:
        self._report(trainer, pl_module, self._stages.pop(name), last=True)

    def _ensure(self, trainer: Trainer, pl_module: LightningModule) -> Setting:
        if self._setting is None:
            device = trainer.strategy.root_device
            group = data_parallel_group(trainer.strategy)
            model = self.flops_model or find_model(
                pl_module, causal=self.causal, tokens=self.tokens, recompute=self.recompute
            )
            self._setting = Setting(
                model=model,
                peak=resolve_peak(self.peak, device, compute_dtype(trainer.precision_plugin, pl_module)),
                group=group,
                device=device,
                wire=communication_device(group, device),
                ranks=group_size(group),
                devices=trainer.world_size,
            )
            self._signature = training_signature(pl_module)
        return self._setting

    def _report(
        self, trainer: Trainer, pl_module: LightningModule, stage: Stage, *, last: bool = False
    ) -> None:
        setting = self._ensure(trainer, pl_module)
        if stage.work == "forward":
            stage.pause(setting)
        metrics = stage.close(setting, last=last)
        self.latest.update(metrics)
        values = torch.tensor(list(metrics.values()), dtype=torch.float64)
        trainer.callback_metrics.update(zip(metrics, values, strict=True))
        if self.progress_bar and stage.name == "train":
            found = {short: metrics[f"train/{key}"] for key, short in _BAR if f"train/{key}" in metrics}
            trainer.progress_bar_metrics.update(found)
        trainer._logger_connector.log_metrics(dict(metrics))  # type: ignore[arg-type]  # floats are welcome
        self._follow(setting, pl_module)

    @contextmanager
    def _saved(self) -> Iterator[None]:
        """Save what all ranks counted, and leave the saving out of the rates."""
        stage, setting = self._stages.get("train"), self._setting
        with self.paused():
            if stage is not None and setting is not None and not self._failing:
                stage.reduce(setting)
            yield

    def _follow(self, setting: Setting, pl_module: LightningModule) -> None:
        """Read the model again when weights were frozen or thawed since the last interval."""
        signature = training_signature(pl_module)
        if signature != self._signature and self.flops_model is None and not self._counted:
            model = find_model(pl_module, causal=self.causal, tokens=self.tokens, recompute=self.recompute)
            self._setting = replace(setting, model=model)
        self._signature = signature

    def _count_once(self, batch: Any) -> None:
        slots = combine([stats for stats, _ in microbatches(batch)]).slots
        if slots and slots not in self._counted and len(self._counted) < _MAX_SHAPES:
            if not self._counted:
                rank_zero_info(
                    "No transformers config was found to count FLOPs from: one step of every new shape is "
                    "counted with torch's FlopCounterMode. For exact counts pass flops_model=."
                )
            self._counted.add(slots)
            self._counting = FlopCounterMode(display=False)
            self._counting.__enter__()  # type: ignore[no-untyped-call]

    def _counted_once(
        self,
        batch: Any,
        setting: Setting,
        pl_module: LightningModule,
    ) -> Setting:
        counter = self._stop_counting()
        assert counter is not None
        self._exclude = True  # counting takes longer than computing
        stats = combine([stats for stats, _ in microbatches(batch)])
        try:
            name = type(pl_module).__name__
            layers = counted_layers(counter, stats, name=name)
        except ValueError as nothing:
            rank_zero_info(f"FLOPs are not logged: {nothing}")
            return setting
        self._setting = replace(setting, model=FlopsModel(name=name, layers=layers, tokens="slots"))
        return self._setting

    def _let_go(self) -> None:
        self._stop_counting()
        if self._saving is not None:
            self._saving.restore()
            self._saving = None

    def _stop_counting(self) -> FlopCounterMode | None:
        counter, self._counting = self._counting, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return counter


def _log_every(trainer: Trainer) -> int:
    return int(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # set outside __init__


def _compiled_graphs() -> int:
    """Graphs torch.compile has made so far; 0 where it was never imported."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
