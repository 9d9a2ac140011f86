"""Rows of token ids -> one flat, memory-mapped array with offsets: a map-style dataset of any size."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_thd._checks import host_ints
from lightning_thd.batch.examples import PARTS
from lightning_thd.batch.keys import IGNORE_INDEX
from lightning_thd.batch.samples import MOST_ID, check_sample, refuse_wrapped
from lightning_thd.data.store.cache import build_once, cached_folder, open_arrays, reopen, save_arrays, seal

_VERSION = 3  # the version of a store's files
_BLOCK_TOKENS = 1 << 22  # read at once to find the largest id: 16 MiB as uint32
_SKIPPED = "skipped.jsonl"  # the file of a store that lists the records that were left out


class Skipped(NamedTuple):
    """A record that was left out, with its place and the reason."""

    place: str
    reason: str


class Rows(NamedTuple):
    """Token ids, and labels if any, of sequences laid end to end."""

    tokens: NDArray[np.integer]  # ids ``[N]``
    lengths: NDArray[np.int64]  # int64 ``[n]``, which add up to N
    labels: NDArray[np.integer] | None = None
    skipped: tuple[Skipped, ...] = ()  # records that were left out
    label: NDArray[Any] | None = None  # a number for each whole sequence ``[n]``
    parts: NDArray[np.int64] | None = None  # role and length of the parts of all examples, ``[parts, 2]``
    part_counts: NDArray[np.int64] | None = None  # the number of parts of each example ``[n]``


class TokenStore(Dataset[dict[str, NDArray[np.integer]]]):
    """Sequences of token ids laid end to end.

    ``store[i]`` is ``{"input_ids": ids[, "labels": ids][, "label": number]}``, as ``THDDataModule`` takes it.

    Args:
        tokens: ids ``[N]``, any unsigned or signed integer dtype.
        offsets: int64 ``[n + 1]``, from 0 to N.
        labels: int ids ``[N]``, unshifted, -100 where ignored; None if the tokens are the labels.
        loss_tokens: the number in each sequence, ints ``[n]``; None counts them when they are needed.
        largest: the largest id and the sequence it is in, ints ``[2]``; None finds it when it is needed.
        label: a number for each whole sequence ``[n]``, which classifiers learn; None for other models.
        parts: role and length of the query and documents that lie in each sequence, ints ``[parts, 2]``.
        part_counts: the number of parts in each sequence, ints ``[n]``.
        largest_label: the largest label and its sequence, ints ``[2]``; None finds it when it is needed.
    """

    keeps_rows = True  # a row stays unchanged when other rows are read

    def __init__(
        self,
        tokens: NDArray[np.integer],
        offsets: NDArray[np.int64],
        labels: NDArray[np.integer] | None = None,
        loss_tokens: NDArray[np.integer] | None = None,
        largest: NDArray[np.integer] | None = None,
        label: NDArray[Any] | None = None,
        parts: NDArray[np.integer] | None = None,
        part_counts: NDArray[np.integer] | None = None,
        largest_label: NDArray[np.integer] | None = None,
    ) -> None:
        tokens = _flat(tokens, "tokens")
        offsets = _flat(offsets, "offsets").astype(np.int64, copy=False)
        labels = None if labels is None else _flat(labels, "labels")
        loss_tokens = None if loss_tokens is None else _flat(loss_tokens, "loss_tokens")

        total = len(offsets) - 1
        # Mapped arrays were checked when they were written. They may be larger than memory.
        is_mapped = isinstance(offsets, np.memmap)
        ends_are_right = total >= 0 and offsets[0] == 0 and offsets[-1] == len(tokens)
        if not ends_are_right or (not is_mapped and (np.diff(offsets) < 0).any()):
            raise ValueError(f"TokenStore: offsets must run from 0 to {len(tokens)} and never fall.")
        _check_shape("labels", labels, len(tokens))
        _check_shape("loss_tokens", loss_tokens, total)
        _check_shape("label", label, total)
        if labels is not None and not is_mapped:
            refuse_wrapped(labels, "TokenStore")
        if parts is not None and (part_counts is None or int(part_counts.sum()) != len(parts)):
            raise ValueError(f"TokenStore got {len(parts)} parts, but part_counts do not add up to that.")

        self.tokens = tokens
        self.offsets = offsets
        self.labels = labels
        self.label = label
        self.parts = parts
        self.part_counts = part_counts
        counts = np.zeros(0, np.int64) if part_counts is None else part_counts
        self._part_offsets = np.concatenate([[0], np.cumsum(counts)])
        self._loss_tokens = loss_tokens
        self._largest = largest
        self._largest_label = largest_label
        self._folder: Path | None = None  # where the files are, if the arrays are mapped
        self.trusted = False  # whether the ids were checked before they were written
        self.fingerprint: str | None = None

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int] | NDArray[np.integer]]) -> TokenStore:
        """Lay rows of ids end to end in memory, as uint16, or as uint32 if an id needs it."""
        arrays = [host_ints(row, f"row {i}") for i, row in enumerate(rows)]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(row) for row in arrays], out=offsets[1:])
        tokens = np.concatenate(arrays) if arrays else np.empty(0, np.uint16)
        return cls(_narrowed(tokens), offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens in each sequence, int64 ``[n]``."""
        return np.diff(self.offsets)

    @property
    def loss_tokens(self) -> NDArray[np.integer]:
        """Return the number of loss tokens in each sequence, ints ``[n]``; the first label never counts."""
        if self._loss_tokens is None:
            if self.labels is None:
                self._loss_tokens = np.maximum(self.lengths - 1, 0)
            else:
                self._loss_tokens = count_targets(self.labels, self.lengths)
        return self._loss_tokens

    @property
    def largest(self) -> tuple[int, int]:
        """Return the largest id and the sequence it is in; (-1, 0) for a store without tokens."""
        if self._largest is None:
            self._largest = np.array(_largest_id(self.tokens, self.offsets))
        return int(self._largest[0]), int(self._largest[1])

    @property
    def largest_label(self) -> tuple[int, int]:
        """Return the largest label and the sequence it is in; (-1, 0) for a store without labels."""
        if self.labels is None:
            return -1, 0
        if self._largest_label is None:
            self._largest_label = np.array(_largest_id(self.labels, self.offsets))
        return int(self._largest_label[0]), int(self._largest_label[1])

    @property
    def skipped(self) -> int:
        """Return how many records were left out of the store; its ``skipped.jsonl`` lists them."""
        return len(self.skipped_records)

    @property
    def skipped_records(self) -> list[Skipped]:
        """Return the records that were left out of the store."""
        return [] if self._folder is None else _skipped_in(self._folder)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> dict[str, NDArray[np.integer]]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"Sequence {i} of a TokenStore of {len(self)} sequences does not exist.")
        i %= len(self)

        span = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        sample = {"input_ids": self.tokens[span]}
        if self.labels is not None:
            sample["labels"] = self.labels[span]
        if self.label is not None:
            sample["label"] = self.label[i]
        if self.parts is not None:
            sample[PARTS] = self.parts[self._part_offsets[i] : self._part_offsets[i + 1]]
        return sample

    def save(self, folder: str | Path) -> None:
        """Write ``folder``, which appears only when it is complete; refuse ids and labels out of range."""
        # All sequences are checked at once, as one long sample.
        as_sample = {"input_ids": self.tokens}
        if self.labels is not None:
            as_sample["labels"] = self.labels
        check_sample(as_sample, "The store", empty=True)

        arrays = {"tokens": self.tokens, "offsets": self.offsets, "largest": np.array(self.largest)}
        if self.labels is not None:
            arrays |= {"labels": self.labels, "loss_tokens": self.loss_tokens}
            arrays["largest_label"] = np.array(self.largest_label)
        if self.label is not None:
            arrays["label"] = self.label
        if self.parts is not None and self.part_counts is not None:
            arrays |= {"parts": self.parts, "part_counts": self.part_counts}
        save_arrays(folder, arrays, version=_VERSION)

    @classmethod
    def open(cls, folder: str | Path) -> TokenStore:
        """Map a folder written by ``save`` into memory; raise ValueError if a file was changed since."""
        return cls._from_arrays(folder, open_arrays(folder, version=_VERSION))

    @classmethod
    def _from_arrays(cls, folder: str | Path, arrays: Mapping[str, NDArray[Any]]) -> TokenStore:
        store = cls(**arrays)
        store._folder = Path(folder)
        store.trusted = True
        # meta.json holds a hash of the content of each file.
        store.fingerprint = hashlib.sha256((store._folder / "meta.json").read_bytes()).hexdigest()
        return store

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._folder is None:
            return super().__reduce__()
        return type(self).open, (self._folder,)  # a worker maps the files, and gets no copy of the arrays


