"""A map-style dataset -> the length and the number of loss tokens of every sequence, counted once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from lightning_thd.batch import IGNORE_INDEX, check_modalities
from lightning_thd.batch.samples import WEIGHT_KEYS
from lightning_thd.batch.weights import sample_weights, whole_weight
from lightning_thd.data.store.arrays import cached_arrays
from lightning_thd.data.store.columns import count_columns
from lightning_thd.packing import Spans

Empty = Literal["error", "drop"]

_VERSION = 2
# What tells the collator of targets and weights.
_COLLATORS = ("next_label", *WEIGHT_KEYS)
# What has one value a token, and so can be cut with the tokens.
_PER_TOKEN = ("input_ids", "labels", "position_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


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
        media: sorted dataset indices of the sequences known to carry images or the like, ints ``[M]``.
        weights: sum of the weights of each sequence's loss tokens, fp64 ``[N]``; empty without weights.
        sequence_weights: of each sequence among sequences, fp64 ``[N]``; likewise.
    """

    lengths: NDArray[np.integer]
    loss_tokens: NDArray[np.integer]
    media: NDArray[np.integer]
    weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    sequence_weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def sample(
        self, dataset: MapDataset, i: int, start: int, stop: int, continued: bool = False
    ) -> dict[str, Any]:
        """Read tokens ``start`` to ``stop`` of sequence ``i``.

        Args:
            dataset: the one that was counted.
            i: index of the sequence.
            start: first token.
            stop: one past the last token.
            continued: the sequence goes on in another piece, so the last token keeps its target, the token at
                ``stop``. A truncated sequence does not go on: what was cut off is no target.

        Raises:
            ValueError: when the sequence has not the length that was counted, or carries images and would be
                cut.
        """
        sample = dict(dataset[i])
        found, counted = len(sample["input_ids"]), int(self.lengths[i])
        if found != counted:
            raise ValueError(
                f"Sequence {i} has {found} tokens, but {counted} were counted. The lengths do not match the "
                "data: correct the dataset's `lengths`, or remove them to have the sequences counted; if the "
                "data changed under the same fingerprint, delete the cache."
            )
        if "weights" in sample and not len(self.weights):
            raise ValueError(
                f"Sequence {i} has weights, but none were counted: the first sequence has none. Give "
                "every sequence weights, or none."
            )
        if stop - start == found:
            return sample
        refuse_cut(sample, i, found)
        if continued:
            sample["next_label"] = int(sample.get("labels", sample["input_ids"])[stop])
        self._cut_weights(sample, i, start, stop, continued)
        for name in _PER_TOKEN:
            if name in sample:
                sample[name] = np.asarray(sample[name])[..., start:stop]
        return sample

    def loss_weights(self, dataset: MapDataset, spans: Spans) -> tuple[float, float]:
        """Add up what the loss tokens of a microbatch count; only parts of some sequences have to be read.

        Returns:
            The weight of the loss tokens, their number without weights, and that of the sequences, a part of
            one counting as its share of the sequence's loss tokens.
        """
        at = spans.index
        of_sequence = (self.weights if len(self.weights) else self.loss_tokens)[at].astype(np.float64)
        sequence = self.sequence_weights[at] if len(self.weights) else np.ones(len(at))
        own = of_sequence.copy()
        cut = spans.lengths != self.lengths[at]
        for k in np.flatnonzero(cut):
            piece = int(at[k]), int(spans.start[k]), int(spans.stop[k]), bool(spans.continued[k])
            own[k] = self._weight_of_piece(dataset, *piece)
            if _is_truncated(piece[1], piece[3]):
                of_sequence[k] = own[k]
        share = np.divide(own, of_sequence, out=np.zeros_like(own), where=of_sequence > 0)
        return float(own.sum()), float((sequence * share).sum())

    def _weight_of_piece(self, dataset: MapDataset, i: int, start: int, stop: int, continued: bool) -> float:
        if not len(self.weights) and self.loss_tokens[i] == self.lengths[i] - 1:
            return float(stop - start - (not continued))
        if not self.loss_tokens[i]:
            return 0.0
        sample, targets = dataset[i], slice(start + 1, stop + continued)
        counts = np.asarray(sample.get("labels", sample["input_ids"]))[targets] != IGNORE_INDEX
        weights = sample_weights(sample, int(self.lengths[i]), i).tokens[targets]
        return float(weights[counts].sum(dtype=np.float64))

    def _cut_weights(self, sample: dict[str, Any], i: int, start: int, stop: int, continued: bool) -> None:
        """Leave a piece the weights of its own tokens, and what its sequence counts as a whole."""
        if not _is_truncated(start, continued):
            sample["whole_weight"] = float((self.weights if len(self.weights) else self.loss_tokens)[i])
        if "weights" in sample:
            weights = np.asarray(sample["weights"])
            if weights.ndim:
                sample["weights"] = weights[start:stop]
                if continued:
                    sample["next_weight"] = float(weights[stop])


def _is_truncated(start: int, continued: bool) -> bool:
    """Say whether a piece that is not the whole sequence is all that is kept of it."""
    return start == 0 and not continued


def media_names(sample: Mapping[str, Any]) -> list[str]:
    """Name what a sample carries beside its tokens."""
    return sorted(name for name in sample if name not in _PER_TOKEN and name not in _COLLATORS)


