"""Hooks of a run, in their order -> the metrics of each stage: which FLOPs apply, when time counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_thd.callbacks.measuring.counting import Counting
from lightning_thd.callbacks.measuring.stage import Setting, Stage
from lightning_thd.flops.rates import Work

_WAYS_OUT = (
    "a THDBatch, a THDStep, SeqStats, rows of padded token ids [B, N] as a tensor or under 'input_ids', or a "
    "dict, tuple or list with one of these"
)


class RunMeter:
    """Measures one run: its stages, the FLOPs models of each, and when time counts."""

    def __init__(self, setting: Setting, counting: Counting, clock: Callable[[], float]) -> None:
        self._setting = setting
        self._counting = counting
        self._clock = clock
        self._stages: dict[str, Stage] = {}
        self._warned = False

    def setting(self, name: str) -> Setting:
        """Return the settings of a stage, with the model that counts its FLOPs."""
        model = self._counting.model(name)
        if self._setting.model is not model:
            self._setting = replace(self._setting, model=model)
        return self._setting

    def open(self, name: str, work: Work) -> Stage:
        """Create the meter of a stage, in place of an earlier one."""
        stage = self._stages[name] = Stage(name, work, self._clock)
        return stage

    def stage(self, name: str) -> Stage | None:
        """Return the running stage of this name, None when there is none."""
        return self._stages.get(name)

    def begin_evaluation(self, name: str, module: nn.Module) -> None:
        """Stop the training clock and start that of an evaluation stage."""
        self.pause("train")
        stage = self.open(name, "forward")
        self._counting.begin(name, module)
        stage.resume(self.setting(name))

    def begin_batch(self, module: nn.Module, batch: Any) -> None:
        """Start the training clock, and count the step's operators where its FLOPs are unknown."""
        self._stages["train"].resume(self.setting("train"))
        self._counting.begin("train", module, batch)

    def add(self, name: str, module: nn.Module, batch: Any) -> None:
        """Count a batch; warn once of one whose lengths are unknown."""
        meter = self._stages[name].meter
        if not meter.add(batch) and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"A batch of type {type(batch).__name__} tells nothing about its sequences, so it is missing "
                f"from tokens/s, FLOP/s and MFU. Countable are {_WAYS_OUT}."
            )
        if name != "train":
            self._counting.end(name, module, meter.steps[-1])

    def end_step(self, module: nn.Module, *, leave_out: bool, discard: bool) -> None:
        """Close a step after the optimizer's update, and decide whether its time counts in the rates."""
        stage = self._stages["train"]
        counted = self._counting.end("train", module, stage.meter.steps[-1], discard=discard)
        stage.meter.end_step()
        if leave_out or counted:  # counting takes longer than computing
            stage.leave_out(self._setting)

    def close(self, name: str, module: nn.Module, *, last: bool = False) -> dict[str, float]:
        """Reduce a stage's interval over the ranks and return its metrics; a collective."""
        stage, setting = self._stages[name], self.setting(name)
        if stage.work == "forward":
            stage.pause(setting)
            del self._stages[name]
        metrics = stage.close(setting, last=last)
        self._counting.follow(module)
        return metrics

    def reduce(self) -> None:
        """Add up the whole steps of all ranks since the last reduction, without a report; a collective."""
        if (stage := self._stages.get("train")) is not None:
            stage.reduce(self.setting("train"), whole=True)

    def pause(self, name: str) -> bool:
        """Stop a stage's clock, and return whether it was running."""
        stage = self._stages.get(name)
        return stage is not None and stage.pause(self._setting)

    def resume(self, name: str) -> None:
        """Start a stage's clock again."""
        if (stage := self._stages.get(name)) is not None:
            stage.resume(self._setting)

    def stop(self) -> None:
        """Remove every hook and counter."""
        self._counting.stop()
