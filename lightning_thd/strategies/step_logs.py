"""``self.log`` calls of every microbatch of a step -> one logged value a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_thd.batch import THDBatch
from lightning_thd.strategies.modules.metrics import StepMetrics

_FX = "training_step"


class StepLogs:
    """Collects the values that ``training_step`` logs in each microbatch and reduces them to one a step.

    Values logged on_step are reduced over the microbatches of the step by their own ``reduce_fx`` (mean by
    default). That is exact for the loss, whose mean over microbatches and ranks is the step's: see
    ``THDBatch.loss_scale``. Values logged on_epoch are weighted by loss tokens, see ``weigh``.

    What ``sync_dist=True`` reduces over ranks is reduced once, at the step's end, so that ranks wait for each
    other there and not in every microbatch. A name that is logged for the first time is reduced at once.
    """

    def __init__(self, trainer: L.Trainer, *, microbatches: int, metrics: Sequence[Metric] = ()) -> None:
        self._trainer, self._microbatches = trainer, microbatches
        self._objects = StepMetrics(metrics)
        self._objects.begin(self._logged_objects())
        self._logged: dict[str, list[Tensor]] = {}
        several, known = microbatches > 1, self._metrics()
        self._late = {key: metric for key, metric in known.items() if several and metric.meta.sync.should}

    def begin(self, batch: THDBatch) -> str | None:
        """Prepare Lightning's logging for a microbatch outside its call; return the hook it was in."""
        results = self._results
        if results is not None:
            weigh(results, batch)
            for metric in self._metrics().values():
                metric._forward_cache = None
        for metric in self._late.values():
            metric.meta.sync._fn = metric.meta.sync.no_op
        module = self._trainer.lightning_module
        before, module._current_fx_name = module._current_fx_name, _FX
        # Another hook may have logged since: without this, the first batch of an epoch starts its sums anew.
        self._trainer._logger_connector._current_fx = _FX
        return before

    def end(self, before: str | None) -> None:
        """Collect the values that the microbatch logged."""
        self.close()
        self._trainer.lightning_module._current_fx_name = before
        for key, metric in self._metrics().items():
            if metric._forward_cache is not None:
                self._logged.setdefault(key, []).append(metric._forward_cache)
        self._objects.end(self._logged_objects(), several=self._microbatches > 1)

    def close(self) -> None:
        """Let Lightning reduce over ranks again, also where a microbatch raised."""
        for metric in self._late.values():
            metric.meta.sync._generate_sync_fn()

    def finish(self) -> None:
        """Write the reduced values where Lightning reads the values of the step.

        What other hooks log from now on, ``on_train_batch_end`` say, weighs as much as the step: its loss
        tokens on this rank.
        """
        for key, metric in self._metrics().items():
            values = self._logged.get(key)
            if values:
                reduced = _reduce(torch.stack(values), metric.meta)
                metric._forward_cache = metric.meta.sync(reduced) if key in self._late else reduced
                if not metric.meta.on_epoch:
                    metric.value = metric._forward_cache
        self._logged.clear()
        self._objects.finish(self._logged_objects())
        if self._results is not None and self._results.batch_size is not None:
            self._results.batch_size *= self._microbatches

    @property
    def _results(self) -> Any:
        return self._trainer._results

    def _metrics(self) -> dict[str, Any]:
        """Return the tensors logged on_step by ``training_step``; a logged Metric has its own state."""
        return {key: metric for key, metric in self._on_step().items() if metric.is_tensor}

    def _logged_objects(self) -> list[Any]:
        return [result for result in self._on_step().values() if not result.is_tensor]

    def _on_step(self) -> dict[str, Any]:
        results = self._results or {}
        return {
            key: metric for key, metric in results.items() if metric.meta.fx == _FX and metric.meta.on_step
        }


def weigh(results: Any, batch: THDBatch) -> None:
    """Set the weight of values logged on_epoch to the step's loss tokens per microbatch and rank.

    Lightning would count the rows of the batch, a whole number; the mean over an epoch is exact without
    rounding.
    """
    results.batch = batch
    results.batch_size = 1.0 / batch.loss_scale if batch.loss_scale else 0


def _reduce(values: Tensor, meta: Any) -> Tensor:
    if meta.is_sum_reduction:
        return values.sum()
    if meta.is_max_reduction:
        return values.max()
    if meta.is_min_reduction:
        return values.min()
    return values.mean()
