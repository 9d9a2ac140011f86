"""Records of text, ids, prompts or chats, and a tokenizer -> rows of ids, with labels if some are masked."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from lightning_thd.batch.samples import is_scalar, token_row
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
from lightning_thd.data.store.index import OnError, checked_row
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
# Texts that formats keep beside the text of a prompt, or of the first of two sentences.
_SECOND_TEXTS = (
    *("answer", "response", "completion", "output", "target", "solution"),
    *("text_pair", "text2", "sentence2", "hypothesis", "question2"),
)
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


def _refuse_second_text(fields: Mapping[str, Any], text: str, dropped: Collection[str]) -> None:
    """Refuse an answer or a second text beside a record of text, unless the text holds it."""
    for name in _SECOND_TEXTS:
        value = fields.get(name)
        if isinstance(value, str) and value.strip() and value.strip() not in text and name not in dropped:
            raise ValueError(
                f"{name!r} is beside the text, and would be left out. Write it into the text, or give prompt "
                "and completion. If it may be dropped, list it in metadata_keys=, or pass records='text'."
            )


def _label_of(record: Record) -> Number | None:
    """Return the label of a whole record, or None; refuse media and numbers per token: they would be lost."""
    fields = record if isinstance(record, dict) else {}
    for name in _MEDIA:
        media: Any = fields.get(name)
        # An array has no truth value, but a length.
        has_media = len(media) > 0 if hasattr(media, "__len__") else bool(media)
        if has_media:
            raise ValueError(f"{name!r} was found: {_NO_AUDIO if 'audio' in name else _NO_IMAGES}")
    return label_of(fields)


def label_of(fields: Mapping[str, Any]) -> Number | None:
    """Return the label of a whole record, or None; refuse weights and masks of its tokens."""
    refused = _WEIGHTS if "input_ids" in fields else _PER_TOKEN_KEYS
    for name in refused:
        value: Any = fields.get(name)
        if _are_numbers(value) or (name in _ALSO_NUMBERS and is_scalar(value)):
            raise ValueError(f"{name!r} beside text would be left out. Give input_ids, labels and weights.")

    label: Any = fields.get("label")
    if label is None and is_scalar(fields.get("labels")):
        label = fields["labels"]
    if _are_numbers(label):
        raise ValueError(
            "several numbers under 'label', but one is kept of each record. Rename the key, or pass a "
            "list of samples with input_ids and label."
        )
    if not is_scalar(label):
        return None
    if not np.isfinite(label):
        raise ValueError(f"'label' is {label}; wanted a finite number. Fix it, or remove the record.")
    return cast("Number", label)


def _are_numbers(value: Any) -> bool:
    """Return whether a value is a list, array or tensor of numbers."""
    if isinstance(value, np.ndarray | torch.Tensor):
        value = value.tolist()
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
    only_text: bool = False  # the user chose records="text": other keys of a record may be dropped

    def encode(self, placed: Iterable[Placed]) -> Rows:
        """Encode records and lay their ids end to end."""
        records = list(placed)
        skipped: list[Skipped] = []
        rows = self._encode_texts(records)
        if not rows:
            rows = self._encode_one_by_one(records, skipped)

        lengths = np.array([len(row.ids) for row in rows], np.int64)
        labels = None
        if any(row.labels is not None for row in rows):
            labels = _joined([row.ids if row.labels is None else row.labels for row in rows])
        numbers = [row.label for row in rows if row.label is not None]
        parts = [row.parts for row in rows if row.parts is not None]
        return Rows(
            tokens=_joined([row.ids for row in rows]),
            lengths=lengths,
            labels=labels,
            skipped=tuple(skipped),
            label=np.array(numbers) if numbers else None,
            parts=np.concatenate(parts) if parts else None,
            part_counts=np.array([len(of_row) for of_row in parts], np.int64) if parts else None,
        )

    def _leave_out(self, place: str | Line, err: Exception, skipped: list[Skipped]) -> None:
        """List a record as skipped, or raise its error with its place."""
        reason = str(err)
        is_ours = isinstance(err, ValueError) and not isinstance(err, UnicodeError)
        if not is_ours:
            reason = f"the tokenizer raised {type(err).__name__} ({err}). Fix or remove the record."
        if self.on_error == "raise":
            raise ValueError(f"{place}: {reason}") from err
        skipped.append(Skipped(str(place), reason))

    def _encode_texts(self, records: list[Placed]) -> list[_Row] | None:
        """Encode records of text at once; None for another kind, or if a record cannot be encoded."""
        if self.kind != "text":
            return None
        try:
            labels = [_label_of(record) for _, record in records]
            encoded = self._tokenize_batch([self._text_of(record) for _, record in records])
        except Exception:  # any error of the tokenizer; encoding one by one finds the record
            return None
        if None in labels and any(label is not None for label in labels):
            return None
        return [_Row(ids, None, label) for ids, label in zip(encoded, labels, strict=True)]

    def _text_of(self, record: Record) -> str:
        """Return the text of a record; refuse another text beside it that the model would never see."""
        text = text_of(record, self.text_key)
        if isinstance(record, dict) and not self.only_text:
            _refuse_second_text(record, text, (self.text_key, *self.metadata_keys))
        return text

    def _tokenize_batch(self, texts: list[str]) -> list[Ids]:
        """Tokenise documents; each ends with EOS if ``append_eos`` is set."""
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
        bos = tokenizer.bos_token
        eos = tokenizer.eos_token
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

        # A label is kept for all records or none, so the fewer ones are left out.
        few_have_it = 2 * sum(row.label is not None for _, row in rows) < len(rows)
        for place, row in rows:
            if (row.label is not None) == few_have_it:
                article = "a" if few_have_it else "no"
                fault = f"it has {article} number under 'label', unlike most. Give it to all."
                self._leave_out(place, ValueError(fault), skipped)
        return [row for _, row in rows if (row.label is not None) != few_have_it]

    def _encode_record(self, record: Record) -> _Row:
        """Encode one record, or raise with what is wrong with it."""
        if isinstance(record, Bad):
            raise ValueError(record.reason)
        if self.kind == "text":
            [ids] = self._tokenize_batch([self._text_of(record)])
            return _Row(ids, None, _label_of(record))
        if self.kind == "pairs" and isinstance(record, dict):
            return self._encode_example(record)

        kind = kind_of(record, self.text_key)
        if self.kind == "ids" and kind is None and "input_ids" in record:
            raise ValueError("'input_ids' is null. Give the record's ids, or remove it.")
        if isinstance(record, str) or (kind != self.kind and not is_kind(record, self.kind)):
            raise ValueError(f"a record of kind {kind!r} among records of kind {self.kind!r}. Split them.")
        if self.kind == "ids":
            return _Row(*ids_of_record(record), _label_of(record))

        record = {name: x for name, x in record.items() if name not in self.metadata_keys}
        label = _label_of(record)
        encoded, mask = self._encode_conversation(record)
        ids = np.asarray(encoded, np.int64)
        return _Row(ids, np.where(mask, ids, IGNORE_INDEX), label)

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
        """Return the ids of a prompt and completion or a conversation, and which of them are learned."""
        texts = self._prompt_texts(record)
        if texts is not None:
            return self._prompt_and_completion(*texts)

        conversation = messages_of(record, self.kind, self.metadata_keys)
        return encode_chat(
            self.tokenizer,
            conversation.messages,
            tools=conversation.tools,
            skip=conversation.skip,
            options=conversation.options,
        )

    def _prompt_texts(self, record: dict[str, Any]) -> tuple[Any, Any] | None:
        """Return prompt and completion of a record that needs no chat template, else None."""
        if self.kind == "prompt":
            keys: Sequence[str] = ("prompt", "completion")
            prompt = record["prompt"]
            completion = record["completion"]
            if isinstance(prompt, list) and isinstance(completion, list):
                return None  # two lists of messages
        elif self.kind == "alpaca" and not getattr(self.tokenizer, "chat_template", None):
            keys = ALPACA_KEYS
            prompt = f"{alpaca_prompt(record)}\n\n"
            completion = record["output"]
        else:
            return None

        lost = [name for name in ("system", "tools") if record.get(name)]
        if lost:
            raise ValueError(f"{lost[0]!r} beside a prompt would be left out. Write it into the prompt.")
        check_record(record, [name for name in keys if record.get(name) is not None])
        return prompt, completion

    def _prompt_and_completion(self, prompt: object, completion: object) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the ids of a prompt and its completion, and a mask that is True for the completion."""
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise ValueError("prompt and completion must be two strings, or two lists of messages.")
        if "\0" in prompt + completion:
            raise ValueError("the record has a null character (\\u0000), so it is not text. Remove it.")

        # At inference the prompt is encoded without a completion, so no token may reach over its end.
        before = self._encode_prompt(prompt)
        after = self._with_eos(self._encode_after(prompt, completion))
        mask = np.repeat([False, True], [len(before), len(after)])
        return np.concatenate([before, after]).astype(np.int64), mask

    def _encode_prompt(self, text: str) -> Ids:
        """Encode a prompt, with the BOS but without the EOS that the tokenizer adds."""
        ids = as_ids(self.tokenizer(text))
        bos = getattr(self.tokenizer, "bos_token", None)
        eos = self._eos
        if bos and text.startswith(bos) and len(ids) > 1 and ids[0] == ids[1] == self._bos:
            ids = ids[1:]  # the prompt begins with the BOS that the tokenizer adds

        if eos is None and not is_hugging_face(self.tokenizer):
            _, behind = self._added(ids)
            return ids[: len(ids) - behind]
        if eos is None or not len(ids) or ids[-1] != eos:
            return ids

        # The prompt itself may end with EOS, so look for the prompt's own tokens before that EOS.
        bare = self._without_special_tokens(text) if is_hugging_face(self.tokenizer) else ids[:-1]
        before_eos = ids[len(ids) - 1 - len(bare) : -1]
        return ids[:-1] if np.array_equal(before_eos, bare) else ids

    def _encode_after(self, prompt: str, completion: str) -> Ids:
        """Encode a completion as it continues a prompt; some tokenizers put a blank before any text."""
        if not is_hugging_face(self.tokenizer):
            return self._without_special_tokens(completion)

        # A token may reach over the end of the prompt. Then encode behind a text where none does.
        for text in (prompt, "\n", "a"):
            start = self._without_special_tokens(text)
            both = self._without_special_tokens(text + completion)
            if np.array_equal(both[: len(start)], start):
                return both[len(start) :]
        return self._without_special_tokens(completion)

    def _without_special_tokens(self, text: str) -> Ids:
        """Encode a text without what a tokenizer adds; of a function, only what it adds before the text."""
        if is_hugging_face(self.tokenizer) or isinstance(self.tokenizer, ByteTokenizer):
            return as_ids(cast("Any", self.tokenizer)(text, add_special_tokens=False))
        ids = as_ids(self.tokenizer(text))
        before, _ = self._added(ids)
        return ids[before:]

    def _added(self, ids: Ids) -> tuple[int, int]:
        """Count the ids that a function put before and after a text; it returns only these for no text."""
        special = as_ids(self.tokenizer(""))
        for before in range(len(special), -1, -1):
            behind = len(special) - before
            if np.array_equal([*ids[:before], *ids[len(ids) - behind :]], special):
                return before, behind
        return 0, 0

    def _with_eos(self, row: Ids) -> Ids:
        """Append EOS unless the row ends with it, there is none, or ``append_eos`` is off."""
        eos = self._eos
        if eos is None or not self.append_eos or (len(row) and row[-1] == eos):
            return row
        if row.dtype.kind in "iu" and eos <= np.iinfo(row.dtype).max:
            return np.append(row, np.array([eos], row.dtype))
        return np.append(row.astype(np.int64), np.array([eos]))

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
    lost = [name for name in _NOT_KEPT if record.get(name) is not None]
    if lost:
        raise ValueError(
            f"{', '.join(lost)} beside input_ids would be lost: only ids and labels are kept. Write Parquet."
        )
    read: dict[str, Any] = {
        name: record[name] for name in ("input_ids", "labels", "attention_mask") if name in record
    }
    sample = checked_row(read, "the record", empty=True)
    return sample["input_ids"], sample.get("labels")


