"""Token rows -> one flat, memory-mapped array with offsets: a map-style dataset of any size."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_thd._checks import host_ints, whole_number
from lightning_thd.data.store.arrays import (
    cache_folder,
    cached_folder,
    new_folder,
    open_arrays,
    reopen,
    save_arrays,
    seal,
)
from lightning_thd.data.store.journal import (
    SKIPPED,
    Rows,
    count_targets,
    fill_store,
    flat_integers,
    largest_id,
    refuse_more,
    refuse_negative,
)
from lightning_thd.data.store.lock import build_once, told

_VERSION = 3
_BLOCK = 1 << 22  # labels counted at a time


class TokenStore(Dataset[dict[str, NDArray[np.integer]]]):
    """Sequences of token ids laid end to end.

    A dataset as ``THDDataModule`` takes it: ``store[i]`` is ``{"input_ids": ids[, "labels": ids]}``, and
    ``lengths`` and ``loss_tokens`` are known without reading a token.

    Args:
        tokens: ids ``[N]``, any unsigned or signed integer dtype.
        offsets: int64 ``[n + 1]``, from 0 to N.
        labels: int ids ``[N]``, unshifted, -100 where ignored; the tokens themselves when absent.
        loss_tokens: ints ``[n]``; counted when absent.
        largest: the largest id and the sequence it is in, ints ``[2]``; looked for when absent.
    """

    def __init__(
        self,
        tokens: NDArray[np.integer],
        offsets: NDArray[np.int64],
        labels: NDArray[np.integer] | None = None,
        loss_tokens: NDArray[np.integer] | None = None,
        largest: NDArray[np.integer] | None = None,
    ) -> None:
        tokens = flat_integers(tokens, "tokens")
        offsets = flat_integers(offsets, "offsets").astype(np.int64, copy=False)
        labels = None if labels is None else flat_integers(labels, "labels")
        loss_tokens = None if loss_tokens is None else flat_integers(loss_tokens, "loss_tokens")
        if loss_tokens is not None and len(loss_tokens) != len(offsets) - 1:
            raise ValueError(
                f"TokenStore got {len(offsets) - 1} sequences but {len(loss_tokens)} loss_tokens. "
                "Give one a sequence, or leave them out."
            )
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(tokens):
            raise ValueError(
                f"TokenStore got {len(tokens)} tokens but offsets from {offsets[:1]} to {offsets[-1:]}. "
                f"Offsets run from 0 to {len(tokens)}."
            )
        # What is mapped was written by ``save`` or ``write_store``, and may be longer than memory.
        if not isinstance(offsets, np.memmap) and (falls := np.diff(offsets) < 0).any():
            raise ValueError(
                f"TokenStore got offsets that fall after entry {int(falls.argmax())}. Give where each "
                "sequence begins, in order."
            )
        if labels is not None and len(labels) != len(tokens):
            raise ValueError(
                f"TokenStore got {len(tokens)} tokens but {len(labels)} labels. Give one a token."
            )
        self.tokens, self.offsets, self.labels = tokens, offsets, labels
        self._loss_tokens, self._largest = loss_tokens, largest
        self._folder: Path | None = None
        self.fingerprint: str | None = None

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int] | NDArray[np.integer]]) -> TokenStore:
        """Lay rows of ids end to end in memory, in the smallest unsigned dtype that holds them."""
        arrays = [host_ints(row, f"row {i}") for i, row in enumerate(rows)]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(row) for row in arrays], out=offsets[1:])
        tokens = np.concatenate(arrays) if arrays else np.empty(0, np.uint16)
        refuse_negative(tokens)
        largest = int(tokens.max()) if tokens.size else 0
        return cls(tokens.astype(np.uint16 if largest < 2**16 else np.uint32, copy=False), offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of every sequence, int64 ``[n]``."""
        return np.diff(self.offsets)

    @property
    def loss_tokens(self) -> NDArray[np.integer]:
        """Return the loss tokens of every sequence, ints ``[n]``; a first label never counts."""
        if self._loss_tokens is None:
            self._loss_tokens = (
                np.maximum(self.lengths - 1, 0)
                if self.labels is None
                else _count_targets(self.labels, self.offsets)
            )
        return self._loss_tokens

    @property
    def largest(self) -> tuple[int, int]:
        """Return the largest id and the sequence it is in; (-1, 0) for a store without tokens."""
        if self._largest is None:
            self._largest = np.array(largest_id(self.tokens, self.offsets))
        return int(self._largest[0]), int(self._largest[1])

    @property
    def skipped(self) -> int:
        """Return how many records were left out of the store; its ``skipped.jsonl`` lists them."""
        file = self._folder / SKIPPED if self._folder is not None else None
        return len(file.read_text().splitlines()) if file is not None and file.is_file() else 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> dict[str, NDArray[np.integer]]:
        if not isinstance(i, int | np.integer):
            raise TypeError(f"A TokenStore was asked for {i!r:.40}. Pass the number of a sequence.")
        if not -len(self) <= i < len(self):
            raise IndexError(f"Sequence {i} of a TokenStore with {len(self)}. Pass a number below that.")
        i %= len(self)
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        sample = {"input_ids": self.tokens[part]}
        if self.labels is not None:
            sample["labels"] = self.labels[part]
        return sample

    def save(self, folder: str | Path) -> None:
        """Write ``folder`` atomically: afterwards it is there and whole, or not there."""
        arrays = {"tokens": self.tokens, "offsets": self.offsets, "largest": np.array(self.largest)}
        if self.labels is not None:
            arrays |= {"labels": self.labels, "loss_tokens": self.loss_tokens}
        save_arrays(folder, arrays, version=_VERSION)

    @classmethod
    def open(cls, folder: str | Path) -> TokenStore:
        """Map a folder written by ``save`` or ``write_store`` into memory.

        Raises:
            ValueError: when a file is missing, or has another size or other edges than was written.
        """
        return cls._from_arrays(folder, open_arrays(folder, version=_VERSION))

    @classmethod
    def _from_arrays(cls, folder: str | Path, arrays: Mapping[str, NDArray[Any]]) -> TokenStore:
        try:
            store = cls(**arrays)
        except (TypeError, ValueError) as err:
            raise ValueError(f"The folder {folder} is no token store ({err}). Delete it.") from err
        store._folder = Path(folder)
        # meta.json holds sizes and hashes of all files, so that it stands for the content.
        store.fingerprint = hashlib.sha256((store._folder / "meta.json").read_bytes()).hexdigest()
        return store

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._folder is None:
            return super().__reduce__()
        return type(self).open, (self._folder,)  # a worker maps the files itself and gets no copy of them


