"""A training step -> the same step, replayed from a captured CUDA graph if the batch fits one."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_thd._checks import flags, instance
from lightning_thd._modes import operators_are_watched
from lightning_thd._static import trial_runs
from lightning_thd._trees import tree_paths
from lightning_thd.batch import THDBatch
from lightning_thd.batch.noted import UnreadBoundariesError
from lightning_thd.cuda_graph.backend import Backend, CudaBackend
from lightning_thd.cuda_graph.buckets import BatchShape, Bucket, choose
from lightning_thd.cuda_graph.capture import (
    CapturedStep,
    Example,
    GraphMemory,
    StepFunction,
    Subject,
    capture_step,
    differentiable,
    differentiate,
)
from lightning_thd.cuda_graph.compiled import cannot_compile, compiled_layers, uncompiled
from lightning_thd.cuda_graph.errors import CaptureError, as_capture_error
from lightning_thd.cuda_graph.fingerprint import PLAIN, Fingerprint, Uses
from lightning_thd.cuda_graph.guards import RandomUse, attribute, guarded, remembered, restored, sharded_by
from lightning_thd.flops.listen import LISTENERS, calls_are_needed, report_unseen
from lightning_thd.parallel.across_ranks import all_agree, gather_ints, group_size
from lightning_thd.warnings import SlowWarning, warn

# Stop after this many captures of all buckets: if parameters move every few steps, captures are useless.
_MOST_CAPTURES = 4
_MARGIN = 0.02  # A replay must be faster than eager by this share, else the bucket's batches run eagerly.


@dataclass(slots=True)
class GraphStats:
    """Numbers of replayed and of eager batches of a graphed step; calls without gradients do not count."""

    replays: int = 0  # batches that ran from a graph
    fallbacks: Counter[str] = field(default_factory=Counter)  # batches that ran eagerly, by reason
    captures: int = 0  # captured graphs
    capture_s: float = 0.0  # seconds spent on captures, warm-up included
    optimizer_replays: int = 0  # steps of the optimizer that ran from a graph
    optimizer_fallbacks: Counter[str] = field(default_factory=Counter)  # and those that did not, by reason

    @property
    def hit_rate(self) -> float:
        """Return the share of batches that were replayed; 0 before the first batch."""
        total = self.replays + self.fallbacks.total()
        return self.replays / total if total else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the values to log, by key."""
        metrics = {"cuda_graph/hit_rate": self.hit_rate, "cuda_graph/capture_time_s": self.capture_s}
        for reason, count in sorted(self.fallbacks.items()):
            metrics[f"cuda_graph/fallback_{reason}"] = float(count)

        updates = self.optimizer_replays + self.optimizer_fallbacks.total()
        if updates:
            metrics["cuda_graph/optimizer_hit_rate"] = self.optimizer_replays / updates
        return metrics


