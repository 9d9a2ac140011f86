"""A checkpoint of Hugging Face's Trainer -> the same packs again: a stream's position, a plan's settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.data.loader import THDLoader
from lightning_thd.data.streams import Stream, StreamLoader, is_stream
from lightning_thd.integrations.hf_data import with_labels

_FILE, _PLAN = "thd_stream.pt", "thd_plan.pt"  # in a checkpoint's folder


def is_streamed(dataset: object) -> bool:
    """Return whether a Trainer's dataset can only be iterated, or is a mixture with such sources."""
    if isinstance(dataset, Mapping):
        given = [part[0] for part in dataset.values() if isinstance(part, tuple | list) and part]
        return any(isinstance(source, Stream) or is_stream(source) for source in given)
    return isinstance(dataset, Stream) or (dataset is not None and is_stream(dataset))


def streamed_dataset(dataset: Any, trainer: type) -> Any:
    """Return a dataset that can be iterated with TRL's masks of learned tokens turned into labels.

    Raises:
        ValueError: for a ``Stream`` or a function given to a Trainer that prepares datasets itself.
    """
    prepared = any(base.__module__.startswith("trl.") for base in trainer.__mro__)
    if not hasattr(dataset, "map"):
        if prepared:
            raise ValueError(
                f"{trainer.__name__} prepares its dataset before packed_trainer sees it, and cannot prepare "
                f"a {type(dataset).__name__}. Give it a datasets.IterableDataset, or use packed_trainer() "
                "around transformers.Trainer."
            )
        return dataset
    return dataset.map(_with_listed_labels) if prepared else dataset


def _with_listed_labels(record: Mapping[str, Any]) -> Mapping[str, Any]:
    found = with_labels(record)
    return found if found is record else {**found, "labels": found["labels"].tolist()}


class StreamsMixin:
    """Keeps in a Trainer's checkpoints what decides its next packs, and checks it when it resumes."""

    args: Any
    state: Any
    train_dataset: Any
    _packs: StreamedPacks | None = None
    _planner: Any = None
    _resumed: str | None = None  # the checkpoint that training goes on from

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the base class does; a stream resumes where its checkpoint left it, without skipping."""
        if not resume_from_checkpoint or self.args.ignore_data_skip:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        from transformers.trainer_utils import get_last_checkpoint

        last = resume_from_checkpoint is True
        self._resumed = get_last_checkpoint(self.args.output_dir) if last else str(resume_from_checkpoint)
        # Trainer would read, and throw away, what was used of a stream
        self.args.ignore_data_skip = is_streamed(self.train_dataset)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.ignore_data_skip, self._resumed = False, None

    def _planned(self, loader: THDLoader) -> None:
        """Remember the plan of training; on resuming, check a checkpoint's and begin in its epoch.

        Raises:
            ValueError: where the data or a setting has changed since.
        """
        self._planner = loader.planner
        if self._resumed is None:
            return
        check_plan(self._resumed, loader.planner)
        trained = Path(self._resumed) / "trainer_state.json"
        if trained.is_file():  # Trainers before 5.23 tell the epoch to no loader whose batches they skip
            steps = json.loads(trained.read_text(encoding="utf-8"))["global_step"]
            loader.batch_sampler.sampler.set_epoch(steps // loader.planner.num_steps(0))

    def _streamed(self, loader: StreamLoader) -> StreamedPacks:
        """Return the dataset that Trainer iterates, at the position of its checkpoint."""
        self._packs = StreamedPacks(loader, self._begin_stream)
        if self._resumed is not None:
            self._packs.load(self._resumed)
        return self._packs

    def _begin_stream(self) -> None:
        if self._resumed is not None:  # as Trainer does after skipping the batches used before
            self._load_rng_state(self._resumed)  # type: ignore[attr-defined]

    def _save_checkpoint(self, model: nn.Module, trial: Any = None, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(model, trial, *args, **kwargs)  # type: ignore[misc]
        if not self.args.should_save:
            return
        folder = self._get_output_dir(trial=trial)  # type: ignore[attr-defined]
        folder = f"{folder}/checkpoint-{self.state.global_step}"
        if self._packs is not None:
            self._packs.save(folder)
        elif self._planner is not None:
            epoch, step = divmod(self.state.global_step, self._planner.num_steps(0))
            _write(Path(folder) / _PLAN, self._planner.state(epoch, step))


def check_plan(folder: str, planner: Any) -> None:
    """Refuse to resume a plan from a checkpoint of other data or settings, whose steps held other sequences.

    Raises:
        ValueError: naming what has changed.
    """
    path = Path(folder) / _PLAN
    if not path.is_file():
        rank_zero_warn(
            f"The checkpoint {folder} has no {_PLAN}: whether its steps held the sequences that are planned "
            "now cannot be checked. Resume with the data, capacity and accumulation it was written with."
        )
        return
    try:
        planner.resume(torch.load(path, weights_only=True))
    except ValueError as err:
        raise ValueError(
            f"{folder}: {err} TrainingArguments(ignore_data_skip=True) takes its weights and begins the "
            "epoch anew."
        ) from None


def _write(path: Path, state: dict[str, Any]) -> None:
    """Write a state into a checkpoint's folder, atomically."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


class StreamedPacks:
    """An iterable of a stream's packs for Trainer: one a batch, or all of a step with ``Sequences(n)``.

    Args:
        loader: of this rank.
        begin: called once, when the first pack is asked for.
    """

    def __init__(self, loader: StreamLoader, begin: Callable[[], None]) -> None:
        self.loader, self._begin = loader, begin
        self._begun = False

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, THDBatch | THDStep]]:
        if not self._begun:
            self._begun = True
            self._begin()
        for batch in self.loader:
            yield {"batch": batch}

    def save(self, folder: str | Path) -> None:
        """Write the stream's position into a checkpoint's folder, atomically."""
        _write(Path(folder) / _FILE, self.loader.state_dict())

    def load(self, folder: str | Path) -> None:
        """Restore the stream's position from a checkpoint's folder.

        Raises:
            ValueError: for a checkpoint that says nothing of it.
        """
        path = Path(folder) / _FILE
        if not path.is_file():
            raise ValueError(
                f"The checkpoint {folder} has no {_FILE}: it was not written by packed_trainer with a "
                "stream. Pass TrainingArguments(ignore_data_skip=True) to begin the stream anew."
            )
        self.loader.load_state_dict(torch.load(path, weights_only=True))
