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
from lightning_thd.batch.samples import MOST_ID, check_sample, refuse_wrapped
from lightning_thd.data.store.cache import build_once, cached_folder, open_arrays, reopen, save_arrays, seal

_VERSION = 3
_IGNORE = -100
_BLOCK = 1 << 22  # tokens that are read at once to find the largest id: 16 MiB as uint32
_SKIPPED = "skipped.jsonl"


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
    ) -> None:
        tokens = _flat(tokens, "tokens")
        offsets = _flat(offsets, "offsets").astype(np.int64, copy=False)
        labels = None if labels is None else _flat(labels, "labels")
        loss_tokens = None if loss_tokens is None else _flat(loss_tokens, "loss_tokens")
        total, self.trusted = len(offsets) - 1, False
        mapped = isinstance(offsets, np.memmap)  # it may be larger than memory
        if (
            total < 0
            or offsets[0] != 0
            or offsets[-1] != len(tokens)
            or (not mapped and (np.diff(offsets) < 0).any())
        ):
            raise ValueError(f"TokenStore: offsets must run from 0 to {len(tokens)} and never fall.")
        wanted_of = {"labels": len(tokens), "loss_tokens": total, "label": total}
        for (name, wanted), values in zip(wanted_of.items(), (labels, loss_tokens, label), strict=True):
            if values is not None and np.shape(values) != (wanted,):
                raise ValueError(
                    f"TokenStore got {name} of shape {np.shape(values)}; wanted {wanted} numbers."
                )
        if labels is not None and not mapped:
            refuse_wrapped(labels, "TokenStore")
        self.tokens, self.offsets, self.labels = tokens, offsets, labels
        self._loss_tokens, self._largest, self.label = loss_tokens, largest, label
        self._folder: Path | None = None
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
            self._loss_tokens = (
                np.maximum(self.lengths - 1, 0)
                if self.labels is None
                else count_targets(self.labels, self.lengths)
            )
        return self._loss_tokens

    @property
    def largest(self) -> tuple[int, int]:
        """Return the largest id and the sequence it is in; (-1, 0) for a store without tokens."""
        if self._largest is None:
            self._largest = np.array(_largest_id(self.tokens, self.offsets))
        return int(self._largest[0]), int(self._largest[1])

    @property
    def skipped(self) -> int:
        """Return how many records were left out of the store; its ``skipped.jsonl`` lists them."""
        return len(_listed(self._folder)) if self._folder is not None else 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> dict[str, NDArray[np.integer]]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"Sequence {i} of a TokenStore of {len(self)} sequences does not exist.")
        i %= len(self)
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        sample = {"input_ids": self.tokens[part]}
        if self.labels is not None:
            sample["labels"] = self.labels[part]
        if self.label is not None:
            sample["label"] = self.label[i]
        return sample

    def save(self, folder: str | Path) -> None:
        """Write ``folder``, which appears only when it is complete; refuse ids and labels out of range."""
        rows = {"input_ids": self.tokens, "labels": self.labels}
        check_sample({name: row for name, row in rows.items() if row is not None}, "The store", empty=True)
        arrays = {"tokens": self.tokens, "offsets": self.offsets, "largest": np.array(self.largest)}
        if self.labels is not None:
            arrays |= {"labels": self.labels, "loss_tokens": self.loss_tokens}
        if self.label is not None:
            arrays["label"] = self.label
        save_arrays(folder, arrays, version=_VERSION)

    @classmethod
    def open(cls, folder: str | Path) -> TokenStore:
        """Map a folder written by ``save`` into memory; raise ValueError if a file was changed since."""
        return cls._from_arrays(folder, open_arrays(folder, version=_VERSION))

    @classmethod
    def _from_arrays(cls, folder: str | Path, arrays: Mapping[str, NDArray[Any]]) -> TokenStore:
        store = cls(**arrays)
        store._folder, store.trusted = Path(folder), True  # the ids were checked before they were written
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
    """Open the store of the same key, or build it on disk; without a key, files last as long as the store."""
    folder = cached_folder("tokens", {"unnamed": uuid4().hex} if key is None else key, cache_dir)
    arrays = reopen(folder, version=_VERSION)
    if arrays is not None:
        _refuse_more(_listed(folder), max_errors)  # it may be from a run with a larger bound
        return TokenStore._from_arrays(folder, arrays)
    build_once(folder, lambda place: _fill(place, parts, max_errors), resume=key is not None)
    store = TokenStore.open(folder)
    if key is None:
        weakref.finalize(store, _remove, folder, os.getpid())
    return store


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker that ends must not delete the files
        shutil.rmtree(folder, ignore_errors=True)


