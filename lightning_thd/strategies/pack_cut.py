"""The batches of a dataloader -> what this rank reads, and its slice of each pack."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.utils.data import IterableDataset

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.parallel.across_ranks import broadcast_object, on_host
from lightning_thd.parallel.agreement import check_agreement
from lightning_thd.parallel.context.shared_step import SharedStep, check_shared_agreement, cut_step
from lightning_thd.parallel.mesh import CONTEXT, AxisSizes
from lightning_thd.parallel.shard import THDShard, shard_batch, shard_step
from lightning_thd.strategies.axes import Axes
from lightning_thd.strategies.dynamic import check_batch, know_whole_packs
from lightning_thd.strategies.guards import refuse_other_attention, refuse_second_context_parallelism


class PackCut:
    """Compares the batches of ranks that share packs, and keeps this rank's slice of each."""

    def __init__(self, strategy: Any, axes: Axes) -> None:
        self._strategy, self._axes = strategy, axes
        self._size = strategy.context_parallel_size
        self._most = strategy.max_context_parallel_size or (1 if axes.degree_groups else self._size)
        self._how = {
            "layout": strategy.context_parallel_layout,
            "communication": strategy.context_parallel_communication,
        }
        self._checked_stage: object = None
        self._guarded = False

    def compare(self, batch: Any) -> None:
        """Raise if ranks that share packs read different ones, at a stage's first batch or at every batch."""
        if not isinstance(batch, THDBatch | THDStep):
            return
        axes, module = self._axes, self._strategy.lightning_module
        stage = (id(module), None if module is None else module.trainer.state.stage)
        shared = isinstance(batch, SharedStep) or axes.sizes.peers > 1
        if not self._strategy.check_plans and not (shared and stage != self._checked_stage):
            return
        self._checked_stage = stage
        if isinstance(batch, SharedStep):
            assert axes.degree_groups is not None
            check_shared_agreement(batch, axes.degree_groups, axes.wire)
        else:
            check_agreement(batch, axes.sizes, axes.wire)

    def cut(self, moved: Any, given: Any) -> Any:
        """Keep this rank's slice of every pack in a moved batch; ``given`` is what the dataloader gave."""
        if self._size == 1:
            return moved
        module = self._strategy.lightning_module
        self._refuse_modules(module)
        if (groups := self._axes.degree_groups) is not None:
            know_whole_packs(moved)
            check_batch(moved, training=module is None or module.trainer.training)
            return cut_step(moved, groups, **self._how) if isinstance(moved, SharedStep) else moved
        found: list[Any] = []

        def cut_one(batch: THDBatch | THDStep) -> THDBatch | THDStep:
            found.append(batch)
            if isinstance(batch, THDShard):
                return batch
            assert self._axes.meshes is not None
            how = {"group": self._axes.meshes.group(CONTEXT), **self._how}
            return shard_step(batch, **how) if isinstance(batch, THDStep) else shard_batch(batch, **how)

        if isinstance(moved, THDBatch | THDStep):
            return cut_one(moved)
        collection = apply_to_collection(moved, (THDBatch, THDStep), cut_one)
        if not found:
            raise MisconfigurationException(
                f"context_parallel_size={self._size} cuts THDBatch, but the dataloader gave "
                f"{type(given).__name__}. Use THDDataModule, or THDBatch.collate(samples, "
                "align=trainer.strategy.alignment) as collate_fn."
            )
        return collection

    def _refuse_modules(self, module: nn.Module | None) -> None:
        if not self._guarded:
            assert module is not None
            refuse_other_attention(module, self._most)
            self._guarded = True
        refuse_second_context_parallelism(module, self._most)


def prepare_loader(strategy: Any, axes: Axes, dataloader: Any) -> Any:
    """Prepare a dataloader so that ranks which share a pack read the same data."""
    sizes = axes.sizes
    if strategy.broadcast_data and sizes.peers > 1 and not getattr(dataloader, "reads_for_peers", False):
        assert axes.meshes is not None
        timeout: timedelta | None = getattr(strategy, "_timeout", None)
        return BroadcastLoader(dataloader, axes.meshes.peers.get_group(), timeout)
    set_data_rank(dataloader, axes.data_rank, sizes)
    return dataloader


def set_data_rank(dataloader: object, rank: int, sizes: AxisSizes) -> None:
    """Set which part of the data an iterable dataset reads on this rank, or refuse an unknown part."""
    dataset: Any = getattr(dataloader, "dataset", None)
    if not isinstance(dataset, IterableDataset):
        return
    if hasattr(dataset, "data_rank") and hasattr(dataset, "data_size"):
        dataset.data_rank, dataset.data_size = rank, sizes.data
        return
    if sizes.peers == 1:  # every rank reads its own data, as under any strategy
        return
    split = getattr(dataset, "_distributed", None)  # datasets.IterableDataset
    if split is not None and (split.rank, split.world_size) == (rank, sizes.data):
        return
    found = "" if split is None else f" It reads part {split.rank} of {split.world_size}."
    raise MisconfigurationException(
        f"{type(dataset).__name__} is iterable and does not say which part of the data it reads, but "
        f"{sizes.peers} ranks share each pack and must read the same.{found} Give it attributes data_rank "
        "and data_size, which are set here, or let one rank read for its peers with broadcast_data=True."
    )


class BroadcastLoader:
    """Iterates a dataloader on the first rank of a group only, and sends every batch to the others."""

    def __init__(self, dataloader: Any, group: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        self._dataloader, self._reads = dataloader, group.rank() == 0
        # On the device batches would wait for the work that is queued there.
        self._group, self._source = on_host(group, timeout), dist.get_global_rank(group, 0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataloader":
            raise AttributeError(name)
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        if not self._reads:
            while message := broadcast_object(None, self._group, self._source):
                yield message[0]
            return
        for batch in self._dataloader:
            broadcast_object((batch,), self._group, self._source)
            yield batch
        broadcast_object((), self._group, self._source)  # the end