def _count_targets(labels: NDArray[np.integer], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the labels other than -100 of each sequence, without its first, in blocks of sequences."""
    counts = np.empty(len(offsets) - 1, np.int64)
    first = 0
    while first < len(counts):
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + _BLOCK, side="right")) - 1)
        counts[first:last] = count_targets(
            labels[offsets[first] : offsets[last]], np.diff(offsets[first : last + 1])
        )
        first = last
    return counts


def write_store(folder: str | Path, parts: Iterable[Rows]) -> None:
    """Write a store piece by piece; memory holds one piece.

    Args:
        folder: as for ``TokenStore.save``; a failure leaves nothing behind.
        parts: pieces in order, all with labels or all without.
    """
    with new_folder(folder, version=_VERSION) as partial:
        fill_store(partial, lambda first: iter(parts))


def cached_store(
    key: dict[str, Any] | None,
    parts: Callable[[int], Iterable[Rows]],
    *,
    cache_dir: str | Path | None = None,
    max_errors: int | None = None,
) -> TokenStore:
    """Open the store that was built from the same key before, or build it on disk and open it.

    One process builds it and others that want it wait; one that is killed is taken up where it stopped.

    Args:
        key: everything the result depends on, JSON-serialisable; None keeps the store in a temporary folder
            of the cache that goes with the object.
        parts: makes the pieces of the store from a number on; called when nothing, or something unreadable,
            is cached.
        cache_dir: where stores are kept; ``$XDG_CACHE_HOME/lightning_thd`` by default.
        max_errors: most records that may have been skipped.

    Raises:
        CacheError: when the cache cannot be written.
        ValueError: when too many records were skipped.
    """
    if max_errors is not None:
        whole_number(max_errors, "max_errors", advice="None takes any number.")

    def build(place: Path) -> None:
        fill_store(place, parts, max_errors=max_errors)
        seal(place, version=_VERSION)

    if key is None:
        parent = cache_folder(cache_dir)
        with told(parent / "unnamed"):
            parent.mkdir(parents=True, exist_ok=True)
            unnamed = Path(tempfile.mkdtemp(dir=parent, prefix="unnamed-"))
            try:
                (unnamed / "store").mkdir()
                build(unnamed / "store")
            except BaseException:
                shutil.rmtree(unnamed, ignore_errors=True)
                raise
        store = TokenStore.open(unnamed / "store")
        weakref.finalize(store, _remove, unnamed, os.getpid())
        return store
    folder = cached_folder("tokens", key, cache_dir)
    arrays = reopen(folder, version=_VERSION)
    if arrays is None:
        build_once(folder, build, resume=True)
        return TokenStore.open(folder)
    store = TokenStore._from_arrays(folder, arrays)
    if store.skipped:  # it may have been built with another bound
        with (folder / SKIPPED).open() as file:
            entries = [json.loads(line) for line in islice(file, 3)]
        refuse_more(store.skipped, max_errors, [f"{entry['place']}: {entry['reason']}" for entry in entries])
    return store


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker that ends must not take the files away
        shutil.rmtree(folder, ignore_errors=True)
