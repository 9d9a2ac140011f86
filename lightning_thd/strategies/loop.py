"""A ``THDStep`` -> one optimizer step over all its microbatches, inside one Lightning batch.

Under automatic optimisation, Lightning's closure calls training_step, then zero_grad, then backward. So the
first microbatch's forward pass runs in ``training_step`` and all other passes in ``backward``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.tuner import lr_finder
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.strategies.axes import cuts_weights, gathers_once
from lightning_thd.strategies.guards import refuse_static_graph
from lightning_thd.strategies.logs import StepLogs
from lightning_thd.warnings import THDWarning, warn


class StepLoop:
    """Runs the microbatches of a ``THDStep``; the base strategy runs batches of any other kind."""

    def __init__(self, strategy: Any, run: Callable[..., Any]) -> None:
        self._strategy, self._run = strategy, run
        self._step: tuple[THDStep, tuple[Any, ...]] | None = None
        self._losses: list[Tensor] = []
        self._logs: StepLogs | None = None

    def takes(self, batch: object) -> bool:
        """Return whether the loop runs a batch."""
        return isinstance(batch, THDStep)

    @property
    def is_running(self) -> bool:
        """Return whether a step has begun and not ended."""
        return self._step is not None

    def first(self, batch: Any, *args: Any) -> Any:
        """Run the first microbatch forward and return what the user's ``training_step`` returned."""
        trainer = self._strategy._trainer
        if not trainer.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                "Sequences(n) steps run under automatic optimisation: with automatic_optimization=False a "
                "module would see only the first microbatch. Use Packs(n), or automatic optimisation."
            )
        if (accumulate := trainer.accumulate_grad_batches) != 1:
            raise MisconfigurationException(
                f"accumulate_grad_batches={accumulate}, but a THDStep holds all microbatches of a step. Set "
                "it to 1, or give THDBatch, as THDDataModule(global_batch=Packs(n)) does."
            )
        if len(batch) > 1:
            refuse_static_graph(self._strategy.model)
        self._step = (batch, args)
        self._logs = StepLogs(trainer, microbatches=len(batch))
        output = self._forward(batch.microbatches[0], args, last=len(batch) == 1)
        warn_of_extras(output, len(batch))
        self._losses = [loss_of(output).detach()]
        return output

    def rest(self, first_loss: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        """Backpropagate the first microbatch, then run the others. A loss is divided by ``len(step)``."""
        assert self._step is not None
        assert self._logs is not None
        step, args = self._step
        with self._synchronised(last=len(step) == 1):
            result = backward(first_loss / len(step))
        for i, batch in enumerate(step.microbatches[1:], start=2):
            last = i == len(step)
            loss = loss_of(self._forward(batch, args, last=last))
            self._losses.append(loss.detach())
            with self._synchronised(last=last):
                result = backward(loss / len(step))
        self._logs.finish()
        return result

    def mean_loss(self) -> Tensor | None:
        """Return the mean of the losses of this rank's microbatches, or None if no step has run."""
        if not self._losses:
            return None
        return sum(self._losses[1:], start=self._losses[0]) / len(self._losses)

    def report(self, result: Any) -> None:
        """Report the step's mean loss to callbacks; for a learning-rate finder, the mean over all ranks."""
        mean = self.mean_loss()
        if mean is not None:
            result.loss = mean
        # While it runs, Lightning's learning-rate finder has put a callback of its module into the Trainer.
        callbacks = self._strategy._trainer.callbacks
        finds = any(type(callback).__module__ == lr_finder.__name__ for callback in callbacks)
        if result.loss is not None and finds:
            result.loss = self._strategy.reduce(result.loss.detach(), reduce_op="mean")

    def end(self) -> None:
        """Forget the step."""
        self._step, self._logs, self._losses = None, None, []

    def _forward(self, batch: THDBatch, args: tuple[Any, ...], *, last: bool) -> Any:
        assert self._logs is not None
        before = self._logs.begin(batch)
        try:
            with self._synchronised(last=last):
                output = self._run(batch, *args)
        finally:
            self._logs.close()
        self._logs.end(before)
        return output

    @contextmanager
    def _synchronised(self, *, last: bool) -> Generator[None]:
        """Unless ``last``, leave gradients unreduced, and weights gathered if ``gathers_once`` says so."""
        if last:
            yield
            return
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(self._strategy.block_backward_sync())
            if gathers_once(self._strategy):
                contexts.enter_context(_without("set_reshard_after_backward", self._strategy.model))
            yield


def local_gradients(strategy: Any) -> AbstractContextManager[Any] | None:
    """Return a context in which FSDP1 or FSDP2 leaves gradients unreduced; None for other strategies."""
    model = getattr(strategy, "model", None)
    if isinstance(strategy, FSDPStrategy) and isinstance(model, FullyShardedDataParallel):
        context: AbstractContextManager[Any] = model.no_sync()
        return context
    if cuts_weights(strategy) and model is not None:
        return _without("set_requires_gradient_sync", model)
    return None


@contextmanager
def _without(setting: str, model: nn.Module) -> Generator[None]:
    sharded = [child for child in model.modules() if isinstance(child, FSDPModule)]
    for module in sharded:
        getattr(module, setting)(False, recurse=False)
    try:
        yield
    finally:
        for module in sharded:
            getattr(module, setting)(True, recurse=False)


def loss_of(output: object) -> Tensor:
    """Return the loss in the output of ``training_step``, or refuse an output without one."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise MisconfigurationException(
            f"training_step returned {type(loss).__name__} for a microbatch of a step, wanted the "
            "loss tensor, or a dict with it under 'loss'. Skipping part of a step would change its loss."
        )
    return loss


def warn_of_extras(output: object, microbatches: int) -> None:
    """Warn that callbacks get only one microbatch's outputs of ``training_step``, apart from the loss."""
    extras = [name for name in output if name != "loss"] if isinstance(output, Mapping) else []
    if extras and microbatches > 1:
        warn(
            f"training_step returns {extras} beside the loss, and this step has {microbatches} microbatches: "
            "on_train_batch_end gets the values of only one microbatch. Log them by self.log.",
            THDWarning,
        )
