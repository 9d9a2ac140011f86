"""A Hugging Face Trainer class -> the same class on packs: its data, its loss, its FLOPs, its logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd._checks import answers, described, flags
from lightning_thd._find import unwrapped
from lightning_thd._imports import require
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.batch.noted import FirstStep
from lightning_thd.callbacks.experts import expert_load
from lightning_thd.callbacks.loggers import for_loggers
from lightning_thd.callbacks.meter import Hardware, Meter, count_table
from lightning_thd.callbacks.module_flops import ModuleFlops
from lightning_thd.callbacks.seen import microbatches
from lightning_thd.data.auto_capacity import refuse_other_loops
from lightning_thd.flops.model import FlopsModel, checked_flops, from_ints
from lightning_thd.flops.rates import check_peak
from lightning_thd.integrations.hf_cuts import CutMixin
from lightning_thd.integrations.hf_data import (
    PositionMixin,
    TrainerPacks,
    arguments_of,
    is_streamed,
    is_trls,
    open_datasets,
    packed_dataset,
    streamed_dataset,
)
from lightning_thd.integrations.hf_evaluation import LOSS, OPTION, EvaluationMixin, in_data_kwargs
from lightning_thd.integrations.hf_heads import head_loss, head_of, refuse_head
from lightning_thd.integrations.hf_options import (
    choose_thd,
    learned_from_paths,
    leave_out_ligers_losses,
    precision_of,
    refuse_attention,
    refuse_engines,
    refuse_ligers_gaps,
    refuse_options,
    refuse_trainer,
    settings_for,
)
from lightning_thd.integrations.hf_rows import ROW_TRAINERS, PackedRowsMixin, refuse_old_rows
from lightning_thd.integrations.packed_loop import sum_over_packs
from lightning_thd.loss import causal_lm_loss, causal_lm_loss_and_stats
from lightning_thd.loss.router_balance import RouterBalance, checked_balance
from lightning_thd.models.preparing import prepare_if_asked
from lightning_thd.packing import Sequences
from lightning_thd.packing.lengths import check_capacity
from lightning_thd.precision.convert import in_low_precision


def packed_trainer(trainer_class: type | None = None) -> type:
    """Make a Hugging Face Trainer class train on packs.

    Call ``packed_trainer()(model=model, args=args, train_dataset=dataset, capacity=8192)``. TRL's
    ``SFTTrainer`` works too, with ``packing=False``; pass ``max_length=None``, or it cuts at 1,024 tokens and
    warns. ``per_device_train_batch_size`` is unused: a batch is a
    pack. TRL's ``DPOTrainer``, ``RewardTrainer`` and ``GRPOTrainer`` keep their arguments and pack all rows
    of a batch. They also take ``share_prefixes=True``, to run a prompt through the model once for all its
    answers in the batch, ``peak=``, to log throughput and MFU, and ``flops_model=`` for these.

    Args:
        trainer_class: ``transformers.Trainer`` (default), TRL's above, or a class with their loss and data.

    Returns:
        A subclass. Options work as in the base or are refused. Unless the base is one of the three TRL
        trainers above, the loss of a step is the mean over its loss tokens, and the subclass takes six more
        arguments: ``capacity`` (most tokens of a pack), ``peak`` and ``flops_model`` (see
        ``THDThroughputMonitor``), ``router_balance`` (see ``causal_lm_loss``), ``data_kwargs`` (more
        arguments of ``THDDataModule``) and ``needs_boundaries`` (False for a model without attention).
        With ``data_kwargs={"global_batch": Sequences(n)}``, every optimizer step has exactly n sequences.
        ``train_dataset`` may be a stream: an iterable dataset, a ``data.streams.Stream``, or a mixture. It
        and ``eval_dataset`` may be paths, which are read as ``THDDataModule`` reads them; the tokenizer is
        ``processing_class``. TRL may get the name of a model, which is then built with "thd".
    """
    transformers = require("transformers", feature="packed_trainer")
    base = transformers.Trainer if trainer_class is None else trainer_class
    if not isinstance(base, type) or not issubclass(base, transformers.Trainer):
        raise TypeError(
            f"trainer_class is {described(base)}; wanted transformers.Trainer or a subclass of it."
        )

    mixin: type = _PackedTrainerMixin
    trl: Any = sys.modules.get("trl")  # a user who passes a class of TRL has imported it
    row_trainer = None if trl is None else _row_trainer(base, trl)
    if row_trainer is not None:
        refuse_old_rows(base, row_trainer)
        mixin = PackedRowsMixin
    elif trl is None:
        refuse_trainer(base, (transformers.Trainer,))
    else:
        refuse_trainer(base, (transformers.Trainer, trl.SFTTrainer))
    return type(f"Packed{base.__name__}", (mixin, base), {"__doc__": base.__doc__})


def _row_trainer(trainer_class: type, trl: Any) -> str | None:
    """Return the name of TRL's trainer of pairs or groups from which a class derives, or None."""
    for name in ROW_TRAINERS:
        if issubclass(trainer_class, getattr(trl, name)):
            return name
    return None


