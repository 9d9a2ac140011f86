"""A document too long to tokenise at once -> the ids that tokenising it whole gives, a piece at a time.

A fast tokenizer keeps some 800 bytes a token while it works, so that one document of 4 million tokens takes
3 GB. Pieces overlap. Two neighbours are joined at a run of tokens that both put at the same characters: from
there on neither depends on what came before. That is exact if a token depends on what is near it: in BPE,
where a row of tokens is the answer if each two neighbours in it are, and for models that look at words one by
one. A unigram model without words chooses the best row of the whole document, so it is not cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE = 1 << 17  # characters
_OVERLAP = 1 << 12  # characters
_AGREE = 16  # tokens in a row that both pieces must have
_LONG = 1 << 20  # characters; shorter documents are tokenised whole

Ids = NDArray[np.int32]  # half the memory of int64, and ids are below 2^31


def is_long(tokenizer: Any, text: str) -> bool:
    """Return whether a document is tokenised in pieces: over a million characters, if that is exact."""
    if len(text) <= _LONG:
        return False
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
        The ids that ``tokenizer(text)`` gives. If neighbours agree on no run of tokens, the piece grows; if
        the grown piece does not continue the tokens before it, the document is tokenised whole.
    """
    before, after = _added(tokenizer)
    parts: list[NDArray[np.integer]] = [before]
    last = _Tokens(tokenizer, text[:piece], 0)
    read = piece
    given: tuple[Ids, int] | None = None  # the last tokens that were given out, and where they end
    while read < len(text):
        stop = read + piece - overlap
        later = _Tokens(tokenizer, text[read - overlap : stop], read - overlap)
        joint = _joint(last, later)
        read = stop
        if joint is not None:
            parts.append(last.ids[: joint[0]])
            given = last.ids[: joint[0]][-_AGREE // 2 :], int(last.ends[joint[0] - 1])
            last = later.from_token(joint[1])
            continue
        last = _Tokens(tokenizer, text[last.start : stop], last.start)
        if given is not None and not last.follow(*given):
            return np.asarray(tokenizer(text, return_attention_mask=False)["input_ids"], np.int64)
    return np.concatenate([*parts, last.ids, after])


class _Tokens:
    """The tokens of a piece of a document: ids, the end of each, and a key for its place."""

    def __init__(self, tokenizer: Any, text: str, start: int) -> None:
        self.start = start
        found = tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True
        )
        self.ids: Ids = np.asarray(found["input_ids"], np.int32)
        self.ends = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)[:, 1] + start
        # Several tokens end at one character that takes more than one: their order keeps them apart.
        within = np.arange(len(self.ends)) - np.searchsorted(self.ends, self.ends)
        self.places = self.ends * 64 + np.minimum(within, 63)

    def from_token(self, first: int) -> _Tokens:
        """Drop the tokens before one."""
        self.ids, self.ends, self.places = self.ids[first:], self.ends[first:], self.places[first:]
        return self

    def follow(self, given: Ids, end: int) -> bool:
        """Drop the tokens that were given out before; return whether they are at the same place here."""
        first = int(np.searchsorted(self.ends, end, side="right"))
        if first < len(given) or not np.array_equal(self.ids[first - len(given) : first], given):
            return False
        if int(self.ends[first - 1]) != end:
            return False
        self.from_token(first)
        return True


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
