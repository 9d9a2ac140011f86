"""A query with its positive and negative documents -> one sample, whose parts become sequences of a batch.

An example stays one entry of a plan, so that its query and its documents are in the same pack. The collator
makes each part a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_thd._checks import host_ints
from lightning_thd.batch.keys import IGNORE_INDEX, PER_TOKEN

QUERY: Final = 0
POSITIVE: Final = 1
NEGATIVE: Final = 2
# The key under which a sample carries the role and the length of its parts, ints ``[parts, 2]``.
PARTS: Final = "example_parts"

_KEYS = {QUERY: ("query", "anchor"), POSITIVE: ("positive", "positives"), NEGATIVE: ("negative", "negatives")}
_WANTED = "Give {'query': ..., 'positive': ..., 'negative': ...}; 'anchor' is another name of 'query'."


class Places(NamedTuple):
    """Where the parts of a batch's examples are among its sequences."""

    queries: NDArray[np.int64]  # indices of sequences, ``[Q]``
    documents: NDArray[np.int64]  # indices of sequences, ``[N]``
    pairs: NDArray[np.int64]  # rows of a query and of its positive among these, ``[P, 2]``


def is_example(record: Mapping[str, Any]) -> bool:
    """Return whether a record has positives or negatives of a query as text or ids, and no ``input_ids``."""
    if record.get("input_ids") is not None:
        return False
    documents = [value for key, value in record.items() if role_of(key) in (POSITIVE, NEGATIVE)]
    return any(_is_text_or_ids(value) for value in documents)


def _is_text_or_ids(value: Any) -> bool:
    """Return whether a value is text, or a list or array; a single number, such as a score, is neither."""
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim > 0
    return isinstance(value, str | list | tuple)


def role_of(key: str) -> int | None:
    """Return the role of a key of a record, None for other keys; ``negative_1`` is a negative."""
    stem, _, number = key.rpartition("_")
    if stem == "negative" and number.isdigit():
        return NEGATIVE
    return next((role for role, keys in _KEYS.items() if key in keys), None)


def parts_of(record: Mapping[str, Any], name: str) -> list[tuple[int, str, Any]]:
    """Return the parts of an example as (role, key, text or ids), the query first, then the positives."""
    parts: list[tuple[int, str, Any]] = []
    for key, value in record.items():
        role = role_of(key)
        # A column of lists, as datasets and Parquet have, holds an empty list where a query has no negatives.
        is_no_negative = key == "negatives" and isinstance(value, list | tuple) and len(value) == 0
        if role is not None and value is not None and not is_no_negative:
            parts += [(role, key, part) for part in _several(value, key, name)]
    parts.sort(key=lambda part: part[0])  # stable: documents keep their order

    num_queries = sum(role == QUERY for role, _, _ in parts)
    if num_queries > 1:
        raise ValueError(f"{name} has {num_queries} queries; wanted one query. {_WANTED}")
    if num_queries == 0:
        raise ValueError(f"{name} has {_listed(parts)} without a query; wanted one query. {_WANTED}")
    if len(parts) < 2 or parts[1][0] != POSITIVE:
        raise ValueError(f"{name} has a query without a positive, so nothing is to be found. {_WANTED}")
    return parts


def _listed(parts: Sequence[tuple[int, str, Any]]) -> str:
    """Return the distinct keys of parts as words: ``'positive' and 'negative'``."""
    keys = dict.fromkeys(repr(key) for _, key, _ in parts)
    return " and ".join(keys) or "no part"


def _several(value: Any, key: str, name: str) -> list[Any]:
    """Return the texts, or the rows of ids, under one key."""
    entries = _entries(value)
    for entry in entries:
        if not isinstance(entry, str | list | tuple | np.ndarray | Tensor):
            raise ValueError(f"{name}: {key} is {value!r:.40}; wanted text or ids, or a list of them.")
        if len(entry) == 0:
            raise ValueError(f"{name}: {key} has an empty text or no ids. Remove it, or leave the key out.")
    if not entries:
        raise ValueError(f"{name}: {key} is an empty list. Leave the key out.")
    return entries


