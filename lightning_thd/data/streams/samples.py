"""A record of a stream -> a sample that can be packed and sent: ids, labels, and the rest as bytes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_thd.batch.keys import TYPES, names, refuse_boundaries, refuse_keys
from lightning_thd.batch.media import ExtrasCost, declared, patch_table, sizes_of
from lightning_thd.batch.samples import (
    check_sample,
    per_token_row,
    refuse_restart,
    refuse_shifted,
    whole_weight,
)
from lightning_thd.data.read.conversations import Records, kind_of
from lightning_thd.data.read.encode import Encoder, Tokenizer
from lightning_thd.data.read.vision_chat import VisionChat

StreamOversize = Literal["error", "drop", "truncate", "own_pack"]

# What every rank knows of a sequence that any rank holds; ranks send it to each other.
META = np.dtype(
    [
        ("length", "<i4"),  # tokens
        ("keys", "<i4"),  # bit 0: labels; the others: see _KEYS
        ("extra", "<i4"),  # bytes of everything but ids and labels
        ("shard", "<i4"),
        ("row", "<i8"),
        ("round", "<i4"),  # pass over its source
        ("weight", "<f8"),  # sum over its loss tokens; their number if nothing is weighed
        ("sequences", "<f8"),  # its weight among sequences
        ("patches", "<i8"),  # its images have so many
        ("squares", "<i8"),  # sum of the squared patches of each frame
    ]
)
LABELS = 1
# What the policies of a data module leave out or change, by the names of their counts.
POLICIES = ("empty", "dropped", "truncated", "own_pack", "tokens_lost")
# Either all sequences of a job carry one of these or none does: bits of META's ``keys``.
_KEYS = {**{name: 2 << i for i, name in enumerate(TYPES)}, "position_ids": 2 << len(TYPES)}
_OWN = ("input_ids", "labels", "attention_mask")
# Beside ids these are no names or notes, but what the model should see or learn.
_UNREAD = ("next_label", *names("raw", "audio", "media"))
_INT32 = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sequence as a rank holds and sends it: ids, labels, and further inputs as bytes."""

    ids: npt.NDArray[np.int32]  # int32 ``[n]``
    labels: npt.NDArray[np.int32] | None
    extra: bytes  # the other keys, pickled; empty where there are none
    meta: dict[str, Any] = field(default_factory=dict)  # its entry of ``META``, but for shard and row


def unpacked(ids: Any, labels: Any, extra: bytes) -> dict[str, Any]:
    """Return a sample as the dict that ``THDBatch.collate`` takes."""
    sample: dict[str, Any] = {"input_ids": ids}
    if labels is not None:
        sample["labels"] = labels
    if extra:
        sample |= pickle.loads(extra)
    return sample


