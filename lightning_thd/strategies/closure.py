"""Lightning's closure of a batch -> a closure that returns the loss of the whole optimizer step.

An optimizer with a line search compares the values that its closure returns, and calls it again on other
weights. Lightning's closure returns the loss of the first microbatch on its own rank, so that ranks would
choose different steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_thd.strategies.loop import StepLoop

# The package of torch's own optimizers, without a private name: torch.optim.
_TORCH = torch.optim.Optimizer.__module__.rpartition(".")[0]


def uses_value_of_closure(optimizer: Any) -> bool:
    """Return whether an optimizer may use the loss that its closure returns.

    Of torch's own optimizers only LBFGS does. Others only pass the loss on.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, LBFGS):
        return True
    return not (isinstance(inner, Optimizer) and type(inner).__module__.startswith(f"{_TORCH}."))


def closure_of_step(
    strategy: Any, optimizer: Any, closure: Callable[[], Any], loop: StepLoop
) -> Callable[[], Any]:
    """Return a closure whose value is the loss of the step: the mean over its microbatches and all ranks.

    For optimizers that do not use the value it is ``closure`` itself, so that they cost no reduction.
    """
    if not uses_value_of_closure(optimizer):
        return closure
    _refuse_accumulation(strategy, optimizer)

    def loss_of_step() -> Any:
        value = closure()
        if not isinstance(value, Tensor):  # training_step returned None
            return value
        mean = loop.mean_loss()
        if mean is None:
            mean = value.detach()
        return strategy.reduce(mean, reduce_op="mean")

    return loss_of_step


@contextmanager
def kept_results(closure: object) -> Generator[list[Any]]:
    """Yield a list that holds, once Lightning's closure has run in this context, the result of its last run.

    Callbacks get the fields of that result. ``Closure.consume_result()`` would take it away from Lightning's
    loop, which calls that method itself after the optimizer's step. A closure that a module's own
    ``optimizer_step`` has made leaves the list empty.
    """
    results: list[Any] = []
    if not isinstance(closure, Closure):
        yield results
        return

    run = closure.closure

    def keeping_run(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        results[:] = [result]
        return result

    closure.closure = keeping_run  # type: ignore[method-assign]
    try:
        yield results
    finally:
        del closure.closure  # the closure and its batch would otherwise live until a garbage collection


def _refuse_accumulation(strategy: Any, optimizer: Any) -> None:
    """Refuse LBFGS on accumulated batches: when it calls the closure again, only the last batch would run."""
    batches = strategy.lightning_module.trainer.accumulate_grad_batches
    if batches != 1 and isinstance(getattr(optimizer, "optimizer", optimizer), LBFGS):
        raise MisconfigurationException(
            f"LBFGS with accumulate_grad_batches={batches}: LBFGS runs a step several times, and Lightning "
            "would repeat only its last batch. Use THDDataModule(global_batch=Sequences(n)), whose step is "
            "one batch, or another optimizer."
        )
