"""A ``THDStep`` -> its microbatches through a pipeline of stages, inside one Lightning batch.

Every rank of a pipeline reads the same plan, so no metadata travels: a stage knows the shape of every
microbatch before it comes. As without stages, Lightning's closure runs ``training_step``, then zero_grad,
then backward: the first forward pass runs in ``training_step``, all other passes in ``backward``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_thd._imports import available
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.models.weights import postponed_reading
from lightning_thd.parallel.clip import clip_by_norm
from lightning_thd.parallel.fsdp import memory_of_rank
from lightning_thd.parallel.mesh import another_group
from lightning_thd.parallel.pipeline import Schedule, ScheduleName, expected_bubble
from lightning_thd.parallel.pipeline.channel import Channel, copy_tied, share_freezing, share_group, sum_tied
from lightning_thd.parallel.pipeline.cut import cut_model, language_model_of, stages_in, tied_names
from lightning_thd.parallel.pipeline.stage import Stage
from lightning_thd.strategies.checkpoints import (
    drop_unknown_options,
    is_folder,
    parameters_of_folder,
    trained,
)
from lightning_thd.strategies.mixin import THDStrategyMixin, warn_of_extras
from lightning_thd.strategies.modules.finetuning import gather_names, keep_own_names, restore_groups
from lightning_thd.strategies.pipeline.checkpoint import (
    complete_groups,
    gather_states,
    load_folder,
    rename_optimizer,
)
from lightning_thd.strategies.pipeline.own_norms import refuse_own_norms
from lightning_thd.strategies.pipeline.step import PipelineStep
from lightning_thd.strategies.pipeline.training_step import refuse_decisions_on_loss


class PipelineMixin(THDStrategyMixin):
    """Runs a model cut by depth over the ranks of a pipeline; a size of 1 changes nothing.

    Its settings are arguments of ``THDModelParallelStrategy``.

    Attributes:
        waited: share of the last step that this rank waited for other stages, on a CPU.
        expected_wait: the same by the schedule's formula.
    """

    pipeline_parallel_size: int = 1
    pipeline_schedule: ScheduleName = "1f1b"
    stages_per_rank: int = 1
    pipeline_split: Literal["auto"] | Sequence[int] = "auto"

    waited: float = 0.0
    expected_wait: float = 0.0

    _channel: Channel | None = None
    _stage: Stage | None = None
    _run: PipelineStep | None = None
    _warned: bool = False

    @property
    def packs_as_steps(self) -> bool:
        """Return whether a batch of ``Packs(n)`` holds all packs of this rank's step."""
        return self.pipeline_parallel_size > 1

    def setup_environment(self) -> None:
        """Build the mesh, then a process group for activations and one for gradients."""
        super().setup_environment()
        if self.pipeline_parallel_size > 1:
            self._channel = self._make_channel()

    def _make_channel(self) -> Channel:
        """Create the process groups of a channel; a collective of the job."""
        timeout: timedelta | None = getattr(self, "_timeout", None)
        several = self.stages_per_rank > 1
        down, up, *wraps = (another_group(self.sizes, timeout=timeout) for _ in range(4 if several else 2))
        return Channel(down=down, up=up, wraps=(wraps[0], wraps[1]) if several else None)

    def _balance_channel(self) -> Channel:
        """Create the process groups of a MoE balancing loss; a collective of the job."""
        channel = self._make_channel()
        channel.fix_dtype(torch.float32)
        return channel

    @property
    def slots_shared(self) -> int:
        """Return how many tensor-parallel ranks divide the slots of a message."""
        return self.sizes.tensor if getattr(self, "sequence_parallel", False) else 1

    @contextlib.contextmanager
    def model_sharded_context(self) -> Generator[None]:
        """Delay ``from_pretrained``'s reading of weights until the model is cut."""
        waits = self.pipeline_parallel_size > 1 and available("transformers")
        with postponed_reading() if waits else contextlib.nullcontext(), super().model_sharded_context():
            yield

    def setup(self, trainer: L.Trainer) -> None:
        """Cut the model, unless an earlier fit has, then set up as the base strategy does."""
        assert self.lightning_module is not None
        for stage in stages_in(self.lightning_module):
            self._go_on_with(stage)
        if self.pipeline_parallel_size > 1:
            refuse_own_norms([self.lightning_module, *trainer.callbacks])  # type: ignore[attr-defined]
        super().setup(trainer)

    def _go_on_with(self, stage: Stage) -> None:
        held, asked = (stage.split.ranks, stage.chunks), (self.pipeline_parallel_size, self.stages_per_rank)
        if held != asked:
            raise MisconfigurationException(
                f"The model was cut for pipeline_parallel_size={held[0]} with stages_per_rank={held[1]} by "
                f"an earlier Trainer, and this one asks for {asked[0]} with {asked[1]}; each rank has its "
                "own layers alone. Give both the same sizes, or build the model anew and load a checkpoint."
            )
        stage.require_idle()
        self._stage, self._channel = stage, stage.channel  # the layers' weights lie on the same old groups

    def _cut_by_depth(self, module: nn.Module) -> None:
        if self._channel is None:
            return
        trainer = self._trainer
        if not trainer.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                f"pipeline_parallel_size={self.pipeline_parallel_size} runs the microbatches of a step in "
                "an order of its own, which automatic_optimization=False would not see. Use automatic "
                "optimisation, or pipeline_parallel_size=1."
            )
        refuse_decisions_on_loss(trainer.lightning_module)
        _refuse_weights_outside(module, language_model_of(module))
        names = tied_names(module)
        self._stage = cut_model(
            module,
            self._channel,
            stages_per_rank=self.stages_per_rank,
            split=self.pipeline_split,
            balance=self._balance_channel,
        )
        self._stage.tied_names = names
        rank_zero_info(self._stage.split.table())

    def _tie_ends(self, module: nn.Module) -> None:
        stage = self._stage
        if stage is None or not stage.tied_names or not (stage.holds_embedding or stage.holds_head):
            return
        ((head, embedding),) = stage.tied_names.items()
        stage.tied = module.get_parameter(embedding if stage.channel.rank == 0 else head)
        copy_tied(stage.tied, stage.channel)

    def _shard_model(self, module: nn.Module) -> None:
        super()._shard_model(module)
        assert self.model is not None
        self._tie_ends(self.model)

    def _share_weights(self, module: nn.Module) -> None:
        """Broadcast a stage's initial weights from its first rank."""
        if self._channel is None:
            super()._share_weights(module)
            return
        assert self._meshes is not None
        group = self._meshes.stage.get_group()
        source = dist.get_global_rank(group, 0)
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), source, group=group)

    def on_train_start(self) -> None:
        """Agree on whether a tied weight is trained: hooks may have frozen it by a name of one stage."""
        super().on_train_start()
        if self._stage is not None and self._stage.tied_names:
            share_freezing(self._stage.tied, self._stage.channel)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first forward pass of a step; ``backward`` runs the others."""
        if self._stage is None:
            return super().training_step(*args, **kwargs)
        batch, *rest = args
        if (accumulate := self._trainer.accumulate_grad_batches) != 1:
            raise MisconfigurationException(
                f"accumulate_grad_batches={accumulate}, but a pipeline runs all microbatches of a step in "
                "one batch and updates behind it. Set it to 1, with THDDataModule(global_batch=Packs(n)) or "
                "THDStep batches of your own."
            )
        if not isinstance(batch, THDBatch | THDStep):
            raise MisconfigurationException(
                f"pipeline_parallel_size={self.pipeline_parallel_size} runs THDBatch, but the dataloader "
                f"gave {type(batch).__name__}. Use THDDataModule."
            )
        step = batch if isinstance(batch, THDStep) else THDStep([batch])
        if self._draws is not None:
            self._draws.begin()
        self._run = PipelineStep(self, step, tuple(rest))
        self._warn_of_bubble(self._run.schedule)
        output = self._run.first()
        warn_of_extras(output, len(step))
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run all passes of the step after the first."""
        if self._run is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        run = self._run
        result = closure_loss
        for op in run.rest():
            if op.forward:
                run.forward(op)
                continue
            loss = closure_loss if run.is_first(op) else run.take_loss(op)
            ending = op.chunk if run.is_last_of_chunk(op) else None
            self._synchronise_chunk(ending, last=op is run.program[-1])
            result = super().backward(loss / len(run.step), optimizer, *args, **kwargs)
        self._losses = run.finish()
        tied = run.stage.tied
        if tied is not None and tied.requires_grad:
            sum_tied(tied, run.channel)
        self._run = None
        return result

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        """Leave the stream as it is inside a step: layers take their numbers from it in turn."""
        return super()._drawing() if self._channel is None else contextlib.nullcontext()

    def forward_pass(self, batch: THDBatch, rest: tuple[Any, ...]) -> Any:
        """Run the user's ``training_step`` on one microbatch."""
        return super().training_step(batch, *rest)

    def _synchronise_chunk(self, chunk: int | None, *, last: bool) -> None:
        """Reduce a chunk's gradients in its last backward pass only, then free its weights.

        What is not a layer, an embedding or a head, is left to the rank's last pass of all.
        """
        assert self.model is not None
        assert self._stage is not None
        ending = set() if chunk is None else {id(module) for module in self._stage.modules_of(chunk)}
        layers = {id(m) for c in range(self._stage.chunks) for m in self._stage.modules_of(c)}
        for child in self.model.modules():
            if isinstance(child, FSDPModule):
                ends = id(child) in ending if id(child) in layers else last
                child.set_requires_gradient_sync(ends, recurse=False)
                child.set_reshard_after_backward(ends, recurse=False)

    def _frees_weights(self, module: nn.Module) -> bool:
        """Return whether weights are freed after every pass, not kept for the step."""
        if self._channel is None or self.reshard_after_forward != "auto":
            return super()._frees_weights(module)
        assert self._meshes is not None
        own = sum(p.numel() * p.element_size() for p in module.parameters()) // self.sizes.tensor
        fits = torch.tensor([own <= memory_of_rank(self.root_device) / 4], device=self.root_device).int()
        dist.all_reduce(fits, dist.ReduceOp.MIN, group=self._meshes.stage.get_group())
        return not bool(fits)

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        if self._channel is None:
            super()._clip_by_norm(optimizer, clip_val)
            return
        assert self._stage is not None
        counted_twice = {id(self._stage.tied)} if self._channel.rank else set()
        clip_by_norm(
            self.precision_plugin.main_params(optimizer),
            float(clip_val),
            across=self._channel.down,
            counted_elsewhere=counted_twice,
        )

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return this stage's optimizer state, listing the parameters of all stages."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self._channel is None:
            return state
        return complete_groups(rename_optimizer(state, self._head_name), self._channel.down)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load this stage's part of a checkpoint folder that any layout has written."""
        if self._channel is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        path = Path(self.broadcast(checkpoint_path))
        assert self.model is not None
        saved: list[nn.Parameter] = []
        if self.optimizers and is_folder(path):
            restore_groups(self._trainer, path, weights_only=weights_only, stage=True)
            own = {value: name for name, value in self._head_name.items()}
            saved = parameters_of_folder(path, self.optimizers, self.model, own)
            drop_unknown_options(self.optimizers, path)
        with trained(saved):
            checkpoint = load_folder(path, self.model, self.optimizers, self._head_name, weights_only)
        self._leave_fresh(checkpoint)
        names = [name for name, _ in self._trainer.lightning_module.named_parameters()]
        keep_own_names(checkpoint, self._trainer.callbacks, names)  # type: ignore[attr-defined]
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint as the base strategy does, with the names that callbacks of all stages list."""
        if self._channel is not None:
            callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
            gather_names(checkpoint, callbacks, self._channel.down)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _fresh(self) -> list[int]:
        """Return the optimizers that have made no step on any stage: one may train nothing."""
        fresh = super()._fresh()
        if self._channel is None:
            return fresh
        found: list[list[int]] = [[]] * self._channel.ranks
        dist.all_gather_object(found, fresh, group=self._channel.down)
        return [i for i in fresh if all(i in other for other in found)]

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Make the optimizers as the base strategy does.

        Raises:
            MisconfigurationException: for an optimizer without parameters, on a stage that trains nothing.
        """
        try:
            super().setup_optimizers(trainer)
        except ValueError as err:
            if self._channel is None or "empty parameter list" not in str(err):
                raise
            raise MisconfigurationException(
                "configure_optimizers gives the optimizer no parameters on pipeline stage "
                f"{self._channel.rank}, whose layers are all frozen. Give it the frozen weights too, or a "
                'list of groups, [{"params": [...]}], which may be empty on a stage.'
            ) from err
        if self._stage is not None and self._stage.tied_names:
            share_group(self._stage.tied, self.optimizers, self._stage.channel)

    @property
    def _head_name(self) -> Mapping[str, str]:
        """Return the tied head's name mapped to the embedding's, on the last stage; else nothing."""
        assert self._stage is not None
        return self._stage.tied_names if self._stage.holds_head else {}

    @property
    def _first_of_stage(self) -> bool:
        return self._meshes is None or self._meshes.stage.get_local_rank() == 0

    def _all_stages(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gather the weights of all stages on the first rank, a tied one once."""
        if self._channel is None or not self._first_of_stage:
            return state
        names = {name.partition(".")[2] for name in self._head_name}
        own = {name: value for name, value in state.items() if name not in names}
        return gather_states(own, self._channel.down)

    def _warn_of_bubble(self, schedule: Schedule) -> None:
        if self._warned or schedule.microbatches >= schedule.ranks:
            return
        self._warned = True
        bubble = expected_bubble(schedule.ranks, schedule.microbatches, chunks=schedule.chunks)
        rank_zero_warn(
            f"A step has {schedule.microbatches} microbatches for pipeline_parallel_size={schedule.ranks}: "
            f"ranks wait {bubble:.0%} of the time. Raise global_batch (Packs(n) or Sequences(n)), or lower "
            "the capacity so that a step has more microbatches."
        )


def _refuse_weights_outside(module: nn.Module, inner: nn.Module) -> None:
    """Refuse trained weights outside the model that is cut: no stage is known for them."""
    cut = {id(parameter) for parameter in inner.parameters()}
    left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in cut]
    if left:
        raise MisconfigurationException(
            f"{type(module).__name__} trains {left[:4]} beside the {type(inner).__name__} that "
            "pipeline_parallel_size > 1 cuts by depth; no stage is known for them. Freeze them, or set "
            "pipeline_parallel_size=1."
        )
