"""One optimizer step of a pipeline -> its passes in the order of the schedule, their losses and logs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
from torch import Tensor

from lightning_thd.batch import THDStep
from lightning_thd.parallel.pipeline import Op, expected_bubble, make_schedule
from lightning_thd.parallel.pipeline.channel import Channel
from lightning_thd.parallel.pipeline.schedule import best_order
from lightning_thd.parallel.pipeline.stage import Stage
from lightning_thd.strategies.mixin import loss_of
from lightning_thd.strategies.pipeline.logs import RecordedLogs
from lightning_thd.strategies.pipeline.training_step import definition, require_loss_alone

# Squares of a sequence's length that cost what a token's linear part does; decides the order alone.
_LINEAR = 4096


class PipelineStep:
    """One optimizer step of a pipeline: its schedule, and the losses and logs of passes so far."""

    def __init__(self, strategy: Any, step: THDStep, rest: tuple[Any, ...]) -> None:
        self.strategy = strategy
        self.stage: Stage = strategy._stage
        self.channel: Channel = strategy._channel
        self.step, self.rest_args = step, rest
        self.schedule = make_schedule(self.channel.ranks, len(step), chunks=self.stage.chunks)
        work = [float(batch.stats.sum_squares + _LINEAR * batch.stats.slots) for batch in step.microbatches]
        self.batches = [step.microbatches[m] for m in best_order(self.schedule, work)]
        self.program = self.schedule.programs[self.channel.rank]
        self.logs = RecordedLogs(strategy._trainer, self.channel)
        self.losses: dict[tuple[int, int], Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.started, self.channel.waited_s = time.perf_counter(), 0.0

    def first(self) -> Any:
        """Run the first pass and return the loss that Lightning gets."""
        return self.forward(self.program[0])

    def rest(self) -> Iterator[Op]:
        """Yield the passes after the first, receiving the next one's input while one runs."""
        ahead = iter(self.program[1:])
        self._expect(next(ahead, None))
        for op in self.program[1:]:
            self._expect(next(ahead, None))
            yield op

    def _expect(self, op: Op | None) -> None:
        if op is not None:
            ids = self.batches[op.microbatch].input_ids
            self.stage.expect(op, ids.numel() // self.strategy.slots_shared, ids.device)

    def is_first(self, op: Op) -> bool:
        """Return whether a backward pass belongs to the forward pass whose loss Lightning holds."""
        return (op.microbatch, op.chunk) == (self.program[0].microbatch, self.program[0].chunk)

    def is_last_of_chunk(self, op: Op) -> bool:
        """Return whether a backward pass is a chunk's last in this step."""
        return op.microbatch == len(self.step) - 1

    def take_loss(self, op: Op) -> Tensor:
        """Return the loss of a forward pass and remove it."""
        return self.losses.pop((op.microbatch, op.chunk))

    def forward(self, op: Op) -> Any:
        """Run a forward pass through one chunk of this rank."""
        stage, batch = self.stage, self.batches[op.microbatch]
        stage.begin(op.chunk)
        with self.logs.record(op.microbatch, op.chunk):
            output = self.strategy.forward_pass(batch, self.rest_args)
        loss = loss_of(output)
        module = self.strategy.lightning_module
        stage.require_one_call(definition(module) if not stage.made else "")
        require_loss_alone(module, loss, stage.made)
        if stage.holds_head:
            self.values[op.microbatch] = loss.detach()
        if op is not self.program[0]:
            self.losses[op.microbatch, op.chunk] = loss
        return output

    def finish(self) -> list[Tensor]:
        """Send the last stage's losses and logs to all stages, and return the losses."""
        self.stage.begin(None)
        self.channel.finish()
        if self.stage.balance is not None:
            self.stage.balance.channel.finish()
        losses = self.logs.share(self.batches, self.values, holds_head=self.stage.holds_head)
        n, p, v = self.schedule.microbatches, self.schedule.ranks, self.schedule.chunks
        self.strategy.waited = self.channel.waited_s / max(time.perf_counter() - self.started, 1e-9)
        self.strategy.expected_wait = expected_bubble(p, n, chunks=v)
        self._log_bubble()
        return losses

    def _log_bubble(self) -> None:
        trainer: L.Trainer = self.strategy._trainer
        if not trainer._logger_connector.should_update_logs:
            return
        found = {
            "pipeline/bubble_fraction": self.strategy.waited,
            "pipeline/expected_bubble_fraction": self.strategy.expected_wait,
        }
        for logger in trainer.loggers:
            logger.log_metrics(found, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
