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
    check_sample,
    refuse_null_targets,
    refuse_restart,
    refuse_shifted,
    whole_weight,
)
from lightning_thd.data.read.conversations import Records, kind_of
from lightning_thd.data.read.encode import Encoder, Tokenizer
from lightning_thd.data.read.vision_chat import VisionChat
from lightning_thd.data.store.index import refuse_cut
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
        given = self._with_ids(record, folder)
        if given["input_ids"] is None or not len(given["input_ids"]):
            if not self.drop_empty:
                raise ValueError("the sequence has no tokens. Remove it, or pass empty='drop'.")
            self.counts["empty"] += 1
            return None
        sample = self._checked(given)
        patches, squares = self._patches(record, sample)
        wide = self.max_patches is not None and patches > self.max_patches
        if wide and self.oversize not in ("drop", "own_pack"):
            raise ValueError(f"{patches} image patches but max_patches={self.max_patches}. Raise it.")
        fitted = self._fitted(sample, row, wide)
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
        cost = self.extras_cost
        sizes = sizes_of(sample) if cost is None else declared(cost, record, "the record")
        if self.max_patches is not None and self.patch is None and sizes[2]:
            raise ValueError(f"max_patches={self.max_patches}, but images come as pixels. Pass extras_cost=.")
        patches, squares = patch_table(np.array([sizes], np.int64), self.patch)[0].tolist()
        return patches, squares

    def _with_ids(self, record: Any, folder: Path | None) -> dict[str, Any]:
        if (
            isinstance(record, Mapping)
            and record.get("input_ids") is not None
            and self.records in ("auto", "ids")
        ):
            return dict(record)
        if not isinstance(record, str | Mapping):
            raise TypeError(f"a {type(record).__name__} is not a sequence. A stream must give dicts or str.")
        record = dict(record) if isinstance(record, Mapping) else record
        if self.chat is not None:
            return self.chat.sample(record if isinstance(record, dict) else {"text": record}, folder)
        kind = self.records if self.records != "auto" else kind_of(record, self.text_key) or "text"
        if kind not in self._encoders:
            self._encoders[kind] = Encoder(
                kind=kind,
                tokenizer=self.tokenizer,
                text_key=self.text_key,
                append_eos=self.append_eos,
                metadata_keys=self.metadata_keys,
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

    def _checked(self, given: dict[str, Any]) -> dict[str, Any]:
        """Check a sample, and drop keys that are not inputs of the model, such as text and names."""
        refuse_null_targets(given, "the record")
        sample = check_sample({key: x for key, x in given.items() if _is_read(key, x)}, "the record")
        sample.pop("attention_mask", None)  # checked to be all ones
        if self.one_each:
            refuse_restart(sample, "the record", "Give one sequence per record, or set packed='off'.")
        for key, what in (("input_ids", "token id"), ("labels", "label")):
            if key not in sample:
                continue
            if self.vocab_size is not None and int(sample[key].max()) >= self.vocab_size:
                raise ValueError(
                    f"the {what} {int(sample[key].max())}, but the model's vocabulary has {self.vocab_size}."
                )
            sample[key] = sample[key].astype(np.int32)
        if "labels" in sample:
            refuse_shifted([(sample["input_ids"], sample["labels"])], "the record")
        return sample

    def _fitted(self, sample: dict[str, Any], row: int, wide: bool) -> dict[str, Any] | None:
        """Apply the ``oversize`` policy to a sample that is too long, or has too many patches (``wide``)."""
        length = len(sample["input_ids"])
        if length <= self.capacity and not wide:
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
        self.counts["truncated"] += 1
        self.counts["tokens_lost"] += length - self.capacity
        cut = {key: sample[key][..., : self.capacity] for key in sample if key in PER_TOKEN}
        if np.ndim(sample.get("weights", 1)):
            cut["weights"] = sample["weights"][: self.capacity]
        fitted = sample | cut
        if not _is_learned(fitted) and _is_learned(sample):
            self.counts["truncated"] -= 1
            self.counts["tokens_lost"] += self.capacity
            self.counts["truncated_without_targets"] += 1
            return None
        return fitted


def _is_learned(sample: Mapping[str, Any]) -> bool:
    """Return whether a sample has a token with a target."""
    return bool((sample.get("labels", sample["input_ids"])[1:] != IGNORE_INDEX).any())


def _form_of(sample: dict[str, Any]) -> Form:
    shapes = {key: ("*", *sample[key].shape[1:]) for key in inputs(sample) if sample[key].shape != (0,)}
    shapes |= {key: (*sample[key].shape[:-1], "*") for key in ("position_ids",) if key in sample}
    shapes |= {key: sample[key].shape for key in ("label",) if key in sample}
    presence = {name: "given" if name in sample else "" for name in PER_SOURCE}
    shapes |= {key: ("*",) for key in (PARTS,) if key in sample}
    return (
        dict.fromkeys(_LIKE_OTHERS, "")
        | presence
        | {key: f"[{', '.join(map(str, shape))}]" for key, shape in shapes.items()}
    )


def _is_read(key: str, value: Any) -> bool:
    """Return whether a key is read: a known one, or another with an array of numbers; None is not read."""
    if value is None or key in KEYS:
        return value is not None
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind in "biufc"
    return isinstance(value, Tensor) and value.ndim > 0
