"""A map-style dataset -> length, loss tokens and weights of every sequence, checked and counted once."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from lightning_thd._checks import host_ints
from lightning_thd._workers import begin_worker, own_generator
from lightning_thd.batch.examples import PARTS
from lightning_thd.batch.keys import COLLATED, IGNORE_INDEX, PER_TOKEN, inputs
from lightning_thd.batch.media import COLUMNS, ExtrasCost, declared, sizes_of
from lightning_thd.batch.samples import (
    UnusedKeyError,
    check_sample,
    is_scalar,
    refuse_restart,
    refuse_shifted,
    sample_weights,
    whole_weight,
    with_label,
)
from lightning_thd.data.store.cache import cached_arrays
from lightning_thd.data.store.columns import arrow_table, count_columns, without_pixels
from lightning_thd.data.store.tokens import TokenStore
from lightning_thd.packing import Spans
from lightning_thd.warnings import DataWarning, warn

Empty = Literal["error", "drop"]
OnError = Literal["raise", "skip"]

_VERSION = 6  # the version of cached counts
_SHIFT_ROWS = 32  # sequences whose labels are compared with their ids, to find shifted labels
_HASHED_ROWS = 8  # rows hashed to recognise the data on resume; few, because images are slow to read
_NO_SIZES = np.empty((0, COLUMNS), np.int64)
_ADVICE = "Fix the data, or set on_error='skip'."


def keeps_rows(dataset: object) -> bool:
    """Return whether the class of the dataset promises that rows stay unchanged when others are read."""
    return hasattr(type(dataset), "keeps_rows") and bool(dataset.keeps_rows)  # type: ignore[attr-defined]


class MapDataset(Protocol):
    """The interface of a dataset: ``len()``, and ``[i]`` gives ``{"input_ids": ints[, "labels": ints]}``."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """The files of a dataset's rows, which lie end to end; without files, rows have only their number."""

    # The name of each file, "" for rows of another source, or a function that names a row by its number.
    names: tuple[str | Callable[[int], str], ...] = ()
    ends: tuple[int, ...] = ()  # the row behind the last of each file

    @classmethod
    def of_files(cls, names: Sequence[str], rows: Sequence[int]) -> Places:
        """Return the places of files that have ``rows`` rows each."""
        return cls(names=tuple(names), ends=tuple(np.cumsum(rows).tolist()))

    def name(self, i: int, kind: str = "Sequence") -> str:
        """Return ``"a.parquet, row 3"`` for a row of a file, and ``"Sequence 3"`` for any other."""
        file = bisect_right(self.ends, i)
        if file == len(self.ends) or not self.names[file]:
            return f"{kind} {i}"
        name = self.names[file]
        first = self.ends[file - 1] if file else 0
        return name(i - first) if callable(name) else f"{name}, row {i - first}"


def checked_row(sample: Mapping[str, Any], place: str, *, empty: bool = False) -> dict[str, Any]:
    """Return ``check_sample`` of a row; a list or column with a null in it is refused with its position."""
    try:
        return check_sample(sample, place, empty=empty)
    except (TypeError, ValueError) as err:
        for name in ("input_ids", "labels", "weights"):
            position = _first_null(sample.get(name))
            if position is not None:
                count = len(sample[name])
                raise ValueError(
                    f"{place} has a null under {name!r}, at position {position} of {count}. Remove it."
                ) from err
        raise


def _first_null(values: Any) -> int | None:
    """Return the position of the first null; in an array of floats that is a NaN, see ``ColumnRows``."""
    if isinstance(values, list | tuple):
        return next((k for k, value in enumerate(values) if value is None), None)
    if isinstance(values, np.ndarray) and values.dtype.kind == "f" and values.ndim == 1:
        nulls = np.flatnonzero(np.isnan(values))
        return int(nulls[0]) if len(nulls) else None
    return None


def mapping_or_text(sample: Any, i: int) -> Mapping[str, Any]:
    """Return a row that is a dict or text, or raise TypeError naming the row and its type."""
    if isinstance(sample, Mapping | str):
        return sample  # type: ignore[return-value]  # text is tokenised later
    raise TypeError(
        f"Row {i} of the dataset is a {type(sample).__name__}, wanted a dict of input_ids, or text. "
        "Write {'input_ids': ids} for a row of ids."
    )


