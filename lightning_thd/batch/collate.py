"""Samples -> the fields of a ``THDBatch``. The public door is ``THDBatch.collate``.

T slots in a pack, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_thd._checks import INT64_MAX, described, host_ints, real_number, whole_number
from lightning_thd.alignment import Alignment
from lightning_thd.batch.samples import (
    IGNORE_INDEX,
    OWN_KEYS,
    PER_TOKEN,
    ROW_BOUNDS,
    check_attention_mask,
    check_modalities,
    check_samples,
    joined_extras,
    per_token_row,
    position_row,
    refuse_bounds,
    refuse_ids,
    refuse_labels,
    refuse_shifted,
    token_row,
)
from lightning_thd.batch.weights import pack_weights
from lightning_thd.seqlens import INT32_MAX
from lightning_thd.stats import SeqStats, Window


def collate_fields(
    samples: Sequence[dict[str, Any]],
    *,
    align: Alignment | None,
    pad_to: int | None,
    sequence_ids: Sequence[int] | None,
    loss_scale: float | None,
    sequence_scale: float | None,
    windows: Sequence[Window] = (),
) -> dict[str, Any]:
    """Build the fields of ``THDBatch.collate``; the arguments are described there."""
    check_samples(samples)
    ids = [token_row(sample, "input_ids", i) for i, sample in enumerate(samples)]
    lengths = [len(row) for row in ids]
    sequence_ids = _sequence_ids(sequence_ids, len(lengths))
    padded, slots = _slots(lengths, align, pad_to)
    starts = [0, *accumulate(padded)][: len(lengths)]
    dense = padded[: len(lengths)] == lengths

    input_ids = _lay_out(ids, starts, slots, dense, fill=0)
    if input_ids.size and input_ids.min() < 0:
        refuse_ids(ids)
    source, masked = input_ids, any("labels" in sample for sample in samples)
    if masked:
        labels = [
            per_token_row(sample, "labels", lengths[i], i) if "labels" in sample else ids[i]
            for i, sample in enumerate(samples)
        ]
        source = _lay_out(labels, starts, slots, dense, fill=IGNORE_INDEX)
        if ((source < 0) & (source != IGNORE_INDEX)).any():
            refuse_labels(labels)
        refuse_shifted(zip(ids, labels, strict=True), "The samples")
    targets = _shift(source, starts, lengths, dense)
    loss_tokens = sum(lengths) - len(lengths)
    for i, (sample, start, length) in enumerate(zip(samples, starts, lengths, strict=True)):
        if "attention_mask" in sample:
            check_attention_mask(sample, length, i)
        if "next_label" in sample:
            label = targets[start + length - 1] = _next_label(sample["next_label"], i)
            loss_tokens += 1
            masked |= label == IGNORE_INDEX
    if masked:  # else every token with a next one has a target
        loss_tokens = int(np.count_nonzero(targets != IGNORE_INDEX))

    weights = pack_weights(samples, targets, starts, lengths, masked=masked)
    loss_scale, sequence_scale = _scale(loss_scale, "loss_scale"), _scale(sequence_scale, "sequence_scale")
    if loss_scale is None:
        loss_scale, sequence_scale = mean_scale(weights.total), mean_scale(weights.sequences)
    cu_seqlens_padded = cumulative(padded)
    # A trailing pad counts as a sequence of its own in both, so its real length is its slots.
    cu_seqlens = cu_seqlens_padded if dense else cumulative([*lengths, *padded[len(lengths) :]])
    extras = _extras(samples, starts, slots, lengths)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "targets": torch.from_numpy(targets),
        "position_ids": _positions(samples, padded, starts, lengths, slots),
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_padded": cu_seqlens_padded,
        "lengths": lengths,
        "padded_lengths": padded,
        "stats": SeqStats.from_lengths(
            lengths,
            slots=slots,
            loss_tokens=loss_tokens,
            windows=windows,
            image_grid_thw=extras.get("image_grid_thw"),
            video_grid_thw=extras.get("video_grid_thw"),
        ),
        "sequence_ids": sequence_ids,
        "loss_scale": loss_scale,
        "sequence_scale": sequence_scale,
        "sequence_shares": weights.shares,
        "weights": None if weights.slots is None else torch.from_numpy(weights.slots),
        "extras": extras,
    }


def _sequence_ids(sequence_ids: Sequence[int] | None, count: int) -> Sequence[int]:
    if sequence_ids is None:
        return range(count)
    ids: list[int] = host_ints(sequence_ids, "sequence_ids").tolist()
    if len(ids) != count:
        raise ValueError(
            f"There are {count} samples but {len(ids)} sequence_ids. Give one dataset index each."
        )
    return ids


def _next_label(label: Any, i: int) -> int:
    number = whole_number(
        label, f"Sample {i}: next_label", least=None, most=INT64_MAX, advice="It is one id, or -100."
    )
    if number < 0 and number != IGNORE_INDEX:
        raise ValueError(f"Sample {i} has next_label={number}. Give the id of the next token, or -100.")
    return number


def _scale(given: Any, name: str) -> float | None:
    if given is None:
        return None
    scale = real_number(given, name, advice="Leave it out for the mean over the batch.")
    if scale < 0:
        raise ValueError(f"{name}={scale}; wanted 0 or more. Leave it out for the mean over the batch.")
    return scale


def mean_scale(weight: float) -> float:
    """Return the scale that makes a sum of this weight a mean: 4 gives 0.25, and 0 gives 0."""
    return 1.0 / weight if weight else 0.0


def cumulative(lengths: Sequence[int]) -> Tensor:
    """Sum lengths to int32 offsets on the CPU: ``[3, 2]`` becomes ``[0, 3, 5]``."""
    return torch.from_numpy(np.array([0, *accumulate(lengths)], np.int32))


def _slots(lengths: list[int], align: Alignment | None, pad_to: int | None) -> tuple[list[int], int]:
    """Return the slots of every sequence, a trailing dummy included, and their sum."""
    if align is not None and not isinstance(align, Alignment):
        raise TypeError(f"align is {described(align)}; wanted an Alignment. Pass Alignment.for_(...).")
    if pad_to is not None:
        pad_to = whole_number(pad_to, "pad_to", least=1, advice="It is the number of slots of the batch.")
    padded = lengths if align is None else [align.padded_length(n) for n in lengths]
    total = sum(padded)
    wanted = max(1, total) if align is None else align.padded_total(max(1, total))
    slots = wanted if pad_to is None else pad_to
    if slots > INT32_MAX:
        raise ValueError(f"A batch of {slots} slots is past int32 ({INT32_MAX}). Pack fewer sequences.")
    if slots < total:
        raise ValueError(
            f"{len(lengths)} sequences need {total} slots but pad_to={pad_to}. "
            "Raise pad_to or pack fewer sequences."
        )
    if align is not None and slots % align.total_multiple:
        try:
            align.check(slots)  # names the kernel that would refuse, where the alignment knows it
        except ValueError as err:
            raise ValueError(
                f"pad_to={pad_to} is no multiple of {align.total_multiple}: {err} Use "
                f"pad_to={align.padded_total(slots)}."
            ) from err
    return (padded if slots == total else [*padded, slots - total]), slots


def _lay_out(
    rows: list[NDArray[Any]], starts: list[int], slots: int, dense: bool, *, fill: int
) -> NDArray[np.int64]:
    out = np.empty(slots, np.int64)
    if dense:
        real = starts[-1] + len(rows[-1]) if rows else 0
        if rows:
            np.concatenate(rows, out=out[:real], casting="unsafe")
        out[real:] = fill
        return out
    out.fill(fill)
    for start, row in zip(starts, rows, strict=True):
        out[start : start + len(row)] = row
    return out


def _shift(
    source: NDArray[np.int64], starts: list[int], lengths: list[int], dense: bool
) -> NDArray[np.int64]:
    """Return the next token of the same sequence for every slot; the last of each gets -100."""
    targets = np.empty_like(source)
    if dense:
        targets[:-1] = source[1:]
        ends = np.cumsum(lengths, dtype=np.int64)
        targets[ends - 1] = IGNORE_INDEX
        targets[starts[-1] + lengths[-1] if lengths else 0 :] = IGNORE_INDEX
        return targets
    targets.fill(IGNORE_INDEX)
    for start, length in zip(starts, lengths, strict=True):
        targets[start : start + length - 1] = source[start + 1 : start + length]
    return targets


@lru_cache(maxsize=32)
def _count_up(size: int) -> NDArray[np.int64]:
    values = np.arange(size, dtype=np.int64)
    values.flags.writeable = False
    return values


def _positions(
    samples: Sequence[dict[str, Any]], padded: list[int], starts: list[int], lengths: list[int], slots: int
) -> Tensor:
    # One copy of each beginning of 0, 1, 2, ... takes a third of the time of arange - repeat.
    from_zero = _count_up(1 << max(padded, default=1).bit_length())
    counted = np.concatenate([from_zero[:n] for n in padded])
    if not any("position_ids" in sample for sample in samples):
        return torch.from_numpy(counted)
    given = [position_row(sample, lengths[i], i) for i, sample in enumerate(samples)]
    leading = next(row.shape[:-1] for row in given if row is not None)
    # A sample without keeps what is counted, in all three rows: what M-RoPE gives to text.
    out = np.broadcast_to(counted, (*leading, slots)).copy()
    for i, (start, row, length) in enumerate(zip(starts, given, lengths, strict=True)):
        if row is None:
            continue
        if row.shape != (*leading, length):
            raise ValueError(
                f"Sample {i} has position_ids of shape {row.shape}, and a sample before it of another kind. "
                "Give every sample one position a token, [n], or every sample three, [3, n]."
            )
        out[..., start : start + length] = row
    return torch.from_numpy(out)


def _extras(
    samples: Sequence[dict[str, Any]], starts: list[int], slots: int, lengths: list[int]
) -> dict[str, Tensor]:
    names = dict.fromkeys(name for sample in samples for name in sample if name not in OWN_KEYS)
    check_modalities([*names])
    if not names.keys().isdisjoint(ROW_BOUNDS):
        for i, sample in enumerate(samples):
            refuse_bounds(sample, i)
    extras: dict[str, Tensor] = {}
    for name in names:
        extras[name] = joined_extras(samples, name)
    for name in PER_TOKEN:
        if any(name in sample for sample in samples):
            row = torch.zeros(1, slots, dtype=torch.int64)
            for i, (sample, start, length) in enumerate(zip(samples, starts, lengths, strict=True)):
                values = per_token_row(sample, name, length, i).astype(np.int64)
                row[0, start : start + length] = torch.from_numpy(values)
            extras[name] = row
    return extras