def cached_store(
    key: dict[str, Any] | None,
    parts: Callable[[int], Iterable[Rows]],
    *,
    cache_dir: str | Path | None = None,
    max_errors: int | None = None,
) -> TokenStore:
    """Open the store of the same key, or build it on disk; without a key, files last as long as the store.

    Args:
        key: identifies content and settings.
        parts: ``parts(k)`` gives the rows of the source part by part, without its first k parts.
        cache_dir: the folder of the cache; None is the user's.
        max_errors: the largest number of records that may be left out; None sets no bound.

    Raises:
        ValueError: more than ``max_errors`` records are bad, or all are.
        CacheError: the cache cannot be written.
    """
    folder = cached_folder("tokens", {"unnamed": uuid4().hex} if key is None else key, cache_dir)
    arrays = reopen(folder, version=_VERSION)
    if arrays is not None:
        _refuse_more(_skipped_in(folder), max_errors)  # it may be from a run with a larger bound
        return TokenStore._from_arrays(folder, arrays)

    build_once(folder, lambda new_folder: _fill(new_folder, parts, max_errors), resume=key is not None)
    store = TokenStore.open(folder)
    if key is None:
        weakref.finalize(store, _remove, folder, os.getpid())
    return store


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker that ends must not delete the files
        shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, parts: Callable[[int], Iterable[Rows]], max_errors: int | None) -> None:
    """Save parts as files, and join them; ``parts(k)`` gives those after the k that an earlier run saved."""
    paths: list[Path] = []
    skipped: list[Skipped] = []
    has: dict[str, bool] = {}  # whether the parts have "labels" and "label"
    while (path := folder / f"part{len(paths)}.npz").exists():
        with np.load(path, allow_pickle=False) as part:
            skipped += [Skipped(*entry) for entry in json.loads(str(part["skipped"]))]
            _refuse_mixed(has, part)
        paths.append(path)
    _refuse_more(skipped, max_errors)

    for rows in parts(len(paths)):
        skipped += rows.skipped
        _refuse_more(skipped, max_errors)
        arrays = _arrays_of(rows)
        _refuse_mixed(has, arrays)
        paths.append(folder / f"part{len(paths)}.npz")
        _save_part(paths[-1], arrays)

    sequences = _join(folder, paths, labelled=has.get("labels", False))
    if skipped and not sequences:
        place, reason = skipped[0]
        raise ValueError(f"All {len(skipped)} records are bad; the first: {place}: {reason} Fix the data.")
    if skipped:
        lines = "".join(json.dumps(entry._asdict()) + "\n" for entry in skipped)
        (folder / _SKIPPED).write_text(lines)
    for path in folder.glob("*.npz"):
        path.unlink()
    seal(folder, version=_VERSION)


