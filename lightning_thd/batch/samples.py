"""A user's sample -> its checked arrays, or an error that names the sample and the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_thd._checks import as_tensor, described, host_ints, whole_number
from lightning_thd.batch.examples import PARTS, check_parts, is_example, sample_of_ids
from lightning_thd.batch.keys import IGNORE_INDEX, KEYS, TYPES, inputs, refuse_boundaries, refuse_keys

MOST_ID = 2**31 - 1  # no vocabulary has a larger id
_SHIFTED_FROM = 8  # fewer labels than this may equal the next id, and not their own id, by chance


class UnusedKeyError(ValueError):
    """Raised for a key that no model takes: a fault of all rows, which skipping bad rows does not mend."""


def check_sample(sample: Any, name: str, *, empty: bool = False, piece: bool = False) -> dict[str, Any]:
    """Check a sample, or a ``piece`` of one, and return its rows as arrays; errors begin with ``name``."""
    if not isinstance(sample, Mapping):
        raise TypeError(f"{name} is {described(sample)}; wanted a dict. Pass {{'input_ids': [5, 6, 7]}}.")
    if "input_ids" not in sample and is_example(sample):
        sample = sample_of_ids(sample, name)
    made = sorted(key for key in sample if KEYS.get(key) == "made")
    if made:
        raise ValueError(f"{name} carries {', '.join(made)}, which the batch makes. Leave them out.")
    refuse_keys(sample)
    refuse_null_targets(sample, name)

    ids = token_row(sample, "input_ids", name, empty=empty)
    _check_ids(ids, name, "token id")
    checked = with_label({**sample, "input_ids": ids}, name)
    if "labels" in checked:
        labels = per_token_row(sample, "labels", len(ids), name)
        _check_ids(labels, name, "label")
        refuse_wrapped(labels, name)
        checked["labels"] = labels
    if "attention_mask" in sample:
        check_attention_mask(sample, len(ids), name)
    if "position_ids" in sample:
        checked["position_ids"] = position_row(sample, len(ids), name)
    for key in TYPES:
        if key in sample:
            checked[key] = per_token_row(sample, key, len(ids), name)

    if PARTS in sample:
        checked[PARTS] = check_parts(sample[PARTS], len(ids), name)
    if "weights" in sample:
        sample_weights(sample, len(ids), name)
    if "next_label" in sample:
        if not piece:
            raise ValueError(f"{name} carries 'next_label', which only THDBatch.collate reads. Drop the key.")
        checked["next_label"] = _next_label(sample["next_label"], name)

    refuse_boundaries(sample, name)
    for key in inputs(sample):
        checked[key] = _extra_input(sample[key], key, name)
    return checked


def _next_label(value: Any, name: str) -> int:
    """Return the target of a piece's last token, an id or -100, or raise."""
    label = whole_number(value, f"{name}: next_label", least=None, most=MOST_ID, advice="One id, or -100.")
    if label < 0 and label != IGNORE_INDEX:
        raise ValueError(f"{name} has next_label={label}. Give the id of the next token, or -100.")
    return label


