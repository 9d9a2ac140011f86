"""A step of microbatches in an Accelerate or Fabric loop -> gradients, the step's loss and metrics."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from lightning.fabric.wrappers import is_wrapped
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_thd._checks import flags, instance, whole_number
from lightning_thd._private import private_of
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.batch.noted import SCALES, FirstStep, NotedBatch, refuse_unread, warn_of_scale
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
from lightning_thd.data.trainer_link import check_step
from lightning_thd.flops.model import FlopsModel, checked_flops
from lightning_thd.flops.rates import check_peak
from lightning_thd.loss import causal_lm_loss
from lightning_thd.loss.router_balance import RouterBalance, checked_balance
from lightning_thd.packing.planner import Planner
from lightning_thd.parallel.across_ranks import ALONE, communication_device, group_size
from lightning_thd.precision.convert import in_low_precision
from lightning_thd.strategies.guards import (
    refuse_unused_layout,
)
from lightning_thd.strategies.pack_cut import PackReader

LossFn: TypeAlias = Callable[[nn.Module, THDBatch], Tensor]
# The names of a loop's loss, and of the argument for models without attention, in messages.
_LOSS_FN = "loss_fn"
_OPTION = "needs_boundaries=False in prepare_fabric or prepare_thd"


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """The functions and sizes that Accelerate or Fabric provides to a ``PackedLoop``."""

    backward: Callable[[Tensor], None]  # must not divide the loss
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]]  # leaves gradients unreduced
    log: Callable[[dict[str, float], int], None]  # takes metrics and the number of steps
    device: torch.device
    devices: int  # devices of the whole job
    reader: PackReader
    precision: str  # Lightning's name of the precision, such as "bf16-mixed"


class PackedLoop:
    """Holds the prepared model, loader and optimizer, and runs whole steps; ``prepare_thd`` returns it.

    Attributes:
        model: the model, prepared by Accelerate or Fabric.
        loader: a loader that yields ``THDStep`` objects; checkpoints hold its position.
        optimizer: the prepared optimizer; a list if several were given.
        scheduler: the prepared scheduler, or None.
        global_step: optimizer steps run so far.
        latest: the metrics of the last logging interval.
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
        flops_model: FlopsModel | None = None,
        log_every_n_steps: int = 50,
        needs_boundaries: bool = True,
        warmup_steps: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        whole_number(log_every_n_steps, "log_every_n_steps", least=1, advice="Log every 1 or more steps.")
        check_peak(peak, named=True)
        self.model = model
        self.loader = loader
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.global_step = 0
        self.latest: dict[str, float] = {}
        self._engine = engine
        self._needs_boundaries = needs_boundaries
        self._every = log_every_n_steps
        self._warmup = warmup_steps  # how many more steps are left out of the rates
        self._graphed: GraphedStep | None = None
        self._captured_s = 0.0  # seconds of captures so far

        reader = engine.reader
        group = None if reader.data_group is ALONE else reader.data_group
        self._loss_fn = in_low_precision(loss_fn, model, group=group)
        # In the first packs, this also checks what ``loss_fn`` asks of a batch.
        self._train_loss: LossFn = FirstStep(
            self._loss_fn,
            what=_LOSS_FN,
            option=_OPTION if needs_boundaries else None,
            passed=self._end_checks,
            look=functools.partial(warn_of_scale, what=_LOSS_FN),
        )

        hardware = Hardware.of(
            model, engine.device, peak, engine.precision, group=reader.data_group, devices=engine.devices
        )
        self._flops = ModuleFlops(model, checked_flops(flops_model), sharded=reader.size > 1)
        self._meter = Meter("train", "training", clock, hardware)
        self._meter.use(self._flops)
        self._meter.experts = expert_load(model, ALONE if engine.devices == 1 else None)
        self._meter.capacity = loader.capacity
        loader.report_run()  # from now on, a step that was fetched but not run comes first after a resume

    def backward(self, step: THDStep) -> Tensor:
        """Run every microbatch of a step forward and backward, with gradients synchronised only in the last.

        Args:
            step: a step from the loader, on any device.

        Returns:
            ``[]``, detached, this rank's share of the step's loss. The mean of the shares over the
            data-parallel ranks is the step's loss: with ``causal_lm_loss``, a mean over all loss tokens.
        """
        if self._flops.outdated:  # weights were frozen or unfrozen since the last step
            self._meter.use(self._flops)
            self._meter.reduce(whole=True)
            self._flops.follow()

        self._meter.resume()
        step = step.to(self._engine.device)
        self._flops.begin("train", step)

        try:
            loss = sum_over_packs(
                step, self._engine.no_sync, self.model, lambda batch: self._run(batch, len(step))
            )
        except BaseException:
            self._flops.stop()  # else torch's counter would see what the process runs next
            raise

        self._meter.add(step, self._flops.calls())
        self.loader.report_run()
        self._end_step()
        return loss

    def evaluate(self, data: THDDataModule | Iterable[THDBatch], *, name: str = "val") -> dict[str, float]:
        """Return and log the mean loss over all loss tokens of an evaluation set; every rank must call it.

        A loss that reads ``batch.sequence_scale``, or the own loss of a classifier, is a mean over sequences.

        Args:
            data: a ``THDDataModule(val=...)``, which gives each rank its packs, or this rank's batches.
            name: prefix of the keys: ``val/loss`` and ``val/loss_tokens``. All ranks get the same values.
        """
        batches: Any = data
        if isinstance(data, THDDataModule):
            accumulate = data._attached.accumulate  # the data module may be that of training
            attach(data, self.model, self._engine.reader, accumulate=accumulate, device=self._engine.device)
            data.setup("validate")
            batches = data.val_dataloader()
            if isinstance(batches, list):
                raise ValueError(
                    "evaluate() runs one set, but val= names several. Pass them one by one, with name=."
                )

        reader = self._engine.reader
        options: Any = {"device": self._engine.device, "group": reader.data_group, "cut": reader.cut}
        if self._needs_boundaries:
            options["judge"] = functools.partial(refuse_unread, what=_LOSS_FN, option=_OPTION)
        was_running = self._meter.pause()
        loss, tokens = mean_loss(self._loss_fn, self.model, batches, **options)
        if was_running:
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
        compile_layers: bool = False,
        backend: Backend | None = None,
    ) -> GraphedStep | None:
        """Capture CUDA graphs and replay them from now on for every microbatch that fits one.

        Losses and gradients are unchanged, and a microbatch that fits no graph runs eagerly. Hit rate and
        reasons are logged with the loop's other metrics. The arguments are those of ``CUDAGraphCallback``.

        Returns:
            The graphs, with their ``stats``; None if training continues eagerly, with the reason printed.

        Raises:
            ValueError: under context parallelism, for counts below 1, for layers that cannot be compiled, or
                if required graphs are impossible.
        """
        size = self._engine.reader.size
        if size > 1:
            raise ValueError(
                f"capture() with context_parallel_size={size}: ranks that share packs exchange keys whose "
                "number depends on the lengths. Leave capture() out."
            )
        counts = sequence_counts(max_sequences)
        planner = getattr(self.loader, "planner", None)
        if backend is None:
            backend = CudaBackend()
        bare: Any = self.model
        precision: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        if is_wrapped(bare):
            precision = bare._strategy.precision.forward_context
            bare = private_of(bare, "lightning.Fabric.setup._forward_module")

        reason = backend.unavailable(self._engine.device) or _why_no_graphs(bare, planner)
        if reason is None:
            ranks = self._engine.reader.ranks
            plan = plan_for(cast("Planner", planner), dp=ranks, costs=costs, given=counts)
            rank_zero_info(plan.table())
            reason = plan.problem()
        if reason is not None:
            if require:
                raise ValueError(
                    f"capture(require=True), but {reason}. Leave require out to train without graphs."
                )
            if compile_layers:
                reason += ", and compile_layers=True compiles only inside graphs"
            rank_zero_info(f"No CUDA graphs: {reason}.")
            return None

        def function(module: nn.Module, batch: Any, *rest: Any) -> Tensor:
            with precision():
                return self._train_loss(module, batch)

        self._graphed = GraphedStep(
            function,
            bare,
            buckets=plan.buckets(),
            backend=backend,
            require=require,
            compile_layers=compile_layers,
        )
        self._graphed.group = ALONE if self._engine.devices == 1 else None
        return self._graphed

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the throughput totals of all ranks; every rank must call it."""
        self._meter.pause()
        self._meter.use(self._flops)
        self._meter.reduce(whole=True)
        return {"global_step": self.global_step, "throughput": self._meter.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of steps and the throughput totals from a checkpoint."""
        self.global_step = int(state["global_step"])
        self._meter.load(state["throughput"])

    def _run(self, batch: THDBatch, microbatches: int) -> Tensor:
        """Run a microbatch forward and backward; return its part of the step's loss."""
        batch = self._engine.reader.cut(batch)
        loss = self._train_loss(self.model, batch) if self._graphed is None else self._graphed(batch)
        refuse_unused_layout(batch)
        loss = loss / microbatches
        self._engine.backward(loss)
        return loss.detach()

    def _end_checks(self) -> None:
        """Run the loss itself from now on, without notes of what it reads."""
        self._train_loss = self._loss_fn

    def _end_step(self) -> None:
        """Count a finished step, and log if a log is due."""
        capture_s = 0.0 if self._graphed is None else self._graphed.stats.capture_s
        has_captured = capture_s > self._captured_s
        self._captured_s = capture_s
        has_counted = self._flops.end("train", self._meter.steps[-1], discard=has_captured)
        self._meter.end_step(self._flops.products)
        self.global_step += 1

        self._warmup -= 1  # counted from this process's start, not from the checkpoint's step 0
        if self._warmup >= 0 or has_captured or has_counted:  # a step that did more than train
            self._meter.leave_out()
        if self.global_step % self._every == 0:
            self._meter.use(self._flops)
            self.latest = self._meter.close()
            self._flops.follow()  # weights may have been added
            if self._graphed is not None:
                self.latest |= self._graphed.stats.metrics()
            self._engine.log(for_loggers(self.latest), self.global_step)


