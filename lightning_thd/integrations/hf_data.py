"""A Trainer's dataset, or a stream -> packs for Trainer, and the data's position in its checkpoints."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from lightning_thd._find import unwrapped
from lightning_thd._imports import require
from lightning_thd._private import private_of
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.batch.keys import PER_TOKEN, TYPES, refuse_boundaries, refuse_keys
from lightning_thd.batch.samples import check_attention_mask
from lightning_thd.data.loader import Position, THDLoader
from lightning_thd.data.read.conversations import Records, kind_of
from lightning_thd.data.read.files import is_paths
from lightning_thd.data.read.sources import Opener, as_dataset
from lightning_thd.data.store.index import MapDataset
from lightning_thd.data.streams import Stream
from lightning_thd.data.streams.shards import is_stream

# The base of the mixins of ``packed_trainer``, which use the attributes of a Trainer.
TrainerBase: Any = object
_FILE = "thd_data.pt"  # in a checkpoint's folder
# Arguments of THDDataModule that decide how rows are read. Evaluation takes only these from data_kwargs.
OF_READING = frozenset({"cache_dir", "empty", "max_errors", "on_error", "vocab_size"})
# Arguments of THDDataModule that only files need.
_OF_FILES = ("text_key", "append_eos", "records")
MASKS = ("completion_mask", "assistant_masks")  # TRL's columns: 1 for tokens to learn


def packed_dataset(
    dataset: Any, arguments: frozenset[str] = frozenset(), *, own_labels: bool = False
) -> MapDataset:
    """Return a dataset of ids, labels and weights; refuse rows with other columns that would be lost.

    With ``own_labels``, labels belong to their own tokens, not to the next; rows without them are refused.
    """
    if dataset is None:
        raise ValueError(
            "The Trainer has no dataset to pack. Pass train_dataset=, or eval_dataset= to evaluate."
        )
    return cast("MapDataset", WithLabels(as_dataset(dataset), arguments, own_labels=own_labels))


def open_datasets(
    arguments: dict[str, Any], reading: dict[str, Any]
) -> dict[str, Callable[[], Records | None]]:
    """Replace paths among a Trainer's datasets by what they hold, tokenised; take the tokenizer from both.

    Args:
        arguments: the keyword arguments of the Trainer; ``train_dataset``, ``eval_dataset`` and
            ``processing_class`` are changed in place.
        reading: ``data_kwargs``; the arguments that only files need are taken out.

    Returns:
        For each argument that was a path, a function that finds the kind of its records; None for a folder
        of stored ids.
    """
    tokenizer = _tokenizer_of(arguments, reading)
    of_files = {name: reading.pop(name) for name in _OF_FILES if name in reading}
    of_all = {name: reading[name] for name in ("cache_dir", "max_errors", "on_error") if name in reading}
    opener = Opener(tokenizer=tokenizer, **of_files, **of_all)

    kinds: dict[str, Callable[[], Records | None]] = {}
    for name in ("train_dataset", "eval_dataset"):
        dataset = arguments.get(name)
        if isinstance(dataset, Mapping) and any(map(is_paths, dataset.values())):
            for key, source in dataset.items():
                if is_paths(source):
                    kinds[f"{name}[{key!r}]"] = partial(_kind_of_path, opener, source)
            arguments[name] = {key: _opened(opener, source) for key, source in dataset.items()}
        elif is_paths(dataset):
            kinds[name] = partial(_kind_of_path, opener, dataset)
            arguments[name] = _opened(opener, dataset)
    if of_files and not kinds:
        raise ValueError(
            f"data_kwargs has {', '.join(of_files)}, which only files need, but no dataset is a path. "
            "Leave it out, or pass the path as train_dataset."
        )
    return kinds


def _kind_of_path(opener: Opener, source: Any) -> Records | None:
    """Return the kind of a path's records, as its first record shows it; None for stored ids."""
    if opener.records != "auto":
        return opener.records
    record = opener.first_record(source)
    if record is None:
        return None
    kind = kind_of(record, opener.text_key) if isinstance(record, dict | str) else None
    return kind or "text"


def _tokenizer_of(arguments: dict[str, Any], reading: dict[str, Any]) -> Any:
    """Take the tokenizer from ``data_kwargs``, loaded if it is a name, or the Trainer's own, or None."""
    tokenizer = reading.pop("tokenizer", None)
    if tokenizer is None:
        return arguments.get("processing_class")
    if isinstance(tokenizer, str):
        auto = require("transformers", feature=f"tokenizer={tokenizer!r}").AutoTokenizer
        tokenizer = auto.from_pretrained(tokenizer)

    if arguments.get("processing_class") not in (None, tokenizer):
        raise ValueError("data_kwargs has a tokenizer, and processing_class is another. Pass one.")
    if hasattr(tokenizer, "save_pretrained"):  # a Trainer saves it with the model
        arguments["processing_class"] = tokenizer
    return tokenizer