def _fill(place: Path, parts: Callable[[int], Iterable[Rows]], max_errors: int | None) -> None:
    """Save parts as files, and join them; ``parts(k)`` gives those after the k that an earlier run saved."""
    paths: list[Path] = []
    skipped: list[Skipped] = []
    has: dict[str, bool] = {}
    while (path := place / f"part{len(paths)}.npz").exists():
        with np.load(path, allow_pickle=False) as part:
            skipped += [Skipped(*entry) for entry in json.loads(str(part["skipped"]))]
            _refuse_mixed(has, part)
        paths.append(path)
    _refuse_more(skipped, max_errors)
    for rows in parts(len(paths)):
        skipped += rows.skipped
        _refuse_more(skipped, max_errors)
        values = _part_of(rows)
        _refuse_mixed(has, values)
        with (place / "unfinished.npz").open("wb") as out:
            np.savez(out, **values)
            out.flush()
            os.fsync(out.fileno())  # a part with its final name is complete, even after a power cut
        paths.append(place / f"part{len(paths)}.npz")
        os.replace(place / "unfinished.npz", paths[-1])
    sequences = _join(place, paths, labelled=has.get("labels", False))
    if skipped and not sequences:
        where, reason = skipped[0]
        raise ValueError(f"All {len(skipped)} records are bad; the first: {where}: {reason} Fix the data.")
    if skipped:
        lines = "".join(json.dumps(entry._asdict()) + "\n" for entry in skipped)
        (place / _SKIPPED).write_text(lines)
    for path in place.glob("*.npz"):
        path.unlink()
    seal(place, version=_VERSION)


def _part_of(rows: Rows) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tokens": _narrowed(rows.tokens),
        "lengths": rows.lengths,
        "loss_tokens": np.maximum(rows.lengths - 1, 0),
        "largest": np.array(_largest_id(rows.tokens, np.concatenate([[0], np.cumsum(rows.lengths)]))),
        "skipped": np.array(json.dumps(rows.skipped)),
    }
    if rows.labels is not None:
        values["labels"] = rows.labels.astype(np.int32)
        values["loss_tokens"] = count_targets(rows.labels, rows.lengths)
    if rows.label is not None:
        values["label"] = rows.label.astype(np.int64 if rows.label.dtype.kind in "iub" else np.float64)
    return values


def _refuse_mixed(has: dict[str, bool], part: Mapping[str, Any]) -> None:
    """Raise if this part has labels, or a label per sequence, and the parts before do not, or vice versa."""
    for name in ("labels", "label") if len(part["lengths"]) else ():
        if has.setdefault(name, name in part) != (name in part):
            some, others = ("first", "later") if has[name] else ("later", "first")
            raise ValueError(f"The {some} records have {name!r}, but the {others} records do not. Add it.")


def _join(place: Path, paths: Sequence[Path], *, labelled: bool) -> int:
    found: dict[str, list[Any]] = {"lengths": [np.empty(0, np.int64)]}
    largest, sequences = (-1, 0), 0
    for path in paths:
        with np.load(path, allow_pickle=False) as part:
            for name in set(part.files) - {"tokens", "labels", "skipped", "largest"}:
                found.setdefault(name, []).append(part[name])
            top, row = part["largest"].tolist()
            largest = (top, sequences + row) if top > largest[0] else largest
            sequences += len(part["lengths"])
    arrays = {name: np.concatenate(values) for name, values in found.items()}
    lengths = arrays.pop("lengths")
    arrays |= {"offsets": np.concatenate([[0], np.cumsum(lengths)]), "largest": np.array(largest)}
    for name, values in arrays.items():
        np.save(place / f"{name}.npy", values)
    kinds = {"tokens": _narrow(largest[0])} | ({"labels": np.dtype(np.int32)} if labelled else {})
    for name, kind in kinds.items():
        with (place / f"{name}.npy").open("wb") as out:
            header = {"descr": kind.str, "fortran_order": False, "shape": (int(lengths.sum()),)}
            np.lib.format.write_array_header_1_0(out, header)
            for path in paths:
                with np.load(path, allow_pickle=False) as part:
                    if name in part:
                        part[name].astype(kind).tofile(out)
    return sequences


def _narrow(largest: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if largest < 2**16 else np.uint32)


def _narrowed(tokens: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return ids as uint16, or as uint32 if an id needs it; raise if one is out of range."""
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    if low < 0 or high > MOST_ID:
        raise ValueError(f"Token ids start at 0, got {low} to {high}. Ids run to {MOST_ID}.")
    return tokens.astype(_narrow(high), copy=False)


def _listed(folder: Path) -> list[Skipped]:
    file = folder / _SKIPPED
    lines = file.read_text().splitlines() if file.is_file() else []
    return [Skipped(**json.loads(line)) for line in lines]


def _refuse_more(skipped: Sequence[Skipped], max_errors: int | None) -> None:
    if max_errors is not None and len(skipped) > max_errors:
        first = " | ".join(f"{entry.place}: {entry.reason}" for entry in skipped[:3])
        raise ValueError(
            f"{len(skipped)} records are bad, more than max_errors={max_errors}; the first: {first}"
        )


def _flat(values: Any, name: str) -> NDArray[np.integer]:
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != 1:
        return host_ints(values, name)
    return values


def count_targets(labels: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Count the labels other than -100 of sequences laid end to end; a sequence's first label never counts.

    Labels ``[-100, 7, 8, 9]`` of lengths ``[3, 1]`` give ``[2, 0]``.
    """
    learned = labels != _IGNORE
    ends = np.cumsum(lengths)
    learned[(ends - lengths)[lengths > 0]] = False
    counted = np.zeros(len(lengths), np.int64)
    if len(labels):
        counted[lengths > 0] = np.add.reduceat(learned, (ends - lengths)[lengths > 0], dtype=np.int64)
    return counted


def _largest_id(tokens: NDArray[np.integer], offsets: NDArray[np.integer]) -> tuple[int, int]:
    value, at = -1, 0
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        if int(block.max()) > value:
            value, at = int(block.max()), start + int(block.argmax())
    return value, int(np.searchsorted(offsets, at, side="right")) - 1 if len(tokens) else 0
