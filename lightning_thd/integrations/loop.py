"""A step of microbatches in a loop without a Lightning Trainer: gradients, the step's loss, and its metrics.

What Accelerate and Fabric have in common. Each hands in how it goes backward, how it leaves gradients
unsynchronised, and where it logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_thd._checks import described, instance, whole_number
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.callbacks.meter import Hardware, Meter
from lightning_thd.callbacks.module_flops import find_model
from lightning_thd.cuda_graph import GraphCosts, GraphedStep
from lightning_thd.cuda_graph.capture.backend import Backend
from lightning_thd.data import THDDataModule
from lightning_thd.data.loader import THDLoader
from lightning_thd.data.streams import StreamLoader
from lightning_thd.flops.rates import check_peak
from lightning_thd.integrations.context import Shared
from lightning_thd.integrations.evaluation import LossFn, mean_loss
from lightning_thd.integrations.graphs import MaxSequences, graphed_loss
from lightning_thd.integrations.hf_steps import sum_over_packs
from lightning_thd.loss import causal_lm_loss
from lightning_thd.precision.convert import in_low_precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Holds the functions and sizes that a framework provides to a ``PackedLoop``.

    Attributes:
        backward: backpropagates a loss, without dividing it.
        no_sync: leaves the gradients of a model to this rank.
        log: logs metrics at an optimizer step.
        device: of this rank.
        devices: of the whole job.
        shared: which packs this rank reads, and which part of them it runs.
        precision: as Lightning names it, "32-true" or "bf16-mixed".
    """

    backward: Callable[[Tensor], None]
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]]
    log: Callable[[dict[str, float], int], None]
    device: torch.device
    devices: int
    shared: Shared
    precision: str