def _extra_input(value: Any, key: str, name: str) -> Tensor:
    """Return an extra model input as a tensor, or raise."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = as_tensor(value)
    if not isinstance(value, Tensor) or value.ndim == 0:
        raise UnusedKeyError(
            f"{name} carries {key!r} as {type(value).__name__}. Extras are tensors or arrays with at "
            "least one axis, concatenated along the first. If the model does not need it, leave the key "
            f"out of the rows, as dataset.remove_columns({key!r}) does for a Hugging Face dataset."
        )
    return value


def refuse_null_targets(sample: Mapping[str, Any], name: str) -> None:
    """Raise for labels or weights that are null: without them, every token would be learned alike."""
    for key in ("labels", "weights"):
        if key in sample and sample[key] is None:
            raise ValueError(f"{name} has null {key}. Give them to all rows, or leave the key out of all.")


def token_row(
    sample: Mapping[str, Any], key: str, name: str, *, empty: bool = False
) -> NDArray[np.integer[Any]]:
    """Read one row of integers ``[n]`` of a sample; ids must not be empty, except with ``empty``."""
    if key not in sample:
        raise ValueError(f"{name} has the keys {sorted(sample)} but no {key!r}. Give it one.")
    value = sample[key]
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"{name}: {key} is a masked array, whose mask would be lost. Give its compressed() values."
        )
    if isinstance(value, list | tuple) and bool in set(map(type, value)):  # numpy would make them 0 and 1
        raise ValueError(f"{name}: {key} holds True or False among its numbers. Give integers.")

    if isinstance(value, Tensor) and value.dtype in (torch.uint8, torch.uint16) and not value.is_meta:
        value = value.cpu().numpy()  # keep the dtype, because a wrapped -100 is recognised by it
    is_int_array = isinstance(value, np.ndarray) and value.dtype.kind in ("i", "u")
    if not is_int_array or (value.dtype.kind == "u" and value.itemsize == 8):  # uint64 may exceed int64
        value = host_ints(value, f"{name}: {key}", ndim=None, advice="Give one row of integers.")

    row: NDArray[np.integer[Any]] = value
    if row.ndim != 1:
        raise ValueError(f"{name}: {key} has shape {row.shape}. Give one row of integers.")
    if key == "input_ids" and not row.size and not empty:
        raise ValueError(f"{name} has no tokens. Remove it, or let THDDataModule do so with empty='drop'.")
    return row


def per_token_row(sample: Mapping[str, Any], key: str, length: int, name: str) -> NDArray[np.integer[Any]]:
    """Read a sample's row of integers, which must have one value per token."""
    row = token_row(sample, key, name)
    if len(row) != length:
        advice = "unshifted, with -100 for tokens to ignore" if key == "labels" else "or drop the key"
        raise ValueError(
            f"{name} has {length} input_ids but {len(row)} {key}. Give one value per token, {advice}."
        )
    return row


def _check_ids(row: NDArray[np.integer[Any]], name: str, kind: Literal["token id", "label"]) -> None:
    """Raise for values that are no token ids; labels may also be -100."""
    if not row.size or (row.max() <= MOST_ID and row.min() >= 0):
        return
    odd = (row > MOST_ID) | (row < 0)
    advice = f"Ids run from 0 to {MOST_ID}; -100 belongs in labels, not in input_ids."
    if kind == "label":
        odd &= row != IGNORE_INDEX
        advice = "Labels are ids, or -100 for tokens to ignore."
    if odd.any():
        raise ValueError(f"{name} has the {kind} {int(row[odd][0])}. {advice}")


def refuse_wrapped(labels: NDArray[np.integer[Any]], name: str) -> None:
    """Raise for unsigned labels that contain a wrapped -100: 156 in 8 bits, 65436 in 16 bits."""
    if wrapped(labels).any():
        kind = labels.dtype
        raise ValueError(
            f"{name} has the label {2 ** (8 * kind.itemsize) + IGNORE_INDEX} in {kind}, which is what -100 "
            "becomes in a type without a sign. Give labels in a signed type, such as int32."
        )


