"""One sample as users give it -> its checked arrays, or an error that names the sample and the key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORE_INDEX = -100
# One value a token, so they are padded with the ids and given to the model as [1, T].
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
WEIGHT_KEYS = ("weights", "next_weight", "whole_weight")
OWN_KEYS = (
    *("input_ids", "labels", "next_label", "position_ids", "attention_mask"),
    *WEIGHT_KEYS,
    *PER_TOKEN,
)
_REFUSED = ("input_features", "input_values", "audio_values", "audio_features")
_EMPTY = "Sample {i} has no tokens. Remove it, or let THDDataModule do so with empty='drop'."


def token_row(sample: dict[str, Any], key: str, i: int) -> NDArray[np.integer[Any]]:
    """Read one row of integers ``[n]`` of sample ``i``; ids must not be empty."""
    if key not in sample:
        raise ValueError(f"Sample {i} has the keys {sorted(sample)} but no {key!r}. Give it one.")
    value = sample[key]
    row = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
    if row.ndim != 1 or row.dtype.kind not in "iu":
        if row.size == 0:
            raise ValueError(_EMPTY.format(i=i))
        raise ValueError(
            f"Sample {i}: {key} has shape {row.shape} and dtype {row.dtype}. Give one row of integers."
        )
    if key == "input_ids" and not len(row):
        raise ValueError(_EMPTY.format(i=i))
    return row


def label_row(sample: dict[str, Any], ids: NDArray[Any], i: int) -> NDArray[np.integer[Any]]:
    """Read the labels of sample ``i``, one an id; a sample without any is trained on all its ids."""
    if "labels" not in sample:
        return ids
    labels = token_row(sample, "labels", i)
    if len(labels) != len(ids):
        raise ValueError(
            f"Sample {i} has {len(ids)} input_ids but {len(labels)} labels. "
            "Give one label a token, unshifted, with -100 where it is to be ignored."
        )
    return labels


def refuse_negative(ids: list[NDArray[Any]]) -> None:
    """Raise for the first sample with an id below 0."""
    i, worst = next((i, int(row.min())) for i, row in enumerate(ids) if row.min() < 0)
    raise ValueError(
        f"Sample {i} has the token id {worst}. Ids start at 0; -100 belongs into labels, not into input_ids."
    )


def check_modalities(names: Iterable[str]) -> None:
    """Raise for keys of inputs that cannot be packed, audio above all."""
    for name in names:
        if name in _REFUSED:
            raise ValueError(
                f"Samples carry {name!r}: audio inputs cannot be packed, only tokens, images and video. "
                "Remove the key or use a padded batch."
            )


def extra_tensor(value: object, name: str, i: int) -> Tensor:
    """Read a further model input of sample ``i`` as a tensor with at least one axis."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.ndim == 0:
        raise ValueError(
            f"Sample {i} carries {name!r} as {type(value).__name__}. Extras are tensors or arrays with at "
            "least one axis, concatenated along the first; drop the key if the model does not need it."
        )
    return value
