"""A Lightning strategy -> one whose ranks share packs, with data, alignment and cutting per rank."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_thd.alignment import Alignment, Layout
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.packing.sharing import Sharing
from lightning_thd.parallel import mesh as axes
from lightning_thd.parallel.agreement import check_agreement
from lightning_thd.parallel.context.costs import CommCosts
from lightning_thd.parallel.context.layout import Communication, end_job
from lightning_thd.parallel.context.shared_step import (
    SharedStep,
    check_shared_agreement,
    cut_step,
    make_degree_groups,
)
from lightning_thd.parallel.mesh import AxisSizes
from lightning_thd.parallel.restarts import begin_again
from lightning_thd.parallel.shard import THDShard, shard_batch, shard_step
from lightning_thd.strategies.dynamic import DYNAMIC, check_batch, know_whole_packs, sharing_of
from lightning_thd.strategies.guards import (
    refuse_indivisible_heads,
    refuse_other_attention,
    refuse_second_context_parallelism,
)
from lightning_thd.strategies.hosts import cuts_weights, own_axes, resolve_axes
from lightning_thd.strategies.loading import BroadcastLoader, set_data_rank
from lightning_thd.strategies.modules.metrics import groups_of_sums

_NOT_GIVEN: Any = object()


class ContextParallelMixin(Strategy):
    """Distributes data and cuts packs over a job's parallel axes; sizes of 1 change nothing.

    Attributes:
        data_parallel_size: groups that read different data; ``auto`` takes what the other axes leave, and
            None also lets a ``ModelParallelStrategy`` say so by its own arguments.

    The others are the arguments of ``THDModelParallelStrategy`` and ``THDDDPStrategy`` of the same names.
    """

    data_parallel_size: int | Literal["auto"] | None = None
    data_parallel_replicas: int = 1
    context_parallel_size: int | Literal["dynamic"] = 1
    max_context_parallel_size: int | None = None
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    context_parallel_layout: Layout = "dual_chunk"
    context_parallel_communication: Communication = "auto"
    context_parallel_costs: CommCosts | Literal["measure"] | None = None
    broadcast_data: bool = False
    check_plans: bool = False

    _meshes: axes.Meshes | None = None
    _degree_groups: dict[int, dist.ProcessGroup] | None = None
    _checked_stage: object = None
    _guarded: bool = False

    def teardown(self) -> None:
        """End what belongs to the job: shards that are still held refuse no other attention."""
        super().teardown()
        end_job()

    @property
    def sizes(self) -> AxisSizes:
        """Return the number of ranks along each parallel axis.

        Raises:
            MisconfigurationException: when they do not make up the job.
        """
        try:
            return resolve_axes(
                self,
                data=self.data_parallel_size,
                context=self._fixed_size,
                tensor=self.tensor_parallel_size,
                pipeline=getattr(self, "pipeline_parallel_size", 1),
            )
        except ValueError as err:
            raise MisconfigurationException(str(err)) from err

    @property
    def alignment(self) -> Alignment | None:
        """Return what sequence and pack lengths must be multiples of, for the collator."""
        if self._fixed_size == 1 and not self.sequence_parallel:
            return None
        return Alignment.for_(
            cp=self._fixed_size,
            tp=self.sizes.tensor,
            sequence_parallel=self.sequence_parallel,
            layout=self.context_parallel_layout,
        )

    @property
    def sharing(self) -> Sharing | None:
        """Return how the plan of a step may share sequences over ranks; None if fixed.

        Raises:
            MisconfigurationException: when groups cannot be made of the ranks there are.
        """
        return sharing_of(self) if self.context_parallel_size == DYNAMIC else None

    @property
    def _fixed_size(self) -> int:
        return 1 if isinstance(self.context_parallel_size, str) else self.context_parallel_size

    @property
    def data_rank(self) -> int:
        """Return this rank's index among the ranks that read different data, from 0."""
        return self.sizes.data_rank(getattr(self, "global_rank", 0))

    @property
    def data_size(self) -> int:
        """Return how many ranks read different data."""
        return self.sizes.data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return rank and number of replicas for samplers, by different data."""
        if self.sizes.peers == 1:
            known: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
            return known
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that read different data; None is the whole job."""
        return None if self._meshes is None else self._meshes.group(axes.DATA)

    @property
    def context_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that share this rank's pack."""
        return None if self._meshes is None else self._meshes.group(axes.CONTEXT)

    def setup_environment(self) -> None:
        """Start the job's process group, then build the mesh of its axes.

        Under a ``ModelParallelStrategy`` the LightningModule sees it as ``device_mesh``: the strategy's own
        where its arguments give sizes, else ours of three axes.
        """
        if self.data_parallel_replicas != 1 and not cuts_weights(self):
            raise MisconfigurationException(
                f"data_parallel_replicas={self.data_parallel_replicas} under {type(self).__name__}, "
                "which does not share weights out. Use THDModelParallelStrategy, or leave it at 1."
            )
        begin_again(self)
        if cuts_weights(self) and own_axes(self) is None:
            host: Any = self
            host._setup_distributed()
            self._meshes = self._make_meshes()
            assert self.lightning_module is not None
            host._device_mesh = self.lightning_module._device_mesh = self._meshes.axes
        else:
            super().setup_environment()
            if self.sizes.peers > 1 or cuts_weights(self):
                self._meshes = self._make_meshes()
        if (sharing := self.sharing) is not None:
            self._degree_groups = make_degree_groups(
                self.sizes.data, sharing.max_degree, tp=sharing.tp, device=self._wire_device
            )
        if self.context_parallel_costs == "measure":
            self.context_parallel_costs = self._measured_costs()

    def _make_meshes(self) -> axes.Meshes:
        try:
            return axes.make_meshes(self.sizes, self.root_device.type, replicas=self.data_parallel_replicas)
        except ValueError as err:
            raise MisconfigurationException(str(err)) from err

    def _measured_costs(self) -> CommCosts | None:
        """Time the group that shares packs; all ranks then use the same costs."""
        groups = self._degree_groups or {}
        group = groups[max(groups)] if groups else self.context_parallel_group
        return None if group is None else CommCosts.measure(group, self._wire_device)

    def reduce(
        self, tensor: Any, group: Any = _NOT_GIVEN, reduce_op: ReduceOp | str | None = "mean", **kwargs: Any
    ) -> Any:
        """Reduce as the base strategy does, except for means of integers and sums of logged values.

        Lightning divides sums of values by the mean batch size of the ranks: of 101 tokens on two ranks it
        makes 50, and an epoch's mean is wrong by 1 %. A sum that ``self.log`` asks for counts once what ranks
        of the same data have in common.

        Raises:
            MisconfigurationException: for such a sum under context parallelism, where a number may be of the
                pack or of this rank's slots.
        """
        if group is None and isinstance(reduce_op, str) and reduce_op.lower() == "sum":
            group = self._group_of_sums()  # self.log always names the group, its default None
        group = None if group is _NOT_GIVEN else group
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if mean and isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
            tensor = tensor.to(torch.float64)
        return super().reduce(tensor, group, reduce_op=reduce_op, **kwargs)  # type: ignore[safe-super]

    def _group_of_sums(self) -> dist.ProcessGroup | None:
        if self.context_parallel_size != 1:
            raise MisconfigurationException(
                "self.log(reduce_fx='sum', sync_dist=True) while ranks share packs: a loss is the pack's on "
                "each of them and would count several times. Set sync_dist_group to "
                + groups_of_sums(dynamic=self.context_parallel_size == DYNAMIC)
            )
        return None if self.sizes.peers == 1 else self.data_parallel_group

    def process_dataloader(self, dataloader: object) -> object:
        """Prepare a dataloader so that ranks which share a pack read the same data."""
        dataloader = super().process_dataloader(dataloader)
        sizes = self.sizes
        if self.broadcast_data and sizes.peers > 1 and not getattr(dataloader, "reads_for_peers", False):
            assert self._meshes is not None
            return BroadcastLoader(dataloader, self._meshes.peers.get_group(), self._wire_device)
        set_data_rank(dataloader, self.data_rank, self.data_size, sizes.peers)
        return dataloader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device by the user's transfer hooks, and keep this rank's slice of packs."""
        self._compare(batch)
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self.context_parallel_size == 1:
            return moved
        most = self.max_context_parallel_size or self._fixed_size
        if not self._guarded:
            assert self.lightning_module is not None
            refuse_other_attention(self.lightning_module, most)
            refuse_indivisible_heads(self.lightning_module, most, self.context_parallel_communication)
            self._guarded = True
        refuse_second_context_parallelism(self.lightning_module, most)
        if self._degree_groups is not None:
            module = self.lightning_module
            know_whole_packs(moved)
            check_batch(moved, training=module is None or module.trainer.training)
            return (
                cut_step(moved, self._degree_groups, **self._how) if isinstance(moved, SharedStep) else moved
            )
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
        how = {"group": self.context_parallel_group, **self._how}
        return shard_step(batch, **how) if isinstance(batch, THDStep) else shard_batch(batch, **how)

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "layout": self.context_parallel_layout,
            "communication": self.context_parallel_communication,
            "costs": self.context_parallel_costs,
        }

    def _compare(self, batch: Any) -> None:
        """Raise if ranks that share a pack got different batches; checks a stage's first."""
        sizes, module = self.sizes, self.lightning_module
        if sizes.world == 1 or not isinstance(batch, THDBatch | THDStep):
            return
        stage = (id(module), None if module is None else module.trainer.state.stage)
        shared = isinstance(batch, SharedStep)
        if self.check_plans or ((shared or sizes.peers > 1) and stage != self._checked_stage):
            self._checked_stage = stage
            if isinstance(batch, SharedStep):
                assert self._degree_groups is not None
                check_shared_agreement(batch, self._degree_groups, self._wire_device)
                return
            check_agreement(batch, sizes, self._wire_device)

    @property
    def _wire_device(self) -> torch.device:
        if dist.get_backend() == "gloo":
            return torch.device("cpu")
        return self.root_device
