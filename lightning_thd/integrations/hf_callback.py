"""A ``TrainerCallback`` of transformers that measures throughput on padded batches or packs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_thd._imports import require
from lightning_thd._static import only_looking
from lightning_thd.callbacks.loggers import for_loggers
from lightning_thd.callbacks.monitor import THDThroughputMonitor
from lightning_thd.flops.model import FlopsModel
from lightning_thd.integrations.hf_options import precision_of

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    TrainerCallback = require("transformers", feature="ThroughputCallback").TrainerCallback

_KEY = "lightning_thd.throughput"  # A TrainerState holds the totals under this key.


class ThroughputCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for mypy
    """Adds FLOP/s, MFU, tokens/s and real tokens per slot to the logs of any transformers ``Trainer``.

    The keys are those of ``THDThroughputMonitor`` without ``train/``, because reporters add that prefix.

    Args:
        peak: dense FLOP/s of one device; "auto" looks the device up, "measure" times matmuls once.
        flops_model: the model that counts FLOPs; None reads the transformers config of the model.
        warmup_steps: number of first optimizer steps that are left out of the rates.

    Attributes:
        monitor: the monitor that measures; ``monitor.latest`` holds the metrics of the last log.
    """

    def __init__(
        self,
        *,
        peak: Literal["auto", "measure"] | float = "auto",
        flops_model: FlopsModel | None = None,
        warmup_steps: int = 1,
    ) -> None:
        self.monitor = THDThroughputMonitor(peak=peak, flops_model=flops_model, warmup_steps=warmup_steps)
        self.reference: nn.Module | None = None  # a frozen model whose forward passes count too
        self.counts_calls = True  # whether the hook counts; ``hf_rows`` sets False and calls ``count``
        self._handle: RemovableHandle | None = None
        self._inside_step = False  # whether the running step has trained a microbatch
        self._pending: dict[str, float] = {}

    def add_to(self, trainer: Any) -> None:
        """Add the callback in front of the reporters, so that TensorBoard and W&B log its metrics too."""
        trainer.callback_handler.callbacks.insert(1, self)  # behind the one that decides to log and save

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the FLOPs model and a checkpoint's totals; register a hook that counts the model's inputs."""
        model: nn.Module = kwargs["model"]
        self.monitor.load_state_dict(state.stateful_callbacks.get(_KEY, {}))
        models = model
        if self.reference is not None:
            models = nn.ModuleList([model, self.reference])
        self.monitor.watch(models, precision=precision_of(args))
        if self._handle is not None:  # an error ended the training before
            self._handle.remove()
        self._handle = model.register_forward_pre_hook(
            only_looking(lambda module, args, kwargs: self._look(module, args, kwargs)), with_kwargs=True
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._inside_step = False
        self.monitor._begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step; measure if a log is due; stop the clock if the Trainer will evaluate or save."""
        self.monitor._end_step()
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure if a log is due; stop the clock and keep the totals for an evaluation or checkpoint."""
        step = state.global_step
        is_last = step == state.max_steps
        is_due = bool(state.logging_steps) and step % state.logging_steps == 0
        if control.should_log or is_due or is_last:
            self._pending |= for_loggers(self.monitor._publish(last=is_last))

        if control.should_evaluate or control.should_save:
            meter = self.monitor._meter("train")
            meter.pause()
            meter.reduce(whole=True)
            state.stateful_callbacks[_KEY] = meter.state()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock for an evaluation; the next step starts it again."""
        if "train" in self.monitor._meters:
            self.monitor._meters["train"].pause()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the metrics of the last interval to a log of training."""
        if logs is None or "loss" not in logs:
            return
        metrics = {key.removeprefix("train/"): value for key, value in self._pending.items()}
        self._pending = {}
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the cost of padding, and remove the hook from the model."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            self.monitor.finish()

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the inputs of a call of the model."""
        if not self.counts_calls:
            return
        inputs = dict(kwargs)
        if args:
            inputs.setdefault("input_ids", args[0])
        self._begin_count(module, inputs)
        self.count(module, inputs)

    def _begin_count(self, module: nn.Module, batch: Any) -> None:
        """Let the products of a model without a known config be counted from its first call in a step on."""
        flops = self.monitor._flops
        if flops is not None and module.training and torch.is_grad_enabled():
            flops.begin("train", batch, inside=self._inside_step)
            self._inside_step = True

    def count(self, module: nn.Module, batch: Any) -> None:
        """Count a batch if the model trains on it."""
        if module.training and torch.is_grad_enabled():
            self.monitor._add("train", batch)