def _why_no_graphs(module: nn.Module, planner: object) -> str | None:
    """Return why the steps of a loop cannot be captured on any device, or None."""
    if planner is None:
        return "the loader reads a stream, which cannot list future packs"
    if not isinstance(planner, Planner) or not planner.epochs_alike:
        return f"the loader is planned by a {type(planner).__name__}, which cannot list future packs"
    sharding = sharded_by(module)
    if sharding is not None:
        return f"the model is sharded by {sharding}, whose gathered parameters have no fixed address"
    return None


def attach(
    data: THDDataModule, model: nn.Module, reader: PackReader, *, accumulate: int, device: torch.device
) -> None:
    """Attach a data module with this rank's place among those that read, the model, and packs' alignment."""
    data.attach(
        rank=reader.rank,
        ranks=reader.ranks,
        model=model,
        alignment=reader.alignment,
        accumulate=accumulate,
        device=device,
    )


def as_loader(
    data: object,
    model: nn.Module,
    reader: PackReader,
    *,
    accumulate: int,
    device: torch.device,
    name: str = "accumulate",
) -> THDLoader:
    """Return the loader of training steps of a data module; return a given packed loader unchanged.

    ``name`` is what the host calls ``accumulate``, for messages.
    """
    if isinstance(data, THDDataModule):
        accumulate = whole_number(accumulate, name, least=1, advice="1 is a step for every batch.")
        check_step(data.global_batch, ranks=reader.ranks, accumulate=accumulate, name=name)
        attach(data, model, reader, accumulate=accumulate, device=device)
        data.prepare_data()
        data.setup("fit")
        return data.train_steps()

    if not isinstance(data, THDLoader):
        raise ValueError(
            f"The data have the type {type(data).__name__}; wanted a THDDataModule, or the loader that "
            "its train_steps() returns. Write THDDataModule(dataset, capacity=...) instead."
        )

    if reader.size > 1:
        raise ValueError(
            f"context_parallel_size={reader.size}, but the given {type(data).__name__} was planned without "
            "context parallelism. Pass the THDDataModule itself."
        )
    return data


