"""An indexed data set, settings and ranks -> a planner; large data sets cache their numbers of packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._checks import choice, flags, instance, whole_number
from lightning_thd.batch.examples import PARTS
from lightning_thd.batch.keys import TYPES, inputs
from lightning_thd.batch.media import ExtrasCost, patch_table
from lightning_thd.batch.thd_batch import THDBatch, collate_checked
from lightning_thd.data.read.sources import Opener
from lightning_thd.data.sets import DataSet
from lightning_thd.data.store.cache import cached_arrays
from lightning_thd.data.store.index import Empty, MapDataset, refuse_cuts
from lightning_thd.data.trainer_link import Job, model_cost, model_counts, model_patch
from lightning_thd.packing import Cost, PackPlanner, Packs, Scheduler, Sequences, Spans
from lightning_thd.packing.entries import Oversize
from lightning_thd.packing.lengths import make_slots
from lightning_thd.packing.mixtures import Mixing, MixturePlanner, make_mixture
from lightning_thd.packing.planner import Planner, Tail, media_digest
from lightning_thd.packing.prefixes import PrefixPlanner
from lightning_thd.packing.sharing import DynamicPlanner, Sharing
from lightning_thd.warnings import DataWarning, warn

T = TypeVar("T")

_VERSION = 3  # the version of the counts in the cache
# With capacity, max_patches and the data, these are the cache key: the counts depend on no other setting.
_WINDOW_SETTINGS = ("align", "window", "oversize", "seed")

COUNTS_FROM = 100_000  # With fewer sequences, counting packs takes less time than opening a cache file.


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """The settings of a ``THDDataModule`` for datasets and streams; its arguments document them."""

    capacity: int
    global_batch: Packs | Sequences | None = None
    oversize: Oversize = "error"
    empty: Empty = "error"
    tail: Tail = "pad"
    window: int = 4096
    seed: int = 0
    schedule: Sequence[int] | None = None
    scheduler: Scheduler | None = None
    cost: Cost | None = None
    extras_cost: ExtrasCost | None = None
    max_patches: int | None = None
    pad_to: int | None = None
    mixing: Mixing | None = None
    share_prefixes: bool = False
    vocab_size: int | None = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    opener: Opener = field(default_factory=Opener)

    def __post_init__(self) -> None:
        advice = "Pass the tokens of a pack: 8_192."
        capacity = whole_number(self.capacity, "capacity", least=1, advice=advice)
        object.__setattr__(self, "capacity", capacity)
        object.__setattr__(self, "opener", replace(self.opener, num_workers=self.num_workers))
        if self.global_batch is not None:
            advice = "Pass Sequences(8), for example."
            instance(self.global_batch, "global_batch", Packs, Sequences, advice=advice)
        if self.mixing is not None:
            instance(self.mixing, "mixing", Mixing, advice="Pass Mixing(shares=...), for example.")
        choice(self.oversize, "oversize", *get_args(Oversize))
        choice(self.empty, "empty", *get_args(Empty))
        choice(self.tail, "tail", *get_args(Tail))

        for name in ("pad_to", "vocab_size", "max_patches"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, least=1)
        flags(share_prefixes=self.share_prefixes)
        if self.pin_memory is not None:
            flags(pin_memory=self.pin_memory)
        if self.pad_to is not None and self.pad_to < self.capacity:
            raise ValueError(f"pad_to={self.pad_to} is less than capacity={self.capacity}. Raise or omit it.")

    def step(self, job: Job) -> Packs | Sequences:
        """Return a step's size; by default one pack per batch for each rank, or for each dynamic group."""
        if self.global_batch is not None:
            return self.global_batch
        groups = job.ranks
        if job.sharing is not None:
            groups = max(1, job.ranks // job.sharing.max_degree)
        return Packs(groups * job.accumulate)

    def collator(self, job: Job) -> partial[THDBatch]:
        """Return the function that collates checked samples for the model."""
        options = {"align": job.alignment, "pad_to": self.pad_to, **model_counts(job.model)}
        if job.accumulate != 1 and not job.whole_steps:
            return partial(_collate_part_of_step, accumulate=job.accumulate, **options)
        return partial(collate_checked, **options)

    def pins(self, job: Job) -> bool:
        """Return whether batches are page-locked."""
        return job.on_gpu if self.pin_memory is None else self.pin_memory


def _collate_part_of_step(samples: Sequence[dict[str, Any]], *, accumulate: int, **options: Any) -> THDBatch:
    """Collate a batch of an accumulated step; refuse queries, which need the documents of all batches."""
    if any(PARTS in sample for sample in samples):
        raise MisconfigurationException(
            f"accumulate_grad_batches={accumulate} with queries and documents: a query would be compared "
            "with the documents of one batch, not of the step. Set global_batch=Sequences(n) and a strategy "
            "such as 'thd' or 'thd_ddp', which runs any number of microbatches in a step."
        )
    return collate_checked(samples, **options)


class Setting(Generic[T]):
    """An attribute of a data module that reads and replaces a value of its ``DataSettings``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> T:
        return cast("T", self if module is None else getattr(module._settings, self._name))

    def __set__(self, module: Any, value: T) -> None:
        module._settings = replace(module._settings, **{self._name: value})


def make_planner(data: DataSet, settings: DataSettings, job: Job, *, training: bool) -> Planner:
    """Make the planner of a data set; a step of evaluation is one pack per rank.

    If truncation leaves no token of a sequence to learn, training leaves the sequence out.
    """
    if not training or settings.oversize != "truncate":
        return _make_planner(data, settings, job, training=training)

    cut = _without_targets(data, _longest_sequence(settings, job, job.sharing))
    planner = _make_planner(_left_out(data, cut), settings, job, training=True)
    if len(cut):
        planner.entries.counts["empty"] -= len(cut)  # their length of 0 made them look empty
        planner.entries.counts["tokens_lost"] += int(data.index.lengths[cut].sum())
        planner.entries.counts["truncated_without_targets"] = len(cut)
    return planner


def _longest_sequence(settings: DataSettings, job: Job, sharing: Sharing | None) -> int:
    """Return the tokens of the longest sequence that is not oversize."""
    if sharing is None:
        return make_slots(settings.capacity, job.alignment).longest
    # The largest number of ranks shares the longest pack; each degree has its own alignment.
    return make_slots(settings.capacity * sharing.max_degree, None).longest


def _without_targets(data: DataSet, limit: int) -> npt.NDArray[np.intp]:
    """Return the sequences that have targets, but none in their first ``limit`` tokens."""
    index = data.index
    is_weighted = len(index.weights) > 0
    weights = index.weights if is_weighted else index.loss_tokens
    has_targets = weights > 0
    may_be_masked = index.loss_tokens < index.lengths - 1
    if is_weighted:  # any token may have the weight 0
        may_be_masked = np.ones_like(has_targets)
    long = np.flatnonzero(has_targets & may_be_masked & (index.lengths > limit))
    if not len(long):
        return long

    refuse_cuts(index, data.dataset, limit)
    zeros = np.zeros(len(long), np.int64)
    beginnings = Spans(index=long, start=zeros, stop=zeros + limit, continued=zeros.astype(bool))
    weights_of_beginnings = index.loss_weights(data.dataset, beginnings)[0]
    cut: npt.NDArray[np.intp] = long[weights_of_beginnings == 0]
    if len(cut) and len(cut) == np.count_nonzero(has_targets):
        raise ValueError(
            f"oversize='truncate' leaves no token to learn: all {len(cut):,} sequences with targets have "
            f"them after token {limit:,}. Raise capacity, or cut the prompts."
        )
    return cut


def _left_out(data: DataSet, cut: npt.NDArray[np.intp]) -> DataSet:
    """Return a data set in which some sequences have the length 0, which leaves them out of plans."""
    if not len(cut):
        return data
    lengths = np.array(data.index.lengths)
    lengths[cut] = 0
    lengths_of_sources = data.lengths
    if lengths_of_sources is not None:
        parts = _split_by_source(lengths, lengths_of_sources)
        lengths_of_sources = dict(zip(lengths_of_sources, parts, strict=True))
    return replace(data, index=replace(data.index, lengths=lengths), lengths=lengths_of_sources)


def _split_by_source(
    values: npt.NDArray[Any], lengths_of_sources: Mapping[str, npt.NDArray[np.integer]]
) -> list[npt.NDArray[Any]]:
    """Cut one value per sequence of a mixture into one array per source."""
    sizes = [len(lengths) for lengths in lengths_of_sources.values()]
    return np.split(values, np.cumsum(sizes)[:-1])


def _make_planner(data: DataSet, settings: DataSettings, job: Job, *, training: bool) -> Planner:
    """Make the planner of a data set, of the class that its settings ask for."""
    sharing = job.sharing if training else None
    if sharing is not None:
        _refuse_with_sharing(data, settings, job, sharing)

    capacity = settings.capacity
    oversize = settings.oversize
    if not training and oversize == "error":
        oversize = "own_pack"  # evaluation uses every token
    if oversize in ("truncate", "split"):
        refuse_cuts(data.index, data.dataset, _longest_sequence(settings, job, sharing))

    longest = capacity
    if sharing is not None:  # bounded by the data: a resume may change the largest degree, but not the cost
        longest = min(capacity * sharing.max_degree, int(data.index.lengths.max(initial=1)))
    schedule: Sequence[int] | npt.NDArray[np.int64] | None = data.schedule
    if training and settings.schedule is not None:
        schedule = settings.schedule
    plan: dict[str, Any] = {
        "global_batch": settings.step(job) if training else Packs(job.ranks),
        "loss_tokens": partial(data.index.loss_weights, data.dataset),
        "align": job.alignment,
        "cost": settings.cost or model_cost(job.model, longest),
        "window": settings.window,
        "oversize": oversize,
        "tail": settings.tail if training else "pad",
        "seed": settings.seed,
        "scheduler": settings.scheduler if training else None,
        "schedule": schedule,
    }
    if sharing is not None:
        del plan["align"]  # each degree has its own alignment
        return DynamicPlanner(data.index.lengths, capacity, sharing=sharing, **plan)

    plan |= _image_limits(data, settings, job)
    if settings.share_prefixes:
        _refuse_with_prefixes(data, job)
        return PrefixPlanner(data.index.lengths, capacity, ids=partial(prefix_bytes, data.dataset), **plan)
    if data.weights is not None:
        return _mixture_planner(data, settings, plan)

    make = partial(PackPlanner, data.index.lengths, capacity, **plan)
    if data.key is None or len(data.index.lengths) < COUNTS_FROM:
        return make()
    return plan_counted_once(make, data.key, settings.opener.cache_dir)


def _refuse_with_sharing(data: DataSet, settings: DataSettings, job: Job, sharing: Sharing) -> None:
    """Raise for settings that do not combine with ranks that share packs."""
    clashes = {
        "a mixture": data.weights is not None,
        f"a precision that aligns packs ({job.alignment})": job.alignment != sharing.align(1),
        f"max_patches={settings.max_patches}": settings.max_patches is not None,
        f"pad_to={settings.pad_to}": settings.pad_to is not None,
        "oversize='own_pack'": settings.oversize == "own_pack",
        "share_prefixes=True": settings.share_prefixes,
    }
    _refuse("context_parallel_size='dynamic'", clashes)


def _refuse_with_prefixes(data: DataSet, job: Job) -> None:
    """Raise for data and jobs that do not combine with shared prefixes."""
    clashes = {
        "a mixture, which draws sequences one by one": data.weights is not None,
        "context_parallel_size='dynamic'": job.sharing is not None,
    }
    _refuse("share_prefixes=True", clashes)


def _refuse(option: str, clashes: Mapping[str, bool]) -> None:
    """Raise for the first of the clashes that is True."""
    for other, clashing in clashes.items():
        if clashing:
            raise ValueError(f"{option} cannot be used with {other}. Leave one of them out.")


def _mixture_planner(data: DataSet, settings: DataSettings, plan: dict[str, Any]) -> MixturePlanner:
    """Make the planner of a mixture, whose shares count the tokens that are trained on."""
    assert data.weights is not None
    assert data.lengths is not None
    if settings.schedule is not None:
        raise ValueError("schedule= uses each sequence once, but a mixture repeats some. Leave one out.")

    limit = make_slots(settings.capacity, plan["align"]).longest
    lengths: Mapping[str, npt.NDArray[np.integer]] = data.lengths
    most = None
    if plan["oversize"] == "truncate":
        lengths = {name: np.minimum(values, limit) for name, values in lengths.items()}
    elif plan["oversize"] == "drop":
        most = limit
        if {"patches", "max_patches"} <= plan.keys():
            # A sequence with too many patches is dropped too, so it gets a length that is dropped.
            has_too_many = plan["patches"][:, 0] > plan["max_patches"]
            parts = _split_by_source(has_too_many, lengths)
            lengths = {
                name: np.where(part, limit + 1, values)
                for (name, values), part in zip(lengths.items(), parts, strict=True)
            }
    mixture = make_mixture(lengths, data.weights, settings.mixing, seed=settings.seed, most=most)
    return MixturePlanner(data.index.lengths, settings.capacity, mixture=mixture, **plan)


def _image_limits(data: DataSet, settings: DataSettings, job: Job) -> dict[str, Any]:
    """Return a planner's arguments about images: ``max_patches`` and the table of ``patches``."""
    limits: dict[str, Any] = {}
    if settings.max_patches is not None:
        limits["max_patches"] = settings.max_patches
    if limits and not data.index.sizes_measured and settings.extras_cost is None:
        raise ValueError(
            f"max_patches= needs the rows, but {data.name} has `lengths`, so no row was read. "
            "Pass extras_cost=, or remove the `lengths`."
        )

    sizes = data.index.sizes
    if not len(sizes):
        if limits and data.name == "train":
            rank_zero_info(
                f"max_patches={settings.max_patches} has no effect: the train data have no images."
            )
        return limits

    patch = model_patch(job.model)
    if limits and patch is None and sizes[:, 2].any():
        raise ValueError(
            f"max_patches={settings.max_patches}, but images of the {data.name} data come as pixels. "
            "Pass extras_cost=, a function from a row to its patches."
        )
    limits["patches"] = patch_table(np.asarray(sizes, np.int64), patch)
    return limits


def prefix_bytes(rows: MapDataset, i: int) -> bytes:
    """Return a row's ids, 4 bytes each; a row with other inputs gets numbers that no other row has."""
    sample = rows[i]
    ids = np.asarray(sample["input_ids"])
    if inputs(sample) or any(key in sample for key in ("position_ids", *TYPES)):
        ids = np.full(len(ids), -1 - i)
    return ids.astype("<i4").tobytes()


def counts_of(data: DataSet, planner: Planner) -> dict[str, int]:
    """Return the sequences that each policy left out or changed, ``tokens_lost``, and ``skipped`` records."""
    counts = dict(planner.entries.counts)
    counts["empty"] -= len(data.index.bad)  # a bad row also has length 0
    if data.skipped:
        counts["skipped"] = data.skipped
    return counts


def plan_counted_once(
    make: partial[PackPlanner], key: Mapping[str, Any], cache_dir: str | Path | None
) -> PackPlanner:
    """Make a planner; for ``Packs`` without a schedule, cache how many packs each of its windows makes."""
    options = make.keywords
    if isinstance(options["global_batch"], Sequences) or options["schedule"] is not None:
        return make()
    counted: list[PackPlanner] = []  # the planner, if the cache has no counts of it yet

    def count() -> dict[str, npt.NDArray[np.uint32]]:
        planner = make()
        counted.append(planner)
        assert planner.counts is not None
        return {"counts": planner.counts}

    cache_key = {"of": dict(key), "capacity": make.args[1]}
    for name in _WINDOW_SETTINGS:
        cache_key[name] = repr(options[name])
    if "max_patches" in options and "patches" in options:
        table = options["patches"]
        digest = media_digest(partial(np.take, table, axis=0), len(table))
        cache_key["max_patches"] = f"{options['max_patches']} {digest}"

    arrays = cached_arrays("counts", cache_key, count, version=_VERSION, cache_dir=cache_dir)
    if counted:
        return counted[0]
    return make(counts=np.asarray(arrays["counts"]))


def announce(data: DataSet, planner: Planner, job: Job) -> None:
    """Print the size of a data set; print and log how many sequences policies leave out or change."""
    name = data.name
    lengths = data.index.lengths
    changed = {key: count for key, count in counts_of(data, planner).items() if count}

    parts = [f"{name}: {len(lengths):,} sequences", f"{int(lengths.sum()):,} tokens"]
    most_targets = int(np.maximum(lengths - 1, 0).sum())  # the first token of a sequence is never a target
    targets = int(data.index.loss_tokens.sum())
    if targets < most_targets:
        parts.append(f"{targets:,} of them learned")
    parts += [f"{key.replace('_', ' ')} {count:,}" for key, count in changed.items()]
    rank_zero_info(", ".join(parts))

    learned = data.index.weights if len(data.index.weights) else data.index.loss_tokens
    if name == "train" and lengths.max(initial=0) > 1 and not learned.any():
        warn(
            "train: no token is learned, because all labels are -100 or all weights are 0. "
            "The label of a token that the model should learn is its id.",
            DataWarning,
        )

    if changed:
        metrics: dict[str, float] = {f"data/{name}_{key}": count for key, count in changed.items()}
        for logger in job.loggers:
            logger.log_metrics(metrics, step=0)
