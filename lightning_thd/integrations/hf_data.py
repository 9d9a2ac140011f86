"""A Trainer's dataset, or a stream -> packs that Trainer can skip and resume; what its checkpoints keep."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.utils.data import DataLoader

from lightning_thd._find import unwrapped
from lightning_thd._workers import end_with_parent
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.batch.keys import PER_TOKEN, TYPES
from lightning_thd.batch.samples import check_attention_mask
from lightning_thd.data.loader import THDLoader
from lightning_thd.data.read.sources import as_dataset
from lightning_thd.data.store.index import MapDataset
from lightning_thd.data.streams import Stream, is_stream

# A class of Trainers, whose attributes the mixins of ``packed_trainer`` use.
TrainerBase: Any = object
# Files in a checkpoint's folder.
_FILE, _PLAN = "thd_stream.pt", "thd_plan.pt"
# Columns that are packed, or that are looked at for what they say.
_LOOKED_AT = frozenset(PER_TOKEN)
# Arguments of THDDataModule that say how rows are read. Others plan training, and an evaluation needs none.
OF_READING = frozenset({"cache_dir", "empty", "max_errors", "on_error", "vocab_size"})
_MASKS = ("completion_mask", "assistant_masks")  # TRL's columns: 1 for tokens to learn


def packed_dataset(dataset: Any, taken: frozenset[str] = frozenset()) -> MapDataset:
    """Return a dataset whose rows hold only ids and labels."""
    if dataset is None:
        raise ValueError("The Trainer has no dataset to pack. Pass train_dataset (and eval_dataset).")
    return cast("MapDataset", WithLabels(as_dataset(dataset), taken))


def arguments_of(model: Any) -> frozenset[str]:
    """Return the names of the arguments of a model's ``forward``, under its adapters if it has any."""
    return frozenset(inspect.signature(unwrapped(model).forward).parameters)


def keyed_loader(loader: Any, *, pin_memory: bool) -> DataLoader[Any]:
    """Return the batches of a ``THDLoader`` from a loader that Trainer can skip and resume."""
    inner = loader.source.loader
    return KeyedLoader(
        cast("Any", Sized(inner.dataset, len(loader))),
        batch_sampler=cast("Any", _Keys(loader)),
        collate_fn=first,
        num_workers=inner.num_workers,
        worker_init_fn=end_with_parent,
        prefetch_factor=inner.prefetch_factor,
        pin_memory=pin_memory,
    )


def with_labels(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Turn TRL's masks of learned tokens, if a sample has them, into labels."""
    masks = {name: np.asarray(sample[name]) for name in _MASKS if sample.get(name) is not None}
    without = {**sample, **dict.fromkeys(masks)}  # None: `datasets` keeps a column that is left out
    if not masks or "labels" in sample:
        return without
    learned = np.logical_and.reduce([*masks.values()])
    return {**without, "labels": np.where(learned, np.asarray(sample["input_ids"]), -100)}


class WithLabels:
    """A dataset of dicts whose masks of learned tokens become labels; ``taken`` as for ``packed_dataset``."""

    def __init__(self, dataset: Any, taken: frozenset[str] = frozenset()) -> None:
        self._dataset, self._further = dataset, sorted(taken - _LOOKED_AT)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        sample = with_labels(self._dataset[i])
        if "input_ids" not in sample:
            raise ValueError(
                f"Row {i} of the dataset has the keys {list(self._dataset[i])} and no 'input_ids'. Tokenise "
                "it first, or use TRL's SFTTrainer, which does."
            )
        self._refuse_what_is_left_out(sample, i)
        return {name: sample[name] for name in ("input_ids", "labels") if name in sample}

    def _refuse_what_is_left_out(self, sample: Mapping[str, Any], i: int) -> None:
        """Raise for columns that would change what the model computes; Trainer itself passes them on."""
        length = len(sample["input_ids"])
        if sample.get("attention_mask") is not None:
            check_attention_mask(sample, length, f"Row {i} of the dataset")
        positions = sample.get("position_ids")
        if positions is not None and not np.array_equal(np.asarray(positions), np.arange(length)):
            raise ValueError(
                f"Row {i} of the dataset has position_ids that do not count from 0 to {length - 1}, as if it "
                "were a pack already or had positions of its own; packed_trainer makes them by itself. Give "
                "one sequence a row without them, or use Lightning's Trainer with THDDataModule."
            )
        others = [name for name in self._further if sample.get(name) is not None]
        others += [name for name in TYPES if sample.get(name) is not None and np.any(sample[name])]
        if others:
            raise ValueError(
                f"Row {i} of the dataset has {', '.join(others)}, which the model takes, but packed_trainer "
                "packs only ids and labels. Use Lightning's Trainer with THDDataModule, which packs images "
                "and token types too, or remove the columns."
            )


class KeyedLoader(DataLoader[Any]):
    """Loads batches by keys from a batch sampler, so that Trainer and Accelerate can skip them on resume."""

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, when Trainer calls."""
        sampler = self.batch_sampler
        cast("_Keys", sampler).set_epoch(epoch)


class _Keys:
    """Presents a ``THDLoader`` as a batch sampler that yields one key a batch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[Any]]:
        return ([key] for key in self._loader.keys_left())

    def set_epoch(self, epoch: int) -> None:
        self._loader.begin_epoch(epoch)