def _arrays_of(rows: Rows) -> dict[str, Any]:
    """Return the arrays of a part's file."""
    offsets = np.concatenate([[0], np.cumsum(rows.lengths)])
    arrays: dict[str, Any] = {
        "tokens": _narrowed(rows.tokens),
        "lengths": rows.lengths,
        "loss_tokens": np.maximum(rows.lengths - 1, 0),
        "largest": np.array(_largest_id(rows.tokens, offsets)),
        "skipped": np.array(json.dumps(rows.skipped)),
    }

    if rows.labels is not None:
        arrays["labels"] = rows.labels.astype(np.int32)
        arrays["largest_label"] = np.array(_largest_id(rows.labels, offsets))
        arrays["loss_tokens"] = count_targets(rows.labels, rows.lengths)

    if rows.label is not None:
        is_whole = rows.label.dtype.kind in "iub"
        arrays["label"] = rows.label.astype(np.int64 if is_whole else np.float64)

    if rows.parts is not None and rows.part_counts is not None:
        arrays |= {"parts": rows.parts, "part_counts": rows.part_counts}
    return arrays


def _save_part(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write a part's file so that it is complete if it has its final name, even after a power cut."""
    unfinished = path.parent / "unfinished.npz"
    with unfinished.open("wb") as out:
        np.savez(out, **arrays)
        out.flush()
        os.fsync(out.fileno())
    os.replace(unfinished, path)


def _refuse_mixed(has: dict[str, bool], part: Mapping[str, Any]) -> None:
    """Raise if this part has labels, or a label per sequence, and the parts before do not, or vice versa."""
    if not len(part["lengths"]):
        return
    for name in ("labels", "label"):
        if has.setdefault(name, name in part) != (name in part):
            some, others = ("first", "later") if has[name] else ("later", "first")
            raise ValueError(f"The {some} records have {name!r}, but the {others} records do not. Add it.")


def _join(folder: Path, paths: Sequence[Path], *, labelled: bool) -> int:
    """Join the files of all parts, with one part in memory at a time; return the number of sequences."""
    per_sequence: dict[str, list[Any]] = {"lengths": [np.empty(0, np.int64)]}
    largest = {"largest": (-1, 0)}  # values and the sequences they are in
    if labelled:
        largest["largest_label"] = (-1, 0)
    sequences = 0
    for path in paths:
        with np.load(path, allow_pickle=False) as part:
            for name in set(part.files) - {"tokens", "labels", "skipped", "largest", "largest_label"}:
                per_sequence.setdefault(name, []).append(part[name])
            for name, (so_far, _) in list(largest.items()):
                # Only parts of an older release and parts without a sequence have none.
                value, row = part[name].tolist() if name in part else (-1, 0)
                if value > so_far:
                    largest[name] = value, sequences + row
            sequences += len(part["lengths"])

    arrays = {name: np.concatenate(values) for name, values in per_sequence.items()}
    lengths = arrays.pop("lengths")
    arrays["offsets"] = np.concatenate([[0], np.cumsum(lengths)])
    arrays |= {name: np.array(value_and_row) for name, value_and_row in largest.items()}
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)

    total = int(lengths.sum())
    _join_tokens(folder, "tokens", _narrowest_dtype(largest["largest"][0]), total, paths)
    if labelled:
        _join_tokens(folder, "labels", np.dtype(np.int32), total, paths)
    return sequences


