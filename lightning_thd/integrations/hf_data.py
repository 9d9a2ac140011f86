"""A Trainer's dataset and a ``THDLoader`` -> a loader of packs that Trainer can skip and resume."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader

from lightning_thd._find import unwrapped
from lightning_thd.batch import THDBatch
from lightning_thd.batch.samples import PER_TOKEN, check_attention_mask
from lightning_thd.data import THDDataModule
from lightning_thd.data.store.measure import MapDataset

# Columns that are packed, or that are looked at for what they say.
_LOOKED_AT = frozenset(("input_ids", "labels", "attention_mask", "position_ids", *PER_TOKEN))
# Arguments of THDDataModule that packed_trainer gives it: where a user says them.
_GIVEN_ELSEWHERE = {
    "train": "train_dataset=",
    "val": "eval_dataset=",
    "test": "trainer.evaluate(dataset)",
    "predict": "trainer.predict(dataset)",
    "capacity": "capacity= of packed_trainer",
    "num_workers": "TrainingArguments(dataloader_num_workers=...)",
    "prefetch_factor": "TrainingArguments(dataloader_prefetch_factor=...)",
    "pin_memory": "TrainingArguments(dataloader_pin_memory=...)",
}
# Those that say how rows are read. The others plan training steps; an evaluation keeps every sequence whole.
_OF_READING = frozenset({"cache_dir", "empty", "engine", "max_errors", "on_error", "vocab_size"})
_MASKS = ("completion_mask", "assistant_masks")  # TRL's columns: 1 where a token is to be learned


def packed_dataset(dataset: Any, taken: frozenset[str] = frozenset()) -> MapDataset:
    """Return a dataset whose rows hold only ids and labels.

    Args:
        dataset: of the Trainer.
        taken: names of the arguments of the model's ``forward``: a column of such a name says something.

    Raises:
        ValueError: for none, and for one without a length; later for rows that say more than ids and labels.
    """
    if dataset is None:
        raise ValueError("The Trainer has no dataset to pack. Pass train_dataset (and eval_dataset).")
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{type(dataset).__name__} has no length, so its sequences cannot be planned. "
            "Pass a map-style dataset."
        )
    return cast("MapDataset", WithLabels(dataset, taken))


def check_data_kwargs(given: Mapping[str, Any] | None) -> None:
    """Refuse ``data_kwargs`` that THDDataModule does not take, or that packed_trainer gives it itself.

    Raises:
        TypeError: naming the argument.
    """
    known = inspect.signature(THDDataModule).parameters
    for name in given or ():
        if name in _GIVEN_ELSEWHERE:
            raise TypeError(
                f"data_kwargs has {name!r}, which packed_trainer gives to THDDataModule by itself. Say it as "
                f"{_GIVEN_ELSEWHERE[name]}."
            )
        if name not in known:
            raise TypeError(
                f"data_kwargs has {name!r}, which is no argument of THDDataModule. It takes "
                f"{', '.join(sorted(known.keys() - _GIVEN_ELSEWHERE.keys()))}."
            )


def evaluation_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``data_kwargs`` that an evaluation set is read with too."""
    return {name: value for name, value in given.items() if name in _OF_READING}


def arguments_of(model: Any) -> frozenset[str]:
    """Return the names of the arguments of a model's ``forward``, under its adapters if it has any."""
    return frozenset(inspect.signature(unwrapped(model).forward).parameters)


def keyed_loader(loader: Any, *, pin_memory: bool) -> DataLoader[Any]:
    """Return the batches of a ``THDLoader`` from a loader that Trainer can skip and resume."""
    inner = loader._loader
    return KeyedLoader(
        cast("Any", Sized(inner.dataset, len(loader))),
        batch_sampler=cast("Any", _Keys(loader._cursor)),
        collate_fn=first,
        num_workers=inner.num_workers,
        prefetch_factor=inner.prefetch_factor,
        pin_memory=pin_memory,
    )


def with_labels(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Turn TRL's masks of learned tokens, where a sample has them, into labels."""
    masks = {name: np.asarray(sample[name]) for name in _MASKS if sample.get(name) is not None}
    without = {**sample, **dict.fromkeys(masks)}  # None: `datasets` keeps a column that is left out
    if not masks or "labels" in sample:
        return without
    learned = np.logical_and.reduce([*masks.values()])
    return {**without, "labels": np.where(learned, np.asarray(sample["input_ids"]), -100)}


class WithLabels:
    """A dataset whose masks of learned tokens, where it has them, become labels.

    Args:
        dataset: of rows that are dicts.
        taken: see ``packed_dataset``.
    """

    def __init__(self, dataset: Any, taken: frozenset[str] = frozenset()) -> None:
        self._dataset, self._further = dataset, sorted(taken - _LOOKED_AT)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        sample = with_labels(self._dataset[i])
        if "input_ids" in sample:
            self._refuse_what_is_left_out(sample, i)
        return {name: sample[name] for name in ("input_ids", "labels") if name in sample}

    def _refuse_what_is_left_out(self, sample: Mapping[str, Any], i: int) -> None:
        """Raise for columns that would change what the model computes; Trainer itself passes them on."""
        length = len(sample["input_ids"])
        if sample.get("attention_mask") is not None:
            check_attention_mask(sample, length, i)
        positions = sample.get("position_ids")
        if positions is not None and not np.array_equal(np.asarray(positions), np.arange(length)):
            raise ValueError(
                f"Row {i} of the dataset has position_ids that do not count from 0 to {length - 1}, as if it "
                "were a pack already or had positions of its own; packed_trainer makes them by itself. Give "
                "one sequence a row without them, or use Lightning's Trainer with THDDataModule."
            )
        others = [name for name in self._further if sample.get(name) is not None]
        others += [name for name in PER_TOKEN if sample.get(name) is not None and np.any(sample[name])]
        if others:
            raise ValueError(
                f"Row {i} of the dataset has {', '.join(others)}, which the model takes, but packed_trainer "
                "packs ids and labels alone. Use Lightning's Trainer with THDDataModule, which packs images "
                "and token types too, or remove the columns."
            )


class KeyedLoader(DataLoader[Any]):
    """Loads batches by keys from a batch sampler, so that Trainer and Accelerate can skip them on resume."""

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, when Trainer calls."""
        sampler = self.batch_sampler
        cast("_Keys", sampler).set_epoch(epoch)


class _Keys:
    """Presents a ``THDLoader``'s cursor as a batch sampler that yields one key a batch."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def __len__(self) -> int:
        return len(self._cursor)

    def __iter__(self) -> Iterator[list[Any]]:
        return ([key] for key in self._cursor)

    def set_epoch(self, epoch: int) -> None:
        self._cursor.set_epoch(epoch)


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
