"""An optimizer and a graphed step -> the same updates, from a graph if gradients keep their addresses.

A graph holds the update of all parameters. It reads the learning rate, in fp32, from a tensor that is filled
before every replay, and keeps all other settings. The update runs eagerly in every other case.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_thd.cuda_graph.backend import Backend
from lightning_thd.cuda_graph.errors import CaptureError, as_capture_error
from lightning_thd.cuda_graph.graphed_step import GraphedStep
from lightning_thd.warnings import SlowWarning, warn

# Sums over microbatches and gradients of each bucket have addresses of their own, so each has a graph.
_MOST_GRAPHS = 8
_MOST_CAPTURES = 24  # with settings that change in every step, graphs stay off after this many

_GRADIENT: Any = attrgetter("grad")
_address: Any = Tensor.data_ptr


def cannot_capture_optimizer(optimizer: Optimizer) -> str | None:
    """Return why the step of an optimizer cannot be captured, and what to do, or None."""
    kind = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim"):
        return (
            f"capture_optimizer=True takes optimizers of torch.optim, and {kind} is another, whose step may "
            "do work on the host that a replay would leave out. Leave capture_optimizer out."
        )

    for group in optimizer.param_groups:
        if not (group.get("capturable") or group.get("fused")):
            return (
                f"capture_optimizer=True needs an optimizer that counts its steps on the device, and {kind} "
                f"has a group with fused={group.get('fused')} and capturable={group.get('capturable')}. Pass "
                "torch.optim.AdamW(..., fused=True), or capturable=True; or leave capture_optimizer out."
            )

    replacement = vars(optimizer).get("step")
    if replacement is not None and not _is_of_a_schedule(replacement, optimizer):
        return (
            f"capture_optimizer=True: {kind}.step was replaced by {replacement!r}, which a replay would not "
            "call. Leave capture_optimizer out, or the replacement."
        )
    return None


def _is_of_a_schedule(step: Any, optimizer: Optimizer) -> bool:
    """Return whether a learning rate schedule put this function in place of ``step``, to note its calls.

    A schedule wraps the step of an optimizer, but not one that a schedule has wrapped. So another optimizer
    gets this step, and then a schedule, which leaves it there if it is a schedule's.
    """
    if getattr(step, "__wrapped__", None) is not type(optimizer).step:  # it runs another function
        return False

    other = torch.optim.SGD([torch.zeros(())], lr=1.0)
    step_of_other = types.MethodType(step, other)
    other.step = step_of_other  # type: ignore[method-assign]
    torch.optim.lr_scheduler.LambdaLR(other, lambda _: 1.0)
    return other.step is step_of_other


class _Update:
    """The captured update of an optimizer's parameters, from gradients with fixed addresses."""

    def __init__(self, optimizer: Optimizer, gradients: Sequence[Tensor | None]) -> None:
        self.gradients = gradients
        self.parameters = _parameters(optimizer)
        self.rates = [_rate_like(group) for group in optimizer.param_groups]
        self.graph: Any = None
        self._addresses = [*map(_address, self.parameters)]
        self._settings = _settings(optimizer)

        # Every value of every parameter's state, as three lists that ``holds`` compares without a loop.
        self._state = optimizer.state
        self._states = [*map(optimizer.state.get, self.parameters)]
        entries = [(state, name) for state in self._states if state for name in state]
        self._owners = [state for state, _ in entries]
        self._names = [name for _, name in entries]
        self._values = [state[name] for state, name in entries]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the update writes, and the gradients, which it may write."""
        states = [x for x in self._values if isinstance(x, Tensor)]
        return [*self.parameters, *states, *(x for x in self.gradients if x is not None)]

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether parameters, states and settings are those of the capture."""
        if optimizer.state is not self._state or _settings(optimizer) != self._settings:
            return False
        if [*map(_address, self.parameters)] != self._addresses:
            return False
        # There are hundreds of states, so they are compared without a loop in Python.
        if not all(map(is_, map(self._state.get, self.parameters), self._states)):
            return False
        return all(map(is_, map(dict.get, self._owners, self._names), self._values))

    def fill_rates(self, optimizer: Optimizer) -> None:
        """Copy the learning rates of all groups into the tensors that the graph reads."""
        for rate, group in zip(self.rates, optimizer.param_groups, strict=True):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device == rate.device:
                rate.copy_(lr)
            else:
                rate.fill_(float(lr))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _settings(optimizer: Optimizer) -> list[list[tuple[str, Any]]]:
    """Return the settings of all groups that a graph keeps: all but the learning rate and the schedule's."""
    left_out = ("params", "lr", "initial_lr")
    return [[(k, v) for k, v in group.items() if k not in left_out] for group in optimizer.param_groups]


def _rate_like(group: dict[str, Any]) -> Tensor:
    """Return a tensor for the learning rate of a group, on the device of its parameters."""
    device = group["params"][0].device if group["params"] else None
    return torch.zeros((), dtype=torch.float32, device=device)


