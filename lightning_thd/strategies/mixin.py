"""A ``THDStep`` -> all its microbatches run inside one Lightning batch, under automatic optimisation.

Lightning's closure runs training_step, then zero_grad, then backward. So the first microbatch's forward runs
in ``training_step`` and all that is left in ``backward``: one zero_grad, one clipping, one optimizer and
scheduler step a ``THDStep``, however many microbatches it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.strategies.dynamic import log_traffic
from lightning_thd.strategies.guards import refuse_static_graph, refuse_unused_layout
from lightning_thd.strategies.hosts import kept_weights, refuse_host
from lightning_thd.strategies.modules.unfrozen import reduces_now
from lightning_thd.strategies.sharding import ShardingMixin
from lightning_thd.strategies.step_logs import StepLogs, weigh


class THDStrategyMixin(ShardingMixin):
    """Runs steps of varying microbatches: put it before a Lightning strategy in the bases of your own.

    ``class MyStrategy(THDStrategyMixin, DDPStrategy)`` runs ``Sequences(n)``. Batches of any other type go
    the base strategy's way untouched. Gradients are synchronised in the last microbatch alone,
    ``outputs["loss"]`` is the mean over the microbatches, and ``self.log`` gives one value a step.

    With the attribute ``context_parallel_size`` above 1 (see ``ContextParallelMixin`` for the others) ranks
    share packs: batches are cut after they were moved, and data is handed out to groups of ranks. On a
    ``ModelParallelStrategy`` the model is cut and sharded too, over the axes that the strategy's arguments or
    these attributes give (see ``ShardingMixin``).

    Raises:
        TypeError: when a class puts it on a strategy that runs steps by itself: DeepSpeed, XLA.
    """

    runs_thd_steps = True

    _pending: tuple[THDStep, tuple[Any, ...]] | None = None
    _losses: list[Tensor] | None = None
    _logs: StepLogs | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_host(cls)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first microbatch of a ``THDStep`` forward, or any other batch as usual."""
        self._pending, self._losses = None, None
        batch, *rest = args
        if not isinstance(batch, THDStep):
            if isinstance(batch, THDBatch) and self._trainer._results is not None:
                weigh(self._trainer._results, batch)
            output = super().training_step(*args, **kwargs)
            refuse_unused_layout(batch)
            return output
        trainer = self._trainer
        if not trainer.lightning_module.automatic_optimization:
            raise MisconfigurationException(
                "Sequences(n) steps run under automatic optimisation: with automatic_optimization=False a "
                "module would see the first microbatch alone. Use Packs(n), or automatic optimisation."
            )
        if len(batch) > 1:
            refuse_static_graph(self.model)
        self._pending = (batch, tuple(rest))
        self._logs = StepLogs(trainer, microbatches=len(batch), metrics=self._metrics)
        output = self._forward(batch.microbatches[0], tuple(rest), last=len(batch) == 1)
        warn_of_extras(output, len(batch))
        self._losses = [loss_of(output).detach()]
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Backpropagate the first microbatch, then run the others, each weighing 1 / their number."""
        if self._pending is None:
            result = super().backward(closure_loss, optimizer, *args, **kwargs)
            self._average_unfrozen()
            return result
        step, rest = self._pending
        assert self._losses is not None
        assert self._logs is not None
        with self._synchronised(last=len(step) == 1):
            result = super().backward(closure_loss / len(step), optimizer, *args, **kwargs)
        for i, batch in enumerate(step.microbatches[1:], start=2):
            last = i == len(step)
            loss = loss_of(self._forward(batch, rest, last=last))
            self._losses.append(loss.detach())
            with self._synchronised(last=last):
                result = super().backward(loss / len(step), optimizer, *args, **kwargs)
        self._average_unfrozen()
        self._logs.finish()
        return result

    def _average_unfrozen(self) -> None:
        if self._unfrozen is not None and reduces_now(self.model):
            self._unfrozen.average()

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Update the weights as the base strategy does, and report the mean loss of the step to callbacks."""
        if self._count_groups() != self._groups:  # a callback may have added one
            self._no_foreach_over_meshes()
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if isinstance(closure, Closure) and closure._result is not None:
            self._report_loss(closure._result)
        self._pending, self._losses, self._logs = None, None, None
        if self.context_parallel_size != 1:
            log_traffic(self._trainer)
        return result

    def _report_loss(self, result: Any) -> None:
        """Write the loss of the whole step into what callbacks get; of all ranks, for a rate finder."""
        if self._losses:
            result.loss = sum(self._losses[1:], start=self._losses[0]) / len(self._losses)
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        if result.loss is not None and any(isinstance(callback, _LRCallback) for callback in callbacks):
            result.loss = self.reduce(result.loss.detach(), reduce_op="mean")

    def _forward(self, batch: THDBatch, rest: tuple[Any, ...], *, last: bool) -> Any:
        assert self._logs is not None
        before = self._logs.begin(batch)
        try:
            with self._synchronised(last=last):
                output = super().training_step(batch, *rest)
        finally:
            self._logs.close()
        refuse_unused_layout(batch)
        self._logs.end(before)
        return output

    @contextlib.contextmanager
    def _synchronised(self, *, last: bool) -> Generator[None]:
        """Leave gradients unreduced, and weights gathered if they may be, but in the last microbatch."""
        if last:
            yield
            return
        with self.block_backward_sync(), kept_weights(self):
            yield

    @property
    def _trainer(self) -> L.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def loss_of(output: object) -> Tensor:
    """Return the loss in the output of ``training_step``.

    Raises:
        MisconfigurationException: when there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise MisconfigurationException(
            f"training_step returned {type(loss).__name__} for a microbatch of a Sequences(n) step, wanted "
            "the loss tensor, or a dict with it under 'loss'. Skipping part of a step would change its loss."
        )
    return loss


def warn_of_extras(output: object, microbatches: int) -> None:
    """Warn that callbacks get what ``training_step`` returns beside the loss of one microbatch alone."""
    extras = [name for name in output if name != "loss"] if isinstance(output, Mapping) else []
    if extras and microbatches > 1:
        rank_zero_warn(
            f"training_step returns {extras} beside the loss, and this step has {microbatches} microbatches: "
            "on_train_batch_end gets them of one microbatch alone. Log them by self.log, which reduces over "
            "all of them, or gather them on the module in training_step."
        )
