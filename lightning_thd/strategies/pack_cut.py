"""The batches of a dataloader -> this rank's slice of each pack, for fixed and dynamic numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import lightning.pytorch as L
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.utils.data import IterableDataset

from lightning_thd._checks import choice, whole_number
from lightning_thd._find import model_config
from lightning_thd._private import private_of
from lightning_thd.alignment import Layout
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.flops import FlopsModel
from lightning_thd.packing.sharing import Sharing, check_tiling
from lightning_thd.parallel.across_ranks import broadcast_object, check_agreement, on_host
from lightning_thd.parallel.context.costs import BYTES_PER_S, FLOPS_PER_S, LayerSizes
from lightning_thd.parallel.context.dynamic_step import DynamicStep, check_dynamic_agreement, cut_step
from lightning_thd.parallel.context.layout import Communication
from lightning_thd.parallel.context.traffic import Traffic
from lightning_thd.parallel.mesh import CONTEXT, AxisSizes
from lightning_thd.parallel.shard import cut_batch
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
        return apply_to_collection(moved, (THDBatch, THDStep), self._cut_one)

    def _cut_to_degrees(self, moved: Any) -> Any:
        """Cut a step with a planned number of ranks for each microbatch; leave evaluation's packs whole."""
        assert self._axes.degree_groups is not None
        if isinstance(moved, DynamicStep):
            return cut_step(moved, self._axes.degree_groups, traffic=self._traffic, **self._options)

        module = self._strategy.lightning_module
        trains = module is None or module.trainer.training
        if trains and isinstance(moved, THDBatch | THDStep):
            raise MisconfigurationException(
                "context_parallel_size='dynamic' needs steps with a planned number of ranks for each "
                f"microbatch, but the dataloader gave {type(moved).__name__}. Use THDDataModule."
            )
        return moved

    def _cut_one(self, batch: THDBatch | THDStep) -> THDBatch | THDStep:
        """Return this rank's part of a pack or step; a pack that is cut already stays as it is."""
        if isinstance(batch, THDBatch) and batch.boundaries.ranks > 1:
            return batch
        assert self._axes.meshes is not None
        options = {"group": self._axes.meshes.group(CONTEXT), **self._options}
        if isinstance(batch, THDStep):
            return THDStep([cut_batch(part, self._traffic, **options) for part in batch.microbatches])
        return cut_batch(batch, self._traffic, **options)

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
