"""A step and a bucket -> graphs of its forward and backward, captured on a dummy batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_thd._static import static_shapes
from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph.backend import Backend
from lightning_thd.cuda_graph.buckets import Bucket
from lightning_thd.cuda_graph.errors import CaptureError
from lightning_thd.cuda_graph.fingerprint import Uses, watched
from lightning_thd.cuda_graph.guards import HostValue, LoggedValue, check_numbers, guarded
from lightning_thd.cuda_graph.module_state import (
    RandomUse,
    host_state,
    refuse_fp8,
    refuse_host_changes,
    refuse_sums_over_slots,
    restored,
    without_saved_states,
)
from lightning_thd.cuda_graph.pair import (
    GradientBuffers,
    GraphPair,
    StandIns,
    Turn,
    differentiable,
    differentiate,
)
from lightning_thd.cuda_graph.static_batch import StaticBatch, StaticInputs
from lightning_thd.loss.watch import SlotLosses, recorded_losses, show

StepFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A step ``function(module, batch, *rest)``, the module it trains, and the backend that captures it."""

    function: StepFunction
    module: nn.Module
    backend: Backend

    def __call__(self, batch: Any, *rest: Any) -> Any:
        """Run the step eagerly."""
        return self.function(self.module, batch, *rest)


class Example(NamedTuple):
    """A call of the step: its device, its layout and its number of further arguments are those to capture."""

    batch: THDBatch
    rest: tuple[Any, ...] = ()

    @property
    def device(self) -> torch.device:
        """Return the device that the step runs on."""
        return self.batch.input_ids.device


class Shared:
    """State that graphs of one memory pool share: the turn to use it, and the gradient buffers."""

    def __init__(self) -> None:
        self.turn = Turn()
        self._parameters: list[int] = []
        self._buffers = GradientBuffers(0)

    def buffers_of(self, parameters: list[Tensor]) -> GradientBuffers:
        """Return gradient buffers for these parameters, new ones when the parameters have changed."""
        known = [id(x) for x in parameters]
        if known != self._parameters:
            self._parameters, self._buffers = known, GradientBuffers(len(known))
        return self._buffers


class CapturedStep:
    """The captured step of one bucket, ready to replay; ``uses`` is what the step does with attributes."""

    def __init__(
        self,
        inputs: StaticInputs,
        leaves: list[Tensor],
        pair: GraphPair,
        logged: list[LoggedValue],
        uses: Uses,
        module: nn.Module,
    ) -> None:
        self.inputs, self.leaves, self.logged, self.uses = inputs, leaves, logged, uses
        self._pair, self._module = pair, module

    def run(self, batch: THDBatch) -> Any:
        """Copy a batch into the buffers and replay the step, without logging."""
        self.inputs.fill(batch)
        output, slots = self._pair(self.leaves)
        if slots:
            losses, weights = slots
            show(batch, SlotLosses(losses.flatten(), weights.flatten(), None))
        return output

    def __call__(self, batch: THDBatch) -> Any:
        """Replay the step on a batch and log what it logs, with this batch's values."""
        output = self.run(batch)
        log: Any = getattr(self._module, "log", None)
        for name, value, args, kwargs in self.logged:
            log(name, value.clone() if isinstance(value, Tensor) else value, *args, **kwargs)
        return output


def capture_step(subject: Subject, bucket: Bucket, example: Example, shared: Shared) -> CapturedStep:
    """Warm up and capture, leaving the module, the random states and the Trainer's logs as they were."""
    batch, module, backend = example.batch, subject.module, subject.backend
    refuse_sums_over_slots(module)
    refuse_fp8(module)
    parameters: list[Tensor] = [x for x in module.parameters() if x.requires_grad]
    make_inputs = functools.partial(
        StaticInputs,
        bucket,
        example.device,
        axes=None if batch.position_ids.ndim == 1 else batch.position_ids.shape[0],
        scale_dtype=torch.float64 if any(x.dtype == torch.float64 for x in parameters) else torch.float32,
    )
    hidden = tuple(HostValue(f"argument {i + 2} of the step (batch_idx)") for i in range(len(example.rest)))
    stand_ins = StandIns(module, parameters)

    def run(static: StaticBatch) -> Any:
        with stand_ins.in_place():
            return _checked(subject(static, *hidden))

    def run_recorded() -> tuple[Any, list[Tensor]]:
        with recorded_losses() as found:
            output = run(inputs.batch)
        return output, [part for slots in found[-1:] for part in (slots.losses, slots.weights)]

    with restored(module), static_shapes(), _uncached_autocast(example.device):
        runs = _warm_up(backend, run, module, make_inputs, stand_ins.leaves)
        refuse_fp8(module)
        inputs = make_inputs()
        inputs.fill(inputs.dummy())
        with guarded(module) as logged, without_saved_states(), watched(module) as uses:
            pair = GraphPair(
                backend,
                run_recorded,
                stand_ins.leaves,
                shared.turn,
                shared.buffers_of(parameters),
            )
    check_numbers([*runs, logged], {bucket.slots, bucket.sequences, bucket.max_seqlen})
    return CapturedStep(inputs, parameters, pair, logged, uses, module)


def _warm_up(
    backend: Backend,
    run: Callable[[StaticBatch], Any],
    module: nn.Module,
    make_inputs: Callable[[], StaticInputs],
    leaves: list[Tensor],
) -> list[list[LoggedValue]]:
    """Run forward and backward a few times, each on buffers of its own; return what each run logged."""
    runs = []
    before = host_state(module)
    for i in range(backend.warm_ups):
        if i == 1:  # the first run may build tables and fill caches
            before = host_state(module)
        use = RandomUse()
        own = make_inputs()  # as kernels may cache by the identity of a tensor
        own.fill(own.dummy())
        last = i == backend.warm_ups - 1
        with guarded(module) as logged, without_saved_states(use), use:
            backend.warm_up(functools.partial(_forward_backward, run, own.batch, leaves), last=last)
        use.refuse()
        runs.append(logged)
    refuse_host_changes(module, before)
    return runs


def _forward_backward(
    run: Callable[[StaticBatch], Any], batch: StaticBatch, leaves: Sequence[Tensor]
) -> None:
    outputs = differentiable(run(batch))
    if outputs:  # the capture refuses a step without, and says so
        differentiate(outputs, leaves)


@contextlib.contextmanager
def _uncached_autocast(device: torch.device) -> Iterator[None]:
    """Keep autocast, but not its cache of casts: one found there stays that of the capture in a graph."""
    kind = device.type
    with torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    ):
        yield


def _checked(output: Any) -> Any:
    """Return the step's outputs, or raise for those that a replay could not return: None, non-tensors."""
    if output is None:
        raise CaptureError("the step returned None, which skips a batch; a replay cannot decide that again.")
    others = [x for x in tree_leaves(output) if x is not None and not isinstance(x, Tensor)]
    if others:
        raise CaptureError(
            f"the step returned a {type(others[0]).__name__} beside its tensors, which a replay would return "
            "unchanged always. Return tensors only."
        )
    return output
