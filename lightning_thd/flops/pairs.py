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
    queries, keys = np.asarray(q_lengths, np.int64), np.asarray(kv_lengths, np.int64)
    if right == 0 and np.array_equal(queries, keys):
        window = left + 1 if left >= 0 else int(queries.max(initial=0)) + 1
        pairs = int(window_pairs(queries, window, ends=[len(queries)])[0]) if len(queries) else 0
    elif left < 0 and right < 0:
        pairs = int(queries @ keys)
    else:
        pairs = _pairs_in_band(queries, keys, left, right)
    if right != 0 or convention == "exact":
        return pairs
    square = 2 * pairs - int(queries.sum())  # the diagonal counts once, as in ``SeqStats.sum_squares``
    return square / 2 if convention == "half" else square


def _pairs_in_band(queries: IntArray, keys: IntArray, left: int, right: int) -> int:
    """Sum over all queries the keys from ``left`` before to ``right`` after the query's own."""
    starts = np.cumsum(queries) - queries
    places = np.arange(int(queries.sum())) - np.repeat(starts, queries)
    last = np.repeat(keys, queries) - 1
    own = places + np.repeat(keys - queries, queries)
    first = np.maximum(0, own - left) if left >= 0 else np.zeros_like(own)
    end = np.minimum(last, own + right) if right >= 0 else last
    return int(np.maximum(0, end - first + 1).sum())


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """What the attention calls on a batch's own sequences cost, by their windows.

    Attributes:
        costs: by (left, right), the FLOPs of a pair forward and backward, over all layers of one microbatch.
        convention: how the pairs of causal calls are counted.
    """

    costs: dict[tuple[int, int], tuple[Fraction, Fraction]]
    convention: Causal

    @classmethod
    def of(cls, calls: Sequence[AttentionCall], microbatches: int, convention: Causal) -> AttentionPattern:
        """Add up calls on their microbatches' own sequences."""
        costs: dict[tuple[int, int], tuple[Fraction, Fraction]] = {}
        for call in calls:
            forward, backward = costs.get((call.left, call.right), (Fraction(0), Fraction(0)))
            forward += Fraction(call.forward, microbatches)
            backward += Fraction(call.backward, microbatches)
            costs[call.left, call.right] = forward, backward
        return cls(costs, convention)

    def flops(self, lengths: Sequence[int], held: Sequence[int], *, training: bool) -> float:
        """Return the FLOPs of one microbatch.

        ``held`` are the first tokens of each sequence that another one computes; () without shared prefixes.
        """
        total = 0.0
        for (left, right), (forward, backward) in self.costs.items():
            options: Any = {"left": left, "right": right, "convention": self.convention}
            pairs = visible_pairs(lengths, lengths, **options)
            if held:
                pairs -= visible_pairs(held, held, **options)
            total += float(forward + backward if training else forward) * pairs
        return total


def flops_of_calls(
    calls: Sequence[AttentionCall], convention: Causal, *, training: bool, host: dict[int, list[int]]
) -> float:
    """Return the FLOPs of calls on other sequences than the batch's; reads offsets that ``host`` lacks."""
    total = 0.0
    pairs_of: dict[Any, float] = {}
    for call in calls:
        key = (id(call.cu_seqlens_q), id(call.cu_seqlens_kv), call.left, call.right)
        if key not in pairs_of:
            q = call.q_lengths or _lengths(call.cu_seqlens_q, host)
            kv = call.kv_lengths or _lengths(call.cu_seqlens_kv, host)
            pairs_of[key] = visible_pairs(q, kv, left=call.left, right=call.right, convention=convention)
        total += (call.forward + call.backward if training else call.forward) * pairs_of[key]
    return total


def _lengths(offsets: Tensor, host: dict[int, list[int]]) -> Sequence[int]:
    if id(offsets) not in host:
        host[id(offsets)] = offsets.diff().tolist()
    return host[id(offsets)]
