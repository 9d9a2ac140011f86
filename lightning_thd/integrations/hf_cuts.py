"""TRL's ``max_length`` -> the sequences and pairs that it shortens or leaves out, counted and reported.

The default of TRL is 1,024 tokens, whatever the capacity of packs. An explicit 1,024 cannot be told from it.
So the value holds, and what it costs is a warning if the value is the default, and a line of the log if not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numpy.typing import NDArray

from lightning_thd._checks import whole_number
from lightning_thd._imports import require
from lightning_thd._private import private_of
from lightning_thd.batch.keys import IGNORE_INDEX, PER_TOKEN
from lightning_thd.integrations.hf_data import MASKS, TrainerBase, is_streamed, with_labels
from lightning_thd.warnings import DataWarning, warn

_PER_TOKEN = frozenset({*PER_TOKEN, *MASKS, "weights"})
_WHOLE = "Pass max_length=None to keep them whole"
_OF_PACKS = (
    f"{_WHOLE}: capacity is the only bound then, and data_kwargs={{'oversize': ...}} says what to do with "
    "sequences above it."
)
_CONVERSATIONS = ("messages", "conversations")  # the keys under which TRL looks for them


class CutMixin(TrainerBase):  # type: ignore[misc]
    """Cuts the sequences of TRL's ``SFTTrainer`` at ``max_length``, in TRL's place, and reports how many."""

    def _refuse_uncounted_cuts(self, args: Any) -> None:
        """Refuse a ``max_length`` that is no length, or that TRL would apply where nothing counts."""
        if not any(base.__name__ == "SFTTrainer" for base in type(self).__mro__):
            return
        default = 1_024  # TRL makes an SFTConfig if it gets none
        most = getattr(args, "max_length", default)
        if most is not None:
            whole_number(most, f"{type(args).__name__}: max_length", least=1, advice="None cuts nothing.")
            private_of(super(), "trl.SFTTrainer._prepare_dataset")

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, *further: Any, **named: Any
    ) -> Any:
        """Prepare a data set as TRL does, but cut it here. TRL 1.0 would only cut rows that it pads."""
        given = {**dict(zip(("packing", "formatting_func", "dataset_name"), further, strict=False)), **named}
        name = str(given.get("dataset_name", "dataset"))
        if given.get("formatting_func") is None and name == "train":
            _report_learned(name, dataset, args)

        without_cut = copy.copy(args)
        without_cut.max_length = None
        prepared = super()._prepare_dataset(dataset, processing_class, without_cut, *further, **named)
        if args.max_length is None:
            return prepared
        if is_streamed(prepared):
            return _cut_stream(name, prepared, args)
        return _cut_dataset(name, prepared, args)


def _report_learned(name: str, dataset: Any, args: Any) -> None:
    """Say that TRL's default learns the user's words too, if the rows of a data set are conversations."""
    first = next(iter(dataset), None)
    if args.assistant_only_loss or not isinstance(first, Mapping) or "input_ids" in first:
        return
    if any(isinstance(first.get(key), list) for key in _CONVERSATIONS):
        rank_zero_info(
            f"{name}: every token of the conversations is learned, the user's words too, which is TRL's "
            f"default. {type(args).__name__}(assistant_only_loss=True) learns only the assistant's answers, "
            "and so does a path in place of the dataset."
        )


def _cut_dataset(name: str, dataset: Any, args: Any) -> Any:
    """Return a ``datasets.Dataset`` with at most ``max_length`` tokens in a sequence; report the changes."""
    most = args.max_length
    lengths = _lengths(dataset, "input_ids")
    is_cut = lengths > most
    if not is_cut.any():
        return dataset

    state: Any = require("accelerate", feature="packed_trainer").PartialState()
    with state.main_process_first():  # which writes the cache of datasets, for the others to read
        cut = dataset.map(
            _cut_row,
            fn_kwargs={"most": most, "keeps_end": _keeps_end(args)},
            num_proc=args.dataset_num_proc,
            desc=f"Cutting {name} dataset",
        )

    numbers = np.flatnonzero(is_cut)
    learns = [_learns(row) for row in cut.select(numbers)]
    gone = numbers[~np.array(learns)]
    if len(gone):
        cut = cut.select(np.setdiff1d(np.arange(len(cut)), gone))

    lost = int((lengths[is_cut] - most).sum())
    message = f"{name}: {len(numbers):,} of {len(lengths):,} sequences are longer than {_option(args)}"
    message += f" which cut {lost:,} tokens from them"
    if len(gone):
        message += f" and left out {len(gone):,}, in which no token to learn remained"
    _report(f"{message}. {_OF_PACKS}", is_default=_is_default(args))
    return cut


def _cut_stream(name: str, dataset: Any, args: Any) -> Any:
    """Return a stream whose sequences have at most ``max_length`` tokens; report the first that is longer."""
    first_cut = _FirstCut(name, args)
    cut = dataset.map(partial(first_cut.cut, most=args.max_length, keeps_end=_keeps_end(args)))
    return cut.filter(partial(_is_kept, most=args.max_length))


class _FirstCut:
    """Cuts the rows of a stream, and reports the first that is longer than ``max_length``."""

    def __init__(self, name: str, args: Any) -> None:
        self._message = f"{name}: a sequence is longer than {_option(args)} which cuts it and all others of "
        self._message += f"the stream that are longer. {_OF_PACKS}"
        self._is_default = _is_default(args)
        self._reported = False

    def cut(self, row: Mapping[str, Any], *, most: int, keeps_end: bool) -> Mapping[str, Any]:
        if len(row["input_ids"]) > most and not self._reported:
            self._reported = True
            _report(self._message, is_default=self._is_default)
        return {**row, **_cut_row(row, most=most, keeps_end=keeps_end)}


def _cut_row(row: Mapping[str, Any], *, most: int, keeps_end: bool) -> dict[str, Any]:
    """Return the columns of a row that hold a value for each token, with at most ``most`` of them."""
    kept = slice(-most, None) if keeps_end else slice(None, most)
    length = len(row["input_ids"])
    columns = {name: row[name] for name in _PER_TOKEN if name in row and np.ndim(row[name])}
    return {name: values[kept] for name, values in columns.items() if len(values) == length}


def _learns(row: Mapping[str, Any]) -> bool:
    """Return whether the loss counts any token of a prepared row."""
    labels = with_labels(row).get("labels")
    return labels is None or bool((np.asarray(labels) != IGNORE_INDEX).any())


def _is_kept(row: Mapping[str, Any], *, most: int) -> bool:
    """Return whether a row of a stream was short enough to be kept whole, or has a token to learn."""
    return len(row["input_ids"]) < most or _learns(row)


def report_cut_pairs(name: str, given: Any, prepared: Any, args: Any) -> None:
    """Report the pairs of a data set that TRL's ``max_length`` cuts or has left out.

    Args:
        name: "train" or "eval", or the name of one of several evaluation sets.
        given: the data set that the user passed.
        prepared: what TRL made of it; DPO's has ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``.
        args: the trainer's arguments. Nothing is reported if ``max_length`` is None, or if there is none.
    """
    if getattr(args, "max_length", None) is None:
        return
    columns = getattr(prepared, "column_names", None) or ()
    if is_streamed(prepared) or "chosen_ids" not in columns:
        rank_zero_info(f"{name}: pairs may be longer than {_option(args)} which cuts them. {_WHOLE}.")
        return

    gone = len(given) - len(prepared)
    num_cut = 0
    if "prompt_ids" in columns:  # DPO cuts pairs in its batches; rewards leave whole pairs out
        answers = np.maximum(_lengths(prepared, "chosen_ids"), _lengths(prepared, "rejected_ids"))
        num_cut = int((_lengths(prepared, "prompt_ids") + answers > args.max_length).sum())
    if not gone and not num_cut:
        return

    changes = []
    if num_cut:
        changes.append(f"cuts {num_cut:,}")
    if gone:
        changes.append(f"left out {gone:,}")
    message = f"{name}: {num_cut + gone:,} of {len(given):,} pairs are longer than {_option(args)} which "
    _report(f"{message}{' and '.join(changes)} of them. {_WHOLE}.", is_default=_is_default(args))


def _lengths(dataset: Any, name: str) -> NDArray[np.int64]:
    """Return the lengths of the lists in a column of a ``datasets.Dataset``, in its order."""
    compute: Any = require("pyarrow.compute", feature="max_length of TRL's trainers")
    tables = dataset.select_columns(name).with_format("arrow").iter(batch_size=10_000)
    parts = [compute.fill_null(compute.list_value_length(table[name]), 0).to_numpy() for table in tables]
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _keeps_end(args: Any) -> bool:
    """Return whether sequences lose their beginnings and not their ends, an option of TRL's."""
    return getattr(args, "truncation_mode", "keep_start") == "keep_end"


def _is_default(args: Any) -> bool:
    """Return whether ``max_length`` has the value that TRL gives it."""
    return bool(args.max_length == type(args).__dataclass_fields__["max_length"].default)


def _option(args: Any) -> str:
    """Return the option with its value, for a message that goes on with ``which``."""
    option = f"{type(args).__name__}(max_length={args.max_length}),"
    return f"{option} TRL's default," if _is_default(args) else option


def _report(message: str, *, is_default: bool) -> None:
    """Warn of what nobody chose; print what somebody chose."""
    if is_default:
        warn(message, DataWarning)
    else:
        rank_zero_info(message)