def row_to_count(dataset: MapDataset, i: int) -> Mapping[str, Any]:
    """Return a row for counting; a dataset with ``measured(i)`` gives it without the pixels of images."""
    read = getattr(dataset, "measured", dataset.__getitem__)
    return mapping_or_text(read(i), i)


def refuse_second_sequence(sample: Mapping[str, Any], i: int) -> None:
    """Refuse a row of several sequences: row 0 marks no boundaries, so each row counts as one sequence."""
    refuse_restart(
        sample,
        f"Sequence {i}",
        "Row 0 has no position_ids, so each row counts as one sequence. Give position_ids to all rows or "
        "to none, or set packed='off' to train on rows as they are.",
    )


def _as_array(name: str, value: Any) -> Any:
    """Return lists, and tensors with a value per token, as arrays; leave any other value as it is."""
    if isinstance(value, Tensor) and name in PER_TOKEN:
        return value.detach().cpu().numpy()
    return np.asarray(value) if isinstance(value, list | tuple | range) else value


def _copied(value: Any) -> Any:
    """Copy a value of a row, because a dataset may reuse one buffer for all rows."""
    if isinstance(value, Tensor):
        return value.clone()
    return np.array(value) if isinstance(value, np.ndarray) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceIndex:
    """The length, number of loss tokens and weight of every sequence, from which plans are made."""

    lengths: NDArray[np.integer]  # tokens of every sequence, ints ``[N]``
    loss_tokens: NDArray[np.integer]  # tokens that have a target, ints ``[N]``; the first label never counts
    # Indices of rows that are known to carry images, videos or other inputs beside tokens; sorted.
    media: NDArray[np.integer] = field(default_factory=lambda: np.empty(0, np.int64))
    # The summed token weights of each sequence, and its own weight; fp64 ``[N]``, empty without weights.
    weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    sequence_weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    # The largest token id, and the row it is in; [-1, 0] if unknown.
    largest: NDArray[np.integer] = field(default_factory=lambda: np.array([-1, 0]))
    # The largest label, and the row it is in; [-1, 0] if unknown, or without labels.
    largest_label: NDArray[np.integer] = field(default_factory=lambda: np.array([-1, 0]))
    # Sorted indices of the rows that were skipped, whose entry in ``lengths`` is 0.
    bad: NDArray[np.integer] = field(default_factory=lambda: np.empty(0, np.int64))
    # Patches and pixels of images, ``[N, 4]``: see ``batch.media.COLUMNS``; empty for text, or if unknown.
    sizes: NDArray[np.integer] = field(default_factory=lambda: _NO_SIZES)
    # Whether ``sizes`` come from the images themselves; if so, every row that is read is compared with them.
    sizes_measured: bool = True
    checked: bool = True  # every row was checked when it was counted, so batches do not check it again
    places: Places = field(default_factory=Places)  # where rows come from, for errors

    def check_vocabulary(self, vocab_size: int | None, name: str) -> None:
        """Raise if the largest id or label that was counted is outside a model's vocabulary."""
        if vocab_size is None:
            return
        for what, counted in (("token id", self.largest), ("label", self.largest_label)):
            value, row = counted.tolist()
            if value >= vocab_size:
                raise ValueError(
                    f"{self.places.name(row)} of the {name} data has the {what} {value}, but the model's "
                    f"vocabulary has {vocab_size} entries. Use the model's tokenizer, or pass vocab_size=."
                )

    def samples(self, dataset: MapDataset, spans: Spans, *, one_each: bool = False) -> list[dict[str, Any]]:
        """Read the pieces of sequences that spans name; copy them unless the dataset keeps its rows.

        Args:
            dataset: the dataset of which this is the index.
            spans: the rows, with the first token of each piece and the token behind it.
            one_each: refuse rows whose positions mark several sequences.

        Raises:
            ValueError: a row differs from what was counted, or marks several sequences.
            RuntimeError: the dataset raised StopIteration, which would silently end the epoch.
        """
        keeps = keeps_rows(dataset)
        samples = []
        columns = (spans.index, spans.start, spans.stop, spans.continued)
        for i, start, stop, continued in zip(*(column.tolist() for column in columns), strict=True):
            try:
                row: Any = dataset[i]
            except StopIteration as err:
                raise RuntimeError(
                    f"Sequence {i}: the dataset raised StopIteration. Fix its data[i]."
                ) from err
            if type(row) is not dict:
                row = mapping_or_text(row, i)
            # Lists are converted here and not in ``_as_array``, because that saves a call for each of them.
            sample = {k: np.asarray(x) if type(x) is list else _as_array(k, x) for k, x in row.items()}
            if not self.checked:
                sample = checked_row(sample, self.places.name(i))
            elif "label" in sample or "labels" in sample:
                sample = with_label(sample, self.places.name(i))

            length = len(sample["input_ids"])
            # The full comparison is left out for the usual row: ids only, each of them learned, as counted.
            has_more = len(sample) > 1 or len(self.weights) or len(self.sizes)
            if has_more or length != self.lengths[i] or self.loss_tokens[i] != max(0, length - 1):
                self._check_counts(sample, i, length)
            if stop - start != length:
                self._cut(sample, i, start, stop, continued)
            if not keeps:  # arrays are copied here and not in ``_copied``, again to save a call
                sample = {k: np.array(x) if type(x) is np.ndarray else _copied(x) for k, x in sample.items()}
            if one_each and "position_ids" in sample:
                refuse_second_sequence(sample, i)
            samples.append(sample)
        return samples

    def _check_counts(self, sample: dict[str, Any], i: int, length: int) -> None:
        """Raise if a row differs from what was counted, because plan and loss scale would be wrong."""
        if length != self.lengths[i]:
            raise _changed_error(i, "tokens", length, int(self.lengths[i]))

        if self.sizes_measured and (len(self.sizes) or not COLLATED.issuperset(sample)):
            counted_sizes = tuple(self.sizes[i].tolist()) if len(self.sizes) else (0,) * COLUMNS
            sizes = sizes_of(sample)
            if sizes != counted_sizes:
                raise _changed_error(i, "patches and pixels of images", sizes, counted_sizes)

        if "weights" in sample and not len(self.weights):
            raise ValueError(f"Sequence {i} has weights, but none were counted: the first sequence has none.")
        if "labels" in sample or len(self.weights) or self.loss_tokens[i] != max(0, length - 1):
            self._check_targets(sample, i)

    def _check_targets(self, sample: dict[str, Any], i: int) -> None:
        """Raise if targets or weights differ from those counted, because the loss scale would be wrong."""
        labels = np.asarray(sample.get("labels", sample["input_ids"]))
        loss_tokens = int(np.count_nonzero(labels[1:] != IGNORE_INDEX))
        if loss_tokens != self.loss_tokens[i]:
            raise _changed_error(i, "loss tokens", loss_tokens, int(self.loss_tokens[i]))

        if not len(self.weights):
            return
        total, of_sequence = whole_weight(sample, f"Sequence {i}")
        counted = float(self.weights[i]), float(self.sequence_weights[i])
        # The sum may round differently if the dataset gives another float dtype than it did for counting.
        if abs(total - counted[0]) > 1e-6 * counted[0] or of_sequence != counted[1]:
            raise _changed_error(i, "as the sum and the whole of its weights", (total, of_sequence), counted)

    def _cut(self, sample: dict[str, Any], i: int, start: int, stop: int, continued: bool) -> None:
        """Cut a sample to a piece; if the sequence continues, keep the next token's label and weight."""
        length = len(sample["input_ids"])
        refuse_cut(sample, i, length)
        if "label" in sample and not _is_truncated(start, continued):
            raise ValueError(f"Sequence {i} ({length} tokens) has a label: set oversize='truncate'.")

        if continued:
            sample["next_label"] = int(sample.get("labels", sample["input_ids"])[stop])
        if not _is_truncated(start, continued):
            sample["whole_weight"] = float(self._summed_weights[i])
        if np.ndim(sample.get("weights", 1)):  # one weight per token, and not one for the sequence
            weights = sample["weights"]
            sample["weights"] = weights[start:stop]
            if continued:
                sample["next_weight"] = float(weights[stop])
        for name in PER_TOKEN:
            if name in sample:
                sample[name] = np.asarray(sample[name])[..., start:stop]

    @property
    def _summed_weights(self) -> NDArray[Any]:
        """Return the summed weight of each sequence's loss tokens; without weights, their number."""
        return self.weights if len(self.weights) else self.loss_tokens

    def loss_weights(self, dataset: MapDataset, spans: Spans) -> NDArray[np.float64]:
        """Return float64 ``[2, S]``: weight of a span's loss tokens, and its share of the sequence weight."""
        rows = spans.index
        of_row = self._summed_weights[rows].astype(np.float64)
        sequence_weight = self.sequence_weights[rows] if len(self.weights) else np.ones(len(rows))
        cut = np.flatnonzero(spans.lengths != self.lengths[rows])
        if not len(cut):
            return np.array([of_row, sequence_weight * (of_row > 0)])

        of_span = of_row.copy()
        for k in cut:
            start = int(spans.start[k])
            continued = bool(spans.continued[k])
            of_span[k] = self._weight_of_piece(dataset, int(rows[k]), start, int(spans.stop[k]), continued)
            if _is_truncated(start, continued):
                of_row[k] = of_span[k]  # the rest is dropped, so this piece is the whole sequence
        share = of_span / np.where(of_row > 0, of_row, np.inf)  # 0 / inf is the 0 of a row without weight
        return np.array([of_span, sequence_weight * share])

    def _weight_of_piece(self, dataset: MapDataset, i: int, start: int, stop: int, continued: bool) -> float:
        """Return the summed weight of the loss tokens of a piece; the row is read only if they differ."""
        if not len(self.weights) and self.loss_tokens[i] == self.lengths[i] - 1:  # each token is learned
            return float(stop - start - (not continued))
        if not self.loss_tokens[i]:
            return 0.0

        sample = with_label(dataset[i], f"Sequence {i}")
        # The label of a token is the target of the token before it.
        targets = slice(start + 1, stop + continued)
        labels = np.asarray(sample.get("labels", sample["input_ids"]))[targets]
        weights, _ = sample_weights(sample, int(self.lengths[i]), f"Sequence {i}")
        return float(weights[targets][labels != IGNORE_INDEX].sum(dtype=np.float64))


