"""A Trainer and its model -> the ranks, alignment, costs and progress that a data module needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_thd._find import (
    holds_compiled_code,
    model_config,
    models_in,
    outermost_models,
    recipe_of,
    text_config,
)
from lightning_thd._pages import see
from lightning_thd._private import private_of, set_private
from lightning_thd._trainer import logged_step_setter
from lightning_thd.alignment import Alignment
from lightning_thd.batch.noted import FirstStep, NotedBatch, warn_of_scale
from lightning_thd.flops import FlopsModel
from lightning_thd.packing import Cost, Packs, Sequences
from lightning_thd.packing.sharing import Sharing
from lightning_thd.warnings import SlowWarning, warn


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The ranks, device, model and loggers of a training job: of a Trainer, or of a loop without one."""

    rank: int = 0  # data-parallel rank of this process
    ranks: int = 1  # number of data-parallel ranks
    accumulate: int = 1  # batches that each rank runs between two optimizer steps
    is_first: bool = True  # whether this process shows progress bars
    on_gpu: bool = False  # whether batches are moved to a CUDA device
    alignment: Alignment | None = None  # multiples of lengths and of slots; None requires none
    sharing: Sharing | None = None  # set with context_parallel_size="dynamic"
    model: nn.Module | None = None  # the module that is trained
    loggers: tuple[Logger, ...] = ()
    alone: bool = False  # whether a Trainer runs on this rank only, even if the process has a group of ranks
    whole_steps: bool = False  # whether a batch holds all packs of this rank in a step, also with Packs(n)


def job_of(trainer: L.Trainer) -> Job:
    """Describe a Trainer as a ``Job``; its strategy knows which ranks read different data."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    device = getattr(trainer.strategy, "root_device", None)
    sharing = getattr(trainer.strategy, "sharing", None)
    return Job(
        rank=sampler.get("rank", 0),
        ranks=sampler.get("num_replicas", 1),
        accumulate=trainer.accumulate_grad_batches,
        is_first=trainer.is_global_zero,
        on_gpu=device is not None and device.type == "cuda",
        alignment=alignment_of(trainer.strategy, trainer.precision_plugin, trainer.lightning_module),
        sharing=sharing,
        model=trainer.lightning_module,
        loggers=tuple(trainer.loggers),
        alone=getattr(trainer.strategy, "world_size", 1) == 1,
        whole_steps=sharing is not None or getattr(trainer.strategy, "packs_as_steps", False),
    )


def on_gpu(model: nn.Module | None, device: torch.device | str | None) -> bool:
    """Return whether batches go to a CUDA device: to ``device``, or by default to that of the model."""
    if device is not None:
        return torch.device(device).type == "cuda"
    parameters = () if model is None else model.parameters()
    return any(parameter.device.type == "cuda" for parameter in parameters)


def alignment_of(strategy: Any, precision: Any, module: nn.Module | None = None) -> Alignment | None:
    """Return the multiples of lengths and totals that strategy and precision (or FP8 layers) need, if any."""
    of_strategy: Alignment | None = getattr(strategy, "alignment", None)
    rule = getattr(precision, "alignment", None)
    if not callable(rule):
        rule = getattr(recipe_of(module), "alignment", None)
    if rule is None:
        return of_strategy

    cp = getattr(strategy, "context_parallel_size", 1)
    if not isinstance(cp, int):  # "dynamic"
        cp = getattr(strategy, "max_context_parallel_size", 1)
    of_precision: Alignment = rule(
        cp=cp,
        tp=getattr(strategy, "tensor_parallel_size", 1),
        sequence_parallel=bool(getattr(strategy, "sequence_parallel", False)),
        layout=getattr(strategy, "context_parallel_layout", "dual_chunk"),
    )
    return of_precision if of_strategy is None else of_strategy.joined_with(of_precision)


def model_alignment(module: nn.Module | None) -> Alignment | None:
    """Return the alignment that a model converted to FP8 needs, in a loop without a precision plugin."""
    recipe = recipe_of(module)
    if recipe is None:
        return None
    alignment: Alignment = recipe.alignment()
    return alignment


def vocab_size(module: nn.Module | None) -> int | None:
    """Return the vocabulary size in the model's config, or None."""
    config = model_config(module)
    if config is None:
        return None
    return getattr(config.get_text_config(), "vocab_size", None)


def sequence_classifier(module: nn.Module | None) -> str | None:
    """Return the class name of the first model in a module that classifies sequences, or None."""
    for _, model in models_in(module):
        name = type(model).__name__
        if name.endswith("ForSequenceClassification"):
            return name
    return None