def asks_boundaries(data: object, needs_boundaries: bool) -> bool:
    """Return whether to refuse models that ask for no boundaries: unless the loop or its data say not to."""
    flags(needs_boundaries=needs_boundaries)
    return needs_boundaries and bool(getattr(data, "needs_boundaries", True))


def sum_over_packs(
    step: THDStep,
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]],
    model: nn.Module,
    run: Callable[[THDBatch], Tensor],
) -> Tensor:
    """Run the microbatches of a step, all but the last under ``no_sync``, and sum their losses."""
    *first, last = step.microbatches
    losses = []
    for batch in first:
        with no_sync(model):
            losses.append(run(batch))
    losses.append(run(last))
    return torch.stack(losses).sum()


def balancing(loss_fn: LossFn, router_balance: RouterBalance | None) -> LossFn:
    """Return ``loss_fn`` with ``router_balance``; refuse other losses unless that is None."""
    if checked_balance(router_balance) is None:
        return loss_fn
    if loss_fn is not causal_lm_loss:
        raise ValueError(
            f"router_balance={router_balance!r} is an argument of causal_lm_loss. Leave loss_fn out."
        )
    return functools.partial(causal_lm_loss, router_balance=router_balance)


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Evaluate a model without gradients inside this context, then restore the mode of each module."""
    was_training = model.training
    modes = [(child, child.training) for child in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)  # some modules override train() to do more than set a flag
        for child, mode in modes:  # keep modules in eval() that the user put there
            child.training = mode


def _weight_of_sequences(batch: THDBatch) -> float | None:
    """Return a batch's weight in a mean over sequences, one for each label; None if it is unknown."""
    if "labels" in batch.extras:
        return float(len(batch.lengths))
    scale = batch.sequence_scale
    if scale is None:
        return None
    return 1 / scale if scale else 0.0


