"""``CUDAGraphCallback``: ``training_step`` replayed from CUDA graphs, with nothing else changed."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._checks import choice, flags
from lightning_thd.batch import THDBatch
from lightning_thd.callbacks._graph_host import (
    leave_out_of_rates,
    planner_of,
    unsupported,
)
from lightning_thd.cuda_graph import (
    Bucket,
    CaptureError,
    GraphCosts,
    GraphedStep,
    GraphStats,
    LintReport,
    lint_capture,
    make_buckets,
)
from lightning_thd.cuda_graph.capture.backend import Backend, CudaBackend
from lightning_thd.cuda_graph.capture.recording import RecordingBackend
from lightning_thd.cuda_graph.capture.subject import Example, Subject
from lightning_thd.cuda_graph.choice.measuring import measured_costs
from lightning_thd.cuda_graph.choice.plan import (
    GraphPlan,
    needed_sequences,
    plan_graphs,
    problem_of,
    sequence_counts,
)
from lightning_thd.cuda_graph.choice.sampling import longest_sequence, sample_layouts
from lightning_thd.cuda_graph.graphed_step import Scope, check_scope
from lightning_thd.cuda_graph.shapes.buckets import Layout
from lightning_thd.cuda_graph.shapes.static_shard import Cut
from lightning_thd.packing import PackPlanner
from lightning_thd.parallel.agreement import all_agree

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

# Until 0.3 modules that stood in a folder of this name are found through ``_moved``.
__path__: list[str] = []

# Batches looked at where no planner tells what will come.
_OBSERVED = 32
# Slots of a bucket are rounded up to this where they are only observed.
_ROUND = 128


class CUDAGraphCallback(L.Callback):
    """Replays forward and backward of ``training_step`` from CUDA graphs wherever a batch fits one.

    Losses, gradients, hooks and logs stay what they are without it. A batch that fits no graph, and a step
    that cannot be captured, run eagerly; which and why is logged as ``cuda_graph/hit_rate``,
    ``cuda_graph/fallback_<reason>`` and ``cuda_graph/capture_time_s``. Where a replay is no faster, it is
    switched off. ``lint_capture(module, batch)`` tells beforehand, without a GPU, what stands in the way.

    Args:
        max_sequences: sequences of each captured shape, one number or several; ``"auto"`` chooses one to
            three from the packs that the data module's planner will make (from the first 32 batches where
            there is none) and prints the table of :class:`GraphPlan` once.
        scope: ``"step"`` captures the whole step; ``"layers"`` the ``layers`` only, so that the rest of the
            step may read the host.
        layers: names of submodules for ``scope="layers"``, for example ``("self_attn", "mamba")``.
        costs: what ``"auto"`` reckons with; ``"measure"`` measures it on the device.
        require: raise where graphs are not possible, in place of training without them.
        backend: ``"cuda"``, or ``"recording"`` for tests on a CPU.

    Raises:
        ValueError: for numbers of sequences below 1.
        MisconfigurationException: with ``require=True``, for a Trainer that graphs cannot serve.
    """

    def __init__(
        self,
        *,
        max_sequences: int | Sequence[int] | Literal["auto"] = "auto",
        scope: Scope = "step",
        layers: Sequence[str] = (),
        costs: GraphCosts | Literal["measure"] = "measure",
        require: bool = False,
        backend: Literal["cuda", "recording"] | Backend = "cuda",
    ) -> None:
        self.given = sequence_counts(max_sequences)
        check_scope(scope, layers)
        flags(require=require)
        if not isinstance(costs, GraphCosts):
            choice(costs, "costs", "measure")
        if not isinstance(backend, Backend):
            choice(backend, "backend", "cuda", "recording")
        self.scope: Scope = scope
        self.layers = tuple(layers)
        self.costs, self.require = costs, require
        self._backend_choice = backend
        self.plan: GraphPlan | None = None
        self.step: GraphedStep | None = None
        self._idle = False
        self._measuring_s = 0.0
        self._seen: list[Layout] = []
        self._installed: tuple[L.LightningModule, Any] | None = None
        self._planner: tuple[PackPlanner, int] | None = None

    @property
    def stats(self) -> GraphStats:
        """Return the counts of replayed and eager batches so far."""
        return GraphStats() if self.step is None else self.step.stats

    @property
    def spent_s(self) -> float:
        """Return the seconds spent on capturing graphs and on measuring their speed-up."""
        return self._measuring_s + self.stats.capture_s

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replace ``training_step`` by one that replays graphs, or print why none are possible."""
        self._remove()
        self.step, self.plan, self._seen, self._idle, self._measuring_s = None, None, [], False, 0.0
        backend = self._make_backend()
        reason = unsupported(trainer, pl_module, backend)
        if reason is not None:
            self._stay_idle(reason)
            return
        self._planner = planner_of(trainer)
        original = pl_module.training_step

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            batch = args[0] if args else None
            if self._idle or kwargs:
                return original(*args, **kwargs)
            spent = self.spent_s
            if self.step is None:
                self._plan_step(backend, pl_module, original, batch, args[1:])
            output = original(*args) if self.step is None else self.step(*args)
            if self.spent_s > spent:
                leave_out_of_rates(trainer)
            return output

        self._installed = (pl_module, pl_module.__dict__.get("training_step"))
        pl_module.__dict__["training_step"] = training_step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Log hit rate and fallbacks at the steps at which the Trainer logs."""
        if self._installed is not None and trainer._logger_connector.should_update_logs:
            self._log(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the module's own ``training_step``."""
        if self._installed is not None:
            self._log(trainer)
        self._remove()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Restore the module's own ``training_step``."""
        self._remove()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the module's own ``training_step``, however the fit ended."""
        self._remove()

    def _plan_step(
        self,
        backend: Backend,
        module: L.LightningModule,
        original: Callable[..., Any],
        batch: Any,
        rest: tuple[Any, ...],
    ) -> None:
        """Choose buckets and build the graphed step once enough batches are known."""
        found = self._needs(batch)
        if found is None:
            return
        needs, slots, longest = found
        function = _with_module(original)
        costs: GraphCosts | None = self.costs if isinstance(self.costs, GraphCosts) else None
        if costs is None and not self.given and self.scope == "step":
            started = time.perf_counter()
            subject = Subject(function=function, module=module, backend=backend)
            costs = measured_costs(
                subject, Example(batch, rest), needs=needs, slots=slots, max_seqlen=longest
            )
            self._measuring_s = time.perf_counter() - started
        self.plan = plan_graphs(needs, slots=slots, max_seqlen=longest, costs=costs, given=self.given)
        rank_zero_info(self.plan.table())
        problem = problem_of(self.plan, self.given)
        # Without a planner ranks have seen different batches, and capture is for all or none.
        if not all_agree(problem is None, batch.input_ids.device):
            self._stay_idle(problem or "another rank has no use for graphs, and says why")
            return
        self.step = GraphedStep(
            function,
            module,
            buckets=self.plan.buckets(),
            backend=backend,
            scope=self.scope,
            layers=self.layers,
            require=self.require,
        )

    def _needs(self, batch: Any) -> tuple[Any, int, int] | None:
        """Return the sequences needed a batch, slots and longest sequence; None if too few batches."""
        if not isinstance(batch, THDBatch):
            if not self._seen:
                self._stay_idle(f"the batches are {type(batch).__name__}, and graphs are for THDBatch")
            return None
        if self._planner is not None:
            planner, dp = self._planner
            slots, longest = planner.slots.usable, longest_sequence(planner)
            return needed_sequences(sample_layouts(planner, dp=dp), slots, longest), slots, longest
        self._seen.append(Layout.of_batch(batch))
        if len(self._seen) < _OBSERVED:
            return None
        cut = Cut.of(batch)
        multiple = math.lcm(_ROUND, 1 if cut is None else cut.multiple)
        slots = -(-max(x.slots for x in self._seen) // multiple) * multiple
        longest = min(slots, -(-max(x.max_seqlen for x in self._seen) // multiple) * multiple)
        return needed_sequences(self._seen, slots, longest), slots, longest

    def _stay_idle(self, reason: str) -> None:
        self._idle = True
        if self.require:
            raise MisconfigurationException(f"CUDAGraphCallback(require=True), but {reason}.")
        rank_zero_info(f"CUDAGraphCallback is idle: {reason}.")

    def _make_backend(self) -> Backend:
        if self._backend_choice == "cuda":
            return CudaBackend()
        if self._backend_choice == "recording":
            return RecordingBackend()
        return self._backend_choice

    def _log(self, trainer: L.Trainer) -> None:
        if self.step is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(self.stats.metrics(), step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _remove(self) -> None:
        if self._installed is None:
            return
        module, before = self._installed
        self._installed = None
        if before is None:
            module.__dict__.pop("training_step", None)
        else:
            module.__dict__["training_step"] = before
        if self.step is not None:
            self.step.close()


def _with_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bound method so that it ignores the module that ``GraphedStep`` passes first."""
    return lambda module, *args: original(*args)
