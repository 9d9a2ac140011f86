"""A ``THDStep`` -> one optimizer step over all its microbatches, inside one Lightning batch.

Under automatic optimisation, Lightning's closure calls training_step, then zero_grad, then backward. So the
first microbatch's forward pass runs in ``training_step`` and all other passes in ``backward``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import FSDPStrategy
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
        self._strategy = strategy
        self._run = run  # the forward pass of one microbatch
        self._step: tuple[THDStep, tuple[Any, ...]] | None = None  # and what else training_step takes
        self._losses: list[Tensor] = []  # one of each microbatch that has run, detached
        self._logs: StepLogs | None = None
        self._callbacks: list[Any] = strategy._trainer.callbacks

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
        accumulate = trainer.accumulate_grad_batches
        if accumulate != 1:
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
        """Backpropagate the first microbatch, then run the others. A loss is divided by ``len(step)``.

        A microbatch's ``loss_scale`` has that number as a factor, so that the sum of the quotients is the
        loss of the step.
        """
        assert self._step is not None
        assert self._logs is not None
        step, args = self._step
        with self._synchronised(last=len(step) == 1):
            result = backward(first_loss / len(step))

        for number, batch in enumerate(step.microbatches[1:], start=2):
            last = number == len(step)
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
        """Report the step's mean loss to callbacks; to a learning-rate finder, the mean over all ranks.

        ``result`` is what Lightning's closure returned; its ``loss`` is the first microbatch's.
        """
        mean = self.mean_loss()
        if mean is not None:
            result.loss = mean
        if result.loss is not None and self._may_search_learning_rate():
            result.loss = self._strategy.reduce(result.loss.detach(), reduce_op="mean")

    def _may_search_learning_rate(self) -> bool:
        """Return whether Lightning may be searching a learning rate.

        Its search ends when the loss gets too large. Each rank decides that by the loss that it sees, so
        ranks with different losses would end at different steps, and wait for each other forever.
        """
        if any(isinstance(callback, LearningRateFinder) for callback in self._callbacks):
            return True  # also after a search: a subclass may search again at any epoch
        # A callback of the user may call LearningRateFinder.lr_find() without being one. A search replaces
        # the Trainer's list of callbacks while it runs.
        return self._strategy._trainer.callbacks is not self._callbacks

    def end(self) -> None:
        """Forget the step."""
        self._step = None
        self._logs = None
        self._losses = []

    def _forward(self, batch: THDBatch, args: tuple[Any, ...], *, last: bool) -> Any:
        """Run one microbatch forward, with its logs collected; return the output of ``training_step``."""
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
    """Turn a setting of FSDP2, the name of its setter, off in all parts of a model inside this context."""
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
    if not isinstance(output, Mapping) or microbatches == 1:
        return
    extras = [name for name in output if name != "loss"]
    if extras:
        warn(
            f"training_step returns {extras} beside the loss, and this step has {microbatches} microbatches: "
            "on_train_batch_end gets the values of only one microbatch. Log them by self.log.",
            THDWarning,
        )
