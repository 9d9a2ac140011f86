"""Token rows -> one flat, memory-mapped array with offsets: a map-style dataset of any size."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from torch.utils.data import Dataset

_VERSION = 1
_FILES = ("tokens", "offsets", "labels")


class TokenStore(Dataset[dict[str, NDArray[np.integer]]]):
    """Sequences of token ids laid end to end.

    A dataset as ``THDDataModule`` takes it: ``store[i]`` is ``{"input_ids": ids[, "labels": ids]}``, and
    ``lengths`` and ``loss_tokens`` are known without reading a token.

    Args:
        tokens: ids ``[N]``, any unsigned or signed integer dtype.
        offsets: int64 ``[n + 1]``, from 0 to N.
        labels: int ids ``[N]``, unshifted, -100 where ignored; the tokens themselves when absent.
    """

    def __init__(
        self,
        tokens: NDArray[np.integer],
        offsets: NDArray[np.int64],
        labels: NDArray[np.integer] | None = None,
    ) -> None:
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(tokens):
            raise ValueError(
                f"TokenStore got {len(tokens)} tokens but offsets from {offsets[:1]} to {offsets[-1:]}. "
                f"Offsets run from 0 to {len(tokens)}."
            )
        if labels is not None and len(labels) != len(tokens):
            raise ValueError(
                f"TokenStore got {len(tokens)} tokens but {len(labels)} labels. Give one a token."
            )
        self.tokens, self.offsets, self.labels = tokens, offsets, labels

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int] | NDArray[np.integer]]) -> TokenStore:
        """Lay rows of ids end to end, in the smallest unsigned dtype that holds them."""
        arrays = [np.asarray(row) for row in rows]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(row) for row in arrays], out=offsets[1:])
        tokens = np.concatenate(arrays) if arrays else np.empty(0, np.uint16)
        if tokens.size and tokens.dtype.kind == "i" and tokens.min() < 0:
            raise ValueError(f"Token ids start at 0, got {int(tokens.min())}.")
        largest = int(tokens.max()) if tokens.size else 0
        return cls(tokens.astype(np.uint16 if largest < 2**16 else np.uint32, copy=False), offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every sequence, int64 ``[n]``."""
        return np.diff(self.offsets)

    @property
    def loss_tokens(self) -> NDArray[np.int64]:
        """Slots with a target of every sequence, int64 ``[n]``; the first label of each is never one."""
        if self.labels is None:
            return np.maximum(self.lengths - 1, 0)
        counted = np.zeros(len(self.labels) + 1, np.int64)
        np.cumsum(self.labels != -100, out=counted[1:])
        firsts = np.minimum(self.offsets[:-1] + 1, self.offsets[1:])
        return counted[self.offsets[1:]] - counted[firsts]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> dict[str, NDArray[np.integer]]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"Sequence {i} of a TokenStore with {len(self)}.")
        i %= len(self)
        part = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        sample = {"input_ids": self.tokens[part]}
        if self.labels is not None:
            sample["labels"] = self.labels[part]
        return sample

    def save(self, folder: str | Path) -> None:
        """Write ``folder`` in one step: it is either there and whole, or not there."""
        folder = Path(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        arrays = {name: getattr(self, name) for name in _FILES if getattr(self, name) is not None}
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array)
        meta = {"version": _VERSION, "bytes": {n: (partial / f"{n}.npy").stat().st_size for n in arrays}}
        (partial / "meta.json").write_text(json.dumps(meta))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)

    @classmethod
    def open(cls, folder: str | Path) -> TokenStore:
        """Map a folder written by ``save`` into memory.

        Raises:
            ValueError: when a file is missing or has another size than was written.
        """
        folder = Path(folder)
        try:
            meta = json.loads((folder / "meta.json").read_text())
            sizes = {name: (folder / f"{name}.npy").stat().st_size for name in meta["bytes"]}
            if meta["version"] != _VERSION or sizes != meta["bytes"]:
                raise ValueError(f"expected {meta['bytes']} bytes in version {_VERSION}, found {sizes}")
            arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in sizes}
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise ValueError(
                f"The token store {folder} cannot be read ({err}). Delete the folder; it is built anew."
            ) from err
        return cls(**arrays)


def cached_store(
    key: dict[str, Any], build: Callable[[], TokenStore], *, cache_dir: str | Path | None = None
) -> TokenStore:
    """Open the store that was built from the same key before, or build, save and open it.

    Args:
        key: everything the result depends on, JSON-serialisable.
        build: makes the store; called when nothing, or something unreadable, is cached.
        cache_dir: where stores are kept; ``$XDG_CACHE_HOME/lightning_thd`` by default.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]
    folder = cache_folder(cache_dir) / f"tokens-{digest}"
    if folder.exists():
        try:
            return TokenStore.open(folder)
        except ValueError as err:
            rank_zero_warn(f"{err} It is built anew now.")
    build().save(folder)
    return TokenStore.open(folder)


def cache_folder(cache_dir: str | Path | None) -> Path:
    """Return ``cache_dir``, or the user's cache folder for this package."""
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_thd"