def is_hugging_face(tokenizer: object) -> bool:
    """Return whether a tokenizer has the interface of transformers."""
    return hasattr(tokenizer, "apply_chat_template") and hasattr(tokenizer, "convert_ids_to_tokens")


def as_ids(encoded: Any) -> Ids:
    """Check that a tokenizer's output is one row of integers, and return it."""
    if hasattr(encoded, "keys") and "input_ids" in encoded:
        encoded = encoded["input_ids"]
    return token_row({"input_ids": encoded}, "input_ids", "The tokenizer's answer", empty=True)


def _joined(rows: list[Ids]) -> NDArray[Any]:
    return np.concatenate(rows) if rows else np.empty(0, np.int64)


def find_kind(chunks: Sequence[Chunk], *, records: Records, text_key: str, on_error: OnError) -> Kind:
    """Return ``records``; for "auto", the first kind that keys of the examined records show, else "text"."""
    placed = chain.from_iterable(chunk() for chunk in chunks)
    examined = _KIND_RECORDS if on_error == "skip" else 1
    first = [record for _, record in islice(placed, examined)]
    if not first:
        raise ValueError("The source has no record. Give at least one line, file or row.")
    if records != "auto":
        return records

    for record in first:
        kind = None if isinstance(record, Bad) else kind_of(record, text_key)
        if kind is not None:
            return kind
    return "text"


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
