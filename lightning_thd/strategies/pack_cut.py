"""The batches of a dataloader -> this rank's slice of each pack, for strategies and for loops by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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
from lightning_thd._private import private_of
from lightning_thd.alignment import Alignment, Layout
from lightning_thd.batch import THDBatch
from lightning_thd.batch.thd_batch import Packed
from lightning_thd.data.trainer_link import model_alignment
from lightning_thd.flops import FlopsModel
from lightning_thd.packing.sharing import Sharing, check_tiling
from lightning_thd.parallel.across_ranks import broadcast_object, check_agreement, on_host
from lightning_thd.parallel.context.costs import BYTES_PER_S, FLOPS_PER_S, LayerSizes
from lightning_thd.parallel.context.dynamic_step import DynamicStep, check_dynamic_agreement
from lightning_thd.parallel.context.layout import Communication
from lightning_thd.parallel.context.traffic import Traffic
from lightning_thd.parallel.mesh import CONTEXT, DATA, AxisSizes, make_meshes
from lightning_thd.parallel.shard import cut_batch, cut_step
from lightning_thd.stats import SeqStats
from lightning_thd.strategies.axes import Axes, gathers_once
from lightning_thd.strategies.guards import packs, refuse_other_attention, refuse_second_context_parallelism
from lightning_thd.strategies.logs import log_numbers, logs_this_step

DYNAMIC = "dynamic"
_TOKENS = 1024  # length of the sequence by which exchange and computing are compared


class PackCut:
    """Compares the batches of ranks that share packs, and keeps this rank's slice of each."""

    def __init__(self, strategy: Any, axes: Axes) -> None:
        self._strategy = strategy
        self._axes = axes
        self._size = strategy.context_parallel_size
        # The largest number of ranks that share a pack; check_degrees requires it under "dynamic".
        self._max_size = strategy.max_context_parallel_size or self._size
        self._options = {
            "layout": strategy.context_parallel_layout,
            "communication": strategy.context_parallel_communication,
        }
        self._traffic = Traffic()
        self._compared_stage: object = None
        self._checked_attention = False

    def compare(self, batch: Any) -> None:
        """Raise if ranks that share packs read different ones; checked when training or evaluation begins."""
        axes = self._axes
        module = self._strategy.lightning_module
        stage = (id(module), None if module is None else module.trainer.state.stage)
        if stage == self._compared_stage:
            return

        packs_and_steps = packs(batch)
        if isinstance(batch, DynamicStep):
            assert axes.degree_groups is not None
            check_dynamic_agreement(batch, axes.degree_groups, axes.collective_device)
        elif packs_and_steps and axes.sizes.peers > 1:
            check_agreement(packs_and_steps, axes.sizes, axes.collective_device)
        if packs_and_steps:  # a batch without packs says nothing; wait for the next
            self._compared_stage = stage

    def cut(self, moved: Any, loaded: Any) -> Any:
        """Keep this rank's slice of every pack in a moved batch; ``loaded`` is the dataloader's batch."""
        if self._size == 1:
            return moved

        module = self._strategy.lightning_module
        if not self._checked_attention:
            assert module is not None
            refuse_other_attention(module, self._max_size)
            self._checked_attention = True
        refuse_second_context_parallelism(module, self._max_size)

        if self._axes.degree_groups is not None:
            return self._cut_to_degrees(moved)
        if not packs(moved):
            raise MisconfigurationException(
                f"context_parallel_size={self._size} cuts THDBatch, but the dataloader gave {type(loaded)}. "
                "Use THDDataModule, or THDBatch.collate(samples, align=trainer.strategy.alignment)."
            )
        return apply_to_collection(moved, Packed, lambda batch: batch.each(self._cut_one))

    def _cut_to_degrees(self, moved: Any) -> Any:
        """Cut a step with a planned number of ranks for each microbatch; leave evaluation's packs whole."""
        assert self._axes.degree_groups is not None
        if isinstance(moved, DynamicStep):
            return cut_step(moved, self._axes.degree_groups, traffic=self._traffic, **self._options)

        module = self._strategy.lightning_module
        trains = module is None or module.trainer.training
        if trains and isinstance(moved, Packed):
            raise MisconfigurationException(
                "context_parallel_size='dynamic' needs steps with a planned number of ranks for each "
                f"microbatch, but the dataloader gave {type(moved).__name__}. Use THDDataModule."
            )
        return moved

    def _cut_one(self, batch: THDBatch) -> THDBatch:
        """Return this rank's part of a pack; a pack that is cut already stays as it is."""
        if batch.boundaries.ranks > 1:
            return batch
        assert self._axes.meshes is not None
        group = self._axes.meshes.group(CONTEXT)
        return cut_batch(batch, self._traffic, group=group, **self._options)

    def log_traffic(self, trainer: L.Trainer) -> None:
        """When the Trainer logs, log bytes received per slot since the last log, and each method's share."""
        if not logs_this_step(trainer):
            return
        received = self._traffic.read_and_reset()
        if received.slots:
            numbers = {f"context_parallel/{way}": share for way, share in received.shares.items()}
            numbers["context_parallel/bytes_per_token"] = received.received_bytes / received.slots
            log_numbers(trainer, numbers)

    def forget_traffic(self) -> None:
        """Leave the exchanges since the last log out of the next one."""
        self._traffic.read_and_reset()