def refuse_cut(sample: Mapping[str, Any], i: int, length: int) -> None:
    """Refuse to cut a sequence whose images would lose their tokens."""
    if names := media_names(sample):
        raise ValueError(
            f"Sequence {i} has {length} tokens, more than fit a pack, and carries {', '.join(names)}, so it "
            "cannot be cut. Set oversize='drop' or 'own_pack', raise capacity, or shorten it beforehand."
        )


def refuse_cuts(index: SequenceIndex, dataset: MapDataset, limit: int) -> None:
    """Refuse, before the first step, that sequences with images will be cut at ``limit`` tokens."""
    long = index.media[index.lengths[index.media] > limit]
    if len(long):
        refuse_cut(dataset[int(long[0])], int(long[0]), int(index.lengths[long[0]]))


def build_index(
    dataset: MapDataset,
    *,
    empty: Empty = "error",
    num_workers: int = 0,
    progress: bool = False,
    key: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
) -> SequenceIndex:
    """Count a dataset.

    Args:
        dataset: read once, unless it has ``lengths`` (and, with labels, ``loss_tokens``) or is a Hugging Face
            dataset, whose columns are counted in place.
        empty: whether a sequence without tokens is an error, or is left out by the planner and counted there.
        num_workers: processes that read.
        progress: show a progress bar when the dataset has to be read.
        key: what the content of the dataset is known by; what was read is kept under it and memory-mapped.
        cache_dir: where that is kept.

    Raises:
        ValueError: for an empty dataset, samples that are none, and whatever a policy calls an error.
    """
    if len(dataset) == 0:
        raise ValueError("The dataset is empty. Give at least one sequence.")
    counted = _known(dataset)
    if counted is None:
        counted = cached_arrays(
            "index",
            None if key is None else {**key, "sequences": len(dataset)},
            lambda: _read(dataset, num_workers, progress),
            version=_VERSION,
            cache_dir=cache_dir,
        )
    index = SequenceIndex(**counted)
    if empty == "error" and (index.lengths == 0).any():
        raise ValueError(
            f"Sequence {int(np.argmax(index.lengths == 0))} has no tokens "
            f"({int((index.lengths == 0).sum())} of {len(index.lengths)} are empty). "
            "Set empty='drop', or remove them."
        )
    return index


def _known(dataset: MapDataset) -> dict[str, NDArray[Any]] | None:
    """Take what needs no reading of samples: the dataset's own lengths, or its Arrow columns."""
    media = np.empty(0, np.int64)
    given = getattr(dataset, "lengths", None)
    if given is not None and "weights" not in dataset[0]:
        lengths = np.asarray(given)
        if len(lengths) != len(dataset):
            raise ValueError(
                f"The dataset has {len(dataset)} sequences but {len(lengths)} `lengths`. "
                "Correct them, or remove them to have the sequences counted."
            )
        loss_tokens = getattr(dataset, "loss_tokens", None)
        if loss_tokens is None and "labels" in dataset[0]:
            return None
        loss = np.maximum(lengths - 1, 0) if loss_tokens is None else np.asarray(loss_tokens)
        return {"lengths": lengths, "loss_tokens": loss, "media": media}
    columns = count_columns(dataset)
    if columns is None or media_names(dataset[0]) or "weights" in dataset[0]:
        return None
    return {"lengths": columns[0], "loss_tokens": columns[1], "media": media}


class _Measured(TorchDataset[tuple[float, ...]]):
    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> tuple[float, ...]:
        sample = self._dataset[i]
        if "input_ids" not in sample:
            raise ValueError(f"Sample {i} has the keys {sorted(sample)} but no 'input_ids'. Give it one.")
        media = bool(media_names(sample))
        if media:
            check_modalities(sample)
        length = len(sample["input_ids"])
        if "labels" in sample and len(sample["labels"]) != length:
            raise ValueError(
                f"Sample {i} has {length} input_ids but {len(sample['labels'])} labels. "
                "Give one label a token, unshifted, with -100 where it is to be ignored."
            )
        loss_tokens = max(0, length - 1)
        if "labels" in sample:
            loss_tokens = int(np.count_nonzero(np.asarray(sample["labels"])[1:] != IGNORE_INDEX))
        if "weights" not in sample:
            return length, loss_tokens, media, loss_tokens, 1.0, False
        return length, loss_tokens, media, *whole_weight(sample, i), True


def _read(dataset: MapDataset, num_workers: int, progress: bool) -> dict[str, NDArray[Any]]:
    loader = DataLoader(_Measured(dataset), batch_size=256, num_workers=num_workers, collate_fn=_as_array)
    counted = np.empty((len(dataset), 6), np.float64)
    for done, rows in _shown(loader, len(counted), progress):
        counted[done : done + len(rows)] = rows
    weighted = counted[:, 5].any()
    return {
        "lengths": counted[:, 0].astype(np.int64),
        "loss_tokens": counted[:, 1].astype(np.int64),
        "media": np.flatnonzero(counted[:, 2]),
        "weights": counted[:, 3].copy() if weighted else np.empty(0),
        "sequence_weights": counted[:, 4].copy() if weighted else np.empty(0),
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
