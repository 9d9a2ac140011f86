"""The steps of a mixture that were trained -> tokens, share and loss of each source, in the loggers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor

from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.data.mixing import Sources
from lightning_thd.loss.watch import SlotLosses, watch
from lightning_thd.parallel.shard import THDShard


class SourceLog:
    """Logs how much of what was trained on came from each source, and its loss, for the whole job.

    Tokens and shares come from the plan, on the first process. Losses are those that ``causal_lm_loss`` sums
    anyway: added up on the device by source, and over the ranks once a log interval, when they are read.
    A loss of another kind shows its own by ``loss.log_token_losses``; else the keys of losses are left out.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._steps: list[tuple[int, int]] = []  # (epoch, step) begun since the last log
        self._tokens = np.zeros(len(sources.names), np.int64)
        self._own: tuple[tuple[int, ...], ...] = ()
        self._sums: Tensor | None = None  # loss and weight of each source since the last log, fp64 [2, K + 1]

    def begin(self, trainer: L.Trainer, batch: THDBatch | THDStep, dp: int) -> None:
        """Record the sources of the coming batch, and log if a log is due; called on every rank."""
        batches = int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        step = trainer.current_epoch, batches // self.sources.per_step
        if not self._steps or self._steps[-1] != step:
            if len(self._steps) >= max(1, trainer.log_every_n_steps):  # type: ignore[attr-defined]
                self.flush(trainer, dp)
            self._steps.append(step)
        microbatches = batch.microbatches if isinstance(batch, THDStep) else (batch,)
        self._own = tuple(part.sequence_ids for part in microbatches)
        watch(self)

    def wants(self, batch: THDBatch) -> bool:
        """Return whether a batch is one that ``begin`` has announced."""
        return batch.sequence_ids in self._own

    def see(self, batch: THDBatch, slots: SlotLosses, scale: float) -> None:
        """Add the losses of a batch to those of their sources, on the device."""
        if not scale:
            return  # no loss token
        where = self._source_of_slots(batch)
        where = where if slots.kept is None else where.index_select(0, slots.kept)
        if self._sums is None:
            self._sums = self._zeros(where.device)
        found = torch.stack([slots.losses.flatten(), slots.weights.flatten()]).to(self._sums.dtype)
        # A replayed step has more slots than the batch, which comes first.
        self._sums.index_add_(1, where, found[:, : len(where)] / scale)

    def _source_of_slots(self, batch: THDBatch) -> Tensor:
        """Return the number of each slot's source, int64 ``[T]``; padding has the last number."""
        padding = len(self.sources.names)
        sources = self.sources.source_of(np.asarray(batch.sequence_ids, np.int64))
        trailing = np.full(len(batch.padded_lengths) - len(sources), padding)
        on_host = torch.from_numpy(np.repeat(np.concatenate([sources, trailing]), batch.padded_lengths))
        device = batch.targets.device
        if device.type == "cuda":
            on_host = on_host.pin_memory()
        found = on_host.to(device, non_blocking=True)
        return found.index_select(0, batch.layout.own) if isinstance(batch, THDShard) else found

    def flush(self, trainer: L.Trainer, dp: int) -> None:
        """Log the steps since the last log; a collective."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        losses = self._losses(trainer)
        if not trainer.is_global_zero:
            return
        tokens = np.zeros(len(self.sources.names), np.int64)
        for epoch, step in steps:
            tokens += self.sources.tokens_of(epoch, step, dp)
        self._tokens += tokens
        logged: dict[str, Any] = {}
        for k, name in enumerate(self.sources.names):
            logged[f"data/{name}/tokens"] = float(self._tokens[k])
            logged[f"data/{name}/share"] = float(tokens[k]) / max(1, int(tokens.sum()))
            if losses[k] is not None:
                logged[f"data/{name}/loss"] = losses[k]
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=trainer.global_step)

    def _zeros(self, device: torch.device) -> Tensor:
        wide = torch.float32 if device.type == "mps" else torch.float64
        return torch.zeros((2, len(self.sources.names) + 1), dtype=wide, device=device)

    def _losses(self, trainer: L.Trainer) -> list[float | None]:
        """Sum the losses of all ranks and read each source's mean: one message and one read."""
        sums, self._sums = self._sums, None
        if sums is None:  # of a pipeline the last stage alone has losses
            sums = self._zeros(trainer.strategy.root_device)
        summed = trainer.strategy.reduce(sums, reduce_op="sum")
        assert isinstance(summed, Tensor)
        total, weight = summed.tolist()
        return [a / b if b else None for a, b in zip(total[:-1], weight[:-1], strict=True)]