@dataclass(frozen=True, kw_only=True, slots=True)
class PackReader:
    """Says which packs a rank reads, and which shard of each pack it runs."""

    rank: int  # the rank's place among those that read different packs; ranks that share packs have one place
    ranks: int  # the number of places
    data_group: Any = None  # the group of one rank of each place; None is the world
    size: int = 1  # the number of ranks in ``group``, which share a pack; 1 leaves batches whole
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    layout: Layout = "dual_chunk"
    communication: Communication = "auto"
    traffic: Traffic = field(default_factory=Traffic, repr=False)  # between the ranks that share packs

    @property
    def alignment(self) -> Alignment | None:
        """Return the multiples that lengths and totals of packs must have, or None."""
        return None if self.size == 1 else Alignment.for_(cp=self.size, layout=self.layout)

    def cut(self, batch: THDBatch) -> THDBatch:
        """Return this rank's shard of a pack, which must be on this rank's device."""
        if self.size == 1:
            return batch
        options: dict[str, Any] = {"layout": self.layout, "communication": self.communication}
        return cut_batch(batch, self.traffic, group=self.group, **options)


def share_packs(
    model: nn.Module,
    data: tuple[int, int, dist.ProcessGroup | None],  # (index, count, group) of ranks that read data
    device: torch.device,
    size: int,
    layout: Layout,
    communication: Communication,
) -> PackReader:
    """Group neighbouring ranks to share packs by context parallelism; a collective if ``size`` is above 1."""
    rank, ranks, group = data
    advice = "It is a number of ranks; 'dynamic' needs THDDDPStrategy or THDModelParallelStrategy."
    size = whole_number(size, "context_parallel_size", least=1, advice=advice)
    check_ways(layout, communication)
    if ranks % size:
        raise ValueError(
            f"context_parallel_size={size} does not divide the {ranks} ranks that read data. Start a "
            f"multiple of {size} ranks, or lower it."
        )
    if size == 1:
        return PackReader(rank=rank, ranks=ranks, data_group=group)
    if ranks != dist.get_world_size():
        raise ValueError(
            f"context_parallel_size={size}, but {ranks} of {dist.get_world_size()} processes read different "
            "data: other axes of the mesh share weights. Use a mesh of data-parallel ranks, or Lightning."
        )
    if model_alignment(model) is not None:
        raise ValueError(
            f"context_parallel_size={size} with a model in FP8, whose packs are aligned for one rank. Use "
            "Lightning with FP8Precision, or context_parallel_size=1."
        )
    refuse_other_attention(model, size)
    refuse_second_context_parallelism(model, size)
    meshes = make_meshes(AxisSizes(data=ranks // size, context=size), device.type)
    return PackReader(
        rank=rank // size,
        ranks=ranks // size,
        data_group=meshes.group(DATA),
        size=size,
        group=meshes.group(CONTEXT),
        layout=layout,
        communication=communication,
    )


class BroadcastLoader:
    """Iterates a dataloader on the first rank of a group only, and sends every batch to the other ranks."""

    def __init__(self, dataloader: Any, group: dist.ProcessGroup) -> None:
        self._dataloader = dataloader
        self._reads = group.rank() == 0
        # Send through CPU memory: on a device, batches would wait for the work that is queued there.
        self._group = on_host(group)
        self._source = dist.get_global_rank(group, 0)

    def __getattr__(self, name: str) -> Any:
        # A copy or pickle has no ``_dataloader`` yet and asks for dunder names: both would recur forever.
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
        dataset.data_rank = rank
        dataset.data_size = sizes.data
        return
    if sizes.peers == 1 or one_reads:  # ranks may read different data, as under any strategy
        return
    if _part_of(dataset) == (rank, sizes.data):
        return
    raise MisconfigurationException(
        f"{type(dataset).__name__} is iterable and does not say which part of the data it reads, but "
        f"{sizes.peers} ranks share each pack. Give it attributes data_rank and data_size, which the "
        "strategy sets, or let one rank read for its peers with broadcast_data=True."
    )


def _part_of(dataset: Any) -> tuple[int, int] | None:
    """Return rank and world size of ``datasets.distributed.split_dataset_by_node``; None without a split."""
    if not any(base.__module__.partition(".")[0] == "datasets" for base in type(dataset).__mro__):
        return None
    split = private_of(dataset, "datasets.IterableDataset._distributed")
    return None if split is None else (split.rank, split.world_size)


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
    stages = strategy.pipeline_parallel_size
    if stages != 1:
        raise MisconfigurationException(
            f"context_parallel_size='dynamic' with pipeline_parallel_size={stages}: stages need "
            "microbatches of one degree. Set a fixed context_parallel_size."
        )

    largest = strategy.max_context_parallel_size
    check_tiling(strategy.sizes.data, largest)
    # Ranks wait for each other once a step if DDP sums gradients or FSDP2 gathers once, else more often.
    waits_once = isinstance(strategy, DDPStrategy) or gathers_once(strategy)
    return Sharing(
        max_degree=largest,
        layout=strategy.context_parallel_layout,
        tp=strategy.sizes.tensor,
        sequence_parallel=strategy.sequence_parallel,
        exchange=exchange_costs(strategy.lightning_module, largest),
        waits="step" if waits_once else "microbatch",
    )


def exchange_costs(module: nn.Module | None, largest: int) -> tuple[float, ...] | None:
    """Return, for 2, 4, ... ranks, a slot's cheapest exchange time as a share of a token's training time.

    None if the FLOPs of the model are not known. ``largest`` is the most ranks, a power of two.
    """
    config = model_config(module)
    if config is None:
        return None
    try:
        model = FlopsModel.from_config(config)
        flops = float(model.training_flops(SeqStats.from_lengths([_TOKENS])).hardware)
    except ValueError:
        return None
    token_s = flops / _TOKENS / FLOPS_PER_S

    layer, num_layers = _layer_of(config.get_text_config())
    costs = []
    degree = 2
    while degree <= largest:
        layer_bytes = layer.gather_bytes(_TOKENS, degree)
        if layer.heads % degree == 0:
            layer_bytes = min(layer_bytes, layer.ulysses_bytes(_TOKENS, degree))
        slot_bytes = 2 * num_layers * layer_bytes / _TOKENS  # forward and backward
        costs.append(slot_bytes / BYTES_PER_S / token_s)
        degree *= 2
    return tuple(costs)


def _layer_of(text: Any) -> tuple[LayerSizes, int]:
    """Return the sizes of a layer's attention, whose activations are bf16, and the number of layers."""
    heads = getattr(text, "num_attention_heads", 0) or 0
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    layer = LayerSizes(
        heads=heads, kv_heads=kv_heads, head_size=head_size, value_size=head_size, element_bytes=2
    )
    return layer, text.num_hidden_layers
