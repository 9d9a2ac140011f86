"""Lengths, a capacity and a seed -> the plan of any step of any epoch on any number of ranks.

Only the number of packs of each window is stored. Every plan is computed from (seed, epoch, step). So a
killed job resumes where it stopped, with the same sequences in every step, also on another number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import choice, instance, whole_number
from lightning_thd.alignment import Alignment
from lightning_thd.packing.balancing import Scheduler, balanced_bins, order_by_rank, scheduled_bins
from lightning_thd.packing.bins import Packing
from lightning_thd.packing.cost import Cost, Media, media_table
from lightning_thd.packing.degrees import Sharing
from lightning_thd.packing.entries import (
    BLOCK,
    Entries,
    Lengths,
    OpenLengths,
    Oversize,
    make_entries,
    open_lengths,
    read_lengths,
    summarize,
)
from lightning_thd.packing.lengths import MOST_RANKS, Slots, make_slots
from lightning_thd.packing.permutation import derive_key
from lightning_thd.packing.plan import FloatArray, Packs, Sequences, Spans, StepPlan, Weigh
from lightning_thd.packing.windows import ScheduledPacks, WindowedPacks, make_windows, open_schedule

Tail = Literal["pad", "drop"]
LossTokens = Lengths | Literal["all"] | Weigh
IntArray = npt.NDArray[np.int64]

# Part of every fingerprint: raise it when the same settings no longer give the same plans.
_PLAN_VERSION = 1
_ENTRIES = 10  # mixed into the key that shuffles entries; the keys of windows.py use other numbers


class NoSuchStep(IndexError, ValueError):
    """Raised when a step is requested that the epoch does not have."""


class Planner(ABC):
    """Plans the steps of every epoch, and resumes from a checkpoint's state; its settings decide all plans.

    Attributes:
        settings: what the plans depend on, as JSON can write it.
        slots: the slots of a pack.
        entries: the sequences that take part.
        global_batch: the size of a step.
        names: the names of the sources of a mixture; empty if there is one source.
        epochs_alike: whether all epochs have the same sequences, so that one shows the packs of all.
        sharing: how many ranks may share a sequence, which each plan decides; None if none are shared.
    """

    settings: dict[str, Any]
    slots: Slots
    entries: Entries
    global_batch: Packs | Sequences
    names: tuple[str, ...] = ()
    epochs_alike = True
    sharing: Sharing | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of steps of the first epoch."""

    @abstractmethod
    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""

    @abstractmethod
    def step(self, epoch: int, k: int, dp: int = 1) -> StepPlan:
        """Return the plan of a step for ``dp`` ranks without computing the steps before it."""

    def source_of(self, indices: npt.ArrayLike) -> IntArray:
        """Return the index in ``names`` of the source of each dataset index, int64 ``[S]``."""
        return np.zeros(len(np.asarray(indices)), np.int64)

    def held(self, rows: IntArray) -> IntArray:
        """Return how many first tokens each sequence of a pack takes from the sequence before it."""
        return np.zeros(len(rows), np.int64)

    def shares(self, rows: IntArray) -> bool:
        """Return whether sequences of a pack share slots."""
        return False

    def fingerprint(self) -> str:
        """Return a hash of ``settings``, by which ``resume`` recognises its own states."""
        return fingerprint(self.settings)

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state to save, equal on all ranks, from which ``step(epoch, step)`` continues."""
        whole_number(epoch, "epoch", advice="Epochs count from 0.")
        whole_number(step, "step", most=self.num_steps(epoch), advice="Pass the steps consumed in the epoch.")
        return {
            "epoch": int(epoch),
            "step": int(step),
            "seed": self.settings["seed"],
            "fingerprint": self.fingerprint(),
            "settings": dict(self.settings),
        }

    def resume(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return the epoch and next step of a state; raise if it was saved with other data or settings."""
        instance(state, "state", Mapping, advice="Pass what PackPlanner.state() returned.")
        if state.get("fingerprint") != self.fingerprint():
            saved = state.get("settings", {})
            changes = [
                f"{name} was {saved.get(name)!r}, is {value!r}"
                for name, value in self.settings.items()
                if saved.get(name) != value
            ]
            reason = "; ".join(changes) or "its fingerprint differs"
            raise ValueError(
                f"The state was saved with other data or settings ({reason}), so its steps "
                "would hold other sequences. Restore the old ones, or start without the state."
            )
        return int(state["epoch"]), int(state["step"])


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return a hash of settings that JSON can write, in any order, as 32 hexadecimal digits."""
    text = json.dumps(settings, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class CountedTargets:
    """Weighs spans by their number of loss tokens; each target and each sequence weighs 1."""

    lengths: OpenLengths  # tokens of each sequence
    counts: OpenLengths | None  # loss tokens of each sequence; None if all but the first token are

    def __call__(self, spans: Spans) -> FloatArray | None:
        """Return the weights of ``Weigh``; None if a sequence is cut whose targets are partly masked."""
        lengths = read_lengths(self.lengths, spans.index)
        counts = lengths - 1 if self.counts is None else read_lengths(self.counts, spans.index)
        wrong = (counts < 0) | (counts >= lengths)
        if wrong.any():
            first = int(wrong.argmax())
            raise ValueError(
                f"Sequence {spans.index[first]} has {lengths[first]} tokens but {counts[first]} loss tokens. "
                "The first token of a sequence is not a target, so it has fewer. Count the labels from the "
                "second token on."
            )

        # A piece's targets are known if it is the whole sequence, or if all or no targets of it count.
        whole = spans.lengths == lengths
        all_count = counts == lengths - 1
        if not (whole | all_count | (counts == 0)).all():
            return None
        # The first token of a piece is no target, but the last token of a continued piece keeps its own,
        # the first token of the next piece.
        targets = spans.lengths - 1 + spans.continued
        of_span = np.where(whole, counts, np.where(all_count, targets, 0)).astype(np.float64)

        # A sequence weighs 1, shared among its pieces by their loss tokens.
        only_piece = (spans.start == 0) & ~spans.continued  # whole, or truncated
        of_sequence = np.where(only_piece, of_span, counts)
        share = np.divide(of_span, of_sequence, out=np.zeros_like(of_span), where=of_sequence > 0)
        return np.stack([of_span, share])


def open_loss_tokens(loss_tokens: LossTokens | None, lengths: OpenLengths) -> Weigh | None:
    """Make a function that weighs spans; counts in memory maps or computed on demand are not copied."""
    if loss_tokens is None or callable(loss_tokens):
        return loss_tokens
    if isinstance(loss_tokens, str) and loss_tokens == "all":
        return CountedTargets(lengths, None)
    opened = open_lengths(loss_tokens)
    if len(opened) != len(lengths):
        raise ValueError(
            f"loss_tokens has {len(opened)} counts for {len(lengths)} sequences. Pass one for each."
        )
    return CountedTargets(lengths, opened)


def open_media(patches: npt.ArrayLike | Media | None, sequences: int) -> Media | None:
    """Return patches as a function from positions to int64 ``[S, 2]``; None for text."""
    if patches is None or callable(patches):
        return patches
    table = media_table(patches, sequences)
    return partial(np.take, table, axis=0) if table.any() else None


def media_digest(media: Media, sequences: int) -> str:
    """Return a hexadecimal hash of the patch counts of all sequences, read in blocks."""
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, sequences, BLOCK):
        table = media(np.arange(start, min(start + BLOCK, sequences)))
        digest.update(np.ascontiguousarray(table, "<i8").tobytes())
    return digest.hexdigest()


class PackPlanner(Planner):
    """Plans the steps of every epoch, each a pure function of (seed, epoch, step, dp).

    With ``Sequences(n)`` step k takes n entries of the epoch's permutation, balanced over the ranks in as
    many microbatches as they need. With ``Packs(n)`` it takes n packs, made by best fit inside windows of the
    data set. The packs are counted once, when the planner is made.

    Args:
        lengths: tokens of each sequence: ints ``[N]`` in a list, an array, a memory map, or an object with
            ``__len__`` and ``__getitem__`` for an array of positions. Of these, only a list is copied.
        capacity: slots of a pack.
        global_batch: ``Packs(n)`` or ``Sequences(n)`` per optimizer step.
        align: the multiples to which lengths and totals are padded; padding takes slots of the capacity.
        cost: the work of a sequence by its length and patches; the default fits a text model with hidden
            size 4096.
        window: sequences that ``Packs(n)`` packs together; a larger window fills packs better.
        oversize: what to do with a sequence that does not fit a pack: ``error``, ``drop`` it, ``truncate``
            it, ``split`` it in pieces, or let it have its ``own_pack`` above the capacity.
        tail: what to do if the last step of an epoch has too few packs or sequences: ``pad`` runs the step
            with those that are left, ``drop`` leaves it out.
        seed: the seed of every shuffle.
        loss_tokens: number of targets of each sequence, ints ``[N]``, or ``"all"`` if every token except the
            last has one. Or a function ``Spans -> float64 [2, S]`` that returns the weights of their loss
            tokens and of their sequences. Each plan then holds the loss scale of its step.
        scheduler: a function that replaces :func:`balance`, for ``Sequences(n)``.
        schedule: the pack number of each sequence, ints ``[N]``, for ``Packs(n)``. Every epoch runs the packs
            in this order. A last step with fewer than n packs distributes their sequences over n.
        counts: packs of every window, from :attr:`counts` of a planner with the same fingerprint.
        num_workers: processes that count the packs of the windows; 0 counts them in this process.
        patches: image patches of each sequence, ints ``[N]`` or ``[N, 2]`` as ``Cost`` takes them, or a
            function from an array of positions to int64 ``[S, 2]``; None for text.
        max_patches: most patches of a pack. A sequence with more is an error, unless ``oversize`` is ``drop``
            or ``own_pack``.
        evenly: each step of ``Sequences(n)`` and each window of ``Packs(n)`` takes sequences at equal
            distances in the data set. Mixtures use this.
    """

    def __init__(
        self,
        lengths: Lengths,
        capacity: int,
        *,
        global_batch: Packs | Sequences,
        align: Alignment | None = None,
        cost: Cost | None = None,
        window: int = 4096,
        oversize: Oversize = "error",
        tail: Tail = "pad",
        seed: int = 0,
        loss_tokens: LossTokens | None = None,
        scheduler: Scheduler | None = None,
        schedule: npt.ArrayLike | None = None,
        counts: npt.NDArray[np.uint32] | None = None,
        num_workers: int = 0,
        patches: npt.ArrayLike | Media | None = None,
        max_patches: int | None = None,
        evenly: bool = False,
    ) -> None:
        choice(oversize, "oversize", *get_args(Oversize))
        choice(tail, "tail", *get_args(Tail))
        whole_number(window, "window", least=1, advice="It is the number of sequences packed together.")
        whole_number(seed, "seed", least=-(2**255), most=2**255, advice="It decides every shuffle.")
        whole_number(num_workers, "num_workers", advice="It is the number of processes that count.")
        if cost is not None:
            instance(cost, "cost", Cost, advice="Pass Cost(linear=..., quadratic=...).")
        _check_batch(global_batch, scheduler=scheduler is not None, schedule=schedule is not None)

        self.slots = make_slots(capacity, align, max_patches)
        opened = open_lengths(lengths)
        summary = summarize(opened)
        media = open_media(patches, len(opened))
        self.entries = make_entries(
            opened, summary, self.slots, oversize=oversize, media=media, evenly=evenly
        )
        self.global_batch = global_batch
        self.cost = Cost() if cost is None else cost
        self.tail = tail
        self.seed = int(seed)
        self.weigh = open_loss_tokens(loss_tokens, opened)
        self.scheduler = scheduler

        self._packs: WindowedPacks | ScheduledPacks | None = None
        if schedule is not None:
            self._packs = open_schedule(schedule, self.entries, summary.count, self.slots)
        elif isinstance(global_batch, Packs):
            self._packs = make_windows(
                self.entries, self.slots, window, self.seed, counts=counts, num_workers=num_workers
            )

        # If all sequences fit, padding does not change which sequences a step of Sequences(n) holds. So a job
        # can resume with another number of context-parallel ranks.
        multiples: list[int] | None = [self.slots.multiple, align.total_multiple if align else 1]
        if isinstance(global_batch, Sequences) and summary.longest <= self.slots.longest:
            multiples = None
        # Settings that older versions lack are added only if they are set, so that older states stay valid.
        self.settings: dict[str, Any] = {
            "version": _PLAN_VERSION,
            "sequences": summary.count,
            "lengths": summary.digest,
            "capacity": int(capacity),
            "global_batch": repr(global_batch),
            "multiples": multiples,
            "cost": [self.cost.linear, self.cost.quadratic],
            "window": int(window),
            "oversize": oversize,
            "tail": tail,
            "seed": self.seed,
            "scheduler": None if scheduler is None else _name_of(scheduler),
            "schedule": self._packs.digest() if isinstance(self._packs, ScheduledPacks) else None,
        }
        if evenly:
            self.settings["evenly"] = True
        if media is not None:
            self.settings |= {
                "version": 2,  # the version if there are images
                "patches": media_digest(media, len(opened)),
                "max_patches": max_patches and int(max_patches),
                "cost": [*self.settings["cost"], self.cost.patch, self.cost.patch_pair],
            }

        self._steps = self._count_steps(self.entries.total if self._packs is None else self._packs.total)

    def _count_steps(self, units: int) -> int:
        """Return the number of steps that ``units`` packs or sequences make; raise if they make none."""
        n = self.global_batch.n
        if self.tail == "drop" and units < n:
            raise ValueError(f"{self.global_batch} is more than the {units} in the data set. Set tail='pad'.")
        if self.tail == "drop":
            return units // n
        return -(-units // n)

    def __len__(self) -> int:
        """Return the number of steps of an epoch; every epoch has the same number."""
        return self._steps

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch; every epoch has the same number."""
        return self._steps

    @property
    def counts(self) -> npt.NDArray[np.uint32] | None:
        """Return the number of packs of every window, uint32 ``[W]``; None if there are no windows."""
        return self._packs.counts if isinstance(self._packs, WindowedPacks) else None

    @property
    def num_packs(self) -> int | None:
        """Return the number of packs of an epoch; None with ``Sequences(n)``, which packs step by step."""
        packs = None if isinstance(self.global_batch, Sequences) else self._packs
        return None if packs is None else packs.total

    def tail_dropped(self, epoch: int) -> int:
        """Return how many sequences ``tail="drop"`` leaves out of an epoch, wholly or in part."""
        whole_number(epoch, "epoch", advice="Epochs count from 0.")
        if self.tail == "pad":
            return 0
        first = len(self) * self.global_batch.n
        if self._packs is None:
            return self.entries.total - first
        spans, _ = self._packs.read(epoch, first, self._packs.total)
        return len(np.unique(spans.index))  # pieces of one sequence count once

    def step(self, epoch: int, k: int, dp: int = 1) -> StepPlan:
        """Return the plan of a step without computing the steps before it.

        Args:
            epoch: number of the epoch, from 0.
            k: number of the step in its epoch, below ``len(planner)``.
            dp: data-parallel ranks. The sequences of the step do not depend on this number.

        Raises:
            NoSuchStep: if the epoch has no such step; it is an ``IndexError`` and a ``ValueError``.
            ValueError: if ``n`` of ``Packs(n)`` is not a multiple of ``dp``.
        """
        self._check_request(epoch, k, dp)
        if self._packs is None:
            spans, offsets = self._balanced(self._sequences(epoch, k), dp)
        else:
            n = self.global_batch.n
            spans, offsets = self._packs.read(epoch, k * n, min((k + 1) * n, self._packs.total))
            if n > 1:
                spans, offsets = self._ordered_packs(spans, offsets, dp)
        return self._make_plan(epoch, k, dp, spans, offsets)

    def _sequences(self, epoch: int, k: int) -> Spans:
        """Return the pieces of the sequences of step k of ``Sequences(n)``."""
        n = self.global_batch.n
        positions = np.arange(k * n, min((k + 1) * n, self.entries.total))
        return self.entries.spans(self.entries.drawn(positions, n, derive_key(self.seed, _ENTRIES, epoch)))

    def _work(self, spans: Spans) -> FloatArray:
        """Return the work of each piece, including its images, float64 ``[S]``."""
        media = self.entries.media
        return self.cost(spans.lengths, None if media is None else media(spans.index))

    def _balanced(self, spans: Spans, dp: int) -> tuple[Spans, IntArray]:
        """Return spans by rank and microbatch, and the offsets of the microbatches."""
        padded = self.slots.padded(spans.lengths)
        patches = self.entries.patches(spans)
        if self.scheduler is None:
            order, offsets = balanced_bins(padded, self._work(spans), self.slots, dp=dp, patches=patches)
        else:
            order, offsets = scheduled_bins(
                self.scheduler, padded, self.slots, dp=dp, cost=self.cost, patches=patches
            )
        return spans.take(order), offsets

    def _ordered_packs(self, spans: Spans, offsets: IntArray, dp: int) -> tuple[Spans, IntArray]:
        """Return the spans of a step's packs by rank and microbatch, and the offsets of the microbatches."""
        n = self.global_batch.n
        in_order = np.arange(len(spans))
        work = self._work(spans)
        if len(offsets) - 1 == n:
            totals = np.add.reduceat(work, offsets[:-1])  # no pack is empty
            order, new_offsets = order_by_rank(in_order, offsets, totals, dp)
        else:  # the last step of an epoch has fewer packs than n: distribute its sequences over n packs
            order, new_offsets = balanced_bins(
                self.slots.padded(spans.lengths),
                work,
                self.slots,
                dp=dp,
                num_microbatches=n // dp,
                packs=Packing(indices=in_order, offsets=offsets),
                patches=self.entries.patches(spans),
            )
        return spans.take(order), new_offsets

    def _make_plan(self, epoch: int, k: int, dp: int, spans: Spans, offsets: IntArray) -> StepPlan:
        """Return the plan of a step from its spans, by rank and microbatch, and their offsets."""
        media = self.entries.media
        patches = np.zeros(len(spans), np.int64) if media is None else media(spans.index)[:, 0]
        work = partial(self._work, spans)  # computed for `lightning-thd plan` and pictures, not in training
        return StepPlan.of((epoch, k, dp), spans, offsets, work, patches, self.weigh)

    def _check_request(self, epoch: int, k: int, dp: int) -> None:
        if type(dp) is not int or dp != 1:  # 1 is the usual case, and needs no check
            whole_number(dp, "dp", least=1, most=MOST_RANKS, advice="Pass the number of data-parallel ranks.")
        are_whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in (epoch, k))
        if not are_whole or epoch < 0 or not 0 <= k < self._steps:
            raise NoSuchStep(
                f"Step {k!r} of epoch {epoch!r} was requested, but epochs have {len(self)} steps. Both count "
                "from 0."
            )
        if isinstance(self.global_batch, Packs) and self.global_batch.n % dp:
            raise ValueError(
                f"{self.global_batch} cannot be shared by dp={dp} ranks. Pass a multiple, or Sequences(n)."
            )


def _name_of(scheduler: Scheduler) -> str:
    """Return the name by which a fingerprint knows a user's scheduler: its own, or that of its class."""
    return str(getattr(scheduler, "__qualname__", type(scheduler).__qualname__))


def _check_batch(global_batch: object, *, scheduler: bool, schedule: bool) -> None:
    """Refuse anything but a step size, and a scheduler or schedule that the step size would ignore."""
    if not isinstance(global_batch, Packs | Sequences):
        raise ValueError(
            f"global_batch={global_batch!r}: pass Packs(n) or Sequences(n), for example Packs(8)."
        )
    for name, is_passed, unserved in (("scheduler", scheduler, Packs), ("schedule", schedule, Sequences)):
        if is_passed and isinstance(global_batch, unserved):
            raise ValueError(
                f"A {name} cannot serve {global_batch}: schedulers take Sequences(n), schedules Packs(n)."
            )