def say_other_attention(module: nn.Module | None) -> None:
    """Print a notice for each trained model whose attention may cross sequence boundaries in a pack."""
    models = outermost_models(module).values()
    for model in models:
        text = text_config(model.config)
        attention = getattr(text, "_attn_implementation", None)
        crosses = attention in ("eager", "sdpa", "flex_attention") and hasattr(text, "vocab_size")
        if not crosses or not any(parameter.requires_grad for parameter in model.parameters()):
            continue

        advice = "Build it with attn_implementation='thd'"
        if sum(other.config is model.config for other in models) > 1:
            advice += ", and give each model a copy of the config"
        rank_zero_info(
            f"{type(model).__name__} runs attn_implementation={attention!r}, under which sequences of a "
            f"pack may see each other. {advice}. {see('attention')}"
        )


def model_cost(module: nn.Module | None, longest: int) -> Cost | None:
    """Return the cost of a sequence by the model's FLOPs, exact at ``longest`` tokens; None if unknown."""
    model = _flops_model(module)
    return None if model is None else Cost.from_flops(model, longest=longest)


def model_counts(module: nn.Module | None) -> dict[str, Any]:
    """Return the model's attention windows and vision tower, which the collator needs to count a batch."""
    model = _flops_model(module)
    return {} if model is None else {"windows": model.windows, "vision": model.vision}


def model_patch(module: nn.Module | None) -> int | None:
    """Return the edge of an image patch in pixels, from the config of the vision tower, or None."""
    vision = getattr(model_config(module), "vision_config", None)
    patch = getattr(vision, "patch_size", None)
    return patch if isinstance(patch, int) else None


def _flops_model(module: nn.Module | None) -> FlopsModel | None:
    """Return the FLOPs of a module's model; None without a config of transformers, or an unknown one."""
    config = model_config(module)
    if config is None:
        return None
    try:
        return FlopsModel.from_config(config)
    except ValueError:
        return None


class _Hidden(partial[Any]):
    """A partial whose attributes reach a spawned process; multiprocessing drops those of a plain one."""


_STEPS = {
    "fit": ("training_step", "validation_step"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": ("predict_step",),
}


class ModuleStep(FirstStep):
    """A step method of a LightningModule, set on the module until it has run a pack of several sequences.

    Args:
        module: the module.
        name: the method's name, such as ``"training_step"``.
        look: is called with the first batch that the method ran, and with the method's name in messages.
    """

    def __init__(
        self, module: L.LightningModule, name: str, look: Callable[[NotedBatch, str], None] | None = None
    ) -> None:
        self._module = module
        self._name = name
        # A method that other code has set on the instance, as torch.compile does; else empty.
        self._replaced = {name: vars(module)[name]} if name in vars(module) else {}
        what = f"{type(module).__name__}.{name}"
        super().__init__(
            getattr(module, name),
            what=what,
            option="THDDataModule(needs_boundaries=False)",
            passed=self.remove,
            look=None if look is None else lambda batch: look(batch, what),
            sees_calls=not holds_compiled_code(module),
        )
        vars(module)[name] = self

    def remove(self) -> None:
        """Give the module its own method back, unless other code has replaced it since."""
        if vars(self._module).get(self._name) is self:
            del vars(self._module)[self._name]
            vars(self._module).update(self._replaced)


def note_first_steps(
    trainer: L.Trainer | None, stage: str, global_batch: Packs | Sequences | None = None
) -> list[ModuleStep]:
    """Watch the step methods of a Trainer's module: a first pack that is asked for no boundaries raises.

    A ``training_step`` that reads no scale of its batch warns, where a step of this ``global_batch`` has
    several microbatches.
    """
    module = None if trainer is None else trainer.lightning_module
    if trainer is None or module is None:
        return []

    weighs = weighs_microbatches(job_of(trainer), global_batch) and module.automatic_optimization
    looks = {"training_step": warn_of_scale} if weighs else {}
    names = [name for name in _STEPS.get(stage, ()) if is_overridden(name, module)]
    return [ModuleStep(module, name, looks.get(name)) for name in names]


def weighs_microbatches(job: Job, global_batch: Packs | Sequences | None) -> bool:
    """Return whether a step may have several microbatches, so that a loss must say what each weighs."""
    return isinstance(global_batch, Sequences) or job.whole_steps or job.ranks * job.accumulate > 1


def hide_hooks(module: L.LightningDataModule, base: type, hooks: Iterable[str]) -> None:
    """Make hooks of ``base`` look absent to Lightning, except those that a subclass overrides."""
    for hook in hooks:
        if getattr(type(module), hook) is getattr(base, hook):
            hidden = _Hidden(getattr(base, hook), module)  # still callable
            # Lightning's is_overridden() compares this attribute with its own hook.
            hidden.__wrapped__ = getattr(L.LightningDataModule, hook)  # type: ignore[attr-defined]
            setattr(module, hook, hidden)


def hook_of_module(trainer: L.Trainer | None, batch: Any, dataloader_idx: int) -> Any:
    """Run ``on_before_batch_transfer`` of the LightningModule; Lightning calls only the data module's."""
    module = None if trainer is None else trainer.lightning_module
    if module is None or not is_overridden("on_before_batch_transfer", module):
        return batch
    return module.on_before_batch_transfer(batch, dataloader_idx)


def check_trainer(trainer: L.Trainer | None, step: Packs | Sequences | None) -> None:
    """Refuse a Trainer that contradicts ``global_batch`` or cannot train the model; warn of unused FP8."""
    if trainer is None:
        return
    module = trainer.lightning_module
    job = job_of(trainer)
    _check_weight_averaging(trainer)
    if isinstance(step, Sequences) and not getattr(trainer.strategy, "runs_thd_steps", False):
        raise MisconfigurationException(
            f"global_batch={step} needs a strategy that runs all microbatches of a step: 'thd', 'thd_ddp' or "
            f"'thd_model_parallel', not {type(trainer.strategy).__name__}. Or use Packs(n). "
            f"{see('steps')}"
        )
    has_several_microbatches = job.accumulate != 1 or isinstance(step, Sequences)
    if has_several_microbatches and _reads_batches_itself(module):
        raise MisconfigurationException(
            "training_step(dataloader_iter) reads batches itself: Lightning would clear gradients inside an "
            "accumulated step, and Sequences(n) has several microbatches. Take (self, batch, batch_idx)."
        )
    _warn_of_unused_fp8(trainer, job)

    # A module with manual optimization decides how many batches make a step.
    is_manual = module is not None and not module.automatic_optimization and isinstance(step, Packs)
    ranks = 1 if job.sharing is not None else job.ranks  # with dynamic degrees, any number of packs is a step
    check_step(step, ranks=ranks, accumulate=job.accumulate, whole=job.whole_steps or is_manual)


def _check_weight_averaging(trainer: L.Trainer) -> None:
    """Refuse Lightning's stochastic weight averaging where its result would be wrong."""
    callbacks = cast("list[L.Callback]", trainer.callbacks)  # type: ignore[attr-defined]
    if not any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
        return
    module = trainer.lightning_module
    if is_overridden("configure_model", module) and not any(True for _ in module.parameters()):
        why = "copies the module before configure_model() builds it, and so would average nothing"
    elif trainer.max_epochs != -1 and StochasticWeightAveraging.pl_module_contains_batch_norm(module):
        why = "runs one more epoch for BatchNorm, and steps in it with the gradients of the epoch before"
    else:
        return
    raise MisconfigurationException(
        f"StochasticWeightAveraging {why}. Use WeightAveraging of lightning.pytorch.callbacks."
    )


def _reads_batches_itself(module: L.LightningModule | None) -> bool:
    """Return whether a module's training step takes the iterator over batches."""
    if module is None:
        return False
    return is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)


