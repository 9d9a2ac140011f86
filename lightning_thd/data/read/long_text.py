"""A document too long to tokenise at once -> the ids that tokenising it whole gives, a piece at a time.

A fast tokenizer keeps some 800 bytes a token while it works, so that one document of 4 million tokens takes 3
GB. Pieces overlap. Two neighbours are joined where both put the same tokens at the same characters, many in a
row: from there on neither knows what came before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE = 1 << 18  # characters
_OVERLAP = 1 << 12
_AGREE = 16  # tokens in a row that both pieces have
_LONG = 1 << 20  # characters: shorter documents are tokenised whole


def is_long(tokenizer: Any, text: str) -> bool:
    """Return whether a document is tokenised in pieces: over a million characters, by a fast tokenizer."""
    return len(text) > _LONG and bool(getattr(tokenizer, "is_fast", False))


def encode_long(
    tokenizer: Any, text: str, *, piece: int = _PIECE, overlap: int = _OVERLAP
) -> NDArray[np.integer]:
    """Tokenise a document in pieces of ``piece`` characters, of which neighbours share ``overlap``.

    Returns:
        The ids that ``tokenizer(text)`` gives. Where neighbours agree on no run of tokens it is tokenised
        whole.
    """
    parts: list[NDArray[np.int32]] = []  # half the memory: ids are below 2^31
    ids, ends = _piece(tokenizer, text, 0, piece)
    start = 0
    while start + piece < len(text):
        start += piece - overlap
        later, later_ends = _piece(tokenizer, text, start, piece)
        joint = _joint(ids, ends, later, later_ends)
        if joint is None:
            return np.asarray(tokenizer(text, return_attention_mask=False)["input_ids"], np.int64)
        parts.append(ids[: joint[0]].astype(np.int32))
        ids, ends = later[joint[1] :], later_ends[joint[1] :]
    parts.append(ids.astype(np.int32))
    before, after = _added(tokenizer)
    return np.concatenate([before, *parts, after])


def _piece(tokenizer: Any, text: str, start: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Encode characters ``start`` to ``start + size``: the ids, and where each ends in the document."""
    found = tokenizer(
        text[start : start + size],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
    )
    offsets = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)
    return np.asarray(found["input_ids"], np.int64), offsets[:, 1] + start


def _joint(
    ids: NDArray[np.int64], ends: NDArray[np.int64], later: NDArray[np.int64], later_ends: NDArray[np.int64]
) -> tuple[int, int] | None:
    """Find a run of tokens that two pieces share at the same characters, and return its middle in each."""
    first = int(np.searchsorted(ends, later_ends[0] if len(later_ends) else 0))
    here = {int(end): i for i, end in enumerate(ends[first:], first)}
    run = 0
    for j in range(len(later)):
        i = here.get(int(later_ends[j]))
        same = i is not None and ids[i] == later[j]
        follows = run and same and i is not None and i > 0 and j > 0 and ends[i - 1] == later_ends[j - 1]
        run = run + 1 if follows else int(same)
        if run == _AGREE and i is not None:
            return i - _AGREE // 2, j - _AGREE // 2
    return None


def _added(tokenizer: Any) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the special tokens that the tokenizer puts before and after a document."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return np.asarray(full[:at], np.int32), np.asarray(full[at + len(bare) :], np.int32)