class GraphedOptimizer(contextlib.AbstractContextManager["GraphedOptimizer"]):
    """Replaces ``optimizer.step`` inside its context by one that replays graphs of the update.

    The first step runs eagerly. ``step.stats`` counts replayed updates, and eager ones by reason.

    Args:
        optimizer: its groups have ``fused=True`` or ``capturable=True``.
        step: the graphed step that computes the gradients, with ``keep_gradients=False``.

    Raises:
        ValueError: if the optimizer cannot be captured.
    """

    def __init__(self, optimizer: Optimizer, step: GraphedStep) -> None:
        reason = cannot_capture_optimizer(optimizer)
        if reason is not None:
            raise ValueError(reason)

        self._optimizer = optimizer
        self._step = step
        self._updates: list[_Update] = []
        self._have_states: set[int] = set()  # ids of the parameters that an eager step has updated
        self._captures = 0  # captures of updates
        self._rounds = 0  # captures of the step, after which gradients have other addresses
        self._off = False
        self._bare: Callable[..., Any] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # no hooks
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> GraphedOptimizer:
        optimizer = self._optimizer
        eager_step = optimizer.step
        of_schedule = vars(optimizer).get("step")  # a schedule's, which notes calls; or None
        with_hooks = Optimizer.profile_hook_step(self._update)

        @functools.wraps(eager_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not self._off and self._have_states:
                return with_hooks(*args, **kwargs)
            loss = eager_step(*args[1:], **kwargs)
            self._note_eager_step()
            return loss

        def restore() -> None:
            del optimizer.step
            if of_schedule is not None:
                optimizer.step = of_schedule  # type: ignore[method-assign]

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        self._restore.callback(restore)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore.close()
        self._updates.clear()

    def _note_eager_step(self) -> None:
        """Note the parameters that an eager step updated, which therefore have their states."""
        updated = [p for p in _parameters(self._optimizer) if p.grad is not None]
        self._have_states.update(map(id, updated))

    def _update(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, then replay the update, or run it eagerly."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        update = self._find(optimizer)
        stats = self._step.stats
        if isinstance(update, str):
            stats.optimizer_fallbacks[update] += 1
            self._bare(optimizer)
            self._note_eager_step()
        else:
            stats.optimizer_replays += 1
            update.fill_rates(optimizer)
            update.graph.replay()
        return loss

    def _find(self, optimizer: Optimizer) -> _Update | str:
        """Return the captured update of these gradients, after a capture if needed, or why there is none."""
        if getattr(optimizer, "grad_scale", None) is not None:
            return "grad_scaler"  # a GradScaler gave a fused optimizer new tensors for this step
        if self._rounds != self._step.stats.captures or self._step.off is not None:
            self._updates.clear()  # gradients have other addresses now
            self._rounds = self._step.stats.captures

        parameters = _parameters(optimizer)
        gradients = [*map(_GRADIENT, parameters)]
        if not self._step.writes(gradients):
            return "gradients"

        for update in self._updates:
            if len(parameters) == len(update.parameters) and all(map(is_, gradients, update.gradients)):
                if all(map(is_, parameters, update.parameters)) and update.holds(optimizer):
                    return update
                self._updates.remove(update)  # the optimizer changed since, so that its graph is no use
                break
        return self._capture(optimizer, gradients)

    def _capture(self, optimizer: Optimizer, gradients: list[Tensor | None]) -> _Update | str:
        """Capture the update of these gradients, or return why there is none."""
        if self._off:
            return "capture_error"

        pairs = zip(_parameters(optimizer), gradients, strict=True)
        if any(id(p) not in self._have_states for p, gradient in pairs if gradient is not None):
            return "new_state"  # an eager step makes it

        if self._captures >= _MOST_CAPTURES or len(self._updates) >= _MOST_GRAPHS:
            self._give_up(
                CaptureError(
                    "the optimizer's settings or states changed in too many steps. A schedule of the "
                    "learning rate is fine, and one of betas is not: pass cycle_momentum=False."
                )
            )
            return "capture_error"

        self._captures += 1
        update = _Update(optimizer, gradients)
        update.fill_rates(optimizer)
        backend: Backend = self._step.backend
        written: list[Tensor] = []
        if getattr(backend, "runs_captures", False):  # it records on the CPU, by running what it captures
            written = update.tensors()
        try:
            with _for_capture(optimizer, update.rates), _unchanged(written):
                update.graph, _ = backend.capture(lambda: self._bare(optimizer))
        except Exception as error:  # ``_give_up`` warns of it, or raises it with ``require``
            self._give_up(as_capture_error(error))
            return "capture_error"

        self._updates.append(update)
        return update

    def _give_up(self, error: CaptureError) -> None:
        """Run all later updates eagerly, and warn of the reason, or raise it."""
        self._off = True
        self._updates.clear()
        if self._step.require:
            raise CaptureError(error.message, error.where)
        warn(f"The optimizer's step runs eagerly: its capture failed. {error}", SlowWarning)


@contextlib.contextmanager
def _for_capture(optimizer: Optimizer, rates: Sequence[Tensor]) -> Iterator[None]:
    """Let groups read their learning rates from tensors, and pass torch's check for captures."""
    # A fused update is the same with and without ``capturable``: its step count is on the device anyway.
    settings = [(group["lr"], group.get("capturable")) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, (lr, capturable) in zip(optimizer.param_groups, settings, strict=True):
            group["lr"] = lr
            if "capturable" in group:
                group["capturable"] = capturable


@contextlib.contextmanager
def _unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the values of tensors when this context ends."""
    values = [x.detach().clone() for x in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