class GraphedStep:
    """Runs ``function(module, batch, *rest)``, from a captured graph if the batch fits a bucket.

    The first call with gradients on a batch that graphs support captures all buckets, on dummy batches. A
    batch that cannot be replayed exactly, such as a context-parallel shard, runs eagerly; see ``stats``.

    Args:
        function: returns the loss or a dict with the loss, for example ``causal_lm_loss``. If ``module`` is
            wrapped in DistributedDataParallel, the function gets the module inside.
        module: the module to train.
        buckets: the shapes to capture; see ``make_buckets``.
        backend: the capture engine; CUDA graphs by default.
        require: raise :class:`CaptureError` if a capture fails, instead of running eagerly.
        keep_gradients: give every backward pass gradients of its own. With False, a replay's gradients are
            the graph's buffers: they cost no copy and no memory, the next replay overwrites them, and only
            ``backward()`` finds them, not ``torch.autograd.grad``. Sums over microbatches are kept. Hooks of
            parameters, DDP and other ranks get copies also with False.
        compile_layers: compile the layers by torch's compiler while buckets are captured, a quarter of the
            kernel launches. Batches that fit no bucket run eagerly and uncompiled.

    Raises:
        ValueError: if the module is sharded, or has layers that ``compile_layers`` cannot compile.
    """

    def __init__(
        self,
        function: StepFunction,
        module: nn.Module,
        *,
        buckets: Sequence[Bucket],
        backend: Backend | None = None,
        require: bool = False,
        keep_gradients: bool = True,
        compile_layers: bool = False,
    ) -> None:
        flags(require=require, keep_gradients=keep_gradients, compile_layers=compile_layers)
        instance(module, "module", nn.Module, advice="Pass the module that is trained.")
        instance(buckets, "buckets", list, tuple, advice="See make_buckets((24, 80), slots=...).")
        self.buckets = sorted(buckets)
        if not self.buckets or not all(isinstance(bucket, Bucket) for bucket in self.buckets):
            raise ValueError(
                "GraphedStep got no buckets; wanted at least one. See make_buckets((24, 80), slots=...)."
            )

        bare: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        sharding = sharded_by(bare)
        if sharding is not None:
            raise ValueError(
                f"The module is sharded by {sharding}, which gathers parameters into its own memory at every "
                "step: a captured step would keep the addresses of its capture. Use CUDA graphs with one "
                "device or DDP, or train without them."
            )
        self._subject = Subject(function=function, module=bare, backend=backend or CudaBackend())
        if compile_layers:
            reason = cannot_compile(bare, self._subject.backend)
            if reason is not None:
                raise ValueError(reason)

        self.wrapped = module
        self.require = require
        self.keep_gradients = keep_gradients
        self.compile_layers = compile_layers
        self.stats = GraphStats()
        self.off: CaptureError | None = None
        self.group: Any = None  # the ranks that capture together; None is the world
        self._memory = GraphMemory()
        self._graphs: dict[Bucket, CapturedStep] = {}
        self._modes: tuple[Any, ...] | None = None  # torch's modes at the capture
        self._fingerprint: Fingerprint | None = None
        self._slower: set[Bucket] = set()
        self._calls = 0  # the number of calls before the first capture, if there are several ranks
        self._rounds = 0  # the number of successful captures, each of all buckets

    def __call__(self, batch: Any, *rest: Any) -> Any:
        """Run the step on a batch, replayed from a graph if one fits."""
        if isinstance(self.wrapped, DistributedDataParallel):
            return self._through_ddp(batch, *rest)
        return self._run(batch, *rest)

    def close(self) -> None:
        """Drop all graphs and their memory; if not ``off``, the next call with gradients captures again."""
        self._graphs = {}
        self._modes = None
        self._fingerprint = None
        self._memory.drop_buffers()
        self._subject.backend.release()

    @property
    def backend(self) -> Backend:
        """Return the capture engine."""
        return self._subject.backend

    def writes(self, gradients: Sequence[Tensor | None]) -> bool:
        """Return whether gradients are tensors of the graphs, and a graph may use the shared memory now."""
        return not self._memory.turn.pending and self._memory.own(gradients)

    def _run(self, batch: Any, *rest: Any) -> Any:
        """Run the step on a batch, without DDP's forward around it."""
        if not torch.is_grad_enabled():  # validation, and the first pass of reentrant checkpointing
            return self._subject(batch, *rest)
        step = self._find(batch, rest)
        if isinstance(step, str):
            self.stats.fallbacks[step] += 1
            return self._subject(batch, *rest)
        self.stats.replays += 1
        if LISTENERS:
            report_unseen()
        return step(batch, hand_over=self._hands_over())

    def _hands_over(self) -> bool:
        """Return whether gradients may be the graph's buffers: nothing but the optimizer waits for them."""
        if self.keep_gradients or isinstance(self.wrapped, DistributedDataParallel):
            return False
        # DDP of a strategy, outside of this step, has hooks in C++ that cannot be seen.
        return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1

    def _find(self, batch: Any, rest: tuple[Any, ...]) -> CapturedStep | str:
        """Return a batch's captured step, after a capture if needed, or the reason to run eagerly."""
        reason = _unsupported(batch)
        if self._rounds or self.off is not None:
            if reason is not None:
                return reason
        elif not self._all_capture(reason):
            return reason or "other_ranks"
        if self.off is not None:
            return "capture_error"

        if self._fingerprint is not None:
            change = self._fingerprint.change()
            if change is not None:
                self._forget(change)
                return "parameters_moved"

        example = Example(batch, rest)
        if self._modes != _modes(example):
            if self._memory.turn.pending:
                return "pending_backward"
            if self._modes is not None:
                self._forget("torch's autocast, dtype or precision changed")
            with torch.cuda.device_of(batch.input_ids):  # type: ignore[no-untyped-call]  # its streams
                if self.off is not None or not self._capture(example):
                    return "capture_error"

        if reason is not None:
            return reason
        return self._step_for(batch)

    def _step_for(self, batch: THDBatch) -> CapturedStep | str:
        """Return the captured step of the bucket that a batch fits, or the reason to run eagerly."""
        bucket, misfit = choose(self.buckets, batch)
        if bucket is None:
            assert misfit is not None
            return misfit
        if bucket in self._slower:
            return "slower"
        step = self._graphs[bucket]
        if not step.inputs.matches(batch):
            return "extras"
        if self._memory.turn.pending:
            return "pending_backward"
        return step

    def _all_capture(self, reason: str | None) -> bool:
        """Return whether all ranks capture in this call: each can, and at least one has a batch to replay."""
        if group_size(self.group) == 1:
            return reason is None
        self._calls += 1
        if self._calls & (self._calls - 1):
            return False  # ranks vote only in calls 1, 2, 4, 8, ..., because a vote waits for the device

        if reason is None:
            vote = 2  # this rank has a batch to replay
        elif reason in ("weights", "shared_prefixes"):
            vote = 1  # this rank can capture, and replay other batches
        else:
            vote = 0
        device = next(self._subject.module.parameters()).device
        votes = [of_rank for (of_rank,) in gather_ints([vote], group=self.group, device=device)]
        return min(votes) > 0 and max(votes) == 2

    @trial_runs()
    def _capture(self, example: Example) -> bool:
        """Capture all buckets; return whether that worked, on all ranks that capture together."""
        start = time.perf_counter()
        # All ranks capture together the first time, and each time if the module has DTensors. Any other
        # capture may run on this rank only, so it must not communicate.
        parameters = self._subject.module.parameters()
        together = self._rounds == 0 or any(isinstance(parameter, DTensor) for parameter in parameters)
        error = self._try_capture(example)
        succeeded = error is None
        if together:
            succeeded = all_agree(succeeded, example.device, self.group)

        if succeeded:
            self._modes = _modes(example)
            uses = Uses(*(step.uses for step in self._graphs.values()))
            self._fingerprint = Fingerprint(self._subject.module, uses)
            self._rounds += 1
            self._find_slower(example, together=together)
            self.stats.captures += len(self._graphs)
        self.stats.capture_s += time.perf_counter() - start

        if not succeeded:
            self._give_up(
                error or CaptureError("the capture failed on another rank, whose message says why.")
            )
        return succeeded

    def _try_capture(self, example: Example) -> CaptureError | None:
        """Capture all buckets and prove them on dummy batches; return the error of this rank, or None."""
        subject = self._subject
        give_back = remembered(map(vars, subject.module.modules()))
        try:
            missing = subject.backend.unavailable(example.device)
            if missing is not None:
                raise CaptureError(f"{missing}.")

            if not self._rounds:  # what a step keeps of its first batch must come from a real batch
                with restored(subject.module), guarded(subject.module) as logged:
                    subject(example.batch, *example.rest)
                example = example._replace(logged=(logged,))

            with ExitStack() as compiling:
                if self.compile_layers:
                    compiling.enter_context(compiled_layers(subject.module, subject.backend))
                for bucket in reversed(self.buckets):  # the largest first: smaller ones reuse its memory
                    self._graphs[bucket] = capture_step(subject, bucket, example, self._memory)

            for step in self._graphs.values():
                for shape in shapes_to_prove(step.inputs.bucket):
                    prove(subject, step, example, shape)
        except UnreadBoundariesError:  # the eager step is wrong too
            give_back()
            raise
        except Exception as error:  # ``_give_up`` warns of it, or raises it with ``require``
            give_back()  # counters, lists and metrics, which have seen dummy batches
            return as_capture_error(error)
        return None

    def _find_slower(self, example: Example, *, together: bool) -> None:
        """Time every bucket, and keep those whose replays gain too little from being replayed."""
        for bucket, step in self._graphs.items():
            times = _compare(self._subject, step, example)
            if times is None:
                return

            eager_s, replay_s = times
            is_faster = replay_s <= (1 - _MARGIN) * eager_s
            if together:
                is_faster = all_agree(is_faster, example.device, self.group)

            if not is_faster:
                self._slower.add(bucket)
                rank_zero_info(
                    f"CUDA graph of {bucket}: a replay takes {replay_s * 1e3:.2f} ms and eager "
                    f"{eager_s * 1e3:.2f} ms on this rank. A rank gains too little, so these batches run "
                    "eagerly."
                )

    def _forget(self, change: str) -> None:
        """Drop the graphs because of a change; after too many captures, give up."""
        self.close()
        if self._rounds >= _MOST_CAPTURES:
            self._give_up(
                CaptureError(
                    f"the step changed again after {self._rounds} captures ({change}). Keep its "
                    "settings, and copy new weights in place (copy_), which keeps graphs valid."
                )
            )

    def _give_up(self, error: CaptureError) -> None:
        """Run all further batches eagerly, with a warning; with ``require``, raise."""
        self.off = error
        self.close()
        if self.require:
            raise CaptureError(error.message, error.where)  # without the traceback, which keeps the batch
        warn(
            f"CUDA graphs are off, training goes on eagerly. {error} "
            "lightning_thd.callbacks.cuda_graph.lint_capture(module, batch) lists what cannot be captured.",
            SlowWarning,
        )

    def _through_ddp(self, batch: Any, *rest: Any) -> Any:
        """Run the step inside the DDP wrapper's forward, so that DDP reduces the gradients."""

        def forward(*args: Any) -> Any:
            replaced.close()  # the step calls the module's own forward
            return self._run(*args)

        with ExitStack() as replaced:
            replaced.enter_context(attribute(self._subject.module, "forward", forward))
            return self.wrapped(batch, *rest)


