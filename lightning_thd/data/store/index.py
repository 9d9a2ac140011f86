"""A map-style dataset -> length, loss tokens and weights of every sequence, checked and counted once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from lightning_thd._checks import host_ints
from lightning_thd._workers import begin_worker, own_generator
from lightning_thd.batch.keys import COLLATED, IGNORE_INDEX, PER_TOKEN, inputs
from lightning_thd.batch.media import COLUMNS, ExtrasCost, declared, sizes_of
from lightning_thd.batch.samples import (
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

_VERSION = 5
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


def check_row(sample: Any, i: int) -> Mapping[str, Any]:
    """Return a row that is a dict or text, or raise TypeError naming the row and its type."""
    if isinstance(sample, Mapping | str):
        return sample  # type: ignore[return-value]  # text is tokenised later
    raise TypeError(
        f"Row {i} of the dataset is a {type(sample).__name__}, wanted a dict of input_ids, or text."
    )


def counted_row(dataset: MapDataset, i: int) -> Mapping[str, Any]:
    """Return a row for counting; a dataset with ``measured(i)`` gives it without the pixels of images."""
    return check_row(getattr(dataset, "measured", dataset.__getitem__)(i), i)


def refuse_second_sequence(sample: Mapping[str, Any], i: int) -> None:
    """Refuse a row of several sequences: row 0 marks no boundaries, so each row counts as one sequence."""
    refuse_restart(
        sample,
        f"Sequence {i}",
        "Row 0 has no position_ids, so each row counts as one sequence. Give position_ids to all rows or "
        "to none, or set packed='off' to train on rows as they are.",
    )


def _as_array(name: str, value: Any) -> Any:
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
    # Sorted indices of the rows that were skipped, whose entry in ``lengths`` is 0.
    bad: NDArray[np.integer] = field(default_factory=lambda: np.empty(0, np.int64))
    # Patches and pixels of images, ``[N, 4]``: see ``batch.media.COLUMNS``; empty for text, or if unknown.
    sizes: NDArray[np.integer] = field(default_factory=lambda: _NO_SIZES)
    # Whether ``sizes`` come from the images themselves; if so, every row that is read is compared with them.
    sizes_measured: bool = True
    checked: bool = True  # every row was checked when it was counted, so batches do not check it again

    def check_vocabulary(self, vocab_size: int | None, name: str) -> None:
        """Raise if the largest id that was counted is outside a model's vocabulary."""
        largest, row = self.largest.tolist()
        if vocab_size is not None and largest >= vocab_size:
            raise ValueError(
                f"Sequence {row} of the {name} data has the token id {largest}, but the model's vocabulary "
                f"has {vocab_size} entries. Use the model's tokenizer, or pass vocab_size=."
            )

    def sample(
        self, dataset: MapDataset, i: int, start: int, stop: int, continued: bool = False, keeps: bool = False
    ) -> dict[str, Any]:
        """Read tokens ``start`` to ``stop`` of sequence ``i``; copy them unless the dataset keeps rows."""
        given: Any = dataset[i]
        if type(given) is not dict:
            given = check_row(given, i)
        sample = {k: np.asarray(x) if type(x) is list else _as_array(k, x) for k, x in given.items()}
        if not self.checked:
            sample = check_sample(sample, f"Sequence {i}")
        elif "label" in sample or "labels" in sample:
            sample = with_label(sample, f"Sequence {i}")
        found, counted = len(sample["input_ids"]), int(self.lengths[i])
        if found != counted:
            raise _changed_error(i, "tokens", found, counted)
        if self.sizes_measured and (len(self.sizes) or not COLLATED.issuperset(sample)):
            counted_sizes = tuple(self.sizes[i].tolist()) if len(self.sizes) else (0,) * COLUMNS
            if (sizes := sizes_of(sample)) != counted_sizes:
                raise _changed_error(i, "patches and pixels of images", sizes, counted_sizes)
        if "weights" in sample and not len(self.weights):
            raise ValueError(f"Sequence {i} has weights, but none were counted: the first sequence has none.")
        if "labels" in sample or len(self.weights) or self.loss_tokens[i] != max(0, found - 1):
            self._check_targets(sample, i)
        if stop - start != found:
            self._cut(sample, i, start, stop, continued)
        if keeps:
            return sample
        return {k: np.array(x) if type(x) is np.ndarray else _copied(x) for k, x in sample.items()}

    def _cut(self, sample: dict[str, Any], i: int, start: int, stop: int, continued: bool) -> None:
        """Cut a sample to a piece; if the sequence continues, keep the next token's label and weight."""
        found = len(sample["input_ids"])
        refuse_cut(sample, i, found)
        if "label" in sample and not _is_truncated(start, continued):
            raise ValueError(f"Sequence {i} ({found} tokens) has a label: set oversize='truncate'.")
        if continued:
            sample["next_label"] = int(sample.get("labels", sample["input_ids"])[stop])
        if not _is_truncated(start, continued):
            sample["whole_weight"] = float((self.weights if len(self.weights) else self.loss_tokens)[i])
        if np.ndim(sample.get("weights", 1)):
            weights = sample["weights"]
            sample["weights"] = weights[start:stop]
            if continued:
                sample["next_weight"] = float(weights[stop])
        for name in PER_TOKEN:
            if name in sample:
                sample[name] = np.asarray(sample[name])[..., start:stop]

    def _check_targets(self, sample: dict[str, Any], i: int) -> None:
        """Raise if targets or weights differ from those counted, because the loss scale would be wrong."""
        labels = np.asarray(sample.get("labels", sample["input_ids"]))
        if (found := int(np.count_nonzero(labels[1:] != IGNORE_INDEX))) != self.loss_tokens[i]:
            raise _changed_error(i, "loss tokens", found, int(self.loss_tokens[i]))
        if len(self.weights):
            total, own = whole_weight(sample, f"Sequence {i}")
            counted = float(self.weights[i]), float(self.sequence_weights[i])
            if abs(total - counted[0]) > 1e-6 * counted[0] or own != counted[1]:
                raise _changed_error(i, "as the sum and the whole of its weights", (total, own), counted)

    def loss_weights(self, dataset: MapDataset, spans: Spans) -> NDArray[np.float64]:
        """Return float64 ``[2, S]``: weight of a span's loss tokens, and its share of the sequence weight."""
        at = spans.index
        of_sequence = (self.weights if len(self.weights) else self.loss_tokens)[at].astype(np.float64)
        sequence = self.sequence_weights[at] if len(self.weights) else np.ones(len(at))
        cut = np.flatnonzero(spans.lengths != self.lengths[at])
        if not len(cut):
            return np.array([of_sequence, sequence * (of_sequence > 0)])
        of_span = of_sequence.copy()
        for k in cut:  # the weights inside a cut sequence are read, unless all are 1 or all are 0
            i, start, stop = int(at[k]), int(spans.start[k]), int(spans.stop[k])
            continued = bool(spans.continued[k])
            if not len(self.weights) and self.loss_tokens[i] == self.lengths[i] - 1:
                of_span[k] = stop - start - (not continued)
            elif not self.loss_tokens[i]:
                of_span[k] = 0.0
            else:
                sample, targets = with_label(dataset[i], f"Sequence {i}"), slice(start + 1, stop + continued)
                counts = np.asarray(sample.get("labels", sample["input_ids"]))[targets] != IGNORE_INDEX
                weights, _ = sample_weights(sample, int(self.lengths[i]), f"Sequence {i}")
                of_span[k] = weights[targets][counts].sum(dtype=np.float64)
            if _is_truncated(start, continued):
                of_sequence[k] = of_span[k]
        share = of_span / np.where(of_sequence > 0, of_sequence, np.inf)
        return np.array([of_span, sequence * share])


