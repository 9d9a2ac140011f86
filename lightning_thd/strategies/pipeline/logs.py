"""``self.log`` on every stage of a pipeline -> the last stage's values, on all of them.

Only the last stage has the loss. What ``training_step`` logs there is recorded, sent to the other stages
once a step in one message, and then logged on every rank as if it had been computed there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_thd._user_code import user_line
from lightning_thd.batch import THDBatch
from lightning_thd.parallel.pipeline.channel import Channel
from lightning_thd.strategies.step_logs import StepLogs


class RecordedLogs:
    """Records the ``self.log`` calls of a step's forward passes, and logs those of the last stage."""

    def __init__(self, trainer: L.Trainer, channel: Channel) -> None:
        self._trainer, self._channel = trainer, channel
        # (microbatch, chunk) -> name -> value and options
        self._calls: dict[tuple[int, int], dict[str, tuple[Any, dict[str, Any]]]] = {}

    @contextlib.contextmanager
    def record(self, microbatch: int, chunk: int) -> Generator[None]:
        """Record what the module logs inside this context."""
        module: Any = self._trainer.lightning_module
        calls = self._calls.setdefault((microbatch, chunk), {})

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if args or not isinstance(value, Tensor | float | int):
                raise MisconfigurationException(
                    f"self.log({name!r}, {type(value).__name__}) in training_step: only the last pipeline "
                    "stage has the numbers, and sends them to the others. Log numbers or tensors of one "
                    f"element, options by keyword; update metric objects in validation_step.\n  {user_line()}"
                )
            calls[name] = (value.detach() if isinstance(value, Tensor) else value, kwargs)

        before = module.__dict__.get("log")
        module.__dict__["log"] = log
        try:
            yield
        finally:
            del module.__dict__["log"]
            if before is not None:
                module.__dict__["log"] = before

    def share(
        self, batches: Sequence[THDBatch], losses: Mapping[int, Tensor], *, holds_head: bool
    ) -> list[Tensor]:
        """Send the last stage's losses and logs, in running order, to all stages; return the losses."""
        message: list[Any] = [None]
        if holds_head:
            chunk = max(chunk for _, chunk in self._calls)
            logged = [
                {name: float(value) for name, (value, _) in self._calls[m, chunk].items()}
                for m in range(len(batches))
            ]
            message = [([float(losses[m]) for m in range(len(batches))], logged)]
        group = self._channel.down
        dist.broadcast_object_list(message, dist.get_global_rank(group, self._channel.ranks - 1), group=group)
        values, logged = message[0]
        self._log(batches, logged)
        device = self._trainer.strategy.root_device
        return [torch.tensor(value, dtype=torch.float64, device=device) for value in values]

    def _log(self, batches: Sequence[THDBatch], logged: Sequence[Mapping[str, float]]) -> None:
        module = self._trainer.lightning_module
        logs = StepLogs(self._trainer, microbatches=len(logged))
        for m, values in enumerate(logged):
            before = logs.begin(batches[m])
            for name, value in values.items():
                module.log(name, torch.tensor(value, dtype=torch.float64), **self._options(m, name))
            logs.end(before)
        logs.finish()

    def _options(self, microbatch: int, name: str) -> dict[str, Any]:
        for (m, _), calls in self._calls.items():
            if m == microbatch and name in calls:
                return calls[name][1]
        raise MisconfigurationException(
            f"The last pipeline stage logged {name!r} in training_step and this one did not. Log the same "
            "names on every rank, whatever the loss is."
        )
