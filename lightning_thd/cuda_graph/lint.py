"""A module and a batch -> the lines of the step that a CUDA graph cannot capture, found without a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_thd._static import static_shapes
from lightning_thd._trainer import trainer_of
from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph.buckets import StaticBatch
from lightning_thd.cuda_graph.capture import StepFunction, differentiable, differentiate
from lightning_thd.cuda_graph.errors import Report, as_capture_error
from lightning_thd.cuda_graph.guards import (
    HostValue,
    RandomUse,
    guarded,
    host_state,
    refuse_host_changes,
    restored,
    without_saved_states,
)
from lightning_thd.cuda_graph.recording import record, refused_reads
from lightning_thd.loss import causal_lm_loss
from lightning_thd.models.families.ropes import keep_frequencies

_AUTOCAST = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A line of the step that cannot be captured: "file:line in function" or None, and what to do."""

    where: str | None
    message: str


@dataclass(frozen=True, slots=True)
class LintReport:
    """The findings of :func:`lint_capture` in the order found, one per line of code."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Return whether the step can be captured, as far as this can be checked without a GPU."""
        return not self.findings

    def __str__(self) -> str:
        if self.ok:
            return "The step can be captured."
        lines = [f"{x.where or 'the step'}: {x.message}" for x in self.findings]
        return "\n".join([f"{len(lines)} reason(s) why the step cannot be captured:", *lines])


def lint_capture(module: nn.Module, batch: THDBatch, *, step: StepFunction | None = None) -> LintReport:
    """Run a step on the CPU and on the meta device, and report what a CUDA graph cannot capture.

    The runs use copies: the module, its gradients and the random states do not change.

    Args:
        module: a LightningModule or any other module.
        batch: a real batch, on any device.
        step: ``step(module, batch)``, which returns the loss. The default is a LightningModule's
            ``training_step``, and ``causal_lm_loss`` for any other module.

    Returns:
        The report. Put ``assert lint_capture(module, batch).ok`` into the tests of your model.

    Raises:
        ValueError: if ``batch`` is not a ``THDBatch``, is a shard of one, or shares prefixes.
    """
    if not isinstance(batch, THDBatch):
        raise ValueError(
            f"lint_capture got a {type(batch).__name__}; wanted a THDBatch. See THDBatch.collate."
        )
    if batch.boundaries.eager is not None:
        raise ValueError(
            f"lint_capture got a batch with which steps always run eagerly ({batch.boundaries.eager}); "
            "wanted a THDBatch without shared prefixes, before it is cut into shards for context parallelism."
        )
    findings: dict[str, Finding] = {}

    def report(message: str, where: str | None) -> None:
        findings.setdefault(where or message, Finding(where=where, message=message))

    run = _default_step(module) if step is None else step
    with static_shapes():
        _run_on_cpu(_copy(module), batch.to("cpu"), run, report)
        _run_on_meta(_copy(module), batch, run, report)
    return LintReport(tuple(findings.values()))


def _run_on_cpu(module: nn.Module, batch: THDBatch, run: StepFunction, report: Report) -> None:
    """Record a step on the CPU, which shows what a replay would not repeat."""
    module.to("cpu")
    use = RandomUse()
    with _errors_to(report), restored(module), without_saved_states(use):
        # Builds tables and fills caches, as the first warm-up does.
        _forward_backward(module, batch, run, lambda *_: None)
        before = host_state(module)
        with use:
            record(lambda: _forward_backward(module, batch, run, report), report)
        refuse_host_changes(module, before)

    with _errors_to(report):
        use.refuse()


def _run_on_meta(module: nn.Module, batch: THDBatch, run: StepFunction, report: Report) -> None:
    """Run a step without values, which shows where it reads one."""
    with _errors_to(report), without_saved_states(), _autocast_knows_meta():
        keep_frequencies(module)  # this compares values, which "meta" does not have
        module = module.to("meta")
        batch = batch.to("meta")
        _forward_backward(module, batch, run, report)  # builds tables and fills caches
        with refused_reads():
            _forward_backward(module, batch, run, report)


def _forward_backward(module: nn.Module, batch: THDBatch, run: StepFunction, report: Report) -> None:
    """Run a step and its backward pass, without leaving gradients in the parameters."""
    leaves = [p for p in module.parameters() if p.requires_grad]
    with guarded(module, report):
        output = run(module, StaticBatch.watching(batch, report))
    differentiate(differentiable(output), leaves)


@contextmanager
def _errors_to(report: Report) -> Iterator[None]:
    """Report an error that ends this context, and go on behind it."""
    try:
        yield
    except Exception as error:
        problem = as_capture_error(error)
        report(problem.message, problem.where)


def _default_step(module: nn.Module) -> StepFunction:
    if not isinstance(module, L.LightningModule):
        return causal_lm_loss

    def training_step(module: Any, batch: StaticBatch) -> Any:
        # As Lightning decides whether to pass it.
        if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            batch_idx = HostValue("argument 2 of training_step (batch_idx)", batch._report)
            return module.training_step(batch, batch_idx)
        return module.training_step(batch)

    return training_step


def _copy(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module, which shares its Trainer."""
    trainer = trainer_of(module) if isinstance(module, L.LightningModule) else None
    return copy.deepcopy(module, {id(trainer): trainer})


@contextmanager
def _autocast_knows_meta() -> Iterator[None]:
    """Let torch's autocast treat the meta device, which it refuses, as the CPU."""
    available: Any = torch.amp.autocast_mode
    places = [(torch, name) for name in _AUTOCAST] + [(available, "is_autocast_available")]
    originals = [getattr(owner, name) for owner, name in places]
    for (owner, name), function in zip(places, originals, strict=True):
        setattr(owner, name, _with_meta(function))
    try:
        yield
    finally:
        for (owner, name), function in zip(places, originals, strict=True):
            setattr(owner, name, function)


def _with_meta(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gets "cpu" where it is called with "meta"."""
    return lambda *args, **kwargs: function(*("cpu" if x == "meta" else x for x in args), **kwargs)
