"""Checked samples, or a padded batch with its mask -> the fields of a ``THDBatch``.

T slots in a pack, S sequences, C labels of a sequence; B rows of N slots in a padded batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_thd._checks import as_tensor, described, int_tensor, real_number, whole_number
from lightning_thd.alignment import Alignment
from lightning_thd.batch.examples import PARTS, split
from lightning_thd.batch.keys import COLLATED, IGNORE_INDEX, TYPES, inputs
from lightning_thd.batch.media import counted
from lightning_thd.batch.samples import (
    MOST_ID,
    check_sample,
    refuse_shifted,
    refuse_wrapped,
    sample_weights,
    sequence_label,
    whole_weight,
)
from lightning_thd.boundaries import Boundaries
from lightning_thd.seqlens import INT32_MAX
from lightning_thd.stats import SeqStats, Vision, Window

Sample = Mapping[str, Any]
_PLAIN = {"input_ids", "labels"}


def check_samples(samples: object) -> list[dict[str, Any]]:
    """Check each sample, and all labels together; return the samples with rows as arrays."""
    if not isinstance(samples, Sequence) or isinstance(samples, str | bytes):
        raise TypeError(f"samples is {described(samples)}; wanted a list of dicts. Pass [sample, ...].")

    rows = _plain_rows(samples)
    if rows is None:
        samples = [check_sample(sample, f"Sample {i}", piece=True) for i, sample in enumerate(samples)]
        rows = [(sample["input_ids"], sample.get("labels", sample["input_ids"])) for sample in samples]

    if any("labels" in sample for sample in samples):
        refuse_shifted(rows, "The samples")
    return list(samples)


def _plain_rows(samples: Sequence[Any]) -> list[tuple[NDArray[Any], NDArray[Any]]] | None:
    """Return ids and labels if all samples have only these, as valid arrays; else None, for a full check.

    This is the fast path: it checks the values of all samples at once, instead of sample by sample.
    """
    rows = []
    for sample in samples:
        if type(sample) is not dict or not sample.keys() <= _PLAIN or "input_ids" not in sample:
            return None
        ids = sample["input_ids"]
        labels = sample.get("labels", ids)
        if not (type(ids) is type(labels) is np.ndarray) or not ids.dtype.kind == labels.dtype.kind == "i":
            return None
        if ids.ndim != 1 or not ids.size or labels.shape != ids.shape:
            return None
        rows.append((ids, labels))
    if not rows:
        return rows

    all_ids = np.concatenate([ids for ids, _ in rows])
    if all_ids.min() < 0 or all_ids.max() > MOST_ID:
        return None

    if any(labels is not ids for ids, labels in rows):
        all_labels = np.concatenate([labels for _, labels in rows])
        odd = (all_labels < 0) & (all_labels != IGNORE_INDEX)
        if all_labels.max() > MOST_ID or odd.any():
            return None
    return rows


def lay_out(
    samples: Sequence[Sample],
    *,
    align: Alignment | None = None,
    pad_to: int | None = None,
    sequence_ids: Sequence[int] | None = None,
    loss_scale: float | None = None,
    sequence_scale: float | None = None,
    token_scale: float | None = None,
    windows: Sequence[Window] = (),
    vision: Vision | None = None,
) -> dict[str, Any]:
    """Return the fields of a ``THDBatch`` from checked samples; the arguments are ``THDBatch.collate``'s."""
    if sequence_ids is not None and len(sequence_ids) != len(samples):
        raise ValueError(
            f"There are {len(samples)} samples but {len(sequence_ids)} sequence_ids. Give one each."
        )
    roles: tuple[int, ...] | None = None
    if any(PARTS in sample for sample in samples):
        samples, sequence_ids, roles = _split_examples(samples, sequence_ids, align)

    ids = [np.asarray(sample["input_ids"]) for sample in samples]
    lengths = [len(row) for row in ids]
    # ``padded`` has an entry for each sequence and, if slots are left at the end of the pack, one for them.
    padded, slots = slots_of(lengths, align, pad_to)
    starts = [0, *accumulate(padded)][: len(lengths)]
    dense = padded[: len(lengths)] == lengths  # no padding between sequences

    input_ids = _end_to_end(ids, starts, slots, dense, fill=0)
    targets, loss_tokens, masked = _targets(samples, input_ids, starts, lengths, dense)
    weights = pack_weights(samples, targets, starts, lengths, masked=masked)

    _check_scales(loss_scale=loss_scale, sequence_scale=sequence_scale, token_scale=token_scale)
    if loss_scale is None:
        loss_scale = mean_scale(weights.total)
        sequence_scale = mean_scale(weights.sequences)
        if token_scale is None:
            token_scale = mean_scale(sum(lengths))

    cu_seqlens_padded = cumulative(padded)
    cu_seqlens = cu_seqlens_padded
    if not dense:  # trailing padding is a sequence in both offsets, so all its slots count as its length
        cu_seqlens = cumulative([*lengths, *padded[len(lengths) :]])

    extras = _extras(samples, starts, lengths, slots)
    images: dict[str, Any] = {}
    if extras or (vision is not None and vision.windows):
        images = counted(extras, vision)
    stats = SeqStats.from_lengths(
        np.array(lengths, np.int64), slots=slots, loss_tokens=loss_tokens, windows=windows, **images
    )

    return {
        "input_ids": torch.from_numpy(input_ids),
        "targets": torch.from_numpy(targets),
        "position_ids": _positions(samples, padded, starts, lengths, slots),
        "boundaries": Boundaries.laid_out(cu_seqlens, cu_seqlens_padded, lengths, padded),
        "stats": stats,
        "sequence_ids": range(len(lengths)) if sequence_ids is None else sequence_ids,
        "max_targets": loss_tokens,
        "loss_scale": loss_scale,
        "sequence_scale": sequence_scale,
        "token_scale": token_scale,
        "sequence_shares": weights.shares,
        "weights": None if weights.slots is None else torch.from_numpy(weights.slots),
        "extras": extras,
        "roles": roles,
    }


