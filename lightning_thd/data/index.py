"""A map-style dataset -> the length and the number of loss tokens of every sequence, counted once."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from lightning_thd.batch import IGNORE_INDEX
from lightning_thd.packing import Spans

Empty = Literal["error", "drop"]


class MapDataset(Protocol):
    """What ``THDDataModule`` packs: ``len``, and ``[i]`` giving ``{"input_ids": ints[, "labels": ints]}``."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceIndex:
    """What a plan is made from.

    Attributes:
        lengths: tokens of every sequence, ints ``[N]``.
        loss_tokens: slots with a target of every sequence, ints ``[N]``; a first label is none.
    """

    lengths: NDArray[np.integer]
    loss_tokens: NDArray[np.integer]

    def sample(self, dataset: MapDataset, i: int, start: int, stop: int) -> dict[str, Any]:
        """Read tokens ``start`` to ``stop`` of sequence ``i``.

        Raises:
            ValueError: when the sequence has not the length that was counted.
        """
        sample = dict(dataset[i])
        found, counted = len(sample["input_ids"]), int(self.lengths[i])
        if found != counted:
            raise ValueError(
                f"Sequence {i} has {found} tokens, but {counted} were counted. The lengths do not match the "
                "data: correct the dataset's `lengths`, or remove them to have the sequences counted."
            )
        if stop - start == found:
            return sample
        if stop < found:  # a piece that goes on keeps the target of its last token
            sample["next_label"] = int(sample.get("labels", sample["input_ids"])[stop])
        for name in ("input_ids", "labels", "position_ids", "token_type_ids", "mm_token_type_ids"):
            if name in sample:
                sample[name] = np.asarray(sample[name])[..., start:stop]
        return sample

    def count_loss_tokens(self, dataset: MapDataset, spans: Spans) -> int:
        """Count the targets of a microbatch; only parts of partly masked sequences have to be read."""
        whole = spans.lengths == self.lengths[spans.index]
        total = int(self.loss_tokens[spans.index[whole]].sum())
        for k in np.flatnonzero(~whole):
            i, start, stop = int(spans.index[k]), int(spans.start[k]), int(spans.stop[k])
            if self.loss_tokens[i] == self.lengths[i] - 1:
                total += stop - start - (not spans.continued[k])
            elif self.loss_tokens[i]:
                labels = np.asarray(dataset[i]["labels"])[start + 1 : stop + bool(spans.continued[k])]
                total += int(np.count_nonzero(labels != IGNORE_INDEX))
        return total


def build_index(
    dataset: MapDataset, *, empty: Empty = "error", num_workers: int = 0, progress: bool = False
) -> SequenceIndex:
    """Count a dataset.

    Args:
        dataset: read once, unless it has ``lengths`` (and, with labels, ``loss_tokens``) or is a Hugging Face
            dataset without labels, whose column is counted in place.
        empty: whether a sequence without tokens is an error, or is left out by the planner and counted there.
        num_workers: processes that read.
        progress: show a progress bar when the dataset has to be read.

    Raises:
        ValueError: for an empty dataset, samples that are none, and whatever a policy calls an error.
    """
    if len(dataset) == 0:
        raise ValueError("The dataset is empty. Give at least one sequence.")
    lengths, loss_tokens = _measure(dataset, num_workers=num_workers, progress=progress)
    if empty == "error" and (lengths == 0).any():
        raise ValueError(
            f"Sequence {int(np.argmax(lengths == 0))} has no tokens ({int((lengths == 0).sum())} of "
            f"{len(lengths)} are empty). Set empty='drop', or remove them."
        )
    return SequenceIndex(lengths=lengths, loss_tokens=loss_tokens)


def _measure(
    dataset: MapDataset, *, num_workers: int, progress: bool
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    given = getattr(dataset, "lengths", None)
    if given is not None:
        lengths = np.asarray(given)
        if len(lengths) != len(dataset):
            raise ValueError(
                f"The dataset has {len(dataset)} sequences but {len(lengths)} `lengths`. "
                "Correct them, or remove them to have the sequences counted."
            )
        loss_tokens = getattr(dataset, "loss_tokens", None)
        if loss_tokens is not None:
            return lengths, np.asarray(loss_tokens)
        if "labels" not in dataset[0]:
            return lengths, np.maximum(lengths - 1, 0)
    columns = _measure_columns(dataset)
    return columns if columns is not None else _measure_samples(dataset, num_workers, progress)


def _measure_columns(dataset: MapDataset) -> tuple[NDArray[np.integer], NDArray[np.integer]] | None:
    """Count a ``datasets.Dataset`` by its Arrow columns, without making a Python object a token."""
    table = getattr(getattr(dataset, "data", None), "table", None)
    if table is None or "labels" in table.column_names or "input_ids" not in table.column_names:
        return None
    import pyarrow.compute as pc

    lengths = np.asarray(pc.list_value_length(table.column("input_ids")), dtype=np.int64)
    indices = getattr(dataset, "_indices", None)  # what select, shuffle and filter leave behind
    if indices is not None:
        lengths = lengths[np.asarray(indices.column(0))]
    return lengths, np.maximum(lengths - 1, 0)


class _Measured(TorchDataset[tuple[int, int]]):
    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> tuple[int, int]:
        sample = self._dataset[i]
        if "input_ids" not in sample:
            raise ValueError(f"Sample {i} has the keys {sorted(sample)} but no 'input_ids'. Give it one.")
        length = len(sample["input_ids"])
        if "labels" in sample and len(sample["labels"]) != length:
            raise ValueError(
                f"Sample {i} has {length} input_ids but {len(sample['labels'])} labels. "
                "Give one label a token, unshifted, with -100 where it is to be ignored."
            )
        if "labels" not in sample:
            return length, max(0, length - 1)
        return length, int(np.count_nonzero(np.asarray(sample["labels"])[1:] != IGNORE_INDEX))


def _measure_samples(
    dataset: MapDataset, num_workers: int, progress: bool
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    loader = DataLoader(_Measured(dataset), batch_size=256, num_workers=num_workers, collate_fn=np.asarray)
    counted = np.empty((len(cast("Sized", dataset)), 2), np.int64)
    done = 0
    with tqdm(total=len(counted), desc="Counting tokens", disable=not progress) as bar:
        for rows in loader:
            counted[done : done + len(rows)] = rows
            done += len(rows)
            bar.update(len(rows))
    return counted[:, 0].copy(), counted[:, 1].copy()