def _changed_error(i: int, what: str, found: object, counted: object) -> ValueError:
    return ValueError(
        f"Sequence {i} has {found} {what}, but {counted} were counted. Correct the dataset's `lengths` or "
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
        found = [digest(int(i)) for i in rows]
        again = digest(int(rows[0])) if len(rows) else ""
    except Exception:  # any error of the user's dataset; reading a batch raises it again
        return None
    if not found or found[0] != again:
        return None
    return hashlib.sha256("".join(found).encode()).hexdigest()[:16]


def refuse_cut(sample: Mapping[str, Any], i: int, length: int) -> None:
    """Refuse to cut a sequence with images or other inputs, whose placeholder tokens could be lost."""
    if names := inputs(sample):
        raise ValueError(
            f"Sequence {i} has {length} tokens, more than fit a pack, and carries {', '.join(names)}, so it "
            "cannot be cut. Set oversize='drop' or 'own_pack', or raise capacity."
        )


def refuse_cuts(index: SequenceIndex, dataset: MapDataset, limit: int) -> None:
    """Refuse, before the first step, sequences above ``limit`` tokens with images or other inputs."""
    long = index.media[index.lengths[index.media] > limit]
    if len(long):
        refuse_cut(dataset[int(long[0])], int(long[0]), int(index.lengths[long[0]]))


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
) -> SequenceIndex:
    """Count the tokens and loss tokens of every sequence, and find rows that cannot be trained on."""
    if len(dataset) == 0:
        raise ValueError("The dataset is empty. Give at least one sequence.")
    counted = _known_counts(dataset, on_error) if extras_cost is None else None
    sizes_measured = extras_cost is None and (counted is None or "sizes" in counted)
    if counted is None:
        cache_key = None
        if key is not None and extras_cost is None:
            cache_key = {**key, "sequences": len(dataset), "on_error": on_error}
        rows = without_pixels(dataset) if extras_cost is None else dataset
        read = partial(read_rows, rows, on_error, num_workers, progress, one_each, extras_cost)
        counted = cached_arrays("index", cache_key, read, version=_VERSION, cache_dir=cache_dir)
    # Counting checks every row, unless the dataset gave lengths, or Arrow has columns beside ``plain``.
    checked = isinstance(dataset, TokenStore) and dataset.trusted
    if not checked and (getattr(dataset, "lengths", None) is None or "weights" in dataset[0]):
        plain = {"input_ids", "labels", "attention_mask"}
        checked = arrow_table(dataset) is None or not set(dataset[0]) - plain
    index = SequenceIndex(**counted, sizes_measured=sizes_measured, checked=checked)
    _check_bad(dataset, index, max_errors)
    is_empty = index.lengths == 0
    is_empty[index.bad] = False
    if empty == "error" and is_empty.any():
        raise ValueError(f"Sequence {int(np.argmax(is_empty))} has no tokens. Set empty='drop'.")
    _refuse_shifted(dataset, index)
    return index


