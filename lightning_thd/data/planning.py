"""A counted set, its settings and the ranks -> its planner; windows are counted once for all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_thd._checks import choice, flags, instance, whole_number
from lightning_thd.batch.keys import TYPES, inputs
from lightning_thd.batch.media import ExtrasCost, patch_table
from lightning_thd.batch.thd_batch import THDBatch, collate_checked
from lightning_thd.data.loader import Planner
from lightning_thd.data.read.sources import Opener
from lightning_thd.data.sets import DataSet
from lightning_thd.data.store.cache import cached_arrays
from lightning_thd.data.store.index import Empty, MapDataset, refuse_cuts
from lightning_thd.data.trainer_link import Host, model_cost, model_counts, model_patch
from lightning_thd.packing import Cost, PackPlanner, Packs, Scheduler, Sequences
from lightning_thd.packing.entries import Oversize
from lightning_thd.packing.lengths import make_slots
from lightning_thd.packing.mixtures import Mixing, MixturePlanner, make_mixture
from lightning_thd.packing.planner import Tail, media_digest
from lightning_thd.packing.prefixes import PrefixPlanner
from lightning_thd.packing.sharing import SharedPlanner

T = TypeVar("T")

_VERSION = 1  # The version of the counts in the cache.
# These settings decide the packs of a window; others may change without a new count.
_DECIDES = ("align", "window", "oversize", "seed")

COUNTS_FROM = 100_000  # With fewer sequences, counting windows takes less time than opening a file.


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
        if self.global_batch is not None:
            instance(self.global_batch, "global_batch", Packs, Sequences)
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

    def step(self, host: Host) -> Packs | Sequences:
        """Return the size of an optimizer step; by default one pack per rank (or largest group) and batch."""
        groups = host.ranks if host.sharing is None else max(1, host.ranks // host.sharing.max_degree)
        return self.global_batch or Packs(groups * host.accumulate)

    def collator(self, host: Host) -> partial[THDBatch]:
        """Return the function that collates checked samples for the model."""
        return partial(collate_checked, align=host.alignment, pad_to=self.pad_to, **model_counts(host.model))

    def pins(self, host: Host) -> bool:
        """Return whether batches are page-locked."""
        return host.on_gpu if self.pin_memory is None else self.pin_memory


class Setting(Generic[T]):
    """An attribute of a data module, kept in its ``DataSettings``; a new value applies to later loaders."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> T:
        return cast("T", self if module is None else getattr(module._settings, self._name))

    def __set__(self, module: Any, value: T) -> None:
        module._settings = replace(module._settings, **{self._name: value})


def make_planner(
    data: DataSet, settings: DataSettings, host: Host, *, training: bool
) -> tuple[Planner, MapDataset]:
    """Make a set's planner, and the dataset of its rows; a step of evaluation is one pack per rank."""
    sharing = host.sharing if training else None
    capacity, oversize = settings.capacity, settings.oversize
    if sharing is not None:
        clashes = {
            "a mixture": data.weights is not None,
            f"a precision that aligns packs ({host.alignment})": host.alignment != sharing.align(1),
            f"max_patches={settings.max_patches}": settings.max_patches is not None,
            f"pad_to={settings.pad_to}": settings.pad_to is not None,
            "oversize='own_pack'": settings.oversize == "own_pack",
            "share_prefixes=True": settings.share_prefixes,
        }
        _refuse("context_parallel_size='dynamic'", clashes)
    if not training and oversize == "error":
        oversize = "own_pack"  # evaluation uses every token
    largest = capacity if sharing is None else capacity * sharing.max_degree
    if oversize in ("truncate", "split"):
        refuse_cuts(data.index, data.dataset, largest)
    rows = data.dataset
    plan: dict[str, Any] = {
        "global_batch": settings.step(host) if training else Packs(host.ranks),
        "loss_tokens": partial(data.index.loss_weights, rows),
        "align": host.alignment,
        "cost": settings.cost or model_cost(host.model, largest),
        "window": settings.window,
        "oversize": oversize,
        "tail": settings.tail if training else "pad",
        "seed": settings.seed,
        "scheduler": settings.scheduler if training else None,
        "schedule": settings.schedule if training and settings.schedule is not None else data.schedule,
    }
    if sharing is None:
        plan |= _images(data, settings, host)
    else:
        del plan["align"]
        return SharedPlanner(data.index.lengths, capacity, sharing=sharing, **plan), rows
    if settings.share_prefixes:
        cut = host.alignment is not None and host.alignment.sequence_multiple != 1
        clashes = {
            "a mixture, which draws sequences one by one": data.weights is not None,
            "context parallelism, which cuts every sequence": cut or host.sharing is not None,
        }
        _refuse("share_prefixes=True", clashes)
        return PrefixPlanner(data.index.lengths, capacity, ids=partial(prefix_bytes, rows), **plan), rows
    if data.weights is not None:
        return _mixture_planner(data, settings, plan), rows
    whole = partial(PackPlanner, data.index.lengths, capacity, **plan)
    if data.key is None or len(data.index.lengths) < COUNTS_FROM:
        return whole(), rows
    return plan_counted_once(whole, data.key, settings.opener.cache_dir), rows


