"""A LightningModule -> its Trainer; a Trainer -> the step under which Lightning logs."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import LightningModule, Trainer

from lightning_thd._private import private_of, private_setter

_LOGGED_STEP = "lightning.pytorch.Trainer.fit_loop.epoch_loop._batches_that_stepped"


def trainer_of(module: LightningModule) -> Trainer | None:
    """Return the Trainer of a LightningModule; None outside of a Trainer, also under Fabric."""
    if module.fabric is not None:
        return None
    try:
        return module.trainer
    except RuntimeError:  # "is not attached to a `Trainer`"
        return None


def logged_step(trainer: Trainer) -> int:
    """Return the step under which Lightning logs: batches of the fit that ended with an optimizer step."""
    # trainer.global_step is another number if there are several optimizers.
    return int(private_of(trainer.fit_loop.epoch_loop, _LOGGED_STEP))


def logged_step_setter(trainer: Trainer) -> Callable[[int], None]:
    """Return a fast function that corrects the step under which Lightning logs."""
    return private_setter(trainer.fit_loop.epoch_loop, _LOGGED_STEP)
