"""A counted set, how to pack it, and the ranks -> its planner, with windows counted once for all runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import Dataset

from lightning_thd._checks import whole_number
from lightning_thd.data.plans_ahead import Planner
from lightning_thd.data.sets import DataSet
from lightning_thd.data.store.arrays import cached_arrays
from lightning_thd.data.store.columns import ColumnRows
from lightning_thd.data.store.index import refuse_cuts
from lightning_thd.data.store.measure import MapDataset
from lightning_thd.data.store.tokens import TokenStore
from lightning_thd.data.trainer_link import Host, model_cost
from lightning_thd.packing import Cost, PackPlanner, Packs, Scheduler, Sequences
from lightning_thd.packing.entries import Oversize
from lightning_thd.packing.lengths import make_slots
from lightning_thd.packing.mixtures import Mixing, MixturePlanner, make_mixture
from lightning_thd.packing.plan import Weigh
from lightning_thd.packing.planner import Tail
from lightning_thd.packing.sharing import Sharing
from lightning_thd.packing.sharing.planner import SharedPlanner

T = TypeVar("T")

_VERSION = 1
# What decides the packs of a window; the rest of a planner's settings may change under the same counts.
_DECIDES = ("align", "window", "oversize", "seed")
_KEEP_TOKENS = 1 << 24  # of split sequences that stay in memory: at most 256 MiB with labels
COUNTS_FROM = 100_000  # sequences: below it counting windows takes less than opening a file


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """How sets are packed; every attribute is described by ``THDDataModule``."""

    capacity: int
    global_batch: Packs | Sequences | None = None
    oversize: Oversize = "error"
    tail: Tail = "pad"
    window: int = 4096
    seed: int = 0
    schedule: Sequence[int] | None = None
    scheduler: Scheduler | None = None
    cost: Cost | None = None
    pad_to: int | None = None
    mixing: Mixing | None = None

    def __post_init__(self) -> None:
        capacity = whole_number(
            self.capacity, "capacity", least=None, advice="Pass the tokens of a pack: 8_192."
        )
        object.__setattr__(self, "capacity", capacity)
        if self.global_batch is not None and not isinstance(self.global_batch, Packs | Sequences):
            raise TypeError(
                f"global_batch is a {type(self.global_batch).__name__}. Pass Packs(n), Sequences(n) or None."
            )
        if self.pad_to is not None:
            whole_number(self.pad_to, "pad_to", least=1, advice="None pads no pack.")
        if self.capacity < 1:
            raise ValueError(
                f"capacity={self.capacity}: a pack holds at least 1 token. Pass the tokens of a pack."
            )
        if self.pad_to is not None and self.pad_to < self.capacity:
            raise ValueError(
                f"pad_to={self.pad_to} is less than capacity={self.capacity}. Raise pad_to or leave it out."
            )

    def step(self, host: Host) -> Packs | Sequences:
        """Return what one optimizer step takes: by default one pack a rank (or largest group) a batch."""
        groups = host.ranks if host.sharing is None else max(1, host.ranks // host.sharing.max_degree)
        return self.global_batch or Packs(groups * host.accumulate)


class Setting(Generic[T]):
    """A data module's attribute in its ``PlanSettings``; what is set holds for the loaders made after."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> T:
        return cast("T", self if module is None else getattr(module._plans, self._name))

    def __set__(self, module: Any, value: T) -> None:
        module._plans = replace(module._plans, **{self._name: value})