def _split_examples(
    samples: Sequence[Sample], sequence_ids: Sequence[int] | None, align: Alignment | None
) -> tuple[list[Sample], list[int], tuple[int, ...]]:
    """Return the parts of all examples as samples, with the sequence id of their example, and the roles."""
    plain = [i for i, sample in enumerate(samples) if PARTS not in sample]
    if plain:
        raise ValueError(
            f"Sample {plain[0]} has no query, but others of the batch have. Give examples or plain sequences."
        )
    if align is not None and align.sequence_multiple != 1:
        raise ValueError(
            "Queries and documents cannot be padded one by one, as context parallelism and sequence "
            f"parallelism do (to multiples of {align.sequence_multiple}). Set context_parallel_size=1 and "
            "sequence_parallel=False."
        )

    weights = [whole_weight(sample, f"Sample {i}")[0] for i, sample in enumerate(samples)]
    example_ids = range(len(samples)) if sequence_ids is None else sequence_ids
    ids_of_parts: list[int] = []
    roles: list[int] = []
    for sample, example_id in zip(samples, example_ids, strict=True):
        ids_of_parts += [example_id] * len(sample[PARTS])
        roles += sample[PARTS][:, 0].tolist()
    return list(split(samples, weights)), ids_of_parts, tuple(roles)


def _targets(
    samples: Sequence[Sample],
    input_ids: NDArray[np.int64],
    starts: list[int],
    lengths: list[int],
    dense: bool,
) -> tuple[NDArray[np.int64], int, bool]:
    """Return the target of each slot, the number of targets, and whether samples may hide tokens."""
    slots = len(input_ids)
    source = input_ids
    masked = any("labels" in sample for sample in samples)
    if masked:
        labels = [np.asarray(sample.get("labels", sample["input_ids"])) for sample in samples]
        source = _end_to_end(labels, starts, slots, dense, fill=IGNORE_INDEX)

    targets = _shift(source, starts, lengths)
    loss_tokens = sum(lengths) - len(lengths)
    for sample, start, length in zip(samples, starts, lengths, strict=True):
        if "next_label" in sample:
            targets[start + length - 1] = sample["next_label"]
            loss_tokens += 1
            masked |= sample["next_label"] == IGNORE_INDEX

    if masked:  # otherwise every token has a target, except the last of a sequence without next_label
        loss_tokens = int(np.count_nonzero(targets != IGNORE_INDEX))
    return targets, loss_tokens, masked


def _check_scales(**scales: float | None) -> None:
    """Raise for a scale that is not a finite number of at least 0."""
    for name, scale in scales.items():
        if type(scale) is float and 0.0 <= scale < math.inf:  # the planner's scales need no further check
            continue
        if scale is not None:
            real_number(scale, name, least=0, advice="Leave it out for the mean over the batch.")


def _extras(
    samples: Sequence[Sample], starts: list[int], lengths: list[int], slots: int
) -> dict[str, Tensor]:
    """Return the model inputs besides ids and positions: extra tensors, token types, sequence labels."""
    keys = set().union(*samples)
    extras = {}
    if not keys <= COLLATED:
        extras = {key: joined(samples, key) for key in inputs(keys)}

    for key in TYPES:
        if key in keys:
            extras[key] = _types(samples, key, starts, lengths, slots)
    if "label" in keys:
        extras["labels"] = sequence_labels(samples)
    return extras


def mean_scale(weight: float) -> float:
    """Return the factor that turns a sum of this total weight into a mean: 4 gives 0.25, 0 gives 0."""
    return 1.0 / weight if weight else 0.0


def cumulative(lengths: Sequence[int]) -> Tensor:
    """Return int32 offsets on the CPU from lengths: ``[3, 2]`` becomes ``[0, 3, 5]``."""
    return torch.from_numpy(np.array([0, *accumulate(lengths)], np.int32))


def slots_of(lengths: list[int], align: Alignment | None, pad_to: int | None) -> tuple[list[int], int]:
    """Return the slots of every sequence and of a trailing padding sequence, if any, and their sum."""
    if pad_to is not None:
        pad_to = whole_number(pad_to, "pad_to", least=1, advice="It is the number of slots of the batch.")

    padded = lengths
    if align is not None:
        padded = [align.padded_length(length) for length in lengths]
    total = sum(padded)

    if pad_to is not None:
        slots = pad_to
    else:
        slots = max(1, total)
        if align is not None:
            slots = align.padded_total(slots)

    if slots > INT32_MAX:
        raise ValueError(f"A batch of {slots} slots is past int32 ({INT32_MAX}). Pack fewer sequences.")
    if slots < total:
        raise ValueError(
            f"{len(lengths)} sequences need {total} slots but pad_to={pad_to}. "
            "Raise pad_to or pack fewer sequences."
        )
    if align is not None and slots % align.total_multiple:
        align.check(slots)
    if slots > total:
        return [*padded, slots - total], slots
    return padded, slots


def _end_to_end(
    rows: list[NDArray[Any]], starts: list[int], slots: int, dense: bool, *, fill: int
) -> NDArray[np.int64]:
    """Copy the rows to their starts in one row of slots, int64 ``[T]``; other slots get ``fill``."""
    out = np.empty(slots, np.int64)
    if dense:
        total = sum(len(row) for row in rows)
        if rows:
            np.concatenate(rows, out=out[:total], casting="unsafe")
        out[total:] = fill
        return out

    out.fill(fill)
    for start, row in zip(starts, rows, strict=True):
        out[start : start + len(row)] = row
    return out


def _shift(source: NDArray[np.int64], starts: list[int], lengths: list[int]) -> NDArray[np.int64]:
    """Return each slot's next token in its sequence; a sequence's last token and padding get -100."""
    targets = np.append(source[1:], IGNORE_INDEX)
    ends = np.asarray(starts, np.int64) + np.asarray(lengths, np.int64)
    # For an empty sequence at slot 0 this is -1, the last slot of the pack, which has no target either.
    targets[ends - 1] = IGNORE_INDEX

    ends_of_tokens = ends.tolist() or [0]  # a batch without sequences is all padding
    next_starts = [*starts[1:], len(source)]
    for end, start in zip(ends_of_tokens, next_starts, strict=True):
        if end < start:  # padding between two sequences or at the end
            targets[end:start] = IGNORE_INDEX
    return targets


@lru_cache(maxsize=32)
def _count_up(size: int) -> NDArray[np.int64]:
    """Return 0, 1, 2, ... as an array that nobody can write to, because calls share it."""
    values = np.arange(size, dtype=np.int64)
    values.flags.writeable = False
    return values


def _positions(
    samples: Sequence[Sample], padded: list[int], starts: list[int], lengths: list[int], slots: int
) -> Tensor:
    """Return the samples' own positions, and positions from 0 for samples that have none."""
    counted_up = _counted_positions(padded, lengths)
    own_positions = [s["position_ids"] for s in samples if "position_ids" in s]
    if not own_positions:
        return torch.from_numpy(counted_up)

    # A sample without positions counts from 0, in all three rows of M-RoPE, as text does.
    leading = np.shape(own_positions[0])[:-1]  # (3,) for M-RoPE, else ()
    out = np.broadcast_to(counted_up, (*leading, slots)).copy()
    for i, (sample, start, length) in enumerate(zip(samples, starts, lengths, strict=True)):
        if "position_ids" not in sample:
            continue
        row = np.asarray(sample["position_ids"])
        if row.shape != (*leading, length):
            raise ValueError(
                f"Sample {i} has position_ids of shape {row.shape}, unlike an earlier sample. "
                "Give every sample one position per token, [n], or every sample three, [3, n]."
            )
        out[..., start : start + length] = row
    return torch.from_numpy(out)


def _counted_positions(padded: list[int], lengths: list[int]) -> NDArray[np.int64]:
    """Count positions from 0 inside every sequence, int64 ``[T]``.

    No position exceeds the longest sequence's, because a model's table of positions may hold no more.
    """
    # Joining slices of one cached arange takes a third of the time of arange(T) minus the repeated starts.
    # Sizes are powers of 2, so that batches of almost any length share a few cached ranges.
    from_zero = _count_up(1 << max(padded, default=1).bit_length())
    longest = max([1, *lengths])
    sequences = [from_zero[:slots] for slots in padded[: len(lengths)]]
    trailing = [from_zero[:slots] % longest for slots in padded[len(lengths) :]]
    positions: NDArray[np.int64] = np.minimum(np.concatenate([*sequences, *trailing]), longest - 1)
    return positions


def sequence_labels(samples: Sequence[Sample]) -> Tensor:
    """Stack the labels of whole sequences to ``[S]`` or ``[S, C]``, in fp32 if any label is fp32."""
    labels = [sequence_label(sample, f"Sample {i}").get("label") for i, sample in enumerate(samples)]
    shapes = {None if label is None else label.shape for label in labels}
    if len(shapes) > 1:
        raise ValueError(
            f"The labels of a batch have several shapes, or a sample has none: {shapes}. Give every sample "
            "one number, or every sample a list of the same length."
        )

    stacked = np.stack([label for label in labels if label is not None])
    if stacked.dtype != np.int64:
        stacked = stacked.astype(np.float32)
    return torch.from_numpy(stacked)


def _types(samples: Sequence[Sample], key: str, starts: list[int], lengths: list[int], slots: int) -> Tensor:
    """Return the token types of all samples, int64 ``[1, T]``; a sample without them gets 0."""
    row = np.zeros((1, slots), np.int64)
    for sample, start, length in zip(samples, starts, lengths, strict=True):
        if key in sample:
            row[0, start : start + length] = sample[key]
    return torch.from_numpy(row)


def joined(samples: Sequence[Sample], key: str) -> Tensor:
    """Concatenate the values of an extra model input along its first axis, over all samples that have it."""
    parts = [as_tensor(sample[key]) for sample in samples if key in sample]
    try:
        return torch.cat(parts)
    except RuntimeError as err:
        raise ValueError(
            f"Samples carry {key!r}, which cannot be concatenated along the first axis ({err}). Give them "
            "the same further axes, or drop the key."
        ) from err


class PackWeights(NamedTuple):
    """The loss weights of a pack."""

    # fp32 ``[T]``, the weight of each slot's target, 0 without a target; None if no sample has weights
    slots: NDArray[np.float32] | None
    total: float  # the sum of ``slots``; the number of targets if no sample has weights
    # ``[S]``, each sequence's weight / the summed weight of its loss tokens in all packs; 0 if that is 0
    shares: list[float]
    sequences: float  # summed weights of sequences with loss tokens; a cut one counts by its tokens here


def pack_weights(
    samples: Sequence[Sample],
    targets: NDArray[np.int64],
    starts: list[int],
    lengths: list[int],
    *,
    masked: bool,
) -> PackWeights:
    """Return the loss weights of a pack from the weights of its samples."""
    weighted = any("weights" in sample for sample in samples)
    of_sequences = [1.0] * len(samples)
    of_slots = None
    if not weighted and not masked:  # every token but the last of a sequence counts 1
        sums = [float(n - 1 + ("next_label" in sample)) for n, sample in zip(lengths, samples, strict=True)]
    else:
        of_slots = (targets != IGNORE_INDEX).astype(np.float32)
        if weighted:
            of_sequences = _weigh(of_slots, samples, starts, lengths)
        sums = _sums(of_slots, starts, lengths)

    shares = []
    for sample, weight, weight_here in zip(samples, of_sequences, sums, strict=True):
        # A piece of a cut sequence carries the sum of the whole sequence.
        whole = sample.get("whole_weight", weight_here)
        shares.append(weight / whole if whole > 0 else 0.0)

    return PackWeights(
        slots=of_slots if weighted else None,
        total=sum(sums),
        shares=shares,
        sequences=sum(weight_here * share for weight_here, share in zip(sums, shares, strict=True)),
    )


