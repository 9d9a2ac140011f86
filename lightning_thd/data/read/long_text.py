"""A document too long to tokenise at once -> the ids that tokenising it whole gives, a piece at a time.

A fast tokenizer keeps some 800 bytes a token while it works, so that one document of 4 million tokens takes
3 GB. Pieces overlap. Two neighbours are joined where both put the same tokens at the same characters, many in
a row: from there on neither knows what came before. That is exact where a token depends on what is near it:
in BPE, where a row of tokens is the answer if each two neighbours in it are, and for models that look at
words one by one. A unigram model without words chooses the best row of the whole document: it is not cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE = 1 << 17  # characters
_OVERLAP = 1 << 12
_AGREE = 16  # tokens in a row that both pieces have
_LONG = 1 << 20  # characters: shorter documents are tokenised whole

Ids = NDArray[np.int32]  # half the memory of int64, and ids are below 2^31
Ends = NDArray[np.int64]


class NoJoint(Exception):
    """Two pieces of a document agree nowhere, so that it has to be tokenised whole."""


def is_long(tokenizer: Any, text: str) -> bool:
    """Return whether a document is tokenised in pieces: over a million characters, where that is exact."""
    return len(text) > _LONG and can_cut(tokenizer)


def can_cut(tokenizer: Any) -> bool:
    """Return whether a tokenizer gives the same ids piece by piece: a fast one of words or byte pairs."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not getattr(tokenizer, "is_fast", False) or backend is None:
        return False
    model, cuts = backend.model, backend.pre_tokenizer
    if type(model).__name__ in ("BPE", "WordPiece", "WordLevel"):
        return not getattr(model, "dropout", None)
    return cuts is not None and len(cuts.pre_tokenize_str("a b c")) > 1


def encode_long(
    tokenizer: Any, text: str, *, piece: int = _PIECE, overlap: int = _OVERLAP
) -> NDArray[np.integer]:
    """Tokenise a document in pieces of ``piece`` characters, of which neighbours share ``overlap``.

    Returns:
        The ids that ``tokenizer(text)`` gives. Where neighbours agree on no run of tokens it is tokenised
        whole.
    """
    try:
        return np.concatenate([*encode_pieces(tokenizer, [text], piece=piece, overlap=overlap)])
    except NoJoint:
        return np.asarray(tokenizer(text, return_attention_mask=False)["input_ids"], np.int64)


def encode_pieces(
    tokenizer: Any, text: Iterable[str], *, piece: int = _PIECE, overlap: int = _OVERLAP
) -> Iterator[Ids]:
    """Tokenise a document that comes in parts, holding little more than a piece of it.

    Where neighbours agree nowhere, the piece grows by another.

    Args:
        tokenizer: a fast one of transformers.
        text: the parts of the document, of any size.
        piece: characters of a piece.
        overlap: characters that neighbours share.

    Returns:
        int32, part after part of the ids that tokenising the document gives.

    Raises:
        NoJoint: when a piece that grew does not go on where the one before it ended.
    """
    before, after = _added(tokenizer)
    yield before
    window = _Window(text)
    last = _Tokens(tokenizer, window.take(piece), 0)
    kept: tuple[Ids, int] | None = None  # the last tokens given out, and where they end
    while more := window.take(piece - overlap):
        start = last.start + len(last.text) - min(overlap, len(last.text))
        later = _Tokens(tokenizer, last.text[start - last.start :] + more, start)
        joint = _joint(last, later)
        if joint is None:
            last = _Tokens(tokenizer, last.text + more, last.start).following(kept)
            continue
        yield last.ids[: joint[0]]
        agreed = last.ids[: joint[0]][-_AGREE // 2 :]
        kept = agreed, int(last.ends[joint[0] - 1])
        last = later.from_token(joint[1])
    yield last.ids
    yield after


class _Window:
    """Gives the characters of a document in portions of any size."""

    def __init__(self, text: Iterable[str]) -> None:
        self._parts, self._held, self._at = iter(text), "", 0

    def take(self, count: int) -> str:
        """Return the next ``count`` characters, or what is left."""
        held = [self._held[self._at : self._at + count]]
        self._at += len(held[0])
        missing = count - len(held[0])
        while missing and (part := next(self._parts, None)) is not None:
            self._held, self._at = part, min(missing, len(part))
            held.append(part[: self._at])
            missing -= self._at
        return "".join(held)


class _Tokens:
    """The tokens of a piece of a document: ids, the end of each, and a key for its place.

    Args:
        tokenizer: a fast one.
        text: the piece.
        start: its first character in the document.
    """

    def __init__(self, tokenizer: Any, text: str, start: int) -> None:
        self.text, self.start = text, start
        found = tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True
        )
        self.ids: Ids = np.asarray(found["input_ids"], np.int32)
        self.ends: Ends = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)[:, 1] + start
        # Several tokens end at one character that takes more than one: their order tells them apart.
        within = np.arange(len(self.ends)) - np.searchsorted(self.ends, self.ends)
        self.places: Ends = self.ends * 64 + np.minimum(within, 63)

    def from_token(self, first: int) -> _Tokens:
        """Drop the tokens before one."""
        self.ids, self.ends, self.places = self.ids[first:], self.ends[first:], self.places[first:]
        return self

    def following(self, kept: tuple[Ids, int] | None) -> _Tokens:
        """Drop the tokens that were given out before, which must be those at the same place here."""
        if kept is None:
            return self
        given, end = kept
        first = int(np.searchsorted(self.ends, end, side="right"))
        if first < len(given) or not np.array_equal(self.ids[first - len(given) : first], given):
            raise NoJoint
        if int(self.ends[first - 1]) != end:
            raise NoJoint
        return self.from_token(first)


def _joint(last: _Tokens, later: _Tokens) -> tuple[int, int] | None:
    """Find a run of tokens that two pieces share at the same characters, and return its middle in each."""
    first = int(np.searchsorted(last.ends, later.ends[0] if len(later.ends) else 0))
    here = {int(place): i for i, place in enumerate(last.places[first:], first)}
    run = 0
    for j in range(len(later.ids)):
        i = here.get(int(later.places[j]))
        same = i is not None and last.ids[i] == later.ids[j]
        follows = run and same and i is not None and i > 0 and last.places[i - 1] == later.places[j - 1]
        run = run + 1 if follows else int(same)
        if run == _AGREE and i is not None:
            return i - _AGREE // 2, j - _AGREE // 2
    return None


def _added(tokenizer: Any) -> tuple[Ids, Ids]:
    """Return the special tokens that the tokenizer puts before and after a document."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return np.asarray(full[:at], np.int32), np.asarray(full[at + len(bare) :], np.int32)
