"""Token ids of sequences -> groups with a common prefix, each planned like one sequence.

A pack holds the tokens of a shared prefix once. A group is one or more branches of the prefix tree over all
sequences. It fits a pack, unless it is one sequence above the capacity (``own_pack``). Inside a group, each
sequence after the first shares its longest prefix with the sequence just before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_thd.packing.balancing import balanced_bins
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
    # Sorted by their bytes, sequences that share a prefix are neighbours.
    order = sorted(texts, key=texts.__getitem__)
    lengths = np.array([len(texts[row]) // width for row in order], np.int64)
    shared_with_previous = [_common(texts[one], texts[next_], width) for one, next_ in pairwise(order)]
    shared = np.array([0, *shared_with_previous], np.int64)

    # A run of neighbours that share enough is a group, or is cut into several.
    shorter = np.minimum(lengths, np.concatenate([[0], lengths[:-1]]))  # each compared with the one before
    joins_previous = (shared > 0) & (shared * _LEAST >= shorter)
    bounds = np.flatnonzero(np.concatenate([~joins_previous, [True]]))
    cut = _Cut(lengths, shared, limit, np.random.default_rng(seed % 2**256))  # numpy takes none below 0
    for start, stop in pairwise(bounds.tolist()):
        cut.add(start, stop)

    ranges = [range_ for group in cut.groups for range_ in group]
    places = np.concatenate([np.empty(0, np.int64), *ranges])  # in ``order``, group after group
    sizes = [sum(len(range_) for range_ in group) for group in cut.groups]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    # Inside a range, a sequence shares with its neighbour in sorted order. The first sequence of a range
    # shares the depth of its group with the range before, and nothing if it begins the group.
    shared_in_group = shared[places]
    range_starts = np.concatenate([[0], np.cumsum([len(range_) for range_ in ranges])])[:-1]
    depths = [depth for group, depth in zip(cut.groups, cut.depths, strict=True) for _ in group]
    shared_in_group[range_starts] = depths
    shared_in_group[offsets[:-1]] = 0

    rows = np.asarray(order, np.int64)[places]
    first = [int.from_bytes(texts[row][:width], "little") if texts[row] else -1 for row in rows.tolist()]
    return Groups(
        rows=rows,
        offsets=offsets,
        shared=shared_in_group,
        first=np.array(first, np.int64),
        repeated=cut.repeated,
    )


def _common(one: bytes, other: bytes, width: int) -> int:
    """Return how many first tokens, of ``width`` bytes each, two sequences have in common."""
    most = min(len(one), len(other))
    differs = np.frombuffer(one, np.uint8, most) != np.frombuffer(other, np.uint8, most)
    equal_bytes = int(differs.argmax()) if differs.any() else most
    return equal_bytes // width


class _Cut:
    """Cuts sequences, sorted by their tokens, into groups; a group is a list of ranges of sequences."""

    def __init__(self, lengths: IntArray, shared: IntArray, limit: int, random: np.random.Generator) -> None:
        self._lengths = lengths  # tokens of each sequence
        self._shared = shared  # how many first tokens each shares with the one before it
        self._limit = limit  # most distinct tokens of a group
        self._random = random
        self.groups: list[list[IntArray]] = []
        self.depths: list[int] = []  # for each group, how many first tokens all its ranges share
        self.repeated = 0  # prefixes that several groups compute

    def _size(self, start: int, stop: int) -> int:
        """Return the distinct tokens of a range of sequences."""
        return int(self._lengths[start:stop].sum() - self._shared[start + 1 : stop].sum())

    def add(self, start: int, stop: int) -> None:
        """Add a range of sequences as one group, or cut it where neighbours share the fewest tokens."""
        waiting = [(start, stop)]
        while waiting:
            start, stop = waiting.pop()
            if stop - start == 1 or self._size(start, stop) <= self._limit:
                self.groups.append([np.arange(start, stop)])
                self.depths.append(0)
                continue

            # The branches of the prefix tree below the longest prefix that all of them share.
            inner = self._shared[start + 1 : stop]
            depth = int(inner.min())
            cuts = start + 1 + np.flatnonzero(inner == depth)
            branches = list(pairwise([start, *cuts.tolist(), stop]))
            sizes = [self._size(first, last) for first, last in branches]
            fitting = []
            for branch, size in zip(branches, sizes, strict=True):
                if size > self._limit:
                    waiting.append(branch)
                else:
                    fitting.append((*branch, size))
            self._join(fitting, depth)
            self.repeated += len(branches) > 1

    def _join(self, branches: list[tuple[int, int, int]], depth: int) -> None:
        """Join branches that share ``depth`` tokens, in a random order, into groups within the capacity.

        A branch is its first sequence, the one after its last, and its distinct tokens.
        """
        used = self._limit + 1  # so that the first branch begins a group
        for number in self._random.permutation(len(branches)).tolist():
            start, stop, size = branches[number]
            if used + size - depth > self._limit:
                self.groups.append([])
                self.depths.append(depth)
                used = depth
            self.groups[-1].append(np.arange(start, stop))
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

        # The sequences that take part, in groups. ``rows`` below are positions in ``groups.rows``.
        slots = make_slots(capacity, settings.get("align"))
        sequences = make_entries(opened, summary, slots, oversize=oversize)
        indices = sequences.indices(np.arange(sequences.total))
        groups = group_prefixes(ids, 4, indices, slots.longest, int(settings.get("seed", 0)))
        self.groups = groups
        self._row_lengths = read_lengths(opened, groups.rows)

        # The parent plans groups, each with the slots of its distinct tokens. ``Sequences(n)`` is planned
        # here, so the parent gets ``Packs(1)`` in its place.
        sizes = np.add.reduceat(self._row_lengths - groups.shared, groups.offsets[:-1])
        packs = global_batch if isinstance(global_batch, Packs) else Packs(1)
        policy: Oversize = "own_pack" if oversize == "own_pack" else "error"
        super().__init__(sizes, capacity, global_batch=packs, oversize=policy, **settings)

        # What the parent made of groups is replaced by what holds for sequences.
        self._row_work = self.cost(self._row_lengths) - self.cost(groups.shared)
        self._group_work = np.add.reduceat(self._row_work, groups.offsets[:-1])
        self.global_batch = global_batch
        self.weigh = open_loss_tokens(loss_tokens, opened)
        counts = {**sequences.counts, "prefixes_repeated": groups.repeated}
        self.entries = replace(self.entries, counts=counts)
        digest = hashlib.blake2b(groups.rows.tobytes() + groups.offsets.tobytes(), digest_size=16)
        self.settings |= {
            "sequences": summary.count,
            "lengths": summary.digest,
            "global_batch": repr(global_batch),
            "prefixes": digest.hexdigest(),
        }
        self._row_of = np.zeros(summary.count, np.int64)  # the position of each sequence in ``groups.rows``
        self._row_of[groups.rows] = np.arange(len(groups.rows))
        # The order of an epoch's groups, and how many sequences come before each; only the last epoch's.
        self._epochs: dict[int, tuple[IntArray, IntArray]] = {}
        if isinstance(global_batch, Sequences):
            self._steps = self._count_steps(len(groups.rows))

    def tail_dropped(self, epoch: int) -> int:
        """Return how many sequences ``tail="drop"`` leaves out of an epoch."""
        if self.tail == "pad":
            return 0
        if isinstance(self.global_batch, Sequences):
            return len(self.groups.rows) % self.global_batch.n
        assert self._packs is not None
        spans, _ = self._packs.read(epoch, len(self) * self.global_batch.n, self._packs.total)
        groups = spans.index
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
        shared = self.groups.shared[firsts]  # the first sequence of a range computes its whole prefix
        tokens_before = np.concatenate([[0], np.cumsum(self._row_lengths - self.groups.shared)])
        sizes = tokens_before[stops] - tokens_before[firsts] + shared
        work_before = np.concatenate([[0.0], np.cumsum(self._row_work)])
        work = work_before[stops] - work_before[firsts] + self.cost(shared)
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
        """Return the work of groups, which are the entries of the parent."""
        return self._group_work[spans.index]

    def _slice(self, epoch: int, k: int) -> tuple[IntArray, IntArray]:
        """Return the ranges of ``groups.rows`` in step k of an epoch; each is a group or a part of one."""
        cached = self._epochs.get(epoch)  # read once, because a thread that plans ahead may replace it
        if cached is None:
            total = len(self.groups.offsets) - 1
            order = permute(np.arange(total), total, key=derive_key(self.seed, _GROUPS, epoch))
            counts = np.diff(self.groups.offsets)[order]
            cached = order, np.concatenate([[0], np.cumsum(counts)])
            self._epochs = {epoch: cached}
        order, before = cached

        # The step has the sequences ``low`` to ``high - 1`` of the epoch, in the groups ``first`` to
        # ``last - 1`` of its order, of which the first and the last may be in other steps too.
        low = k * self.global_batch.n
        high = min(low + self.global_batch.n, int(before[-1]))
        first = np.searchsorted(before, low, "right") - 1
        last = np.searchsorted(before, high, "left")
        # What turns a position in the epoch into one in ``groups.rows``, for each of these groups.
        shift = self.groups.offsets[order[first:last]] - before[first:last]
        starts = np.maximum(before[first:last], low)
        stops = np.minimum(before[first + 1 : last + 1], high)
        return starts + shift, stops + shift

    def _of_rows(
        self, place: tuple[int, int, int], offsets: IntArray, firsts: IntArray, stops: IntArray
    ) -> StepPlan:
        """Plan ranges of ``groups.rows``; ``offsets`` holds the index of each microbatch's first range."""
        counts = stops - firsts
        before = np.concatenate([[0], np.cumsum(counts)])
        rows = np.arange(before[-1]) + np.repeat(firsts - before[:-1], counts)

        # The first sequence of a range computes its whole prefix, even if its group began before the range.
        work = self._row_work[rows].copy()
        has_rows = counts > 0
        work[before[:-1][has_rows]] += self.cost(self.groups.shared[firsts[has_rows]])

        zeros = np.zeros(len(rows), np.int64)
        spans = Spans(
            index=self.groups.rows[rows],
            start=zeros,
            stop=self._row_lengths[rows],
            continued=np.zeros(len(rows), np.bool_),
        )
        return StepPlan.of(place, spans, before[offsets], partial(np.asarray, work), zeros, self.weigh)
