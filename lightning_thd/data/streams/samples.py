"""A record of a stream -> a sample that can be sent to another rank: its values as bytes, and its sizes."""

from __future__ import annotations

import pickle
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightning_thd.batch.examples import PARTS
from lightning_thd.batch.keys import IGNORE_INDEX, KEYS, PER_TOKEN, inputs
from lightning_thd.batch.media import ExtrasCost, declared, patch_table, sizes_of
from lightning_thd.batch.samples import (
    refuse_null_targets,
    refuse_restart,
    refuse_shifted,
    whole_weight,
)
from lightning_thd.data.read.conversations import Records, kind_of
from lightning_thd.data.read.encode import Encoder, Tokenizer
from lightning_thd.data.read.vision_chat import VisionChat
from lightning_thd.data.store.index import checked_row, refuse_cut
from lightning_thd.packing.entries import Oversize

# What every rank knows about each sequence that any rank has read.
META = np.dtype(
    [
        ("length", "<i4"),  # tokens
        ("bytes", "<i4"),  # size of the payload
        ("shard", "<i4"),  # number of the shard
        ("row", "<i8"),  # row in the shard
        ("round", "<i4"),  # number of the pass over the source
        ("weight", "<f8"),  # summed weight of the loss tokens; without weights, their number
        ("sequences", "<f8"),  # weight of the sequence
        ("patches", "<i8"),  # patches of all images
        ("squares", "<i8"),  # sum over frames of squared patch counts
        ("form", "<u4"),  # hash of its ``Form``
    ]
)
# Keys that all samples of a source have, or none; the sources of a mixture may differ.
PER_SOURCE = ("labels",)
_LIKE_OTHERS = ("label", PARTS)  # keys that all samples of a batch have, or none
Form = dict[str, str]  # by key, a shape in which the samples of a batch must agree; "" without a label
# Names of counts: the sequences that a data module's policies leave out or change, and the tokens lost.
# A sequence of which no token is learned after truncation is dropped, and counted by itself.
POLICIES = ("empty", "dropped", "truncated", "truncated_without_targets", "own_pack", "tokens_lost")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sequence in the form in which ranks keep and send it."""

    payload: bytes  # the pickled sample that ``THDBatch.collate`` takes
    meta: dict[str, Any]  # the fields of ``META`` except shard, row and round
    form: Form


@dataclass(kw_only=True)
class Sampler:
    """Turns records into samples; applies the policies of a data module, and counts their effects."""

    capacity: int
    oversize: Oversize = "error"
    drop_empty: bool = False
    tokenizer: Tokenizer
    text_key: str = "text"
    append_eos: bool = True
    records: Records = "auto"
    metadata_keys: Sequence[str] = ()
    one_each: bool = True  # refuse records in which positions start again from 0
    vocab_size: int | None = None
    chat: VisionChat | None = None
    extras_cost: ExtrasCost | None = None
    patch: int | None = None  # edge of an image patch in pixels; None if unknown
    max_patches: int | None = None
    counts: Counter[str] = field(default_factory=Counter)  # by names of ``POLICIES``
    _encoders: dict[str, Encoder] = field(default_factory=dict)

    def __call__(self, record: Any, row: int, folder: Path | None = None) -> Sample | None:
        """Convert a record to a sample, or return None if a policy leaves it out.

        ``folder`` is where relative paths of images start.
        """
        encoded = self._with_ids(record, folder)
        if encoded["input_ids"] is None or not len(encoded["input_ids"]):
            if not self.drop_empty:
                raise ValueError("the sequence has no tokens. Remove it, or pass empty='drop'.")
            self.counts["empty"] += 1
            return None

        sample = self._checked(encoded)
        patches, squares = self._patches(record, sample)
        too_many_patches = self.max_patches is not None and patches > self.max_patches
        if too_many_patches and self.oversize not in ("drop", "own_pack"):
            raise ValueError(f"{patches} image patches but max_patches={self.max_patches}. Raise it.")
        fitted = self._fitted(sample, row, too_many_patches)
        if fitted is None:
            return None

        weight, sequences = whole_weight(fitted, "the record")
        form = _form_of(fitted)
        payload = pickle.dumps(fitted, protocol=pickle.HIGHEST_PROTOCOL)
        meta = {
            "length": len(fitted["input_ids"]),
            "bytes": len(payload),
            "weight": weight,
            "sequences": sequences if weight else 0.0,
            "patches": patches,
            "squares": squares,
            "form": zlib.crc32(repr(sorted(form.items())).encode()),
        }
        return Sample(payload=payload, meta=meta, form=form)

    def _patches(self, record: Any, sample: dict[str, Any]) -> tuple[int, int]:
        """Return ``patches`` and ``squares`` of ``META``."""
        cost = self.extras_cost
        sizes = sizes_of(sample) if cost is None else declared(cost, record, "the record")
        pixels = sizes[2]
        if self.max_patches is not None and self.patch is None and pixels:
            raise ValueError(f"max_patches={self.max_patches}, but images come as pixels. Pass extras_cost=.")
        patches, squares = patch_table(np.array([sizes], np.int64), self.patch)[0].tolist()
        return patches, squares

    def _with_ids(self, record: Any, folder: Path | None) -> dict[str, Any]:
        """Return a record of ids as it is, and any other rendered or tokenised."""
        has_ids = isinstance(record, Mapping) and record.get("input_ids") is not None
        if has_ids and self.records in ("auto", "ids"):
            return dict(record)
        if not isinstance(record, str | Mapping):
            raise TypeError(f"a {type(record).__name__} is not a sequence. A stream must give dicts or str.")

        if isinstance(record, Mapping):
            fields: dict[str, Any] = dict(record)
            if "input_ids" in fields and kind_of(fields, self.text_key) is None:
                return fields  # null ids, and nothing beside them that has tokens
            record = fields
        if self.chat is not None:
            return self.chat.sample(record if isinstance(record, dict) else {"text": record}, folder)

        kind = self.records
        if kind == "auto":
            kind = kind_of(record, self.text_key) or "text"
        if kind not in self._encoders:
            self._encoders[kind] = Encoder(
                kind=kind,
                tokenizer=self.tokenizer,
                text_key=self.text_key,
                append_eos=self.append_eos,
                metadata_keys=self.metadata_keys,
                only_text=self.records == "text",
            )
        rows = self._encoders[kind].encode([("the record", record)])
        sample = {"input_ids": rows.tokens}
        if rows.labels is not None:
            sample["labels"] = rows.labels
        if rows.label is not None:
            sample["label"] = rows.label[0]
        if rows.parts is not None:
            sample[PARTS] = rows.parts
        return sample

    def _checked(self, encoded: dict[str, Any]) -> dict[str, Any]:
        """Check a sample, and drop keys that are not inputs of the model, such as text and names."""
        refuse_null_targets(encoded, "the record")
        sample = checked_row({key: x for key, x in encoded.items() if _is_read(key, x)}, "the record")
        sample.pop("attention_mask", None)  # checked to be all ones
        if self.one_each:
            refuse_restart(sample, "the record", "Give one sequence per record, or set packed='off'.")

        for key, what in (("input_ids", "token id"), ("labels", "label")):
            if key not in sample:
                continue
            largest = int(sample[key].max())
            if self.vocab_size is not None and largest >= self.vocab_size:
                raise ValueError(f"the {what} {largest}, but the model's vocabulary has {self.vocab_size}.")
            sample[key] = sample[key].astype(np.int32)  # ranks hold and send half as much as with int64
        if "labels" in sample:
            refuse_shifted([(sample["input_ids"], sample["labels"])], "the record")
        return sample

    def _fitted(self, sample: dict[str, Any], row: int, too_many_patches: bool) -> dict[str, Any] | None:
        """Apply the ``oversize`` policy to a sample that is too long, or has too many patches."""
        length = len(sample["input_ids"])
        if length <= self.capacity and not too_many_patches:
            return sample

        if self.oversize == "error":
            raise ValueError(f"the sequence has {length} tokens but capacity={self.capacity}. Set oversize=.")
        if self.oversize == "own_pack":
            self.counts["own_pack"] += 1
            return sample
        if self.oversize == "drop":
            self.counts["dropped"] += 1
            self.counts["tokens_lost"] += length
            return None

        refuse_cut(sample, row, length)
        per_token = {key: values[..., : self.capacity] for key, values in sample.items() if key in PER_TOKEN}
        if np.ndim(sample.get("weights", 1)):  # one weight per token, and not one for the sequence
            per_token["weights"] = sample["weights"][: self.capacity]
        truncated = sample | per_token
        if _is_learned(sample) and not _is_learned(truncated):
            # Weight decay would move the weights in a step that has nothing to learn.
            self.counts["truncated_without_targets"] += 1
            self.counts["tokens_lost"] += length
            return None
        self.counts["truncated"] += 1
        self.counts["tokens_lost"] += length - self.capacity
        return truncated


def _is_learned(sample: Mapping[str, Any]) -> bool:
    """Return whether a sample has a token with a target."""
    return bool((sample.get("labels", sample["input_ids"])[1:] != IGNORE_INDEX).any())


def _form_of(sample: dict[str, Any]) -> Form:
    """Return the shapes of a sample's inputs, with ``*`` in place of the axis that collating joins."""
    form = dict.fromkeys(_LIKE_OTHERS, "")
    form |= {name: "given" if name in sample else "" for name in PER_SOURCE}
    for key in inputs(sample):
        if sample[key].shape != (0,):  # no image: it joins with images of any size
            form[key] = _shape_text("*", *sample[key].shape[1:])
    if "position_ids" in sample:
        form["position_ids"] = _shape_text(*sample["position_ids"].shape[:-1], "*")
    if "label" in sample:
        form["label"] = _shape_text(*sample["label"].shape)
    if PARTS in sample:
        form[PARTS] = _shape_text("*")
    return form


def _shape_text(*axes: int | str) -> str:
    return f"[{', '.join(map(str, axes))}]"


def _is_read(key: str, value: Any) -> bool:
    """Return whether a key is read: a known one, or another with an array of numbers; None is not read."""
    if value is None:
        return False
    if key in KEYS:
        return True
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind in "biufc"
    return isinstance(value, Tensor) and value.ndim > 0