def _warn_of_unused_fp8(trainer: L.Trainer, job: Job) -> None:
    """Warn if the model has layers of Transformer Engine's FP8, which this Trainer would not use."""
    recipe = recipe_of(job.model)
    if recipe is not None and recipe.engine == "te" and not hasattr(trainer.precision_plugin, "recipe"):
        warn(
            "The model was converted to Transformer Engine's FP8, but this Trainer has no FP8Precision: its "
            "layers multiply in high precision outside fp8_context(model). Pass plugins=FP8Precision(...).",
            SlowWarning,
        )


def check_step(
    step: Packs | Sequences | None,
    *,
    ranks: int,
    accumulate: int,
    whole: bool = False,
    name: str = "accumulate_grad_batches",
) -> None:
    """Refuse a ``global_batch`` that contradicts ranks and accumulation; with ``whole`` a batch is a step.

    ``name`` is what the Trainer or loop calls ``accumulate``.
    """
    if accumulate != 1 and (whole or isinstance(step, Sequences)):
        raise MisconfigurationException(
            f"{name}={accumulate}, but with a pipeline, context_parallel_size='dynamic' or Sequences(n) each "
            "batch is a step. Set gradient accumulation to 1. "
            f"{see('steps')}"
        )
    if not isinstance(step, Packs):
        return

    packs = ranks * accumulate
    fits = step.n % ranks == 0 if whole else step.n == packs
    if not fits:
        or_multiple = " or a multiple" if whole else ""
        raise MisconfigurationException(
            f"global_batch={step} but {ranks} data-parallel ranks x {name}={accumulate} "
            f"make {packs} packs a step. Set Packs({packs}){or_multiple}. {see('steps')}"
        )


# Attributes of Lightning's loop, in the table of private names.
_FIT_LOOP = "lightning.pytorch.Trainer.fit_loop"
_STATES = f"{_FIT_LOOP}._combined_loader_states_to_load"


