"""``CUDAGraphCallback`` replays ``training_step`` from CUDA graphs and changes nothing else."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any, Literal

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._checks import choice, flags, instance
from lightning_thd._pages import see
from lightning_thd._trainer import logged_step
from lightning_thd.batch import THDBatch
from lightning_thd.callbacks.loggers import accumulates, logs_now
from lightning_thd.callbacks.monitor import THDThroughputMonitor
from lightning_thd.cuda_graph import (
    Bucket,
    CaptureError,
    GraphCosts,
    GraphedStep,
    GraphStats,
    LintReport,
    graph_choice,
    lint_capture,
    make_buckets,
)
from lightning_thd.cuda_graph.backend import Backend, CudaBackend
from lightning_thd.cuda_graph.buckets import BatchShape
from lightning_thd.cuda_graph.compiled import cannot_compile
from lightning_thd.cuda_graph.graph_choice import GraphPlan, MaxSequences, sequence_counts
from lightning_thd.cuda_graph.guards import attribute, sharded_by
from lightning_thd.cuda_graph.optimizer import GraphedOptimizer, cannot_capture_optimizer
from lightning_thd.cuda_graph.recording import RecordingBackend
from lightning_thd.models.preparing import prepare_if_asked
from lightning_thd.packing.planner import Planner
from lightning_thd.parallel.across_ranks import ALONE, all_agree, group_size

__all__ = [
    "Bucket",
    "CUDAGraphCallback",
    "CaptureError",
    "GraphCosts",
    "GraphStats",
    "GraphedStep",
    "LintReport",
    "lint_capture",
    "make_buckets",
]

_OBSERVED = 32  # Without a planner, the shapes to capture are chosen from this many batches.


class CUDAGraphCallback(L.Callback):
    """Replays forward and backward of ``training_step`` from a CUDA graph if the batch fits one.

    Losses, gradients, logs and the Trainer's hooks are unchanged. A batch runs eagerly if it fits no graph,
    if its step cannot be captured, or if its replay is measured to be no faster. The callback logs
    ``cuda_graph/hit_rate``, ``cuda_graph/fallback_<reason>`` and ``cuda_graph/capture_time_s``.
    ``lint_capture(module, batch)`` lists, without a GPU, what prevents a capture.

    Args:
        max_sequences: the number of sequences of each captured shape: one number, or several. ``"auto"``
            chooses one to three numbers from the packs of the data module's planner or, without a planner,
            from the first 32 batches. The table of :class:`GraphPlan` is printed once.
        costs: the step times that ``"auto"`` and the table assume; by default those of a launch-bound step.
        require: raise an error if graphs are not possible or gain nothing, instead of training without them.
        keep_gradients: give every backward pass gradients of its own, as eager training does. By default a
            replay's gradients are the graph's own buffers, which saves their copy and their memory: 14.5 GB
            for 7B parameters in bf16. A ``.grad`` that your code keeps is overwritten at the next replay.
            Sums over microbatches are kept, and hooks of parameters and DDP get copies in any case.
        compile_layers: compile the layers by torch's compiler (inductor) while graphs are captured, which
            leaves about a quarter of the kernel launches. Batches that fit no graph run eagerly and
            uncompiled. The first capture takes up to a minute longer, and seconds if a run before it kept
            ``TORCHINDUCTOR_CACHE_DIR`` and ``TRITON_CACHE_DIR``.
        capture_optimizer: replay the optimizer's update from a graph, too, after gradients that graphs wrote.
            The optimizer is one of torch's with ``fused=True`` or ``capturable=True``. The graph reads the
            learning rate in fp32, so an update differs by at most the rounding of it, 6e-8. Clipping,
            schedules of the learning rate and sums over microbatches stay as they are.
        backend: ``"cuda"``, or ``"recording"`` for tests on a CPU.

    Raises:
        ValueError: if a number of sequences is below 1.
        MisconfigurationException: with ``require=True``, if graphs are not possible or gain nothing; with
            ``compile_layers=True``, if the strategy or the layers do not allow it; with
            ``capture_optimizer=True``, if the optimizer, a GradScaler, several processes, the strategy or
            manual optimization do not allow it.
        CaptureError: with ``require=True``, if a capture fails.
    """

    def __init__(
        self,
        *,
        max_sequences: MaxSequences = "auto",
        costs: GraphCosts | None = None,
        require: bool = False,
        keep_gradients: bool = False,
        compile_layers: bool = False,
        capture_optimizer: bool = False,
        backend: Literal["cuda", "recording"] | Backend = "cuda",
    ) -> None:
        self.given = sequence_counts(max_sequences)
        flags(
            require=require,
            keep_gradients=keep_gradients,
            compile_layers=compile_layers,
            capture_optimizer=capture_optimizer,
        )
        if capture_optimizer and keep_gradients:
            raise ValueError(
                "capture_optimizer=True needs gradients with fixed addresses, and keep_gradients=True gives "
                "every step new ones. Leave one of them out."
            )
        if costs is not None:
            instance(costs, "costs", GraphCosts, advice="Pass GraphCosts(eager=..., graph=...), or None.")
        if not isinstance(backend, Backend):
            choice(backend, "backend", "cuda", "recording")

        self.costs = costs
        self.require = require
        self.keep_gradients = keep_gradients
        self.compile_layers = compile_layers
        self.capture_optimizer = capture_optimizer
        self._backend_choice = backend

        self.plan: GraphPlan | None = None
        self.step: GraphedStep | None = None
        self._idle = False  # whether this fit runs without graphs
        self._seen: list[BatchShape | None] = []  # without a planner: shapes so far; None if none fits
        self._replaced = ExitStack()  # closing it restores the module's own training_step

    @property
    def stats(self) -> GraphStats:
        """Return the numbers of replayed and eager batches since the graphs were planned."""
        return GraphStats() if self.step is None else self.step.stats

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replace ``training_step`` by one that replays graphs, or print why graphs are not possible."""
        self._remove()
        self.step = None
        self.plan = None
        self._seen = []
        self._idle = False
        self._group = ALONE if trainer.world_size == 1 else None

        backend = _backend_of(self._backend_choice)
        missing = backend.unavailable(trainer.strategy.root_device)
        if missing is not None:
            self._stay_idle(missing)
            return

        reason = _unsupported(trainer, pl_module)
        if reason is not None:
            if self.compile_layers:
                raise MisconfigurationException(
                    f"CUDAGraphCallback(compile_layers=True) compiles layers inside graphs, but {reason}. "
                    "Leave it out, and compile layers for eager training: layer.compile(dynamic=True). See "
                    "'Speed' in the documentation."
                )
            if self.capture_optimizer:
                raise MisconfigurationException(
                    "CUDAGraphCallback(capture_optimizer=True) replays updates after gradients that graphs "
                    f"wrote, but {reason}. Leave capture_optimizer out."
                )
            self._stay_idle(reason)
            return

        prepare_if_asked(pl_module)
        if self.compile_layers:
            reason = cannot_compile(pl_module, backend)
            if reason is not None:
                raise MisconfigurationException(f"CUDAGraphCallback: {reason}")

        if self.capture_optimizer:
            _check_optimizer(trainer)

        self._replace_training_step(trainer, pl_module, backend)

    def _replace_training_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, backend: Backend
    ) -> None:
        """Replace ``training_step`` of a module by one that captures graphs once they are chosen."""
        original = pl_module.training_step

        def without_module(module: L.LightningModule, *args: Any) -> Any:
            """Call the original, which is bound; ``GraphedStep`` passes the module as first argument."""
            return original(*args)

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            batch = args[0] if args else None
            if self._idle or kwargs:
                return original(*args, **kwargs)

            if self.step is None and self._choose(trainer, batch):
                assert self.plan is not None
                self.step = GraphedStep(
                    without_module,
                    pl_module,
                    buckets=self.plan.buckets(),
                    backend=backend,
                    require=self.require,
                    keep_gradients=self.keep_gradients,
                    compile_layers=self.compile_layers,
                )
                self.step.group = self._group
                if self.capture_optimizer:
                    self._replaced.enter_context(GraphedOptimizer(trainer.optimizers[0], self.step))
            if self.step is None:  # the batches that the choice needs have not all been seen
                return original(*args)

            capture_s_before = self.stats.capture_s
            output = self.step(*args)
            if self.stats.capture_s > capture_s_before:
                # A capture takes seconds, which say nothing about the speed of training.
                for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set outside __init__
                    if isinstance(callback, THDThroughputMonitor):
                        callback.exclude_step()
            return output

        self._replaced.enter_context(attribute(pl_module, "training_step", training_step))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Log the hit rate and the fallbacks on the steps on which the Trainer logs."""
        if not accumulates(trainer) and logs_now(trainer):
            self._log(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the last numbers, and restore the module's own ``training_step``."""
        self._log(trainer)
        self._remove()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Restore the module's own ``training_step``."""
        self._remove()

    def _choose(self, trainer: L.Trainer, batch: Any) -> bool:
        """Choose buckets once enough batches are known; return whether there are graphs to capture."""
        packs = isinstance(batch, THDBatch)
        if not packs and not self._seen and group_size(self._group) == 1:
            self._stay_idle(f"the batches are {type(batch).__name__}, and graphs need THDBatch")
            return False

        planner = getattr(trainer.train_dataloader, "planner", None)
        if isinstance(planner, Planner) and planner.epochs_alike:
            sampler: Any = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
            ranks = int(sampler.get("num_replicas", 1))  # the number of ranks with different data
            self.plan = graph_choice.plan_for(planner, dp=ranks, costs=self.costs, given=self.given)
        else:
            # Batches that fit no graph are noted too, so that all ranks get here after equally many batches.
            fits = packs and batch.boundaries.eager is None and not batch.extras and batch.weights is None
            self._seen.append(BatchShape.of_batch(batch) if fits else None)
            if len(self._seen) < _OBSERVED:
                return False
            self.plan = graph_choice.plan_observed(self._seen, costs=self.costs, given=self.given)
        rank_zero_info(self.plan.table())

        problem = self.plan.problem()
        # Without a planner, ranks have seen different batches. They capture only if all ranks expect a gain.
        if not all_agree(problem is None, trainer.strategy.root_device, self._group):
            self._stay_idle(problem or "graphs gain nothing on another rank")
            return False
        return True

    def _stay_idle(self, reason: str) -> None:
        """Run this fit without graphs and print why; with ``require=True``, raise instead."""
        self._idle = True
        if self.require:
            raise MisconfigurationException(f"CUDAGraphCallback(require=True), but {reason}.")

        layers = ", and compile_layers=True compiles only inside graphs" if self.compile_layers else ""
        rank_zero_info(f"CUDAGraphCallback is idle: {reason}{layers}. {see('graphs')}")

    def _log(self, trainer: L.Trainer) -> None:
        if self.step is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(self.stats.metrics(), step=logged_step(trainer))

    def _remove(self) -> None:
        """Restore the module's own ``training_step`` and close the graphs; ``stats`` keeps their numbers."""
        self._replaced.close()
        if self.step is not None:
            self.step.close()


