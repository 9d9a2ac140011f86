"""The batches of a dataloader -> this rank's slice of each pack, for fixed and dynamic numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.utils.data import IterableDataset

from lightning_thd._checks import choice, whole_number
from lightning_thd._find import model_config
from lightning_thd.alignment import Layout
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.flops import FlopsModel
from lightning_thd.packing.sharing import Sharing, check_tiling
from lightning_thd.parallel.across_ranks import broadcast_object, check_agreement, on_host
from lightning_thd.parallel.context import traffic
from lightning_thd.parallel.context.costs import BYTES_PER_S, FLOPS_PER_S, LayerSizes
from lightning_thd.parallel.context.layout import Communication
from lightning_thd.parallel.context.shared_step import SharedStep, check_shared_agreement, cut_step
from lightning_thd.parallel.mesh import CONTEXT, AxisSizes
from lightning_thd.parallel.shard import shard_batch, shard_step
from lightning_thd.stats import SeqStats
from lightning_thd.strategies.axes import Axes, gathers_once
from lightning_thd.strategies.guards import packs, refuse_other_attention, refuse_second_context_parallelism

DYNAMIC = "dynamic"


class PackCut:
    """Compares the batches of ranks that share packs, and keeps this rank's slice of each."""

    def __init__(self, strategy: Any, axes: Axes) -> None:
        self._strategy, self._axes = strategy, axes
        self._size = strategy.context_parallel_size
        self._max_size = strategy.max_context_parallel_size or (1 if axes.degree_groups else self._size)
        layout, communication = strategy.context_parallel_layout, strategy.context_parallel_communication
        self._options = {"layout": layout, "communication": communication}
        self._checked_stage: object = None
        self._checked_attention = False

    def compare(self, batch: Any) -> None:
        """Raise if ranks that share packs read different ones; checked when training or evaluation begins."""
        axes, module = self._axes, self._strategy.lightning_module
        stage = (id(module), None if module is None else module.trainer.state.stage)
        if stage == self._checked_stage:
            return
        found = packs(batch)
        if isinstance(batch, SharedStep):
            assert axes.degree_groups is not None
            check_shared_agreement(batch, axes.degree_groups, axes.collective_device)
        elif found and axes.sizes.peers > 1:
            check_agreement(found, axes.sizes, axes.collective_device)
        self._checked_stage = stage if found else self._checked_stage

    def cut(self, moved: Any, given: Any) -> Any:
        """Keep this rank's slice of every pack in a moved batch; ``given`` is the dataloader's batch."""
        if self._size == 1:
            return moved
        module = self._strategy.lightning_module
        if not self._checked_attention:
            assert module is not None
            refuse_other_attention(module, self._max_size)
            self._checked_attention = True
        refuse_second_context_parallelism(module, self._max_size)
        if (groups := self._axes.degree_groups) is not None:
            if isinstance(moved, SharedStep):
                return cut_step(moved, groups, **self._options)
            if isinstance(moved, THDBatch | THDStep) and (module is None or module.trainer.training):
                raise MisconfigurationException(
                    "context_parallel_size='dynamic' needs steps with a planned number of ranks for each "
                    f"microbatch, but the dataloader gave {type(moved).__name__}. Use THDDataModule."
                )
            return moved
        found: list[Any] = []

        def cut_one(batch: THDBatch | THDStep) -> THDBatch | THDStep:
            found.append(batch)
            if isinstance(batch, THDBatch) and batch.boundaries.ranks > 1:
                return batch
            assert self._axes.meshes is not None
            options = {"group": self._axes.meshes.group(CONTEXT), **self._options}
            if isinstance(batch, THDStep):
                return shard_step(batch, **options)
            return shard_batch(batch, **options)

        collection = apply_to_collection(moved, (THDBatch, THDStep), cut_one)
        if not found:
            raise MisconfigurationException(
                f"context_parallel_size={self._size} cuts THDBatch, but the dataloader gave {type(given)}. "
                "Use THDDataModule, or THDBatch.collate(samples, align=trainer.strategy.alignment)."
            )
        return collection


class BroadcastLoader:
    """Iterates a dataloader on the first rank of a group only, and sends every batch to the other ranks."""

    def __init__(self, dataloader: Any, group: dist.ProcessGroup) -> None:
        self._dataloader, self._reads = dataloader, group.rank() == 0
        # Send through CPU memory: on a device, batches would wait for the work that is queued there.
        self._group, self._source = on_host(group), dist.get_global_rank(group, 0)

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
        broadcast_object((), self._group, self._source)  # an empty message ends the iteration


