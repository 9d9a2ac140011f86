"""Pieces of rows -> the growing files of a token store, which a killed process leaves usable."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_thd._checks import host_ints, instance
from lightning_thd.data.store.arrays import ArrayWriter, load_array

SKIPPED = "skipped.jsonl"
_IGNORE = -100
_BLOCK = 1 << 22  # tokens looked at at a time


class Skipped(NamedTuple):
    """A record that was left out, with its place and the reason."""

    place: str
    reason: str


class Rows(NamedTuple):
    """Token ids, and labels if any, of sequences laid end to end.

    Attributes:
        tokens: ids ``[N]``.
        lengths: int64 ``[n]``, which add up to N.
        labels: int64 ``[N]``, unshifted, -100 where ignored; None where every token is a label.
        skipped: records that stood between them and were left out.
        goes_on: the last sequence goes on with the first of the next rows.
        undo: the sequence that goes on is taken back first.
        more: the piece of the source that these rows are of has more.
    """

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int64]
    labels: NDArray[np.integer] | None = None
    skipped: tuple[Skipped, ...] = ()
    goes_on: bool = False
    undo: bool = False
    more: bool = False


@dataclass(slots=True)
class _Open:
    """A sequence of which more is to come.

    Attributes:
        length: its tokens so far.
        targets: its loss tokens so far.
        largest: the largest id before it, and the sequence that is in.
        first_labels: the store has no labels before it.
    """

    length: int
    targets: int
    largest: tuple[int, int]
    first_labels: bool


def fill_store(place: Path, parts: Callable[[int], Iterable[Rows]], *, max_errors: int | None = None) -> None:
    """Write the files of a store into a folder, resuming where a killed process stopped.

    After every piece a line of ``journal.jsonl`` says how much of each file counts. What a kill left beyond
    the last whole line is cut off.

    Args:
        place: a folder, empty or left by a killed process.
        parts: called with the number of pieces that are there already; gives the others in order.
        max_errors: most records that may have been skipped.

    Raises:
        ValueError: when more were skipped, or nothing is left.
    """
    with _Journal(place) as journal:
        for rows in parts(journal.pieces):
            journal.add(rows, max_errors)
        journal.finish()


class _Journal:
    """The growing files of a store, with a log of how much of each file is complete."""

    def __init__(self, place: Path) -> None:
        self._place, self._file = place, place / "journal.jsonl"
        done = _last_line(self._file)
        self.pieces, self._skipped, self._first = done["pieces"], done["skipped"], done["first"]
        self._largest: tuple[int, int] = (done["largest"][0], done["largest"][1])
        self._open: _Open | None = None
        # The first skipped records stand in the message when there are too many of them.
        self._writers = {"tokens": ArrayWriter(place / "tokens.npy", keep=done["tokens"])}
        self._writers["lengths"] = ArrayWriter(place / "lengths.npy", np.int64, keep=done["sequences"])
        if done["labels"]:
            self._open_labels(done["tokens"], done["sequences"])
        self._list = (place / SKIPPED).open("r+b" if done["listed"] else "wb")
        self._list.truncate(done["listed"])
        self._list.seek(0, os.SEEK_END)
        self._lines = self._file.open("ab")

    def _open_labels(self, tokens: int, sequences: int) -> None:
        self._writers["labels"] = ArrayWriter(self._place / "labels.npy", np.int32, keep=tokens)
        self._writers["loss_tokens"] = ArrayWriter(self._place / "loss_tokens.npy", np.int64, keep=sequences)

    def add(self, rows: Rows, max_errors: int | None) -> None:
        """Write a piece of rows to the files, then a journal line that marks it complete."""
        rows = _checked(rows)
        if rows.undo:
            self._take_back()
        had_none = "labels" not in self._writers
        tokens, sequences = self._writers["tokens"].flush(), self._writers["lengths"].flush()
        refuse_negative(rows.tokens)
        if rows.labels is not None and "labels" not in self._writers:
            if tokens:
                raise ValueError(
                    "The first records have no labels and later ones have. Give all, or none, labels."
                )
            self._open_labels(0, 0)
            if sequences:
                self._writers["loss_tokens"].append(np.zeros(sequences, np.int64))
        if rows.labels is None and not had_none and len(rows.tokens):
            raise ValueError(
                "The first records have labels and later ones have none. Give all, or none, labels."
            )
        largest = self._largest
        self._note_largest(rows, sequences)
        self._append(rows, _Open(0, 0, largest, had_none and "labels" in self._writers))
        self._note_skipped(rows.skipped, max_errors)
        if not rows.more:
            assert self._open is None, "a sequence ends in the piece of the source that it is in"
            self.pieces += 1
            self._write_line()

    def _append(self, rows: Rows, fresh: _Open) -> None:
        """Write tokens, labels and counts of rows, joining the first sequence to the one that goes on."""
        self._writers["tokens"].append(rows.tokens)
        labels = rows.tokens if rows.labels is None else rows.labels
        lengths, targets = rows.lengths.copy(), count_targets(labels, rows.lengths)
        if self._open is not None and len(lengths):
            joins = self._open.length > 0 and lengths[0] > 0 and labels[0] != _IGNORE
            targets[0] += self._open.targets + joins
            lengths[0] += self._open.length
            fresh, self._open = self._open, None
        if rows.goes_on:
            fresh.length, fresh.targets = int(lengths[-1]), int(targets[-1])
            self._open, lengths, targets = fresh, lengths[:-1], targets[:-1]
        self._writers["lengths"].append(lengths)
        if "labels" in self._writers:
            self._writers["labels"].append(labels)
            self._writers["loss_tokens"].append(targets)

    def _take_back(self) -> None:
        """Remove what was written of the sequence that goes on."""
        if self._open is None:
            return
        self._largest = self._open.largest
        for name in ("tokens", "labels"):
            if name in self._writers:
                self._writers[name].truncate(self._writers[name].flush() - self._open.length)
        if self._open.first_labels:
            for name in ("labels", "loss_tokens"):
                self._writers.pop(name).close()
                (self._place / f"{name}.npy").unlink()
        self._open = None

    def _note_largest(self, rows: Rows, before: int) -> None:
        offsets = np.concatenate([[0], np.cumsum(rows.lengths)])
        value, at = largest_id(rows.tokens, offsets)
        if value > self._largest[0]:
            self._largest = value, before + at

    def _note_skipped(self, skipped: tuple[Skipped, ...], max_errors: int | None) -> None:
        for entry in skipped:
            self._list.write(json.dumps(entry._asdict()).encode() + b"\n")
        self._skipped += len(skipped)
        self._first = [*self._first, *(f"{entry.place}: {entry.reason}" for entry in skipped)][:3]
        refuse_more(self._skipped, max_errors, self._first)

    def _write_line(self) -> None:
        self._list.flush()
        counts = {name: writer.flush() for name, writer in self._writers.items()}
        line = {
            "pieces": self.pieces,
            "tokens": counts["tokens"],
            "sequences": counts["lengths"],
            "labels": "labels" in counts,
            "largest": list(self._largest),
            "skipped": self._skipped,
            "listed": self._list.tell(),
            "first": self._first,
        }
        self._lines.write(json.dumps(line).encode() + b"\n")
        self._lines.flush()

    def finish(self) -> None:
        """Convert lengths to offsets and close all files, which completes the store."""
        sequences = self._writers["lengths"].flush()
        if not sequences and self._skipped:
            raise ValueError(
                f"All {self._skipped} records are bad; the first: {self._first[0]} Mend the data."
            )
        self.__exit__()
        offsets = np.zeros(1 + sequences, np.int64)
        np.cumsum(load_array(self._place / "lengths.npy"), out=offsets[1:])
        np.save(self._place / "offsets.npy", offsets)
        np.save(self._place / "largest.npy", np.array(self._largest, np.int64))
        self._file.unlink()
        (self._place / "lengths.npy").unlink()
        if not self._skipped:
            (self._place / SKIPPED).unlink()

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *args: object) -> None:
        for writer in self._writers.values():
            writer.close()
        self._list.close()
        self._lines.close()


def refuse_more(skipped: int, max_errors: int | None, first: list[str]) -> None:
    """Raise ValueError with the first skipped records where there are more than ``max_errors``."""
    if max_errors is not None and skipped > max_errors:
        raise ValueError(
            f"{skipped} records are bad, more than max_errors={max_errors}; the first: {' | '.join(first)} "
            "Mend the data, or raise max_errors."
        )


def _checked(rows: Rows) -> Rows:
    """Return a piece of rows, or raise if its arrays do not belong together."""
    instance(rows, "A piece of a store", Rows, advice="Pass Rows(tokens, lengths[, labels]).")
    tokens, lengths = flat_integers(rows.tokens, "tokens"), host_ints(rows.lengths, "lengths")
    labels = None if rows.labels is None else flat_integers(rows.labels, "labels")
    given = [len(tokens)] if labels is None else [len(tokens), len(labels)]
    if any(n != lengths.sum() for n in given) or (lengths.size and lengths.min() < 0):
        raise ValueError(
            f"A piece of a store has {given} tokens and labels, but lengths that add up to {lengths.sum()}. "
            "Give the length of every sequence, and one label a token or no labels."
        )
    return rows._replace(tokens=tokens, lengths=lengths, labels=labels)


def flat_integers(values: Any, name: str) -> NDArray[np.integer]:
    """Return values as a one-dimensional integer array; keep such an array or memory map as it is.

    Raises:
        TypeError: for what holds no numbers.
        ValueError: for other shapes and types.
    """
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != 1:
        return host_ints(values, name)
    return values


def _last_line(file: Path) -> dict[str, Any]:
    """Return the last complete line of a journal, ignoring one that a kill has torn."""
    zero = {"pieces": 0, "tokens": 0, "sequences": 0, "labels": False, "largest": [-1, 0]}
    state: dict[str, Any] = {**zero, "skipped": 0, "listed": 0, "first": []}
    if not file.is_file():
        return state
    whole, _, torn = file.read_bytes().rpartition(b"\n")
    if torn:
        with file.open("r+b") as opened:
            opened.truncate(len(whole) + 1 if whole else 0)
    return json.loads(whole.splitlines()[-1]) if whole else state


def count_targets(labels: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Count the labels other than -100 of sequences laid end to end, without the first of each.

    Args:
        labels: ints ``[N]``.
        lengths: ints ``[n]``, which add up to N.

    Returns:
        int64 ``[n]``. ``([-100, 7, 8, 9], [3, 1])`` becomes ``[2, 0]``.
    """
    labels, lengths = np.asarray(labels), host_ints(lengths, "lengths")
    if labels.ndim != 1 or lengths.sum() != len(labels) or (lengths.size and lengths.min() < 0):
        raise ValueError(
            f"{labels.size} labels of shape {labels.shape} and {len(lengths)} lengths that add up to "
            f"{lengths.sum()}. Give labels [N] and lengths that add up to N."
        )
    counted = np.zeros(len(labels) + 1, np.int64)
    np.cumsum(labels != _IGNORE, out=counted[1:])
    ends = np.cumsum(lengths)
    firsts = np.minimum(ends - lengths + 1, ends)
    result: NDArray[np.int64] = counted[ends] - counted[firsts]
    return result


def largest_id(tokens: NDArray[np.integer], offsets: NDArray[np.integer]) -> tuple[int, int]:
    """Return the largest id and the sequence it is in; (-1, 0) without tokens."""
    value, at = -1, 0
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        if int(block.max()) > value:
            value, at = int(block.max()), start + int(block.argmax())
    return value, int(np.searchsorted(offsets, at, side="right")) - 1 if len(tokens) else 0


def refuse_negative(tokens: NDArray[np.integer]) -> None:
    """Refuse ids below 0."""
    if tokens.size and tokens.dtype.kind == "i" and tokens.min() < 0:
        raise ValueError(f"Token ids start at 0, got {int(tokens.min())}.")