def _refuse_shifted(dataset: MapDataset, index: SequenceIndex) -> None:
    good = np.setdiff1d(np.arange(min(len(dataset), _SHIFT_ROWS + len(index.bad))), index.bad)

    def rows() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for i in good[:_SHIFT_ROWS].tolist():
            sample = counted_row(dataset, i)
            if "labels" not in sample or is_scalar(sample["labels"]):
                return
            yield np.asarray(sample["input_ids"]), np.asarray(sample["labels"])

    refuse_shifted(rows(), "The first sequences")


def _check_bad(dataset: MapDataset, index: SequenceIndex, max_errors: int | None) -> None:
    if not len(index.bad):
        return
    first = " | ".join(_fault_of(dataset, int(i)) for i in index.bad[:3])
    if max_errors is not None and len(index.bad) > max_errors:
        raise ValueError(
            f"{len(index.bad)} rows are bad, more than max_errors={max_errors}; the first: {first}"
        )
    if len(index.bad) == len(index.lengths):
        raise ValueError(f"All {len(index.bad)} rows are bad; the first: {first} Fix the data.")
    warn(f"{len(index.bad)} bad rows are left out; the first: {first}", DataWarning)


def _fault_of(dataset: MapDataset, i: int) -> str:
    try:
        row = counted_row(dataset, i)
    except Exception as err:  # any error of the user's dataset
        return f"Row {i}: {type(err).__name__}: {err}"
    try:
        check_sample(row, f"Row {i}", empty=True)
    except (TypeError, ValueError) as err:
        return str(err)
    return f"Row {i} differs from the rows before in having labels."


def _known_counts(dataset: MapDataset, on_error: OnError) -> dict[str, NDArray[Any]] | None:
    """Return counts from the dataset's ``lengths`` or Arrow columns; None if every row must be read."""
    given = getattr(dataset, "lengths", None)
    if given is not None and "weights" not in dataset[0]:
        lengths = host_ints(given, "The dataset's `lengths`")
        if len(lengths) != len(dataset):
            raise ValueError(f"The dataset has {len(dataset)} sequences but {len(lengths)} `lengths`.")
        loss_tokens = getattr(dataset, "loss_tokens", None)
        if loss_tokens is None and "labels" in dataset[0]:
            return None
        loss = np.maximum(lengths - 1, 0) if loss_tokens is None else host_ints(loss_tokens, "`loss_tokens`")
        known = {"lengths": lengths, "loss_tokens": loss}
        if isinstance(dataset, TokenStore):
            known |= {"largest": np.array(dataset.largest), "sizes": _NO_SIZES}
        return known
    counted = count_columns(dataset)
    if counted is None or "weights" in dataset[0] or inputs(dataset[0]):
        return None
    bad = counted["bad"]
    if len(bad) and on_error == "raise":
        fault = _fault_of(dataset, int(bad[0]))
        raise ValueError(f"{fault} ({len(bad)} of {len(dataset)} rows are bad.) {_ADVICE}")
    return {**counted, "sizes": _NO_SIZES}


