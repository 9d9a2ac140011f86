"""A training step -> the same step, replayed from captured graphs wherever the batch fits one.

For raw loops and Accelerate use it directly; ``CUDAGraphCallback`` puts it around ``training_step``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph.agree import all_agree
from lightning_thd.cuda_graph.capture.backend import Backend, CudaBackend
from lightning_thd.cuda_graph.capture.capture import capture_step
from lightning_thd.cuda_graph.capture.captured import CapturedStep, StepFunction
from lightning_thd.cuda_graph.capture.layers import GraphedLayers
from lightning_thd.cuda_graph.capture.pair import Turn
from lightning_thd.cuda_graph.choice.timing import compare
from lightning_thd.cuda_graph.errors import CaptureError, as_capture_error
from lightning_thd.cuda_graph.limits.module_state import Fingerprint
from lightning_thd.cuda_graph.limits.support import refuse_sharded
from lightning_thd.cuda_graph.shapes.buckets import Bucket, Layout, choose
from lightning_thd.cuda_graph.stats import GraphStats
from lightning_thd.parallel.shard import THDShard

Scope = Literal["step", "layers"]
Context = tuple[bool, torch.dtype]
# Parameters that keep moving (a swap every few steps) make every capture worthless.
_MOST_CAPTURES = 4


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
        if scope not in ("step", "layers"):
            raise ValueError(f"scope={scope!r}: wanted 'step' or 'layers'.")
        if (scope == "layers") != bool(layers):
            raise ValueError(
                f"scope={scope!r} with layers={tuple(layers)}: scope='layers' needs names of the layers to "
                "capture, for example layers=('self_attn',), and scope='step' takes none."
            )
        if not buckets:
            raise ValueError(
                "GraphedStep got no buckets; wanted at least one, see make_buckets((24, 80), slots=...)."
            )
        self.function, self.wrapped = function, module
        self.module: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        self.buckets = sorted(buckets)
        self.backend: Backend = backend or CudaBackend()
        self.scope, self.require = scope, require
        self.stats = GraphStats()
        self.off: CaptureError | None = None
        self.slower: set[Bucket] = set()
        self._layers = GraphedLayers(self.backend, layers) if scope == "layers" else None
        self._clock = clock
        self._captured: dict[Context, dict[Bucket, CapturedStep]] = {}
        self._fingerprint: Fingerprint | None = None
        self._turn = Turn()
        self._rounds = 0
        refuse_sharded(self.module)

    def __call__(self, batch: Any, *rest: Any) -> Any:
        """Run the step on a batch.

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
        self._captured.clear()
        self._fingerprint = None
        if self._layers is not None:
            self._layers.remove()
        self.backend.release()

    def _run(self, batch: Any, *rest: Any) -> Any:
        if not torch.is_grad_enabled():  # validation, and the first pass of reentrant checkpointing
            return self.function(self.module, batch, *rest)
        if not isinstance(batch, THDBatch):
            return self._eager("batch_type", batch, *rest)
        if torch._C._len_torch_dispatch_stack():  # FlopCounterMode and the like would see nothing of a replay
            return self._eager("watched", batch, *rest)
        reason = self._prepare(batch, rest)
        if reason is not None:
            return self._eager(reason, batch, *rest)
        bucket, misfit = choose(self.buckets, batch)
        if bucket is None:
            assert misfit is not None
            return self._eager(misfit, batch, *rest)
        if bucket in self.slower:
            return self._eager("slower", batch, *rest)
        captured = self._captured[self._context(batch)][bucket]
        if not captured.inputs.matches(batch):
            return self._eager("extras", batch, *rest)
        if self._pending:
            return self._eager("pending_backward", batch, *rest)
        self.stats.replays += 1
        return captured(batch, *rest)

    @property
    def _pending(self) -> bool:
        return self._turn.pending or (self._layers is not None and self._layers.pending)

    def _eager(self, reason: str, batch: Any, *rest: Any) -> Any:
        self.stats.fallbacks[reason] += 1
        return self.function(self.module, batch, *rest)

    def _prepare(self, batch: THDBatch, rest: tuple[Any, ...]) -> str | None:
        """See that graphs of the present module and context exist; else give the reason to run eagerly."""
        if self.off is not None:
            return "capture_error"
        change = None if self._fingerprint is None else self._fingerprint.change()
        if change is not None:
            self._forget(change)
            return "parameters_moved"
        context = self._context(batch)
        if context not in self._captured:
            if self._pending:
                return "pending_backward"
            try:
                self._capture_all(context, batch, rest)
            except Exception as error:  # whatever stops a capture, training goes on
                self._give_up(as_capture_error(error))
                return "capture_error"
        return None

    def _capture_all(self, context: Context, batch: THDBatch, rest: tuple[Any, ...]) -> None:
        started = self._clock()
        try:
            captured = self._agreed(batch, self._try_capture(batch, rest))
            self._captured[context] = captured
            reads = {name for step in captured.values() for name in step.reads}
            self._fingerprint = Fingerprint(self.module, reads)
            self._rounds += 1
            self.stats.captures += len(captured)
            self._drop_slower(captured, batch, rest)
        finally:
            self.stats.capture_s += self._clock() - started

    def _try_capture(self, batch: THDBatch, rest: tuple[Any, ...]) -> dict[Bucket, CapturedStep] | Exception:
        captured: dict[Bucket, CapturedStep] = {}
        try:
            missing = self.backend.unavailable(batch.input_ids.device)
            if missing is not None:
                raise CaptureError(f"{missing}.")
            for bucket in reversed(self.buckets):  # the largest first: the smaller ones reuse its memory
                captured[bucket] = capture_step(
                    self.backend, self.function, self.module, bucket, batch, rest, self._turn, self._layers
                )
        except Exception as error:
            return error
        return captured

    def _agreed(
        self, batch: THDBatch, found: dict[Bucket, CapturedStep] | Exception
    ) -> dict[Bucket, CapturedStep]:
        """Give what was captured, if all ranks have it: those of a model-parallel group run together.

        Ranks that share no model come together here at the first capture, and may recapture alone.
        """
        failed = isinstance(found, Exception)
        together = self._rounds == 0 or isinstance(batch, THDShard) or _has_shards(self.module)
        agreed = all_agree(not failed, batch.input_ids.device) if together else not failed
        if isinstance(found, Exception):
            raise found
        if not agreed:
            raise CaptureError("the capture failed on another rank, whose message says why.")
        return found

    def _drop_slower(
        self, captured: dict[Bucket, CapturedStep], batch: THDBatch, rest: tuple[Any, ...]
    ) -> None:
        layout = Layout.of_batch(batch)
        for bucket, step in captured.items():
            slower = compare(self.backend, self.function, self.module, step, layout, rest)
            if slower is None:
                return
            if all_agree(not slower.slower, batch.input_ids.device):
                continue
            self.slower.add(bucket)
            rank_zero_info(
                f"CUDA graph of {bucket}: a replay takes {slower.replay_s * 1e3:.2f} ms and eager "
                f"{slower.eager_s * 1e3:.2f} ms on this or another rank, so batches of this size run eagerly."
            )

    def _forget(self, change: str) -> None:
        self.close()
        if self._rounds >= _MOST_CAPTURES:
            self._give_up(
                CaptureError(
                    f"the module changed again after {self._rounds} captures ({change}). Swap weights by "
                    "copying values in place (copy_), which graphs see."
                )
            )

    def _give_up(self, error: CaptureError) -> None:
        self.off = error
        self.close()
        if self.require:
            raise error
        rank_zero_warn(
            f"CUDA graphs are off, training goes on eagerly. {error} "
            "lightning_thd.callbacks.cuda_graph.lint_capture(module, batch) lists everything of this kind."
        )

    def _context(self, batch: THDBatch) -> Context:
        kind = batch.input_ids.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _through_ddp(self, batch: Any, *rest: Any) -> Any:
        """Run inside the wrapper's forward, so that its reducer takes part, as Lightning does."""
        inner: Any = self.module
        before = inner.__dict__.get("forward")

        def forward(*args: Any) -> Any:
            _restore_forward(inner, before)
            return self._run(*args)

        inner.forward = forward
        try:
            return self.wrapped(batch, *rest)
        finally:
            _restore_forward(inner, before)


def _has_shards(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _restore_forward(module: Any, before: Any) -> None:
    if before is not None:
        module.forward = before
    elif "forward" in module.__dict__:
        del module.forward