def _unsupported(batch: Any) -> str | None:
    """Return why graphs do not support a batch, or None."""
    if not isinstance(batch, THDBatch):
        return "batch_type"
    if batch.boundaries.eager is not None:
        return batch.boundaries.eager
    # Modes such as FlopCounterMode, and the monitor's own counter, would not see a replay. The counter would
    # also count the trial runs of a capture.
    if operators_are_watched() or calls_are_needed():
        return "watched"
    return None if batch.weights is None else "weights"


def _compare(subject: Subject, step: CapturedStep, example: Example) -> tuple[float, float] | None:
    """Return the seconds of forward and backward, eager and replayed; None if the backend has no times."""
    batch = step.inputs.dummy(_shape_like(example.batch, step.inputs.bucket))

    def run_eager() -> None:
        differentiate(differentiable(subject(batch, *example.rest)), step.leaves)

    def run_replay() -> None:
        differentiate(differentiable(step.run(batch)), step.leaves)

    with restored(subject.module), guarded(subject.module):
        eager_s = subject.backend.time_s(run_eager)
        if eager_s is None:
            return None
        replay_s = subject.backend.time_s(run_replay)
    return None if replay_s is None else (eager_s, replay_s)


def _shape_like(batch: THDBatch, bucket: Bucket) -> BatchShape:
    """Return a shape with a batch's slots and sequences, or one that fills the bucket if that is smaller."""
    slots = batch.input_ids.numel()  # with trailing padding, because FP8 needs it
    sizes = BatchShape.of_batch(batch)
    even_length = math.ceil(slots / max(1, sizes.sequences))  # sequences that hold the padding, too
    shape = BatchShape(slots, sizes.sequences, max(sizes.max_seqlen, even_length))
    if bucket.misfit(shape) is not None:
        return BatchShape(bucket.slots, bucket.sequences, bucket.max_seqlen)
    return shape


