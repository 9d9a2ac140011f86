"""A row of a dataset -> its length, loss tokens, weights and largest id, or what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from lightning_thd.batch import IGNORE_INDEX, check_modalities
from lightning_thd.batch.samples import WEIGHT_KEYS, refuse_restart
from lightning_thd.batch.weights import whole_weight
from lightning_thd.data.store.columns import why_bad

OnError = Literal["raise", "skip"]

# What tells the collator of targets and weights.
_COLLATORS = ("next_label", *WEIGHT_KEYS)
# What has one value a token, and so can be cut with the tokens.
PER_TOKEN = ("input_ids", "labels", "position_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
ADVICE = "Mend the data, or set on_error='skip'."


class MapDataset(Protocol):
    """The interface of a dataset: ``len``, and ``[i]`` giving ``{"input_ids": ints[, "labels": ints]}``."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict[str, Any]: ...


def check_sample(sample: Any, i: int) -> Mapping[str, Any]:
    """Return a sample that is a dict, or raise TypeError naming its row and type.

    Raises:
        TypeError: naming the row, what it is, and what it should be.
    """
    if isinstance(sample, Mapping | str):
        return sample  # type: ignore[return-value]  # text is tokenised before anything else
    raise TypeError(
        f"Row {i} of the dataset is a {type(sample).__name__}, wanted a dict: {{'input_ids': ids}}, perhaps "
        "with 'labels', or text, a prompt or messages. Wrap the dataset in one whose [i] gives that."
    )


def media_names(sample: Mapping[str, Any]) -> list[str]:
    """Return the names of what a sample carries beside its tokens, such as images."""
    return sorted(name for name in sample if name not in PER_TOKEN and name not in _COLLATORS)


def as_sentence(why: str) -> str:
    """Turn a description of what is wrong into the predicate of "row N ..."."""
    return why if why.startswith("has ") else f"is bad: {why}"


class _Measured(TorchDataset[tuple[float, ...]]):
    def __init__(self, dataset: MapDataset, on_error: OnError, one_each: bool) -> None:
        self._dataset, self._on_error, self._one_each = dataset, on_error, one_each

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> tuple[float, ...]:
        if self._on_error == "raise":
            return self._measure(i)
        try:
            return self._measure(i)
        except Exception:  # whatever the user's dataset raises; _why says it again
            return (0, 0, False, 0, 1.0, False, -1, True)

    def _measure(self, i: int) -> tuple[float, ...]:
        sample: Any = check_sample(self._dataset[i], i)
        if isinstance(sample, str) or "input_ids" not in sample:
            keys = "is text" if isinstance(sample, str) else f"has the keys {sorted(sample)}"
            raise ValueError(f"Sample {i} {keys} but no 'input_ids'. Give it one.")
        media = bool(media_names(sample))
        if media:
            check_modalities(sample)
        if why := why_bad(sample):
            raise ValueError(f"Sequence {i} {as_sentence(why)} {ADVICE}")
        if self._one_each:
            refuse_second_sequence(sample, i)
        ids = np.asarray(sample["input_ids"])
        length, largest = len(ids), int(ids.max()) if len(ids) else -1
        loss_tokens = max(0, length - 1)
        if "labels" in sample:
            loss_tokens = int(np.count_nonzero(np.asarray(sample["labels"])[1:] != IGNORE_INDEX))
        if "weights" not in sample:
            return length, loss_tokens, media, loss_tokens, 1.0, False, largest, False
        return length, loss_tokens, media, *whole_weight(dict(sample), i), True, largest, False


def refuse_second_sequence(sample: Mapping[str, Any], i: int) -> None:
    """Raise for a row of several sequences among rows of one, which the first row is."""
    try:
        refuse_restart(
            sample,
            "Row 0 has no position_ids, so rows are taken for one sequence each: give position_ids to all "
            "or to none, or set packed='off' to train on them as they are.",
        )
    except ValueError as err:
        raise ValueError(f"Sequence {i} is bad: {err}") from None


def read_rows(
    dataset: MapDataset, on_error: OnError, num_workers: int, progress: bool, *, one_each: bool = False
) -> dict[str, NDArray[Any]]:
    """Read every row of a dataset once and return the arrays of a ``SequenceIndex``.

    Args:
        dataset: gives rows.
        on_error: whether a bad row is an error, or is counted as one.
        num_workers: processes that read.
        progress: show a progress bar.
        one_each: refuse rows whose position_ids tell of several sequences.

    Raises:
        TypeError: for a row that is no sample.
        ValueError: with ``on_error="raise"``, for a row that cannot be trained on.
    """
    measured = _Measured(dataset, on_error, one_each)
    loader = DataLoader(
        measured,
        batch_size=256,
        num_workers=num_workers,
        collate_fn=_as_array,
        # A generator of its own: the weights of a model built later do not depend on what the cache held.
        generator=torch.Generator(),
    )
    counted = np.empty((len(dataset), 8), np.float64)
    for done, rows in _shown(loader, len(counted), progress):
        counted[done : done + len(rows)] = rows
    weighted = counted[:, 5].any()
    at = int(counted[:, 6].argmax())
    return {
        "lengths": counted[:, 0].astype(np.int64),
        "loss_tokens": counted[:, 1].astype(np.int64),
        "media": np.flatnonzero(counted[:, 2]),
        "weights": counted[:, 3].copy() if weighted else np.empty(0),
        "sequence_weights": counted[:, 4].copy() if weighted else np.empty(0),
        "largest": np.array([int(counted[at, 6]), at]),
        "bad": np.flatnonzero(counted[:, 7]),
    }


def _as_array(rows: Sequence[tuple[float, ...]]) -> NDArray[np.float64]:
    return np.asarray(rows, np.float64)


def _shown(loader: DataLoader[Any], total: int, progress: bool) -> Iterator[tuple[int, NDArray[np.float64]]]:
    done = 0
    with tqdm(total=total, desc="Counting tokens", disable=not progress) as bar:
        for rows in loader:
            yield done, rows
            done += len(rows)
            bar.update(len(rows))