def mean_loss(
    loss_fn: LossFn,
    model: nn.Module,
    batches: Iterable[THDBatch],  # this rank's batches; over all ranks, every sequence occurs once
    *,
    device: torch.device,
    group: Any = None,
    seen: Callable[[THDBatch], None] = lambda batch: None,  # called with a batch before it runs
    cut: Callable[[THDBatch], THDBatch] = lambda batch: batch,  # keeps this rank's part of a batch
    judge: Callable[[NotedBatch], None] = lambda batch: None,  # called with a batch after it ran
) -> tuple[float, int]:
    """Return the mean loss of a set and the number of its loss tokens; a collective.

    A loss that multiplies by ``batch.loss_scale`` is averaged over loss tokens. One that multiplies by
    ``batch.sequence_scale``, and a classifier's own mean, are averaged over sequences.
    """
    means = list[Tensor]()
    weights = list[float]()
    loss_tokens = 0
    with evaluating(model):
        for batch in batches:
            instance(batch, "A batch of evaluate()", THDBatch, advice="Pass THDDataModule(..., val=...).")
            moved = batch.to(device)
            seen(moved)

            token_weight = float(batch.loss_tokens)
            if batch.weights is not None:
                token_weight = float(batch.weights.sum(dtype=torch.float64))
            sequence_weight = _weight_of_sequences(batch)
            # The batch's mean, because a balancing loss is a mean too; ``weights`` weigh the sum of both.
            scaled = moved.replace(
                loss_scale=1 / (token_weight or 1.0),
                sequence_scale=None if sequence_weight is None else 1 / (sequence_weight or 1.0),
                token_scale=0.0,
            )
            noted = NotedBatch.of(cut(scaled))
            means.append(loss_fn(model, noted).detach())
            judge(noted)

            # A classifier's own loss reads no scale: it is the mean over the batch's labels.
            is_classifiers = "labels" in batch.extras and not noted.read & SCALES
            is_by_sequence = is_classifiers or "sequence_scale" in noted.read
            if is_by_sequence and sequence_weight is not None:
                weights.append(sequence_weight)
            else:
                weights.append(token_weight)
            loss_tokens += batch.loss_tokens

    on_host = torch.stack(means).tolist() if means else []  # read once, after all batches
    rows = [(mean * weight, weight, 0.0) for mean, weight in zip(on_host, weights, strict=True)]
    sums = torch.tensor([(0.0, 0.0, loss_tokens), *rows], dtype=torch.float64).sum(0)
    if group_size(group) > 1:
        sums = sums.to(communication_device(group, device))
        dist.all_reduce(sums, group=group)
    loss, weight, tokens = sums.tolist()
    return loss / weight if weight else math.nan, int(tokens)
