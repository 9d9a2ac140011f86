"""A module that trains eagerly -> its layers compiled after some steps, and after how many that pays off."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd.flops.peaks import synchronize
from lightning_thd.parallel.fsdp import layers_of

_COMPILING = 2  # These batches compile: the first for one size, the second with symbolic sizes.
_MEASURED = 3  # This many compiled batches are timed after them.


class CompileLayers(Callback):
    """Compiles the model's layers after a few eager batches and says after how many more that pays off.

    One graph serves all layers of a kind and packs of any size. torch keeps what it compiled on disk
    (``TORCHINDUCTOR_CACHE_DIR``), so a second run compiles in a fraction of the time.

    Args:
        eager_batches: run before the layers are compiled, for the comparison; the first only warms up.
        report: receives the sentence; the default logs it on rank zero.
        clock: returns seconds.

    Raises:
        ValueError: for fewer than two eager batches.
    """

    def __init__(
        self,
        *,
        eager_batches: int = 4,
        report: Callable[[str], object] = rank_zero_info,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if isinstance(eager_batches, bool) or not isinstance(eager_batches, int) or eager_batches < 2:
            raise ValueError(f"eager_batches={eager_batches!r}: wanted 2 or more, the first only warms up.")
        self.eager_batches = eager_batches
        self._report, self._clock = report, clock
        self._seconds: list[float] = []
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count batches, unless the module's layers are compiled already."""
        self._seconds = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Read the clock as a batch begins, once the device has finished earlier work."""
        if self._running():
            synchronize(pl_module.device)
            self._began = self._clock()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compile after the eager batches; report after some compiled ones."""
        if not self._running():
            return
        synchronize(pl_module.device)
        self._seconds.append(self._clock() - self._began)
        if len(self._seconds) == self.eager_batches:
            for layer in layers_of(pl_module):
                layer.compile(dynamic=True)
        if not self._running():
            eager, compiled = self._seconds[: self.eager_batches], self._seconds[self.eager_batches :]
            self._report(break_even(eager, compiled))

    def _running(self) -> bool:
        return len(self._seconds) < self.eager_batches + _COMPILING + _MEASURED


def break_even(eager: list[float], compiled: list[float]) -> str:
    """Return what compiling took and after how many batches that pays off: the first of each list warm up."""
    before, after = median(eager[1:]), median(compiled[_COMPILING:])
    cost, gain = sum(compiled[:_COMPILING]) - _COMPILING * after, before - after
    said = (
        f"Layers compiled in {max(cost, 0.0):.1f} s; a batch takes {after:.2f} s instead of {before:.2f} s: "
    )
    if gain <= 0:
        return said + "compiling does not pay off here."
    return said + f"pays off after {max(0, round(cost / gain)):,} batches."