class Sized:
    """Presents the batches of a rank as a dataset with a length, which Trainer asks for."""

    def __init__(self, steps: Any, length: int) -> None:
        self._steps, self._length = steps, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: Any) -> THDBatch:
        return cast("THDBatch", self._steps[key])


def first(items: list[THDBatch]) -> dict[str, THDBatch]:
    """Return the one pack of a list as the dict that Trainer takes for a batch."""
    return {"batch": items[0]}


def is_streamed(dataset: object) -> bool:
    """Return whether a Trainer's dataset can only be iterated, or is a mixture with such sources."""
    if isinstance(dataset, Mapping):
        given = [part[0] for part in dataset.values() if isinstance(part, tuple | list) and part]
        return any(isinstance(source, Stream) or is_stream(source) for source in given)
    return isinstance(dataset, Stream) or (dataset is not None and is_stream(dataset))


def streamed_dataset(dataset: Any, trainer: type) -> Any:
    """Return a dataset that can be iterated with TRL's masks of learned tokens turned into labels."""
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


class StreamsMixin(TrainerBase):  # type: ignore[misc]
    """Keeps in a Trainer's checkpoints what decides its next packs, and checks it when it resumes."""

    _packs: StreamedPacks | None = None
    _planner: Any = None
    _resumed: str | None = None  # the checkpoint that training goes on from

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the base class does; a stream resumes where its checkpoint left it, without skipping."""
        if not resume_from_checkpoint or self.args.ignore_data_skip:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        from transformers.trainer_utils import get_last_checkpoint

        last = resume_from_checkpoint is True
        self._resumed = get_last_checkpoint(self.args.output_dir) if last else str(resume_from_checkpoint)
        # Trainer would read, and throw away, what was used of a stream
        self.args.ignore_data_skip = is_streamed(self.train_dataset)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.ignore_data_skip, self._resumed = False, None

    def _planned(self, loader: THDLoader) -> None:
        """Remember the plan of training; on resuming, check a checkpoint's and begin in its epoch."""
        self._planner = loader.planner
        assert loader.planner is not None
        if self._resumed is None:
            return
        check_plan(self._resumed, loader.planner)
        trained = Path(self._resumed) / "trainer_state.json"
        if trained.is_file():  # Trainers before 5.23 set no epoch on a loader whose batches they skip
            steps = json.loads(trained.read_text(encoding="utf-8"))["global_step"]
            loader.begin_epoch(steps // loader.planner.num_steps(0))

    def _streamed(self, loader: THDLoader) -> StreamedPacks:
        """Return the dataset that Trainer iterates, at the position of its checkpoint."""
        self._packs = StreamedPacks(loader, self._begin_stream, lambda: self.state.global_step)
        if self._resumed is not None:
            self._packs.load(self._resumed)
        return self._packs

    def _begin_stream(self) -> None:
        if self._resumed is not None:  # as Trainer does after skipping the batches used before
            self._load_rng_state(self._resumed)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(model, trial, *args, **kwargs)
        if not self.args.should_save:
            return
        folder = self._get_output_dir(trial=trial)
        folder = f"{folder}/checkpoint-{self.state.global_step}"
        if self._packs is not None:
            self._packs.save(folder)
        elif self._planner is not None:
            epoch, step = divmod(self.state.global_step, self._planner.num_steps(0))
            _write(Path(folder) / _PLAN, self._planner.state(epoch, step))


def check_plan(folder: str, planner: Any) -> None:
    """Refuse to resume from a checkpoint of other data or settings, whose steps held other sequences."""
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
            "epoch again."
        ) from None


def _write(path: Path, state: dict[str, Any]) -> None:
    """Write a state into a checkpoint's folder, atomically."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


class StreamedPacks:
    """An iterable of a stream's packs for Trainer; ``begin`` is called when the first pack is asked for.

    ``steps`` returns how many steps Trainer has finished. A checkpoint may be asked for inside a step, when
    its packs are handed out already.
    """

    def __init__(self, loader: THDLoader, begin: Callable[[], None], steps: Callable[[], int]) -> None:
        self.loader, self._begin, self._steps = loader, begin, steps
        self._begun, self._before = False, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, THDBatch | THDStep]]:
        if not self._begun:
            self._begun = True
            self._begin()
        self._before = self._steps()
        for batch in self.loader:
            yield {"batch": batch}

    def save(self, folder: str | Path) -> None:
        """Write the stream's position into a checkpoint's folder, atomically."""
        done = (self._steps() - self._before) * self.loader.per_step
        _write(Path(folder) / _FILE, self.loader.state_after(done))

    def load(self, folder: str | Path) -> None:
        """Restore the stream's position from a checkpoint's folder."""
        path = Path(folder) / _FILE
        if not path.is_file():
            raise ValueError(
                f"The checkpoint {folder} has no {_FILE}: it was not written by packed_trainer with a "
                "stream. Pass TrainingArguments(ignore_data_skip=True) to begin the stream again."
            )
        self.loader.load_state_dict(torch.load(path, weights_only=True))
