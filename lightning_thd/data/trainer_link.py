"""A Trainer and its model -> the ranks, steps, sizes and progress that a data module needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_thd._find import model_config, models_in, outermost_models, text_config
from lightning_thd.alignment import Alignment
from lightning_thd.flops import FlopsModel
from lightning_thd.packing import Cost, Packs, Sequences
from lightning_thd.packing.sharing import Sharing


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The ranks, devices, model and loggers of the Trainer or loop that runs the loaders."""

    rank: int = 0  # data-parallel rank of this process
    ranks: int = 1  # number of data-parallel ranks
    accumulate: int = 1  # batches that each rank runs between two optimizer steps
    is_first: bool = True  # whether this process writes messages and shows bars
    on_gpu: bool = False  # whether batches are moved to a CUDA device
    alignment: Alignment | None = None
    sharing: Sharing | None = None  # how many ranks may share a sequence, if the plan decides that
    model: nn.Module | None = None  # the module that is trained
    loggers: tuple[Logger, ...] = ()
    whole_steps: bool = False  # With Packs(n), one batch holds all packs of this rank's step.


def host_of(trainer: L.Trainer) -> Host:
    """Describe a Trainer as a ``Host``; its strategy knows which ranks read different data."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    device = getattr(trainer.strategy, "root_device", None)
    sharing = getattr(trainer.strategy, "sharing", None)
    return Host(
        rank=sampler.get("rank", 0),
        ranks=sampler.get("num_replicas", 1),
        accumulate=trainer.accumulate_grad_batches,
        is_first=trainer.is_global_zero,
        on_gpu=device is not None and device.type == "cuda",
        alignment=alignment_of(trainer.strategy, trainer.precision_plugin, trainer.lightning_module),
        sharing=sharing,
        model=trainer.lightning_module,
        loggers=tuple(trainer.loggers),
        whole_steps=sharing is not None or getattr(trainer.strategy, "packs_as_steps", False),
    )


def on_gpu(model: nn.Module | None, device: torch.device | str | None) -> bool:
    """Return whether batches go to a CUDA device: the one given, or that of the model's parameters."""
    if device is not None:
        return torch.device(device).type == "cuda"
    parameters = () if model is None else model.parameters()
    return any(parameter.device.type == "cuda" for parameter in parameters)


def alignment_of(strategy: Any, precision: Any, module: nn.Module | None = None) -> Alignment | None:
    """Return the multiples of lengths and totals that the strategy and the precision together need."""
    asked: Alignment | None = getattr(strategy, "alignment", None)
    rule = getattr(precision, "alignment", None)
    if not callable(rule):
        rule = getattr(recipe_of(module), "alignment", None)
    if rule is None:
        return asked
    cp = getattr(strategy, "context_parallel_size", 1)
    found: Alignment = rule(
        cp=cp if isinstance(cp, int) else getattr(strategy, "max_context_parallel_size", 1),
        tp=getattr(strategy, "tensor_parallel_size", 1),
        sequence_parallel=bool(getattr(strategy, "sequence_parallel", False)),
        layout=getattr(strategy, "context_parallel_layout", "dual_chunk"),
    )
    return found if asked is None else asked.joined_with(found)


def model_alignment(module: nn.Module | None) -> Alignment | None:
    """Return the alignment that a model converted to FP8 needs, in a loop without a precision plugin."""
    recipe = recipe_of(module)
    return None if recipe is None else cast("Alignment", recipe.alignment())


def recipe_of(module: nn.Module | None) -> Any | None:
    """Return the FP8 recipe that a model, or a layer inside it, was converted with, or None."""
    for child in module.modules() if module is not None else ():
        if (recipe := child.__dict__.get("_thd_fp8")) is not None:
            return recipe
    return None


def vocab_size(module: nn.Module | None) -> int | None:
    """Return the size of the model's vocabulary, if its config has it."""
    config = model_config(module)
    return getattr(config.get_text_config(), "vocab_size", None) if config is not None else None


def sequence_classifier(module: nn.Module | None) -> str | None:
    """Return the class of the first model in a module that has one output per sequence, if any."""
    names = (type(model).__name__ for _, model in models_in(module))
    return next((name for name in names if name.endswith("ForSequenceClassification")), None)


