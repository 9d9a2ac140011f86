"""Sizes and weights of sources -> which sequences of each source an epoch takes.

An epoch of a mixture takes a fixed number of sequences of every source. A source is reshuffled whenever it is
used up. So after any epoch, the numbers of uses of a source's sequences differ by at most one, apart from
those left out. Nothing is stored: the j-th sequence drawn from a source is a function of seed, source and j.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import gcd, lcm
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import choice, described, host_ints, instance, whole_number
from lightning_thd.packing.cost import Media
from lightning_thd.packing.entries import OpenLengths, make_entries, read_lengths, summarize
from lightning_thd.packing.lengths import make_slots
from lightning_thd.packing.permutation import derive_key, permute
from lightning_thd.packing.plan import StepPlan
from lightning_thd.packing.planner import LossTokens, PackPlanner, Planner, open_loss_tokens, open_media

IntArray = npt.NDArray[np.int64]
EpochSize = Literal["longest", "shortest"] | int

_DRAWS = 11  # mixed into the key that shuffles a source; windows.py and planner.py use other numbers
_MOST_PASSES = 1000  # An epoch with more passes over a source is probably a mistake, and takes long to plan.
_DENOMINATOR = 10**9  # a weight becomes a fraction with at most this denominator: 0.3 is exactly 3/10
_OF_EPOCH = ("lengths", "sequences")  # settings of a planner that differ between epochs
_KEEP = 2  # planners that are kept: this epoch's and, because workers prefetch, the next epoch's


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixing:
    """Sets how long an epoch of a mixture is, and what ends it.

    Attributes:
        epoch: the number of sequences in an epoch, or its rule: ``"longest"`` uses every source completely at
            least once, and ``"shortest"`` uses no sequence twice.
        dry: what happens when a source runs dry; only for streams, whose sizes are not known. ``"restart"``,
            the default, reads the source again, and ends the epoch once every source was used completely.
            ``"stop"`` ends the epoch; the next epoch continues the other sources where they stopped.
            ``"rest"`` continues the epoch with the other sources, by their shares.
        shares: the unit of the weights, ``"sequences"`` or ``"tokens"``. Shares of tokens hold over whole
            passes, and on average within a pass. Streams, whose lengths are unknown, need ``"sequences"``.
    """

    epoch: EpochSize = "longest"
    dry: Literal["restart", "stop", "rest"] | None = None
    shares: Literal["sequences", "tokens"] = "sequences"

    def __post_init__(self) -> None:
        if self.dry is not None:
            choice(self.dry, "dry", "restart", "stop", "rest")
        choice(self.shares, "shares", "sequences", "tokens")
        if not isinstance(self.epoch, str) or self.epoch not in ("longest", "shortest"):
            whole_number(self.epoch, "epoch", least=1, advice="Pass 'longest', 'shortest' or a number.")


def share_out(
    sizes: Mapping[str, int], weights: Mapping[str, float], mixing: Mixing | None = None
) -> dict[str, int]:
    """Return how many sequences of each source an epoch takes."""
    if mixing is None:
        mixing = Mixing()
    instance(mixing, "mixing", Mixing, advice="Pass Mixing(epoch=..., shares=...), or None.")
    if mixing.dry is not None:
        raise ValueError(
            f"Mixing(dry={mixing.dry!r}) is for streams; no source here is one. Set Mixing(epoch=)."
        )
    check_weights(weights)
    if not sizes or set(sizes) != set(weights):
        raise ValueError(
            f"A mixture got sizes of {sorted(sizes)} and weights of {sorted(weights)}. Give both of each."
        )
    for name, size in sizes.items():
        whole_number(size, f"sizes[{name!r}]", least=1, advice="A source has at least one sequence.")

    largest = max(weights.values())  # a sum of large weights may overflow
    scaled = {name: weights[name] / largest for name in sizes}
    total = sum(scaled.values())
    shares = {name: value / total for name, value in scaled.items()}
    number = _sequences_of_epoch(sizes, shares, mixing.epoch)
    counts = _round(shares, number)
    # Rounding may have left out or repeated one sequence of a source.
    if mixing.epoch == "longest":
        counts = {name: max(count, sizes[name]) for name, count in counts.items()}
    elif mixing.epoch == "shortest":
        counts = {name: min(count, sizes[name]) for name, count in counts.items()}

    most_used = max(sizes, key=lambda name: counts[name] / sizes[name])
    if counts[most_used] > _MOST_PASSES * sizes[most_used]:
        raise ValueError(
            f"An epoch of this mixture takes more than {_MOST_PASSES:,} passes over {most_used!r}, which has "
            f"{sizes[most_used]:,} sequences. Bring the weights closer together, or set "
            "Mixing(epoch='shortest') or a smaller number of sequences."
        )
    unused = [name for name, count in counts.items() if not count]
    if unused:
        raise ValueError(
            f"An epoch of {number} sequences has none of {unused[0]!r}. Raise its weight, or Mixing(epoch=)."
        )
    return counts


def _sequences_of_epoch(sizes: Mapping[str, int], shares: Mapping[str, float], epoch: EpochSize) -> int:
    """Return the number of sequences of an epoch before rounding the shares of its sources."""
    if not isinstance(epoch, str):
        return int(epoch)
    # For each source, the sequences of the mixture while it is used once. A share of 0 (the weight
    # underflowed) would take infinitely many sequences of the other sources.
    once = [sizes[name] / shares[name] if shares[name] else math.inf for name in sizes]
    wanted = max(once) if epoch == "longest" else min(once)
    # Anything above the most passes is refused by the caller, and infinity has no int.
    return round(min(wanted, 2.0 * _MOST_PASSES * sum(sizes.values())))


def check_weights(weights: Mapping[str, float]) -> None:
    """Refuse weights that are not finite numbers above 0."""
    instance(weights, "weights", Mapping, advice="Pass the weight of each source, by its name.")
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float | np.integer | np.floating) and not isinstance(
            weight, bool
        )
        if not is_number or not 0 < weight < np.inf:
            value = repr(weight) if is_number else described(weight)
            raise ValueError(
                f"The weight of {name!r} is {value}; wanted a finite number above 0. Or leave it out."
            )


def _round(shares: Mapping[str, float], number: int) -> dict[str, int]:
    """Round shares to whole sequences that add up to ``number``, by largest remainder."""
    exact = {name: share * number for name, share in shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    missing = number - sum(counts.values())
    largest_remainder_first = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in largest_remainder_first[:missing]:
        counts[name] += 1
    return counts


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Convert weights above 0 to whole numbers of the same proportions: ``[0.3, 0.7]`` becomes ``[3, 7]``."""
    exact = [Fraction(weight.item() if isinstance(weight, np.generic) else weight) for weight in weights]
    # A tiny weight would become 0: it keeps its own, larger denominator.
    fractions = [weight.limit_denominator(_DENOMINATOR) or weight for weight in exact]
    common = lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * common) for fraction in fractions]
    divisor = gcd(*whole)
    return [number // divisor for number in whole]


def take_turns(
    shares: Mapping[int, int], drawn: Sequence[int], waiting: Sequence[int], most: int | None = None
) -> tuple[list[int], int | None]:
    """Return the sources of the next sequences, and the source whose turn came when it had none, or None.

    Args:
        shares: whole numbers in the proportions of the sources, by the number of each source.
        drawn: the sequences that each source has given before.
        waiting: the sequences that each source can give.
        most: the most sequences to return; None returns sequences until a source has none.
    """
    # The next source is the one due first among those that are at least 1 / (2n - 2) turns behind. This keeps
    # all n sources within a turn of their shares: Tijdeman, "The chairman assignment problem", 1980.
    sources = list(shares)
    taken = {source: int(drawn[source]) for source in sources}
    left = {source: int(waiting[source]) for source in sources}
    if len(sources) == 1:  # 2n - 2 is 0
        (only,) = sources
        count = left[only] if most is None else min(most, left[only])
        return [only] * count, only if count != most else None

    total = sum(shares.values())
    twice = 2 * len(sources) - 2
    turn = sum(taken.values())  # turns of all sources so far
    turns: list[int] = []
    while len(turns) != most:
        turn += 1
        chosen: int | None = None
        earliest = math.inf
        for source in sources:
            behind = shares[source] * turn - taken[source] * total  # in units of 1 / total of a turn
            if behind * twice >= total:
                due = ((twice - 1) * total - twice * behind) / shares[source]
                if due < earliest:
                    earliest = due
                    chosen = source
        assert chosen is not None  # all n sources together are one turn behind, so one is behind by 1 / n
        if not left[chosen]:
            return turns, chosen
        turns.append(chosen)
        taken[chosen] += 1
        left[chosen] -= 1
    return turns, None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Entries of an epoch -> dataset indices, which number the data of all sources laid end to end."""

    names: tuple[str, ...]
    sizes: IntArray  # sequences of each source, int64 ``[K]``
    counts: IntArray  # sequences that an epoch takes of each source, int64 ``[K]``
    seed: int
    usable: tuple[IntArray | None, ...]  # for each source the positions that take part; None if all do

    @property
    def total(self) -> int:
        """Return the number of entries of an epoch."""
        return int(self.counts.sum())

    def indices(self, epoch: int, entries: IntArray) -> IntArray:
        """Return the dataset indices of entries of an epoch, int64 ``[S]``."""
        ends = np.cumsum(self.counts)  # an epoch's entries are those of source 0, then of source 1, ...
        starts = np.cumsum(self.sizes) - self.sizes
        source = np.searchsorted(ends, entries, side="right")
        indices = np.empty(len(entries), np.int64)
        for k in np.unique(source).tolist():
            of_source = source == k
            # A source's draws are numbered over all epochs.
            draws = entries[of_source] - (ends[k] - self.counts[k]) + epoch * self.counts[k]
            indices[of_source] = starts[k] + self._drawn(k, draws)
        return indices

    def _drawn(self, k: int, draws: IntArray) -> IntArray:
        """Return the position in source ``k`` of each draw; every pass over a source has its own shuffle."""
        usable = self.usable[k]
        size = int(self.sizes[k]) if usable is None else len(usable)
        passes, places = np.divmod(draws, size)
        positions = np.empty(len(draws), np.int64)
        for number in np.unique(passes).tolist():
            in_pass = passes == number
            key = derive_key(self.seed, _DRAWS, k, number)
            positions[in_pass] = permute(places[in_pass], size, key=key)
        return positions if usable is None else usable[positions]

    def source_of(self, indices: npt.ArrayLike) -> IntArray:
        """Return the index in ``names`` of the source of each dataset index, int64 ``[S]``."""
        return np.searchsorted(np.cumsum(self.sizes), np.asarray(indices), side="right")


def make_mixture(
    lengths: Mapping[str, npt.NDArray[np.integer]],
    weights: Mapping[str, float],
    mixing: Mixing | None = None,
    *,
    seed: int = 0,
    most: int | None = None,
) -> Mixture:
    """Build a mixture from the lengths of its sources; leave out sequences of 0 or over ``most`` tokens."""
    instance(lengths, "lengths", Mapping, advice="Pass the lengths of each source, by its name.")
    whole_number(seed, "seed", least=-(2**255), most=2**255, advice="It decides every shuffle.")
    if most is not None:
        whole_number(most, "most", least=1, advice="None lets sequences of any length take part.")

    usable: dict[str, IntArray | None] = {}
    sizes: dict[str, int] = {}  # all sequences of each source
    taking_part: dict[str, int] = {}
    mean_lengths: dict[str, float] = {}  # tokens of a sequence that takes part
    for name, lengths_of_source in lengths.items():
        values = host_ints(lengths_of_source, f"lengths[{name!r}]", least=0)
        left_out = values < 1
        if most is not None:
            left_out |= values > most
        usable[name] = np.flatnonzero(~left_out) if left_out.any() else None
        sizes[name] = len(values)
        taking_part[name] = len(values) - int(left_out.sum())
        # A source of which no sequence takes part is refused below, by name.
        mean_lengths[name] = float(values[~left_out].mean()) if taking_part[name] else 1.0

    if mixing is not None and mixing.shares == "tokens":
        check_weights(weights)
        # Sequences in proportion to tokens / (tokens of a sequence). Unknown names are refused below.
        weights = {name: weight / mean_lengths.get(name, 1.0) for name, weight in weights.items()}
    counts = share_out(taking_part, weights, mixing)
    return Mixture(
        names=tuple(sizes),
        sizes=np.array([sizes[name] for name in sizes], np.int64),
        counts=np.array([counts[name] for name in sizes], np.int64),
        seed=seed,
        usable=tuple(usable.values()),
    )


@dataclass(frozen=True, slots=True)
class _EpochLengths:
    """The lengths of the entries of an epoch, read on demand."""

    lengths: OpenLengths
    mixture: Mixture
    epoch: int

    def __len__(self) -> int:
        return self.mixture.total

    def __getitem__(self, positions: IntArray, /) -> npt.NDArray[np.integer]:
        return read_lengths(self.lengths, self.mixture.indices(self.epoch, positions))


def _media_of(media: Media, mixture: Mixture, epoch: int, entries: IntArray) -> IntArray:
    """Return what ``media`` has for the sequences of an epoch's entries."""
    return media(mixture.indices(epoch, entries))


class MixturePlanner(Planner):
    """Plans the steps of a mixture; each epoch has a ``PackPlanner`` of the sequences that it takes."""

    epochs_alike = False

    def __init__(
        self,
        lengths: OpenLengths,
        capacity: int,
        *,
        mixture: Mixture,
        loss_tokens: LossTokens | None = None,
        patches: npt.ArrayLike | Media | None = None,
        **settings: Any,
    ) -> None:
        self.mixture = mixture
        self.names = mixture.names
        self.slots = make_slots(capacity, settings.get("align"), settings.get("max_patches"))
        self._lengths = lengths
        self._capacity = capacity
        self._settings = settings  # the arguments of each epoch's ``PackPlanner``
        self._weigh = open_loss_tokens(loss_tokens, lengths)
        self._media = open_media(patches, len(lengths))
        self._planners: dict[int, PackPlanner] = {}  # by epoch; only the last ones are kept
        summary = summarize(lengths)
        # Entries of all data: an error then names the right sequence, and each sequence is counted once.
        self.entries = make_entries(
            lengths, summary, self.slots, oversize=settings.get("oversize", "error"), media=self._media
        )

        first = self.of_epoch(0)
        self.global_batch = first.global_batch
        # The planner's settings, except those that describe the entries of its epoch.
        common = {name: value for name, value in first.settings.items() if name not in _OF_EPOCH}
        self.settings = {
            **common,
            "mixture": list(mixture.names),
            "sizes": mixture.sizes.tolist(),
            "draws": mixture.counts.tolist(),
            "lengths": summary.digest,
        }

    def of_epoch(self, epoch: int) -> PackPlanner:
        """Return the planner of the entries of an epoch."""
        planner = self._planners.get(epoch)  # read once, because a thread that plans ahead may replace it
        if planner is None:
            drawn = _EpochLengths(self._lengths, self.mixture, epoch)
            media = None if self._media is None else partial(_media_of, self._media, self.mixture, epoch)
            planner = PackPlanner(
                cast("Any", drawn), self._capacity, patches=media, evenly=True, **self._settings
            )
            latest = list(self._planners.items())[-(_KEEP - 1) :]
            self._planners = {**dict(latest), epoch: planner}  # replaced whole, for the same reason
        return planner

    def __len__(self) -> int:
        """Return the number of steps of the first epoch."""
        return len(self.of_epoch(0))

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        return len(self.of_epoch(epoch))

    def source_of(self, indices: npt.ArrayLike) -> IntArray:
        """Return the index in ``names`` of the source of each dataset index, int64 ``[S]``."""
        return self.mixture.source_of(indices)

    def step(self, epoch: int, k: int, dp: int = 1) -> StepPlan:
        """Plan a step as ``PackPlanner.step`` does; its spans hold dataset indices."""
        whole_number(epoch, "epoch", advice="Epochs count from 0.")
        plan = self.of_epoch(epoch).step(epoch, k, dp)
        spans = replace(plan.spans, index=self.mixture.indices(epoch, plan.spans.index))
        return replace(plan, spans=spans, weigh=self._weigh)