def _changed_error(i: int, what: str, read: object, counted: object) -> ValueError:
    return ValueError(
        f"Sequence {i} has {read} {what}, but {counted} were counted. Correct the dataset's `lengths` or "
        "`loss_tokens`. If rows change at every reading (random masks or crops), pass an IterableDataset. "
        "If data changed under the same fingerprint, delete the cache."
    )


def _is_truncated(start: int, continued: bool) -> bool:
    """Return whether the rest of a cut sequence is dropped, rather than placed in other pieces."""
    return start == 0 and not continued


def content_of_rows(dataset: MapDataset, index: SequenceIndex) -> str | None:
    """Hash ids and labels of a few rows; None if one is unreadable, or the first differs when read again."""
    rows = np.unique(np.linspace(0, len(dataset) - 1, _HASHED_ROWS, dtype=np.int64))
    rows = np.setdiff1d(rows, index.bad)

    def digest(i: int) -> str:
        sample = dataset[i]
        parts = [
            np.asarray(sample[name], np.int64).tobytes() for name in ("input_ids", "labels") if name in sample
        ]
        return hashlib.sha256(b"|".join(parts)).hexdigest()

    try:
        digests = [digest(int(i)) for i in rows]
        first_again = digest(int(rows[0])) if len(rows) else ""
    except Exception:  # any error of the user's dataset; reading a batch raises it again
        return None
    if not digests or digests[0] != first_again:
        return None
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def refuse_cut(sample: Mapping[str, Any], i: int, length: int) -> None:
    """Refuse to cut an example, or a sequence with images or other inputs, which would lose a part."""
    if PARTS in sample:
        raise ValueError(
            f"Sequence {i} is a query with its documents, {length} tokens, more than fit a pack. It cannot "
            "be cut, because its last documents would be lost. Cut texts in the tokenizer (tokenizer=lambda "
            "text: ids(text)[:512]), raise capacity, or set oversize='drop' or 'own_pack'."
        )
    if names := inputs(sample):
        raise ValueError(
            f"Sequence {i} has {length} tokens, more than fit a pack, and carries {', '.join(names)}, so it "
            "cannot be cut. Set oversize='drop' or 'own_pack', or raise capacity."
        )