def say_other_attention(module: nn.Module | None) -> None:
    """Print a notice for each trained model whose attention may cross the sequences of a pack."""
    for model in outermost_models(module).values():
        text = text_config(model.config)
        attention = getattr(text, "_attn_implementation", None)
        known = attention in ("eager", "sdpa", "flex_attention") and hasattr(text, "vocab_size")
        if known and any(parameter.requires_grad for parameter in model.parameters()):
            rank_zero_info(
                f"{type(model).__name__} runs attn_implementation={attention!r}, under which sequences of a "
                "pack may see each other. Build it with attn_implementation='thd', and give each model a "
                "copy of the config. See docs/reference/messages.md#attention."
            )


def model_cost(module: nn.Module | None, longest: int) -> Cost | None:
    """Return the cost of a sequence by the model's FLOPs, exact at ``longest``; None if unknown."""
    model = _flops_model(module)
    return None if model is None else Cost.from_flops(model, longest=longest)


def model_counts(module: nn.Module | None) -> dict[str, Any]:
    """Return the model's attention windows and vision tower, which the collator needs to count a batch."""
    model = _flops_model(module)
    return {} if model is None else {"windows": model.windows, "vision": model.vision}


def model_patch(module: nn.Module | None) -> int | None:
    """Return the edge of an image patch in pixels, from the config of the model's vision tower, if any."""
    vision = getattr(model_config(module), "vision_config", None)
    found = getattr(vision, "patch_size", None)
    return found if isinstance(found, int) else None


def _flops_model(module: nn.Module | None) -> FlopsModel | None:
    config = model_config(module)
    try:
        return None if config is None else FlopsModel.from_config(config)
    except ValueError:
        return None


def hide_hooks(module: L.LightningDataModule, own: type, hooks: Iterable[str]) -> None:
    """Make hooks of a data module look absent to Lightning, except those that a subclass overrides."""
    for hook in hooks:
        if getattr(type(module), hook) is getattr(own, hook):
            hidden = partial(getattr(own, hook), module)  # which says what is missing
            hidden.__wrapped__ = getattr(L.LightningDataModule, hook)  # type: ignore[attr-defined]  # is_overridden
            setattr(module, hook, hidden)


def hook_of_module(trainer: L.Trainer | None, batch: Any, dataloader_idx: int) -> Any:
    """Run a module's own ``on_before_batch_transfer``; Lightning calls only the data module's."""
    module = None if trainer is None else trainer.lightning_module
    if module is None or not is_overridden("on_before_batch_transfer", module):
        return batch
    return module.on_before_batch_transfer(batch, dataloader_idx)


def check_trainer(trainer: L.Trainer | None, step: Packs | Sequences | None) -> None:
    """Refuse a Trainer whose ranks and accumulation contradict ``global_batch``."""
    if trainer is None:
        return
    callbacks = cast("list[L.Callback]", trainer.callbacks)  # type: ignore[attr-defined]
    module = trainer.lightning_module
    if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks) and (
        is_overridden("configure_model", module) and not any(True for _ in module.parameters())
    ):
        raise MisconfigurationException(
            "StochasticWeightAveraging copies the module before configure_model() builds the model, and so "
            "would average nothing. Use WeightAveraging of lightning.pytorch.callbacks."
        )
    if isinstance(step, Sequences) and not getattr(trainer.strategy, "runs_thd_steps", False):
        raise MisconfigurationException(
            f"global_batch={step} needs a strategy that runs all microbatches of a step: 'thd', 'thd_ddp' or "
            f"'thd_model_parallel', not {type(trainer.strategy).__name__}. Or use Packs(n). "
            "See docs/reference/messages.md#steps."
        )
    host = host_of(trainer)
    recipe = recipe_of(host.model)
    if recipe is not None and recipe.engine == "te" and not hasattr(trainer.precision_plugin, "recipe"):
        rank_zero_warn(
            "The model was converted to Transformer Engine's FP8, and this Trainer has no FP8Precision: its "
            "layers multiply in high precision outside fp8_context(model). Pass plugins=FP8Precision(...)."
        )
    # A module that runs its optimizers itself decides how many batches make a step.
    own = module is not None and not module.automatic_optimization and isinstance(step, Packs)
    ranks = 1 if host.sharing is not None else host.ranks  # with degrees, packs need not divide by the ranks
    check_step(step, ranks=ranks, accumulate=host.accumulate, whole=host.whole_steps or own)