def _mixture_planner(data: DataSet, settings: DataSettings, plan: dict[str, Any]) -> MixturePlanner:
    assert data.weights is not None
    assert data.lengths is not None
    if settings.schedule is not None:
        raise ValueError("schedule= places each sequence once, and a mixture draws them. Leave one out.")
    slots = make_slots(settings.capacity, plan["align"])
    limit = slots.usable // slots.multiple * slots.multiple
    most = limit if plan["oversize"] == "drop" else None
    lengths: Mapping[str, npt.NDArray[np.integer]] = data.lengths
    if plan["oversize"] == "truncate":
        lengths = {name: np.minimum(values, limit) for name, values in lengths.items()}
    if most is not None and {"patches", "max_patches"} <= plan.keys():
        starts = np.cumsum([len(values) for values in lengths.values()])[:-1]
        over = np.split(plan["patches"][:, 0] > plan["max_patches"], starts)
        pairs = zip(lengths.items(), over, strict=True)
        lengths = {name: np.where(out, most + 1, values) for (name, values), out in pairs}
    mixture = make_mixture(lengths, data.weights, settings.mixing, seed=settings.seed, most=most)
    return MixturePlanner(data.index.lengths, settings.capacity, mixture=mixture, **plan)


def _images(data: DataSet, settings: DataSettings, host: Host) -> dict[str, Any]:
    """Return the planner's options for images: the bound on patches, and the patches of all sequences."""
    sizes, patch = data.index.sizes, model_patch(host.model)
    found = {} if settings.max_patches is None else {"max_patches": settings.max_patches}
    if settings.max_patches is not None and not data.index.seen and settings.extras_cost is None:
        raise ValueError(
            f"max_patches= needs the rows, but {data.name} has `lengths`, so no row was read. "
            "Pass extras_cost=, or remove the `lengths`."
        )
    if not len(sizes):
        if found and data.name == "train":
            rank_zero_info(
                f"max_patches={settings.max_patches} has no effect: the train data have no images."
            )
        return found
    if settings.max_patches is not None and patch is None and sizes[:, 2].any():
        raise ValueError(
            f"max_patches={settings.max_patches}, but images of the {data.name} data come as pixels. "
            "Pass extras_cost=, a function from a row to its patches."
        )
    return {**found, "patches": patch_table(np.asarray(sizes, np.int64), patch)}


def prefix_bytes(rows: MapDataset, i: int) -> bytes:
    """Return the ids of a row, 4 bytes each; a row with images or positions gets ids of its own instead."""
    sample = rows[i]
    ids = np.asarray(sample["input_ids"])
    if inputs(sample) or any(key in sample for key in ("position_ids", *TYPES)):
        ids = np.full(len(ids), -1 - i)
    return ids.astype("<i4").tobytes()


def _refuse(option: str, clashes: Mapping[str, bool]) -> None:
    """Refuse an option together with another that clashes with it; the error names the first such one."""
    for other, clashing in clashes.items():
        if clashing:
            raise ValueError(f"{option} cannot be used with {other}. Leave one of them out.")


def counts_of(data: DataSet, planner: Planner) -> dict[str, int]:
    """Return how many sequences the policies left out or changed; bad records count as ``skipped``."""
    counts = dict(planner.entries.counts)
    counts["empty"] -= len(data.index.bad)  # a bad row also has length 0
    return {**counts, "skipped": data.skipped} if data.skipped else counts


def plan_counted_once(
    plan: partial[PackPlanner], key: Mapping[str, Any], cache_dir: str | Path | None
) -> PackPlanner:
    """Make a planner; read its number of packs per window from the cache if they were counted before."""
    given = plan.keywords
    if isinstance(given["global_batch"], Sequences) or given["schedule"] is not None:
        return plan()
    made: list[PackPlanner] = []

    def count() -> dict[str, npt.NDArray[np.uint32]]:
        made.append(plan())
        counts = made[0].counts
        assert counts is not None
        return {"counts": counts}

    of = {"of": dict(key), "capacity": plan.args[1], **{name: repr(given[name]) for name in _DECIDES}}
    if "max_patches" in given and "patches" in given:
        table = given["patches"]
        of["max_patches"] = (
            f"{given['max_patches']} {media_digest(partial(np.take, table, axis=0), len(table))}"
        )
    found = cached_arrays("counts", of, count, version=_VERSION, cache_dir=cache_dir)
    return made[0] if made else plan(counts=np.asarray(found["counts"]))


def announce(data: DataSet, planner: Planner, host: Host) -> None:
    """Print and log how large a set is and what its policies leave out or change."""
    lengths, name = data.index.lengths, data.name
    changed = {key: count for key, count in counts_of(data, planner).items() if count}
    rank_zero_info(
        f"{name}: {len(lengths):,} sequences, {int(lengths.sum()):,} tokens"
        + "".join(f", {key.replace('_', ' ')} {count:,}" for key, count in changed.items())
    )
    learned = data.index.weights if len(data.index.weights) else data.index.loss_tokens
    if name == "train" and lengths.max(initial=0) > 1 and not learned.any():
        rank_zero_warn(
            "train: no token is learned, because all labels are -100, or all weights 0. "
            "Label each token that is to be learned with its id."
        )
    for logger in host.loggers if changed else ():
        logger.log_metrics({f"data/{name}_{key}": count for key, count in changed.items()}, step=0)