def refuse_cuts(index: SequenceIndex, dataset: MapDataset, limit: int) -> None:
    """Refuse, before the first step, examples and sequences with images that have above ``limit`` tokens."""
    above = np.flatnonzero(index.lengths > limit)
    if len(above):
        first = int(above[0])
        sample = dataset[first]
        if PARTS in sample:  # then all rows of the dataset are examples
            refuse_cut(sample, first, int(index.lengths[first]))
    too_long = index.media[index.lengths[index.media] > limit]
    if len(too_long):
        first = int(too_long[0])
        refuse_cut(dataset[first], first, int(index.lengths[first]))


def build_index(
    dataset: MapDataset,
    *,
    empty: Empty = "error",
    on_error: OnError = "raise",
    max_errors: int | None = None,
    num_workers: int = 0,
    progress: bool = False,
    key: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    one_each: bool = False,
    extras_cost: ExtrasCost | None = None,
    places: Places | None = None,
) -> SequenceIndex:
    """Count the tokens and loss tokens of every sequence, and find rows that cannot be trained on.

    Args:
        dataset: rows of ids; Arrow columns, and datasets with ``lengths``, are not read row by row.
        empty: what to do with rows without tokens; ``"drop"`` leaves them to the plan, which skips them.
        on_error: what to do with bad rows.
        max_errors: the largest number of bad rows with ``on_error="skip"``; None sets no bound.
        num_workers: processes that read rows.
        progress: whether to show a progress bar.
        key: identifies the content, so that counts are cached; None if it is unknown.
        cache_dir: the folder of the cache; None is the user's.
        one_each: whether to refuse rows whose ``position_ids`` mark several sequences.
        extras_cost: a user's function that says what the images of a row cost.
        places: the files of the rows, which errors name.

    Raises:
        ValueError: the dataset is empty, a row cannot be trained on, or too many cannot.
    """
    if len(dataset) == 0:
        raise ValueError("The dataset is empty. Give at least one sequence.")

    places = places or Places()
    counted = _counts_without_reading(dataset, on_error, places) if extras_cost is None else None
    sizes_measured = extras_cost is None and (counted is None or "sizes" in counted)
    if counted is None:
        cache_key = None
        if key is not None and extras_cost is None:  # nothing identifies what a user's function returns
            cache_key = {**key, "sequences": len(dataset), "on_error": on_error}
        rows = without_pixels(dataset) if extras_cost is None else dataset
        read = partial(read_rows, rows, on_error, num_workers, progress, one_each, extras_cost, places)
        counted = cached_arrays("index", cache_key, read, version=_VERSION, cache_dir=cache_dir)
    index = SequenceIndex(
        **counted, sizes_measured=sizes_measured, checked=_are_all_checked(dataset), places=places
    )

    _check_bad(dataset, index, max_errors)
    is_empty = index.lengths == 0
    is_empty[index.bad] = False
    if empty == "error" and is_empty.any():
        raise ValueError(f"{places.name(int(np.argmax(is_empty)))} has no tokens. Set empty='drop'.")
    _refuse_shifted(dataset, index)
    return index


