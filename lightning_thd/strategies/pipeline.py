"""A model cut by depth -> optimizer steps through a pipeline of stages."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_thd._pages import see
from lightning_thd._user_code import definition_of
from lightning_thd.batch import THDStep
from lightning_thd.batch.thd_batch import Packed
from lightning_thd.batch.upload import uploaded
from lightning_thd.parallel.across_ranks import broadcast_object, on_host
from lightning_thd.parallel.mesh import another_group
from lightning_thd.parallel.pipeline import Op, make_schedule
from lightning_thd.parallel.pipeline.channel import (
    Channel,
    StageBeforeFailed,
    copy_tied,
    require_same_ends,
    sum_tied,
)
from lightning_thd.parallel.pipeline.cut import (
    cut_model,
    decoder_stack,
    language_model_of,
    stages_in,
    tied_names,
)
from lightning_thd.parallel.pipeline.seam import weights_in
from lightning_thd.parallel.pipeline.stage import Stage
from lightning_thd.strategies.axes import Axes, timeout_of
from lightning_thd.strategies.logs import RecordedLogs, logs_this_step, number_of_step
from lightning_thd.strategies.loop import StepLoop, loss_of, warn_of_extras


class Pipeline:
    """The stage that this rank holds of a model cut by depth, and its messages to the other stages."""

    def __init__(self, strategy: Any, axes: Axes) -> None:
        self._strategy = strategy
        self._axes = axes
        self.channel = self._make_channel()
        self.stage: Stage | None = None
        # Shares of the last step's time.
        self.waited = 0.0  # this rank's measured wait; 0 on a GPU
        self.expected_wait = 0.0  # the schedule's ``bubble``
        self.compared = False  # whether the stages have compared which copies of a tied weight they train

    @functools.cached_property
    def host_group(self) -> dist.ProcessGroup:
        """The stages' group for Python objects, in CPU memory; the stages create it together."""
        return on_host(self.channel.down)

    def _make_channel(self, dtype: torch.dtype | None = None) -> Channel:
        """Create a channel and its two or four process groups; all ranks of the job call this."""

        def new_group() -> dist.ProcessGroup:
            return another_group(self._axes.sizes, timeout=timeout_of(self._strategy))

        down = new_group()
        up = new_group()
        wraps = None
        if self._strategy.stages_per_rank > 1:
            wraps = (new_group(), new_group())
        channel = Channel(down=down, up=up, wraps=wraps, fixed_dtype=dtype)
        channel.meet(self._strategy.root_device)
        return channel

    def reuse(self, stage: Stage) -> None:
        """Continue with the stage that an earlier fit has cut, and with its channel."""
        stage.require_idle()
        self.stage, self.channel = stage, stage.channel

    def cut(self, module: nn.Module) -> None:
        """Keep this rank's layers of a module, in place."""
        strategy = self._strategy
        if not strategy.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                f"pipeline_parallel_size={strategy.pipeline_parallel_size} runs the microbatches of a step "
                "in its own order, which automatic_optimization=False cannot. Use automatic optimisation."
            )
        _refuse_weights_outside(module, language_model_of(module))

        names = tied_names(module)  # before the cut, which takes one of the two copies away
        _, decoder, _ = decoder_stack(language_model_of(module))
        meshes = self._axes.meshes
        self.stage = cut_model(
            module,
            self.channel,
            stages_per_rank=strategy.stages_per_rank,
            split=strategy.pipeline_split,
            balance=lambda: self._make_channel(torch.float64),
            peers=None if meshes is None else meshes.stage.get_group(),
        )
        self.stage.tied_names = names
        self._fail_together(decoder)
        rank_zero_info(self.stage.split.table())

    def _fail_together(self, decoder: Any) -> None:
        """Make all stages raise what one of them raises in its first forward pass, so that none waits."""
        stage = self.stage
        assert stage is not None
        forward = decoder.forward
        passed: set[int] = set()  # the chunks that have run once

        @functools.wraps(forward)
        def first_forward(*args: Any, **kwargs: Any) -> Any:
            chunk = stage.active or 0
            # Without gradients, the first rank waits for its second stage inside of the pass, not after it.
            waits_inside = stage.chunks > 1 and stage.active is None
            if chunk in passed or waits_inside:
                return forward(*args, **kwargs)

            passed.add(chunk)
            try:
                output = forward(*args, **kwargs)
            except Exception as error:
                stage.fail(self._strategy.root_device)
                self._compare_failures(error)
                raise
            self._compare_failures(None)
            return output

        decoder.forward = first_forward

    def _compare_failures(self, error: Exception | None) -> None:
        """Raise the first stage's error, unless this stage has one of its own; a collective."""
        ranks = self.channel.ranks
        has_own = error is not None and not isinstance(error, StageBeforeFailed)
        first = torch.tensor(self.channel.rank if has_own else ranks, device="cpu")  # whatever the default is
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self.host_group)
        failed_rank = int(first)
        if failed_rank == ranks:
            return

        is_refusal = isinstance(error, ValueError | MisconfigurationException)
        source = dist.get_global_rank(self.host_group, failed_rank)
        is_refusal, text = broadcast_object((is_refusal, str(error)), self.host_group, source)
        if has_own:
            return
        if is_refusal:
            raise ValueError(text) from None
        raise RuntimeError(f"Rank {failed_rank} of the pipeline failed in its first forward pass: {text}")

    def tie_ends(self, module: nn.Module) -> None:
        """Copy the tied weight of embedding and head from the first stage to the last."""
        stage = self.stage
        assert stage is not None
        if stage.tied_names and (stage.holds_embedding or stage.holds_head):
            ((head, embedding),) = stage.tied_names.items()
            stage.tied = module.get_parameter(embedding if stage.channel.rank == 0 else head)
            copy_tied(stage.tied, stage.channel)

    def make_optimizers(self, base: Callable[[L.Trainer], None], trainer: L.Trainer) -> None:
        """Make the optimizers, and require that they treat a tied weight alike on its two stages."""
        base(trainer)
        if self.stage is not None and self.stage.tied_names:
            require_same_ends(self.stage.tied, self._strategy.optimizers, self.channel)

    @property
    def head_name(self) -> Mapping[str, str]:
        """Return the tied head's name mapped to the embedding's, on the last stage; else nothing."""
        assert self.stage is not None
        return self.stage.tied_names if self.stage.holds_head else {}

    @property
    def clipping(self) -> dict[str, Any]:
        """Return the arguments with which ``clip_by_norm`` counts every weight of the pipeline once."""
        assert self.stage is not None
        counted_elsewhere = {id(self.stage.tied)} if self.channel.rank else set()
        return {"across": self.channel.down, "counted_elsewhere": counted_elsewhere}

    def gather_states(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather all stages' weights in the first stage's CPU memory, a tied weight once; a collective."""
        # ``head_name`` begins at the LightningModule, the names of ``state`` at a model inside of it.
        of_stage = {
            name: value
            for name, value in state.items()
            if not any(head.endswith(f".{name}") for head in self.head_name)
        }
        group = self.host_group
        first = dist.get_global_rank(group, 0)
        if group.rank() != 0:
            dist.gather_object(of_stage, None, dst=first, group=group)
            return of_stage

        parts: list[Any] = [None] * group.size()
        dist.gather_object(of_stage, parts, dst=first, group=group)
        return {name: value for part in parts for name, value in part.items()}

    def write_adapters(self, folder: Path, model: Any, state: Mapping[str, Tensor]) -> None:
        """Write all stages' adapters, of which PEFT writes only the first stage's; a collective."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        for name in model.peft_config:
            adapter = self.gather_states(get_peft_model_state_dict(model, dict(state), name))
            if self.host_group.rank() == 0:
                of_adapter = folder if name == "default" else folder / name  # as PEFT does
                # safetensors refuses tensors that share memory with others.
                copies = {key: value.clone() for key, value in adapter.items()}
                save_file(copies, of_adapter / "adapter_model.safetensors", metadata={"format": "pt"})


def earlier_stage(module: nn.Module, ranks: int, stages_per_rank: int) -> Stage | None:
    """Return the stage that an earlier Trainer has cut, or None; refuse a stage for other sizes."""
    for stage in stages_in(module):
        if (stage.split.ranks, stage.chunks) != (ranks, stages_per_rank):
            raise MisconfigurationException(
                f"The model was cut for pipeline_parallel_size={stage.split.ranks} with stages_per_rank="
                f"{stage.chunks} by an earlier Trainer, but this Trainer has {ranks} and {stages_per_rank}. "
                "Use the same sizes, or a new model."
            )
        return stage
    return None


def _refuse_weights_outside(module: nn.Module, inner: nn.Module) -> None:
    """Refuse trained weights of a LightningModule beside the model that is cut by depth."""
    cut = {id(parameter) for parameter in inner.parameters()}
    beside = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in cut]
    if beside:
        raise MisconfigurationException(
            f"{type(module).__name__} trains {beside[:4]} beside the {type(inner).__name__} that "
            "pipeline_parallel_size > 1 cuts by depth; no stage is known for them. Freeze them."
        )