class PackedLoop:
    """Holds the prepared model, loader and optimizer, and runs whole steps; ``prepare_thd`` returns it.

    Unpacks like the tuple ``accelerator.prepare`` returns: ``model, loader, optimizer = prepare_thd(...)``,
    and the scheduler last where one was given.

    Attributes:
        model: prepared by the host.
        loader: ``THDStep`` after ``THDStep``; its position is saved and restored with the host's state.
        optimizer: prepared by the host; a list where several were given.
        scheduler: prepared by the host, or None.
        global_step: steps run so far.
        latest: the metrics of the last interval.
    """

    def __init__(
        self,
        host: Host,
        model: nn.Module,
        loader: THDLoader | StreamLoader,
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
        whole_number(warmup_steps, "warmup_steps", advice="It is the number of steps left out of the rates.")
        if not isinstance(peak, str) or peak not in ("auto", "measure"):
            check_peak(peak)
        self.model, self.loader, self.optimizer, self.scheduler = model, loader, optimizer, scheduler
        self.global_step = 0
        self.latest: dict[str, float] = {}
        self._host, self._loss_fn = host, in_low_precision(loss_fn, model, group=host.shared.data_group)
        self._every, self._warmup = log_every_n_steps, warmup_steps
        self._graphed: GraphedStep | None = None
        self._captured_s = 0.0
        shared = host.shared
        hardware = Hardware.of(
            model, host.device, peak, host.precision, group=shared.data_group, devices=host.devices
        )
        self._meter = Meter("train", "training", clock, hardware, find_model(model))

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

        Raises:
            TypeError: for what is no step of the loader.
        """
        instance(
            step, "step", THDStep, advice="Pass what loop.loader gives; THDStep([batch]) holds one pack."
        )
        self._meter.resume()
        step = step.to(self._host.device)
        loss = sum_over_packs(step, self._host.no_sync, self.model, lambda batch: self._run(batch, len(step)))
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
            shared = self._host.shared
            data.attach(rank=shared.rank, ranks=shared.ranks, model=self.model, alignment=shared.alignment)
            data.setup("validate")
            batches = data.val_dataloader()
        running = self._meter.pause()
        loss, tokens = mean_loss(
            self._loss_fn,
            self.model,
            batches,
            device=self._host.device,
            group=self._host.shared.data_group,
            cut=self._host.shared.cut,
        )
        if running:
            self._meter.resume()
        metrics = {f"{name}/loss": loss, f"{name}/loss_tokens": float(tokens)}
        self._host.log(metrics, self.global_step)
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

        What ``CUDAGraphCallback`` does under Lightning. Losses and gradients stay what they are; what fits no
        graph runs eagerly, and hit rate and reasons are logged with the loop's other metrics.

        Args:
            max_sequences: sequences of each captured shape, one number or several; "auto" chooses them from
                the packs the planner will make.
            costs: what "auto" reckons with; those of a launch-bound step when absent.
            require: raise where graphs are not possible, in place of training without them.
            backend: CUDA graphs by default; a ``RecordingBackend`` for tests on a CPU.

        Returns:
            The graphs, with their ``stats``; None where training goes on eagerly, and a line says why.

        Raises:
            ValueError: for numbers of sequences below 1, and with ``require`` where there can be no graphs.
        """
        if self._host.shared.size > 1:
            raise ValueError(
                f"capture() with context_parallel_size={self._host.shared.size}: graphs of shared packs run "
                "under Lightning. Use CUDAGraphCallback with THDDDPStrategy, or leave capture() out."
            )
        self._graphed = graphed_loss(
            self._loss_fn,
            self.model,
            getattr(self.loader, "planner", None),
            ranks=self._host.shared.ranks,
            device=self._host.device,
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
        batch = self._host.shared.cut(batch)
        loss = self._loss_fn(self.model, batch) if self._graphed is None else self._graphed(batch)
        self._host.shared.check(batch)
        loss = loss / microbatches
        self._host.backward(loss)
        return loss.detach()

    def _end_step(self) -> None:
        self._meter.end_step()
        self.global_step += 1
        spent_s = 0.0 if self._graphed is None else self._graphed.stats.capture_s
        if self.global_step <= self._warmup or spent_s > self._captured_s:
            self._meter.leave_out()
        self._captured_s = spent_s
        if self.global_step % self._every == 0:
            self.latest = self._meter.close()
            if self._graphed is not None:
                self.latest |= self._graphed.stats.metrics()
            self._host.log(self.latest, self.global_step)


def listed(optimizer: Any, who: str, name: str) -> list[Any]:
    """Return one optimizer or several as a list.

    Raises:
        TypeError: for anything else.
    """
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for each in given:
        if not hasattr(each, "param_groups"):
            raise TypeError(
                f"{who} got {described(each)} as {name}; wanted a torch.optim.Optimizer over the model's "
                "parameters, or a list of such."
            )
    return given


def as_loader(data: object, model: nn.Module, shared: Shared, *, accumulate: int) -> THDLoader | StreamLoader:
    """Return the loader of training steps of a data module, or the given loader after a check.

    Raises:
        ValueError: for a loader of another kind, which would split, dispatch or re-batch packs.
    """
    if isinstance(data, THDDataModule):
        data.attach(
            rank=shared.rank,
            ranks=shared.ranks,
            accumulate=accumulate,
            model=model,
            alignment=shared.alignment,
        )
        data.prepare_data()
        data.setup("fit")
        return data.train_steps()
    if isinstance(data, THDLoader | StreamLoader) and shared.size > 1:
        raise ValueError(
            f"prepare_thd got a ready {type(data).__name__} with context_parallel_size={shared.size}: which "
            "packs it reads and how they are padded was decided before. Give the THDDataModule itself."
        )
    if isinstance(data, THDLoader | StreamLoader):
        return data
    raise ValueError(
        f"prepare_thd got data of type {type(data).__name__}, wanted a THDDataModule, or what its "
        "train_steps() returns. Another loader would split packs, dispatch them to other ranks or stack "
        "them. Write THDDataModule(dataset, capacity=...) in its place."
    )