def _modes(example: Example) -> tuple[Any, ...]:
    """Return torch's modes that change what an operator does; a graph keeps those of its capture."""
    kind = example.device.type
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
    )


# A bucket has more slots and sequences than a batch. So a replayed step differs from an eager one if it
# divides by the number of slots or sequences, takes a mean over slots, or returns a tensor of slots.
_ADVICE = (
    "Divide by the number of targets, (batch.targets != -100).sum(), or use causal_lm_loss; return and log "
    "sums over tokens, no tensors of slots; or train this step eagerly."
)
# The relative differences by dtype that rounding can cause, because padding changes the order of sums.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}
_LOW = 2e-2  # for other dtypes, autocast or TF32
_FP8 = 0.1
_RANDOM = 0.7  # for a step that draws random numbers


def prove(subject: Subject, step: CapturedStep, example: Example, shape: BatchShape) -> None:
    """Raise if a captured step differs from the eager one, on a batch of a shape, by more than rounding."""
    batch = step.inputs.dummy(shape)
    batch = batch.replace(input_ids=torch.ones_like(batch.input_ids))  # unlike the zeros of the bucket's tail
    use = RandomUse()
    with restored(subject.module), guarded(subject.module) as eager_logs, uncompiled(subject.module), use:
        eager_output = subject(batch, *example.rest)
    with restored(subject.module), guarded(subject.module) as replay_logs:
        output = step.run(batch)

    bound = _RANDOM if use.draws else _rounding(subject.module, example.device)
    _refuse_difference(output, eager_output, "the step returns", bound)

    graph_logs = step.logged or replay_logs
    graph_names = [log.name for log in graph_logs]
    eager_names = [log.name for log in eager_logs]
    if graph_names != eager_names:
        raise CaptureError(
            f"the step logs {graph_names} in a graph and {eager_names} without. Log the same keys for every "
            "batch."
        )
    for in_graph, in_eager in zip(graph_logs, eager_logs, strict=True):
        _refuse_difference(in_graph.value, in_eager.value, f"the step logs {in_graph.name!r}", bound)
        for name, value in in_eager.kwargs.items():
            kept = in_graph.kwargs.get(name)
            if isinstance(value, PLAIN) and kept != value:
                raise CaptureError(
                    f"the step logs {in_graph.name!r} with {name}={value!r}, which depends on the batch; a "
                    f"replay would log it with {name}={kept!r} always. Log it in on_train_batch_end."
                )


