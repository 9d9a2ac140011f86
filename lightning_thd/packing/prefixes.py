"""Token ids of sequences -> groups with a common prefix, each planned like one sequence.

A pack holds the tokens of a shared prefix once. A group is one or more branches of the prefix tree over all
sequences. It fits a pack, unless it is one sequence above the capacity (``own_pack``). Inside a group, each
sequence after the first shares its longest prefix with the sequence just before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_thd.packing.balance import balanced_bins
from lightning_thd.packing.entries import (
    Lengths,
    Oversize,
    make_entries,
    open_lengths,
    read_lengths,
    summarize,
)
from lightning_thd.packing.lengths import make_slots
from lightning_thd.packing.permutation import derive_key, permute
from lightning_thd.packing.plan import Packs, Sequences, Spans, StepPlan
from lightning_thd.packing.planner import LossTokens, PackPlanner, open_loss_tokens

IntArray = npt.NDArray[np.int64]
_LEAST = 8  # neighbours in sorted order that share less than 1/8 of the shorter one get separate groups
_GROUPS = 7  # mixed into the key that orders the groups of an epoch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """Groups of sequences that are planned together."""

    rows: IntArray  # int64 ``[S]``, dataset indices, group after group
    offsets: IntArray  # int64 ``[G + 1]``, where each group begins in ``rows``
    shared: IntArray  # int64 ``[S]``, how many first tokens each shares with the one before it in its group
    first: IntArray  # int64 ``[S]``, the first token of each, -1 if it has none
    repeated: int  # prefixes that several groups compute, because their sequences do not fit one group


def group_prefixes(ids: Callable[[int], bytes], width: int, rows: IntArray, limit: int, seed: int) -> Groups:
    """Group sequences by prefix; a group has at most ``limit`` distinct tokens, of ``width`` bytes each."""
    texts = {row: ids(row) for row in rows.tolist()}
    order = sorted(texts, key=texts.__getitem__)
    lengths = np.array([len(texts[row]) // width for row in order], np.int64)
    shared = np.array([0, *(_common(texts[a], texts[b], width) for a, b in pairwise(order))], np.int64)
    joins = shared * _LEAST >= np.minimum(lengths, np.concatenate([[0], lengths[:-1]]))
    bounds = np.flatnonzero(np.concatenate([~(joins & (shared > 0)), [True]]))
    cut = _Cut(lengths, shared, limit, np.random.default_rng(seed % 2**256))  # numpy takes none below 0
    for a, b in pairwise(bounds.tolist()):
        cut.add(a, b)
    places = np.concatenate([np.empty(0, np.int64), *(place for group in cut.groups for place in group)])
    firsts = np.concatenate([[0], np.cumsum([sum(map(len, group)) for group in cut.groups])]).astype(np.int64)
    held = shared[places]
    starts = np.concatenate([[0], np.cumsum([len(p) for group in cut.groups for p in group])])[:-1]
    held[starts] = [depth for group, depth in zip(cut.groups, cut.depths, strict=True) for _ in group]
    held[firsts[:-1]] = 0
    rows = np.asarray(order, np.int64)[places]
    first = [int.from_bytes(texts[row][:width], "little") if texts[row] else -1 for row in rows.tolist()]
    return Groups(
        rows=rows, offsets=firsts, shared=held, first=np.array(first, np.int64), repeated=cut.repeated
    )


def _common(a: bytes, b: bytes, width: int) -> int:
    most = min(len(a), len(b))
    differ = np.frombuffer(a, np.uint8, most) != np.frombuffer(b, np.uint8, most)
    return (int(differ.argmax()) if differ.any() else most) // width


class _Cut:
    """Cuts sequences, sorted by their tokens, into groups; a group is a list of ranges of sequences."""

    def __init__(self, lengths: IntArray, shared: IntArray, limit: int, random: np.random.Generator) -> None:
        self._lengths, self._shared, self._limit, self._random = lengths, shared, limit, random
        self.groups: list[list[IntArray]] = []
        self.depths: list[int] = []  # for each group, how many first tokens all its ranges share
        self.repeated = 0  # prefixes that several groups compute

    def _size(self, a: int, b: int) -> int:
        return int(self._lengths[a:b].sum() - self._shared[a + 1 : b].sum())

    def add(self, a: int, b: int) -> None:
        """Add sequences ``a`` to ``b - 1`` as one group, or cut them where neighbours share fewest tokens."""
        waiting = [(a, b)]
        while waiting:
            a, b = waiting.pop()
            if b - a == 1 or self._size(a, b) <= self._limit:
                self.groups.append([np.arange(a, b)])
                self.depths.append(0)
                continue
            depth = int(self._shared[a + 1 : b].min())
            edges = [a, *(a + 1 + np.flatnonzero(self._shared[a + 1 : b] == depth)).tolist(), b]
            branches = [(c, d, self._size(c, d)) for c, d in pairwise(edges)]
            waiting += [(c, d) for c, d, size in branches if size > self._limit]
            self._join([x for x in branches if x[2] <= self._limit], depth)
            self.repeated += len(branches) > 1

    def _join(self, branches: list[tuple[int, int, int]], depth: int) -> None:
        """Join branches that share ``depth`` tokens, in a random order, into groups within the capacity."""
        used = self._limit + 1
        for at in self._random.permutation(len(branches)).tolist():
            a, b, size = branches[at]
            if used + size - depth > self._limit:
                self.groups.append([])
                self.depths.append(depth)
                used = depth
            self.groups[-1].append(np.arange(a, b))
            used += size - depth


class PrefixPlanner(PackPlanner):
    """Plans groups of sequences with a common prefix; the other arguments are those of ``PackPlanner``.

    ``ids`` returns the bytes of a sequence's tokens, 4 bytes each. A pack holds at most ``capacity`` tokens;
    shared ones count once. A step of ``Sequences(n)`` may end inside a group, which the next step continues.
    """

    def __init__(
        self,
        lengths: Lengths,
        capacity: int,
        *,
        ids: Callable[[int], bytes],
        global_batch: Packs | Sequences,
        loss_tokens: LossTokens | None = None,
        oversize: Oversize = "error",
        **settings: Any,
    ) -> None:
        opened = open_lengths(lengths)
        summary = summarize(opened)
        settings.pop("patches", None)  # the work of sequences with images is counted by their tokens only
        for name in ("scheduler", "schedule", "max_patches"):
            if settings.pop(name, None) is not None:
                raise ValueError(f"share_prefixes=True does not work with {name}=. Leave one out.")
        if oversize in ("truncate", "split"):
            raise ValueError(
                f"share_prefixes=True with oversize={oversize!r}: pieces share no prefix. Set 'drop'."
            )
        slots = make_slots(capacity, settings.get("align"))
        rows = make_entries(opened, summary, slots, oversize=oversize)
        seed = int(settings.get("seed", 0))
        self.groups = found = group_prefixes(ids, 4, rows.indices(np.arange(rows.total)), slots.longest, seed)
        self._row_lengths = read_lengths(opened, found.rows)
        own = self._row_lengths - found.shared
        sizes = np.add.reduceat(own, found.offsets[:-1])
        packs = global_batch if isinstance(global_batch, Packs) else Packs(1)
        policy: Oversize = "own_pack" if oversize == "own_pack" else "error"
        super().__init__(sizes, capacity, global_batch=packs, oversize=policy, **settings)
        work = self.cost(self._row_lengths) - self.cost(found.shared)
        self._row_work, self._group_work = work, np.add.reduceat(work, found.offsets[:-1])
        self.global_batch, self.weigh = global_batch, open_loss_tokens(loss_tokens, opened)
        self.entries = replace(self.entries, counts={**rows.counts, "prefixes_repeated": found.repeated})
        digest = hashlib.blake2b(found.rows.tobytes() + found.offsets.tobytes(), digest_size=16).hexdigest()
        self.settings |= {
            "sequences": summary.count,
            "lengths": summary.digest,
            "global_batch": repr(global_batch),
            "prefixes": digest,
        }
        self._row_of = np.zeros(summary.count, np.int64)  # the position of each sequence in ``groups.rows``
        self._row_of[found.rows] = np.arange(len(found.rows))
        self._epochs: dict[int, tuple[IntArray, IntArray]] = {}
        if isinstance(global_batch, Sequences):
            self._steps = self._count_steps(len(found.rows))

    def tail_dropped(self, epoch: int) -> int:
        """Return how many sequences ``tail="drop"`` leaves out of an epoch."""
        if self.tail == "pad":
            return 0
        if isinstance(self.global_batch, Sequences):
            return len(self.groups.rows) % self.global_batch.n
        assert self._packs is not None
        groups = self._packs.read(epoch, len(self) * self.global_batch.n, self._packs.total)[0].index
        return int(np.diff(self.groups.offsets)[groups].sum())

    def step(self, epoch: int, k: int, dp: int = 1) -> StepPlan:
        """Return the plan of a step, as ``PackPlanner.step`` does."""
        if isinstance(self.global_batch, Packs):
            plan = super().step(epoch, k, dp)
            firsts = self.groups.offsets[plan.spans.index]
            stops = self.groups.offsets[plan.spans.index + 1]
            return self._of_rows((epoch, k, dp), plan.offsets, firsts, stops)
        self._check_request(epoch, k, dp)
        firsts, stops = self._slice(epoch, k)
        before = np.concatenate([[0], np.cumsum(self._row_lengths - self.groups.shared)])
        shared = self.groups.shared[firsts]  # the first sequence of a range computes its whole prefix
        sizes = before[stops] - before[firsts] + shared
        works = np.concatenate([[0.0], np.cumsum(self._row_work)])
        work = works[stops] - works[firsts] + self.cost(shared)
        order, offsets = balanced_bins(self.slots.padded(sizes), work, self.slots, dp=dp)
        return self._of_rows((epoch, k, dp), offsets, firsts[order], stops[order])

    def held(self, rows: IntArray) -> IntArray:
        """Return how many first tokens each sequence of a pack takes from the sequence before it."""
        places = self._row_of[rows]
        follows = np.diff(places, prepend=-2) == 1
        return np.where(follows, self.groups.shared[places], 0)

    def shares(self, rows: IntArray) -> bool:
        """Return whether two sequences of a pack begin alike, so that its batch has shared slots."""
        first = self.groups.first[self._row_of[rows]]
        first = first[first >= 0]
        return len(np.unique(first)) < len(first)

    def _work(self, spans: Spans) -> npt.NDArray[np.float64]:
        return self._group_work[spans.index]

    def _slice(self, epoch: int, k: int) -> tuple[IntArray, IntArray]:
        """Return the ranges of ``groups.rows`` in step k of an epoch; each is a group or a part of one."""
        kept = self._epochs.get(epoch)  # read once, because a thread that plans ahead may replace it
        if kept is None:
            number = len(self.groups.offsets) - 1
            order = permute(np.arange(number), number, key=derive_key(self.seed, _GROUPS, epoch))
            counts = np.diff(self.groups.offsets)[order]
            kept = order, np.concatenate([[0], np.cumsum(counts)])
            self._epochs = {epoch: kept}
        order, before = kept
        low, high = k * self.global_batch.n, min((k + 1) * self.global_batch.n, int(before[-1]))
        a, b = np.searchsorted(before, low, "right") - 1, np.searchsorted(before, high, "left")
        at = self.groups.offsets[order[a:b]] - before[a:b]
        return np.maximum(before[a:b], low) + at, np.minimum(before[a + 1 : b + 1], high) + at

    def _of_rows(
        self, place: tuple[int, int, int], offsets: IntArray, firsts: IntArray, stops: IntArray
    ) -> StepPlan:
        """Plan ranges of ``groups.rows``; ``offsets`` holds the index of each microbatch's first range."""
        counts = stops - firsts
        before = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(before[-1]) + np.repeat(firsts - before[:-1], counts)
        work = self._row_work[places].copy()
        heads = before[:-1][counts > 0]
        work[heads] += self.cost(self.groups.shared[firsts[counts > 0]])
        lengths = self._row_lengths[places]
        zeros = np.zeros(len(places), np.int64)
        index, continued = self.groups.rows[places], zeros.astype(bool)
        spans = Spans(index=index, start=zeros, stop=lengths, continued=continued)
        return StepPlan.of(place, spans, before[offsets], work, zeros, self.weigh)
