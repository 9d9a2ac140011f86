"""A stream of packs -> the dataset that Hugging Face's Trainer iterates, its position in checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.data.streams import Stream, StreamLoader, is_stream
from lightning_thd.integrations.hf_data import with_labels

_FILE = "thd_stream.pt"  # in a checkpoint's folder


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
    """Trains a Hugging Face Trainer on a stream, whose position its checkpoints keep."""

    args: Any
    state: Any
    train_dataset: Any
    _packs: StreamedPacks | None = None
    _resumed: str | None = None  # the checkpoint that a stream goes on from

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the base class does; a stream resumes where its checkpoint left it, without skipping."""
        streamed = is_streamed(self.train_dataset)
        if not streamed or not resume_from_checkpoint or self.args.ignore_data_skip:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        from transformers.trainer_utils import get_last_checkpoint

        last = resume_from_checkpoint is True
        self._resumed = get_last_checkpoint(self.args.output_dir) if last else str(resume_from_checkpoint)
        self.args.ignore_data_skip = True  # Trainer would read, and throw away, what was used
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.ignore_data_skip, self._resumed = False, None

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
        if self._packs is not None and self.args.should_save:
            folder = self._get_output_dir(trial=trial)  # type: ignore[attr-defined]
            self._packs.save(f"{folder}/checkpoint-{self.state.global_step}")


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
        path = Path(folder) / _FILE
        partial = path.with_suffix(".partial")
        torch.save(self.loader.state_dict(), partial)
        os.replace(partial, path)

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