def shapes_to_prove(bucket: Bucket) -> Iterator[BatchShape]:
    """Yield a shape that leaves tokens to a bucket's dummy sequences, and one that leaves them empty."""
    short = min(bucket.max_seqlen // 2, bucket.slots // 4)
    unit = math.gcd(bucket.slots, 128)  # lengths are multiples of it, which some kernels need
    if unit > short:
        unit = 1
    short = short // unit * unit
    long = bucket.max_seqlen // unit * unit
    for count, length in ((2, short), (1, short), (2, long), (1, long)):
        shape = BatchShape(count * length, count, length)
        if length and shape.slots < bucket.slots and bucket.misfit(shape) is None:
            yield shape
            break

    fewest = math.ceil(bucket.slots / bucket.max_seqlen)
    if fewest < bucket.sequences:
        yield BatchShape(bucket.slots, fewest, bucket.max_seqlen)


def _refuse_difference(from_graph: Any, from_eager: Any, what: str, bound: float) -> None:
    """Raise if tensors of a replayed step differ from the eager step's in shape, or by more than a bound."""
    pairs = zip(tree_paths(from_graph), tree_paths(from_eager), strict=True)
    for (path, replayed), (_, eager) in pairs:
        name = f"{what} {path.strip('[]')}".rstrip()
        if not isinstance(replayed, Tensor) or not isinstance(eager, Tensor):
            continue
        if replayed.shape != eager.shape:
            raise CaptureError(
                f"{name}: a tensor of shape {tuple(eager.shape)}, and {tuple(replayed.shape)} from a graph, "
                f"whose batch is padded. {_ADVICE}"
            )

        error = _relative_error(replayed.detach().double(), eager.detach().double())
        # The error is NaN if the replay's value is; a NaN of the eager step proves nothing.
        if not error <= bound and bool(eager.isfinite().all()):
            raise CaptureError(
                f"{name}: the value from a graph, whose batch is padded with dummy sequences, differs from "
                f"the eager value by {error:.1e}. It depends on the number of slots or sequences, or on the "
                f"padding. {_ADVICE}"
            )


def _relative_error(value: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, divided by the norm of the expected tensor; 0 for empty tensors."""
    if not expected.numel():
        return 0.0
    return float((value - expected).norm() / expected.norm().clamp_min(1e-30))


def _rounding(module: nn.Module, device: torch.device) -> float:
    """Return the relative difference that rounding can cause with a module's dtypes and torch's modes."""
    if any("_thd_fp8" in vars(child) for child in module.modules()):
        return _FP8  # scales of whole tensors depend on the padding
    dtypes = {parameter.dtype for parameter in module.parameters()}
    uses_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    if (torch.is_autocast_enabled(device.type) or uses_tf32) and torch.float64 not in dtypes:
        return _LOW
    return max((_ROUNDING.get(dtype, _LOW) for dtype in dtypes), default=_LOW)
