"""Batches that pass through a Trainer -> FLOP/s, MFU, tokens/s and packing quality, once an interval."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_thd._checks import described, flags, whole_number
from lightning_thd.callbacks.measuring.across_ranks import data_parallel_group, group_size
from lightning_thd.callbacks.measuring.counting import Counting
from lightning_thd.callbacks.measuring.evaluation import EvaluationHooks
from lightning_thd.callbacks.measuring.marks import StepMarks
from lightning_thd.callbacks.measuring.models import Policy
from lightning_thd.callbacks.measuring.paused_saving import PausedSaving
from lightning_thd.callbacks.measuring.pictures import Pictures, warn_without_loggers
from lightning_thd.callbacks.measuring.run import RunMeter
from lightning_thd.callbacks.measuring.stage import Setting
from lightning_thd.flops.model import FlopsModel, check_conventions
from lightning_thd.flops.rates import check_peak
from lightning_thd.flops.terms import Causal, Tokens

_FLUSH_STEPS = 1000  # where logging is off: bounds what is held on the host
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
    turn them into metrics, under the names of Lightning's ``ThroughputMonitor`` and more: see
    docs/reference/keys.md. Validation, checkpoints, compilation, and the first ``warmup_steps`` are no part
    of the rates.

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
        pictures: once an epoch, give TensorBoard and W&B a drawing of rank 0's first packs, and histograms of
            the lengths in them and of their fill; needs matplotlib, and is no part of the rates.
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
        pictures: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(peak, str) or peak not in ("auto", "measure"):
            check_peak(peak)
        check_conventions(causal=causal, tokens=tokens)
        if recompute != "auto":
            check_conventions(recompute=recompute)
        if every_n_steps is not None and whole_number(every_n_steps, "every_n_steps", least=None) < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: log every 1 or more steps, or None.")
        whole_number(warmup_steps, "warmup_steps", advice="It is the number of steps left out of the rates.")
        flags(progress_bar=progress_bar, pictures=pictures)
        if clock is not None and not callable(clock):
            raise TypeError(
                f"clock is {described(clock)}; wanted a function that gives seconds, as time.perf_counter."
            )
        self.peak = peak
        self.flops_model = flops_model
        self.causal: Causal = causal
        self.tokens: Tokens = tokens
        self.recompute: Policy = recompute
        self.every_n_steps = every_n_steps
        self.warmup_steps = warmup_steps
        self.progress_bar = progress_bar
        self.latest: dict[str, float] = {}
        self._pictures = Pictures() if pictures else None
        self._clock = clock or time.perf_counter
        self._run: RunMeter | None = None
        self._restored: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._saving: PausedSaving | None = None
        self._marks = StepMarks(self._clock)
        self._steps = 0
        self._exclude = False
        self._failing = False
        self._graphs = 0

    def exclude_step(self) -> None:
        """Exclude the running step from the rates but not from the FLOPs, as in a capture."""
        self._exclude = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside this context from the training rates, as for a checkpoint."""
        with self._left_out(None):
            yield

    @contextmanager
    def _left_out(self, part: str | None) -> Iterator[None]:
        """Exclude the time inside this context from the rates, and count it for a part of the step."""
        was_running = self._run is not None and self._run.pause("train")
        try:
            with self._marks.apart(part):
                yield
        finally:
            if was_running and self._run is not None:
                self._run.resume("train")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the FLOPs model and the device's peak, and start measuring."""
        run = self._ensure(trainer, pl_module)
        self._failing, self._steps, self._graphs = False, 0, _compiled_graphs()
        self._marks = StepMarks(self._clock)
        stage = run.open("train", "training")
        if self._restored:
            stage.load(self._restored, run.setting("train").model)
            self._restored = {}
        self._saving = PausedSaving(trainer, self._saved)
        if self._pictures is not None and not getattr(trainer, "fast_dev_run", False):
            warn_without_loggers(trainer.loggers)
        self._await_packs(trainer)  # no epoch starts where one is resumed

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start collecting the epoch's first packs for a picture."""
        self._await_packs(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the collected packs of an epoch too short to fill the picture."""
        self._draw(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock at the first batch, and after whatever paused it."""
        self._ensure(trainer, pl_module).begin_batch(pl_module, batch)
        self._marks.waited(trainer.train_dataloader)
        self._marks.mark("other")

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Mark the end of the step's forward and backward passes."""
        self._marks.mark("forward_backward")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and log the metrics when an interval ends."""
        accumulates = trainer.fit_loop._should_accumulate()
        self._marks.mark("forward_backward" if accumulates else "optimizer")
        run = self._ensure(trainer, pl_module)
        skipped = pl_module.automatic_optimization and outputs == {}  # training_step returned None
        if not skipped:
            run.add("train", pl_module, batch)
        if self._pictures is not None and self._pictures.add(batch):
            self._draw(trainer)
        if accumulates:
            return
        self._marks.end_step()
        self._steps += 1
        graphs = _compiled_graphs()
        leave_out = self._exclude or graphs != self._graphs or self._steps <= self.warmup_steps
        run.end_step(pl_module, leave_out=leave_out, discard=self._exclude)
        if leave_out:
            self._marks.close()
        self._exclude, self._graphs = False, graphs
        every = self.every_n_steps or _log_every(trainer)
        if every and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0:
            self._report(trainer, pl_module, "train")
        elif not every and self._steps % _FLUSH_STEPS == 0:
            run.reduce()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the steps after the last full interval, so that a short fit has numbers too."""
        if self._run is not None and self._run.stage("train") is not None and _log_every(trainer):
            self._report(trainer, pl_module, "train", last=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Skip further collectives after an error: other ranks may not join them."""
        self._failing = True
        self._let_go()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the Trainer's own methods and remove all hooks."""
        self._last = self.state_dict()
        self._let_go()
        self._run = None

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of training so far, over all ranks."""
        stage = self._run.stage("train") if self._run is not None else None
        return stage.state() if stage is not None else self._restored or self._last

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the totals from a checkpoint."""
        self._restored = state_dict

    def evaluation_start(self, name: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the training clock and start that of the evaluation."""
        self._marks.pause()
        self._ensure(trainer, pl_module).begin_evaluation(name, pl_module)

    def evaluation_batch(self, name: str, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        """Count a batch of an evaluation."""
        self._ensure(trainer, pl_module).add(name, pl_module, batch)

    def evaluation_end(self, name: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the rates of the evaluation; the training clock goes on with the next batch."""
        self._report(trainer, pl_module, name, last=True)

    def _ensure(self, trainer: Trainer, pl_module: LightningModule) -> RunMeter:
        if self._run is None:
            strategy = trainer.strategy
            counting = Counting(
                self.flops_model,
                causal=self.causal,
                tokens=self.tokens,
                recompute=self.recompute,
                sharded=getattr(strategy, "context_parallel_size", 1) != 1,
            )
            counting.find(pl_module)
            group = data_parallel_group(strategy)
            setting = Setting.of(
                pl_module,
                strategy.root_device,
                self.peak,
                trainer.precision_plugin,
                model=counting.model("train"),
                group=group,
                ranks=group_size(group),
                devices=trainer.world_size,
            )
            self._run = RunMeter(setting, counting, self._clock)
        return self._run

    def _report(self, trainer: Trainer, pl_module: LightningModule, name: str, *, last: bool = False) -> None:
        metrics = self._ensure(trainer, pl_module).close(name, pl_module, last=last)
        if name == "train" and metrics:
            metrics |= self._marks.close()
        self.latest.update(metrics)
        values = torch.tensor(list(metrics.values()), dtype=torch.float64)
        trainer.callback_metrics.update(zip(metrics, values, strict=True))
        if self.progress_bar and name == "train":
            found = {short: metrics[f"train/{key}"] for key, short in _BAR if f"train/{key}" in metrics}
            trainer.progress_bar_metrics.update(found)
        trainer._logger_connector.log_metrics(dict(metrics))  # type: ignore[arg-type]  # floats are welcome

    def _await_packs(self, trainer: Trainer) -> None:
        if self._pictures is not None and trainer.is_global_zero:
            capacity = getattr(getattr(trainer, "datamodule", None), "capacity", None)
            self._pictures.begin(capacity if isinstance(capacity, int) else None)

    def _draw(self, trainer: Trainer) -> None:
        if self._pictures is not None and trainer.is_global_zero:
            with self.paused():
                self._pictures.show(trainer.loggers, trainer.fit_loop.epoch_loop._batches_that_stepped)

    @contextmanager
    def _saved(self) -> Iterator[None]:
        """Reduce the counts before a checkpoint is saved, and exclude the saving from the rates."""
        with self._left_out("checkpoint"):
            if self._run is not None and not self._failing:
                self._run.reduce()
            yield

    def _let_go(self) -> None:
        if self._run is not None:
            self._run.stop()
        if self._saving is not None:
            self._saving.restore()
            self._saving = None


def _log_every(trainer: Trainer) -> int:
    return int(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # set outside __init__


def _compiled_graphs() -> int:
    """Return how many graphs torch.compile has made; 0 where it was never imported."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