def _weigh(
    of_slots: NDArray[np.float32], samples: Sequence[Sample], starts: list[int], lengths: list[int]
) -> list[float]:
    """Multiply the slots' weights by the samples' own, in place; return the weights of the sequences.

    A slot holds the weight of its target, the next token; the last slot's target is in another piece.
    """
    of_sequences = []
    for i, (sample, start, length) in enumerate(zip(samples, starts, lengths, strict=True)):
        of_tokens, of_sequence = sample_weights(sample, length, f"Sample {i}")
        of_slots[start : start + length - 1] *= of_tokens[1:]
        of_slots[start + length - 1] *= sample.get("next_weight", of_sequence)
        of_sequences.append(of_sequence)
    return of_sequences


def _sums(of_slots: NDArray[np.float32], starts: list[int], lengths: list[int]) -> list[float]:
    """Return the sum of the slots' weights of every sequence, added up in float64."""
    running = np.concatenate([[0.0], np.cumsum(of_slots, dtype=np.float64)])
    first = np.asarray(starts, np.int64)
    stop = first + np.asarray(lengths, np.int64)
    sums: list[float] = (running[stop] - running[first]).tolist()
    return sums


def padded_fields(input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, Any]:
    """Build the fields of a ``THDBatch`` on the host; see ``THDBatch.from_padded`` for the arguments."""
    if getattr(labels, "dtype", None) in (torch.uint8, torch.uint16, np.uint8, np.uint16):
        refuse_wrapped(np.asarray(as_tensor(labels).cpu()), "from_padded")
    source = int_tensor(input_ids, "input_ids") if labels is None else int_tensor(labels, "labels")
    ids, mask, source = padded_on_host(input_ids, attention_mask, source, "labels")

    too_low = (ids < 0) | ((source < 0) & (source != IGNORE_INDEX))
    too_high = torch.maximum(ids, source) > MOST_ID
    if bool(((too_low | too_high) & mask).any()):
        raise ValueError(
            f"from_padded() got ids outside 0..{MOST_ID}, or labels outside it that are not -100, where the "
            "mask is 1. Pass token ids, and labels that are token ids or -100 to ignore a token."
        )

    padded_rows = zip(ids.numpy(), source.numpy(), mask.numpy(), strict=True)
    rows = [(id_row[real], label_row[real]) for id_row, label_row, real in padded_rows]
    if labels is not None:
        refuse_shifted(rows, "from_padded()")
    return lay_out([{"input_ids": id_row, "labels": label_row} for id_row, label_row in rows])


def padded_on_host(
    input_ids: Any, attention_mask: Any, other: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Check padded ids, mask and ``other``, copy them to the host at once, and return them ``[B, N]``."""
    if attention_mask is None:
        raise TypeError("attention_mask is None; wanted [B, N]. Pass ones if no token is padding.")

    ids = int_tensor(input_ids, "input_ids")
    mask = attention_mask
    if not isinstance(mask, Tensor):
        mask = as_tensor(np.asarray(mask))
    shapes = [list(x.shape) for x in (ids, mask, other)]
    if ids.ndim != 2 or shapes[1:] != shapes[:1] * 2:
        raise ValueError(
            f"from_padded() got shapes {shapes} for input_ids, mask and {name}, wanted one [B, N] for all."
        )

    odd = (mask != 0) & (mask != 1)  # before long() rounds it
    ids, mask, other, odd = torch.stack([x.long() for x in (ids, mask, other, odd)]).cpu()
    if bool(odd.any()):
        raise ValueError(
            "from_padded() got an attention_mask with values other than 0 and 1. Pass 1 for real tokens."
        )
    if not bool(mask.any()):
        raise ValueError(f"from_padded() got an attention_mask {shapes[1]} without a real token.")
    return ids, mask.bool(), other