@dataclass(kw_only=True)
class Sampler:
    """Turns records into samples by the policies of a data module, and counts what they leave out."""

    capacity: int
    oversize: StreamOversize = "error"
    drop_empty: bool = False
    tokenizer: Tokenizer
    text_key: str = "text"
    append_eos: bool = True
    records: Records = "auto"
    one_each: bool = True  # refuse positions that begin again inside a record
    vocab_size: int | None = None
    chat: VisionChat | None = None
    extras_cost: ExtrasCost | None = None
    patch: int | None = None
    max_patches: int | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POLICIES, 0))
    _encoders: dict[str, Encoder] = field(default_factory=dict)

    def __call__(self, record: Any, row: int) -> Sample | None:
        """Convert a record to a sample, or return None where a policy leaves it out."""
        sample = self._with_ids(record)
        if sample is None or not len(sample["input_ids"]):
            if not self.drop_empty:
                raise ValueError("the sequence has no tokens. Remove it, or pass empty='drop'.")
            self.counts["empty"] += 1
            return None
        patches, squares = self._patches(record, sample)
        if self.max_patches is not None and patches > self.max_patches and self.oversize != "own_pack":
            if self.oversize != "drop":
                raise ValueError(
                    f"the sequence has {patches} image patches but max_patches={self.max_patches}. Raise it, "
                    "make the images smaller, or set oversize='drop' or 'own_pack'."
                )
            self.counts["dropped"] += 1
            return None
        fitted = self._fitted(sample)
        if fitted is None:
            return None
        packed = self._packed(fitted)
        packed.meta.update(patches=patches, squares=squares)
        return packed

    def _patches(self, record: Any, sample: dict[str, Any]) -> tuple[int, int]:
        """Return the patches of a sample's images, and the sum of their squares over frames."""
        sizes = (
            sizes_of(sample) if self.extras_cost is None else declared(self.extras_cost, record, "the record")
        )
        if self.max_patches is not None and self.patch is None and sizes[2]:
            raise ValueError(
                f"max_patches={self.max_patches}, but its images come as pixels, and the model's config has "
                "no known patch size. Pass extras_cost=, a function from a record to its patches."
            )
        patches, squares = patch_table(np.array([sizes], np.int64), self.patch)[0].tolist()
        return patches, squares

    def _with_ids(self, record: Any) -> dict[str, Any] | None:
        if isinstance(record, Mapping) and "input_ids" in record and self.records in ("auto", "ids"):
            sample = dict(record)
            ids = sample["input_ids"]
            if ids is None or (hasattr(ids, "__len__") and not len(ids)):
                return None
            return sample
        if not isinstance(record, str | Mapping):
            raise TypeError(
                f"a {type(record).__name__} is no sequence. A stream gives dicts with input_ids, or text."
            )
        record = dict(record) if isinstance(record, Mapping) else record
        if self.chat is not None:
            return self.chat.sample(record if isinstance(record, dict) else {"text": record}, None)
        kind = self.records if self.records != "auto" else kind_of(record, self.text_key) or "text"
        if kind not in self._encoders:
            self._encoders[kind] = Encoder(
                kind=kind,
                tokenizer=self.tokenizer,
                text_key=self.text_key,
                append_eos=self.append_eos,
            )
        rows = self._encoders[kind].encode([("the record", record)])
        sample = {"input_ids": rows.tokens}
        if rows.labels is not None:
            sample["labels"] = rows.labels
        if rows.label is not None:
            sample["label"] = rows.label[0]
        return sample

    def _fitted(self, sample: dict[str, Any]) -> dict[str, Any] | None:
        """Apply the ``oversize`` policy to a sample: keep, cut, drop or refuse it."""
        length = len(sample["input_ids"])
        if length <= self.capacity:
            return sample
        if self.oversize == "error":
            raise ValueError(
                f"the sequence has {length} tokens but capacity={self.capacity}. Set oversize='truncate', "
                "'drop' or 'own_pack', or raise capacity."
            )
        self.counts[{"drop": "dropped", "truncate": "truncated"}.get(self.oversize, "own_pack")] += 1
        if self.oversize == "own_pack":
            return sample
        self.counts["tokens_lost"] += length - (self.capacity if self.oversize == "truncate" else 0)
        return _cut(sample, length, self.capacity) if self.oversize == "truncate" else None

    def _packed(self, sample: dict[str, Any]) -> Sample:
        extras = {key: value for key, value in sample.items() if key not in _OWN and _kept(key, value)}
        refuse_keys(sample)
        _refuse_lost(sample, extras, one_each=self.one_each)
        own = {key: sample[key] for key in _OWN if key in sample}
        checked = check_sample({**own, **extras}, "the record")
        ids, labels = checked["input_ids"], checked.get("labels")
        length = len(ids)
        limit = self.vocab_size if self.vocab_size is not None else _INT32 + 1
        if int(ids.max()) >= limit:
            raise ValueError(
                f"the token ids run from {int(ids.min())} to {int(ids.max())}, wanted 0 to {limit - 1}. Use "
                "the tokenizer the model was made for."
            )
        if labels is not None:
            if int(labels.max()) >= limit:
                raise ValueError(
                    f"labels hold {labels.min()} to {labels.max()}; wanted ids from 0 to {limit - 1}, or "
                    "-100 where a token is not to be learned."
                )
            labels = labels.astype(np.int32)
            refuse_shifted([(ids, labels)], "the record")
        keys = 0 if labels is None else LABELS
        for name, bit in _KEYS.items():
            if name in extras:
                keys |= bit
        weighed = {**extras, "input_ids": ids, "labels": ids if labels is None else labels}
        weight, sequences = whole_weight(weighed, "the record")
        extra = pickle.dumps(extras, protocol=pickle.HIGHEST_PROTOCOL) if extras else b""
        extra += b"." * (-len(extra) % 4)  # whole int32; pickle stops at its end
        meta = {
            "length": length,
            "keys": keys,
            "extra": len(extra),
            "weight": weight,
            "sequences": sequences if weight else 0.0,
        }
        return Sample(ids=ids.astype(np.int32), labels=labels, extra=extra, meta=meta)


def _refuse_lost(sample: dict[str, Any], extras: dict[str, Any], *, one_each: bool) -> None:
    """Refuse what says more of a sequence, or of several in one record, and would be left out."""
    refuse_boundaries(sample, "the record")
    if one_each:
        refuse_restart(sample, "the record", "Give the sequences one by one, or set packed='off'.")
    left = [name for name in _UNREAD if sample.get(name) is not None and name not in extras]
    if left:
        raise ValueError(
            f"it carries {left[0]!r} as {type(sample[left[0]]).__name__}, which a stream leaves out. Give "
            "inputs of the model as arrays or tensors with at least one axis, or drop the key."
        )


def _kept(key: str, value: Any) -> bool:
    """Return whether a key of a record is an input of the model rather than text or a name."""
    if key in _KEYS or key == "weights":
        return True
    if key == "label":  # that of the sequence
        return value is not None
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind in "biufc"
    return isinstance(value, Tensor) and value.ndim > 0


def _cut(sample: dict[str, Any], length: int, capacity: int) -> dict[str, Any]:
    """Cut a sample's per-token values to the first ``capacity`` tokens."""
    cut = {}
    for key, value in sample.items():
        if key == "labels":
            per_token_row(sample, key, length, "the record")  # cut, they would be as many as the ids
        if key in _OWN or key in TYPES or (key == "weights" and np.ndim(value) == 1):
            cut[key] = value[:capacity]
        elif key == "position_ids":
            cut[key] = np.asarray(value)[..., :capacity]
        elif key not in ("weights", "label") and _kept(key, value):
            raise ValueError(
                f"the sequence has {length} tokens and carries {key!r}, which cannot be truncated with it. "
                "Set oversize='drop' or 'own_pack'."
            )
        else:
            cut[key] = value
    return cut


def check_keys(table: npt.NDArray[Any], names: list[str]) -> None:
    """Raise when some sequences of the job carry a key that others lack."""
    for key, bit in _KEYS.items():
        if key == "position_ids":  # a sequence without counts from 0
            continue
        has = (table["keys"] & bit) != 0
        if has.any() and not has.all():
            one, other = (names[int(table["shard"][mask][0])] for mask in (has, ~has))
            raise ValueError(
                f"Sequences of shard {one} carry {key!r} and some of shard {other} do not. Give it to all of "
                "them, or drop it."
            )
