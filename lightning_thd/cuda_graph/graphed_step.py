"""A training step -> the same step, replayed from captured graphs wherever the batch fits one.

For raw loops and Accelerate use it directly; ``CUDAGraphCallback`` puts it around ``training_step``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_thd._checks import described, flags, instance
from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph.capture.backend import Backend, CudaBackend
from lightning_thd.cuda_graph.capture.captured import CapturedStep
from lightning_thd.cuda_graph.capture.subject import Example, StepFunction, Subject
from lightning_thd.cuda_graph.errors import CaptureError, as_capture_error
from lightning_thd.cuda_graph.graph_set import GraphSet
from lightning_thd.cuda_graph.limits.support import refuse_sharded
from lightning_thd.cuda_graph.shapes.buckets import Bucket, choose
from lightning_thd.cuda_graph.stats import GraphStats

Scope = Literal["step", "layers"]
# Parameters that keep moving (a swap every few steps) make every capture worthless.
_MOST_CAPTURES = 4


def check_scope(scope: object, layers: Any) -> None:
    """Refuse an unknown scope, and one that its layers contradict.

    Raises:
        TypeError: for layers that are no list of names.
        ValueError: for another scope, one of layers without names, one of steps with them.
    """
    if not isinstance(scope, str) or scope not in ("step", "layers"):
        raise ValueError(f"scope={scope!r}: wanted 'step' or 'layers'.")
    instance(layers, "layers", list, tuple, advice="Pass names of layers.")
    names = tuple(layers)
    if (scope == "layers") != bool(names):
        raise ValueError(
            f"scope={scope!r} with layers={names}: scope='layers' needs names of layers to capture, for "
            "example layers=('self_attn',), and scope='step' takes none."
        )


class GraphedStep:
    """Calls ``function(module, batch, *rest)``, from a captured graph where the batch fits a bucket.

    All buckets are captured in the first call with gradients, on dummy batches. Whatever cannot be replayed
    exactly runs eagerly, and is counted in ``stats``. Shards of context parallelism are captured with their
    collectives, if packs are cut by ``dual_chunk``; buckets are those of whole packs.

    Args:
        function: gives the loss, or a dict with it, for example ``causal_lm_loss``. Called with the bare
            module when ``module`` is wrapped in DistributedDataParallel.
        module: what is trained.
        buckets: shapes to capture. None are worth it without ``plan``.
        backend: CUDA graphs by default.
        scope: ``step`` captures forward and backward of the whole call; ``layers`` only the layers named in
            ``layers``, so that the rest of the step may read the host.
        layers: names of submodules, their last parts, for ``scope="layers"``: ``("self_attn", "mamba")``.
        require: raise :class:`CaptureError` where capture fails, in place of running eagerly.
        clock: seconds, for the time spent on capturing.
    """

    def __init__(
        self,
        function: StepFunction,
        module: nn.Module,
        *,
        buckets: Sequence[Bucket],
        backend: Backend | None = None,
        scope: Scope = "step",
        layers: Sequence[str] = (),
        require: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_scope(scope, layers)
        flags(require=require)
        instance(buckets, "buckets", list, tuple, advice="See make_buckets((24, 80), slots=...).")
        if not buckets:
            raise ValueError(
                "GraphedStep got no buckets; wanted at least one, see make_buckets((24, 80), slots=...)."
            )
        instance(module, "module", nn.Module, advice="Pass the module that is trained.")
        for bucket in buckets:
            instance(bucket, "A bucket", Bucket, advice="See make_buckets((24, 80), slots=...).")
        if not callable(function):
            raise TypeError(f"function is {described(function)}; wanted step(module, batch).")
        bare: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        refuse_sharded(bare)
        self.wrapped, self.require = module, require
        self.buckets = sorted(buckets)
        self.stats = GraphStats()
        self.off: CaptureError | None = None
        self._subject = Subject(function=function, module=bare, backend=backend or CudaBackend())
        self._graphs = GraphSet(self._subject, self.buckets, layers)
        self._clock = clock

    @property
    def pending(self) -> bool:
        """Return whether a replayed step's backward is outstanding; the next step would run eagerly."""
        return self._graphs.pending

    def __call__(self, batch: Any, *rest: Any) -> Any:
        """Run the step on a batch, replayed from a graph if one fits.

        Args:
            batch: on the module's device. Anything but a ``THDBatch`` runs eagerly.
            rest: passed on to ``function``; a captured step may not use it.

        Returns:
            What ``function`` returns, with a loss that ``backward()`` may be called on once.
        """
        if isinstance(self.wrapped, DistributedDataParallel):
            return self._through_ddp(batch, *rest)
        return self._run(batch, *rest)

    def close(self) -> None:
        """Drop all graphs and their memory; the next call with gradients captures anew."""
        self._graphs.close()

    def _run(self, batch: Any, *rest: Any) -> Any:
        if not torch.is_grad_enabled():  # validation, and the first pass of reentrant checkpointing
            return self._subject(batch, *rest)
        found = self._find(batch, rest)
        if isinstance(found, str):
            self.stats.fallbacks[found] += 1
            return self._subject(batch, *rest)
        self.stats.replays += 1
        return found(batch, *rest)

    def _find(self, batch: Any, rest: tuple[Any, ...]) -> CapturedStep | str:
        """Find the captured step that serves a batch, capturing if need be, or the reason to run eagerly."""
        if not isinstance(batch, THDBatch):
            return "batch_type"
        if batch.weights is not None:
            return "weights"
        if torch._C._len_torch_dispatch_stack():  # FlopCounterMode and the like would see nothing of a replay
            return "watched"
        if self.off is not None:
            return "capture_error"
        change = self._graphs.change()
        if change is not None:
            self._forget(change)
            return "parameters_moved"
        example = Example(batch, rest)
        graphs = self._graphs.find(example)
        if graphs is None and self.pending:
            return "pending_backward"
        graphs = graphs or self._capture(example)
        if graphs is None:
            return "capture_error"
        bucket, misfit = choose(self.buckets, batch)
        if bucket is None:
            assert misfit is not None
            return misfit
        if bucket in self._graphs.slower:
            return "slower"
        if not graphs[bucket].inputs.matches(batch):
            return "extras"
        return "pending_backward" if self.pending else graphs[bucket]

    def _capture(self, example: Example) -> dict[Bucket, CapturedStep] | None:
        started = self._clock()
        try:
            graphs = self._graphs.capture(example)
            self.stats.captures += len(graphs)
            return graphs
        except Exception as error:  # whatever stops a capture, training goes on
            self._give_up(as_capture_error(error))
            return None
        finally:
            self.stats.capture_s += self._clock() - started

    def _forget(self, change: str) -> None:
        self.close()
        rounds = self._graphs.rounds
        if rounds >= _MOST_CAPTURES:
            self._give_up(
                CaptureError(
                    f"the module changed again after {rounds} captures ({change}). Swap weights by "
                    "copying values in place (copy_), which graphs see."
                )
            )

    def _give_up(self, error: CaptureError) -> None:
        self.off = CaptureError(error.message, error.where)  # not its traceback, which keeps the batch alive
        self.close()
        if self.require:
            try:
                raise error
            finally:
                del error
        rank_zero_warn(
            f"CUDA graphs are off, training goes on eagerly. {error} "
            "lightning_thd.callbacks.cuda_graph.lint_capture(module, batch) lists everything of this kind."
        )

    def _through_ddp(self, batch: Any, *rest: Any) -> Any:
        """Run the step inside the DDP wrapper's forward, so that its reducer takes part."""
        inner: Any = self._subject.module
        before = inner.__dict__.get("forward")

        def forward(*args: Any) -> Any:
            _restore_forward(inner, before)
            return self._run(*args)

        inner.forward = forward
        try:
            return self.wrapped(batch, *rest)
        finally:
            _restore_forward(inner, before)


def _restore_forward(module: Any, before: Any) -> None:
    if before is not None:
        module.forward = before
    elif "forward" in module.__dict__:
        del module.forward