def check_step(step: Packs | Sequences | None, *, ranks: int, accumulate: int, whole: bool = False) -> None:
    """Refuse a ``global_batch`` that contradicts ranks and accumulation; ``whole`` if a batch is a step."""
    if accumulate != 1 and (whole or isinstance(step, Sequences)):
        raise MisconfigurationException(
            f"accumulate_grad_batches={accumulate}, but a pipeline, context_parallel_size='dynamic' and "
            "Sequences(n) make each batch a step. Set gradient accumulation to 1. "
            "See docs/reference/messages.md#steps."
        )
    if isinstance(step, Packs) and (step.n % ranks if whole else step.n != ranks * accumulate):
        raise MisconfigurationException(
            f"global_batch={step} but {ranks} data-parallel ranks x accumulate_grad_batches={accumulate} "
            f"make {ranks * accumulate} packs a step. Set Packs({ranks * accumulate}). "
            "See docs/reference/messages.md#steps."
        )


def settle_epoch(trainer: L.Trainer) -> list[Any]:
    """Fix the resumed Trainer's epoch and batch counters before its training loader is restored."""
    # Lightning ends an epoch that max_steps, max_time or an early stop interrupted, and would begin the next,
    # so the rest would be lost. After max_steps it also runs one more batch of a complete epoch.
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress
    batches: Any = loop.epoch_loop.batch_progress
    states = loop._combined_loader_states_to_load
    over = any(isinstance(state, Mapping) and state.get("ended") is True for state in states)
    if over and epochs.total.processed < epochs.total.ready == epochs.total.started:
        for count in (epochs.total, epochs.current):  # it was saved in a hook of the epoch's last batch
            count.processed += 1
            count.completed = count.processed
    ended = 0 < epochs.total.ready == epochs.total.started == epochs.total.processed
    if not (ended and states):
        return []
    if batches.is_last_batch or over:
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # the loop's own setter checks max_steps
        loop._combined_loader_states_to_load = []
        return states  # Lightning does not restore the states of loaders whose epoch was complete.
    if batches.current.processed:
        for count in (epochs.total, epochs.current):
            count.processed -= 1
            count.completed = count.processed
        loop.restarting = True
    return []


class Progress:
    """A Trainer's position in its epoch, for a loader that saves its own position."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._accumulate = trainer.accumulate_grad_batches

    def begins_epoch(self) -> bool:
        """Return whether the Trainer is in ``on_train_epoch_start``, or a checkpoint was written there."""
        epochs: Any = self._trainer.fit_loop.epoch_progress.total
        return bool(epochs.started < epochs.ready)

    def refuse_other_accumulation(self) -> None:
        """Refuse a change of accumulation while the Trainer runs, because all steps are planned."""
        now = self._trainer.accumulate_grad_batches
        if now != self._accumulate:
            raise MisconfigurationException(
                f"accumulate_grad_batches is {now}, but was {self._accumulate} when the training data was "
                "set up, and the packs of a step were planned. Begin another fit to change it."
            )

    def total(self) -> int:
        """Return how many batches of all epochs and fits the Trainer has finished."""
        return int(self._batches.total.processed)

    def limit(self, length: int | None) -> int | None:
        """Return how many batches of an epoch of ``length`` the Trainer runs; None if that is unknown."""
        limited = self._trainer.limit_train_batches
        if isinstance(limited, int):
            return limited if length is None else min(length, limited)
        return length if length is None or limited is None else int(length * limited)

    def resize(self, length: int) -> None:
        """Set the Trainer's number of batches for this epoch, because a mixture's epochs differ a little."""
        trainer, batches = self._trainer, self.limit(length) or 0
        loop = trainer.fit_loop
        if loop.max_batches == batches or getattr(trainer, "overfit_batches", 0) > 0:
            return
        loop.max_batches = batches
        combined = loop._combined_loader
        if combined is not None:
            combined.limits = batches  # set once by Lightning, before the first epoch
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))

    def match(self, start: int) -> None:
        """Set Lightning's batch counter to the loader's position, after a change of ranks or mid-step."""
        progress = self._batches
        if self.begins_epoch() and not start:  # the counts are still those of the epoch before
            progress.current.reset()
            progress.is_last_batch = False
            return
        shift = start - progress.current.processed
        if shift:
            progress.is_last_batch = False  # an interrupted step is run again
            for counter in (progress.current, progress.total):
                done = counter.processed + shift
                counter.ready = counter.started = counter.processed = counter.completed = done

    @property
    def _batches(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress
