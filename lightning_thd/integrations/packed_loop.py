"""A step of microbatches in a loop without a Lightning Trainer: gradients, the step's loss, and its metrics.

What Accelerate and Fabric have in common. Each hands in an ``Engine``: how to go backward, how to leave
gradients unsynchronised, where to log.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.fabric.wrappers import _FabricModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_thd._checks import whole_number
from lightning_thd.alignment import Alignment, Layout
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.callbacks.experts import expert_load
from lightning_thd.callbacks.loggers import for_loggers
from lightning_thd.callbacks.meter import Hardware, Meter
from lightning_thd.callbacks.module_flops import ModuleFlops
from lightning_thd.cuda_graph import GraphCosts, GraphedStep
from lightning_thd.cuda_graph.backend import Backend, CudaBackend
from lightning_thd.cuda_graph.graph_choice import MaxSequences, plan_for, sequence_counts
from lightning_thd.cuda_graph.guards import sharded_by
from lightning_thd.data import THDDataModule
from lightning_thd.data.loader import THDLoader
from lightning_thd.data.trainer_link import model_alignment
from lightning_thd.flops.rates import check_peak
from lightning_thd.integrations.evaluation import LossFn, mean_loss
from lightning_thd.loss import causal_lm_loss
from lightning_thd.packing import PackPlanner
from lightning_thd.parallel.context.layout import Communication
from lightning_thd.parallel.mesh import CONTEXT, DATA, AxisSizes, make_meshes
from lightning_thd.parallel.shard import shard_batch
from lightning_thd.precision.convert import in_low_precision
from lightning_thd.strategies.guards import (
    refuse_other_attention,
    refuse_second_context_parallelism,
    refuse_unused_layout,
)
from lightning_thd.strategies.pack_cut import check_ways


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """The packs a rank of a loop reads: its place among ranks with different data, and its part of each."""

    rank: int
    ranks: int
    data_group: dist.ProcessGroup | None = None  # one rank of each pack; None is the world
    size: int = 1  # ranks that share a pack, those of ``group``; 1 leaves batches whole
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    layout: Layout = "dual_chunk"
    communication: Communication = "auto"

    @property
    def alignment(self) -> Alignment | None:
        """Return what lengths and totals must be multiples of; None asks for nothing."""
        return None if self.size == 1 else Alignment.for_(cp=self.size, layout=self.layout)

    def cut(self, batch: THDBatch) -> THDBatch:
        """Keep this rank's part of a pack that lies on its device."""
        if self.size == 1:
            return batch
        return shard_batch(batch, group=self.group, layout=self.layout, communication=self.communication)


