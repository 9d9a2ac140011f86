"""A Lightning strategy -> one that runs steps of several microbatches and cuts packs and weights."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_thd._imports import available
from lightning_thd.alignment import Alignment, Layout
from lightning_thd.batch import THDBatch
from lightning_thd.batch.thd_batch import epoch_weight
from lightning_thd.models.preparing import prepare_if_asked
from lightning_thd.models.weights import postponed_reading
from lightning_thd.packing.sharing import Sharing
from lightning_thd.parallel.context.layout import Communication
from lightning_thd.parallel.mesh import CONTEXT, DATA, AxisSizes
from lightning_thd.parallel.pipeline import ScheduleName
from lightning_thd.strategies.axes import (
    Axes,
    arguments_of,
    cuts_weights,
    fixed_context,
    sizes_of,
    start_axes,
)
from lightning_thd.strategies.checkpoints import Checkpoints
from lightning_thd.strategies.closure import closure_of_step, kept_results
from lightning_thd.strategies.guards import (
    refuse_callbacks,
    refuse_compiled_module,
    refuse_engine,
    refuse_unfrozen,
    refuse_unused_layout,
)
from lightning_thd.strategies.logs import SyncedMetrics, groups_of_sums, refuse_sums, results_of, weigh
from lightning_thd.strategies.loop import StepLoop, local_gradients
from lightning_thd.strategies.norms import refused_norms_of_a_stage
from lightning_thd.strategies.pack_cut import (
    DYNAMIC,
    BroadcastLoader,
    PackCut,
    set_data_rank,
    sharing_of,
)
from lightning_thd.strategies.pipeline import Pipeline, PipelineLoop, earlier_stage
from lightning_thd.strategies.shards import WeightShards

_NOT_GIVEN: Any = object()
_MEANS = ("mean", "avg")  # Lightning's two names of one reduction
# The exit status of a process that a signal ended, as shells count it: 143.
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM


def _all_reduced(tensor: Tensor, group: Any, reduce_op: str) -> Tensor:
    """Reduce over ranks in place, as Lightning does, but without the barrier that makes the host wait."""
    if dist.get_world_size() == 1:
        return tensor
    if reduce_op.lower() in _MEANS:  # not ReduceOp.AVG, which gloo lacks
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        return tensor.div_(dist.get_world_size(group))
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, reduce_op.upper()), group=group)
    return tensor


class THDStrategyMixin(Strategy):
    """Runs steps of any number of microbatches; the mixin comes before a Lightning strategy in the bases.

    ``class MyStrategy(THDStrategyMixin, DDPStrategy)`` runs ``Sequences(n)``. Gradients are synchronised only
    in the last microbatch, ``outputs["loss"]`` is the mean over a rank's microbatches, and ``self.log`` logs
    one value per step. The attributes below are the arguments of ``THDModelParallelStrategy`` and
    ``THDDDPStrategy``; set them on a class.
    """

    data_parallel_size: int | Literal["auto"] = "auto"
    data_parallel_replicas: int = 1
    context_parallel_size: int | Literal["dynamic"] = 1
    max_context_parallel_size: int | None = None
    tensor_parallel_size: int = 1
    tensor_parallel_plan: dict[str, str] | None = None
    sequence_parallel: bool = False
    context_parallel_layout: Layout = "dual_chunk"
    context_parallel_communication: Communication = "auto"
    broadcast_data: bool = False
    reshard_after_forward: bool | Literal["auto"] = "auto"
    asynchronous_checkpoints: bool = False
    pipeline_parallel_size: int = 1
    pipeline_schedule: ScheduleName = "1f1b"
    stages_per_rank: int = 1
    pipeline_split: Literal["auto"] | Sequence[int] = "auto"
    expert_parallel_size: int = 1

    base_arguments: Mapping[str, Any] = MappingProxyType({})  # what the base strategy was built with

    runs_thd_steps = True  # THDDataModule allows Sequences(n) only for such strategies

    _axes: Axes | None = None
    _cut: PackCut | None = None  # None if every rank reads and runs different packs
    _shards: WeightShards | None = None  # None unless the base strategy cuts weights
    _pipeline: Pipeline | None = None
    _loop: StepLoop
    _checkpoints: Checkpoints
    _frozen: tuple[nn.Parameter, ...] = ()  # frozen when DDP wrapped the module
    _synced: SyncedMetrics | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.base_arguments = arguments_of(super().__init__, args, kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_engine(cls)
        # Trainer.init_module() warns of every strategy with a context of its own, so only those that have
        # pipelines get one.
        if issubclass(cls, ModelParallelStrategy) and "model_sharded_context" not in vars(cls):
            setattr(cls, "model_sharded_context", THDStrategyMixin._postponing_context)  # noqa: B010

    # -- axes and data

    @property
    def sizes(self) -> AxisSizes:
        """Return the number of ranks along each parallel axis."""
        return sizes_of(self) if self._axes is None else self._axes.sizes

    @property
    def alignment(self) -> Alignment | None:
        """Return the multiples to which the collator pads sequences and packs; None for no padding."""
        context = fixed_context(self)
        if context == 1 and not self.sequence_parallel:
            return None
        return Alignment.for_(
            cp=context,
            tp=self.sizes.tensor,
            sequence_parallel=self.sequence_parallel,
            layout=self.context_parallel_layout,
        )

    @property
    def sharing(self) -> Sharing | None:
        """Return how a plan may share sequences over ranks; None if the context-parallel size is fixed."""
        return sharing_of(self) if self.context_parallel_size == DYNAMIC else None

    @property
    def packs_as_steps(self) -> bool:
        """Return whether a batch of ``Packs(n)`` holds all packs of this rank's step."""
        return self.pipeline_parallel_size > 1

    @property
    def data_rank(self) -> int:
        """Return the index of the part of the data that this rank reads."""
        return self.sizes.data_rank(getattr(self, "global_rank", 0))

    @property
    def data_size(self) -> int:
        """Return the number of parts into which the ranks divide the data."""
        return self.sizes.data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return rank and num_replicas for samplers; ranks that read the same data count as one replica."""
        if self.sizes.peers == 1:
            of_base: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
            return of_base
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that read different data; None is the whole job."""
        return None if self._axes is None else self._axes.group(DATA)

    @property
    def context_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group over which this rank's packs are cut; None without a mesh."""
        return None if self._axes is None else self._axes.group(CONTEXT)

    @property
    def _trainer(self) -> L.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # -- the job

    def setup_environment(self) -> None:
        """Start the process group, build the mesh of the axes, and create the strategy's parts."""
        self._axes = None  # ``sizes`` must not answer by the axes of an earlier fit
        self._checkpoints = Checkpoints(self)
        axes = start_axes(self, super().setup_environment)
        self._axes = axes

        shares_packs = axes.sizes.peers > 1 or self.context_parallel_size != 1
        self._cut = PackCut(self, axes) if shares_packs else None
        self._shards = WeightShards(self, axes) if cuts_weights(self) else None
        self._pipeline = Pipeline(self, axes) if self.pipeline_parallel_size > 1 else None

    @contextlib.contextmanager
    def _postponing_context(self) -> Generator[None]:
        """Delay ``from_pretrained``'s reading of weights until a pipeline has cut the model."""
        with contextlib.ExitStack() as contexts:
            if self.pipeline_parallel_size > 1 and available("transformers"):
                contexts.enter_context(postponed_reading())
            contexts.enter_context(super().model_sharded_context())
            yield

    def setup(self, trainer: L.Trainer) -> None:
        """Cut and shard the model, if the strategy does, and create the optimizers."""
        module = self.lightning_module
        axes = self._axes
        assert module is not None
        assert axes is not None
        stage = earlier_stage(module, self.pipeline_parallel_size, self.stages_per_rank)
        if self._pipeline is not None and stage is not None:
            self._pipeline.reuse(stage)
        self._refuse_unsupported(trainer, module, axes)
        prepare_if_asked(module)

        if axes.meshes is not None and axes.sizes.tensor * axes.sizes.pipeline > 1:
            self._synced = SyncedMetrics(module, axes.meshes.data_context.get_group())
        if self._pipeline is None:
            self._loop = StepLoop(self, self._microbatch)
        else:
            self._loop = PipelineLoop(self, self._microbatch, self._pipeline)

        if self._shards is not None:
            self._shards.setup(trainer)
            return
        super().setup(trainer)
        if isinstance(self.model, DistributedDataParallel):
            self._frozen = tuple(p for p in self.model.parameters() if not p.requires_grad)

    def _refuse_unsupported(self, trainer: L.Trainer, module: L.LightningModule, axes: Axes) -> None:
        """Refuse what would change the numbers of a parallel layout, lose weights or hang."""
        refuse_compiled_module(module, axes.sizes)
        self._checkpoints.refuse_unsupported()
        if self.context_parallel_size != 1:
            refuse_sums(module, dynamic=self.context_parallel_size == DYNAMIC)
        refuse_callbacks(trainer.callbacks, self)  # type: ignore[attr-defined]

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Make the optimizers as the base strategy does."""
        if self._pipeline is None:
            super().setup_optimizers(trainer)
        else:
            self._pipeline.make_optimizers(super().setup_optimizers, trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Let a job that SIGTERM stopped end with a status that says so; Lightning's would say success."""
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = _ENDED_BY_SIGTERM
        super().on_exception(exception)

    def teardown(self) -> None:
        """Wait for this rank's part of the last checkpoint, and release the state of the job."""
        if self._synced is not None:
            self._synced.close()
        self._synced = None
        self._frozen = ()

        super().teardown()
        if cuts_weights(self):
            self.checkpoint_io.teardown()  # Lightning's ModelParallelStrategy does not do this
        if self._axes is not None:
            self._checkpoints.close()

    # -- batches

    def process_dataloader(self, dataloader: object) -> object:
        """Prepare a dataloader so that the ranks that share a pack read the same data."""
        axes = self._axes
        assert axes is not None
        # THDDataModule reads on one rank by itself if the strategy asks for it.
        reads_for_peers = getattr(dataloader, "reads_for_peers", False)
        broadcasts = (
            self.broadcast_data and axes.sizes.peers > 1 and axes.meshes is not None and not reads_for_peers
        )
        set_data_rank(dataloader, self.data_rank, axes.sizes, one_reads=broadcasts)

        processed = super().process_dataloader(dataloader)
        if not broadcasts:
            return processed
        assert axes.meshes is not None
        return BroadcastLoader(processed, axes.meshes.peers.get_group())

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device with the user's transfer hooks, and keep this rank's shard of packs."""
        if self._cut is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        self._cut.compare(batch)
        moved = super().batch_to_device(batch, device, dataloader_idx)
        return self._cut.cut(moved, batch)

    # -- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a step's first microbatch, or of any other batch."""
        if self._loop.takes(args[0]):
            return self._loop.first(*args)
        return self._microbatch(*args, **kwargs)

    def _microbatch(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base strategy's ``training_step`` for one batch."""
        batch = args[0]
        results = results_of(self._trainer)
        if isinstance(batch, THDBatch) and results is not None:
            weigh(results, epoch_weight(batch))

        if self._shards is None:
            output = super().training_step(*args, **kwargs)
        else:
            with self._shards.microbatch(batch):
                output = super().training_step(*args, **kwargs)

        if self._cut is not None:
            refuse_unused_layout(batch)
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Backpropagate the loss, and run the other microbatches of a step."""
        base = super().backward
        if self._loop.is_running:
            result = self._loop.rest(closure_loss, lambda loss: base(loss, optimizer, *args, **kwargs))
        else:
            result = base(closure_loss, optimizer, *args, **kwargs)
        refuse_unfrozen(self._frozen)
        return result

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Accumulate gradients on this rank without reducing them inside this context."""
        base: Any = super()
        block = local_gradients(self)
        if block is None:
            block = getattr(base, "block_backward_sync", contextlib.nullcontext)()
        with block:
            yield

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Update the weights as the base strategy does, and report the step's mean loss to callbacks."""
        run = closure_of_step(self, optimizer, closure, self._loop)
        with contextlib.ExitStack() as contexts:
            if self._pipeline is not None:
                contexts.enter_context(refused_norms_of_a_stage())
            results = contexts.enter_context(kept_results(closure))
            result = super().optimizer_step(optimizer, run, model, **kwargs)

        for step_result in results:
            self._loop.report(step_result)
        self._loop.end()
        if self._cut is not None:
            self._cut.log_traffic(self._trainer)
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; after the last batch of validation, free the weights that FSDP2 left gathered."""
        output = super().validation_step(*args, **kwargs)
        if self._shards is not None:
            self._shards.free_after_validation(self._trainer)
        return output

    def on_validation_end(self) -> None:
        """Leave the exchanges of an evaluation out of those that the next training steps log."""
        super().on_validation_end()
        if self._cut is not None:
            self._cut.forget_traffic()

    def reduce(
        self, tensor: Any, group: Any = _NOT_GIVEN, reduce_op: ReduceOp | str | None = "mean", **kwargs: Any
    ) -> Any:
        """Reduce over ranks; means of integers are floats; logged sums count each token once."""
        name = reduce_op.lower() if isinstance(reduce_op, str) else None
        if group is None and name == "sum":
            group = self._group_of_sums()  # the call comes from self.log, which passes group=None by default
        if group is _NOT_GIVEN:
            group = None

        is_tensor = isinstance(tensor, torch.Tensor)
        if is_tensor and name in _MEANS and not tensor.is_floating_point():
            tensor = tensor.to(torch.float64)
        runs_on_ranks = isinstance(self, ParallelStrategy) and dist.is_initialized()
        if is_tensor and name is not None and runs_on_ranks:
            return _all_reduced(tensor, dist.group.WORLD if group is None else group, name)
        return super().reduce(tensor, group, reduce_op=reduce_op, **kwargs)  # type: ignore[safe-super]

    def _group_of_sums(self) -> dist.ProcessGroup | None:
        """Return the ranks over which a logged sum counts each token once, None being all."""
        if self.context_parallel_size != 1:
            raise MisconfigurationException(
                "self.log(reduce_fx='sum', sync_dist=True) while ranks share packs. Set sync_dist_group to "
                + groups_of_sums(dynamic=self.context_parallel_size == DYNAMIC)
            )
        return None if self.sizes.peers == 1 else self.data_parallel_group

    # -- checkpoints

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state, which is empty if the optimizer has made no step."""
        return self._checkpoints.optimizer_state(super().optimizer_state, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, in the background with ``asynchronous_checkpoints``."""
        self._checkpoints.save(super().save_checkpoint, checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, once the one that is being written is complete."""
        self._checkpoints.remove(super().remove_checkpoint, filepath)

    def wait_for_checkpoint(self) -> None:
        """Wait until the current checkpoint is completely written; a collective."""
        if self._axes is not None:
            self._checkpoints.wait()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any layout: one file, or a folder of sharded weights."""
        loaded = self._checkpoints.load(super().load_checkpoint, checkpoint_path, weights_only)
        if self._shards is not None:
            self._shards.no_foreach_over_meshes()  # loading restored the options of another layout
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states; ``load_checkpoint`` has loaded those of sharded optimizers."""
        self._checkpoints.load_optimizers(super().load_optimizer_state_dict, checkpoint)
