"""The lengths of queries and keys, and a layer's window -> the number of query-key pairs that it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from lightning_thd.flops.listen import AttentionCall
from lightning_thd.flops.terms import Causal
from lightning_thd.stats import IntArray, window_pairs


def visible_pairs(
    q_lengths: Sequence[int], kv_lengths: Sequence[int], *, left: int, right: int, convention: Causal
) -> float:
    """Count the pairs of one call, the last query of each sequence being at its last key.

    ``left`` and ``right`` are the keys that a query sees before and after its own, -1 for all. Only causal
    calls (``right=0``) follow the convention; in others every visible pair counts.
    """
    queries = np.asarray(q_lengths, np.int64)
    keys = np.asarray(kv_lengths, np.int64)
    pairs = _visible_pairs(queries, keys, left, right)
    if right != 0 or convention == "exact":
        return pairs
    square = 2 * pairs - int(queries.sum())  # the diagonal counts once, as in ``SeqStats.sum_squares``
    return square / 2 if convention == "half" else square


def _visible_pairs(queries: IntArray, keys: IntArray, left: int, right: int) -> int:
    """Count the visible pairs: by a formula of the lengths if there is one, else over all queries."""
    if right == 0 and np.array_equal(queries, keys):
        if not len(queries):
            return 0
        window = left + 1 if left >= 0 else int(queries.max()) + 1  # the longest sequence sees itself whole
        return int(window_pairs(queries, window, ends=[len(queries)])[0])
    if left < 0 and right < 0:
        return int(queries @ keys)
    return _pairs_in_band(queries, keys, left, right)


def _pairs_in_band(queries: IntArray, keys: IntArray, left: int, right: int) -> int:
    """Sum over all queries the keys from ``left`` before to ``right`` after the query's own."""
    # For each query: its place in its sequence, the place of its key there, and the first and last key seen.
    starts = np.cumsum(queries) - queries
    place = np.arange(int(queries.sum())) - np.repeat(starts, queries)
    key_place = place + np.repeat(keys - queries, queries)  # the last query is at the last key
    last_key = np.repeat(keys, queries) - 1
    first_seen = np.maximum(0, key_place - left) if left >= 0 else np.zeros_like(key_place)
    last_seen = np.minimum(last_key, key_place + right) if right >= 0 else last_key
    return int(np.maximum(0, last_seen - first_seen + 1).sum())


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """What the attention calls on a batch's own sequences cost, by their windows.

    Attributes:
        costs: by (left, right), the FLOPs of a pair over all layers of one microbatch: forward, backward, and
            run again by checkpointing.
        convention: how the pairs of causal calls are counted.
    """

    costs: dict[tuple[int, int], tuple[Fraction, Fraction, Fraction]]
    convention: Causal

    @classmethod
    def of(cls, calls: Sequence[AttentionCall], microbatches: int, convention: Causal) -> AttentionPattern:
        """Add up calls on their microbatches' own sequences."""
        costs: dict[tuple[int, int], tuple[Fraction, Fraction, Fraction]] = {}
        nothing = (Fraction(0), Fraction(0), Fraction(0))
        for call in calls:
            forward, backward, again = costs.get((call.left, call.right), nothing)
            forward += Fraction(call.forward, microbatches)
            backward += Fraction(call.backward, microbatches)
            again += Fraction(call.again, microbatches)
            costs[call.left, call.right] = forward, backward, again
        return cls(costs, convention)

    def flops(self, lengths: Sequence[int], held: Sequence[int], *, training: bool) -> tuple[float, float]:
        """Return the FLOPs of one microbatch, and those that checkpointing runs again.

        ``held`` are the first tokens of each sequence that another one computes; () without shared prefixes.
        """
        total = recomputed = 0.0
        for (left, right), (forward, backward, again) in self.costs.items():
            options: Any = {"left": left, "right": right, "convention": self.convention}
            pairs = visible_pairs(lengths, lengths, **options)
            if held:
                pairs -= visible_pairs(held, held, **options)
            flops_of_pair = forward + backward if training else forward
            total += float(flops_of_pair) * pairs
            if training:
                recomputed += float(again) * pairs
        return total, recomputed


def flops_of_calls(
    calls: Sequence[AttentionCall], convention: Causal, *, training: bool, host: dict[int, list[int]]
) -> tuple[float, float]:
    """Return the FLOPs of calls on other sequences than the batch's, and those that checkpointing runs again.

    ``host`` holds lengths by the ``id`` of their offsets; offsets that it lacks are read. The calls keep the
    offsets, so no id is reused.
    """
    total = recomputed = 0.0
    pairs_of: dict[tuple[int, int, int, int], float] = {}  # layers call with the same offsets
    for call in calls:
        key = (id(call.cu_seqlens_q), id(call.cu_seqlens_kv), call.left, call.right)
        if key not in pairs_of:
            q_lengths = call.q_lengths or _lengths(call.cu_seqlens_q, host)
            kv_lengths = call.kv_lengths or _lengths(call.cu_seqlens_kv, host)
            pairs_of[key] = visible_pairs(
                q_lengths, kv_lengths, left=call.left, right=call.right, convention=convention
            )
        flops_of_pair = call.forward + call.backward if training else call.forward
        total += flops_of_pair * pairs_of[key]
        if training:
            recomputed += call.again * pairs_of[key]
    return total, recomputed


def _lengths(offsets: Tensor, host: dict[int, list[int]]) -> Sequence[int]:
    """Return the lengths between offsets; the first time, this waits for the device."""
    if id(offsets) not in host:
        host[id(offsets)] = offsets.diff().tolist()
    return host[id(offsets)]