def make_planner(
    data: DataSet, settings: PlanSettings, host: Host, *, training: bool, cache_dir: str | Path | None
) -> tuple[Planner, MapDataset]:
    """Make the planner of a set, and the dataset that gives its rows; evaluation takes one pack a rank.

    Raises:
        ValueError: when the set cannot be planned so.
    """
    rows = data.dataset
    if settings.oversize == "split" and not isinstance(rows, TokenStore | ColumnRows):
        degree = host.sharing.max_degree if training and host.sharing is not None else 1
        rows = RecentRows(rows, settings.capacity * degree // 2)
    weigh = partial(data.index.loss_weights, rows)
    return _make_planner(data, settings, host, weigh, training=training, cache_dir=cache_dir), rows


def _make_planner(
    data: DataSet,
    settings: PlanSettings,
    host: Host,
    weigh: Weigh,
    *,
    training: bool,
    cache_dir: str | Path | None,
) -> Planner:
    if training and host.sharing is not None:
        if data.weights is not None:
            raise ValueError(
                "context_parallel_size='dynamic' plans one source, not a mixture. Give a number of ranks, or "
                "one source."
            )
        return _shared_planner(data, settings, host, host.sharing, weigh)
    index = data.index
    oversize: Oversize = "own_pack" if not training and settings.oversize == "error" else settings.oversize
    if oversize in ("truncate", "split"):
        refuse_cuts(index, data.dataset, settings.capacity)
    plan = partial(
        PackPlanner if data.weights is None else _mixture_planner(data, settings, oversize, host),
        index.lengths,
        settings.capacity,
        global_batch=settings.step(host) if training else Packs(host.ranks),
        loss_tokens=weigh,
        align=host.alignment,
        cost=settings.cost or model_cost(host.model, settings.capacity),
        window=settings.window,
        oversize=oversize,
        tail=settings.tail if training else "pad",
        seed=settings.seed,
        scheduler=settings.scheduler if training else None,
        schedule=settings.schedule if training and settings.schedule is not None else data.schedule,
    )
    if data.weights is not None or data.key is None or len(index.lengths) < COUNTS_FROM:
        return plan()
    return plan_counted_once(cast("partial[PackPlanner]", plan), data.key, cache_dir)


def _mixture_planner(
    data: DataSet, settings: PlanSettings, oversize: Oversize, host: Host
) -> Callable[..., MixturePlanner]:
    assert data.weights is not None
    assert data.lengths is not None
    if settings.schedule is not None:
        raise ValueError(
            "schedule= places each sequence once, and a mixture draws them by weight. Leave one out."
        )
    slots = make_slots(settings.capacity, host.alignment)
    limit = slots.usable // slots.multiple * slots.multiple
    mixture = make_mixture(
        data.lengths,
        data.weights,
        settings.mixing,
        seed=settings.seed,
        most=limit if oversize == "drop" else None,
    )
    return partial(MixturePlanner, mixture=mixture)


def counts_of(data: DataSet, planner: Planner) -> dict[str, int]:
    """Return how many sequences the policies left out or changed, bad records as ``skipped``."""
    counts = dict(planner.entries.counts)
    counts["empty"] -= len(data.index.bad)  # a bad row has length 0, too
    return {**counts, "skipped": data.skipped} if data.skipped else counts


class RecentRows(Dataset[dict[str, Any]]):
    """A dataset that caches the last long rows, so that reading one piece by piece reads it once.

    Args:
        dataset: gives rows.
        limit: tokens up to which a row is not worth keeping.
    """

    def __init__(self, dataset: MapDataset, limit: int) -> None:
        self._dataset, self._limit = dataset, limit
        self._kept: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i in self._kept:
            self._kept.move_to_end(i)
            return self._kept[i]
        sample = self._dataset[i]
        length = len(sample["input_ids"])
        if length <= self._limit:
            return sample
        names = ("input_ids", "labels", "position_ids", "attention_mask")
        self._kept[i] = {k: np.asarray(v) if k in names else v for k, v in sample.items()}
        self._tokens += length
        while self._tokens > _KEEP_TOKENS and len(self._kept) > 1:
            self._tokens -= len(self._kept.popitem(last=False)[1]["input_ids"])
        return self._kept[i]


def _shared_planner(
    data: DataSet, settings: PlanSettings, host: Host, sharing: Sharing, weigh: Weigh
) -> SharedPlanner:
    """Plan a set whose long sequences several ranks share."""
    if host.alignment != sharing.align(1):
        raise ValueError(
            f"context_parallel_size='dynamic' with a precision that aligns packs ({host.alignment}): that "
            "is known for one degree alone. Set a fixed context_parallel_size, or another precision."
        )
    if settings.pad_to is not None:
        raise ValueError(
            f"pad_to={settings.pad_to} under context_parallel_size='dynamic': packs of different degrees are "
            "padded by different multiples. Leave pad_to out."
        )
    if settings.oversize == "own_pack":
        raise ValueError(
            "oversize='own_pack' under context_parallel_size='dynamic' would put a sequence above the "
            "capacity of its ranks. Raise max_context_parallel_size, or set oversize='drop', 'truncate' or "
            "'split'."
        )
    largest = settings.capacity * sharing.max_degree
    if settings.oversize in ("truncate", "split"):
        refuse_cuts(data.index, data.dataset, largest)
    return SharedPlanner(
        data.index.lengths,
        settings.capacity,
        global_batch=settings.step(host),
        loss_tokens=weigh,
        sharing=sharing,
        cost=settings.cost or model_cost(host.model, largest),
        window=settings.window,
        oversize=settings.oversize,
        tail=settings.tail,
        seed=settings.seed,
        scheduler=settings.scheduler,
        schedule=settings.schedule if settings.schedule is not None else data.schedule,
    )


def plan_counted_once(
    plan: partial[PackPlanner], key: Mapping[str, Any], cache_dir: str | Path | None
) -> PackPlanner:
    """Make a planner whose number of packs in each window comes from the cache if counted before.

    The planner compares each window that it packs with its count, so that counts of other data cannot pass.

    Args:
        plan: ``PackPlanner`` with all its arguments but ``counts``.
        key: what the lengths are known by.
        cache_dir: where counts are kept.
    """
    if isinstance(plan.keywords["global_batch"], Sequences) or plan.keywords["schedule"] is not None:
        return plan()
    made: list[PackPlanner] = []

    def count() -> dict[str, npt.NDArray[np.uint32]]:
        made.append(plan())
        counts = made[0].counts
        assert counts is not None
        return {"counts": counts}

    settings = {name: repr(plan.keywords[name]) for name in _DECIDES}
    found = cached_arrays(
        "counts",
        {"of": dict(key), "capacity": plan.args[1], **settings},
        count,
        version=_VERSION,
        cache_dir=cache_dir,
    )
    return made[0] if made else plan(counts=np.asarray(found["counts"]))


def announce(data: DataSet, planner: Planner, host: Host) -> None:
    """Print and log how large a set is and what its policies leave out or change."""
    lengths, name = data.index.lengths, data.name
    changed = {key: count for key, count in counts_of(data, planner).items() if count}
    rank_zero_info(
        f"{name}: {len(lengths):,} sequences, {int(lengths.sum()):,} tokens"
        + "".join(f", {key.replace('_', ' ')} {count:,}" for key, count in changed.items())
    )
    for logger in host.loggers if changed else ():
        logger.log_metrics({f"data/{name}_{key}": count for key, count in changed.items()}, step=0)
