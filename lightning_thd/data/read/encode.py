"""Records of text, ids, prompts or chats, and a tokenizer -> rows of ids, with labels if some are masked."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from lightning_thd._checks import refuse_missing
from lightning_thd._imports import require
from lightning_thd._workers import begin_worker, own_generator
from lightning_thd.batch.examples import PARTS, example_sample, parts_of
from lightning_thd.batch.keys import IGNORE_INDEX, names, refuse_keys
from lightning_thd.batch.samples import check_sample, is_scalar, token_row
from lightning_thd.data.read.chat import encode_chat
from lightning_thd.data.read.conversations import (
    ALPACA_KEYS,
    Kind,
    Records,
    alpaca_prompt,
    is_kind,
    kind_of,
    messages_of,
)
from lightning_thd.data.read.message_keys import check_record
from lightning_thd.data.read.records import Bad, Chunk, Line, Placed, Record
from lightning_thd.data.read.text import ByteTokenizer, text_of
from lightning_thd.data.store.index import OnError
from lightning_thd.data.store.tokens import Rows, Skipped

Tokenizer = Callable[[str], Sequence[int] | NDArray[np.integer]]
Ids = NDArray[np.integer]
Number = int | float

_KIND_RECORDS = 1000  # with on_error="skip", this many records are searched for a known kind; else one
# Keys that are refused beside text if they hold a list of numbers; ``_ALSO_NUMBERS`` also if they hold one.
_PER_TOKEN_KEYS = names("weight", "other_weight", "mask", "token", "type", "other_boundary")
_WEIGHTS = names("weight", "other_weight")
_MEDIA = names("raw", "audio", "media")
_ALSO_NUMBERS = (*_WEIGHTS, "prompt_length", "prompt_len", "prompt_lengths", "answer_start_idx")
# Keys beside ids that are refused, because a store keeps only ids, labels and ``label``.
_NOT_KEPT = (*names("weight", "type", "media", "boundary"), "next_label", "position_ids")
_NO_AUDIO = "audio cannot be packed, only tokens, images and video. Remove these records."
_NO_IMAGES = "images need conversations and processor=. Pass both, or drop the key."


def load_tokenizer(tokenizer: Tokenizer | str | None) -> Tokenizer:
    """Open a Hugging Face tokenizer by its name or path; None means UTF-8 bytes."""
    if tokenizer is None:
        return ByteTokenizer()
    if isinstance(tokenizer, str):
        refuse_missing(tokenizer, "Pass a folder that save_pretrained() wrote, or a tokenizer's name.")
        transformers = require("transformers", feature=f"tokenizer={tokenizer!r}")
        return cast("Tokenizer", transformers.AutoTokenizer.from_pretrained(tokenizer))
    if not callable(cast("object", tokenizer)):  # such as tokenizers.Tokenizer
        advice = "Pass a function of text, such as lambda text: tokenizer.encode(text).ids."
        raise TypeError(f"tokenizer is a {type(tokenizer).__name__}, which cannot be called. {advice}")
    return tokenizer


class _Row(NamedTuple):
    """An encoded record: its ids, its labels if some are masked, and the label of the whole sequence."""

    ids: Ids
    labels: Ids | None
    label: Number | None
    parts: NDArray[np.int64] | None = None  # role and length of query and documents, ``[parts, 2]``


def _label_of(record: Record) -> Number | None:
    """Return the label of a whole record, or None; refuse media and numbers per token: they would be lost."""
    fields = record if isinstance(record, dict) else {}
    for name in _MEDIA:
        media: Any = fields.get(name)
        if len(media) if hasattr(media, "__len__") else media:
            raise ValueError(f"{name!r} was found: {_NO_AUDIO if 'audio' in name else _NO_IMAGES}")
    return label_of(fields)


def label_of(fields: Mapping[str, Any]) -> Number | None:
    """Return the label of a whole record, or None; refuse weights and masks of its tokens."""
    for name in _WEIGHTS if "input_ids" in fields else _PER_TOKEN_KEYS:
        found = fields.get(name)
        if _is_row(found) or (name in _ALSO_NUMBERS and is_scalar(found)):
            raise ValueError(f"{name!r} beside text would be left out. Give input_ids, labels and weights.")
    value: Any = fields.get("label")
    if value is None and is_scalar(fields.get("labels")):
        value = fields["labels"]
    if _is_row(value):
        raise ValueError(
            "several numbers under 'label', but one is kept of each record. Rename the key, or pass a "
            "list of samples with input_ids and label."
        )
    if is_scalar(value) and not np.isfinite(value):
        raise ValueError(f"'label' is {value}; wanted a finite number. Fix it, or remove the record.")
    return cast("Number", value) if is_scalar(value) else None


def _is_row(value: Any) -> bool:
    value = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
    return isinstance(value, list) and bool(value) and all(map(is_scalar, value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Encodes records of one kind to ids laid end to end."""

    tokenizer: Tokenizer  # text -> ids; conversations need a Hugging Face tokenizer
    kind: Kind
    text_key: str = "text"  # the key of the text in a record
    append_eos: bool = True  # end documents and completions with EOS if the tokenizer does not add it
    on_error: OnError = "raise"  # what to do with a record that cannot be encoded
    metadata_keys: Sequence[str] = ()  # keys of conversations that may be dropped

    def encode(self, placed: Iterable[Placed]) -> Rows:
        """Encode records and lay their ids end to end."""
        records = list(placed)
        skipped: list[Skipped] = []
        rows = self._encode_texts(records) or self._encode_one_by_one(records, skipped)
        ids = [row.ids for row in rows]
        lengths = np.array([len(row) for row in ids], np.int64)
        labels = None
        if any(row.labels is not None for row in rows):
            labels = _joined([row.ids if row.labels is None else row.labels for row in rows])
        numbers = [row.label for row in rows if row.label is not None]
        label = np.array(numbers) if numbers else None
        parts = [row.parts for row in rows if row.parts is not None]
        counts = np.array([len(part) for part in parts], np.int64) if parts else None
        joined = np.concatenate(parts) if parts else None
        return Rows(_joined(ids), lengths, labels, tuple(skipped), label, joined, counts)

    def _leave_out(self, place: str | Line, err: Exception, skipped: list[Skipped]) -> None:
        known = isinstance(err, ValueError) and not isinstance(err, UnicodeError)
        reason = f"the tokenizer raised {type(err).__name__} ({err}). Fix or remove the record."
        if self.on_error == "raise":
            raise ValueError(f"{place}: {err if known else reason}") from err
        skipped.append(Skipped(str(place), str(err) if known else reason))

    def _encode_texts(self, records: list[Placed]) -> list[_Row] | None:
        """Encode records of text at once; None for another kind, or if a record cannot be encoded."""
        if self.kind != "text":
            return None
        try:
            labels = [_label_of(record) for _, record in records]
            encoded = self._tokenize_batch([text_of(record, self.text_key) for _, record in records])
        except Exception:  # any error of the tokenizer; encoding one by one finds the record
            return None
        if None in labels and any(label is not None for label in labels):
            return None
        return [_Row(ids, None, label) for ids, label in zip(encoded, labels, strict=True)]

    def _tokenize_batch(self, texts: list[str]) -> list[Ids]:
        if not is_hugging_face(self.tokenizer):
            return [self._with_eos(as_ids(self.tokenizer(text))) for text in texts]
        if not texts:
            return []
        tokenizer: Any = self.tokenizer
        lists = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False)["input_ids"]
        eos = self._eos if self.append_eos else None
        for text, row in zip(texts, lists, strict=True):
            self._drop_second_ends(text, row)
            if eos is not None and (not row or row[-1] != eos):
                row.append(eos)
        # numpy would take three times as long as array() to find out the type of these lists.
        return [np.frombuffer(array("i", row), np.int32) for row in lists]

    def _drop_second_ends(self, text: str, row: list[int]) -> None:
        """Remove from a text's ids the BOS or EOS that the tokenizer added beside the one in the text."""
        tokenizer: Any = self.tokenizer
        bos, eos = tokenizer.bos_token, tokenizer.eos_token
        if bos and text.startswith(bos) and row[:2] == [tokenizer.bos_token_id] * 2:
            del row[0]
        if eos and text.endswith(eos) and row[-2:] == [tokenizer.eos_token_id] * 2:
            del row[-1]

    def _encode_one_by_one(self, records: list[Placed], skipped: list[Skipped]) -> list[_Row]:
        rows: list[tuple[str | Line, _Row]] = []
        for place, record in records:
            try:
                row = self._encode_record(record)
                if rows and (row.labels is None) != (rows[0][1].labels is None):
                    has, had = ("no labels", "labels") if row.labels is None else ("labels", "none")
                    raise ValueError(f"it has {has}, but the records before had {had}. Give all labels.")
                rows.append((place, row))
            except Exception as err:  # templates and tokenizers raise many types of errors
                self._leave_out(place, err, skipped)
        few = 2 * sum(row.label is not None for _, row in rows) < len(rows)  # most records have no label
        for place in (place for place, row in rows if (row.label is not None) == few):
            odd = f"it has {'a' if few else 'no'} number under 'label', unlike most. Give it to all."
            self._leave_out(place, ValueError(odd), skipped)
        return [row for _, row in rows if (row.label is not None) != few]

    def _encode_record(self, record: Record) -> _Row:
        if isinstance(record, Bad):
            raise ValueError(record.reason)
        if self.kind == "text":
            return _Row(self._tokenize_batch([text_of(record, self.text_key)])[0], None, _label_of(record))
        if self.kind == "pairs" and isinstance(record, dict):
            return self._encode_example(record)
        found = kind_of(record, self.text_key)
        if isinstance(record, str) or (found != self.kind and not is_kind(record, self.kind)):
            raise ValueError(f"a record of kind {found!r} among records of kind {self.kind!r}. Split them.")
        if self.kind == "ids":
            return _Row(*ids_of_record(record), _label_of(record))
        record = {name: x for name, x in record.items() if name not in self.metadata_keys}
        label = _label_of(record)
        ids, mask = self._encode_conversation(record)
        row = np.asarray(ids, np.int64)
        return _Row(row, np.where(mask, row, IGNORE_INDEX), label)

    def _encode_example(self, record: dict[str, Any]) -> _Row:
        """Encode a query and its documents, each as a text of its own, or take their ids as they are."""
        if _label_of(record) is not None:
            raise ValueError(
                "'label' beside a query would be left out: documents are positives or negatives. Sort them "
                "by their label, or drop the key."
            )
        parts = parts_of(record, "the record")
        texts = iter(self._tokenize_batch([_text_of_part(*part) for part in parts if _is_text(part)]))
        ids = [next(texts) if _is_text(part) else part[2] for part in parts]
        roles = [role for role, _, _ in parts]
        sample = example_sample(list(zip(roles, ids, strict=True)), "the record")
        return _Row(sample["input_ids"], sample["labels"], None, sample[PARTS])

    def _encode_conversation(self, record: dict[str, Any]) -> tuple[Sequence[int] | Ids, NDArray[np.bool_]]:
        texts = None
        if self.kind == "prompt":
            texts = record["prompt"], record["completion"]
        elif self.kind == "alpaca" and not getattr(self.tokenizer, "chat_template", None):
            texts = f"{alpaca_prompt(record)}\n\n", record["output"]
        if texts is not None and not all(isinstance(text, list) for text in texts):
            if lost := [name for name in ("system", "tools") if record.get(name)]:
                raise ValueError(f"{lost[0]!r} beside a prompt would be left out. Write it into the prompt.")
            own = ("prompt", "completion") if self.kind == "prompt" else ALPACA_KEYS
            check_record(record, [name for name in own if record.get(name) is not None])
            return self._prompt_and_completion(*texts)
        talk = messages_of(record, self.kind, self.metadata_keys)
        return encode_chat(
            self.tokenizer, talk.messages, tools=talk.tools, skip=talk.skip, options=talk.options
        )

    def _prompt_and_completion(self, prompt: object, completion: object) -> tuple[Ids, NDArray[np.bool_]]:
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise ValueError("prompt and completion must be two strings, or two lists of messages.")
        if "\0" in prompt + completion:
            raise ValueError("the record has a null character (\\u0000), so it is not text. Remove it.")
        # At inference the prompt is encoded without a completion, so no token may reach over its end.
        before, after = self._encode_prompt(prompt), self._with_eos(self._encode_after(prompt, completion))
        mask = np.repeat([False, True], [len(before), len(after)])
        return np.concatenate([before, after]).astype(np.int64), mask

    def _encode_prompt(self, text: str) -> Ids:
        """Encode a prompt, with the BOS but without the EOS that the tokenizer adds."""
        ids, eos = as_ids(self.tokenizer(text)), self._eos
        bos = getattr(self.tokenizer, "bos_token", None)
        if bos and text.startswith(bos) and len(ids) > 1 and ids[0] == ids[1] == self._bos:
            ids = ids[1:]  # the prompt begins with the BOS that the tokenizer adds
        if eos is None and not is_hugging_face(self.tokenizer):
            return ids[: len(ids) - self._added(ids)[1]]
        if eos is None or not len(ids) or ids[-1] != eos:
            return ids
        # The prompt itself may end with EOS, so look for the prompt's own tokens before that EOS.
        bare = self._without_special_tokens(text) if is_hugging_face(self.tokenizer) else ids[:-1]
        return ids[:-1] if np.array_equal(ids[len(ids) - 1 - len(bare) : -1], bare) else ids

    def _encode_after(self, prompt: str, completion: str) -> Ids:
        """Encode a completion as it continues a prompt; some tokenizers put a blank before any text."""
        for text in (prompt, "\n", "a") if is_hugging_face(self.tokenizer) else ():
            start = self._without_special_tokens(text)
            both = self._without_special_tokens(text + completion)
            if np.array_equal(both[: len(start)], start):
                return both[len(start) :]
        return self._without_special_tokens(completion)

    def _without_special_tokens(self, text: str) -> Ids:
        if is_hugging_face(self.tokenizer) or isinstance(self.tokenizer, ByteTokenizer):
            return as_ids(cast("Any", self.tokenizer)(text, add_special_tokens=False))
        ids = as_ids(self.tokenizer(text))
        return ids[self._added(ids)[0] :]

    def _added(self, ids: Ids) -> tuple[int, int]:
        """Count the ids that a function put before and after a text; it returns only these for no text."""
        special = as_ids(self.tokenizer(""))
        for bos in range(len(special), -1, -1):
            eos = len(special) - bos
            if np.array_equal([*ids[:bos], *ids[len(ids) - eos :]], special):
                return bos, eos
        return 0, 0

    def _with_eos(self, row: Ids) -> Ids:
        eos = self._eos
        if eos is None or not self.append_eos or (len(row) and row[-1] == eos):
            return row
        fits = row.dtype.kind in "iu" and eos <= np.iinfo(row.dtype).max
        return np.append(row if fits else row.astype(np.int64), np.array([eos], row.dtype if fits else None))

    @property
    def _bos(self) -> int | None:
        return getattr(self.tokenizer, "bos_token_id", None)

    @property
    def _eos(self) -> int | None:
        return getattr(self.tokenizer, "eos_token_id", None)