def _are_all_checked(dataset: MapDataset) -> bool:
    """Return whether counting checks all values of every row, so that batches need not check them again."""
    if isinstance(dataset, TokenStore) and dataset.trusted:
        return True
    if getattr(dataset, "lengths", None) is not None and "weights" not in dataset[0]:
        return False  # the rows are not read for counting
    if arrow_table(dataset) is None:
        return True
    return not set(dataset[0]) - {"input_ids", "labels", "attention_mask"}  # these columns are counted


def _refuse_shifted(dataset: MapDataset, index: SequenceIndex) -> None:
    """Raise if the labels of the first good rows are those of the next tokens already."""
    head = np.arange(min(len(dataset), _SHIFT_ROWS + len(index.bad)))
    good = np.setdiff1d(head, index.bad)

    def rows() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for i in good[:_SHIFT_ROWS].tolist():
            sample = row_to_count(dataset, i)
            if "labels" not in sample or is_scalar(sample["labels"]):
                return
            yield np.asarray(sample["input_ids"]), np.asarray(sample["labels"])

    refuse_shifted(rows(), "The first sequences")


def _check_bad(dataset: MapDataset, index: SequenceIndex, max_errors: int | None) -> None:
    """Warn of bad rows, with the faults of the first; raise if there are too many of them."""
    if not len(index.bad):
        return

    first = " | ".join(_fault_of(dataset, int(i), index.places) for i in index.bad[:3])
    if max_errors is not None and len(index.bad) > max_errors:
        raise ValueError(
            f"{len(index.bad)} rows are bad, more than max_errors={max_errors}; the first: {first}"
        )
    if len(index.bad) == len(index.lengths):
        raise ValueError(f"All {len(index.bad)} rows are bad; the first: {first} Fix the data.")
    warn(f"{len(index.bad)} bad rows are left out; the first: {first}", DataWarning)


