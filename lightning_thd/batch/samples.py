"""One sample as users give it -> its checked arrays, or an error that names the sample and the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_thd._checks import described, host_ints

IGNORE_INDEX = -100
# One value a token, so they are padded with the ids and given to the model as [1, T].
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
WEIGHT_KEYS = ("weights", "next_weight", "whole_weight")
OWN_KEYS = (
    *("input_ids", "labels", "next_label", "position_ids", "attention_mask"),
    *WEIGHT_KEYS,
    *PER_TOKEN,
)
_SHIFTED_FROM = 8  # labels that are the next id and not their own: fewer may be so by chance
_REFUSED = ("input_features", "input_values", "audio_values", "audio_features")
# What hides tokens from the loss, or tells sequences of a row apart, under names that nobody reads here.
_MASKS = (
    *("loss_mask", "label_mask", "labels_mask", "target_mask", "completion_mask", "response_mask"),
    *("prompt_mask", "assistant_mask", "assistant_masks", "prompt_length", "prompt_len", "prompt_lengths"),
    *("mask", "masks", "loss_masks", "label_masks", "train_mask", "learn_mask", "completion_masks"),
    *("response_masks", "prompt_masks", "target_masks", "shift_labels", "answer_start_idx"),
    *("context_length", "source_len", "source_length", "source_mask"),
)
# Weights of tokens or sequences under names that nobody reads here.
_WEIGHTS = (
    *("weight", "loss_weight", "loss_weights", "token_weight", "token_weights", "label_weight"),
    *("label_weights", "sample_weight", "sample_weights", "sequence_weight", "sequence_weights"),
)
_BOUNDS = (
    *("segment_ids", "document_ids", "doc_ids", "seq_idx", "sequence_lengths", "seq_lens", "seqlens"),
    *("doc_lens", "doc_lengths", "document_lengths", "input_pos", "seq_start_id", "seq_boundaries"),
    *("cumulative_len", "cu_lens", "cu_doc_lens", "cu_seq_lens"),
)
# The same under names that datasets of rows that were packed before are read by.
ROW_BOUNDS = ("lengths", "seq_lengths", "cu_seqlens", "cu_seqlens_padded")
# Arguments that THDBatch.hf_kwargs makes; a sample's own would replace them in the call of the model.
_RESERVED = frozenset(
    (
        *("cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_lens_real", "max_length_q", "max_length_k"),
        *("use_cache", "targets"),
    )
)


def check_samples(samples: object) -> None:
    """Raise for anything but a sequence of dicts whose keys are inputs of a model."""
    if not isinstance(samples, Sequence) or isinstance(samples, str | bytes):
        raise TypeError(f"samples is {described(samples)}; wanted a list of dicts. Pass [sample, ...].")
    for i, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"Sample {i} is {described(sample)}; wanted a dict. Pass {{'input_ids': [5, 6, 7]}}."
            )
        if not _RESERVED.isdisjoint(sample):
            names = sorted(_RESERVED.intersection(sample))
            raise ValueError(
                f"Sample {i} carries {', '.join(names)}, which the batch makes by itself. Leave them out: "
                "samples hold input_ids and labels of one sequence."
            )


def token_row(sample: Mapping[str, Any], key: str, i: int) -> NDArray[np.integer[Any]]:
    """Read one row of integers ``[n]`` of sample ``i``; ids must not be empty."""
    if key not in sample:
        raise ValueError(f"Sample {i} has the keys {[*sample]} but no {key!r}. Give it one.")
    value = sample[key]
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"Sample {i}: {key} is a masked array, whose mask would be lost. Give its compressed() values."
        )
    kind = (value.dtype.kind, value.dtype.itemsize) if isinstance(value, np.ndarray) else ("", 0)
    if kind[0] not in ("i", "u") or kind == ("u", 8):  # uint64 may pass int64
        try:
            value = host_ints(value, key, ndim=None, advice="Give one row of integers.")
        except (TypeError, ValueError) as err:
            raise type(err)(f"Sample {i}: {err}") from err
    row: NDArray[np.integer[Any]] = value
    if key == "input_ids" and not row.size:
        raise ValueError(
            f"Sample {i} has no tokens. Remove it, or let THDDataModule do so with empty='drop'."
        )
    if row.ndim != 1:
        raise ValueError(f"Sample {i}: {key} has shape {row.shape}. Give one row of integers.")
    return row


def per_token_row(sample: Mapping[str, Any], key: str, length: int, i: int) -> NDArray[np.integer[Any]]:
    """Read one row of integers of sample ``i`` that must have one value a token."""
    row = token_row(sample, key, i)
    if len(row) != length:
        advice = "unshifted, with -100 where it is to be ignored" if key == "labels" else "or drop the key"
        raise ValueError(
            f"Sample {i} has {length} input_ids but {len(row)} {key}. Give one value a token, {advice}."
        )
    return row


def check_attention_mask(sample: Mapping[str, Any], length: int, i: int) -> None:
    """Raise for a sample whose attention mask hides tokens, which packing would train on."""
    mask = np.asarray(sample["attention_mask"])
    if mask.shape != (length,) or not (mask == 1).all():
        raise ValueError(
            f"Sample {i} has {length} input_ids and an attention_mask of shape {mask.shape} that is not all "
            "ones. Cut the padding off, or pack a padded batch with THDBatch.from_padded."
        )


def position_row(sample: Mapping[str, Any], length: int, i: int) -> NDArray[np.int64] | None:
    """Read the positions of sample ``i``, ``[n]`` or ``[3, n]``; None where it has none."""
    if "position_ids" not in sample:
        return None
    try:
        row: NDArray[np.int64] = host_ints(sample["position_ids"], "position_ids", ndim=None)
    except (TypeError, ValueError) as err:
        raise type(err)(f"Sample {i}: {err}") from err
    if row.shape not in ((length,), (3, length)):
        raise ValueError(
            f"Sample {i} has {length} input_ids but position_ids of shape {row.shape}. "
            "Give every sample one position a token, [n], or three, [3, n]."
        )
    return row


def refuse_ids(ids: list[NDArray[Any]]) -> None:
    """Raise for the first sample with an id below 0."""
    i, worst = next((i, int(row.min())) for i, row in enumerate(ids) if row.min() < 0)
    raise ValueError(
        f"Sample {i} has the token id {worst}. Ids start at 0; -100 belongs into labels, not into input_ids."
    )


def refuse_labels(labels: list[NDArray[Any]]) -> None:
    """Raise for the first sample with a label that is neither an id nor -100."""
    for i, row in enumerate(labels):
        for label in row[(row < 0) & (row != IGNORE_INDEX)][:1].tolist():
            raise ValueError(f"Sample {i} has the label {label}. Labels are ids, or -100 where ignored.")


def refuse_shifted(rows: Iterable[tuple[NDArray[Any], NDArray[Any]]], name: str) -> None:
    """Raise where labels are the next tokens already: shifted again, each would be the token after the next.

    Args:
        rows: ids ``[n]`` and labels ``[n]`` of some sequences.
        name: what the rows are called in the message.

    Raises:
        ValueError: when every label is the next id, and 8 or more are not the id at their own place.
    """
    others = 0
    for ids, labels in rows:
        own, following, labels = ids[:-1], ids[1:], labels[:-1]
        learned = labels != IGNORE_INDEX
        if ((labels != following) & learned).any():
            return
        others += int(np.count_nonzero((labels != own) & learned))
    if others >= _SHIFTED_FROM:
        raise ValueError(
            f"{name}: the labels are the next tokens, as if they were shifted already, and they are shifted "
            "here. Give labels that are the ids themselves, -100 where one is not to be learned, or none; "
            "and ids with the last token, too."
        )


def check_modalities(names: Iterable[str]) -> None:
    """Raise for keys of inputs that cannot be packed, such as audio, and of masks that would be left out."""
    if isinstance(names, Mapping):
        names = [name for name, value in names.items() if value is not None]
    names = list(names)
    for name in names:
        if name in _MASKS and "labels" in names:
            raise ValueError(
                f"Samples carry {name!r} beside labels, and labels alone say what is learned. Put -100 "
                f"into them where it hides a token, if they lack it, and drop {name!r}."
            )
        if name in _MASKS:
            raise ValueError(
                f"Samples carry {name!r}, which is not read, so that what it hides would be trained on. Give "
                "labels, unshifted, with -100 where a token is not to be learned, in its place."
            )
        if name in _WEIGHTS:
            raise ValueError(
                f"Samples carry {name!r}, which is not read. Give weights under 'weights', one a token or "
                "one a sequence; rename it, or drop it."
            )
        if name in _BOUNDS:
            raise ValueError(
                f"Samples carry {name!r}, which is not read, so that sequences of one row would see each "
                "other. Give lengths, cu_seqlens or position_ids in its place, or one sequence a row."
            )
        if name in _REFUSED:
            raise ValueError(
                f"Samples carry {name!r}: audio inputs cannot be packed, only tokens, images and video. "
                "Remove the key or use a padded batch."
            )


def refuse_bounds(names: Iterable[str], i: int) -> None:
    """Raise for the boundaries of several sequences in one sample, which would see each other."""
    if found := [name for name in names if name in ROW_BOUNDS]:
        raise ValueError(
            f"Sample {i} carries {', '.join(found)}, as a row of several sequences does, and a sample is "
            "one: they would see each other. Give the sequences one by one, or drop the key; THDDataModule "
            "takes the rows of a dataset with a length apart."
        )


def refuse_restart(sample: Mapping[str, Any], advice: str) -> None:
    """Raise for position_ids that begin again inside a sample, whose sequences would see each other."""
    positions = np.asarray(sample.get("position_ids", ()))
    if positions.ndim == 1 and (positions[1:] == 0).any():
        raise ValueError(
            "its position_ids start anew inside it, as in a row of several sequences, which would see each "
            f"other. {advice}"
        )


def joined_extras(samples: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """Concatenate a further model input of all samples that have it, along its first axis."""
    parts = [_extra_tensor(sample[name], name, i) for i, sample in enumerate(samples) if name in sample]
    first = parts[0]
    for part in parts[1:]:
        if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype or part.device != first.device:
            raise ValueError(
                f"Samples carry {name!r} as {first.dtype} {list(first.shape)} on {first.device} and as "
                f"{part.dtype} {list(part.shape)} on {part.device}. Extras are concatenated along the first "
                "axis: give them one dtype, one device and the same other axes."
            )
    return torch.cat(parts)


def _extra_tensor(value: object, name: str, i: int) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.ndim == 0:
        raise ValueError(
            f"Sample {i} carries {name!r} as {type(value).__name__}. Extras are tensors or arrays with at "
            "least one axis, concatenated along the first; drop the key if the model does not need it."
        )
    return value