class _CountedRows(TorchDataset[tuple[float, ...]]):
    def __init__(
        self, dataset: MapDataset, on_error: OnError, one_each: bool, extras_cost: ExtrasCost | None
    ) -> None:
        self._dataset, self._on_error, self._one_each = dataset, on_error, one_each
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
            return (0, 0, False, 0, 1.0, False, -1, True, False, *(0,) * COLUMNS)

    def _measure(self, i: int) -> tuple[float, ...]:
        given: Any = counted_row(self._dataset, i)
        if isinstance(given, str):
            raise ValueError(f"Sequence {i} is text; wanted a dict with 'input_ids'.")
        try:
            sample = check_sample(given, f"Sequence {i}", empty=True)
        except (TypeError, ValueError) as err:
            raise ValueError(f"{err} {_ADVICE}") from err
        if self._one_each:
            refuse_second_sequence(sample, i)
        ids = sample["input_ids"]
        largest = int(ids.max()) if len(ids) else -1
        loss_tokens = int(np.count_nonzero(sample.get("labels", ids)[1:] != IGNORE_INDEX))
        weights = (loss_tokens, 1.0) if "weights" not in sample else whole_weight(sample, f"Sequence {i}")
        media = bool(inputs(sample))
        sizes = sizes_of(sample)
        if self._extras_cost is not None:
            sizes = declared(self._extras_cost, given, f"Sequence {i}")
        given_targets = "weights" in sample, "labels" in sample
        return (
            len(ids),
            loss_tokens,
            media,
            *weights,
            given_targets[0],
            largest,
            False,
            given_targets[1],
            *sizes,
        )


def _refuse_odd(
    name: str,
    has: NDArray[np.float64],
    bad: NDArray[np.float64],
    lengths: NDArray[np.float64],
    on_error: OnError,
) -> None:
    """Refuse rows without labels among rows with them, or the reverse; or mark them as bad."""
    good = np.flatnonzero((bad == 0) & (lengths > 0))
    odd = good[has[good] != has[good[0]]] if len(good) else good
    if not len(odd):
        return
    if on_error == "raise":
        first, other = (f"no {name}", name) if has[good[0]] else (name, f"no {name}")
        raise ValueError(
            f"Sequence {odd[0]} has {first}, but the sequences before have {other} ({len(odd):,} of "
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
) -> dict[str, NDArray[Any]]:
    """Read every row of a dataset once and return the arrays of a ``SequenceIndex``."""
    loader = DataLoader(
        _CountedRows(dataset, on_error, one_each, extras_cost),
        batch_size=256,
        num_workers=num_workers,
        collate_fn=np.asarray,
        worker_init_fn=begin_worker,
        generator=own_generator(),
    )
    counted, done = np.empty((len(dataset), 9 + COLUMNS), np.float64), 0
    with tqdm(total=len(counted), desc="Counting tokens", disable=not progress) as bar:
        for rows in loader:
            counted[done : done + len(rows)] = rows
            done += len(rows)
            bar.update(len(rows))
    lengths, loss_tokens, media, weights, sequence_weights, weighted, largest, bad, labelled = counted[
        :, :9
    ].T
    _refuse_odd("labels", labelled, bad, lengths, on_error)  # a row without weights has the weight 1
    sizes, at = counted[:, 9:], int(largest.argmax())
    return {
        "lengths": lengths.astype(np.int64),
        "loss_tokens": loss_tokens.astype(np.int64),
        "media": np.flatnonzero(media),
        "weights": weights.copy() if weighted.any() else np.empty(0),
        "sequence_weights": sequence_weights.copy() if weighted.any() else np.empty(0),
        "largest": np.array([int(largest[at]), at]),
        "bad": np.flatnonzero(bad),
        "sizes": sizes.astype(np.int64) if sizes.any() else _NO_SIZES,
    }
