"""The hooks of a training run -> FLOP/s, MFU, tokens/s, packing quality and step times, once per interval."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_thd._checks import described, flags, whole_number
from lightning_thd._pages import see
from lightning_thd._trainer import logged_step
from lightning_thd._trees import tree_leaves
from lightning_thd._versions import warn_of_newer
from lightning_thd.callbacks.experts import expert_load
from lightning_thd.callbacks.loggers import accumulates, for_loggers, lay_out, record
from lightning_thd.callbacks.meter import Hardware, Meter
from lightning_thd.callbacks.module_flops import ModuleFlops, Policy
from lightning_thd.flops.model import FlopsModel, check_conventions, checked_flops
from lightning_thd.flops.rates import Work, check_peak
from lightning_thd.flops.terms import Causal, Tokens
from lightning_thd.parallel.across_ranks import data_parallel_group, stage_group
from lightning_thd.report.page import PARTS
from lightning_thd.warnings import MeasureWarning, warn

_OWN_LOOP_STEPS = 50  # Without a Trainer, metrics are logged once per 50 steps, the Trainer's default.
_FLUSH_STEPS = 1000  # Without logging, counts are reduced once per 1000 steps, to bound their memory.
# Two keys share a label. With several devices both exist, and the second, the total, is shown.
_BAR = (
    ("device/real_items_per_sec", "tokens/s"),
    ("real_items_per_sec", "tokens/s"),
    ("device/tflops_per_gpu", "TFLOP/s"),
    ("device/mfu", "MFU"),
)
_LOADERS = {"train": "train_dataloader", "validate": "val_dataloaders"}
_LOADERS |= {stage: f"{stage}_dataloaders" for stage in ("test", "predict")}
_COUNTABLE = (
    "a THDBatch, a THDStep, SeqStats, rows of padded token ids [B, N] as a tensor or under 'input_ids', or a "
    "dict, tuple or list with one of these"
)


def _evaluation_hooks(stage: str) -> Any:
    """Return the three hooks of an evaluation loop; they do nothing in the sanity check."""

    def start(self: THDThroughputMonitor, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._begin_evaluation(stage, trainer, pl_module)

    def batch_end(
        self: THDThroughputMonitor, trainer: Trainer, pl_module: LightningModule, _: Any, batch: Any, *__: int
    ) -> None:
        if not trainer.sanity_checking:
            self._add(stage, batch)

    def end(self: THDThroughputMonitor, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._report(trainer, stage, last=True)

    return start, batch_end, end


class THDThroughputMonitor(Callback):
    """Logs FLOP/s, MFU, HFU, tokens/s and packing quality, from the real lengths of the sequences.

    Collectives and device reads happen once per interval, before checkpoints and after weights were frozen
    or unfrozen, never per batch. Metrics have the names of Lightning's ``ThroughputMonitor`` and some more
    (docs/reference/keys.md). In padded rows, only real tokens count. They are found from ``attention_mask``,
    ``position_ids``, ``lengths`` or pad ids with the label -100; a message at the end says what packing would
    save. The rates leave out validation, checkpoints, compilation and the first ``warmup_steps``.

    Args:
        peak: dense FLOP/s of one device; "auto" looks the device up, "measure" times matmuls once.
        flops_model: the model's FLOPs; None derives them from its transformers config. Without a config,
            torch's FLOP counter counts a step.
        causal: the query-key pairs of a causal layer: "half" of the square, "exact", or the "full" square.
        tokens: count the FLOPs of "real" tokens, or of "slots", padding included.
        recompute: the activation checkpointing, for HFU; "auto" finds it in the model. If the model has no
            transformers config, counted steps show it, and "full" is one forward more if they show none.
        every_n_steps: optimizer steps between two logs; None means the Trainer's ``log_every_n_steps``.
        warmup_steps: the number of first optimizer steps that the rates leave out.
        progress_bar: show tokens/s, TFLOP/s and MFU in the progress bar.
        all_keys: log every key. By default, loggers get a short list; ``latest`` always has every key.
        clock: a function that returns seconds; None means ``time.perf_counter``.
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
        all_keys: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        check_peak(peak, named=True)
        check_conventions(causal=causal, tokens=tokens)
        if recompute != "auto":
            check_conventions(recompute=recompute)
        if every_n_steps is not None:
            whole_number(every_n_steps, "every_n_steps", least=1, advice="None is the Trainer's own number.")
        whole_number(warmup_steps, "warmup_steps", advice="It is the number of steps left out of the rates.")
        flags(progress_bar=progress_bar, all_keys=all_keys)
        if clock is not None and not callable(clock):
            raise TypeError(f"clock is {described(clock)}; wanted a function that returns seconds.")

        self.peak = peak
        self.flops_model = checked_flops(flops_model)
        self.causal: Causal = causal
        self.tokens: Tokens = tokens
        self.recompute: Policy = recompute
        self.every_n_steps = every_n_steps
        self.warmup_steps = warmup_steps
        self.progress_bar = progress_bar
        self.all_keys = all_keys

        self.latest: dict[str, float] = {}
        self._clock = clock or time.perf_counter
        self._meters: dict[str, Meter] = {}
        self._hardware: Hardware | None = None
        self._flops: ModuleFlops | None = None
        self._restored: dict[str, Any] = {}  # totals of a checkpoint or of the last fit
        self._saving: tuple[Trainer, Any, Any] | None = None  # a Trainer, its own save_checkpoint, ours
        self._warned = False
        self._noticed_padding = self._noticed_fill = False  # whether each notice has been printed
        self._log: Callable[[dict[str, float], int], object] | None = None
        self._marks = StepMarks(self._clock)
        self._steps = 0
        self._exclude = False  # whether ``exclude_step`` was called in this step
        self._graphs = 0  # torch.compile's graphs when the last step ended

    def exclude_step(self) -> None:
        """Leave this step and those since the last reduction out of the rates, but not of total_flops."""
        self._exclude = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside this context, such as that of a checkpoint, from the training rates."""
        was_running = "train" in self._meters and self._meters["train"].pause()
        if was_running:
            self._marks.mark("other")
        else:  # in an evaluation, or in another pause
            self._marks.pause()
        try:
            yield
        finally:
            if was_running:
                self._marks.skip()
            else:
                self._marks.pause()
            if was_running and "train" in self._meters:
                self._meters["train"].resume()

    def watch(
        self,
        model: nn.Module,
        *,
        precision: str = "32-true",
        log: Callable[[dict[str, float], int], object] | None = None,
        capacity: int | None = None,
    ) -> None:
        """Start to measure a loop without a Lightning Trainer; every rank calls this.

        Args:
            model: the model; FLOPs come from its transformers config or, without one, from torch's counter.
            precision: precision of the matmuls in Lightning's terms: "bf16-mixed", "bf16-true", "32-true".
            log: a function of the metrics and the number of steps, such as Fabric's ``fabric.log_dict``. It
                is called every ``every_n_steps`` (default 50) steps.
            capacity: most tokens of a pack, by which ``packing/fill`` divides; None means a batch's slots.
        """
        if capacity is not None:
            whole_number(capacity, "capacity", least=1, advice="Pass the data module's capacity.")
        self._remove_hooks()  # those of an earlier model

        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        hardware = Hardware.of(model, device, self.peak, precision, group=None, devices=ranks)

        self._flops = self._flops_of(model, sharded=False)
        self._log = log
        self._steps = 0
        self._graphs = _compiled_graphs()
        self._marks = StepMarks(self._clock)

        meter = self._new_meter("train", "training", hardware, model)
        meter.capacity = capacity or 0

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Count one optimizer step of a loop without a Lightning Trainer; call ``watch`` before.

        Args:
            batch: the step's ``THDBatch``, padded rows, or a list of several microbatches.
        """
        if "train" not in self._meters or self._flops is None:
            raise ValueError("step() was called before watch(model). Call monitor.watch(model) once.")

        self._begin_step(batch)
        try:
            yield
        except BaseException:
            self._flops.stop()
            raise

        self._add("train", batch)
        self._end_step()
        if self._steps % (self.every_n_steps or _OWN_LOOP_STEPS) == 0:
            self._publish()

    def finish(self) -> dict[str, float]:
        """Log the last steps of a loop without a Lightning Trainer, and return the latest metrics."""
        if "train" not in self._meters:
            raise ValueError("finish() was called before watch(model). Call monitor.watch(model) once.")
        self._publish(last=True)
        _notice_padding(self._meters["train"])
        return self.latest

    def _follow(self) -> None:
        """If weights were frozen or unfrozen, reduce counts of ended steps and rebuild the FLOPs models."""
        if self._flops is not None and self._flops.outdated:
            if "train" in self._meters:
                self._meter("train").reduce(whole=True)
            self._flops.follow()

    def _begin_step(self, batch: Any = None) -> None:
        self._follow()
        self._meters["train"].resume()
        if self._flops is not None:
            self._flops.begin("train", batch)

    def _publish(self, *, last: bool = False) -> dict[str, float]:
        """Close an interval of a loop without a Lightning Trainer, and log its metrics; a collective."""
        metrics = self._close(self._meter("train"), last=last)
        if metrics and self._log is not None:
            self._log(metrics if self.all_keys else for_loggers(metrics), self._steps)
        return metrics

    on_validation_start, on_validation_batch_end, on_validation_end = _evaluation_hooks("validate")
    on_test_start, on_test_batch_end, on_test_end = _evaluation_hooks("test")
    on_predict_start, on_predict_batch_end, on_predict_end = _evaluation_hooks("predict")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the FLOPs model and the device's peak, and start measuring."""
        warn_of_newer()
        self._open("train", trainer, pl_module)
        self._steps = 0
        self._graphs = _compiled_graphs()
        self._marks = StepMarks(self._clock)
        self._wrap_saving(trainer)
        lay_out(trainer.loggers)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock at the first batch, and again after each pause."""
        meter = self._meters["train"]
        inside_step = bool(meter.steps[-1])  # with gradient accumulation, after the step's first batch
        if not inside_step:
            self._follow()

        meter.resume()
        if self._flops is not None:
            self._flops.begin("train", batch, inside=inside_step)
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
        step_goes_on = accumulates(trainer)
        self._marks.mark("forward_backward" if step_goes_on else "optimizer")

        skipped = pl_module.automatic_optimization and outputs == {}  # training_step returned None
        if not skipped:
            self._add("train", batch)
        elif self._flops is not None:
            self._flops.stop()
        if step_goes_on:
            return

        self._end_step()
        every = self.every_n_steps or _log_every(trainer)
        if every and (logged_step(trainer) + 1) % every == 0:  # Lightning adds the 1 after this hook
            self._report(trainer, "train")
        elif not every and self._steps % _FLUSH_STEPS == 0:
            self._meter("train").reduce(whole=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the steps after the last full interval, so that a short fit also gets metrics."""
        self._marks.pause()
        if "train" in self._meters and (self.every_n_steps or _log_every(trainer)):
            self._report(trainer, "train", last=True)
            _notice_padding(self._meters["train"])

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove all hooks without a collective; after an error, Lightning does not call ``teardown``."""
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the Trainer's own methods and remove all hooks."""
        self._restored = self.state_dict()
        self._remove_hooks()
        self._meters = {}
        self._hardware = None
        self._flops = None

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of training so far, over all ranks."""
        return self._meters["train"].state() if "train" in self._meters else self._restored

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the totals from a checkpoint."""
        self._restored = state_dict

    def _open(self, stage: str, trainer: Trainer, pl_module: LightningModule) -> Meter:
        """Create the meter of a stage; the first meter of a run looks up the peak and the FLOPs model."""
        strategy = trainer.strategy
        if self._hardware is None:
            sharded = getattr(strategy, "context_parallel_size", 1) != 1
            self._flops = self._flops_of(pl_module, sharded=sharded)
            precision = str(getattr(trainer.precision_plugin, "precision", "32-true"))
            self._hardware = Hardware.of(
                pl_module,
                strategy.root_device,
                self.peak,
                precision,
                group=data_parallel_group(strategy),
                devices=trainer.world_size,
            )

        work: Work = "training" if stage == "train" else "forward"
        if stage == "train" and not trainer.global_step:  # neither a resumed nor a second fit
            self._restored = {}
        meter = self._new_meter(stage, work, self._hardware, pl_module, stage_group(strategy))
        meter.capacity = _capacity_of(trainer, stage)
        return meter

    def _flops_of(self, module: nn.Module, *, sharded: bool) -> ModuleFlops:
        """Return what finds the FLOPs models of a module's stages, by the monitor's arguments."""
        conventions: Any = {"causal": self.causal, "tokens": self.tokens, "recompute": self.recompute}
        return ModuleFlops(module, self.flops_model, sharded=sharded, **conventions)

    def _new_meter(
        self, stage: str, work: Work, hardware: Hardware, module: nn.Module, group: Any = None
    ) -> Meter:
        """Create the meter of a stage; that of training also gets the experts' choices and the totals."""
        meter = Meter(stage, work, self._clock, hardware)
        self._meters[stage] = meter
        meter.pad_id = _pad_id_of(module)

        if stage == "train":
            meter.experts = expert_load(module, group)
            if self._restored:
                meter.load(self._restored)
                self._restored = {}
        return self._meter(stage)

    def _meter(self, stage: str) -> Meter:
        """Return the meter of a stage, updated with the FLOPs model that is known by now."""
        meter = self._meters[stage]
        if self._flops is not None:
            meter.use(self._flops, stage)
        return meter

    def _begin_evaluation(self, stage: str, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pause training, and start the meter of an evaluation."""
        self._marks.pause()
        if "train" in self._meters:
            self._meters["train"].pause()

        meter = self._open(stage, trainer, pl_module)
        if self._flops is not None:
            self._flops.begin(stage)
        meter.resume()

    def _add(self, stage: str, batch: Any) -> None:
        """Count a batch; warn once of one that cannot be counted."""
        meter = self._meters[stage]
        calls = [] if self._flops is None else self._flops.calls()
        microbatches = meter.add(batch, calls)

        if not microbatches and not self._warned:
            self._warned = True
            warn(_why_uncounted(batch), MeasureWarning)

        if stage != "train" and self._flops is not None:  # each batch of an evaluation is a step
            self._flops.end(stage, meter.steps[-1])

    def _close(self, meter: Meter, *, last: bool) -> dict[str, float]:
        """Return an interval's metrics, in a collective; print once if padding or capacity is unknown."""
        metrics = meter.close(last=last)
        self._follow()
        if self._flops is not None:
            self._flops.follow()  # in a pipeline, where ``_follow`` does nothing
        self.latest.update(metrics)

        all_slots = meter.model is not None and meter.model.tokens == "slots"  # by the user's choice
        if meter.unknown_padding and not all_slots and not self._noticed_padding:
            self._noticed_padding = True
            rank_zero_info(
                "A batch of token ids does not show which slots are padding. FLOPs and tokens/s are those "
                "of all slots; MFU, real tokens and packing/fill are not logged. Put attention_mask, "
                "position_ids or lengths beside input_ids. If no slot is padding, "
                "THDThroughputMonitor(tokens='slots') logs MFU. "
                f"{see('padding')}"
            )

        if metrics and meter.unfilled and not self._noticed_fill:
            self._noticed_fill = True
            rank_zero_info(
                "packing/fill is 1.0: the packs have no padding, and their capacity is unknown. "
                "Pass watch(capacity=...), or give the Trainer the THDDataModule or its loader."
            )
        return metrics

    def _end_step(self) -> None:
        """Close a step after the optimizer's update, and decide whether its time counts in the rates."""
        self._marks.end_step()
        self._steps += 1
        meter = self._meters["train"]

        slow = False  # a step under torch's FLOP counter
        products = None
        if self._flops is not None:
            slow = self._flops.end("train", meter.steps[-1], discard=self._exclude)
            products = self._flops.products
        meter.end_step(products)

        graphs = _compiled_graphs()
        compiled = graphs != self._graphs
        if slow or compiled or self._exclude or self._steps <= self.warmup_steps:
            meter.leave_out()
            self._marks.close()

        self._exclude = False
        self._graphs = graphs

    def _report(self, trainer: Trainer, stage: str, *, last: bool = False) -> None:
        """Close an interval of a stage, and give its metrics to the Trainer; a collective."""
        meter = self._meter(stage)
        if stage != "train":
            meter.pause()
            del self._meters[stage]

        metrics = self._close(meter, last=last)
        if stage == "train" and metrics:
            metrics |= self._marks.close()
            self.latest.update(metrics)

        shown = None
        if self.progress_bar and stage == "train":
            shown = {label: metrics[f"train/{key}"] for key, label in _BAR if f"train/{key}" in metrics}
        logged = metrics if self.all_keys else for_loggers(metrics)
        record(trainer, metrics, logged=logged, shown=shown)

    def _wrap_saving(self, trainer: Trainer) -> None:
        """Pause the clock while the Trainer saves; reduce the counts first, for the checkpoint."""
        original = trainer.save_checkpoint

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> None:
            with self.paused():
                if "train" in self._meters:  # not after an error, when other ranks may not join
                    self._meter("train").reduce(whole=True)
                original(*args, **kwargs)
                self._marks.mark("checkpoint")

        # In the instance's __dict__, which shows whether other code had replaced the method before.
        self._saving = (trainer, trainer.__dict__.get("save_checkpoint"), save)
        trainer.__dict__["save_checkpoint"] = save

    def _remove_hooks(self) -> None:
        """Remove the hooks on the model, and restore the Trainer's ``save_checkpoint``."""
        if "train" in self._meters:
            experts = self._meters["train"].experts
            if experts is not None:
                experts.stop()
        if self._flops is not None:
            self._flops.stop()

        if self._saving is None:
            return
        trainer, before, save = self._saving
        self._saving = None
        if trainer.__dict__.get("save_checkpoint") is save:  # unless other code has replaced it since
            del trainer.__dict__["save_checkpoint"]
            if before is not None:
                trainer.__dict__["save_checkpoint"] = before


class StepMarks:
    """Adds up the CPU's time between the hooks of training steps, without a device synchronisation."""

    # The CPU runs ahead of a GPU. A wait for the GPU counts in the part of the step in which the CPU waits.

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._since: float | None = None  # the time of the last mark; None in a pause
        self._steps = 0
        self._waited: tuple[Any, float] | None = None  # a loader and the last value of its ``waited_s``

    def mark(self, part: str) -> None:
        """Add the CPU time since the last mark to a named part of the step."""
        now = self._clock()
        if self._since is not None:
            self._seconds[part] += now - self._since
        self._since = now

    def waited(self, loader: Any) -> None:
        """Count a loader's wait for data since the last call, if the loader has ``waited_s``."""
        total = getattr(loader, "waited_s", None)
        if total is None:
            return

        if self._since is not None and self._waited is not None:
            last_loader, last_total = self._waited
            if last_loader is loader:
                waited_s = total - last_total
                self._seconds["data_wait"] += waited_s
                self._since += waited_s  # so that the next mark does not count it again
        self._waited = (loader, total)

    def end_step(self) -> None:
        """Increment the number of steps."""
        self._steps += 1

    def skip(self) -> None:
        """Do not count the time since the last mark."""
        if self._since is not None:
            self._since = self._clock()

    def pause(self) -> None:
        """Do not count the time until the next mark; the time before is ``other``."""
        self.mark("other")
        self._since = None

    def close(self) -> dict[str, float]:
        """Return the mean seconds per step of each part since the last call, or {} without steps."""
        if not self._steps:
            return {}

        means = {f"train/step_time/{part}": seconds / self._steps for part, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._steps = 0
        return means


def _why_uncounted(batch: Any) -> str:
    """Return a warning that says what a batch lacks to be counted."""
    lost = "it is missing from tokens/s, FLOP/s and MFU"
    if not isinstance(batch, Mapping):
        return (
            f"A batch of type {type(batch).__name__} has no sequence lengths, so {lost}. "
            f"The monitor can count {_COUNTABLE}."
        )

    keys = ", ".join(map(repr, batch)) or "none"
    ids = batch.get("input_ids")
    if ids is not None:
        return (
            f"'input_ids' of the batch is {described(ids)}, so {lost}. The monitor reads a tensor of integer "
            f"token ids there, [B, N] or [T]. The keys of the batch are {keys}."
        )
    return (
        f"The batch has no token ids under 'input_ids', so {lost}. Its keys are {keys}. Rename the key of "
        "the token ids to 'input_ids' in the collate function. Real tokens are then counted by "
        f"attention_mask, position_ids or lengths beside it. {see('padding')}"
    )


def _capacity_of(trainer: Trainer, stage: str) -> int:
    """Return the slots of a full pack of a stage's loaders, else of the data module; 0 if unknown."""
    loaders = tree_leaves(getattr(trainer, _LOADERS[stage]))
    capacities = {getattr(loader, "capacity", None) for loader in loaders} - {None}
    if not capacities:
        datamodule = getattr(trainer, "datamodule", None)
        capacities = {getattr(datamodule, "capacity", None)}
    if len(capacities) != 1:  # loaders of several capacities
        return 0

    (capacity,) = capacities
    return capacity if isinstance(capacity, int) else 0  # not a string such as "auto"


def _pad_id_of(module: nn.Module) -> int | None:
    """Return the first pad id that a config in a module has."""
    for child in module.modules():
        pad_id = getattr(getattr(child, "config", None), "pad_token_id", None)
        if isinstance(pad_id, int):
            return pad_id
    return None


def _notice_padding(meter: Meter) -> None:
    """Say once, at the end, which share of the padded rows was padding, and what packing would save."""
    real, slots = meter.padded
    if 0 < real < slots:
        rank_zero_info(
            f"{1 - real / slots:.0%} of slots were padding: {real:,} real tokens in {slots:,} slots. Packing "
            f"them with THDDataModule would need about {real / slots:.0%} of the slots: up to "
            f"{slots / real:.1f} times as many tokens a second."
        )


def _log_every(trainer: Trainer) -> int:
    return int(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # set outside __init__


def _compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made; 0 if it was never imported."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