class PipelineLoop(StepLoop):
    """Runs the passes of a step in the order of the pipeline's schedule."""

    def __init__(self, strategy: Any, run: Callable[..., Any], pipeline: Pipeline) -> None:
        super().__init__(strategy, run)
        self._pipeline = pipeline
        self._running: PipelineStep | None = None

    def takes(self, batch: object) -> bool:
        """Return True: the loop runs every batch, or raises an error for it."""
        return True

    @property
    def is_running(self) -> bool:
        """Return whether a step has begun and not ended."""
        return self._running is not None

    def first(self, batch: Any, *args: Any) -> Any:
        """Run the first forward pass of a step; the method ``rest`` runs all other passes."""
        strategy = self._strategy
        accumulate = strategy._trainer.accumulate_grad_batches
        if accumulate != 1:
            raise MisconfigurationException(
                f"accumulate_grad_batches={accumulate}, but a pipeline runs all microbatches of a step in "
                "one batch. Set it to 1, with THDDataModule(global_batch=Packs(n)) or THDStep batches."
            )
        if not isinstance(batch, Packed):
            raise MisconfigurationException(
                f"pipeline_parallel_size={strategy.pipeline_parallel_size} runs THDBatch, but the dataloader "
                f"gave {type(batch).__name__}. Use THDDataModule."
            )

        step = batch.in_step()
        if strategy._shards.draws is not None:
            strategy._shards.draws.begin(strategy._trainer.global_step)
        self._running = PipelineStep(strategy, self._pipeline, self._run, step, args)
        output = self._running.forward(self._running.program[0])
        warn_of_extras(output, len(step))
        return output

    def rest(self, first_loss: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        """Run all passes of the step after the first."""
        step = self._running
        assert step is not None
        result = first_loss
        for op in step.rest():
            if op.forward:
                step.forward(op)
                continue
            loss = step.losses.pop((op.microbatch, op.chunk))
            self._synchronise(step, op)
            result = backward(loss / len(step.step))

        self._losses = step.finish()
        tied = step.stage.tied
        if tied is not None and tied.requires_grad:
            sum_tied(tied, self._pipeline.channel)
        self._running = None
        return result

    def _synchronise(self, step: PipelineStep, op: Op) -> None:
        """Reduce the gradients of a chunk, and free its weights, only in the chunk's last backward pass."""
        ends_chunk = op.microbatch == len(step.step) - 1  # each chunk runs the microbatches in order
        ends_step = op is step.program[-1]
        in_layers: dict[int, bool] = {}  # id of a module of a layer -> whether this is its last pass
        for chunk in range(step.stage.chunks):
            ends_layers = ends_chunk and chunk == op.chunk
            in_layers.update({id(module): ends_layers for module in step.stage.modules_of(chunk)})

        for module in self._strategy.model.modules():
            if isinstance(module, FSDPModule):
                # The embedding and the head are in no chunk. Reduce their gradients in the rank's last pass.
                ends = in_layers.get(id(module), ends_step)
                module.set_requires_gradient_sync(ends, recurse=False)
                module.set_reshard_after_backward(ends, recurse=False)


class PipelineStep:
    """One optimizer step of a pipeline: the schedule, and the losses and logs of the passes so far."""

    def __init__(
        self, strategy: Any, pipeline: Pipeline, run: Callable[..., Any], step: THDStep, args: tuple[Any, ...]
    ) -> None:
        assert pipeline.stage is not None
        self._strategy = strategy
        self._pipeline = pipeline
        self._run = run  # the forward pass of one microbatch
        self._args = args  # what training_step takes beside the batch
        self.step = step
        self._batches = step.microbatches
        self.stage = pipeline.stage
        self.channel = pipeline.channel
        self.schedule = make_schedule(self.channel.ranks, len(step), chunks=self.stage.chunks)
        self.program = self.schedule.programs[self.channel.rank]
        # With sequence parallelism, a message has only the slots of one tensor-parallel rank.
        self._slot_ranks = strategy.sizes.tensor if strategy.sequence_parallel else 1
        self._logs = RecordedLogs(strategy._trainer)
        self.losses: dict[tuple[int, int], Tensor] = {}  # (microbatch, chunk) -> loss
        self._values: dict[int, Tensor] = {}  # microbatch -> loss, on the stage with the head
        self._weights = _trained(strategy)
        # For each chunk, also those after its first pass, because FSDP2 replaces weights by gathered ones.
        self._weights_after: dict[int, list[tuple[str, Tensor]]] = {}
        self._started_s = time.perf_counter()
        self.channel.waited_s = 0.0

    def rest(self) -> Iterator[Op]:
        """Yield the passes after the first, and begin to receive each pass's input during the pass before."""
        ahead = iter(self.program[1:])
        self._expect(next(ahead, None))
        for op in self.program[1:]:
            self._expect(next(ahead, None))
            yield op

    def _expect(self, op: Op | None) -> None:
        """Begin to receive the input of a pass, if there is one more."""
        if op is not None:
            ids = self._batches[op.microbatch].input_ids
            self.stage.expect(op, ids.numel() // self._slot_ranks, ids.device)

    def forward(self, op: Op) -> Any:
        """Run a forward pass through one chunk of this rank."""
        stage = self.stage
        stage.begin(op.chunk)
        with self._logs.record(op.microbatch, op.chunk):
            output = self._run(self._batches[op.microbatch], *self._args)

        made = loss_of(output)
        stage.require_one_call(_definition(self._strategy.lightning_module))
        self._require_loss_of_model(made, op.chunk)
        loss = stage.seam.join(made, has_head=stage.holds_head)
        if stage.holds_head:
            self._values[op.microbatch] = loss.detach()
        self.losses[op.microbatch, op.chunk] = loss
        return output

    def _require_loss_of_model(self, made: Tensor, chunk: int) -> None:
        """Refuse what training_step returned if it depends on weights, or has no gradient."""
        module = self._strategy.lightning_module
        if chunk not in self._weights_after:
            found = [*self._weights, *module.named_parameters()]
            self._weights_after[chunk] = list({id(weight): (name, weight) for name, weight in found}.values())
        require_no_weights(module, made, self._weights_after[chunk])
        if self.stage.holds_head and not made.requires_grad:
            raise MisconfigurationException(
                f"training_step of {type(module).__name__} returns a loss without a gradient "
                f"({_definition(module)}). Do not detach it. {see('pipelines')}"
            )

    def finish(self) -> list[Tensor]:
        """Send the last stage's losses and logs to all stages, log the values, and return the losses."""
        self.stage.begin(None)
        self.channel.finish()
        if self.stage.balance is not None:
            self.stage.balance.channel.finish()
        losses = self._share()

        pipeline = self._pipeline
        step_s = time.perf_counter() - self._started_s
        pipeline.waited = self.channel.waited_s / max(step_s, 1e-9)
        pipeline.expected_wait = self.schedule.bubble
        trainer = self._strategy._trainer
        if logs_this_step(trainer):
            numbers = {
                "pipeline/bubble_fraction": pipeline.waited,
                "pipeline/expected_bubble_fraction": pipeline.expected_wait,
            }
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=number_of_step(trainer))
        return losses

    def _share(self) -> list[Tensor]:
        """Send the last stage's losses and logs to all stages, in one message."""
        message: Any = None
        if self.stage.holds_head:
            microbatches = range(len(self._batches))
            losses, logged = self._logs.values([self._values[microbatch] for microbatch in microbatches])
            message = (losses, logged, self._trains_tied)

        group = self._pipeline.host_group  # a GPU group would copy the objects to the GPU and back
        last_rank = dist.get_global_rank(group, self.channel.ranks - 1)
        losses, logged, last_trains_tied = broadcast_object(message, group, last_rank)
        self._logs.log(self._batches, logged)
        self._refuse_one_trained_copy(last_trains_tied)
        return list(uploaded(np.array(losses, np.float64), self._strategy.root_device))

    def _refuse_one_trained_copy(self, last_trains_tied: bool) -> None:
        """Refuse to train only one of the two copies of a tied weight."""
        problem = None
        if self.channel.rank == 0 and self._trains_tied != last_trains_tied:
            problem = (
                "The weight that embedding and head share is now trained on the "
                f"{'last' if last_trains_tied else 'first'} pipeline stage only, so its copies would differ. "
                "Freeze and unfreeze both copies: the embedding's on the first stage, the head's on the last."
            )

        if not self._pipeline.compared:  # compare in the first step, so that all stages raise together
            self._pipeline.compared = True
            problems: list[Any] = [None] * self.channel.ranks
            dist.all_gather_object(problems, problem, group=self._pipeline.host_group)
            problem = next((each for each in problems if each is not None), None)
        if problem is not None:
            raise MisconfigurationException(problem)

    @property
    def _trains_tied(self) -> bool:
        return self.stage.tied is not None and self.stage.tied.requires_grad


def _trained(strategy: Any) -> list[tuple[str, Tensor]]:
    """Return the module's weights by name, and what else its optimizers train."""
    named = list(strategy.lightning_module.named_parameters())
    known = {id(weight) for _, weight in named}
    for optimizer in strategy.optimizers:
        for group in optimizer.param_groups:
            named += [("a tensor of the optimizer", w) for w in group["params"] if id(w) not in known]
    return named


def require_no_weights(module: Any, loss: Tensor, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse a loss that training_step makes of weights too, not only of the model's values."""
    names = weights_in(loss, weights)
    if names:
        raise MisconfigurationException(
            f"training_step of {type(module).__name__} returns more than the model's loss: it depends on "
            f"{names[:4]} in another way too ({_definition(module)}). Return "
            f"causal_lm_loss(self.model, batch), or something made of it. {see('pipelines')}"
        )


def _definition(module: Any) -> str:
    """Say in which file and line a module's ``training_step`` is defined."""
    return definition_of(type(module).training_step) or "training_step"
