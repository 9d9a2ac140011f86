"""Records of text, prompts or conversations, and a tokenizer -> rows of ids, and of labels where some count.

Nothing here compares an id with the pad id: where EOS and pad are one token, EOS keeps its target.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from lightning_thd._imports import require
from lightning_thd.data.read.chat import encode_chat
from lightning_thd.data.read.records import Place, Record
from lightning_thd.data.read.text import ByteTokenizer, text_of
from lightning_thd.data.store.tokens import Rows

Tokenizer = Callable[[str], Sequence[int] | NDArray[np.integer]]
Kind = Literal["text", "prompt", "chat"]
Placed = tuple[Place, Record]
Encoded = tuple[Sequence[int] | NDArray[np.integer], NDArray[np.bool_] | None]

_IGNORE = -100
_MEDIA = ("images", "image", "videos", "video", "audio", "audios", "pixel_values")
_NO_AUDIO = "audio cannot be packed, only tokens, images and video. Remove these records."
_NO_IMAGES = (
    "images and video go through the model's processor: give a dataset of your own whose samples carry "
    "input_ids, position_ids, pixel_values and image_grid_thw."
)


def load_tokenizer(tokenizer: Tokenizer | str | None) -> Tokenizer:
    """Open a Hugging Face tokenizer by its name or path; None stands for UTF-8 bytes."""
    if tokenizer is None:
        return ByteTokenizer()
    if isinstance(tokenizer, str):
        transformers = require("transformers", feature=f"tokenizer={tokenizer!r}")
        return cast("Tokenizer", transformers.AutoTokenizer.from_pretrained(tokenizer))
    return tokenizer


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str | None:
    """Hash all that decides the ids; None for a function, which says nothing about itself.

    A function with an attribute ``fingerprint`` has that one.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return "bytes"
    own = getattr(tokenizer, "fingerprint", None)
    if own is not None:
        return str(own)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = getattr(tokenizer, "name_or_path", None)
    if backend is None and not name:
        return None
    parts = [
        backend.to_str() if backend is not None else f"{name} {len(cast('Any', tokenizer))}",
        json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True, default=str),
        repr(getattr(tokenizer, "special_tokens_map", None)),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def kind_of(place: Place, record: Record, text_key: str) -> Kind:
    """Say what a record is.

    Raises:
        ValueError: when it is neither text nor a prompt with its completion nor a conversation.
    """
    if isinstance(record, dict):
        if "messages" in record:
            return "chat"
        if "prompt" in record and "completion" in record:
            return "prompt"
        if text_key not in record and "conversations" in record:
            raise ValueError(
                f"{place}: 'conversations' was found. Rename it to 'messages', a list of "
                "{'role': ..., 'content': ...}."
            )
    text_of(place, record, text_key)
    return "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Records of one kind -> ``Rows``.

    Attributes:
        tokenizer: gives ids; a Hugging Face tokenizer where records are conversations.
        kind: of every record. ``"text"`` has no labels, the others have loss on what the assistant says.
        text_key: the key of the text in a record.
        append_eos: end documents and completions with the tokenizer's EOS where it did not do so.
    """

    tokenizer: Tokenizer
    kind: Kind
    text_key: str = "text"
    append_eos: bool = True

    def encode(self, placed: Iterable[Placed]) -> Rows:
        """Encode records and lay them end to end.

        Raises:
            ValueError: for a record of another kind, or one that cannot be encoded; the message says where.
        """
        if self.kind == "text":
            return self._texts(list(placed))
        rows = [self._labelled(place, record) for place, record in placed]
        ids = [np.asarray(row, dtype=np.int64) for row, _ in rows]
        masks = [cast("NDArray[np.bool_]", mask) for _, mask in rows]
        labels = [np.where(mask, row, _IGNORE) for row, mask in zip(ids, masks, strict=True)]
        return Rows(_joined(ids), _lengths(ids), _joined(labels))

    def _texts(self, placed: list[Placed]) -> Rows:
        texts = [text_of(place, record, self.text_key) for place, record in placed]
        if is_hugging_face(self.tokenizer) and texts:
            encoded = cast("Any", self.tokenizer)(texts, return_attention_mask=False)["input_ids"]
        else:
            encoded = [_ids(self.tokenizer(text)) for text in texts]
        ids = [self._ended(row) for row in encoded]
        return Rows(_joined(ids), _lengths(ids))

    def _labelled(self, place: Place, record: Record) -> Encoded:
        try:
            found = kind_of(place, record, self.text_key)
            if found != self.kind:
                raise ValueError(f"a record of kind {found!r} among those of kind {self.kind!r}. Sort them.")
            record = cast("dict[str, Any]", record)
            for name in _MEDIA:
                if record.get(name):
                    raise ValueError(f"{name!r} was found: {_NO_AUDIO if 'audio' in name else _NO_IMAGES}")
            if self.kind == "chat":
                return encode_chat(self.tokenizer, record["messages"], tools=record.get("tools"))
            return self._completed(record)
        except ValueError as err:
            raise ValueError(f"{place}: {err}") from err

    def _completed(self, record: dict[str, Any]) -> Encoded:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return encode_chat(
                self.tokenizer, [*prompt, *completion], tools=record.get("tools"), skip=len(prompt)
            )
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise ValueError(
                f"prompt and completion are {type(prompt).__name__} and {type(completion).__name__}. "
                "Give two strings, or two lists of messages."
            )
        # Apart, because that is how the model will meet the prompt when it is asked to complete it.
        before, after = self._open(prompt), self._ended(self._bare(completion))
        mask = np.repeat([False, True], [len(before), len(after)])
        return np.concatenate([before, after]).astype(np.int64), mask

    def _open(self, text: str) -> NDArray[np.integer]:
        """Encode the start of a row: with what the tokenizer puts first, without what it puts last."""
        ids, eos = _ids(self.tokenizer(text)), self._eos
        return ids[:-1] if len(ids) and ids[-1] == eos else ids

    def _bare(self, text: str) -> NDArray[np.integer]:
        if is_hugging_face(self.tokenizer) or isinstance(self.tokenizer, ByteTokenizer):
            return _ids(cast("Any", self.tokenizer)(text, add_special_tokens=False))
        return _ids(self.tokenizer(text))

    def _ended(self, row: Sequence[int] | NDArray[np.integer]) -> NDArray[np.integer]:
        ids, eos = np.asarray(row), self._eos
        if eos is None or not self.append_eos or (len(ids) and ids[-1] == eos):
            return ids if len(ids) else np.empty(0, np.int64)
        return np.append(ids.astype(np.int64), eos)

    @property
    def _eos(self) -> int | None:
        return getattr(self.tokenizer, "eos_token_id", None)


def is_hugging_face(tokenizer: object) -> bool:
    """Say whether a tokenizer has the interface of transformers."""
    return hasattr(tokenizer, "apply_chat_template") and hasattr(tokenizer, "convert_ids_to_tokens")


def _ids(encoded: Any) -> NDArray[np.integer]:
    ids = np.asarray(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)
    if not ids.size:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"The tokenizer gave an array of shape {ids.shape} and type {ids.dtype} for a string. "
            "It must give one row of integer ids."
        )
    return ids


def _joined(rows: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(rows) if rows else np.empty(0, np.int64)


def _lengths(rows: list[NDArray[Any]]) -> NDArray[np.int64]:
    return np.array([len(row) for row in rows], np.int64)