def share_packs(
    model: nn.Module,
    *,
    data: tuple[int, int, dist.ProcessGroup | None],  # what ``data_rank`` returns
    device: torch.device,
    size: int,
    layout: Layout,
    communication: Communication,
) -> Shared:
    """Group neighbouring ranks to share packs by context parallelism; a collective of the world."""
    rank, ranks, group = data
    advice = "It is a number of ranks; 'dynamic' needs THDDDPStrategy or THDModelParallelStrategy."
    size = whole_number(size, "context_parallel_size", least=1, advice=advice)
    check_ways(layout, communication)
    if ranks % size:
        raise ValueError(
            f"context_parallel_size={size} does not divide the {ranks} ranks that read data. Start a "
            "multiple of it, or lower it."
        )
    if size == 1:
        return Shared(rank=rank, ranks=ranks, data_group=group)
    if ranks != dist.get_world_size():
        raise ValueError(
            f"context_parallel_size={size} where {ranks} of {dist.get_world_size()} processes read different "
            "data: other axes of the mesh share weights. Use THDModelParallelStrategy(context_parallel_size=,"
            " tensor_parallel_size=) under Lightning, or a mesh of data-parallel ranks only."
        )
    if model_alignment(model) is not None:
        raise ValueError(
            f"context_parallel_size={size} with a model in FP8, whose packs are aligned for one rank. Use "
            "Lightning with FP8Precision, or context_parallel_size=1."
        )
    refuse_other_attention(model, size)
    refuse_second_context_parallelism(model, size)
    meshes = make_meshes(AxisSizes(data=ranks // size, context=size), device.type)
    return Shared(
        rank=rank // size,
        ranks=ranks // size,
        data_group=meshes.group(DATA),
        size=size,
        group=meshes.group(CONTEXT),
        layout=layout,
        communication=communication,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """The functions and sizes that Accelerate or Fabric provides to a ``PackedLoop``."""

    backward: Callable[[Tensor], None]  # does not divide the loss
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]]  # leaves gradients to this rank
    log: Callable[[dict[str, float], int], None]
    device: torch.device
    devices: int  # devices of the whole job
    shared: Shared
    precision: str  # under Lightning's name, such as "bf16-mixed"


class PackedLoop:
    """Holds the prepared model, loader and optimizer, and runs whole steps; ``prepare_thd`` returns it.

    Unpacks like the tuple ``accelerator.prepare`` returns: ``model, loader, optimizer = prepare_thd(...)``,
    and the scheduler last if one was given.

    Attributes:
        model: prepared by Accelerate or Fabric.
        loader: gives ``THDStep`` after ``THDStep``; its position is in the checkpoints.
        optimizer: prepared; a list if several were given.
        scheduler: prepared, or None.
        global_step: steps run so far.
        latest: the metrics of the last interval.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        loader: THDLoader,
        optimizer: Any,
        scheduler: Any = None,
        *,
        loss_fn: LossFn = causal_lm_loss,
        peak: Literal["auto", "measure"] | float = "auto",
        log_every_n_steps: int = 50,
        warmup_steps: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        whole_number(log_every_n_steps, "log_every_n_steps", least=1, advice="Log every 1 or more steps.")
        if not isinstance(peak, str) or peak not in ("auto", "measure"):
            check_peak(peak)
        self.model, self.loader, self.optimizer, self.scheduler = model, loader, optimizer, scheduler
        self.global_step = 0
        self.latest: dict[str, float] = {}
        self._engine, self._loss_fn = engine, in_low_precision(loss_fn, model, group=engine.shared.data_group)
        self._every, self._warmup = log_every_n_steps, warmup_steps
        self._graphed: GraphedStep | None = None
        self._captured_s = 0.0
        shared = engine.shared
        hardware = Hardware.of(
            model, engine.device, peak, engine.precision, group=shared.data_group, devices=engine.devices
        )
        self._flops = ModuleFlops(model, sharded=shared.size > 1)
        self._meter = Meter("train", "training", clock, hardware, self._flops.model("train"))
        self._meter.experts = expert_load(model)
        self._meter.capacity = loader.capacity

    def __iter__(self) -> Iterator[Any]:
        prepared = (self.model, self.loader, self.optimizer)
        return iter(prepared if self.scheduler is None else (*prepared, self.scheduler))

    def backward(self, step: THDStep) -> Tensor:
        """Run every microbatch of a step forward and backward, with gradients synchronised only in the last.

        Args:
            step: what the loader gave, on any device.

        Returns:
            fp32 ``[]``, this rank's share of the step's loss: its mean over the data-parallel ranks is the
            sum over all loss tokens of the step divided by their number. Detached.
        """
        if self._flops.outdated:  # weights were frozen or thawed since the last step
            self._meter.model = self._flops.model("train")
            self._meter.reduce(whole=True)
            self._flops.follow()
        self._meter.resume()
        self._flops.stop()  # after a step that raised
        self._flops.begin("train")
        step = step.to(self._engine.device)
        loss = sum_over_packs(
            step, self._engine.no_sync, self.model, lambda batch: self._run(batch, len(step))
        )
        self._meter.add(step)
        self._end_step()
        return loss

    def evaluate(self, data: THDDataModule | Iterable[THDBatch], *, name: str = "val") -> dict[str, float]:
        """Return and log the mean loss over all loss tokens of an evaluation set; every rank calls it.

        Args:
            data: a ``THDDataModule(val=...)``, which shares its packs out, or this rank's batches themselves.
            name: goes before every key.

        Returns:
            ``val/loss`` and ``val/loss_tokens``, the same on every rank. The time it takes is left out of the
            throughput of training.

        Raises:
            MisconfigurationException: for a data module without ``val``.
        """
        batches: Any = data
        if isinstance(data, THDDataModule):
            shared = self._engine.shared
            data.attach(
                rank=shared.rank,
                ranks=shared.ranks,
                model=self.model,
                alignment=shared.alignment,
                device=self._engine.device,
            )
            data.setup("validate")
            batches = data.val_dataloader()
        running = self._meter.pause()
        loss, tokens = mean_loss(
            self._loss_fn,
            self.model,
            batches,
            device=self._engine.device,
            group=self._engine.shared.data_group,
            cut=self._engine.shared.cut,
        )
        if running:
            self._meter.resume()
        metrics = {f"{name}/loss": loss, f"{name}/loss_tokens": float(tokens)}
        self._engine.log(metrics, self.global_step)
        return metrics

    def capture(
        self,
        *,
        max_sequences: MaxSequences = "auto",
        costs: GraphCosts | None = None,
        require: bool = False,
        backend: Backend | None = None,
    ) -> GraphedStep | None:
        """Capture CUDA graphs and replay them from now on for every microbatch that fits one.

        This is what ``CUDAGraphCallback`` does under Lightning. Losses and gradients are unchanged. A
        microbatch that fits no graph runs eagerly. Hit rate and reasons are logged with the loop's other
        metrics.

        Args:
            max_sequences: sequences of each captured shape, one number or several; "auto" chooses them from
                the packs the planner will make.
            costs: the times that "auto" uses; by default those of a launch-bound step.
            require: raise if graphs are not possible, instead of training without them.
            backend: CUDA graphs by default; a ``RecordingBackend`` for tests on a CPU.

        Returns:
            The graphs, with their ``stats``; None if training goes on eagerly; the reason is printed.

        Raises:
            ValueError: for numbers of sequences below 1, and with ``require`` if there can be no graphs.
        """
        if (size := self._engine.shared.size) > 1:
            raise ValueError(
                f"capture() with context_parallel_size={size}: packs that ranks share exchange keys whose "
                "number depends on the lengths. Leave capture() out."
            )
        self._graphed = graphed_loss(
            self._loss_fn,
            self.model,
            getattr(self.loader, "planner", None),
            ranks=self._engine.shared.ranks,
            device=self._engine.device,
            max_sequences=max_sequences,
            costs=costs,
            require=require,
            backend=backend,
        )
        return self._graphed

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the throughput totals; the loader has a state of its own."""
        return {"global_step": self.global_step, "throughput": self._meter.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of steps and the throughput totals from a checkpoint."""
        self.global_step = int(state["global_step"])
        self._meter.load(state["throughput"])

    def _run(self, batch: THDBatch, microbatches: int) -> Tensor:
        batch = self._engine.shared.cut(batch)
        loss = self._loss_fn(self.model, batch) if self._graphed is None else self._graphed(batch)
        refuse_unused_layout(batch)  # an attention that did not see the other ranks of a shard
        loss = loss / microbatches
        self._engine.backward(loss)
        return loss.detach()

    def _end_step(self) -> None:
        spent_s = 0.0 if self._graphed is None else self._graphed.stats.capture_s
        captured, self._captured_s = spent_s > self._captured_s, spent_s
        self._flops.end("train", self._meter.steps[-1], discard=captured)
        self._meter.end_step()
        self.global_step += 1
        if self.global_step <= self._warmup or captured:
            self._meter.leave_out()
        if self.global_step % self._every == 0:
            self._meter.model = self._flops.model("train")
            self.latest = self._meter.close()
            self._flops.follow()  # weights that were added
            if self._graphed is not None:
                self.latest |= self._graphed.stats.metrics()
            self._engine.log(for_loggers(self.latest), self.global_step)


def as_loader(
    data: object, model: nn.Module, shared: Shared, *, accumulate: int, device: torch.device
) -> THDLoader:
    """Return the loader of training steps of a data module, or the packed loader that was given."""
    if isinstance(data, THDDataModule):
        data.attach(
            rank=shared.rank,
            ranks=shared.ranks,
            accumulate=accumulate,
            model=model,
            alignment=shared.alignment,
            device=device,
        )
        data.prepare_data()
        data.setup("fit")
        return data.train_steps()
    if isinstance(data, THDLoader) and shared.size > 1:
        raise ValueError(
            f"prepare_thd got a ready {type(data).__name__} with context_parallel_size={shared.size}: which "
            "packs it reads and how they are padded was decided before. Give the THDDataModule itself."
        )
    if isinstance(data, THDLoader):
        return data
    raise ValueError(
        f"prepare_thd got data of type {type(data).__name__}, wanted a THDDataModule, or what its "
        "train_steps() returns. Another loader would split packs, dispatch them to other ranks or stack "
        "them. Write THDDataModule(dataset, capacity=...) in its place."
    )


def sum_over_packs(
    step: THDStep,
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]],
    model: nn.Module,
    run: Callable[[THDBatch], Tensor],
) -> Tensor:
    """Run the microbatches of a step, all but the last under ``no_sync``, and sum their losses."""
    losses = []
    for i, batch in enumerate(step.microbatches, start=1):
        with contextlib.nullcontext() if i == len(step) else no_sync(model):
            losses.append(run(batch))
    return torch.stack(losses).sum()


def graphed_loss(
    loss_fn: Callable[[nn.Module, THDBatch], Tensor],
    model: nn.Module,
    planner: object,
    *,
    ranks: int,
    device: torch.device,
    max_sequences: MaxSequences,
    costs: GraphCosts | None,
    require: bool,
    backend: Backend | None,
) -> GraphedStep | None:
    """Wrap a loss function into CUDA graphs, or return None and print why that is not possible."""
    given = sequence_counts(max_sequences)
    backend = CudaBackend() if backend is None else backend
    bare, precision = model, cast("Callable[[], AbstractContextManager[Any]]", contextlib.nullcontext)
    if isinstance(model, _FabricModule):
        bare, precision = model._forward_module, model._strategy.precision.forward_context
    reason = backend.unavailable(device)
    if reason is None and not isinstance(planner, PackPlanner):
        reason = (
            f"the loader's plans come from a {type(planner).__name__}, which does not know the packs to come"
        )
    if reason is None and (found := sharded_by(bare)) is not None:
        reason = f"the model is sharded by {found}, whose gathered parameters have no fixed address"
    if reason is None:
        plan = plan_for(cast("PackPlanner", planner), dp=ranks, costs=costs, given=given)
        rank_zero_info(plan.table())
        reason = plan.problem()
    if reason is not None:
        if require:
            raise ValueError(
                f"capture(require=True), but {reason}. Leave require out to train without graphs."
            )
        rank_zero_info(f"No CUDA graphs: {reason}.")
        return None

    def function(module: nn.Module, batch: Any, *rest: Any) -> Tensor:
        with precision():
            return loss_fn(module, batch)

    return GraphedStep(function, bare, buckets=plan.buckets(), backend=backend, require=require)