def _entries(value: Any) -> list[Any]:
    """Return a value's texts or rows of ids, unchecked; a single one becomes a list of one."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, np.ndarray | Tensor):
        return list(value) if value.ndim > 1 else [value]
    if isinstance(value, list | tuple):
        is_one_row = all(isinstance(entry, int | np.integer) for entry in value)
        return [value] if is_one_row else list(value)
    return [None]  # refused by the caller


def example_sample(parts: Sequence[tuple[int, Any]], name: str) -> dict[str, Any]:
    """Return the sample of (role, ids) laid end to end; labels hide tokens that begin a part."""
    rows = [host_ints(ids, f"{name}: ids", advice="Give rows of token ids.") for _, ids in parts]
    ids = np.concatenate(rows)
    lengths = np.array([len(row) for row in rows], np.int64)
    if not lengths.all():
        raise ValueError(f"{name}: a part has no tokens. Remove it from the example.")
    labels = ids.copy()
    labels[np.cumsum(lengths)[:-1]] = IGNORE_INDEX  # the first token of a part follows another part
    roles = np.array([role for role, _ in parts], np.int64)
    return {"input_ids": ids, "labels": labels, PARTS: np.stack([roles, lengths], 1)}


def sample_of_ids(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the sample of a record whose parts are ids."""
    parts = parts_of(record, name)
    texts = [key for _, key, part in parts if isinstance(part, str)]
    if texts:
        raise ValueError(f"{name}: {texts[0]} is text; wanted ids. THDDataModule tokenises text.")
    return example_sample([(role, ids) for role, _, ids in parts], name)


def check_parts(parts: Any, length: int, name: str) -> NDArray[np.int64]:
    """Return the parts of a sample of ``length`` tokens, int64 ``[parts, 2]``, or raise."""
    table = host_ints(parts, f"{name}: {PARTS}", ndim=2)
    is_table = table.shape[1:] == (2,) and len(table) > 1
    if not is_table or not (table[:, 1] > 0).all() or int(table[:, 1].sum()) != length:
        raise ValueError(
            f"{name} has {length} tokens, but {PARTS} that do not cover them. Give query, positive and "
            "negative in place of this key."
        )
    return table


def split(samples: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield every part of some examples as a sample; ``weights`` are those of each example's loss tokens."""
    for sample, weight in zip(samples, weights, strict=True):
        start = 0
        for length in sample[PARTS][:, 1].tolist():
            stop = start + length
            part = {key: value for key, value in sample.items() if key != PARTS}
            for key in PER_TOKEN:
                if key in part:
                    part[key] = np.asarray(part[key])[..., start:stop]
            if np.ndim(part.get("weights", 1)):
                part["weights"] = part["weights"][start:stop]
            part["whole_weight"] = weight
            yield part
            start = stop


def places_of(roles: Sequence[int]) -> Places:
    """Return where queries, documents and their pairs are among sequences of these roles.

    Roles ``[0, 1, 2, 0, 1]`` give queries ``[0, 3]``, documents ``[1, 2, 4]``, pairs ``[[0, 0], [1, 2]]``.
    """
    row = np.asarray(roles, np.int64)
    is_query = row == QUERY
    queries = np.flatnonzero(is_query)
    documents = np.flatnonzero(~is_query)

    query_of = np.cumsum(is_query)[documents] - 1  # a document belongs to the last query before it
    positives = np.flatnonzero(row[documents] == POSITIVE)
    pairs = np.stack([query_of[positives], positives], 1)

    begins_with_query = not len(row) or row[0] == QUERY
    all_have_positives = len(np.unique(pairs[:, 0])) == len(queries)
    unknown = (row < QUERY) | (row > NEGATIVE)
    if not begins_with_query or not all_have_positives or unknown.any():
        raise ValueError(
            f"The batch has the roles {tuple(row.tolist())!r:.60}; wanted 0 for a query, followed by 1 for "
            "each of its positives and 2 for each negative. Collate whole examples."
        )
    return Places(queries, documents, pairs)
