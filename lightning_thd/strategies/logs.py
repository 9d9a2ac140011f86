"""Values that ``training_step`` logs in every microbatch of a step -> one logged value per step."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

from lightning_thd._user_code import user_line
from lightning_thd.batch import THDBatch
from lightning_thd.batch.thd_batch import epoch_weight, weighing_rows
from lightning_thd.batch.upload import uploaded

_FX = "training_step"


class StepLogs:
    """Reduces the values that ``training_step`` logs in a step's microbatches to one value per name."""

    def __init__(self, trainer: L.Trainer, *, microbatches: int) -> None:
        self._trainer, self._microbatches = trainer, microbatches
        self._logged: dict[str, list[Tensor]] = {}
        self._weight = 0.0  # the sum over microbatches that have begun
        # Values, known from earlier steps, whose reduction over ranks waits for the end of the step.
        known = self._values() if microbatches > 1 else {}
        self._late = {key: value for key, value in known.items() if value.meta.sync.should}

    def begin(self, batch: THDBatch) -> str | None:
        """Let Lightning log as in ``training_step``; return the name of the hook that really runs."""
        if self._results is not None:
            self._weight += weigh(self._results, epoch_weight(batch))
            for value in self._values().values():
                value._forward_cache = None
        for value in self._late.values():
            value.meta.sync._fn = value.meta.sync.no_op
        module = self._trainer.lightning_module
        before, module._current_fx_name = module._current_fx_name, _FX
        # Another hook may have logged since the last microbatch. Then, without this line, Lightning would
        # restart the epoch's sums in the first batch of an epoch.
        self._trainer._logger_connector._current_fx = _FX
        return before

    def end(self, before: str | None) -> None:
        """Collect the values that the microbatch logged."""
        self.close()
        self._trainer.lightning_module._current_fx_name = before
        for key, value in self._values().items():
            if value._forward_cache is not None:
                self._logged.setdefault(key, []).append(value._forward_cache)
        for value in self._on_step().values():
            if self._microbatches > 1 and not value.is_tensor:
                raise MisconfigurationException(
                    f"self.log({value.meta.name!r}, {type(value.value).__name__}, on_step=True) in a step of "
                    "several microbatches would log only the last. Log it with on_step=False, on_epoch=True."
                )

    def close(self) -> None:
        """Give Lightning its reduction back; called also after a microbatch that raised an error."""
        for value in self._late.values():
            value.meta.sync._generate_sync_fn()

    def finish(self) -> None:
        """Reduce the collected values, and store the results where Lightning reads a step's values."""
        for key, value in self._values().items():
            if values := self._logged.get(key):
                reduced = _reduce(torch.stack(values), value.meta)
                value._forward_cache = value.meta.sync(reduced) if key in self._late else reduced
                if not value.meta.on_epoch:
                    value.value = value._forward_cache
        self._logged.clear()
        if self._results is not None:  # values that later hooks log get the step's weight
            weigh(self._results, self._weight)

    @property
    def _results(self) -> Any:
        return self._trainer._results

    def _values(self) -> dict[str, Any]:
        """Return the tensors logged on_step by ``training_step``; a logged Metric accumulates by itself."""
        return {key: value for key, value in self._on_step().items() if value.is_tensor}

    def _on_step(self) -> dict[str, Any]:
        results = self._results or {}
        return {key: value for key, value in results.items() if value.meta.fx == _FX and value.meta.on_step}


def weigh(results: Any, weight: float) -> float:
    """Let values that are logged on_epoch from now on count with ``weight``, and return it."""
    results.batch, results.batch_size = (weighing_rows(weight),), None
    return weight


def _reduce(values: Tensor, meta: Any) -> Tensor:
    if meta.is_sum_reduction:
        return values.sum()
    if meta.is_max_reduction:
        return values.max()
    return values.min() if meta.is_min_reduction else values.mean()


class SyncedMetrics:
    """Lets metrics without a group gather only from ranks that see different tokens, until ``close``."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._metrics = [metric for metric in metrics if metric.process_group is None]
        for metric in self._metrics:
            metric.process_group = group

    def close(self) -> None:
        """Remove the group from the metrics, because the group ends with the job and cannot be copied."""
        for metric in self._metrics:
            metric.process_group = None


def refuse_sums(module: nn.Module, *, dynamic: bool) -> None:
    """Refuse sums over ranks that share packs, unless a ``process_group`` says which ranks to sum over."""
    for name, child in module.named_modules():
        if isinstance(child, SumMetric) and child.process_group is None:
            raise MisconfigurationException(
                f"{type(module).__name__}.{name} is a {type(child).__name__} while ranks share packs. In "
                f"setup(), set its process_group to {groups_of_sums(dynamic=dynamic)}"
            )


def groups_of_sums(*, dynamic: bool) -> str:
    """Return the end of a message: which group to sum over."""
    more = "See docs/reference/messages.md#sums."
    world = "torch.distributed.group.WORLD for a count of each rank's slots"
    if dynamic:
        return f"{world}; under context_parallel_size='dynamic' no group counts each pack just once. {more}"
    return f"self.trainer.strategy.data_parallel_group for a value of the whole pack, or to {world}. {more}"


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_cpu


class RecordedLogs:
    """Records the ``self.log`` calls of a pipeline's step, and logs the last stage's values on all stages."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
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
                    f"stage has the numbers. Log numbers, and pass options by keyword.\n  {user_line()}"
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

    def values(self, losses: Sequence[Tensor]) -> tuple[list[float], list[dict[str, float]]]:
        """Return the last stage's losses and what it logged in each microbatch, by one read of the device."""
        chunk = max(chunk for _, chunk in self._calls)
        logged = [{k: value for k, (value, _) in self._calls[m, chunk].items()} for m in range(len(losses))]
        on_device = [*losses, *(x for row in logged for x in row.values() if _is_on_device(x))]
        numbers = iter(torch.stack([x.reshape(()).double() for x in on_device]).tolist())
        read = [next(numbers) for _ in losses]
        rows = [
            {k: next(numbers) if _is_on_device(x) else float(x) for k, x in row.items()} for row in logged
        ]
        return read, rows

    def log(self, batches: Sequence[THDBatch], logged: Sequence[Mapping[str, float]]) -> None:
        """Log the last stage's values of every microbatch, in the order of the microbatches, on this rank."""
        module, device = self._trainer.lightning_module, self._trainer.strategy.root_device
        logs = StepLogs(self._trainer, microbatches=len(logged))
        # The values go to the device, because sync_dist reduces them there and NCCL refuses CPU tensors.
        rows = uploaded([np.array([*values.values()], np.float64) for values in logged], device)
        for m, values in enumerate(logged):
            before = logs.begin(batches[m])
            own = [calls for (microbatch, _), calls in self._calls.items() if microbatch == m]
            options = {name: given for calls in own for name, (_, given) in calls.items()}
            for name, value in zip(values, rows[m], strict=True):
                if name not in options:
                    raise MisconfigurationException(
                        f"The last pipeline stage logged {name!r} in training_step, but this stage did not. "
                        "Log the same names on every rank, whatever the loss is."
                    )
                module.log(name, value, **options[name])
            logs.end(before)
        logs.finish()
