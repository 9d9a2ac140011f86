"""A Trainer and its model -> what a data module needs of them: ranks, steps, sizes and progress."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import lightning.pytorch as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_thd._find import model_config
from lightning_thd.alignment import Alignment
from lightning_thd.flops import FlopsModel
from lightning_thd.packing import Cost, Packs, Sequences
from lightning_thd.packing.sharing import Sharing
from lightning_thd.stats import Window


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The ranks, devices, model and loggers of what runs the loaders: a Trainer, or the user's own loop.

    Attributes:
        rank: data-parallel rank of this process.
        ranks: number of data-parallel ranks.
        accumulate: batches a rank runs between two optimizer steps.
        is_first: this process writes messages and shows bars.
        on_gpu: batches are moved to a CUDA device.
        alignment: what the strategy asks lengths to be multiples of.
        sharing: how many ranks may share a sequence, where the plan decides.
        model: the module that is trained.
        loggers: of the Trainer.
        whole_steps: a batch of ``Packs(n)`` is all packs of this rank's step, as a pipeline or a plan of
            degrees needs.
    """

    rank: int = 0
    ranks: int = 1
    accumulate: int = 1
    is_first: bool = True
    on_gpu: bool = False
    alignment: Alignment | None = None
    sharing: Sharing | None = None
    model: nn.Module | None = None
    loggers: tuple[Logger, ...] = ()
    whole_steps: bool = False


def host_of(trainer: L.Trainer) -> Host:
    """Describe a Trainer as a ``Host``; its strategy tells which ranks read different data."""
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


def alignment_of(strategy: Any, precision: Any, module: nn.Module | None = None) -> Alignment | None:
    """Return the multiples of lengths and totals that strategy and precision together ask for.

    Args:
        strategy: of a Trainer; its ``alignment`` and the sizes of its parallel axes, where it has them.
        precision: the precision plugin; its ``alignment(cp, tp, sequence_parallel)``, where it has one.
        module: that is trained: a model converted to FP8 by hand asks for what the plugin would.
    """
    asked: Alignment | None = getattr(strategy, "alignment", None)
    rule = getattr(precision, "alignment", None)
    if not callable(rule):
        rule = getattr(_recipe(module), "alignment", None)
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
    recipe = _recipe(module)
    return None if recipe is None else cast("Alignment", recipe.alignment())


def _recipe(module: nn.Module | None) -> Any | None:
    """Return the FP8 recipe that a model was converted with, or None."""
    for child in module.modules() if module is not None else ():
        if (recipe := child.__dict__.get("_thd_fp8")) is not None:
            return recipe
    return None


def vocab_size(module: nn.Module | None) -> int | None:
    """Return the size of the model's vocabulary, if its config tells it."""
    config = model_config(module)
    return getattr(config.get_text_config(), "vocab_size", None) if config is not None else None


def model_cost(module: nn.Module | None, longest: int) -> Cost | None:
    """Return the cost of a sequence by the model's FLOPs, exact at ``longest``; None where unknown."""
    config = model_config(module)
    if config is None:
        return None
    try:
        return Cost.from_flops(FlopsModel.from_config(config), longest=longest)
    except ValueError:
        return None


def model_windows(module: nn.Module | None) -> tuple[Window, ...]:
    """Return the attention windows of the model, so that the collator counts their pairs."""
    config = model_config(module)
    if config is None:
        return ()
    try:
        return FlopsModel.from_config(config).windows
    except ValueError:
        return ()


def hide_hooks(module: L.LightningDataModule, own: type, hooks: Iterable[str]) -> None:
    """Make Lightning take hooks of a data module for absent, except those that a subclass has written.

    Args:
        module: that Lightning will ask.
        own: class whose hooks are to be hidden.
        hooks: their names.
    """
    for hook in hooks:
        if getattr(type(module), hook) is getattr(own, hook):
            setattr(module, hook, MethodType(getattr(L.LightningDataModule, hook), module))


