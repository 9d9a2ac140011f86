"""A Lightning strategy -> one whose ranks share packs: who reads what, how packs are aligned and cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_thd.alignment import Alignment, Layout
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.parallel import mesh as axes
from lightning_thd.parallel.agreement import check_agreement
from lightning_thd.parallel.layout import Communication
from lightning_thd.parallel.mesh import AxisSizes
from lightning_thd.parallel.shard import THDShard, shard_batch, shard_step
from lightning_thd.strategies.guards import refuse_other_attention, refuse_second_context_parallelism
from lightning_thd.strategies.loading import BroadcastLoader, set_data_rank


class ContextParallelMixin(Strategy):
    """The part of ``THDStrategyMixin`` that knows which ranks share what; every size 1 changes nothing.

    Attributes:
        context_parallel_size: ranks that share the slots of a pack.
        tensor_parallel_size: ranks that share weights.
        sequence_parallel: tensor-parallel ranks share slots between their products.
        context_parallel_layout: ``dual_chunk`` or ``contiguous``.
        context_parallel_communication: ``auto``, ``all_gather`` or ``ulysses``.
        broadcast_data: one rank reads for all that share its data.
        check_plans: compare what ranks are about to run at every batch, not only at the first of a stage.
    """

    context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    context_parallel_layout: Layout = "dual_chunk"
    context_parallel_communication: Communication = "auto"
    broadcast_data: bool = False
    check_plans: bool = False

    _meshes: axes.Meshes | None = None
    _checked_stage: object = None
    _guarded: bool = False

    @property
    def sizes(self) -> AxisSizes:
        """Ranks along each axis, once the number of processes is known.

        Raises:
            MisconfigurationException: when they do not make up the job.
        """
        world = getattr(self, "world_size", 1)
        try:
            return axes.resolve_sizes(
                world,
                data=getattr(self, "data_parallel_size", "auto"),
                context=self.context_parallel_size,
                tensor=self.tensor_parallel_size,
            )
        except ValueError as err:
            raise MisconfigurationException(str(err)) from err

    @property
    def alignment(self) -> Alignment | None:
        """What lengths and packs must be multiples of; the data module tells the collator."""
        if self.context_parallel_size == 1 and not self.sequence_parallel:
            return None
        return Alignment.for_(
            cp=self.context_parallel_size,
            tp=self.tensor_parallel_size,
            sequence_parallel=self.sequence_parallel,
            layout=self.context_parallel_layout,
        )

    @property
    def data_rank(self) -> int:
        """Which data this rank reads, from 0."""
        return self.sizes.data_rank(getattr(self, "global_rank", 0))

    @property
    def data_size(self) -> int:
        """How many different ranks' data there are."""
        return self.sizes.data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Rank and number of those that read different data; samplers and data modules ask this."""
        if self.sizes.peers == 1:
            known: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
            return known
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold different data, one of each pack; None is all."""
        return None if self._meshes is None else self._meshes.group(axes.DATA)

    @property
    def context_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that share this rank's pack."""
        return None if self._meshes is None else self._meshes.group(axes.CONTEXT)

    def setup_environment(self) -> None:
        """Start the processes' groups, then those of the axes."""
        super().setup_environment()
        if self.sizes.peers > 1:
            self._meshes = axes.make_meshes(self.sizes, self.root_device.type)

    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean", **kwargs: Any
    ) -> Any:
        """Reduce as the base strategy does, but for means of integers, which Lightning truncates.

        Lightning divides sums of values by the mean batch size of the ranks: of 101 tokens on two ranks it
        makes 50, and an epoch's mean is wrong by 1 %.
        """
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if mean and isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
            tensor = tensor.to(torch.float64)
        return super().reduce(tensor, group, reduce_op=reduce_op, **kwargs)  # type: ignore[safe-super]

    def process_dataloader(self, dataloader: object) -> object:
        """Make sure that ranks which share data read the same."""
        dataloader = super().process_dataloader(dataloader)
        sizes = self.sizes
        if self.broadcast_data and sizes.peers > 1:
            assert self._meshes is not None
            return BroadcastLoader(dataloader, self._meshes.peers.get_group(), self._wire_device)
        set_data_rank(dataloader, self.data_rank, self.data_size, sizes.peers)
        return dataloader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch, user's transfer hooks included, then keep this rank's part of every pack."""
        self._compare(batch)
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self.context_parallel_size == 1:
            return moved
        if not self._guarded:
            assert self.lightning_module is not None
            refuse_other_attention(self.lightning_module, self.context_parallel_size)
            self._guarded = True
        refuse_second_context_parallelism(self.lightning_module, self.context_parallel_size)
        if isinstance(moved, THDBatch | THDStep):
            return self._cut(moved)
        found: list[THDBatch | THDStep] = []

        def cut(one: THDBatch | THDStep) -> THDBatch | THDStep:
            found.append(self._cut(one))
            return found[-1]

        collection = apply_to_collection(moved, (THDBatch, THDStep), cut)
        if not found:
            raise MisconfigurationException(
                f"context_parallel_size={self.context_parallel_size} cuts THDBatch, but the dataloader gave "
                f"{type(batch).__name__}. Use THDDataModule, or THDBatch.collate(samples, "
                "align=trainer.strategy.alignment) as collate_fn."
            )
        return collection

    def _cut(self, batch: THDBatch | THDStep) -> THDBatch | THDStep:
        if isinstance(batch, THDShard):
            return batch
        how: dict[str, Any] = {
            "group": self.context_parallel_group,
            "layout": self.context_parallel_layout,
            "communication": self.context_parallel_communication,
        }
        return shard_step(batch, **how) if isinstance(batch, THDStep) else shard_batch(batch, **how)

    def _compare(self, batch: Any) -> None:
        """Compare plans at the first batch of a stage where ranks share data, or always when asked to."""
        sizes, module = self.sizes, self.lightning_module
        if sizes.world == 1 or not isinstance(batch, THDBatch | THDStep):
            return
        stage = (id(module), None if module is None else module.trainer.state.stage)
        if self.check_plans or (sizes.peers > 1 and stage != self._checked_stage):
            self._checked_stage = stage
            check_agreement(batch, sizes, self._wire_device)

    @property
    def _wire_device(self) -> torch.device:
        if dist.get_backend() == "gloo":
            return torch.device("cpu")
        return self.root_device