def settle_epoch(trainer: L.Trainer) -> list[Any]:
    """Fix the counters of a resumed Trainer; return loader states that Lightning would not restore."""
    # If max_steps, max_time or an early stop interrupts an epoch, Lightning marks the epoch as complete. A
    # resumed fit would begin the next epoch, and lose the rest. After max_steps, it would also run one more
    # batch of a complete epoch.
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress
    batches: Any = loop.epoch_loop.batch_progress
    states: list[Any] = private_of(loop, _STATES)
    loader_ended = any(isinstance(state, Mapping) and state.get("ended") is True for state in states)
    if loader_ended and epochs.total.processed < epochs.total.ready == epochs.total.started:
        _count_epochs(epochs, 1)  # the checkpoint was saved in a hook of the last batch

    marked_complete = 0 < epochs.total.ready == epochs.total.started == epochs.total.processed
    if not (marked_complete and states):
        return []

    if batches.current.processed and (batches.is_last_batch or loader_ended):  # it is complete
        # The setter of the loop's own class checks max_steps; that of its base only sets the value.
        setters = [vars(base)["restarting"] for base in type(loop).__mro__ if "restarting" in vars(base)]
        setters[-1].fset(loop, False)
        set_private(loop, _STATES, [])
        return states  # Lightning does not restore the states of loaders after a complete epoch

    _count_epochs(epochs, -1)
    loop.restarting = True
    return []


def _count_epochs(epochs: Any, change: int) -> None:
    """Change the number of epochs that Lightning's counters call processed and completed."""
    for count in (epochs.total, epochs.current):
        count.processed += change
        count.completed = count.processed


class Progress:
    """The position of a Trainer in its epoch, read and corrected by a loader."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._accumulate = trainer.accumulate_grad_batches
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._set_logged_step = logged_step_setter(trainer)
        self._batches: Any = self._loop.batch_progress
        module = trainer.lightning_module
        self._automatic = module is not None and module.automatic_optimization

    def begins_epoch(self) -> bool:
        """Return whether the Trainer is in ``on_train_epoch_start``, or resumes from a save inside it."""
        epochs: Any = self._trainer.fit_loop.epoch_progress.total
        return bool(epochs.started < epochs.ready)

    def check_counts(self) -> None:
        """Refuse a change of accumulation after steps are planned; correct the step that loggers show."""
        if self._automatic:  # Lightning miscounts after some resumes, such as from inside a step
            steps = self._loop.automatic_optimization.optim_progress.optimizer.step.total.completed
            self._set_logged_step(steps)
        now = self._trainer.accumulate_grad_batches
        if now != self._accumulate:
            raise MisconfigurationException(
                f"accumulate_grad_batches is {now}, but was {self._accumulate} when the training steps "
                "were planned. Begin another fit to change it."
            )

    def total(self) -> int:
        """Return how many batches of all epochs and fits the Trainer has finished."""
        return int(self._batches.total.processed)

    def limit(self, length: int | None) -> int | None:
        """Return how many of ``length`` batches the Trainer runs in an epoch; None if that is unknown."""
        limit: Any = self._trainer.limit_train_batches  # a number of batches, a share of them, or None
        if length is None:
            return limit if isinstance(limit, int) else None
        if limit is None:
            return length
        return min(length, limit) if isinstance(limit, int) else int(length * limit)

    def resize(self, length: int) -> None:
        """Set the Trainer's number of batches for this epoch, because epochs of a mixture differ a little."""
        trainer = self._trainer
        if getattr(trainer, "overfit_batches", 0) > 0:
            return
        loop = trainer.fit_loop
        batches = self.limit(length) or 0

        # Lightning copies the number of batches at setup, before it restores the epoch of a checkpoint. A
        # resumed epoch runs with these copies: it makes no new iterator.
        fetcher = private_of(loop, f"{_FIT_LOOP}._data_fetcher")
        if fetcher is not None:
            fetcher.combined_loader.limits = batches
            if fetcher.length is not None:
                fetcher.length = batches

        if loop.max_batches == batches:
            return
        loop.max_batches = batches
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))

    def match(self, start: int) -> None:
        """Set Lightning's batch counters to ``start``, the batches in the steps that the loader finished."""
        # The counters differ from it after a change of ranks, or if the checkpoint was saved inside a step.
        progress = self._batches
        if self.begins_epoch() and not start:  # the counters are still those of the epoch before
            progress.current.reset()
            progress.is_last_batch = False
            return

        shift = start - progress.current.processed
        if shift:
            progress.is_last_batch = False  # an interrupted step is run again
            for counter in (progress.current, progress.total):
                finished = counter.processed + shift
                counter.ready = finished
                counter.started = finished
                counter.processed = finished
                counter.completed = finished
