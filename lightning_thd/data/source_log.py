"""The trained steps of a mixture -> the tokens, share and loss of each source, sent to the loggers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_thd._trainer import logged_step
from lightning_thd.batch import THDBatch
from lightning_thd.batch.thd_batch import Packed
from lightning_thd.batch.upload import uploaded
from lightning_thd.data.loader import THDLoader
from lightning_thd.data.trainer_link import hook_of_module
from lightning_thd.loss.watch import SlotLosses, is_training, watch


class SourceLog:
    """Logs the tokens and the loss of each source, over all ranks, once per log interval."""

    def __init__(self, loader: THDLoader, tokens: Mapping[str, int], trainer: L.Trainer | None) -> None:
        self.loader = loader
        self.trainer = trainer
        self._names = loader.source.names
        # Steps begun since the last log: (epoch, step), and the tokens per source (0 except on process 0).
        self._steps: list[tuple[tuple[int, int], NDArray[np.int64] | int]]
        # Losses and weights since the last log, summed for each of K sources and for padding: [2, K + 1].
        self._sums: Tensor | None
        self.restore(tokens)

    def begin(self, trainer: L.Trainer, batch: Packed) -> None:
        """Log if a log is due, and record the step of the coming batch; called on every rank."""
        batches = int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        step = trainer.current_epoch, batches // self.loader.per_step
        is_new = not self._steps or self._steps[-1][0] != step
        if is_new:
            if len(self._steps) >= max(1, trainer.log_every_n_steps):  # type: ignore[attr-defined]
                self.flush(trainer)
            tokens = self.loader.tokens_of(*step) if trainer.is_global_zero else 0
            self._steps.append((step, tokens))

        for pack in batch.packs:
            watch(pack, self)

    def wants(self) -> bool:
        """Return whether the running code is a training step."""
        return is_training()

    def see(self, batch: THDBatch, slots: SlotLosses, scale: float | Tensor) -> None:
        """Add the losses of a batch to the sums of their sources, on the device."""
        if not scale:
            return  # no loss token
        sources = self._source_of_slots(batch)
        if slots.kept is not None:
            sources = sources.index_select(0, slots.kept)
        if self._sums is None:
            self._sums = self._zeros(sources.device)

        values = torch.stack([slots.losses.flatten(), slots.weights.flatten()]).to(self._sums.dtype)
        # A step that is replayed from a CUDA graph may have more slots after those of the batch: drop them.
        self._sums.index_add_(1, sources, values[:, : len(sources)] / scale)

    def _source_of_slots(self, batch: THDBatch) -> Tensor:
        """Return the index of each slot's source, int64 ``[T]``; padding gets K, after those of K sources."""
        sources = self.loader.source.source_of(np.asarray(batch.sequence_ids, np.int64))
        of_sequence: Tensor = uploaded(np.append(sources, len(self._names)), batch.input_ids.device)
        return of_sequence.index_select(0, batch.token_sequences())

    def flush(self, trainer: L.Trainer) -> None:
        """Log the steps since the last log; a collective."""
        if not self._steps:
            return
        losses = self._losses(trainer)  # all ranks take part
        self._tokens += sum(tokens for _, tokens in self._steps)
        self._steps = []
        if not trainer.is_global_zero:
            return

        logged: dict[str, Any] = {}
        for k, name in enumerate(self._names):
            logged[f"data/{name}/tokens"] = float(self._tokens[k])
            logged[f"data/{name}/share"] = float(self._tokens[k]) / max(1, int(self._tokens.sum()))
            if losses[k] is not None:
                logged[f"data/{name}/loss"] = losses[k]
        last = logged_step(trainer) - 1  # Lightning logs train/loss under it
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=max(0, last))

    def state(self, trainer: L.Trainer) -> dict[str, int]:
        """Return the tokens of each source in finished steps; an empty dict except on process 0."""
        if not trainer.is_global_zero:
            return {}
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        steps, batches_of_next = divmod(progress.current.processed, self.loader.per_step)
        if batches_of_next and progress.is_last_batch:  # a limit on batches may cut the last step
            steps += 1
        # The first step that is not finished, for comparison with the (epoch, step) of steps.
        unfinished = trainer.current_epoch, steps
        total = self._tokens + sum(tokens for step, tokens in self._steps if step < unfinished)
        return dict(zip(self._names, total.tolist(), strict=True))

    def restore(self, tokens: Mapping[str, int]) -> None:
        """Set the token count of each source to that of a checkpoint; drop what is not logged yet."""
        self._steps = []
        self._sums = None
        self._tokens = np.array([tokens.get(name, 0) for name in self._names], np.int64)

    def _zeros(self, device: torch.device) -> Tensor:
        """Return sums of losses and weights that are all 0, ``[2, K + 1]``."""
        dtype = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        return torch.zeros((2, len(self._names) + 1), dtype=dtype, device=device)

    def _losses(self, trainer: L.Trainer) -> list[float | None]:
        """Return each source's mean loss over all ranks, None without loss tokens; one device read."""
        sums = self._sums
        self._sums = None
        if sums is None:  # no loss here: in a pipeline only the last stage has losses
            sums = self._zeros(trainer.strategy.root_device)
        over_ranks: Any = trainer.strategy.reduce(sums, reduce_op="sum")
        losses, weights = over_ranks.tolist()
        # The last column is padding.
        columns = zip(losses[:-1], weights[:-1], strict=True)
        return [loss / weight if weight else None for loss, weight in columns]


class LogsSources(L.LightningDataModule):
    """Hooks of a data module that log the sources of a mixture and save their token counts."""

    _source_log: SourceLog | None = None  # None without a mixture
    # The token counts of a checkpoint, from which the log of the next loader starts.
    _restored: Mapping[str, int] = MappingProxyType({})

    def _log_sources(self, loader: THDLoader) -> None:
        """Make the log for a loader's mixture; all loaders of a Trainer share one log."""
        if self._source_log is not None and self._source_log.trainer is self.trainer:
            self._source_log.loader = loader
        elif loader.source.names:
            self._source_log = SourceLog(loader, self._restored, self.trainer)
        self._restored = {}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Record the sources of a training batch; Lightning calls this with every batch."""
        if self._source_log is not None and self.trainer is not None and self.trainer.training:
            self._source_log.begin(self.trainer, batch)
        return hook_of_module(self.trainer, batch, dataloader_idx)

    def teardown(self, stage: str) -> None:
        """Log the last steps of a mixture at the end of a fit."""
        if self._source_log is not None and self.trainer is not None and stage == "fit":
            self._source_log.flush(self.trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the tokens of each source of a mixture, on process 0; an empty dict otherwise."""
        if self._source_log is None or self.trainer is None:
            return {}
        tokens = self._source_log.state(self.trainer)
        return {"source_tokens": tokens} if tokens else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the tokens of each source from a checkpoint."""
        self._restored = state_dict.get("source_tokens", {})
        if self._source_log is not None and self._restored:
            self._source_log.restore(self._restored)
