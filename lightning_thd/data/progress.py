"""A Trainer's counters -> where a loader stands in its epoch, when an epoch ends, what must not change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

import lightning.pytorch as L
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd.data.trainer_link import accumulates_itself, host_of

# Under one of these Lightning iterates training loaders, and restores them.
_IN_A_FIT = frozenset((_FitLoop.advance.__code__, _FitLoop.setup_data.__code__))


def running_trainer(loader: object) -> L.Trainer | None:
    """Return the Trainer that trains on a loader right now; None where it is iterated by something else.

    A loader that was given to ``trainer.fit`` without its data module is handed no Trainer: it is found among
    the callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _IN_A_FIT:
        frame = frame.f_back
    if frame is None:
        return None
    loop: _FitLoop = frame.f_locals["self"]
    combined = loop._combined_loader
    given = combined is not None and any(one is loader for one in combined.flattened)
    return loop.trainer if given else None


def refuse_other_trainer(
    trainer: L.Trainer, *, kind: Literal["pack", "step"], rank: int, ranks: int, per_step: int
) -> None:
    """Refuse a Trainer that runs a loader which was made for other ranks, accumulation or strategies.

    Args:
        trainer: that iterates the loader.
        kind: what the loader hands out.
        rank: data-parallel rank that the loader reads for.
        ranks: number of data-parallel ranks.
        per_step: batches of a rank to a step.

    Raises:
        MisconfigurationException: saying how to tell the data module.
    """
    host = host_of(trainer)
    steps = getattr(trainer.strategy, "runs_thd_steps", False)
    accumulated = accumulates_itself(trainer) or host.accumulate == per_step
    fits = accumulated and (steps if kind == "step" else not host.whole_steps)
    if fits and (host.rank, host.ranks) == (rank, ranks):
        return
    what = "a THDStep" if kind == "step" else f"one of {per_step} batches of a step"
    way = (
        "or set strategy='thd', 'thd_ddp' or 'thd_model_parallel', which run a THDStep"
        if kind == "step" and not steps
        else f"or call data.attach(rank={host.rank}, ranks={host.ranks}, accumulate={host.accumulate}) "
        "before data.setup()"
    )
    raise MisconfigurationException(
        f"A training loader of THDDataModule was made to give {what} to rank {rank} of {ranks}. The Trainer "
        f"that was given it runs {type(trainer.strategy).__name__} with "
        f"accumulate_grad_batches={host.accumulate} as rank {host.rank} of {host.ranks}: losses or sequences "
        f"would count wrongly. Pass the data module itself, trainer.fit(module, datamodule=data), {way}."
    )


def settle_epoch(trainer: L.Trainer) -> list[Any]:
    """Correct where a Trainer that resumes believes to stand, before its training loader is restored.

    Lightning ends an epoch that ``max_steps``, ``max_time`` or an early stop broke off, and would begin the
    next: the rest of it was lost. And with ``max_steps`` it runs a batch more of an epoch that was complete.

    Returns:
        States of loaders that Lightning will not restore, as their epoch was complete.
    """
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress
    batches: Any = loop.epoch_loop.batch_progress
    ended = 0 < epochs.total.ready == epochs.total.started == epochs.total.processed
    if not (ended and loop._combined_loader_states_to_load):
        return []
    if batches.is_last_batch:
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # its own asks for max_steps
        states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
        return states
    if batches.current.processed:
        for count in (epochs.total, epochs.current):
            count.processed -= 1
            count.completed = count.processed
        loop.restarting = True
    return []


def refuse_lost_rest(epoch: int, done: int, batches: int) -> None:
    """Refuse to begin another epoch than that in which a checkpoint was written, for a loader alone.

    Raises:
        MisconfigurationException: when less batches were done than an epoch has.
    """
    if done < batches:
        raise MisconfigurationException(
            f"The checkpoint was written after {done} of {batches} batches of epoch {epoch}, where max_steps "
            "or a stop broke it off, and Lightning begins the next epoch for a loader given alone: "
            "the rest would be lost. Pass the data module itself, trainer.fit(module, datamodule=data), or "
            "go on with Trainer(max_steps=...)."
        )