def _fault_of(dataset: MapDataset, i: int, places: Places) -> str:
    """Read a bad row again and return what is wrong with it."""
    place = places.name(i, "Row")
    try:
        row = row_to_count(dataset, i)
    except Exception as err:  # any error of the user's dataset
        return f"{place}: {type(err).__name__}: {err}"
    try:
        checked_row(row, place, empty=True)
    except (TypeError, ValueError) as err:
        return str(err)
    return f"{place} differs from the rows before in having labels, or documents of a query."


def _counts_without_reading(
    dataset: MapDataset, on_error: OnError, places: Places
) -> dict[str, NDArray[Any]] | None:
    """Return counts from the dataset's ``lengths`` or Arrow columns; None if every row must be read."""
    if getattr(dataset, "lengths", None) is not None and "weights" not in dataset[0]:
        return _counts_of_lengths(dataset)

    counted = count_columns(dataset)
    if counted is None or "weights" in dataset[0] or inputs(dataset[0]):
        return None
    bad = counted["bad"]
    if len(bad) and on_error == "raise":
        fault = _fault_of(dataset, int(bad[0]), places)
        raise ValueError(f"{fault} ({len(bad)} of {len(dataset)} rows are bad.) {_ADVICE}")
    return {**counted, "sizes": _NO_SIZES}


def _counts_of_lengths(dataset: Any) -> dict[str, NDArray[Any]] | None:
    """Return the counts of a dataset with ``lengths``; None if it has labels, but no ``loss_tokens``."""
    lengths = host_ints(dataset.lengths, "The dataset's `lengths`")
    if len(lengths) != len(dataset):
        raise ValueError(f"The dataset has {len(dataset)} sequences but {len(lengths)} `lengths`.")

    loss_tokens = getattr(dataset, "loss_tokens", None)
    if loss_tokens is not None:
        loss_tokens = host_ints(loss_tokens, "`loss_tokens`")
    elif "labels" in dataset[0]:
        return None
    else:
        loss_tokens = np.maximum(lengths - 1, 0)

    counts = {"lengths": lengths, "loss_tokens": loss_tokens}
    if isinstance(dataset, TokenStore):
        counts |= {"largest": np.array(dataset.largest), "largest_label": np.array(dataset.largest_label)}
        counts["sizes"] = _NO_SIZES
    return counts


class _Counted(NamedTuple):
    """What counting finds in a row; the sizes of images come behind, see ``batch.media.COLUMNS``."""

    length: float
    loss_tokens: float
    has_media: float
    weight: float  # summed over the loss tokens
    sequence_weight: float
    has_weights: float
    largest: float  # id; -1 without tokens
    largest_label: float  # -1 without labels
    is_bad: float
    has_labels: float
    has_documents: float  # whether it is a query with its documents


_NUM_FACTS = len(_Counted._fields)
_BAD_ROW = _Counted(
    length=0,
    loss_tokens=0,
    has_media=False,
    weight=0,
    sequence_weight=1.0,
    has_weights=False,
    largest=-1,
    largest_label=-1,
    is_bad=True,
    has_labels=False,
    has_documents=False,
)