def _is_text(part: tuple[int, str, Any]) -> bool:
    return isinstance(part[2], str)


def _text_of_part(role: int, key: str, text: str) -> str:
    return text_of({key: text}, key)  # refuses null characters


def ids_of_record(record: dict[str, Any]) -> tuple[Ids, Ids | None]:
    """Return the ids of a tokenised record, and its labels or None."""
    refuse_keys(record)
    if found := [name for name in _NOT_KEPT if record.get(name) is not None]:
        raise ValueError(
            f"{', '.join(found)} beside input_ids would be lost: only ids and labels are kept. Write Parquet."
        )
    read = ("input_ids", "labels", "attention_mask")
    sample = check_sample({name: record[name] for name in read if name in record}, "the record", empty=True)
    return sample["input_ids"], sample.get("labels")


def is_hugging_face(tokenizer: object) -> bool:
    """Return whether a tokenizer has the interface of transformers."""
    return hasattr(tokenizer, "apply_chat_template") and hasattr(tokenizer, "convert_ids_to_tokens")


def as_ids(encoded: Any) -> Ids:
    """Check that a tokenizer's output is one row of integers, and return it."""
    encoded = encoded["input_ids"] if hasattr(encoded, "keys") and "input_ids" in encoded else encoded
    return token_row({"input_ids": encoded}, "input_ids", "The tokenizer's answer", empty=True)