def hook_of_module(trainer: L.Trainer | None, batch: Any, dataloader_idx: int) -> Any:
    """Run a module's own ``on_before_batch_transfer``, which Lightning leaves to the data module."""
    module = None if trainer is None else trainer.lightning_module
    if module is None or not is_overridden("on_before_batch_transfer", module):
        return batch
    return module.on_before_batch_transfer(batch, dataloader_idx)


def check_trainer(trainer: L.Trainer | None, step: Packs | Sequences | None) -> None:
    """Refuse a Trainer whose ranks and accumulation contradict ``global_batch``.

    Raises:
        MisconfigurationException: for accumulation, ranks or a strategy that would change the loss.
    """
    if trainer is None:
        return
    callbacks = cast("list[L.Callback]", trainer.callbacks)  # type: ignore[attr-defined]
    if any(
        isinstance(callback, GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches()
        for callback in callbacks
    ):
        raise MisconfigurationException(
            "GradientAccumulationScheduler changes the packs of a step between epochs, which would "
            "change the loss. Use a fixed Trainer(accumulate_grad_batches=...)."
        )
    if isinstance(step, Sequences) and not getattr(trainer.strategy, "runs_thd_steps", False):
        raise MisconfigurationException(
            f"global_batch={step} needs a strategy that runs all microbatches of a step: 'thd' on "
            f"one device, 'thd_ddp' or 'thd_model_parallel', not "
            f"{type(trainer.strategy).__name__}. Or use Packs(n)."
        )
    host = host_of(trainer)
    if host.whole_steps:
        ranks = 1 if host.sharing is not None else host.ranks  # a plan of degrees needs no whole packs
        check_whole_steps(step, ranks=ranks, accumulate=host.accumulate)
    elif not (accumulates_itself(trainer) and isinstance(step, Packs) and step.n % host.ranks == 0):
        check_packs(step, ranks=host.ranks, accumulate=host.accumulate)


def accumulates_itself(trainer: L.Trainer) -> bool:
    """Return whether the module runs its optimizers, and so decides how many batches make a step."""
    module = trainer.lightning_module
    return module is not None and not module.automatic_optimization


def check_whole_steps(step: Packs | Sequences | None, *, ranks: int, accumulate: int) -> None:
    """Refuse accumulation and packs that do not suit a strategy running a whole step in one batch.

    Raises:
        MisconfigurationException: for accumulation, or packs that the ranks do not divide.
    """
    if accumulate != 1:
        raise MisconfigurationException(
            f"accumulate_grad_batches={accumulate}, but a pipeline or context_parallel_size='dynamic' runs "
            "all microbatches of a step in one batch. Set accumulate_grad_batches=1 and "
            f"global_batch=Packs({ranks * accumulate}), or Sequences(n)."
        )
    if isinstance(step, Packs) and step.n % ranks:
        raise MisconfigurationException(
            f"global_batch={step} does not divide over {ranks} data-parallel ranks. Set a multiple of "
            f"{ranks}."
        )


def check_packs(step: Packs | Sequences | None, *, ranks: int, accumulate: int) -> None:
    """Refuse a ``global_batch`` that ranks and accumulation do not add up to.

    Raises:
        MisconfigurationException: when they would change what a step holds.
    """
    if isinstance(step, Packs) and step.n != ranks * accumulate:
        raise MisconfigurationException(
            f"global_batch={step} but {ranks} data-parallel ranks x accumulate_grad_batches={accumulate} "
            f"make {ranks * accumulate} packs a step. Set Packs({ranks * accumulate}), or "
            + (
                f"accumulate_grad_batches={step.n // ranks}."
                if step.n % ranks == 0
                else f"a number of packs that {ranks} ranks divide."
            )
        )
    if isinstance(step, Sequences) and accumulate != 1:
        raise MisconfigurationException(
            f"global_batch={step} decides by itself how many microbatches a step has, but "
            f"accumulate_grad_batches={accumulate}. Set gradient accumulation to 1."
        )