class _CountedRows(TorchDataset[tuple[float, ...]]):
    """A dataset -> for each row the numbers of ``_Counted``, and the sizes of its images."""

    def __init__(
        self,
        dataset: MapDataset,
        on_error: OnError,
        one_each: bool,
        extras_cost: ExtrasCost | None,
        places: Places,
    ) -> None:
        self._dataset = dataset
        self._places = places
        self._on_error = on_error
        self._one_each = one_each
        self._extras_cost = extras_cost

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> tuple[float, ...]:
        try:
            return self._measure(i)
        except Exception as err:  # any error of the user's dataset; _fault_of reports it
            if self._on_error == "raise":
                if isinstance(err, StopIteration):  # it would end the count silently
                    raise RuntimeError(f"Sequence {i}: the dataset raised StopIteration. Fix it.") from err
                raise
            no_sizes = (0,) * COLUMNS
            return (*_BAD_ROW, *no_sizes)

    def _measure(self, i: int) -> tuple[float, ...]:
        place = self._places.name(i)
        row: Any = row_to_count(self._dataset, i)
        if isinstance(row, str):
            raise ValueError(f"{place} is text; wanted a dict with 'input_ids'.")
        try:
            sample = checked_row(row, place, empty=True)
        except UnusedKeyError:
            raise
        except (TypeError, ValueError) as err:
            raise ValueError(f"{err} {_ADVICE}") from err
        if self._one_each:
            refuse_second_sequence(sample, i)

        ids = sample["input_ids"]
        loss_tokens = int(np.count_nonzero(sample.get("labels", ids)[1:] != IGNORE_INDEX))
        has_weights = "weights" in sample
        weight = float(loss_tokens)
        sequence_weight = 1.0
        if has_weights:
            weight, sequence_weight = whole_weight(sample, place)
        sizes = sizes_of(sample)
        if self._extras_cost is not None:
            sizes = declared(self._extras_cost, row, place)

        counted = _Counted(
            length=len(ids),
            loss_tokens=loss_tokens,
            has_media=bool(inputs(sample)),
            weight=weight,
            sequence_weight=sequence_weight,
            has_weights=has_weights,
            largest=int(ids.max()) if len(ids) else -1,
            largest_label=int(sample["labels"].max()) if "labels" in sample and len(ids) else -1,
            is_bad=False,
            has_labels="labels" in sample,
            has_documents=PARTS in sample,
        )
        return (*counted, *sizes)


def _refuse_odd(
    name: str,
    has: NDArray[np.float64],
    bad: NDArray[np.float64],
    lengths: NDArray[np.float64],
    on_error: OnError,
    places: Places,
) -> None:
    """Refuse rows without labels (or documents) among rows with them, or the reverse; or mark them as bad."""
    good = np.flatnonzero((bad == 0) & (lengths > 0))
    if not len(good):
        return
    odd = good[has[good] != has[good[0]]]
    if not len(odd):
        return

    if on_error == "raise":
        first, other = (f"no {name}", name) if has[good[0]] else (name, f"no {name}")
        raise ValueError(
            f"{places.name(int(odd[0]))} has {first}, but the sequences before have {other} ({len(odd):,} of "
            f"{len(has):,} differ). Give {name} to all sequences of a source, or to none. {_ADVICE}"
        )
    bad[odd] = 1
    lengths[odd] = 0


def read_rows(
    dataset: MapDataset,
    on_error: OnError,
    num_workers: int,
    progress: bool,
    one_each: bool,
    extras_cost: ExtrasCost | None,
    places: Places,
) -> dict[str, NDArray[Any]]:
    """Read every row of a dataset once and return the arrays of a ``SequenceIndex``."""
    loader = DataLoader(
        _CountedRows(dataset, on_error, one_each, extras_cost, places),
        batch_size=256,
        num_workers=num_workers,
        collate_fn=np.asarray,
        worker_init_fn=begin_worker,
        generator=own_generator(),
    )

    # Whole numbers are exact in float64 up to 2**53, so one table holds all columns.
    table = np.empty((len(dataset), _NUM_FACTS + COLUMNS), np.float64)
    done = 0
    with tqdm(total=len(table), desc="Counting tokens", disable=not progress) as bar:
        for rows in loader:
            table[done : done + len(rows)] = rows
            done += len(rows)
            bar.update(len(rows))

    columns: Any = _Counted(*table[:, :_NUM_FACTS].T)
    sizes = table[:, _NUM_FACTS:]
    # A row without weights among weighted ones is no error: it has the weight 1.
    of_rows = {"documents": columns.has_documents, "labels": columns.has_labels}
    for what, has in of_rows.items():
        _refuse_odd(what, has, columns.is_bad, columns.length, on_error, places)

    is_weighted = columns.has_weights.any()
    row_of_largest = int(columns.largest.argmax())
    row_of_label = int(columns.largest_label.argmax())
    return {
        "lengths": columns.length.astype(np.int64),
        "loss_tokens": columns.loss_tokens.astype(np.int64),
        "media": np.flatnonzero(columns.has_media),
        "weights": columns.weight.copy() if is_weighted else np.empty(0),
        "sequence_weights": columns.sequence_weight.copy() if is_weighted else np.empty(0),
        "largest": np.array([int(columns.largest[row_of_largest]), row_of_largest]),
        "largest_label": np.array([int(columns.largest_label[row_of_label]), row_of_label]),
        "bad": np.flatnonzero(columns.is_bad),
        "sizes": sizes.astype(np.int64) if sizes.any() else _NO_SIZES,
    }