def _joined(rows: list[Ids]) -> NDArray[Any]:
    return np.concatenate(rows) if rows else np.empty(0, np.int64)


def find_kind(chunks: Sequence[Chunk], *, records: Records, text_key: str, on_error: OnError) -> Kind:
    """Return ``records``; for "auto", the first kind that keys of the examined records show, else "text"."""
    placed = chain.from_iterable(chunk() for chunk in chunks)
    first = [record for _, record in islice(placed, _KIND_RECORDS if on_error == "skip" else 1)]
    if not first:
        raise ValueError("The source has no record. Give at least one line, file or row.")
    if records != "auto":
        return records
    found = (kind_of(record, text_key) for record in first if not isinstance(record, Bad))
    return next((kind for kind in found if kind is not None), "text")


def _encode(encoder: Encoder, chunk: Chunk) -> Rows:
    return encoder.encode(chunk())


def tokenize(
    chunks: Sequence[Chunk], encoder: Encoder, *, num_workers: int = 0, progress: bool = False
) -> Iterator[Rows]:
    """Encode chunks in order, with only a few chunks in memory."""
    loader = DataLoader(
        cast("TorchDataset[Chunk]", chunks),
        batch_size=None,
        num_workers=min(num_workers, len(chunks)),
        collate_fn=partial(_encode, encoder),
        worker_init_fn=begin_worker,
        generator=own_generator(),
    )
    yield from tqdm(loader, desc="Tokenising", unit="chunk", total=len(chunks), disable=not progress)