def _backend_of(named: str | Backend) -> Backend:
    """Return a backend that was passed, or a new one of a name."""
    if isinstance(named, Backend):
        return named
    return CudaBackend() if named == "cuda" else RecordingBackend()


def _check_optimizer(trainer: L.Trainer) -> None:
    """Raise if the optimizer's step cannot be replayed in this fit."""
    if trainer.world_size > 1:
        raise MisconfigurationException(
            "CUDAGraphCallback(capture_optimizer=True) needs one process, and the job has "
            f"{trainer.world_size}, which exchange gradients in new memory. Leave capture_optimizer out."
        )

    for optimizer in trainer.optimizers:
        reason = cannot_capture_optimizer(optimizer)
        if reason is not None:
            raise MisconfigurationException(f"CUDAGraphCallback: {reason}")

        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and any(group.get("fused") for group in optimizer.param_groups):
            raise MisconfigurationException(
                f"CUDAGraphCallback(capture_optimizer=True): precision={trainer.precision!r} gives a fused "
                "optimizer another scale in new memory at every step. Pass capturable=True, fused=False to "
                "the optimizer, or train in bf16."
            )


def _unsupported(trainer: L.Trainer, module: L.LightningModule) -> str | None:
    """Return why the strategy or the module cannot run from graphs on any device, or None."""
    if not module.automatic_optimization:
        return (
            "the module has automatic_optimization=False, so training_step contains the optimizer. Wrap the "
            "part that computes the loss: GraphedStep(function, module, buckets=...)"
        )

    stages = getattr(trainer.strategy, "pipeline_parallel_size", 1)
    if stages != 1:
        return f"pipeline_parallel_size={stages!r} runs stages by a schedule, outside of training_step"

    shards = getattr(trainer.strategy, "context_parallel_size", 1)
    if shards != 1:
        return f"context_parallel_size={shards!r} exchanges keys whose number depends on the lengths"

    ranks = getattr(trainer.strategy, "expert_parallel_size", 1)
    if ranks != 1:
        return f"expert_parallel_size={ranks!r} reads in every layer, from the device, where its tokens go"

    # strategy.model is the wrapped module, such as FSDP1's, once the strategy has set it up.
    sharding = sharded_by(module) or sharded_by(trainer.strategy.model or module)
    if sharding is not None:
        return f"the module is sharded by {sharding}, whose gathered parameters have no fixed address"
    return None