def _join_tokens(folder: Path, name: str, dtype: np.dtype[Any], total: int, paths: Sequence[Path]) -> None:
    """Write the .npy file of ``total`` tokens or labels, part by part: all may be larger than memory."""
    with (folder / f"{name}.npy").open("wb") as out:
        header = {"descr": dtype.str, "fortran_order": False, "shape": (total,)}
        np.lib.format.write_array_header_1_0(out, header)
        for path in paths:
            with np.load(path, allow_pickle=False) as part:
                if name in part:
                    part[name].astype(dtype).tofile(out)


def _narrowest_dtype(largest: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if largest < 2**16 else np.uint32)


def _narrowed(tokens: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return ids as uint16, or as uint32 if an id needs it; raise if one is out of range."""
    smallest = int(tokens.min()) if tokens.size else 0
    largest = int(tokens.max()) if tokens.size else 0
    if smallest < 0 or largest > MOST_ID:
        raise ValueError(f"Token ids start at 0, got {smallest} to {largest}. Ids run to {MOST_ID}.")
    return tokens.astype(_narrowest_dtype(largest), copy=False)


def _skipped_in(folder: Path) -> list[Skipped]:
    """Return the records that were left out of the store in a folder."""
    file = folder / _SKIPPED
    if not file.is_file():
        return []
    return [Skipped(**json.loads(line)) for line in file.read_text().splitlines()]


def _refuse_more(skipped: Sequence[Skipped], max_errors: int | None) -> None:
    if max_errors is not None and len(skipped) > max_errors:
        first = " | ".join(f"{entry.place}: {entry.reason}" for entry in skipped[:3])
        raise ValueError(
            f"{len(skipped)} records are bad, more than max_errors={max_errors}; the first: {first}"
        )


def _flat(values: Any, name: str) -> NDArray[np.integer]:
    """Return an array of integers with one axis as it is, in its dtype; convert or refuse any other value."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and values.ndim == 1:
        return values
    return host_ints(values, name)


def _check_shape(name: str, values: NDArray[Any] | None, wanted: int) -> None:
    if values is not None and np.shape(values) != (wanted,):
        raise ValueError(f"TokenStore got {name} of shape {np.shape(values)}; wanted {wanted} numbers.")


def count_targets(labels: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Count the labels other than -100 of sequences laid end to end; a sequence's first label never counts.

    Labels ``[-100, 7, 8, 9]`` of lengths ``[3, 1]`` give ``[2, 0]``.
    """
    # Empty sequences take no part: numpy's reduceat would give them a value of the sequence behind them.
    has_tokens = lengths > 0
    begins = (np.cumsum(lengths) - lengths)[has_tokens]

    is_target = labels != IGNORE_INDEX
    is_target[begins] = False
    counted = np.zeros(len(lengths), np.int64)
    if len(labels):
        counted[has_tokens] = np.add.reduceat(is_target, begins, dtype=np.int64)
    return counted


def _largest_id(tokens: NDArray[np.integer], offsets: NDArray[np.integer]) -> tuple[int, int]:
    """Return the largest id and the sequence it is in, reading block by block; (-1, 0) without tokens."""
    if not len(tokens):
        return -1, 0
    largest = -1
    slot = 0
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS]
        if int(block.max()) > largest:
            largest = int(block.max())
            slot = start + int(block.argmax())
    # Empty sequences share an offset with the one behind them; side="right" finds the one with the token.
    return largest, int(np.searchsorted(offsets, slot, side="right")) - 1