def wrapped(labels: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Return which labels are a -100 that an unsigned type has wrapped."""
    kind = labels.dtype
    if kind.kind != "u":
        return np.zeros(labels.shape, bool)
    return np.asarray(labels == 2 ** (8 * kind.itemsize) + IGNORE_INDEX)


def check_attention_mask(sample: Mapping[str, Any], length: int, name: str) -> None:
    """Raise for an attention mask that hides tokens, because packing would train on them."""
    try:
        mask = np.asarray(sample["attention_mask"])
    except (TypeError, ValueError, RuntimeError) as err:
        raise ValueError(f"{name}: attention_mask is not a row of ones ({err}). Leave it out.") from err
    if mask.shape != (length,) or not (mask == 1).all():
        raise ValueError(
            f"{name} has {length} input_ids and an attention_mask of shape {mask.shape} that is not all "
            "ones. Cut the padding off, or pack a padded batch with THDBatch.from_padded."
        )


def position_row(sample: Mapping[str, Any], length: int, name: str) -> NDArray[np.int64]:
    """Read the positions of a sample, ``[n]`` or ``[3, n]``."""
    row: NDArray[np.int64] = host_ints(sample["position_ids"], f"{name}: position_ids", ndim=None)
    if row.shape not in ((length,), (3, length)):
        raise ValueError(
            f"{name} has {length} input_ids but position_ids of shape {row.shape}. "
            "Give every sample one position per token, [n], or three, [3, n]."
        )
    return row


def sequence_label(sample: Mapping[str, Any], name: str) -> dict[str, NDArray[Any]]:
    """Read a sequence's label: int64 or fp32 ``[]``, or fp32 ``[C]`` for several labels; {} without one."""
    if sample.get("label") is not None:
        key = "label"
    elif is_scalar(sample.get("labels")):  # labels with one value per token are not the sequence's
        key = "labels"
    else:
        return {}

    value = sample[key]
    try:
        label = _floats(value)
    except ValueError:  # ragged lists
        label = np.empty(0, object)
    if label.dtype.kind not in "biuf" or label.ndim > 1 or not label.size or not np.isfinite(label).all():
        raise ValueError(
            f"{name} has {key}={value!r}; wanted one finite number for the sequence, or a list of numbers "
            "for several labels. Map names of classes to numbers, or drop the key."
        )
    is_class = label.dtype.kind in "biu" and label.ndim == 0
    return {"label": label.astype(np.int64 if is_class else np.float32)}


def _floats(value: Any) -> NDArray[Any]:
    """Return weights or labels as an array; numpy has no bfloat16."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.is_floating_point() and value.itemsize < 4:
            value = value.float()
    return np.asarray(value)


def is_scalar(value: object) -> bool:
    """Return whether a value is one number, such as the label of a whole sequence."""
    return isinstance(value, int | float | np.generic) or (
        isinstance(value, np.ndarray | Tensor) and value.ndim == 0
    )


def with_label(sample: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a sample with its sequence label, if it has one, under ``label`` instead of ``labels``."""
    labels_is_scalar = is_scalar(sample.get("labels"))
    if "label" not in sample and not labels_is_scalar:
        return sample
    replaced = {"label", "labels"} if labels_is_scalar else {"label"}
    others = {key: value for key, value in sample.items() if key not in replaced}
    return others | sequence_label(sample, name)


def sample_weights(sample: Mapping[str, Any], length: int, name: str) -> tuple[NDArray[np.float32], float]:
    """Read a sample's loss weights: of each token as a target, fp32 ``[n]``, and of the whole sequence."""
    row = _floats(sample.get("weights", 1.0))
    if row.dtype.kind not in "iufb" or row.shape not in ((), (length,)):
        raise ValueError(
            f"{name} has {length} input_ids but weights of shape {row.shape} and dtype {row.dtype}. Give "
            "one number for the sequence, or one per token, aligned with labels."
        )
    row = row.astype(np.float32)
    if not np.isfinite(row).all() or (row < 0).any():
        raise ValueError(
            f"{name} has the weight {float(row[~np.isfinite(row) | (row < 0)].flat[0])}. Weights are "
            "finite and at least 0; for a negative factor, multiply the loss of the step yourself."
        )
    if row.ndim == 0:
        return np.broadcast_to(row, (length,)), float(row)
    return row, 1.0


def whole_weight(sample: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Return the sum of the weights of a sequence's loss tokens, and the weight of the sequence."""
    labels = np.asarray(sample.get("labels", sample["input_ids"]))
    of_tokens, of_sequence = sample_weights(sample, len(labels), name)
    learned = labels[1:] != IGNORE_INDEX  # the first token is nobody's target
    return float(of_tokens[1:][learned].sum(dtype=np.float64)), of_sequence


def refuse_shifted(
    rows: Iterable[tuple[NDArray[Any], NDArray[Any]]], name: str, *, least: int = _SHIFTED_FROM
) -> None:
    """Raise if labels are already shifted: all equal the next id or -100, and ``least`` not their own id."""
    num_differing = 0
    for ids, all_labels in rows:
        labels = all_labels[:-1]  # the last label has no next id to compare with
        learned = labels != IGNORE_INDEX
        if ((labels != ids[1:]) & learned).any():
            return
        num_differing += int(np.count_nonzero((labels != ids[:-1]) & learned))
    if num_differing >= least:
        raise ValueError(
            f"{name}: the labels are the next tokens, as if they were shifted already, but collation shifts "
            "them. Undo the shift, which keeps the last target too: input_ids=[*ids, labels[-1]], "
            "labels=[-100, *labels]. To learn every token, give whole documents as input_ids, without labels."
        )


def refuse_restart(sample: Mapping[str, Any], name: str, advice: str) -> None:
    """Raise if position_ids restart inside a sample: its several sequences would see each other."""
    positions = np.asarray(sample.get("position_ids", ()))
    if positions.ndim == 1 and (positions[1:] == 0).any():
        raise ValueError(
            f"{name} is bad: its position_ids begin again, as in a row of several sequences, which would see "
            f"each other. {advice}"
        )