def _opened(opener: Opener, source: Any) -> Any:
    """Return the rows of files as a dataset of Hugging Face, as TRL wants it; other sources as they are."""
    if not is_paths(source):
        return source
    rows = opener.open(source).dataset
    datasets = require("datasets", feature="a path as a Trainer's dataset")
    return datasets.Dataset.from_list([_listed(rows[i]) for i in range(len(rows))])


def _listed(row: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the ids and labels of a row as lists, which are columns of integers for datasets."""
    return {name: np.asarray(row[name]).tolist() for name in ("input_ids", "labels") if name in row}


def arguments_of(model: Any) -> frozenset[str]:
    """Return the names of the arguments of a model's ``forward``; adapters around the model do not count."""
    return frozenset(inspect.signature(unwrapped(model).forward).parameters)


def with_labels(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Turn TRL's masks of learned tokens, if a sample has them and no labels, into labels."""
    masks = {name: np.asarray(sample[name]) for name in MASKS if sample.get(name) is not None}
    without_masks = {**sample, **dict.fromkeys(masks)}  # None, because `datasets.map` keeps what is left out
    if not masks or sample.get("labels") is not None:
        return without_masks
    is_learned = np.logical_and.reduce([*masks.values()])
    return {**without_masks, "labels": np.where(is_learned, np.asarray(sample["input_ids"]), -100)}


class WithLabels:
    """A dataset of dicts whose masks of learned tokens become labels; see ``packed_dataset``."""

    def __init__(
        self, dataset: Any, arguments: frozenset[str] = frozenset(), *, own_labels: bool = False
    ) -> None:
        self._dataset = dataset
        # Columns that the model would take, but that packs do not hold.
        self._refused = sorted(arguments - frozenset(PER_TOKEN))
        self._own_labels = own_labels

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = self._dataset[i]
        if not isinstance(row, Mapping):
            row = {"text": row}
        if "input_ids" not in row:
            raise ValueError(
                f"Row {i} of the dataset has the keys {list(row)} and no input_ids. Tokenise it."
            )
        sample = with_labels(row)
        self._refuse_columns(sample, i)
        if self._own_labels:
            _check_own_labels(sample.get("labels"), i)
        kept = ("input_ids", "labels", "weights", "label")
        return {name: sample[name] for name in kept if sample.get(name) is not None}

    def _refuse_columns(self, sample: Mapping[str, Any], i: int) -> None:
        """Refuse columns that Trainer would give the model or that change the loss, but are not read."""
        refuse_keys(sample)
        refuse_boundaries(sample, f"Row {i} of the dataset")
        length = len(sample["input_ids"])
        if sample.get("attention_mask") is not None:
            check_attention_mask(sample, length, f"Row {i} of the dataset")

        positions = sample.get("position_ids")
        if positions is not None and not np.array_equal(np.asarray(positions), np.arange(length)):
            raise ValueError(
                f"Row {i} of the dataset has position_ids that do not count from 0 to {length - 1}. Give one "
                "sequence per row without them, or use Lightning's Trainer with THDDataModule."
            )

        columns = [name for name in self._refused if sample.get(name) is not None]
        columns += [name for name in TYPES if sample.get(name) is not None and np.any(sample[name])]
        if columns:
            raise ValueError(
                f"Row {i} of the dataset has {', '.join(columns)}, which a model takes, but packed_trainer "
                "packs only ids, labels and weights. Use Lightning with THDDataModule, or remove the columns."
            )


def _check_own_labels(labels: Any, i: int) -> None:
    """Refuse a row whose labels are its ids by default, or whose first label a pack would lose."""
    if labels is None:
        raise ValueError(
            f"Row {i} of the dataset has no labels, which token classifiers and masked language models need. "
            "Give one a token, -100 where there is none."
        )
    values = np.asarray(labels)
    if values.size and values.flat[0] != -100:
        raise ValueError(
            f"Row {i} of the dataset has a label for its first token, which packs cannot hold. Begin rows "
            "with a token without a label (-100), such as [CLS]."
        )


def is_streamed(dataset: object) -> bool:
    """Return whether a Trainer's dataset can only be iterated, or is a mixture with such sources."""
    sources = [dataset]
    if isinstance(dataset, Mapping):  # a mixture of (source, weight), or a dict of splits or columns
        sources = [part[0] for part in dataset.values() if isinstance(part, tuple | list) and part]
    return any(isinstance(source, Stream) or is_stream(source) for source in sources)


def is_trls(trainer: type) -> bool:
    """Return whether a trainer's class is one of TRL, or derives from one."""
    return any(base.__module__.startswith("trl.") for base in trainer.__mro__)


def streamed_dataset(dataset: Any, trainer: type) -> Any:
    """Return an iterable dataset; for TRL's trainers, its masks of learned tokens become labels."""
    if not is_trls(trainer):
        return dataset
    if not hasattr(dataset, "map"):
        raise ValueError(
            f"{trainer.__name__} prepares datasets itself and cannot prepare a {type(dataset).__name__}. "
            "Give it a datasets.IterableDataset, or use packed_trainer() around transformers.Trainer."
        )
    return dataset.map(_with_listed_labels)


def _with_listed_labels(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what ``with_labels`` does, with labels as a list, as a stream of datasets needs them."""
    labelled = with_labels(record)
    labels = labelled.get("labels")
    if isinstance(labels, np.ndarray):  # labels that TRL made are a list already
        return {**labelled, "labels": labels.tolist()}
    return labelled


class PositionMixin(TrainerBase):  # type: ignore[misc]
    """Keeps the position of the data in a Trainer's checkpoints, and resumes at it."""

    _packs: TrainerPacks | None = None
    _resumed: str | None = None  # the checkpoint from which training resumes
    _saves_checkpoint = False

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the base class does; data resume at the checkpoint unless ``ignore_data_skip`` is set."""
        self._packs = None
        if not resume_from_checkpoint or self.args.ignore_data_skip:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        from transformers.trainer_utils import get_last_checkpoint

        last = resume_from_checkpoint is True
        self._resumed = get_last_checkpoint(self.args.output_dir) if last else str(resume_from_checkpoint)
        self.args.ignore_data_skip = True  # Trainer would read the used batches again, and discard them.
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.ignore_data_skip = False
            self._resumed = None

    def _packs_of(self, loader: THDLoader) -> TrainerPacks:
        """Return the packs of a loader, at the position of the checkpoint from which training resumes."""
        packs = TrainerPacks(loader, self._begin, lambda: self.state.global_step)
        if self._resumed is not None:
            packs.load(self._resumed)
        if self._packs is None:  # the first is Trainer's own; a callback may ask for another
            self._packs = packs
        return packs

    def _begin(self) -> None:
        if self._resumed is not None:  # Trainer does so only if it has skipped batches
            private_of(self, "transformers.Trainer._load_rng_state")(self._resumed)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if ours := self._resumed is not None:
            self.args.ignore_data_skip = False  # the saved arguments keep the user's value
        self._saves_checkpoint = True
        try:
            super()._save_checkpoint(*args, **kwargs)
        finally:
            self._saves_checkpoint = False
        self.args.ignore_data_skip = ours or self.args.ignore_data_skip

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save the model; into a checkpoint, save the position of the data before it."""
        # Trainer saves the model first, and deletes older checkpoints at the end.
        if self._saves_checkpoint and self.args.should_save and self._packs is not None:
            assert output_dir is not None
            self._packs.save(output_dir)
        super().save_model(output_dir, *args, **kwargs)


class TrainerPacks:
    """An iterable of packs for Trainer; ``begin`` runs before the first; ``steps`` counts finished steps."""

    def __init__(
        self, loader: THDLoader, begin: Callable[[], None] = lambda: None, steps: Callable[[], int] = int
    ) -> None:
        self.loader = loader
        self._begin = begin
        self._steps = steps
        self._begun = False
        self._steps_before = 0  # finished when this pass over the packs began

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, THDBatch | THDStep]]:
        if not self._begun:
            self._begun = True
            self._begin()
        self._steps_before = self._steps()
        for batch in self.loader:
            yield {"batch": batch}

    def position(self) -> Position:
        """Return the position in the data after the finished steps."""
        # The loader may have yielded packs of a step that has not ended. So count only finished steps.
        finished_steps = self._steps() - self._steps_before
        return self.loader.position_after(finished_steps * self.loader.per_step)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch when Trainer calls this, unless the epoch has begun already."""
        self.loader.begin_epoch(epoch)

    def save(self, folder: str | Path) -> None:
        """Write the position into a checkpoint's folder, atomically."""
        path = Path(folder) / _FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(self.loader.source.state(self.position()), partial)
        os.replace(partial, path)

    def load(self, folder: str | Path) -> None:
        """Restore the position from a checkpoint's folder; refuse a position in other data or settings."""
        path = Path(folder) / _FILE
        advice = "TrainingArguments(ignore_data_skip=True) begins the data again."
        if not path.is_file():
            raise ValueError(
                f"The checkpoint {folder} has no {_FILE}: packed_trainer did not write it. {advice}"
            )
        try:
            self.loader.load_state_dict(torch.load(path, weights_only=True))
        except ValueError as err:
            raise ValueError(f"{folder}: {err} {advice}") from None