def set_data_rank(dataloader: object, rank: int, sizes: AxisSizes, *, one_reads: bool) -> None:
    """Set which part of the data an iterable dataset reads; if all peers read, refuse an unknown part."""
    dataset: Any = getattr(dataloader, "dataset", None)
    if not isinstance(dataset, IterableDataset):
        return
    if hasattr(dataset, "data_rank") and hasattr(dataset, "data_size"):
        dataset.data_rank, dataset.data_size = rank, sizes.data
        return
    if sizes.peers == 1 or one_reads:  # ranks may read different data, as under any strategy
        return
    split = getattr(dataset, "_distributed", None)  # an attribute of datasets.IterableDataset
    if split is not None and (split.rank, split.world_size) == (rank, sizes.data):
        return
    raise MisconfigurationException(
        f"{type(dataset).__name__} is iterable and does not say which part of the data it reads, but "
        f"{sizes.peers} ranks share each pack. Give it attributes data_rank and data_size, which the "
        "strategy sets, or let one rank read for its peers with broadcast_data=True."
    )


def log_traffic(trainer: L.Trainer) -> None:
    """When the Trainer logs, log the bytes received per slot since the last log, and each method's share."""
    connector = trainer._logger_connector
    if not connector.should_update_logs:
        return
    found = traffic.read_and_reset()
    if found.slots:
        metrics = {f"context_parallel/{way}": share for way, share in found.shares.items()}
        metrics["context_parallel/bytes_per_token"] = found.received_bytes / found.slots
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        connector.log_metrics(metrics)  # type: ignore[arg-type]  # it accepts floats


def check_degrees(size: Any, largest: int | None) -> None:
    """Refuse a context-parallel size that is no number or contradicts ``max_context_parallel_size``."""
    if size == DYNAMIC:
        advice = "It is the most ranks that may share a sequence: a power of two, such as 8."
        whole_number(largest, "max_context_parallel_size", least=None, advice=advice)
        return
    advice = "Pass a number of ranks, or 'dynamic'."
    whole_number(size, "context_parallel_size", least=None, advice=advice)  # resolve_sizes checks its value
    if largest is not None:
        raise ValueError(f"max_context_parallel_size={largest} belongs to context_parallel_size='dynamic'.")


def check_ways(layout: Any, communication: Any) -> None:
    """Refuse unknown names of layouts and communication methods."""
    choice(layout, "context_parallel_layout", *get_args(Layout))
    choice(communication, "context_parallel_communication", *get_args(Communication))


def sharing_of(strategy: Any) -> Sharing:
    """Return how many ranks of a strategy may share a sequence, and at what cost."""
    if (stages := strategy.pipeline_parallel_size) != 1:
        raise MisconfigurationException(
            f"context_parallel_size='dynamic' with pipeline_parallel_size={stages}: stages need "
            "microbatches of one degree. Set a fixed context_parallel_size."
        )
    largest = strategy.max_context_parallel_size
    check_tiling(strategy.sizes.data, largest)
    return Sharing(
        max_degree=largest,
        layout=strategy.context_parallel_layout,
        tp=strategy.sizes.tensor,
        sequence_parallel=strategy.sequence_parallel,
        exchange=exchange_costs(strategy.lightning_module, largest),
        # Ranks wait for each other once a step if DDP sums gradients or FSDP2 gathers once, else more often.
        waits="step" if isinstance(strategy, DDPStrategy) or gathers_once(strategy) else "microbatch",
    )


def exchange_costs(module: nn.Module | None, largest: int) -> tuple[float, ...] | None:
    """Return, for 2, 4, ... ranks, a slot's cheapest exchange time as a share of a token's training time."""
    config = model_config(module)
    if config is None:
        return None
    text = config.get_text_config()
    try:
        flops = float(FlopsModel.from_config(config).training_flops(SeqStats.from_lengths([1024])).hardware)
    except ValueError:
        return None
    heads = getattr(text, "num_attention_heads", 0) or 0
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    layer = LayerSizes(heads=heads, kv_heads=kv_heads, head_size=size, value_size=size, element_bytes=2)
    token_s = flops / 1024 / FLOPS_PER_S
    found = []
    for degree in (1 << i for i in range(1, largest.bit_length())):
        moved = layer.gather_bytes(1024, degree)
        if heads % degree == 0:
            moved = min(moved, layer.ulysses_bytes(1024, degree))
        slot_bytes = 2 * text.num_hidden_layers * moved / 1024  # forward and backward
        found.append(slot_bytes / BYTES_PER_S / token_s)
    return tuple(found)