class _PackedTrainerMixin(EvaluationMixin, PositionMixin, CutMixin):
    """Trains on packs, with the exact mean loss over a step's loss tokens; see ``packed_trainer``."""

    loss_is_scaled_for_ga = False  # so Trainer divides by the accumulation steps, as loss_scale expects
    current_gradient_accumulation_steps: int

    @answers(
        required="capacity",
        capacity="It is the most tokens of a pack, for example capacity=8_192. A batch is a pack, so it "
        "takes the place of per_device_train_batch_size.",
    )
    def __init__(
        self,
        *args: Any,
        capacity: int,
        peak: Literal["auto", "measure"] | float = "auto",
        flops_model: FlopsModel | None = None,
        router_balance: RouterBalance | None = None,
        data_kwargs: dict[str, Any] | None = None,
        needs_boundaries: bool = True,
        **kwargs: Any,
    ) -> None:
        flags(needs_boundaries=needs_boundaries)
        if str(capacity) == "auto":
            refuse_other_loops()
        check_capacity(capacity)
        data_kwargs = dict(data_kwargs or {})
        collator = kwargs.get("data_collator", args[2] if len(args) > 2 else None)
        if collator is not None:
            raise ValueError(f"data_collator={type(collator).__name__} would pad packs. Leave it out.")
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func is called with logits, which packed_trainer never makes. Define "
                "compute_loss() in a subclass, or give prepare_thd(loss_fn=...) the loss."
            )
        for name in {"val", "test", "predict"} & data_kwargs.keys():
            raise ValueError(f"data_kwargs has {name!r}, which nothing would read. Pass eval_dataset=.")

        settings = kwargs.get("args", args[1] if len(args) > 1 else None)
        if settings is not None:
            refuse_options(settings)  # before the base class warns about them or acts on them
            leave_out_ligers_losses(settings)
        self._refuse_uncounted_cuts(settings)
        model = kwargs.get("model", args[0] if args else None)
        if isinstance(model, str):
            if settings is None:
                settings = settings_for(model)
                kwargs["args"] = settings
            choose_thd(settings)
        else:
            refuse_attention(model)  # before the base class tokenises anything
        kinds = open_datasets(kwargs, data_kwargs)

        with learned_from_paths(settings, kinds, kwargs.get("eval_dataset")):
            super().__init__(*args, **kwargs)
        self._give_balancing_factor()
        check_peak(peak, named=True)
        checked_balance(router_balance)
        self._router_balance = router_balance
        self._flops_model = checked_flops(flops_model)
        self._capacity = capacity
        self._peak = peak
        self._data_kwargs = data_kwargs
        self._meter = Meter("train", "training", time.perf_counter)
        self._meter.capacity = capacity
        self._metered = False  # whether the meter was set up for the model
        self._checked_step = -1  # the last step with a check for frozen or unfrozen weights
        self._warm_after: int | None = None  # the first step of this run, which rates leave out; -1 if done
        self._inside_step = False  # whether some microbatches of the running step have been trained
        self._counted_flops = 0  # FLOPs of the last step of a model without a known config
        self._trained_sequences = 0
        self._trained_tokens = 0
        self._first_step_trained = 0  # after a resume the steps before it were of another run
        self._token_sums: dict[str, list[Tensor]] = {}  # (entropy, correct, tokens) of packs, by mode

        self._needs_boundaries = needs_boundaries and self._data_kwargs.get("needs_boundaries", True)
        if self._needs_boundaries:  # checks the first packs, then gives way to the class's own method
            self._first_step = FirstStep(
                self.compute_loss,
                what=f"{type(self).__name__}.{LOSS}",
                option=OPTION,
                passed=self._forget_first_step,
            )
            self.__dict__[LOSS] = self._first_step
        self._refuse_settings()

    def _give_balancing_factor(self) -> None:
        """Give the model TRL's factor of the balancing loss, because causal_lm_loss reads it from there."""
        factor = getattr(self, "router_aux_loss_coef", None)
        if factor is None and getattr(self, "aux_loss_enabled", False):  # TRL before 1.14
            factor = getattr(self.args, "router_aux_loss_coef", None)
        if factor is not None:
            unwrapped(self.model).router_aux_loss_coef = factor

    def _forget_first_step(self) -> None:
        """Give the class's own method back, unless somebody has put another function in its place."""
        if self.__dict__.get(LOSS) is self._first_step:
            del self.__dict__[LOSS]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the base class does; count sequences from 0, and make a new FLOPs model."""
        self._trained_sequences = 0
        self._metered = False  # model_init may have made a new model
        self._warm_after = None
        self._inside_step = False
        try:
            return super().train(*args, **kwargs)
        finally:
            self._meter.pause()
            if self._metered:
                self._flops.stop()  # after an error, or in a step that was not finished

    def get_train_dataloader(self) -> TrainerPacks:
        """Return a loader of this rank's training packs."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if is_streamed(self.train_dataset):
            train = streamed_dataset(self.train_dataset, type(self))
        else:
            own_labels = head_of(self.model) == "token"
            train = packed_dataset(self.train_dataset, arguments_of(self.model), own_labels=own_labels)
        accumulate = self.args.gradient_accumulation_steps
        options = {"seed": seed, **self._data_kwargs}
        data = self._attached(train=train, accumulate=accumulate, **options)
        with in_data_kwargs():
            data.setup("fit")
            return self._packs_of(data.train_dataloader())

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, THDBatch],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the pack's loss, whose mean over a step's packs on all ranks is the step's mean loss."""
        if return_outputs:
            raise ValueError(
                "compute_loss(return_outputs=True) wants logits, which packed_trainer never makes. Call "
                "model(**inputs['batch'].hf_kwargs()) for them."
            )
        ranks = dist.group.WORLD if self.args.world_size > 1 else None
        loss_fn = in_low_precision(self._loss, model, group=ranks)
        return loss_fn(model, inputs["batch"].to(self.args.device))

    def _loss(self, model: nn.Module, batch: THDBatch) -> Tensor:
        """Return the loss that the model's head asks for; for TRL's logs, add up a pack's entropy too."""
        head = head_of(model)
        if head != "causal":
            return head_loss(model, batch, head)

        options: Any = {
            "label_smoothing": float(self.args.label_smoothing_factor),
            "router_balance": self._router_balance,
        }
        if not self._logs_entropy:
            return causal_lm_loss(model, batch, **options)
        loss, stats = causal_lm_loss_and_stats(model, batch, **options)
        mode = "train" if model.training else "eval"
        self._token_sums.setdefault(mode, []).append(torch.stack(stats))
        return loss

    def _token_metrics(self, mode: str) -> dict[str, float]:
        """Return the entropy and accuracy of the loss tokens since the last call; this is a collective."""
        rows = [torch.zeros(3, device=self.args.device), *self._token_sums.pop(mode, ())]
        sums = self.accelerator.reduce(torch.stack(rows).sum(0), reduction="sum")  # fp32: MPS has no fp64
        entropy, correct, tokens = sums.tolist()
        if not tokens:
            return {}
        return {"entropy": entropy / tokens, "mean_token_accuracy": correct / tokens}

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on one pack or all packs of a step, and add their tokens to the throughput counters."""
        meter = self._ready
        if self._checked_step != self.state.global_step and self._flops.outdated:  # (un)frozen weights
            meter.reduce()
            self._flops.follow()
            meter.use(self._flops)
        self._checked_step = self.state.global_step
        self._leave_out_first()
        meter.resume()

        step = inputs["batch"]
        self._flops.begin("train", step, inside=self._inside_step)
        if not self._trained_sequences:
            self._first_step_trained = self.state.global_step
        if isinstance(step, THDStep):
            loss = self._train_step(model, step)
        else:
            loss = super().training_step(model, inputs)

        meter.add(step, self._flops.calls())
        for batch in step.packs:
            self._trained_sequences += len(batch.lengths)
            self._trained_tokens += batch.stats.real_tokens
        self._inside_step = not self.accelerator.sync_gradients
        if not self._inside_step:
            self._end_count()
        return loss

    def _train_step(self, model: nn.Module, step: THDStep) -> Tensor:
        """Train on all packs of a step, as if they were accumulated by Trainer."""
        run = super().training_step
        accumulation_steps = self.current_gradient_accumulation_steps
        self.current_gradient_accumulation_steps = len(step)  # by which Trainer divides the loss
        try:
            return sum_over_packs(
                step, self.accelerator.no_sync, model, lambda batch: run(model, {"batch": batch})
            )
        finally:
            self.current_gradient_accumulation_steps = accumulation_steps

    def _end_count(self) -> None:
        """End the count of a step whose gradients are complete; the optimizer's update comes behind it."""
        is_slow = self._flops.end("train", self._meter.steps[-1])
        self._meter.end_step(self._flops.products)
        self._meter.use(self._flops)
        self._counted_flops = 0 if self._flops.pattern is None else self._meter.last_flops()
        if is_slow:  # counting slowed it
            self._meter.leave_out()

    def _leave_out_first(self) -> None:
        """Leave the first step out of the rates once it has ended, because it starts workers and kernels."""
        if self._warm_after is None:
            self._warm_after = self.state.global_step
        elif 0 <= self._warm_after < self.state.global_step:
            self._meter.leave_out()
            self._warm_after = -1

    def floating_point_ops(self, inputs: dict[str, THDBatch | THDStep]) -> int:
        """Return the model FLOPs of a batch's packs, from lengths; 0 for a model with unknown FLOPs.

        Those of a model without a known config are counted once a step, with its last batch.
        """
        model = self._ready.model
        if model is None or self._flops.pattern is not None:
            counted = self._counted_flops
            self._counted_flops = 0
            return counted
        packs: Any = microbatches(inputs["batch"])
        counts = count_table(packs, model).sum(axis=0).tolist()
        return int(model.training_flops(from_ints(counts, model)).model)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add throughput, MFU and packing to the Trainer's own logs."""
        self._count_packs(logs)
        self._set_epoch()
        if "loss" in logs and self._metered:
            logs = {**logs, **self._throughput()}
            if self._logs_entropy:  # TRL's compute_loss, which fills these metrics, does not run
                tokens = self._sum_over_ranks(self._trained_tokens)
                metrics = {"num_tokens": tokens, **self._token_metrics("train")}
                self._metrics["train"].update({key: [value] for key, value in metrics.items()})
        super().log(logs, *args, **kwargs)

    def _throughput(self) -> dict[str, float]:
        """Return the metrics of the interval that ends here, without "train/", which reporters add."""
        self._leave_out_first()
        is_last = self.state.global_step >= self.state.max_steps
        metrics = for_loggers(self._meter.close(last=is_last))
        if metrics.get("train/device/items_per_sec") == metrics.get("train/device/real_items_per_sec"):
            metrics.pop("train/device/items_per_sec", None)  # without padding between sequences
        if "train/total_flops" in metrics:  # the Trainer's own sum also counts the steps before a resume
            metrics["train/total_flops"] = float(self.state.total_flos)
        return {key.removeprefix("train/"): value for key, value in metrics.items()}

    def _set_epoch(self) -> None:
        """Set the epoch of logs and checkpoints; Trainer's own counts only the packs since a resume."""
        if self._packs is None:
            return
        position = self._packs.position()
        source = self._packs.loader.source
        # Without a length, a pass over a stream counts as max_steps steps, as in Trainer.
        batches = source.length(position.epoch) or self.state.max_steps * source.per_step
        self.state.epoch = position.epoch + position.step * source.per_step / batches

    def _sum_over_ranks(self, count: int) -> int:
        """Return the sum of a number over all ranks; a collective."""
        if self.args.world_size == 1:
            return count
        total = torch.tensor(count, device=self.args.device)
        return int(self.accelerator.reduce(total, reduction="sum"))

    def _track_num_input_tokens(self, inputs: dict[str, THDBatch | THDStep]) -> None:
        """Count the tokens of all ranks' packs, in place of Trainer, which counts ``input_ids``."""
        counted = self.args.include_num_input_tokens_seen
        if counted == "no":
            return

        stats = inputs["batch"].stats
        tokens_of_rank = stats.real_tokens if counted == "non_padding" else stats.slots
        self.state.num_input_tokens_seen += self._sum_over_ranks(tokens_of_rank)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the packs of an optimizer step, or its sequences under ``Sequences(n)``."""
        global_batch = self._data_kwargs.get("global_batch")
        if global_batch is not None:
            return int(global_batch.n)
        return int(args.gradient_accumulation_steps * args.world_size)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        # Trainer would count packs. It multiplies this number by (steps run now) / max_steps.
        samples = self._sum_over_ranks(self._trained_sequences)
        steps = self.state.global_step - self._first_step_trained
        samples *= max(self.state.max_steps, 1) / max(steps, 1)
        return super()._finalize_training(trial, samples, start_time)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._set_epoch()
        with self._paused():
            super()._save_checkpoint(*args, **kwargs)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Stop the clock inside this context, if it runs."""
        was_running = self._meter.pause()
        yield
        if was_running:
            self._ready.resume()

    @property
    def _ready(self) -> Meter:
        """Return the meter, set up for the model at its first use, when Trainer has placed the model."""
        if not self._metered:
            self._meter.hardware = Hardware.of(
                self.model,
                torch.device(self.args.device),
                self._peak,
                precision_of(self.args),
                devices=self.args.world_size,
            )
            self._flops = ModuleFlops(self.model, self._flops_model, sharded=False)
            self._meter.use(self._flops)
            self._metered = True
            if self._meter.experts is not None:
                self._meter.experts.stop()
            self._meter.experts = expert_load(self.model)
        return self._meter

    def _refuse_settings(self) -> None:
        """Refuse a model, settings and data that the Trainer cannot train on packs."""
        refuse_engines(self)
        refuse_attention(self.model)
        refuse_ligers_gaps(self.args, self.model)
        refuse_head(
            self.model,
            label_smoothing=float(self.args.label_smoothing_factor),
            split=self._data_kwargs.get("oversize") == "split",
            streamed=self.train_dataset is not None and is_streamed(self.train_dataset),
        )

        prepare_if_asked(self.model)
        if _leaves_images_to_its_collator(self):
            raise ValueError(
                "The dataset has images, which TRL prepares batch by batch in its collator. Use THDDataModule"
                ", as examples/vision_language.py does."
            )

        global_batch = self._data_kwargs.get("global_batch")
        if isinstance(global_batch, Sequences):
            self._check_sequences(global_batch)

    def _check_sequences(self, global_batch: Sequences) -> None:
        """Refuse settings under which a step of several microbatches would be trained wrongly."""
        accumulate = self.args.gradient_accumulation_steps
        if accumulate != 1:
            raise ValueError(
                f"global_batch={global_batch} with gradient_accumulation_steps={accumulate}: a step of n "
                "sequences has as many microbatches as it needs. Set gradient_accumulation_steps=1."
            )
        optimizer = str(getattr(self.args.optim, "value", self.args.optim))
        if "layerwise" in optimizer or "lomo" in optimizer:
            raise ValueError(
                f"global_batch={global_batch} with optim={optimizer!r}, which steps in every backward pass: "
                "once a microbatch here. Use another optimizer, or global_batch=Packs(n)."
            )


def _leaves_images_to_its_collator(trainer: Any) -> bool:
    """Return whether a trainer of TRL has rows with images, which it does not prepare."""
    if not is_trls(type(trainer)):
        return False
    dataset = trainer.train_dataset
    names = getattr(dataset, "column_names", None)
    if names is None and dataset is not None:  # a stream may not know its columns before it reads
        names = next(iter(dataset), {})
    return names is not None and not {"image", "images"}.isdisjoint(names)