def refuse_cut_steps(trainer: L.Trainer | None, loader: Any) -> None:
    """Refuse a Trainer's limit that ends an epoch inside a step, whose loss is divided by all its packs.

    Raises:
        MisconfigurationException: naming limits that do not.
    """
    limit = getattr(trainer, "limit_train_batches", None)
    try:
        total: int | None = len(loader)
    except TypeError:  # nobody knows how many there are
        total = None
    share = isinstance(limit, float)
    if limit is None or (share and total is None):
        return
    batches = int(limit * total) if share and total is not None else int(limit)
    if batches % loader.per_step and (total is None or batches < total):
        fits = -(-batches // loader.per_step) * loader.per_step
        raise MisconfigurationException(
            f"limit_train_batches={limit} (which fast_dev_run sets too) takes {batches} batches of a stream, "
            f"whose steps of accumulate_grad_batches={loader.per_step} packs a rank are made whole: the last "
            f"would train on a part of its packs by the loss of all. Take {fits}, another multiple of "
            f"{loader.per_step}, or set accumulate_grad_batches=1."
        )


class Progress:
    """A Trainer's position in its epoch, for a loader that saves where it stands."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._accumulate = trainer.accumulate_grad_batches

    def hooks(self, *, resizes: bool) -> dict[str, Callable[..., Any]]:
        """Return the functions by which a ``THDLoader`` follows the Trainer, by its arguments' names."""
        told: dict[str, Any] = {
            "consumed": self.consumed,
            "limit": self.limit,
            "on_load": self.match,
            "check": self.refuse_other_accumulation,
        }
        return {**told, "on_epoch": self.resize} if resizes else told

    def unread_states(self) -> list[Any]:
        """Take the states of training loaders that the Trainer has not restored, as it begins an epoch."""
        loop = self._trainer.fit_loop
        states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
        return states

    def stream_hooks(self) -> dict[str, Any]:
        """Return the functions by which a ``StreamLoader`` follows the Trainer, by its arguments' names."""
        return {
            "consumed": self.total,
            "on_load": self.match,
            "begins": self.begins_epoch,
            "check": self.refuse_other_accumulation,
        }

    def consumed(self) -> int:
        """Return how many batches of this epoch the Trainer has finished."""
        # `processed` counts a batch once its update is done and before on_train_batch_end, where checkpoints
        # are written; a batch that raised is not counted and comes again.
        return 0 if self.begins_epoch() else int(self._batches.current.processed)

    def begins_epoch(self) -> bool:
        """Return whether the Trainer is in ``on_train_epoch_start``, or a checkpoint was written there."""
        epochs: Any = self._trainer.fit_loop.epoch_progress.total
        return bool(epochs.started < epochs.ready)

    def refuse_other_accumulation(self) -> None:
        """Refuse accumulation that was changed while the Trainer runs: the packs of a step are planned.

        Raises:
            MisconfigurationException: saying what it was.
        """
        now = self._trainer.accumulate_grad_batches
        if now != self._accumulate:
            raise MisconfigurationException(
                f"accumulate_grad_batches is {now}, but was {self._accumulate} when the training data was "
                "set up, and the loss of each pack is its share of a step of that many. Set it before fit, "
                "and begin another fit to change it."
            )

    def total(self) -> int:
        """Return how many batches of all epochs and fits the Trainer has finished."""
        return int(self._batches.total.processed)

    def limit(self) -> int | None:
        """Return the most batches that the Trainer takes of an epoch."""
        batches = self._trainer.num_training_batches
        return int(batches) if batches != float("inf") else None

    def resize(self, batches: int) -> None:
        """Set the Trainer's number of batches for this epoch: a mixture's epochs differ by a few."""
        trainer = self._trainer
        limited = trainer.limit_train_batches
        if isinstance(limited, int) and not isinstance(limited, bool):
            batches = min(batches, limited)
        elif limited is not None:
            batches = int(batches * limited)
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
        if self.begins_epoch() and not start:  # still the counts of the epoch before
            progress.current.reset()
            progress.is_last_batch = False
            return
        shift = start - progress.current.processed
        if shift:
            for counter in (progress.current, progress.total):
                for name in ("ready", "started", "processed", "completed"):
                    setattr(counter, name, max(0, getattr(counter, name) + shift))
            progress.current.ready = progress.current.started = start

    @property
    def _batches(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress
