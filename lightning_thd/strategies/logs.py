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

from lightning_thd._pages import see
from lightning_thd._private import private_of, set_private
from lightning_thd._user_code import user_line
from lightning_thd.batch import THDBatch
from lightning_thd.batch.thd_batch import epoch_weight, weighing_rows
from lightning_thd.batch.upload import uploaded

_FX = "training_step"
# Modules of Lightning in the table of private names.
_CONNECTOR = "lightning.pytorch.Trainer._logger_connector"
_RESULT = "lightning.pytorch.Trainer._results.values"


class StepLogs:
    """Reduces the values that ``training_step`` logs in a step's microbatches to one value per name.

    Lightning keeps a value of each name: ``_forward_cache``, what was logged last, and sums over the epoch.
    """

    def __init__(self, trainer: L.Trainer, *, microbatches: int) -> None:
        self._trainer = trainer
        self._microbatches = microbatches
        self._logged: dict[str, list[Tensor]] = {}  # name -> the value of each microbatch
        self._weight = 0.0  # the sum over microbatches that have begun
        # Values, known from earlier steps, whose reduction over ranks waits for the end of the step.
        values = self._values() if microbatches > 1 else {}
        self._late = {name: value for name, value in values.items() if value.meta.sync.should}

    def begin(self, batch: THDBatch) -> str | None:
        """Let Lightning log as in ``training_step``; return the name of the hook that really runs."""
        results = results_of(self._trainer)
        if results is not None:
            self._weight += weigh(results, epoch_weight(batch))
            for value in self._values().values():
                set_private(value, f"{_RESULT}._forward_cache", None)
        for value in self._late.values():
            # Lightning compares the options of each self.log() with the first. Only ``_fn`` is no option.
            set_private(value.meta.sync, f"{_RESULT}.meta.sync._fn", value.meta.sync.no_op)

        # Another hook may have logged since the last microbatch. Then, without the last line, Lightning would
        # restart the epoch's sums in the first batch of an epoch.
        before = self._set_hook(_FX)
        connector = private_of(self._trainer, "lightning.pytorch.Trainer._logger_connector")
        set_private(connector, f"{_CONNECTOR}._current_fx", _FX)
        return before

    def _set_hook(self, name: str | None) -> str | None:
        """Tell Lightning that a hook of this name runs, and return the name that it had before."""
        module = self._trainer.lightning_module
        attribute = "lightning.pytorch.LightningModule._current_fx_name"
        before: str | None = private_of(module, attribute)
        set_private(module, attribute, name)
        return before

    def end(self, before: str | None) -> None:
        """Collect the values that the microbatch logged; ``before`` is what ``begin`` returned."""
        self.close()
        self._set_hook(before)
        for name, value in self._values().items():
            logged = private_of(value, f"{_RESULT}._forward_cache")
            if logged is not None:
                self._logged.setdefault(name, []).append(logged)

        for value in self._on_step().values():
            if self._microbatches > 1 and not value.is_tensor:
                raise MisconfigurationException(
                    f"self.log({value.meta.name!r}, {type(value.value).__name__}, on_step=True) in a step of "
                    "several microbatches would log only the last. Log it with on_step=False, on_epoch=True."
                )

    def close(self) -> None:
        """Give Lightning its reduction back; called also after a microbatch that raised an error."""
        for value in self._late.values():
            value.meta.sync.should = True  # makes the reduction again

    def finish(self) -> None:
        """Reduce the collected values, and store the results where Lightning reads a step's values."""
        for name, value in self._values().items():
            logged = self._logged.get(name)
            if not logged:
                continue
            reduced = _reduce(torch.stack(logged), value.meta)
            if name in self._late:
                reduced = value.meta.sync(reduced)
            set_private(value, f"{_RESULT}._forward_cache", reduced)
            if not value.meta.on_epoch:
                value.value = reduced
        self._logged.clear()

        results = results_of(self._trainer)
        if results is not None:  # values that later hooks log get the step's weight
            weigh(results, self._weight)

    def _values(self) -> dict[str, Any]:
        """Return the tensors logged on_step by ``training_step``; a logged Metric accumulates by itself."""
        return {name: value for name, value in self._on_step().items() if value.is_tensor}

    def _on_step(self) -> dict[str, Any]:
        """Return everything that ``training_step`` logs on_step."""
        results = results_of(self._trainer) or {}
        return {name: value for name, value in results.items() if value.meta.fx == _FX and value.meta.on_step}


def results_of(trainer: L.Trainer) -> Any:
    """Return Lightning's collection of the values that the running loop has logged; None without a loop."""
    return private_of(trainer, "lightning.pytorch.Trainer._results")


def weigh(results: Any, weight: float) -> float:
    """Let values that are logged on_epoch from now on count with ``weight``, and return it."""
    results.batch = (weighing_rows(weight),)  # Lightning takes the number of rows of what it finds here
    results.batch_size = None  # what Lightning found in the batch before
    return weight


def logs_this_step(trainer: L.Trainer) -> bool:
    """Return whether Lightning logs the values of the running training step: every ``log_every_n_steps``."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if every == 0:
        return False
    return (number_of_step(trainer) + 1) % every == 0 or trainer.should_stop


def number_of_step(trainer: L.Trainer) -> int:
    """Return how many training steps have ended before the running one: the step under which loggers log.

    Lightning counts a batch as one step, however many optimizers a module steps by hand.
    """
    assert trainer.lightning_module is not None
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.epoch_loop.total_batch_idx


def log_numbers(trainer: L.Trainer, numbers: Mapping[str, float]) -> None:
    """Give numbers to callbacks and loggers under the running step, as Lightning gives what a module logs."""
    trainer.callback_metrics.update({name: torch.tensor(number) for name, number in numbers.items()})
    trainer.logged_metrics.update({name: torch.tensor(number) for name, number in numbers.items()})
    for logger in trainer.loggers:
        logger.log_metrics({**numbers, "epoch": trainer.current_epoch}, step=number_of_step(trainer))
        logger.save()


def _reduce(values: Tensor, meta: Any) -> Tensor:
    """Reduce the values of microbatches ``[M]`` as ``self.log(reduce_fx=...)`` says."""
    if meta.is_sum_reduction:
        return values.sum()
    if meta.is_max_reduction:
        return values.max()
    if meta.is_min_reduction:
        return values.min()
    return values.mean()


class SyncedMetrics:
    """Lets metrics without a group gather only from ranks that see different tokens, until ``close``."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._metrics = [
            child for child in module.modules() if isinstance(child, Metric) and child.process_group is None
        ]
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
    page = see("sums")
    world = "torch.distributed.group.WORLD for a count of each rank's slots"
    if dynamic:
        return f"{world}; under context_parallel_size='dynamic' no group counts each pack just once. {page}"
    return f"self.trainer.strategy.data_parallel_group for a value of the whole pack, or to {world}. {page}"


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
            if isinstance(value, Tensor):
                value = value.detach()
            calls[name] = (value, kwargs)

        # In the module's dict, because nn.Module.__setattr__ costs more; a user may have put one there too.
        replaced = module.__dict__.get("log")
        module.__dict__["log"] = log
        try:
            yield
        finally:
            del module.__dict__["log"]
            if replaced is not None:
                module.__dict__["log"] = replaced

    def values(self, losses: Sequence[Tensor]) -> tuple[list[float], list[dict[str, float]]]:
        """Return the last stage's losses and what it logged in each microbatch, by one read of the device."""
        last_chunk = max(chunk for _, chunk in self._calls)
        logged: list[dict[str, Any]] = []  # for each microbatch
        for microbatch in range(len(losses)):
            calls = self._calls[microbatch, last_chunk]
            logged.append({name: value for name, (value, _) in calls.items()})

        on_device = [*losses]
        for values in logged:
            on_device += [value for value in values.values() if _is_on_device(value)]
        numbers = iter(torch.stack([value.reshape(()).double() for value in on_device]).tolist())

        losses_read = [next(numbers) for _ in losses]
        rows = []
        for values in logged:
            row = {}
            for name, value in values.items():
                row[name] = next(numbers) if _is_on_device(value) else float(value)
            rows.append(row)
        return losses_read, rows

    def log(self, batches: Sequence[THDBatch], logged: Sequence[Mapping[str, float]]) -> None:
        """Log the last stage's values of every microbatch, in the order of the microbatches, on this rank."""
        module = self._trainer.lightning_module
        logs = StepLogs(self._trainer, microbatches=len(logged))
        # The values go to the device, because sync_dist reduces them there and NCCL refuses CPU tensors.
        device = self._trainer.strategy.root_device
        rows = uploaded([np.array([*values.values()], np.float64) for values in logged], device)

        for microbatch, values in enumerate(logged):
            before = logs.begin(batches[microbatch])
            options = self._options(microbatch)
            for name, value in zip(values, rows[microbatch], strict=True):
                if name not in options:
                    raise MisconfigurationException(
                        f"The last pipeline stage logged {name!r} in training_step, but this stage did not. "
                        "Log the same names on every rank, whatever the loss is."
                    )
                module.log(name, value, **options[name])
            logs.end(before)
        logs.finish()

    def _options(self, microbatch: int) -> dict[str, dict[str, Any]]:
        """Return the options with which this stage logged each name in a microbatch."""
        options = {}
        for (recorded, _), calls in self._calls.items():
            if recorded == microbatch:
                options.update({name: kwargs for name, (_, kwargs) in calls.items()})
        return options
